/// @file  HostRecorder: records spans by the host's clock, for devices whose streams run callables.
/// What all recorders share is here too: lanes, groups, sampling by step, the thread that drains.
///
/// A recorder is a handle; copies record into one recording, so the hooks of a trainer and its
/// traced communicators hold copies. An empty handle records nothing, at the cost of a branch a
/// span; a program that never records uses NullRecorder, which costs nothing.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/hooks.hpp>
#include <mega/scan/record.hpp>
#include <mega/scan/ring.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

struct RecorderOptions {
  std::int64_t interval = 1;         ///< record steps divisible by it; 0: none
  bool times_steps = true;           ///< see HostRecorder::take_fastest_step()
  std::size_t capacity = 1U << 14U;  ///< records between two visits of the drain thread
};

[[nodiscard]] inline Nanoseconds steady_now() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

namespace detail {

/// What follows `key` in the first line of a small file that begins with it; empty where there is
/// no such line.
[[nodiscard]] inline std::string read_line(const char* path, std::string_view key = {}) {
  std::string found;
  std::FILE* const file = std::fopen(path, "r");
  if (file == nullptr) return found;
  std::array<char, 4096> line{};
  while (std::fgets(line.data(), static_cast<int>(line.size()), file) != nullptr) {
    std::string_view text(line.data());
    if (!text.starts_with(key)) continue;
    text.remove_prefix(key.size());
    const std::size_t begin = std::min(text.find_first_not_of(" \t"), text.size());
    found = text.substr(begin, text.find('\n') - begin);
    break;
  }
  std::fclose(file);
  return found;
}

}  // namespace detail

/// Names the clock of steady_now(): equal in all processes of a booted machine.
[[nodiscard]] inline std::string steady_clock_name() {
  const std::string boot = detail::read_line("/proc/sys/kernel/random/boot_id");
  // Without a name nothing is claimed of other processes.
  return boot.empty() ? boot : "steady " + boot;
}
[[nodiscard]] inline std::string host_name() {
  return detail::read_line("/proc/sys/kernel/hostname");
}
/// On which the calling thread may run, as Rank::processors has them.
[[nodiscard]] inline std::string own_processors() {
  return detail::read_line("/proc/thread-self/status", "Cpus_allowed_list:");
}

/// The steady clock against the real time: the narrowest of a few brackets.
[[nodiscard]] inline ClockAnchor anchor_steady_clock() noexcept {
  ClockAnchor best;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const Nanoseconds before = steady_now();
    const Nanoseconds real = std::chrono::duration_cast<std::chrono::nanoseconds>(
                                 std::chrono::system_clock::now().time_since_epoch())
                                 .count();
    const Nanoseconds width = steady_now() - before;
    if (attempt == 0 || width < best.width_ns) best = {before + width / 2, real, width};
  }
  return best;
}

namespace detail {

/// A stream that the recording has seen.
struct LaneLabel {
  const void* stream = nullptr;
  std::string text;
};

/// What recorders of all devices share. Everything but drain() belongs to the recording rank's
/// thread.
class Recording {
 public:
  Recording(RecordingInfo info, std::unique_ptr<RecordSink> sink, RecorderOptions options)
      : options_(options), info_(std::move(info)), sink_(std::move(sink)) {
    info_.interval = options.interval;
    if (info_.clock.empty()) info_.clock = steady_clock_name();
    if (info_.host.empty()) info_.host = host_name();
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  virtual ~Recording() = default;

  /// @param ranks  global; empty where unknown  @return  the number for SpanInfo::group
  std::int32_t add_group(std::string name, std::vector<int> ranks) {
    const std::lock_guard lock(described_);
    std::sort(ranks.begin(), ranks.end());
    // A second communicator of these ranks under this name counts its operations anew.
    int again = 1;
    for (const Group& g : groups_) again += g.first_name == name && g.ranks == ranks ? 1 : 0;
    groups_.push_back({name, again > 1 ? sentence(name, " #", again) : name, std::move(ranks)});
    return static_cast<std::int32_t>(groups_.size() - 1);
  }
  /// Global ranks of a group.
  [[nodiscard]] std::vector<int> group_ranks(std::int32_t group) {
    const std::lock_guard lock(described_);
    return groups_[static_cast<std::size_t>(group)].ranks;
  }

  [[nodiscard]] const RecordingInfo& info() const noexcept { return info_; }

  /// Drains, ends the thread, finishes the sink.
  void close() {
    if (std::exchange(closed_, true)) return;
    {
      const std::lock_guard lock(waking_);
      closing_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
    last_drain();
    try_to([&] { sink_->finish({recorded_, dropped()}); });
    if (failure_) std::rethrow_exception(failure_);
  }

  /// Returns once what was recorded so far, and is complete, is with the sink.
  void flush() {
    const std::lock_guard lock(draining_);
    visit();
  }

 protected:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds period{20};
  static constexpr std::size_t most_lanes = 256;

  /// Where a span without a chunk and micro-batch of its own is.
  struct Place {
    std::int32_t chunk = -1, microbatch = -1;
  };

  /// Of the derived class: gives sink_ what is complete, by keep(). False: nothing is left to come.
  virtual bool drain() = 0;
  /// Also what is still to be completed, as far as that can be waited for.
  virtual void last_drain() { flush(); }
  [[nodiscard]] virtual std::int64_t dropped() const noexcept = 0;
  /// What the device says of itself now, if it is time to ask. Called by the thread that drains
  /// while steps are recorded, never by the rank's.
  [[nodiscard]] virtual std::optional<DeviceState> device_state() { return {}; }

  /// At the end of the derived class's constructor, once drain() works.
  void start() {
    sink_->start(info_);
    if (options_.interval > 0) thread_ = std::thread([this] { run(); });
  }

  void begin_step_at(std::int64_t step) noexcept {
    step_ = static_cast<std::int32_t>(step);
    samples_ = step >= 0 && options_.interval > 0 && step % options_.interval == 0;
    if (samples_ == sampling_) return;
    {
      const std::lock_guard lock(waking_);
      sampling_ = samples_;
    }
    if (samples_) wake_.notify_one();
  }

  /// The record of a span that begins now, all but its times and lane.
  [[nodiscard]] Record describe(const SpanInfo& info) const noexcept {
    Record r;
    r.name = info.name;
    r.dtype = info.dtype;
    r.bytes = info.bytes;
    r.sequence = info.sequence;
    r.step = step_;
    r.microbatch = info.microbatch >= 0 ? info.microbatch : place_.microbatch;
    r.chunk = info.chunk >= 0 ? info.chunk : place_.chunk;
    r.group = info.group;
    r.peer = info.peer;
    r.kind = info.kind;
    return r;
  }

  /// Index of the lane of a stream, made at its first use; -1 where there are too many.
  [[nodiscard]] int lane_index(const void* stream) {
    const std::size_t count = lane_count_.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < count; ++i)
      if (lanes_[i].stream == stream) return static_cast<int>(i);
    if (count == most_lanes) return -1;
    const std::lock_guard lock(described_);
    lanes_[count].stream = stream;
    lanes_[count].text = sentence("stream ", count);
    lane_count_.store(count + 1, std::memory_order_release);
    return static_cast<int>(count);
  }
  void label_lane(const void* stream, const char* label) {
    const int lane = lane_index(stream);
    if (lane < 0) return;
    const std::lock_guard lock(described_);
    lanes_[static_cast<std::size_t>(lane)].text = label;
  }

  void keep(const Record& record) {
    describe_new();
    sink_->record(record);
    ++recorded_;
  }
  void keep(const ClockAnchor& anchor) { sink_->anchor(anchor); }

  RecorderOptions options_;
  RecordingInfo info_;
  Place place_;
  std::int32_t step_ = -1;
  bool samples_ = false;

 private:
  struct Group {
    std::string first_name, name;
    std::vector<int> ranks;
  };

  /// Runs f unless the sink has failed; its first failure is what close() throws.
  template <class F>
  void try_to(const F& f) noexcept {
    if (failure_) return;
    try {
      f();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  void describe_new() {
    const std::lock_guard lock(described_);
    for (; told_lanes_ < lane_count_.load(std::memory_order_acquire); ++told_lanes_)
      sink_->lane(static_cast<int>(told_lanes_), lanes_[told_lanes_].text);
    for (; told_groups_ < groups_.size(); ++told_groups_)
      sink_->group(static_cast<int>(told_groups_), groups_[told_groups_].name,
                   groups_[told_groups_].ranks);
  }

  bool visit() {
    bool more = false;
    try_to([&] {
      more = drain();
      sink_->flush();
    });
    return more;
  }

  void run() {
    std::unique_lock lock(waking_);
    bool more = false;
    while (!closing_) {
      // Between recorded steps there is nothing to visit for.
      wake_.wait_for(lock, sampling_ || more ? period : 50 * period);
      const bool sampling = sampling_;
      lock.unlock();
      const std::optional<DeviceState> state = sampling ? device_state() : std::nullopt;
      {
        const std::lock_guard draining(draining_);
        if (state) try_to([&] { sink_->device(*state); });
        more = visit();
      }
      lock.lock();
    }
  }

  std::unique_ptr<RecordSink> sink_;
  std::mutex described_;  // lanes' labels and groups
  std::array<LaneLabel, most_lanes> lanes_;
  std::atomic<std::size_t> lane_count_{0};
  std::vector<Group> groups_;
  std::size_t told_lanes_ = 0, told_groups_ = 0;
  std::mutex draining_;
  std::int64_t recorded_ = 0;
  std::exception_ptr failure_;
  std::mutex waking_;
  std::condition_variable wake_;
  bool sampling_ = false;  // written by the rank's thread only
  bool closing_ = false, closed_ = false;
  std::thread thread_;
};

/// Seconds of a rank's own work in its steps: the time of the iteration spans less that of the
/// waits inside them.
class StepTimes {
 public:
  /// Sums since the start, as whoever times them has them.
  struct Sums {
    Nanoseconds iterations = 0, waits = 0;
    std::int64_t steps = 0;
  };

  void observe(const Sums& now) noexcept {
    if (now.steps == last_.steps) return;
    const double own =
        static_cast<double>((now.iterations - last_.iterations) - (now.waits - last_.waits)) /
        static_cast<double>(now.steps - last_.steps) / 1e9;
    fastest_ = fastest_ < 0 ? own : std::min(fastest_, own);
    last_ = now;
  }
  [[nodiscard]] double take() noexcept { return std::exchange(fastest_, -1.0); }

 private:
  Sums last_;
  double fastest_ = -1;
};

struct NoWork {
  void operator()() const noexcept {}
};

struct InlineStream {
  template <class F>
  void run(F&& work) {
    work();
  }
};

/// Spans of host time. Streams may run in threads of their own: a lane belongs to the thread that
/// runs its stream, and each such thread has one ring.
class HostRecording final : public Recording {
 public:
  struct Lane;
  /// What end() needs of begin(). lane is null where nothing is recorded.
  struct Token {
    Lane* lane = nullptr;
    Place outer;
    bool waits = false, iterates = false;
  };

  HostRecording(RecordingInfo info, std::unique_ptr<RecordSink> sink, RecorderOptions options)
      : Recording(std::move(info), std::move(sink), options), anchors_(64) {
    if (info_.processors.empty()) info_.processors = own_processors();
    info_.cost_ns_per_event = calibrate();
    start();
  }
  ~HostRecording() override {
    try {
      close();
    } catch (...) {
      // close() tells who asks.
    }
  }

  void begin_step(std::int64_t step) noexcept {
    begin_step_at(step);
    times_.observe(sums());
    if (samples_) (void)anchors_.push(anchor_steady_clock());
  }

  template <class S>
  [[nodiscard]] Token begin(S& stream, const SpanInfo& info) noexcept {
    // Only what tells a step's own time is looked at outside of recorded steps.
    const bool waits = info.kind == SpanKind::wait || info.kind == SpanKind::communication;
    const bool iterates = info.kind == SpanKind::iteration;
    if (!samples_ && !(options_.times_steps && (waits || iterates))) return {};
    Lane* const lane = find(&stream);
    if (lane == nullptr) {
      ++without_lane_;
      return {};
    }
    const Token token{lane, place_, waits, iterates};
    Open open{describe(info), samples_, waits && iteration_depth_ > 0 && wait_depth_ == 0,
              iterates};
    place_ = {open.record.chunk, open.record.microbatch};
    wait_depth_ += waits ? 1 : 0;
    iteration_depth_ += iterates ? 1 : 0;
    stream.run([lane, open]() noexcept { lane->open(open); });
    return token;
  }

  template <class S>
  void end(S& stream, const Token& token) noexcept {
    if (token.lane == nullptr) return;
    place_ = token.outer;
    wait_depth_ -= token.waits ? 1 : 0;
    iteration_depth_ -= token.iterates ? 1 : 0;
    stream.run([this, lane = token.lane]() noexcept { lane->close(*this); });
  }

  void name_stream(const void* stream, const char* label) noexcept { label_lane(stream, label); }

  [[nodiscard]] double take_fastest_step() noexcept {
    times_.observe(sums());
    return times_.take();
  }

 private:
  static constexpr int most_open = 32;

  struct Open {
    Record record;
    bool kept = false;      // goes to the sink
    bool delays = false;    // is time that the step lost to others
    bool iterates = false;  // is a step
  };

  /// The records of one thread.
  struct Producer {
    Producer(std::thread::id id, std::size_t capacity) : thread(id), ring(capacity) {}
    std::thread::id thread;
    SpscRing<Record> ring;
    std::atomic<std::int64_t> dropped{0};
  };

 public:
  /// A stream's open spans and sums, touched by the thread that runs it.
  struct Lane {
    std::int16_t index = -1;
    Producer* producer = nullptr;
    int depth = 0;
    std::array<Open, most_open> stack;
    std::atomic<Nanoseconds> iterations{0}, waits{0};
    std::atomic<std::int64_t> steps{0};

    void open(const Open& span) noexcept {
      if (depth < most_open) {
        stack[static_cast<std::size_t>(depth)] = span;
        stack[static_cast<std::size_t>(depth)].record.begin = steady_now();
      }
      ++depth;
    }
    void close(HostRecording& recording) noexcept {
      const Nanoseconds now = steady_now();
      if (producer == nullptr) producer = recording.producer_here();
      if (--depth >= most_open) {
        add(producer->dropped, std::int64_t{1});
        return;
      }
      Open& span = stack[static_cast<std::size_t>(depth)];
      span.record.end = now;
      span.record.lane = index;
      if (span.delays) add(waits, now - span.record.begin);
      if (span.iterates) {
        add(iterations, now - span.record.begin);
        steps.store(steps.load(std::memory_order_relaxed) + 1, std::memory_order_release);
      }
      if (span.kept && !producer->ring.push(span.record)) add(producer->dropped, std::int64_t{1});
    }

   private:
    /// One thread writes, so this needs no locked instruction.
    template <class T>
    static void add(std::atomic<T>& sum, T value) noexcept {
      sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
    }
  };

 private:
  [[nodiscard]] Lane* find(const void* stream) noexcept {
    if (stream == last_stream_) return last_lane_;
    const int index = lane_index(stream);
    if (index < 0) return nullptr;
    auto& lane = own_lanes_[static_cast<std::size_t>(index)];
    if (!lane) {
      lane = std::make_unique<Lane>();
      lane->index = static_cast<std::int16_t>(index);
    }
    last_stream_ = stream;
    last_lane_ = lane.get();
    return last_lane_;
  }

  [[nodiscard]] Producer* producer_here() {
    const std::lock_guard lock(producing_);
    const std::thread::id here = std::this_thread::get_id();
    for (const auto& known : producers_)
      if (known->thread == here) return known.get();
    producers_.push_back(std::make_unique<Producer>(here, options_.capacity));
    return producers_.back().get();
  }

  [[nodiscard]] StepTimes::Sums sums() const noexcept {
    StepTimes::Sums out;
    for (const auto& lane : own_lanes_) {
      if (!lane) continue;
      out.steps += lane->steps.load(std::memory_order_acquire);
      out.iterations += lane->iterations.load(std::memory_order_relaxed);
      out.waits += lane->waits.load(std::memory_order_relaxed);
    }
    return out;
  }

  bool drain() override {
    ClockAnchor anchor;
    while (anchors_.pop(anchor)) keep(anchor);
    bool found = false;
    for (std::size_t p = 0;; ++p) {
      Producer* producer = nullptr;
      {
        const std::lock_guard lock(producing_);
        if (p == producers_.size()) return found;
        producer = producers_[p].get();
      }
      Record record;
      // As much as a ring holds, so that one that fills fast cannot hold the others up.
      for (std::size_t n = producer->ring.capacity(); n > 0 && producer->ring.pop(record); --n) {
        keep(record);
        found = true;
      }
    }
  }

  [[nodiscard]] std::int64_t dropped() const noexcept override {
    std::int64_t sum = without_lane_;
    for (const auto& producer : producers_)
      sum += producer->dropped.load(std::memory_order_relaxed);
    return sum;
  }

  /// Nanoseconds of the recording thread a record, at best: what else runs on the machine is not
  /// the recorder's cost.
  [[nodiscard]] double calibrate() {
    InlineStream stream;
    Lane lane;
    Producer scratch(std::this_thread::get_id(), 256);
    lane.producer = &scratch;
    last_stream_ = &stream;
    last_lane_ = &lane;
    samples_ = true;
    Nanoseconds best = 0;
    for (int round = 0; round < 32; ++round) {
      const Nanoseconds begin = steady_now();
      for (int i = 0; i < 256; ++i) end(stream, this->begin(stream, SpanInfo{"calibration"}));
      const Nanoseconds spent = steady_now() - begin;
      best = round == 0 ? spent : std::min(best, spent);
      Record record;
      while (scratch.ring.pop(record)) continue;
    }
    samples_ = false;
    last_stream_ = nullptr;
    last_lane_ = nullptr;
    return static_cast<double>(best) / 256;
  }

  const void* last_stream_ = nullptr;
  Lane* last_lane_ = nullptr;
  std::array<std::unique_ptr<Lane>, most_lanes> own_lanes_;
  std::int64_t without_lane_ = 0;
  int wait_depth_ = 0, iteration_depth_ = 0;
  StepTimes times_;
  SpscRing<ClockAnchor> anchors_;
  std::mutex producing_;
  std::vector<std::unique_ptr<Producer>> producers_;
};

}  // namespace detail

/// Models event_recorder on streams that run callables: Host's, where a span is the time between
/// begin() and end(), and HostAsync's, where it is the time on the stream's thread.
/// @cost  of a recorded span: two clock readings and one copy of a Record; see
///        RecordingInfo::cost_ns_per_event. The first span of a stream allocates.
class HostRecorder {
 public:
  using Token = detail::HostRecording::Token;

  /// Records nothing.
  HostRecorder() = default;
  /// @param sink  takes the records, in a thread of the recorder
  HostRecorder(RecordingInfo info, std::unique_ptr<RecordSink> sink, RecorderOptions options = {})
      : recording_(
            std::make_shared<detail::HostRecording>(std::move(info), std::move(sink), options)) {}

  /// Spans from here on belong to this step, and are recorded if options.interval says so. Before
  /// the first call nothing is.
  void begin_step(std::int64_t step) noexcept {
    if (recording_) recording_->begin_step(step);
  }

  template <class S>
  [[nodiscard]] Token begin(S& stream, const SpanInfo& info) noexcept requires requires {
    stream.run(detail::NoWork{});
  }
  { return recording_ ? recording_->begin(stream, info) : Token{}; }
  template <class S>
  void end(S& stream, const Token& token) noexcept requires requires {
    stream.run(detail::NoWork{});
  }
  {
    if (token.lane != nullptr) recording_->end(stream, token);
  }

  template <class S>
  void name_stream(const S& stream, const char* label) noexcept {
    if (recording_) recording_->name_stream(&stream, label);
  }
  /// Numbers a communicator for SpanInfo::group; -1 where nothing is recorded.
  std::int32_t add_group(std::string name, std::vector<int> ranks) {
    return recording_ ? recording_->add_group(std::move(name), std::move(ranks)) : -1;
  }
  [[nodiscard]] std::vector<int> group_ranks(std::int32_t group) const {
    return recording_ && group >= 0 ? recording_->group_ranks(group) : std::vector<int>{};
  }

  /// Seconds that this rank worked in the fastest step since the last call, waits for others left
  /// out; negative where no step ended. Counted in every step unless options.times_steps is off.
  [[nodiscard]] double take_fastest_step() noexcept {
    return recording_ ? recording_->take_fastest_step() : -1;
  }

  [[nodiscard]] bool records() const noexcept { return recording_ != nullptr; }
  [[nodiscard]] const RecordingInfo& info() const { return recording_->info(); }

  /// Brings to the sink what was recorded so far. Between steps.
  void flush() {
    if (recording_) recording_->flush();
  }
  /// Ends the recording for all copies, which afterwards must record nothing more.
  /// @throws  what the sink threw
  void close() {
    if (recording_) recording_->close();
  }

 private:
  std::shared_ptr<detail::HostRecording> recording_;
};

}  // namespace mega::inline v0::scan
