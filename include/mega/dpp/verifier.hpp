/// @file  Proof that a lowered schedule is complete, ordered and free of deadlock, with its peak of
/// live activations. The same functions serve static_assert (small pipelines) and start-up (all).
///
/// Model of a run: every rank executes its list in order. One ordered channel joins two consecutive
/// stages in each direction, and a recv waits for the data. tied_reduce waits for the other rank of
/// the tied pair. Both halves of a fused pair begin together, once both may. Chunk c of a rank owns
/// a fixed number of slots: a micro-batch takes one when it arrives, on the first stage when its
/// forward begins, and gives it back after its weight gradient. Gradients travel back through the
/// same slots and want none of their own. What a send waits for is the Transport's.
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

/// How messages travel between ranks, as far as waiting goes. Whatever the kind, a hop between two
/// stages of one rank never waits for a receiver.
struct Transport {
  enum class Kind : std::uint8_t {
    /// Slots are posted ahead: send_forward waits until the receiving chunk has a free slot and
    /// takes it, send_backward never waits. The executor never waits for more than this: its sends
    /// leave from two out-buffers on streams of their own.
    slots,
    /// Nothing is posted ahead: a message stays with its sender until the receiver's list has come
    /// to the recv, which on the forward way takes a slot. Sends run beside the list, which goes on
    /// until it wants an out-buffer again: the action that makes a message waits until fewer than
    /// `buffers` earlier ones of its channel are left. With 0 buffers the send itself waits.
    rendezvous,
    /// One stream a rank and no tags, as batched NCCL sends and receives: those that stand next to
    /// each other in a list begin together, each ends when its other end has begun as well, and the
    /// list goes on when all have ended. A recv_forward takes a slot when it begins. All messages
    /// from one rank to another share one queue, so they must be received in the order in which
    /// they are sent, whatever their stage and direction.
    /// Source: pytorch issue 172668, a schedule that hung on rendezvous after a buffered dry run.
    blocking,
  };

  Kind kind = Kind::slots;
  int buffers = 0;  ///< rendezvous: out-buffers of each channel

  [[nodiscard]] static constexpr Transport slots() noexcept { return {}; }
  [[nodiscard]] static constexpr Transport rendezvous(int buffers = 2) noexcept {
    return {Kind::rendezvous, buffers};
  }
  [[nodiscard]] static constexpr Transport blocking() noexcept { return {Kind::blocking, 0}; }
};

enum class Fault : std::uint8_t {
  none,
  out_of_place,  ///< chunk, micro-batch or neighbour that the rank does not have
  duplicate,     ///< an action that has been there before, or would compute a gradient twice
  missing,       ///< an action that the rank's list lacks
  bad_pair,      ///< with_next where no forward and backward that may run side by side follow
  out_of_order,  ///< micro-batches of one chunk not ascending: gradients would add up differently
  dependency,    ///< an action before one of the same rank that it needs
  unmatched,     ///< the order of a queue's receives differs from that of its sends
  deadlock,      ///< ranks wait for each other in a cycle
};

[[nodiscard]] constexpr std::string_view to_string(Fault fault) noexcept {
  switch (fault) {
    case Fault::none: return "none";
    case Fault::out_of_place: return "out of place";
    case Fault::duplicate: return "duplicate";
    case Fault::missing: return "missing";
    case Fault::bad_pair: return "bad pair";
    case Fault::out_of_order: return "out of order";
    case Fault::dependency: return "dependency";
    case Fault::unmatched: return "unmatched";
    case Fault::deadlock: return "deadlock";
  }
  return "unknown";
}

/// A rank that cannot go on, and the rank it waits for.
struct Blocked {
  enum class Want : std::uint8_t {
    other_end,  ///< the peer's matching send, recv or tied_reduce
    slot,       ///< one of the peer's slots, or of its own
    buffer,     ///< an out-buffer whose message the peer has not received
  };

  int rank = 0;
  int position = 0;  ///< in the rank's list
  Action action{};
  int waits_for = 0;
  Want wants = Want::other_end;
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
  /// Throws Error(logic) where the schedule is invalid or has no such rank.
  [[nodiscard]] constexpr int peak(int of_rank) const;
};

namespace detail {

[[nodiscard]] constexpr std::size_t index(int i) noexcept {
  return static_cast<std::size_t>(i);
}

/// A rank's list between plain pointers, which the compiler walks at a fraction of the cost of the
/// iterators of a span.
struct RankList {
  const Action* first;
  const Action* last;

  [[nodiscard]] constexpr const Action* begin() const noexcept { return first; }
  [[nodiscard]] constexpr const Action* end() const noexcept { return last; }
  [[nodiscard]] constexpr int size() const noexcept { return static_cast<int>(last - first); }
};

[[nodiscard]] constexpr RankList list_of(const ScheduleView& s, int rank) noexcept {
  const Action* all = s.actions.data();
  return {all + s.first[index(rank)], all + s.first[index(rank + 1)]};
}

/// Channels by the stage that sends: 2*stage forwards, 2*stage + 1 backwards.
/// @return the channel of a send or recv of the stage, else -1
[[nodiscard]] constexpr int channel_of(ActionKind kind, int stage) noexcept {
  switch (kind) {
    case ActionKind::send_forward: return 2 * stage;
    case ActionKind::send_backward: return 2 * stage + 1;
    case ActionKind::recv_forward: return 2 * (stage - 1);
    case ActionKind::recv_backward: return 2 * (stage + 1) + 1;
    default: return -1;
  }
}

/// The rank at the other end of the channel seen from one of its two stages.
[[nodiscard]] constexpr int receiver_of(const ScheduleView& s, int channel) noexcept {
  return s.rank_of(channel % 2 == 0 ? channel / 2 + 1 : channel / 2 - 1);
}
[[nodiscard]] constexpr int sender_of(const ScheduleView& s, int channel) noexcept {
  return s.rank_of(channel / 2);
}

[[nodiscard]] constexpr bool is_recv(ActionKind kind) noexcept {
  return kind == ActionKind::recv_forward || kind == ActionKind::recv_backward;
}

/// Executes the lists against each other. Whether they all end does not depend on the order in
/// which ranks are advanced: every slot pool, buffer pool and channel has one producer and one
/// consumer, and nothing that an action waits for is taken away again.
class ListRun {
 public:
  /// @param slots  [p*v] by place; empty = as many as wanted
  constexpr ListRun(const ScheduleView& schedule, std::span<const int> slots, Transport transport)
      : s_(schedule),
        slots_(slots),
        transport_(transport),
        front_(index(s_.p), Front{}),
        occupied_(index(s_.stages()), 0),
        traffic_(index(2 * s_.stages()), Traffic{}),
        at_tied_(index(s_.p), 0) {
    for (int stage = 0; stage + 1 < s_.stages(); ++stage) {
      const bool crosses = s_.rank_of(stage) != s_.rank_of(stage + 1);
      traffic_[index(2 * stage)].crosses = crosses;
      traffic_[index(2 * (stage + 1) + 1)].crosses = crosses;
    }
  }
  constexpr ~ListRun() = default;  // nvcc 13 does not see that the implicit one is constexpr

  /// True when every rank reaches the end of its list.
  constexpr bool finish() {
    // Forwards travel down the ranks and gradients up, so ranks take their turns in both
    // directions.
    bool down = true;
    for (bool progress = true; progress; down = !down) {
      progress = false;
      for (int i = 0; i < s_.p; ++i) {
        const int rank = down ? i : s_.p - 1 - i;
        const RankList list = list_of(s_, rank);
        while (advance(rank, list)) progress = true;
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
    for (int step = 0; step < s_.p; ++step) rank = blocked(rank).waits_for;
    int lowest = rank;
    for (int r = blocked(rank).waits_for; r != rank; r = blocked(r).waits_for) {
      lowest = r < lowest ? r : lowest;
    }
    std::vector<Blocked> found;
    rank = lowest;
    do {
      found.push_back(blocked(rank));
      rank = found.back().waits_for;
    } while (rank != lowest);
    return found;
  }

  /// Stage whose slots an action of `stage` takes one of, or -1.
  [[nodiscard]] constexpr int takes_slot_of(ActionKind kind, int stage) const noexcept {
    using enum ActionKind;
    const bool ahead = transport_.kind == Transport::Kind::slots;
    if (kind == send_forward) return ahead ? stage + 1 : -1;
    if (kind == recv_forward) return ahead ? -1 : stage;
    return kind == forward && stage == 0 ? 0 : -1;
  }

 private:
  /// Where a rank stands. The actions next..end-1 begin together; those before `begun` have.
  struct Front {
    int next = 0;
    int begun = 0;
    int end = 0;
  };
  /// Messages of a channel.
  struct Traffic {
    int made = 0;
    int sent = 0;          ///< send begun
    int left = 0;          ///< send ended
    int awaited = 0;       ///< recv begun
    int received = 0;      ///< recv ended
    bool crosses = false;  ///< its ends are on two ranks
  };

  constexpr bool advance(int rank, RankList list) {
    Front& at = front_[index(rank)];
    if (list.first + at.next == list.last) return false;
    if (at.next == at.end) at.end = end_of_step(rank, list, at.next);
    bool moved = false;
    for (; at.begun < at.end && begin(rank, list.first[at.begun]); ++at.begun) moved = true;
    if (at.begun < at.end || !complete(rank, list.first[at.next])) return moved;
    ++at.next;
    return true;
  }

  /// End of the actions that begin together with the one at `position`.
  [[nodiscard]] constexpr int end_of_step(int rank, RankList list, int position) const {
    if (list.first[position].with_next) return position + 2;
    int end = position + 1;
    if (transport_.kind == Transport::Kind::blocking && crosses(rank, list.first[position])) {
      while (list.first + end != list.last && crosses(rank, list.first[end])) ++end;
    }
    return end;
  }

  /// A send or recv whose other end is on another rank.
  [[nodiscard]] constexpr bool crosses(int rank, const Action& a) const {
    const int channel = channel_of(a.kind, s_.stage(rank, a.chunk));
    return channel >= 0 && traffic_[index(channel)].crosses;
  }

  /// Channel in one of whose out-buffers an action of `stage` puts its result, or -1.
  [[nodiscard]] constexpr int fills_buffer_of(ActionKind kind, int stage) const {
    int channel = -1;
    if (kind == ActionKind::forward && stage < s_.stages() - 1) channel = 2 * stage;
    if (gives_input_gradient(kind) && stage > 0) channel = 2 * stage + 1;
    return channel < 0 || !traffic_[index(channel)].crosses ? -1 : channel;
  }

  [[nodiscard]] constexpr bool lacks_slot(int stage) const {
    return stage >= 0 && !slots_.empty() &&
           occupied_[index(stage)] >= slots_[index(s_.place_of[index(stage)])];
  }
  [[nodiscard]] constexpr bool lacks_buffer(int channel) const {
    const Traffic& messages = traffic_[index(channel)];
    return messages.made - messages.received >= transport_.buffers;
  }

  /// Takes what the action must have before it begins; false where there is none.
  constexpr bool begin(int rank, const Action& a) {
    using enum ActionKind;
    switch (a.kind) {
      case tied_reduce: at_tied_[index(rank)] = 1; return true;
      case backward_weight:
      case loss:
      case reduce: return true;
      default: break;
    }
    const int stage = s_.stage(rank, a.chunk);
    const int slot = takes_slot_of(a.kind, stage);
    const int buffer = transport_.buffers > 0 ? fills_buffer_of(a.kind, stage) : -1;
    if (slot >= 0 && lacks_slot(slot)) return false;
    if (buffer >= 0 && lacks_buffer(buffer)) return false;
    if (slot >= 0) ++occupied_[index(slot)];
    if (buffer >= 0) ++traffic_[index(buffer)].made;
    if (is_compute(a.kind)) return true;
    Traffic& messages = traffic_[index(channel_of(a.kind, stage))];
    ++(is_recv(a.kind) ? messages.awaited : messages.sent);
    return true;
  }

  /// False where the action's other end has not begun.
  constexpr bool complete(int rank, const Action& a) {
    using enum ActionKind;
    switch (a.kind) {
      case backward:
      case backward_weight: --occupied_[index(s_.stage(rank, a.chunk))]; return true;
      case recv_forward:
      case recv_backward: {
        Traffic& messages = traffic_[index(channel_of(a.kind, s_.stage(rank, a.chunk)))];
        if (messages.received == messages.sent) return false;
        ++messages.received;
        return true;
      }
      case send_forward:
      case send_backward: return !holds_sender() || has_left(rank, a);
      case tied_reduce: return at_tied_[index(tied_peer(rank))] != 0;
      default: return true;
    }
  }
  /// Whether a send waits until its message is received.
  [[nodiscard]] constexpr bool holds_sender() const noexcept {
    return transport_.kind != Transport::Kind::slots && transport_.buffers == 0;
  }
  constexpr bool has_left(int rank, const Action& send) {
    Traffic& messages = traffic_[index(channel_of(send.kind, s_.stage(rank, send.chunk)))];
    if (messages.crosses && messages.left == messages.awaited) return false;
    ++messages.left;
    return true;
  }

  [[nodiscard]] constexpr bool ended(int rank) const {
    return index(front_[index(rank)].next) == s_.of_rank(rank).size();
  }
  [[nodiscard]] constexpr int tied_peer(int rank) const {
    const int first = s_.rank_of(0);
    return rank == first ? s_.rank_of(s_.stages() - 1) : first;
  }
  /// What a rank that cannot go on waits for.
  [[nodiscard]] constexpr Blocked blocked(int rank) const {
    const Front& at = front_[index(rank)];
    Blocked found{.rank = rank, .position = at.begun < at.end ? at.begun : at.next};
    found.action = s_.of_rank(rank)[index(found.position)];
    const ActionKind kind = found.action.kind;
    const int stage = s_.stage(rank, found.action.chunk);
    const int slot = takes_slot_of(kind, stage);
    const int channel = channel_of(kind, stage);
    if (at.begun < at.end && lacks_slot(slot)) {
      found.wants = Blocked::Want::slot;
      found.waits_for = s_.rank_of(slot);
    } else if (at.begun < at.end) {
      found.wants = Blocked::Want::buffer;
      found.waits_for = receiver_of(s_, fills_buffer_of(kind, stage));
    } else if (channel < 0) {
      found.waits_for = tied_peer(rank);
    } else {
      found.waits_for = is_recv(kind) ? sender_of(s_, channel) : receiver_of(s_, channel);
    }
    return found;
  }

  ScheduleView s_;
  std::span<const int> slots_;
  Transport transport_;
  std::vector<Front> front_;
  std::vector<int> occupied_;     // by stage
  std::vector<Traffic> traffic_;  // by channel
  std::vector<int> at_tied_;
};

/// The checks of verify(), each of which relies on the ones before it.
class ScheduleCheck {
 public:
  constexpr ScheduleCheck(const ScheduleView& schedule, Transport transport)
      : s_(schedule), transport_(transport) {}

  constexpr Verdict run(std::span<const int> slots) {
    if (places_known_and_unique() && complete() && paired() && ordered() && matched()) {
      finishes(slots);
    }
    return verdict_;
  }

  /// Of a schedule that passes all checks on some transport, those that depend on the transport.
  constexpr bool runs(std::span<const int> slots) {
    const bool shares_queues = transport_.kind == Transport::Kind::blocking;
    return (!shares_queues || matched()) && finishes(slots);
  }

 private:
  using Seen = int;  // one bit an ActionKind

  static constexpr Seen bit(ActionKind kind) noexcept { return 1 << static_cast<int>(kind); }
  template <class... Kinds>
  static constexpr Seen bits(Kinds... kinds) noexcept {
    return (0 | ... | bit(kinds));
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
      for (const Action& a : list_of(s_, rank)) {
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

  constexpr bool paired() {
    for (int rank = 0; rank < s_.p; ++rank) {
      const RankList list = list_of(s_, rank);
      for (const Action* a = list.first; a != list.last; ++a) {
        if (!a->with_next) continue;
        if (a + 1 != list.last && is_pair(*a, a[1])) continue;
        return fail(Fault::bad_pair, rank, static_cast<int>(a - list.first), *a);
      }
    }
    return true;
  }
  static constexpr bool is_pair(const Action& first, const Action& second) noexcept {
    const bool directions =
        (first.kind == ActionKind::forward && gives_input_gradient(second.kind)) ||
        (second.kind == ActionKind::forward && gives_input_gradient(first.kind));
    const bool same = first.chunk == second.chunk && first.microbatch == second.microbatch;
    return directions && !same && !second.with_next;
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
      int paired_gradient = -1;  // place whose activation lives until the pair ends
      const auto free_activation = [&](std::size_t of) {
        --live_on_rank;
        --live[of];
      };
      for (const Action& a : list_of(s_, rank)) {
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
        if (paired_gradient >= 0) free_activation(index(paired_gradient));
        paired_gradient = -1;
        if (!gives_weight_gradient(a.kind)) continue;
        if (a.with_next) {
          paired_gradient = rank * s_.v + a.chunk;
        } else {
          free_activation(place);
        }
      }
    }
    return true;
  }
  static constexpr void raise(int& peak, int value) noexcept { peak = value > peak ? value : peak; }

  constexpr bool matched() {
    // The n-th message received from a queue must be the n-th that was sent to it.
    std::vector<int> number(index(2 * s_.stages() * s_.m), 0);  // by channel and micro-batch
    std::vector<int> count(index(2 * s_.stages() + s_.p * s_.p), 0);
    for (const bool receives : {false, true}) {
      for (int& n : count) n = 0;
      for (int rank = 0; rank < s_.p; ++rank) {
        int position = -1;
        for (const Action& a : list_of(s_, rank)) {
          ++position;
          const int channel = channel_of(a.kind, s_.stage(rank, a.chunk));
          if (channel < 0 || is_recv(a.kind) != receives) continue;
          int& expected = number[index(channel * s_.m + a.microbatch)];
          int& next = count[index(queue_of(channel))];
          if (!receives) expected = next;
          if (expected != next++) return fail(Fault::unmatched, rank, position, a);
        }
      }
    }
    return true;
  }
  /// Messages of a queue keep their order: a channel, or all from one rank to another.
  [[nodiscard]] constexpr int queue_of(int channel) const {
    if (transport_.kind != Transport::Kind::blocking) return channel;
    const int from = sender_of(s_, channel);
    const int to = receiver_of(s_, channel);
    return from == to ? channel : 2 * s_.stages() + from * s_.p + to;
  }

  constexpr bool finishes(std::span<const int> slots) {
    ListRun run(s_, slots, transport_);
    if (run.finish()) return true;
    verdict_.cycle = run.cycle();
    const Blocked& first = verdict_.cycle.front();
    return fail(Fault::deadlock, first.rank, first.position, first.action);
  }

  ScheduleView s_;
  Transport transport_;
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
                                       std::span<const int> slots = {},
                                       Transport transport = Transport::slots()) {
  expects(slots.empty() || slots.size() == schedule.place_of.size(), ErrorCode::usage, [&] {
    return sentence("verify() was given ", slots.size(), " slot counts for ",
                    schedule.place_of.size(), " chunks");
  });
  expects(transport.buffers >= 0, ErrorCode::usage, [&] {
    return sentence("verify() was given ", transport.buffers,
                    " out-buffers for each channel; 0 is the least");
  });
  return detail::ScheduleCheck(schedule, transport).run(slots);
}

/// Whether a schedule that verify() has found valid, on whatever transport and slots, is so with
/// these: verify(schedule, slots, transport).ok() for less than half of its cost.
/// @pre  the schedule is valid on some transport; slots and transport as verify() takes them
[[nodiscard]] constexpr bool runs_on(const ScheduleView& schedule, std::span<const int> slots,
                                     Transport transport) {
  return detail::ScheduleCheck(schedule, transport).runs(slots);
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
    case Fault::bad_pair:
      return where +
             " has no partner right behind it: a fused pair is one forward and one backward, of "
             "different micro-batches or chunks";
    case Fault::out_of_order:
      return where + " breaks the ascending order of its chunk's micro-batches";
    case Fault::dependency: return where + " stands before an action of the rank that it needs";
    case Fault::unmatched: return where + " receives in another order than the other end sends";
    case Fault::deadlock: break;
  }
  std::string text = "deadlock: ";
  for (const Blocked& b : verdict.cycle) {
    const bool wants_slot = b.wants == Blocked::Want::slot;
    if (&b != &verdict.cycle.front()) text += "; ";
    text += sentence("rank ", b.rank, " at position ", b.position, " (", to_string(b.action),
                     ") waits for ", wants_slot ? "a slot of rank " : "rank ", b.waits_for,
                     b.wants == Blocked::Want::buffer ? " to receive an earlier message" : "");
  }
  return text;
}

constexpr int Verdict::peak(int of_rank) const {
  expects(ok(), ErrorCode::logic,
          [&] { return "only a valid schedule has a peak: " + describe(*this); });
  const int p = static_cast<int>(peak_per_rank.size());
  expects(0 <= of_rank && of_rank < p, ErrorCode::logic, [&] {
    return sentence("rank ", of_rank, " has no peak; the schedule's ranks are 0..", p - 1);
  });
  return peak_per_rank[detail::index(of_rank)];
}

/// Throws Error(usage) with describe()'s sentence unless the schedule is valid.
constexpr void expect_valid(const ScheduleView& schedule, std::span<const int> slots = {},
                            Transport transport = Transport::slots()) {
  const Verdict verdict = verify(schedule, slots, transport);
  expects(verdict.ok(), ErrorCode::usage, [&] { return describe(verdict); });
}

namespace detail {

/// Takes slots that are not needed away again, place by place in ascending order. What runs with
/// fewer slots runs with more, so many places are tried at once and parted where that fails.
class SlotTrimmer {
 public:
  /// @param least  [p*v] what no place may undercut
  constexpr SlotTrimmer(const ScheduleView& schedule, const std::vector<int>& least,
                        std::vector<int>& slots)
      : s_(schedule), least_(least), slots_(slots) {}

  /// @param places  ascending, with more than the least
  /// @param fails   the run is known to stop when all of them have the least
  /// @param single  the last place is parted first: of the waits of one cycle, one slot ends all
  /// @return  whether all of them have come to the least
  constexpr bool trim(std::span<const std::size_t> places, bool fails, bool single = false) {
    if (places.empty()) return true;
    if (!fails && all_to_least(places)) return true;
    if (places.size() == 1) {
      lower(places[0]);
      return false;
    }
    const std::size_t middle = single ? places.size() - 1 : places.size() / 2;
    const bool first_part = trim(places.first(middle), false);
    return trim(places.subspan(middle), first_part) && first_part;
  }

 private:
  [[nodiscard]] constexpr bool runs() const {
    return ListRun(s_, {slots_.data(), slots_.size()}, Transport::slots()).finish();
  }

  constexpr bool all_to_least(std::span<const std::size_t> places) {
    std::vector<int> before;
    for (const std::size_t place : places) {
      before.push_back(slots_[place]);
      slots_[place] = least_[place];
    }
    if (runs()) return true;
    for (std::size_t i = 0; i < places.size(); ++i) slots_[places[i]] = before[i];
    return false;
  }

  /// One slot at a time. @pre the least is known to be too few
  constexpr void lower(std::size_t place) {
    while (slots_[place] > least_[place] + 1) {
      --slots_[place];
      if (runs()) continue;
      ++slots_[place];
      return;
    }
  }

  ScheduleView s_;
  const std::vector<int>& least_;
  std::vector<int>& slots_;
};

}  // namespace detail

/// Slots of each place rank*v + chunk with which the schedule runs on Transport::slots(): at least
/// the chunk's peak of live micro-batches, and so few that lowering any single count deadlocks or
/// undercuts that peak. Throws Error(usage) if the schedule is invalid whatever the slots.
/// @param verdict  verify(schedule)
/// @cost  one run of the lists; where ranks wait for slots of several places in one cycle, some
/// more to find out which of them it takes
[[nodiscard]] constexpr std::vector<int> required_slots(const ScheduleView& schedule,
                                                        const Verdict& verdict) {
  expects(verdict.ok(), ErrorCode::usage, [&] { return describe(verdict); });
  std::vector<int> slots = verdict.peak_per_chunk;
  // A place whose last slot was the only one that its cycle wanted: with one less the run comes to
  // the same cycle again, whatever the other places have, so it need not be tried.
  std::vector<int> is_needed(slots.size(), 0);
  // What was done with fewer slots could have been done with more, so a run that stopped goes on.
  detail::ListRun growing(schedule, {slots.data(), slots.size()}, Transport::slots());
  while (!growing.finish()) {
    // With unlimited slots the order runs, so at least one rank of the cycle wants a slot.
    const auto cycle = growing.cycle();
    int wanted = 0;
    for (const Blocked& b : cycle) wanted += b.wants == Blocked::Want::slot ? 1 : 0;
    for (const Blocked& b : cycle) {
      if (b.wants != Blocked::Want::slot) continue;
      const int stage =
          growing.takes_slot_of(b.action.kind, schedule.stage(b.rank, b.action.chunk));
      const auto place = detail::index(schedule.place_of[detail::index(stage)]);
      ++slots[place];
      is_needed[place] = wanted == 1 ? 1 : 0;
    }
  }
  std::vector<std::size_t> open;
  bool some_needed = false;
  for (std::size_t place = 0; place < slots.size(); ++place) {
    if (slots[place] == verdict.peak_per_chunk[place]) continue;
    if (is_needed[place] == 0) open.push_back(place);
    some_needed = some_needed || is_needed[place] != 0;
  }
  detail::SlotTrimmer(schedule, verdict.peak_per_chunk, slots)
      .trim({open.data(), open.size()}, !some_needed, true);
  return slots;
}
[[nodiscard]] constexpr std::vector<int> required_slots(const ScheduleView& schedule) {
  return required_slots(schedule, verify(schedule));
}

}  // namespace mega::inline v0::dpp
