/// @file  What importing traces has to say to a tool's user.
#pragma once
#include <mega/scan/import.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>

namespace tools {

/// Remarks on the job once all its files are in the trace, and prints the first of its warnings to
/// standard error.
inline void finish_import(mega::scan::Trace& trace, const char* program) {
  mega::scan::remark_on_job(trace);
  constexpr std::size_t most = 8;
  const std::size_t count = trace.warnings.size();
  for (std::size_t i = 0; i < std::min(most, count); ++i)
    std::fprintf(stderr, "%s: warning: %s\n", program, trace.warnings[i].c_str());
  if (count > most) {
    std::fprintf(stderr, "%s: warning: and %zu more %s\n", program, count - most,
                 count - most == 1 ? "warning" : "warnings");
  }
}

}  // namespace tools
