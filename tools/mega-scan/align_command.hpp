/// @file  The subcommand align.
#pragma once
#include <CLI/CLI.hpp>

namespace scan_tool {

void add_align(CLI::App& app);

}  // namespace scan_tool
