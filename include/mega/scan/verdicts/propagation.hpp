/// @file  Propagation: over which ranks the waiting for a culprit spreads.
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/wait_states.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// Fills Verdict::path: from each culprit to the rank that waited longest for it, and on.
inline void trace_paths(std::vector<Verdict>& verdicts, const Trace& trace,
                        const WaitReport& waits) {
  std::map<std::int32_t, std::map<std::int32_t, double>> edges;
  for (const WaitState& w : waits.waits) {
    const std::int32_t waiter =
        trace.rank(trace.events[trace.communications[w.communication].event]);
    edges[trace.ranks[w.culprit].rank][waiter] += static_cast<double>(w.wait);
  }
  for (Verdict& v : verdicts) {
    if (v.ranks.size() != 1) continue;
    v.path = v.ranks;
    double first = 0;
    while (v.path.size() < 5) {
      std::int32_t next = -1;
      double most = 0;
      for (const auto& [waiter, time] : edges[v.path.back()]) {
        if (time <= most || std::find(v.path.begin(), v.path.end(), waiter) != v.path.end())
          continue;
        most = time;
        next = waiter;
      }
      if (first == 0) first = most;
      if (next < 0 || most < 0.05 * first) break;
      v.path.push_back(next);
    }
  }
}

}  // namespace mega::inline v0::scan::verdicts
