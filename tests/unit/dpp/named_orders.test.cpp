/// @file  Tests of the orders by name, of what --schedule auto of the trainers finds within its
/// limits, and that a trainer makes the order of each name.
#include "examples/trainer/config.hpp"
#include "examples/trainer/order_choice.hpp"
#include "examples/trainer/schedule_choice.hpp"
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/named_orders.hpp>
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
#include <span>
#include <string>
#include <type_traits>
#include <vector>

using namespace mega::dpp;
using mega_test::refusal_of;

namespace {

template <class Policy>
bool equals(NamedOrder order, const OrderNumbers& numbers, int p, int m, int v,
            const Policy& expected) {
  const auto made = with_named(order, numbers,
                               [&](const auto& policy) { return make_schedule(policy, p, m, v); });
  const auto other = make_schedule(expected, p, m, v);
  return std::ranges::equal(made.view().actions, other.view().actions) &&
         std::ranges::equal(made.view().stage_of, other.view().stage_of);
}

/// Times of the stages between 0.25 and 1.25, hops of a quarter of that.
trainer::StageTimes random_times(int stages, std::uint64_t seed) {
  const mega::RandomKey key{.seed = seed, .use = mega::RandomUse::test};
  mega::Index drawn = 0;
  const auto next = [&] { return 0.25 + static_cast<double>(key.uniform(drawn++)); };
  trainer::StageTimes times(static_cast<std::size_t>(stages));
  for (ActionTimes& t : times) {
    const double forward = next(), input = next(), weight = next();
    t = {forward, input, weight, 0.25 * next(), -1};
  }
  return times;
}

bool splits(const Schedule& schedule) {
  const auto actions = schedule.view().actions;
  return std::any_of(actions.begin(), actions.end(),
                     [](const Action& a) { return a.kind == ActionKind::backward_weight; });
}

}  // namespace

TEST_CASE("dpp: each name stands for its policy") {
  using enum NamedOrder;
  CHECK(equals(gpipe, {}, 3, 5, 1, GPipe{}));
  CHECK(equals(looped_bfs, {}, 3, 5, 2, GPipe{}));
  CHECK(equals(one_f_one_b, {}, 3, 5, 1, OneForwardOneBackward{}));
  CHECK(equals(eager_one_f_one_b, {}, 3, 5, 1, EagerOneForwardOneBackward{}));
  CHECK(equals(dfc, {}, 3, 7, 2, Interleaved{{3}}));
  CHECK(equals(bfc, {}, 3, 7, 2, Interleaved{{7}}));
  CHECK(equals(interleaved, {.group_size = 5}, 3, 7, 2, Interleaved{{5}}));
  CHECK(equals(zero_bubble_h1, {}, 3, 5, 1, ZeroBubbleH1{}));
  CHECK(equals(zero_bubble_h2, {}, 3, 5, 1, ZeroBubbleH2{}));
  CHECK(equals(zero_bubble_v, {}, 3, 7, 2, ZeroBubbleV{}));
  CHECK(equals(v_half, {}, 5, 11, 2, VHalf{}));
  CHECK(equals(v_min, {}, 5, 11, 2, VMin{}));
  CHECK(equals(v_schedule, {.cap = 3}, 3, 7, 2, VSchedule{{3}}));
  CHECK(equals(dual_pipe_v, {}, 3, 7, 2, DualPipeV{}));
  CHECK(equals(split_gpipe, {}, 3, 5, 1, SplitBackward<GPipe, WeightByRank<1>>{}));
  CHECK(equals(split_looped_bfs, {.weights = {2, 0}}, 3, 5, 2,
               SplitBackward<GPipe, WeightsPending>{{}, {2}}));
  CHECK(equals(split_one_f_one_b, {}, 3, 5, 1, ZeroBubbleH1{}));
  CHECK(equals(split_eager_one_f_one_b, {.weights = {0, 2}}, 3, 5, 1, ZeroBubbleH2{}));
  CHECK(equals(split_dfc, {}, 3, 7, 2, SplitBackward<Interleaved, WeightByRank<1>>{{{3}}, {}}));
  CHECK(equals(split_bfc, {.weights = *weights_pending_of("at-end")}, 3, 7, 2,
               SplitBackward<Interleaved, WeightAtEnd>{{{7}}, {}}));
  CHECK(equals(split_interleaved, {.group_size = 5, .weights = *weights_pending_of("at-once")}, 3,
               7, 2, SplitBackward<Interleaved, WeightAtOnce>{{{5}}, {}}));
  // Those that are decided by measuring have none, and a number that a name needs is not made up.
  const auto made = [](NamedOrder order, int v) {
    return with_named(order, {},
                      [&](const auto& policy) { return make_schedule(policy, 4, 8, v); });
  };
  for (const NamedOrder order : {adaptive, automatic})
    CHECK(
        refusal_of([&] { (void)made(order, 1); }, mega::ErrorCode::logic).find(named(order).name) !=
        std::string::npos);
  CHECK(refusal_of([&] { (void)made(v_schedule, 2); }).find("cap of 0") != std::string::npos);
  CHECK(refusal_of([&] { (void)made(split_interleaved, 2); }).find("4..8") != std::string::npos);
}

TEST_CASE("dpp: what is said of a name is true of its order") {
  for (const OrderName& each : order_names) {
    CAPTURE(std::string(each.name));
    CHECK(find_order_name(each.name) == &each);
    CHECK(&named(each.order) == &each);
    CHECK_FALSE(each.summary.empty());
    if (each.order == NamedOrder::adaptive || each.order == NamedOrder::automatic) continue;
    const OrderNumbers numbers{.group_size = 5, .cap = 4};
    const Schedule made = with_named(each.order, numbers, [&](const auto& policy) {
      CHECK(brings_placement<std::remove_cvref_t<decltype(policy)>> == stands_on_v(each.order));
      return make_schedule(policy, 4, 9, each.chunks);
    });
    CHECK(verify(lower(made)).ok());
    CHECK(splits(made) == has_split_backward(each.order));
  }
  CHECK(find_order_name("zigzag") == nullptr);
  CHECK(find_order_name("") == nullptr);
  CHECK(weights_pending_of("7")->value == 7);
  CHECK(weights_pending_of("0")->value == 0);
  for (const char* const text : {"", "-1", "1.5", "by rank", "99999999999", "1x"})
    CHECK_FALSE(weights_pending_of(text).has_value());
}

TEST_CASE("dpp: a trainer makes the order of each name, or says why not") {
  for (const OrderName& each : order_names) {
    CAPTURE(std::string(each.name));
    trainer::Config c;
    c.pipeline = 4;
    c.schedule = each.order;
    if (takes_group_size(each.order)) c.group_size = 5;
    if (each.order == NamedOrder::v_schedule) c.memory_cap = 4;
    trainer::check_order_choice(c);
    const trainer::ChosenTraversal chosen = trainer::chosen_traversal(c);
    const Schedule made = make_schedule(chosen, 4, 9, each.chunks);
    CHECK(verify(lower(made)).ok());
    CHECK((chosen.splits_backward() || !splits(made)));
    CHECK(chosen.placement().is_v == stands_on_v(each.order));
    if (each.order == NamedOrder::adaptive || each.order == NamedOrder::automatic) continue;
    const Schedule expected =
        with_named(each.order, {.group_size = c.group_size, .cap = c.memory_cap},
                   [&](const auto& policy) { return make_schedule(policy, 4, 9, each.chunks); });
    CHECK(std::ranges::equal(made.view().actions, expected.view().actions));
    CHECK(std::ranges::equal(made.view().stage_of, expected.view().stage_of));
  }
  const auto refused = [](const auto& change, const std::string& words) {
    trainer::Config c;
    c.pipeline = 4;
    change(c);
    const std::string said = refusal_of([&] { trainer::check_order_choice(c); });
    CHECK_MESSAGE(said.find(words) != std::string::npos, said);
  };
  using trainer::Config;
  refused([](Config& c) { c.schedule = NamedOrder::v_schedule; }, "needs --memory-cap");
  refused([](Config& c) { c.memory_cap = 4; }, "v, auto and adaptive");
  refused([](Config& c) { c.group_size = 4; }, "belong together");
  refused([](Config& c) { c.schedule = NamedOrder::split_interleaved; }, "belong together");
  refused([](Config& c) { c.weight_gradients = "at-end"; }, "split-<base>");
  refused(
      [](Config& c) {
        c.schedule = NamedOrder::split_dfc;
        c.weight_gradients = "later";
      },
      "'later'");
  refused([](Config& c) { c.placement = "v"; }, "--schedule auto");
  refused(
      [](Config& c) {
        c.schedule = NamedOrder::automatic;
        c.placement = "any";
      },
      "mega-plan");
  refused(
      [](Config& c) {
        c.schedule = NamedOrder::automatic;
        c.placement = "star";
      },
      "'star'");
}

TEST_CASE("dpp: a trainer's search is never worse than its first order, 1f1b and dfc in its room") {
  int cases = 0, shorter = 0, wants_slots = 0;
  const auto check = [&](int p, int m, int v, bool on_v, int added, std::uint64_t seed) {
    CAPTURE(p);
    CAPTURE(m);
    CAPTURE(v);
    CAPTURE(added);
    CAPTURE(on_v);
    const trainer::StageTimes times = random_times(p * v, seed);
    const std::span<const ActionTimes> clock(times);
    const trainer::ChosenTraversal begun{.schedule = NamedOrder::automatic, .on_v = on_v};
    const Schedule first = make_schedule(begun, p, m, v);
    const Verdict verdict = verify(lower(first));
    const std::vector<int>& peaks = verdict.peak_per_rank;
    const int peak = *std::max_element(peaks.begin(), peaks.end());
    const int cap = added == 0 ? 0 : peak + added;
    if (added < 0 && cap < v) return;
    ++cases;
    const trainer::SearchLimits limits(begun, p, m, v, cap);
    const trainer::FoundOrder found = trainer::find_order(limits, times);
    CHECK(found.peak <= (cap == 0 ? peak : cap));
    // It runs as a trainer runs it, with the slots that were planned and no more.
    trainer::ChosenTraversal chosen = begun;
    chosen.found = found.lists;
    const Schedule made = make_schedule(chosen, p, m, v);
    CHECK(verify(lower(made), limits.slots()).ok());
    CHECK(simulate(made, clock).makespan <= found.makespan * (1 + 1e-12));
    if (added < 0) return;
    const double begun_with = simulate(first, clock).makespan;
    CHECK(found.makespan <= begun_with);
    shorter += found.makespan < 0.99 * begun_with ? 1 : 0;
    if (!found.rival.empty()) CHECK(found.makespan <= found.rival_makespan);
    // What fits the activations of the first order, chunk by chunk, may want more slots.
    if (added > 0) return;
    const AutoSchedule roomy = auto_schedule({.p = p,
                                              .m = m,
                                              .v = v,
                                              .times = times,
                                              .caps = limits.caps(),
                                              .chunk_caps = verdict.peak_per_chunk},
                                             ScheduleGoal::makespan, {}, limits.placement());
    wants_slots += verify(lower(roomy.schedule), limits.slots()).ok() ? 0 : 1;
  };
  std::uint64_t seed = 0;
  for (const bool on_v : {false, true}) {
    for (const int p : {1, 2, 3, 4}) {
      for (const int v : {1, 2, 3}) {
        for (const int m : {1, 3, 8}) {
          if (on_v && v != 2) continue;
          for (const int added : {-1, 0, 2}) check(p, m, v, on_v, added, ++seed);
        }
      }
    }
  }
  for (const int m : {8, 12}) {
    for (const int v : {2, 3}) {
      for (seed = 1; seed <= 4; ++seed) check(6, m, v, false, 0, seed);
    }
  }
  MESSAGE(cases, " cases, ", shorter, " shorter, ", wants_slots, " want slots");
  CHECK(cases > 120);
  CHECK(shorter > 30);
  CHECK(wants_slots > 0);
  const trainer::ChosenTraversal on_v{.schedule = NamedOrder::automatic, .on_v = true};
  CHECK(refusal_of([&] { (void)trainer::SearchLimits(on_v, 2, 4, 3, 0); }).find("2 chunks") !=
        std::string::npos);
  CHECK(refusal_of([&] { (void)trainer::SearchLimits(on_v, 2, 4, 2, 1); }).find("2 chunks") !=
        std::string::npos);
}
