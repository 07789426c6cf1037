#include <mega/core/bfloat16.hpp>
#include <mega/core/float16.hpp>
#include <mega/core/storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

using mega::Float16;

namespace {
Float16 of_bits(unsigned bits) {
  Float16 out;
  out.bits = static_cast<std::uint16_t>(bits);
  return out;
}

/// By the definition of the format, in double.
double value_of(unsigned bits) {
  const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
  const int exponent = static_cast<int>(bits >> 10 & 31U),
            fraction = static_cast<int>(bits & 1023U);
  if (exponent == 31)
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  return exponent == 0 ? sign * std::ldexp(fraction, -24)
                       : sign * std::ldexp(1024 + fraction, exponent - 25);
}
}  // namespace

static_assert(Float16(1.0F).bits == 0x3c00 && static_cast<float>(Float16(-0.1F)) < 0);
static_assert(mega::half_storage<Float16> && mega::storage<float> && !mega::half_storage<float>);
static_assert(!mega::storage<double> && !std::is_convertible_v<float, Float16>);

TEST_CASE("float16: each of the 65536 numbers is widened exactly and comes back") {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const float wide = of_bits(bits);
    const double expected = value_of(bits);
    const unsigned back = Float16(wide).bits;
    if (std::isnan(expected)) {
      REQUIRE(std::isnan(wide));
      REQUIRE(back == (bits | 0x200U));  // a quiet one with the same payload
    } else {
      REQUIRE(static_cast<double>(wide) == expected);
      REQUIRE(std::signbit(wide) == ((bits & 0x8000U) != 0));
      REQUIRE(back == bits);
    }
  }
}

TEST_CASE("float16: around every midpoint the nearest is taken, and the even one of two") {
  for (unsigned bits = 0; bits < 0x7c00; ++bits) {
    // Behind the largest number comes 2^16, which is stored as infinity.
    const double low = value_of(bits), high = bits == 0x7bff ? 65536.0 : value_of(bits + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    REQUIRE(static_cast<double>(middle) == (low + high) / 2);
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    REQUIRE(Float16(middle).bits == even);
    REQUIRE(Float16(-middle).bits == (even | 0x8000U));
    REQUIRE(Float16(std::nextafterf(middle, 0.0F)).bits == bits);
    REQUIRE(Float16(std::nextafterf(middle, 1e30F)).bits == bits + 1);
  }
}

TEST_CASE("float16: the ends of float") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  CHECK(Float16(65504.0F).bits == 0x7bff);
  CHECK(Float16(65519.996F).bits == 0x7bff);
  CHECK(Float16(65520.0F).bits == 0x7c00);
  CHECK(Float16(3.4e38F).bits == 0x7c00);
  CHECK(Float16(-infinity).bits == 0xfc00);
  CHECK(Float16(0x1p-25F).bits == 0);
  CHECK(Float16(std::nextafterf(0x1p-25F, 1.0F)).bits == 1);
  CHECK(Float16(std::numeric_limits<float>::denorm_min()).bits == 0);
  CHECK(Float16(-1e-40F).bits == 0x8000);
  CHECK(Float16(std::nextafterf(0x1p-14F, 0.0F)).bits == 0x400);
  // A NaN whose payload is in the bits that are lost does not become an infinity.
  CHECK(std::isnan(static_cast<float>(Float16(std::bit_cast<float>(0x7f800001U)))));
  CHECK(std::isnan(static_cast<float>(Float16(std::bit_cast<float>(0xff800001U)))));
}

TEST_CASE("float16: any float is within half a step of what it is stored as") {
  std::uint32_t word = 12345;
  for (int i = 0; i < 1000000; ++i) {
    word = word * 1664525U + 1013904223U;
    const float x = std::bit_cast<float>(word);
    if (!(std::abs(x) < 65504.0F)) continue;
    const double error = std::abs(static_cast<double>(static_cast<float>(Float16(x))) - x);
    const double step = std::max(std::ldexp(1.0, -24), std::ldexp(1.0, std::ilogb(x) - 10));
    REQUIRE(error <= step / 2);
  }
}
