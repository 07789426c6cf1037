/// @file  What a study found, in plain sentences: which rank, why, since when, at what cost.
#pragma once
#include <mega/scan/study.hpp>

#include <string>
#include <vector>

namespace scan_tool {

/// One verdict: a headline, and the sentences behind it.
struct Statement {
  std::string headline;
  std::vector<std::string> details;
};

/// What Diagnosis::step_time is.
inline constexpr const char* step_length = "median, from a rank's first operation to its last";

/// "8 ranks, 26,912 events over 38.2 ms".
[[nodiscard]] std::string describe_extent(const mega::scan::Study& study);
/// Whether the clocks agree now, and how well.
[[nodiscard]] std::string describe_alignment(const mega::scan::Trace& trace,
                                             const mega::scan::Alignment& alignment);
/// Which ranks share processors; empty where none do.
[[nodiscard]] std::vector<std::string> describe_hosts(const mega::scan::Trace& trace);
/// Dearest first; empty if nothing is wrong.
[[nodiscard]] std::vector<Statement> describe_verdicts(const mega::scan::Study& study);
/// What a trace without a verdict says: healthy, or nothing to compare.
[[nodiscard]] std::string describe_health(const mega::scan::Study& study);
/// The step without stragglers. @param with_shares  whose they are, too
[[nodiscard]] std::string describe_what_if(const mega::scan::WhatIf& w, bool with_shares = true);
/// Defects of the input that were passed over, as sentences.
[[nodiscard]] std::vector<std::string> describe_defects(const mega::scan::Trace& trace);

/// Every counter of scan::Defects, by the name that it has in JSON.
struct NamedDefect {
  const char* name;
  std::int64_t count;
  const char *one, *many;  ///< follow the number in a sentence
};
[[nodiscard]] std::vector<NamedDefect> named_defects(const mega::scan::Defects& defects);

}  // namespace scan_tool
