#include <mega/scan/detail/byte_lanes.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string_view>

namespace {

using namespace mega::scan::detail;

using Block = std::array<char, 64>;

template <class Has>
std::uint64_t mask_of(const Block& text, Has has) {
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < text.size(); ++i)
    mask |= static_cast<std::uint64_t>(has(text[i])) << i;
  return mask;
}

bool one_of(std::string_view set, char c) {
  return set.find(c) != std::string_view::npos;
}
bool is_odd(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte < 0x20 || byte > 0x7F;
}

/// The masks, one character after the other.
JsonBlock plain_block(const Block& text) {
  return {.quotes = mask_of(text, [](char c) { return c == '"'; }),
          .odd = mask_of(text, [](char c) { return c == '\\' || is_odd(c); }),
          .opens = mask_of(text, [](char c) { return one_of("[{", c); }),
          .closes = mask_of(text, [](char c) { return one_of("]}", c); }),
          .marks = mask_of(text, [](char c) { return one_of(",:", c); })};
}

template <class Lanes>
void check(const Block& text) {
  const JsonBlock expected = plain_block(text);
  CHECK(JsonBlock::at<Lanes>(text.data()) == expected);
  CHECK(special_characters<Lanes>(text.data()) == (expected.quotes | expected.odd));
}

void check_all(const Block& text) {
  check<WordLanes>(text);
#if defined(__SSE2__)
  check<Sse2Lanes>(text);
#endif
#if defined(__AVX2__)
  check<Avx2Lanes>(text);
#endif
#if defined(__AVX512BW__)
  check<Avx512Lanes>(text);
#endif
}

TEST_CASE("scan: every character at every place gives the same bits in words and in vectors") {
  Block text;
  for (int byte = 0; byte < 256; ++byte) {
    for (std::size_t at = 0; at < text.size(); ++at) {
      text.fill('x');
      text[at] = static_cast<char>(byte);
      check_all(text);
    }
    // All alike: a step that carried from byte to byte would show.
    text.fill(static_cast<char>(byte));
    check_all(text);
  }
}

TEST_CASE("scan: random text gives the same bits in words and in vectors") {
  std::mt19937 random(7);
  constexpr std::string_view json = "\"\\[]{},: \n\x1f\x7f\x80\xff!Zz0[{;<";
  Block text;
  for (int round = 0; round < 2000; ++round) {
    for (char& c : text)
      c = round % 2 == 0 ? json[random() % json.size()] : static_cast<char>(random());
    check_all(text);
  }
}

static_assert(running_parity(0) == 0);
static_assert(running_parity(1) == ~std::uint64_t{0});
static_assert(running_parity(0b0100'1000) == 0b0011'1000);
static_assert(running_parity(std::uint64_t{1} << 63U) == std::uint64_t{1} << 63U);

}  // namespace
