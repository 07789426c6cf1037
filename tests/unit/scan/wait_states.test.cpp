#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/wait_states.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

namespace {

using namespace mega::scan;
using enum CommunicationOp;

struct Job {
  Trace trace;
  TableIndex world = none;

  explicit Job(int ranks) {
    std::vector<std::int32_t> all;
    for (int r = 0; r < ranks; ++r) {
      Rank rank;
      rank.rank = r;
      rank.clock = "one";
      trace.ranks.push_back(rank);
      Lane lane;
      lane.rank = static_cast<TableIndex>(r);
      trace.lanes.push_back(lane);
      all.push_back(r);
    }
    world = trace.intern_group("world", all);
  }
  void call(int rank, CommunicationOp op, Nanoseconds begin, Nanoseconds end, std::int64_t sequence,
            std::int32_t peer = -1) {
    Event e;
    e.begin = begin;
    e.end = end;
    e.lane = static_cast<TableIndex>(rank);
    const auto at = static_cast<TableIndex>(trace.events.push_back(e));
    Communication c;
    c.group = world;
    c.op = op;
    c.sequence = sequence;
    c.peer = peer;
    trace.attach(at, c);
  }
  [[nodiscard]] WaitReport waits() const {
    const Matches matches = match(trace);
    return find_waits(trace, matches, align(trace, matches));
  }
};

TEST_CASE("scan: in a collective everyone waits for the last to arrive") {
  Job job(3);
  job.call(0, all_reduce, 100, 560, 0);
  job.call(1, all_reduce, 400, 565, 0);
  job.call(2, all_reduce, 500, 550, 0);
  const WaitReport w = job.waits();
  REQUIRE(w.operations.size() == 1);
  CHECK(w.operations[0].last_arriver == 2);
  CHECK(w.operations[0].end_spread == 15);
  CHECK(w.operations[0].transfer == 65);
  CHECK(w.operations[0].waited == 500);
  CHECK(w.caused == std::vector<Nanoseconds>{0, 0, 500});
  CHECK(w.suffered == std::vector<Nanoseconds>{400, 100, 0});
  for (const WaitState& s : w.waits) CHECK(s.pattern == WaitPattern::late_arrival);
}

TEST_CASE("scan: a wait is never longer than the span of who waits") {
  Job job(2);
  job.call(0, all_reduce, 0, 30, 0);  // ends before the other begins: the clocks are off
  job.call(1, all_reduce, 100, 130, 0);
  CHECK(job.waits().suffered == std::vector<Nanoseconds>{30, 0});
}

TEST_CASE("scan: a broadcast waits for its root only, a reduction's root for the others") {
  Job down(3);
  down.call(0, broadcast, 50, 90, 0, 0);
  down.call(1, broadcast, 10, 91, 0, 0);
  down.call(2, broadcast, 70, 92, 0, 0);
  const WaitReport b = down.waits();
  CHECK(b.suffered == std::vector<Nanoseconds>{0, 40, 0});
  CHECK(b.caused == std::vector<Nanoseconds>{40, 0, 0});
  REQUIRE(b.waits.size() == 1);
  CHECK(b.waits[0].pattern == WaitPattern::late_root);

  Job up(3);
  up.call(0, reduce, 10, 90, 0, 0);
  up.call(1, reduce, 30, 60, 0, 0);
  up.call(2, reduce, 70, 85, 0, 0);
  const WaitReport r = up.waits();
  CHECK(r.suffered == std::vector<Nanoseconds>{60, 0, 0});
  CHECK(r.caused == std::vector<Nanoseconds>{0, 0, 60});
}

TEST_CASE("scan: of a transfer either end can be late") {
  Job job(2);
  job.call(0, send, 100, 150, 0, 1);
  job.call(1, recv, 20, 155, 0, 0);
  job.call(0, send, 200, 290, 1, 1);
  job.call(1, recv, 260, 295, 1, 0);
  const WaitReport w = job.waits();
  REQUIRE(w.waits.size() == 2);
  CHECK(w.waits[0].pattern == WaitPattern::late_sender);
  CHECK(w.waits[0].wait == 80);
  CHECK(w.waits[0].culprit == 0);
  CHECK(w.waits[1].pattern == WaitPattern::late_receiver);
  CHECK(w.waits[1].wait == 60);
  CHECK(w.waits[1].culprit == 1);
}

TEST_CASE("scan: nothing in common, nothing waited") {
  Job job(2);
  const WaitReport w = job.waits();
  CHECK(w.operations.empty());
  CHECK(w.caused == std::vector<Nanoseconds>{0, 0});
}

}  // namespace
