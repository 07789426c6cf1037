// The executor's orders over emulated links: what it takes is what the simulator says, and what the
// breadth of the order is worth.
#include "../../../benchmarks/emulated_pipeline.hpp"

#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/metrics.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/traversal.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace {

using namespace mega::dpp;
using emulation::Windows;
using emulation::Workload;
using mega::comm::LogicalClock;

/// p 4, a forward of 3 ms and a backward of 6 ms in every stage.
Workload uniform(int m, int v, double seconds_a_message) {
  Workload work{.p = 4, .m = m, .v = v};
  work.times.assign(static_cast<std::size_t>(4 * v), {3e-3, 3e-3, 3e-3});
  work.hop = {.latency_s = 1e-5, .bytes_per_s = 1e9};
  work.message_bytes = seconds_a_message * 1e9;
  return work;
}

template <class Traversal>
void check_against_simulator(Workload work, const Traversal& order) {
  work.roomy = true;
  CAPTURE(work.m);
  CAPTURE(work.v);
  CAPTURE(work.message_bytes);
  const Windows run = emulation::run_windows<LogicalClock>(work, order);
  Cluster cluster{.times = work.times, .links = {{work.hop.latency_s, work.hop.bytes_per_s}}};
  cluster.message_bytes = work.message_bytes;
  const ClusterRun expected = simulate(make_schedule(order, work.p, work.m, work.v), cluster);
  const PipelineMetrics metrics = measure(record_of(expected.timeline, 1e9));
  double send_ratio = 0;
  for (const SendWindow& send : metrics.sends)
    send_ratio += send.ratio / static_cast<double>(metrics.sends.size());
  int peak = 0;
  for (const RankMetrics& rank : metrics.ranks) peak = std::max(peak, rank.peak_live);
  // Both add the same numbers in another order; records are cut to nanoseconds.
  CHECK(std::abs(run.step_s - expected.timing.makespan) < 1e-9);
  CHECK(std::abs(run.send_ratio - send_ratio) < 1e-5);
  CHECK(std::abs(run.transfers.total - expected.transfers.total) < 1e-6);
  CHECK(std::abs(run.transfers.covered - expected.transfers.covered) < 1e-6);
  CHECK(run.peak == peak);
  CHECK(std::abs(run.overrun) < 1e-9);
}

}  // namespace

TEST_CASE("dpp: the executor over emulated links takes the simulator's time") {
  for (const double message : {1e-4, 1.1e-3, 4e-3}) {
    check_against_simulator(uniform(8, 2, message), ScheduleTraversal<DFC>{});
    check_against_simulator(uniform(8, 2, message), ScheduleTraversal<BFC>{});
    check_against_simulator(uniform(10, 3, message), Interleaved{{5}});
    check_against_simulator(uniform(6, 1, message), OneForwardOneBackward{});
    check_against_simulator(uniform(5, 2, message), GPipe{});
  }
  Workload uneven = uniform(9, 2, 5e-4);
  for (std::size_t stage = 0; stage < uneven.times.size(); ++stage)
    uneven.times[stage].forward *= 1 + 0.1 * static_cast<double>(stage);
  check_against_simulator(uneven, ScheduleTraversal<DFC>{});
  check_against_simulator(uneven, ScheduleTraversal<BFC>{});
}

TEST_CASE("dpp: breadth first widens the windows as published, and exposes half the transfers") {
  const Workload work = uniform(16, 4, 3e-4);
  const Windows dfc = emulation::run_windows<LogicalClock>(work, ScheduleTraversal<DFC>{});
  const Windows bfc = emulation::run_windows<LogicalClock>(work, ScheduleTraversal<BFC>{});
  CHECK(bfc.send_ratio >= 1.93 * dfc.send_ratio);
  CHECK(bfc.all_reduce_window >= 2.0 * dfc.all_reduce_window);
  CHECK(bfc.transfers.exposed() <= 0.5 * dfc.transfers.exposed());
  CHECK(bfc.step_s <= dfc.step_s);
  CHECK(bfc.peak == 55);
  CHECK(dfc.peak == 19);
  CHECK(bfc.loss == dfc.loss);
  // 16 stages add 1 + 2 + .. + 16 to inputs of 1: two steps of 16 micro-batches of 137.
  CHECK(bfc.loss == 2 * 16 * 137);
}
