/// @file  The traversal that a run chose by name: one policy type over the library's, so that the
/// trainer is compiled once.
#pragma once
#include "config.hpp"
#include <mega/dpp/traversal.hpp>

#include <span>
#include <string_view>

namespace trainer {

struct ChosenTraversal {
  static constexpr std::string_view name = "chosen";
  Schedule schedule = Schedule::dfc;
  int group_size = 0;

  [[nodiscard]] int length(int p, int m, int v) const {
    return with([=](const auto& policy) { return policy.length(p, m, v); });
  }
  int order(int rank, int p, int m, int v, std::span<mega::dpp::Action> out) const {
    return with([=](const auto& policy) { return policy.order(rank, p, m, v, out); });
  }

 private:
  template <class Use>
  int with(const Use& use) const {
    using namespace mega::dpp;
    switch (schedule) {
      case Schedule::gpipe: return use(GPipe{});
      case Schedule::one_f_one_b: return use(OneForwardOneBackward{});
      case Schedule::bfc: return use(ScheduleTraversal<BFC>{});
      case Schedule::interleaved: return use(ScheduleTraversal<GroupSize>{{group_size}});
      case Schedule::dfc: break;
    }
    return use(ScheduleTraversal<DFC>{});
  }
};

static_assert(mega::dpp::traversal_policy<ChosenTraversal>);

}  // namespace trainer
