/// @file  The diagnosis of a trace, and all that it says as one text for failing checks.
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/match.hpp>

#include <string>

namespace mega_test {

[[nodiscard]] inline mega::scan::Diagnosis diagnosis_of(const mega::scan::Trace& trace) {
  const mega::scan::Matches matches = mega::scan::match(trace);
  return mega::scan::diagnose(trace, matches, mega::scan::align(trace, matches));
}

/// A line for each verdict, then the notes.
[[nodiscard]] inline std::string text(const mega::scan::Diagnosis& diagnosis) {
  std::string out;
  for (const mega::scan::Verdict& v : diagnosis.verdicts) {
    out += to_string(v.what);
    for (const auto rank : v.ranks) out += " rank " + std::to_string(rank);
    for (const auto stage : v.stages) out += " stage " + std::to_string(stage);
    for (const std::string& line : v.evidence) out += "; " + line;
    out += "\n";
  }
  for (const std::string& note : diagnosis.notes) out += note + "\n";
  return out;
}

}  // namespace mega_test
