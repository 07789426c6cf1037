/// @file  Tests of DualPipeV, against PyTorch's file, DualPipe's published step counts and the
/// formula of its idle time.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/csv.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/verifier.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

constexpr bool is_valid(int p, int m) {
  return verify(lower(make_schedule(DualPipeV{}, p, m, 2))).ok();
}
static_assert(is_valid(1, 2) && is_valid(2, 4) && is_valid(3, 7));
static_assert(simulate(make_schedule(DualPipeV{}, 2, 5, 2)).makespan == 32);

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string refusal(int rank, int p, int m, int v) {
  std::vector<Action> list(100);
  return mega_test::refusal_of([&] { DualPipeV::order(rank, p, m, v, list); });
}

}  // namespace

TEST_CASE("dpp: DualPipeV of three ranks, cell by cell") {
  CHECK(write_csv(make_schedule(DualPipeV{}, 3, 6, 2)) ==
        "0F0,0F1,0F2,0F3,0F4,5F0,5I0,5W0,5F1,5I1,5W1,5F2,(0F5;5B2)OVERLAP_F_B,"
        "(5F3;0B0)OVERLAP_F_B,5B3,(5F4;0B1)OVERLAP_F_B,5B4,(5F5;0B2)OVERLAP_F_B,5B5,0I3,0W3,0I4,"
        "0W4,0I5,0W5\n"
        "1F0,1F1,1F2,4F0,1F3,4F1,4I0,4W0,4F2,(1F4;4B1)OVERLAP_F_B,(4F3;1B0)OVERLAP_F_B,"
        "(1F5;4B2)OVERLAP_F_B,(4F4;1B1)OVERLAP_F_B,4B3,(4F5;1B2)OVERLAP_F_B,4B4,1B3,4I5,1I4,4W5,"
        "1I5,1W4,1W5\n"
        "2F0,3F0,2F1,3F1,2F2,3F2,2F3,3B0,(3F3;2B0)OVERLAP_F_B,(2F4;3B1)OVERLAP_F_B,"
        "(3F4;2B1)OVERLAP_F_B,(2F5;3B2)OVERLAP_F_B,(3F5;2B2)OVERLAP_F_B,3B3,2B3,3B4,2I4,3I5,2I5,"
        "2W4,3W5,2W5\n");
}

TEST_CASE("dpp: DualPipeV gives PyTorch's file, action for action") {
  const char* const shared = std::getenv("MEGA_SHARED");
  const std::string file =
      shared == nullptr
          ? ""
          : contents(std::string(shared) + "/oracles/schedules/pytorch_dualpipev_4rank_10mb.csv");
  if (file.empty()) {
    MESSAGE("skipped: MEGA_SHARED names no directory with the file");
    return;
  }
  const CsvSchedule theirs = read_csv(file);
  const Schedule ours = make_schedule(DualPipeV{}, 4, 10, 2);
  CHECK(write_csv(ours) == file);
  for (int rank = 0; rank < 4; ++rank) {
    const auto a = ours.of_rank(rank);
    const auto b = theirs.schedule.of_rank(rank);
    CHECK(std::equal(a.begin(), a.end(), b.begin(), b.end()));
  }
}

TEST_CASE("dpp: DualPipeV of four ranks and ten micro-batches takes the known times") {
  const Schedule s = make_schedule(DualPipeV{}, 4, 10, 2);
  struct Row {
    double pair, makespan, idle;
  };
  for (const Row& row : {Row{3, 66, 6}, Row{2.5, 59, 4.5}, Row{2.2, 54.8, 3.6}}) {
    CAPTURE(row.pair);
    const Timing timing = simulate(s, {.pair = row.pair});
    // 2.2 is no binary fraction; a few dozen additions of it err by far less.
    CHECK(timing.makespan == doctest::Approx(row.makespan).epsilon(1e-12));
    CHECK(timing.peak_per_rank == std::vector<int>{9, 9, 9, 9});
    double most_idle = 0;
    for (int rank = 0; rank < 4; ++rank) {
      double busy = 0;
      const auto list = s.of_rank(rank);
      for (std::size_t i = 0; i < list.size(); ++i) {
        if (list[i].with_next) {
          busy += row.pair;
          ++i;
        } else {
          busy += ActionTimes{}.of(list[i].kind);
        }
      }
      most_idle = std::max(most_idle, timing.makespan - busy);
    }
    CHECK(most_idle == doctest::Approx(row.idle).epsilon(1e-12));
  }
}

TEST_CASE("dpp: DualPipeV is valid for every p and m >= 2p, within 2p + 1 live activations") {
  for (int p = 1; p <= 9; ++p) {
    for (const int m : {2 * p, 2 * p + 1, 2 * p + 2, 3 * p + 1, 5 * p}) {
      CAPTURE(p);
      CAPTURE(m);
      const Schedule s = make_schedule(DualPipeV{}, p, m, 2);
      const Verdict verdict = verify(lower(s, {.tied_ends = true}));
      CHECK_MESSAGE(verdict.ok(), describe(verdict));
      for (const int peak : verdict.peak_per_rank) CHECK(peak <= 2 * p + 1);
      if (m > 2 * p) CHECK(verdict.peak(p - 1) == 2 * p + 1);
      CHECK(s.of_rank(0).size() == static_cast<std::size_t>(DualPipeV::length(p, m, 2)));
      for (int rank = 0; rank < p; ++rank) {
        const auto list = s.of_rank(rank);
        CHECK(static_cast<int>(list.size()) == DualPipeV::length(p, m, 2) - rank);
        // All forwards but those of the fill run side by side with a backward.
        const auto pairs =
            std::count_if(list.begin(), list.end(), [](const Action& a) { return a.with_next; });
        CHECK(pairs == 2 * (m - 2 * p + rank + 1) + (p - 1 - rank) - (rank == p - 1 ? 1 : 0));
      }
    }
  }
}

TEST_CASE("dpp: DualPipe's step counts") {
  // Eight ranks and 20 micro-batches, 10 from each end: rank r and rank 7-r alike.
  CHECK(dual_pipe_phases(0, 4, 10) == std::array<int, 8>{6, 1, 3, 3, 3, 1, 3, 1});
  CHECK(dual_pipe_phases(1, 4, 10) == std::array<int, 8>{4, 2, 2, 4, 2, 2, 2, 2});
  CHECK(dual_pipe_phases(2, 4, 10) == std::array<int, 8>{2, 3, 1, 5, 1, 3, 1, 3});
  CHECK(dual_pipe_phases(3, 4, 10) == std::array<int, 8>{0, 4, 0, 6, 0, 4, 0, 4});
}

TEST_CASE("dpp: DualPipeV refuses what it cannot run, in words") {
  CHECK(refusal(0, 4, 8, 2) == "accepted");
  CHECK(refusal(0, 4, 7, 2) ==
        "DualPipeV needs one micro-batch for each of its 8 stages at least, not m 7; use m 8 or "
        "more");
  CHECK(refusal(0, 1, 1, 2).find("not m 1; use m 2 or more") != std::string::npos);
  CHECK(refusal(0, 4, 8, 1) == "DualPipeV runs 2 chunks a rank, not v 1; use v 2");
  CHECK(refusal(0, 4, 8, 3).find("not v 3") != std::string::npos);
  CHECK(refusal(4, 4, 8, 2).find("rank 4 is outside 0..3") != std::string::npos);
  std::array<Action, 38> short_by_one;
  CHECK_THROWS_AS(DualPipeV::order(0, 4, 8, 2, short_by_one), Error);
}
