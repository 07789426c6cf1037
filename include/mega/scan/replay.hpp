/// @file  Replay: what a trace's operations wait for, and what the steps would have taken had their
/// durations been others.
///
/// A trace says when, not why. An operation follows the one before it on its stream; it starts when
/// all members of its matched operation have; and it follows an operation of another stream of its
/// rank where operations of these two kinds are often the last to end before it begins. What
/// remains between the last of them and its begin is its delay: the host, or what was not recorded.
/// What is sent is needed elsewhere, and a receive that begins together with its send was stamped
/// when the transfer began, so that its begin does not tell what its rank did before.
///
/// A step is replayed on its own, from the begin of its first operation, so that windows need not
/// be contiguous. One replay is one pass over the operations and their dependencies.
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/detail/own_time.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// Device operations, their dependencies, and an order in which each comes behind what it needs. A
/// computation that holds others, as a layer its products, is no operation: they are, and what lies
/// between them is delay. One that holds only communications is as many as they leave of it.
struct DependencyGraph {
  struct Node {
    TableIndex event = none;         ///< of several nodes where it is in parts
    TableIndex rank = none;          ///< into Trace::ranks
    std::uint32_t step = 0;          ///< into steps
    std::uint32_t meeting = none;    ///< into meetings; none: no other rank takes part
    Nanoseconds begin = 0, end = 0;  ///< aligned
    std::size_t first_needed = 0;    ///< into dependencies
    std::uint32_t needed = 0;
    bool passive = false;  ///< a receive that begins together with its send: it waits for nothing
                           ///< else
    double work = 0;       ///< ns: duration, or of a matched operation the transfer behind the last
                           ///< arrival
    double delay = 0;      ///< ns from the end of what it needs to its begin
  };

  std::vector<Node> nodes;  ///< by rank, then by step, then by begin
  std::vector<std::uint32_t> dependencies;
  std::vector<std::uint32_t> meeting_members;  ///< nodes of matched operations, one after the other
  std::vector<std::size_t> meeting_ends{0};    ///< into meeting_members: [m], [m + 1] of meeting m
  std::vector<std::uint32_t> order;            ///< the members of a meeting are adjacent
  std::vector<std::int32_t> steps;             ///< sorted
  std::size_t dropped = 0;                     ///< dependencies that would have closed a circle

  [[nodiscard]] std::span<const std::uint32_t> needs(const Node& n) const noexcept {
    return std::span<const std::uint32_t>(dependencies).subspan(n.first_needed, n.needed);
  }
  [[nodiscard]] std::size_t meetings() const noexcept { return meeting_ends.size() - 1; }
  [[nodiscard]] std::span<const std::uint32_t> members(std::size_t meeting) const noexcept {
    return std::span<const std::uint32_t>(meeting_members)
        .subspan(meeting_ends[meeting], meeting_ends[meeting + 1] - meeting_ends[meeting]);
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
  struct Candidate {
    std::uint32_t node, needed;
    std::uint32_t kinds;  // into evidence_; none: the same stream
  };
  /// How often a dependency between two kinds of operations was possible, and the last fulfilled.
  struct Evidence {
    std::size_t seen = 0, binding = 0;
  };
  /// What is asked of a node's event again and again.
  struct Trait {
    TableIndex name;
    TableIndex lane;
    bool communicates, sends, receives;
  };

  void add_nodes() {
    std::vector<Part> found;
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      if (occupies(e)) found.push_back({static_cast<TableIndex>(i), e.begin, e.end});
    }
    found = OwnTime::of(t_, std::move(found));
    for (const Part& part : found) {
      const std::int32_t step = t_.events[part.event].step;
      if (out_.steps.empty() || out_.steps.back() != step) out_.steps.push_back(step);
    }
    std::sort(out_.steps.begin(), out_.steps.end());
    out_.steps.erase(std::unique(out_.steps.begin(), out_.steps.end()), out_.steps.end());

    // A bucket for each step of each rank; inside one by time.
    const std::size_t steps = out_.steps.size();
    slices_.assign(t_.ranks.size() * steps + 1, 0);
    std::vector<std::uint32_t> bucket(found.size());
    std::uint32_t step = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const Event& e = t_.events[found[i].event];
      if (out_.steps[step] != e.step) {
        step = static_cast<std::uint32_t>(
            std::lower_bound(out_.steps.begin(), out_.steps.end(), e.step) - out_.steps.begin());
      }
      bucket[i] = static_cast<std::uint32_t>(t_.rank_index(e) * steps + step);
      ++slices_[bucket[i] + 1];
    }
    std::partial_sum(slices_.begin(), slices_.end(), slices_.begin());
    out_.nodes.resize(found.size());
    std::vector<std::uint32_t> next(slices_.begin(), slices_.end() - 1);
    for (std::size_t i = 0; i < found.size(); ++i) {
      Node& n = out_.nodes[next[bucket[i]]++];
      n.event = found[i].event;
      n.rank = t_.rank_index(t_.events[n.event]);
      n.step = static_cast<std::uint32_t>(bucket[i] % steps);
      n.begin = alignment_.at(n.rank, found[i].begin);
      n.end = std::max(n.begin, alignment_.at(n.rank, found[i].end));
    }
    const auto at = [&](std::uint32_t i) {
      return out_.nodes.begin() + static_cast<std::ptrdiff_t>(i);
    };
    for (std::size_t s = 0; s + 1 < slices_.size(); ++s) {
      std::sort(at(slices_[s]), at(slices_[s + 1]), [](const Node& a, const Node& b) {
        return std::tie(a.begin, a.end, a.event) < std::tie(b.begin, b.end, b.event);
      });
    }
    traits_.reserve(out_.nodes.size());
    for (const Node& n : out_.nodes) {
      const Event& e = t_.events[n.event];
      const bool communicates = e.kind == EventKind::communication;
      const CommunicationOp op = communicates && e.detail != none ? t_.communications[e.detail].op
                                                                  : CommunicationOp::unknown;
      traits_.push_back(
          {e.name, e.lane, communicates, op == CommunicationOp::send, op == CommunicationOp::recv});
    }
  }

  void add_meetings() {
    std::vector<std::uint32_t> node_of(t_.events.size(), none);
    for (std::size_t i = 0; i < out_.nodes.size(); ++i)
      node_of[out_.nodes[i].event] = static_cast<std::uint32_t>(i);
    out_.meeting_members.reserve(matches_.members.size());
    out_.meeting_ends.reserve(matches_.instances.size() + 1);
    for (const Instance& instance : matches_.instances) {
      const auto meeting = static_cast<std::uint32_t>(out_.meetings());
      for (const TableIndex c : matches_.of(instance)) {
        const std::uint32_t member = node_of[t_.communications[c].event];
        out_.nodes[member].meeting = meeting;
        out_.meeting_members.push_back(member);
      }
      out_.meeting_ends.push_back(out_.meeting_members.size());
    }
    for (std::uint32_t i = 0; i < out_.nodes.size(); ++i)
      out_.nodes[i].passive = begins_with_its_send(i);
  }

  /// Some files put what the host does between two kernels, as collecting garbage, on the device's
  /// lane: there it holds up what follows.
  [[nodiscard]] bool occupies(const Event& e) const {
    const bool on_device = t_.lanes[e.lane].kind == LaneKind::device;
    return is_compute(e.kind) || e.kind == EventKind::communication ||
           (on_device && (e.kind == EventKind::host_op || e.kind == EventKind::memory));
  }

  void find_candidates() {
    candidates_.reserve(4 * out_.nodes.size());
    for (std::size_t s = 0; s + 1 < slices_.size(); ++s)
      find_candidates(slices_[s], slices_[s + 1]);
  }

  /// Of every other stream the last operation that ended before, in one step of one rank.
  void find_candidates(std::uint32_t first, std::uint32_t last) {
    assign_streams(first, last);
    by_end_.resize(last - first);
    std::iota(by_end_.begin(), by_end_.end(), first);
    std::sort(by_end_.begin(), by_end_.end(), [&](std::uint32_t a, std::uint32_t b) {
      return std::pair(over(a), a) < std::pair(over(b), b);
    });
    ended_.assign(streams_.size(), none);
    before_.assign(streams_.size(), none);
    early_.clear();
    const auto take = [&](std::uint32_t node) {
      std::uint32_t& latest = ended_[stream_[node - first]];
      if (latest == none || over(latest) <= over(node)) latest = node;
    };
    std::size_t next = 0;
    for (std::uint32_t i = first; i < last; ++i) {
      const Node& n = out_.nodes[i];
      // Ends that are equal, or nearly so, do not make an operation wait for a later one: what has
      // not begun is kept for those behind it, and does not hide what ended before.
      std::erase_if(early_, [&](std::uint32_t node) {
        if (node >= i) return false;
        take(node);
        return true;
      });
      for (; next < by_end_.size() && over(by_end_[next]) <= n.begin + slack(n); ++next) {
        if (by_end_[next] < i) {
          take(by_end_[next]);
        } else {
          early_.push_back(by_end_[next]);
        }
      }
      const std::uint32_t own = stream_[i - first];
      if (before_[own] != none) candidates_.push_back({i, before_[own], none});
      before_[own] = i;
      if (n.passive) continue;
      for (std::uint32_t s = 0; s < ended_.size(); ++s) {
        if (s != own && ended_[s] != none && !traits_[ended_[s]].sends)
          candidates_.push_back({i, ended_[s], kinds_of(ended_[s], i)});
      }
    }
  }

  /// A stream is a lane; communications of different kinds share one in some files, and overlap
  /// there.
  void assign_streams(std::uint32_t first, std::uint32_t last) {
    streams_.clear();
    stream_.resize(last - first);
    for (std::uint32_t i = first; i < last; ++i) {
      const std::pair stream{traits_[i].lane, traits_[i].communicates ? traits_[i].name : none};
      const auto at = std::find(streams_.begin(), streams_.end(), stream);
      stream_[i - first] = static_cast<std::uint32_t>(at - streams_.begin());
      if (at == streams_.end()) streams_.push_back(stream);
    }
  }

  [[nodiscard]] bool begins_with_its_send(std::uint32_t node) const {
    const Node& n = out_.nodes[node];
    if (!traits_[node].receives || n.meeting == none) return false;
    const auto members = out_.members(n.meeting);
    return std::all_of(members.begin(), members.end(), [&](std::uint32_t m) {
      const Nanoseconds apart = out_.nodes[m].begin - n.begin;
      return apart <= slack(n) && -apart <= slack(n);
    });
  }

  std::uint32_t kinds_of(std::uint32_t needed, std::uint32_t node) {
    const std::uint64_t key = std::uint64_t{traits_[needed].name} << 32U | traits_[node].name;
    // Few pairs make up nearly all: they are found without a search.
    auto& [known, at] = recent_[(traits_[needed].name * 31U + traits_[node].name) % recent_.size()];
    if (at != none && known == key) return at;
    known = key;
    at = kinds_.try_emplace(key, static_cast<std::uint32_t>(kinds_.size())).first->second;
    evidence_.resize(kinds_.size());
    return at;
  }

  /// A dependency between kinds of operations is one that is often the last to be fulfilled.
  void keep_binding() {
    for (std::size_t i = 0; i < candidates_.size();) {
      std::size_t end = i;
      Nanoseconds latest = std::numeric_limits<Nanoseconds>::min();
      for (; end < candidates_.size() && candidates_[end].node == candidates_[i].node; ++end)
        latest = std::max(latest, out_.nodes[candidates_[end].needed].end);
      for (; i < end; ++i) {
        const Candidate& c = candidates_[i];
        const std::uint32_t kinds = c.kinds == none ? kinds_of(c.needed, c.node) : c.kinds;
        ++evidence_[kinds].seen;
        evidence_[kinds].binding += out_.nodes[c.needed].end == latest ? 1 : 0;
      }
    }
    out_.dependencies.reserve(candidates_.size());
    for (std::size_t i = 0; i < candidates_.size();) {
      Node& n = out_.nodes[candidates_[i].node];
      n.first_needed = out_.dependencies.size();
      const std::uint32_t node = candidates_[i].node;
      for (; i < candidates_.size() && candidates_[i].node == node; ++i) {
        const Candidate& c = candidates_[i];
        if (c.kinds == none || evidence_[c.kinds].binding * 20 >= evidence_[c.kinds].seen)
          out_.dependencies.push_back(c.needed);
      }
      n.needed = static_cast<std::uint32_t>(out_.dependencies.size() - n.first_needed);
    }
    candidates_ = {};
  }

  /// Kahn's order, over meetings as wholes.
  void sort() {
    const std::size_t n = out_.nodes.size();
    std::vector<std::uint32_t> missing(n + out_.meetings(), 0);
    std::vector<std::size_t> follower_ends(n + 1, 0);
    std::vector<std::uint32_t> followers(out_.dependencies.size());
    const auto whole = [&](std::uint32_t node) {
      const std::uint32_t meeting = out_.nodes[node].meeting;
      return meeting == none ? node : static_cast<std::uint32_t>(n) + meeting;
    };
    for (const std::uint32_t d : out_.dependencies) ++follower_ends[d];
    std::partial_sum(follower_ends.begin(), follower_ends.end(), follower_ends.begin());
    for (auto i = static_cast<std::uint32_t>(n); i-- > 0;) {
      for (const std::uint32_t d : out_.needs(out_.nodes[i])) {
        followers[--follower_ends[d]] = i;
        ++missing[whole(i)];
      }
    }
    std::vector<char> done(n + out_.meetings(), 0);
    std::vector<std::uint32_t> ready;
    out_.order.reserve(n);
    const auto finish = [&](std::uint32_t node) {
      out_.order.push_back(node);
      for (std::size_t k = follower_ends[node]; k < follower_ends[node + 1]; ++k) {
        const std::uint32_t f = whole(followers[k]);
        if (--missing[f] == 0) ready.push_back(f);
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
          for (const std::uint32_t m : out_.members(at - n)) finish(m);
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
      return place[meeting == none ? node : out_.members(meeting).front()];
    };
    for (std::uint32_t i = 0; i < n; ++i) {
      Node& node = out_.nodes[i];
      std::uint32_t kept = 0;
      for (std::uint32_t k = 0; k < node.needed; ++k) {
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
      n.delay = n.passive ? 0 : static_cast<double>(std::max<Nanoseconds>(0, n.begin - ready));
      Nanoseconds start = n.begin;
      if (n.meeting != none) {
        for (const std::uint32_t m : out_.members(n.meeting))
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
  std::vector<std::uint32_t> slices_;  // of nodes: a step of a rank from [s] to [s + 1]
  std::vector<Trait> traits_;          // by node
  std::vector<Candidate> candidates_;
  std::vector<Evidence> evidence_;
  std::unordered_map<std::uint64_t, std::uint32_t> kinds_;  // pairs of names, into evidence_
  std::vector<std::pair<std::uint64_t, std::uint32_t>> recent_{4096, {0, none}};
  // Of the slice at hand: streams, the stream of each node, nodes by end; by stream the last that
  // ended and the last that began; what ended while it had not begun.
  std::vector<std::pair<TableIndex, TableIndex>> streams_;
  std::vector<std::uint32_t> stream_, by_end_, ended_, before_, early_;
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
    const std::size_t count = meeting == none ? 1 : graph.members(meeting).size();
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
