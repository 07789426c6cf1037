#include <mega/scan/input.hpp>

#include <doctest/doctest.h>
#include <tests/support/temporary_directory.hpp>
#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <string_view>

namespace {

using namespace mega::scan;
using mega::tests::TemporaryDirectory;

std::string packed(std::string_view text) {
  z_stream stream{};
  REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string out(deflateBound(&stream, static_cast<uLong>(text.size())) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(out.size() - stream.avail_out);
  deflateEnd(&stream);
  return out;
}

std::string member(const std::string& name, const std::string& content, char type = '0',
                   const std::string& prefix = "") {
  std::string header(512, '\0');
  header.replace(0, name.size(), name);
  char size[13];
  std::snprintf(size, sizeof size, "%011lo", static_cast<unsigned long>(content.size()));
  header.replace(124, 11, size);
  header[156] = type;
  header.replace(257, 8,
                 std::string("ustar\0"
                             "00",
                             8));
  header.replace(345, prefix.size(), prefix);
  return header + content + std::string((512 - content.size() % 512) % 512, '\0');
}

/// Everything, consumed in odd pieces so that the window rolls.
std::string drained(Source& source) {
  std::string out;
  for (std::size_t want = 1;; want = want * 3 % 70001 + 1) {
    const std::string_view text = source.look(want);
    if (text.empty()) return out;
    const std::size_t count = std::min(want, text.size());
    out += text.substr(0, count);
    source.consume(count);
  }
}

std::map<std::string, std::string> sources(const std::string& path, std::string* damage = nullptr) {
  std::map<std::string, std::string> out;
  for_each_source(path, [&](Source& source) {
    out[source.name()] = drained(source);
    if (damage != nullptr) *damage += source.damage();
  });
  return out;
}

std::string noise(std::size_t size) {
  std::mt19937 random(7);
  std::string out(size, '\0');
  for (char& c : out) c = static_cast<char>('a' + random() % 7);
  return out;
}

TEST_CASE("scan: plain and gzip files, concatenated and empty, give their text") {
  const TemporaryDirectory directory;
  const std::string text = noise(5000000);
  CHECK(sources(directory.write("plain", text)).begin()->second == text);
  CHECK(sources(directory.write("one.gz", packed(text))).begin()->second == text);
  CHECK(sources(directory.write("two.gz", packed("first,") + packed(text))).begin()->second ==
        "first," + text);
  CHECK(sources(directory.write("empty", "")).begin()->second.empty());
  CHECK(sources(directory.write("nothing.gz", packed(""))).begin()->second.empty());
  CHECK(sources(directory.write("byte", "x")).begin()->second == "x");
}

TEST_CASE("scan: damaged gzip gives what precedes the damage, and says so") {
  const TemporaryDirectory directory;
  const std::string text = noise(300000);
  const std::string whole = packed(text);
  std::string damage;
  const std::string cut =
      sources(directory.write("cut.gz", whole.substr(0, whole.size() / 2)), &damage)
          .begin()
          ->second;
  CHECK(cut.size() > text.size() / 4);
  CHECK(text.starts_with(cut));
  CHECK(damage == "the gzip stream ends in the middle");
  damage.clear();
  std::string wrong = whole;
  wrong[wrong.size() / 2] = static_cast<char>(wrong[wrong.size() / 2] ^ 0x55);
  (void)sources(directory.write("wrong.gz", wrong), &damage);
  CHECK(mega::tests::contains(damage, "gzip stream is damaged"));
}

TEST_CASE("scan: members of archives are files of their own") {
  const TemporaryDirectory directory;
  const std::string big = noise(2000000);
  const std::string longest(300, 'n');
  const std::string archive =
      member("dir/", "", '5') + member("dir/a.json", "[1]") + member("b", big, '0', "deep") +
      member("@LongLink", longest + std::string(1, '\0'), 'L') + member("short", "long") +
      member("x", "27 path=renamed/by/pax.txt\n", 'x') + member("old", "pax") +
      member("c.gz", packed("packed member")) + member("empty", "") + std::string(1024, '\0');
  for (const bool zipped : {false, true}) {
    const std::string path =
        directory.write(zipped ? "t.tar.gz" : "t.tar", zipped ? packed(archive) : archive);
    std::string damage;
    const auto found = sources(path, &damage);
    CHECK(found.size() == 6);
    CHECK(found.at(path + ":dir/a.json") == "[1]");
    CHECK(found.at(path + ":deep/b") == big);
    CHECK(found.at(path + ":" + longest) == "long");
    CHECK(found.at(path + ":renamed/by/pax.txt") == "pax");
    CHECK(found.at(path + ":c.gz") == "packed member");
    CHECK(found.at(path + ":empty").empty());
    CHECK(damage.empty());
  }
  // A member that its reader leaves half-read does not move the next one.
  std::string second;
  for_each_source(directory.write("skip.tar", archive), [&](Source& source) {
    if (source.name().ends_with(longest)) second = drained(source);
  });
  CHECK(second == "long");
  // Nor is it damaged, however much of the archive is at hand.
  const std::string zipped = directory.write("half.tar.gz", packed(archive));
  for (const std::size_t want : {std::size_t{1}, std::size_t{4096}, std::size_t{1} << 20U}) {
    for_each_source(zipped, [&](Source& source) {
      (void)source.look(want);
      CHECK(source.damage().empty());
    });
  }
  std::string damage;
  (void)sources(directory.write("cut.tar", archive.substr(0, 4000)), &damage);
  CHECK(mega::tests::contains(damage, "ends in the middle of this member"));
}

TEST_CASE("scan: lines, their limit, and a source that is too long") {
  Source source("lines", "one\r\n\nthree\nlast");
  std::string_view line;
  std::string all;
  while (next_line(source, line)) all += std::string(line) + "|";
  CHECK(all == "one||three|last|");
  Source wide("wide", "0123456789\nnext\n");
  REQUIRE(next_line(wide, line, 4));
  CHECK(line == "0123");
  REQUIRE(next_line(wide, line, 4));
  CHECK(line == "next");
  CHECK_FALSE(next_line(wide, line, 4));
  Source longer("longer", "12345");
  CHECK(longer.everything(5) == "12345");
  CHECK_THROWS_WITH_AS((void)longer.everything(4),
                       doctest::Contains("longer is longer than 4 bytes"), mega::Error);
}

TEST_CASE("scan: a directory gives its files in the order of their numbers") {
  const TemporaryDirectory directory;
  for (const char* name : {"dump_10", "dump_9", "dump_1"}) directory.write(name, name);
  std::string order;
  for_each_source(directory.path(), [&](Source& source) { order += drained(source) + " "; });
  CHECK(order == "dump_1 dump_9 dump_10 ");
  CHECK_THROWS_AS(for_each_source(directory / "absent", [](Source&) {}), mega::Error);
}

}  // namespace
