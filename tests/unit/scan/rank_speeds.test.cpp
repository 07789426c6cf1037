// How much longer a rank's kernels take than its peers', beneath a load that varies, and how long
// it computes in a step.
#include "../../support/hand_trace.hpp"
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/rank_speeds.hpp>
#include <mega/scan/verdicts/robust.hpp>
#include <mega/scan/verdicts/slow_gpu.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using namespace mega::scan;
using namespace mega::scan::verdicts;
using mega_test::HandTrace;

constexpr std::int64_t us = 1'000;
constexpr int steps = 3;

/// Four ranks of one replica, six micro-batches of loads that differ five times and from step to
/// step. Rank 2 is 1.3 times as slow. In all light micro-batches rank 0 runs beside NCCL's kernels,
/// which make it twice as slow.
Trace loaded(bool labelled) {
  HandTrace h(4);
  const int loads[] = {100, 120, 80, 500, 90, 410};
  for (int rank = 0; rank < 4; ++rank) {
    std::int64_t at = 1000 * us;
    for (int step = 0; step < steps; ++step) {
      for (int m = 0; m < 6; ++m) {
        const int load = loads[(m + step) % 6] + 7 * step;
        const bool beside = rank == 0 && load < 200;
        std::int64_t length = load * us;
        if (rank == 2) length = length * 13 / 10;
        if (beside) length *= 2;
        const TableIndex run = h.run(rank, "k", at, at + length, step);
        if (labelled) h.trace.events[run].microbatch = m;
        if (beside)
          h.call(rank, CommunicationOp::all_reduce, "ncclDevKernel", at - us, at + length + us, m,
                 step);
        at += length + 10 * us;
      }
    }
  }
  return std::move(h.trace);
}

TEST_CASE("scan: ranks are compared over the same micro-batches where their load varies") {
  for (const bool labelled : {true, false}) {
    CAPTURE(labelled);
    const Trace t = loaded(labelled);
    const JobLayout job = lay_out(t);
    const KernelTimes times = tabulate_kernels(t, job);
    REQUIRE(times.kernels.size() == 1);
    for (const CellFigure& figure :
         {CellFigure{&KernelCell::alone_least, &Kernel::least, &undisturbed<double>},
          CellFigure{&KernelCell::alone_middle, &Kernel::middle, &lower_median<double>}}) {
      const std::vector<Shift> shifts = shifts_beneath_load(times, job, times.kernels[0], figure);
      REQUIRE(shifts.size() == 4 * steps);
      for (const Shift& s : shifts) {
        CAPTURE(s.rank);
        CHECK(s.runs == (s.rank == 0 ? 2 : 6));  // logarithms are floats: 24 bits of about 13
        CHECK(s.shift == doctest::Approx(s.rank == 2 ? std::log(1.3) : 0).epsilon(2e-6));
      }
    }
  }
}

TEST_CASE("scan: a run that no member of the replica has beside it says nothing") {
  // Each rank is a replica of its own.
  Trace t = loaded(true);
  for (std::size_t r = 0; r < 4; ++r) t.ranks[r].data = static_cast<std::int32_t>(r);
  const JobLayout job = lay_out(t);
  const KernelTimes times = tabulate_kernels(t, job);
  CHECK(shifts_beneath_load(times, job, times.kernels[0],
                            {&KernelCell::alone_least, &Kernel::least, &undisturbed<double>})
            .empty());
}

TEST_CASE("scan: a rank computes in a step what it does in most since the fault began") {
  HandTrace h(2, 2);
  std::int64_t at = 0;
  const auto run = [&](std::int64_t length, int step) {
    h.run(1, "k", at, at + length, step);
    h.run(0, "k", at, at + 100 * us, step);
    at += length;
  };
  // Set-up in the first step, 200 us from step 3 on, and one burst.
  for (int step = 0; step < 8; ++step)
    run((step == 0 ? 90'000 : step == 5 ? 4'000 : step >= 3 ? 200 : 100) * us, step);
  const JobLayout job = lay_out(h.trace);
  const KernelTimes times = tabulate_kernels(h.trace, job);
  Onset onset;
  onset.first = 3;
  CHECK(busy_time(job, times, 1, onset) == doctest::Approx(200.0 * us).epsilon(1e-5));
  CHECK(busy_time(job, times, 0, onset) == doctest::Approx(100.0 * us).epsilon(1e-5));
  onset.first = 0;
  CHECK(busy_time(job, times, 1, onset) == doctest::Approx(200.0 * us).epsilon(1e-5));
}

}  // namespace
