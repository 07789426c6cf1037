/// @file  StallMeter: a recorder that only adds up how long compute waited for other ranks.
#pragma once
#include <mega/core/hooks.hpp>

#include <chrono>
#include <string_view>

namespace mega::inline v0::train {

/// For devices that run work as it is queued (Host): there a span's host time is its device time.
/// Two clock reads for each message received, none for other spans.
class StallMeter {
 public:
  using Clock = std::chrono::steady_clock;
  struct Token {
    Clock::time_point begin;
    bool counts;
  };

  template <class Stream>
  [[nodiscard]] Token begin(Stream&, const SpanInfo& info) noexcept {
    const bool counts = info.name == "recv_forward" || info.name == "recv_backward";
    return {counts ? Clock::now() : Clock::time_point{}, counts};
  }
  template <class Stream>
  void end(Stream&, const Token& token) noexcept {
    if (token.counts) waited_ += Clock::now() - token.begin;
  }

  /// Seconds waited since the last call of this function.
  [[nodiscard]] double take_seconds() noexcept {
    const double seconds = std::chrono::duration<double>(waited_).count();
    waited_ = {};
    return seconds;
  }

 private:
  Clock::duration waited_{};
};

}  // namespace mega::inline v0::train
