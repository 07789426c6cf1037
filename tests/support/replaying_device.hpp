/// @file  A host device that replays as a GPU does with graphs: work is recorded with the arguments
/// that it has at that time and run again later. It refuses what CUDA refuses in a capture, so that
/// the order of streams and events is tested without a GPU.
#pragma once
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/core/replay.hpp>
#include <mega/host/memory.hpp>
#include <mega/host/stream.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace mega_test {

/// What a stream knows of the capture that it takes part in.
struct CaptureState {
  std::uint64_t capture = 0;         ///< number of the capture, 0: none yet
  std::uint64_t work = 0, left = 0;  ///< pieces in it, and those that the first stream waits for
};

/// A capture of the calling thread.
struct Recording {
  std::uint64_t number;
  std::vector<std::function<void()>> work;
  std::vector<std::shared_ptr<CaptureState>> streams;  // the one it began on comes first

  static inline thread_local Recording* current = nullptr;
  static inline thread_local std::uint64_t captures = 0;

  [[nodiscard]] static bool holds(const CaptureState& stream) {
    return current != nullptr && stream.capture == current->number;
  }
};

inline void expect_capture(bool fine, const char* what) {
  mega::expects(fine, mega::ErrorCode::logic, what);
}

struct RecordedEvent {
  struct Mark {
    std::shared_ptr<CaptureState> stream;
    std::uint64_t capture = 0, work = 0;
  };
  std::shared_ptr<Mark> mark = std::make_shared<Mark>();
};

/// Based on Stream, so that host operations are found for it.
class RecordingStream : public mega::host::Stream {
 public:
  using event_type = RecordedEvent;

  template <std::invocable F>
  void run(F&& work) {
    if (Recording::current == nullptr) return std::forward<F>(work)();
    expect_capture(Recording::holds(*state_), "work of a stream that is not in the capture");
    ++state_->work;
    Recording::current->work.emplace_back(
        [call = std::make_shared<std::decay_t<F>>(std::forward<F>(work))] { (*call)(); });
  }
  void record(RecordedEvent& event) {
    *event.mark = {state_, Recording::holds(*state_) ? state_->capture : 0, state_->work};
  }
  void wait(const RecordedEvent& event) {
    const RecordedEvent::Mark& mark = *event.mark;
    Recording* const now = Recording::current;
    if (Recording::holds(*state_)) {
      expect_capture(mark.capture == state_->capture,
                     "a capture waits for an event that was recorded outside of it");
      if (state_ == now->streams.front()) mark.stream->left = mark.work;
      ++state_->work;
    } else if (now != nullptr && mark.capture == now->number) {
      *state_ = {now->number, 1, 0};
      now->streams.push_back(state_);
    } else {
      expect_capture(mark.capture == 0, "an event was last recorded in a capture");
    }
  }
  void synchronize() const {
    expect_capture(Recording::current == nullptr, "a capture cannot be waited for");
  }

 private:
  friend class RecordedReplays;
  std::shared_ptr<CaptureState> state_ = std::make_shared<CaptureState>();
};

static_assert(mega::host::host_stream<RecordingStream>);

/// Of all replays of a device.
struct ReplayCounts {
  int direct = 0;    ///< bodies that ran
  int recorded = 0;  ///< bodies that were recorded
  int replayed = 0;  ///< launches, those behind a recording included
};

class RecordedReplays {
 public:
  explicit RecordedReplays(std::shared_ptr<ReplayCounts> counts) : counts_(std::move(counts)) {}

  template <class Body, class... Others>
  void run(std::size_t place, std::uint64_t revision, const Body& body, RecordingStream& stream,
           Others&...) {
    if (place >= places_.size()) places_.resize(place + 1);
    Place& at = places_[place];
    if (!at.was_run || at.revision != revision) {
      at = {revision, true, {}};
      ++counts_->direct;
      return body();
    }
    if (at.work.empty()) {
      at.work = record(body, stream);
      ++counts_->recorded;
    }
    for (const auto& work : at.work) work();
    ++counts_->replayed;
  }
  void clear() noexcept { places_.clear(); }
  [[nodiscard]] std::size_t size() const noexcept {
    std::size_t count = 0;
    for (const Place& at : places_) count += at.work.empty() ? 0 : 1;
    return count;
  }

 private:
  struct Place {
    std::uint64_t revision = 0;
    bool was_run = false;
    std::vector<std::function<void()>> work;
  };

  template <class Body>
  static std::vector<std::function<void()>> record(const Body& body, RecordingStream& stream) {
    expect_capture(Recording::current == nullptr, "a capture within a capture");
    Recording recording{++Recording::captures, {}, {stream.state_}};
    *stream.state_ = {recording.number, 0, 0};
    struct Scope {
      explicit Scope(Recording& r) { Recording::current = &r; }
      ~Scope() { Recording::current = nullptr; }
    };
    {
      const Scope scope(recording);
      body();
    }
    for (std::size_t s = 1; s < recording.streams.size(); ++s)
      expect_capture(recording.streams[s]->work == recording.streams[s]->left,
                     "a capture ends before it was joined by all streams");
    return std::move(recording.work);
  }

  std::shared_ptr<ReplayCounts> counts_;
  std::vector<Place> places_;
};

/// Used by one thread. Copies share the counts.
class ReplayingDevice {
 public:
  using stream_type = RecordingStream;
  using memory_type = mega::host::Memory;
  using replays_type = RecordedReplays;

  explicit ReplayingDevice(mega::ReplayScope scope = mega::ReplayScope::none) : scope_(scope) {}

  [[nodiscard]] RecordingStream make_stream(const char*) const { return {}; }
  [[nodiscard]] RecordedEvent make_event() const { return {}; }
  [[nodiscard]] mega::host::Memory allocate(std::size_t bytes) const {
    return mega::host::Memory(bytes);
  }
  [[nodiscard]] mega::ReplayScope replay_scope() const noexcept { return scope_; }
  [[nodiscard]] RecordedReplays make_replays() const { return RecordedReplays(counts_); }
  [[nodiscard]] const ReplayCounts& counts() const noexcept { return *counts_; }

 private:
  mega::ReplayScope scope_;
  std::shared_ptr<ReplayCounts> counts_ = std::make_shared<ReplayCounts>();
};

static_assert(mega::device_policy<ReplayingDevice> && mega::replays_work<ReplayingDevice>);

}  // namespace mega_test
