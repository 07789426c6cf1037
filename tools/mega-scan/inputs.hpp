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
  std::vector<std::string> ranks;  ///< as given

  void add_to(CLI::App& command);
  /// Warnings of the trace go to standard error.
  /// @throws mega::Error where a file cannot be read, is none that a dialect knows, or is not of
  /// the job that the others are of
  [[nodiscard]] mega::scan::Trace read() const;
  /// Of an option's output, before anything is read, which may take long. Leaves nothing behind
  /// that would be read from a directory.
  /// @throws  Error(usage) where it would replace one of the files, given as such or in a directory
  /// @throws  Error(usage, not_durable) where it cannot be written
  void expect_output(std::string_view option, const std::string& output) const;
};

/// Adds an option that names a file to write; "-" becomes standard output.
CLI::Option& add_output(CLI::App& command, const std::string& names, std::string& output,
                        const std::string& description);

/// One file, directory or archive; as Inputs::read().
[[nodiscard]] mega::scan::Trace read_trace(const std::string& path);

}  // namespace scan_tool
