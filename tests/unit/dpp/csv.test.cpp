/// @file  Tests of the CSV grammar, of the placement table and of the passes that import needs:
/// exact round trips, both spellings of the backward, and hostile files.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/csv.hpp>
#include <mega/dpp/passes.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/verifier.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace mega;
using namespace mega::dpp;
using enum mega::dpp::ActionKind;

namespace {

std::string own_file(const std::string& name) {
  std::ifstream in("tests/unit/dpp/data/" + name, std::ios::binary);
  REQUIRE_MESSAGE(in.good(), name, " is not there; tests run from the root of the repository");
  return {std::istreambuf_iterator<char>(in), {}};
}

void check_equal(const ScheduleView& a, const ScheduleView& b) {
  REQUIRE(a.p == b.p);
  REQUIRE(a.v == b.v);
  CHECK(a.m == b.m);
  CHECK(std::ranges::equal(a.stage_of, b.stage_of));
  for (int rank = 0; rank < a.p; ++rank) {
    CHECK(std::ranges::equal(a.of_rank(rank), b.of_rank(rank)));
  }
}

std::string refusal(std::string_view text, BackwardSpelling spelling = BackwardSpelling::detect) {
  return mega_test::refusal_of([&] { (void)read_csv(text, "s.csv", spelling); },
                               ErrorCode::bad_input);
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// The words of the cells of a one-rank file without the stages' forwards.
std::vector<ActionKind> kinds(const CsvSchedule& read) {
  std::vector<ActionKind> found;
  for (const Action& a : read.schedule.of_rank(0)) {
    if (a.kind != forward) found.push_back(a.kind);
  }
  return found;
}

Schedule one_rank(std::string_view text) {
  return read_csv(text).schedule;
}

}  // namespace

static_assert(TablePlacement(std::array{0, 1, 1, 0}).stage(0, 1, 2, 2) == 3);

TEST_CASE("dpp: a placement table gives the chunks of a rank in ascending stages") {
  const TablePlacement table(std::array{2, 0, 0, 1, 2, 1});
  CHECK(table.ranks() == 3);
  CHECK(table.chunks() == 2);
  const std::array<std::array<int, 2>, 3> stages{{{1, 2}, {3, 5}, {0, 4}}};
  for (int rank = 0; rank < 3; ++rank) {
    for (int chunk = 0; chunk < 2; ++chunk) {
      const int stage = stages[static_cast<std::size_t>(rank)][static_cast<std::size_t>(chunk)];
      CHECK(table.stage(rank, chunk, 3, 2) == stage);
      CHECK(table.rank_of(stage, 3, 2) == rank);
      CHECK(table.chunk_of(stage, 3, 2) == chunk);
    }
  }
  CHECK(TablePlacement().rank_of(0, 1, 1) == 0);
}

TEST_CASE("dpp: placement tables equal the named placements, and lead policies to valid orders") {
  for (const auto& [p, v] : std::array<std::array<int, 2>, 4>{{{1, 1}, {4, 1}, {4, 2}, {3, 3}}}) {
    std::vector<int> loop;
    std::vector<int> down_up;
    for (int stage = 0; stage < p * v; ++stage) {
      loop.push_back(LoopPlacement::rank_of(stage, p, v));
      down_up.push_back(VPlacement::rank_of(stage, p, v));
    }
    check_equal(make_schedule(GPipe{}, p, 5, v, TablePlacement(loop)),
                make_schedule(GPipe{}, p, 5, v));
    check_equal(make_schedule(GPipe{}, p, 5, v, TablePlacement(down_up)),
                make_schedule(GPipe{}, p, 5, v, VPlacement{}));
  }
  const TablePlacement odd(std::array{1, 1, 0, 2, 0, 2});
  CHECK(verify(lower(make_schedule(GPipe{}, 3, 4, 2, odd))).ok());
}

TEST_CASE("dpp: a placement table refuses ranks that hold unequally many stages") {
  const auto refuses = [](std::vector<int> table) {
    CHECK_THROWS_WITH_AS(TablePlacement{table}, doctest::Contains("placement table"), Error);
  };
  refuses({});
  refuses({0, 0, 1});
  refuses({0, 2});  // rank 1 holds none
  refuses({0, -1});
  refuses({-1});
  refuses({0, 1, 1, 1});
  refuses({2000000000, 0});
  CHECK_THROWS_WITH_AS((void)TablePlacement().stage(0, 0, 2, 1),
                       "the placement table is for p 1, v 1, not for p 2, v 1", Error);
}

TEST_CASE("dpp: merging joins neighbours of one chunk and micro-batch only") {
  const auto merged = [](std::string_view text) {
    return write_csv(merge_backward(one_rank(text)));
  };
  // The rule in PyTorch's test of its own pass.
  CHECK(merged("0F0,0F1,0F2,0I0,0I1,0W0,0I2,0W2,0W1") == "0F0,0F1,0F2,0I0,0I1,0W0,0B2,0W1\n");
  CHECK(merged("0F0,1F0,1I0,0I0,0W0,1W0") == "0F0,1F0,1I0,0B0,1W0\n");
  CHECK(merged("0F0,0F1,0I0,0W1,0I1,0W0") == "0F0,0F1,0I0,0W1,0I1,0W0\n");
  CHECK(merged("0F0,0I0") == "0F0,0I0\n");
  CHECK(merged("0F0,0F1,(0F2;0I0)OVERLAP_F_B,0W0,0B1,0I2,0W2") ==
        "0F0,0F1,(0F2;0I0)OVERLAP_F_B,0W0,0B1,0B2\n");
  CHECK(merged("0F0,0F1,(0I0;0F2)OVERLAP_F_B,0W0,0B1,0B2") ==
        "0F0,0F1,(0I0;0F2)OVERLAP_F_B,0W0,0B1,0B2\n");
}

TEST_CASE("dpp: splitting is the inverse of merging, pairs stay") {
  CHECK(write_csv(split_backward(one_rank("0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0B1;0F3)OVERLAP_F_B,"
                                          "0B2,0B3"))) ==
        "0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0B1;0F3)OVERLAP_F_B,0I2,0W2,0I3,0W3\n");
  for (const int m : {1, 2, 7}) {
    const Schedule whole = make_schedule(ScheduleTraversal<DFC>{}, 3, m, 2);
    const Schedule split = split_backward(whole);
    CHECK(split.view().actions.size() == whole.view().actions.size() / 2 * 3);
    CHECK(verify(lower(split)).ok());
    check_equal(merge_backward(split), whole);
  }
}

TEST_CASE("dpp: dropping what is implicit and putting it back gives the lowered schedule again") {
  const auto check = [](const Schedule& compute) {
    const Schedule lowered = lower(compute);
    check_equal(compute_order(lowered), compute);
    const Schedule bare = strip_implicit(lowered);
    for (const Action& a : bare.view().actions) CHECK(a.kind != loss);
    CHECK(bare.view().actions.size() < lowered.view().actions.size());
    check_equal(insert_implicit(bare), lowered);
  };
  for (const int m : {1, 3, 8}) {
    check(make_schedule(OneForwardOneBackward{}, 1, m, 1));
    check(make_schedule(OneForwardOneBackward{}, 4, m, 1));
    check(make_schedule(GPipe{}, 1, m, 3));
    check(make_schedule(GPipe{}, 3, m, 2, VPlacement{}));
    check(make_schedule(GPipe{}, 2, m, 4, VPlacement{}));
    check(split_backward(make_schedule(ScheduleTraversal<DFC>{}, 3, m, 2)));
    check(make_schedule(GPipe{}, 3, m, 2, TablePlacement(std::array{1, 1, 0, 2, 0, 2})));
  }
  check(read_csv(own_file("pairs_2rank_5mb.csv")).schedule);
}

TEST_CASE("dpp: strip_implicit drops hand-overs within a rank only") {
  const Schedule lowered = lower(make_schedule(GPipe{}, 2, 1, 2, VPlacement{}));
  CHECK(write_csv(strip_implicit(lowered)) ==
        "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,3REDUCE_GRAD,0RECV_B0,0B0,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,2REDUCE_GRAD,1B0,1SEND_B0,1REDUCE_GRAD\n");
  // Reductions are added where a file has none, once per chunk.
  CHECK(write_csv(insert_implicit(one_rank("0F0,1F0,1I0,1W0,1REDUCE_GRAD,0I0,0W0"))) ==
        "0F0,0SEND_F0,1RECV_F0,1F0,1LOSS0,1I0,1SEND_B0,1W0,1REDUCE_GRAD,0RECV_B0,0I0,0W0,"
        "0REDUCE_GRAD\n");
}

TEST_CASE("dpp: csv reads every word") {
  const CsvSchedule read = read_csv(
      "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0I0,0RESHARD,0UNSHARD,0W0,0REDUCE_GRAD,0TIED_REDUCE\r\n"
      ", 1RECV_F0,\t1F0 ,1LOSS0,,1B0,1SEND_B0,\r\n");
  const ScheduleView s = read.schedule;
  CHECK(s.p == 2);
  CHECK(s.m == 1);
  CHECK(s.v == 1);
  const std::vector<Action> first{make_action(forward, 0, 0),
                                  make_action(send_forward, 0, 0),
                                  make_action(recv_backward, 0, 0),
                                  make_action(backward_input, 0, 0),
                                  make_action(backward_weight, 0, 0),
                                  make_action(reduce, 0, all_microbatches),
                                  make_action(tied_reduce, 0, all_microbatches)};
  const std::vector<Action> second{make_action(recv_forward, 0, 0), make_action(forward, 0, 0),
                                   make_action(loss, 0, 0), make_action(backward, 0, 0),
                                   make_action(send_backward, 0, 0)};
  CHECK(std::ranges::equal(s.of_rank(0), first));
  CHECK(std::ranges::equal(s.of_rank(1), second));
  CHECK(read.spelling == BackwardSpelling::current);
  CHECK(read.unshards == 2);
  CHECK(read.reshards == 1);
  CHECK(read.empty_cells == 3);
  CHECK(left_out(read) == "left out: 2 UNSHARD, 1 RESHARD, 3 idle steps");
  CsvSchedule other = read;
  other.unshards = 0;
  other.empty_cells = 1;
  CHECK(left_out(other) == "left out: 1 RESHARD, 1 idle step");
  other.reshards = other.empty_cells = 0;
  CHECK(left_out(other).empty());
  CHECK(left_out(read_csv("0F0")).empty());
}

TEST_CASE("dpp: csv reads pairs in either order of the halves") {
  const CsvSchedule read =
      read_csv("0F0,1F0,( 0F1 ; 1B0 )OVERLAP_F_B,(0I0;1F1)OVERLAP_F_B,0W0,1B1,0B1");
  std::vector<Action> expected{make_action(forward, 0, 0),         make_action(forward, 1, 0),
                               make_action(forward, 0, 1),         make_action(backward, 1, 0),
                               make_action(backward_input, 0, 0),  make_action(forward, 1, 1),
                               make_action(backward_weight, 0, 0), make_action(backward, 1, 1),
                               make_action(backward, 0, 1)};
  expected[2].with_next = true;
  expected[4].with_next = true;
  CHECK(std::ranges::equal(read.schedule.of_rank(0), expected));
  CHECK(write_csv(read.schedule) ==
        "0F0,1F0,(0F1;1B0)OVERLAP_F_B,(0I0;1F1)OVERLAP_F_B,0W0,1B1,0B1\n");
}

TEST_CASE("dpp: what B means follows from the other words of the file") {
  using enum BackwardSpelling;
  const auto spelled = [](std::string_view text, BackwardSpelling wanted = detect) {
    const CsvSchedule read = read_csv(text, "s.csv", wanted);
    return std::pair(read.spelling, kinds(read));
  };
  using Kinds = std::vector<ActionKind>;
  CHECK(spelled("0F0,0B0") == std::pair(current, Kinds{backward}));
  CHECK(spelled("0F0,0B0,0W0") == std::pair(old, Kinds{backward_input, backward_weight}));
  CHECK(spelled("0F0,0BW0") == std::pair(old, Kinds{backward}));
  CHECK(spelled("0F0,0F1,0B0,0BW1,0W0") ==
        std::pair(old, Kinds{backward_input, backward, backward_weight}));
  CHECK(spelled("0F0,0F1,0B0,0I1,0W1") ==
        std::pair(current, Kinds{backward, backward_input, backward_weight}));
  CHECK(spelled("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2").first == current);
  CHECK(spelled("0F0,0B0,0REDUCE_GRAD") == std::pair(current, Kinds{backward, reduce}));
  // An explicit spelling beats the rule where the words allow it.
  CHECK(spelled("0F0,0B0,0W0", current) == std::pair(current, Kinds{backward, backward_weight}));
  CHECK(spelled("0F0,0B0", old) == std::pair(old, Kinds{backward_input}));
  CHECK(spelled("0F0,0F1,0B0,0B1,0W1", old).second ==
        Kinds{backward_input, backward_input, backward_weight});

  CHECK(refusal("0F0,0F1,0I0,0BW1") ==
        "s.csv: row 1, column 4, '0BW1', is of the old spelling (B, W, BW), but row "
        "1, column 3, '0I0', is of the current one (I, W, B)");
  CHECK(contains(refusal("0F0,0F1,0BW0,(0F2;0B1)OVERLAP_F_B,0B2"), "old spelling"));
  CHECK(refusal("0F0,0F1,0B0,0B1,0W1") ==
        "s.csv: row 1, column 3, '0B0', leaves open what B means, since some but not all B have a "
        "W of the same stage and micro-batch; name the spelling: current (I, W, B) or old (B, W, "
        "BW)");
  CHECK(contains(refusal("0F0,0B0,0W0,0W0"), "leaves open"));
  CHECK(contains(refusal("0F0,0W0"), "leaves open"));
  CHECK(contains(refusal("0F0,0BW0", current), "'0BW0', is of the old spelling"));
  CHECK(contains(refusal("0F0,0I0,0W0", old), "'0I0', is of the current spelling"));
}

TEST_CASE("dpp: csv round trips are exact, compute-only and lowered") {
  const auto check = [](const Schedule& schedule) {
    const std::string text = write_csv(schedule);
    const CsvSchedule read = read_csv(text);
    check_equal(read.schedule, schedule);
    CHECK(write_csv(read.schedule) == text);
    CHECK(left_out(read).empty());
  };
  for (const int m : {1, 2, 5, 11}) {
    for (const int p : {1, 2, 5}) {
      for (const int v : {1, 2, 3}) {
        const Schedule compute = make_schedule(ScheduleTraversal<DFC>{}, p, m, v);
        check(compute);
        check(lower(compute));
        check(lower(split_backward(compute), {.tied_ends = true}));
        check(lower(make_schedule(GPipe{}, p, m, v, VPlacement{}), {.tied_ends = true}));
      }
    }
  }
  check(make_schedule(GPipe{}, 3, 2, 2, TablePlacement(std::array{1, 1, 0, 2, 0, 2})));
  check(lower(read_csv(own_file("pairs_2rank_5mb.csv")).schedule));
  // Forwards only, as in evaluation; stages of two digits; micro-batches of three.
  check(make_schedule(GPipe{}, 6, 103, 2));
  check(Schedule::from_lists(2, 1, {{make_action(forward, 0, 0), make_action(forward, 0, 1)}}));
}

TEST_CASE("dpp: csv of own files is written as it was read") {
  for (const char* const name : {"pairs_2rank_5mb.csv", "old_spelling_3rank_transfers.csv"}) {
    const std::string text = own_file(name);
    const CsvSchedule read = read_csv(text);
    CHECK(write_csv(read.schedule, read.spelling) == text);
  }
  const CsvSchedule idle = read_csv(own_file("old_spelling_3rank_compute.csv"));
  CHECK(idle.spelling == BackwardSpelling::old);
  CHECK(idle.empty_cells == 7);
}

TEST_CASE("dpp: writing the old spelling, and what it has no word for") {
  const Schedule s = one_rank("0F0,0F1,0I0,0B1,0W0");
  CHECK(write_csv(s, BackwardSpelling::old) == "0F0,0F1,0B0,0BW1,0W0\n");
  check_equal(read_csv(write_csv(s, BackwardSpelling::old)).schedule, s);
  CHECK_THROWS_WITH_AS((void)write_csv(lower(s), BackwardSpelling::old),
                       "the old spelling has no word for reduce, at position 7 of rank 0; use the "
                       "current one",
                       Error);
  CHECK_THROWS_WITH_AS(
      (void)write_csv(one_rank("0F0,(0F1;0B0)OVERLAP_F_B,0B1"), BackwardSpelling::old),
      doctest::Contains("no word for a pair"), Error);
}

TEST_CASE("dpp: writing refuses broken pairs and silent ranks") {
  const auto refuses = [](std::vector<Action> list, const char* what) {
    list[0].with_next = true;
    CHECK_THROWS_WITH_AS((void)write_csv(Schedule::from_lists(2, 1, {list})),
                         doctest::Contains(what), Error);
  };
  refuses({make_action(forward, 0, 0)},
          "forward of chunk 0, micro-batch 0 at position 0 of rank 0");
  refuses({make_action(forward, 0, 0), make_action(forward, 0, 1)}, "one forward and one backward");
  refuses({make_action(forward, 0, 0), make_action(send_forward, 0, 0)}, "next to each other");
  refuses({make_action(backward_weight, 0, 0), make_action(forward, 0, 1)}, "is not one forward");
  CHECK_THROWS_WITH_AS((void)write_csv(Schedule::from_lists(1, 1, {{}, {}})),
                       doctest::Contains("rank 0 has no action"), Error);
}

TEST_CASE("dpp: csv refuses cells outside the grammar with row, column, text and the valid ones") {
  CHECK(refusal("0F0\n1F0,1B0,1X0") ==
        "s.csv: row 2, column 3, '1X0', is no action; valid are <stage> then F, I, W, B, BW, "
        "SEND_F, RECV_F, SEND_B, RECV_B or LOSS then <microbatch>, as in 2F0; <stage> then "
        "REDUCE_GRAD, TIED_REDUCE, UNSHARD or RESHARD; (2F0;1B3)OVERLAP_F_B; and nothing");
  for (const char* const cell : {"F0",
                                 "0F",
                                 "0",
                                 "F",
                                 "0F0x",
                                 "0f0",
                                 "0F-1",
                                 "-1F0",
                                 "0F 0",
                                 "0 F0",
                                 "0FF0",
                                 "0SEND_F",
                                 "0SEND0",
                                 "0REDUCE_GRAD0",
                                 "0UNSHARD1",
                                 "0F0;0B0",
                                 "\"0F0\"",
                                 "0F0.5",
                                 "+0F0",
                                 "0F0F0",
                                 "OVERLAP_F_B",
                                 "0OVERLAP_F_B0",
                                 "\xef\xbb\xbf"
                                 "0F0",
                                 ";",
                                 ")"}) {
    CAPTURE(cell);
    const std::string said = refusal(std::string("0F0,") + cell);
    CHECK(contains(said, "s.csv: row 1, column 2, '"));
    CHECK(contains(said, "is no action; valid are"));
  }
  for (const char* const cell :
       {"(0F1;0B0)", "(0F1;0B0)OVERLAP", "(0F1;0B0)OVERLAP_F_B0", "(0F1;0B0", "()OVERLAP_F_B",
        "(0F1)OVERLAP_F_B", "(0F1);OVERLAP_F_B", "(", "(;", "(0F1;0B0))OVERLAP_F_B"}) {
    CAPTURE(cell);
    CHECK(contains(refusal(std::string("0F0,") + cell), "is no pair; valid are"));
  }
  for (const char* const cell :
       {"(0F1;0F2)OVERLAP_F_B", "(0B0;0B1)OVERLAP_F_B", "(0F1;0W0)OVERLAP_F_B",
        "(0F1;0SEND_B0)OVERLAP_F_B", "(0UNSHARD;0B0)OVERLAP_F_B", "(0LOSS0;0F1)OVERLAP_F_B"}) {
    CAPTURE(cell);
    CHECK(contains(refusal(std::string("0F0,") + cell), "one forward, F, with one backward"));
  }
  CHECK(contains(refusal("0F0,(;0B0)OVERLAP_F_B"), "is no action"));
  CHECK(contains(refusal("0F0,(0F1;0B0;0W0)OVERLAP_F_B"), "is no action"));
  CHECK(contains(refusal("0F0,((0F1;0B0)OVERLAP_F_B;0B0)OVERLAP_F_B"), "is no pair"));
}

TEST_CASE("dpp: csv refuses files that are no pipeline") {
  for (const char* const text : {"", "\n", "\r\n\r\n", "\n\n\n"}) {
    CHECK(refusal(text) == "s.csv: the file is empty; a schedule has one line of cells a rank");
  }
  CHECK(contains(refusal(" "), "row 1 holds no action"));
  CHECK(contains(refusal(",,\n0F0"), "row 1 holds no action"));
  CHECK(contains(refusal("0F0\n\n1F0"), "row 2 holds no action"));
  CHECK(contains(refusal("0F0\n,,"), "row 2 holds no action"));
  CHECK(refusal("0F0,1F0\n2F0,0B0") ==
        "s.csv: row 2, column 2, '0B0', puts stage 0 on rank 1, but row 1 has it on rank 0");
  CHECK(refusal("0F0,0B0\n2F0,2B0") ==
        "s.csv: stage 1 has no cell, though the file names stages up to 2; every stage from 0 on "
        "stands on one rank");
  CHECK(refusal("0F0,1F0\n2F0") ==
        "s.csv: row 2, column 1, '2F0', ends the row of rank 1, which has 1 stage, but rank 0 has "
        "2; all ranks hold equally many");
  CHECK(refusal("0F0,0F1,0B0,0B7") ==
        "s.csv: row 1, column 4, '0B7', makes 8 micro-batches, but stage 0 has no forward of "
        "micro-batch 2");
  CHECK(contains(refusal("0F0,0F1\n1F0"), "stage 1 has no forward of micro-batch 1"));
  CHECK(contains(refusal("0F1,0F2"), "stage 0 has no forward of micro-batch 0"));
  CHECK(refusal("0F0,,0F1,0F0") ==
        "s.csv: row 1, column 4, '0F0', is a second forward of stage 0, micro-batch 0, after that "
        "of column 1");
  CHECK(contains(refusal("0B0,0F0,0F0,0F0"), "column 3, '0F0', is a second forward of stage 0"));
  CHECK(contains(refusal("0UNSHARD"), "no cell computes a micro-batch"));
  CHECK(read_csv("0F0\n\n\r\n").schedule.view().p == 1);  // blank lines at the end are harmless
}

TEST_CASE("dpp: csv survives hostile numbers and bytes") {
  CHECK(contains(refusal("99999999999999999999F0"), "holds a number beyond 999999999"));
  CHECK(contains(refusal("0F99999999999999999999"), "holds a number beyond 999999999"));
  CHECK(contains(refusal("0F" + std::string(5000, '9')),
                 "'0F99999999999999999999999999999999999"
                 "999...', holds"));
  CHECK(contains(refusal("4294967296F0"), "beyond 999999999"));
  CHECK(refusal("0F0,999999999F0") ==
        "s.csv: row 1, column 2, '999999999F0', names stage 999999999 in a file of 2 actions; "
        "every stage from 0 on needs its own");
  CHECK(contains(refusal("0F999999999"), "makes 1000000000 micro-batches"));
  CHECK(contains(refusal(std::string_view("0F0,0F\0001", 8)), "'0F\\x001', is no action"));
  CHECK(contains(refusal("0F0,\xff\xfe\x7f"), "'\\xff\\xfe\\x7f', is no action"));
  CHECK(contains(refusal("0F0\r1F0"), "'0F0\\x0d1F0', is no action"));  // a lone CR ends no line
  CHECK(read_csv("000F00,0B0").schedule.view().m == 1);

  // One rank with 32768 stages: one more than an Action's chunk can name.
  std::string many;
  for (int stage = 0; stage < 32768; ++stage) many += std::to_string(stage) + "F0,";
  CHECK(contains(refusal(many), "'32767F0', is stage 32768 of the rank; the limit is 32767"));
}

TEST_CASE("dpp: csv tells cells that are no schedule from what it cannot read") {
  struct Case {
    const char* text;
    Fault fault;
    int rank, column;
  };
  for (const Case& c :
       {Case{"0F0,0F0,0B0", Fault::duplicate, 0, 2},
        Case{"0F0,0F1,0B0,0B1\n1F0,1B0,1F0,1F1", Fault::duplicate, 1, 3},
        Case{"0B0", Fault::missing, 0, 1}, Case{"0F0,0B0,0B1", Fault::missing, 0, 3},
        Case{"0F0,0B0\n2F0,2B0", Fault::missing, -1, 0},
        Case{"0F0,0B0\n1F0,0B1", Fault::out_of_place, 1, 2},
        Case{"0F0,7F0", Fault::out_of_place, 0, 2}, Case{"0F0,1F0\n2F0", Fault::out_of_place, 1, 1},
        Case{"0UNSHARD", Fault::missing, -1, 0}}) {
    CAPTURE(c.text);
    try {
      (void)read_csv(c.text);
      FAIL("accepted");
    } catch (const WrongSchedule& wrong) {
      CHECK(wrong.fault() == c.fault);
      CHECK(wrong.rank() == c.rank);
      CHECK(wrong.column() == c.column);
    }
  }
  for (const char* text : {"", "0X0", "0F0,hello", "(0F0;0F1)OVERLAP_F_B", "0F0,0B0,0W0,0W0"}) {
    CAPTURE(text);
    bool wrong = false;
    try {
      (void)read_csv(text);
    } catch (const WrongSchedule&) {
      wrong = true;
    } catch (const Error& unreadable) {
      CHECK(unreadable.code() == ErrorCode::bad_input);
    }
    CHECK_FALSE(wrong);
  }
}

TEST_CASE("dpp: csv reads a million cells") {
  // 64 ranks, 4 chunks, 2000 micro-batches: 1 024 000 compute cells.
  const Schedule big = make_schedule(GPipe{}, 64, 2000, 4);
  const std::string text = write_csv(big);
  check_equal(read_csv(text).schedule, big);
}

TEST_CASE("dpp: a byte order mark is passed over, and columns are those of the row") {
  const CsvSchedule read = read_csv(
      "\xEF\xBB\xBF"
      "0F0,,0UNSHARD,0F1,0B0,0B1\n1F0,1B0,(1F1;1B1)OVERLAP_F_B\n");
  CHECK(read.columns == std::vector<std::vector<int>>{{1, 4, 5, 6}, {1, 2, 3, 3}});
  CHECK(read_csv("0F0,0B0\n").columns == std::vector<std::vector<int>>{{1, 2}});
  CHECK_THROWS_AS((void)read_csv("\xEF\xBB\xBF"), mega::Error);
  // Only the first bytes are a mark.
  CHECK_THROWS_AS((void)read_csv("0F0,\xEF\xBB\xBF"
                                 "0B0\n"),
                  mega::Error);
}
