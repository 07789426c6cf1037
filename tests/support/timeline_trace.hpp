/// @file  Two ranks whose clocks differ by a known offset, for tests of what is written from a
/// trace: nested and partially overlapping slices, a matched collective and a matched transfer, a
/// launch, awkward names.
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace mega_test {

inline constexpr mega::scan::Nanoseconds timeline_offset = 5'000'000'123;  // of rank 1's clock
inline constexpr mega::scan::Nanoseconds timeline_start = 1712195495505582988;
inline constexpr std::string_view awkward_name = "a \"b\" \\ \n\x01 \xE2\x86\x92 \xFF";

struct Timeline {
  mega::scan::Trace trace;
  mega::scan::Matches matches;
  mega::scan::Alignment alignment;

  /// Times count from timeline_start, in true time. @return index of the event
  mega::scan::TableIndex add(int rank, int stream, mega::scan::Nanoseconds begin,
                             mega::scan::Nanoseconds end, std::string_view name) {
    using namespace mega::scan;
    const Nanoseconds shift = timeline_start + (rank == 1 ? timeline_offset : 0);
    Event e;
    e.begin = begin + shift;
    e.end = end + shift;
    e.name = trace.names.intern(name);
    e.lane = static_cast<TableIndex>(2 * rank + stream);
    return static_cast<TableIndex>(trace.events.push_back(e));
  }

  Timeline() {
    using namespace mega::scan;
    for (int r = 0; r < 2; ++r) {
      Rank rank;
      rank.rank = 4 + 2 * r;  // 4 and 6
      rank.pipeline = r;
      trace.ranks.push_back(rank);
      trace.lanes.push_back({static_cast<TableIndex>(r), 0, 7, LaneKind::device, ""});
      trace.lanes.push_back({static_cast<TableIndex>(r), 99, 1, LaneKind::host, "python"});
    }
    const TableIndex group = trace.intern_group("dp", {4, 6});
    const auto communicate = [&](TableIndex event, CommunicationOp op, std::int64_t sequence,
                                 std::int32_t peer = -1) {
      Communication c;
      c.group = group;
      c.op = op;
      c.sequence = sequence;
      c.bytes = 4096;
      c.peer = peer;
      c.dtype = trace.names.intern("bf16");
      trace.attach(event, c);
    };
    const TableIndex outer = add(0, 0, 0, 1000, "outer");
    trace.events[outer].kind = EventKind::forward;
    trace.events[outer].step = 3;
    trace.events[outer].microbatch = 2;
    trace.events[outer].chunk = 1;
    add(0, 0, 100, 400, awkward_name);      // inside outer
    add(0, 0, 400, 1000, "until its end");  // ends with outer
    add(0, 0, 900, 1200, "overlaps");
    const TableIndex neighbour = add(0, 0, 1000, 1100, "neighbour");
    communicate(add(0, 0, 2000, 3000, "nccl all_reduce"), CommunicationOp::all_reduce, 41);
    communicate(add(1, 0, 2500, 3001, "nccl all_reduce"), CommunicationOp::all_reduce, 41);
    communicate(add(0, 0, 4000, 4500, "send"), CommunicationOp::send, 0, 6);
    communicate(add(1, 0, 3900, 4501, "recv"), CommunicationOp::recv, 0, 4);
    const TableIndex launch = add(0, 1, 50, 60, "launch");
    trace.events[neighbour].launch = launch;
    matches = match(trace);
    alignment = {};
    alignment.clocks.resize(2);
    alignment.clocks[1].offset = -timeline_offset;
  }
};

}  // namespace mega_test
