/// @file  Matching: which communication events of different ranks are one operation.
///
/// The key is (group, operation, sequence number) where the file recorded all three. Where it did
/// not, the series of operations that each rank ran in a group are laid side by side: every
/// operation has a signature (operation, dtype, bytes), windows of ranks may begin at different
/// points, and the shift is the one at which the most signatures agree. Ranks without group names
/// are taken as one group. What found no partner is reported, not guessed.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// One operation of several ranks.
struct Instance {
  CommunicationOp op = CommunicationOp::unknown;
  TableIndex group = none;    ///< into Trace::groups; none: all ranks of the trace
  std::int64_t sequence = 0;  ///< as recorded, or the position in the aligned series
  std::size_t first = 0;      ///< into Matches::members
  std::size_t count = 0;
};

struct Matches {
  std::vector<Instance> instances;    ///< by the earliest begin of their members' own clocks
  std::vector<TableIndex> members;    ///< communication indices, by rank inside an instance
  std::vector<TableIndex> ranks;      ///< of each member, into Trace::ranks
  std::vector<TableIndex> leftovers;  ///< communications without a partner
  std::vector<std::string> notes;     ///< sentences: what was matched by order, and how well
  std::int64_t by_sequence = 0;       ///< instances whose key was recorded
  std::int64_t by_signature = 0;      ///< instances matched by order

  [[nodiscard]] std::span<const TableIndex> of(const Instance& i) const noexcept {
    return std::span<const TableIndex>(members).subspan(i.first, i.count);
  }
  [[nodiscard]] std::span<const TableIndex> ranks_of(const Instance& i) const noexcept {
    return std::span<const TableIndex>(ranks).subspan(i.first, i.count);
  }
};

namespace detail {

/// The operations of one rank in one series, in the order in which the rank began them.
struct Series {
  TableIndex rank = none;
  std::vector<TableIndex> calls;  // communication indices
};

/// What must be equal for two calls to be one operation: op, dtype, bytes. Members of an all-to-all
/// or of a batch of sends may carry different sizes.
[[nodiscard]] inline std::uint64_t signature(const Communication& c) noexcept {
  const bool sized = c.op == CommunicationOp::all_reduce || c.op == CommunicationOp::broadcast ||
                     c.op == CommunicationOp::reduce;
  const std::uint64_t bytes = sized ? static_cast<std::uint64_t>(c.bytes + 1) : 0;
  return (bytes << 8U | static_cast<std::uint64_t>(c.op)) * 0x9E3779B97F4A7C15ULL ^ c.dtype;
}

class Matcher {
 public:
  explicit Matcher(const Trace& trace) : t_(trace) {}

  Matches run() {
    for (std::size_t i = 0; i < t_.communications.size(); ++i) sort_in(static_cast<TableIndex>(i));
    for (auto& [key, calls] : recorded_) finish_recorded(key, calls);
    for (auto& [key, ranks] : by_order_) finish_series(key, ranks);
    for (auto& [key, ends] : pairs_) finish_pair(key, ends);
    sort_instances();
    std::sort(out_.leftovers.begin(), out_.leftovers.end());
    if (!out_.leftovers.empty()) {
      out_.notes.push_back(sentence(out_.leftovers.size(), " of ", t_.communications.size(),
                                    " communications have no partner in the files given"));
    }
    return std::move(out_);
  }

 private:
  using RecordedKey = std::tuple<TableIndex, CommunicationOp, std::int64_t>;
  using SeriesKey = std::pair<TableIndex, bool>;  // group; batches of sends apart from collectives
  using PairKey = std::tuple<TableIndex, std::int32_t, std::int32_t>;  // group, source, destination
  struct Ends {
    std::vector<TableIndex> sends, recvs;
  };

  [[nodiscard]] const Communication& call(TableIndex i) const { return t_.communications[i]; }
  [[nodiscard]] const Event& event(TableIndex i) const { return t_.events[call(i).event]; }
  [[nodiscard]] TableIndex rank_of(TableIndex i) const { return t_.rank_index(event(i)); }
  [[nodiscard]] Nanoseconds begin(const Instance& i) const {
    Nanoseconds earliest = event(out_.members[i.first]).begin;
    for (const TableIndex m : out_.of(i)) earliest = std::min(earliest, event(m).begin);
    return earliest;
  }

  void sort_instances() {
    std::vector<std::pair<Nanoseconds, std::size_t>> order;
    order.reserve(out_.instances.size());
    for (std::size_t i = 0; i < out_.instances.size(); ++i)
      order.emplace_back(begin(out_.instances[i]), i);
    std::sort(order.begin(), order.end());
    std::vector<Instance> sorted;
    sorted.reserve(order.size());
    for (const auto& [time, at] : order) sorted.push_back(out_.instances[at]);
    out_.instances = std::move(sorted);
    out_.ranks.reserve(out_.members.size());
    for (const TableIndex member : out_.members) out_.ranks.push_back(rank_of(member));
  }

  void sort_in(TableIndex i) {
    const Communication& c = call(i);
    const bool one_sided = c.op == CommunicationOp::send || c.op == CommunicationOp::recv;
    if (one_sided && c.peer >= 0) {
      const std::int32_t own = t_.ranks[rank_of(i)].rank;
      const bool sends = c.op == CommunicationOp::send;
      Ends& ends = pairs_[{c.group, sends ? own : c.peer, sends ? c.peer : own}];
      (sends ? ends.sends : ends.recvs).push_back(i);
    } else if (one_sided) {
      out_.leftovers.push_back(i);
    } else if (c.group != none && c.sequence >= 0) {
      recorded_[{c.group, c.op, c.sequence}].push_back(i);
    } else {
      by_order_[{c.group, c.op == CommunicationOp::send_recv && c.group != none}][rank_of(i)]
          .push_back(i);
    }
  }

  void add(CommunicationOp op, TableIndex group, std::int64_t sequence,
           std::vector<TableIndex>& members) {
    std::sort(members.begin(), members.end(),
              [&](TableIndex a, TableIndex b) { return rank_of(a) < rank_of(b); });
    out_.instances.push_back({op, group, sequence, out_.members.size(), members.size()});
    out_.members.insert(out_.members.end(), members.begin(), members.end());
  }

  void finish_recorded(const RecordedKey& key, std::vector<TableIndex>& calls) {
    // One rank twice under one key: the number was used again (a new run, a recreated group).
    std::stable_sort(calls.begin(), calls.end(),
                     [&](TableIndex a, TableIndex b) { return rank_of(a) < rank_of(b); });
    std::vector<TableIndex> once;
    for (const TableIndex i : calls) {
      const bool again = !once.empty() && rank_of(once.back()) == rank_of(i);
      (again ? out_.leftovers : once).push_back(i);
    }
    if (once.size() < 2) {
      out_.leftovers.insert(out_.leftovers.end(), once.begin(), once.end());
      return;
    }
    ++out_.by_sequence;
    add(std::get<1>(key), std::get<0>(key), std::get<2>(key), once);
  }

  void by_begin(std::vector<TableIndex>& calls) const {
    std::stable_sort(calls.begin(), calls.end(),
                     [&](TableIndex a, TableIndex b) { return event(a).begin < event(b).begin; });
  }

  /// How many places `other` must move to the right to lie on `base`; ties go to the least spread
  /// of the differences of ends, then to the smallest shift.
  [[nodiscard]] std::ptrdiff_t best_shift(const Series& base, const Series& other) const {
    const auto n = static_cast<std::ptrdiff_t>(base.calls.size());
    const auto k = static_cast<std::ptrdiff_t>(other.calls.size());
    std::ptrdiff_t best = 0;
    std::ptrdiff_t best_agree = -1;
    Nanoseconds best_spread = 0;
    const std::ptrdiff_t reach = std::min<std::ptrdiff_t>(std::max(n, k) - 1, 4096);
    std::vector<Nanoseconds> differences;
    for (std::ptrdiff_t step = 0; step <= 2 * reach; ++step) {
      const std::ptrdiff_t shift = step % 2 == 0 ? step / 2 : -(step + 1) / 2;
      const std::ptrdiff_t from = std::max<std::ptrdiff_t>(0, -shift);
      const std::ptrdiff_t to = std::min(k, n - shift);
      std::ptrdiff_t agree = 0;
      for (std::ptrdiff_t j = from; j < to; ++j) {
        agree += signature(call(base.calls[static_cast<std::size_t>(j + shift)])) ==
                         signature(call(other.calls[static_cast<std::size_t>(j)]))
                     ? 1
                     : 0;
      }
      // A shift pays only if nearly all that overlaps agrees, and not for a short overlap.
      if (to - from < 1 || agree * 10 < (to - from) * 9 || agree < best_agree) continue;
      // Periodic signatures agree at many shifts; at a wrong one the ends scatter.
      differences.clear();
      for (std::ptrdiff_t j = from; j < to; ++j) {
        differences.push_back(event(base.calls[static_cast<std::size_t>(j + shift)]).end -
                              event(other.calls[static_cast<std::size_t>(j)]).end);
      }
      const Nanoseconds spread = spread_of(differences);
      if (agree > best_agree || spread < best_spread) {
        best = shift;
        best_agree = agree;
        best_spread = spread;
      }
    }
    return best;
  }

  /// Median absolute deviation.
  [[nodiscard]] static Nanoseconds spread_of(std::vector<Nanoseconds>& values) {
    const auto middle = [](std::vector<Nanoseconds>& v) {
      const auto at = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
      std::nth_element(v.begin(), at, v.end());
      return *at;
    };
    const Nanoseconds median = middle(values);
    for (Nanoseconds& value : values) value = value > median ? value - median : median - value;
    return middle(values);
  }

  void finish_series(const SeriesKey& key, std::map<TableIndex, std::vector<TableIndex>>& ranks) {
    std::vector<Series> all;
    for (auto& [rank, calls] : ranks) {
      by_begin(calls);
      all.push_back({rank, std::move(calls)});
    }
    const auto longest = std::max_element(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return a.calls.size() < b.calls.size();
    });
    if (all.size() < 2) {
      for (const Series& s : all)
        out_.leftovers.insert(out_.leftovers.end(), s.calls.begin(), s.calls.end());
      return;
    }
    std::vector<std::vector<TableIndex>> columns(longest->calls.size());
    std::int64_t shifted = 0;
    for (const Series& s : all) {
      const std::ptrdiff_t shift = &s == &*longest ? 0 : best_shift(*longest, s);
      shifted += shift != 0 ? 1 : 0;
      for (std::size_t j = 0; j < s.calls.size(); ++j) {
        const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(j) + shift;
        const bool inside = at >= 0 && at < static_cast<std::ptrdiff_t>(columns.size());
        if (inside && signature(call(longest->calls[static_cast<std::size_t>(at)])) ==
                          signature(call(s.calls[j]))) {
          columns[static_cast<std::size_t>(at)].push_back(s.calls[j]);
        } else {
          out_.leftovers.push_back(s.calls[j]);
        }
      }
    }
    for (std::size_t i = 0; i < columns.size(); ++i) {
      if (columns[i].size() < 2) {
        out_.leftovers.insert(out_.leftovers.end(), columns[i].begin(), columns[i].end());
        continue;
      }
      ++out_.by_signature;
      add(call(columns[i].front()).op, key.first, static_cast<std::int64_t>(i), columns[i]);
    }
    out_.notes.push_back(sentence(
        "operations of ",
        key.first == none ? std::string("unnamed groups") : "group " + t_.groups[key.first].name,
        " carry no sequence number: ", columns.size(), " were matched by their order on ",
        all.size(), " ranks",
        shifted > 0 ? sentence(", ", shifted, " of which were shifted") : ""));
  }

  /// Sends and receives of an ordered pair are first in, first out; recorded numbers come first.
  void finish_pair(const PairKey& key, Ends& ends) {
    by_begin(ends.sends);
    by_begin(ends.recvs);
    const auto numbered = [&](const std::vector<TableIndex>& calls) {
      return std::all_of(calls.begin(), calls.end(),
                         [&](TableIndex i) { return call(i).sequence >= 0; });
    };
    const bool by_number = numbered(ends.sends) && numbered(ends.recvs);
    if (by_number) {
      const auto by_sequence = [&](TableIndex a, TableIndex b) {
        return call(a).sequence < call(b).sequence;
      };
      std::stable_sort(ends.sends.begin(), ends.sends.end(), by_sequence);
      std::stable_sort(ends.recvs.begin(), ends.recvs.end(), by_sequence);
    }
    std::size_t s = 0, r = 0;
    std::int64_t position = 0;
    while (s < ends.sends.size() && r < ends.recvs.size()) {
      if (by_number && call(ends.sends[s]).sequence != call(ends.recvs[r]).sequence) {
        const bool send_alone = call(ends.sends[s]).sequence < call(ends.recvs[r]).sequence;
        out_.leftovers.push_back(send_alone ? ends.sends[s++] : ends.recvs[r++]);
        continue;
      }
      std::vector<TableIndex> both{ends.sends[s], ends.recvs[r]};
      ++(by_number ? out_.by_sequence : out_.by_signature);
      add(CommunicationOp::send_recv, std::get<0>(key),
          by_number ? call(ends.sends[s]).sequence : position, both);
      ++s, ++r, ++position;
    }
    out_.leftovers.insert(out_.leftovers.end(), ends.sends.begin() + static_cast<std::ptrdiff_t>(s),
                          ends.sends.end());
    out_.leftovers.insert(out_.leftovers.end(), ends.recvs.begin() + static_cast<std::ptrdiff_t>(r),
                          ends.recvs.end());
  }

  const Trace& t_;
  Matches out_;
  std::map<RecordedKey, std::vector<TableIndex>> recorded_;
  std::map<SeriesKey, std::map<TableIndex, std::vector<TableIndex>>> by_order_;
  std::map<PairKey, Ends> pairs_;
};

}  // namespace detail

/// Cost: O(C log C) for C communications with recorded keys; a series of n operations without
/// numbers costs O(n * min(n, 4096)) a rank.
[[nodiscard]] inline Matches match(const Trace& trace) {
  return detail::Matcher(trace).run();
}

/// Whether nothing says that the ranks are of one job: they have their numbers by the places of
/// their files, and share no operation. Comparing them would accuse one program of another's work.
[[nodiscard]] inline bool are_strangers(const Trace& trace, const Matches& matches) {
  return trace.ranks.size() > 1 && matches.instances.empty() &&
         std::all_of(trace.ranks.begin(), trace.ranks.end(),
                     [](const Rank& rank) { return rank.is_numbered_by_place; });
}

}  // namespace mega::inline v0::scan
