#include "../../support/hand_trace.hpp"
#include "../../support/scan_generator.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/critical_path.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/replay.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace mega::scan;
using enum CommunicationOp;
using mega_test::HandTrace;

CriticalPath path_of(const Trace& t) {
  const Matches m = match(t);
  return find_critical_path(t, build_dependencies(t, m, align(t, m)));
}

TEST_CASE("scan: the path goes through the last to arrive and back to its host's delay") {
  HandTrace h(2);
  h.run(0, "a", 0, 100'000);
  h.run(1, "b", 0, 150'000);
  h.run(1, "c", 190'000, 300'000);  // 40 us without a reason in the trace
  h.call(0, all_reduce, "reduce", 100'000, 360'000, 0);
  h.call(1, all_reduce, "reduce", 300'000, 361'000, 0);
  h.run(0, "d", 360'000, 500'000);
  h.run(1, "e", 361'000, 400'000);
  const CriticalPath p = path_of(h.trace);
  REQUIRE(p.segments.size() == 5);
  std::vector<std::string> names;
  for (const PathSegment& s : p.segments) names.emplace_back(h.trace.name(h.trace.events[s.event]));
  CHECK(names == std::vector<std::string>{"b", "c", "c", "reduce", "d"});
  CHECK(p.segments[1].kind == PathKind::idle);
  CHECK(p.idle == 40'000);
  CHECK(p.transfer == 60'000);
  CHECK(p.compute == 400'000);
  CHECK(p.length() == 500'000);
  CHECK(p.by_rank.at(0) == 140'000);
  CHECK(p.by_rank.at(1) == 360'000);
  CHECK(p.by_name.at(h.trace.names.intern("c")) == 110'000);
}

TEST_CASE("scan: the path of a sent message goes to the sender") {
  HandTrace h(2);
  h.run(0, "work", 0, 200'000);
  h.call(0, send, "send", 200'000, 250'000, 0, 0, 1);
  h.call(1, recv, "recv", 0, 250'000, 0, 0, 0);
  h.run(1, "next", 250'000, 300'000);
  const CriticalPath p = path_of(h.trace);
  CHECK(p.by_rank.at(0) == 250'000);
  CHECK(p.by_rank.at(1) == 50'000);
}

TEST_CASE("scan: a receive that is stamped with its send, or just behind it, leads to the sender") {
  HandTrace h(2);
  h.run(0, "work", 0, 200'000);
  h.run(1, "other", 0, 120'000);
  h.call(0, send, "send", 200'000, 250'000, 0, 0, 1);
  h.call(1, recv, "recv", 200'100, 250'000, 0, 0, 0);
  h.run(1, "next", 250'000, 300'000);
  const CriticalPath p = path_of(h.trace);
  CHECK(p.by_rank.at(0) == 250'000);
  CHECK(p.by_rank.at(1) == 50'000);
  CHECK(p.idle == 0);
}

TEST_CASE("scan: no operations, no path") {
  CHECK(path_of(Trace{}).segments.empty());
}

TEST_CASE("scan: a path covers the whole window once, and a slow GPU is on most of it") {
  mega_test::JobSpec spec;
  spec.dp = 4, spec.tp = 1, spec.pp = 2, spec.microbatches = 4, spec.clock_spread_s = 0;
  spec.drift_ppm = 0, spec.one_clock_a_node = true;
  mega_test::Fault slow;
  slow.rank = 2;
  slow.factor = 2;
  spec.faults = {slow};
  const auto job = mega_test::generate(spec, 4);
  const CriticalPath p = path_of(job.trace);
  REQUIRE_FALSE(p.segments.empty());
  for (std::size_t i = 1; i < p.segments.size(); ++i)
    CHECK(p.segments[i].begin == p.segments[i - 1].end);
  CHECK(p.length() == p.segments.back().end - p.segments.front().begin);
  CHECK(p.by_rank.at(2) > p.length() / 2);
}

}  // namespace
