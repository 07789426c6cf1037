/// @file  The subcommand convert.
#pragma once
#include <CLI/CLI.hpp>

namespace scan_tool {

void add_convert(CLI::App& app);

}  // namespace scan_tool
