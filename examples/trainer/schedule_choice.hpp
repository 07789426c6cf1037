/// @file  The traversal that a run chose by name: one policy type over the library's, so that the
/// trainer is compiled once.
#pragma once
#include "config.hpp"
#include <mega/dpp/adaptive.hpp>
#include <mega/dpp/named_orders.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

namespace trainer {

/// Round the ranks, or down and up again.
struct ChosenPlacement {
  static constexpr std::string_view name = "chosen";
  bool is_v = false;

  [[nodiscard]] int stage(int rank, int chunk, int p, int v) const noexcept {
    return is_v ? mega::dpp::VPlacement::stage(rank, chunk, p, v)
                : mega::dpp::LoopPlacement::stage(rank, chunk, p, v);
  }
  [[nodiscard]] int rank_of(int stage, int p, int v) const noexcept {
    return is_v ? mega::dpp::VPlacement::rank_of(stage, p, v)
                : mega::dpp::LoopPlacement::rank_of(stage, p, v);
  }
  [[nodiscard]] int chunk_of(int stage, int p, int v) const noexcept {
    return is_v ? mega::dpp::VPlacement::chunk_of(stage, p, v)
                : mega::dpp::LoopPlacement::chunk_of(stage, p, v);
  }
};

/// The compute actions of every rank.
using ActionLists = std::vector<std::vector<mega::dpp::Action>>;

struct ChosenTraversal {
  static constexpr std::string_view name = "chosen";
  Schedule schedule = Schedule::dfc;
  int group_size = 0;  ///< of interleaved; of adaptive the one in force, 0: that of dfc
  int cap = 0;         ///< of v
  mega::dpp::WeightsPending weights{0, 1};  ///< of the split ones
  bool on_v = false;                        ///< of automatic: where the stages stand
  int largest_group = 0;                    ///< of adaptive; 0: any
  /// Of automatic; null: the order that it begins its search with.
  std::shared_ptr<const ActionLists> found = nullptr;

  /// Adaptive with another group size in force.
  [[nodiscard]] ChosenTraversal turned_to(int size) const {
    ChosenTraversal out = *this;
    out.group_size = size;
    return out;
  }

  [[nodiscard]] ChosenPlacement placement() const noexcept { return {is_v()}; }

  /// The order with a policy of its own for v chunks a rank: of those that are decided by
  /// measurements the one that they begin with.
  [[nodiscard]] Schedule begun_with(int v) const noexcept {
    if (schedule == Schedule::adaptive)
      return group_size == 0 ? Schedule::dfc : Schedule::interleaved;
    if (schedule != Schedule::automatic) return schedule;
    if (on_v) return Schedule::zero_bubble_v;
    return v == 1 ? Schedule::zero_bubble_h1 : Schedule::split_dfc;
  }

  /// use(policy) with the chosen one for v chunks a rank.
  template <class Use>
  auto with(int v, const Use& use) const {
    const bool searches = schedule == Schedule::automatic;
    return mega::dpp::with_named(begun_with(v),
                                 {.group_size = group_size,
                                  .cap = cap,
                                  .weights = searches ? mega::dpp::WeightsPending{} : weights},
                                 use);
  }

  [[nodiscard]] int length(int p, int m, int v) const {
    if (found) {
      std::size_t longest = 0;
      for (const auto& list : *found) longest = std::max(longest, list.size());
      return static_cast<int>(longest);
    }
    return with(v, [=](const auto& policy) { return policy.length(p, m, v); });
  }
  int order(int rank, int p, int m, int v, mega::dpp::ActionSpan out) const {
    if (found) {
      const auto& list = (*found)[static_cast<std::size_t>(rank)];
      const int count = static_cast<int>(list.size());
      std::copy(list.begin(), list.end(), out.first(count).begin());
      return count;
    }
    return with(v, [=](const auto& policy) { return policy.order(rank, p, m, v, out); });
  }
  [[nodiscard]] ActionLists orders(int p, int m, int v) const {
    if (found) return *found;
    return with(
        v, [=](const auto& policy) { return lists_of(mega::dpp::make_schedule(policy, p, m, v)); });
  }
  [[nodiscard]] static ActionLists lists_of(const mega::dpp::Schedule& schedule) {
    ActionLists lists;
    for (int rank = 0; rank < schedule.view().p; ++rank) {
      const auto own = schedule.of_rank(rank);
      lists.emplace_back(own.begin(), own.end());
    }
    return lists;
  }

  /// The other group sizes of adaptive.
  [[nodiscard]] std::vector<ChosenTraversal> alternatives(int p, int m) const {
    std::vector<ChosenTraversal> out;
    if (schedule != Schedule::adaptive) return out;
    for (const int size : dial().group_sizes(p, m)) out.push_back(turned_to(size));
    return out;
  }
  /// A fresh dial of adaptive.
  [[nodiscard]] mega::dpp::AdaptiveTraversal dial() const {
    mega::dpp::AdaptiveTraversal made;
    made.limit(largest_group);
    return made;
  }

  /// A traversal of the same placement that takes a single micro-batch.
  [[nodiscard]] ChosenTraversal of_one_microbatch() const noexcept {
    return {is_v() ? Schedule::zero_bubble_v : Schedule::dfc};
  }
  /// Whether stages must run backward_input and backward_weight apart.
  [[nodiscard]] bool splits_backward() const noexcept {
    return mega::dpp::has_split_backward(schedule);
  }
  /// Whether it runs a forward and a backward as a pair.
  [[nodiscard]] bool has_fused_pairs() const noexcept { return schedule == Schedule::dual_pipe_v; }
  /// Chunks a rank where the run names none: two on the V and where the name means several.
  [[nodiscard]] int usual_chunks() const noexcept {
    return is_v() || schedule == Schedule::looped_bfs || schedule == Schedule::split_looped_bfs ? 2
                                                                                                : 1;
  }

 private:
  [[nodiscard]] bool is_v() const noexcept { return on_v || mega::dpp::stands_on_v(schedule); }
};

/// What the run chose. @pre check_order_choice(c)
[[nodiscard]] inline ChosenTraversal chosen_traversal(const Config& c) {
  return {.schedule = c.schedule,
          .group_size = c.group_size,
          .cap = c.schedule == Schedule::v_schedule ? c.memory_cap : 0,
          .weights = mega::dpp::weights_pending_of(c.weight_gradients)
                         .value_or(mega::dpp::WeightsPending{0, 1}),
          .on_v = c.placement == "v"};
}

static_assert(mega::dpp::traversal_policy<ChosenTraversal> &&
              mega::dpp::orders_all_ranks<ChosenTraversal> &&
              mega::dpp::names_alternatives<ChosenTraversal> &&
              mega::dpp::brings_placement<ChosenTraversal>);

}  // namespace trainer
