/// @file  Tests of the automatic scheduler: its clock against simulate(), its orders against caps,
/// named traversals, exhaustive search and the published bubble rates.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/dpp/auto_schedule.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

namespace inner = mega::dpp::detail;

constexpr double unlimited = std::numeric_limits<double>::infinity();

/// Times of the stages between `low` and `low` + 1, all different.
std::vector<ActionTimes> random_times(int stages, std::uint64_t seed, double low = 0.25) {
  const RandomKey key{.seed = seed, .use = RandomUse::test};
  std::vector<ActionTimes> times;
  Index drawn = 0;
  const auto next = [&] { return low + static_cast<double>(key.uniform(drawn++)); };
  for (int stage = 0; stage < stages; ++stage) {
    const double forward = next();
    const double input = next();
    const double weight = next();
    times.push_back({forward, input, weight, 0.2 * next(), -1});
  }
  return times;
}

inner::Pipeline pipeline_of(const PipelineProfile& profile, const Schedule& schedule) {
  const auto stage_of = schedule.view().stage_of;
  return {profile, {stage_of.begin(), stage_of.end()}};
}

/// What a rank holds at most, counted from its list alone.
double peak_memory(std::span<const Action> list, double released_by_input) {
  double live = 0;
  double peak = 0;
  for (const Action& a : list) {
    if (a.kind == ActionKind::forward) live += 1;
    if (a.kind == ActionKind::backward) live -= 1;
    if (a.kind == ActionKind::backward_input) live -= released_by_input;
    if (a.kind == ActionKind::backward_weight) live -= 1 - released_by_input;
    peak = std::max(peak, live);
  }
  return peak;
}

void check_result(const PipelineProfile& profile, ScheduleGoal goal, const AutoSchedule& made) {
  const Verdict verdict = verify(lower(made.schedule));
  CHECK_MESSAGE(verdict.ok(), describe(verdict));
  const Timing timing = simulate(made.schedule, std::span<const ActionTimes>(profile.times));
  CHECK(made.timing.makespan == timing.makespan);
  CHECK(made.timing.longest_span == timing.longest_span);
  CHECK(made.timing.peak_per_rank == verdict.peak_per_rank);
  for (int rank = 0; rank < profile.p; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const double peak = peak_memory(made.schedule.of_rank(rank), profile.released_by_input);
    CHECK(made.memory_per_rank[r] == doctest::Approx(peak).epsilon(1e-9));
    if (!profile.caps.empty()) CHECK(peak <= profile.caps[r] + 1e-9);
  }
  for (const ScheduleCandidate& candidate : made.candidates) {
    CAPTURE(candidate.name);
    // Orders that are equally short but for rounding are chosen between by their memory.
    constexpr double rounding = 1 + 1e-11;
    if (goal == ScheduleGoal::makespan) CHECK(timing.makespan <= candidate.makespan * rounding);
    if (goal == ScheduleGoal::longest_span)
      CHECK(timing.longest_span <= candidate.longest_span * rounding);
  }
}

template <class Policy, class Placement = LoopPlacement>
void check_clock(const Policy& policy, int p, int m, int v, Placement place = {}) {
  CAPTURE(std::string(Policy::name));
  CAPTURE(p);
  CAPTURE(m);
  CAPTURE(v);
  PipelineProfile profile{.p = p, .m = m, .v = v, .times = random_times(p * v, 7), .caps = {}};
  profile.times.front().pair = 0.5 * profile.times.front().of(ActionKind::forward);
  const Schedule schedule = make_schedule(policy, p, m, v, place);
  const inner::Pipeline pipeline = pipeline_of(profile, schedule);
  inner::Stopwatch watch(pipeline);
  CHECK(std::ranges::equal(inner::schedule_of(inner::words_of(schedule), schedule).view().actions,
                           schedule.view().actions));
  for (int repeat = 0; repeat < 2; ++repeat) {
    REQUIRE(watch.run(inner::words_of(schedule)));
    const Timing timing = simulate(schedule, std::span<const ActionTimes>(profile.times));
    CHECK(watch.makespan() == timing.makespan);
    CHECK(watch.longest_span() == timing.longest_span);
    for (std::size_t rank = 0; rank < timing.peak_per_rank.size(); ++rank) {
      CHECK(watch.peak_memory()[rank] == timing.peak_per_rank[rank]);
    }
  }
}

/// 1F1B whose steady backward and the forward behind it form a pair.
struct Pairs {
  static constexpr std::string_view name = "pairs";
  static constexpr int length(int, int m, int) noexcept { return 2 * m; }
  static int order(int rank, int p, int m, int v, ActionSpan out) {
    const int count = OneForwardOneBackward::order(rank, p, m, v, out);
    for (int i = p - rank; i + 1 < count; ++i) {
      Action& a = out[static_cast<std::size_t>(i)];
      a.with_next = a.kind == ActionKind::backward &&
                    out[static_cast<std::size_t>(i + 1)].kind == ActionKind::forward;
    }
    return count;
  }
};

/// All words of m forwards, inputs and weights of one chunk in which each waits for the one before.
void all_words(int m, int f, int i, int w, std::vector<inner::Letter>& word, inner::Words& found) {
  if (w == m) found.push_back(word);
  const auto with = [&](ActionKind kind, int df, int di, int dw) {
    word.push_back({kind, false, 0});
    all_words(m, f + df, i + di, w + dw, word, found);
    word.pop_back();
  };
  if (f < m) with(ActionKind::forward, 1, 0, 0);
  if (i < f) with(ActionKind::backward_input, 0, 1, 0);
  if (w < i) with(ActionKind::backward_weight, 0, 0, 1);
}

/// The shortest makespan of any order within the caps, by trying all.
double shortest_of_all(const PipelineProfile& profile) {
  std::vector<inner::Letter> word;
  inner::Words choices;
  all_words(profile.m, 0, 0, 0, word, choices);
  const Schedule schedule = make_schedule(GPipe{}, profile.p, profile.m, 1);
  const inner::Pipeline pipeline = pipeline_of(profile, schedule);
  inner::Stopwatch watch(pipeline);
  std::vector<std::size_t> pick(static_cast<std::size_t>(profile.p), 0);
  double shortest = unlimited;
  for (;;) {
    inner::Words words;
    for (const std::size_t i : pick) words.push_back(choices[i]);
    if (watch.run(words)) shortest = std::min(shortest, watch.makespan());
    std::size_t rank = 0;
    while (rank < pick.size() && ++pick[rank] == choices.size()) pick[rank++] = 0;
    if (rank == pick.size()) return shortest;
  }
}

std::string refusal(const PipelineProfile& profile) {
  return mega_test::refusal_of([&] { static_cast<void>(auto_schedule(profile)); });
}

}  // namespace

TEST_CASE("dpp: the scheduler's clock equals simulate() to the last bit") {
  for (const int p : {1, 2, 3, 6}) {
    for (const int m : {1, 2, 7, 12}) {
      check_clock(GPipe{}, p, m, 1);
      check_clock(OneForwardOneBackward{}, p, m, 1);
      check_clock(ZeroBubbleH1{}, p, m, 1);
      check_clock(ZeroBubbleH2{}, p, m, 1);
      check_clock(Pairs{}, p, m, 1);
      check_clock(GPipe{}, p, m, 3, VPlacement{});
      check_clock(VSchedule{{p + 1}}, p, m, 2);
      if (m >= 2 * p) check_clock(DualPipeV{}, p, m, 2);
      check_clock(ScheduleTraversal<DFC>{}, p, m, 2);
      check_clock(ScheduleTraversal<BFC>{}, p, m, 4);
      check_clock(SplitBackward<ScheduleTraversal<DFC>, WeightAtEnd>{}, p, m, 3);
    }
  }
}

TEST_CASE("dpp: the scheduler's clock stops at a deadlock and at a cap") {
  PipelineProfile profile{.p = 2, .m = 2, .v = 1, .times = {{}}, .caps = {2, 1}};
  const Schedule schedule = make_schedule(OneForwardOneBackward{}, 2, 2, 1);
  CHECK(inner::Stopwatch(pipeline_of(profile, schedule)).run(inner::words_of(schedule)));
  profile.caps = {1.5, 1};
  CHECK_FALSE(inner::Stopwatch(pipeline_of(profile, schedule)).run(inner::words_of(schedule)));
  profile.caps = {};
  using enum ActionKind;
  const inner::Words backward_first = {{{forward}, {backward}}, {{backward}, {forward}}};
  CHECK_FALSE(inner::Stopwatch(pipeline_of(profile, schedule)).run(backward_first));
  const inner::Words weight_first = {{{forward}, {backward_weight}, {backward_input}},
                                     {{forward}, {backward}}};
  CHECK_FALSE(inner::Stopwatch(pipeline_of(profile, schedule)).run(weight_first));
}

TEST_CASE("dpp: orders that are too long are cut off, and no others") {
  struct Case {
    int p, m, v;
    bool on_v;
    double cap;
  };
  std::uint64_t seed = 0;
  for (const Case& c :
       {Case{1, 3, 1, false, unlimited}, Case{4, 9, 1, false, 4}, Case{3, 7, 2, true, unlimited},
        Case{4, 8, 2, false, 7}, Case{5, 6, 3, false, unlimited}, Case{4, 12, 2, true, 6}}) {
    CAPTURE(c.p);
    CAPTURE(c.m);
    CAPTURE(c.v);
    const auto ranks = static_cast<std::size_t>(c.p);
    const PipelineProfile profile{.p = c.p,
                                  .m = c.m,
                                  .v = c.v,
                                  .times = random_times(c.p * c.v, ++seed),
                                  .caps = std::vector<double>(ranks, c.cap)};
    const Schedule empty =
        c.on_v ? Schedule(c.p, c.m, c.v, VPlacement{}) : Schedule(c.p, c.m, c.v, LoopPlacement{});
    const inner::Pipeline pipeline = pipeline_of(profile, empty);
    inner::Stopwatch watch(pipeline), cutting(pipeline);
    for (const double lead : {1.0, 2.0, 5.0}) {
      for (const double patience : {0.0, 0.5, 1.0}) {
        const inner::ListRules rules{
            std::vector<double>(ranks * static_cast<std::size_t>(c.v), lead), patience, lead == 2.0,
            patience == 0.5};
        const inner::Words words = inner::ListScheduler(pipeline, rules).run();
        REQUIRE(watch.run(words));
        for (const auto goal : {ScheduleGoal::makespan, ScheduleGoal::longest_span}) {
          const double exact =
              goal == ScheduleGoal::makespan ? watch.makespan() : watch.longest_span();
          for (const double part : {0.2, 0.8, 0.95, 0.999, 1.0, 1.001}) {
            CAPTURE(part);
            const inner::Cutoff cutoff{goal, part * exact};
            const inner::Words made = inner::ListScheduler(pipeline, rules).run(cutoff);
            CHECK(made == (part < 1 ? inner::Words{} : words));
            REQUIRE(cutting.run(words, cutoff) == (part >= 1));
            if (part < 1) continue;
            CHECK(cutting.makespan() == watch.makespan());
            CHECK(cutting.peak_memory() == watch.peak_memory());
          }
        }
      }
    }
  }
}

TEST_CASE("dpp: automatic schedules reach the zero-bubble table under its memory accounting") {
  struct Row {
    int p;
    int m;
    ActionTimes times;
    double one_p;
    double two_p;
  };
  const std::vector<Row> rows = {
      {8, 24, {18.522, 18.086, 9.337, .601}, .1585, .0433},
      {8, 32, {18.513, 18.086, 9.331, .626}, .1242, .0039},
      {8, 64, {18.546, 18.097, 9.321, .762}, .0674, .0026},
      {8, 24, {29.718, 29.444, 19.927, .527}, .1323, .0029},
      {8, 32, {29.802, 29.428, 19.530, .577}, .1045, .0022},
      {8, 64, {29.935, 29.621, 19.388, .535}, .0554, .0010},
      {16, 48, {11.347, 11.248, 8.132, .377}, .1397, .0066},
  };
  constexpr double rounding = 5e-5;  // the table has four digits
  for (const Row& row : rows) {
    for (const int multiple : {1, 2}) {
      CAPTURE(row.p);
      CAPTURE(row.m);
      CAPTURE(multiple);
      const PipelineProfile profile{
          .p = row.p,
          .m = row.m,
          .v = 1,
          .times = {row.times},
          .caps = std::vector<double>(static_cast<std::size_t>(row.p), 1.0 * multiple * row.p),
          .released_by_input = 0.5};
      // The local search is needed for the first row only.
      const int tries = row.m == 24 && multiple == 2 ? 1000 : 0;
      const AutoSchedule made =
          auto_schedule(profile, ScheduleGoal::longest_span, {.tries = tries});
      check_result(profile, ScheduleGoal::longest_span, made);
      const ActionTimes& t = row.times;
      const double busy = row.m * (t.forward + t.backward_input + t.backward_weight);
      const double rate = 1 - busy / made.timing.longest_span;
      CHECK(rate <= (multiple == 1 ? row.one_p : row.two_p) + rounding);
      // Counted whole, what waits for its weight gradient is more than the cap of 2p.
      const auto& whole = made.timing.peak_per_rank;
      const int most = *std::max_element(whole.begin(), whole.end());
      if (multiple == 2) CHECK(most > 2 * row.p);
      if (&row == &rows[1] && multiple == 2) CHECK(most == 31);
    }
  }
}

TEST_CASE("dpp: automatic schedules are the best of all orders of small pipelines") {
  struct Size {
    int p;
    int m;
  };
  for (const Size size : {Size{1, 4}, Size{2, 3}, Size{2, 4}, Size{3, 3}}) {
    const int p = size.p;
    const int m = size.m;
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
      CAPTURE(p);
      CAPTURE(m);
      CAPTURE(seed);
      PipelineProfile profile{.p = p, .m = m, .v = 1, .times = random_times(p, seed), .caps = {}};
      if (seed % 2 == 0) profile.caps.assign(static_cast<std::size_t>(p), 2);
      if (seed % 3 == 0) profile.released_by_input = 0.5;
      const AutoSchedule made = auto_schedule(profile);
      // Equal sums may be added up in another order.
      const double shortest = shortest_of_all(profile);
      CHECK(made.timing.makespan == doctest::Approx(shortest).epsilon(1e-12));
      const Schedule empty(p, m, 1, LoopPlacement{});
      const double bound = pipeline_of(profile, empty).bound(ScheduleGoal::makespan);
      CHECK(bound <= shortest * (1 + 1e-12));
      CHECK(bound >= 0.6 * shortest);
    }
  }
}

TEST_CASE("dpp: automatic schedules keep every cap and are no worse than any candidate") {
  std::uint64_t seed = 0;
  const auto check = [&](int p, int m, int v, auto place) {
    for (const ScheduleGoal goal : {ScheduleGoal::makespan, ScheduleGoal::longest_span}) {
      CAPTURE(p);
      CAPTURE(m);
      CAPTURE(v);
      CAPTURE(++seed);
      PipelineProfile profile{
          .p = p, .m = m, .v = v, .times = random_times(p * v, seed), .caps = {}};
      const RandomKey key{.seed = seed, .use = RandomUse::test};
      for (int rank = 0; rank < p && seed % 4 != 0; ++rank) {
        // From the smallest valid cap, where only one order of micro-batches is left, upwards.
        const double more = seed % 4 == 1 ? 0 : 1.5 * p * static_cast<double>(key.uniform(rank));
        profile.caps.push_back(v + more);
      }
      profile.released_by_input = 0.25 * static_cast<double>(seed % 5);
      check_result(profile, goal, auto_schedule(profile, goal, {.tries = 60, .seed = seed}, place));
    }
  };
  for (const int p : {1, 2, 3, 5}) {
    for (const int m : {1, 2, 5, 9}) {
      check(p, m, 1, LoopPlacement{});
      check(p, m, 2, LoopPlacement{});
      check(p, m, 3, LoopPlacement{});
      check(p, m, 2, VPlacement{});
      check(p, m, 3, VPlacement{});
    }
  }
}

TEST_CASE("dpp: automatic schedules keep the room of each chunk, however little") {
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    CAPTURE(seed);
    const RandomKey key{.seed = seed, .use = RandomUse::test};
    const int p = 2 + static_cast<int>(seed % 3), m = 5 + static_cast<int>(seed % 4);
    const int v = 1 + static_cast<int>(seed % 2);
    PipelineProfile profile{.p = p, .m = m, .v = v, .times = random_times(p * v, seed), .caps = {}};
    for (Index place = 0; place < p * v; ++place)
      profile.chunk_caps.push_back(1 + static_cast<int>(3 * key.uniform(place)));
    const AutoSchedule found = auto_schedule(profile, ScheduleGoal::makespan, {.tries = 60});
    check_result(profile, ScheduleGoal::makespan, found);
    const Verdict verdict = verify(lower(found.schedule));
    bool is_filled = false;
    for (std::size_t place = 0; place < profile.chunk_caps.size(); ++place) {
      CHECK(verdict.peak_per_chunk[place] <= profile.chunk_caps[place]);
      is_filled |= verdict.peak_per_chunk[place] == profile.chunk_caps[place];
    }
    CHECK(is_filled);
  }
  // Room for all is no limit, and room for what the named order needs lets it in.
  PipelineProfile profile{.p = 4, .m = 8, .v = 2, .times = {{}}, .caps = {}};
  const AutoSchedule free = auto_schedule(profile);
  profile.chunk_caps.assign(8, 8);
  CHECK(auto_schedule(profile).timing.makespan == free.timing.makespan);
  const Schedule dfc = make_schedule(ScheduleTraversal<DFC>{}, 4, 8, 2);
  profile.chunk_caps = verify(lower(dfc)).peak_per_chunk;
  CHECK(auto_schedule(profile).timing.makespan <= simulate(dfc).makespan);
  --profile.chunk_caps[0];
  for (const ScheduleCandidate& c : auto_schedule(profile).candidates) CHECK(c.name != "dfc");
}

TEST_CASE("dpp: automatic schedules on a V are no worse than the published ones under each cap") {
  struct Row {
    int p;
    int m;
    int cap;
    double span_bubble;
  };
  const std::vector<Row> rows = {{4, 8, 4, 11},  {4, 8, 5, 8},   {4, 8, 6, 5},    {4, 8, 7, 3},
                                 {4, 8, 8, 0},   {8, 16, 8, 23}, {8, 16, 10, 17}, {8, 16, 12, 11},
                                 {8, 16, 14, 5}, {8, 16, 16, 0}};
  for (const Row& row : rows) {
    CAPTURE(row.p);
    CAPTURE(row.cap);
    const PipelineProfile profile{
        .p = row.p,
        .m = row.m,
        .v = 2,
        .times = {{}},
        .caps = std::vector<double>(static_cast<std::size_t>(row.p), row.cap)};
    const auto goal = ScheduleGoal::longest_span;
    const AutoSchedule made = auto_schedule(profile, goal, {.tries = 0}, VPlacement{});
    check_result(profile, goal, made);
    CHECK(made.timing.bubble_span() <= row.span_bubble);
  }
}

TEST_CASE("dpp: named traversals that fit are candidates, others are not") {
  PipelineProfile profile{.p = 3, .m = 6, .v = 1, .times = {{}}, .caps = {3, 3, 3}};
  const auto makespan_of = [](const AutoSchedule& made, std::string_view name) {
    for (const ScheduleCandidate& c : made.candidates) {
      if (c.name == name) return c.makespan;
    }
    return -1.0;
  };
  const AutoSchedule tight = auto_schedule(profile, ScheduleGoal::makespan, {.tries = 0});
  CHECK(makespan_of(tight, "1f1b") ==
        simulate(make_schedule(OneForwardOneBackward{}, 3, 6, 1)).makespan);
  CHECK(makespan_of(tight, "zb_h1") == simulate(make_schedule(ZeroBubbleH1{}, 3, 6, 1)).makespan);
  CHECK(makespan_of(tight, "zb_h2") == -1.0);
  CHECK(makespan_of(tight, "gpipe") == -1.0);
  profile.caps = {6, 6, 6};
  const AutoSchedule wide = auto_schedule(profile, ScheduleGoal::longest_span, {.tries = 0});
  CHECK(makespan_of(wide, "zb_h2") == simulate(make_schedule(ZeroBubbleH2{}, 3, 6, 1)).makespan);
  CHECK(makespan_of(wide, "gpipe") == simulate(make_schedule(GPipe{}, 3, 6, 1)).makespan);
  CHECK(wide.timing.bubble_span() == 0);
}

TEST_CASE("dpp: measured times of unequal stages give a better order than any named one") {
  PipelineProfile profile{.p = 4, .m = 12, .v = 1, .times = {}, .caps = {5, 5, 5, 5}};
  profile.times.assign(4, {1, 1, .6, .1, -1});
  profile.times[1] = {1.3, 1.2, .8, .1, -1};
  const AutoSchedule made = auto_schedule(profile);
  check_result(profile, ScheduleGoal::makespan, made);
  double best_named = unlimited;
  for (const ScheduleCandidate& c : made.candidates) {
    if (c.name != "list") best_named = std::min(best_named, c.makespan);
  }
  CHECK(made.timing.makespan < best_named - 1.5);
  // No order can beat rank 1's work behind the arrival of the first forward.
  const double bound = 1.1 + 12 * 3.3;
  CHECK(made.timing.makespan >= bound - 1e-9);
  CHECK(made.timing.makespan <= 1.01 * bound);
}

TEST_CASE("dpp: where no order can be shorter, only one that holds less is looked for") {
  const auto bound = [](const PipelineProfile& profile, const auto& place, ScheduleGoal goal) {
    return pipeline_of(profile, Schedule(profile.p, profile.m, profile.v, place)).bound(goal);
  };
  // ZB-H1 with W at least as long as its gaps, and the V of 2p: each formula is the bound.
  for (const int p : {2, 5, 8}) {
    const int m = 3 * p;
    const PipelineProfile one{.p = p, .m = m, .v = 1, .times = {{}}, .caps = {}};
    const PipelineProfile two{.p = p, .m = m, .v = 2, .times = {{}}, .caps = {}};
    CHECK(bound(one, LoopPlacement{}, ScheduleGoal::makespan) == 3 * m + p - 1);
    CHECK(bound(two, VPlacement{}, ScheduleGoal::makespan) == 6 * m + p - 1);
    CHECK(bound(two, VPlacement{}, ScheduleGoal::longest_span) == 6 * m);
    const AutoSchedule made = auto_schedule(one);
    CHECK(made.timing.makespan == 3 * m + p - 1);
    CHECK(made.candidates.back().name != "list");  // all of them would hold as much
    const AutoSchedule on_v = auto_schedule(two, ScheduleGoal::makespan, {}, VPlacement{});
    CHECK(on_v.timing.makespan == 6 * m + p - 1);
    CHECK(*std::max_element(on_v.memory_per_rank.begin(), on_v.memory_per_rank.end()) <= 2 * p);
  }
  // Two halves at a time may take less than both: that is not foreseen.
  CHECK(bound({.p = 2, .m = 4, .v = 1, .times = {{1, 1, 1, 0, 2.5}}, .caps = {}}, LoopPlacement{},
              ScheduleGoal::makespan) == 0);
  // A list schedule that fills a rank up to the bound is given up.
  const PipelineProfile profile{.p = 4, .m = 9, .v = 1, .times = random_times(4, 5), .caps = {}};
  const inner::Pipeline pipeline = pipeline_of(profile, Schedule(4, 9, 1, LoopPlacement{}));
  const inner::ListRules rules{std::vector<double>(4, 3.0)};
  const inner::Words words = inner::ListScheduler(pipeline, rules).run();
  inner::Stopwatch watch(pipeline);
  REQUIRE(watch.run(words));
  const auto& peaks = watch.peak_memory();
  const double fullest = *std::max_element(peaks.begin(), peaks.end());
  CHECK(inner::ListScheduler(pipeline, rules).run({.fullest = fullest + 0.5}) == words);
  CHECK(inner::ListScheduler(pipeline, rules).run({.fullest = fullest}).empty());
}

TEST_CASE("dpp: what activations take counts stage by stage") {
  // A stage of n layers takes n GB for an activation; the last ones have fewer, and a head.
  const std::vector<double> layers{4, 4, 4, 4, 4, 5, 5, 2};
  PipelineProfile profile{.p = 4, .m = 16, .v = 2, .times = {}, .caps = {}};
  for (const double n : layers) {
    profile.activation_sizes.push_back(n * 1e9);
    profile.times.push_back({n, 1.1 * n, 0.9 * n});
  }
  profile.times.back() = {4.4, 4.6, 4.2};
  const auto searched = [](const PipelineProfile& of) {
    return auto_schedule(of, ScheduleGoal::makespan, {.tries = 200}, VPlacement{});
  };
  for (const double cap : {14e9, 20e9, 28e9, 34e9}) {
    CAPTURE(cap);
    profile.caps.assign(4, cap);
    const AutoSchedule made = searched(profile);
    for (int rank = 0; rank < 4; ++rank) {
      double live = 0, peak = 0;
      for (const Action& a : made.schedule.of_rank(rank)) {
        const int stage = made.schedule.view().stage(rank, a.chunk);
        const double size = profile.activation_sizes[static_cast<std::size_t>(stage)];
        if (a.kind == ActionKind::forward) live += size;
        if (gives_weight_gradient(a.kind)) live -= size;
        peak = std::max(peak, live);
      }
      CHECK(peak <= cap * (1 + 1e-9));
      CHECK(made.memory_per_rank[static_cast<std::size_t>(rank)] == doctest::Approx(peak));
    }
    // Every V schedule that keeps within the bytes is a candidate, and none is shorter.
    for (int count = 2; count <= 8; ++count) {
      const Schedule named = make_schedule(VSchedule{{count}}, 4, 16, 2);
      const inner::Pipeline pipeline = pipeline_of(profile, named);
      inner::Stopwatch watch(pipeline);
      if (!watch.run(inner::words_of(named))) continue;
      CHECK(made.timing.makespan <= watch.makespan() * (1 + 1e-11));
    }
    // As many activations as of the largest stage are fewer.
    PipelineProfile counted = profile;
    counted.activation_sizes.clear();
    counted.caps.assign(4, std::max(2.0, cap / 5e9));
    CHECK(made.timing.makespan <= searched(counted).timing.makespan * (1 + 1e-11));
    if (cap == 34e9) CHECK(made.timing.makespan < 0.99 * searched(counted).timing.makespan);
  }
  profile.caps[2] = 8.5e9;  // rank 2 has the stages of 4 and 5 layers
  CHECK(mega_test::refusal_of([&] { static_cast<void>(searched(profile)); }) ==
        "rank 2 may hold 8.5e+09, but one micro-batch alone keeps 9e+09 on its chunks");
  profile.activation_sizes.pop_back();
  CHECK(refusal(profile) == "the profile has sizes of activations of 7 stages, not of p*v = 8");
  profile.activation_sizes.push_back(-1);
  CHECK(refusal(profile) ==
        "an activation of stage 7 has the size -1; sizes are finite and not negative");
}

TEST_CASE("dpp: of orders that differ by rounding the one with least memory is found") {
  // On one rank every order takes 4 (F + I + W), in sums that round in their own ways.
  for (const ActionTimes& times :
       {ActionTimes{0.1, 0.2, 0.3}, ActionTimes{1. / 3, 0.7, 0.11}, ActionTimes{1, 1, 1}}) {
    const AutoSchedule made = auto_schedule({.p = 1, .m = 4, .v = 1, .times = {times}, .caps = {}});
    CHECK(made.timing.peak_per_rank == std::vector<int>{1});
  }
}

TEST_CASE("dpp: equal arguments give equal automatic schedules, and a spent budget a valid one") {
  PipelineProfile profile{
      .p = 4, .m = 9, .v = 2, .times = random_times(8, 3), .caps = {9, 8, 7, 6}};
  const SearchBudget budget{.tries = 300, .seed = 11};
  const AutoSchedule one = auto_schedule(profile, ScheduleGoal::makespan, budget);
  const AutoSchedule two = auto_schedule(profile, ScheduleGoal::makespan, budget);
  CHECK(std::ranges::equal(one.schedule.view().actions, two.schedule.view().actions));
  CHECK(one.candidate == two.candidate);
  CHECK(one.tries == 300);
  const AutoSchedule hurried = auto_schedule(profile, ScheduleGoal::makespan, {.seconds = 0});
  CHECK(hurried.tries == 0);
  check_result(profile, ScheduleGoal::makespan, hurried);
  CHECK(one.timing.makespan <= hurried.timing.makespan);
}

TEST_CASE("dpp: impossible profiles are refused in words") {
  const PipelineProfile good{.p = 3, .m = 4, .v = 2, .times = {{}}, .caps = {2, 2, 2}};
  CHECK(refusal(good) == "accepted");
  PipelineProfile bad = good;
  bad.caps[1] = 1.5;
  CHECK(refusal(bad) ==
        "rank 1 may hold 1.5 live activations, but one micro-batch alone keeps one on each of its "
        "chunks; the smallest valid cap is v = 2");
  bad.caps = {2, 2};
  CHECK(refusal(bad) == "the profile has memory caps of 2 ranks, not of p = 3");
  bad = good;
  bad.caps[2] = std::numeric_limits<double>::quiet_NaN();
  CHECK(refusal(bad).starts_with("rank 2 may hold nan live activations"));
  bad = good;
  bad.chunk_caps = {1, 1, 1};
  CHECK(refusal(bad) == "the profile has room for micro-batches of 3 chunks, not of p*v = 6");
  bad.slots = {1, 1};
  bad.chunk_caps = {};
  CHECK(refusal(bad) == "the profile has room for micro-batches of 2 chunks, not of p*v = 6");
  bad.slots = {};
  bad.chunk_caps = {1, 1, 1, 0, 1, 1};
  CHECK(refusal(bad) == "place 3 has room for 0 micro-batches; it needs room for at least 1");
  bad = good;
  bad.times.resize(5);
  CHECK(refusal(bad) == "the profile has times of 5 stages, not of p*v = 6; 1 serves them all");
  bad.times.assign(6, {});
  bad.times[4].backward_weight = -1;
  CHECK(refusal(bad) ==
        "stage 4 has forward 1, backward_input 1, backward_weight -1, hop 0 and pair -1; times are "
        "finite, none but pair is negative, and a stage takes some");
  bad.times[4] = {0, 0, 0};
  CHECK(refusal(bad).starts_with("stage 4 has forward 0"));
  bad = good;
  bad.released_by_input = 1.25;
  CHECK(refusal(bad) == "released_by_input 1.25 is outside 0..1");
  bad = good;
  bad.m = 0;
  CHECK(refusal(bad) ==
        "a pipeline needs at least 1 rank, 1 micro-batch and 1 chunk a rank, not p 3, m 0, v 2");
}
