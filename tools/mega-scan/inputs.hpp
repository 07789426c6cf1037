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
  /// @throws mega::Error where a file cannot be read, or is none that a dialect knows
  [[nodiscard]] mega::scan::Trace read() const;
};

/// One file, directory or archive.
[[nodiscard]] mega::scan::Trace read_trace(const std::string& path);

}  // namespace scan_tool
