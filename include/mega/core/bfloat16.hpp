/// @file  Bfloat16: a 16-bit number for storage. Arithmetic on it is arithmetic on float.
#pragma once
#include <mega/core/config.hpp>

#include <cstdint>

namespace mega::inline v0 {

/// The upper half of an IEEE single: 8 bits of exponent, 7 of fraction. It turns into a float
/// without loss, and from one by rounding to nearest, ties to even; a NaN stays one.
struct Bfloat16 {
  std::uint16_t bits = 0;

  Bfloat16() = default;
  explicit MEGA_HD constexpr Bfloat16(float value) noexcept : bits(rounded(value)) {}
  MEGA_HD constexpr operator float() const noexcept {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }

 private:
  [[nodiscard]] static MEGA_HD constexpr std::uint16_t rounded(float value) noexcept {
    const auto word = __builtin_bit_cast(std::uint32_t, value);
    const bool is_nan = (word & 0x7fffffffU) > 0x7f800000U;
    // Carries out of the fraction go into the exponent, so the largest numbers become infinite.
    const std::uint32_t even = word + 0x7fffU + ((word >> 16) & 1U);
    return static_cast<std::uint16_t>(is_nan ? (word >> 16) | 0x40U : even >> 16);
  }
};
static_assert(sizeof(Bfloat16) == 2);

}  // namespace mega::inline v0
