/// @file  Float16: a 16-bit number for storage. Arithmetic on it is arithmetic on float.
#pragma once
#include <mega/core/config.hpp>

#include <cstdint>

namespace mega::inline v0 {

/// IEEE half precision: 5 bits of exponent, 10 of fraction. Numbers from 2^-14 to 65504 have 11
/// significant bits, smaller ones fewer, down to 2^-24. It turns into a float without loss, and
/// from one by rounding to nearest, ties to even; what rounds to 65520 or more becomes infinite, a
/// NaN stays one.
struct Float16 {
  std::uint16_t bits = 0;

  Float16() = default;
  explicit MEGA_HD constexpr Float16(float value) noexcept : bits(rounded(value)) {}
  MEGA_HD constexpr operator float() const noexcept { return widened(bits); }

 private:
  /// Between the exponents' biases, 127 and 15, in the place of float's exponent.
  static constexpr std::uint32_t rebias = 112U << 23;

  [[nodiscard]] static MEGA_HD constexpr std::uint16_t rounded(float value) noexcept {
#ifdef __CUDA_ARCH__
    if (!__builtin_is_constant_evaluated()) {
      std::uint16_t out = 0;
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
      return out;
    }
#endif
    const auto word = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (word >> 16) & 0x8000U, size = word & 0x7fffffffU;
    if (size > 0x7f800000U) return narrow(sign | 0x7e00U | ((size >> 13) & 0x3ffU));
    if (size >= 0x477ff000U) return narrow(sign | 0x7c00U);  // 65520, halfway to 2^16
    if (size < 0x38800000U) {
      // Below 2^-14 the steps are of 2^-24, as those of float between 0.5 and 1 are.
      const float shifted = __builtin_bit_cast(float, size) + 0.5F;
      return narrow(sign | (__builtin_bit_cast(std::uint32_t, shifted) - 0x3f000000U));
    }
    // Carries out of the fraction go into the exponent.
    const std::uint32_t even = size + 0xfffU + ((size >> 13) & 1U);
    return narrow(sign | ((even - rebias) >> 13));
  }

  [[nodiscard]] static MEGA_HD constexpr float widened(std::uint16_t half) noexcept {
#ifdef __CUDA_ARCH__
    if (!__builtin_is_constant_evaluated()) {
      float out = 0.0F;
      asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
      return out;
    }
#endif
    const std::uint32_t sign = (half & 0x8000U) << 16, size = half & 0x7fffU;
    if (size < 0x400U) {
      const float magnitude = static_cast<float>(size) * 0x1p-24F;
      return sign != 0 ? -magnitude : magnitude;
    }
    const std::uint32_t beyond = size >= 0x7c00U ? rebias : 0U;  // of infinity and NaN
    return __builtin_bit_cast(float, sign | ((size << 13) + rebias + beyond));
  }

  [[nodiscard]] static MEGA_HD constexpr std::uint16_t narrow(std::uint32_t word) noexcept {
    return static_cast<std::uint16_t>(word);
  }
};
static_assert(sizeof(Float16) == 2);

}  // namespace mega::inline v0
