/// @file  Tests of the shared order of transfers: it runs on every transport, and changes nothing
/// but where transfers stand.
#include <mega/core/error.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/transfer_order.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/verifier.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

using namespace mega;
using namespace mega::dpp;
using enum mega::dpp::ActionKind;

namespace {

bool crosses(const ScheduleView& s, int rank, const Action& a) {
  const int stage = s.stage(rank, a.chunk);
  if (a.kind == send_forward || a.kind == recv_backward) return s.rank_of(stage + 1) != rank;
  if (a.kind == recv_forward || a.kind == send_backward) return s.rank_of(stage - 1) != rank;
  return false;
}

/// The actions of a rank that cross to another one, or those that do not.
std::vector<Action> part(const ScheduleView& s, int rank, bool crossing) {
  std::vector<Action> found;
  for (const Action& a : s.of_rank(rank)) {
    if (crosses(s, rank, a) == crossing) found.push_back(a);
  }
  return found;
}

void check_order(const ScheduleView& s) {
  CAPTURE(s.p);
  CAPTURE(s.m);
  CAPTURE(s.v);
  const Schedule made = order_transfers(s);
  for (const Transport transport :
       {Transport::slots(), Transport::rendezvous(0), Transport::rendezvous(1),
        Transport::rendezvous(), Transport::blocking()}) {
    const Verdict verdict = verify(made, {}, transport);
    CHECK_MESSAGE(verdict.ok(), describe(verdict));
  }
  for (int rank = 0; rank < s.p; ++rank) {
    CHECK(part(made, rank, false) == part(s, rank, false));
    const auto moved = part(made, rank, true);
    const auto before = part(s, rank, true);
    CHECK(moved.size() == before.size());
    CHECK(std::is_permutation(moved.begin(), moved.end(), before.begin(), before.end()));
  }
  CHECK(verify(made).peak_per_rank == verify(s).peak_per_rank);
}

}  // namespace

TEST_CASE("dpp: transfers in one order run on every transport") {
  for (int p = 1; p <= 5; ++p) {
    for (int m = 1; m <= 9; ++m) {
      check_order(lower(make_schedule(OneForwardOneBackward{}, p, m, 1), {.tied_ends = true}));
      for (int v = 1; v <= 3; ++v) {
        for (const bool tied_ends : {false, true}) {
          check_order(lower(make_schedule(GPipe{}, p, m, v), {tied_ends}));
          check_order(lower(make_schedule(GPipe{}, p, m, v, VPlacement{}), {tied_ends}));
          check_order(lower(make_schedule(ScheduleTraversal<DFC>{}, p, m, v), {tied_ends}));
          check_order(lower(make_schedule(ScheduleTraversal<BFC>{}, p, m, v), {tied_ends}));
        }
      }
    }
  }
}

TEST_CASE("dpp: a recv stands where its message is made, before what starts no earlier") {
  const auto made = order_transfers(lower(make_schedule(OneForwardOneBackward{}, 2, 2, 1)));
  const auto list = [&](int rank) {
    const auto of_rank = made.of_rank(rank);
    return std::vector<Action>(of_rank.begin(), of_rank.end());
  };
  // Times: forward 1, backward 2. Rank 0 forwards at 0 and 1, rank 1 forwards at 1, backwards at 2.
  CHECK(list(0) ==
        std::vector<Action>{make_action(forward, 0, 0), make_action(send_forward, 0, 0),
                            make_action(forward, 0, 1), make_action(send_forward, 0, 1),
                            make_action(recv_backward, 0, 0), make_action(backward, 0, 0),
                            make_action(recv_backward, 0, 1), make_action(backward, 0, 1),
                            make_action(reduce, 0, all_microbatches)});
  CHECK(list(1) == std::vector<Action>{make_action(recv_forward, 0, 0), make_action(forward, 0, 0),
                                       make_action(recv_forward, 0, 1), make_action(loss, 0, 0),
                                       make_action(backward, 0, 0),
                                       make_action(send_backward, 0, 0), make_action(forward, 0, 1),
                                       make_action(loss, 0, 1), make_action(backward, 0, 1),
                                       make_action(send_backward, 0, 1),
                                       make_action(reduce, 0, all_microbatches)});
}

TEST_CASE("dpp: fused pairs stay together when transfers move") {
  Action fused_forward = make_action(forward, 0, 1);
  fused_forward.with_next = true;
  Action late_forward = make_action(forward, 0, 2);
  late_forward.with_next = true;
  const std::vector<std::vector<Action>> lists{
      {make_action(forward, 0, 0), make_action(forward, 0, 1), late_forward,
       make_action(backward, 0, 0), make_action(backward, 0, 1), make_action(backward, 0, 2)},
      {make_action(forward, 0, 0), fused_forward, make_action(backward, 0, 0),
       make_action(forward, 0, 2), make_action(backward, 0, 1), make_action(backward, 0, 2)}};
  check_order(lower(Schedule::from_lists(3, 1, lists)));
}

TEST_CASE("dpp: the shared order needs at most one slot more for each chunk") {
  for (const int m : {3, 8, 13}) {
    for (const int v : {1, 2, 3}) {
      const auto before = lower(make_schedule(ScheduleTraversal<DFC>{}, 4, m, v));
      const auto needed = required_slots(before);
      const auto shared = required_slots(order_transfers(before));
      for (std::size_t place = 0; place < needed.size(); ++place) {
        CHECK(shared[place] >= needed[place]);
        CHECK(shared[place] <= needed[place] + 1);
      }
    }
  }
}

TEST_CASE("dpp: transfers of an invalid schedule are not ordered") {
  CHECK_THROWS_AS((void)order_transfers(make_schedule(GPipe{}, 2, 1, 1)), Error);
}
