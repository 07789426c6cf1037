/// @file  Tests of data/jsonl.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/data/jsonl.hpp>

#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace data = mega::data;
using mega::ErrorCode;
using mega::Index;
using mega::tests::contains;
using mega::tests::sentence_of;
using mega::tests::TemporaryDirectory;
using mega::tests::throws_code;

namespace {
std::string text_of(const data::ByteTokenSource& source) {  // '|' ends a document
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(source.size()));
  source.read(0, tokens);
  std::string out;
  for (const auto token : tokens) out += token == 256 ? '|' : static_cast<char>(token);
  return out;
}
}  // namespace

TEST_CASE("jsonl: one document a line") {
  TemporaryDirectory dir;
  const auto read = [&](std::string_view content) {
    return data::open_token_source(dir.write("d.jsonl", content));
  };
  CHECK(text_of(read("{\"text\":\"a\"}\n{\"text\":\"b\"}\n")) == "a|b|");
  CHECK(text_of(read("{\"text\":\"a\"}\n{\"text\":\"b\"}")) == "a|b|");
  CHECK(text_of(read("\xEF\xBB\xBF{\"text\":\"a\"}\r\n{\"text\":\"b\"}\r\n")) == "a|b|");
  CHECK(text_of(read("\n\n  \t\r\n{\"text\":\"a\"}\n\n \n{\"text\":\"b\"}\n\n")) == "a|b|");
  CHECK(
      text_of(read(R"({"id":7,"meta":{"text":"no","x":[{"text":1}]},"text":"yes","z":[null]})")) ==
      "yes|");
  CHECK(text_of(read(R"({"text":"\u00e9\ud83d\ude00\n\"\\"})")) ==
        "\xC3\xA9\xF0\x9F\x98\x80\n\"\\|");
  CHECK(text_of(read("{\"text\":\"\xC3\xA9\xE2\x80\xA9\"}")) == "\xC3\xA9\xE2\x80\xA9|");
  CHECK(text_of(read(R"({"text":"a\u0000b"})")) == std::string("a\0b|", 4));
}

TEST_CASE("jsonl: empty documents are skipped and counted, the first one too") {
  TemporaryDirectory dir;
  const auto source = data::open_token_source(
      dir.write("d.jsonl", "{\"text\":\"\"}\n{\"text\":\"a\"}\n{\"text\":\"\"}\n"));
  CHECK(text_of(source) == "a|");
  CHECK(source.empty_documents() == 2);
  for (const auto* content : {"", "\n\n", "\xEF\xBB\xBF", "{\"text\":\"\"}\n{\"text\":\"\"}"}) {
    CAPTURE(content);
    const auto path = dir.write("d.jsonl", content);
    CHECK(contains(sentence_of([&] { (void)data::open_token_source(path); }), "holds no text"));
  }
}

TEST_CASE("jsonl: faults are named with file, line and reason") {
  TemporaryDirectory dir;
  struct Case {
    std::string line;
    std::string_view reason;
  };
  std::string deep = "{\"x\":" + std::string(64, '[') + std::string(64, ']') + ",\"text\":\"a\"}";
  const Case cases[] = {
      {"{\"text\":\"a\"", "invalid JSON at byte"},
      {"{\"text\":\"a\"} x", "invalid JSON at byte"},
      {"{\"text\":\"a\"}{\"text\":\"b\"}", "invalid JSON at byte"},
      {"{'text':'a'}", "invalid JSON at byte 2"},
      {std::string("{\"text\":\"a\"}\0", 13), "invalid JSON"},
      {"{\"text\":\"a\tb\"}", "invalid JSON"},
      {"{}", "\"text\" is missing"},
      {"{\"Text\":\"a\",\"x\":{\"text\":\"b\"}}", "\"text\" is missing"},
      {"{\"text\":1}", "\"text\" is a number, not a string"},
      {"{\"text\":null}", "\"text\" is null, not a string"},
      {"{\"text\":true}", "\"text\" is a boolean"},
      {"{\"text\":[\"a\"]}", "\"text\" is an array"},
      {"{\"text\":{\"text\":\"a\"}}", "\"text\" is an object"},
      {"{\"text\":\"a\",\"text\":\"b\"}", "appears twice"},
      {"[\"a\"]", "the line is an array, not an object"},
      {"\"a\"", "the line is a string"},
      {"7", "the line is a number"},
      {"{\"text\":\"\xff\"}", "invalid UTF-8 at byte"},
      {"{\"text\":\"\xc0\xaf\"}", "invalid UTF-8"},          // overlong '/'
      {"{\"text\":\"\xe0\x80\xaf\"}", "invalid UTF-8"},      // overlong in three bytes
      {"{\"text\":\"\xf0\x80\x80\xaf\"}", "invalid UTF-8"},  // overlong in four bytes
      {"{\"text\":\"\xed\xa0\x80\"}", "invalid UTF-8"},      // a surrogate
      {"{\"text\":\"\xf4\x90\x80\x80\"}", "invalid UTF-8"},  // beyond U+10FFFF
      {"{\"text\":\"\xe2\x82\"}", "invalid UTF-8"},          // cut short
      {"{\"other\":\"\xff\",\"text\":\"a\"}", "invalid UTF-8"},
      {"{\"text\":\"\\ud800\"}", "half of a surrogate pair"},
      {"{\"text\":\"\\udc00\"}", "half of a surrogate pair"},
      {"{\"text\":\"\\ud800\\ud800\"}", "half of a surrogate pair"},
      {"{\"x\":1e999,\"text\":\"a\"}", "a number out of range"},
      {deep, "nesting deeper than 64"},
      {"{\"x\":" + std::string(512'000, '['), "nesting deeper than 64"},
  };
  for (const auto& c : cases) {
    CAPTURE(c.line.substr(0, 100));
    const auto path =
        dir.write("d.jsonl", "{\"text\":\"fine\"}\n\n" + c.line + "\n{\"text\":\"z\"}\n");
    const auto said = sentence_of([&] { (void)data::open_token_source(path); });
    CAPTURE(said);
    CHECK(said.starts_with(path + ", line 3: "));
    CHECK(contains(said, c.reason));
    CHECK(throws_code(ErrorCode::bad_input, [&] { (void)data::open_token_source(path); }));
  }
  deep.erase(5, 1).erase(deep.find(']'), 1);
  CHECK_NOTHROW((void)data::open_token_source(dir.write("d.jsonl", deep)));
}

TEST_CASE("jsonl: lines longer than a piece of the file, and lines cut by its pieces") {
  TemporaryDirectory dir;
  std::string content, expected;
  for (int i = 0; i < 9'000; ++i) {
    const std::string text(static_cast<std::size_t>(1 + i % 97), static_cast<char>('a' + i % 26));
    content += "{\"text\":\"" + text + "\"}\n";
    expected += text + "|";
  }
  const std::string longest(1'000'000, 'L');
  content += "{\"text\":\"" + longest + "\"}";
  expected += longest + "|";
  CHECK(text_of(data::open_token_source(dir.write("d.jsonl", content))) == expected);
}

TEST_CASE("jsonl: the kind of a file follows from its name") {
  TemporaryDirectory dir;
  const std::string line = "{\"text\":\"a\"}";
  CHECK(text_of(data::open_token_source(dir.write("x.txt", line))) == line + "|");
  dir.write("y.jsonl", line + "\n{\"text\":\"b\"}");
  CHECK(text_of(data::open_token_source(dir.path())) == line + "|a|b|");
}
