/// @file  A study as one self-contained page: no request leaves it.
#pragma once
#include <mega/scan/study.hpp>

#include <string>

namespace scan_tool {

/// Verdicts and sentences, the timeline of all ranks on one clock, waits by rank and group, the
/// propagation of each verdict and the what-if scores. Of very long traces the longest events are
/// drawn, and the page says so. Needs a browser with a canvas; nothing is loaded from elsewhere.
[[nodiscard]] std::string html_page(const mega::scan::Study& study);

}  // namespace scan_tool
