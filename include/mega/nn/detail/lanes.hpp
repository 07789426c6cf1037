/// @file  Sums and maxima of a row in an order that depends on its length only, written so that a
/// compiler may vectorise them without being allowed to reorder floating-point sums.
#pragma once
#include <mega/core/view.hpp>

#include <limits>

namespace mega::inline v0::nn::detail {

inline constexpr Index lanes = 16;

/// term(0) + ... + term(n - 1): term i goes to lane i % 16, the lanes are added pairwise.
template <class Term>
[[nodiscard]] float lane_sum(Index n, Term term) {
  float sum[lanes] = {};
  Index i = 0;
  for (; i + lanes <= n; i += lanes)
    for (Index l = 0; l < lanes; ++l) sum[l] += term(i + l);
  for (Index l = 0; l < n - i; ++l) sum[l] += term(i + l);
  for (Index half = lanes / 2; half > 0; half /= 2)
    for (Index l = 0; l < half; ++l) sum[l] += sum[l + half];
  return sum[0];
}

/// Largest of x[0..n), minus infinity for n == 0. A NaN is passed over.
[[nodiscard]] inline float lane_max(Index n, const float* x) {
  float largest[lanes];
  for (float& value : largest) value = -std::numeric_limits<float>::infinity();
  Index i = 0;
  for (; i + lanes <= n; i += lanes)
    for (Index l = 0; l < lanes; ++l) largest[l] = x[i + l] > largest[l] ? x[i + l] : largest[l];
  for (Index l = 0; l < n - i; ++l) largest[l] = x[i + l] > largest[l] ? x[i + l] : largest[l];
  for (Index half = lanes / 2; half > 0; half /= 2)
    for (Index l = 0; l < half; ++l)
      largest[l] = largest[l + half] > largest[l] ? largest[l + half] : largest[l];
  return largest[0];
}

/// out[c] += sum over rows r, ascending, of term(r, c) for c < cols. The sum of this call is formed
/// first and added once, so that a long accumulation loses less.
template <class Term>
void add_column_sums(float* out, Index rows, Index cols, Term term) {
  constexpr Index width = 64;
  for (Index first = 0; first < cols; first += width) {
    float sum[width] = {};
    if (first + width <= cols) {
      for (Index r = 0; r < rows; ++r)
        for (Index c = 0; c < width; ++c) sum[c] += term(r, first + c);
      for (Index c = 0; c < width; ++c) out[first + c] += sum[c];
    } else {
      for (Index r = 0; r < rows; ++r)
        for (Index c = 0; first + c < cols; ++c) sum[c] += term(r, first + c);
      for (Index c = 0; first + c < cols; ++c) out[first + c] += sum[c];
    }
  }
}

}  // namespace mega::inline v0::nn::detail
