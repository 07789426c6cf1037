#include "../../support/hand_trace.hpp"
#include "../../support/scan_generator.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/delay_cost.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/wait_states.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

using namespace mega::scan;
using enum CommunicationOp;
using mega_test::HandTrace;

struct Costs {
  WaitReport waits;
  DelayCosts costs;
};
Costs costs_of(const Trace& t) {
  const Matches m = match(t);
  const Alignment a = align(t, m);
  Costs out;
  out.waits = find_waits(t, m, a);
  out.costs = find_delay_costs(t, m, out.waits);
  return out;
}

TEST_CASE("scan: a messenger is not blamed: the cost goes through two transfers to the first") {
  HandTrace h(3);
  // Rank 0 computes for 500 us and sends to 1, which then sends to 2.
  h.call(0, send, "send", 500'000, 510'000, 0, 0, 1);
  h.call(1, recv, "recv", 0, 510'000, 0, 0, 0);
  h.call(1, send, "send", 530'000, 540'000, 0, 0, 2);
  h.call(2, recv, "recv", 10'000, 540'000, 0, 0, 1);
  const Costs c = costs_of(h.trace);
  CHECK(c.waits.caused == std::vector<Nanoseconds>{500'000, 520'000, 0});
  CHECK(c.costs.direct[0] == doctest::Approx(500'000));
  CHECK(c.costs.indirect[0] == doctest::Approx(500'000));
  CHECK(c.costs.direct[1] == doctest::Approx(20'000));  // what 1 did between, and nothing else
  CHECK(c.costs.passed[1] == doctest::Approx(500'000));
  CHECK(c.costs.between.at({2, 0}) == doctest::Approx(500'000));
  CHECK(c.costs.between.at({2, 1}) == doctest::Approx(20'000));
}

TEST_CASE("scan: what both waited for does not make one late to the other") {
  HandTrace h(3);
  const TableIndex pair = h.trace.intern_group("pair", {0, 1});
  // All wait for 2; then 1 is late to 0 by what it did itself.
  h.call(0, all_reduce, "reduce", 0, 310'000, 0);
  h.call(1, all_reduce, "reduce", 0, 310'000, 0);
  h.call(2, all_reduce, "reduce", 300'000, 310'000, 0);
  for (int r = 0; r < 2; ++r) {
    const TableIndex e = h.call(r, all_reduce, "pair", r == 0 ? 320'000 : 420'000, 430'000, 0);
    h.trace.communications[h.trace.events[e].detail].group = pair;
  }
  const Costs c = costs_of(h.trace);
  CHECK(c.costs.direct == std::vector<double>{0, 100'000, 600'000});
  CHECK(c.costs.indirect == std::vector<double>{0, 0, 0});
}

TEST_CASE("scan: delay costs add up to all that was waited, and lead to a slow GPU") {
  for (const std::uint64_t seed : {1U, 2U, 3U, 4U}) {
    CAPTURE(seed);
    mega_test::JobSpec spec;
    spec.dp = 3, spec.tp = 2, spec.pp = 4, spec.microbatches = 8;
    mega_test::Fault slow;
    slow.rank = 13;
    slow.factor = 2;
    spec.faults = {slow};
    const auto job = mega_test::generate(spec, seed);
    const Costs c = costs_of(job.trace);
    const double waited = static_cast<double>(
        std::accumulate(c.waits.suffered.begin(), c.waits.suffered.end(), Nanoseconds{0}));
    double costs = 0;
    std::vector<double> by_rank;
    for (TableIndex r = 0; r < 24; ++r) by_rank.push_back(c.costs.cost(r));
    for (const double x : by_rank) costs += x;
    CHECK(costs == doctest::Approx(waited));
    CHECK(std::max_element(by_rank.begin(), by_rank.end()) - by_rank.begin() == 13);
  }
}

}  // namespace
