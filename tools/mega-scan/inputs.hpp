/// @file  The files that every subcommand reads.
#pragma once
#include <mega/scan/trace.hpp>

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace scan_tool {

struct Inputs {
  std::vector<std::string> paths;
  std::vector<int> ranks;

  void add_to(CLI::App& command);
  /// Warnings of the trace go to standard error.
  /// @throws mega::Error where a file cannot be read, is none that a dialect knows, or is not of
  /// the job that the others are of
  [[nodiscard]] mega::scan::Trace read() const;
};

/// One file, directory or archive; as Inputs::read().
[[nodiscard]] mega::scan::Trace read_trace(const std::string& path);

}  // namespace scan_tool
