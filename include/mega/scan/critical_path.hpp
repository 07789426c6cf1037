/// @file  Critical path: the chain of operations over all ranks that no time could be saved without
/// shortening.
///
/// It is walked backwards from the operation that ended last. A matched operation leads to the
/// member that arrived last, any other to what it needed last; time in which the path's rank had
/// all it needed and still did not begin is its host's. Every nanosecond between the first begin
/// and the last end is on exactly one segment.
#pragma once
#include <mega/scan/replay.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

enum class PathKind : std::uint8_t {
  compute,
  transfer,  ///< of a communication, behind the last arrival
  idle,      ///< nothing that the trace knows of was waited for
};

/// One stretch of the path; the rank is the one whose time it is.
struct PathSegment {
  TableIndex event = none;  ///< what ran, or what did not begin yet
  TableIndex rank = none;   ///< into Trace::ranks
  PathKind kind = PathKind::compute;
  Nanoseconds begin = 0, end = 0;  ///< aligned
};

struct CriticalPath {
  std::vector<PathSegment> segments;            ///< by time
  std::map<std::int32_t, Nanoseconds> by_rank;  ///< time on the path, by global rank
  std::map<TableIndex, Nanoseconds> by_name;    ///< of what ran, by index into Trace::names
  Nanoseconds compute = 0, transfer = 0, idle = 0;

  [[nodiscard]] Nanoseconds length() const noexcept { return compute + transfer + idle; }
};

namespace detail {

class PathWalk {
 public:
  PathWalk(const Trace& trace, const DependencyGraph& graph) : t_(trace), g_(graph) {
    by_end_.resize(t_.ranks.size());
    for (std::uint32_t i = 0; i < g_.nodes.size(); ++i) by_end_[g_.nodes[i].rank].push_back(i);
    for (auto& nodes : by_end_) {
      std::stable_sort(nodes.begin(), nodes.end(), [&](std::uint32_t a, std::uint32_t b) {
        return g_.nodes[a].end < g_.nodes[b].end;
      });
    }
  }

  CriticalPath run() {
    if (g_.nodes.empty()) return {};
    std::uint32_t at = 0;
    for (std::uint32_t i = 0; i < g_.nodes.size(); ++i) {
      if (g_.nodes[i].end > g_.nodes[at].end) at = i;
    }
    Nanoseconds until = g_.nodes[at].end;
    while (at != none) {
      if (g_.nodes[at].meeting != none) {
        for (const std::uint32_t m : g_.members(g_.nodes[at].meeting)) {
          const auto& other = g_.nodes[m];
          if (!other.passive && (g_.nodes[at].passive || other.begin > g_.nodes[at].begin)) at = m;
        }
      }
      const auto& n = g_.nodes[at];
      const bool transfers = t_.events[n.event].kind == EventKind::communication;
      add(n, transfers ? PathKind::transfer : PathKind::compute, std::min(n.begin, until), until);
      until = std::min(n.begin, until);
      const std::uint32_t before = needed_last(at, until);
      const Nanoseconds ready = before == none ? until : std::min(g_.nodes[before].end, until);
      add(n, PathKind::idle, ready, until);
      until = ready;
      at = before;
    }
    std::reverse(out_.segments.begin(), out_.segments.end());
    return std::move(out_);
  }

 private:
  void add(const DependencyGraph::Node& n, PathKind kind, Nanoseconds begin, Nanoseconds end) {
    if (end <= begin) return;
    out_.segments.push_back({n.event, n.rank, kind, begin, end});
    out_.by_rank[t_.ranks[n.rank].rank] += end - begin;
    if (kind != PathKind::idle) out_.by_name[t_.events[n.event].name] += end - begin;
    Nanoseconds& sum = kind == PathKind::idle       ? out_.idle
                       : kind == PathKind::transfer ? out_.transfer
                                                    : out_.compute;
    sum += end - begin;
  }

  /// What the operation needed last; the first of a step follows what its rank did before.
  [[nodiscard]] std::uint32_t needed_last(std::uint32_t at, Nanoseconds until) const {
    const auto& n = g_.nodes[at];
    std::uint32_t best = none;
    for (const std::uint32_t d : g_.needs(n)) {
      const auto& needed = g_.nodes[d];
      if (needed.begin >= until && needed.end >= until) continue;  // the walk only goes back
      if (best == none || needed.end > g_.nodes[best].end) best = d;
    }
    if (best != none) return best;
    const auto& own = by_end_[n.rank];
    const auto after =
        std::upper_bound(own.begin(), own.end(), until,
                         [&](Nanoseconds t, std::uint32_t i) { return t < g_.nodes[i].end; });
    for (auto i = after; i != own.begin();) {
      --i;
      if (*i != at && g_.nodes[*i].begin < until) return *i;
    }
    return none;
  }

  const Trace& t_;
  const DependencyGraph& g_;
  std::vector<std::vector<std::uint32_t>> by_end_;
  CriticalPath out_;
};

}  // namespace detail

/// Cost: linear in the path, after a sort of the operations of each rank.
[[nodiscard]] inline CriticalPath find_critical_path(const Trace& trace,
                                                     const DependencyGraph& graph) {
  return detail::PathWalk(trace, graph).run();
}

}  // namespace mega::inline v0::scan
