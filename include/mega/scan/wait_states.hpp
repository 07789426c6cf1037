/// @file  Wait states: what part of each matched operation was waiting, for whom, and what part was
/// transfer.
///
/// Of an operation that all members must enter, everyone waits for the last to arrive; of a
/// broadcast the others wait for the root, of a reduction the root for the others; of a transfer
/// the receiver waits for a late sender and the sender for a late receiver. A wait is never longer
/// than the member's own span. Patterns after Scalasca's, on aligned time.
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

enum class WaitPattern : std::uint8_t {
  no_wait,
  late_arrival,  ///< collective: for its last member
  late_root,     ///< broadcast or scatter: for the root
  early_root,    ///< reduction or gather: the root for the others
  late_sender,
  late_receiver,
};

/// One member's share of a matched operation.
struct WaitState {
  TableIndex communication = none;
  TableIndex culprit = none;  ///< rank index that was waited for; none: nobody
  WaitPattern pattern = WaitPattern::no_wait;
  TableIndex waiter = none;  ///< rank index of the member
  Nanoseconds begin = 0;     ///< of the member, aligned
  Nanoseconds wait = 0;
};

/// One matched operation, judged as a whole.
struct OperationTiming {
  std::size_t instance = 0;        ///< into Matches::instances
  TableIndex last_arriver = none;  ///< rank index
  Nanoseconds last_arrival = 0;    ///< aligned time
  Nanoseconds first_end = 0;       ///< aligned time
  Nanoseconds end_spread = 0;      ///< latest end - earliest end
  Nanoseconds transfer = 0;        ///< latest end - last arrival
  Nanoseconds waited = 0;          ///< sum over the members
  std::size_t first_wait = 0;      ///< into WaitReport::waits
  std::size_t waits = 0;           ///< members that waited at all
};

struct WaitReport {
  std::vector<OperationTiming> operations;  ///< in the order of Matches::instances, but without
                                            ///< those of which is_timed() knows nothing
  std::vector<WaitState> waits;             ///< of the members that waited at all, by operation
  std::vector<Nanoseconds> caused;          ///< by rank index
  std::vector<Nanoseconds> suffered;        ///< by rank index
};

namespace detail {

class WaitSearch {
 public:
  WaitSearch(const Trace& trace, const Matches& matches, const Alignment& alignment)
      : t_(trace), matches_(matches), alignment_(alignment) {
    out_.caused.assign(trace.ranks.size(), 0);
    out_.suffered.assign(trace.ranks.size(), 0);
  }

  WaitReport run() {
    for (std::size_t i = 0; i < matches_.instances.size(); ++i) {
      if (is_timed(t_, matches_, alignment_, matches_.instances[i])) judge(i);
    }
    return std::move(out_);
  }

 private:
  struct Member {
    TableIndex communication;
    TableIndex rank;
    Nanoseconds begin, end;
  };

  void judge(std::size_t at) {
    const Instance& instance = matches_.instances[at];
    members_.clear();
    std::int32_t root_rank = -1;
    for (std::size_t k = instance.first; k < instance.first + instance.count; ++k) {
      const TableIndex i = matches_.members[k], rank = matches_.ranks[k];
      const Communication& c = t_.communications[i];
      const Event& e = t_.events[c.event];
      members_.push_back({i, rank, alignment_.at(rank, e.begin), alignment_.at(rank, e.end)});
      if (c.peer >= 0) root_rank = c.peer;
    }
    OperationTiming timing;
    timing.instance = at;
    const Member* last = &members_.front();
    timing.first_end = last->end;
    Nanoseconds last_end = last->end;
    for (const Member& m : members_) {
      if (m.begin > last->begin) last = &m;
      timing.first_end = std::min(timing.first_end, m.end);
      last_end = std::max(last_end, m.end);
    }
    timing.last_arriver = last->rank;
    timing.last_arrival = last->begin;
    timing.end_spread = last_end - timing.first_end;
    timing.transfer = std::max<Nanoseconds>(0, last_end - last->begin);

    const Member* root = nullptr;
    for (const Member& m : members_) {
      if (t_.ranks[m.rank].rank == root_rank) root = &m;
    }
    timing.first_wait = out_.waits.size();
    for (const Member& m : members_) timing.waited += wait_of(m, *last, root, instance.op);
    timing.waits = out_.waits.size() - timing.first_wait;
    out_.operations.push_back(timing);
  }

  Nanoseconds wait_of(const Member& m, const Member& last, const Member* root, CommunicationOp op) {
    using enum CommunicationOp;
    const Member* culprit = &last;
    WaitPattern pattern = WaitPattern::late_arrival;
    if (op == broadcast || op == scatter) {
      if (root == nullptr) return 0;
      culprit = root;
      pattern = WaitPattern::late_root;
    } else if (op == reduce || op == gather) {
      if (root != &m) return 0;
      pattern = WaitPattern::early_root;
    } else if (op == send_recv && members_.size() == 2) {
      pattern = t_.communications[m.communication].op == recv ? WaitPattern::late_sender
                                                              : WaitPattern::late_receiver;
    }
    const Nanoseconds wait = std::clamp<Nanoseconds>(culprit->begin - m.begin, 0,
                                                     std::max<Nanoseconds>(0, m.end - m.begin));
    if (culprit == &m || wait == 0) return 0;
    out_.waits.push_back({m.communication, culprit->rank, pattern, m.rank, m.begin, wait});
    out_.caused[culprit->rank] += wait;
    out_.suffered[m.rank] += wait;
    return wait;
  }

  const Trace& t_;
  const Matches& matches_;
  const Alignment& alignment_;
  std::vector<Member> members_;
  WaitReport out_;
};

}  // namespace detail

/// Cost: one pass over the matched communications.
[[nodiscard]] inline WaitReport find_waits(const Trace& trace, const Matches& matches,
                                           const Alignment& alignment) {
  return detail::WaitSearch(trace, matches, alignment).run();
}

}  // namespace mega::inline v0::scan
