#include "inputs.hpp"

#include "../common/trace_warnings.hpp"
#include "text.hpp"
#include <mega/core/error.hpp>
#include <mega/scan/import.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace scan_tool {

using mega::ErrorCode;
using mega::expects;
using mega::sentence;
namespace scan = mega::scan;

namespace {

void finish(scan::Trace& trace) {
  tools::finish_import(trace, "mega-scan");
}

}  // namespace

void Inputs::add_to(CLI::App& command) {
  command
      .add_option("files", paths,
                  "traces, one or more a rank: files, directories, archives, or - for standard "
                  "input")
      ->required();
  command.add_option("--ranks", ranks, "the global rank of each file, where the files do not say")
      ->delimiter(',');
}

scan::Trace Inputs::read() const {
  expects(ranks.empty() || ranks.size() == paths.size(), ErrorCode::usage, [&] {
    return sentence("--ranks has ", counted(static_cast<std::int64_t>(ranks.size()), "number"),
                    " for ", counted(static_cast<std::int64_t>(paths.size()), "file"),
                    "; give one for each");
  });
  for (const int rank : ranks) {
    expects(rank >= 0, ErrorCode::usage,
            [&] { return sentence("--ranks has ", rank, "; valid are numbers from 0 on"); });
  }
  for (std::size_t i = 0; i < paths.size(); ++i) {
    expects(std::count(paths.begin(), paths.end(), paths[i]) == 1, ErrorCode::usage,
            [&] { return sentence(paths[i], " is given twice"); });
  }
  scan::Trace trace;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    scan::ImportOptions options;
    if (!ranks.empty()) options.rank = ranks[i];
    scan::import_file(trace, paths[i], options);
  }
  finish(trace);
  return trace;
}

scan::Trace read_trace(const std::string& path) {
  scan::Trace trace;
  scan::import_file(trace, path);
  finish(trace);
  return trace;
}

}  // namespace scan_tool
