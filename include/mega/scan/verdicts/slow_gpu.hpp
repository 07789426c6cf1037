/// @file  Slow GPU: every kernel of one rank takes longer than the same kernel of its peers, or
/// most do, or some of them so much longer that their sum does.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/device_evidence.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/rank_speeds.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// Nanoseconds that the rank computes in a step, from the first slow one on. What a factor is a
/// typical one of is a typical step: set-up and delays make some of them longer, none shorter.
[[nodiscard]] inline double busy_time(const JobLayout& job, const KernelTimes& times,
                                      std::size_t rank, const Onset& onset) {
  std::vector<double> of_steps(job.steps.size(), 0);
  for (const KernelCell& c : times.cells) {
    if (c.rank == rank) of_steps[c.step] += c.total;
  }
  of_steps.erase(of_steps.begin(), of_steps.begin() + static_cast<std::ptrdiff_t>(onset.first));
  std::erase(of_steps, 0.0);  // steps that the trace does not hold of this rank
  return of_steps.empty() ? 0 : lower_median(of_steps);
}

[[nodiscard]] inline std::vector<Verdict> find_slow_gpus(const JobLayout& job,
                                                         const KernelTimes& times,
                                                         const RankSpeeds& speeds,
                                                         const RankSpeeds& usually) {
  std::vector<Verdict> out;
  std::vector<std::size_t> present;
  for (std::size_t r = 0; r < job.ranks(); ++r) {
    if (speeds.present(r)) present.push_back(r);
  }
  for (const std::size_t r : present) {
    if (speeds.with_stage[r] != 0) continue;
    const bool always = speeds.lasts(speeds.onset(r));
    const Onset o = (always ? speeds : usually).onset(r);
    // In most steps, too: nothing else tells it from a burst.
    const bool mostly = usually.with_stage[r] == 0 && usually.lasts(o) && o.slow * 3 >= o.known * 2;
    if (!always && !mostly) continue;
    Verdict v;
    v.factor = std::exp(o.level);
    v.since_step = job.steps[o.first];
    v.stages = {job.stage[r]};
    const double busy = busy_time(job, times, r, o);
    v.cost_per_step = static_cast<Nanoseconds>(busy * (1 - 1 / v.factor));
    // Two ranks that differ, and no time at which they did not: nothing says who is right.
    const bool two_only = present.size() == 2 && o.slow == o.known;
    v.what = two_only ? VerdictClass::ambiguous : VerdictClass::slow_gpu;
    if (two_only) {
      v.ranks = {job.number[present[0]], job.number[present[1]]};
    } else {
      v.ranks = {job.number[r]};
    }
    // Longer work looks the same where no other rank has it.
    v.alone = present.size() == 1;
    v.confidence = two_only || v.alone ? 0.5 : std::min(always ? 0.99 : 0.7, 0.6 + o.level);
    v.evidence.push_back(sentence(
        always ? "" : "most ", "kernels of rank ", job.number[r], " take ", figure(v.factor),
        " times as long as the same kernels ", v.alone ? "in its other steps" : "of its peers",
        ", in ", o.slow, " of ", o.known, " steps", always ? "" : ", though the fastest do not"));
    v.evidence.push_back(sentence("that is ", milliseconds(static_cast<double>(v.cost_per_step)),
                                  " of its ", milliseconds(busy), " of compute a step"));
    if (v.alone)
      v.evidence.push_back("there is no other rank, so it may have got more work instead");
    if (two_only)
      v.evidence.push_back("there are two ranks only, so either may be the one that is wrong");
    out.push_back(std::move(v));
  }
  return out;
}

/// Ranks whose kernels a GPU runs: they have launches, or their device has told of its state. Work
/// of the processor is interrupted all the time.
[[nodiscard]] inline std::vector<char> find_gpu_ranks(const Trace& trace) {
  std::vector<char> out(trace.ranks.size(), 0);
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    if (e.launch != none) out[trace.rank_index(e)] = 1;
  }
  for (const DeviceState& state : trace.device_states) out[state.rank] = 1;
  return out;
}

/// A GPU that is taken away now and then, as by another process: no matter how few the ranks are,
/// its peers cannot have made some of its kernels longer than the rest.
/// @param in_sum  see measure_excess_in_sum()
[[nodiscard]] inline std::vector<Verdict> find_interrupted_gpus(
    const Trace& trace, const JobLayout& job, const KernelTimes& times, const RankSpeeds& speeds,
    const RankSpeeds& usually, const RankSpeeds& in_sum, const DiagnoseOptions& options) {
  std::vector<Verdict> out;
  // Unequal data make some kernels longer than others, too.
  const bool varies = std::any_of(times.kernels.begin(), times.kernels.end(), [&](const Kernel& k) {
    return k.variation > options.data_variation;
  });
  if (varies) return out;
  const std::vector<char> on_gpu = find_gpu_ranks(trace);
  for (std::size_t r = 0; r < job.ranks(); ++r) {
    if (on_gpu[r] == 0 || !in_sum.present(r) || in_sum.with_stage[r] != 0 ||
        speeds.with_stage[r] != 0)
      continue;
    const Onset o = in_sum.onset(r);
    if (!in_sum.lasts(o) || speeds.lasts(speeds.onset(r)) || usually.lasts(usually.onset(r)))
      continue;
    Verdict v;
    v.what = VerdictClass::slow_gpu;
    v.ranks = {job.number[r]};
    v.stages = {job.stage[r]};
    v.factor = std::exp(o.level);
    v.since_step = job.steps[o.first];
    v.confidence = std::min(0.95, 0.6 + o.level);
    const double busy = busy_time(job, times, r, o);
    v.cost_per_step = static_cast<Nanoseconds>(busy * (1 - 1 / v.factor));
    v.evidence.push_back(sentence("kernels of rank ", job.number[r], " take ", figure(v.factor),
                                  " times as long in sum as as many of its peers', in ", o.slow,
                                  " of ", o.known, " steps, though most of them are not longer"));
    v.evidence.push_back("so something interrupts them, as another process on its GPU would");
    out.push_back(std::move(v));
  }
  return out;
}

/// What the devices of ranks that are slow alone say of themselves, beside their stage's others.
inline void add_device_evidence(std::vector<Verdict>& verdicts, const Trace& trace,
                                const JobLayout& job) {
  for (Verdict& v : verdicts) {
    if (v.what != VerdictClass::slow_gpu || v.ranks.size() != 1) continue;
    TableIndex own = none;
    for (std::size_t r = 0; r < job.ranks(); ++r) {
      if (job.number[r] == v.ranks[0]) own = static_cast<TableIndex>(r);
    }
    if (own == none) continue;
    std::vector<TableIndex> peers;
    for (std::size_t r = 0; r < job.ranks(); ++r) {
      if (r != own && job.stage[r] == job.stage[own]) peers.push_back(static_cast<TableIndex>(r));
    }
    std::string said = device_evidence(trace, own, peers, v.since_step);
    if (!said.empty()) v.evidence.push_back(std::move(said));
  }
}

}  // namespace mega::inline v0::scan::verdicts
