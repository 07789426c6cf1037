/// @file  Tests of split backwards and of the zero-bubble schedules, against published step times
/// and bubble rates.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

using namespace mega;
using namespace mega::dpp;
using enum ActionKind;

namespace {

template <class Policy>
std::vector<Action> list_of(const Policy& policy, int rank, int p, int m, int v) {
  std::vector<Action> list(static_cast<std::size_t>(policy.length(p, m, v)));
  list.resize(static_cast<std::size_t>(policy.order(rank, p, m, v, list)));
  return list;
}

/// "F0 I0 W0 ..." with the chunk in front where it is not 0, "+" after the first of a pair.
std::string text_of(const std::vector<Action>& list) {
  std::string text;
  for (const Action& a : list) {
    if (!text.empty()) text += ' ';
    if (a.chunk != 0) text += std::to_string(a.chunk);
    text += a.kind == forward          ? 'F'
            : a.kind == backward       ? 'B'
            : a.kind == backward_input ? 'I'
                                       : 'W';
    text += std::to_string(a.microbatch);
    if (a.with_next) text += '+';
  }
  return text;
}

template <class Policy>
std::string refusal(const Policy& policy, int rank, int p, int m, int v) {
  return mega_test::refusal_of([&] { static_cast<void>(list_of(policy, rank, p, m, v)); });
}

/// The delay rule, stated on the finished list: at most `pending` W wait after any action that does
/// not open a pair, and no W runs while it could still wait, except behind the last I.
bool obeys_delay(const std::vector<Action>& list, int pending) {
  int waiting = 0;
  auto inputs = std::count_if(list.begin(), list.end(),
                              [](const Action& a) { return a.kind == backward_input; });
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Action& a = list[i];
    if (a.kind == backward_input) {
      ++waiting;
      --inputs;
    }
    if (a.kind == backward_weight) {
      if (waiting <= pending && inputs > 0) return false;
      --waiting;
    } else if (!a.with_next) {
      int runs_now = 0;
      for (std::size_t k = i + 1; k < list.size() && list[k].kind == backward_weight; ++k)
        ++runs_now;
      if (waiting - runs_now > pending) return false;
    }
  }
  return waiting == 0;
}

template <class Base, class Delay, class Placement>
void check_split(const Base& base, const Delay& delay, int p, int m, int v, Placement place) {
  CAPTURE(p);
  CAPTURE(m);
  CAPTURE(v);
  const SplitBackward<Base, Delay> split{.base = base, .delay = delay};
  const Schedule whole = make_schedule(base, p, m, v, place);
  const Schedule made = make_schedule(split, p, m, v, place);
  const Verdict verdict = verify(lower(made));
  CHECK_MESSAGE(verdict.ok(), describe(verdict));
  const Verdict of_base = verify(lower(whole));
  for (int rank = 0; rank < p; ++rank) {
    const auto list = made.of_rank(rank);
    CHECK(obeys_delay({list.begin(), list.end()}, delay.pending(rank, p, m, v)));
    CHECK(verdict.peak(rank) <= of_base.peak(rank) + delay.pending(rank, p, m, v));
    // Without its W and with I for B it is the base's order.
    std::vector<Action> kept;
    for (Action a : list) {
      if (a.kind == backward_weight) continue;
      if (a.kind == backward_input) a.kind = backward;
      kept.push_back(a);
    }
    const auto before = whole.of_rank(rank);
    CHECK(kept == std::vector<Action>(before.begin(), before.end()));
  }
}

/// One forward and one backward side by side, from all ranks' lists at once and on a V.
struct PairsOnV {
  static constexpr std::string_view name = "pairs_on_v";
  static constexpr VPlacement placement() noexcept { return {}; }
  static constexpr int length(int, int m, int) noexcept { return 2 * m; }
  static std::vector<std::vector<Action>> orders(int p, int m, int v) {
    std::vector<std::vector<Action>> lists;
    for (int rank = 0; rank < p; ++rank) lists.push_back(list_of(PairsOnV{}, rank, p, m, v));
    return lists;
  }
  static int order(int rank, int p, int m, int v, ActionSpan out) {
    const int count = OneForwardOneBackward::order(rank, p, m, v, out);
    for (int i = p - rank; i + 1 < count; ++i) {
      Action& a = out[static_cast<std::size_t>(i)];
      a.with_next = a.kind == backward && out[static_cast<std::size_t>(i + 1)].kind == forward;
    }
    return count;
  }
};
static_assert(orders_all_ranks<PairsOnV> && traversal_policy<PairsOnV>);

constexpr bool proves_itself(const auto& policy, int p, int m) {
  return verify(lower(make_schedule(policy, p, m, 1))).ok();
}
static_assert(proves_itself(ZeroBubbleH1{}, 3, 5) && proves_itself(ZeroBubbleH2{}, 3, 5));
static_assert(simulate(make_schedule(ZeroBubbleH2{}, 2, 3, 1)).bubble_span() == 0);
static_assert(sizeof(ZeroBubbleH1) == 1 && sizeof(ZeroBubbleH2) == 1);
static_assert(orders_all_ranks<SplitBackward<PairsOnV, WeightAtOnce>> &&
              !orders_all_ranks<ZeroBubbleH1>);
static_assert(brings_placement<SplitBackward<PairsOnV, WeightAtOnce>> &&
              brings_placement<FullBackward<PairsOnV>> && !brings_placement<ZeroBubbleH1>);

struct Row {
  int p;
  int m;
  ActionTimes times;
  double one_f_one_b;
  double h1;
  double h2;
};

}  // namespace

TEST_CASE("dpp: lists of the zero-bubble schedules for two ranks and three micro-batches") {
  CHECK(text_of(list_of(ZeroBubbleH1{}, 0, 2, 3, 1)) == "F0 F1 I0 W0 F2 I1 W1 I2 W2");
  CHECK(text_of(list_of(ZeroBubbleH1{}, 1, 2, 3, 1)) == "F0 I0 F1 I1 W0 F2 I2 W1 W2");
  CHECK(text_of(list_of(ZeroBubbleH2{}, 0, 2, 4, 1)) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3");
  CHECK(text_of(list_of(ZeroBubbleH2{}, 1, 2, 4, 1)) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3");
}

TEST_CASE("dpp: zero-bubble step times with equal times of F, I and W") {
  const auto check = [](int p, int m, double h1, double h2_wall, double h2_span) {
    const Timing one = simulate(make_schedule(ZeroBubbleH1{}, p, m, 1));
    const Timing two = simulate(make_schedule(ZeroBubbleH2{}, p, m, 1));
    CHECK(one.makespan == h1);
    CHECK(two.makespan == h2_wall);
    CHECK(two.longest_span == h2_span);
    CHECK(one.peak_per_rank == std::vector<int>(static_cast<std::size_t>(p), p));
    CHECK(two.peak_per_rank == std::vector<int>(static_cast<std::size_t>(p), 2 * p - 1));
  };
  check(4, 8, 27, 27, 24);
  check(8, 16, 55, 55, 48);
  check(8, 24, 79, 79, 72);
}

TEST_CASE("dpp: zero-bubble orders are valid for every p and m, with the stated peaks") {
  for (int p = 1; p <= 9; ++p) {
    for (int m = 1; m <= 21; ++m) {
      CAPTURE(p);
      CAPTURE(m);
      const Verdict one = verify(lower(make_schedule(ZeroBubbleH1{}, p, m, 1)));
      const Verdict two = verify(lower(make_schedule(ZeroBubbleH2{}, p, m, 1)));
      CHECK_MESSAGE(one.ok(), describe(one));
      CHECK_MESSAGE(two.ok(), describe(two));
      CHECK(one.peak_per_rank == std::vector<int>(static_cast<std::size_t>(p), std::min(m, p)));
      CHECK(two.peak_per_rank ==
            std::vector<int>(static_cast<std::size_t>(p), std::min(m, 2 * p - 1)));
      CHECK(simulate(make_schedule(ZeroBubbleH2{}, p, m, 1)).longest_span <=
            simulate(make_schedule(ZeroBubbleH1{}, p, m, 1)).longest_span);
    }
  }
}

TEST_CASE("dpp: idle time of the zero-bubble schedules follows the formula") {
  // W is the shortest action in each; tolerance: rounding of sums of up to 300 terms below 1e3.
  for (const ActionTimes t : {ActionTimes{1, 1, 1}, ActionTimes{1, 1.2, .8}, ActionTimes{1, 2, .5},
                              ActionTimes{18.5, 18.1, 9.3}}) {
    for (const int p : {1, 2, 4, 7}) {
      for (const int m : {2 * p - 1, 2 * p, 5 * p + 1}) {
        CAPTURE(p);
        CAPTURE(m);
        const Timing one = simulate(make_schedule(ZeroBubbleH1{}, p, m, 1), t);
        const Timing two = simulate(make_schedule(ZeroBubbleH2{}, p, m, 1), t);
        const double work = t.forward + t.backward_input;
        const double h1 = (p - 1) * (work - t.backward_weight);
        const double h2 = (p - 1) * (work - 2 * t.backward_weight);
        CHECK(one.bubble_wall() == doctest::Approx(h1).epsilon(1e-9));
        CHECK(two.bubble_span() == doctest::Approx(h2).epsilon(1e-9));
        CHECK(two.bubble_wall() ==
              doctest::Approx(std::max(h2, (p - 1) * t.forward)).epsilon(1e-9));
      }
    }
  }
}

TEST_CASE("dpp: bubble rates of the zero-bubble table") {
  const std::vector<Row> rows = {
      {8, 24, {18.522, 18.086, 9.337, .601}, .2431, .1585, .1083},
      {8, 32, {18.513, 18.086, 9.331, .626}, .1985, .1242, .0837},
      {8, 64, {18.546, 18.097, 9.321, .762}, .1240, .0674, .0444},
      {8, 24, {29.718, 29.444, 19.927, .527}, .2347, .1323, .0698},
      {8, 32, {29.802, 29.428, 19.530, .577}, .1898, .1045, .0559},
      {8, 64, {29.935, 29.621, 19.388, .535}, .1091, .0554, .0294},
      {16, 48, {11.347, 11.248, 8.132, .377}, .2552, .1397, .0672},
      {32, 96, {10.419, 10.207, 7.715, .408}, .2646, .1421, .0641},
  };
  constexpr double rounding = 5e-5;  // the table has four digits
  for (const Row& row : rows) {
    CAPTURE(row.p);
    CAPTURE(row.m);
    const ActionTimes& t = row.times;
    const auto rate = [&](const auto& policy) {
      const double busy = row.m * (t.forward + t.backward_input + t.backward_weight);
      return 1 - busy / simulate(make_schedule(policy, row.p, row.m, 1), t).longest_span;
    };
    CHECK(std::abs(rate(OneForwardOneBackward{}) - row.one_f_one_b) <= rounding);
    CHECK(rate(ZeroBubbleH1{}) <= row.h1 + rounding);
    CHECK(rate(ZeroBubbleH2{}) <= row.h2 + rounding);
  }
}

TEST_CASE("dpp: any traversal can be split with any delay") {
  for (const int p : {1, 2, 3, 5}) {
    for (const int m : {1, 2, 5, 7, 11}) {
      for (const WeightsPending delay : {WeightsPending{0}, WeightsPending{1}, WeightsPending{4}}) {
        check_split(OneForwardOneBackward{}, delay, p, m, 1, LoopPlacement{});
        check_split(GPipe{}, delay, p, m, 3, LoopPlacement{});
        check_split(ScheduleTraversal<DFC>{}, delay, p, m, 2, LoopPlacement{});
        check_split(ScheduleTraversal<BFC>{}, delay, p, m, 3, LoopPlacement{});
      }
      check_split(ScheduleTraversal<DFC>{}, WeightAtOnce{}, p, m, 2, LoopPlacement{});
      check_split(ScheduleTraversal<DFC>{}, WeightByRank<3>{}, p, m, 2, LoopPlacement{});
      check_split(ScheduleTraversal<DFC>{}, WeightAtEnd{}, p, m, 4, LoopPlacement{});
      check_split(GPipe{}, WeightAtEnd{}, p, m, 2, VPlacement{});
    }
  }
}

TEST_CASE("dpp: the delay counts the pending weight gradients") {
  using Base = OneForwardOneBackward;
  CHECK(text_of(list_of(SplitBackward<Base, WeightAtOnce>{}, 0, 2, 2, 1)) == "F0 F1 I0 W0 I1 W1");
  CHECK(text_of(list_of(SplitBackward<Base, WeightAtEnd>{}, 1, 2, 2, 1)) == "F0 I0 F1 I1 W0 W1");
  CHECK(text_of(list_of(SplitBackward<Base, WeightsPending>{.delay = {1}}, 0, 1, 3, 1)) ==
        "F0 I0 F1 I1 W0 F2 I2 W1 W2");
  CHECK(text_of(list_of(SplitBackward<ScheduleTraversal<DFC>, WeightsPending>{.delay = {1}}, 0, 1,
                        2, 2)) == "F0 1F0 1I0 F1 I0 1W0 1F1 1I1 W0 I1 1W1 W1");
}

TEST_CASE("dpp: splitting again moves the weight gradients, a full backward takes them back") {
  for (const int p : {1, 2, 4}) {
    for (const int m : {1, 3, 9}) {
      for (int rank = 0; rank < p; ++rank) {
        const auto once =
            list_of(SplitBackward<OneForwardOneBackward, WeightAtOnce>{}, rank, p, m, 1);
        CHECK(list_of(SplitBackward<ZeroBubbleH1, WeightAtOnce>{}, rank, p, m, 1) == once);
        CHECK(list_of(SplitBackward<SplitBackward<GPipe, WeightAtEnd>, WeightAtOnce>{}, rank, p, m,
                      2) == list_of(SplitBackward<GPipe, WeightAtOnce>{}, rank, p, m, 2));
        CHECK(list_of(FullBackward<ZeroBubbleH1>{}, rank, p, m, 1) ==
              list_of(OneForwardOneBackward{}, rank, p, m, 1));
        CHECK(list_of(FullBackward<ScheduleTraversal<BFC>>{}, rank, p, m, 2) ==
              list_of(ScheduleTraversal<BFC>{}, rank, p, m, 2));
      }
      using Delayed = SplitBackward<ScheduleTraversal<DFC>, WeightsPending>;
      const FullBackward<Delayed> full{.base = {.delay = {3}}};
      CHECK(verify(lower(make_schedule(full, p, m, 3))).ok());
    }
  }
}

TEST_CASE("dpp: a split parts no pair and keeps the placement of its base") {
  CHECK(text_of(list_of(PairsOnV{}, 0, 1, 3, 1)) == "F0 B0+ F1 B1+ F2 B2");
  CHECK(text_of(list_of(SplitBackward<PairsOnV, WeightAtOnce>{}, 0, 1, 3, 1)) ==
        "F0 I0+ F1 W0 I1+ F2 W1 I2 W2");
  using Policy = SplitBackward<PairsOnV, WeightByRank<1>>;
  const Schedule made = make_schedule(Policy{}, 3, 6, 1);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(made.view().stage(rank, 0) == VPlacement::stage(rank, 0, 3, 1));
    const auto list = made.of_rank(rank);
    CHECK(std::vector<Action>(list.begin(), list.end()) == list_of(Policy{}, rank, 3, 6, 1));
    CHECK(obeys_delay({list.begin(), list.end()}, rank));
  }
  CHECK(simulate(make_schedule(FullBackward<PairsOnV>{}, 3, 6, 1)).makespan ==
        simulate(make_schedule(PairsOnV{}, 3, 6, 1)).makespan);
}

TEST_CASE("dpp: zero-bubble policies refuse what they cannot order, in words") {
  CHECK(refusal(ZeroBubbleH1{}, 0, 2, 4, 2) ==
        "1F1B runs 1 chunk a rank, not v 2; use v 1, or dfc for several chunks");
  CHECK(refusal(ZeroBubbleH2{}, 0, 2, 4, 3) ==
        "eager 1F1B runs 1 chunk a rank, not v 3; use v 1, or dfc for several "
        "chunks");
  CHECK(refusal(ZeroBubbleH1{}, 2, 2, 4, 1) == "rank 2 is outside 0..1");
  std::vector<Action> room(11);
  CHECK_THROWS_WITH_AS(ZeroBubbleH1{}.order(0, 2, 4, 1, room),
                       "an order has 12 actions on a rank, but its length() is 11", Error);
}
