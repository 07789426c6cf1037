/// @file  Scores that a few odd values cannot move.
///
/// What ranks share, a processor or a link, delays work now and then, and only ever makes it
/// longer. A fault delays it each time. So equal work is compared by what it takes when nothing is
/// in the way, see undisturbed(); and to take long now and then says nothing where peers do, see
/// find_lasting().
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// The value that this share of the values is below, or the next smaller one. Reorders the values.
/// @pre not empty, 0 <= share < 1
template <class T>
[[nodiscard]] T lower_quantile(std::vector<T>& values, double share) {
  const auto at =
      values.begin() + static_cast<std::ptrdiff_t>(static_cast<double>(values.size() - 1) * share);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

/// Lower median: of two, the smaller, so that one slow rank of two cannot set the standard.
/// Reorders the values. @pre not empty
template <class T>
[[nodiscard]] T lower_median(std::vector<T>& values) {
  return lower_quantile(values, 0.5);
}

/// Median: of two, what lies between, so that neither is the standard. Reorders the values.
/// @pre not empty
[[nodiscard]] inline double central_value(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

/// Lower median of all values but one, for any of them. Cost: one sort for all.
template <class T>
class MedianOfOthers {
 public:
  explicit MedianOfOthers(std::vector<T> values) : sorted_(std::move(values)) {
    std::sort(sorted_.begin(), sorted_.end());
  }
  /// @param own  one of the values, which does not count; nothing: all count
  /// @return nothing where no other is
  [[nodiscard]] std::optional<T> without(const std::optional<T>& own) const {
    const std::size_t others = sorted_.size() - (own ? 1 : 0);
    if (others == 0) return std::nullopt;
    const std::size_t middle = (others - 1) / 2;
    // The values from the own one's place on come one later.
    return sorted_[middle + (own && *own <= sorted_[middle] ? 1 : 0)];
  }

 private:
  std::vector<T> sorted_;
};

/// What equal work takes when nothing delays it: a tenth of the values are smaller, so that nine of
/// ten may be delayed. Reorders the values. @pre not empty
template <class T>
[[nodiscard]] T undisturbed(std::vector<T>& values) {
  return lower_quantile(values, 0.1);
}

/// Median absolute deviation from `center`, scaled to a standard deviation.
[[nodiscard]] inline double spread_around(const std::vector<double>& values, double center) {
  if (values.empty()) return 0;
  std::vector<double> away;
  for (const double v : values) away.push_back(std::abs(v - center));
  return 1.4826 * lower_median(away);
}

}  // namespace mega::inline v0::scan::verdicts
