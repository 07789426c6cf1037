/// @file  Attribution: what of all waiting goes back to each verdict's ranks, by backward replay.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/delay_cost.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// Whose delays the waiting of all ranks goes back to.
struct WaitBill {
  std::vector<double> cost;        ///< ns, by index into Trace::ranks
  double total = 0;                ///< ns
  double part = 0;                 ///< of the time of all ranks in the steps
  std::vector<std::size_t> order;  ///< ranks, the dearest first

  [[nodiscard]] double share(std::size_t rank) const { return cost[rank] / total; }
};

[[nodiscard]] inline WaitBill bill_waits(const JobLayout& job, const DelayCosts& delays) {
  WaitBill out;
  for (std::size_t r = 0; r < job.ranks(); ++r)
    out.cost.push_back(delays.cost(static_cast<TableIndex>(r)));
  out.total = std::accumulate(out.cost.begin(), out.cost.end(), 0.0);
  const double time =
      static_cast<double>(job.ranks() * job.steps.size()) * static_cast<double>(job.step_time);
  out.part = time > 0 ? out.total / time : 0;
  out.order.resize(job.ranks());
  std::iota(out.order.begin(), out.order.end(), std::size_t{0});
  std::stable_sort(out.order.begin(), out.order.end(),
                   [&](std::size_t a, std::size_t b) { return out.cost[a] > out.cost[b]; });
  return out;
}

/// The verdict's ranks, or those of its stages; all where it names neither.
[[nodiscard]] inline bool concerns(const Verdict& v, const JobLayout& job, std::size_t rank) {
  const auto holds = [](const std::vector<std::int32_t>& list, std::int32_t value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  };
  if (!v.ranks.empty()) return holds(v.ranks, job.number[rank]);
  return v.stages.empty() || holds(v.stages, job.stage[rank]);
}

[[nodiscard]] inline double share_of(const Verdict& v, const JobLayout& job, const WaitBill& bill) {
  double out = 0;
  for (std::size_t r = 0; r < job.ranks(); ++r) out += concerns(v, job, r) ? bill.share(r) : 0;
  return out;
}

/// Leaves out verdicts on whom nobody waited, and says so in the notes; the others get their share
/// as evidence. @pre  bill.total > 0
inline void check_shares(std::vector<Verdict>& verdicts, const JobLayout& job, const WaitBill& bill,
                         const DiagnoseOptions& options, std::vector<std::string>& notes) {
  std::erase_if(verdicts, [&](Verdict& v) {
    if (v.what == VerdictClass::hang || v.ranks.empty()) return false;
    const double share = share_of(v, job, bill);
    std::string who;
    for (const std::int32_t r : v.ranks) who += sentence(who.empty() ? "" : ", ", r);
    if (share < options.least_wait_share) {
      notes.push_back(sentence("no verdict, because ", figure(100 * share),
                               " % of all waiting goes back to rank ", who, ": ",
                               v.evidence.empty() ? std::string() : v.evidence.front()));
      return true;
    }
    v.evidence.push_back(
        sentence(figure(100 * share), " % of all waiting goes back to rank ", who));
    return false;
  });
}

/// Of two ranks each is the other's only peer: a host seems late where it is the other's device
/// that is never ready before its launches. Then nobody waits for the one that seems late.
inline void drop_unawaited_hosts(std::vector<Verdict>& verdicts, const JobLayout& job,
                                 const WaitBill& bill, const DiagnoseOptions& options,
                                 std::vector<std::string>& notes) {
  if (job.ranks() != 2) return;
  std::erase_if(verdicts, [&](const Verdict& v) {
    if (v.what != VerdictClass::host_delay || share_of(v, job, bill) >= options.least_wait_share)
      return false;
    notes.push_back(sentence("no verdict, because nobody waits for rank ", v.ranks.front(), ": ",
                             v.evidence.front()));
    return true;
  });
}

/// One rank that most of the waiting goes back to, and no verdict that says why.
[[nodiscard]] inline std::vector<Verdict> find_unexplained(const std::vector<Verdict>& verdicts,
                                                           const JobLayout& job,
                                                           const WaitBill& bill,
                                                           const DiagnoseOptions& options) {
  if (job.ranks() < 3 || bill.part < options.wait_part) return {};
  const std::size_t first = bill.order[0], second = bill.order[1];
  if (bill.share(first) < 0.5 || bill.cost[first] < 3 * bill.cost[second]) return {};
  const bool explained = std::any_of(verdicts.begin(), verdicts.end(),
                                     [&](const Verdict& v) { return concerns(v, job, first); });
  if (explained) return {};
  Verdict v;
  v.what = VerdictClass::ambiguous;
  v.ranks = {job.number[first]};
  v.stages = {job.stage[first]};
  v.confidence = 0.5;
  const double others = static_cast<double>((job.ranks() - 1) * job.steps.size());
  v.cost_per_step = static_cast<Nanoseconds>(bill.cost[first] / others);
  std::string ranking;
  constexpr std::size_t most = 4;
  for (std::size_t i = 0; i < std::min(most, bill.order.size()); ++i) {
    const std::size_t r = bill.order[i];
    if (bill.cost[r] <= 0) break;
    ranking += sentence(i == 0 ? " to rank " : ", to rank ", job.number[r], " by ",
                        figure(100 * bill.share(r)), " %");
  }
  v.evidence.push_back(
      sentence("the waiting of all ranks, ", milliseconds(bill.total), ", goes back", ranking));
  v.evidence.push_back(sentence("neither kernels nor launches nor transfers of rank ",
                                job.number[first], " say why it came late"));
  return {std::move(v)};
}

}  // namespace mega::inline v0::scan::verdicts
