/// @file  Tests of the timing model, against closed formulas and published bubble rates.
#include <mega/core/error.hpp>
#include <mega/dpp/simulator.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

using namespace mega;
using namespace mega::dpp;

// Sums of whole numbers and halves are exact in double, so unit-time results compare with ==.

static_assert(simulate(make_schedule(ScheduleTraversal<DFC>{}, 4, 8, 2)).makespan == 57);
static_assert(simulate(make_schedule(OneForwardOneBackward{}, 4, 8, 1)).makespan == 33);

TEST_CASE("dpp: unit-time makespans with one chunk") {
  for (const auto& [p, m, makespan] :
       std::array<std::array<int, 3>, 3>{{{4, 8, 33}, {8, 16, 69}, {8, 24, 93}}}) {
    CHECK(simulate(make_schedule(GPipe{}, p, m, 1)).makespan == makespan);
    CHECK(simulate(make_schedule(OneForwardOneBackward{}, p, m, 1)).makespan == makespan);
  }
}

TEST_CASE("dpp: unit-time makespans and peaks with several chunks") {
  const auto dfc = simulate(make_schedule(ScheduleTraversal<DFC>{}, 4, 8, 2));
  CHECK(dfc.makespan == 57);
  CHECK(dfc.peak_per_rank == std::vector<int>{11, 9, 7, 5});
  const auto bfc = simulate(make_schedule(Interleaved{{8}}, 4, 8, 2));
  CHECK(bfc.makespan == 57);
  CHECK(bfc.peak_per_rank == std::vector<int>{15, 13, 11, 9});
  const auto deep = simulate(make_schedule(ScheduleTraversal<DFC>{}, 4, 8, 4));
  CHECK(deep.makespan == 105);
  CHECK(deep.peak_per_rank == std::vector<int>{19, 17, 15, 13});
  const auto wide = simulate(make_schedule(ScheduleTraversal<DFC>{}, 8, 16, 2));
  CHECK(wide.makespan == 117);
  CHECK(wide.peak_per_rank == std::vector<int>{23, 21, 19, 17, 15, 13, 11, 9});
}

TEST_CASE("dpp: a hop of half a unit is exposed with g = p and partly hidden breadth first") {
  const ActionTimes times{.hop = 0.5};
  const auto makespan = [&](const auto& policy, int p, int m, int v) {
    return simulate(make_schedule(policy, p, m, v), times).makespan;
  };
  CHECK(makespan(ScheduleTraversal<DFC>{}, 4, 8, 2) == 64);
  CHECK(makespan(LoopedBreadthFirst{}, 4, 8, 2) == 60);
  CHECK(makespan(ScheduleTraversal<DFC>{}, 4, 8, 4) == 120);
  CHECK(makespan(LoopedBreadthFirst{}, 4, 8, 4) == 108);
  CHECK(makespan(ScheduleTraversal<DFC>{}, 8, 16, 2) == 132);
  CHECK(makespan(LoopedBreadthFirst{}, 8, 16, 2) == 124);
  CHECK(makespan(ScheduleTraversal<BFC>{}, 4, 8, 2) == 60);
  CHECK(makespan(ScheduleTraversal<BFC>{}, 4, 8, 4) == 108);
  CHECK(makespan(ScheduleTraversal<BFC>{}, 8, 16, 2) == 124);
}

TEST_CASE("dpp: bubble is (p-1) of a stage's work over v, at zero transfer time") {
  const ActionTimes times{.forward = 2, .backward_input = 3, .backward_weight = 1.5};
  const double work = 6.5;
  for (const int p : {1, 2, 3, 4, 7}) {
    for (const int rounds : {1, 2, 3}) {
      const int m = p * rounds;
      for (const int v : {1, 2, 3, 4}) {
        CAPTURE(p);
        CAPTURE(m);
        CAPTURE(v);
        const auto check = [&](const auto& policy) {
          const auto t = simulate(make_schedule(policy, p, m, v), times);
          CHECK(t.busy == m * v * work);
          CHECK(t.bubble_wall() == (p - 1) * work);
          // Relative rounding of one division and of the formula's own.
          CHECK(t.wall_fraction() == doctest::Approx((p - 1.0) / (m * v + p - 1.0)).epsilon(1e-14));
        };
        check(GPipe{});
        check(ScheduleTraversal<DFC>{});
        check(ScheduleTraversal<BFC>{});
        if (v == 1) check(OneForwardOneBackward{});
      }
    }
  }
}

TEST_CASE("dpp: 1F1B's bubble rates of the zero-bubble paper's profiles, four digits") {
  struct Row {
    int p, m;
    double forward, input, weight, hop, rate;
  };
  const std::array<Row, 8> rows{{{8, 24, 18.522, 18.086, 9.337, .601, .2431},
                                 {8, 32, 18.513, 18.086, 9.331, .626, .1985},
                                 {8, 64, 18.546, 18.097, 9.321, .762, .1240},
                                 {8, 24, 29.718, 29.444, 19.927, .527, .2347},
                                 {8, 32, 29.802, 29.428, 19.530, .577, .1898},
                                 {8, 64, 29.935, 29.621, 19.388, .535, .1091},
                                 {16, 48, 11.347, 11.248, 8.132, .377, .2552},
                                 {32, 96, 10.419, 10.207, 7.715, .408, .2646}}};
  for (const Row& row : rows) {
    const auto t = simulate(make_schedule(OneForwardOneBackward{}, row.p, row.m, 1),
                            {row.forward, row.input, row.weight, row.hop});
    CAPTURE(row.p);
    CAPTURE(row.m);
    CHECK(std::round(t.span_fraction() * 1e4) == std::round(row.rate * 1e4));
  }
}

TEST_CASE("dpp: peaks follow the closed formulas") {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 17; ++m) {
      const auto one = simulate(make_schedule(OneForwardOneBackward{}, p, m, 1));
      const auto all = simulate(make_schedule(GPipe{}, p, m, 3));
      for (int rank = 0; rank < p; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        CHECK(one.peak_per_rank[r] == std::min(m, p - rank));
        CHECK(all.peak_per_rank[r] == 3 * m);
      }
      for (int v = 2; v <= 3; ++v) {
        for (int g = p; g <= std::max(p, m); ++g) {
          const auto t = simulate(make_schedule(Interleaved{{g}}, p, m, v));
          const bool exact = m % g == 0 || m % g >= p;
          for (int rank = 0; rank < p; ++rank) {
            const int formula = std::min(m * v, 2 * (p - 1 - rank) + (v - 1) * g + 1);
            const int peak = t.peak_per_rank[static_cast<std::size_t>(rank)];
            CHECK(peak <= formula);
            if (exact) CHECK(peak == formula);
          }
        }
      }
    }
  }
}

TEST_CASE("dpp: a split backward frees its activation only at the weight gradient") {
  using enum ActionKind;
  const std::vector<std::vector<Action>> lists{{{forward, false, 0, 0},
                                                {backward_input, false, 0, 0},
                                                {forward, false, 0, 1},
                                                {backward_weight, false, 0, 0},
                                                {backward_input, false, 0, 1},
                                                {backward_weight, false, 0, 1}}};
  const auto t = simulate(Schedule::from_lists(2, 1, lists), {2, 3, 5, 1});
  CHECK(t.makespan == 20);
  CHECK(t.peak_per_rank == std::vector<int>{2});
}

TEST_CASE("dpp: the V placement hands over inside a rank for free") {
  // Stages 0 1 | 1 0 on two ranks: two hops forwards and backwards cost, the turn does not.
  const auto t = simulate(make_schedule(GPipe{}, 2, 1, 2, VPlacement{}), {.hop = 10});
  CHECK(t.makespan == 4 * 3 + 4 * 10);
}

TEST_CASE("dpp: span leaves out the wait for the first micro-batch: ZB-H2 with p 2, m 3") {
  using enum ActionKind;
  const std::vector<std::vector<Action>> lists{{{forward, false, 0, 0},
                                                {forward, false, 0, 1},
                                                {forward, false, 0, 2},
                                                {backward_input, false, 0, 0},
                                                {backward_weight, false, 0, 0},
                                                {backward_input, false, 0, 1},
                                                {backward_weight, false, 0, 1},
                                                {backward_input, false, 0, 2},
                                                {backward_weight, false, 0, 2}},
                                               {{forward, false, 0, 0},
                                                {backward_input, false, 0, 0},
                                                {forward, false, 0, 1},
                                                {backward_input, false, 0, 1},
                                                {forward, false, 0, 2},
                                                {backward_input, false, 0, 2},
                                                {backward_weight, false, 0, 0},
                                                {backward_weight, false, 0, 1},
                                                {backward_weight, false, 0, 2}}};
  const auto t = simulate(Schedule::from_lists(3, 1, lists));
  CHECK(t.makespan == 10);
  CHECK(t.bubble_wall() == 1);  // (p-1) forwards
  CHECK(t.bubble_span() == 0);
  CHECK(t.peak_per_rank == std::vector<int>{3, 3});  // 2p-1
}

TEST_CASE("dpp: ranks that wait for each other cannot be timed") {
  using enum ActionKind;
  const std::vector<std::vector<Action>> lists{{{backward, false, 0, 0}, {forward, false, 0, 0}},
                                               {{forward, false, 0, 0}, {backward, false, 0, 0}}};
  CHECK_THROWS_WITH_AS((void)(simulate(Schedule::from_lists(1, 1, lists))),
                       "the schedule stops with 4 compute actions left: ranks wait for each other",
                       Error);
}

TEST_CASE("dpp: stages of different times: the slowest one sets the pace") {
  // GPipe on two ranks: 3 micro-batches through stages of 1 and 4, then back through 6 and 2.
  const std::array<ActionTimes, 2> times{{{1, 1, 1, 0.5}, {4, 5, 1, 0.25}}};
  const auto t = simulate(make_schedule(GPipe{}, 2, 3, 1), times);
  // Stage 1 starts at 1.5 and computes for 3 * (4 + 6); stage 0 ends one hop and 2 later.
  CHECK(t.makespan == 1.5 + 30 + 0.25 + 2);
  CHECK(t.busy == 30);
  CHECK(t.longest_span == 1.5 + 30 + 0.25 + 2);
  const std::array<ActionTimes, 4> equal{{{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}}};
  const auto schedule = make_schedule(ScheduleTraversal<DFC>{}, 2, 5, 2);
  CHECK(simulate(schedule, equal).makespan == simulate(schedule, {1, 2, 3, 4}).makespan);
  CHECK_THROWS_WITH_AS((void)(simulate(schedule, times)),
                       "simulate() was given the times of 2 stages for 4; 1 serves them all",
                       Error);
}

TEST_CASE("dpp: a fused pair starts with its later input and takes the pair's time") {
  using enum ActionKind;
  // One rank, two chunks: F00, F10, then F01 with B10, B00, F11, B11, B01.
  const std::vector<std::vector<Action>> lists{{{forward, false, 0, 0},
                                                {forward, false, 1, 0},
                                                {forward, true, 0, 1},
                                                {backward, false, 1, 0},
                                                {backward, false, 0, 0},
                                                {forward, false, 1, 1},
                                                {backward, false, 1, 1},
                                                {backward, false, 0, 1}}};
  const auto schedule = Schedule::from_lists(2, 2, lists);
  CHECK(simulate(schedule).makespan == 12);
  const auto fused = simulate(schedule, {.pair = 2.5});
  CHECK(fused.makespan == 11.5);
  CHECK(fused.busy == 11.5);
  CHECK(fused.peak_per_rank == std::vector<int>{3});
  // What the two stages save is averaged: (3 - 2.5 + 3 - 2) / 2.
  const std::array<ActionTimes, 2> times{{{.pair = 2.5}, {.pair = 2}}};
  CHECK(simulate(schedule, times).makespan == 12 - 0.75);
  // A pair is never faster than its longer half.
  CHECK(simulate(schedule, {.pair = 0}).makespan == 9 + 2);
}

TEST_CASE("dpp: neither half of a fused pair begins before the input of the other") {
  using enum ActionKind;
  // Two ranks, 1F1B with rank 0's second forward and first backward fused: the backward's gradient
  // comes at 1 + 1 + 2, and the fused forward's output leaves with the pair's end at 4 + 3.
  const auto run = [](bool lowered) {
    const std::vector<std::vector<Action>> lists{{{forward, false, 0, 0},
                                                  {forward, true, 0, 1},
                                                  {backward, false, 0, 0},
                                                  {backward, false, 0, 1}},
                                                 {{forward, false, 0, 0},
                                                  {backward, false, 0, 0},
                                                  {forward, false, 0, 1},
                                                  {backward, false, 0, 1}}};
    const auto schedule = Schedule::from_lists(2, 1, lists);
    return simulate(lowered ? lower(schedule) : schedule).makespan;
  };
  CHECK(run(false) == 7 + 1 + 2 + 2);
  CHECK(run(true) == 7 + 1 + 2 + 2);
}

TEST_CASE("dpp: a pair whose second half needs the first cannot be timed") {
  using enum ActionKind;
  const std::vector<std::vector<Action>> lists{{{forward, true, 0, 0}, {backward, false, 0, 0}}};
  CHECK_THROWS_AS((void)(simulate(Schedule::from_lists(1, 1, lists))), Error);
}
