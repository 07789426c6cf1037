/// @file  HostAsync: a host device with real queues. Each stream is a worker thread that runs its
/// work late by seeded random delays, so a forgotten event wait fails a test without a GPU.
#pragma once
#include <mega/core/device.hpp>
#include <mega/core/rng.hpp>
#include <mega/host/memory.hpp>
#include <mega/host/stream.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::host {

/// Marks a point in a stream. A copy names the same point's owner; record() moves the point.
class AsyncEvent {
 public:
  AsyncEvent() : state_(std::make_shared<State>()) {}

 private:
  friend class AsyncStream;
  struct State {
    std::mutex mutex;
    std::condition_variable passed;
    std::uint64_t recorded = 0;   // how often record() was queued
    std::uint64_t completed = 0;  // up to which record the streams have come
  };
  std::shared_ptr<State> state_;
};

namespace detail {

/// A callable of any type. std::function would do, at the price of a header that costs as much to
/// compile as this one.
class Task {
 public:
  template <std::invocable F>
  explicit Task(F&& call) : held_(std::make_unique<Of<std::decay_t<F>>>(std::forward<F>(call))) {}
  void operator()() { held_->call(); }
  void drop() noexcept { held_.reset(); }

 private:
  struct Any {
    virtual ~Any() = default;
    virtual void call() = 0;
  };
  template <class F>
  struct Of final : Any {
    explicit Of(F f) : f_(std::move(f)) {}
    void call() override { f_(); }
    F f_;
  };
  std::unique_ptr<Any> held_;
};

}  // namespace detail

/// A worker thread with a queue. After work has thrown, later work is skipped but events still
/// pass, so that no other stream hangs; synchronize() rethrows the first exception.
class AsyncStream {
 public:
  using event_type = AsyncEvent;

  /// @param max_delay_us  before one piece of work in four, the worker sleeps up to this long
  AsyncStream(std::uint64_t seed, std::uint32_t stream_id, int max_delay_us)
      : queue_(std::make_unique<Queue>()) {
    queue_->worker = std::thread([q = queue_.get(), seed, stream_id, max_delay_us] {
      drain(*q, RandomKey{seed, 0, stream_id, RandomUse::test}, max_delay_us);
    });
  }
  AsyncStream(AsyncStream&&) noexcept = default;
  AsyncStream& operator=(AsyncStream&& other) noexcept {
    std::swap(queue_, other.queue_);
    return *this;
  }
  /// Finishes what was queued.
  ~AsyncStream() {
    if (!queue_) return;
    {
      std::lock_guard lock(queue_->mutex);
      queue_->closing = true;
    }
    queue_->changed.notify_all();
    queue_->worker.join();
  }

  template <std::invocable F>
  void run(F&& work) {
    push({detail::Task(std::forward<F>(work)), false});
  }

  void record(AsyncEvent& event) {
    const auto state = event.state_;
    std::uint64_t mark = 0;
    {
      std::lock_guard lock(state->mutex);
      mark = ++state->recorded;
    }
    push({detail::Task([state, mark] {
            {
              std::lock_guard lock(state->mutex);
              if (mark > state->completed) state->completed = mark;
            }
            state->passed.notify_all();
          }),
          true});
  }

  void wait(const AsyncEvent& event) {
    const auto state = event.state_;
    std::uint64_t mark = 0;
    {
      std::lock_guard lock(state->mutex);
      mark = state->recorded;
    }
    push({detail::Task([state, mark] {
            std::unique_lock lock(state->mutex);
            state->passed.wait(lock, [&] { return state->completed >= mark; });
          }),
          true});
  }

  void synchronize() {
    std::unique_lock lock(queue_->mutex);
    queue_->idle.wait(lock, [&] { return queue_->work.empty() && !queue_->busy; });
    if (queue_->failure) std::rethrow_exception(std::exchange(queue_->failure, nullptr));
  }

 private:
  struct Work {
    detail::Task call;
    bool always;  // runs even after a failure: it only moves events
  };
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed, idle;
    std::vector<Work> work;
    std::exception_ptr failure;
    bool busy = false, closing = false;
    std::thread worker;
  };

  void push(Work work) {
    {
      std::lock_guard lock(queue_->mutex);
      queue_->work.push_back(std::move(work));
    }
    queue_->changed.notify_one();
  }

  static void drain(Queue& q, RandomKey random, int max_delay_us) {
    std::vector<Work> batch;
    Index done = 0;
    for (;;) {
      {
        std::unique_lock lock(q.mutex);
        q.busy = false;
        if (q.work.empty()) q.idle.notify_all();
        q.changed.wait(lock, [&] { return q.closing || !q.work.empty(); });
        if (q.work.empty()) return;
        batch.swap(q.work);
        q.busy = true;
      }
      for (Work& next : batch) perform(q, next, random.bits(done++), max_delay_us);
      batch.clear();
    }
  }

  static void perform(Queue& q, Work& work, std::uint32_t bits, int max_delay_us) {
    if (max_delay_us > 0 && bits % 4 == 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds((bits >> 2) % static_cast<std::uint32_t>(max_delay_us)));
    }
    {
      std::lock_guard lock(q.mutex);
      if (q.failure && !work.always) return;
    }
    try {
      work.call();
    } catch (...) {
      std::lock_guard lock(q.mutex);
      if (!q.failure) q.failure = std::current_exception();
    }
    // What the callable holds goes before the stream reports itself idle.
    work.call.drop();
  }

  std::unique_ptr<Queue> queue_;
};

static_assert(host_stream<AsyncStream>);

/// Device policy for tests of stream order: correct programs give the bits that Host gives.
/// Copies share the numbering of streams, so that each stream has its own sequence of delays.
class HostAsync {
 public:
  static constexpr std::string_view name = "host-async";
  using stream_type = AsyncStream;
  using memory_type = Memory;

  explicit HostAsync(std::uint64_t seed = 0, int max_delay_us = 50)
      : seed_(seed), max_delay_us_(max_delay_us) {}

  [[nodiscard]] AsyncStream make_stream(const char*) {
    return {seed_, next_->fetch_add(1), max_delay_us_};
  }
  [[nodiscard]] AsyncEvent make_event() const { return {}; }
  [[nodiscard]] Memory allocate(std::size_t bytes) const { return Memory(bytes); }

 private:
  std::uint64_t seed_;
  int max_delay_us_;
  std::shared_ptr<std::atomic<std::uint32_t>> next_ =
      std::make_shared<std::atomic<std::uint32_t>>(0);
};

static_assert(device_policy<HostAsync>);

}  // namespace mega::inline v0::host

namespace mega::inline v0 {
using host::HostAsync;
}
