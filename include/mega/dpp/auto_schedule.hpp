/// @file  Search for the best pipeline order, on one placement or several, from measured stage
/// times and memory caps. Run time only, for start-up and tools; not part of mega.hpp.
///
/// Every named traversal that fits the caps is a candidate, so is what a list scheduler makes with
/// several rules, and the best of all is improved by a local search. All are timed by one function,
/// so the result is never slower than any named candidate under that clock.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/detail/named_candidates.hpp>
#include <mega/dpp/detail/order_search.hpp>
#include <mega/dpp/detail/order_words.hpp>
#include <mega/dpp/detail/pipeline.hpp>
#include <mega/dpp/detail/stopwatch.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/search_problem.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/verifier.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

namespace detail {

/// Where an order may stand.
struct Site {
  Schedule empty;
  std::string_view placement;  ///< its name

  [[nodiscard]] bool has_stages_of(const ScheduleView& other) const {
    const auto own = empty.view().stage_of;
    return std::equal(own.begin(), own.end(), other.stage_of.begin());
  }
};

/// The best order on one site, and its rating.
struct SiteResult {
  AutoSchedule found;
  Rating rating;
};

inline SiteResult search_site(const PipelineProfile& profile, ScheduleGoal goal,
                              const SearchBudget& budget, const Site& site) {
  const int p = profile.p;
  const int m = profile.m;
  const int v = profile.v;
  const auto stage_of = site.empty.view().stage_of;
  const Pipeline pipeline(profile, {stage_of.begin(), stage_of.end()});
  ScheduleSearch search(pipeline, site.empty, profile.slots, goal, budget);
  for_each_named_traversal(p, m, v, [&](const std::string& name, const auto& policy) {
    if constexpr (brings_placement<std::remove_cvref_t<decltype(policy)>>) {
      if (!site.has_stages_of(Schedule(p, m, v, policy.placement()))) return;
    }
    try {
      search.consider(name, words_of(make_schedule(policy, p, m, v)));
    } catch (const Error& refusal) {
      if (refusal.code() != ErrorCode::usage) throw;
    }
  });
  search.try_lists();
  search.improve();
  for (ScheduleCandidate& candidate : search.candidates) candidate.placement = site.placement;
  AutoSchedule found{site.empty, std::move(search.best_name),  site.placement, {},
                     {},         std::move(search.candidates), search.tries};
  if (search.best.empty()) return {std::move(found), {}};
  found.schedule = schedule_of(search.best, site.empty);
  expect_valid(lower(found.schedule));
  Stopwatch watch(pipeline);
  watch.run(search.best);
  found.memory_per_rank = watch.peak_memory();
  for (double& peak : found.memory_per_rank) peak *= pipeline.unit;
  found.timing = simulate(found.schedule, std::span<const ActionTimes>(profile.times));
  return {std::move(found), search.rating};
}

inline AutoSchedule search_sites(const PipelineProfile& profile, ScheduleGoal goal,
                                 const SearchBudget& budget, std::span<const Site> sites) {
  const auto begin = std::chrono::steady_clock::now();
  std::optional<SiteResult> best;
  std::vector<ScheduleCandidate> candidates;
  int tries = 0;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    const auto same = [&](const Site& earlier) { return sites[i].has_stages_of(earlier.empty); };
    if (std::any_of(sites.begin(), sites.begin() + static_cast<std::ptrdiff_t>(i), same)) continue;
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    SearchBudget own = budget;
    own.seconds = (budget.seconds - spent.count()) / static_cast<double>(sites.size() - i);
    SiteResult result = search_site(profile, goal, own, sites[i]);
    const auto& found = result.found.candidates;
    candidates.insert(candidates.end(), found.begin(), found.end());
    tries += result.found.tries;
    if (!best || result.rating.is_better_than(best->rating)) best = std::move(result);
  }
  expects(best->rating.peak < never, ErrorCode::usage,
          "the automatic scheduler found no order that runs with the slots of the profile");
  best->found.candidates = std::move(candidates);
  best->found.tries = tries;
  return std::move(best->found);
}

}  // namespace detail

/// The best order found for the profile on the given placements; on LoopPlacement where none is
/// given. auto_schedule(profile, goal, budget, LoopPlacement{}, VPlacement{}) tries both.
///
/// Candidates, on each placement: the named traversals, among them all group sizes from p to m, the
/// V schedules of all caps from 2 to 2p (33 of each where there are more) and backwards split with
/// several delays; and list schedules in which a rank takes an input gradient before a forward
/// before a weight gradient, for several limits of how far forwards run ahead and of how well a
/// weight gradient must fit the gap it fills. Then a local search varies the rules of the best list
/// schedule and moves single actions on the critical path. What exceeds a cap is no candidate; of
/// equally short orders, but for rounding, the one with the least peak of any rank wins, then the
/// one that came first. Every order keeps the micro-batches of a (chunk, kind) ascending and is
/// proven by verify().
/// @param places  which rank holds which stage; the times are by stage, so they are the same on
///                all. Policies made for another placement stay out; a placement with every stage
///                where an earlier one has it is passed over
/// Throws Error(usage) where the profile is impossible: a cap below what one micro-batch alone
/// needs, which is v activations, times and sizes that do not fit each other, or slots with which
/// no order is found to run.
/// @cost  of each placement, linear in the 3*p*m*v actions: up to some 400 named candidates at 0.05
///        us an action, 240 list schedules, 480 for v > 1, at 0.1 us, and budget.tries at 0.01 us
///        for the moves of the search; what can no longer be better ends early
/// @determinism  equal arguments give equal orders while budget.seconds is not spent
template <placement... Placements>
[[nodiscard]] AutoSchedule auto_schedule(const PipelineProfile& profile,
                                         ScheduleGoal goal = ScheduleGoal::makespan,
                                         const SearchBudget& budget = {}, Placements... places) {
  if constexpr (sizeof...(places) == 0) {
    return auto_schedule(profile, goal, budget, LoopPlacement{});
  } else {
    detail::expect_profile(profile);
    const auto site = [&]<placement P>(const P& place) {
      return detail::Site{Schedule(profile.p, profile.m, profile.v, place), P::name};
    };
    const std::array<detail::Site, sizeof...(places)> sites{site(places)...};
    return detail::search_sites(profile, goal, budget, sites);
  }
}

}  // namespace mega::inline v0::dpp
