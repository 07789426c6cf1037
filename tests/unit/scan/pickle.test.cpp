#include "../../support/pickled.hpp"
#include "../../support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/scan/pickle.hpp>
#include <mega/scan/plain_document.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace {

using namespace mega::scan;
using namespace std::string_literals;
using Kind = PlainDocument::Kind;
namespace pickled = mega_test::pickled;

std::string refusal(const std::string& bytes) {
  return mega_test::refusal_of([&] { (void)read_pickle(bytes, "dump"); },
                               mega::ErrorCode::bad_input);
}

TEST_CASE("scan: a pickle of every kind of plain value, protocol 2") {
  const std::string bytes = pickled::file(
      pickled::dictionary({{"none", pickled::null()},
                           {"yes", pickled::truth(true)},
                           {"no", pickled::truth(false)},
                           {"byte", "K\xfe"},
                           {"short", "M\x34\x12"},
                           {"int", "J\xfe\xff\xff\xff"},
                           {"long", pickled::integer(1758580156069309184)},
                           {"minus", "\x8a\x01\xff"},
                           {"zero", "\x8a\x00"s},
                           {"real", "G\x40\x09\x21\xfb\x54\x44\x2d\x18"},
                           {"pair", pickled::pair(pickled::text("a"), pickled::text("b"))},
                           {"list", pickled::list({pickled::integer(1), pickled::list({})})}}));
  const PlainDocument d = read_pickle(bytes, "dump");
  const auto of = [&](std::string_view key) { return d.find(d.root(), key); };
  CHECK(d.kind(of("none")) == Kind::null);
  CHECK(d.truth(of("yes")));
  CHECK(d.kind(of("no")) == Kind::boolean);
  CHECK_FALSE(d.truth(of("no")));
  CHECK(d.integer(of("byte")) == 254);
  CHECK(d.integer(of("short")) == 0x1234);
  CHECK(d.integer(of("int")) == -2);
  CHECK(d.integer(of("long")) == 1758580156069309184);
  CHECK(d.integer(of("minus"), 7) == -1);
  CHECK(d.integer(of("zero"), 7) == 0);
  CHECK(d.real(of("real")) == 3.141592653589793);
  CHECK(d.text(d.at(of("pair"), 1)) == "b");
  CHECK(d.at(of("pair"), 2) == PlainDocument::absent);
  CHECK(d.children(of("list")).size() == 2);
  CHECK(d.kind(d.at(of("list"), 1)) == Kind::list);
  CHECK(of("missing") == PlainDocument::absent);
  CHECK(d.integer(of("missing"), 5) == 5);
}

TEST_CASE("scan: a pickle of protocol 4, with frames, memo and short texts") {
  // {'a': [1, 'a'], 'b': the same list}, as the opcodes of protocols 4 and 5 spell it
  const std::string body =
      "}\x94(\x8c\x01"
      "a\x94]\x94(K\x01h\x01"
      "e\x8c\x01"
      "b\x94h\x02u."s;
  const std::string bytes = "\x80\x04\x95"s + pickled::little_endian(body.size(), 8) + body;
  const PlainDocument d = read_pickle(bytes, "dump");
  const auto a = d.find(d.root(), "a");
  CHECK(d.integer(d.at(a, 0)) == 1);
  CHECK(d.text(d.at(a, 1)) == "a");
  CHECK(d.find(d.root(), "b") == a);  // one node: shared, not copied
}

TEST_CASE("scan: integers beyond 64 bits are doubles") {
  const std::string two_to_64 = "\x8a\x09\0\0\0\0\0\0\0\0\x01"s;
  const PlainDocument d = read_pickle("\x80\x02"s + two_to_64 + ".", "dump");
  CHECK(d.kind(d.root()) == Kind::real);
  CHECK(d.real(d.root()) == 18446744073709551616.0);
  const PlainDocument minus = read_pickle("\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\xff."s, "dump");
  CHECK(minus.real(minus.root()) == -18446744073709551616.0);
}

TEST_CASE("scan: a list may hold itself, a value of any depth costs no stack") {
  const PlainDocument d = read_pickle(
      "\x80\x02]q\x00h\x00"
      "a."s,
      "dump");
  CHECK(d.at(d.root(), 0) == d.root());
  const PlainDocument deep =
      read_pickle("\x80\x02N" + std::string(1'000'000, '\x85') + ".", "dump");
  CHECK(deep.children(deep.root()).size() == 1);
}

TEST_CASE("scan: opcodes that name or call code are refused with their place") {
  // os.system("true"), the textbook attack
  const std::string attack =
      "\x80\x02"
      "cos\nsystem\nX\x04\0\0\0true\x85R."s;
  CHECK(
      refusal(attack) ==
      "dump: byte 2 is opcode GLOBAL, which names code to run; only numbers, texts, lists, tuples "
      "and dictionaries are read");
  for (const char opcode : "cRbioPQ\x81\x82\x83\x84\x92\x93"s) {
    CAPTURE(static_cast<int>(static_cast<unsigned char>(opcode)));
    CHECK(refusal("\x80\x02NN"s + opcode + ".").find("byte 4 is opcode ") != std::string::npos);
    CHECK(refusal("\x80\x02NN"s + opcode + ".").find("code to run") != std::string::npos);
  }
}

TEST_CASE("scan: malformed pickles are refused, each with a reason") {
  CHECK(refusal("").find("is no pickle of protocol") != std::string::npos);
  CHECK(refusal("\x80\x01N.").find("is no pickle of protocol") != std::string::npos);
  CHECK(refusal("\x80\x02") ==
        "dump: byte 2 begins a value of which the file, of 2 bytes, holds only "
        "a part");
  CHECK(refusal("\x80\x02X\xff\xff\xff\xffme").find("holds only a part") != std::string::npos);
  CHECK(refusal("\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xff.").find("holds only a part") !=
        std::string::npos);
  CHECK(refusal("\x80\x02.").find("empty stack") != std::string::npos);
  CHECK(refusal("\x80\x02(.").find("empty stack") != std::string::npos);
  CHECK(refusal("\x80\x02"
                "e.")
            .find("asks for a mark") != std::string::npos);
  CHECK(refusal("\x80\x02](N("
                "0.")
            .find("empty stack") != std::string::npos);
  CHECK(refusal("\x80\x02}(Nu.").find("a key without a value") != std::string::npos);
  CHECK(refusal("\x80\x02N(Ne.").find("no list or dictionary") != std::string::npos);
  CHECK(refusal("\x80\x02h\x07.").find("never remembered") != std::string::npos);
  CHECK(refusal("\x80\x02Nr\xff\xff\xff\xff.").find("too large a number") != std::string::npos);
  CHECK(refusal("\x80\x02\xf0.").find("opcode 240") != std::string::npos);
  CHECK(refusal("\x80\x02\x80\x06N.").find("protocol above 5") != std::string::npos);
}

TEST_CASE("scan: a pickle cannot ask for more values than the limit") {
  CHECK(refusal("\x80\x02" + std::string(PlainDocument::most_nodes + 1, 'N') + ".")
            .find("holds more than 4194304 values") != std::string::npos);
  // Copies on the stack and members of lists cost two bytes each, and are limited too.
  CHECK(refusal("\x80\x02N" + std::string(PlainDocument::most_nodes + 1, '2') + ".") != "accepted");
  std::string shared = "\x80\x02]q\x00"s;
  for (std::size_t i = 0; i <= PlainDocument::most_nodes; ++i)
    shared +=
        "h\x00"
        "a"s;
  CHECK(refusal(shared + ".").find("holds more than") != std::string::npos);
}

}  // namespace
