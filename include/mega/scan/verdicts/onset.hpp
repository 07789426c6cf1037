/// @file  Onset: since when a figure of each step is above a limit, and whether that lasts.
#pragma once
#include <mega/scan/verdicts/robust.hpp>

#include <cstddef>
#include <vector>

namespace mega::inline v0::scan::verdicts {

struct Onset {
  std::size_t slow = 0, known = 0;  ///< steps above the limit, and all
  std::size_t first = 0;            ///< index of the first step above it
  double level = 0;                 ///< median over the slow steps

  /// In a third of the steps at least, and not in a single one of many.
  [[nodiscard]] bool lasts() const noexcept {
    return slow > 0 && slow * 3 >= known && (slow > 1 || known < 3);
  }
};

/// @param value  value(s): the figure of the step of index s  @param known  known(s): it has one
template <class Value, class Known>
[[nodiscard]] Onset find_onset(std::size_t steps, const Value& value, const Known& known,
                               double limit) {
  Onset out;
  std::vector<double> slow;
  for (std::size_t s = 0; s < steps; ++s) {
    if (!known(s)) continue;
    ++out.known;
    if (value(s) <= limit) continue;
    if (slow.empty()) out.first = s;
    ++out.slow;
    slow.push_back(value(s));
  }
  if (!slow.empty()) out.level = lower_median(slow);
  return out;
}

/// Since when the value stays above the limit, as a fault's does and noise does not: from the
/// earliest step on from which two thirds of the steps are. Where there is none, none is slow.
template <class Value, class Known>
[[nodiscard]] Onset find_lasting(std::size_t steps, const Value& value, const Known& known,
                                 double limit) {
  const Onset all = find_onset(steps, value, known, limit);
  for (std::size_t from = all.first; from < steps && all.slow > 0; ++from) {
    if (!known(from) || value(from) <= limit) continue;
    const Onset since = find_onset(
        steps, value, [&](std::size_t s) { return s >= from && known(s); }, limit);
    if (since.slow * 3 < since.known * 2) continue;
    Onset out = since;
    out.known = all.known;
    return out;
  }
  Onset out = all;
  out.slow = 0;
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
