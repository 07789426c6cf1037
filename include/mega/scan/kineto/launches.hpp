/// @file  Launches: which call started which work of the device, by their correlations.
#pragma once
#include <mega/scan/kineto/record.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mega::inline v0::scan::kineto {

/// Until link(), an event's `launch` holds its correlation, so that none needs room of its own.
/// Memory: 8 bytes for each correlation, within link().
class Launches {
 public:
  /// Marks the event of this record.
  void mark(Event& e, const Record& r) noexcept {
    if (r.category == Category::runtime) {
      calls_ += r.correlation != none ? 1 : 0;
      e.launch = r.correlation;
    } else if (on_device(r.category)) {
      started_ += r.correlation != none ? 1 : 0;
      e.launch = r.correlation;
    }
  }

  /// Calls and what they started, both in the order of their correlations, side by side.
  /// @param first_event  of this file
  void link(Trace& t, std::size_t first_event) const {
    std::vector<Correlated> calls, started;
    calls.reserve(calls_);
    started.reserve(started_);
    for (std::size_t i = first_event; i < t.events.size(); ++i) {
      Event& e = t.events[i];
      if (e.launch == none) continue;
      const bool waits = e.kind == EventKind::synchronize;
      const bool on_host = waits ? t.lanes[e.lane].kind == LaneKind::host
                                 : e.kind == EventKind::launch || e.kind == EventKind::host_op;
      (on_host ? calls : started).push_back({e.launch, static_cast<TableIndex>(i)});
      e.launch = none;
    }
    for (std::vector<Correlated>* list : {&calls, &started}) {
      if (!std::is_sorted(list->begin(), list->end())) std::sort(list->begin(), list->end());
    }
    auto call = calls.begin();
    std::uint32_t previous = none;
    for (const Correlated& work : started) {
      while (call != calls.end() && call->correlation < work.correlation) ++call;
      Event& e = t.events[work.event];
      if (call != calls.end() && call->correlation == work.correlation) e.launch = call->event;
      if (!is_kernel(e)) continue;
      if (previous == work.correlation) ++t.defects.duplicate_correlations;
      previous = work.correlation;
    }
    for (std::size_t i = first_event; i < t.events.size(); ++i) {
      const Event& e = t.events[i];
      if (is_kernel(e) && e.launch == none) ++t.defects.kernels_without_launch;
    }
  }

 private:
  /// A correlation and the event that carries it.
  struct Correlated {
    std::uint32_t correlation;
    TableIndex event;
    [[nodiscard]] bool operator<(const Correlated& other) const noexcept {
      return correlation != other.correlation ? correlation < other.correlation
                                              : event < other.event;
    }
  };
  [[nodiscard]] static bool is_kernel(const Event& e) noexcept {
    return e.kind == EventKind::compute || e.kind == EventKind::communication;
  }

  std::size_t calls_ = 0, started_ = 0;  // with a correlation
};

}  // namespace mega::inline v0::scan::kineto
