/// @file  Study: a trace and everything that is found in it, in one call.
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/critical_path.hpp>
#include <mega/scan/delay_cost.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/hang.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/replay.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/wait_states.hpp>
#include <mega/scan/what_if.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <future>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// One kind of event of the whole job.
struct NameTotal {
  TableIndex name = none;  ///< into Trace::names
  EventKind kind = EventKind::other;
  std::int64_t count = 0;
  Nanoseconds total = 0;
};

/// The steps but the first ones, as long as these take more than three times the usual one: loading
/// modules and choosing algorithms is set-up, and no rank's fault. All where fewer than four
/// remain. Cost: one pass over the events.
[[nodiscard]] inline std::vector<std::int32_t> steps_after_set_up(const Trace& trace,
                                                                  const DependencyGraph& graph) {
  std::map<std::pair<std::int32_t, TableIndex>, std::pair<Nanoseconds, Nanoseconds>> extents;
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    if (e.step < 0) continue;
    const auto [at, is_new] =
        extents.try_emplace({e.step, trace.rank_index(e)}, std::pair(e.begin, e.end));
    auto& [begin, end] = at->second;
    begin = std::min(begin, e.begin);
    end = std::max(end, e.end);
  }
  std::map<std::int32_t, Nanoseconds> longest;
  for (const auto& [key, extent] : extents) {
    Nanoseconds& length = longest[key.first];
    length = std::max(length, extent.second - extent.first);
  }
  std::vector<Nanoseconds> lengths;
  for (const std::int32_t step : graph.steps) lengths.push_back(longest[step]);
  std::vector<Nanoseconds> sorted = lengths;
  std::sort(sorted.begin(), sorted.end());
  std::size_t first = 0;
  while (first + 4 < lengths.size() && lengths[first] > 3 * sorted[sorted.size() / 2]) ++first;
  return {graph.steps.begin() + static_cast<std::ptrdiff_t>(first), graph.steps.end()};
}

/// Without set-up; nothing where no steps with device work are known, or where places are lost and
/// with them who waited for whom.
[[nodiscard]] inline std::optional<WhatIf> what_if_of(const Trace& trace,
                                                      const DependencyGraph& graph) {
  if (graph.steps.empty() || trace.lost_places() > 0) return std::nullopt;
  WhatIfOptions options;
  options.steps = steps_after_set_up(trace, graph);
  WhatIf out = what_if(trace, graph, options);
  return out.ideal_ns > 0 ? std::optional(std::move(out)) : std::nullopt;
}

/// What a trace says, each part made from those before it.
struct Study {
  Trace trace;
  Matches matches;
  Alignment alignment;
  WaitReport waits;
  DelayCosts delays;
  Diagnosis diagnosis;
  HangReport hang;
  CriticalPath critical_path;     ///< empty where the clocks are not aligned
  std::optional<WhatIf> what_if;  ///< nothing where no steps, no ranks of one job, or no times of
                                  ///< what they did together are known

  /// What follows from waits and what follows from dependencies is found at the same time.
  explicit Study(Trace given)
      : trace(std::move(given)), matches(match(trace)), alignment(align(trace, matches)) {
    auto replayed = std::async(std::launch::async, [this] {
      const DependencyGraph graph = build_dependencies(trace, matches, alignment);
      if (alignment.aligned()) critical_path = find_critical_path(trace, graph);
      if (!are_strangers(trace, matches) && are_timed(trace, matches, alignment))
        what_if = what_if_of(trace, graph);
    });
    waits = find_waits(trace, matches, alignment);
    delays = find_delay_costs(trace, matches, waits);
    diagnosis = diagnose(trace, matches, alignment, waits, delays);
    hang = find_hang(trace);
    adopt_hang();
    replayed.get();
  }

  /// Earliest begin and latest end of all events, aligned; {0, 0} of an empty trace.
  [[nodiscard]] std::pair<Nanoseconds, Nanoseconds> extent() const {
    std::pair<Nanoseconds, Nanoseconds> out{0, 0};
    for (std::size_t i = 0; i < trace.events.size(); ++i) {
      const Event& e = trace.events[i];
      const TableIndex rank = trace.rank_index(e);
      const Nanoseconds begin = alignment.at(rank, e.begin), end = alignment.at(rank, e.end);
      if (i == 0) out = {begin, end};
      out = {std::min(out.first, begin), std::max(out.second, end)};
    }
    return out;
  }

 private:
  /// Dumps of a runtime hold counters instead of spans; what they say is a verdict, too.
  void adopt_hang() {
    if (!hang.hung || hang.suspects.empty()) return;
    for (const Verdict& v : diagnosis.verdicts) {
      if (v.what == VerdictClass::hang) return;
    }
    Verdict found;
    found.what = VerdictClass::hang;
    found.ranks = hang.suspects;
    found.confidence = hang.notes.empty() ? 0.9 : 0.6;
    found.evidence = hang.evidence;
    diagnosis.verdicts.insert(diagnosis.verdicts.begin(), std::move(found));
  }
};

/// Time by name and kind, the most first.
/// Cost: one pass over the events.
[[nodiscard]] inline std::vector<NameTotal> totals_by_name(const Trace& trace) {
  std::map<std::pair<TableIndex, EventKind>, NameTotal> totals;
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    NameTotal& t = totals[{e.name, e.kind}];
    t.name = e.name;
    t.kind = e.kind;
    ++t.count;
    t.total += e.duration();
  }
  std::vector<NameTotal> out;
  for (const auto& [key, total] : totals) out.push_back(total);
  std::stable_sort(out.begin(), out.end(),
                   [](const NameTotal& a, const NameTotal& b) { return a.total > b.total; });
  return out;
}

}  // namespace mega::inline v0::scan
