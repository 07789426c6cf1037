#include <mega/scan/json_scanner.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace mega::scan;
using Kind = JsonScanner::Kind;

/// Gives a text in pieces of a few bytes.
class Drops final : public Reader {
 public:
  Drops(std::string text, std::size_t piece) : text_(std::move(text)), piece_(piece) {}
  std::size_t read(std::span<char> into) override {
    const std::size_t count = std::min({piece_, into.size(), text_.size() - at_});
    std::copy_n(text_.data() + at_, count, into.data());
    at_ += count;
    return count;
  }

 private:
  std::string text_;
  std::size_t piece_, at_ = 0;
};

/// The string value of key "v" of the first object, and what was counted.
struct Read {
  std::string value;
  std::vector<std::string> keys;
  Defects defects;
  bool broken = false, cut = false;
};

Read read_object(const std::string& text) {
  Read out;
  Source source("text", text);
  JsonScanner json(source, out.defects);
  REQUIRE(json.kind() == Kind::object);
  json.enter();
  JsonText key;
  std::string scratch;
  while (json.next_key(key)) {
    out.keys.emplace_back(key.raw);
    if (key.raw == "v" && json.kind() == Kind::text) {
      out.value = unescape(json.text(), scratch);
    } else {
      json.skip();
    }
  }
  out.broken = json.broken();
  out.cut = json.cut();
  return out;
}

TEST_CASE("scan: strings with unescaped quotes end where the object goes on") {
  struct Row {
    const char* text;
    const char* value;
    std::int64_t bad;
  };
  const Row rows[] = {
      {R"({"v": "plain", "a": 1})", "plain", 0},
      {R"({"v": "an "inner" word", "a": 1})", R"(an "inner" word)", 2},
      {R"~({"v": "f("x", "y")", "a": 1})~", R"~(f("x", "y"))~", 4},
      {R"({"v": "map<"a"}>", "a": 1})", R"(map<"a"}>)", 2},
      {R"({"v": "tail"", "a": 1})", R"(tail")", 1},
      {R"({"v": "C:\dir\q", "a": 1})", R"(C:\dir\q)", 2},
      {"{\"v\": \"ends in \\\",\n \"a\": 1}", "ends in \\", 1},
      {"{\"v\": \"never ends\n \"a\": 1}", "never ends", 1},
  };
  for (const Row& row : rows) {
    CAPTURE(row.text);
    const Read read = read_object(row.text);
    CHECK(read.value == row.value);
    CHECK(read.defects.bad_escapes == row.bad);
    REQUIRE(read.keys.size() == 2);
    CHECK(read.keys[1] == "a");
    CHECK_FALSE(read.broken);
    CHECK_FALSE(read.cut);
  }
}

TEST_CASE("scan: control characters, bytes that are no UTF-8 and escapes are read and counted") {
  Read read = read_object(
      "{\"v\": \"a\x01"
      "b\nc\", \"a\": 1}");
  CHECK(read.value ==
        "a\x01"
        "b\nc");
  CHECK(read.defects.control_characters == 2);
  read = read_object("{\"v\": \"\xFFok\xC0\x80 \xED\xA0\x80 \xE4\xBD\xA0\", \"a\": 1}");
  CHECK(read.defects.bad_utf8 == 6);  // FF, C0, 80, and a surrogate's three bytes
  CHECK(read.value == "\uFFFDok\uFFFD\uFFFD \uFFFD\uFFFD\uFFFD \u4F60");
  read = read_object(R"({"v": "\u00e9\ud83d\ude00\ud83dx\n\/\"", "a": 1})");
  CHECK(read.value == "\u00e9\U0001F600\uFFFDx\n/\"");
  CHECK(read.defects.bad_escapes == 0);
}

TEST_CASE("scan: keys without their opening quote, commas too many, missing and trailing") {
  const Read read = read_object(R"({"pid": 1, tid": 7, bare: 2,, "a": 3 "b": 4, })");
  CHECK(read.keys == std::vector<std::string>{"pid", "tid", "bare", "a", "b"});
  CHECK(read.defects.bad_escapes == 2);
  CHECK_FALSE(read.broken);
}

TEST_CASE("scan: values behind each other are found, whatever marks stand between") {
  Defects defects;
  Source source("text", "1 }], {\"a\": 2}\n:\"x\" }");
  JsonScanner json(source, defects);
  std::vector<Kind> kinds;
  for (json.start_record(); json.next_value(); json.start_record()) {
    kinds.push_back(json.kind());
    json.skip();
  }
  CHECK(kinds == std::vector<Kind>{Kind::scalar, Kind::object, Kind::text});
  CHECK_FALSE(json.cut());
}

TEST_CASE("scan: numbers that are none are counted wherever they stand") {
  const Read read =
      read_object(R"({"a": NaN, "b": -inf, "c": Infinity, "d": nan, "e": null, "f": -1.5e3})");
  CHECK(read.defects.not_a_number == 4);
  CHECK(read.keys.size() == 6);
}

TEST_CASE("scan: nesting of any depth is passed over without recursion") {
  const std::string deep(2000000, '[');
  const Read cut = read_object("{\"a\": " + deep);
  CHECK(cut.cut);
  std::string closed = "{\"a\": " + deep + std::string(deep.size(), ']') + ", \"v\": \"x\"}";
  CHECK(read_object(closed).value == "x");
  // Brackets and quotes inside strings are text.
  CHECK(read_object(R"({"a": [{"]": "}\"]"}, ["["]], "v": "y"})").value == "y");
}

TEST_CASE("scan: a text cut at any byte ends, and never reads beyond") {
  const std::string text =
      R"([{"v": "a\u00e9 "q" \\", "n": -1.5e3, "o": {"k": [1, "x", {}]}, tid": 7}, {"v": 2}])";
  for (std::size_t size = 0; size < text.size(); ++size) {
    // A heap copy of exactly this size, so that a sanitizer sees a byte too many.
    const std::vector<char> copy(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(size));
    Defects defects;
    Source source("text", std::string_view(copy.data(), copy.size()));
    JsonScanner json(source, defects);
    if (json.kind() != Kind::array) continue;
    json.enter();
    JsonText key;
    while (json.next_element()) {
      if (json.kind() != Kind::object) break;
      json.enter();
      while (json.next_key(key)) json.skip();
    }
    CHECK(json.cut());
  }
}

TEST_CASE("scan: records stream through a window, whatever the size of the pieces") {
  std::string text = "[";
  constexpr int records = 30000;
  for (int i = 0; i < records; ++i)
    text += "{\"i\": " + std::to_string(i) + ", \"s\": \"" + std::string(std::size_t(i % 97), 'x') +
            "\"},\n";
  text += "]";
  for (const std::size_t piece : {std::size_t{4099}, std::size_t{1} << 20U}) {
    Defects defects;
    Source source("drops", std::make_unique<Drops>(text, piece));
    JsonScanner json(source, defects);
    REQUIRE(json.kind() == Kind::array);
    json.enter();
    std::int64_t expected = 0;
    JsonText key;
    for (json.start_record(); json.next_element(); json.start_record()) {
      json.enter();
      while (json.next_key(key)) {
        if (key.raw == "i") {
          std::int64_t i = -1;
          CHECK(json.number(i));
          CHECK(i == expected);
        } else {
          CHECK(json.text().raw.size() == static_cast<std::size_t>(expected % 97));
        }
      }
      ++expected;
    }
    CHECK(expected == records);
    CHECK_FALSE(json.cut());
  }
}

TEST_CASE("scan: values are passed over in blocks as they are character by character") {
  // 64 characters and more are looked at as a block, fewer one by one.
  constexpr std::string_view letters = "\"\"\"\"\\[]{}[]{},,:: \nax\x01\xC3\xA9";
  std::mt19937 random(11);
  int whole = 0;
  for (int round = 0; round < 200000; ++round) {
    std::string text = "{\"a\": [";
    for (std::size_t left = random() % 40; left > 0; --left)
      text += letters[random() % letters.size()];
    text += "], \"z\": 1}";
    const Read few = read_object(text);
    const Read block = read_object(text + std::string(100, ' '));
    CAPTURE(text);
    REQUIRE(text.size() < 64);
    REQUIRE(block.keys == few.keys);
    REQUIRE(block.cut == few.cut);
    REQUIRE(block.broken == few.broken);
    REQUIRE(block.defects.bad_escapes == few.defects.bad_escapes);
    REQUIRE(block.defects.bad_utf8 == few.defects.bad_utf8);
    REQUIRE(block.defects.control_characters == few.defects.control_characters);
    whole += few.keys == std::vector<std::string>{"a", "z"} ? 1 : 0;
  }
  CHECK(whole > 1000);  // not all are wreckage
}

/// A random value of a few hundred characters, well-formed.
void append_value(std::string& out, std::mt19937& random, int depth) {
  const unsigned kind = random() % (depth > 6 ? 2 : 4);
  if (kind == 0) {
    out += std::to_string(random() % 1000);
  } else if (kind == 1) {
    constexpr std::string_view pieces[] = {"]",    "}",    "{[",   ",",      ":",
                                           "\\\"", "\\\\", "word", "\\u00e9"};
    out += '"';
    for (std::size_t left = random() % 30; left > 0; --left)
      out += pieces[random() % std::size(pieces)];
    out += '"';
  } else {
    out += kind == 2 ? '[' : '{';
    for (std::size_t left = random() % 6; left > 0; --left) {
      if (kind == 3) out += random() % 2 == 0 ? "\"key\": " : "\"\" : ";
      append_value(out, random, depth + 1);
      if (left > 1) out += random() % 2 == 0 ? ", " : " ,\n ";
    }
    out += kind == 2 ? ']' : '}';
  }
}

TEST_CASE("scan: nested values end at their own bracket, wherever blocks begin and end") {
  std::mt19937 random(5);
  for (int round = 0; round < 20000; ++round) {
    std::string text = "{\"a\": [";
    append_value(text, random, 0);
    text += "], \"v\": \"found\"}";
    const Read read = read_object(text);
    CAPTURE(text);
    REQUIRE(read.keys == std::vector<std::string>{"a", "v"});
    REQUIRE(read.value == "found");
    REQUIRE(read.defects.bad_escapes == 0);
    REQUIRE_FALSE(read.broken);
    REQUIRE_FALSE(read.cut);
  }
}

TEST_CASE("scan: a record that ends a few bytes behind what is at hand is passed over as well") {
  // Three pieces of 100000 bytes are at hand, of which the first bracket is gone.
  for (std::size_t extra = 0; extra < 80; ++extra) {
    const std::string huge(300000 - 1 - std::string_view("{\"v\": \"\"}").size() + extra, 'x');
    const std::string text = "[{\"v\": \"" + huge + "\"}, {\"v\": \"next\"}]";
    Defects defects;
    Source source("drops", std::make_unique<Drops>(text + std::string(300000, ' '), 100000));
    JsonScanner json(source, defects);
    json.enter();
    JsonText key;
    std::string last;
    for (json.start_record(); json.next_element(); json.start_record()) {
      json.enter();
      while (json.next_key(key)) last = json.text().raw;
      if (json.too_long()) json.give_up_record();
    }
    CAPTURE(extra);
    REQUIRE(last == "next");
    REQUIRE(defects.bad_escapes == 0);
    REQUIRE(defects.control_characters == 0);
    REQUIRE_FALSE(json.cut());
  }
}

TEST_CASE("scan: a record beyond the limit is passed over, the next one is read") {
  const std::string huge(2 * JsonScanner::record_limit, 'x');
  const std::string text = "[{\"v\": \"" + huge + "\"}, {\"v\": \"next\"}]";
  Defects defects;
  Source source("drops", std::make_unique<Drops>(text, 100000));
  JsonScanner json(source, defects);
  json.enter();
  JsonText key;
  std::string last;
  for (json.start_record(); json.next_element(); json.start_record()) {
    json.enter();
    while (json.next_key(key)) last = json.text().raw;
    if (json.too_long()) json.give_up_record();
  }
  CHECK(last == "next");
  CHECK(defects.malformed_records == 1);
  CHECK_FALSE(json.cut());
}

}  // namespace
