/// @file  RankSpeeds: how much longer the kernels of each rank take in each step than the same
/// kernels of its peers.
#pragma once
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

struct RankSpeeds {
  std::size_t steps = 0;
  std::vector<double> excess;    ///< [rank][step]: logarithm of the factor; 0 where not known
  std::vector<char> known;       ///< [rank][step]
  std::vector<char> with_stage;  ///< [rank]: slow as all ranks of its stage are
  std::vector<double> usual;     ///< [rank]: share of steps in which its peers are slow
  double limit = 0;              ///< of excess, above which a rank is slow in a step
  double flicker = 0;            ///< standard deviation of excess from step to step
  double significance = 0;       ///< times the standard error, that a level must be

  [[nodiscard]] Onset onset(std::size_t rank) const {
    return find_lasting(
        steps, [&](std::size_t s) { return excess[rank * steps + s]; },
        [&](std::size_t s) { return known[rank * steps + s] != 0; }, limit,
        usual.empty() ? 0 : usual[rank]);
  }
  [[nodiscard]] bool present(std::size_t rank) const {
    const auto from = known.begin() + static_cast<std::ptrdiff_t>(rank * steps);
    return std::find(from, from + static_cast<std::ptrdiff_t>(steps), 1) !=
           from + static_cast<std::ptrdiff_t>(steps);
  }
  /// Slow for good: what flickers from step to step, as where ranks share processors, is noise, and
  /// so is the mean of as many such steps.
  [[nodiscard]] bool lasts(const Onset& o) const {
    return o.lasts() && o.level * std::sqrt(static_cast<double>(o.slow)) > significance * flicker;
  }
  /// The rank itself, and not its whole stage, is slow in the step.
  [[nodiscard]] bool slow(std::size_t rank, std::size_t step) const {
    const std::size_t at = rank * steps + step;
    return with_stage[rank] == 0 && known[at] != 0 && excess[at] > limit;
  }
};

/// What a cell's runs say of its rank: a figure of the logarithms of their durations.
struct CellFigure {
  double KernelCell::*of_cell;
  double Kernel::*usual;                    ///< the same of the kernel
  double (*of_logs)(std::vector<double>&);  ///< how it is found; reorders them
};

/// How much longer a kernel takes on each rank and in each step.
struct Shift {
  TableIndex rank, step;
  double shift;      ///< logarithm of the factor
  std::size_t runs;  ///< that were compared
};

/// Shifts of a kernel whose load varies. The load is common to a replica, so that only its members
/// are peers, and to a micro-batch, so that only the same run of theirs is: in a step, one rank may
/// have run beside NCCL's kernels in other micro-batches than another.
[[nodiscard]] inline std::vector<Shift> shifts_beneath_load(const KernelTimes& times,
                                                            const JobLayout& job, const Kernel& k,
                                                            const CellFigure& figure) {
  struct Run {
    std::int32_t replica;
    TableIndex step;
    std::int32_t microbatch;
    std::size_t at,
        of;  // the how-many-eth of the micro-batch, or, where it is unknown, of how many
    std::size_t cell;
    double log;
    [[nodiscard]] auto load() const { return std::tie(replica, step, microbatch, of, at); }
  };
  std::vector<Run> runs;
  std::map<std::int32_t, std::size_t> seen;
  for (std::size_t c = k.first; c < k.first + k.count; ++c) {
    const KernelCell& cell = times.cells[c];
    seen.clear();
    for (std::size_t i = cell.first; i < cell.first + cell.count; ++i) {
      const std::int32_t microbatch = times.microbatches[i];
      const std::size_t at = seen[microbatch]++;
      if (times.alone[i] == 0) continue;
      runs.push_back({job.replica[cell.rank], cell.step, microbatch, at,
                      microbatch < 0 ? cell.count : 0, c, static_cast<double>(times.logs[i])});
    }
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return a.load() != b.load() ? a.load() < b.load() : a.cell < b.cell;
  });
  std::vector<std::vector<double>> of_cells(k.count);  // what is left of each when the load is out
  std::vector<double> logs;
  for (std::size_t i = 0, end = i; i < runs.size(); i = end) {
    logs.clear();
    for (; end < runs.size() && runs[end].load() == runs[i].load(); ++end)
      logs.push_back(runs[end].log);
    if (logs.size() < 2) continue;
    const double load = central_value(logs);
    for (std::size_t run = i; run < end; ++run)
      of_cells[runs[run].cell - k.first].push_back(runs[run].log - load);
  }
  std::map<std::pair<std::int32_t, TableIndex>, std::vector<double>> members;  // replica, step
  std::vector<Shift> out;
  for (std::size_t c = 0; c < of_cells.size(); ++c) {
    if (of_cells[c].empty()) continue;
    const KernelCell& cell = times.cells[k.first + c];
    const double own = figure.of_logs(of_cells[c]);
    members[{job.replica[cell.rank], cell.step}].push_back(own);
    out.push_back({cell.rank, cell.step, own, of_cells[c].size()});
  }
  std::map<std::pair<std::int32_t, TableIndex>, double> standards;
  for (auto& [at, all] : members) standards[at] = lower_median(all);
  for (Shift& s : out) s.shift -= standards[{job.replica[s.rank], s.step}];
  return out;
}

/// Median over the kernels of a rank, each with the weight of its time.
inline void measure_shift(RankSpeeds& speeds, const KernelTimes& times, const JobLayout& job,
                          const DiagnoseOptions& options, const CellFigure& figure) {
  struct Vote {
    double shift, weight;
  };
  std::vector<std::vector<Vote>> votes(job.ranks() * speeds.steps);
  for (const Kernel& k : times.kernels) {
    const auto vote = [&](const Shift& s) {
      const double time = std::exp(k.*figure.usual + s.shift) * static_cast<double>(s.runs);
      votes[s.rank * speeds.steps + s.step].push_back({s.shift, time});
    };
    if (k.variation > options.data_variation) {
      for (const Shift& s : shifts_beneath_load(times, job, k, figure)) vote(s);
      continue;
    }
    for (std::size_t c = k.first; c < k.first + k.count; ++c) {
      const KernelCell& cell = times.cells[c];
      if (cell.alone > 0)
        vote({cell.rank, cell.step, cell.*figure.of_cell - k.*figure.usual, cell.alone});
    }
  }
  for (std::size_t i = 0; i < votes.size(); ++i) {
    std::vector<Vote>& own = votes[i];
    if (own.empty()) continue;
    std::sort(own.begin(), own.end(),
              [](const Vote& a, const Vote& b) { return a.shift < b.shift; });
    double all = 0, sum = 0;
    for (const Vote& v : own) all += v.weight;
    std::size_t at = 0;
    while (at + 1 < own.size() && (sum += own[at].weight) < all / 2) ++at;
    speeds.excess[i] = own[at].shift;
    speeds.known[i] = 1;
  }
}

/// Of what kernels take when nothing delays them.
inline void measure_excess(RankSpeeds& speeds, const KernelTimes& times, const JobLayout& job,
                           const DiagnoseOptions& options) {
  measure_shift(speeds, times, job, options,
                {&KernelCell::alone_least, &Kernel::least, &undisturbed<double>});
}

/// Of what they usually take: sees a rank, too, that is in something's way most of the time.
inline void measure_usual_excess(RankSpeeds& speeds, const KernelTimes& times, const JobLayout& job,
                                 const DiagnoseOptions& options) {
  measure_shift(speeds, times, job, options,
                {&KernelCell::alone_middle, &Kernel::middle, &lower_median<double>});
}

/// What all ranks suffer from in a step, as where their processors are shared with other programs,
/// is no rank's slowness: the lower median over the ranks is taken out.
inline void remove_common_slowness(RankSpeeds& speeds) {
  std::vector<double> ranks;
  for (std::size_t s = 0; s < speeds.steps; ++s) {
    ranks.clear();
    for (std::size_t i = s; i < speeds.excess.size(); i += speeds.steps) {
      if (speeds.known[i] != 0) ranks.push_back(speeds.excess[i]);
    }
    if (ranks.size() < 2) continue;
    const double common = std::max(0.0, lower_median(ranks));
    for (std::size_t i = s; i < speeds.excess.size(); i += speeds.steps) {
      if (speeds.known[i] != 0) speeds.excess[i] -= common;
    }
  }
}

/// From the differences between successive steps of each rank, which a rank that is slow throughout
/// has like any other.
inline double measure_flicker(const RankSpeeds& speeds) {
  std::vector<double> changes;
  for (std::size_t i = 1; i < speeds.excess.size(); ++i) {
    if (i % speeds.steps != 0 && speeds.known[i] != 0 && speeds.known[i - 1] != 0)
      changes.push_back(speeds.excess[i] - speeds.excess[i - 1]);
  }
  return spread_around(changes, 0) / std::sqrt(2.0);
}

/// All ranks of a stage slow alike are not as many faults: the stage's kernels are longer.
inline void excuse_stages(RankSpeeds& speeds, const JobLayout& job) {
  std::map<std::int32_t, std::vector<std::size_t>> stages;
  for (std::size_t r = 0; r < job.ranks(); ++r) {
    if (speeds.present(r)) stages[job.stage[r]].push_back(r);
  }
  if (stages.size() < 2) return;
  for (const auto& [stage, ranks] : stages) {
    std::vector<double> levels;
    for (const std::size_t r : ranks) {
      const Onset o = speeds.onset(r);
      if (speeds.lasts(o)) levels.push_back(o.level);
    }
    if (levels.size() < ranks.size()) continue;
    const auto [least, most] = std::minmax_element(levels.begin(), levels.end());
    if (*most - *least > 0.25 * *most) continue;
    for (const std::size_t r : ranks) speeds.with_stage[r] = 1;
  }
}

/// Sum of the kernels of a rank against what as many of its peers' take. Other than the median it
/// sees a GPU that something else takes away now and then: most kernels are as long as ever, some
/// last many times as long.
inline void measure_excess_in_sum(RankSpeeds& speeds, const KernelTimes& times,
                                  const JobLayout& job, const DiagnoseOptions& options) {
  std::vector<double> actual(job.ranks() * speeds.steps, 0), expected(actual), of_steps, means;
  for (const Kernel& k : times.kernels) {
    if (k.variation > options.data_variation) continue;
    means.clear();
    for (std::size_t c = k.first; c < k.first + k.count;) {
      const TableIndex rank = times.cells[c].rank;
      of_steps.clear();
      for (; c < k.first + k.count && times.cells[c].rank == rank; ++c) {
        const KernelCell& cell = times.cells[c];
        if (cell.alone > 0) of_steps.push_back(cell.alone_total / static_cast<double>(cell.alone));
      }
      if (!of_steps.empty()) means.push_back(lower_median(of_steps));
    }
    if (means.size() < 2) continue;
    const double usual = lower_median(means);
    for (std::size_t c = k.first; c < k.first + k.count; ++c) {
      const KernelCell& cell = times.cells[c];
      const std::size_t at = cell.rank * speeds.steps + cell.step;
      actual[at] += cell.alone_total;
      expected[at] += usual * static_cast<double>(cell.alone);
    }
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!(expected[i] > 0)) continue;
    speeds.excess[i] = std::log(actual[i] / expected[i]);
    speeds.known[i] = 1;
  }
}

using MeasureExcess = void(RankSpeeds&, const KernelTimes&, const JobLayout&,
                           const DiagnoseOptions&);

/// @param least  factor below which no rank is slow
[[nodiscard]] inline RankSpeeds measure_rank_speeds(const KernelTimes& times, const JobLayout& job,
                                                    const DiagnoseOptions& options,
                                                    MeasureExcess& measure, double least) {
  RankSpeeds out;
  out.steps = job.steps.size();
  out.excess.assign(job.ranks() * out.steps, 0);
  out.known.assign(job.ranks() * out.steps, 0);
  out.with_stage.assign(job.ranks(), 0);
  measure(out, times, job, options);
  remove_common_slowness(out);
  std::vector<double> all;
  for (std::size_t i = 0; i < out.excess.size(); ++i) {
    if (out.known[i] != 0) all.push_back(out.excess[i]);
  }
  if (all.empty()) return out;
  std::vector<double> copy = all;
  const double middle = lower_median(copy);
  // The spread is that of healthy ranks while most are: a wide one raises the limit, but not so far
  // that many slow ranks could hide behind each other.
  out.limit = std::max(std::log(least),
                       middle + options.significance * std::min(0.05, spread_around(all, middle)));
  out.flicker = measure_flicker(out);
  out.significance = options.significance;
  Figures figures(job.ranks(), std::vector<std::optional<double>>(out.steps));
  for (std::size_t i = 0; i < out.excess.size(); ++i) {
    if (out.known[i] != 0) figures[i / out.steps][i % out.steps] = out.excess[i];
  }
  for (const UsualFigures& usual : find_usual(figures, out.limit)) out.usual.push_back(usual.share);
  excuse_stages(out, job);
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
