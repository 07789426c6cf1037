/// @file  Independent tasks on several threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace mega::inline v0::scan::detail {

/// As many threads as asked for, or with 0 as the machine runs at once; at least one, and no more
/// than there are tasks.
[[nodiscard]] inline std::size_t useful_threads(std::size_t asked, std::size_t tasks) {
  constexpr std::size_t most = 16;
  if (asked == 0) asked = std::thread::hardware_concurrency();
  return std::max<std::size_t>(1, std::min({asked, tasks, most}));
}

/// Calls task(i, worker) for each i below `count`; worker < threads. Which thread takes which task
/// is left to chance, so that each must write where no other does. Tasks must not throw.
template <class Task>
void on_threads(std::size_t count, std::size_t threads, const Task& task) {
  std::atomic<std::size_t> next{0};
  const auto run = [&](std::size_t worker) {
    for (std::size_t i = next++; i < count; i = next++) task(i, worker);
  };
  std::vector<std::jthread> others;
  for (std::size_t worker = 1; worker < threads; ++worker) others.emplace_back(run, worker);
  run(0);
}

}  // namespace mega::inline v0::scan::detail
