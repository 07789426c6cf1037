/// @file  The subcommand diff.
#pragma once
#include <CLI/CLI.hpp>

namespace scan_tool {

void add_diff(CLI::App& app);

}  // namespace scan_tool
