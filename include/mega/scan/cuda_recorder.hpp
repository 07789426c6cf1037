/// @file  CudaRecorder: records spans of device time with pairs of CUDA events. Needs the CUDA
/// runtime; plain g++ compiles it.
///
/// A span is two timed events from a pool, recorded on the span's stream. Nothing waits in a step:
/// the drain thread asks for each pair, in the order in which spans ended, whether it is done,
/// reads the times and puts the events back. Times are those of the host's steady clock: an anchor
/// event on an idle stream of its own, between two readings of the clock, stands at the begin of
/// each recorded step, and again where the last one is four seconds old, so that the runtime's
/// float milliseconds keep half a microsecond. The host spins for the anchor (some 10 us); the
/// streams that work do not.
///
/// While steps are recorded the drain thread also asks the GPU for its clock, temperature, load and
/// power, ten times a second, where NVML is there: evidence for why a rank is slow.
///
/// CUDA graphs: events of captured spans are event record nodes with cudaEventRecordExternal, and
/// each replay writes them again, so the times of a replay can be read from its end to the next
/// launch only. See begin_capture(). A span must not begin inside a capture and end outside.
#pragma once
#include <mega/core/hooks.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/scan/nvml.hpp>
#include <mega/scan/recorder.hpp>
#include <mega/scan/trace.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::cuda {

/// Calls `work` on the host once the work queued on the stream so far is done; what is queued
/// behind waits for it. It must not call CUDA. Not to be captured into a graph.
template <class F>
void call_in_order(Stream& stream, F work) {
  auto held = std::make_unique<F>(std::move(work));
  check(cudaLaunchHostFunc(
            stream.native(),
            [](void* call) {
              const std::unique_ptr<F> owned(static_cast<F*>(call));
              (*owned)();
            },
            held.get()),
        "cudaLaunchHostFunc");
  (void)held.release();
}

}  // namespace mega::inline v0::cuda

namespace mega::inline v0::scan {

namespace detail {

/// The spans of one captured graph, and which of its replays their events hold.
struct CapturedGraph {
  struct Span {
    Record record;
    cudaEvent_t begin = nullptr, end = nullptr;
  };
  std::vector<Span> spans;
  std::atomic<std::uint64_t> launches{0};

  CapturedGraph() = default;
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  ~CapturedGraph() {
    for (const Span& span : spans) {
      (void)cudaEventDestroy(span.begin);
      (void)cudaEventDestroy(span.end);
    }
  }
};

/// A recorded event and how many hold it: the spans that begin or end there, and the lane whose
/// last event it is.
struct TimePoint {
  cudaEvent_t event = nullptr;
  std::atomic<int> holders{0};
  /// When it was, once a span that holds it was drained: the same for all of them, though CUDA
  /// gives distances that are rounded.
  std::optional<Nanoseconds> at;
};

/// A stream at one moment. Equal uses mean that nothing was queued in between; see
/// cuda::Stream::uses().
struct StreamPoint {
  cudaStream_t stream = nullptr;
  std::optional<std::uint64_t> uses_before, uses_after;  ///< around the call of native()

  template <class S>
  [[nodiscard]] static StreamPoint of(S& stream) {
    StreamPoint point;
    if constexpr (requires { stream.uses(); }) point.uses_before = stream.uses();
    point.stream = stream.native();
    if constexpr (requires { stream.uses(); }) point.uses_after = stream.uses();
    return point;
  }
};

class CudaRecording final : public Recording {
 public:
  struct Token {
    TimePoint* begin = nullptr;
    cudaEvent_t captured_begin = nullptr;
    int lane = -1;
    Record record;
    Place outer;
    bool kept = false, delays = false, waits = false, iterates = false;
  };

  CudaRecording(RecordingInfo info, std::unique_ptr<RecordSink> sink, RecorderOptions options)
      : Recording(of_this_gpu(std::move(info)), std::move(sink), options),
        pending_(options.capacity),
        anchors_(256),
        free_(4 * options.capacity + 1024) {
    cuda::check(cudaGetDevice(&device_), "cudaGetDevice");
    cuda::check(cudaStreamCreateWithFlags(&anchor_stream_, cudaStreamNonBlocking),
                "cudaStreamCreate");
    // Two a span under way; more are made where a step needs them.
    grow(std::min<std::size_t>(options.capacity, 2048));
    info_.cost_ns_per_event = calibrate();
    std::array<char, 32> bus{};
    if (options.interval > 0 &&
        cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device_) == cudaSuccess)
      nvml_ = NvmlDevice(bus.data());
    if (options.interval > 0) anchor();
    start();
  }
  ~CudaRecording() override {
    try {
      close();
    } catch (...) {
      // close() tells who asks.
    }
    for (const auto& point : all_) (void)cudaEventDestroy(point->event);
    (void)cudaStreamDestroy(anchor_stream_);
  }

  void begin_step(std::int64_t step) noexcept {
    begin_step_at(step);
    times_.observe(sums());
    if (samples_) anchor();
  }

  [[nodiscard]] Token begin(const void* lane, const StreamPoint& at,
                            const SpanInfo& info) noexcept {
    Token token;
    token.waits = info.kind == SpanKind::wait || info.kind == SpanKind::communication;
    token.iterates = info.kind == SpanKind::iteration;
    if (graph_ != nullptr) return begin_captured(lane, at.stream, info, token);
    if (!samples_ && !(options_.times_steps && (token.waits || token.iterates))) return token;
    if (samples_ && steady_now() - anchored_at_ > anchor_age) anchor();
    token.lane = lane_index(lane);
    token.begin = token.lane < 0 ? nullptr : mark(token.lane, at);
    if (token.begin == nullptr) {
      add(host_dropped_);
      return token;
    }
    enter(token, info, token.lane);
    token.kept = samples_;
    // Only what holds the compute stream back delays a step.
    token.delays = token.waits && iteration_stream_ == at.stream && wait_depth_++ == 0;
    if (token.waits && iteration_stream_ != at.stream) token.waits = false;
    if (token.iterates) iteration_stream_ = at.stream;
    return token;
  }

  void end(const StreamPoint& at, const Token& token) noexcept {
    if (token.captured_begin != nullptr) return end_captured(at.stream, token);
    place_ = token.outer;
    if (token.waits) --wait_depth_;
    if (token.iterates) iteration_stream_ = nullptr;
    if (TimePoint* const point = mark(token.lane, at); point != nullptr) {
      Pending pending;
      pending.record = token.record;
      pending.begin = token.begin;
      pending.end = point;
      pending.anchor = anchor_number_;
      pending.kept = token.kept;
      pending.delays = token.delays;
      pending.iterates = token.iterates;
      if (pending_.push(pending)) return;
      let_go(point);
    }
    let_go(token.begin);
    add(host_dropped_);
  }

  void name_stream(const void* lane, const char* label) noexcept { label_lane(lane, label); }

  [[nodiscard]] double take_fastest_step() noexcept {
    times_.observe(sums());
    return times_.take();
  }

  void begin_capture() { graph_ = std::make_shared<CapturedGraph>(); }
  [[nodiscard]] std::shared_ptr<CapturedGraph> end_capture() { return std::exchange(graph_, {}); }

  void before_replay(CapturedGraph& graph) noexcept {
    graph.launches.fetch_add(1, std::memory_order_acq_rel);
  }
  void replayed(const std::shared_ptr<CapturedGraph>& graph, cudaStream_t stream) noexcept {
    if (!samples_ || graph->spans.empty()) return;
    TimePoint* const gate = take_event();
    if (gate == nullptr || cudaEventRecord(gate->event, stream) != cudaSuccess) {
      if (gate != nullptr) let_go(gate);
      return add(host_dropped_, graph->spans.size());
    }
    Pending pending;
    pending.begin = gate;
    pending.anchor = anchor_number_;
    pending.launch = graph->launches.load(std::memory_order_relaxed);
    pending.record.step = step_;
    const std::lock_guard lock(graphs_);
    pending.graph = static_cast<int>(replays_.size());
    for (std::size_t i = 0; i < replays_.size(); ++i)
      if (!replays_[i]) pending.graph = static_cast<int>(i);
    if (!pending_.push(pending)) {
      let_go(gate);
      return add(host_dropped_, graph->spans.size());
    }
    if (pending.graph == static_cast<int>(replays_.size())) replays_.push_back({});
    replays_[static_cast<std::size_t>(pending.graph)] = graph;
  }

 private:
  static constexpr Nanoseconds anchor_age = 4'000'000'000;
  static constexpr Nanoseconds device_state_age = 100'000'000;
  static constexpr Nanoseconds shared_for = 10'000;
  static constexpr Nanoseconds rate_window =
      200'000'000;  // brackets of microseconds say little less

  struct Pending {
    Record record;
    TimePoint* begin = nullptr;  // of a replay: what stands behind it
    TimePoint* end = nullptr;
    std::uint64_t anchor = 0;
    std::uint64_t launch = 0;
    int graph = -1;  // into replays_
    bool kept = false, delays = false, iterates = false;
  };
  struct Anchor {
    ClockAnchor clock;
    Nanoseconds bracket_ns = 0;  // the device was there at most half of this before or after
    std::uint64_t number = 0;
    TimePoint* point = nullptr;
  };
  /// The last event of a lane, the stream's uses since it was recorded, and when that was.
  struct LaneEnd {
    TimePoint* point = nullptr;
    std::uint64_t uses = 0;
    Nanoseconds at = 0;
  };

  /// Clocks of GPUs run apart by what an anchor cannot tell: alignment may correct them.
  [[nodiscard]] static RecordingInfo of_this_gpu(RecordingInfo info) {
    if (info.clock.empty())
      info.clock = sentence(steady_clock_name(), " through the GPU of rank ", info.rank);
    return info;
  }

  static void add(std::atomic<std::int64_t>& sum, std::size_t more = 1) noexcept {
    sum.fetch_add(static_cast<std::int64_t>(more), std::memory_order_relaxed);
  }

  bool grow(std::size_t count) noexcept {
    for (std::size_t i = 0; i < count && all_.size() < free_.capacity(); ++i) {
      auto made = std::make_unique<TimePoint>();
      if (cudaEventCreateWithFlags(&made->event, cudaEventDefault) != cudaSuccess) return i > 0;
      spare_.push_back(made.get());
      all_.push_back(std::move(made));
    }
    return !spare_.empty();
  }
  /// Held once, by the caller; null where as many as there may be are under way.
  [[nodiscard]] TimePoint* take_event() noexcept {
    TimePoint* point = nullptr;
    if (!spare_.empty() || !free_.pop(point)) {
      if (spare_.empty() && !grow(64)) return nullptr;
      point = spare_.back();
      spare_.pop_back();
    }
    point->holders.store(1, std::memory_order_relaxed);
    point->at.reset();
    return point;
  }
  /// @pre  on the rank's thread
  void let_go(TimePoint* point) noexcept {
    if (point->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) spare_.push_back(point);
  }
  /// For whoever drains.
  void let_go_drained(TimePoint* point) noexcept {
    if (point->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) (void)free_.push(point);
  }

  /// An event here, held for the caller: the lane's last one where nothing was queued behind it,
  /// since a span mostly begins where another has ended, and each event costs the device a
  /// microsecond or two. Not if the host has let time pass: a device that waits for it does not
  /// work on the next span. Null where there is none.
  [[nodiscard]] TimePoint* mark(int lane, const StreamPoint& at) noexcept {
    const auto index = static_cast<std::size_t>(lane);
    if (lane_ends_.size() <= index) lane_ends_.resize(index + 1);
    LaneEnd& last = lane_ends_[index];
    const Nanoseconds now = steady_now();
    if (last.point != nullptr && at.uses_before == last.uses && now - last.at < shared_for) {
      last.point->holders.fetch_add(1, std::memory_order_relaxed);
      last.uses = *at.uses_after;
      return last.point;
    }
    TimePoint* const point = take_event();
    if (point == nullptr) return nullptr;
    if (cudaEventRecord(point->event, at.stream) != cudaSuccess) {
      let_go(point);
      return nullptr;
    }
    if (at.uses_after) {
      point->holders.fetch_add(1, std::memory_order_relaxed);
      if (last.point != nullptr) let_go(last.point);
      last = {point, *at.uses_after, now};
    }
    return point;
  }

  /// The narrowest of a few brackets. @pre  on the rank's thread
  void anchor() noexcept {
    Anchor best;
    for (int attempt = 0; attempt < 3; ++attempt) {
      TimePoint* const point = take_event();
      if (point == nullptr) break;
      const Nanoseconds before = steady_now();
      cudaError_t status = cudaEventRecord(point->event, anchor_stream_);
      while (status == cudaSuccess && (status = cudaEventQuery(point->event)) == cudaErrorNotReady)
        status = cudaSuccess;
      const Nanoseconds width = steady_now() - before;
      if (status != cudaSuccess || (best.point != nullptr && width >= best.bracket_ns)) {
        let_go(point);
        continue;
      }
      if (best.point != nullptr) let_go(best.point);
      best.point = point;
      best.clock.clock_ns = before + width / 2;
      best.bracket_ns = width;
    }
    (void)cudaGetLastError();  // not ready is an error to CUDA
    if (best.point == nullptr) return;
    const ClockAnchor real = anchor_steady_clock();
    best.clock.realtime_ns = real.realtime_ns + (best.clock.clock_ns - real.clock_ns);
    best.clock.width_ns = best.bracket_ns + real.width_ns;
    best.number = anchor_number_ + 1;
    if (!anchors_.push(best)) return let_go(best.point);
    anchor_number_ = best.number;
    anchored_at_ = best.clock.clock_ns;
  }

  void enter(Token& token, const SpanInfo& info, int lane) noexcept {
    token.record = describe(info);
    token.record.lane = static_cast<std::int16_t>(lane);
    token.outer = place_;
    place_ = {token.record.chunk, token.record.microbatch};
  }

  [[nodiscard]] Token begin_captured(const void* lane, cudaStream_t stream, const SpanInfo& info,
                                     Token token) noexcept {
    const int index = lane_index(lane);
    cudaEvent_t& begun = token.captured_begin;
    if (index < 0 || cudaEventCreateWithFlags(&begun, cudaEventDefault) != cudaSuccess)
      return token;
    if (cudaEventRecordWithFlags(begun, stream, cudaEventRecordExternal) != cudaSuccess) {
      (void)cudaEventDestroy(std::exchange(begun, nullptr));
      return token;
    }
    enter(token, info, index);
    return token;
  }
  void end_captured(cudaStream_t stream, const Token& token) noexcept {
    place_ = token.outer;
    cudaEvent_t event = nullptr;
    if (graph_ == nullptr || cudaEventCreateWithFlags(&event, cudaEventDefault) != cudaSuccess)
      return;
    // Kept even if recording fails: the begin's node names its event for as long as the graph.
    (void)cudaEventRecordWithFlags(event, stream, cudaEventRecordExternal);
    graph_->spans.push_back({token.record, token.captured_begin, event});
  }

  bool drain() override {
    (void)cudaSetDevice(device_);
    while (const Pending* const oldest = pending_.front()) {
      const Pending pending = *oldest;
      const cudaEvent_t last = (pending.graph >= 0 ? pending.begin : pending.end)->event;
      if (finishing_) (void)cudaEventSynchronize(last);
      const cudaError_t status = cudaEventQuery(last);
      if (status == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return true;
      }
      if (pending.kept || pending.graph >= 0) reach_anchor(pending.anchor);
      if (pending.graph >= 0) {
        take_replay(pending);
      } else {
        take(pending, status);
        let_go_drained(pending.end);
      }
      let_go_drained(pending.begin);
      pending_.pop();
    }
    return false;
  }
  [[nodiscard]] std::optional<DeviceState> device_state() override {
    const Nanoseconds now = steady_now();
    if (!nvml_ || now - asked_at_ < device_state_age) return {};
    asked_at_ = now;
    return nvml_.state(now);
  }
  void last_drain() override {
    finishing_ = true;
    flush();
  }

  void reach_anchor(std::uint64_t number) {
    while (anchor_.number < number) {
      Anchor next;
      if (!anchors_.pop(next)) return;
      if (anchor_.point != nullptr) {
        continue_clock(next);
        let_go_drained(anchor_.point);
      } else {
        first_clock_ = next.clock.clock_ns;
      }
      anchor_ = next;
      keep(anchor_.clock);
    }
  }

  /// The clock goes on from the last anchor at the device's rate as far as the new bracket allows:
  /// else spans on both sides of an anchor would overlap by its error.
  void continue_clock(Anchor& next) {
    Nanoseconds since = 0;
    if (!elapsed(anchor_.point->event, next.point->event, since)) return;
    const Nanoseconds said = next.clock.clock_ns, half = next.bracket_ns / 2;
    const Nanoseconds expected = anchor_.clock.clock_ns + scaled(since);
    next.clock.clock_ns = std::clamp(expected, said - half, said + half);
    next.clock.realtime_ns += next.clock.clock_ns - said;
    passed_ += since;
    if (passed_ >= rate_window)
      rate_ =
          static_cast<double>(next.clock.clock_ns - first_clock_) / static_cast<double>(passed_);
  }
  /// Time of the device as time of the host.
  [[nodiscard]] Nanoseconds scaled(Nanoseconds ns) const noexcept {
    return std::llround(static_cast<double>(ns) * rate_);
  }

  /// Nanoseconds from one event to another; false where CUDA does not say.
  [[nodiscard]] static bool elapsed(cudaEvent_t from, cudaEvent_t to, Nanoseconds& ns) noexcept {
    float ms = 0;
    if (cudaEventElapsedTime(&ms, from, to) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    ns = std::llround(static_cast<double>(ms) * 1e6);
    return true;
  }
  /// From the anchor, which is far, rounded more.
  [[nodiscard]] std::optional<Nanoseconds> time_of(cudaEvent_t event) const noexcept {
    Nanoseconds offset = 0;
    if (anchor_.point == nullptr || !elapsed(anchor_.point->event, event, offset)) return {};
    return anchor_.clock.clock_ns + scaled(offset);
  }
  [[nodiscard]] bool times_of(Record& record, TimePoint& begin, TimePoint& end) const noexcept {
    Nanoseconds duration = 0;
    if (!begin.at) begin.at = time_of(begin.event);
    if (!begin.at || (!end.at && !elapsed(begin.event, end.event, duration))) return false;
    if (!end.at) end.at = *begin.at + scaled(duration);
    record.begin = *begin.at;
    record.end = std::max(*end.at, record.begin);
    return true;
  }

  void take(const Pending& pending, cudaError_t status) {
    Nanoseconds duration = 0;
    if (status != cudaSuccess || !elapsed(pending.begin->event, pending.end->event, duration))
      return add(host_dropped_);
    if (pending.delays) waits_.fetch_add(duration, std::memory_order_relaxed);
    if (pending.iterates) {
      iterations_.fetch_add(duration, std::memory_order_relaxed);
      steps_.fetch_add(1, std::memory_order_release);
    }
    if (!pending.kept) return;
    Record record = pending.record;
    if (!times_of(record, *pending.begin, *pending.end)) return add(host_dropped_);
    keep(record);
  }

  void take_replay(const Pending& pending) {
    std::shared_ptr<CapturedGraph> graph;
    {
      const std::lock_guard lock(graphs_);
      graph = std::exchange(replays_[static_cast<std::size_t>(pending.graph)], {});
    }
    std::vector<Record> records;
    for (const CapturedGraph::Span& span : graph->spans) {
      Record record = span.record;
      record.step = pending.record.step;
      TimePoint begin{.event = span.begin}, end{.event = span.end};
      if (times_of(record, begin, end)) records.push_back(record);
    }
    // A launch in the meantime has written, or may have, what was read.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (graph->launches.load(std::memory_order_acquire) != pending.launch) records.clear();
    add(host_dropped_, graph->spans.size() - records.size());
    for (const Record& record : records) keep(record);
  }

  [[nodiscard]] StepTimes::Sums sums() const noexcept {
    StepTimes::Sums out;
    out.steps = steps_.load(std::memory_order_acquire);
    out.iterations = iterations_.load(std::memory_order_relaxed);
    out.waits = waits_.load(std::memory_order_relaxed);
    return out;
  }
  [[nodiscard]] std::int64_t dropped() const noexcept override {
    return host_dropped_.load(std::memory_order_relaxed);
  }

  /// Nanoseconds of the host a span, at best, on a stream that has nothing else to do.
  [[nodiscard]] double calibrate() {
    constexpr int spans = 64;
    samples_ = true;
    anchored_at_ = steady_now();
    Nanoseconds best = 0;
    for (int round = 0; round < 8; ++round) {
      const Nanoseconds begun = steady_now();
      for (int i = 0; i < spans; ++i)
        end({anchor_stream_, {}, {}},
            begin(this, {anchor_stream_, {}, {}}, SpanInfo{"calibration"}));
      const Nanoseconds spent = steady_now() - begun;
      best = round == 0 ? spent : std::min(best, spent);
      cuda::check(cudaStreamSynchronize(anchor_stream_), "cudaStreamSynchronize");
      Pending pending;
      while (pending_.pop(pending)) {
        let_go(pending.begin);
        let_go(pending.end);
      }
    }
    samples_ = false;
    anchored_at_ = 0;
    host_dropped_.store(0, std::memory_order_relaxed);  // a small ring has no room for a round
    label_lane(this, "calibration");
    return static_cast<double>(best) / spans;
  }

  int device_ = 0;
  cudaStream_t anchor_stream_ = nullptr;
  // The rank's thread.
  std::vector<std::unique_ptr<TimePoint>> all_;
  std::vector<TimePoint*> spare_;
  std::vector<LaneEnd> lane_ends_;
  std::uint64_t anchor_number_ = 0;
  Nanoseconds anchored_at_ = 0;
  cudaStream_t iteration_stream_ = nullptr;
  int wait_depth_ = 0;
  StepTimes times_;
  std::shared_ptr<CapturedGraph> graph_;
  // From there to whoever drains, and back.
  SpscRing<Pending> pending_;
  SpscRing<Anchor> anchors_;
  SpscRing<TimePoint*> free_;
  std::mutex graphs_;
  std::vector<std::shared_ptr<CapturedGraph>> replays_;
  std::atomic<std::int64_t> host_dropped_{0}, steps_{0};
  std::atomic<Nanoseconds> iterations_{0}, waits_{0};
  // Whoever drains.
  Anchor anchor_;
  Nanoseconds first_clock_ = 0, passed_ = 0;  // since the first anchor, by the host and the device
  double rate_ = 1;                           // of the host's clock over the device's
  bool finishing_ = false;
  // The drain thread.
  NvmlDevice nvml_;
  Nanoseconds asked_at_ = 0;
};

}  // namespace detail

/// Models event_recorder on CUDA streams, as HostRecorder does on the host's. Made on the thread
/// whose current device the streams belong to, and used there.
/// @cost  of a recorded span: at most two cudaEventRecord of the host, 2 to 5 us in all; see
///        RecordingInfo::cost_ns_per_event. Each event keeps the device for a microsecond or two.
///        Spans that meet with nothing queued in between share one.
/// A span's end is when its last kernel has ended and the event behind it was reached.
class CudaRecorder {
 public:
  using Token = detail::CudaRecording::Token;
  /// The spans of a captured graph; their events live as long as a copy does.
  using Captured = std::shared_ptr<detail::CapturedGraph>;

  /// Records nothing.
  CudaRecorder() = default;
  /// @throws  Error(device)
  CudaRecorder(RecordingInfo info, std::unique_ptr<RecordSink> sink, RecorderOptions options = {})
      : recording_(
            std::make_shared<detail::CudaRecording>(std::move(info), std::move(sink), options)) {}

  void begin_step(std::int64_t step) noexcept {
    if (recording_) recording_->begin_step(step);
  }
  template <class S>
  [[nodiscard]] Token begin(S& stream, const SpanInfo& info) noexcept requires requires {
    { stream.native() } -> std::convertible_to<cudaStream_t>;
  }
  {
    return recording_ ? recording_->begin(&stream, detail::StreamPoint::of(stream), info) : Token{};
  }
  template <class S>
  void end(S& stream, const Token& token) noexcept requires requires {
    { stream.native() } -> std::convertible_to<cudaStream_t>;
  }
  {
    if (token.begin != nullptr || token.captured_begin != nullptr)
      recording_->end(detail::StreamPoint::of(stream), token);
  }

  template <class S>
  void name_stream(const S& stream, const char* label) noexcept {
    if (recording_) recording_->name_stream(&stream, label);
  }
  std::int32_t add_group(std::string name, std::vector<int> ranks) {
    return recording_ ? recording_->add_group(std::move(name), std::move(ranks)) : -1;
  }
  [[nodiscard]] std::vector<int> group_ranks(std::int32_t group) const {
    return recording_ && group >= 0 ? recording_->group_ranks(group) : std::vector<int>{};
  }

  /// As HostRecorder's, of the steps whose end the device has passed: waits are those of the stream
  /// that the step's own span is on.
  [[nodiscard]] double take_fastest_step() noexcept {
    return recording_ ? recording_->take_fastest_step() : -1;
  }

  /// Spans from here to end_capture() belong to the graph that the caller captures meanwhile. A
  /// recorder captures one graph at a time, and spans outside of it are lost so long.
  void begin_capture() {
    if (recording_) recording_->begin_capture();
  }
  [[nodiscard]] Captured end_capture() { return recording_ ? recording_->end_capture() : nullptr; }
  /// Right before and behind each launch. The times of a replay are kept if the drain thread has
  /// read them before the next launch begins; else its spans count as dropped.
  void before_replay(const Captured& graph) noexcept {
    if (recording_ && graph) recording_->before_replay(*graph);
  }
  template <class S>
  void replayed(const Captured& graph, S& stream) noexcept {
    if (recording_ && graph) recording_->replayed(graph, stream.native());
  }

  [[nodiscard]] bool records() const noexcept { return recording_ != nullptr; }
  [[nodiscard]] const RecordingInfo& info() const { return recording_->info(); }
  /// Brings to the sink what was recorded so far and is done.
  void flush() {
    if (recording_) recording_->flush();
  }
  /// Waits for the spans under way and ends the recording for all copies.
  void close() {
    if (recording_) recording_->close();
  }

 private:
  std::shared_ptr<detail::CudaRecording> recording_;
};

}  // namespace mega::inline v0::scan
