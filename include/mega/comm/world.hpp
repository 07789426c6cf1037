/// @file  World: what all communicators of one run share: the deadline, and the first failure,
/// which ends every later wait.
#pragma once
#include <mega/core/error.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

namespace mega::inline v0::comm {

using Seconds = std::chrono::duration<double>;

/// How long a rank waits for others before it gives the run up.
inline constexpr Seconds default_deadline{60.0};

/// "0.3 s".
[[nodiscard]] inline std::string to_string(Seconds seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds.count());
  return text;
}

/// Calls ready() for about a microsecond: long enough to meet a rank that runs on another core,
/// short enough to cost nothing where ranks share a core.
template <class Ready>
bool spin(const Ready& ready) {
  for (int i = 0; i < 40; ++i) {
    if (ready()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

/// What an exception says, and with which code it ends a process.
struct Ending {
  std::string what = "an exception that is not a std::exception";
  int code = 3;  ///< exit_code() of an Error
};
[[nodiscard]] inline Ending ending_of(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const Error& error) {
    return {error.what(), exit_code(error.code())};
  } catch (const std::exception& exception) {
    return {exception.what()};
  } catch (...) {
    return {};
  }
}

/// Why a run failed, as other ranks tell it.
struct Failure {
  int rank = -1;        ///< global rank that failed or found the fault
  bool shared = false;  ///< a disagreement: nobody's alone, and the sentence names all sides
  std::string what;

  /// What a rank throws because of another's failure.
  [[nodiscard]] Error echo() const {
    return {ErrorCode::peer_failed, shared ? what : sentence("rank ", rank, " failed: ", what)};
  }
};

/// Deadline and first failure of a run. Thread-safe.
class World {
 public:
  enum class Ended { ready, late, failed };

  explicit World(Seconds deadline) : deadline_(deadline) {}

  [[nodiscard]] Seconds deadline() const noexcept { return deadline_; }
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }

  /// Records that `rank` (global) left with `cause`. The first failure stays, later ones are
  /// echoes.
  void fail(int rank, std::exception_ptr cause) noexcept {
    record({rank, false, ending_of(cause).what}, cause);
  }

  /// Records a failure that another rank found, or that no rank has alone.
  void fail(Failure failure) noexcept {
    const auto cause = std::make_exception_ptr(failure.echo());
    record(std::move(failure), cause);
  }

  /// For a rank that found a fault while waiting: throws `error`, or the echo of an earlier
  /// failure.
  [[noreturn]] void fail_and_throw(int rank, const Error& error) {
    if (record({rank, false, error.what()}, std::make_exception_ptr(error))) throw error;
    throw_echo();
  }

  /// The same for a disagreement: all ranks throw this very sentence.
  [[noreturn]] void disagree_and_throw(int rank, std::string text) {
    fail(Failure{rank, true, std::move(text)});
    throw_echo();
  }

  /// @pre  failed()
  [[nodiscard]] Failure failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  /// Throws Error(peer_failed) that names the failed rank and its first sentence. @pre  failed()
  [[noreturn]] void throw_echo() const { throw failure().echo(); }

  void throw_if_failed() const {
    if (failed()) [[unlikely]]
      throw_echo();
  }

  /// Throws the first failure itself, if there was one.
  void rethrow_cause() const {
    if (failed()) std::rethrow_exception(cause_);
  }

  /// Waits on `changed` until ready(), the world's failure or the deadline. ready() is asked under
  /// `lock` and comes first.
  template <class Ready>
  Ended wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
             const Ready& ready) const {
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::steady_clock::duration>(deadline_);
    while (true) {
      if (ready()) return Ended::ready;
      if (failed()) return Ended::failed;
      const auto now = std::chrono::steady_clock::now();
      if (now >= end) return Ended::late;
      // A failure elsewhere does not know who waits here, so waiters look up now and then.
      changed.wait_until(lock, std::min(end, now + failure_poll));
    }
  }

 private:
  static constexpr std::chrono::milliseconds failure_poll{10};

  bool record(Failure failure, const std::exception_ptr& cause) noexcept {
    std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    failure_ = std::move(failure);
    cause_ = cause;
    failed_.store(true, std::memory_order_release);
    return true;
  }

  const Seconds deadline_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  Failure failure_;
  std::exception_ptr cause_;
};

}  // namespace mega::inline v0::comm
