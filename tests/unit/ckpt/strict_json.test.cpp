/// @file  Tests of ckpt/strict_json.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/ckpt/strict_json.hpp>

#include <doctest/doctest.h>

#include <string>

using mega::ErrorCode;
using mega::ckpt::parse_json_strictly;
using mega::tests::contains;
using mega::tests::sentence_of;
using mega::tests::throws_code;

TEST_CASE("strict_json: valid text gives its value") {
  const auto json = parse_json_strictly(R"({"a":[1,-2,0.5,null,true],"b":{"a":"x"}})", "f");
  CHECK(json["a"][1] == -2);
  CHECK(json["b"]["a"] == "x");
  CHECK(parse_json_strictly("7", "f") == 7);
}

TEST_CASE("strict_json: duplicate keys are refused in any object, the same key in two is not") {
  CHECK(contains(sentence_of([] { (void)parse_json_strictly(R"({"a":1,"a":2})", "f"); }),
                 "f: key 'a' appears twice"));
  CHECK(throws_code(ErrorCode::bad_input,
                    [] { (void)parse_json_strictly(R"([{"x":{"k":1,"j":2,"k":3}}])", "f"); }));
  CHECK(parse_json_strictly(R"([{"k":1},{"k":{"k":2}}])", "f").size() == 2);
}

TEST_CASE("strict_json: nesting is capped before it costs a stack") {
  const auto nested = [](int depth, char open, char close) {
    return std::string(static_cast<std::size_t>(depth), open) +
           std::string(static_cast<std::size_t>(depth), close);
  };
  CHECK_NOTHROW((void)parse_json_strictly(nested(64, '[', ']'), "f"));
  CHECK(contains(sentence_of([&] { (void)parse_json_strictly(nested(65, '[', ']'), "f"); }),
                 "deeper than 64"));
  CHECK(throws_code(ErrorCode::bad_input,
                    [] { (void)parse_json_strictly(std::string(512'000, '['), "f"); }));
  std::string objects;
  for (int i = 0; i < 512'000; ++i) objects += "{\"a\":";
  CHECK(contains(sentence_of([&] { (void)parse_json_strictly(objects, "f"); }), "deeper than 64"));
}

TEST_CASE("strict_json: faults are located") {
  CHECK(contains(sentence_of([] { (void)parse_json_strictly("{\"a\": x}", "f"); }), "byte 7"));
  for (const auto* text : {"", " ", "{", "[1,]", "{\"a\":1}x", "\"\xff\"", "\"\xc0\xaf\"",
                           "\"\\ud800\"", "nul", "01", "{1:2}", "\"\n\""}) {
    CAPTURE(text);
    CHECK(throws_code(ErrorCode::bad_input, [&] { (void)parse_json_strictly(text, "f"); }));
  }
  CHECK(contains(sentence_of([] { (void)parse_json_strictly({"{}\0{}", 5}, "f"); }), "byte 3"));
  CHECK(contains(sentence_of([] { (void)parse_json_strictly("[1e999]", "f"); }), "out of range"));
}

TEST_CASE("strict_json: printable hides control characters and cuts long names") {
  CHECK(mega::ckpt::printable("a\x1b[31m\n") == "'a?[31m?'");
  CHECK(mega::ckpt::printable(std::string(81, 'n')) == "'" + std::string(80, 'n') + "...'");
}
