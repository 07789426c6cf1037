/// @file  The rank in a file's name.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mega::inline v0::scan::detail {

/// The number after the last "rank", else the last number of the file's own name, extensions apart;
/// -1 where there is none: "rank-34.Jul_15.pt.trace.json.gz" 34, "_dump_9" 9.
[[nodiscard]] constexpr std::int32_t rank_in_dump_name(std::string_view path) noexcept {
  const std::string_view name = path.substr(path.find_last_of("/:") + 1);
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto number_at = [&](std::size_t i) {
    std::int32_t number = 0;
    for (; i < name.size() && digit(name[i]) && number < 100'000'000; ++i)
      number = number * 10 + (name[i] - '0');
    return number;
  };
  if (const std::size_t word = name.rfind("rank"); word != std::string_view::npos) {
    std::size_t i = word + 4;
    while (i < name.size() && (name[i] == '-' || name[i] == '_' || name[i] == ' ')) ++i;
    if (i < name.size() && digit(name[i])) return number_at(i);
  }
  std::size_t i = name.size();
  if (const std::size_t dot = name.find('.'); dot != std::string_view::npos && dot > 0) i = dot;
  while (i > 0 && !digit(name[i - 1])) --i;
  if (i == 0) return -1;
  while (i > 0 && digit(name[i - 1])) --i;
  return number_at(i);
}

}  // namespace mega::inline v0::scan::detail
