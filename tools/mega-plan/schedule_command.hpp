/// @file  `mega-plan schedule`: makes a schedule by name, times it and writes it as CSV, picture or
/// trace.
#pragma once
#include <CLI/CLI.hpp>

namespace plan {

/// Adds the subcommand, which runs while the command line is parsed.
void add_schedule(CLI::App& app, int& exit_code);

}  // namespace plan
