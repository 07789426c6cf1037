/// @file  Tests of schedule code against files, counts and tables that other projects published:
/// PyTorch, torchtitan, Megatron-LM, DeepSpeed and sail's zero-bubble tests. Files of others are
/// read where MEGA_SHARED names a directory with oracles; beside each stands one of our own with
/// the same feature, which is always there.
#include <mega/core/error.hpp>
#include <mega/dpp/csv.hpp>
#include <mega/dpp/passes.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/verifier.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

using namespace mega;
using namespace mega::dpp;
using enum mega::dpp::ActionKind;

namespace {

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string own_file(const std::string& name) {
  std::string text = contents("tests/unit/dpp/data/" + name);
  REQUIRE_MESSAGE(!text.empty(), name, " is not there; tests run from the root of the repository");
  return text;
}

/// Text of another project's file; empty, with a message, where there is none.
std::string foreign_file(const std::string& name) {
  const char* const shared = std::getenv("MEGA_SHARED");
  std::string text =
      shared == nullptr ? "" : contents(std::string(shared) + "/oracles/schedules/" + name);
  if (text.empty()) MESSAGE("skipped: MEGA_SHARED names no directory with ", name);
  return text;
}

/// PyTorch's passes see idle cells, an importer of orders does not: [rank][cell] is idle.
std::vector<std::vector<bool>> idle_cells(const std::string& text) {
  std::vector<std::vector<bool>> idle(1);
  bool empty = true;
  for (const char letter : text) {
    if (letter == ',' || letter == '\n') {
      idle.back().push_back(empty);
      empty = true;
      if (letter == '\n') idle.emplace_back();
    } else {
      empty = false;
    }
  }
  idle.pop_back();
  return idle;
}

std::vector<std::vector<bool>> no_idle_cells(const ScheduleView& s) {
  std::vector<std::vector<bool>> idle;
  for (int rank = 0; rank < s.p; ++rank) idle.emplace_back(s.of_rank(rank).size(), false);
  return idle;
}

/// Who has done what: (kind, stage, micro-batch), for each rank.
using Done = std::vector<std::set<std::tuple<ActionKind, int, int>>>;

/// Adds transfers by the rule of PyTorch's lowering: ranks take turns with one cell each, and a
/// sender places the recv in the receiver's list together with its own send.
Schedule pytorch_transfers(const ScheduleView& s, const std::vector<std::vector<bool>>& idle) {
  Done done(static_cast<std::size_t>(s.p));
  std::vector<std::vector<Action>> out(done.size());
  std::vector<std::size_t> cell(done.size(), 0);
  std::vector<std::size_t> next(done.size(), 0);
  for (bool progress = true; progress;) {
    progress = false;
    for (int rank = 0; rank < s.p; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      if (cell[r] == idle[r].size()) continue;
      if (idle[r][cell[r]]) {
        ++cell[r];
        progress = true;
        continue;
      }
      const Action& a = s.of_rank(rank)[next[r]];
      const int stage = s.stage(rank, a.chunk);
      const auto has = [&](ActionKind kind, int of_stage) {
        return done[r].contains({kind, of_stage, a.microbatch});
      };
      bool ready = true;
      if (a.kind == forward && stage > 0) {
        ready = has(recv_forward, stage) || has(forward, stage - 1);
      }
      if (gives_input_gradient(a.kind) && stage + 1 < s.stages()) {
        ready =
            has(recv_backward, stage) || has(backward, stage + 1) || has(backward_input, stage + 1);
      }
      if (!ready) continue;
      progress = true;
      ++cell[r];
      ++next[r];
      out[r].push_back(a);
      done[r].insert({a.kind, stage, a.microbatch});
      const int target = a.kind == forward ? stage + 1 : stage - 1;
      if (a.kind == backward_weight || target < 0 || target == s.stages()) continue;
      const int peer = s.rank_of(target);
      if (peer == rank) continue;
      const auto send = a.kind == forward ? send_forward : send_backward;
      const auto recv = a.kind == forward ? recv_forward : recv_backward;
      const auto q = static_cast<std::size_t>(peer);
      out[r].push_back(make_action(send, a.chunk, a.microbatch));
      out[q].push_back(make_action(recv, s.chunk_of(target), a.microbatch));
      done[q].insert({recv, target, a.microbatch});
    }
  }
  Schedule made(s);
  for (int rank = 0; rank < s.p; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    REQUIRE(cell[r] == idle[r].size());
    made.append(out[r]);
  }
  return made;
}

/// Steps of PyTorch's dry run, in which transfers cost a step as actions do and sends are buffered:
/// in each step every rank takes one action if it is ready; those that were not are asked once
/// more after the others have moved.
int pytorch_steps(const ScheduleView& s) {
  Done done(static_cast<std::size_t>(s.p));
  std::vector<std::size_t> next(done.size(), 0);
  const auto ready = [&](int rank, const Action& a) {
    const int stage = s.stage(rank, a.chunk);
    const auto has = [&](ActionKind kind, int of_stage) {
      const auto owner = static_cast<std::size_t>(s.rank_of(of_stage));
      return done[owner].contains({kind, of_stage, a.microbatch});
    };
    const auto here = [&](int of_stage) { return s.rank_of(of_stage) == rank; };
    switch (a.kind) {
      case forward:
        return stage == 0 || has(recv_forward, stage) ||
               (here(stage - 1) && has(forward, stage - 1));
      case backward:
      case backward_input:
        return stage + 1 == s.stages() || has(recv_backward, stage) ||
               (here(stage + 1) && (has(backward, stage + 1) || has(backward_input, stage + 1)));
      case send_forward: return has(forward, stage);
      case recv_forward: return has(send_forward, stage - 1);
      case send_backward: return has(backward, stage) || has(backward_input, stage);
      case recv_backward: return has(send_backward, stage + 1);
      default: return true;
    }
  };
  int steps = 0;
  for (bool progress = true; progress; ++steps) {
    progress = false;
    std::vector<int> late;
    const auto try_next = [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      const Action& a = s.of_rank(rank)[next[r]];
      if (!ready(rank, a)) return false;
      done[r].insert({a.kind, s.stage(rank, a.chunk), a.microbatch});
      ++next[r];
      progress = true;
      return true;
    };
    for (int rank = 0; rank < s.p; ++rank) {
      if (next[static_cast<std::size_t>(rank)] == s.of_rank(rank).size()) continue;
      if (!try_next(rank)) late.push_back(rank);
    }
    for (const int rank : late) try_next(rank);
  }
  for (int rank = 0; rank < s.p; ++rank) {
    CHECK(next[static_cast<std::size_t>(rank)] == s.of_rank(rank).size());
  }
  return steps - 1;  // the last round found nothing left to do
}

void check_equal(const ScheduleView& a, const ScheduleView& b) {
  REQUIRE(a.p == b.p);
  REQUIRE(a.v == b.v);
  CHECK(a.m == b.m);
  for (int rank = 0; rank < a.p; ++rank) {
    CHECK(std::ranges::equal(a.of_rank(rank), b.of_rank(rank)));
  }
}

/// What is published about a pair of files: a compute order with idle cells and, made of it by
/// merging and by PyTorch's lowering, one with transfers.
struct Lowered {
  const char* compute;
  const char* transfers;
  double makespan;  // of the compute order, unit times, no hop
  double busy;
  std::vector<int> peaks;
  int steps;  // of the lowered one
};

void check_lowered(const Lowered& expected, const std::string& compute_text,
                   const std::string& transfers_text) {
  const CsvSchedule compute = read_csv(compute_text, expected.compute);
  const CsvSchedule transfers = read_csv(transfers_text, expected.transfers);
  CHECK(compute.spelling == BackwardSpelling::old);
  CHECK(transfers.spelling == BackwardSpelling::old);
  CHECK(verify(lower(compute.schedule)).ok());

  const Timing timing = simulate(compute.schedule);
  CHECK(timing.makespan == expected.makespan);
  CHECK(timing.busy == expected.busy);
  CHECK(timing.peak_per_rank == expected.peaks);

  const Schedule merged = merge_backward(compute.schedule);
  check_equal(compute_order(transfers.schedule), merged);
  const Schedule lowered = pytorch_transfers(merged, no_idle_cells(merged));
  CHECK(write_csv(lowered, BackwardSpelling::old) == transfers_text);
  CHECK(pytorch_steps(transfers.schedule) == expected.steps);
  CHECK(verify(insert_implicit(transfers.schedule)).ok());
}

/// A file of fused pairs: makespans with F = I = W = 1 and these durations of a pair.
void check_pairs(const std::string& text, const std::vector<std::pair<double, double>>& makespans,
                 const std::vector<int>& peaks) {
  const CsvSchedule read = read_csv(text);
  CHECK(read.spelling == BackwardSpelling::current);
  CHECK(left_out(read).empty());
  CHECK(write_csv(read.schedule) == text);
  const Schedule lowered = lower(read.schedule);
  CHECK_MESSAGE(verify(lowered).ok(), describe(verify(lowered)));
  for (const auto& [pair, makespan] : makespans) {
    const Timing timing = simulate(read.schedule, {.pair = pair});
    // 2.2 is no binary fraction; a few dozen additions of it err by far less.
    CHECK(timing.makespan == doctest::Approx(makespan).epsilon(1e-12));
    CHECK(timing.peak_per_rank == peaks);
  }
}

/// The chunk of every action of a rank, from 1 on, negative for backwards.
std::vector<int> signed_chunks(const ScheduleView& s, int rank) {
  std::vector<int> order;
  for (const Action& a : s.of_rank(rank)) {
    order.push_back(a.kind == forward ? a.chunk + 1 : -(a.chunk + 1));
  }
  return order;
}

int forwards_before_first_backward(std::span<const Action> list) {
  int count = 0;
  while (list[static_cast<std::size_t>(count)].kind == forward) ++count;
  return count;
}

}  // namespace

TEST_CASE("dpp: PyTorch's lowered zero-bubble files, 113 steps and its like") {
  const Lowered own{"own compute", "own transfers", 18, 15, {4, 3, 2}, 40};
  check_lowered(own, own_file("old_spelling_3rank_compute.csv"),
                own_file("old_spelling_3rank_transfers.csv"));
  const Lowered foreign{"compute", "transfers", 49, 48, {4, 4}, 113};
  const std::string compute = foreign_file("pytorch_zb1p_2rank_2stage_compute.csv");
  const std::string transfers = foreign_file("pytorch_zb1p_2rank_2stage_comms.csv");
  if (compute.empty() || transfers.empty()) return;
  check_lowered(foreign, compute, transfers);
  CHECK(read_csv(compute).empty_cells == 2);
}

TEST_CASE("dpp: PyTorch's DualPipeV file and its like") {
  check_pairs(own_file("pairs_2rank_5mb.csv"), {{3, 32}, {2.5, 29}, {2.2, 27.2}}, {5, 5});
  const std::string foreign = foreign_file("pytorch_dualpipev_4rank_10mb.csv");
  if (foreign.empty()) return;
  check_pairs(foreign, {{3, 66}, {2.5, 59}, {2.2, 54.8}}, {9, 9, 9, 9});
}

TEST_CASE("dpp: PyTorch's lowering examples count 11 and 24 steps") {
  // Source: test_schedule.py of PyTorch, TestScheduleLowering: simple_2_rank_2_stage and
  // v_2_rank_4_stage, where the stages stand on ranks 0, 1, 1, 0.
  const std::string simple = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n";
  const CsvSchedule one = read_csv(simple);
  check_equal(one.schedule, make_schedule(OneForwardOneBackward{}, 2, 2, 1));
  CHECK(pytorch_steps(pytorch_transfers(one.schedule, idle_cells(simple))) == 11);

  const std::string down_up =
      "0F0,0F1,,3F0,3B0,3F1,3B1,0B0,3W0,0B1,3W1,0W0,0W1\n"
      ",1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1,2W0,2W1,1W0,1W1\n";
  const CsvSchedule v = read_csv(down_up);
  CHECK(v.spelling == BackwardSpelling::old);
  CHECK(v.placement.rank_of(2, 2, 2) == 1);
  CHECK(v.placement.rank_of(3, 2, 2) == 0);
  CHECK(pytorch_steps(pytorch_transfers(v.schedule, idle_cells(down_up))) == 24);

  // Our lowering receives right before it consumes, which saves steps in the same count.
  const auto ours = [](const Schedule& compute) {
    const Schedule lowered = strip_implicit(lower(compute));
    std::vector<std::vector<Action>> lists;
    for (int rank = 0; rank < lowered.view().p; ++rank) {
      std::vector<Action>& list = lists.emplace_back();
      for (const Action& a : lowered.of_rank(rank)) {
        if (a.kind != reduce) list.push_back(a);
      }
    }
    const ScheduleView s = compute;
    return pytorch_steps(Schedule::from_lists(s.m, s.v, lists, VPlacement{}));
  };
  CHECK(ours(one.schedule) == 10);
  CHECK(ours(v.schedule) == 21);
}

TEST_CASE("dpp: PyTorch's grid of pipelines is valid, with its group size and breadth first") {
  // (chunks, micro-batches, ranks) of TestSchedulePlan.
  constexpr std::array<std::array<int, 3>, 19> grid{{{2, 2, 2},
                                                     {2, 4, 4},
                                                     {2, 8, 2},
                                                     {2, 8, 4},
                                                     {2, 8, 8},
                                                     {4, 4, 4},
                                                     {4, 8, 4},
                                                     {4, 8, 8},
                                                     {4, 16, 4},
                                                     {4, 32, 4},
                                                     {4, 64, 4},
                                                     {4, 16, 16},
                                                     {4, 32, 32},
                                                     {4, 128, 64},
                                                     {3, 2, 2},
                                                     {3, 8, 2},
                                                     {3, 12, 4},
                                                     {4, 6, 3},
                                                     {4, 10, 5}}};
  for (const auto& shape : grid) {
    const int v = shape[0];
    const int m = shape[1];
    const int p = shape[2];
    CAPTURE(v);
    CAPTURE(m);
    CAPTURE(p);
    const int group = m / std::max(1, m / p);
    const Interleaved policy{{group}};
    const Schedule compute = make_schedule(policy, p, m, v);
    const Verdict verdict = verify(lower(compute));
    CHECK_MESSAGE(verdict.ok(), describe(verdict));
    for (int rank = 0; rank < p; ++rank) {
      const int warm_up = std::min(m * v, (v - 1) * group + 2 * (p - 1 - rank));
      CHECK(forwards_before_first_backward(compute.of_rank(rank)) == std::min(m * v, warm_up + 1));
      CHECK(verdict.peak(rank) == std::min(m * v, warm_up + 1));
    }
    const Verdict breadth = verify(lower(make_schedule(LoopedBreadthFirst{}, p, m, v)));
    CHECK_MESSAGE(breadth.ok(), describe(breadth));
    CHECK(breadth.peak(0) == m * v);
    CHECK(breadth.peak(p - 1) == m * v);
    CHECK(verify(lower(make_schedule(ScheduleTraversal<DFC>{}, p, m, v))).ok());
    CHECK(verify(lower(make_schedule(ScheduleTraversal<BFC>{}, p, m, v))).ok());
  }
}

TEST_CASE("dpp: torchtitan's custom schedule of 2 ranks, 4 stages, 8 micro-batches") {
  // Its rule: forwards breadth first, backwards in groups of two, each split in place.
  std::string text;
  for (const int rank : {0, 1}) {
    const auto put = [&](int stage, const char* word, int microbatch) {
      if (!text.empty() && text.back() != '\n') text += ',';
      text += std::to_string(stage) + word + std::to_string(microbatch);
    };
    for (const int stage : {rank, rank + 2}) {
      for (int i = 0; i < 8; ++i) put(stage, "F", i);
    }
    for (int first = 0; first < 8; first += 2) {
      for (const int stage : {rank + 2, rank}) {
        for (const int i : {first, first + 1}) {
          put(stage, "I", i);
          put(stage, "W", i);
        }
      }
    }
    text += '\n';
  }
  const CsvSchedule read = read_csv(text);
  CHECK(verify(lower(read.schedule)).ok());
  const Timing timing = simulate(read.schedule);
  CHECK(timing.makespan == 50);
  CHECK(timing.busy == 48);
  CHECK(timing.peak_per_rank == std::vector<int>{16, 16});
  CHECK(write_csv(read.schedule) == text);
}

TEST_CASE("dpp: Megatron-LM's schedule table and order of its documented example") {
  // PP 2, microbatch group size 3, 5 micro-batches, 2 chunks.
  const Interleaved policy{{3}};
  const Schedule s = make_schedule(policy, 2, 5, 2);
  const std::array<int, 10> microbatches{0, 1, 2, 0, 1, 2, 3, 4, 3, 4};
  const std::array<int, 10> chunks{0, 0, 0, 1, 1, 1, 0, 0, 1, 1};
  for (const int rank : {0, 1}) {
    std::vector<int> seen_microbatches;
    std::vector<int> seen_chunks;
    for (const Action& a : s.of_rank(rank)) {
      if (a.kind != forward) continue;
      seen_microbatches.push_back(a.microbatch);
      seen_chunks.push_back(a.chunk);
    }
    CHECK(std::ranges::equal(seen_microbatches, microbatches));
    CHECK(std::ranges::equal(seen_chunks, chunks));
  }
  CHECK(policy.warm_up(0, 2, 5, 2) == 5);
  CHECK(signed_chunks(s, 0) ==
        std::vector<int>{1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1});
}

TEST_CASE("dpp: Megatron-LM's grid of ranks, group sizes, micro-batches and chunks") {
  constexpr std::array<std::array<int, 2>, 7> grid{
      {{1, 1}, {2, 2}, {2, 4}, {4, 4}, {4, 5}, {8, 9}, {8, 11}}};
  int valid = 0;
  int refused = 0;
  for (const auto& shape : grid) {
    const int p = shape[0];
    const int group = shape[1];
    for (const int m : {8, 32}) {
      const Schedule plain = make_schedule(OneForwardOneBackward{}, p, m, 1);
      for (int rank = 0; rank < p; ++rank) {
        CHECK(forwards_before_first_backward(plain.of_rank(rank)) == std::min(m, p - rank));
      }
      CHECK(verify(lower(plain)).ok());
      for (const int v : {2, 4, 8}) {
        CAPTURE(p);
        CAPTURE(group);
        CAPTURE(m);
        CAPTURE(v);
        const Interleaved policy{{group}};
        if (group > m) {  // 9 or 11 of 8 micro-batches, which its runs refuse as well
          CHECK_THROWS_WITH_AS((void)make_schedule(policy, p, m, v),
                               doctest::Contains("the nearest valid one is 8"), Error);
          ++refused;
          continue;
        }
        const Schedule s = make_schedule(policy, p, m, v);
        const Verdict verdict = verify(lower(s));
        CHECK_MESSAGE(verdict.ok(), describe(verdict));
        ++valid;
        for (int rank = 0; rank < p; ++rank) {
          const int warm_up = 2 * (p - 1 - rank) + (v - 1) * group;
          CHECK(policy.warm_up(rank, p, m, v) == warm_up);
          CHECK(forwards_before_first_backward(s.of_rank(rank)) == std::min(m * v, warm_up + 1));
          CHECK(verdict.peak(rank) <= std::min(m * v, warm_up + 1));
        }
      }
    }
  }
  CHECK(valid == 36);
  CHECK(refused == 6);
}

TEST_CASE("dpp: DeepSpeed's counts of steps and buffers") {
  // A step there is a forward or a whole backward.
  const ActionTimes steps{.forward = 1, .backward_input = 0.5, .backward_weight = 0.5};
  for (const int m : {1, 3, 4, 8, 10}) {
    for (const int p : {1, 2, 3, 4}) {
      const Schedule train = make_schedule(OneForwardOneBackward{}, p, m, 1);
      CHECK(simulate(train, steps).makespan == 2 * (m + p - 1));
      const std::vector<int> slots = required_slots(lower(train));
      std::vector<std::vector<Action>> forwards(static_cast<std::size_t>(p));
      for (int rank = 0; rank < p; ++rank) {
        for (const Action& a : train.of_rank(rank)) {
          if (a.kind == forward) forwards[static_cast<std::size_t>(rank)].push_back(a);
        }
        const int buffers = std::max(2, std::min(p - rank, m));
        CHECK(simulate(train).peak_per_rank[static_cast<std::size_t>(rank)] ==
              std::min(p - rank, m));
        CHECK(slots[static_cast<std::size_t>(rank)] <= buffers);
      }
      CHECK(simulate(Schedule::from_lists(m, 1, forwards), steps).makespan == m + p - 1);
    }
  }
}

TEST_CASE("dpp: sail's list of stages and micro-batches is valid for every order") {
  constexpr std::array<std::array<int, 2>, 8> grid{
      {{4, 4}, {4, 8}, {4, 16}, {2, 2}, {2, 4}, {8, 4}, {8, 8}, {8, 16}}};
  for (const auto& shape : grid) {
    const int p = shape[0];
    const int m = shape[1];
    CAPTURE(p);
    CAPTURE(m);
    const auto valid = [&](const Schedule& compute) {
      const Verdict verdict = verify(lower(split_backward(compute)));
      CHECK_MESSAGE(verdict.ok(), describe(verdict));
      return verdict.peak_per_rank;
    };
    std::vector<int> peaks;
    for (int rank = 0; rank < p; ++rank) peaks.push_back(std::min(m, p - rank));
    CHECK(valid(make_schedule(OneForwardOneBackward{}, p, m, 1)) == peaks);
    CHECK(valid(make_schedule(GPipe{}, p, m, 1)) ==
          std::vector<int>(static_cast<std::size_t>(p), m));
    valid(make_schedule(ScheduleTraversal<DFC>{}, p, m, 2));
    valid(make_schedule(ScheduleTraversal<BFC>{}, p, m, 2));
    valid(make_schedule(GPipe{}, p, m, 2, VPlacement{}));
  }
}
