/// @file  What the tests of nn/ share: seeded data, relative error, central differences.
#pragma once
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

using mega::Index;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline std::size_t at(Index i) {
  return static_cast<std::size_t>(i);
}

/// Uniform in [-spread, spread).
inline Floats random_floats(Index count, std::uint64_t seed, float spread = 1.0f) {
  const mega::RandomKey key{.seed = seed, .use = mega::RandomUse::test};
  Floats out(at(count));
  for (Index i = 0; i < count; ++i) out[at(i)] = spread * (2.0f * key.uniform(i) - 1.0f);
  return out;
}

inline Doubles widen(const Floats& x) {
  return {x.begin(), x.end()};
}

inline mega::Matrix<float> matrix(Floats& x, Index rows, Index cols) {
  return {x.data(), rows, cols};
}
inline mega::Matrix<const float> matrix(const Floats& x, Index rows, Index cols) {
  return {x.data(), rows, cols};
}
inline mega::Vector<float> vector(Floats& x) {
  return {x.data(), static_cast<Index>(x.size())};
}
inline mega::Vector<const float> vector(const Floats& x) {
  return {x.data(), static_cast<Index>(x.size())};
}

/// Largest |x - y| over the larger of `size` and the largest |y|: rounding errors of sums scale
/// with the tensor, not with the single element. NaN counts as infinite.
template <class X, class Y>
double error(const X& x, const Y& y, double size = 1e-3) {
  double difference = x.size() == y.size() ? 0.0 : INFINITY;
  for (std::size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    const double d = std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
    difference = std::isnan(d) ? INFINITY : std::max(difference, d);
    size = std::max(size, std::abs(static_cast<double>(y[i])));
  }
  return difference / size;
}

/// Central differences of loss(x) in double at the given elements. With step 1e-4 on values of
/// order one both the truncation (1e-8) and the rounding (1e-12) are far below fp32's 6e-8 times
/// the length of a sum.
template <class Loss>
Doubles differences(Loss loss, Doubles x, const std::vector<Index>& elements) {
  constexpr double step = 1e-4;
  Doubles out;
  for (const Index i : elements) {
    const double value = x[at(i)];
    x[at(i)] = value + step;
    const double above = loss(x);
    x[at(i)] = value - step;
    out.push_back((above - loss(x)) / (2.0 * step));
    x[at(i)] = value;
  }
  return out;
}

inline std::vector<Index> all_elements(Index count) {
  std::vector<Index> out;
  for (Index i = 0; i < count; ++i) out.push_back(i);
  return out;
}

inline Floats pick(const Floats& x, const std::vector<Index>& elements) {
  Floats out;
  for (const Index i : elements) out.push_back(x[at(i)]);
  return out;
}

inline double inner(const Floats& weights, const Doubles& x) {
  double sum = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(weights[i]) * x[i];
  return sum;
}

}  // namespace test
