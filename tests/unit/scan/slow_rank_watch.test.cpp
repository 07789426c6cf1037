// The rule that names slow ranks, on made-up times, and the exchange on threads.
#include <mega/comm/thread.hpp>
#include <mega/core/rng.hpp>
#include <mega/host/host.hpp>
#include <mega/scan/slow_rank_watch.hpp>

#include <doctest/doctest.h>

#include <string>
#include <vector>

using namespace mega;
using namespace mega::scan;

namespace {
/// Times of `ranks` ranks: 10 ms times (1 +- noise), the slow ones times their factor.
std::vector<double> times(int ranks, int observation, double noise,
                          const std::vector<std::pair<int, double>>& slow = {}) {
  const RandomKey random{
      .seed = 5, .step = static_cast<std::uint64_t>(observation), .use = RandomUse::test};
  std::vector<double> out;
  for (int r = 0; r < ranks; ++r)
    out.push_back(0.01 * (1 + noise * (2 * static_cast<double>(random.uniform(r)) - 1)));
  for (const auto& [rank, factor] : slow) out[static_cast<std::size_t>(rank)] *= factor;
  return out;
}
}  // namespace

TEST_CASE("scan: a slow rank among its peers is named once, with factor and first step") {
  SlowRankRule rule(peers_of({.tensor = 2, .data = 2, .pipeline = 2}));
  std::vector<SlowRank> said;
  std::int64_t said_at = -1;
  for (int o = 0; o < 12; ++o) {
    const auto now =
        rule.observe(4 * o, times(8, o, 0.05,
                                  o < 5 ? std::vector<std::pair<int, double>>{}
                                        : std::vector<std::pair<int, double>>{{6, 1.5}}));
    for (const SlowRank& slow : now) said.push_back(slow), said_at = 4 * o;
  }
  REQUIRE(said.size() == 1);
  CHECK(said[0].rank == 6);
  CHECK(said[0].factor > 1.35);
  CHECK(said[0].factor < 1.65);
  CHECK(said[0].since_step == 20);
  CHECK(said_at == 28);
  CHECK(to_string(SlowRank{3, 1.5, 8, false}) ==
        "rank 3 computes 1.50 times as long as its peers since step 8");
}

TEST_CASE("scan: a stage with more work is no slow rank") {
  SlowRankRule rule(peers_of({.tensor = 2, .data = 2, .pipeline = 2}));
  for (int o = 0; o < 20; ++o) {
    auto all = times(8, o, 0.05);
    for (std::size_t r = 4; r < 8; ++r) all[r] *= 2;
    CHECK(rule.observe(o, all).empty());
  }
}

TEST_CASE("scan: two slow ranks at once, also where they are half of the peers") {
  SlowRankRule rule(std::vector<int>(4, 0));
  std::vector<int> named;
  for (int o = 0; o < 6; ++o)
    for (const SlowRank& slow : rule.observe(o, times(4, o, 0.03, {{0, 1.6}, {3, 1.4}})))
      named.push_back(slow.rank);
  CHECK(named == std::vector<int>{0, 3});
}

TEST_CASE("scan: a healthy run of eight says nothing in a thousand observations") {
  for (const double noise : {0.0, 0.02, 0.09}) {
    CAPTURE(noise);
    SlowRankRule rule(peers_of({.tensor = 2, .data = 2, .pipeline = 2}));
    int said = 0;
    for (int o = 0; o < 1000; ++o)
      said += static_cast<int>(rule.observe(o, times(8, o, noise)).size());
    CHECK(said == 0);
  }
}

TEST_CASE("scan: a single late step is not said, and what comes back is said again") {
  SlowRankRule rule(std::vector<int>(4, 0));
  int said = 0;
  const auto observe = [&](int from, int to, double factor) {
    for (int o = from; o < to; ++o)
      said += static_cast<int>(rule.observe(o, times(4, o, 0.02, {{1, factor}})).size());
  };
  observe(0, 4, 1);
  observe(4, 6, 3);
  observe(6, 10, 1);
  CHECK(said == 0);
  observe(10, 20, 1.5);
  CHECK(said == 1);
  observe(20, 21, 1);
  observe(21, 30, 1.5);
  CHECK(said == 2);
}

TEST_CASE("scan: a rank without peers is compared with its own past, unless all slowed down") {
  const std::vector<int> apart{0, 1, 2};
  SlowRankRule rule(apart);
  std::vector<SlowRank> said;
  for (int o = 0; o < 12; ++o) {
    auto all = times(3, o, 0.03);
    all[2] *= o >= 6 ? 1.5 : 1;
    for (const SlowRank& slow : rule.observe(o, all)) said.push_back(slow);
  }
  REQUIRE(said.size() == 1);
  CHECK(said[0].rank == 2);
  CHECK(said[0].by_history);
  CHECK(said[0].since_step == 6);

  SlowRankRule longer_batches(apart);
  for (int o = 0; o < 12; ++o) {
    auto all = times(3, o, 0.03);
    for (double& t : all) t *= o >= 6 ? 1.5 : 1;
    CHECK(longer_batches.observe(o, all).empty());
  }
}

TEST_CASE("scan: two ranks that are each other's only peers are both named when both become slow") {
  const std::vector<int> stages{0, 0, 1, 1};
  for (const auto& [first, second] : {std::pair(1.5, 1.5), {1.5, 2.0}, {3.0, 1.6}}) {
    CAPTURE(first);
    CAPTURE(second);
    SlowRankRule rule(stages);
    std::vector<SlowRank> said;
    for (int o = 0; o < 14; ++o) {
      auto all = times(4, o, 0.03);
      if (o >= 6) all[2] *= first, all[3] *= second;
      for (const SlowRank& slow : rule.observe(o, all)) said.push_back(slow);
    }
    REQUIRE(said.size() == 2);
    CHECK(said[0].rank == 2);
    CHECK(said[1].rank == 3);
    for (const SlowRank& slow : said) CHECK(slow.since_step == 6);
    CHECK((said[0].by_history || said[1].by_history));
  }
  // A stage that has had more work from the beginning has not become slow.
  SlowRankRule rule(stages);
  for (int o = 0; o < 14; ++o) {
    auto all = times(4, o, 0.03);
    all[2] *= 2, all[3] *= 2;
    CHECK(rule.observe(o, all).empty());
  }
}

TEST_CASE("scan: times that are not known accuse nobody") {
  SlowRankRule rule(std::vector<int>(3, 0));
  for (int o = 0; o < 10; ++o) {
    CHECK(rule.observe(o, {-1, -1, -1}).empty());
    CHECK(rule.observe(o, {0.01, 0, 0.01}).empty());
  }
  CHECK_THROWS_AS((void)rule.observe(0, {1, 2}), Error);
}

TEST_CASE("scan: all ranks hear the same after each interval") {
  run_threads(4, [](ThreadComm& world) {
    Host device;
    SlowRankWatch<Host, ThreadComm> watch(device, world, {.data = 4}, 2);
    std::vector<SlowRank> said;
    int asked = 0;
    for (int step = 0; step < 16; ++step) {
      const auto now = watch.step_done(step, [&] {
        ++asked;
        return world.rank() == 2 ? 0.02 : 0.01;
      });
      for (const SlowRank& slow : now) said.push_back(slow);
      if (!now.empty()) CHECK(step == 7);
    }
    CHECK(asked == 8);
    REQUIRE(said.size() == 1);
    CHECK(said[0].rank == 2);
    CHECK(said[0].factor == doctest::Approx(2));
    // The first interval warms up.
    CHECK(said[0].since_step == 2);

    SlowRankWatch<Host, ThreadComm> off(device, world, {.data = 4}, 0);
    CHECK(off.step_done(0, [&] { return ++asked; }).empty());
    CHECK(asked == 8);
  });
}
