#include "../../support/refusal.hpp"
#include "../../support/temporary_directory.hpp"
#include <mega/core/error.hpp>
#include <mega/core/hooks.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/own_format.hpp>
#include <mega/scan/record.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace mega::scan;

constexpr Nanoseconds last_time = (Nanoseconds{1} << 62U) - 1;  // later is taken for damage

void check_equal(const Trace& a, const Trace& b) {
  REQUIRE(a.ranks.size() == b.ranks.size());
  for (std::size_t r = 0; r < a.ranks.size(); ++r) {
    CHECK(a.ranks[r].rank == b.ranks[r].rank);
    CHECK(a.ranks[r].data == b.ranks[r].data);
    CHECK(a.ranks[r].pipeline == b.ranks[r].pipeline);
    CHECK(a.ranks[r].tensor == b.ranks[r].tensor);
    CHECK(a.ranks[r].clock == b.ranks[r].clock);
    CHECK(a.ranks[r].host == b.ranks[r].host);
    CHECK(a.ranks[r].processors == b.ranks[r].processors);
  }
  REQUIRE(a.lanes.size() == b.lanes.size());
  for (std::size_t l = 0; l < a.lanes.size(); ++l) {
    CHECK(a.lanes[l].rank == b.lanes[l].rank);
    CHECK(a.lanes[l].process == b.lanes[l].process);
    CHECK(a.lanes[l].track == b.lanes[l].track);
    CHECK(a.lanes[l].kind == b.lanes[l].kind);
    CHECK(a.lanes[l].label == b.lanes[l].label);
  }
  REQUIRE(a.groups.size() == b.groups.size());
  for (std::size_t g = 0; g < a.groups.size(); ++g) {
    CHECK(a.groups[g].name == b.groups[g].name);
    CHECK(a.groups[g].ranks == b.groups[g].ranks);
  }
  REQUIRE(a.events.size() == b.events.size());
  for (std::size_t i = 0; i < a.events.size(); ++i) {
    CAPTURE(i);
    const Event& x = a.events[i];
    const Event& y = b.events[i];
    CHECK(x.begin == y.begin);
    CHECK(x.end == y.end);
    CHECK(a.name(x) == b.name(y));
    CHECK(x.lane == y.lane);
    CHECK(x.launch == y.launch);
    CHECK(x.step == y.step);
    CHECK(x.microbatch == y.microbatch);
    CHECK(x.chunk == y.chunk);
    CHECK(x.kind == y.kind);
    REQUIRE((x.detail == none) == (y.detail == none));
    if (x.detail == none) continue;
    const Communication& c = a.communications[x.detail];
    const Communication& d = b.communications[y.detail];
    CHECK(c.group == d.group);
    CHECK(c.peer == d.peer);
    CHECK(c.sequence == d.sequence);
    CHECK(c.bytes == d.bytes);
    CHECK(c.op == d.op);
    REQUIRE((c.dtype == none) == (d.dtype == none));
    if (c.dtype != none) CHECK(a.names[c.dtype] == b.names[d.dtype]);
  }
  REQUIRE(a.device_states.size() == b.device_states.size());
  for (std::size_t i = 0; i < a.device_states.size(); ++i) {
    const DeviceState& x = a.device_states[i];
    const DeviceState& y = b.device_states[i];
    CHECK(x.at == y.at);
    CHECK(x.rank == y.rank);
    CHECK(x.sm_mhz == y.sm_mhz);
    CHECK(x.temperature_c == y.temperature_c);
    CHECK(x.busy_percent == y.busy_percent);
    CHECK(x.power_mw == y.power_mw);
    CHECK(x.clock_limits == y.clock_limits);
  }
  CHECK(a.completeness.cost_ns_per_event == b.completeness.cost_ns_per_event);
  CHECK(a.completeness.events_dropped == b.completeness.events_dropped);
}

void read(Trace& into, const std::string& text, const ImportOptions& options = {}) {
  Source source("trace", text);
  import_own_format(into, source, options);
}

/// What a recorder tells its sink: awkward names, extreme times.
void record_into(RecordSink& sink) {
  RecordingInfo info;
  info.rank = 3;
  info.world = 8;
  info.data = 1;
  info.pipeline = 0;
  info.tensor = 1;
  info.clock = "steady \"boot\" 1\\2";
  info.host = "node \"7\"";
  info.processors = "0-3,8";
  info.cost_ns_per_event = 21.100000000000001;
  sink.start(info);
  sink.lane(0, "compute \xE2\x86\x92\n\t\x01");
  sink.anchor({812345678901, 1712195495505582988, 120});
  const auto span = [&](Nanoseconds begin, Nanoseconds end, std::string_view name,
                        mega::SpanKind kind) {
    Record r;
    r.begin = begin;
    r.end = end;
    r.name = name;
    r.kind = kind;
    r.lane = 0;
    return r;
  };
  Record forward = span(812345678950, 812345680150, "layer \"0\"", mega::SpanKind::forward);
  forward.step = 7;
  forward.microbatch = 2;
  forward.chunk = 1;
  sink.record(forward);
  const std::vector<int> ranks{1, 3};
  sink.group(0, "dp", ranks);
  sink.lane(1, "comm");
  Record reduce = span(-5, last_time, "all_reduce", mega::SpanKind::communication);
  reduce.lane = 1;
  reduce.group = 0;
  reduce.sequence = 41;
  reduce.bytes = 1 << 20;
  reduce.dtype = "bf16";
  sink.record(reduce);
  Record send = span(10, 10, "send", mega::SpanKind::communication);
  send.lane = 1;
  send.peer = 5;
  sink.record(send);
  sink.device({.at = 812345680200,
               .sm_mhz = 1980,
               .temperature_c = 61,
               .busy_percent = 0,
               .power_mw = 645'000,
               .clock_limits = 0x8000'0004});
  sink.device({.at = -3});
  sink.record(span(20, 25, "wait", mega::SpanKind::wait));
  sink.finish({4, 17});
}

TEST_CASE("scan: what a recorder writes to a file is read back exactly") {
  const mega::tests::TemporaryDirectory folder;
  TraceCollector collector;
  record_into(*collector.sink());
  {
    OwnFormatWriter writer(folder / "rank3.jsonl");
    record_into(writer);
  }
  const std::string text = mega::tests::content_of(folder / "rank3.jsonl");
  CHECK(looks_like_own_format(text));
  Trace t;
  read(t, text);
  check_equal(collector.trace(), t);
  CHECK(t.events[1].begin == -5);
  CHECK(t.events[1].end == last_time);
  CHECK(t.defects.malformed_records == 0);
  CHECK(t.defects.truncated_files == 0);
  CHECK(t.completeness.events_dropped == 17);
}

TEST_CASE("scan: ranks of a trace are written and read back exactly") {
  Trace t;
  for (int r = 0; r < 2; ++r) {
    Rank rank;
    rank.rank = 4 + r;
    rank.clock = "c";
    t.ranks.push_back(rank);
    t.lanes.push_back({static_cast<TableIndex>(r), 77, 1234567890123, LaneKind::host, "python"});
    t.lanes.push_back({static_cast<TableIndex>(r), 0, 7, LaneKind::device, "stream 7"});
  }
  const TableIndex group = t.intern_group("tp", {5, 4});
  t.completeness.cost_ns_per_event = 0.1;
  for (int r = 0; r < 2; ++r) {
    t.device_states.push_back(
        {.at = 99 + r, .rank = static_cast<TableIndex>(r), .sm_mhz = 1900 + r, .power_mw = 7});
    const auto lane = static_cast<TableIndex>(2 * r);
    Event launch;
    launch.begin = 100 + r;
    launch.end = 110;
    launch.name = t.names.intern("cudaLaunchKernel");
    launch.lane = lane;
    launch.kind = EventKind::launch;
    const auto launcher = static_cast<TableIndex>(t.events.push_back(launch));
    Event kernel;
    kernel.begin = 120;
    kernel.end = 150;
    kernel.name = t.names.intern("ncclDevKernel_AllReduce_Sum_f32");
    kernel.lane = lane + 1;
    kernel.launch = launcher;
    const auto at = static_cast<TableIndex>(t.events.push_back(kernel));
    Communication c;
    c.group = group;
    c.op = CommunicationOp::all_reduce;
    c.bytes = 0;
    t.attach(at, c);
  }
  Trace again;
  for (TableIndex r = 0; r < 2; ++r) {
    std::string text;
    write_own_format(t, r, [&](std::string_view piece) { text += piece; });
    read(again, text);
  }
  check_equal(t, again);
}

TEST_CASE("scan: a file that breaks off anywhere is read as far as it goes") {
  const mega::tests::TemporaryDirectory folder;
  {
    OwnFormatWriter writer(folder / "t");
    record_into(writer);
  }
  const std::string text = mega::tests::content_of(folder / "t");
  const std::size_t header = text.find('\n') + 1;
  const std::size_t last = text.rfind("{\"recorded\"");
  std::size_t most = 0;
  for (std::size_t length = header; length < last; ++length) {
    Trace t;
    read(t, text.substr(0, length));
    if (t.defects.truncated_files < 1 || !t.completeness.window_truncated) FAIL(length);
    if (t.events.size() < most) FAIL(length);
    most = t.events.size();
  }
  CHECK(most == 4);
}

TEST_CASE("scan: bad lines of a trace file are counted, bad files refused") {
  Trace t;
  read(t,
       "{\"mega_trace\":1,\"rank\":2}\n"
       "{\"lane\":0,\"label\":\"a\"}\n"
       "{\"lane\":0,\"label\":\"again\"}\n"                         // 1
       "{\"b\":1,\"d\":2,\"n\":\"x\",\"l\":9}\n"                    // 2: no such lane
       "{\"b\":\"soon\",\"d\":2,\"n\":\"x\",\"l\":0}\n"             // 3
       "{\"b\":9223372036854775807,\"d\":0,\"n\":\"x\",\"l\":0}\n"  // 4: no time
       "{\"b\":5,\"d\":-2,\"n\":\"x\",\"l\":0}\n"
       "{\"b\":5,\"d\":2,\"n\":\"x\",\"l\":0,\"k\":\"communication\",\"g\":3,\"a\":99}\n"
       "{\"later\":[1,{\"b\":2}],\"versions\":\"have\"}\n"  // 5
       "], }\n"
       "{\"recorded\":2,\"dropped\":0}\n");
  CHECK(t.defects.malformed_records == 5);
  CHECK(t.defects.negative_durations == 1);
  CHECK(t.events.size() == 2);
  CHECK(t.communications[0].group == none);
  CHECK(t.events[1].launch == none);
  Trace u;
  read(u, "{\"mega_trace\":1,\"rank\":2}\n{\"recorded\":0}\n", {.rank = 9});
  CHECK(u.ranks[0].rank == 9);
  const auto refusal = [](const std::string& text) {
    Trace v;
    return mega_test::refusal_of([&] { read(v, text); }, mega::ErrorCode::bad_input);
  };
  CHECK(refusal("{\"mega_trace\":2,\"rank\":2}\n") ==
        "trace is a trace of format version 2; this library reads version 1");
  CHECK(refusal("{\"b\":1}\n").find("has no line with \"mega_trace\"") != std::string::npos);
  CHECK(refusal("").find("has no line with") != std::string::npos);
}

TEST_CASE("scan: a trace file that cannot be made or grown is reported") {
  CHECK(mega_test::refusal_of([] { OwnFormatWriter writer("/nowhere/at/all"); },
                              mega::ErrorCode::not_durable) ==
        "the trace file /nowhere/at/all cannot be made");
}

}  // namespace
