/// @file  `mega-plan metrics`: windows, ratios and coverage of a pipeline that ran.
#pragma once
#include <CLI/CLI.hpp>

namespace plan {

/// Adds the subcommand, which runs while the command line is parsed.
void add_metrics(CLI::App& app, int& exit_code);

}  // namespace plan
