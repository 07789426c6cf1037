/// @file  Delay costs: whose delays all the waiting goes back to, through every group.
///
/// The rank that is waited for is not always the one to blame: it may be late because it waited
/// itself. For each wait the time of the late rank since the two last met is looked at. As much of
/// the lateness as it waited more than the waiter did is passed on to whom it waited for, in the
/// shares in which their causes were found; the rest is its own. Waits are taken in order of time,
/// so that a cause is known before it is passed on, through data, tensor and pipeline groups alike.
/// After Scalasca's delay analysis (Boehme et al., Identifying the Root Causes of Wait States in
/// Large-Scale Parallel Applications, ICPP 2010).
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/wait_states.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// By index into Trace::ranks, in ns. The sum of direct and indirect over all ranks is all that
/// was waited.
struct DelayCosts {
  std::vector<double> direct;    ///< waits of ranks that waited for this one
  std::vector<double> indirect;  ///< waits further on that go back to it
  std::vector<double> passed;    ///< waits for it that are not its fault
  /// What the waits of a rank (first) cost it because of another (second).
  std::map<std::pair<TableIndex, TableIndex>, double> between;

  [[nodiscard]] double cost(TableIndex rank) const { return direct[rank] + indirect[rank]; }
};

namespace detail {

class DelayReplay {
 public:
  DelayReplay(const Trace& trace, const Matches& matches, const Alignment& alignment,
              const WaitReport& waits)
      : t_(trace), matches_(matches), alignment_(alignment), waits_(waits) {
    const std::size_t n = trace.ranks.size();
    out_.direct.assign(n, 0);
    out_.indirect.assign(n, 0);
    out_.passed.assign(n, 0);
    history_.resize(n);
  }

  DelayCosts run() {
    std::vector<const WaitState*> of_call(t_.communications.size(), nullptr);
    for (const WaitState& w : waits_.waits) of_call[w.communication] = &w;
    std::vector<const OperationTiming*> order;
    for (const OperationTiming& o : waits_.operations) order.push_back(&o);
    std::stable_sort(order.begin(), order.end(),
                     [](const OperationTiming* a, const OperationTiming* b) {
                       return a->last_arrival < b->last_arrival;
                     });
    std::vector<std::pair<TableIndex, Past>> made;
    for (const OperationTiming* o : order) {
      const Instance& instance = matches_.instances[o->instance];
      made.clear();
      for (const TableIndex c : matches_.of(instance)) {
        if (of_call[c] == nullptr) continue;
        const WaitState& w = *of_call[c];
        made.emplace_back(rank_of(c), blame(instance, w, rank_of(c), begin_of(c), o->last_arrival));
      }
      // Only now: the members of one operation do not explain each other.
      for (auto& [rank, past] : made) remember(rank, std::move(past));
      meet(instance, o->last_arrival);
    }
    return std::move(out_);
  }

 private:
  struct Share {
    TableIndex rank;
    double share;
  };
  /// A wait that is over, and the ranks that it goes back to.
  struct Past {
    Nanoseconds end = 0;  // last arrival
    double wait = 0;
    double total = 0;  // of all waits of the rank up to and with this one
    std::vector<Share> causes;
  };

  [[nodiscard]] TableIndex rank_of(TableIndex call) const {
    return t_.rank_index(t_.events[t_.communications[call].event]);
  }
  [[nodiscard]] Nanoseconds begin_of(TableIndex call) const {
    return alignment_.at(rank_of(call), t_.events[t_.communications[call].event].begin);
  }

  /// Large operations of a group are remembered as a whole, small ones for every pair: these meet
  /// in several groups.
  void meet(const Instance& instance, Nanoseconds arrival) {
    if (instance.count > few_members) {
      met_all_[{instance.group, instance.count}] = arrival;
      return;
    }
    for (const TableIndex a : matches_.of(instance)) {
      for (const TableIndex b : matches_.of(instance)) {
        if (rank_of(a) < rank_of(b)) met_[pair_of(rank_of(a), rank_of(b))] = arrival;
      }
    }
  }
  [[nodiscard]] static std::uint64_t pair_of(TableIndex a, TableIndex b) {
    return std::uint64_t{std::min(a, b)} << 32U | std::max(a, b);
  }
  /// When the two last met before this operation.
  [[nodiscard]] Nanoseconds last_met(const Instance& instance, TableIndex a, TableIndex b) const {
    Nanoseconds out = first_time;
    if (const auto at = met_.find(pair_of(a, b)); at != met_.end()) out = at->second;
    const auto all = met_all_.find({instance.group, instance.count});
    return all == met_all_.end() ? out : std::max(out, all->second);
  }

  /// Waits of the rank that ended in (from, to].
  [[nodiscard]] std::pair<std::size_t, std::size_t> within(TableIndex rank, Nanoseconds from,
                                                           Nanoseconds to) const {
    const std::vector<Past>& h = history_[rank];
    const auto behind = [](Nanoseconds t, const Past& p) { return t < p.end; };
    const auto first = std::upper_bound(h.begin(), h.end(), from, behind);
    const auto last = std::upper_bound(first, h.end(), to, behind);
    return {static_cast<std::size_t>(first - h.begin()),
            static_cast<std::size_t>(last - h.begin())};
  }
  [[nodiscard]] double waited(TableIndex rank, std::pair<std::size_t, std::size_t> span) const {
    if (span.first == span.second) return 0;
    const std::vector<Past>& h = history_[rank];
    return h[span.second - 1].total - (span.first == 0 ? 0 : h[span.first - 1].total);
  }

  /// What the rank's waits in the span go back to, in ns. The members of one operation wait for one
  /// rank and last met it at much the same time, so that the last answer serves most of them.
  const std::vector<Share>& causes_of(TableIndex rank, std::pair<std::size_t, std::size_t> span) {
    const std::tuple asked{rank, span.first, span.second};
    if (asked == answered_) return answer_;
    answered_ = asked;
    std::map<TableIndex, double> sum;
    for (std::size_t i = span.first; i < span.second; ++i) {
      const Past& p = history_[rank][i];
      for (const Share& s : p.causes) sum[s.rank] += p.wait * s.share;
    }
    answer_.clear();
    for (const auto& [cause, cost] : sum) answer_.push_back({cause, cost});
    return answer_;
  }

  Past blame(const Instance& instance, const WaitState& w, TableIndex waiter, Nanoseconds begin,
             Nanoseconds arrival) {
    const Nanoseconds from = last_met(instance, w.culprit, waiter);
    const auto late = within(w.culprit, from, arrival);
    const auto early = within(waiter, from, begin);
    const double wait = static_cast<double>(w.wait);
    const double theirs = waited(w.culprit, late);
    const double passed = std::clamp(theirs - waited(waiter, early), 0.0, wait);

    std::map<TableIndex, double> causes;
    causes[w.culprit] += wait - passed;
    out_.direct[w.culprit] += wait - passed;
    out_.passed[w.culprit] += passed;
    if (passed > 0) {
      for (const Share& s : causes_of(w.culprit, late)) {
        const double part = passed / theirs * s.share;
        out_.indirect[s.rank] += part;
        causes[s.rank] += part;
      }
    }
    Past made;
    made.end = arrival;
    made.wait = wait;
    for (const auto& [rank, cost] : causes) {
      if (cost <= 0) continue;
      out_.between[{waiter, rank}] += cost;
      made.causes.push_back({rank, cost / wait});
    }
    // The long tail of tiny causes is given to the others in proportion, or it would never end.
    std::sort(made.causes.begin(), made.causes.end(),
              [](const Share& a, const Share& b) { return a.share > b.share; });
    if (made.causes.size() > most_causes) made.causes.resize(most_causes);
    double kept = 0;
    for (const Share& s : made.causes) kept += s.share;
    for (Share& s : made.causes) s.share /= kept;
    return made;
  }

  void remember(TableIndex rank, Past past) {
    std::vector<Past>& h = history_[rank];
    // Operations of several streams overlap: the ledger stays in order of time.
    past.end = h.empty() ? past.end : std::max(past.end, h.back().end);
    past.total = past.wait + (h.empty() ? 0 : h.back().total);
    h.push_back(std::move(past));
  }

  static constexpr std::size_t most_causes = 8;
  /// Up to here every pair of members of an operation is remembered.
  static constexpr std::size_t few_members = 16;
  static constexpr Nanoseconds first_time = std::numeric_limits<Nanoseconds>::min();

  const Trace& t_;
  const Matches& matches_;
  const Alignment& alignment_;
  const WaitReport& waits_;
  std::vector<std::vector<Past>> history_;
  std::unordered_map<std::uint64_t, Nanoseconds> met_;
  std::map<std::pair<TableIndex, std::size_t>, Nanoseconds> met_all_;  // by group and members
  std::tuple<TableIndex, std::size_t, std::size_t> answered_{none, 0, 0};
  std::vector<Share> answer_;
  DelayCosts out_;
};

}  // namespace detail

/// Cost: O(W log W) for W waits, times the waits between two meetings.
[[nodiscard]] inline DelayCosts find_delay_costs(const Trace& trace, const Matches& matches,
                                                 const Alignment& alignment,
                                                 const WaitReport& waits) {
  return detail::DelayReplay(trace, matches, alignment, waits).run();
}

}  // namespace mega::inline v0::scan
