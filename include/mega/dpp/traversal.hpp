/// @file  The order in which a rank computes the (chunk, micro-batch) pairs of one step.
///
/// Notation of all schedule code: p ranks, m micro-batches, v model chunks a rank, r = rank.
/// A traversal policy is a small value with
///   length(p, m, v)              how many compute actions a rank has at most
///   order(rank, p, m, v, out)    writes them to `out` in the order of execution, returns how many
/// Both are constexpr. Every policy keeps the micro-batches of one chunk in
/// ascending order, forwards and backwards alike, so gradients add up in the same order whatever
/// the traversal.
/// Where the order has backward_input and backward_weight it says so with
///   static constexpr bool splits_backward = true;
/// which lets the compiler refuse stages that cannot split.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/value.hpp>
#include <mega/dpp/action.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

namespace mega::inline v0::dpp {

/// Room for the actions of a rank, in memory of the caller: a span that refuses to be written past
/// its end. It does not convert to a std::span, which would not.
class ActionSpan {
 public:
  constexpr ActionSpan(std::span<Action> room) noexcept : data_(room.data()), size_(room.size()) {}
  /// A vector, an array.
  template <class Room>
  requires std::convertible_to<Room&, std::span<Action>>
  constexpr ActionSpan(Room& room) noexcept : ActionSpan(std::span<Action>(room)) {}

  [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }

  /// Throws Error(logic) at the end and behind it.
  [[nodiscard]] constexpr Action& operator[](std::size_t position) const {
    expects(position < size_, ErrorCode::logic, [&] {
      return sentence("an order has an action at position ", position,
                      " of a rank, but its length() is ", size_);
    });
    return data_[position];
  }

  /// The first `count` actions. Throws Error(logic) where there are not as many.
  [[nodiscard]] constexpr std::span<Action> first(int count) const {
    expects(0 <= count && static_cast<std::size_t>(count) <= size_, ErrorCode::logic, [&] {
      return sentence("an order has ", count, " actions on a rank, but its length() is ", size_);
    });
    return {data_, static_cast<std::size_t>(count)};
  }

 private:
  Action* data_;
  std::size_t size_;
};

/// Appends actions to an ActionSpan: what order() is written with.
class ActionSink {
 public:
  constexpr explicit ActionSink(ActionSpan out) noexcept : out_(out) {}

  /// Throws Error(logic) where the span is full.
  constexpr void put(ActionKind kind, int chunk, int microbatch) {
    out_[count_] = make_action(kind, chunk, microbatch);
    ++count_;
  }
  /// How many were appended: what order() returns.
  [[nodiscard]] constexpr int count() const noexcept { return static_cast<int>(count_); }

 private:
  ActionSpan out_;
  std::size_t count_ = 0;
};

template <class P>
concept has_traversal_name = requires {
  { P::name } -> std::convertible_to<std::string_view>;
};

template <class P>
concept gives_traversal_length = requires(const P policy, int p, int m, int v) {
  { policy.length(p, m, v) } -> std::same_as<int>;
};

template <class P>
concept writes_traversal_order = requires(const P policy, int rank, int p, int m, int v,
                                          ActionSpan out) {
  { policy.order(rank, p, m, v, out) } -> std::same_as<int>;
};

/// A policy whose ranks' orders come out of one construction gives them all at once, as well as one
/// by one: orders(p, m, v) returns the list of every rank.
template <class P>
concept orders_all_ranks = requires(const P policy, int p, int m, int v) {
  { policy.orders(p, m, v) } -> std::same_as<std::vector<std::vector<Action>>>;
};

template <class P>
concept traversal_policy = semiregular<P> && has_traversal_name<P> && gives_traversal_length<P> &&
    writes_traversal_order<P>;

/// A policy in whose order input and weight gradients are actions of their own. One that never says
/// so may still turn out to: the executor then refuses a stage that cannot, when it is made.
template <class P>
concept splits_backward = std::bool_constant<P::splits_backward>::value;

/// A policy whose order changes between steps names all that it may become: alternatives(p, m).
/// Slots are made for every one of them, and for itself.
template <class P>
concept names_alternatives = requires(const P policy, int p, int m) {
  { policy.alternatives(p, m) } -> std::same_as<std::vector<P>>;
};

namespace detail {

constexpr void expect_pipeline(int rank, int p, int m, int v) {
  expects(p >= 1 && m >= 1 && v >= 1, ErrorCode::usage, [&] {
    return sentence("a pipeline needs at least 1 rank, 1 micro-batch and 1 chunk a rank, not p ", p,
                    ", m ", m, ", v ", v);
  });
  expects(v <= 32767, ErrorCode::usage,
          [&] { return sentence("v ", v, " chunks a rank is above the limit of 32767"); });
  // All actions of a lowered schedule are numbered by an int: at most eight a stage and
  // micro-batch.
  constexpr long long most = (1LL << 28) - 1;
  expects(m <= most / v && p <= most / v / m, ErrorCode::usage, [&] {
    return sentence("p ", p, ", m ", m, ", v ", v, " are more than ", most,
                    " micro-batches of a stage, the limit for a schedule");
  });
  expects(0 <= rank && rank < p, ErrorCode::usage,
          [&] { return sentence("rank ", rank, " is outside 0..", p - 1); });
}

/// The chunk x micro-batch matrix in groups of `group` micro-batches, chunk by chunk inside a
/// group: `warm_up` forwards, then one forward and one backward in turn, then the backwards left.
/// Micro-batches m..padded-1 take their turn in the count but are left out of the result.
constexpr int interleave(int m, int padded, int v, int group, int warm_up, ActionSpan out) {
  ActionSink sink(out);
  const int total = padded * v;
  const int lead = warm_up < total ? warm_up : total;
  const auto put = [&](ActionKind kind, int i) {
    const int first = i / (group * v) * group;
    const int size = padded - first < group ? padded - first : group;
    const int within = i - first * v;
    const int visit = within / size;
    const int microbatch = first + within % size;
    if (microbatch >= m) return;
    sink.put(kind, kind == ActionKind::forward ? visit : v - 1 - visit, microbatch);
  };
  for (int i = 0; i < total + lead; ++i) {
    if (i < total) put(ActionKind::forward, i);
    if (i >= lead) put(ActionKind::backward, i - lead);
  }
  return sink.count();
}

}  // namespace detail

/// All forwards, chunk by chunk, then all backwards. Right for every p, m, v >= 1.
/// Peak: m*v live activations on every rank. Bubble: (p-1)/(m*v+p-1) of the step; with v > 1 and
/// m < p the step takes p*v+m-1 turns in place of m*v+p-1, a turn being F + B of a chunk.
/// Source: Huang et al., GPipe (v = 1); Lamy-Poirier, breadth-first pipeline (v > 1).
struct GPipe {
  static constexpr std::string_view name = "gpipe";

  [[nodiscard]] static constexpr int length(int /*p*/, int m, int v) noexcept { return 2 * m * v; }

  static constexpr int order(int rank, int p, int m, int v, ActionSpan out) {
    detail::expect_pipeline(rank, p, m, v);
    return detail::interleave(m, m, v, m, m * v, out);
  }
};

/// GPipe's order under the name it has in the literature when v > 1.
using LoopedBreadthFirst = GPipe;

/// 1F1B: p-1-r forwards, then one forward and one backward in turn. Every p, m >= 1; v must be 1.
/// Peak: min(m, p-r) live activations on rank r. Bubble: (p-1)/(m+p-1) of the step.
/// Source: Narayanan et al., PipeDream-Flush.
struct OneForwardOneBackward {
  static constexpr std::string_view name = "1f1b";

  [[nodiscard]] static constexpr int length(int /*p*/, int m, int /*v*/) noexcept { return 2 * m; }

  static constexpr int order(int rank, int p, int m, int v, ActionSpan out) {
    detail::expect_pipeline(rank, p, m, v);
    expects(v == 1, ErrorCode::usage, [&] {
      return sentence("1F1B runs 1 chunk a rank, not v ", v,
                      "; use v 1, or dfc for several chunks");
    });
    return detail::interleave(m, m, 1, m, p - 1 - rank, out);
  }
};

/// Depth first over the chunk x micro-batch matrix: groups of p micro-batches, the smallest that
/// keep every rank busy. Least memory; each hop between stages is on the critical path.
struct DFC {
  static constexpr std::string_view name = "dfc";
  [[nodiscard]] static constexpr int group_size(int p, int /*m*/) noexcept { return p; }
};

/// Breadth first: all micro-batches in one group. Most slack for the transfers; memory grows by
/// v-1 activations for each micro-batch of the group.
struct BFC {
  static constexpr std::string_view name = "bfc";
  [[nodiscard]] static constexpr int group_size(int p, int m) noexcept { return m < p ? p : m; }
};

/// Any point between DFC and BFC: p <= value <= max(p, m), else order() refuses.
struct GroupSize {
  static constexpr std::string_view name = "group_size";
  int value = 0;
  [[nodiscard]] constexpr int group_size(int /*p*/, int /*m*/) const noexcept { return value; }
};

template <class D>
concept gives_group_size = requires(const D dial, int p, int m) {
  { dial.group_size(p, m) } -> std::same_as<int>;
};

template <class D>
concept traversal_dial = semiregular<D> && has_traversal_name<D> && gives_group_size<D>;

/// Interleaved 1F1B over the chunk x micro-batch matrix, with the dial's micro-batch group size g.
/// Right for every p, m, v >= 1 on LoopPlacement; with v = 1 it is 1F1B and g has no meaning.
/// Warm-up of rank r: 2(p-1-r) + (v-1)g forwards. Peak: min(m*v, that + 1) live activations.
/// Step at zero transfer time, in turns, F + B of a chunk: m*v+p-1, of which p-1 are bubble, where
/// m mod g = 0 or m mod g >= p; p*v+m-1 where v > 1 and m < p, whatever g.
/// A last group of fewer than p micro-batches can deadlock in this pattern, so it is laid out as if
/// it had p and the absent ones are skipped: leaving micro-batches out of a feasible order keeps it
/// feasible, and the peak can only fall. The (v-1)(p - m mod g) turns skipped cost B each or
/// slightly more; g = m skips none.
/// Source: Narayanan et al., Efficient large-scale language model training on GPU clusters.
template <traversal_dial Dial>
struct ScheduleTraversal {
  static constexpr std::string_view name = Dial::name;
  [[no_unique_address]] Dial dial{};

  [[nodiscard]] static constexpr int length(int /*p*/, int m, int v) noexcept { return 2 * m * v; }

  /// Forwards before the first backward, where m*v allows that many. @pre v = 1 or g is valid
  [[nodiscard]] constexpr int warm_up(int rank, int p, int m, int v) const noexcept {
    return v == 1 ? p - 1 - rank : 2 * (p - 1 - rank) + (v - 1) * dial.group_size(p, m);
  }

  constexpr int order(int rank, int p, int m, int v, ActionSpan out) const {
    detail::expect_pipeline(rank, p, m, v);
    if (v == 1) return detail::interleave(m, m, 1, m, warm_up(rank, p, m, v), out);
    const int group = dial.group_size(p, m);
    const int largest = m < p ? p : m;
    expects(p <= group && group <= largest, ErrorCode::usage, [&] {
      return sentence("micro-batch group size ", group, " is outside ", p, "..", largest, " for p ",
                      p, ", m ", m, "; the nearest valid one is ", group < p ? p : largest);
    });
    const int rest = m % group;
    const int padded = rest == 0 || rest >= p ? m : m - rest + p;
    return detail::interleave(m, padded, v, group, warm_up(rank, p, m, v), out);
  }
};

/// Interleaved 1F1B with a group size chosen at run time.
using Interleaved = ScheduleTraversal<GroupSize>;

static_assert(traversal_policy<GPipe> && traversal_policy<OneForwardOneBackward>);
static_assert(traversal_policy<ScheduleTraversal<BFC>> && traversal_policy<ScheduleTraversal<DFC>>);
static_assert(traversal_policy<Interleaved> && sizeof(Interleaved) == sizeof(int));
static_assert(ScheduleTraversal<DFC>{}.warm_up(0, 2, 5, 2) == 4 &&
              Interleaved{{3}}.warm_up(0, 2, 5, 2) == 5);

}  // namespace mega::inline v0::dpp
