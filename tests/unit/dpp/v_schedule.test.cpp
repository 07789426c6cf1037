/// @file  Tests of the capped V schedules, against bubbles that a public search found, closed
/// formulas and the verifier.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/verifier.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

using namespace mega;
using namespace mega::dpp;

// Times of whole numbers are exact in double, so unit-time results compare with ==.

namespace {

template <class Policy>
constexpr bool is_ideal(const Policy& policy, int p, int m) {
  const Schedule s = make_schedule(policy, p, m, 2);
  const Timing timing = simulate(s);
  return verify(lower(s)).ok() && timing.bubble_span() == 0 && timing.bubble_wall() == p - 1;
}
static_assert(is_ideal(ZeroBubbleV{}, 1, 1) && is_ideal(ZeroBubbleV{}, 2, 4));
static_assert(simulate(make_schedule(VSchedule{{4}}, 3, 6, 2)).bubble_span() == 5);

template <class Policy>
std::string refusal(const Policy& policy, int p, int m, int v) {
  return mega_test::refusal_of([&] { static_cast<void>(policy.orders(p, m, v)); });
}

/// The least bubbles that the search of sail-sg/zero-bubble finds for peaks p..2p at m = 2p.
/// Source: its V-schedule search, run with unit times.
struct PublicSearch {
  int p;
  std::vector<int> bubbles;
};
const PublicSearch public_searches[] = {{4, {11, 8, 5, 3, 0}},
                                        {8, {23, 20, 17, 14, 11, 8, 5, 3, 0}}};

/// The closed formula of the rows above.
int formula(int p, int cap) {
  return 3 * p - 1 - 3 * cap + std::max(3 * p, p - 1 + 2 * (1 + (cap + 1) / 2));
}

void check_valid(int p, int m, int cap) {
  CAPTURE(p);
  CAPTURE(m);
  CAPTURE(cap);
  const Schedule s = make_schedule(VSchedule{{cap}}, p, m, 2);
  const Verdict verdict = verify(lower(s, {.tied_ends = true}));
  REQUIRE_MESSAGE(verdict.ok(), describe(verdict));
  for (const int peak : verdict.peak_per_rank) CHECK(peak <= cap);
}

}  // namespace

TEST_CASE("dpp: V schedules idle no longer than the public search's for every cap") {
  for (const PublicSearch& row : public_searches) {
    for (std::size_t i = 0; i < row.bubbles.size(); ++i) {
      const int cap = row.p + static_cast<int>(i);
      CAPTURE(row.p);
      CAPTURE(cap);
      CHECK(row.bubbles[i] == formula(row.p, cap));
      const Timing timing = simulate(make_schedule(VSchedule{{cap}}, row.p, 2 * row.p, 2));
      CHECK(timing.busy == 12 * row.p);
      CHECK(timing.bubble_span() <= row.bubbles[i]);
      for (const int peak : timing.peak_per_rank) CHECK(peak <= cap);
    }
  }
}

TEST_CASE("dpp: the bubble of a V schedule from V-Min on does not grow with the micro-batches") {
  for (const int p : {3, 4, 5, 8, 12, 16}) {
    for (int cap = VMin{}.cap.live(p); cap <= 2 * p; ++cap) {
      for (const int m : {2 * p, 3 * p + 1, 8 * p}) {
        CAPTURE(p);
        CAPTURE(cap);
        CAPTURE(m);
        const Timing timing = simulate(make_schedule(VSchedule{{cap}}, p, m, 2));
        // The formula is of p = 4 and 8 with m = 2p; elsewhere the orders come this near to it.
        CHECK(timing.bubble_span() <= formula(p, cap) + (p > 6 ? 5 : 0));
      }
    }
  }
}

TEST_CASE("dpp: ZB-V has no bubble but the start of its ranks, within 1F1B's memory") {
  const Timing four = simulate(make_schedule(ZeroBubbleV{}, 4, 8, 2));
  CHECK(four.makespan == 51);
  CHECK(four.longest_span == 48);
  CHECK(*std::max_element(four.peak_per_rank.begin(), four.peak_per_rank.end()) == 8);
  const Timing eight = simulate(make_schedule(ZeroBubbleV{}, 8, 16, 2));
  CHECK(eight.makespan == 103);
  CHECK(eight.longest_span == 96);
  CHECK(*std::max_element(eight.peak_per_rank.begin(), eight.peak_per_rank.end()) == 16);
  for (const int p : {1, 2, 3, 5, 6, 7, 9, 11, 13, 16}) {
    for (const int m : {2 * p, 2 * p + 1, 5 * p}) {
      CAPTURE(p);
      CAPTURE(m);
      CHECK(is_ideal(ZeroBubbleV{}, p, m));
    }
  }
}

TEST_CASE("dpp: ZB-V with uneven times") {
  const auto bubble = [](int m) {
    return simulate(make_schedule(ZeroBubbleV{}, 4, m, 2),
                    {.forward = 1, .backward_input = 1.2, .backward_weight = 0.8})
        .bubble_span();
  };
  // Sums of a hundred tenths err by less than 1e-12.
  CHECK(bubble(8) <= 2.4 + 1e-9);
  CHECK(bubble(20) <= 2.4 + 1e-9);
}

TEST_CASE("dpp: V-Half and V-Min hold what their names say") {
  const auto check = [](const auto& policy, int p, int live, int bubble) {
    CAPTURE(p);
    const Timing timing = simulate(make_schedule(policy, p, 2 * p, 2));
    CHECK(*std::max_element(timing.peak_per_rank.begin(), timing.peak_per_rank.end()) == live);
    CHECK(timing.bubble_span() <= bubble);
  };
  check(VHalf{}, 4, 6, 5);
  check(VHalf{}, 8, 10, 17);
  check(VMin{}, 4, 4, 11);
  check(VMin{}, 8, 8, 23);
  check(VMin{}, 9, 8, 29);
  check(VMin{}, 12, 10, 41);
  check(VMin{}, 16, 12, 59);
  check(VMin{}, 24, 18, 89);
}

TEST_CASE("dpp: V schedules are valid for every p, m and cap, and keep to the cap") {
  for (int p = 1; p <= 6; ++p) {
    for (int m = 1; m <= 2 * p + 3; ++m) {
      for (int cap = 2; cap <= 2 * p + 1; ++cap) check_valid(p, m, cap);
    }
  }
  check_valid(11, 7, 3);
  check_valid(13, 40, 10);
  check_valid(16, 5, 12);
  check_valid(24, 48, 31);
}

TEST_CASE("dpp: the smallest cap runs one micro-batch after the other") {
  // Of a micro-batch the way down, up and back is 4p actions, the last W one more.
  const Timing timing = simulate(make_schedule(VSchedule{{2}}, 3, 4, 2));
  CHECK(timing.makespan >= 4 * (4 * 3 - 1));
  CHECK(timing.makespan <= 4 * (4 * 3 + 2));
  CHECK(timing.peak_per_rank == std::vector<int>{2, 2, 2});
}

TEST_CASE("dpp: a cap above 2p is as good as 2p") {
  CHECK(VSchedule{{100}}.orders(3, 7, 2) == ZeroBubbleV{}.orders(3, 7, 2));
}

TEST_CASE("dpp: a rank's V order is its list of all ranks' orders") {
  const auto lists = VHalf{}.orders(5, 9, 2);
  REQUIRE(lists.size() == 5);
  for (int rank = 0; rank < 5; ++rank) {
    std::vector<Action> list(static_cast<std::size_t>(VHalf::length(5, 9, 2)));
    CHECK(VHalf{}.order(rank, 5, 9, 2, list) == 54);
    CHECK(list == lists[static_cast<std::size_t>(rank)]);
  }
  std::vector<Action> short_by_one(53);
  CHECK_THROWS_AS(VHalf{}.order(0, 5, 9, 2, short_by_one), Error);
}

TEST_CASE("dpp: V schedules refuse what they cannot run, in words") {
  CHECK(refusal(VSchedule{{1}}, 4, 8, 2) ==
        "a cap of 1 on live activations is too low for the V schedule v_schedule: a micro-batch "
        "needs "
        "one for each of its 2 chunks on a rank, so the smallest valid cap is 2");
  CHECK(refusal(VSchedule{}, 4, 8, 2).find("smallest valid cap is 2") != std::string::npos);
  CHECK(refusal(VSchedule{{-3}}, 1, 1, 2).find("a cap of -3") != std::string::npos);
  CHECK(refusal(VSchedule{{2}}, 4, 8, 2) == "accepted");
  CHECK(refusal(ZeroBubbleV{}, 4, 8, 1) ==
        "the V schedule zb_v runs 2 chunks a rank, not v 1; use v 2");
  CHECK(refusal(VMin{}, 4, 8, 4).find("v_min runs 2 chunks a rank, not v 4") != std::string::npos);
  CHECK(refusal(VMin{}, 0, 8, 2).find("not p 0") != std::string::npos);
  std::vector<Action> list(48);
  CHECK_THROWS_AS(VHalf{}.order(4, 4, 8, 2, list), Error);
}
