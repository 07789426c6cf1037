#include "describe.hpp"

#include "text.hpp"
#include <mega/core/error.hpp>
#include <mega/scan/shared_processors.hpp>

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace scan_tool {

using mega::sentence;
namespace scan = mega::scan;
using scan::VerdictClass;

namespace {

std::string_view described(VerdictClass what, bool several) {
  switch (what) {
    case VerdictClass::slow_gpu: return several ? "compute slowly" : "computes slowly";
    case VerdictClass::slow_link: return several ? "have a slow link" : "has a slow link";
    case VerdictClass::stage_imbalance:
      return several ? "have more work than the other stages" : "has more work than the others";
    case VerdictClass::data_imbalance: return "get unequal data";
    case VerdictClass::host_delay:
      return several ? "launch their work late" : "launches its work late";
    case VerdictClass::hang:
      return several ? "hold up a job that hangs" : "holds up a job that hangs";
    case VerdictClass::ambiguous:
      return several ? "differ, and the trace cannot say whose fault it is"
                     : "differs, and the trace cannot say why";
  }
  return "";
}

/// What the factor is one of.
std::string_view yardstick(const scan::Verdict& v) {
  if (!v.alone) return " times its peers";
  return v.what == VerdictClass::host_delay ? " times its steps without that"
                                            : " times its own other steps";
}

std::string headline(const scan::Verdict& v) {
  // A stage's ranks are all to blame for its work, and none for its own.
  const bool by_stage = v.what == VerdictClass::stage_imbalance && !v.stages.empty();
  const auto& who = by_stage ? v.stages : v.ranks;
  if (v.what == VerdictClass::data_imbalance && v.ranks.empty())
    return "The data are unequal: no single rank is at fault";
  if (who.empty()) return sentence("No rank is to blame: ", to_string(v.what));
  std::string out = listed(by_stage ? "stage" : "rank", who);
  out.front() = static_cast<char>(out.front() - 'a' + 'A');
  out += sentence(" ", described(v.what, who.size() > 1));
  if (v.factor > 1.005) out += sentence(", ", fixed(v.factor, 2), yardstick(v));
  return out;
}

std::string cost(const scan::Verdict& v, const scan::Diagnosis& d) {
  if (v.cost_per_step <= 0) return {};
  std::string out =
      sentence("It costs ", duration(static_cast<double>(v.cost_per_step)), " a step");
  if (d.step_time > 0) {
    out +=
        sentence(" of ", duration(static_cast<double>(d.step_time)), ", ",
                 percent(static_cast<double>(v.cost_per_step) / static_cast<double>(d.step_time)));
  }
  return out + ".";
}

std::string path_of(const scan::Verdict& v) {
  std::string out;
  for (const std::int32_t rank : v.path) out += sentence(out.empty() ? "" : " -> ", rank);
  return out;
}

bool share_a_clock(const scan::Trace& trace) {
  const std::string& first = trace.ranks.front().clock;
  return !first.empty() && std::all_of(trace.ranks.begin(), trace.ranks.end(),
                                       [&](const scan::Rank& r) { return r.clock == first; });
}

/// Of what stragglers cost; less, or less than nothing, is no part of it.
constexpr double least_share = 0.0005;
/// S up to here is nothing to share out.
constexpr double least_slowdown = 1.005;

std::string full_stop(std::string text) {
  if (!text.empty() && text.back() != '.') text += '.';
  return text;
}

}  // namespace

std::string describe_extent(const scan::Study& study) {
  const auto [begin, end] = study.extent();
  std::string out =
      sentence(counted(static_cast<std::int64_t>(study.trace.ranks.size()), "rank"), ", ",
               counted(static_cast<std::int64_t>(study.trace.events.size()), "event"));
  // Clocks that were not aligned have no common extent.
  if (!study.trace.events.empty() && (study.trace.ranks.size() == 1 || study.alignment.aligned()))
    out += sentence(" over ", duration(static_cast<double>(end - begin)));
  if (study.diagnosis.step_time > 0)
    out += sentence(", steps of ", duration(static_cast<double>(study.diagnosis.step_time)), " (",
                    step_length, ")");
  return out;
}

std::string describe_alignment(const scan::Trace& trace, const scan::Alignment& a) {
  if (trace.ranks.size() <= 1) return "One rank has one clock: there is nothing to align.";
  if (!a.aligned())
    return sentence("The clocks were not aligned: ", full_stop(a.refusal),
                    " Who waited for whom is not known.");
  if (share_a_clock(trace)) return "The ranks read one clock, says the recorder.";
  return sentence("The clocks are aligned: ends of matched operations deviate by ",
                  fixed(a.residual_mad_us, 1), " us in the median, no offset is off by more than ",
                  fixed(a.bound_us, 1), " us, ", grouped(a.violations), " of ", grouped(a.checked),
                  " members end before their operation can have begun.");
}

std::vector<std::string> describe_hosts(const scan::Trace& trace) {
  std::vector<std::string> out;
  for (const scan::SharedHost& host : scan::shared_hosts(trace))
    out.push_back(full_stop(to_string(host)));
  return out;
}

std::vector<Statement> describe_verdicts(const scan::Study& study) {
  std::vector<Statement> out;
  for (const scan::Verdict& v : study.diagnosis.verdicts) {
    Statement s;
    s.headline = sentence(headline(v), " (", to_string(v.what), ", confidence ",
                          fixed(v.confidence, 2), ").");
    if (v.since_step >= 0) s.details.push_back(sentence("Since step ", v.since_step, "."));
    if (std::string text = cost(v, study.diagnosis); !text.empty()) s.details.push_back(text);
    for (const std::string& line : v.evidence) s.details.push_back(full_stop(line));
    if (v.path.size() > 1)
      s.details.push_back(sentence("The wait spreads over ranks ", path_of(v), "."));
    out.push_back(std::move(s));
  }
  return out;
}

std::string describe_health(const scan::Study& study) {
  if (study.trace.events.empty()) return "The files hold no events: there is nothing to judge.";
  if (study.trace.ranks.size() == 1)
    return "There is one rank: nothing to compare it with, so nobody is accused.";
  if (scan::are_strangers(study.trace, study.matches))
    return "Nothing says that the files are of one job, so nobody is accused.";
  const auto& unjudged = study.diagnosis.unjudged;
  if (!unjudged.empty())
    return sentence("No rank, link, stage or host stands out of those that recorded their work; ",
                    listed("rank", unjudged), " did not, and may be the one.");
  if (study.what_if && study.what_if->slowdown > least_slowdown)
    return sentence("No rank, link, stage or host stands out: the ",
                    percent(1 - 1 / study.what_if->slowdown),
                    " of a step that uneven work costs is spread over all.");
  return "No rank, link, stage or host stands out.";
}

std::string describe_what_if(const scan::WhatIf& w, bool with_shares) {
  const std::string out = sentence("A mean step of the job takes ", duration(w.actual_ns),
                                   ", without gaps between operations ", duration(w.no_delay_ns),
                                   ", and without stragglers too ", duration(w.ideal_ns),
                                   ": S = ", fixed(w.slowdown, 4));
  if (!with_shares || w.slowdown <= least_slowdown) return out + ".";
  std::string shares;
  if (w.worst_share >= least_share) {
    shares += sentence(percent(w.worst_share), " would go with ", listed("rank", w.worst),
                       " alone (M_W = ", fixed(w.worst_share, 4), ")");
  }
  if (w.has_stages() && w.last_stage_share >= least_share) {
    shares += sentence(shares.empty() ? "" : ", ", percent(w.last_stage_share),
                       shares.empty() ? " would go" : "",
                       " with the last stage (M_S = ", fixed(w.last_stage_share, 4), ")");
  }
  return out + (shares.empty() ? "." : "; of what stragglers cost, " + shares + ".");
}

std::vector<NamedDefect> named_defects(const scan::Defects& d) {
  return {
      {"negative_durations", d.negative_durations, "event ends before it begins",
       "events end before they begin"},
      {"partial_overlaps", d.partial_overlaps, "event of a lane overlaps another without nesting",
       "events of a lane overlap without nesting"},
      {"duplicate_correlations", d.duplicate_correlations, "kernel shares a launch with another",
       "kernels share a launch with another"},
      {"kernels_without_launch", d.kernels_without_launch, "kernel has no launch in the file",
       "kernels have no launch in the file"},
      {"dangling_flows", d.dangling_flows, "arrow has one end only", "arrows have one end only"},
      {"not_a_number", d.not_a_number, "value is NaN or infinite", "values are NaN or infinite"},
      {"malformed_numbers", d.malformed_numbers, "number is malformed", "numbers are malformed"},
      {"bad_utf8", d.bad_utf8, "text is not UTF-8", "texts are not UTF-8"},
      {"control_characters", d.control_characters, "text holds control characters",
       "texts hold control characters"},
      {"bad_escapes", d.bad_escapes, "quote or backslash is not JSON's",
       "quotes or backslashes are not JSON's"},
      {"malformed_records", d.malformed_records, "record was passed over",
       "records were passed over"},
      {"truncated_files", d.truncated_files, "file is cut off", "files are cut off"},
      {"rank_guessed", d.rank_guessed,
       "rank stands in no file and was taken from its name or place",
       "ranks stand in no file and were taken from its name or place"},
      {"clock_base_adjusted", d.clock_base_adjusted, "rank had another base of time",
       "ranks had another base of time"},
      {"overlapping_runs", d.overlapping_runs, "file holds several runs on the same tracks",
       "files hold several runs on the same tracks"},
  };
}

std::vector<std::string> describe_defects(const scan::Trace& trace) {
  std::vector<std::string> out;
  for (const NamedDefect& d : named_defects(trace.defects)) {
    if (d.count > 0)
      out.push_back(sentence(grouped(d.count), " ", d.count == 1 ? d.one : d.many, "."));
  }
  return out;
}

}  // namespace scan_tool
