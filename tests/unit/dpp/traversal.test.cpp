/// @file  Tests of the traversal orders, against published tables and warm-up counts.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/traversal.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

template <class Policy>
std::vector<Action> list_of(const Policy& policy, int rank, int p, int m, int v) {
  std::vector<Action> list(static_cast<std::size_t>(policy.length(p, m, v)));
  const int count = policy.order(rank, p, m, v, list);
  CHECK(count == policy.length(p, m, v));
  return list;
}

/// Megatron's notation: chunk + 1 for a forward, negative for a backward.
std::vector<int> signed_chunks(const std::vector<Action>& list) {
  std::vector<int> out;
  for (const Action& a : list) {
    out.push_back(a.kind == ActionKind::forward ? a.chunk + 1 : -(a.chunk + 1));
  }
  return out;
}

int leading_forwards(const std::vector<Action>& list) {
  int n = 0;
  for (const Action& a : list) {
    if (a.kind != ActionKind::forward) break;
    ++n;
  }
  return n;
}

template <class Policy>
std::string refusal(const Policy& policy, int rank, int p, int m, int v) {
  std::vector<Action> list(static_cast<std::size_t>(std::max(0, policy.length(p, m, v))));
  return mega_test::refusal_of([&] { policy.order(rank, p, m, v, list); });
}

constexpr std::array<Action, 4> one_rank_of_two() {
  std::array<Action, 4> list{};
  OneForwardOneBackward::order(1, 2, 2, 1, list);
  return list;
}
static_assert(one_rank_of_two()[1] == make_action(ActionKind::backward, 0, 0));
static_assert(sizeof(ScheduleTraversal<BFC>) == 1);

struct NoOrder {
  static constexpr std::string_view name = "none";
  static constexpr int length(int, int, int) { return 0; }
};
static_assert(!traversal_policy<NoOrder>);

}  // namespace

TEST_CASE("dpp: Megatron's schedule table for p 2, m 5, v 2, group 3") {
  const auto list = list_of(Interleaved{{3}}, 0, 2, 5, 2);
  std::vector<int> microbatches;
  std::vector<int> chunks;
  for (const Action& a : list) {
    if (a.kind != ActionKind::forward) continue;
    microbatches.push_back(a.microbatch);
    chunks.push_back(a.chunk);
  }
  CHECK(microbatches == std::vector<int>{0, 1, 2, 0, 1, 2, 3, 4, 3, 4});
  CHECK(chunks == std::vector<int>{0, 0, 0, 1, 1, 1, 0, 0, 1, 1});
  CHECK(Interleaved{{3}}.warm_up(0, 2, 5, 2) == 5);
  CHECK(signed_chunks(list) ==
        std::vector<int>{1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1});
}

TEST_CASE("dpp: warm-up of Megatron's test grid") {
  constexpr std::array<std::array<int, 2>, 7> grid{
      {{1, 1}, {2, 2}, {2, 4}, {4, 4}, {4, 5}, {8, 9}, {8, 11}}};
  for (const auto& row : grid) {
    const int p = row[0];
    const int g = row[1];
    for (const int m : {8, 32}) {
      for (const int v : {1, 2, 4, 8}) {
        for (int rank = 0; rank < p; ++rank) {
          CAPTURE(p);
          CAPTURE(g);
          CAPTURE(m);
          CAPTURE(v);
          CAPTURE(rank);
          if (v > 1 && g > m) {
            CHECK(refusal(Interleaved{{g}}, rank, p, m, v) ==
                  sentence("micro-batch group size ", g,
                           " is outside 8..8 for p 8, m 8; the nearest valid one is 8"));
            continue;
          }
          const int formula = v == 1 ? p - 1 - rank : 2 * (p - 1 - rank) + (v - 1) * g;
          CHECK(Interleaved{{g}}.warm_up(rank, p, m, v) == formula);
          // The first forward of the steady phase comes before the first backward.
          CHECK(leading_forwards(list_of(Interleaved{{g}}, rank, p, m, v)) ==
                std::min(m * v, formula + 1));
        }
      }
    }
  }
}

TEST_CASE("dpp: BFC and DFC are the ends of the group-size dial, 1F1B is one chunk") {
  for (int p = 1; p <= 5; ++p) {
    for (int m = 1; m <= 11; ++m) {
      for (int v = 1; v <= 3; ++v) {
        for (int rank = 0; rank < p; ++rank) {
          const int largest = std::max(p, m);
          CHECK(list_of(ScheduleTraversal<DFC>{}, rank, p, m, v) ==
                list_of(Interleaved{{p}}, rank, p, m, v));
          CHECK(list_of(ScheduleTraversal<BFC>{}, rank, p, m, v) ==
                list_of(Interleaved{{largest}}, rank, p, m, v));
          if (v == 1) {
            CHECK(list_of(ScheduleTraversal<BFC>{}, rank, p, m, v) ==
                  list_of(OneForwardOneBackward{}, rank, p, m, v));
          }
        }
      }
    }
  }
}

TEST_CASE("dpp: a short last group keeps its place in the pattern") {
  // p 4, m 5: groups 0..3 and 4. Three absent micro-batches are skipped.
  const auto list = list_of(ScheduleTraversal<DFC>{}, 3, 4, 5, 2);
  CHECK(signed_chunks(list) ==
        std::vector<int>{1, 1, 1, 1, 2, -2, 2, -2, 2, -2, 2, -2, 1, -1, -1, -1, -1, 2, -2, -1});
}

TEST_CASE("dpp: GPipe runs chunk by chunk, backwards in reverse chunk order") {
  const auto list = list_of(GPipe{}, 1, 3, 2, 2);
  using enum ActionKind;
  CHECK(list == std::vector<Action>{make_action(forward, 0, 0), make_action(forward, 0, 1),
                                    make_action(forward, 1, 0), make_action(forward, 1, 1),
                                    make_action(backward, 1, 0), make_action(backward, 1, 1),
                                    make_action(backward, 0, 0), make_action(backward, 0, 1)});
}

TEST_CASE("dpp: impossible pipelines are refused with their numbers") {
  CHECK(refusal(OneForwardOneBackward{}, 0, 4, 8, 2) ==
        "1F1B runs 1 chunk a rank, not v 2; use v 1, or dfc for several chunks");
  CHECK(refusal(Interleaved{{3}}, 0, 4, 8, 2) ==
        "micro-batch group size 3 is outside 4..8 for p 4, m 8; the nearest valid one is 4");
  CHECK(refusal(Interleaved{{9}}, 0, 4, 8, 2).find("nearest valid one is 8") != std::string::npos);
  CHECK(refusal(Interleaved{}, 0, 4, 2, 2).find("0 is outside 4..4") != std::string::npos);
  CHECK(refusal(GPipe{}, 0, 0, 8, 1).find("not p 0, m 8, v 1") != std::string::npos);
  CHECK(refusal(ScheduleTraversal<BFC>{}, 0, 4, 0, 2).find("m 0") != std::string::npos);
  CHECK(refusal(ScheduleTraversal<DFC>{}, 4, 4, 8, 2) == "rank 4 is outside 0..3");
  CHECK(refusal(ScheduleTraversal<DFC>{}, -1, 4, 8, 2) == "rank -1 is outside 0..3");
  CHECK(refusal(GPipe{}, 0, 1, 1, 32768).find("limit of 32767") != std::string::npos);
  std::array<Action, 3> too_small{};
  CHECK_THROWS_AS(GPipe::order(0, 1, 2, 1, too_small), Error);
}

TEST_CASE("dpp: step of interleaved 1F1B, for every group size with and without skipped turns") {
  // Integer times: every sum is exact. F and B = I + W of a chunk.
  for (const auto& [f, i, w] : {std::array{1, 1, 1}, std::array{3, 1, 1}, std::array{2, 0, 5}}) {
    const ActionTimes times{.forward = static_cast<double>(f),
                            .backward_input = static_cast<double>(i),
                            .backward_weight = static_cast<double>(w)};
    const auto step = [&](const auto& policy, int p, int m, int v) {
      return simulate(make_schedule(policy, p, m, v), times).makespan;
    };
    for (int p = 1; p <= 6; ++p) {
      for (int v = 2; v <= 4; ++v) {
        for (int m = 1; m <= 20; ++m) {
          for (int g = p; g <= std::max(p, m); ++g) {
            CAPTURE(p);
            CAPTURE(v);
            CAPTURE(m);
            CAPTURE(g);
            const int rest = m % g;
            const int full = m < p ? p * v + m - 1 : m * v + p - 1;
            const int skipped = m >= p && rest != 0 && rest < p ? (v - 1) * (p - rest) : 0;
            const double found = step(Interleaved{{g}}, p, m, v) - full * (f + i + w);
            CHECK(skipped * (i + w) <= found);
            CHECK(found <= skipped * (f + i + w));
          }
          CHECK(step(GPipe{}, p, m, v) == (m < p ? p * v + m - 1 : m * v + p - 1) * (f + i + w));
        }
      }
    }
  }
}
