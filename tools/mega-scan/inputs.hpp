/// @file  The files that every subcommand reads.
#pragma once
#include <mega/scan/trace.hpp>

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>
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
  /// @throws  Error(usage) where the output of an option would replace one of the files, given as
  /// such or in a directory
  void expect_not_replaced(std::string_view option, const std::string& output) const;
};

/// One file, directory or archive; as Inputs::read().
[[nodiscard]] mega::scan::Trace read_trace(const std::string& path);

}  // namespace scan_tool
