/// @file  Figures as the sentences of evidence spell them.
#pragma once
#include <mega/core/error.hpp>

#include <cmath>
#include <cstdint>
#include <string>

namespace mega::inline v0::scan::verdicts {

/// Text of a figure, with two digits behind the point.
[[nodiscard]] inline std::string figure(double x) {
  const auto hundredths = static_cast<std::int64_t>(std::llround(std::abs(x) * 100));
  const std::int64_t rest = hundredths % 100;
  return sentence(x < 0 ? "-" : "", hundredths / 100, rest < 10 ? ".0" : ".", rest);
}

[[nodiscard]] inline std::string milliseconds(double ns) {
  return figure(ns / 1e6) + " ms";
}

}  // namespace mega::inline v0::scan::verdicts
