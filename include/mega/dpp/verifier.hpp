/// @file  Proof that a lowered schedule is complete, ordered and free of deadlock, with its peak of
/// live activations. The same functions serve static_assert (small pipelines) and start-up (all).
///
/// Model of a run: every rank executes its list in order. Chunk c of a rank owns a fixed number of
/// slots. send_forward completes once the next stage's chunk has a free slot; the slot is free
/// again after that micro-batch's weight gradient. The first stage takes a slot at its forward.
/// Gradients travel back through the same slots, so send_backward never blocks. A recv waits for
/// the data. One ordered channel joins two consecutive stages in each direction.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/schedule.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::dpp {

enum class Fault : std::uint8_t {
  none,
  out_of_place,  ///< chunk, micro-batch or neighbour that the rank does not have
  duplicate,     ///< an action that has been there before, or would compute a gradient twice
  missing,       ///< an action that the rank's list lacks
  out_of_order,  ///< micro-batches of one chunk not ascending: gradients would add up differently
  dependency,    ///< an action before one of the same rank that it needs
  unmatched,     ///< the order of a channel's receives differs from that of its sends
  deadlock,      ///< ranks wait for each other in a cycle
};

[[nodiscard]] constexpr std::string_view to_string(Fault fault) noexcept {
  switch (fault) {
    case Fault::none: return "none";
    case Fault::out_of_place: return "out of place";
    case Fault::duplicate: return "duplicate";
    case Fault::missing: return "missing";
    case Fault::out_of_order: return "out of order";
    case Fault::dependency: return "dependency";
    case Fault::unmatched: return "unmatched";
    case Fault::deadlock: return "deadlock";
  }
  return "unknown";
}

/// A rank that cannot go on, and the rank it waits for.
struct Blocked {
  int rank = 0;
  int position = 0;  ///< in the rank's list
  Action action{};
  int waits_for = 0;
};

/// What verify() found. Fault, rank, position and action describe the first fault only; a missing
/// action has the length of the rank's list as its position. Peaks are valid when ok().
struct Verdict {
  Fault fault = Fault::none;
  int rank = 0;
  int position = 0;
  Action action{};
  std::vector<int> peak_per_rank;   ///< [p] live activations: forward done, weight gradient not
  std::vector<int> peak_per_chunk;  ///< [p*v] the same for the place rank*v + chunk
  std::vector<Blocked> cycle;  ///< of a deadlock: each waits for the next, the last for the first

  [[nodiscard]] constexpr bool ok() const noexcept { return fault == Fault::none; }
  [[nodiscard]] constexpr int peak(int rank_index) const {
    return peak_per_rank[static_cast<std::size_t>(rank_index)];
  }
};

namespace detail {

[[nodiscard]] constexpr std::size_t index(int i) noexcept {
  return static_cast<std::size_t>(i);
}

/// Executes the lists against each other. Whether they all end does not depend on the order in
/// which ranks are advanced: every slot pool and every channel has one producer and one consumer.
class SlotRun {
 public:
  /// @param slots  [p*v] by place; empty = as many as wanted
  constexpr SlotRun(const ScheduleView& schedule, std::span<const int> slots)
      : s_(schedule),
        slots_(slots),
        next_(index(s_.p), 0),
        occupied_(index(s_.stages()), 0),
        sent_(index(2 * s_.stages()), 0),
        received_(index(2 * s_.stages()), 0),
        at_tied_(index(s_.p), 0) {}
  constexpr ~SlotRun() = default;  // nvcc 13 does not see that the implicit one is constexpr

  /// True when every rank reaches the end of its list.
  constexpr bool finish() {
    for (bool progress = true; progress;) {
      progress = false;
      for (int rank = 0; rank < s_.p; ++rank) {
        const auto list = s_.of_rank(rank);
        int& at = next_[index(rank)];
        for (; index(at) < list.size() && try_complete(rank, list[index(at)]); ++at) {
          progress = true;
        }
      }
    }
    for (int rank = 0; rank < s_.p; ++rank) {
      if (!ended(rank)) return false;
    }
    return true;
  }

  /// The ranks that wait for each other, beginning with the lowest. @pre finish() gave false
  [[nodiscard]] constexpr std::vector<Blocked> cycle() const {
    int rank = 0;
    while (ended(rank)) ++rank;
    for (int step = 0; step < s_.p; ++step) rank = waits_for(rank);
    int lowest = rank;
    for (int r = waits_for(rank); r != rank; r = waits_for(r)) lowest = r < lowest ? r : lowest;
    std::vector<Blocked> found;
    rank = lowest;
    do {
      found.push_back({rank, next_[index(rank)], waiting(rank), waits_for(rank)});
      rank = waits_for(rank);
    } while (rank != lowest);
    return found;
  }

  /// Stage whose slots the action takes one of, or -1.
  [[nodiscard]] constexpr int takes_slot_of(int rank, const Action& a) const {
    const int stage = s_.stage(rank, a.chunk);
    if (a.kind == ActionKind::send_forward) return stage + 1;
    return a.kind == ActionKind::forward && stage == 0 ? 0 : -1;
  }

 private:
  // Channels by the stage that sends: 2*stage forwards, 2*stage + 1 backwards.
  constexpr bool try_complete(int rank, const Action& a) {
    using enum ActionKind;
    const int stage = s_.stage(rank, a.chunk);
    if (const int target = takes_slot_of(rank, a); target >= 0) {
      int& occupied = occupied_[index(target)];
      if (!slots_.empty() && occupied >= slots_[index(s_.place_of[index(target)])]) return false;
      ++occupied;
    }
    switch (a.kind) {
      case send_forward: ++sent_[index(2 * stage)]; break;
      case send_backward: ++sent_[index(2 * stage + 1)]; break;
      case recv_forward: return receive(2 * (stage - 1));
      case recv_backward: return receive(2 * (stage + 1) + 1);
      case backward:
      case backward_weight: --occupied_[index(stage)]; break;
      case tied_reduce: at_tied_[index(rank)] = 1; return at_tied_[index(tied_peer(rank))] != 0;
      default: break;
    }
    return true;
  }

  constexpr bool receive(int channel) {
    if (received_[index(channel)] == sent_[index(channel)]) return false;
    ++received_[index(channel)];
    return true;
  }

  [[nodiscard]] constexpr bool ended(int rank) const {
    return index(next_[index(rank)]) == s_.of_rank(rank).size();
  }
  [[nodiscard]] constexpr Action waiting(int rank) const {
    return s_.of_rank(rank)[index(next_[index(rank)])];
  }
  [[nodiscard]] constexpr int tied_peer(int rank) const {
    const int first = s_.rank_of(0);
    return rank == first ? s_.rank_of(s_.stages() - 1) : first;
  }
  [[nodiscard]] constexpr int waits_for(int rank) const {
    const Action a = waiting(rank);
    const int stage = s_.stage(rank, a.chunk);
    switch (a.kind) {
      case ActionKind::recv_forward: return s_.rank_of(stage - 1);
      case ActionKind::recv_backward: return s_.rank_of(stage + 1);
      case ActionKind::tied_reduce: return tied_peer(rank);
      default: return s_.rank_of(takes_slot_of(rank, a));
    }
  }

  ScheduleView s_;
  std::span<const int> slots_;
  std::vector<int> next_;
  std::vector<int> occupied_;
  std::vector<int> sent_;
  std::vector<int> received_;
  std::vector<int> at_tied_;
};

/// The checks of verify(), each of which relies on the ones before it.
class ScheduleCheck {
 public:
  constexpr explicit ScheduleCheck(const ScheduleView& schedule) : s_(schedule) {}

  constexpr Verdict run(std::span<const int> slots) {
    if (places_known_and_unique() && complete() && ordered() && matched()) finishes(slots);
    return verdict_;
  }

 private:
  using Seen = std::uint16_t;  // one bit an ActionKind

  static constexpr Seen bit(ActionKind kind) noexcept {
    return static_cast<Seen>(1U << static_cast<unsigned>(kind));
  }
  template <class... Kinds>
  static constexpr Seen bits(Kinds... kinds) noexcept {
    return static_cast<Seen>((0U | ... | bit(kinds)));
  }

  constexpr bool fail(Fault fault, int rank, int position, const Action& action) {
    verdict_.fault = fault;
    verdict_.rank = rank;
    verdict_.position = position;
    verdict_.action = action;
    return false;
  }

  // Actions of all micro-batches have a column of their own behind the m others.
  [[nodiscard]] constexpr Seen& seen(int stage, int microbatch) {
    return seen_[index(stage * (s_.m + 1) + (microbatch < 0 ? s_.m : microbatch))];
  }
  constexpr void forget() { seen_.assign(index(s_.stages() * (s_.m + 1)), Seen{0}); }

  [[nodiscard]] constexpr bool belongs(int rank, const Action& a) const {
    using enum ActionKind;
    if (a.chunk < 0 || a.chunk >= s_.v || a.kind > tied_reduce) return false;
    const bool is_first = s_.stage(rank, a.chunk) == 0;
    const bool is_last = s_.stage(rank, a.chunk) == s_.stages() - 1;
    if (a.kind == reduce) return a.microbatch == all_microbatches;
    if (a.kind == tied_reduce) return a.microbatch == all_microbatches && (is_first || is_last);
    if (a.microbatch < 0 || a.microbatch >= s_.m) return false;
    if (a.kind == recv_forward || a.kind == send_backward) return !is_first;
    if (a.kind == send_forward || a.kind == recv_backward) return !is_last;
    return a.kind != loss || is_last;
  }

  constexpr bool places_known_and_unique() {
    using enum ActionKind;
    forget();
    tied_.assign(index(s_.p), 0);
    for (int rank = 0; rank < s_.p; ++rank) {
      int position = 0;
      for (const Action& a : s_.of_rank(rank)) {
        if (!belongs(rank, a)) return fail(Fault::out_of_place, rank, position, a);
        Seen& before = seen(s_.stage(rank, a.chunk), a.microbatch);
        Seen excluded = bit(a.kind);
        if (a.kind == backward) excluded |= bits(backward_input, backward_weight);
        if (a.kind == backward_input || a.kind == backward_weight) excluded |= bit(backward);
        const bool tied_twice = a.kind == tied_reduce && tied_[index(rank)]++ != 0;
        if ((before & excluded) != 0 || tied_twice) {
          return fail(Fault::duplicate, rank, position, a);
        }
        before |= bit(a.kind);
        ++position;
      }
    }
    return true;
  }

  constexpr bool complete() {
    using enum ActionKind;
    const int last = s_.stages() - 1;
    const int tied_first = s_.rank_of(0);
    const int tied_last = s_.rank_of(last);
    for (int rank = 0; rank < s_.p; ++rank) {
      const int end = static_cast<int>(s_.of_rank(rank).size());
      for (int chunk = 0; chunk < s_.v; ++chunk) {
        const int stage = s_.stage(rank, chunk);
        for (int microbatch = 0; microbatch < s_.m; ++microbatch) {
          const Seen have = seen(stage, microbatch);
          const bool is_split = (have & bits(backward_input, backward_weight)) != 0;
          Seen need = bit(forward);
          need |= is_split ? bits(backward_input, backward_weight) : bit(backward);
          need |= stage > 0 ? bits(recv_forward, send_backward) : Seen{0};
          need |= stage < last ? bits(send_forward, recv_backward) : bit(loss);
          const auto lacking = static_cast<unsigned>(need & ~have);
          for (unsigned kind = 0; lacking >> kind != 0; ++kind) {
            if ((lacking >> kind & 1U) == 0) continue;
            return fail(Fault::missing, rank, end,
                        make_action(static_cast<ActionKind>(kind), chunk, microbatch));
          }
        }
        if ((seen(stage, all_microbatches) & bit(reduce)) == 0) {
          return fail(Fault::missing, rank, end, make_action(reduce, chunk, all_microbatches));
        }
      }
    }
    for (const bool of_first : {true, false}) {
      const int rank = of_first ? tied_first : tied_last;
      const int peer = of_first ? tied_last : tied_first;
      if (tied_[index(rank)] >= tied_[index(peer)]) continue;
      return fail(Fault::missing, rank, static_cast<int>(s_.of_rank(rank).size()),
                  make_action(tied_reduce, s_.chunk_of(of_first ? 0 : last), all_microbatches));
    }
    return true;
  }

  /// Kinds that must stand before `a` in the same list, for the same chunk and micro-batch.
  [[nodiscard]] constexpr Seen needs(const Action& a, int stage) const {
    using enum ActionKind;
    switch (a.kind) {
      case forward: return stage > 0 ? bit(recv_forward) : Seen{0};
      case send_forward:
      case loss: return bit(forward);
      case backward:
      case backward_input: return bits(forward, stage == s_.stages() - 1 ? loss : recv_backward);
      case backward_weight: return bit(backward_input);
      default: return Seen{0};  // recv_* need a peer; the other kinds are no single kind's sequel
    }
  }

  constexpr bool ordered() {
    using enum ActionKind;
    forget();
    const auto places = index(s_.p * s_.v);
    std::vector<int> next_forward(places, 0);  // by place, as are the three below
    std::vector<int> next_input(places, 0);
    std::vector<int> next_weight(places, 0);
    std::vector<int> live(places, 0);
    verdict_.peak_per_rank.assign(index(s_.p), 0);
    verdict_.peak_per_chunk.assign(places, 0);
    for (int rank = 0; rank < s_.p; ++rank) {
      int live_on_rank = 0;
      int position = -1;
      bool tied_done = tied_[index(rank)] == 0;
      for (const Action& a : s_.of_rank(rank)) {
        ++position;
        const int stage = s_.stage(rank, a.chunk);
        const auto place = index(rank * s_.v + a.chunk);
        Seen& before = seen(stage, a.microbatch);
        bool has_all = (needs(a, stage) & ~before) == 0;
        if (a.kind == send_backward) has_all = (before & bits(backward, backward_input)) != 0;
        if (a.kind == reduce) {
          const bool is_tied = stage == 0 || stage == s_.stages() - 1;
          has_all = next_weight[place] == s_.m && (tied_done || !is_tied);
        }
        if (a.kind == tied_reduce) {
          for (const int end : {0, s_.stages() - 1}) {
            if (s_.rank_of(end) != rank) continue;
            has_all = has_all && next_weight[index(s_.place_of[index(end)])] == s_.m;
          }
          tied_done = true;
        }
        if (!has_all) return fail(Fault::dependency, rank, position, a);
        before |= bit(a.kind);
        if ((a.kind == forward && a.microbatch != next_forward[place]++) ||
            (gives_input_gradient(a.kind) && a.microbatch != next_input[place]++) ||
            (gives_weight_gradient(a.kind) && a.microbatch != next_weight[place]++)) {
          return fail(Fault::out_of_order, rank, position, a);
        }
        if (a.kind == forward) {
          raise(verdict_.peak_per_rank[index(rank)], ++live_on_rank);
          raise(verdict_.peak_per_chunk[place], ++live[place]);
        }
        if (gives_weight_gradient(a.kind)) {
          --live_on_rank;
          --live[place];
        }
      }
    }
    return true;
  }
  static constexpr void raise(int& peak, int value) noexcept { peak = value > peak ? value : peak; }

  constexpr bool matched() {
    using enum ActionKind;
    // Channels by the stage that sends: 2*stage forwards, 2*stage + 1 backwards; m entries each.
    std::vector<int> sequence(index(2 * s_.stages() * s_.m), 0);
    std::vector<int> count(index(2 * s_.stages()), 0);
    for (const bool receives : {false, true}) {
      for (int& n : count) n = 0;
      for (int rank = 0; rank < s_.p; ++rank) {
        int position = -1;
        for (const Action& a : s_.of_rank(rank)) {
          ++position;
          const int stage = s_.stage(rank, a.chunk);
          int channel = -1;
          if (!receives && a.kind == send_forward) channel = 2 * stage;
          if (!receives && a.kind == send_backward) channel = 2 * stage + 1;
          if (receives && a.kind == recv_forward) channel = 2 * (stage - 1);
          if (receives && a.kind == recv_backward) channel = 2 * (stage + 1) + 1;
          if (channel < 0) continue;
          int& entry = sequence[index(channel * s_.m + count[index(channel)]++)];
          if (!receives) entry = a.microbatch;
          if (entry != a.microbatch) return fail(Fault::unmatched, rank, position, a);
        }
      }
    }
    return true;
  }

  constexpr bool finishes(std::span<const int> slots) {
    SlotRun run(s_, slots);
    if (run.finish()) return true;
    verdict_.cycle = run.cycle();
    const Blocked& first = verdict_.cycle.front();
    return fail(Fault::deadlock, first.rank, first.position, first.action);
  }

  ScheduleView s_;
  Verdict verdict_;
  std::vector<Seen> seen_;  // [stages, m + 1]
  std::vector<int> tied_;   // [p] tied_reduce actions
};

}  // namespace detail

/// Checks a lowered schedule; see Fault for what it can find, in that order.
/// @param slots  [p*v] slots of the place rank*v + chunk; empty = unlimited, which leaves the order
///               itself to be proven
/// @cost  a few passes over the actions; memory of one word for each send
[[nodiscard]] constexpr Verdict verify(const ScheduleView& schedule,
                                       std::span<const int> slots = {}) {
  expects(slots.empty() || slots.size() == schedule.place_of.size(), ErrorCode::usage, [&] {
    return sentence("verify() was given ", slots.size(), " slot counts for ",
                    schedule.place_of.size(), " chunks");
  });
  return detail::ScheduleCheck(schedule).run(slots);
}

/// One sentence for a verdict, with the cycle of waiting ranks of a deadlock.
[[nodiscard]] inline std::string describe(const Verdict& verdict) {
  const std::string what = to_string(verdict.action);
  const std::string where =
      sentence(what, " at position ", verdict.position, " of rank ", verdict.rank);
  switch (verdict.fault) {
    case Fault::none: return "the schedule is valid";
    case Fault::out_of_place:
      return where + " names a chunk, a micro-batch or a neighbour that the rank does not have";
    case Fault::duplicate: return where + " repeats work that stands earlier in the list";
    case Fault::missing: return sentence("rank ", verdict.rank, " lacks ", what);
    case Fault::out_of_order:
      return where + " breaks the ascending order of its chunk's micro-batches";
    case Fault::dependency: return where + " stands before an action of the rank that it needs";
    case Fault::unmatched: return where + " receives in another order than its channel sends";
    case Fault::deadlock: break;
  }
  std::string text = "deadlock: ";
  for (const Blocked& b : verdict.cycle) {
    const bool wants_slot =
        b.action.kind == ActionKind::send_forward || b.action.kind == ActionKind::forward;
    if (&b != &verdict.cycle.front()) text += "; ";
    text += sentence("rank ", b.rank, " at position ", b.position, " (", to_string(b.action),
                     ") waits for ", wants_slot ? "a slot of rank " : "rank ", b.waits_for);
  }
  return text;
}

/// Throws Error(usage) with describe()'s sentence unless the schedule is valid.
constexpr void expect_valid(const ScheduleView& schedule, std::span<const int> slots = {}) {
  const Verdict verdict = verify(schedule, slots);
  expects(verdict.ok(), ErrorCode::usage, [&] { return describe(verdict); });
}

/// Slots of each place rank*v + chunk with which the schedule runs: at least the chunk's peak of
/// live micro-batches, and so few that lowering any single count deadlocks or undercuts that peak.
/// Throws Error(usage) if the schedule is invalid whatever the slots.
/// @cost  one run of the lists for each slot added beyond the peaks
[[nodiscard]] constexpr std::vector<int> required_slots(const ScheduleView& schedule) {
  const Verdict verdict = verify(schedule);
  expects(verdict.ok(), ErrorCode::usage, [&] { return describe(verdict); });
  std::vector<int> slots = verdict.peak_per_chunk;
  for (;;) {
    detail::SlotRun run(schedule, slots);
    if (run.finish()) break;
    // With unlimited slots the order runs, so at least one rank of the cycle wants a slot.
    for (const Blocked& b : run.cycle()) {
      const int stage = run.takes_slot_of(b.rank, b.action);
      if (stage >= 0) ++slots[detail::index(schedule.place_of[detail::index(stage)])];
    }
  }
  for (std::size_t place = 0; place < slots.size(); ++place) {
    while (slots[place] > verdict.peak_per_chunk[place]) {
      --slots[place];
      if (detail::SlotRun(schedule, slots).finish()) continue;
      ++slots[place];
      break;
    }
  }
  return slots;
}

}  // namespace mega::inline v0::dpp
