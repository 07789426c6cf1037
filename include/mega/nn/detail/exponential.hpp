/// @file  Exponential and logistic function without calls or branches, so that loops over them
/// vectorise.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace mega::inline v0::nn::detail {

/// holds ? a : b as a selection of bits. Compilers that honour floating-point traps turn the
/// conditional operator into branches around arithmetic, and then vectorise nothing.
[[nodiscard]] inline float select(bool holds, float a, float b) noexcept {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(holds);
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a) & mask) |
                              (std::bit_cast<std::uint32_t>(b) & ~mask));
}

/// e^x for x <= 80, within 2 units in the last place; below -87.7 it is 0, NaN stays NaN.
/// Soft-max and the logistic function need no larger argument.
/// Source: reduction by multiples of ln 2 in two parts (Cody and Waite 1980), then the Taylor
/// polynomial of degree 7, whose remainder on |r| <= ln(2) / 2 is below 6e-9.
[[nodiscard]] inline float exponential(float x) noexcept {
  x = select(x < -88.0f, -88.0f, x);  // at -88 the exponent of the power below is that of zero
  constexpr float shift = 0x1.8p23f;  // adding it rounds to an integer, kept in the low bits
  const float shifted = x * 0x1.715476p0f + shift;
  const float n = shifted - shift;
  const float r = (x - n * 0x1.62e4p-1f) + n * -0x1.7f7d1cp-20f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 127u) << 23);
}

/// 1 / (1 + e^-x) and its complement, both without cancellation.
struct Logistic {
  float value;
  float complement;
};

[[nodiscard]] inline Logistic logistic(float x) noexcept {
  const float e = exponential(-std::fabs(x));
  const float scale = 1.0f / (1.0f + e);
  return {select(x < 0.0f, e, 1.0f) * scale, select(x < 0.0f, 1.0f, e) * scale};
}

}  // namespace mega::inline v0::nn::detail
