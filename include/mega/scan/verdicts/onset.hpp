/// @file  Onset: since when a figure of each step is above a limit, and whether that lasts.
#pragma once
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

struct Onset {
  std::size_t slow = 0, known = 0;  ///< steps above the limit, and all
  std::size_t first = 0;            ///< index of the first step above it
  double level = 0;                 ///< median over the slow steps, but see find_lasting()

  /// In a third of the steps at least, and not in a single one of many.
  [[nodiscard]] bool lasts() const noexcept {
    return slow > 0 && slow * 3 >= known && (slow > 1 || known < 3);
  }
};

/// @param value  value(s): the figure of the step of index s  @param known  known(s): it has one
/// @param usual  share of steps in which something is in the way of the peers, too
template <class Value, class Known>
[[nodiscard]] Onset find_onset(std::size_t steps, const Value& value, const Known& known,
                               double limit, double usual = 0) {
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
  // The median of those steps in which nothing else is in the way.
  if (!slow.empty()) out.level = lower_quantile(slow, (1 - usual) / 2);
  return out;
}

/// Since when the value stays above the limit, as a fault's does and noise does not: from the
/// earliest step on from which two thirds of the steps are. Where there is none, none is slow.
///
/// Where the peers are above the limit in some of their steps, too, a fault has to be there nearly
/// each time, in nine steps of ten, and by no accident.
/// @param usual  share of steps in which the peers are above the limit
template <class Value, class Known>
[[nodiscard]] Onset find_lasting(std::size_t steps, const Value& value, const Known& known,
                                 double limit, double usual = 0) {
  constexpr double accident = 1e-5;
  const double least = usual > 0 ? 0.9 : 2.0 / 3;
  const Onset all = find_onset(steps, value, known, limit);
  for (std::size_t from = all.first; from < steps && all.slow > 0; ++from) {
    if (!known(from) || value(from) <= limit) continue;
    const Onset since = find_onset(
        steps, value, [&](std::size_t s) { return s >= from && known(s); }, limit, usual);
    if (static_cast<double>(since.slow) < least * static_cast<double>(since.known)) continue;
    if (std::pow(usual, static_cast<double>(since.slow)) > accident) break;
    Onset out = since;
    out.known = all.known;
    return out;
  }
  Onset out = all;
  out.slow = 0;
  return out;
}

/// A figure of each step of some ranks or links; nothing where it is not known.
using Figures = std::vector<std::vector<std::optional<double>>>;

/// What the figures of the peers of one are: lower medians over the peers.
struct UsualFigures {
  double share = 0;           ///< of their steps, that are above the limit
  double upper_quartile = 0;  ///< of their steps
};

/// By index into the figures; zeros where no peer has any. Cost: n log n in the number of figures.
/// @param from  first step that counts
[[nodiscard]] inline std::vector<UsualFigures> find_usual(const Figures& figures, double limit,
                                                          std::size_t from = 0) {
  std::vector<std::optional<double>> own_share(figures.size()), own_quartile(figures.size());
  std::vector<double> known, shares, quartiles;
  for (std::size_t i = 0; i < figures.size(); ++i) {
    known.clear();
    std::size_t above = 0;
    for (std::size_t s = from; s < figures[i].size(); ++s) {
      if (!figures[i][s]) continue;
      known.push_back(*figures[i][s]);
      above += *figures[i][s] > limit ? 1 : 0;
    }
    if (known.empty()) continue;
    own_share[i] = static_cast<double>(above) / static_cast<double>(known.size());
    own_quartile[i] = lower_quantile(known, 0.75);
    shares.push_back(*own_share[i]);
    quartiles.push_back(*own_quartile[i]);
  }
  const MedianOfOthers share(std::move(shares)), quartile(std::move(quartiles));
  std::vector<UsualFigures> out;
  for (std::size_t i = 0; i < figures.size(); ++i)
    out.push_back(
        {share.without(own_share[i]).value_or(0), quartile.without(own_quartile[i]).value_or(0)});
  return out;
}

/// Of each, since when its figure is above the limit and lasts, judged by its peers over the same
/// steps. Where these are above it in more than one step of four, the limit is what they are below
/// in three. Cost: n log n in the number of figures, for each step in which one of them began.
/// @param limit  below which no figure is worth a verdict
[[nodiscard]] inline std::vector<Onset> find_outliers(const Figures& figures, double limit) {
  const auto judge = [&](std::size_t i, const UsualFigures& usual) {
    const auto value = [&](std::size_t s) { return *figures[i][s]; };
    const auto known = [&](std::size_t s) { return figures[i][s].has_value(); };
    const std::size_t steps = figures[i].size();
    if (usual.share <= 0) return find_onset(steps, value, known, limit);
    return find_lasting(steps, value, known, std::max(limit, usual.upper_quartile),
                        std::min(usual.share, 0.25));
  };
  std::map<std::size_t, std::vector<UsualFigures>> usual;  // by the first step that counts
  const auto usual_from = [&](std::size_t first) -> const std::vector<UsualFigures>& {
    const auto [at, is_new] = usual.try_emplace(first);
    if (is_new) at->second = find_usual(figures, limit, first);
    return at->second;
  };
  std::vector<Onset> out;
  for (std::size_t i = 0; i < figures.size(); ++i) {
    Onset found = judge(i, usual_from(0)[i]);
    // What all suffer from may have begun with it.
    if (found.lasts() && found.first > 0) found = judge(i, usual_from(found.first)[i]);
    out.push_back(found);
  }
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
