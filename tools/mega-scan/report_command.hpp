/// @file  The subcommand report.
#pragma once
#include <CLI/CLI.hpp>

namespace scan_tool {

void add_report(CLI::App& app);

}  // namespace scan_tool
