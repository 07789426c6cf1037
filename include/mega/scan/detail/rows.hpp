/// @file  What both writers of timelines need: rows without partial overlaps, and arrows.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace mega::inline v0::scan::detail {

/// An event in aligned time.
struct Slice {
  Nanoseconds begin, end;
  TableIndex event;
};

[[nodiscard]] inline Nanoseconds aligned(const Alignment& alignment, TableIndex rank_index,
                                         Nanoseconds t) noexcept {
  return rank_index < alignment.clocks.size() ? alignment.at(rank_index, t) : t;
}

/// Aligned begin of the earliest event; 0 where there is none.
[[nodiscard]] inline Nanoseconds earliest(const Trace& trace, const Alignment& alignment) {
  Nanoseconds first = std::numeric_limits<Nanoseconds>::max();
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    first = std::min(first, aligned(alignment, trace.rank_index(e), e.begin));
  }
  return trace.events.empty() ? 0 : first;
}

/// Calls visit(lane, overflow, slices) for each row of each lane, in the order of the lanes. The
/// slices of a row follow or contain one another; a lane whose events overlap partially, which
/// viewers would drop or draw wrongly, has further rows: overflow 1, 2, ...
/// Memory: 4 bytes an event, and one lane's slices. Cost: O(n log n), times the rows of a lane.
template <class Visit>
void for_each_row(const Trace& trace, const Alignment& alignment, const Visit& visit) {
  std::vector<std::size_t> first(trace.lanes.size() + 1, 0);
  for (std::size_t i = 0; i < trace.events.size(); ++i) ++first[trace.events[i].lane + 1];
  for (std::size_t l = 0; l < trace.lanes.size(); ++l) first[l + 1] += first[l];
  std::vector<TableIndex> by_lane(trace.events.size());
  {
    std::vector<std::size_t> at(first.begin(), first.end() - 1);
    for (std::size_t i = 0; i < trace.events.size(); ++i)
      by_lane[at[trace.events[i].lane]++] = static_cast<TableIndex>(i);
  }
  std::vector<Slice> slices;
  std::vector<std::vector<Slice>> rows;
  std::vector<std::vector<Nanoseconds>> open;  // ends of the slices that a row is inside of
  for (std::size_t lane = 0; lane < trace.lanes.size(); ++lane) {
    slices.clear();
    rows.clear();
    open.clear();
    for (std::size_t i = first[lane]; i < first[lane + 1]; ++i) {
      const Event& e = trace.events[by_lane[i]];
      const TableIndex rank = trace.lanes[lane].rank;
      const Nanoseconds begin = aligned(alignment, rank, e.begin);
      slices.push_back({begin, std::max(begin, aligned(alignment, rank, e.end)), by_lane[i]});
    }
    std::stable_sort(slices.begin(), slices.end(), [](const Slice& a, const Slice& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
    for (const Slice& slice : slices) {
      std::size_t row = 0;
      for (; row < rows.size(); ++row) {
        std::vector<Nanoseconds>& ends = open[row];
        while (!ends.empty() && ends.back() <= slice.begin) ends.pop_back();
        if (ends.empty() || ends.back() >= slice.end) break;
      }
      if (row == rows.size()) {
        rows.emplace_back();
        open.emplace_back();
      }
      rows[row].push_back(slice);
      open[row].push_back(slice.end);
    }
    for (std::size_t row = 0; row < rows.size(); ++row)
      visit(static_cast<TableIndex>(lane), row, std::span<const Slice>(rows[row]));
  }
}

enum class FlowRole : std::uint8_t { start, step, end };

/// One end of an arrow: ends with the same id are joined in the order of their begins.
struct FlowEnd {
  TableIndex event;
  FlowRole role;
  CommunicationOp op;  // unknown: from a launch to what it launched
  std::uint64_t id;
};

/// Arrows between the members of every matched instance and from launches to device work. Ids are
/// a bijection of a 64-bit count, begun at a name: unique in a file, and unlikely to meet those of
/// another when viewers open several.
class Flows {
 public:
  Flows(const Trace& trace, const Matches& matches, const Alignment& alignment) {
    std::uint64_t base = 0xCBF29CE484222325ULL;
    for (const Rank& rank : trace.ranks) {
      for (const char c : rank.source)
        base = (base ^ static_cast<std::uint8_t>(c)) * 0x100000001B3ULL;
      base = (base ^ static_cast<std::uint32_t>(rank.rank)) * 0x100000001B3ULL;
    }
    std::uint64_t count = 0;
    std::vector<Slice> members;
    for (const Instance& instance : matches.instances) {
      const std::uint64_t id = scrambled(base + count++);
      members.clear();
      for (const TableIndex i : matches.of(instance)) {
        const TableIndex event = trace.communications[i].event;
        const Event& e = trace.events[event];
        members.push_back({aligned(alignment, trace.rank_index(e), e.begin), 0, event});
      }
      std::stable_sort(members.begin(), members.end(),
                       [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
      for (std::size_t k = 0; k < members.size(); ++k) {
        const FlowRole role = k == 0                   ? FlowRole::start
                              : k + 1 < members.size() ? FlowRole::step
                                                       : FlowRole::end;
        ends_.push_back({members[k].event, role, instance.op, id});
      }
    }
    for (std::size_t i = 0; i < trace.events.size(); ++i) {
      const TableIndex launch = trace.events[i].launch;
      if (launch >= trace.events.size()) continue;
      const std::uint64_t id = scrambled(base + count++);
      ends_.push_back({launch, FlowRole::start, CommunicationOp::unknown, id});
      ends_.push_back({static_cast<TableIndex>(i), FlowRole::end, CommunicationOp::unknown, id});
    }
    std::stable_sort(ends_.begin(), ends_.end(),
                     [](const FlowEnd& a, const FlowEnd& b) { return a.event < b.event; });
  }

  [[nodiscard]] std::span<const FlowEnd> of(TableIndex event) const noexcept {
    const auto before = [](const FlowEnd& f, TableIndex e) { return f.event < e; };
    const auto first = std::lower_bound(ends_.begin(), ends_.end(), event, before);
    const auto last = std::lower_bound(first, ends_.end(), event + 1, before);
    return {first, last};
  }

 private:
  /// The finaliser of SplitMix64, a bijection.
  [[nodiscard]] static std::uint64_t scrambled(std::uint64_t x) noexcept {
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31U);
  }

  std::vector<FlowEnd> ends_;
};

[[nodiscard]] inline std::string rank_label(const Rank& rank) {
  std::string label = rank.rank < 0 ? "rank ?" : sentence("rank ", rank.rank);
  if (rank.data >= 0 || rank.pipeline >= 0 || rank.tensor >= 0) {
    const auto axis = [](const char* name, std::int32_t value) {
      return value < 0 ? std::string() : sentence(" ", name, value);
    };
    label +=
        " (" +
        (axis("dp", rank.data) + axis("pp", rank.pipeline) + axis("tp", rank.tensor)).substr(1) +
        ")";
  }
  return label;
}

[[nodiscard]] inline std::string row_label(const Lane& lane, std::size_t overflow) {
  std::string label = lane.label;
  if (label.empty()) {
    label = lane.kind == LaneKind::device ? sentence("stream ", lane.track)
                                          : sentence("thread ", lane.track);
  }
  return overflow == 0 ? label : label + sentence(", overlapping ", overflow);
}

}  // namespace mega::inline v0::scan::detail
