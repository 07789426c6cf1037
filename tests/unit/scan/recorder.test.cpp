// What recorders write, on streams that run at once and on streams with threads of their own.
#include <mega/core/context.hpp>
#include <mega/host/host.hpp>
#include <mega/host/host_async.hpp>
#include <mega/scan/recorder.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace mega;
using namespace mega::scan;

static_assert(event_recorder<HostRecorder, host::Stream>);
static_assert(event_recorder<HostRecorder, host::AsyncStream>);
static_assert(event_recorder<NullRecorder, host::Stream>);

namespace {

void rest_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

const Event* find(const Trace& t, std::string_view name, int nth = 0) {
  for (std::size_t i = 0; i < t.events.size(); ++i)
    if (t.name(t.events[i]) == name && nth-- == 0) return &t.events[i];
  return nullptr;
}

HostRecorder recorder_to(TraceCollector& to, RecorderOptions options = {},
                         RecordingInfo info = {}) {
  return {std::move(info), to.sink(), options};
}

}  // namespace

TEST_CASE("scan: a span becomes an event with its times, place and kind") {
  TraceCollector collector;
  HostRecorder recorder = recorder_to(collector, {}, recording_of({.tensor = 2, .data = 3}, 5));
  host::Stream compute, other;
  recorder.name_stream(other, "transfer");
  recorder.begin_step(7);
  const Nanoseconds before = steady_now();
  {
    const ScopedSpan outer(
        recorder, compute,
        SpanInfo{.name = "forward", .chunk = 2, .microbatch = 4, .kind = SpanKind::forward});
    rest_ms(2);
    const ScopedSpan inner(recorder, compute, SpanInfo{.name = "attention"});
    rest_ms(2);
  }
  { const ScopedSpan apart(recorder, other, SpanInfo{.name = "apart"}); }
  const Nanoseconds after = steady_now();
  recorder.close();

  const Trace& t = collector.trace();
  REQUIRE(t.events.size() == 3);
  const Event* const outer = find(t, "forward");
  const Event* const inner = find(t, "attention");
  const Event* const apart = find(t, "apart");
  REQUIRE((outer != nullptr && inner != nullptr && apart != nullptr));
  CHECK(outer->kind == EventKind::forward);
  CHECK(outer->chunk == 2);
  CHECK(outer->microbatch == 4);
  CHECK(outer->step == 7);
  CHECK(inner->kind == EventKind::compute);
  // Inherited from the span around it, and only there.
  CHECK(inner->chunk == 2);
  CHECK(inner->microbatch == 4);
  CHECK(apart->chunk == -1);
  CHECK(apart->microbatch == -1);
  CHECK(before <= outer->begin);
  CHECK(outer->begin + 2'000'000 <= inner->begin);
  CHECK(inner->begin + 2'000'000 <= inner->end);
  CHECK(inner->end <= outer->end);
  CHECK(apart->end <= after);
  REQUIRE(t.ranks.size() == 1);
  CHECK(t.ranks[0].rank == 5);
  CHECK(t.ranks[0].tensor == 1);
  CHECK(t.ranks[0].data == 2);
  CHECK(t.ranks[0].pipeline == 0);
  CHECK(t.ranks[0].clock == steady_clock_name());
  CHECK(outer->lane == inner->lane);
  CHECK(outer->lane != apart->lane);
  CHECK(t.lanes[apart->lane].label == "transfer");
  CHECK(t.completeness.events_dropped == 0);
  CHECK(t.completeness.cost_ns_per_event > 10);
  CHECK(t.completeness.cost_ns_per_event < 20'000);
}

TEST_CASE("scan: only every so many-eth step is recorded, and nothing before the first") {
  TraceCollector collector;
  HostRecorder recorder = recorder_to(collector, {.interval = 3});
  host::Stream stream;
  { const ScopedSpan early(recorder, stream, SpanInfo{.name = "early"}); }
  for (int step = 0; step < 8; ++step) {
    recorder.begin_step(step);
    const ScopedSpan span(recorder, stream, SpanInfo{.name = "work"});
  }
  recorder.close();
  const Trace& t = collector.trace();
  REQUIRE(t.events.size() == 3);
  CHECK(t.events[0].step == 0);
  CHECK(t.events[1].step == 3);
  CHECK(t.events[2].step == 6);
}

TEST_CASE("scan: an empty recorder takes spans and records nothing") {
  HostRecorder recorder;
  host::Stream stream;
  recorder.begin_step(0);
  { const ScopedSpan span(recorder, stream, SpanInfo{.name = "work"}); }
  CHECK_FALSE(recorder.records());
  CHECK(recorder.add_group("g", {0, 1}) == -1);
  CHECK(recorder.take_fastest_step() < 0);
  recorder.close();
}

TEST_CASE("scan: records that find no room are counted, not waited for") {
  // A sink that holds the drain thread up while the ring fills.
  struct Slow final : RecordSink {
    std::int64_t* taken;
    RecordingTotals* totals;
    Slow(std::int64_t* t, RecordingTotals* all) : taken(t), totals(all) {}
    void start(const RecordingInfo&) override {}
    void lane(int, std::string_view) override {}
    void group(int, std::string_view, std::span<const int>) override {}
    void anchor(const ClockAnchor&) override {}
    void record(const Record&) override {
      if ((*taken)++ == 0) rest_ms(100);
    }
    void finish(const RecordingTotals& all) override { *totals = all; }
  };
  std::int64_t taken = 0;
  RecordingTotals totals;
  HostRecorder recorder({}, std::make_unique<Slow>(&taken, &totals), {.capacity = 16});
  host::Stream stream;
  recorder.begin_step(0);
  const auto spans = [&](int n) {
    for (int i = 0; i < n; ++i) {
      const ScopedSpan span(recorder, stream, SpanInfo{.name = "work"});
    }
  };
  spans(1);
  rest_ms(50);
  spans(999);
  recorder.close();
  CHECK(totals.recorded == taken);
  CHECK(totals.dropped > 0);
  CHECK(totals.recorded + totals.dropped == 1000);
}

TEST_CASE("scan: a sink that fails ends the recording, and close() tells why") {
  struct Full final : RecordSink {
    void start(const RecordingInfo&) override {}
    void lane(int, std::string_view) override {}
    void group(int, std::string_view, std::span<const int>) override {}
    void anchor(const ClockAnchor&) override {}
    void record(const Record&) override { throw std::runtime_error("disk full"); }
    void finish(const RecordingTotals&) override {}
  };
  HostRecorder recorder({}, std::make_unique<Full>());
  host::Stream stream;
  recorder.begin_step(0);
  { const ScopedSpan span(recorder, stream, SpanInfo{.name = "work"}); }
  CHECK_THROWS_WITH(recorder.close(), "disk full");
  // And a recorder that nobody closes keeps it to itself.
  { HostRecorder forgotten({}, std::make_unique<Full>()); }
}

TEST_CASE("scan: the device is asked while steps are recorded, and never by the rank's thread") {
  /// Says how often it was asked, and by whom.
  class Asked final : public mega::scan::detail::Recording {
   public:
    explicit Asked(TraceCollector& to) : Recording({}, to.sink(), {}) { start(); }
    ~Asked() override { close(); }
    void begin_step(std::int64_t step) { begin_step_at(step); }

   private:
    bool drain() override { return false; }
    [[nodiscard]] std::int64_t dropped() const noexcept override { return 0; }
    [[nodiscard]] std::optional<DeviceState> device_state() override {
      CHECK(std::this_thread::get_id() != made_by_);
      return DeviceState{.at = ++asked_, .sm_mhz = 1000};
    }
    std::thread::id made_by_ = std::this_thread::get_id();
    int asked_ = 0;
  };
  TraceCollector collector;
  std::size_t in_step = 0;
  {
    Asked recording(collector);
    rest_ms(60);
    recording.flush();
    CHECK(collector.trace().device_states.empty());
    recording.begin_step(0);
    for (int i = 0; i < 20; ++i) recording.flush();
    rest_ms(150);
    recording.begin_step(no_step);
    rest_ms(30);
    recording.flush();
    in_step = collector.trace().device_states.size();
  }
  const auto& states = collector.trace().device_states;
  // Every 20 ms or so, and not at each flush.
  REQUIRE_FALSE(states.empty());
  CHECK(states.size() <= 10);
  CHECK(states.size() == in_step);
  for (std::size_t i = 0; i < states.size(); ++i) {
    CHECK(states[i].at == static_cast<Nanoseconds>(i) + 1);
    CHECK(states[i].rank == 0);
    CHECK(states[i].sm_mhz == 1000);
  }
}

TEST_CASE("scan: on a stream with its own thread a span is the time of the work there") {
  TraceCollector collector;
  HostRecorder recorder = recorder_to(collector);
  {
    host::HostAsync device(3, 0);
    host::AsyncStream first = device.make_stream("first");
    host::AsyncStream second = device.make_stream("second");
    recorder.begin_step(0);
    const Nanoseconds queued = steady_now();
    for (int i = 0; i < 20; ++i) {
      host::AsyncStream& stream = i % 2 == 0 ? first : second;
      const ScopedSpan span(recorder, stream,
                            SpanInfo{.name = i % 2 == 0 ? "even" : "odd", .microbatch = i});
      stream.run([] { rest_ms(2); });
    }
    CHECK(steady_now() - queued < 15'000'000);
    first.synchronize();
    second.synchronize();
  }
  recorder.close();
  const Trace& t = collector.trace();
  REQUIRE(t.events.size() == 20);
  for (int i = 0; i < 20; ++i) {
    const Event* const e = find(t, i % 2 == 0 ? "even" : "odd", i / 2);
    REQUIRE(e != nullptr);
    CHECK(e->duration() >= 2'000'000);
    CHECK(e->microbatch == i);
    if (i >= 2) CHECK(e->begin >= find(t, i % 2 == 0 ? "even" : "odd", i / 2 - 1)->end);
  }
  CHECK(find(t, "even")->lane != find(t, "odd")->lane);
}

TEST_CASE("scan: a step's own time leaves out what it waited, and the fastest step counts") {
  TraceCollector collector;
  HostRecorder recorder = recorder_to(collector, {.interval = 0});
  host::Stream compute, receive;
  const auto step = [&](int number, int work_ms, int wait_ms) {
    recorder.begin_step(number);
    const ScopedSpan whole(recorder, compute,
                           SpanInfo{.name = "step", .kind = SpanKind::iteration});
    rest_ms(work_ms);
    const ScopedSpan wait(recorder, compute,
                          SpanInfo{.name = "recv_forward", .kind = SpanKind::wait});
    // The receive inside the wait is not waited for twice.
    const ScopedSpan inner(recorder, receive,
                           SpanInfo{.name = "recv", .kind = SpanKind::communication});
    rest_ms(wait_ms);
  };
  step(0, 60, 30);
  step(1, 8, 60);
  step(2, 60, 10);
  // Outside of a step nothing counts.
  { const ScopedSpan late(recorder, compute, SpanInfo{.name = "x", .kind = SpanKind::wait}); }
  const double fastest = recorder.take_fastest_step();
  CHECK(fastest >= 0.008);
  CHECK(fastest < 0.045);
  CHECK(recorder.take_fastest_step() < 0);
  recorder.close();
  CHECK(collector.trace().events.empty());
}

TEST_CASE("scan: groups have numbers, and a second one of the same ranks a name of its own") {
  TraceCollector collector;
  HostRecorder recorder = recorder_to(collector);
  const auto a = recorder.add_group("tensor", {3, 2});
  const auto b = recorder.add_group("tensor", {2, 3});
  const auto c = recorder.add_group("tensor", {2, 4});
  CHECK(recorder.group_ranks(a) == std::vector<int>{2, 3});
  host::Stream stream;
  recorder.begin_step(0);
  for (const auto group : {a, b, c}) {
    const ScopedSpan span(recorder, stream,
                          SpanInfo{.name = "all_reduce",
                                   .bytes = 12,
                                   .kind = SpanKind::communication,
                                   .group = group,
                                   .sequence = 9,
                                   .dtype = "float32"});
  }
  recorder.close();
  const Trace& t = collector.trace();
  REQUIRE(t.communications.size() == 3);
  CHECK(t.groups[t.communications[0].group].name == "tensor");
  CHECK(t.groups[t.communications[1].group].name == "tensor #2");
  CHECK(t.groups[t.communications[2].group].name == "tensor");
  CHECK(t.communications[0].group != t.communications[2].group);
  CHECK(t.communications[0].op == CommunicationOp::all_reduce);
  CHECK(t.communications[0].sequence == 9);
  CHECK(t.communications[0].bytes == 12);
  CHECK(t.names[t.communications[0].dtype] == "float32");
}

TEST_CASE("scan: the anchor brackets one moment on both clocks") {
  const ClockAnchor a = anchor_steady_clock();
  rest_ms(5);
  const ClockAnchor b = anchor_steady_clock();
  CHECK(a.width_ns >= 0);
  CHECK(a.width_ns < 1'000'000);
  // Both clocks moved alike; NTP slews by at most 500 ppm.
  const Nanoseconds steady = b.clock_ns - a.clock_ns, real = b.realtime_ns - a.realtime_ns;
  CHECK(steady >= 5'000'000);
  CHECK(std::abs(real - steady) <= a.width_ns + b.width_ns + steady / 1000);
}
