/// @file  Tests of the schedule verifier: all policies over a grid of pipelines, and broken
/// schedules that it must refuse for the right reason.
#include <mega/core/error.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

using namespace mega;
using namespace mega::dpp;
using enum mega::dpp::ActionKind;

namespace {

template <class Policy>
constexpr Schedule lowered(const Policy& policy, int p, int m, int v) {
  return lower(make_schedule(policy, p, m, v), {.tied_ends = true});
}

// One proof a shape that matters: plain, interleaved, breadth first, a group in between, fewer
// micro-batches than ranks, a short last group, one rank.
static_assert(verify(lowered(OneForwardOneBackward{}, 8, 16, 1)).ok());
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 4, 8, 2)).peak(0) == 11);
static_assert(verify(lowered(ScheduleTraversal<BFC>{}, 4, 8, 2)).peak(0) == 15);
static_assert(verify(lowered(Interleaved{{3}}, 2, 5, 2)).ok());
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 4, 3, 2)).ok());
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 4, 5, 2)).ok());
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 1, 3, 3)).ok());
static_assert(required_slots(lowered(OneForwardOneBackward{}, 2, 3, 1)) == std::vector<int>{2, 1});

using Lists = std::vector<std::vector<Action>>;

Lists lists_of(const ScheduleView& s) {
  Lists lists;
  for (int rank = 0; rank < s.p; ++rank) {
    const auto list = s.of_rank(rank);
    lists.emplace_back(list.begin(), list.end());
  }
  return lists;
}

std::ptrdiff_t find(const std::vector<Action>& list, const Action& a) {
  const auto at = std::find(list.begin(), list.end(), a);
  REQUIRE(at != list.end());
  return at - list.begin();
}

void move_before(std::vector<Action>& list, const Action& what, const Action& where) {
  list.erase(list.begin() + find(list, what));
  list.insert(list.begin() + find(list, where), what);
}

/// Valid, runs with its required slots, and each of those is needed.
void check_schedule(const ScheduleView& s) {
  CAPTURE(s.p);
  CAPTURE(s.m);
  CAPTURE(s.v);
  const Verdict verdict = verify(s);
  CHECK_MESSAGE(verdict.ok(), describe(verdict));
  if (!verdict.ok()) return;
  CHECK(verdict.peak_per_rank == simulate(s).peak_per_rank);
  std::vector<int> slots = required_slots(s);
  CHECK(verify(s, slots).ok());
  for (std::size_t place = 0; place < slots.size(); ++place) {
    CHECK(slots[place] >= verdict.peak_per_chunk[place]);
    CHECK(slots[place] <= s.m);
    --slots[place];
    if (slots[place] >= verdict.peak_per_chunk[place] || slots[place] == 0) {
      CHECK(verify(s, slots).fault == Fault::deadlock);
    }
    ++slots[place];
  }
}

}  // namespace

TEST_CASE("dpp: every policy is valid for p <= 6, v <= 4, m <= 13 and every group size") {
  for (int p = 1; p <= 6; ++p) {
    for (int m = 1; m <= 13; ++m) {
      check_schedule(lowered(OneForwardOneBackward{}, p, m, 1));
      for (int v = 1; v <= 4; ++v) {
        check_schedule(lowered(GPipe{}, p, m, v));
        check_schedule(lowered(ScheduleTraversal<DFC>{}, p, m, v));
        check_schedule(lowered(ScheduleTraversal<BFC>{}, p, m, v));
        check_schedule(lower(make_schedule(GPipe{}, p, m, v, VPlacement{}), {.tied_ends = true}));
        for (int g = p; g <= std::max(p, m); ++g) {
          CAPTURE(g);
          check_schedule(lowered(Interleaved{{g}}, p, m, v));
        }
      }
    }
  }
}

TEST_CASE(
    "dpp: one-chunk grid of the zero-bubble repository, with fewer micro-batches than ranks") {
  constexpr std::array<std::array<int, 2>, 8> grid{
      {{4, 4}, {4, 8}, {4, 16}, {2, 2}, {2, 4}, {8, 4}, {8, 8}, {8, 16}}};
  for (const auto& row : grid) {
    check_schedule(lowered(OneForwardOneBackward{}, row[0], row[1], 1));
  }
}

/// The definition, word by word: slots are added where a cycle wants some, and then taken away from
/// one place after the other, each time from the beginning.
std::vector<int> slots_one_by_one(const Schedule& s) {
  std::vector<int> slots = verify(s).peak_per_chunk;
  const std::vector<int> least = slots;
  for (Verdict verdict = verify(s, slots); !verdict.ok(); verdict = verify(s, slots)) {
    for (const Blocked& b : verdict.cycle) {
      if (b.wants != Blocked::Want::slot) continue;
      const int stage = s.view().stage(b.rank, b.action.chunk);
      const int wanted = b.action.kind == send_forward ? stage + 1 : stage;
      ++slots[static_cast<std::size_t>(s.view().place_of[static_cast<std::size_t>(wanted)])];
    }
  }
  for (std::size_t place = 0; place < slots.size(); ++place) {
    while (slots[place] > least[place]) {
      --slots[place];
      if (verify(s, slots).ok()) continue;
      ++slots[place];
      break;
    }
  }
  return slots;
}

TEST_CASE("dpp: required slots are those that adding and taking away one by one gives") {
  int added = 0;
  const auto check = [&](const Schedule& s) {
    const std::vector<int> slots = required_slots(s);
    CHECK(slots == slots_one_by_one(s));
    added += slots != verify(s).peak_per_chunk ? 1 : 0;
  };
  for (const int p : {2, 3, 5, 8}) {
    for (const int m : {3, 8, 13}) {
      CAPTURE(p);
      CAPTURE(m);
      for (const int v : {2, 3, 4}) {
        CAPTURE(v);
        for (int group = p; group <= std::max(p, m); ++group) {
          check(lowered(Interleaved{{group}}, p, m, v));
          check(lowered(SplitBackward<Interleaved, WeightsPending>{{{group}}, {2}}, p, m, v));
        }
        check(lowered(SplitBackward<GPipe, WeightAtEnd>{}, p, m, v));
      }
      for (int cap = 2; cap <= 2 * p; ++cap) check(lowered(VSchedule{{cap}}, p, m, 2));
      check(lowered(ZeroBubbleH2{}, p, m, 1));
    }
  }
  CHECK(added > 50);
}

TEST_CASE("dpp: peaks of the published Megatron trace, p 4, m 8, v 4") {
  const auto verdict = verify(lowered(ScheduleTraversal<DFC>{}, 4, 8, 4));
  CHECK(verdict.peak(0) == 19);
  CHECK(verdict.peak(3) == 13);
}

TEST_CASE("dpp: a short last group without its absent micro-batches deadlocks") {
  // Megatron's pattern with a remainder of 1 micro-batch on 4 ranks, which it refuses.
  Schedule compute(4, 5, 3, LoopPlacement{});
  std::vector<Action> list(30);
  for (int rank = 0; rank < 4; ++rank) {
    dpp::detail::interleave(5, 5, 3, 4, ScheduleTraversal<DFC>{}.warm_up(rank, 4, 5, 3), list);
    compute.append(list);
  }
  const auto verdict = verify(lower(compute));
  CHECK(verdict.fault == Fault::deadlock);
  CHECK(verdict.cycle.size() >= 2);
  CHECK(verify(lowered(ScheduleTraversal<DFC>{}, 4, 5, 3)).ok());
}

TEST_CASE("dpp: each dropped action is missed by name") {
  const auto lists = lists_of(lowered(ScheduleTraversal<DFC>{}, 3, 4, 2));
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    for (std::size_t i = 0; i < lists[rank].size(); ++i) {
      Lists broken = lists;
      broken[rank].erase(broken[rank].begin() + static_cast<std::ptrdiff_t>(i));
      const auto verdict = verify(Schedule::from_lists(4, 2, broken));
      CHECK(verdict.fault == Fault::missing);
      CHECK(verdict.rank == static_cast<int>(rank));
      CHECK(verdict.position == static_cast<int>(broken[rank].size()));
      CHECK(verdict.action == lists[rank][i]);
    }
  }
}

TEST_CASE("dpp: each repeated action is found at its second place") {
  const auto lists = lists_of(lowered(ScheduleTraversal<DFC>{}, 3, 4, 2));
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    for (std::size_t i = 0; i < lists[rank].size(); ++i) {
      Lists broken = lists;
      broken[rank].push_back(lists[rank][i]);
      const auto verdict = verify(Schedule::from_lists(4, 2, broken));
      CHECK(verdict.fault == Fault::duplicate);
      CHECK(verdict.rank == static_cast<int>(rank));
      CHECK(verdict.position == static_cast<int>(lists[rank].size()));
      CHECK(verdict.action == lists[rank][i]);
    }
  }
}

TEST_CASE("dpp: each wrong chunk, micro-batch or kind is refused") {
  const auto lists = lists_of(lowered(ScheduleTraversal<DFC>{}, 3, 4, 2));
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    for (std::size_t i = 0; i < lists[rank].size(); ++i) {
      const Action good = lists[rank][i];
      const auto fault_of = [&](Action bad) {
        Lists broken = lists;
        broken[rank][i] = bad;
        const auto verdict = verify(Schedule::from_lists(4, 2, broken));
        if (verdict.fault == Fault::out_of_place) CHECK(verdict.action == bad);
        return verdict.fault;
      };
      for (const int chunk : {-1, 2, 32767, -32768}) {
        CHECK(fault_of(make_action(good.kind, chunk, good.microbatch)) == Fault::out_of_place);
      }
      for (const int microbatch : {-2, 4, 2147483647}) {
        CHECK(fault_of(make_action(good.kind, good.chunk, microbatch)) == Fault::out_of_place);
      }
      CHECK(fault_of(make_action(static_cast<ActionKind>(11), good.chunk, good.microbatch)) ==
            Fault::out_of_place);
      const auto other = fault_of(make_action(good.kind, 1 - good.chunk, good.microbatch));
      const bool named = other == Fault::duplicate || other == Fault::out_of_place;
      CHECK(named);
      if (is_compute(good.kind)) CHECK(other == Fault::duplicate);
    }
  }
}

TEST_CASE("dpp: each exchange of neighbours is either harmless or refused as an order fault") {
  int harmless = 0;
  int refused = 0;
  const auto lists = lists_of(lowered(ScheduleTraversal<DFC>{}, 3, 4, 2));
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    for (std::size_t i = 0; i + 1 < lists[rank].size(); ++i) {
      Lists changed = lists;
      std::swap(changed[rank][i], changed[rank][i + 1]);
      const auto made = Schedule::from_lists(4, 2, changed);
      const auto verdict = verify(made);
      if (verdict.ok()) {
        ++harmless;
        CHECK_NOTHROW((void)simulate(made));
        CHECK_NOTHROW((void)required_slots(made));
        continue;
      }
      ++refused;
      CHECK(verdict.fault >= Fault::out_of_order);
      const Action first = lists[rank][i];
      const Action second = lists[rank][i + 1];
      if (first.chunk == second.chunk && first.microbatch == second.microbatch &&
          verdict.fault != Fault::deadlock) {
        CHECK(verdict.fault == Fault::dependency);
      }
    }
  }
  CHECK(harmless > 0);
  CHECK(refused > 40);
}

TEST_CASE("dpp: exchanged micro-batches break the order of accumulation") {
  for (const ActionKind kind : {forward, backward}) {
    auto lists = lists_of(make_schedule(GPipe{}, 2, 3, 2));
    std::swap(lists[1][static_cast<std::size_t>(find(lists[1], make_action(kind, 1, 0)))],
              lists[1][static_cast<std::size_t>(find(lists[1], make_action(kind, 1, 1)))]);
    const auto verdict = verify(lower(Schedule::from_lists(3, 2, lists)));
    CHECK(verdict.fault == Fault::out_of_order);
    CHECK(verdict.rank == 1);
    CHECK(verdict.action == make_action(kind, 1, 1));
  }
  const Lists split{{make_action(forward, 0, 0), make_action(forward, 0, 1),
                     make_action(backward_input, 0, 0), make_action(backward_input, 0, 1),
                     make_action(backward_weight, 0, 1), make_action(backward_weight, 0, 0)}};
  const auto verdict = verify(lower(Schedule::from_lists(2, 1, split)));
  CHECK(verdict.fault == Fault::out_of_order);
  CHECK(verdict.action == make_action(backward_weight, 0, 1));
  Lists inputs = split;
  inputs[0] = {make_action(forward, 0, 0),         make_action(forward, 0, 1),
               make_action(backward_input, 0, 1),  make_action(backward_input, 0, 0),
               make_action(backward_weight, 0, 0), make_action(backward_weight, 0, 1)};
  const auto swapped = verify(lower(Schedule::from_lists(2, 1, inputs)));
  CHECK(swapped.fault == Fault::out_of_order);
  CHECK(swapped.action == make_action(backward_input, 0, 1));
}

TEST_CASE("dpp: what an action needs must stand before it") {
  const auto lists = lists_of(lowered(ScheduleTraversal<DFC>{}, 2, 2, 2));
  const auto check = [&](std::size_t rank, Action early, Action late) {
    Lists broken = lists;
    move_before(broken[rank], early, late);
    const auto verdict = verify(Schedule::from_lists(2, 2, broken));
    CHECK(verdict.fault == Fault::dependency);
    CHECK(verdict.action == early);
    CHECK(verdict.rank == static_cast<int>(rank));
  };
  check(1, make_action(forward, 0, 0), make_action(recv_forward, 0, 0));
  check(1, make_action(send_forward, 0, 0), make_action(forward, 0, 0));
  check(1, make_action(loss, 1, 0), make_action(forward, 1, 0));
  check(1, make_action(backward, 1, 0), make_action(loss, 1, 0));
  check(0, make_action(backward, 0, 0), make_action(recv_backward, 0, 0));
  check(0, make_action(send_backward, 1, 0), make_action(backward, 1, 0));
  check(0, make_action(reduce, 1, all_microbatches), make_action(backward, 1, 1));
  check(0, make_action(reduce, 0, all_microbatches), make_action(tied_reduce, 0, all_microbatches));
  check(1, make_action(reduce, 1, all_microbatches), make_action(tied_reduce, 1, all_microbatches));
  check(0, make_action(tied_reduce, 0, all_microbatches), make_action(backward, 0, 1));

  const Lists weight_first{{make_action(forward, 0, 0), make_action(backward_weight, 0, 0),
                            make_action(backward_input, 0, 0)}};
  const auto verdict = verify(lower(Schedule::from_lists(1, 1, weight_first)));
  CHECK(verdict.fault == Fault::dependency);
  CHECK(verdict.action == make_action(backward_weight, 0, 0));
}

TEST_CASE("dpp: a channel delivers in the order of its sends") {
  auto lists = lists_of(lower(make_schedule(GPipe{}, 2, 2, 1)));
  move_before(lists[0], make_action(forward, 0, 1), make_action(send_forward, 0, 0));
  CHECK(verify(Schedule::from_lists(2, 1, lists)).ok());
  move_before(lists[0], make_action(send_forward, 0, 1), make_action(send_forward, 0, 0));
  const auto verdict = verify(Schedule::from_lists(2, 1, lists));
  CHECK(verdict.fault == Fault::unmatched);
  CHECK(verdict.rank == 1);
  CHECK(verdict.action == make_action(recv_forward, 0, 0));

  auto backwards = lists_of(lower(make_schedule(GPipe{}, 2, 2, 1)));
  move_before(backwards[1], make_action(backward, 0, 1), make_action(send_backward, 0, 0));
  move_before(backwards[1], make_action(loss, 0, 1), make_action(backward, 0, 1));
  CHECK(verify(Schedule::from_lists(2, 1, backwards)).ok());
  move_before(backwards[1], make_action(send_backward, 0, 1), make_action(send_backward, 0, 0));
  CHECK(verify(Schedule::from_lists(2, 1, backwards)).fault == Fault::unmatched);
}

TEST_CASE("dpp: a gradient is computed whole or in halves, not both") {
  const Lists both{{make_action(forward, 0, 0), make_action(backward, 0, 0),
                    make_action(backward_weight, 0, 0)}};
  CHECK(verify(lower(Schedule::from_lists(1, 1, both))).fault == Fault::duplicate);
  const Lists both_late{{make_action(forward, 0, 0), make_action(loss, 0, 0),
                         make_action(backward_input, 0, 0), make_action(backward, 0, 0),
                         make_action(reduce, 0, all_microbatches)}};
  const auto late = verify(Schedule::from_lists(1, 1, both_late));
  CHECK(late.fault == Fault::duplicate);
  CHECK(late.action == make_action(backward, 0, 0));
  const Lists half{{make_action(forward, 0, 0), make_action(backward_input, 0, 0)}};
  const auto verdict = verify(lower(Schedule::from_lists(1, 1, half)));
  CHECK(verdict.fault == Fault::missing);
  CHECK(verdict.action == make_action(backward_weight, 0, 0));
  const Lists split{{make_action(forward, 0, 0), make_action(backward_input, 0, 0),
                     make_action(backward_weight, 0, 0)}};
  CHECK(verify(lower(Schedule::from_lists(1, 1, split))).ok());
}

TEST_CASE("dpp: a compute order that was not lowered lacks its transfers") {
  const auto verdict = verify(make_schedule(GPipe{}, 2, 1, 1));
  CHECK(verdict.fault == Fault::missing);
  CHECK(verdict.action == make_action(send_forward, 0, 0));
}

TEST_CASE("dpp: a deadlock names the ranks of the cycle and what each waits for") {
  // Rank 2 wants both forwards first, rank 1 the first gradient before the second forward.
  const Lists lists{{make_action(forward, 0, 0), make_action(forward, 0, 1),
                     make_action(backward, 0, 0), make_action(backward, 0, 1)},
                    {make_action(forward, 0, 0), make_action(backward, 0, 0),
                     make_action(forward, 0, 1), make_action(backward, 0, 1)},
                    {make_action(forward, 0, 0), make_action(forward, 0, 1),
                     make_action(backward, 0, 0), make_action(backward, 0, 1)}};
  const auto made = lower(Schedule::from_lists(2, 1, lists));
  const auto verdict = verify(made);
  CHECK(verdict.fault == Fault::deadlock);
  REQUIRE(verdict.cycle.size() == 2);  // rank 0 waits too, but nobody waits for it
  CHECK(
      describe(verdict) ==
      "deadlock: rank 1 at position 3 (recv_backward of chunk 0, micro-batch 0) waits for rank 2; "
      "rank 2 at position 2 (recv_forward of chunk 0, micro-batch 1) waits for rank 1");
  CHECK_THROWS_WITH_AS((void)required_slots(made), describe(verdict).c_str(), Error);
  CHECK_THROWS_WITH_AS(expect_valid(made), describe(verdict).c_str(), Error);
}

TEST_CASE("dpp: too few slots deadlock at the send that finds none") {
  const auto made = lower(make_schedule(GPipe{}, 2, 3, 1));
  CHECK(required_slots(made) == std::vector<int>{3, 3});
  const auto verdict = verify(made, std::vector<int>{3, 2});
  CHECK(verdict.fault == Fault::deadlock);
  CHECK(
      describe(verdict) ==
      "deadlock: rank 0 at position 5 (send_forward of chunk 0, micro-batch 2) waits for a slot of "
      "rank 1; rank 1 at position 4 (recv_forward of chunk 0, micro-batch 2) waits for rank 0");
  const auto first = verify(made, std::vector<int>{2, 3});
  CHECK(first.fault == Fault::deadlock);
  CHECK(first.cycle.size() == 1);  // the first stage waits for a slot of its own
  CHECK(first.action == make_action(forward, 0, 2));
  CHECK_THROWS_AS((void)verify(made, std::vector<int>{3}), Error);
}

TEST_CASE("dpp: a hop inside a rank has slots enough never to block") {
  // Both chunks on one rank, forwards of chunk 0 run ahead of chunk 1, which itself never has more
  // than one live micro-batch: the second output still needs a slot to wait in.
  const Lists lists{{make_action(forward, 0, 0), make_action(forward, 0, 1),
                     make_action(forward, 1, 0), make_action(backward, 1, 0),
                     make_action(forward, 1, 1), make_action(backward, 1, 1),
                     make_action(backward, 0, 0), make_action(backward, 0, 1)}};
  const auto made = lower(Schedule::from_lists(2, 2, lists));
  const auto verdict = verify(made);
  CHECK(verdict.peak_per_chunk == std::vector<int>{2, 1});
  CHECK(verify(made, verdict.peak_per_chunk).fault == Fault::deadlock);
  CHECK(required_slots(made) == std::vector<int>{2, 2});
}

TEST_CASE("dpp: tied gradients summed too early deadlock, on one rank only are missed") {
  auto lists = lists_of(lowered(ScheduleTraversal<DFC>{}, 2, 2, 2));
  move_before(lists[1], make_action(tied_reduce, 1, all_microbatches), make_action(backward, 0, 1));
  const auto early = verify(Schedule::from_lists(2, 2, lists));
  CHECK(early.fault == Fault::deadlock);
  CHECK(early.cycle.size() == 2);

  auto middle = lists_of(lowered(GPipe{}, 3, 1, 1));
  middle[1].push_back(make_action(tied_reduce, 0, all_microbatches));
  CHECK(verify(Schedule::from_lists(1, 1, middle)).fault == Fault::out_of_place);
}

TEST_CASE("dpp: a verdict is told in one sentence") {
  const auto lists = lists_of(lower(make_schedule(GPipe{}, 1, 1, 1)));
  const auto sentence_of = [](const Lists& some) {
    return describe(verify(Schedule::from_lists(1, 1, some)));
  };
  CHECK(sentence_of(lists) == "the schedule is valid");
  Lists broken = lists;
  broken[0].erase(broken[0].begin());
  CHECK(sentence_of(broken) == "rank 0 lacks forward of chunk 0, micro-batch 0");
  broken = lists;
  broken[0].push_back(lists[0][0]);
  CHECK(
      sentence_of(broken) ==
      "forward of chunk 0, micro-batch 0 at position 4 of rank 0 repeats work that stands earlier "
      "in the list");
}

namespace {

Action with_next(Action a) {
  a.with_next = true;
  return a;
}

}  // namespace

TEST_CASE("dpp: a fused pair holds both its activations at once") {
  Lists lists{{make_action(forward, 0, 0), make_action(backward, 0, 0), make_action(forward, 0, 1),
               make_action(backward, 0, 1)}};
  const auto apart = lower(Schedule::from_lists(2, 1, lists));
  CHECK(verify(apart).peak(0) == 1);
  CHECK(verify(apart, std::vector<int>{1}).ok());
  lists[0][1].with_next = true;
  const auto fused = lower(Schedule::from_lists(2, 1, lists));
  const auto verdict = verify(fused);
  CHECK(verdict.ok());
  CHECK(verdict.peak(0) == 2);
  CHECK(verdict.peak_per_chunk == std::vector<int>{2});
  CHECK(required_slots(fused) == std::vector<int>{2});
  // The forward takes a slot when the pair begins, the backward gives one back when it ends.
  const auto short_of = verify(fused, std::vector<int>{1});
  CHECK(describe(short_of) ==
        "deadlock: rank 0 at position 3 (forward of chunk 0, micro-batch 1) waits for a slot of "
        "rank 0");
}

TEST_CASE("dpp: a pair begins when both halves have their inputs") {
  // Rank 1 needs the second forward before it can give the first gradient.
  Lists lists{{make_action(forward, 0, 0), make_action(forward, 0, 1), make_action(backward, 0, 0),
               make_action(backward, 0, 1)},
              {make_action(forward, 0, 0), make_action(forward, 0, 1), make_action(backward, 0, 0),
               make_action(backward, 0, 1)}};
  CHECK(verify(lower(Schedule::from_lists(2, 1, lists))).ok());
  lists[0][1].with_next = true;
  CHECK(describe(verify(lower(Schedule::from_lists(2, 1, lists)))) ==
        "deadlock: rank 0 at position 2 (recv_backward of chunk 0, micro-batch 0) waits for rank "
        "1; rank 1 at position 2 (recv_forward of chunk 0, micro-batch 1) waits for rank 0");
  lists[0][1].with_next = false;
  lists[1][1].with_next = true;
  CHECK(verify(lower(Schedule::from_lists(2, 1, lists))).ok());
}

TEST_CASE("dpp: a pair is one forward and one backward that stand together") {
  const Lists plain{{make_action(forward, 0, 0), make_action(forward, 0, 1),
                     make_action(backward_input, 0, 0), make_action(forward, 0, 2),
                     make_action(backward_weight, 0, 0), make_action(backward, 0, 1),
                     make_action(backward, 0, 2)}};
  const auto verdict_with = [&](const std::vector<std::size_t>& flagged) {
    Lists lists = plain;
    for (const std::size_t i : flagged) lists[0][i].with_next = true;
    return verify(lower(Schedule::from_lists(3, 1, lists)));
  };
  CHECK(verdict_with({}).ok());
  CHECK(verdict_with({1}).ok());
  CHECK(verdict_with({2}).ok());
  for (const std::vector<std::size_t>& flagged :
       {std::vector<std::size_t>{0}, {3}, {4}, {5}, {6}, {1, 2}, {1, 4}}) {
    const auto verdict = verdict_with(flagged);
    CHECK(verdict.fault == Fault::bad_pair);
    CHECK(verdict.action == with_next(plain[0][flagged.back() == 2 ? 1 : flagged.back()]));
  }
  const Lists same{{with_next(make_action(forward, 0, 0)), make_action(backward, 0, 0)}};
  const auto verdict = verify(lower(Schedule::from_lists(1, 1, same)));
  CHECK(describe(verdict) ==
        "forward of chunk 0, micro-batch 0 at position 1 of rank 0 has no partner right behind "
        "it: a fused pair is one forward and one backward, of different micro-batches or chunks");

  auto parted = lists_of(lower(
      Schedule::from_lists(2, 1,
                           {{make_action(forward, 0, 0), with_next(make_action(forward, 0, 1)),
                             make_action(backward, 0, 0), make_action(backward, 0, 1)}})));
  CHECK(verify(Schedule::from_lists(2, 1, parted)).ok());
  move_before(parted[0], make_action(loss, 0, 0), make_action(backward, 0, 0));
  CHECK(verify(Schedule::from_lists(2, 1, parted)).fault == Fault::bad_pair);
}

TEST_CASE("dpp: 1F1B hangs on bare synchronous sends, and on nothing weaker") {
  const auto made = lower(make_schedule(OneForwardOneBackward{}, 2, 2, 1));
  CHECK(describe(verify(made, {}, Transport::rendezvous(0))) ==
        "deadlock: rank 0 at position 3 (send_forward of chunk 0, micro-batch 1) waits for rank "
        "1; rank 1 at position 4 (send_backward of chunk 0, micro-batch 0) waits for rank 0");
  CHECK(verify(made, {}, Transport::rendezvous(1)).ok());
  CHECK(verify(made, {}, Transport::blocking()).ok());
  CHECK_THROWS_WITH_AS((void)verify(made, {}, Transport::rendezvous(-1)),
                       "verify() was given -1 out-buffers for each channel; 0 is the least", Error);
  CHECK_THROWS_AS(expect_valid(made, {}, Transport::rendezvous(0)), Error);
}

TEST_CASE("dpp: out-buffers bound how far a sender runs ahead") {
  // Breadth first, the last rank makes activations for the first before that one wants any.
  const auto made = lower(make_schedule(ScheduleTraversal<BFC>{}, 2, 6, 2));
  CHECK(describe(verify(made, {}, Transport::rendezvous(2))) ==
        "deadlock: rank 0 at position 10 (forward of chunk 0, micro-batch 5) waits for rank 1 to "
        "receive an earlier message; rank 1 at position 7 (forward of chunk 0, micro-batch 2) "
        "waits for rank 0 to receive an earlier message");
  CHECK(verify(made, {}, Transport::rendezvous(3)).ok());
  CHECK(verify(made, required_slots(made)).ok());
}

TEST_CASE("dpp: without tags all messages from one rank to another share a queue") {
  // Rank 0 sends chunk 0 of both micro-batches first, rank 1 wants chunk 1 of the first between.
  const Lists lists{
      {make_action(forward, 0, 0), make_action(forward, 0, 1), make_action(forward, 1, 0),
       make_action(forward, 1, 1), make_action(backward, 1, 0), make_action(backward, 1, 1),
       make_action(backward, 0, 0), make_action(backward, 0, 1)},
      {make_action(forward, 0, 0), make_action(forward, 1, 0), make_action(forward, 0, 1),
       make_action(forward, 1, 1), make_action(backward, 1, 0), make_action(backward, 1, 1),
       make_action(backward, 0, 0), make_action(backward, 0, 1)}};
  const auto made = lower(Schedule::from_lists(2, 2, lists));
  CHECK(verify(made).ok());
  CHECK(verify(made, {}, Transport::rendezvous()).ok());
  const auto verdict = verify(made, {}, Transport::blocking());
  CHECK(verdict.fault == Fault::unmatched);
  CHECK(describe(verdict) ==
        "recv_forward of chunk 1, micro-batch 0 at position 3 of rank 1 receives in another order "
        "than the other end sends");
}

TEST_CASE("dpp: transfers that stand next to each other are one group, others are not") {
  auto lists = lists_of(lower(make_schedule(OneForwardOneBackward{}, 2, 2, 1)));
  CHECK(verify(Schedule::from_lists(2, 1, lists), {}, Transport::blocking()).ok());
  // Within a group the order matters only for messages of one queue.
  std::swap(lists[1][4], lists[1][5]);
  CHECK(lists[1][4] == make_action(recv_forward, 0, 1));
  CHECK(lists[1][5] == make_action(send_backward, 0, 0));
  CHECK(verify(Schedule::from_lists(2, 1, lists), {}, Transport::blocking()).ok());

  // Split on both ranks: a forward stands between rank 0's send and recv, a weight gradient
  // between those of rank 1.
  const Lists split{
      {make_action(forward, 0, 0), make_action(forward, 0, 1), make_action(forward, 0, 2),
       make_action(backward, 0, 0), make_action(backward, 0, 1), make_action(backward, 0, 2)},
      {make_action(forward, 0, 0), make_action(backward_input, 0, 0),
       make_action(backward_weight, 0, 0), make_action(forward, 0, 1), make_action(backward, 0, 1),
       make_action(forward, 0, 2), make_action(backward, 0, 2)}};
  const auto made = lower(Schedule::from_lists(3, 1, split));
  CHECK(describe(verify(made, {}, Transport::blocking())) ==
        "deadlock: rank 0 at position 3 (send_forward of chunk 0, micro-batch 1) waits for rank "
        "1; rank 1 at position 4 (send_backward of chunk 0, micro-batch 0) waits for rank 0");
  CHECK(verify(made, {}, Transport::rendezvous(1)).ok());
}

TEST_CASE("dpp: a recv that stands early takes a slot early where nothing is posted ahead") {
  auto lists = lists_of(lower(make_schedule(OneForwardOneBackward{}, 2, 2, 1)));
  move_before(lists[1], make_action(recv_forward, 0, 1), make_action(forward, 0, 0));
  const auto made = Schedule::from_lists(2, 1, lists);
  for (const Transport transport :
       {Transport::slots(), Transport::rendezvous(1), Transport::blocking()}) {
    CHECK(verify(made, std::vector<int>{2, 2}, transport).ok());
  }
  CHECK(describe(verify(made, std::vector<int>{2, 1}, Transport::rendezvous(1))) ==
        "deadlock: rank 1 at position 1 (recv_forward of chunk 0, micro-batch 1) waits for a slot "
        "of rank 1");
  CHECK(describe(verify(made, std::vector<int>{2, 1}, Transport::slots())) ==
        "deadlock: rank 0 at position 3 (send_forward of chunk 0, micro-batch 1) waits for a slot "
        "of rank 1; rank 1 at position 1 (recv_forward of chunk 0, micro-batch 1) waits for rank "
        "0");
}
