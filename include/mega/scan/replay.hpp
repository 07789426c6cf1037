/// @file  Replay: what a trace's operations wait for, and what the steps would have taken had their
/// durations been others.
///
/// A trace says when, not why. An operation follows the one before it on its stream; it starts when
/// all members of its matched operation have; and it follows an operation of another stream of its
/// rank where operations of these two kinds are often the last to end before it begins. What
/// remains between the last of them and its begin is its delay: the host, or what was not recorded.
///
/// A step is replayed on its own, from the begin of its first operation, so that windows need not
/// be contiguous. One replay is one pass over the operations and their dependencies.
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// Device operations, their dependencies, and an order in which each comes behind what it needs.
struct DependencyGraph {
  struct Node {
    TableIndex event = none;
    TableIndex rank = none;                    ///< into Trace::ranks
    std::uint32_t step = 0;                    ///< into steps
    std::uint32_t meeting = none;              ///< into meetings; none: no other rank takes part
    Nanoseconds begin = 0, end = 0;            ///< aligned
    std::size_t first_needed = 0, needed = 0;  ///< into dependencies
    double work = 0;   ///< ns: duration, or of a matched operation the transfer behind the last
                       ///< arrival
    double delay = 0;  ///< ns from the end of what it needs to its begin
  };

  std::vector<Node> nodes;  ///< by rank, then by begin
  std::vector<std::uint32_t> dependencies;
  std::vector<std::vector<std::uint32_t>> meetings;  ///< nodes of each matched operation
  std::vector<std::uint32_t> order;                  ///< the members of a meeting are adjacent
  std::vector<std::int32_t> steps;
  std::size_t dropped = 0;  ///< dependencies that would have closed a circle

  [[nodiscard]] std::span<const std::uint32_t> needs(const Node& n) const noexcept {
    return std::span<const std::uint32_t>(dependencies).subspan(n.first_needed, n.needed);
  }
};

/// Times of one replay, in ns from the begin of each operation's step.
struct ReplayTimes {
  std::vector<double> begin, end;  ///< by node
  std::vector<double> step;        ///< length of each step

  [[nodiscard]] double mean_step() const {
    double sum = 0;
    for (const double s : step) sum += s;
    return step.empty() ? 0 : sum / static_cast<double>(step.size());
  }
};

namespace detail {

class GraphBuilder {
 public:
  GraphBuilder(const Trace& trace, const Matches& matches, const Alignment& alignment)
      : t_(trace), matches_(matches), alignment_(alignment) {}

  DependencyGraph run() {
    add_nodes();
    add_meetings();
    find_candidates();
    keep_binding();
    sort();
    measure();
    return std::move(out_);
  }

 private:
  using Node = DependencyGraph::Node;
  using Stream = std::pair<TableIndex, TableIndex>;  // lane; name where operations may overlap
  struct Candidate {
    std::uint32_t node, needed;
    bool same_stream;
  };

  void add_nodes() {
    std::map<std::int32_t, std::uint32_t> steps;
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      if (!occupies(e)) continue;
      Node n;
      n.event = static_cast<TableIndex>(i);
      n.rank = t_.rank_index(e);
      n.begin = alignment_.at(n.rank, e.begin);
      n.end = std::max(n.begin, alignment_.at(n.rank, e.end));
      steps.try_emplace(e.step, 0);
      out_.nodes.push_back(n);
    }
    for (auto& [step, at] : steps) {
      at = static_cast<std::uint32_t>(out_.steps.size());
      out_.steps.push_back(step);
    }
    for (Node& n : out_.nodes) n.step = steps[t_.events[n.event].step];
    std::sort(out_.nodes.begin(), out_.nodes.end(), [](const Node& a, const Node& b) {
      return std::tie(a.rank, a.step, a.begin, a.end, a.event) <
             std::tie(b.rank, b.step, b.begin, b.end, b.event);
    });
  }

  void add_meetings() {
    std::vector<std::uint32_t> node_of(t_.events.size(), none);
    for (std::size_t i = 0; i < out_.nodes.size(); ++i)
      node_of[out_.nodes[i].event] = static_cast<std::uint32_t>(i);
    for (const Instance& instance : matches_.instances) {
      std::vector<std::uint32_t> members;
      for (const TableIndex c : matches_.of(instance))
        members.push_back(node_of[t_.communications[c].event]);
      for (const std::uint32_t m : members)
        out_.nodes[m].meeting = static_cast<std::uint32_t>(out_.meetings.size());
      out_.meetings.push_back(std::move(members));
    }
  }

  /// Some files put what the host does between two kernels, as collecting garbage, on the device's
  /// lane: there it holds up what follows.
  [[nodiscard]] bool occupies(const Event& e) const {
    const bool on_device = t_.lanes[e.lane].kind == LaneKind::device;
    return is_compute(e.kind) || e.kind == EventKind::communication ||
           (on_device && (e.kind == EventKind::host_op || e.kind == EventKind::memory));
  }

  /// Communications of different kinds share a lane in some files, and overlap there.
  [[nodiscard]] Stream stream_of(const Node& n) const {
    const Event& e = t_.events[n.event];
    return {e.lane, e.kind == EventKind::communication ? e.name : none};
  }

  void find_candidates() {
    for (std::size_t first = 0; first < out_.nodes.size();) {
      std::size_t last = first;
      while (last < out_.nodes.size() && out_.nodes[last].rank == out_.nodes[first].rank &&
             out_.nodes[last].step == out_.nodes[first].step)
        ++last;
      find_candidates(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(last));
      first = last;
    }
  }

  /// Of every other stream the last operation that ended before, in one step of one rank.
  void find_candidates(std::uint32_t first, std::uint32_t last) {
    std::map<Stream, std::size_t> index;
    std::vector<std::size_t> stream(last - first);
    for (std::uint32_t i = first; i < last; ++i)
      stream[i - first] = index.try_emplace(stream_of(out_.nodes[i]), index.size()).first->second;
    std::vector<std::uint32_t> by_end(last - first);
    for (std::uint32_t i = first; i < last; ++i) by_end[i - first] = i;
    std::sort(by_end.begin(), by_end.end(), [&](std::uint32_t a, std::uint32_t b) {
      return std::pair(over(a), a) < std::pair(over(b), b);
    });
    std::vector<std::uint32_t> ended(index.size(), none), before(index.size(), none);
    std::size_t next = 0;
    for (std::uint32_t i = first; i < last; ++i) {
      const Node& n = out_.nodes[i];
      for (; next < by_end.size() && over(by_end[next]) <= n.begin + slack(n); ++next)
        ended[stream[by_end[next] - first]] = by_end[next];
      const std::size_t own = stream[i - first];
      if (before[own] != none) candidates_.push_back({i, before[own], true});
      before[own] = i;
      for (std::size_t s = 0; s < ended.size(); ++s) {
        // Ends that are equal, or nearly so, do not make an operation wait for a later one; and
        // what is sent is needed elsewhere.
        if (s != own && ended[s] != none && ended[s] < i && !sends(ended[s]))
          candidates_.push_back({i, ended[s], false});
      }
    }
  }

  [[nodiscard]] bool sends(std::uint32_t node) const {
    const Event& e = t_.events[out_.nodes[node].event];
    return e.detail != none && e.kind == EventKind::communication &&
           t_.communications[e.detail].op == CommunicationOp::send;
  }

  /// A dependency between kinds of operations is one that is often the last to be fulfilled.
  void keep_binding() {
    struct Evidence {
      std::size_t seen = 0, binding = 0;
    };
    std::map<std::pair<TableIndex, TableIndex>, Evidence> kinds;
    const auto kind = [&](const Candidate& c) -> Evidence& {
      return kinds[{t_.events[out_.nodes[c.needed].event].name,
                    t_.events[out_.nodes[c.node].event].name}];
    };
    for (std::size_t i = 0; i < candidates_.size();) {
      std::size_t end = i;
      Nanoseconds latest = std::numeric_limits<Nanoseconds>::min();
      for (; end < candidates_.size() && candidates_[end].node == candidates_[i].node; ++end)
        latest = std::max(latest, out_.nodes[candidates_[end].needed].end);
      for (; i < end; ++i) {
        Evidence& e = kind(candidates_[i]);
        ++e.seen;
        e.binding += out_.nodes[candidates_[i].needed].end == latest ? 1 : 0;
      }
    }
    for (std::size_t i = 0; i < candidates_.size();) {
      Node& n = out_.nodes[candidates_[i].node];
      n.first_needed = out_.dependencies.size();
      const std::uint32_t node = candidates_[i].node;
      for (; i < candidates_.size() && candidates_[i].node == node; ++i) {
        const Evidence& e = kind(candidates_[i]);
        if (candidates_[i].same_stream || e.binding * 20 >= e.seen)
          out_.dependencies.push_back(candidates_[i].needed);
      }
      n.needed = out_.dependencies.size() - n.first_needed;
    }
    candidates_ = {};
  }

  /// Kahn's order, over meetings as wholes.
  void sort() {
    const std::size_t n = out_.nodes.size();
    std::vector<std::uint32_t> missing(n + out_.meetings.size(), 0);
    std::vector<std::vector<std::uint32_t>> followers(n);
    const auto whole = [&](std::uint32_t node) {
      const std::uint32_t meeting = out_.nodes[node].meeting;
      return meeting == none ? node : static_cast<std::uint32_t>(n) + meeting;
    };
    for (std::uint32_t i = 0; i < n; ++i) {
      for (const std::uint32_t d : out_.needs(out_.nodes[i])) {
        followers[d].push_back(i);
        ++missing[whole(i)];
      }
    }
    std::vector<char> done(n + out_.meetings.size(), 0);
    std::vector<std::uint32_t> ready;
    const auto finish = [&](std::uint32_t node) {
      out_.order.push_back(node);
      for (const std::uint32_t f : followers[node]) {
        if (--missing[whole(f)] == 0) ready.push_back(whole(f));
      }
    };
    const auto drain = [&] {
      while (!ready.empty()) {
        const std::uint32_t at = ready.back();
        ready.pop_back();
        if (done[at] != 0) continue;
        done[at] = 1;
        if (at < n) {
          finish(at);
        } else {
          for (const std::uint32_t m : out_.meetings[at - n]) finish(m);
        }
      }
    };
    for (std::uint32_t i = 0; i < n; ++i) {
      if (missing[whole(i)] == 0) ready.push_back(whole(i));
    }
    drain();
    // Clocks that contradict the order leave circles: they are opened at the earliest operation.
    std::vector<std::uint32_t> left;
    for (std::uint32_t i = 0; i < n; ++i) {
      if (done[whole(i)] == 0) left.push_back(i);
    }
    std::sort(left.begin(), left.end(), [&](std::uint32_t a, std::uint32_t b) {
      return std::tie(out_.nodes[a].begin, a) < std::tie(out_.nodes[b].begin, b);
    });
    for (const std::uint32_t i : left) {
      if (done[whole(i)] != 0) continue;
      out_.dropped += missing[whole(i)];
      ready.push_back(whole(i));
      drain();
    }
    // What an opened operation still needs but comes behind it must not be read.
    if (out_.dropped == 0) return;
    std::vector<std::uint32_t> place(n);
    for (std::uint32_t i = 0; i < n; ++i) place[out_.order[i]] = i;
    const auto first_place = [&](std::uint32_t node) {
      const std::uint32_t meeting = out_.nodes[node].meeting;
      return place[meeting == none ? node : out_.meetings[meeting].front()];
    };
    for (std::uint32_t i = 0; i < n; ++i) {
      Node& node = out_.nodes[i];
      std::size_t kept = 0;
      for (std::size_t k = 0; k < node.needed; ++k) {
        const std::uint32_t d = out_.dependencies[node.first_needed + k];
        if (place[d] < first_place(i)) out_.dependencies[node.first_needed + kept++] = d;
      }
      node.needed = kept;
    }
  }

  void measure() {
    std::vector<Nanoseconds> step_begin(out_.steps.size(), std::numeric_limits<Nanoseconds>::max());
    for (const Node& n : out_.nodes) step_begin[n.step] = std::min(step_begin[n.step], n.begin);
    for (Node& n : out_.nodes) {
      Nanoseconds ready = step_begin[n.step];
      for (const std::uint32_t d : out_.needs(n)) ready = std::max(ready, out_.nodes[d].end);
      n.delay = static_cast<double>(std::max<Nanoseconds>(0, n.begin - ready));
      Nanoseconds start = n.begin;
      if (n.meeting != none) {
        for (const std::uint32_t m : out_.meetings[n.meeting])
          start = std::max(start, out_.nodes[m].begin);
      }
      n.work = static_cast<double>(std::max<Nanoseconds>(0, n.end - start));
    }
  }

  /// How far stamps of two streams may contradict each other: where operations are phases of many
  /// milliseconds, their stamps are as coarse.
  [[nodiscard]] static Nanoseconds slack(const Node& n) {
    return std::clamp<Nanoseconds>((n.end - n.begin) / 500, 500, 150'000);
  }
  [[nodiscard]] Nanoseconds over(std::uint32_t node) const {
    return out_.nodes[node].end - slack(out_.nodes[node]);
  }

  const Trace& t_;
  const Matches& matches_;
  const Alignment& alignment_;
  std::vector<Candidate> candidates_;
  DependencyGraph out_;
};

}  // namespace detail

/// Cost: O(E log E) for E device operations, times the streams of a rank.
[[nodiscard]] inline DependencyGraph build_dependencies(const Trace& trace, const Matches& matches,
                                                        const Alignment& alignment) {
  return detail::GraphBuilder(trace, matches, alignment).run();
}

/// Replays every step with `work[i]` ns for node i; delays count where `delayed`.
/// @pre work.size() == graph.nodes.size(). Cost: O(V + E).
inline void replay(const DependencyGraph& graph, std::span<const double> work, bool delayed,
                   ReplayTimes& out) {
  out.begin.assign(graph.nodes.size(), 0);
  out.end.assign(graph.nodes.size(), 0);
  out.step.assign(graph.steps.size(), 0);
  for (std::size_t i = 0; i < graph.order.size();) {
    const std::uint32_t meeting = graph.nodes[graph.order[i]].meeting;
    const std::size_t count = meeting == none ? 1 : graph.meetings[meeting].size();
    double start = 0;
    for (std::size_t k = i; k < i + count; ++k) {
      const DependencyGraph::Node& n = graph.nodes[graph.order[k]];
      double ready = 0;
      for (const std::uint32_t d : graph.needs(n)) ready = std::max(ready, out.end[d]);
      if (delayed) ready += n.delay;
      out.begin[graph.order[k]] = ready;
      start = std::max(start, ready);
    }
    for (const std::size_t last = i + count; i < last; ++i) {
      const std::uint32_t at = graph.order[i];
      out.end[at] = start + work[at];
      double& step = out.step[graph.nodes[at].step];
      step = std::max(step, out.end[at]);
    }
  }
}

}  // namespace mega::inline v0::scan
