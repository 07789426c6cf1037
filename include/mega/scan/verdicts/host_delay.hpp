/// @file  Host delay: the device was ready before the launch came, or, where launches are not
/// recorded, a rank begins its steps later than its peers.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/align.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// From the end of a rank's step to the begin of its next one, in ns, by rank and step; negative
/// where it is not known. Only of ranks without launches, which say more.
///
/// No longer than since the first of the ranks at its place of the pipeline began, where clocks
/// agree: who has ended early, and then waits with the others for the last one, is not late. Where
/// steps between were not recorded that is all there is.
[[nodiscard]] inline std::vector<double> measure_pauses(const Trace& trace, const JobLayout& job,
                                                        const Alignment& alignment) {
  struct Span {
    Nanoseconds begin = std::numeric_limits<Nanoseconds>::max();
    Nanoseconds end = std::numeric_limits<Nanoseconds>::min();
  };
  const std::size_t steps = job.steps.size();
  std::vector<Span> spans(job.ranks() * steps);
  std::vector<char> launches(job.ranks(), 0);
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    if (e.launch != none) launches[trace.rank_index(e)] = 1;
    const std::size_t step = job.step_index(e.step);
    if (e.kind != EventKind::iteration || step == JobLayout::no_step) continue;
    Span& span = spans[trace.rank_index(e) * steps + step];
    span.begin = std::min(span.begin, e.begin);
    span.end = std::max(span.end, e.end);
  }
  const auto is_known = [](const Span& span) { return span.end > span.begin; };
  const auto begin = [&](std::size_t r, std::size_t s) {
    return alignment.at(static_cast<TableIndex>(r), spans[r * steps + s].begin);
  };
  std::map<std::pair<std::int32_t, std::size_t>, std::pair<Nanoseconds, std::size_t>> first;
  for (std::size_t r = 0; r < job.ranks() && alignment.aligned(); ++r) {
    for (std::size_t s = 0; s < steps; ++s) {
      if (!is_known(spans[r * steps + s])) continue;
      auto& [earliest, ranks] = first.try_emplace({job.stage[r], s}, begin(r, s), 0).first->second;
      earliest = std::min(earliest, begin(r, s));
      ++ranks;
    }
  }
  std::vector<double> out(spans.size(), -1);
  for (std::size_t r = 0; r < job.ranks(); ++r) {
    for (std::size_t s = 1; s < steps && launches[r] == 0; ++s) {
      const Span &before = spans[r * steps + s - 1], &now = spans[r * steps + s];
      if (!is_known(before) || !is_known(now)) continue;
      std::optional<Nanoseconds> pause;
      if (job.steps[s] == job.steps[s - 1] + 1)
        pause = std::max<Nanoseconds>(0, now.begin - before.end);
      if (const auto peers = first.find({job.stage[r], s});
          peers != first.end() && peers->second.second > 1) {
        const Nanoseconds late = begin(r, s) - peers->second.first;
        pause = std::min(pause.value_or(late), late);
      }
      if (pause) out[r * steps + s] = static_cast<double>(*pause);
    }
  }
  return out;
}

/// Ranks that pause longer before their steps than their peers, and each time: a thread that waits
/// for a processor does so now and then.
[[nodiscard]] inline std::vector<Verdict> find_late_steps(const Trace& trace, const JobLayout& job,
                                                          const Alignment& alignment,
                                                          const DiagnoseOptions& options) {
  const std::size_t ranks = job.ranks(), steps = job.steps.size();
  const std::vector<double> pauses = measure_pauses(trace, job, alignment);
  std::vector<double> own, least;
  for (std::size_t r = 0; r < ranks; ++r) {
    own.clear();
    for (std::size_t s = 0; s < steps; ++s) {
      if (pauses[r * steps + s] >= 0) own.push_back(pauses[r * steps + s]);
    }
    if (!own.empty()) least.push_back(undisturbed(own));
  }
  // What all ranks pause, as between steps, is no rank's fault.
  if (least.size() < 2) return {};
  const double usual = lower_median(least);
  Figures late(ranks, std::vector<std::optional<double>>(steps));
  for (std::size_t i = 0; i < pauses.size(); ++i) {
    if (pauses[i] >= 0) late[i / steps][i % steps] = pauses[i] - usual;
  }
  const std::vector<Onset> onsets =
      find_outliers(late, options.host_share * static_cast<double>(job.step_time));
  std::vector<Verdict> out;
  for (std::size_t r = 0; r < ranks; ++r) {
    const Onset& o = onsets[r];
    if (!o.lasts()) continue;
    Verdict v;
    v.what = VerdictClass::host_delay;
    v.ranks = {job.number[r]};
    v.stages = {job.stage[r]};
    v.since_step = job.steps[o.first];
    v.cost_per_step = static_cast<Nanoseconds>(o.level);
    v.factor = 1 + o.level / std::max(1.0, static_cast<double>(job.step_time));
    v.confidence = 0.9;
    v.evidence.push_back(sentence("rank ", job.number[r], " pauses ", milliseconds(o.level),
                                  " longer before its steps than its peers, in ", o.slow, " of ",
                                  o.known, " steps, and nothing is recorded of what it does then"));
    out.push_back(std::move(v));
  }
  return out;
}

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
  const auto launching = std::count(has.begin(), has.end(), 1);
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
    // What every rank of the job would pause is not known.
    v.alone = launching < 2;
    v.confidence = v.alone ? 0.5 : 0.95;
    v.evidence.push_back(
        sentence("the device of rank ", job.number[r], " was ready ", milliseconds(o.level),
                 " before its operations were launched, in ", o.slow, " of ", o.known, " steps; ",
                 v.alone ? std::string("there is no other rank to say whether that is usual")
                         : sentence("its peers wait ", milliseconds(usual[o.first]))));
    out.push_back(std::move(v));
  }
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
