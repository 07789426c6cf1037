/// @file  Host delay: the device was ready before the launch came.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {
[[nodiscard]] inline std::vector<Verdict> find_late_hosts(const Trace& trace, const JobLayout& job,
                                                          const DiagnoseOptions& options) {
  std::vector<Verdict> out;
  const std::size_t ranks = job.ranks();
  const std::size_t steps = job.steps.size();
  // Time for which the device was ready and the launch had not come: by rank and step.
  std::vector<double> late(ranks * steps, 0);
  std::vector<char> has(ranks, 0);
  std::vector<std::vector<TableIndex>> of_rank(ranks);
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    if (is_device_work(e)) of_rank[trace.rank_index(e)].push_back(static_cast<TableIndex>(i));
  }
  std::vector<Nanoseconds> ends;
  for (std::size_t r = 0; r < ranks; ++r) {
    ends.clear();
    for (const TableIndex i : of_rank[r]) ends.push_back(trace.events[i].end);
    std::sort(ends.begin(), ends.end());
    std::sort(of_rank[r].begin(), of_rank[r].end(), [&](TableIndex a, TableIndex b) {
      return trace.events[a].begin < trace.events[b].begin;
    });
    Nanoseconds covered = std::numeric_limits<Nanoseconds>::min();
    for (const TableIndex i : of_rank[r]) {
      const Event& e = trace.events[i];
      const std::size_t step = job.step_index(e.step);
      if (e.launch == none || step == JobLayout::no_step) continue;
      has[r] = 1;
      const auto after = std::upper_bound(ends.begin(), ends.end(), e.begin);
      if (after == ends.begin()) continue;
      const Nanoseconds ready = std::max(*(after - 1), covered);
      const Nanoseconds launched = std::min(trace.events[e.launch].end, e.begin);
      if (launched <= ready) continue;
      late[r * steps + step] += static_cast<double>(launched - ready);
      covered = launched;
    }
  }
  // What all ranks wait for their hosts, as between steps, is no rank's fault.
  std::vector<double> usual(steps, 0);
  std::vector<double> peers;
  for (std::size_t s = 0; s < steps; ++s) {
    peers.clear();
    for (std::size_t r = 0; r < ranks; ++r) {
      if (has[r] != 0) peers.push_back(late[r * steps + s]);
    }
    if (peers.size() > 1) usual[s] = lower_median(peers);
  }
  const double limit = options.host_share * static_cast<double>(job.step_time);
  for (std::size_t r = 0; r < ranks; ++r) {
    if (has[r] == 0) continue;
    // Stalls may be rare and long: what counts is their share of the whole window.
    const Onset o = find_onset(
        steps, [&](std::size_t s) { return late[r * steps + s] - usual[s]; },
        [](std::size_t) { return true; }, limit);
    double sum = 0;
    for (std::size_t s = 0; s < steps; ++s) sum += std::max(0.0, late[r * steps + s] - usual[s]);
    const double mean = sum / static_cast<double>(steps);
    const bool first_only = o.slow == 1 && o.first == 0 && steps > 2;
    if (o.slow == 0 || first_only || mean < limit) continue;
    Verdict v;
    v.what = VerdictClass::host_delay;
    v.ranks = {job.number[r]};
    v.stages = {job.stage[r]};
    v.since_step = job.steps[o.first];
    v.cost_per_step = static_cast<Nanoseconds>(mean);
    v.factor = 1 + mean / std::max(1.0, static_cast<double>(job.step_time) - mean);
    v.confidence = 0.95;
    v.evidence.push_back(
        sentence("the device of rank ", job.number[r], " was ready ", milliseconds(o.level),
                 " before its operations were launched, in ", o.slow, " of ", o.known,
                 " steps; its peers wait ", milliseconds(usual[o.first])));
    out.push_back(std::move(v));
  }
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
