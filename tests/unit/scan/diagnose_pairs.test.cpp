// Verdicts on two GPUs, where each rank is the other's only peer: kernels that something
// interrupts, kernels beside NCCL's, and hosts that only seem late.
#include "../../support/diagnosis.hpp"
#include "../../support/hand_trace.hpp"
#include <mega/scan/diagnose.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace mega::scan;
using namespace mega_test;

constexpr std::int64_t us = 1'000;
constexpr int steps = 8;

/// Eight steps of ten kernels of 100 us and an all-reduce of 50 us that waits for the last rank.
struct Pair {
  HandTrace h{2, 2};
  std::int64_t at[2] = {0, 0};
  std::int64_t calls = 0;
  bool launches = true;

  void kernel(int rank, int step, std::int64_t length, std::int64_t late = 0) {
    const std::int64_t begin = at[rank] + late;
    TableIndex launch = none;
    if (launches) launch = h.launch(rank, begin - 2 * us, begin - us, step);
    const TableIndex run = h.run(rank, "k", begin, begin + length, step);
    h.trace.events[run].launch = launch;
    at[rank] = begin + length;
  }
  void reduce(int step) {
    const std::int64_t end = std::max(at[0], at[1]) + 50 * us;
    for (std::int64_t& t : at) {
      const int rank = static_cast<int>(&t - at);
      h.call(rank, CommunicationOp::all_reduce, "ncclDevKernel_AllReduce", t, end, calls, step);
      t = end;
    }
    ++calls;
  }
  /// @param length  length(rank, number of the kernel)
  template <class Length>
  void run(const Length& length, std::int64_t late_rank_0 = 0) {
    for (int step = 0; step < steps; ++step) {
      for (int rank = 0; rank < 2; ++rank) {
        for (int k = 0; k < 10; ++k)
          kernel(rank, step, length(rank, k), rank == 0 && k > 0 ? late_rank_0 : 0);
      }
      reduce(step);
    }
  }
};

/// Two of ten kernels of rank 1 last four times as long.
std::int64_t interrupted(int rank, int k) {
  return rank == 1 && k % 5 == 0 ? 400 * us : 100 * us;
}

TEST_CASE("scan: of two GPUs the one whose kernels are interrupted is named") {
  Pair p;
  p.run(interrupted);
  const Diagnosis d = diagnosis_of(p.h.trace);
  CAPTURE(text(d));
  REQUIRE(d.verdicts.size() == 1);
  CHECK(d.verdicts[0].what == VerdictClass::slow_gpu);
  CHECK(d.verdicts[0].ranks == std::vector<std::int32_t>{1});
  CHECK(d.verdicts[0].factor == doctest::Approx(1.6));  // 1,600 us instead of 1,000
  CHECK(d.verdicts[0].cost_per_step == doctest::Approx(600.0 * us).epsilon(1e-5));
  CHECK(d.verdicts[0].evidence[0].find("in 8 of 8 steps") != std::string::npos);
}

TEST_CASE("scan: work of a processor may be interrupted, and a GPU a little") {
  Pair host;
  host.launches = false;
  host.run(interrupted);
  CHECK(diagnosis_of(host.h.trace).healthy());
  Pair little;
  little.run([](int rank, int k) { return rank == 1 && k == 0 ? 220 * us : 100 * us; });  // x 1.12
  CHECK(diagnosis_of(little.h.trace).healthy());
}

TEST_CASE("scan: what a device says of its clock is evidence") {
  Pair p;
  p.run(interrupted);
  for (int i = 0; i < 6; ++i) {
    DeviceState state;
    state.at = i * 1000 * us;
    for (state.rank = 0; state.rank < 2; ++state.rank) {
      state.sm_mhz = state.rank == 1 ? 1200 : 1980;
      p.h.trace.device_states.push_back(state);
    }
  }
  const Diagnosis d = diagnosis_of(p.h.trace);
  CAPTURE(text(d));
  REQUIRE(d.verdicts.size() == 1);
  CHECK(text(d).find("its SM clock was 1200 MHz where its peers' was 1980 MHz") !=
        std::string::npos);
}

TEST_CASE("scan: kernels beside NCCL's say nothing of their GPU") {
  // Rank 0 comes late to the first all-reduce, which rank 1 waits for beside ten kernels that it
  // slows down; the ten before ran alone.
  Pair p;
  for (int step = 0; step < steps; ++step) {
    for (int k = 0; k < 10; ++k) p.kernel(0, step, 100 * us);
    for (int k = 0; k < 10; ++k) p.kernel(1, step, 100 * us);
    const std::int64_t begin = p.at[0], end = begin + 2000 * us;
    for (int rank = 0; rank < 2; ++rank)
      p.h.call(rank, CommunicationOp::all_reduce, "ncclDevKernel_AllReduce",
               rank == 0 ? end - 50 * us : begin, end, p.calls, step);
    ++p.calls;
    for (int k = 0; k < 10; ++k) p.kernel(0, step, 100 * us);
    for (int k = 0; k < 10; ++k) p.kernel(1, step, 150 * us);
    p.at[0] = p.at[1] = end;
  }
  const Diagnosis d = diagnosis_of(p.h.trace);
  CAPTURE(text(d));
  for (const Verdict& v : d.verdicts) CHECK(v.what == VerdictClass::host_delay);
}

TEST_CASE("scan: of two hosts one that nobody waits for is not late") {
  // Rank 0's device is ready 30 us before each launch; rank 1's kernels last longer by more.
  Pair p;
  p.run([](int rank, int k) { return rank == 1 && k % 5 == 0 ? 500 * us : 100 * us; }, 30 * us);
  const Diagnosis d = diagnosis_of(p.h.trace);
  CAPTURE(text(d));
  REQUIRE(d.verdicts.size() == 1);
  CHECK(d.verdicts[0].what == VerdictClass::slow_gpu);
  CHECK(d.verdicts[0].ranks == std::vector<std::int32_t>{1});
  REQUIRE(d.notes.size() == 1);
  CHECK(d.notes[0].find("nobody waits for rank 0") != std::string::npos);
}

TEST_CASE("scan: who ends a step early and then waits for the others is not late") {
  // Without launches. Behind the all-reduce rank 1 has 400 us more to do, and rank 0's host waits
  // for it; `late` is what rank 0 itself comes later.
  const auto run = [](std::int64_t late) {
    Pair p;
    p.launches = false;
    for (int step = 0; step < steps; ++step) {
      const std::int64_t begin[2] = {p.at[0], p.at[1]};
      for (int rank = 0; rank < 2; ++rank) {
        for (int k = 0; k < 10; ++k) p.kernel(rank, step, 100 * us);
      }
      p.reduce(step);
      p.kernel(0, step, 100 * us);
      p.kernel(1, step, 500 * us);
      for (int rank = 0; rank < 2; ++rank) p.h.iterate(rank, begin[rank], p.at[rank], step);
      p.at[0] = p.at[1] += 20 * us;
      p.at[0] += late;
    }
    return diagnosis_of(p.h.trace);
  };
  const auto hosts = [](const Diagnosis& d) {
    return std::count_if(d.verdicts.begin(), d.verdicts.end(),
                         [](const Verdict& v) { return v.what == VerdictClass::host_delay; });
  };
  const Diagnosis early = run(0);
  CAPTURE(text(early));
  CHECK(hosts(early) == 0);
  const Diagnosis late = run(400 * us);
  CAPTURE(text(late));
  CHECK(hosts(late) == 1);
}

}  // namespace
