/// @file  Verdict: what makes a job slow or keeps it from ending, whose fault it is, and the
/// figures that say so. How verdicts are found is in diagnose.hpp.
#pragma once
#include <mega/scan/trace.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::scan {

enum class VerdictClass : std::uint8_t {
  slow_gpu,
  slow_link,
  stage_imbalance,
  data_imbalance,
  host_delay,
  hang,
  ambiguous,
};

[[nodiscard]] constexpr std::string_view to_string(VerdictClass c) noexcept {
  switch (c) {
    case VerdictClass::slow_gpu: return "slow_gpu";
    case VerdictClass::slow_link: return "slow_link";
    case VerdictClass::stage_imbalance: return "stage_imbalance";
    case VerdictClass::data_imbalance: return "data_imbalance";
    case VerdictClass::host_delay: return "host_delay";
    case VerdictClass::hang: return "hang";
    case VerdictClass::ambiguous: return "ambiguous";
  }
  return "unknown";
}

struct Verdict {
  VerdictClass what = VerdictClass::ambiguous;
  std::vector<std::int32_t> ranks;    ///< whose fault it is; empty where no rank is to blame
  std::vector<std::int32_t> stages;   ///< pipeline stages concerned
  double confidence = 0;              ///< in [0, 1]
  double factor = 1;                  ///< how many times slower than its peers
  bool alone = false;                 ///< it has no peers: slower than its own other steps, or
                                      ///< than without the delay
  std::int32_t since_step = -1;       ///< first step with it; -1: unknown, or the whole trace
  Nanoseconds cost_per_step = 0;      ///< time of the culprit in excess of its peers', a step
  std::vector<std::string> evidence;  ///< sentences with figures
  std::vector<std::int32_t> path;     ///< ranks, each of which waited most for the one before it
};

struct Diagnosis {
  std::vector<Verdict> verdicts;       ///< dearest first; empty: healthy
  Nanoseconds step_time = 0;           ///< median over ranks and steps
  std::vector<std::int32_t> unjudged;  ///< ranks that recorded no work, where others did
  std::vector<std::string> notes;

  [[nodiscard]] bool healthy() const noexcept { return verdicts.empty(); }
};

/// Below these an effect is not worth a verdict, or not safe to tell from noise.
struct DiagnoseOptions {
  double slow_gpu = 1.10;               ///< a rank's kernels against its peers'
  double interrupted_gpu = 1.15;        ///< the same in sum, where their typical times agree
  double slow_link = 1.40;              ///< a transfer against equal ones
  double stage_imbalance = 1.12;        ///< work of a stage against the others'
  double data_variation = 0.06;         ///< relative, common to forward and backward
  double data_cost = 0.03;              ///< of the compute time of a step
  double host_share = 0.05;             ///< of a step, by which launches or the step come late
  double significance = 6;              ///< times the spread of the healthy peers
  double least_wait_share = 0.02;       ///< of all waiting, that goes back to a verdict's ranks
  double wait_part = 0.05;              ///< of the ranks' time; less waiting needs no explanation
  Nanoseconds short_transfer = 30'000;  ///< latency; says nothing of a link's speed
  double hang_factor = 20;  ///< an operation that did not end lasted this many steps, or
  Nanoseconds hang_time = 5'000'000'000;  ///< this long
};

}  // namespace mega::inline v0::scan
