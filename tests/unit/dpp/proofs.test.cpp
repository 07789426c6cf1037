/// @file  Schedules proven by the compiler: every line below would stop the build. The sizes are
/// the largest of daily use; far larger ones run through the same functions at the end.
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/transfer_order.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/verifier.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

template <class Policy, placement Placement = LoopPlacement>
constexpr Schedule lowered(const Policy& policy, int p, int m, int v, Placement place = {}) {
  return lower(make_schedule(policy, p, m, v, place), {.tied_ends = true});
}

constexpr bool runs(const ScheduleView& s, Transport transport) {
  return verify(s, {}, transport).ok();
}
constexpr bool deadlocks(const ScheduleView& s, Transport transport) {
  return verify(s, {}, transport).fault == Fault::deadlock;
}

// Complete, ordered and free of deadlock on posted slots; peaks as the policies promise.
static_assert(verify(lowered(GPipe{}, 8, 16, 1)).peak(7) == 16);
static_assert(verify(lowered(GPipe{}, 4, 8, 3)).peak(0) == 24);
static_assert(verify(lowered(OneForwardOneBackward{}, 8, 16, 1)).peak_per_rank ==
              std::vector<int>{8, 7, 6, 5, 4, 3, 2, 1});
static_assert(verify(lowered(OneForwardOneBackward{}, 8, 3, 1)).peak(0) == 3);
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 4, 8, 4)).peak(0) <= 19);
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 5, 3, 4)).ok());
static_assert(verify(lowered(ScheduleTraversal<BFC>{}, 4, 8, 2)).peak_per_rank ==
              std::vector<int>{15, 13, 11, 9});
static_assert(verify(lowered(ScheduleTraversal<BFC>{}, 8, 9, 2)).peak(0) == 18);
static_assert(verify(lowered(Interleaved{{5}}, 4, 13, 3)).peak(0) == 17);
static_assert(verify(lowered(GPipe{}, 4, 8, 2, VPlacement{})).peak(3) == 16);

#ifndef __clang__  // which by default ends an evaluation after 2^20 steps
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 8, 16, 2)).peak_per_rank ==
              std::vector<int>{23, 21, 19, 17, 15, 13, 11, 9});
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 8, 16, 4)).peak(7) == 25);
#endif

// Finite slots.
static_assert(required_slots(lowered(OneForwardOneBackward{}, 4, 8, 1)) ==
              std::vector<int>{4, 3, 2, 1});
static_assert(verify(lowered(ScheduleTraversal<DFC>{}, 4, 8, 2),
                     required_slots(lowered(ScheduleTraversal<DFC>{}, 4, 8, 2)))
                  .ok());

// Links on which nothing is posted ahead. 1F1B hangs on bare synchronous sends: its ranks send to
// each other at once. One out-buffer, or grouping, is enough for it.
static_assert(deadlocks(lowered(OneForwardOneBackward{}, 4, 8, 1), Transport::rendezvous(0)));
static_assert(runs(lowered(OneForwardOneBackward{}, 4, 8, 1), Transport::rendezvous(1)));
static_assert(runs(lowered(OneForwardOneBackward{}, 8, 16, 1), Transport::blocking()));
static_assert(runs(lowered(ScheduleTraversal<DFC>{}, 4, 8, 2), Transport::rendezvous(1)));
static_assert(deadlocks(lowered(ScheduleTraversal<BFC>{}, 4, 16, 2), Transport::rendezvous(2)));
static_assert(deadlocks(lowered(ScheduleTraversal<DFC>{}, 4, 8, 2), Transport::blocking()));

// One order of transfers for all ranks runs everywhere.
static_assert(runs(order_transfers(lowered(ScheduleTraversal<DFC>{}, 4, 8, 2)),
                   Transport::blocking()));
static_assert(runs(order_transfers(lowered(ScheduleTraversal<BFC>{}, 4, 8, 2)),
                   Transport::rendezvous(0)));
static_assert(runs(order_transfers(lowered(OneForwardOneBackward{}, 4, 8, 1)),
                   Transport::rendezvous(0)));

}  // namespace

TEST_CASE("dpp: what the compiler proves for small pipelines holds for 64 ranks at run time") {
  constexpr int p = 64;
  constexpr int m = 128;
  constexpr int v = 4;
  const auto check = [](const auto& policy, int group) {
    const Schedule schedule = lowered(policy, p, m, v);
    const Verdict verdict = verify(schedule);
    REQUIRE(verdict.ok());
    for (int rank = 0; rank < p; ++rank) {
      CHECK(verdict.peak(rank) == std::min(m * v, 2 * (p - 1 - rank) + (v - 1) * group + 1));
    }
    CHECK(verify(schedule, required_slots(schedule)).ok());
    const Schedule shared = order_transfers(schedule);
    CHECK(runs(shared, Transport::slots()));
    CHECK(runs(shared, Transport::rendezvous(0)));
    CHECK(runs(shared, Transport::rendezvous()));
    CHECK(runs(shared, Transport::blocking()));
  };
  check(ScheduleTraversal<DFC>{}, p);
  check(ScheduleTraversal<BFC>{}, m);
  check(Interleaved{{100}}, 100);
  CHECK(runs(lowered(ScheduleTraversal<DFC>{}, p, m, v), Transport::rendezvous()));
  CHECK(runs(lowered(OneForwardOneBackward{}, p, m, 1), Transport::blocking()));
}
