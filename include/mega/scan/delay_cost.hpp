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

/// Sums by key; one look into memory for each addition.
class SumTable {
 public:
  void add(std::uint64_t key, double value) {
    if (2 * (used_ + 1) > cells_.size()) grow();
    Cell& cell = find(key);
    if (cell.key == absent) {
      cell.key = key;
      ++used_;
    }
    cell.sum += value;
  }
  [[nodiscard]] std::vector<std::pair<std::uint64_t, double>> sorted() const {
    std::vector<std::pair<std::uint64_t, double>> out;
    out.reserve(used_);
    for (const Cell& c : cells_) {
      if (c.key != absent) out.emplace_back(c.key, c.sum);
    }
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  static constexpr std::uint64_t absent = ~std::uint64_t{0};
  struct Cell {
    std::uint64_t key = absent;
    double sum = 0;
  };

  [[nodiscard]] Cell& find(std::uint64_t key) {
    std::size_t at = (key * 0x9E3779B97F4A7C15ULL >> 32U) & (cells_.size() - 1);
    while (cells_[at].key != absent && cells_[at].key != key) at = (at + 1) & (cells_.size() - 1);
    return cells_[at];
  }
  void grow() {
    std::vector<Cell> old(std::max<std::size_t>(64, 2 * cells_.size()));
    std::swap(old, cells_);
    for (const Cell& c : old) {
      if (c.key != absent) find(c.key) = c;
    }
  }

  std::vector<Cell> cells_;  // a power of two, at most half of them used
  std::size_t used_ = 0;
};

class DelayReplay {
 public:
  DelayReplay(const Trace& trace, const Matches& matches, const WaitReport& waits)
      : matches_(matches), waits_(waits), sum_(trace.ranks.size(), 0) {
    const std::size_t n = trace.ranks.size();
    out_.direct.assign(n, 0);
    out_.indirect.assign(n, 0);
    out_.passed.assign(n, 0);
    history_.resize(n);
  }

  DelayCosts run() {
    std::vector<std::pair<Nanoseconds, std::size_t>> order;
    order.reserve(waits_.operations.size());
    for (std::size_t i = 0; i < waits_.operations.size(); ++i)
      order.emplace_back(waits_.operations[i].last_arrival, i);
    std::sort(order.begin(), order.end());
    std::vector<std::pair<TableIndex, Past>> made;
    for (const auto& [arrival, at] : order) {
      const OperationTiming& o = waits_.operations[at];
      const Instance& instance = matches_.instances[o.instance];
      made.clear();
      made_causes_.clear();
      for (std::size_t i = o.first_wait; i < o.first_wait + o.waits; ++i)
        made.emplace_back(waits_.waits[i].waiter, blame(instance, waits_.waits[i], arrival));
      // Only now: the members of one operation do not explain each other.
      for (auto& [rank, past] : made) remember(rank, past);
      meet(instance, arrival);
    }
    for (const auto& [pair, cost] : between_.sorted()) {
      out_.between.emplace_hint(
          out_.between.end(),
          std::pair(static_cast<TableIndex>(pair >> 32U), static_cast<TableIndex>(pair)), cost);
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
    std::uint32_t first_cause = 0, causes = 0;
  };
  struct History {
    std::vector<Past> waits;    // by end
    std::vector<Share> causes;  // of each, one after the other
  };

  /// Large operations of a group are remembered as a whole, small ones for every pair: these meet
  /// in several groups.
  void meet(const Instance& instance, Nanoseconds arrival) {
    if (instance.count > few_members) {
      met_all_[{instance.group, instance.count}] = arrival;
      return;
    }
    for (const TableIndex a : matches_.ranks_of(instance)) {
      for (const TableIndex b : matches_.ranks_of(instance)) {
        if (a < b) met_[pair_of(a, b)] = arrival;
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
    const std::vector<Past>& h = history_[rank].waits;
    const std::size_t last = ended_by(h, h.size(), to);
    return {from < to ? ended_by(h, last, from) : last, last};
  }
  /// How many of the first `count` ended by t: most questions are about the last few.
  [[nodiscard]] static std::size_t ended_by(const std::vector<Past>& h, std::size_t count,
                                            Nanoseconds t) {
    std::size_t reach = 1;
    while (reach < count && h[count - reach].end > t) reach *= 2;
    const auto at = [&](std::size_t i) { return h.begin() + static_cast<std::ptrdiff_t>(i); };
    const auto found =
        std::upper_bound(at(count - std::min(reach, count)), at(count), t,
                         [](Nanoseconds asked, const Past& p) { return asked < p.end; });
    return static_cast<std::size_t>(found - h.begin());
  }
  [[nodiscard]] double waited(TableIndex rank, std::pair<std::size_t, std::size_t> span) const {
    if (span.first == span.second) return 0;
    const std::vector<Past>& h = history_[rank].waits;
    return h[span.second - 1].total - (span.first == 0 ? 0 : h[span.first - 1].total);
  }

  /// What the rank's waits in the span go back to, in ns. The members of one operation wait for one
  /// rank and last met it at much the same time, so that the last answer serves most of them.
  const std::vector<Share>& causes_of(TableIndex rank, std::pair<std::size_t, std::size_t> span) {
    const std::tuple asked{rank, span.first, span.second};
    if (asked == answered_) return answer_;
    answered_ = asked;
    answer_.clear();
    const History& h = history_[rank];
    for (std::size_t i = span.first; i < span.second; ++i) {
      const Past& p = h.waits[i];
      for (std::size_t k = p.first_cause; k < p.first_cause + p.causes; ++k) {
        const auto [cause, share] = h.causes[k];
        if (sum_[cause] == 0) answer_.push_back({cause, 0});
        sum_[cause] += p.wait * share;
      }
    }
    for (Share& s : answer_) s.share = std::exchange(sum_[s.rank], 0);
    return answer_;
  }

  Past blame(const Instance& instance, const WaitState& w, Nanoseconds arrival) {
    const Nanoseconds from = last_met(instance, w.culprit, w.waiter);
    const auto late = within(w.culprit, from, arrival);
    const auto early = within(w.waiter, from, w.begin);
    const double wait = static_cast<double>(w.wait);
    const double theirs = waited(w.culprit, late);
    const double passed = std::clamp(theirs - waited(w.waiter, early), 0.0, wait);

    causes_.clear();
    double own = wait - passed;
    out_.direct[w.culprit] += own;
    out_.passed[w.culprit] += passed;
    if (passed > 0) {
      for (const Share& s : causes_of(w.culprit, late)) {
        const double part = passed / theirs * s.share;
        out_.indirect[s.rank] += part;
        if (s.rank == w.culprit) {
          own += part;
        } else if (part > 0) {
          causes_.push_back({s.rank, part});
        }
      }
    }
    if (own > 0) causes_.push_back({w.culprit, own});
    for (Share& s : causes_) {
      between_.add(std::uint64_t{w.waiter} << 32U | s.rank, s.share);
      s.share /= wait;
    }
    // The long tail of tiny causes is given to the others in proportion, or it would never end.
    const std::size_t kept = std::min(causes_.size(), most_causes);
    std::partial_sort(causes_.begin(), causes_.begin() + static_cast<std::ptrdiff_t>(kept),
                      causes_.end(), [](const Share& a, const Share& b) {
                        return a.share != b.share ? a.share > b.share : a.rank < b.rank;
                      });
    double sum = 0;
    for (std::size_t k = 0; k < kept; ++k) sum += causes_[k].share;
    Past made;
    made.end = arrival;
    made.wait = wait;
    made.first_cause = static_cast<std::uint32_t>(made_causes_.size());
    made.causes = static_cast<std::uint32_t>(kept);
    for (std::size_t k = 0; k < kept; ++k)
      made_causes_.push_back({causes_[k].rank, causes_[k].share / sum});
    return made;
  }

  void remember(TableIndex rank, Past past) {
    History& h = history_[rank];
    const auto from = made_causes_.begin() + past.first_cause;
    past.first_cause = static_cast<std::uint32_t>(h.causes.size());
    h.causes.insert(h.causes.end(), from, from + past.causes);
    // Operations of several streams overlap: the ledger stays in order of time.
    if (!h.waits.empty()) past.end = std::max(past.end, h.waits.back().end);
    past.total = past.wait + (h.waits.empty() ? 0 : h.waits.back().total);
    h.waits.push_back(past);
  }

  static constexpr std::size_t most_causes = 8;
  /// Up to here every pair of members of an operation is remembered.
  static constexpr std::size_t few_members = 16;
  static constexpr Nanoseconds first_time = std::numeric_limits<Nanoseconds>::min();

  const Matches& matches_;
  const WaitReport& waits_;
  std::vector<History> history_;  // by rank
  std::unordered_map<std::uint64_t, Nanoseconds> met_;
  std::map<std::pair<TableIndex, std::size_t>, Nanoseconds> met_all_;  // by group and members
  std::tuple<TableIndex, std::size_t, std::size_t> answered_{none, 0, 0};
  std::vector<Share> answer_;
  std::vector<double> sum_;  // by rank; zeros between two questions
  std::vector<Share> causes_, made_causes_;
  SumTable between_;  // by waiter and cause
  DelayCosts out_;
};

}  // namespace detail

/// Cost: O(W log W) for W waits, times the waits between two meetings.
[[nodiscard]] inline DelayCosts find_delay_costs(const Trace& trace, const Matches& matches,
                                                 const WaitReport& waits) {
  return detail::DelayReplay(trace, matches, waits).run();
}

}  // namespace mega::inline v0::scan
