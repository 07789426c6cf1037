/// @file  Data imbalance: kernels of a whole replica vary from micro-batch to micro-batch, forward
/// and backward of the same micro-batch together, and in other ways each step.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/common_load.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/rank_speeds.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// Nothing, or one verdict.
[[nodiscard]] inline std::vector<Verdict> find_data_imbalance(const JobLayout& job,
                                                              const KernelTimes& times,
                                                              const RankSpeeds& speeds,
                                                              const CommonLoad& load,
                                                              const DiagnoseOptions& options) {
  const std::size_t steps = job.steps.size();
  if (steps < 3) return {};  // that the load varies cannot be seen
  double variation = 0;
  std::vector<double> affected(job.ranks() * steps, 0), all(job.ranks() * steps, 0);
  for (const Kernel& k : times.kernels) {
    variation = std::max(variation, k.variation);
    for (std::size_t c = k.first; c < k.first + k.count; ++c) {
      const KernelCell& cell = times.cells[c];
      const std::size_t at = cell.rank * steps + cell.step;
      const bool slow = speeds.slow(cell.rank, cell.step);
      const double total = cell.total / (slow ? std::exp(speeds.excess[at]) : 1);
      all[at] += total;
      if (k.variation > options.data_variation) affected[at] += total;
    }
  }
  if (variation <= options.data_variation) return {};
  // Time of a replica in a step: of its slowest stage.
  double cost = 0, mean_all = 0;
  std::size_t counted = 0;
  std::map<std::int32_t, std::size_t> slowest;
  for (std::size_t s = 0; s < steps; ++s) {
    std::map<std::int32_t, std::pair<double, double>> replicas;  // affected, all
    for (std::size_t r = 0; r < job.ranks(); ++r) {
      auto& [a, b] = replicas[job.replica[r]];
      if (all[r * steps + s] > b) b = all[r * steps + s], a = affected[r * steps + s];
    }
    if (replicas.size() < 2) continue;
    double most = 0, sum = 0, sum_all = 0;
    std::int32_t who = -1;
    for (const auto& [replica, time] : replicas) {
      if (time.first > most) most = time.first, who = replica;
      sum += time.first;
      sum_all += time.second;
    }
    const auto n = static_cast<double>(replicas.size());
    cost += most - sum / n;
    mean_all += sum_all / n;
    ++slowest[who];
    ++counted;
  }
  if (counted == 0 || cost < options.data_cost * mean_all) return {};
  Verdict v;
  v.what = VerdictClass::data_imbalance;
  v.cost_per_step = static_cast<Nanoseconds>(cost / static_cast<double>(counted));
  v.factor = 1 + cost / mean_all;
  v.confidence = std::min(0.99, 0.5 + 3 * variation);
  v.evidence.push_back(sentence("work varies by ", figure(100 * variation),
                                " % from micro-batch to micro-batch: durations of different passes "
                                "over the same one correlate by ",
                                figure(load.correlation), ", over others nearer in time by ",
                                figure(load.neighbours)));
  v.evidence.push_back(sentence("the slowest replica computes ",
                                milliseconds(static_cast<double>(v.cost_per_step)),
                                " a step longer than the mean one; ", slowest.size(),
                                " different replicas were the slowest in ", counted, " steps"));
  return {std::move(v)};
}

}  // namespace mega::inline v0::scan::verdicts
