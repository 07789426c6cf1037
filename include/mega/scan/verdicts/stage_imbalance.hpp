/// @file  Stage imbalance: a stage has more work, more kernels or longer ones on all of its ranks.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/rank_speeds.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// The kernel that the stage runs more often, or longer, than the others; empty where none is.
[[nodiscard]] inline std::string surplus_kernel(const Trace& trace, const JobLayout& job,
                                                const KernelTimes& times, std::int32_t stage) {
  double most = 0;
  std::string text;
  for (const Kernel& k : times.kernels) {
    std::vector<double> own, others, own_count, others_count;
    for (std::size_t c = k.first; c < k.first + k.count; ++c) {
      const KernelCell& cell = times.cells[c];
      const bool mine = job.stage[cell.rank] == stage;
      (mine ? own : others).push_back(cell.total);
      (mine ? own_count : others_count).push_back(static_cast<double>(cell.count));
    }
    if (own.empty()) continue;
    const double more = lower_median(own) - (others.empty() ? 0 : lower_median(others));
    if (more <= most) continue;
    most = more;
    text = sentence("most of it in ", trace.names[k.name], ": ", lower_median(own_count),
                    " a step against ", others.empty() ? 0.0 : lower_median(others_count), ", ",
                    milliseconds(more), " more");
  }
  return text;
}

/// Nanoseconds of work of each rank in a step, with a slow GPU's slowness taken out. The
/// how-many-eth run of a kernel in a step does the same work in every step; what some of them were
/// delayed by is no work.
[[nodiscard]] inline std::vector<double> work_of_ranks(const JobLayout& job,
                                                       const KernelTimes& times,
                                                       const RankSpeeds& speeds) {
  std::vector<double> out(job.ranks(), 0);
  std::vector<char> slow(job.ranks(), 0);
  for (std::size_t r = 0; r < job.ranks(); ++r)
    slow[r] = speeds.with_stage[r] == 0 && speeds.lasts(speeds.onset(r)) ? 1 : 0;
  std::vector<double> runs;
  for (const Kernel& k : times.kernels) {
    for (std::size_t c = k.first, end = c; c < k.first + k.count; c = end) {
      const TableIndex rank = times.cells[c].rank;
      std::size_t most = 0, steps = 0;
      for (end = c; end < k.first + k.count && times.cells[end].rank == rank; ++end)
        most = std::max(most, times.cells[end].count);
      for (std::size_t s = 0; s < job.steps.size(); ++s)
        steps += speeds.known[rank * speeds.steps + s] != 0;
      for (std::size_t run = 0; run < most; ++run) {
        runs.clear();
        for (std::size_t i = c; i < end; ++i) {
          const KernelCell& cell = times.cells[i];
          if (run >= cell.count) continue;
          const double excess = speeds.excess[rank * speeds.steps + cell.step];
          runs.push_back(double(times.logs[cell.first + run]) - (slow[rank] != 0 ? excess : 0));
        }
        const double share =
            static_cast<double>(runs.size()) / static_cast<double>(std::max(steps, runs.size()));
        out[rank] += share * std::exp(undisturbed(runs));
      }
    }
  }
  return out;
}

[[nodiscard]] inline std::vector<Verdict> find_stage_imbalance(const Trace& trace,
                                                               const JobLayout& job,
                                                               const KernelTimes& times,
                                                               const RankSpeeds& speeds,
                                                               const DiagnoseOptions& options) {
  std::vector<Verdict> out;
  std::map<std::int32_t, std::size_t> stages;  // ranks with kernels
  for (std::size_t r = 0; r < job.ranks(); ++r) {
    if (speeds.present(r)) ++stages[job.stage[r]];
  }
  if (stages.size() < 2) return out;

  // Work of each stage in each replica.
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<double>> work;
  const std::vector<double> of_rank = work_of_ranks(job, times, speeds);
  for (std::size_t r = 0; r < job.ranks(); ++r) {
    if (of_rank[r] > 0) work[{job.replica[r], job.stage[r]}].push_back(of_rank[r]);
  }
  std::map<std::int32_t, std::vector<double>> excess, spent;
  for (const auto& [at, values] : work) {
    std::vector<double> own = values, others;
    for (const auto& [stage, ranks] : stages) {
      const auto other = work.find({at.first, stage});
      if (stage == at.second || other == work.end()) continue;
      std::vector<double> theirs = other->second;
      others.push_back(lower_median(theirs));
    }
    if (others.empty()) continue;
    const double mine = lower_median(own), standard = lower_median(others);
    excess[at.second].push_back(mine / standard);
    spent[at.second].push_back(mine - standard);
  }
  for (auto& [stage, ratios] : excess) {
    const double ratio = lower_median(ratios);
    if (ratio < options.stage_imbalance) continue;
    Verdict v;
    v.what = VerdictClass::stage_imbalance;
    v.stages = {stage};
    v.factor = ratio;
    v.confidence = std::min(0.99, 0.5 + (ratio - 1) * 2);
    v.cost_per_step = static_cast<Nanoseconds>(lower_median(spent[stage]));
    v.evidence.push_back(sentence(
        "stage ", stage, " computes ", figure(ratio), " times as long as the other stages: ",
        milliseconds(static_cast<double>(v.cost_per_step)), " a step more"));
    v.evidence.push_back(
        stages[stage] == 1
            ? std::string("its only rank has no peer: more work and a slow GPU look alike")
            : sentence("all ", stages[stage], " ranks of the stage do, so no GPU is to blame"));
    std::string surplus = surplus_kernel(trace, job, times, stage);
    if (!surplus.empty()) v.evidence.push_back(std::move(surplus));
    out.push_back(std::move(v));
  }
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
