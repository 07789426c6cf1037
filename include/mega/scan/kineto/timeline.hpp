/// @file  Timeline of one file: the steps of its events, and the base of its clock.
#pragma once
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace mega::inline v0::scan::kineto {

/// Stays at the ends of the range: times of a hostile file need not make sense.
[[nodiscard]] inline Nanoseconds saturating_sum(Nanoseconds a, Nanoseconds b) noexcept {
  Nanoseconds out = 0;
  if (!__builtin_add_overflow(a, b, &out)) return out;
  return a < 0 ? std::numeric_limits<Nanoseconds>::min() : std::numeric_limits<Nanoseconds>::max();
}

/// Ranges that the profiler named "ProfilerStep#N".
class Steps {
 public:
  void add(Nanoseconds begin, Nanoseconds end, std::int32_t number) {
    steps_.push_back({begin, end, number});
  }

  /// Host work belongs to the step in which it began, device work to that of its launch.
  /// @pre launches are linked
  void assign(Trace& t, std::size_t first_event) {
    if (steps_.empty()) return;
    std::sort(steps_.begin(), steps_.end(),
              [](const Step& a, const Step& b) { return a.begin < b.begin; });
    const Step* current = &steps_.front();
    const auto step_at = [&](Nanoseconds time) -> std::int32_t {
      if (time < current->begin || time >= current->end) {
        const auto after = std::upper_bound(
            steps_.begin(), steps_.end(), time,
            [](Nanoseconds value, const Step& step) { return value < step.begin; });
        if (after == steps_.begin()) return -1;
        current = &*(after - 1);
      }
      return time < current->end ? current->number : -1;
    };
    for (std::size_t i = first_event; i < t.events.size(); ++i) {
      Event& e = t.events[i];
      e.step = step_at(e.launch == none ? e.begin : t.events[e.launch].begin);
    }
  }

 private:
  struct Step {
    Nanoseconds begin, end;
    std::int32_t number;
  };
  std::vector<Step> steps_;
};

/// Stamps are relative to a base that each process rounds down to a multiple of three months, or
/// absolute. All become absolute; a file that left its base out takes the quarter of the others.
/// @param base  "baseTimeNanoseconds", where the file has it
inline void settle_clock(Trace& t, std::size_t first_event, std::optional<Nanoseconds> base) {
  if (t.events.size() == first_event) return;
  constexpr Nanoseconds quarter = Nanoseconds{7889238} * 1000000000;
  constexpr Nanoseconds hour = Nanoseconds{3600} * 1000000000;
  Nanoseconds shift = base.value_or(0);
  if (first_event > 0) {
    const Nanoseconds apart =
        saturating_sum(saturating_sum(t.events[first_event].begin, shift),
                       -std::max(t.events[0].begin, -std::numeric_limits<Nanoseconds>::max()));
    const Nanoseconds quarters =
        saturating_sum(apart, apart < 0 ? -quarter / 2 : quarter / 2) / quarter;
    const Nanoseconds rest = apart - quarters * quarter;
    const bool is_near = rest < hour && rest > -hour;
    if (!base && quarters != 0 && is_near) {
      shift -= quarters * quarter;
      ++t.defects.clock_base_adjusted;
    } else if (base && *base % quarter == 0 && is_near &&
               t.events[0].begin / quarter != *base / quarter) {
      ++t.defects.clock_base_adjusted;
    }
  }
  if (shift == 0) return;
  for (std::size_t i = first_event; i < t.events.size(); ++i) {
    t.events[i].begin = saturating_sum(t.events[i].begin, shift);
    t.events[i].end = saturating_sum(t.events[i].end, shift);
  }
}

}  // namespace mega::inline v0::scan::kineto
