/// @file  Backward passes in one piece or in two, on top of any traversal; the zero-bubble
/// schedules H1 and H2 built that way.
///
/// A backward is an input gradient I, which the previous stage waits for, and a weight gradient W,
/// which nobody waits for before the end of the step. SplitBackward sends I on its way first and
/// lets W wait: W then fills time in which the rank would be idle. What W still needs stays alive
/// while it waits, so a weight-delay policy says how many may.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/traversal.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace mega::inline v0::dpp {

template <class D>
concept limits_pending_weights = requires(const D delay, int rank, int p, int m, int v) {
  { delay.pending(rank, p, m, v) } -> std::same_as<int>;
};

/// How many weight gradients of a rank may wait: as soon as more do, the oldest run.
template <class D>
concept weight_delay = std::semiregular<D> && has_traversal_name<D> && limits_pending_weights<D>;

/// W right after its I: the memory of the whole backward, but the previous stage gets its gradient
/// earlier by the time of W.
struct WeightAtOnce {
  static constexpr std::string_view name = "at_once";
  [[nodiscard]] static constexpr int pending(int, int, int, int) noexcept { return 0; }
};

/// PerRank * r pending on rank r: later ranks, which hold fewer forwards in flight, hold more
/// weight gradients instead, so that memory is even over the ranks.
template <int PerRank>
struct WeightByRank {
  static_assert(PerRank >= 0, "mega: WeightByRank needs a number of pending weights of at least 0");
  static constexpr std::string_view name = "by_rank";
  [[nodiscard]] static constexpr int pending(int rank, int, int, int) noexcept {
    return PerRank * rank;
  }
};

/// `value` pending on the first rank, and `per_rank` more on each next one.
struct WeightsPending {
  static constexpr std::string_view name = "pending";
  int value = 0;
  int per_rank = 0;
  [[nodiscard]] constexpr int pending(int rank, int, int, int) const noexcept {
    return value + per_rank * rank;
  }
};

/// Every W after the rank's last I: the shortest way for gradients and the most memory.
struct WeightAtEnd {
  static constexpr std::string_view name = "at_end";
  [[nodiscard]] static constexpr int pending(int, int, int m, int v) noexcept { return m * v; }
};

namespace detail {

/// Cuts the weight gradients that a rank's list states for itself out of it.
constexpr int without_weights(std::span<Action> list) {
  int kept = 0;
  for (const Action& a : list) {
    if (a.kind != ActionKind::backward_weight) list[static_cast<std::size_t>(kept++)] = a;
  }
  return kept;
}

/// Each backward of list[0..count) becomes I and, in the same order as the I's but once more than
/// `pending` of them wait, W. A pair of actions that run side by side is not parted.
/// @param list  holds `count` actions without W, and has room for one W for each backward
constexpr int split_weights(std::span<Action> list, int count, int pending) {
  using enum ActionKind;
  int waiting = 0;
  for (int i = 0; i < count; ++i) {
    if (gives_input_gradient(list[static_cast<std::size_t>(i)].kind)) ++waiting;
  }
  const int total = count + waiting;
  expects(static_cast<std::size_t>(total) <= list.size(), ErrorCode::logic, [&] {
    return sentence("the output for a rank's actions holds only ", list.size(), " actions, not ",
                    total);
  });
  // The unread part lies at the end of the result: after i of its actions at most i + waiting are
  // written, so none is overwritten before it is read.
  for (int i = count; i-- > 0;) {
    list[static_cast<std::size_t>(i + waiting)] = list[static_cast<std::size_t>(i)];
  }
  int read = waiting;
  int written = 0;
  int oldest = 0;  // where to look for the I whose W is due next
  waiting = 0;
  const auto run_oldest = [&] {
    while (list[static_cast<std::size_t>(oldest)].kind != backward_input) ++oldest;
    const Action input = list[static_cast<std::size_t>(oldest++)];
    list[static_cast<std::size_t>(written++)] =
        make_action(backward_weight, input.chunk, input.microbatch);
    --waiting;
  };
  while (read < total) {
    Action a = list[static_cast<std::size_t>(read++)];
    if (a.kind == backward) a.kind = backward_input;
    if (a.kind == backward_input) ++waiting;
    list[static_cast<std::size_t>(written++)] = a;
    while (!a.with_next && waiting > pending) run_oldest();
  }
  while (waiting > 0) run_oldest();
  return written;
}

}  // namespace detail

/// The traversal with each backward in one piece, in the place of its I where Base splits it.
/// Valid wherever Base is: W only moves to an earlier place at which its input is there.
/// Peak: never above Base's.
template <traversal_policy Base>
struct FullBackward {
  static constexpr std::string_view name = Base::name;
  [[no_unique_address]] Base base{};

  [[nodiscard]] constexpr auto placement() const requires brings_placement<Base> {
    return base.placement();
  }

  [[nodiscard]] constexpr int length(int p, int m, int v) const noexcept {
    return base.length(p, m, v);
  }

  constexpr int order(int rank, int p, int m, int v, ActionSpan out) const {
    const int count = base.order(rank, p, m, v, out);
    return merge(out.first(count));
  }

  [[nodiscard]] constexpr std::vector<std::vector<Action>> orders(
      int p, int m, int v) const requires orders_all_ranks<Base> {
    auto lists = base.orders(p, m, v);
    for (auto& list : lists) list.resize(static_cast<std::size_t>(merge(list)));
    return lists;
  }

 private:
  static constexpr int merge(std::span<Action> list) {
    for (Action& a : list) {
      if (a.kind == ActionKind::backward_input) a.kind = ActionKind::backward;
    }
    return detail::without_weights(list);
  }
};

/// The traversal with each backward in two: I in the backward's place, W as late as Delay allows,
/// the oldest first. Where Base splits already, its W move.
/// Valid wherever Base is, on any placement and for any p, m, v that Base takes: nothing waits for
/// a W, and I comes where the backward stood. (chunk, kind) keeps its ascending micro-batches
/// because the W of a rank follow the order of its I. Peak: at most Base's plus the pending W, so
/// many more live activations of a chunk. Source: Qi et al., Zero bubble pipeline parallelism (the
/// split).
template <traversal_policy Base, weight_delay Delay>
struct SplitBackward {
  static constexpr std::string_view name = "split_backward";
  static constexpr bool splits_backward = true;
  [[no_unique_address]] Base base{};
  [[no_unique_address]] Delay delay{};

  [[nodiscard]] constexpr auto placement() const requires brings_placement<Base> {
    return base.placement();
  }

  [[nodiscard]] static constexpr int length(int /*p*/, int m, int v) noexcept { return 3 * m * v; }

  constexpr int order(int rank, int p, int m, int v, ActionSpan out) const {
    const int count = base.order(rank, p, m, v, out);
    const int kept = detail::without_weights(out.first(count));
    return detail::split_weights(out.first(length(p, m, v)), kept, delay.pending(rank, p, m, v));
  }

  [[nodiscard]] constexpr std::vector<std::vector<Action>> orders(
      int p, int m, int v) const requires orders_all_ranks<Base> {
    auto lists = base.orders(p, m, v);
    int rank = 0;
    for (auto& list : lists) {
      const int kept = detail::without_weights(list);
      list.resize(static_cast<std::size_t>(length(p, m, v)), Action{});
      const int count = detail::split_weights(list, kept, delay.pending(rank++, p, m, v));
      list.resize(static_cast<std::size_t>(count));
    }
    return lists;
  }
};

/// 1F1B with twice its warm-up: 2(p-1-r) forwards, then one forward and one backward in turn.
/// Right for every p, m >= 1; v must be 1. Peak: min(m, 2(p-r)-1) live activations on rank r.
/// Bubble: that of 1F1B where transfers take no time; each hop has a slack of its own otherwise.
/// Source: Zhuang et al., On optimizing the communication of model parallelism.
struct EagerOneForwardOneBackward {
  static constexpr std::string_view name = "eager_1f1b";

  [[nodiscard]] static constexpr int length(int /*p*/, int m, int /*v*/) noexcept { return 2 * m; }

  static constexpr int order(int rank, int p, int m, int v, ActionSpan out) {
    detail::expect_pipeline(rank, p, m, v);
    expects(v == 1, ErrorCode::usage, [&] {
      return sentence("eager 1F1B runs 1 chunk a rank, not v ", v,
                      "; use v 1, or dfc for several chunks");
    });
    return detail::interleave(m, m, 1, m, 2 * (p - 1 - rank), out);
  }
};

/// Zero-bubble H1: 1F1B whose W wait, r of them on rank r. Every p, m >= 1; v must be 1.
/// Peak: min(m, p) live activations on each rank, the worst of 1F1B. Idle time with m >= p:
/// (p-1)(T_F + T_I - T_W) where W is the shortest of the three, a third of 1F1B's for equal times.
/// When to use it: the memory of 1F1B suffices for the first rank and the bubble hurts.
/// Source: Qi et al., Zero bubble pipeline parallelism.
struct ZeroBubbleH1 : SplitBackward<OneForwardOneBackward, WeightByRank<1>> {
  static constexpr std::string_view name = "zb_h1";
};

/// Zero-bubble H2: eager 1F1B whose W wait, 2r of them on rank r. Every p, m >= 1; v must be 1.
/// Peak: min(m, 2p-1) live activations on each rank. With m >= 2p-1 a rank idles between its first
/// and its last action (p-1)(T_F + T_I - 2 T_W), where W is the shortest of the three: nothing for
/// equal times. The step as a whole idles at least (p-1)T_F, as ranks start one after the other.
/// With fewer micro-batches the order stays valid and idles more; with m <= p nothing is gained
/// over H1.
/// When to use it: memory for twice H1's activations, and an optimizer step that a rank may begin
/// before the others end; a global norm or any other wait of all ranks brings the skew back.
/// Source: Qi et al., Zero bubble pipeline parallelism.
struct ZeroBubbleH2 : SplitBackward<EagerOneForwardOneBackward, WeightByRank<2>> {
  static constexpr std::string_view name = "zb_h2";
};

static_assert(weight_delay<WeightAtOnce> && weight_delay<WeightByRank<1>> &&
              weight_delay<WeightsPending> && weight_delay<WeightAtEnd>);
static_assert(traversal_policy<ZeroBubbleH1> && traversal_policy<ZeroBubbleH2> &&
              traversal_policy<FullBackward<ZeroBubbleH1>>);

}  // namespace mega::inline v0::dpp
