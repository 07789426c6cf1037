/// @file  A study as JSON: what --json prints and what the page is drawn from.
#pragma once
#include <mega/scan/study.hpp>

#include <nlohmann/json.hpp>

namespace scan_tool {

using Json = nlohmann::ordered_json;

[[nodiscard]] Json json_of(const mega::scan::Study& study);
[[nodiscard]] Json json_of(const mega::scan::Trace& trace, const mega::scan::Alignment& a);
[[nodiscard]] Json json_of(const mega::scan::WhatIf& w);

/// Names come from foreign files and may be no UTF-8: what is not becomes the replacement
/// character.
[[nodiscard]] std::string text_of(const Json& json, int indent = 2);

}  // namespace scan_tool
