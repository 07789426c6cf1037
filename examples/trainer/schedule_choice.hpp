/// @file  The traversal that a run chose by name: one policy type over the library's, so that the
/// trainer is compiled once.
#pragma once
#include "config.hpp"
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <span>
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

struct ChosenTraversal {
  static constexpr std::string_view name = "chosen";
  Schedule schedule = Schedule::dfc;
  int group_size = 0;

  [[nodiscard]] ChosenPlacement placement() const noexcept { return {is_v()}; }

  /// use(policy) with the chosen one.
  template <class Use>
  auto with(const Use& use) const {
    using namespace mega::dpp;
    using enum trainer::Schedule;
    switch (schedule) {
      case gpipe: return use(GPipe{});
      case one_f_one_b: return use(OneForwardOneBackward{});
      case bfc: return use(ScheduleTraversal<BFC>{});
      case interleaved: return use(ScheduleTraversal<GroupSize>{{group_size}});
      case zero_bubble_h1: return use(ZeroBubbleH1{});
      case zero_bubble_h2: return use(ZeroBubbleH2{});
      case zero_bubble_v: return use(ZeroBubbleV{});
      case v_half: return use(VHalf{});
      case v_min: return use(VMin{});
      case dual_pipe_v: return use(DualPipeV{});
      case dfc: break;
    }
    return use(ScheduleTraversal<DFC>{});
  }

  [[nodiscard]] int length(int p, int m, int v) const {
    return with([=](const auto& policy) { return policy.length(p, m, v); });
  }
  int order(int rank, int p, int m, int v, std::span<mega::dpp::Action> out) const {
    return with([=](const auto& policy) { return policy.order(rank, p, m, v, out); });
  }
  [[nodiscard]] std::vector<std::vector<mega::dpp::Action>> orders(int p, int m, int v) const {
    return with([=](const auto& policy) {
      const mega::dpp::Schedule made = mega::dpp::make_schedule(policy, p, m, v);
      std::vector<std::vector<mega::dpp::Action>> lists;
      for (int rank = 0; rank < p; ++rank) {
        const auto own = made.of_rank(rank);
        lists.emplace_back(own.begin(), own.end());
      }
      return lists;
    });
  }

  /// A traversal of the same placement that takes a single micro-batch.
  [[nodiscard]] ChosenTraversal of_one_microbatch() const noexcept {
    return {is_v() ? Schedule::zero_bubble_v : Schedule::dfc, 0};
  }
  /// Whether stages must run backward_input and backward_weight apart.
  [[nodiscard]] bool splits_backward() const noexcept {
    return schedule == Schedule::zero_bubble_h1 || schedule == Schedule::zero_bubble_h2 || is_v();
  }
  /// Chunks a rank where the run names none.
  [[nodiscard]] int usual_chunks() const noexcept { return is_v() ? 2 : 1; }

 private:
  [[nodiscard]] bool is_v() const noexcept {
    return schedule == Schedule::zero_bubble_v || schedule == Schedule::v_half ||
           schedule == Schedule::v_min || schedule == Schedule::dual_pipe_v;
  }
};

static_assert(mega::dpp::traversal_policy<ChosenTraversal> &&
              mega::dpp::orders_all_ranks<ChosenTraversal> &&
              mega::dpp::brings_placement<ChosenTraversal>);

}  // namespace trainer
