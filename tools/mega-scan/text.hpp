/// @file  Numbers and lists as people read them.
#pragma once
#include <mega/scan/trace.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace scan_tool {

/// With as many digits after the point as asked; never "-0.0".
[[nodiscard]] std::string fixed(double value, int digits);

/// "1.53 s", "214.6 ms", "31.0 us": three or four digits and the unit that fits.
[[nodiscard]] std::string duration(double ns);

/// "12.3 %"
[[nodiscard]] std::string percent(double share);

/// "rank 3", "ranks 3, 5 and 7"; long lists are cut: "ranks 0, 1, 2, 3, 4 and 59 more".
[[nodiscard]] std::string listed(std::string_view noun, std::span<const std::int32_t> numbers,
                                 std::size_t most = 8);

/// "1 file", "1,204 files"
[[nodiscard]] std::string counted(std::int64_t count, std::string_view noun);

/// Digits in groups of three.
[[nodiscard]] std::string grouped(std::int64_t count);

/// The text, cut to `width` characters with dots where it is longer.
[[nodiscard]] std::string cut(std::string_view text, std::size_t width);

}  // namespace scan_tool
