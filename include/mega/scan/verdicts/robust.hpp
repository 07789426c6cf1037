/// @file  Scores that a few odd values cannot move.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// Lower median: of two, the smaller, so that one slow rank of two cannot set the standard.
/// Reorders the values. @pre not empty
template <class T>
[[nodiscard]] T lower_median(std::vector<T>& values) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

/// A quarter of the values are smaller. Reorders the values. @pre not empty
template <class T>
[[nodiscard]] T lower_quartile(std::vector<T>& values) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 4);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

/// Median absolute deviation from `center`, scaled to a standard deviation.
[[nodiscard]] inline double spread_around(const std::vector<double>& values, double center) {
  if (values.empty()) return 0;
  std::vector<double> away;
  for (const double v : values) away.push_back(std::abs(v - center));
  return 1.4826 * lower_median(away);
}

}  // namespace mega::inline v0::scan::verdicts
