/// @file  Tests of the automatic scheduler over placements and within slots: against every named
/// schedule, made and judged here by itself.
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
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

enum class Stages { equal, heavy_head, all_different };

std::vector<ActionTimes> times_of(Stages stages, int count, std::uint64_t seed) {
  std::vector<ActionTimes> times(static_cast<std::size_t>(count), {1, 1, 1, 0.125, -1});
  if (stages == Stages::heavy_head) times.back() = {2.5, 2.75, 2, 0.125, -1};
  const RandomKey key{.seed = seed, .use = RandomUse::test};
  Index drawn = 0;
  const auto next = [&] { return 0.25 + static_cast<double>(key.uniform(drawn++)); };
  for (ActionTimes& t : times) {
    if (stages == Stages::all_different) t = {next(), next(), next(), 0.25 * next(), -1};
  }
  return times;
}

/// Every schedule that has a name in mega-plan, on the placement.
template <placement Placement, class Visit>
void for_each_named(int p, int m, int v, const Placement& place, const Visit& visit) {
  const auto make = [&](const auto& policy) {
    using Place = decltype(placement_of(policy, place));
    if constexpr (std::same_as<Place, Placement>) {
      try {
        visit(make_schedule(policy, p, m, v, place));
      } catch (const Error& refusal) {
        CHECK(refusal.code() == ErrorCode::usage);
      }
    }
  };
  const auto split = [&](const auto& base) {
    using Base = std::remove_cvref_t<decltype(base)>;
    make(base);
    make(SplitBackward<Base, WeightByRank<1>>{base, {}});
    make(SplitBackward<Base, WeightAtEnd>{base, {}});
    for (const int pending : {0, 1, 2, 4})
      make(SplitBackward<Base, WeightsPending>{base, {pending}});
  };
  split(GPipe{});
  split(OneForwardOneBackward{});
  split(EagerOneForwardOneBackward{});
  for (int group = p; group <= std::max(p, m); ++group) split(Interleaved{{group}});
  make(ZeroBubbleH1{});
  make(ZeroBubbleH2{});
  for (int cap = 2; cap <= 2 * p; ++cap) make(VSchedule{{cap}});
  make(ZeroBubbleV{});
  make(VHalf{});
  make(VMin{});
  make(DualPipeV{});
}

bool keeps_caps(const Schedule& schedule, const PipelineProfile& profile) {
  for (std::size_t rank = 0; rank < profile.caps.size(); ++rank) {
    int live = 0, peak = 0, freed_behind_pair = 0;
    for (const Action& a : schedule.of_rank(static_cast<int>(rank))) {
      if (a.kind == ActionKind::forward) peak = std::max(peak, ++live);
      live -= freed_behind_pair;
      freed_behind_pair = gives_weight_gradient(a.kind) && a.with_next ? 1 : 0;
      if (gives_weight_gradient(a.kind) && !a.with_next) --live;
    }
    if (peak > profile.caps[rank]) return false;
  }
  return true;
}

double goal_of(const Timing& timing, ScheduleGoal goal) {
  return goal == ScheduleGoal::makespan ? timing.makespan : timing.longest_span;
}

struct Counts {
  int named = 0;  // legal and within the caps
  int on_v = 0;   // results there
  int on_loop = 0;
};

void check_site(const PipelineProfile& profile, ScheduleGoal goal, Counts& counts) {
  const SearchBudget budget{.tries = 20, .seed = 5};
  const std::span<const ActionTimes> times(profile.times);
  const AutoSchedule made = auto_schedule(profile, goal, budget, LoopPlacement{}, VPlacement{});
  CHECK(verify(lower(made.schedule)).ok());
  CHECK(keeps_caps(made.schedule, profile));
  const auto compare = [&](const Schedule& named) {
    if (!verify(lower(named)).ok() || !keeps_caps(named, profile)) return;
    ++counts.named;
    CHECK(goal_of(made.timing, goal) <= goal_of(simulate(named, times), goal));
  };
  for_each_named(profile.p, profile.m, profile.v, LoopPlacement{}, compare);
  for_each_named(profile.p, profile.m, profile.v, VPlacement{}, compare);
  // The better of what each placement gives by itself.
  const AutoSchedule loop = auto_schedule(profile, goal, budget);
  const AutoSchedule on_v = auto_schedule(profile, goal, budget, VPlacement{});
  CHECK(goal_of(made.timing, goal) ==
        std::min(goal_of(loop.timing, goal), goal_of(on_v.timing, goal)));
  const bool differ = profile.v > 1 && profile.p > 1;
  CHECK(made.tries == (differ ? 40 : 20));
  CHECK(made.candidates.size() ==
        loop.candidates.size() + (differ ? on_v.candidates.size() : std::size_t{0}));
  ++(made.placement == "v" ? counts.on_v : counts.on_loop);
}

}  // namespace

TEST_CASE("dpp: automatic schedules over both placements are no worse than any named schedule") {
  Counts counts;
  std::uint64_t seed = 0;
  for (const int p : {1, 2, 3, 5}) {
    for (const int m : {1, 4, 7}) {
      for (const int v : {1, 2, 3}) {
        for (const Stages stages : {Stages::equal, Stages::heavy_head, Stages::all_different}) {
          ++seed;
          PipelineProfile profile{
              .p = p, .m = m, .v = v, .times = times_of(stages, p * v, seed), .caps = {}};
          const auto goal = seed % 2 == 0 ? ScheduleGoal::makespan : ScheduleGoal::longest_span;
          for (const double room : {0.0, 0.5, 1.0, 100.0}) {
            // From what one micro-batch needs, by rank unequally, to no limit.
            profile.caps.clear();
            for (int rank = 0; rank < p && room < 100; ++rank)
              profile.caps.push_back(v + static_cast<int>(room * p * v) +
                                     (room > 0 ? rank % 2 : 0));
            CAPTURE(p);
            CAPTURE(m);
            CAPTURE(v);
            CAPTURE(static_cast<int>(stages));
            CAPTURE(room);
            check_site(profile, goal, counts);
          }
        }
      }
    }
  }
  CHECK(counts.named > 5000);
  CHECK(counts.on_v > 20);
  CHECK(counts.on_loop > 100);
}

TEST_CASE("dpp: automatic schedules run with the slots that they are given") {
  struct Case {
    int p, m, v;
    Stages stages;
    std::uint64_t seed;
    int added;
  };
  // The first two are such that the best order within the live activations wants more slots.
  const std::vector<Case> cases = {
      {6, 8, 3, Stages::all_different, 2, 0},  {6, 12, 2, Stages::all_different, 3, 0},
      {6, 12, 2, Stages::all_different, 3, 1}, {4, 12, 2, Stages::heavy_head, 1, 1},
      {6, 8, 3, Stages::heavy_head, 1, 3},     {3, 5, 2, Stages::equal, 1, 0},
      {4, 8, 1, Stages::all_different, 4, 1}};
  int shorter = 0;
  for (const Case& c : cases) {
    CAPTURE(c.p);
    CAPTURE(c.m);
    CAPTURE(c.v);
    CAPTURE(c.added);
    const Schedule first =
        c.v == 1
            ? make_schedule(ZeroBubbleH1{}, c.p, c.m, 1)
            : make_schedule(SplitBackward<ScheduleTraversal<DFC>, WeightAtOnce>{}, c.p, c.m, c.v);
    PipelineProfile profile{.p = c.p,
                            .m = c.m,
                            .v = c.v,
                            .times = times_of(c.stages, c.p * c.v, c.seed),
                            .caps = {},
                            .slots = required_slots(lower(first))};
    for (int& slots : profile.slots) slots += c.added;
    const AutoSchedule made = auto_schedule(profile);
    CHECK(verify(lower(made.schedule), profile.slots).ok());
    const double begun_with = simulate(first, std::span<const ActionTimes>(profile.times)).makespan;
    CHECK(made.timing.makespan <= begun_with);
    shorter += made.timing.makespan < 0.99 * begun_with ? 1 : 0;
    const Verdict verdict = verify(lower(made.schedule));
    for (std::size_t place = 0; place < profile.slots.size(); ++place)
      CHECK(verdict.peak_per_chunk[place] <= profile.slots[place]);
  }
  CHECK(shorter >= 5);
}

TEST_CASE("dpp: every group size and every cap of the V schedules is a candidate, or 33 of many") {
  PipelineProfile profile;
  profile.p = 3, profile.m = 7, profile.v = 2;
  profile.times = times_of(Stages::all_different, 6, 9);
  const std::span<const ActionTimes> times(profile.times);
  const auto search = [&] {
    return auto_schedule(profile, ScheduleGoal::makespan, {.tries = 0}, LoopPlacement{},
                         VPlacement{});
  };
  const AutoSchedule made = search();
  const auto makespan_of = [&](const std::string& name, std::string_view placement) {
    for (const ScheduleCandidate& c : made.candidates) {
      if (c.name == name && c.placement == placement) return c.makespan;
    }
    return -1.0;
  };
  for (int group = 3; group <= 7; ++group) {
    const std::string name = group == 3   ? "dfc"
                             : group == 7 ? "bfc"
                                          : sentence("group size ", group);
    CAPTURE(name);
    CHECK(makespan_of(name, "loop") ==
          simulate(make_schedule(Interleaved{{group}}, 3, 7, 2), times).makespan);
    CHECK(
        makespan_of(name + ", W pending 4", "loop") ==
        simulate(make_schedule(SplitBackward<Interleaved, WeightsPending>{{{group}}, {4}}, 3, 7, 2),
                 times)
            .makespan);
  }
  for (int cap = 2; cap <= 6; ++cap) {
    CAPTURE(cap);
    const std::string name = sentence("v_schedule of cap ", cap);
    CHECK(makespan_of(name, "v") ==
          simulate(make_schedule(VSchedule{{cap}}, 3, 7, 2), times).makespan);
    CHECK(makespan_of(name, "loop") == -1.0);
  }
  profile.p = 2;
  profile.m = 200;
  profile.times.resize(4);
  int sizes = 0;
  for (const ScheduleCandidate& c : search().candidates) {
    const bool is_whole = c.name.find(',') == std::string::npos;
    const bool has_size = c.name == "dfc" || c.name == "bfc" || c.name.starts_with("group size");
    sizes += c.placement == "loop" && is_whole && has_size ? 1 : 0;
  }
  CHECK(sizes == 30);  // from 2 to 200 in steps of 7
}
