/// @file  Tests of data/token_source.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/data/token_source.hpp>

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
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
std::vector<std::int32_t> all_tokens(const data::ByteTokenSource& source) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(source.size()));
  source.read(0, out);
  return out;
}
}  // namespace

TEST_CASE("token_source: bytes are tokens and documents end with their own") {
  data::ByteTokenSource source;
  source.append("");
  source.append("ab");
  source.append("");
  source.append(std::string("\0\xff", 2));
  source.append("c");
  CHECK(source.documents() == 3);
  CHECK(source.empty_documents() == 2);
  const std::vector<std::int32_t> expected{'a', 'b', 256, 0, 255, 256, 'c', 256};
  CHECK(all_tokens(source) == expected);
  for (std::size_t first = 0; first <= expected.size(); ++first) {
    for (std::size_t count = 0; first + count <= expected.size(); ++count) {
      std::vector<std::int32_t> out(count, -7);
      source.read(static_cast<Index>(first), out);
      CHECK(std::equal(out.begin(), out.end(), expected.begin() + static_cast<Index>(first)));
    }
  }
  std::int32_t two[2];
  CHECK(throws_code(ErrorCode::logic, [&] { source.read(7, two); }));
  CHECK(throws_code(ErrorCode::logic, [&] { source.read(-1, two); }));
  CHECK(throws_code(ErrorCode::logic, [&] { source.read(INT64_MAX, two); }));
  CHECK(throws_code(ErrorCode::logic, [&] { data::ByteTokenSource().read(0, two); }));
  data::ByteTokenSource().read(0, {});
}

TEST_CASE("token_source: a text file is one document, byte for byte") {
  TemporaryDirectory dir;
  std::string text(700'001, '\0');
  std::iota(text.begin(), text.end(), char{0});
  text += "\r\n\xEF\xBB\xBF\n";
  const auto source = data::open_text(dir.write("t", text));
  const auto tokens = all_tokens(source);
  REQUIRE(tokens.size() == text.size() + 1);
  CHECK(tokens.back() == 256);
  CHECK(std::equal(text.begin(), text.end(), tokens.begin(), [](char c, std::int32_t token) {
    return token == static_cast<unsigned char>(c);
  }));
}

TEST_CASE("token_source: a directory gives its files in byte order of their paths") {
  TemporaryDirectory dir, elsewhere;
  for (const auto* sub : {"b", "b/deep", ".git", "a"}) std::filesystem::create_directory(dir / sub);
  dir.write("b/2", "4");
  dir.write("b/10", "3");
  dir.write("b/deep/x", "5");
  dir.write("a/z", "1");
  dir.write("Z", "0");
  dir.write("a/empty", "");
  dir.write(".hidden", "no");
  dir.write(".git/config", "no");
  std::filesystem::create_symlink(elsewhere.write("real", "6"), dir / "link");
  std::filesystem::create_directory_symlink(dir.path(), dir / "loop");
  REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
  const auto source = data::open_text(dir.path());
  CHECK(all_tokens(source) ==
        std::vector<std::int32_t>{'0', 256, '1', 256, '3', 256, '4', 256, '5', 256, '6', 256});
  CHECK(source.empty_documents() == 1);
}

TEST_CASE("token_source: what holds no text is refused in a sentence with its path") {
  TemporaryDirectory dir;
  std::filesystem::create_directory(dir / "empty");
  REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
  for (const auto& path : {dir / "absent", dir.write("nothing", ""), dir / "empty", dir / "pipe",
                           std::string("/dev/null"), dir / "nothing/x"}) {
    CAPTURE(path);
    CHECK(throws_code(ErrorCode::bad_input, [&] { (void)data::open_text(path); }));
    CHECK(contains(sentence_of([&] { (void)data::open_text(path); }), path));
  }
  std::filesystem::create_symlink(dir / "absent", dir / "empty/dangling");
  CHECK(contains(sentence_of([&] { (void)data::open_text(dir / "empty"); }), "dangling"));
}
