/// @file  Tests of schedule storage and of the lowering pass.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

using namespace mega;
using mega_test::refusal_of;
using namespace mega::dpp;
using enum mega::dpp::ActionKind;

namespace {

std::vector<Action> rank_list(const Schedule& schedule, int rank) {
  const auto list = schedule.of_rank(rank);
  return {list.begin(), list.end()};
}

}  // namespace

TEST_CASE("dpp: lowering of two ranks, one chunk") {
  const auto made = lower(make_schedule(OneForwardOneBackward{}, 2, 2, 1));
  CHECK(rank_list(made, 0) ==
        std::vector<Action>{make_action(forward, 0, 0), make_action(send_forward, 0, 0),
                            make_action(forward, 0, 1), make_action(send_forward, 0, 1),
                            make_action(recv_backward, 0, 0), make_action(backward, 0, 0),
                            make_action(recv_backward, 0, 1), make_action(backward, 0, 1),
                            make_action(reduce, 0, all_microbatches)});
  CHECK(rank_list(made, 1) ==
        std::vector<Action>{make_action(recv_forward, 0, 0), make_action(forward, 0, 0),
                            make_action(loss, 0, 0), make_action(backward, 0, 0),
                            make_action(send_backward, 0, 0), make_action(recv_forward, 0, 1),
                            make_action(forward, 0, 1), make_action(loss, 0, 1),
                            make_action(backward, 0, 1), make_action(send_backward, 0, 1),
                            make_action(reduce, 0, all_microbatches)});
}

TEST_CASE("dpp: tied gradients are summed after all backwards and before their own reduce") {
  const auto made = lower(make_schedule(ScheduleTraversal<DFC>{}, 2, 2, 2), {.tied_ends = true});
  const auto first = rank_list(made, 0);
  const auto last = rank_list(made, 1);
  // Rank 0 holds stages 0 (tied) and 2; rank 1 holds stages 1 and 3 (tied).
  REQUIRE(first.size() > 3);
  CHECK(std::vector<Action>(first.end() - 3, first.end()) ==
        std::vector<Action>{make_action(backward, 0, 1),
                            make_action(tied_reduce, 0, all_microbatches),
                            make_action(reduce, 0, all_microbatches)});
  CHECK(std::vector<Action>(last.end() - 5, last.end()) ==
        std::vector<Action>{make_action(backward, 0, 1), make_action(send_backward, 0, 1),
                            make_action(reduce, 0, all_microbatches),
                            make_action(tied_reduce, 1, all_microbatches),
                            make_action(reduce, 1, all_microbatches)});
}

TEST_CASE("dpp: one rank has its two tied accumulators summed once") {
  const auto whole = lower(make_schedule(GPipe{}, 1, 1, 1), {.tied_ends = true});
  CHECK(rank_list(whole, 0) == std::vector<Action>{make_action(forward, 0, 0),
                                                   make_action(loss, 0, 0),
                                                   make_action(backward, 0, 0),
                                                   make_action(tied_reduce, 0, all_microbatches),
                                                   make_action(reduce, 0, all_microbatches)});
  const auto halves = lower(make_schedule(GPipe{}, 1, 1, 2), {.tied_ends = true});
  CHECK(rank_list(halves, 0) ==
        std::vector<Action>{
            make_action(forward, 0, 0), make_action(send_forward, 0, 0),
            make_action(recv_forward, 1, 0), make_action(forward, 1, 0), make_action(loss, 1, 0),
            make_action(backward, 1, 0), make_action(send_backward, 1, 0),
            make_action(recv_backward, 0, 0), make_action(backward, 0, 0),
            make_action(tied_reduce, 0, all_microbatches), make_action(reduce, 0, all_microbatches),
            make_action(reduce, 1, all_microbatches)});
}

TEST_CASE("dpp: a split backward sends its input gradient before the weight gradient") {
  const std::vector<std::vector<Action>> lists{
      {make_action(forward, 0, 0), make_action(backward_input, 0, 0),
       make_action(backward_weight, 0, 0)},
      {make_action(forward, 0, 0), make_action(backward_input, 0, 0),
       make_action(backward_weight, 0, 0)}};
  const auto made = lower(Schedule::from_lists(1, 1, lists));
  CHECK(rank_list(made, 1) ==
        std::vector<Action>{make_action(recv_forward, 0, 0), make_action(forward, 0, 0),
                            make_action(loss, 0, 0), make_action(backward_input, 0, 0),
                            make_action(send_backward, 0, 0), make_action(backward_weight, 0, 0),
                            make_action(reduce, 0, all_microbatches)});
}

TEST_CASE("dpp: a schedule knows where its stages are") {
  const auto v = make_schedule(GPipe{}, 3, 2, 2, VPlacement{});
  CHECK(v.view().stages() == 6);
  CHECK(v.view().stage(2, 1) == 3);
  CHECK(v.view().rank_of(5) == 0);
  CHECK(v.view().chunk_of(5) == 1);
  CHECK(lower(v).view().rank_of(5) == 0);
}

TEST_CASE("dpp: a schedule takes no more lists than ranks and no pipeline without ranks") {
  Schedule one(1, 1, 1, LoopPlacement{});
  one.append({});
  CHECK_THROWS_AS(one.append({}), Error);
  CHECK_THROWS_AS((void)(Schedule::from_lists(1, 1, {})), Error);
}

TEST_CASE("dpp: lowering keeps the halves of a fused pair together") {
  Action fused_forward = make_action(forward, 0, 1);
  fused_forward.with_next = true;
  Action fused_backward = make_action(backward, 0, 0);
  fused_backward.with_next = true;
  const std::vector<std::vector<Action>> lists{
      {make_action(forward, 0, 0), make_action(forward, 0, 1), fused_backward,
       make_action(forward, 0, 2), make_action(backward, 0, 1), make_action(backward, 0, 2)},
      {make_action(forward, 0, 0), fused_forward, make_action(backward, 0, 0),
       make_action(forward, 0, 2), make_action(backward, 0, 1), make_action(backward, 0, 2)}};
  const auto made = lower(Schedule::from_lists(3, 1, lists));
  CHECK(rank_list(made, 0) ==
        std::vector<Action>{make_action(forward, 0, 0), make_action(send_forward, 0, 0),
                            make_action(forward, 0, 1), make_action(send_forward, 0, 1),
                            make_action(recv_backward, 0, 0), fused_backward,
                            make_action(forward, 0, 2), make_action(send_forward, 0, 2),
                            make_action(recv_backward, 0, 1), make_action(backward, 0, 1),
                            make_action(recv_backward, 0, 2), make_action(backward, 0, 2),
                            make_action(reduce, 0, all_microbatches)});
  CHECK(rank_list(made, 1) ==
        std::vector<Action>{make_action(recv_forward, 0, 0), make_action(forward, 0, 0),
                            make_action(recv_forward, 0, 1), make_action(loss, 0, 0), fused_forward,
                            make_action(backward, 0, 0), make_action(send_backward, 0, 0),
                            make_action(recv_forward, 0, 2), make_action(forward, 0, 2),
                            make_action(loss, 0, 1), make_action(backward, 0, 1),
                            make_action(send_backward, 0, 1), make_action(loss, 0, 2),
                            make_action(backward, 0, 2), make_action(send_backward, 0, 2),
                            make_action(reduce, 0, all_microbatches)});
}

TEST_CASE("dpp: the last gradient of a chunk may be the first half of a pair") {
  Action fused = make_action(backward, 1, 0);
  fused.with_next = true;
  const std::vector<std::vector<Action>> lists{
      {make_action(forward, 0, 0), fused, make_action(forward, 0, 1)}};
  const auto list = rank_list(lower(Schedule::from_lists(2, 2, lists)), 0);
  // Both leave behind the pair: the gradient and the reduce of the first half, then the output.
  CHECK(list == std::vector<Action>{make_action(forward, 0, 0), make_action(send_forward, 0, 0),
                                    make_action(loss, 1, 0), fused, make_action(forward, 0, 1),
                                    make_action(send_backward, 1, 0),
                                    make_action(reduce, 1, all_microbatches),
                                    make_action(send_forward, 0, 1)});
}

namespace {

/// A policy that says one thing and does another.
struct Liar {
  static constexpr std::string_view name = "liar";
  int says = 0;
  int writes = 0;
  int returns = 0;
  [[nodiscard]] constexpr int length(int, int, int) const { return says; }
  constexpr int order(int, int, int, int, ActionSpan out) const {
    for (int i = 0; i < writes; ++i) out[static_cast<std::size_t>(i)] = make_action(forward, 0, i);
    return returns;
  }
};

struct FewLists : Liar {
  int lists = 0;
  [[nodiscard]] std::vector<std::vector<Action>> orders(int, int, int) const {
    return std::vector<std::vector<Action>>(static_cast<std::size_t>(lists));
  }
};

/// Every chunk on stage `stage`.
struct OneStage {
  static constexpr std::string_view name = "one_stage";
  int value = 0;
  [[nodiscard]] constexpr int stage(int, int, int, int) const { return value; }
  static constexpr int rank_of(int, int, int) { return 0; }
  static constexpr int chunk_of(int, int, int) { return 0; }
};

std::string refused(const Liar& policy) {
  return refusal_of([&] { (void)make_schedule(policy, 2, 3, 1); }, ErrorCode::logic);
}

}  // namespace

TEST_CASE("dpp: a policy whose length and order contradict each other is refused") {
  CHECK(refused({6, 6, 6}) == "accepted");
  CHECK(refused({6, 2, 2}) == "accepted");  // verify() judges what is missing
  CHECK(refused({0, 0, 0}) == "accepted");
  CHECK(refused({-1, 0, 0}) ==
        "length() of the policy liar is -1 for p 2, m 3, v 1; it must be at least 0");
  CHECK(refused({6, 6, -1}) ==
        "order() of the policy liar returns -1 for rank 0 of p 2, m 3, v 1; its length() allows "
        "0..6");
  CHECK(refused({6, 6, 9}).find("returns 9 for rank 0") != std::string::npos);
  CHECK(refused({6, 7, 6}) ==
        "an order has an action at position 6 of a rank, but its length() is 6");
  CHECK(refused({0, 1, 0}).find("position 0 of a rank, but its length() is 0") !=
        std::string::npos);
}

TEST_CASE("dpp: wrappers refuse a base whose count lies outside of its room") {
  const auto wrapped = [](const auto& policy) {
    return refusal_of([&] { (void)make_schedule(policy, 2, 3, 1); }, ErrorCode::logic);
  };
  CHECK(wrapped(FullBackward<Liar>{{6, 6, 7}}) ==
        "an order has 7 actions on a rank, but its length() is 6");
  CHECK(wrapped(FullBackward<Liar>{{6, 6, -1}}).find("has -1 actions") != std::string::npos);
  CHECK(wrapped(SplitBackward<Liar, WeightAtEnd>{{6, 10, 10}, {}}).find("position 9") !=
        std::string::npos);
}

TEST_CASE("dpp: orders() gives a list for each rank") {
  const auto refused_lists = [](int lists) {
    return refusal_of([&] { (void)make_schedule(FewLists{{}, lists}, 2, 3, 1); }, ErrorCode::logic);
  };
  CHECK(refused_lists(2) == "accepted");
  CHECK(refused_lists(1) == "orders() of the policy liar gives 1 lists for 2 ranks");
  CHECK(refused_lists(3).find("gives 3 lists for 2 ranks") != std::string::npos);
}

TEST_CASE("dpp: a placement that is no bijection is refused") {
  const auto place = [](int stage, int v) {
    return refusal_of([&] { (void)make_schedule(GPipe{}, 1, 1, v, OneStage{stage}); },
                      ErrorCode::logic);
  };
  CHECK(place(0, 1) == "accepted");
  CHECK(place(0, 2) ==
        "the placement one_stage puts stage 0 on chunk 1 of rank 0; each of 0..1 has one place");
  CHECK(place(-1, 1).find("puts stage -1 on chunk 0") != std::string::npos);
  CHECK(place(1 << 30, 1).find("each of 0..0 has one place") != std::string::npos);
}

TEST_CASE("dpp: sizes beyond the numbering of actions are refused before anything is allocated") {
  const auto refused_size = [](int p, int m, int v) {
    return refusal_of([&] { (void)make_schedule(GPipe{}, p, m, v); });
  };
  CHECK(refused_size(4, 1 << 30, 4) ==
        "p 4, m 1073741824, v 4 are more than 268435455 micro-batches of a stage, the limit for a "
        "schedule");
  CHECK(refused_size(1 << 30, 4, 1).find("are more than") != std::string::npos);
  CHECK(refused_size(2147483647, 2147483647, 32767).find("are more than") != std::string::npos);
}

TEST_CASE("dpp: only a valid schedule has a peak, and only of its own ranks") {
  const auto peak_of = [](const Schedule& schedule, int rank) {
    return refusal_of([&] { (void)verify(schedule).peak(rank); }, ErrorCode::logic);
  };
  const Schedule good = lower(make_schedule(OneForwardOneBackward{}, 2, 3, 1));
  CHECK(verify(good).peak(0) == 2);
  CHECK(peak_of(good, 2) == "rank 2 has no peak; the schedule's ranks are 0..1");
  CHECK(peak_of(good, -1).find("rank -1 has no peak") != std::string::npos);
  CHECK(peak_of(make_schedule(Liar{6, 2, 2}, 2, 3, 1), 0) ==
        "only a valid schedule has a peak: rank 0 lacks backward of chunk 0, micro-batch 0");
}
