/// @file  JobLayout: which stage and replica each rank is, and the steps that can be judged.
#pragma once
#include <mega/scan/trace.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <vector>

namespace mega::inline v0::scan::verdicts {

[[nodiscard]] inline bool is_device_work(const Event& e) noexcept {
  return is_compute(e.kind) || e.kind == EventKind::communication;
}

/// By index into Trace::ranks.
struct JobLayout {
  std::vector<std::int32_t> number;          ///< global rank
  std::vector<std::int32_t> stage, replica;  ///< of the pipeline, of the data
  std::vector<std::int32_t> steps;           ///< numbers of the steps with device work, ascending
  Nanoseconds step_time = 0;                 ///< median over ranks and steps
  std::vector<std::int32_t> silent;          ///< ranks without device work, where others have some
  std::size_t lost_places = 0;  ///< ranks whose stage is lost; then no stage is told from another

  [[nodiscard]] std::size_t ranks() const noexcept { return number.size(); }
  /// Place among the steps; `no_step` where the step is not judged.
  [[nodiscard]] std::size_t step_index(std::int32_t step) const noexcept {
    const auto at = std::lower_bound(steps.begin(), steps.end(), step);
    if (at == steps.end() || *at != step) return no_step;
    return static_cast<std::size_t>(at - steps.begin());
  }
  /// Leaves this step and those behind it out.
  void end_before(std::int32_t step) {
    steps.erase(std::lower_bound(steps.begin(), steps.end(), step), steps.end());
  }

  static constexpr std::size_t no_step = ~std::size_t{0};
};

[[nodiscard]] inline JobLayout lay_out(const Trace& trace) {
  JobLayout out;
  // Where the file does not say, the ranks of a stage are as many replicas.
  std::map<std::int32_t, std::int32_t> seen;
  out.lost_places = trace.lost_places();
  for (const Rank& rank : trace.ranks) {
    out.number.push_back(rank.rank);
    out.stage.push_back(out.lost_places > 0 ? 0 : std::max(0, rank.pipeline));
    const std::int32_t place = seen[out.stage.back()]++;
    out.replica.push_back(rank.data >= 0 ? rank.data : place);
  }
  std::set<std::int32_t> steps;
  std::vector<char> works(trace.ranks.size(), 0);
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    if (!is_device_work(e)) continue;
    steps.insert(e.step);
    works[trace.rank_index(e)] = 1;
  }
  for (std::size_t r = 0; r < trace.ranks.size() && !steps.empty(); ++r) {
    if (works[r] == 0 && !trace.ranks[r].missing) out.silent.push_back(trace.ranks[r].rank);
  }
  if (steps.size() > 1) steps.erase(-1);
  out.steps.assign(steps.begin(), steps.end());

  struct Span {
    Nanoseconds begin = std::numeric_limits<Nanoseconds>::max();
    Nanoseconds end = std::numeric_limits<Nanoseconds>::min();
  };
  std::vector<Span> spans(out.ranks() * out.steps.size());
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    const std::size_t step = out.step_index(e.step);
    if (!is_device_work(e) || step == JobLayout::no_step) continue;
    Span& span = spans[trace.rank_index(e) * out.steps.size() + step];
    span.begin = std::min(span.begin, e.begin);
    span.end = std::max(span.end, e.end);
  }
  std::vector<double> lengths;
  for (const Span& span : spans) {
    if (span.end > span.begin) lengths.push_back(static_cast<double>(span.end - span.begin));
  }
  if (!lengths.empty()) out.step_time = static_cast<Nanoseconds>(lower_median(lengths));
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
