#include "../../support/hand_trace.hpp"
#include "../../support/scan_generator.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/replay.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace mega::scan;
using enum CommunicationOp;
using mega_test::HandTrace;

DependencyGraph graph_of(const Trace& t) {
  const Matches m = match(t);
  return build_dependencies(t, m, align(t, m));
}

std::vector<double> work_of(const DependencyGraph& g) {
  std::vector<double> out;
  for (const auto& n : g.nodes) out.push_back(n.work);
  return out;
}

/// Two ranks: a kernel each, an all-reduce, a kernel each. Rank 1's first kernel is the longer one.
HandTrace two_ranks() {
  HandTrace h(2);
  for (int r = 0; r < 2; ++r) {
    const std::int64_t first = r == 0 ? 100'000 : 300'000;
    h.run(r, "before", 0, first);
    h.call(r, all_reduce, "reduce", first + 2'000, 350'000, 0);
    h.run(r, "after", 352'000, 452'000);
  }
  return h;
}

TEST_CASE("scan: a replay with the trace's own times gives the trace's own times") {
  const HandTrace h = two_ranks();
  const DependencyGraph g = graph_of(h.trace);
  REQUIRE(g.nodes.size() == 6);
  ReplayTimes times;
  replay(g, work_of(g), true, times);
  REQUIRE(times.step.size() == 1);
  CHECK(times.step[0] == 452'000);
  for (std::size_t i = 0; i < g.nodes.size(); ++i) {
    CHECK(times.begin[i] == static_cast<double>(g.nodes[i].begin));
    CHECK(times.end[i] == static_cast<double>(g.nodes[i].end));
  }
}

TEST_CASE("scan: a shorter kernel moves all that waited for it, delays can be left out") {
  const HandTrace h = two_ranks();
  const DependencyGraph g = graph_of(h.trace);
  std::vector<double> work = work_of(g);
  for (std::size_t i = 0; i < g.nodes.size(); ++i) {
    if (g.nodes[i].rank == 1 && h.trace.name(h.trace.events[g.nodes[i].event]) == "before")
      work[i] = 100'000;
  }
  ReplayTimes times;
  replay(g, work, true, times);
  CHECK(times.step[0] == 252'000);  // 100 + 2 + 48 of transfer + 2 + 100
  replay(g, work, false, times);
  CHECK(times.step[0] == 248'000);
}

TEST_CASE("scan: steps are replayed apart, however long the window between them") {
  HandTrace h(1);
  h.run(0, "k", 5'000, 6'000, 3);
  h.run(0, "k", 9'000'000, 9'004'000, 7);
  const DependencyGraph g = graph_of(h.trace);
  CHECK(g.steps == std::vector<std::int32_t>{3, 7});
  ReplayTimes times;
  replay(g, work_of(g), true, times);
  CHECK(times.step == std::vector<double>{1'000, 4'000});
  CHECK(times.mean_step() == 2'500);
}

TEST_CASE("scan: what runs beside without ever being waited for is no dependency") {
  HandTrace h(1);
  std::int64_t at = 0;
  for (int i = 0; i < 40; ++i) {
    h.run(0, "k", at, at + 100'000);
    h.call(0, unknown, "beside", at + 10'000, at + 60'000, i);  // ends while the kernel runs
    at += 100'500;
  }
  const DependencyGraph g = graph_of(h.trace);
  for (const auto& n : g.nodes) {
    if (h.trace.name(h.trace.events[n.event]) != "k") continue;
    for (const std::uint32_t d : g.needs(n))
      CHECK(h.trace.name(h.trace.events[g.nodes[d].event]) == "k");
  }
}

/// The names that the operation of this name in this step of rank 1 needs.
std::vector<std::string> needs_of(const Trace& t, const DependencyGraph& g, std::string_view name,
                                  int step) {
  std::vector<std::string> out;
  for (const auto& n : g.nodes) {
    const Event& e = t.events[n.event];
    if (n.rank != 1 || e.step != step || t.name(e) != name) continue;
    for (const std::uint32_t d : g.needs(n)) out.emplace_back(t.name(t.events[g.nodes[d].event]));
  }
  std::sort(out.begin(), out.end());
  return out;
}

TEST_CASE("scan: what follows at once does not hide the kernel that a send needs") {
  HandTrace h(2);
  for (int step = 0; step < 10; ++step) {
    const std::int64_t at = step * 10'000'000;
    // The last send is stamped 200 ns early, as coarse clocks do.
    const std::int64_t sent = at + 1'000'000 - (step == 9 ? 200 : -300);
    h.run(1, "kernel", at, at + 1'000'000, step);
    h.run(1, "nothing", at + 1'000'000, at + 1'000'000, step);
    h.call(1, send, "send", sent, at + 1'100'000, step, step, 0);
    h.call(0, recv, "recv", at, at + 1'100'000, step, step, 1);
  }
  const DependencyGraph g = graph_of(h.trace);
  CHECK(needs_of(h.trace, g, "send", 0) == std::vector<std::string>{"nothing"});
  CHECK(needs_of(h.trace, g, "send", 9) == std::vector<std::string>{"kernel"});
}

TEST_CASE("scan: a receive that begins with its send waits for nothing but the send") {
  for (const bool together : {true, false}) {
    CAPTURE(together);
    HandTrace h(2);
    for (int step = 0; step < 10; ++step) {
      const std::int64_t at = step * 10'000'000;
      h.run(0, "kernel", at, at + 1'000'000, step);
      h.run(1, "before", at, at + 900'000, step);
      h.call(0, send, "send", at + 1'000'000, at + 1'100'000, step, step, 1);
      h.call(1, recv, "recv", at + (together ? 1'000'300 : 900'000), at + 1'100'000, step, step, 0);
      h.run(1, "after", at + 1'100'000, at + 1'200'000, step);
    }
    const DependencyGraph g = graph_of(h.trace);
    CHECK(needs_of(h.trace, g, "recv", 3) ==
          (together ? std::vector<std::string>{} : std::vector<std::string>{"before"}));
    ReplayTimes times;
    std::vector<double> work = work_of(g);
    for (std::size_t i = 0; i < g.nodes.size(); ++i) {
      if (h.trace.name(h.trace.events[g.nodes[i].event]) == "kernel") work[i] /= 2;
    }
    replay(g, work, true, times);
    // Posted at 0.9 ms, or whenever the send is there; 0.1 ms each of transfer and kernel.
    CHECK(times.step[3] == doctest::Approx(together ? 1'000'000 : 1'100'000).epsilon(0.001));
  }
}

TEST_CASE("scan: clocks that contradict the order do not stop a replay") {
  HandTrace h(2);
  // Each rank ends the operation that it enters first before the other has begun its own.
  h.call(0, all_reduce, "a", 0, 100'000, 0);
  h.call(0, all_reduce, "b", 200'000, 300'000, 1);
  h.call(1, all_reduce, "b", 0, 100'000, 1);
  h.call(1, all_reduce, "a", 200'000, 300'000, 0);
  Trace& t = h.trace;
  for (std::size_t i = 0; i < t.events.size(); ++i) t.events[i].name = t.names.intern("same");
  const DependencyGraph g = graph_of(t);
  CHECK(g.dropped > 0);
  std::vector<std::uint32_t> all = g.order;
  std::sort(all.begin(), all.end());
  CHECK(all == std::vector<std::uint32_t>{0, 1, 2, 3});
  ReplayTimes times;
  replay(g, work_of(g), true, times);
  CHECK(std::isfinite(times.step[0]));
}

TEST_CASE("scan: nothing to replay") {
  const DependencyGraph g = graph_of(Trace{});
  ReplayTimes times;
  replay(g, {}, true, times);
  CHECK(times.mean_step() == 0);
}

TEST_CASE("scan: a replay predicts a job's length without its slow GPU to 3 %") {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    CAPTURE(seed);
    mega_test::JobSpec spec;
    spec.dp = 2, spec.tp = 2, spec.pp = 3, spec.microbatches = 6;
    mega_test::Fault slow;
    slow.rank = 7;
    slow.factor = 1.8;
    spec.faults = {slow};
    const auto job = mega_test::generate(spec, seed);
    const DependencyGraph g = graph_of(job.trace);
    std::vector<double> work = work_of(g);
    ReplayTimes times;
    replay(g, work, true, times);
    const double with = times.mean_step();
    for (std::size_t i = 0; i < g.nodes.size(); ++i) {
      if (g.nodes[i].rank == 7 && is_compute(job.trace.events[g.nodes[i].event].kind))
        work[i] /= slow.factor;
    }
    replay(g, work, true, times);
    CHECK(with / times.mean_step() ==
          doctest::Approx(mega_test::effect_of(spec, slow, seed)).epsilon(0.03));
  }
}

}  // namespace
