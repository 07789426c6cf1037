/// @file  Lost places: ranks whose stages the files no longer say are compared across stages.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/job_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// What would be slow GPUs among ranks of one stage may be stages with more work: one verdict in
/// place of theirs says who differs, the dearest first, and accuses nobody.
inline void doubt_slow_gpus(std::vector<Verdict>& verdicts, const JobLayout& job) {
  if (job.lost_places == 0) return;
  const auto first = std::stable_partition(verdicts.begin(), verdicts.end(), [](const Verdict& v) {
    return v.what != VerdictClass::slow_gpu;
  });
  if (first == verdicts.end()) return;
  std::stable_sort(first, verdicts.end(), [](const Verdict& a, const Verdict& b) {
    return a.cost_per_step > b.cost_per_step;
  });
  constexpr std::size_t most = 4;
  Verdict out;
  out.factor = first->factor;
  out.cost_per_step = first->cost_per_step;
  std::size_t told = 0;
  for (auto v = first; v != verdicts.end(); ++v) {
    out.ranks.insert(out.ranks.end(), v->ranks.begin(), v->ranks.end());
    out.factor = std::min(out.factor, v->factor);
    if (told++ < most && !v->evidence.empty()) out.evidence.push_back(v->evidence.front());
  }
  std::sort(out.ranks.begin(), out.ranks.end());
  out.evidence.push_back(
      sentence("the stages of ", job.lost_places, " of ", job.ranks(),
               " ranks are not known, so these may be stages with more work as well as slow GPUs"));
  out.confidence = 0.3;
  verdicts.erase(first, verdicts.end());
  verdicts.push_back(std::move(out));
}

}  // namespace mega::inline v0::scan::verdicts
