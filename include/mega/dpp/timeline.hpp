/// @file  Timeline of a pipeline step: when each rank computed what, and when what travelled, in
/// one unit of the maker's choice. Included by name.
#pragma once
#include <mega/dpp/action.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

struct TimedAction {
  Action action{};
  double start = 0;
  double end = 0;
};

/// A message between two ranks. It begins when the link takes it and ends when it has arrived.
struct Transfer {
  int from = 0;  ///< ranks
  int to = 0;
  Action sent{};      ///< send_forward or send_backward of the producing chunk
  Action received{};  ///< recv_forward or recv_backward of the consuming chunk
  double start = 0;
  double end = 0;
};

struct Timeline {
  /// [p] compute actions in order of start. The halves of a fused pair stand one after the other
  /// and have equal times.
  std::vector<std::vector<TimedAction>> ranks;
  std::vector<Transfer> transfers;  ///< in order of start

  /// When the last action is done.
  [[nodiscard]] double end() const {
    double latest = 0;
    for (const auto& rank : ranks) {
      for (const TimedAction& a : rank) latest = std::max(latest, a.end);
    }
    return latest;
  }
};

/// How long something was under way, and for how much of that time compute covered it.
struct TransferTime {
  double total = 0;
  double covered = 0;

  [[nodiscard]] double exposed() const noexcept { return total - covered; }
  /// covered / total, at most 1; 1 where nothing travelled.
  [[nodiscard]] double coverage() const noexcept { return total > 0 ? covered / total : 1.0; }
};

/// Of each rank, the time in which at least one message was under way to it (messages side by side
/// count once), and the part of it in which the rank computed; summed over the ranks. What is
/// exposed is time in which a rank did nothing while its input, or some later one, was coming.
[[nodiscard]] inline TransferTime transfer_time(const Timeline& timeline) {
  using Interval = std::pair<double, double>;
  std::vector<std::vector<Interval>> incoming(timeline.ranks.size());
  for (const Transfer& t : timeline.transfers) {
    incoming[static_cast<std::size_t>(t.to)].push_back({t.start, t.end});
  }
  TransferTime time;
  for (std::size_t r = 0; r < incoming.size(); ++r) {
    if (!std::is_sorted(incoming[r].begin(), incoming[r].end()))
      std::sort(incoming[r].begin(), incoming[r].end());
    const auto& computed = timeline.ranks[r];
    std::size_t next = 0;
    double seen = 0;  // compute before this has been counted: fused halves overlap
    const auto close = [&](const Interval& under_way) {
      time.total += under_way.second - under_way.first;
      // Intervals ascend and are disjoint, so each compute action is passed once.
      for (; next < computed.size(); ++next) {
        const double start = std::max({computed[next].start, under_way.first, seen});
        const double end = std::min(computed[next].end, under_way.second);
        if (start < end) {
          time.covered += end - start;
          seen = end;
        }
        if (computed[next].end > under_way.second) break;
      }
    };
    for (std::size_t k = 0; k < incoming[r].size();) {
      Interval joined = incoming[r][k];
      for (++k; k < incoming[r].size() && incoming[r][k].first <= joined.second; ++k) {
        joined.second = std::max(joined.second, incoming[r][k].second);
      }
      close(joined);
    }
  }
  return time;
}

}  // namespace mega::inline v0::dpp
