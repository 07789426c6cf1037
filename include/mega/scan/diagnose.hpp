/// @file  Diagnosis of a trace: which rank, link, stage or host makes a job slow, or why it hangs.
///
/// Every class leaves its mark in a quantity that the others leave alone, and no quantity needs
/// clocks that agree. A header of verdicts/ each says how it is told:
///   slow_gpu.hpp         every kernel of one rank takes longer than the same kernel of its peers,
///                        or their sum does
///   stage_imbalance.hpp  a stage has more work: more kernels, or longer ones on all of its ranks
///   data_imbalance.hpp   kernels of a whole replica vary from micro-batch to micro-batch
///   slow_link.hpp        the transfer itself takes longer than equal ones
///   host_delay.hpp       the device was ready before the launch came
///   pending.hpp          operations that never ended, and a member that never entered them
/// They judge what is measured once: kernel_times.hpp, common_load.hpp, rank_speeds.hpp. Who is
/// slow is asked after what all suffer from is taken out, so that several faults are found at once.
/// Where two explanations fit equally, the verdict is `ambiguous` and says between whom.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/align.hpp>
#include <mega/scan/delay_cost.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/attribution.hpp>
#include <mega/scan/verdicts/common_load.hpp>
#include <mega/scan/verdicts/data_imbalance.hpp>
#include <mega/scan/verdicts/host_delay.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/lost_places.hpp>
#include <mega/scan/verdicts/pending.hpp>
#include <mega/scan/verdicts/propagation.hpp>
#include <mega/scan/verdicts/rank_speeds.hpp>
#include <mega/scan/verdicts/slow_gpu.hpp>
#include <mega/scan/verdicts/slow_link.hpp>
#include <mega/scan/verdicts/stage_imbalance.hpp>
#include <mega/scan/wait_states.hpp>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

namespace detail {

/// With so few steps nothing can be seen to last.
inline constexpr std::size_t few_steps = 2;

/// No verdict but a hang is sure, and a note says why.
inline void doubt(Diagnosis& diagnosis, std::string why) {
  bool doubtful = false;
  for (Verdict& v : diagnosis.verdicts) {
    if (v.what == VerdictClass::hang) continue;
    v.confidence = std::min(v.confidence, 0.5);
    doubtful = true;
  }
  if (doubtful) diagnosis.notes.push_back(std::move(why));
}

/// What happened in one or two steps may be an accident of theirs.
inline void doubt_few_steps(Diagnosis& diagnosis, std::size_t steps) {
  doubt(diagnosis, sentence("the trace holds ", steps, steps == 1 ? " step" : " steps",
                            ": too few to tell what lasts from what happened once"));
}

/// That a launch came late in one or two steps matters if somebody waited for it.
inline void drop_hosts(Diagnosis& diagnosis) {
  std::erase_if(diagnosis.verdicts, [&](const Verdict& v) {
    if (v.what != VerdictClass::host_delay) return false;
    diagnosis.notes.push_back(sentence("no verdict, because who waited for whom is not known: ",
                                       v.evidence.empty() ? std::string() : v.evidence.front()));
    return true;
  });
}

/// Files whose operations do not fit together in time may be of different runs, whose ranks are no
/// peers.
inline void doubt_mismatched(Diagnosis& diagnosis) {
  doubt(diagnosis, "operations of the ranks do not fit together in time, so no verdict is sure");
}

}  // namespace detail

/// Cost: a sort of the kernels and a few passes. Deterministic. Works without alignment; paths, and
/// what of all waiting goes back to whom, need it. Where operations do not fit together in time, no
/// verdict is sure.
/// @param waits, delays  of this trace, see find_waits() and find_delay_costs()
[[nodiscard]] inline Diagnosis diagnose(const Trace& trace, const Matches& matches,
                                        const Alignment& alignment, const WaitReport& waits,
                                        const DelayCosts& delays,
                                        const DiagnoseOptions& options = {}) {
  using namespace verdicts;
  Diagnosis out;
  const auto add = [&](std::vector<Verdict> found) {
    std::move(found.begin(), found.end(), std::back_inserter(out.verdicts));
  };
  JobLayout job = lay_out(trace);
  out.step_time = job.step_time;
  out.unjudged = job.silent;
  for (const std::int32_t rank : job.silent) {
    out.notes.push_back(sentence("rank ", rank,
                                 " recorded no work of its device: it is not judged, and others "
                                 "may have waited for it"));
  }
  add(trace.outstanding.empty() ? find_pending(trace, matches, job, options)
                                : report_outstanding(trace, out.notes));
  if (are_strangers(trace, matches)) {
    out.notes.push_back(sentence("nothing says that the ", trace.ranks.size(),
                                 " files are of one job: they name no ranks and share no "
                                 "operation, so their ranks are not compared; numbers that are "
                                 "given, or names such as rank3.json, say which is which"));
    return out;
  }
  KernelTimes times = tabulate_kernels(trace, job);
  const CommonLoad load = find_common_load(times, job, options);
  const RankSpeeds speeds =
      measure_rank_speeds(times, job, options, measure_excess, options.slow_gpu);
  const RankSpeeds usually =
      measure_rank_speeds(times, job, options, measure_usual_excess, options.slow_gpu);
  const RankSpeeds in_sum =
      measure_rank_speeds(times, job, options, measure_excess_in_sum, options.interrupted_gpu);
  add(find_stage_imbalance(trace, job, times, speeds, options));
  add(find_slow_gpus(job, times, speeds, usually));
  add(find_interrupted_gpus(trace, job, times, speeds, usually, in_sum, options));
  add_device_evidence(out.verdicts, trace, job);
  doubt_slow_gpus(out.verdicts, job);
  add(find_data_imbalance(job, times, speeds, load, options));
  add(find_slow_links(trace, matches, job, options, out.notes));
  add(find_late_hosts(trace, job, options));
  add(find_late_steps(trace, job, alignment, options));

  const bool few = job.steps.size() <= detail::few_steps;
  const WaitBill bill = bill_waits(job, delays);
  // Those who came last of the ranks that are known need not have been the last.
  const bool known = alignment.aligned() && job.silent.empty();
  const bool billed = known && bill.part >= options.wait_part;
  // Where nothing can be seen to last, the waiting has to say what mattered.
  if (!few && billed) drop_unawaited_hosts(out.verdicts, job, bill, options, out.notes);
  if (few && !known) detail::drop_hosts(out);
  if (few && billed) {
    check_shares(out.verdicts, job, bill, options, out.notes);
    add(find_unexplained(out.verdicts, job, bill, options));
  }
  if (alignment.aligned()) trace_paths(out.verdicts, trace, waits);
  if (few) detail::doubt_few_steps(out, job.steps.size());
  if (alignment.mismatched) detail::doubt_mismatched(out);
  const auto dearness = [&](const Verdict& v) {
    // The length of an accident says less than what came of it.
    const double cost =
        few && billed ? share_of(v, job, bill) : static_cast<double>(v.cost_per_step);
    return std::pair(v.what == VerdictClass::hang, cost);
  };
  std::stable_sort(out.verdicts.begin(), out.verdicts.end(),
                   [&](const Verdict& a, const Verdict& b) { return dearness(a) > dearness(b); });
  return out;
}

[[nodiscard]] inline Diagnosis diagnose(const Trace& trace, const Matches& matches,
                                        const Alignment& alignment,
                                        const DiagnoseOptions& options = {}) {
  const WaitReport waits = find_waits(trace, matches, alignment);
  return diagnose(trace, matches, alignment, waits, find_delay_costs(trace, matches, waits),
                  options);
}

}  // namespace mega::inline v0::scan
