/// @file  `mega-plan check`: proves or refutes a schedule from a file.
#pragma once
#include <CLI/CLI.hpp>

namespace plan {

/// Adds the subcommand, which runs while the command line is parsed.
void add_check(CLI::App& app, int& exit_code);

}  // namespace plan
