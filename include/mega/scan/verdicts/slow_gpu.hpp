/// @file  Slow GPU: every kernel of one rank takes longer than the same kernel of its peers.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/rank_speeds.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

[[nodiscard]] inline std::vector<Verdict> find_slow_gpus(const JobLayout& job,
                                                         const KernelTimes& times,
                                                         const RankSpeeds& speeds) {
  std::vector<Verdict> out;
  std::vector<std::size_t> present;
  for (std::size_t r = 0; r < job.ranks(); ++r) {
    if (speeds.present(r)) present.push_back(r);
  }
  for (const std::size_t r : present) {
    const Onset o = speeds.onset(r);
    if (!speeds.lasts(o) || speeds.with_stage[r] != 0) continue;
    Verdict v;
    v.factor = std::exp(o.level);
    v.since_step = job.steps[o.first];
    v.stages = {job.stage[r]};
    double busy = 0;
    for (const KernelCell& c : times.cells) {
      if (c.rank == r) busy += c.total / static_cast<double>(job.steps.size());
    }
    v.cost_per_step = static_cast<Nanoseconds>(busy * (1 - 1 / v.factor));
    // Two ranks that differ, and no time at which they did not: nothing says who is right.
    const bool two_only = present.size() == 2 && o.slow == o.known;
    v.what = two_only ? VerdictClass::ambiguous : VerdictClass::slow_gpu;
    if (two_only) {
      v.ranks = {job.number[present[0]], job.number[present[1]]};
    } else {
      v.ranks = {job.number[r]};
    }
    v.confidence = two_only ? 0.5 : std::min(0.99, 0.6 + o.level);
    v.evidence.push_back(sentence("kernels of rank ", job.number[r], " take ", figure(v.factor),
                                  " times as long as the same kernels of its peers, in ", o.slow,
                                  " of ", o.known, " steps"));
    v.evidence.push_back(sentence("that is ", milliseconds(static_cast<double>(v.cost_per_step)),
                                  " of its ", milliseconds(busy), " of compute a step"));
    if (two_only)
      v.evidence.push_back("there are two ranks only, so either may be the one that is wrong");
    out.push_back(std::move(v));
  }
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
