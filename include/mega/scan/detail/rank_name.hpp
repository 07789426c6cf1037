/// @file  The rank in a file's name.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mega::inline v0::scan::detail {

/// The file's own name. Members of archives are named "archive:member".
[[nodiscard]] constexpr std::string_view own_name(std::string_view path) noexcept {
  return path.substr(path.find_last_of("/:") + 1);
}

/// The number at `at`, cut off where no rank is as large; -1 where there is no digit.
[[nodiscard]] constexpr std::int32_t number_at(std::string_view name, std::size_t at) noexcept {
  std::int32_t number = -1;
  for (; at < name.size() && name[at] >= '0' && name[at] <= '9' && number < 100'000'000; ++at)
    number = (number < 0 ? 0 : number * 10) + (name[at] - '0');
  return number;
}

/// The global rank that a file is named after, as profilers do: "rank-34.Jul_15.pt.trace.json.gz"
/// 34, "worker3_step_12" 3, "sampled_rank_1.json" 1; -1: none.
[[nodiscard]] constexpr std::int32_t rank_in_name(std::string_view path) noexcept {
  const std::string_view name = own_name(path);
  for (const std::string_view word : {"rank", "Rank", "worker"}) {
    for (std::size_t at = name.rfind(word); at != std::string_view::npos;
         at = at == 0 ? std::string_view::npos : name.rfind(word, at - 1)) {
      std::size_t digits = at + word.size();
      while (digits < name.size() && (name[digits] == '-' || name[digits] == '_')) ++digits;
      if (const std::int32_t rank = number_at(name, digits); rank >= 0) return rank;
    }
  }
  return -1;
}

/// The same of a dump, or else the last number of its name, extensions apart: "_dump_9" 9.
[[nodiscard]] constexpr std::int32_t rank_in_dump_name(std::string_view path) noexcept {
  if (const std::int32_t rank = rank_in_name(path); rank >= 0) return rank;
  std::string_view name = own_name(path);
  if (const std::size_t dot = name.find('.'); dot != std::string_view::npos && dot > 0)
    name = name.substr(0, dot);
  const std::size_t last = name.find_last_of("0123456789");
  if (last == std::string_view::npos) return -1;
  return number_at(name, name.find_last_not_of("0123456789", last) + 1);
}

}  // namespace mega::inline v0::scan::detail
