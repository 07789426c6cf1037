/// @file  Traces written down by hand: every rank has one clock, a compute lane, a communication
/// lane and a host lane.
#pragma once
#include <mega/scan/trace.hpp>

#include <cstdint>
#include <string_view>
#include <vector>

namespace mega_test {

class HandTrace {
 public:
  /// Rank r is stage r / dp and replica r % dp.
  explicit HandTrace(int ranks, int dp = 1) {
    std::vector<std::int32_t> all;
    for (int r = 0; r < ranks; ++r) {
      mega::scan::Rank rank;
      rank.rank = r;
      rank.pipeline = r / dp;
      rank.data = r % dp;
      rank.tensor = 0;
      rank.clock = "one";
      trace.ranks.push_back(rank);
      for (int lane = 0; lane < 3; ++lane) {
        mega::scan::Lane made;
        made.rank = static_cast<mega::scan::TableIndex>(r);
        made.kind = lane == 2 ? mega::scan::LaneKind::host : mega::scan::LaneKind::device;
        trace.lanes.push_back(made);
      }
      all.push_back(r);
    }
    world = trace.intern_group("world", all);
  }

  mega::scan::TableIndex run(int rank, std::string_view name, std::int64_t begin, std::int64_t end,
                             int step = 0) {
    return push(rank, 0, name, begin, end, step, mega::scan::EventKind::compute);
  }
  mega::scan::TableIndex iterate(int rank, std::int64_t begin, std::int64_t end, int step) {
    return push(rank, 0, "step", begin, end, step, mega::scan::EventKind::iteration);
  }
  mega::scan::TableIndex launch(int rank, std::int64_t begin, std::int64_t end, int step = 0) {
    return push(rank, 2, "launch", begin, end, step, mega::scan::EventKind::launch);
  }
  mega::scan::TableIndex call(int rank, mega::scan::CommunicationOp op, std::string_view name,
                              std::int64_t begin, std::int64_t end, std::int64_t sequence,
                              int step = 0, std::int32_t peer = -1, std::int64_t bytes = 64) {
    const auto at = push(rank, 1, name, begin, end, step, mega::scan::EventKind::communication);
    mega::scan::Communication c;
    c.group = world;
    c.op = op;
    c.sequence = sequence;
    c.peer = peer;
    c.bytes = bytes;
    trace.attach(at, c);
    return at;
  }

  mega::scan::Trace trace;
  mega::scan::TableIndex world = 0;

 private:
  mega::scan::TableIndex push(int rank, int lane, std::string_view name, std::int64_t begin,
                              std::int64_t end, int step, mega::scan::EventKind kind) {
    mega::scan::Event e;
    e.begin = begin;
    e.end = end;
    e.name = trace.names.intern(name);
    e.lane = static_cast<mega::scan::TableIndex>(3 * rank + lane);
    e.step = step;
    e.kind = kind;
    return static_cast<mega::scan::TableIndex>(trace.events.push_back(e));
  }
};

}  // namespace mega_test
