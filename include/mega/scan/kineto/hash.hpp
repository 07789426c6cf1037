/// @file  Hashes of an import's caches: of the texts of a record, and of pairs of numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

namespace mega::inline v0::scan::kineto {

inline constexpr std::uint64_t odd_multiplier = 0x9E3779B97F4A7C15ULL;

/// Eight characters at a time. The same in every run on machines of one byte order.
[[nodiscard]] inline std::uint64_t quick_hash(std::string_view text) noexcept {
  std::uint64_t hash = text.size() * odd_multiplier;
  const auto mix = [&](std::uint64_t word) { hash = (hash ^ word) * odd_multiplier ^ hash >> 29U; };
  const auto word_at = [](const char* at) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, sizeof word);
    return word;
  };
  if (text.size() >= 8) {
    const char* const last = text.data() + text.size() - 8;
    for (const char* at = text.data(); at < last; at += 8) mix(word_at(at));
    mix(word_at(last));  // over the one before, where the length is no multiple
  } else {
    std::uint64_t word = 0;
    for (const char c : text) word = word << 8U | static_cast<unsigned char>(c);
    mix(word);
  }
  return hash ^ hash >> 32U;
}

struct PairHash {
  [[nodiscard]] std::size_t operator()(
      const std::pair<std::int64_t, std::int64_t>& p) const noexcept {
    return (static_cast<std::size_t>(p.first) * odd_multiplier ^
            static_cast<std::size_t>(p.second)) *
           odd_multiplier;
  }
};

}  // namespace mega::inline v0::scan::kineto
