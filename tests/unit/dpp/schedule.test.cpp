/// @file  Tests of schedule storage and of the lowering pass.
#include <mega/core/error.hpp>
#include <mega/dpp/schedule.hpp>

#include <doctest/doctest.h>

#include <vector>

using namespace mega;
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
