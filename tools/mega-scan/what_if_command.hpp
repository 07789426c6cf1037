/// @file  The subcommand what-if.
#pragma once
#include <CLI/CLI.hpp>

namespace scan_tool {

void add_what_if(CLI::App& app);

}  // namespace scan_tool
