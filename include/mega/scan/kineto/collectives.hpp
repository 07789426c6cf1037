/// @file  Collectives: communications of one file and their groups, from the arguments of kernels
/// and from the file's own list of groups.
#pragma once
#include <mega/scan/communication_name.hpp>
#include <mega/scan/decimal.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/kineto/names.hpp>
#include <mega/scan/kineto/record.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::kineto {

[[nodiscard]] constexpr bool is_rank(std::int64_t value) noexcept {
  return value >= 0 && value <= std::numeric_limits<std::int32_t>::max();
}

/// More ranks of a group are damage.
inline constexpr std::size_t rank_limit = std::size_t{1} << 20U;

class Collectives {
 public:
  Collectives(Trace& trace, Names& names)
      : t_(trace), names_(names), first_(trace.communications.size()) {}

  /// A group of the file's own list.
  void configure(std::string_view name, std::vector<std::int32_t> ranks) {
    std::sort(ranks.begin(), ranks.end());  // intern_group() expects them nearly in order
    configured_.push_back(t_.intern_group(name, std::move(ranks)));
  }

  /// @param named  what the kernel's name says  @param arguments  null where it has none
  void attach(TableIndex event, CommunicationOp named, const CollectiveArguments* arguments) {
    Communication c;
    c.op = named;
    if (arguments != nullptr) describe(c, *arguments);
    t_.attach(event, c);
  }

  /// Groups whose ranks no kernel named take those of the file's own list.
  void settle_groups() {
    std::unordered_map<TableIndex, TableIndex> better;
    for (const auto& [key, group] : groups_) {
      if (!t_.groups[group].ranks.empty()) continue;
      for (const TableIndex other : configured_) {
        if (t_.groups[other].name == t_.groups[group].name) better.emplace(group, other);
      }
    }
    if (better.empty()) return;
    for (std::size_t i = first_; i < t_.communications.size(); ++i) {
      Communication& c = t_.communications[i];
      if (const auto found = better.find(c.group); found != better.end()) c.group = found->second;
    }
  }

 private:
  void describe(Communication& c, const CollectiveArguments& a) {
    const CommunicationOp named = communication_of(a.collective);
    if (named != CommunicationOp::unknown) c.op = named;
    c.sequence = a.sequence;
    if (!a.dtype.empty()) c.dtype = names_.intern({a.dtype, false});
    if (const std::int64_t element = a.dtype == "Char" ? 1 : element_bytes_of(a.dtype);
        element > 0 && a.elements >= 0 && a.elements < (std::int64_t{1} << 59U))
      c.bytes = a.elements * element;
    const std::int64_t peer = c.op == CommunicationOp::recv ? a.source : a.destination;
    if ((c.op == CommunicationOp::send || c.op == CommunicationOp::recv) && is_rank(peer))
      c.peer = static_cast<std::int32_t>(peer);
    if (!a.group.empty() || !a.ranks.empty()) c.group = group_of(a);
  }

  [[nodiscard]] TableIndex group_of(const CollectiveArguments& a) {
    scratch_.assign(a.group).append(1, '\n').append(a.ranks);
    if (const auto known = groups_.find(scratch_); known != groups_.end()) return known->second;
    std::vector<std::int32_t> ranks;
    if (!detail::holds(a.ranks, "...")) {
      for (std::size_t at = 0; at < a.ranks.size() && ranks.size() < rank_limit;) {
        std::int64_t value = 0;
        const std::size_t from = at;
        for (; at < a.ranks.size() && detail::is_digit(a.ranks[at]) && value < 100000000; ++at)
          value = value * 10 + (a.ranks[at] - '0');
        if (at > from) ranks.push_back(static_cast<std::int32_t>(value));
        at += at == from ? 1 : 0;
      }
    } else if (a.size > 0 && is_rank(a.rank_start) && is_rank(a.rank_stride)) {
      // The list was shortened by the recorder; start and stride are not. All such lists together
      // have a limit: a record that claims many ranks must not make many bytes.
      std::int64_t rank = a.rank_start;
      for (std::int64_t i = 0; i < a.size && is_rank(rank) && claimed_ranks_ < rank_limit; ++i) {
        ranks.push_back(static_cast<std::int32_t>(rank));
        rank += a.rank_stride;
        ++claimed_ranks_;
      }
    }
    std::sort(ranks.begin(), ranks.end());  // intern_group() expects them nearly in order
    const TableIndex group = t_.intern_group(a.group, std::move(ranks));
    groups_.emplace(scratch_, group);
    return group;
  }

  Trace& t_;
  Names& names_;
  std::size_t first_;                                   // communication of this file
  std::unordered_map<std::string, TableIndex> groups_;  // by name and ranks as written
  std::vector<TableIndex> configured_;
  std::size_t claimed_ranks_ = 0;  // listed from a start and a stride
  std::string scratch_;
};

}  // namespace mega::inline v0::scan::kineto
