/// @file  Hang: operations that never ended, and a member that never entered them.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/hang.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/figures.hpp>
#include <mega/scan/verdicts/job_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// The recorder itself said what never completed.
[[nodiscard]] inline std::vector<Verdict> report_outstanding(const Trace& trace,
                                                             std::vector<std::string>& notes) {
  const HangReport report = find_hang(trace);
  if (!report.hung || report.suspects.empty()) return {};
  Verdict v;
  v.what = VerdictClass::hang;
  v.ranks = report.suspects;
  v.evidence = report.evidence;
  // A dump that was not handed in looks like one that was not left.
  constexpr std::size_t few = 8;  // one in so many ranks
  const auto absent =
      static_cast<std::size_t>(std::count_if(report.ranks.begin(), report.ranks.end(),
                                             [](const StuckRank& rank) { return rank.missing; }));
  v.confidence = absent <= 1 || absent * few <= report.ranks.size() ? 0.9 : 0.5;
  notes.insert(notes.end(), report.notes.begin(), report.notes.end());
  return {std::move(v)};
}

/// An operation that some members entered and never left, because others never came.
[[nodiscard]] inline std::vector<Verdict> find_pending(const Trace& trace, const Matches& matches,
                                                       JobLayout& job,
                                                       const DiagnoseOptions& options) {
  const std::size_t ranks = job.ranks();
  std::map<std::int32_t, std::size_t> index_of;
  for (std::size_t r = 0; r < ranks; ++r) index_of[job.number[r]] = r;
  const Nanoseconds forever =
      std::max(options.hang_time,
               static_cast<Nanoseconds>(options.hang_factor * static_cast<double>(job.step_time)));
  std::vector<std::int64_t> waits_for(ranks, 0);  // pending operations that lack this rank
  std::vector<char> pends(ranks, 0);
  std::int64_t pending = 0;
  std::int32_t first_step = std::numeric_limits<std::int32_t>::max();
  Nanoseconds longest = 0;
  const auto judge = [&](const TableIndex* members, std::size_t count, TableIndex group) {
    std::vector<std::size_t> present;
    for (std::size_t k = 0; k < count; ++k) {
      const Event& e = trace.events[trace.communications[members[k]].event];
      if (e.duration() < forever) return;
      present.push_back(trace.rank_index(e));
    }
    std::vector<std::int32_t> expected;
    if (group != none) expected = trace.groups[group].ranks;
    const Communication& c = trace.communications[members[0]];
    if (c.op == CommunicationOp::send || c.op == CommunicationOp::recv)
      expected = {trace.rank(trace.events[c.event]), c.peer};
    std::int64_t absent = 0;
    for (const std::int32_t rank : expected) {
      const auto at = index_of.find(rank);
      if (at == index_of.end()) continue;
      if (std::find(present.begin(), present.end(), at->second) != present.end()) continue;
      ++waits_for[at->second];
      ++absent;
    }
    if (absent == 0) return;
    ++pending;
    for (const std::size_t r : present) pends[r] = 1;
    for (std::size_t k = 0; k < count; ++k) {
      const Event& e = trace.events[trace.communications[members[k]].event];
      first_step = std::min(first_step, e.step);
      longest = std::max(longest, e.duration());
    }
  };
  for (const Instance& i : matches.instances) judge(&matches.members[i.first], i.count, i.group);
  for (const TableIndex c : matches.leftovers) judge(&c, 1, trace.communications[c].group);
  if (pending == 0) return {};

  std::vector<std::size_t> suspects;
  for (std::size_t r = 0; r < ranks; ++r) {
    if (waits_for[r] > 0) suspects.push_back(r);
  }
  // A rank that lacks because it waits itself has launched what comes after; the culprit has not.
  std::vector<std::int64_t> progress(ranks, 0);
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    const bool launches = e.kind == EventKind::launch;
    if (launches || (is_device_work(e) && e.launch == none)) ++progress[trace.rank_index(e)];
  }
  std::vector<std::size_t> culprits;
  for (const std::size_t r : suspects) {
    if (trace.ranks[r].missing) culprits.push_back(r);
  }
  if (culprits.empty()) {
    double least = 2;
    for (const std::size_t r : suspects) {
      std::vector<std::int64_t> peers;
      for (std::size_t q = 0; q < ranks; ++q) {
        if (q != r && job.stage[q] == job.stage[r]) peers.push_back(progress[q]);
      }
      if (peers.empty()) peers.push_back(progress[r]);
      const double share =
          static_cast<double>(progress[r]) / static_cast<double>(std::max<std::int64_t>(
                                                 1, *std::max_element(peers.begin(), peers.end())));
      const double score = share + (pends[r] != 0 ? 1e-9 : 0);
      if (score < least) {
        least = score;
        culprits.assign(1, r);
      } else if (score == least) {
        culprits.push_back(r);
      }
    }
  }
  Verdict v;
  v.what = VerdictClass::hang;
  for (const std::size_t r : culprits) {
    v.ranks.push_back(job.number[r]);
    v.stages.push_back(job.stage[r]);
    v.evidence.push_back(trace.ranks[r].missing
                             ? sentence("rank ", job.number[r], " left no record, and ",
                                        waits_for[r], " operations wait for it")
                             : sentence("rank ", job.number[r], " stopped after ", progress[r],
                                        " operations and never entered ", waits_for[r],
                                        " that other ranks wait in"));
  }
  v.evidence.push_back(sentence(pending, " operations began and did not end within ",
                                milliseconds(static_cast<double>(longest))));
  v.confidence = culprits.size() == 1 ? 0.99 : 1.0 / static_cast<double>(culprits.size());
  v.since_step = first_step;
  v.cost_per_step = longest;
  // What follows judges whole steps only.
  job.end_before(first_step);
  return {std::move(v)};
}

}  // namespace mega::inline v0::scan::verdicts
