/// @file  What a communicator is: one small concept an operation, ordered channels for neighbours.
///
/// Laws that hold for every model:
/// - A call is queued on the stream that it names and returns; its effect is ordered there.
/// - All ranks of a communicator issue the same collectives in the same order; a communicator is
///   used from one stream at a time, from another one only behind what the first still has of it.
/// - A sum has one order, whatever carries it. For operands x0 .. x(n-1) of ranks 0 .. n-1 it is
///   the balanced tree S(lo, hi) = S(lo, mid) + S(mid, hi) with mid = lo + bit_ceil(hi - lo) / 2,
///   so ((x0 + x1) + (x2 + x3)) + (x4 + x5). Every rank gets the same bits.
/// - No wait is endless: past the deadline, or when another rank failed, the wait ends with
///   Error(timeout) or Error(peer_failed) naming the ranks, the operation and its sequence number.
#pragma once
#include <mega/core/device.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/value.hpp>
#include <mega/core/view.hpp>

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace mega::inline v0::comm {

enum class Reduce : std::uint8_t { sum, max };

/// Element types that cross a communicator. Those of 16 bits are added in float and rounded after
/// each sum.
template <class T>
concept element = storage<T> || std::same_as<T, double> || std::same_as<T, std::int32_t> ||
    std::same_as<T, std::int64_t> || std::same_as<T, std::byte>;

/// The split point of the canonical reduction tree over [lo, hi), hi - lo >= 2.
[[nodiscard]] constexpr int tree_middle(int lo, int hi) noexcept {
  return lo + static_cast<int>(std::bit_ceil(static_cast<unsigned>(hi - lo)) / 2);
}

/// Combines operand(lo) .. operand(hi - 1) along the canonical tree.
template <class Operand, class Combine>
[[nodiscard]] constexpr auto tree_reduce(int lo, int hi, const Operand& operand,
                                         const Combine& combine) {
  if (hi - lo == 1) return operand(lo);
  const int middle = tree_middle(lo, hi);
  const auto left = tree_reduce(lo, middle, operand, combine);
  return combine(left, tree_reduce(middle, hi, operand, combine));
}

template <class C>
concept has_rank_and_size = requires(const C& c) {
  { c.rank() } -> std::same_as<int>;
  { c.size() } -> std::same_as<int>;
};

/// inout[i] becomes the reduction of inout[i] over all ranks, on all ranks.
template <class C, class S, class T>
concept has_all_reduce = requires(C& c, S& s, Vector<T> inout, Reduce op) {
  c.all_reduce(s, inout, op);
};

/// out becomes piece rank() of the reduction of `in`; in.size() == size() * out.size().
/// @pre  out may be in's own piece rank(); any other overlap is not allowed
template <class C, class S, class T>
concept has_reduce_scatter = requires(C& c, S& s, Vector<T> out, Vector<const T> in, Reduce op) {
  c.reduce_scatter(s, out, in, op);
};

/// out becomes the pieces of all ranks in rank order; out.size() == size() * in.size().
/// @pre  in may be out's own piece rank(); any other overlap is not allowed
template <class C, class S, class T>
concept has_all_gather = requires(C& c, S& s, Vector<T> out, Vector<const T> in) {
  c.all_gather(s, out, in);
};

template <class C, class S, class T>
concept has_broadcast = requires(C& c, S& s, Vector<T> inout, int root) {
  c.broadcast(s, inout, root);
};

/// Piece j of `in` goes to piece rank() of rank j's `out`. @pre  no overlap, size() divides both
template <class C, class S, class T>
concept has_all_to_all = requires(C& c, S& s, Vector<T> out, Vector<const T> in) {
  c.all_to_all(s, out, in);
};

template <class C, class S>
concept has_barrier = requires(C& c, S& s) {
  c.barrier(s);
};

/// Ranks with equal color form a new communicator, ordered by (key, rank). Collective, blocks the
/// host. A negative color takes part and gets a communicator of itself alone.
template <class C>
concept has_split = requires(C& c, int color, int key) {
  { c.split(color, key) } -> std::same_as<C>;
};

/// The sending half of a channel: messages leave in the order in which they were sent.
/// send(): ordered on stream; done once the receiver's oldest posted slot holds the message, so it
/// holds the stream back while no slot is posted. The buffer may be reused by later work of stream.
template <class H, class S>
concept sends = requires(H& h, S& s, Vector<const std::byte> message) {
  h.send(s, message);
};

/// post(): after the work queued on stream so far, `slot` may be written; never blocks.
/// complete(): later work of stream sees the oldest posted slot not yet completed, filled.
/// @pre  every message has the size of its slot (checked); slots stay valid until completed
template <class H, class S>
concept receives = requires(H& h, S& s, Vector<std::byte> slot) {
  h.post(s, slot);
  h.complete(s);
};

/// Channels replace tags: one ordered channel per (source, destination, id), opened by both sides
/// with the same id before its first message. A rank may open both halves of a channel to itself.
template <class C, class S>
concept has_channels = requires(C& c, int peer, std::uint32_t id) {
  typename C::sender;
  typename C::receiver;
  { c.open_sender(peer, id) } -> std::same_as<typename C::sender>;
  { c.open_receiver(peer, id) } -> std::same_as<typename C::receiver>;
}
&&sends<typename C::sender, S>&& receives<typename C::receiver, S>;

/// can_send(): as many slots as messages sent so far and one more were posted and are free, so that
/// one more message would go without waiting for the receiver. Never blocks.
template <class H>
concept tells_whether_it_can_send = requires(const H& h) {
  { h.can_send() } -> std::same_as<bool>;
};

/// ready(): the oldest posted slot not yet completed is filled. Never blocks.
template <class H>
concept tells_whether_it_is_ready = requires(const H& h) {
  { h.ready() } -> std::same_as<bool>;
};

/// poll(done, late): asks done() on the calling thread until it gives true, and gives way to others
/// in between. Throws the echo of another rank's failure; past the deadline it fails the run with
/// Error(timeout) of the sentence late("within 60 s").
template <class C>
concept polls = requires(C& c, bool (*done)(), std::string (*late)(const std::string&)) {
  c.poll(done, late);
};

/// The state of channels can be seen from the host: what a rank needs to choose its next action.
/// For one channel the answers only ever turn from no to yes until it is used again.
template <class C, class S>
concept has_channel_queries = has_channels<C, S> && tells_whether_it_can_send<typename C::sender> &&
    tells_whether_it_is_ready<typename C::receiver> && polls<C>;

/// Optional. attend(true), on all members: until attend(false), a collective returns to its caller
/// once it is done, and where members share a process it begins once all have called it; where a
/// posted slot would occupy the GPU, the completion of a receive holds the host until it is filled.
/// For first uses of operations: allocating, loading code or building a plan may wait until all
/// GPUs of the process are idle, for ever if a collective on one of them waits for the very rank
/// that does so.
template <class C>
concept has_attended_calls = requires(C& c, bool on) {
  c.attend(on);
};

/// Optional static constexpr bool replayable: what calls queue may be queued again without the
/// calls (core/replay.hpp), since all that they do on the host is to queue it. A communicator of
/// one rank has nobody to meet, so it always may.
template <class C>
[[nodiscard]] constexpr bool is_replayable(const C& comm) noexcept {
  if constexpr (requires { C::replayable; }) {
    if (C::replayable) return true;
  }
  // A wrapper may know only at run time.
  if constexpr (requires {
                  { comm.may_replay() } -> std::same_as<bool>;
                }) {
    if (comm.may_replay()) return true;
  }
  return comm.size() == 1;
}

/// Everything that the trainer asks of a communicator on streams of type S.
template <class C, class S>
concept communicator = movable<C> && has_rank_and_size<C> && has_split<C> && has_barrier<C, S> &&
    has_channels<C, S> && has_all_reduce<C, S, float> && has_all_reduce<C, S, double> &&
    has_all_reduce<C, S, std::int64_t> && has_reduce_scatter<C, S, float> &&
    has_all_gather<C, S, float> && has_broadcast<C, S, float> && has_all_to_all<C, S, float>;

}  // namespace mega::inline v0::comm
