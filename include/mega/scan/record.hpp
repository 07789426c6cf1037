/// @file  Record: one recorded span as it travels from a recorder to its sink, and what goes with a
/// recording: who recorded, by which clock, at which cost.
#pragma once
#include <mega/core/hooks.hpp>
#include <mega/core/mesh.hpp>
#include <mega/scan/trace.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// Fixed size; texts are those of the SpanInfo and outlive the recorder.
struct Record {
  Nanoseconds begin = 0;  ///< in the recorder's clock
  Nanoseconds end = 0;
  std::string_view name, dtype;
  std::int64_t bytes = 0;
  std::int64_t sequence = -1;
  std::int32_t step = -1;
  std::int32_t microbatch = -1;
  std::int32_t chunk = -1;
  std::int32_t group = -1;  ///< index into the recorder's groups
  std::int32_t peer = -1;
  std::int16_t lane = -1;  ///< index into the recorder's lanes
  SpanKind kind = SpanKind::other;
};

[[nodiscard]] constexpr EventKind event_kind(SpanKind kind) noexcept {
  switch (kind) {
    case SpanKind::other: return EventKind::other;
    case SpanKind::iteration: return EventKind::iteration;
    case SpanKind::forward: return EventKind::forward;
    case SpanKind::backward: return EventKind::backward;
    case SpanKind::weight: return EventKind::weight;
    case SpanKind::loss: return EventKind::loss;
    case SpanKind::optimizer: return EventKind::optimizer;
    case SpanKind::compute: return EventKind::compute;
    case SpanKind::communication: return EventKind::communication;
    case SpanKind::wait: return EventKind::synchronize;
  }
  return EventKind::other;
}

/// The operation that a communication span is named after.
[[nodiscard]] constexpr CommunicationOp communication_op(std::string_view name) noexcept {
  for (int op = 0; op <= static_cast<int>(CommunicationOp::send_recv); ++op) {
    if (to_string(static_cast<CommunicationOp>(op)) == name)
      return static_cast<CommunicationOp>(op);
  }
  return CommunicationOp::unknown;
}

/// One moment read on two clocks: the recorder's, between two readings, and the real time. The
/// recorder's clock stood at `clock_ns` within half of `width_ns`.
struct ClockAnchor {
  Nanoseconds clock_ns = 0;
  Nanoseconds realtime_ns = 0;  ///< since 1970
  Nanoseconds width_ns = 0;
};

/// What a recording says of itself before its first record.
struct RecordingInfo {
  std::int32_t rank = 0;
  std::int32_t world = 1;
  std::int32_t data = -1, pipeline = -1, tensor = -1;
  std::string clock;             ///< recordings with equal names read one clock
  std::string host;              ///< name of the machine; empty: unknown
  std::string processors;        ///< see Rank::processors
  std::int64_t interval = 1;     ///< every how-many-eth step is recorded
  double cost_ns_per_event = 0;  ///< of the thread that records, measured at start
};

/// Rank `rank` of a mesh.
[[nodiscard]] inline RecordingInfo recording_of(const Mesh& mesh, int rank) {
  const Coordinates at = mesh.coordinates(rank);
  RecordingInfo info;
  info.rank = rank;
  info.world = mesh.size();
  info.data = at[Axis::data];
  info.pipeline = at[Axis::pipeline];
  info.tensor = at[Axis::tensor];
  return info;
}

/// What a recording says of itself behind its last record.
struct RecordingTotals {
  std::int64_t recorded = 0;
  std::int64_t dropped = 0;  ///< a ring was full, or the device had no event left
};

/// Takes what a recorder recorded. Called by one thread at a time, never by the one that records,
/// except for finish(). A lane or group is described before its first record. Where a call throws,
/// the recording ends there, and the recorder's close() tells.
class RecordSink {
 public:
  virtual ~RecordSink() = default;
  virtual void start(const RecordingInfo& info) = 0;
  virtual void lane(int lane, std::string_view label) = 0;
  virtual void group(int group, std::string_view name, std::span<const int> ranks) = 0;
  virtual void anchor(const ClockAnchor& anchor) = 0;
  virtual void record(const Record& record) = 0;
  /// Without DeviceState::rank. For sinks that want it.
  virtual void device(const DeviceState&) {}
  /// Nothing is buffered any more: called when the recorder has drained what there was.
  virtual void flush() {}
  virtual void finish(const RecordingTotals& totals) = 0;
};

/// For a recorder that only times steps.
class NoSink final : public RecordSink {
 public:
  void start(const RecordingInfo&) override {}
  void lane(int, std::string_view) override {}
  void group(int, std::string_view, std::span<const int>) override {}
  void anchor(const ClockAnchor&) override {}
  void record(const Record&) override {}
  void finish(const RecordingTotals&) override {}
};

/// Collects the records of the ranks of a process in one Trace.
class TraceCollector {
 public:
  /// The sink of one more rank. The collector outlives it.
  [[nodiscard]] std::unique_ptr<RecordSink> sink() { return std::make_unique<Sink>(*this); }

  /// @pre  all recorders are closed
  [[nodiscard]] const Trace& trace() const noexcept { return trace_; }
  [[nodiscard]] Trace take() { return std::move(trace_); }

 private:
  class Sink final : public RecordSink {
   public:
    explicit Sink(TraceCollector& to) : to_(to) {}

    void start(const RecordingInfo& info) override {
      const std::lock_guard lock(to_.mutex_);
      rank_ = static_cast<TableIndex>(to_.trace_.ranks.size());
      Rank made;
      made.rank = info.rank;
      made.data = info.data;
      made.pipeline = info.pipeline;
      made.tensor = info.tensor;
      made.clock = info.clock;
      made.host = info.host;
      made.processors = info.processors;
      to_.trace_.ranks.push_back(std::move(made));
      auto& cost = to_.trace_.completeness.cost_ns_per_event;
      cost = cost > info.cost_ns_per_event ? cost : info.cost_ns_per_event;
    }
    void lane(int lane, std::string_view label) override {
      const std::lock_guard lock(to_.mutex_);
      lanes_[lane] = static_cast<TableIndex>(to_.trace_.lanes.size());
      to_.trace_.lanes.push_back({rank_, 0, lane, LaneKind::device, std::string(label)});
    }
    void group(int group, std::string_view name, std::span<const int> ranks) override {
      const std::lock_guard lock(to_.mutex_);
      groups_[group] =
          to_.trace_.intern_group(name, std::vector<std::int32_t>(ranks.begin(), ranks.end()));
    }
    void anchor(const ClockAnchor&) override {}
    void record(const Record& r) override {
      const std::lock_guard lock(to_.mutex_);
      Trace& t = to_.trace_;
      Event e;
      e.begin = r.begin;
      e.end = r.end;
      e.name = t.names.intern(r.name);
      e.lane = lanes_.at(r.lane);
      e.step = r.step;
      e.microbatch = r.microbatch;
      e.chunk = static_cast<std::int16_t>(r.chunk);
      e.kind = event_kind(r.kind);
      const auto event = static_cast<TableIndex>(t.events.push_back(e));
      if (r.kind != SpanKind::communication) return;
      Communication c;
      c.group = r.group < 0 ? none : groups_.at(r.group);
      c.peer = r.peer;
      c.sequence = r.sequence;
      c.bytes = r.bytes;
      c.dtype = r.dtype.empty() ? none : t.names.intern(r.dtype);
      c.op = communication_op(r.name);
      t.attach(event, c);
    }
    void device(const DeviceState& state) override {
      const std::lock_guard lock(to_.mutex_);
      to_.trace_.device_states.push_back(state);
      to_.trace_.device_states.back().rank = rank_;
    }
    void finish(const RecordingTotals& totals) override {
      const std::lock_guard lock(to_.mutex_);
      to_.trace_.completeness.events_dropped += totals.dropped;
    }

   private:
    TraceCollector& to_;
    TableIndex rank_ = none;
    std::map<int, TableIndex> lanes_, groups_;
  };

  std::mutex mutex_;
  Trace trace_;
};

}  // namespace mega::inline v0::scan
