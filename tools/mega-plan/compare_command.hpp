/// @file  `mega-plan compare`: times all schedules for one pipeline and names the best.
#pragma once
#include <CLI/CLI.hpp>

namespace plan {

/// Adds the subcommand, which runs while the command line is parsed.
void add_compare(CLI::App& app, int& exit_code);

}  // namespace plan
