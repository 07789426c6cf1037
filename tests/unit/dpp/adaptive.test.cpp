#include <mega/dpp/adaptive.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/verifier.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace mega::dpp;

constexpr int p = 4;
constexpr int m = 32;

/// A pipeline whose transfers are hidden from group size `enough` on. Activations of a group size g
/// take g/m of the memory.
StepMeasurement steady(int g, int enough, double memory = 0.0) {
  const double exposed = g >= enough ? 0.0 : 0.4 * (enough - g) / enough;
  return {1.0 + exposed, exposed, memory * g / m};
}

/// Runs `steps` steps; returns the group size of each.
template <class Measure>
std::vector<int> run(AdaptiveTraversal& dial, std::int64_t first, int steps,
                     const Measure& measure) {
  std::vector<int> sizes;
  for (std::int64_t step = first; step < first + steps; ++step) {
    const int g = dial.group_size(p, m);
    sizes.push_back(g);
    dial.observe(step, measure(g), p, m);
  }
  return sizes;
}

TEST_CASE("dpp: adaptive dial begins as DFC and gives its order") {
  const AdaptiveTraversal dial;
  for (const int rank : {0, 3}) {
    std::vector<Action> mine(2 * m * 2), theirs(2 * m * 2);
    CHECK(dial.order(rank, p, m, 2, mine) == 2 * m * 2);
    CHECK(ScheduleTraversal<DFC>{}.order(rank, p, m, 2, theirs) == 2 * m * 2);
    CHECK(mine == theirs);
  }
  CHECK(dial.log().empty());
}

TEST_CASE("dpp: adaptive dial goes on from where another was left") {
  AdaptiveTraversal dial;
  dial.begin_at(16);
  CHECK(dial.group_size(p, m) == 16);
  CHECK(dial.log().empty());
  // No move is on trial, so a step that is no faster takes none back; full memory does.
  CHECK(run(dial, 100, 8, [](int) {
          return StepMeasurement{1, 0, 0.5};
        }) == std::vector<int>(8, 16));
  CHECK(dial.observe(108, {1, 0, 0.99}, p, m));
  CHECK(dial.group_size(p, m) == 8);
}

TEST_CASE("dpp: adaptive dial holds group sizes that skip no turn, each twice the last, up to m") {
  CHECK(AdaptiveTraversal{}.group_sizes(4, 32) == std::vector<int>{4, 8, 16, 32});
  CHECK(AdaptiveTraversal{}.group_sizes(4, 10) == std::vector<int>{4, 10});
  CHECK(AdaptiveTraversal{}.group_sizes(4, 18) == std::vector<int>{4, 9, 18});
  CHECK(AdaptiveTraversal{}.group_sizes(4, 3) == std::vector<int>{4});
  CHECK(AdaptiveTraversal{}.group_sizes(1, 1) == std::vector<int>{1});
  AdaptiveTraversal capped;
  capped.limit(9);
  CHECK(capped.group_sizes(4, 32) == std::vector<int>{4, 8});
}

TEST_CASE("dpp: exposed links turn the dial to BFC, one size at a time, and it stays there") {
  AdaptiveTraversal dial;
  const auto sizes = run(dial, 0, 200, [](int g) { return steady(g, 32); });
  CHECK(sizes.front() == 4);
  CHECK(sizes[4] == 8);
  CHECK(sizes[8] == 16);
  CHECK(sizes.back() == 32);
  REQUIRE(dial.log().size() == 3);
  for (const DialMove& move : dial.log()) CHECK(move.reason == DialReason::links);
  CHECK(dial.log()[0].step == 3);
  CHECK(dial.log()[0].measured.step_seconds == doctest::Approx(1.35));
  CHECK(to_string(dial.log()[0]) ==
        "after step 3: group size 4 -> 8, since transfers were exposed for 25.9259 % of the step");
}

TEST_CASE("dpp: memory pressure turns the dial back at once, and it is not turned up again") {
  AdaptiveTraversal dial;
  run(dial, 0, 40, [](int g) { return steady(g, 32); });
  REQUIRE(dial.group_size(p, m) == 32);
  const auto sizes = run(dial, 40, 100, [](int g) { return steady(g, 32, 1.6); });
  CHECK(sizes[0] == 32);
  CHECK(sizes[1] ==
        16);  // 0.8 of the memory: below the bound, not below the bound for growing by 2
  CHECK(dial.log()[3].reason == DialReason::memory);
  int most = 0;
  for (std::size_t i = 1; i < sizes.size(); ++i) most = std::max(most, sizes[i]);
  CHECK(most >= 16);
}

TEST_CASE("dpp: a move that makes steps no faster is taken back and tried ever more rarely") {
  AdaptiveTraversal dial;
  // Exposed whatever the order: a slow rank, not a lack of slack.
  run(dial, 0, 1000, [](int) { return StepMeasurement{1.0, 0.2, 0.1}; });
  CHECK(dial.group_size(p, m) == 4);
  std::vector<std::int64_t> tried;
  for (const DialMove& move : dial.log()) {
    if (move.reason == DialReason::links) {
      CHECK(move.from == 4);
      tried.push_back(move.step);
    } else {
      CHECK(move.reason == DialReason::no_gain);
    }
  }
  REQUIRE(tried.size() >= 3);
  CHECK(tried.size() <= 6);
  CHECK(tried[2] - tried[1] > 1.5 * (tried[1] - tried[0]));
}

TEST_CASE("dpp: noise around the bounds does not make the dial swing") {
  AdaptiveTraversal dial;
  std::uint32_t state = 1;
  run(dial, 0, 2000, [&](int g) {
    state = state * 1664525U + 1013904223U;
    StepMeasurement measured = steady(g, 16);
    const double noise = (state >> 8) / double(1 << 24) - 0.5;
    measured.step_seconds *= 1 + 0.04 * noise;
    measured.exposed_seconds += 0.01 * (noise + 0.5);
    return measured;
  });
  CHECK(dial.group_size(p, m) == 16);
  CHECK(dial.log().size() <= 8);
}

TEST_CASE("dpp: a replayed log gives every step the same order without measuring") {
  AdaptiveTraversal dial;
  const auto recorded = run(dial, 0, 300, [](int g) { return steady(g, 16, 0.9); });
  AdaptiveTraversal again = AdaptiveTraversal::replay(dial.log());
  CHECK(run(again, 0, 300, [](int) { return StepMeasurement{}; }) == recorded);
  CHECK(again.log() == dial.log());
}

TEST_CASE("dpp: every order on the dial is valid and fits the slots of the largest") {
  AdaptiveTraversal dial;
  for (const int g : dial.group_sizes(p, m)) {
    const auto schedule = lower(make_schedule(Interleaved{{g}}, p, m, 2));
    CHECK(verify(schedule).ok());
  }
}

TEST_CASE("dpp: rules that cannot work are refused") {
  DialRules upside_down;
  upside_down.memory_below = 0.96;
  CHECK_THROWS_WITH_AS(
      AdaptiveTraversal{upside_down},
      "the dial's bound for larger groups, 0.96 of the memory, must lie below that "
      "for smaller ones, 0.95",
      mega::Error);
  DialRules hasty;
  hasty.patience = 0;
  CHECK_THROWS_AS(AdaptiveTraversal{hasty}, mega::Error);
}

}  // namespace
