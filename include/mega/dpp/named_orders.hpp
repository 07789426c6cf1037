/// @file  The pipeline orders by the names under which programs offer them, and the policy behind
/// each name, chosen at run time. Not part of mega.hpp.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>

namespace mega::inline v0::dpp {

/// A split_ order is its base with the weight gradients apart.
enum class NamedOrder : std::uint8_t {
  gpipe,
  looped_bfs,
  one_f_one_b,
  eager_one_f_one_b,
  dfc,
  bfc,
  interleaved,  ///< needs a group size
  zero_bubble_h1,
  zero_bubble_h2,
  zero_bubble_v,
  v_half,
  v_min,
  v_schedule,  ///< needs a cap
  dual_pipe_v,
  split_gpipe,
  split_looped_bfs,
  split_one_f_one_b,
  split_eager_one_f_one_b,
  split_dfc,
  split_bfc,
  split_interleaved,  ///< needs a group size
  adaptive,           ///< moves between group sizes as a run measures
  automatic,          ///< searched for given times
};

/// A name, as a command line spells it.
struct OrderName {
  std::string_view name;
  NamedOrder order;
  int chunks;  ///< a rank, where nothing else says how many
  std::string_view summary;
};

inline constexpr std::array<OrderName, 23> order_names{{
    {"gpipe", NamedOrder::gpipe, 1, "all forwards, then all backwards"},
    {"looped-bfs", NamedOrder::looped_bfs, 2, "gpipe over several chunks a rank"},
    {"1f1b", NamedOrder::one_f_one_b, 1,
     "one forward and one backward in turn; least memory of one chunk a rank"},
    {"eager-1f1b", NamedOrder::eager_one_f_one_b, 1,
     "1f1b with twice its warm-up, which gives each hop some slack"},
    {"dfc", NamedOrder::dfc, 2,
     "interleaved 1f1b, depth first: groups of --pp micro-batches, least memory"},
    {"bfc", NamedOrder::bfc, 2,
     "interleaved 1f1b, breadth first: one group, most slack for transfers"},
    {"interleaved", NamedOrder::interleaved, 2,
     "interleaved 1f1b with --group-size between those of dfc and bfc"},
    {"zb-h1", NamedOrder::zero_bubble_h1, 1,
     "split backward, a third of 1f1b's bubble in the memory of 1f1b's first rank"},
    {"zb-h2", NamedOrder::zero_bubble_h2, 1,
     "split backward, no bubble but start skew in twice the memory"},
    {"zb-v", NamedOrder::zero_bubble_v, 2,
     "split backward on a V of two chunks, no bubble but start skew in 1f1b's memory"},
    {"v-half", NamedOrder::v_half, 2, "the V in about half of that memory"},
    {"v-min", NamedOrder::v_min, 2, "the V in about a third of it"},
    {"v", NamedOrder::v_schedule, 2, "the V under --memory-cap"},
    {"dualpipev", NamedOrder::dual_pipe_v, 2,
     "the V with a forward and a backward side by side, which take --pair"},
    {"split-gpipe", NamedOrder::split_gpipe, 1, "gpipe with weight gradients apart"},
    {"split-looped-bfs", NamedOrder::split_looped_bfs, 2, "looped-bfs with weight gradients apart"},
    {"split-1f1b", NamedOrder::split_one_f_one_b, 1, "1f1b with weight gradients apart"},
    {"split-eager-1f1b", NamedOrder::split_eager_one_f_one_b, 1,
     "eager-1f1b with weight gradients apart"},
    {"split-dfc", NamedOrder::split_dfc, 2, "dfc with weight gradients apart"},
    {"split-bfc", NamedOrder::split_bfc, 2, "bfc with weight gradients apart"},
    {"split-interleaved", NamedOrder::split_interleaved, 2,
     "interleaved with weight gradients apart"},
    {"adaptive", NamedOrder::adaptive, 2,
     "interleaved 1f1b whose group size follows what steps measure"},
    {"auto", NamedOrder::automatic, 1,
     "the best order that a search finds for the times, under --memory-cap if given"},
}};

namespace detail {
constexpr bool names_stand_in_order() noexcept {
  for (std::size_t i = 0; i < order_names.size(); ++i) {
    if (static_cast<std::size_t>(order_names[i].order) != i) return false;
  }
  return true;
}
}  // namespace detail
static_assert(detail::names_stand_in_order());

[[nodiscard]] constexpr const OrderName& named(NamedOrder order) noexcept {
  return order_names[static_cast<std::size_t>(order)];
}
/// The entry of a name; null for one that there is none of.
[[nodiscard]] constexpr const OrderName* find_order_name(std::string_view name) noexcept {
  for (const OrderName& each : order_names) {
    if (each.name == name) return &each;
  }
  return nullptr;
}

/// Whether weight gradients may wait as a WeightsPending says.
[[nodiscard]] constexpr bool takes_weight_delay(NamedOrder order) noexcept {
  return order >= NamedOrder::split_gpipe && order <= NamedOrder::split_interleaved;
}
[[nodiscard]] constexpr bool takes_group_size(NamedOrder order) noexcept {
  return order == NamedOrder::interleaved || order == NamedOrder::split_interleaved;
}
/// Whether it stands on VPlacement; all others, but automatic, are for the loop.
[[nodiscard]] constexpr bool stands_on_v(NamedOrder order) noexcept {
  return order >= NamedOrder::zero_bubble_v && order <= NamedOrder::dual_pipe_v;
}
/// Whether stages must run backward_input and backward_weight apart.
[[nodiscard]] constexpr bool has_split_backward(NamedOrder order) noexcept {
  return takes_weight_delay(order) || stands_on_v(order) || order == NamedOrder::automatic ||
         order == NamedOrder::zero_bubble_h1 || order == NamedOrder::zero_bubble_h2;
}

/// Weight gradients that may wait, by name: "at-once", "by-rank", "at-end", or how many on each
/// rank; nothing for another text.
[[nodiscard]] inline std::optional<WeightsPending> weights_pending_of(std::string_view text) {
  if (text == "at-once") return WeightsPending{0, 0};
  if (text == "by-rank") return WeightsPending{0, 1};
  if (text == "at-end") return WeightsPending{std::numeric_limits<int>::max(), 0};
  int count = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (failed != std::errc() || end != text.data() + text.size() || count < 0) return std::nullopt;
  return WeightsPending{count, 0};
}

/// What some names leave open.
struct OrderNumbers {
  int group_size = 0;
  int cap = 0;  ///< live activations of a chunk that a rank may hold
  WeightsPending weights{0, 1};
};

/// use(policy) with the policy of the name. What the name has no use for is passed over; policies
/// refuse numbers that they cannot mean. Throws Error(logic) for adaptive and automatic, whose
/// policy is found by measuring.
template <class Use>
constexpr auto with_named(NamedOrder order, const OrderNumbers& numbers, const Use& use) {
  using enum NamedOrder;
  const auto split = [&]<class Base>(const Base& base) {
    return use(SplitBackward<Base, WeightsPending>{base, numbers.weights});
  };
  switch (order) {
    case gpipe:
    case looped_bfs: return use(GPipe{});
    case one_f_one_b: return use(OneForwardOneBackward{});
    case eager_one_f_one_b: return use(EagerOneForwardOneBackward{});
    case dfc: return use(ScheduleTraversal<DFC>{});
    case bfc: return use(ScheduleTraversal<BFC>{});
    case interleaved: return use(Interleaved{{numbers.group_size}});
    case zero_bubble_h1: return use(ZeroBubbleH1{});
    case zero_bubble_h2: return use(ZeroBubbleH2{});
    case zero_bubble_v: return use(ZeroBubbleV{});
    case v_half: return use(VHalf{});
    case v_min: return use(VMin{});
    case v_schedule: return use(VSchedule{{numbers.cap}});
    case dual_pipe_v: return use(DualPipeV{});
    case split_gpipe:
    case split_looped_bfs: return split(GPipe{});
    case split_one_f_one_b: return split(OneForwardOneBackward{});
    case split_eager_one_f_one_b: return split(EagerOneForwardOneBackward{});
    case split_dfc: return split(ScheduleTraversal<DFC>{});
    case split_bfc: return split(ScheduleTraversal<BFC>{});
    case split_interleaved: return split(Interleaved{{numbers.group_size}});
    case adaptive:
    case automatic: break;
  }
  throw Error(ErrorCode::logic, sentence(order == adaptive ? "adaptive" : "auto",
                                         " has no order before one is measured for"));
}

}  // namespace mega::inline v0::dpp
