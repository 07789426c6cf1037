/// @file  Compares a diagnosis with the faults that a synthetic job was given.
#pragma once
#include "scan_generator.hpp"
#include <mega/scan/diagnose.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mega_test {

[[nodiscard]] inline std::string name_of(const Fault& f) {
  switch (f.kind) {
    case FaultKind::slow_gpu: return "slow GPU";
    case FaultKind::slow_edge: return "slow link of a pair";
    case FaultKind::slow_links: return "slow links of a rank";
    case FaultKind::stage_imbalance: return "stage imbalance";
    case FaultKind::data_imbalance: return "data imbalance";
    case FaultKind::late_host: return f.variant ? "late host, stalls" : "late host, slow";
    case FaultKind::hang: return f.variant ? "hang, file missing" : "hang";
  }
  return "unknown";
}

[[nodiscard]] inline std::string describe(const JobSpec& s) {
  std::string out = "dp " + std::to_string(s.dp) + " tp " + std::to_string(s.tp) + " pp " +
                    std::to_string(s.pp) + " layers " + std::to_string(s.layers) + " mb " +
                    std::to_string(s.microbatches) + " steps " + std::to_string(s.steps) +
                    " noise " + std::to_string(s.noise);
  for (const Fault& f : s.faults) {
    out += "; " + name_of(f) + " rank " + std::to_string(f.rank) + " peer " +
           std::to_string(f.peer) + " stage " + std::to_string(f.stage) + " factor " +
           std::to_string(f.factor) + " from " + std::to_string(f.from_step) +
           (f.variant ? " variant" : "");
  }
  return s.faults.empty() ? out + "; healthy" : out;
}

/// Whether the verdict names this fault: its class and exactly its culprit.
[[nodiscard]] inline bool names(const JobSpec& s, const mega::scan::Verdict& v, const Fault& f) {
  using mega::scan::VerdictClass;
  const std::vector<std::int32_t> rank{f.rank};
  switch (f.kind) {
    case FaultKind::slow_gpu:
      // Two ranks in all: that one of them is slow is all that can be known.
      if (v.what == VerdictClass::ambiguous && s.dp == 2 && s.ranks() == 2)
        return std::find(v.ranks.begin(), v.ranks.end(), f.rank) != v.ranks.end();
      return v.what == VerdictClass::slow_gpu && v.ranks == rank;
    case FaultKind::slow_edge:
      return v.what == VerdictClass::slow_link &&
             v.ranks ==
                 std::vector<std::int32_t>{std::min(f.rank, f.peer), std::max(f.rank, f.peer)};
    case FaultKind::slow_links: return v.what == VerdictClass::slow_link && v.ranks == rank;
    case FaultKind::stage_imbalance:
      return v.what == VerdictClass::stage_imbalance &&
             v.stages == std::vector<std::int32_t>{f.stage};
    case FaultKind::data_imbalance:
      return v.what == VerdictClass::data_imbalance && v.ranks.empty();
    case FaultKind::late_host: return v.what == VerdictClass::host_delay && v.ranks == rank;
    case FaultKind::hang: return v.what == VerdictClass::hang && v.ranks == rank;
  }
  return false;
}

struct Score {
  std::vector<bool> found;  ///< by fault
  std::size_t false_accusations = 0;

  [[nodiscard]] bool right() const {
    return false_accusations == 0 &&
           std::all_of(found.begin(), found.end(), [](bool b) { return b; });
  }
};

[[nodiscard]] inline Score score_of(const JobSpec& s, const mega::scan::Diagnosis& d) {
  Score out;
  out.found.assign(s.faults.size(), false);
  for (const mega::scan::Verdict& v : d.verdicts) {
    bool meant = false;
    for (std::size_t f = 0; f < s.faults.size(); ++f) {
      if (!names(s, v, s.faults[f])) continue;
      meant = true;
      out.found[f] = true;
    }
    out.false_accusations += meant ? 0 : 1;
  }
  return out;
}

}  // namespace mega_test
