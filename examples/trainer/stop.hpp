/// @file  How a run is asked to stop.
#pragma once
#include <atomic>
#include <csignal>

namespace trainer {

/// Set by the first SIGTERM or SIGINT; the ranks agree on it after each step. The second one ends
/// the process as usual.
inline std::atomic<bool> stop_requested{false};

inline void stop_on_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop_requested = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

}  // namespace trainer
