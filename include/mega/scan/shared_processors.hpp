/// @file  Ranks that share processors: their spans hold waits for one another's processors, which
/// no recorder tells from work.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// A host that has fewer processors for its ranks than ranks.
struct SharedHost {
  std::string name;
  std::int64_t ranks = 0;
  std::int64_t processors = 0;  ///< on which at least one of them may run
};

namespace detail {

/// First and last processor.
using ProcessorRange = std::pair<std::int32_t, std::int32_t>;

/// "0-3,8" as {0, 3} and {8, 8}; empty where it is no such list.
[[nodiscard]] inline std::vector<ProcessorRange> parse_processors(std::string_view text) {
  std::vector<ProcessorRange> out;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](std::int32_t& into) {
    const auto [after, failed] = std::from_chars(at, end, into);
    at = after;
    return failed == std::errc() && into >= 0;
  };
  const auto passes = [&](char c) {
    const bool is_next = at != end && *at == c;
    at += is_next ? 1 : 0;
    return is_next;
  };
  do {
    ProcessorRange range;
    if (!number(range.first)) return {};
    range.second = range.first;
    if (passes('-') && !number(range.second)) return {};
    if (range.second < range.first) return {};
    out.push_back(range);
  } while (passes(','));
  return at == end ? out : std::vector<ProcessorRange>{};
}

/// How many processors are in at least one of the ranges.
[[nodiscard]] inline std::int64_t count_processors(std::vector<ProcessorRange> ranges) {
  std::sort(ranges.begin(), ranges.end());
  std::int64_t count = 0, counted_to = 0;
  for (const auto& [first, last] : ranges) {
    const std::int64_t begin = std::max<std::int64_t>(first, counted_to);
    counted_to = std::max<std::int64_t>(counted_to, std::int64_t{last} + 1);
    count += std::max<std::int64_t>(0, counted_to - begin);
  }
  return count;
}

}  // namespace detail

/// By name. Ranks whose recordings do not say where their spans ran are left out.
[[nodiscard]] inline std::vector<SharedHost> shared_hosts(const Trace& trace) {
  struct Host {
    std::int64_t ranks = 0;
    std::vector<detail::ProcessorRange> processors;
  };
  std::map<std::string_view, Host> hosts;
  for (const Rank& rank : trace.ranks) {
    const auto ranges = detail::parse_processors(rank.processors);
    if (rank.host.empty() || ranges.empty()) continue;
    Host& host = hosts[rank.host];
    ++host.ranks;
    host.processors.insert(host.processors.end(), ranges.begin(), ranges.end());
  }
  std::vector<SharedHost> out;
  for (auto& [name, host] : hosts) {
    const std::int64_t processors = detail::count_processors(std::move(host.processors));
    if (processors < host.ranks) out.push_back({std::string(name), host.ranks, processors});
  }
  return out;
}

[[nodiscard]] inline std::string to_string(const SharedHost& host) {
  return sentence(host.ranks, " ranks of host ", host.name, " share ", host.processors,
                  host.processors == 1 ? " processor" : " processors",
                  ": their times contain waiting for one another");
}

}  // namespace mega::inline v0::scan
