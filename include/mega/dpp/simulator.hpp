/// @file  How long a schedule takes when every action has a fixed duration: step time, bubble and
/// peak of live activations. Links are ideal: transfers overlap everything and each other.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/schedule.hpp>

#include <cstddef>
#include <vector>

namespace mega::inline v0::dpp {

/// Durations of the actions of one chunk, in one unit of the caller's choice.
struct ActionTimes {
  double forward = 1;
  double backward_input = 1;  ///< a whole backward takes backward_input + backward_weight
  double backward_weight = 1;
  double hop = 0;  ///< from the end of an action to its data on another rank
};

/// Papers mean one of two bubbles: wall counts a rank's wait for its first micro-batch, span does
/// not.
struct Timing {
  double makespan = 0;             ///< start of the first action to the end of the last
  double longest_span = 0;         ///< largest (last end - first start) of a rank
  double busy = 0;                 ///< computing time of the busiest rank
  std::vector<int> peak_per_rank;  ///< [p] live activations: forward done, weight gradient not

  [[nodiscard]] constexpr double bubble_wall() const noexcept { return makespan - busy; }
  [[nodiscard]] constexpr double bubble_span() const noexcept { return longest_span - busy; }
  /// Idle fraction of the step.
  [[nodiscard]] constexpr double wall_fraction() const noexcept { return bubble_wall() / makespan; }
  [[nodiscard]] constexpr double span_fraction() const noexcept {
    return bubble_span() / longest_span;
  }
};

/// Runs the compute actions of a schedule, lowered or not, with unlimited slots; every rank starts
/// an action as soon as its list and its input allow. A hop between stages of one rank is free.
/// Throws Error(usage) if the ranks wait for each other. @pre actions within the pipeline's bounds
[[nodiscard]] constexpr Timing simulate(const ScheduleView& s, const ActionTimes& times = {}) {
  constexpr double pending = -1;
  const auto at = [&](int stage, int microbatch) {
    return static_cast<std::size_t>(stage * s.m + microbatch);
  };
  const int last_stage = s.stages() - 1;
  std::vector<double> forward_end(at(s.stages(), 0), pending);
  std::vector<double> gradient_end(at(s.stages(), 0), pending);  // of the stage's input
  std::vector<std::size_t> next(static_cast<std::size_t>(s.p), 0);
  std::vector<double> clock(next.size(), 0.0);
  std::vector<double> start(next.size(), pending);
  std::vector<int> live(next.size(), 0);
  Timing timing;
  timing.peak_per_rank.assign(next.size(), 0);
  std::size_t left = 0;
  for (int rank = 0; rank < s.p; ++rank) {
    double busy = 0;
    for (const Action& a : s.of_rank(rank)) {
      if (is_compute(a.kind)) ++left;
      if (a.kind == ActionKind::forward) busy += times.forward;
      if (gives_input_gradient(a.kind)) busy += times.backward_input;
      if (gives_weight_gradient(a.kind)) busy += times.backward_weight;
    }
    timing.busy = busy > timing.busy ? busy : timing.busy;
  }

  // Earliest start that the data allows, or pending.
  const auto arrival = [&](int rank, const Action& a) {
    const int stage = s.stage(rank, a.chunk);
    const auto from = [&](const std::vector<double>& ends, int source) {
      const double end = ends[at(source, a.microbatch)];
      return end == pending || s.rank_of(source) == rank ? end : end + times.hop;
    };
    if (a.kind == ActionKind::forward) return stage == 0 ? 0.0 : from(forward_end, stage - 1);
    if (a.kind == ActionKind::backward_weight) return from(gradient_end, stage);
    return stage == last_stage ? from(forward_end, stage) : from(gradient_end, stage + 1);
  };

  for (bool progress = true; progress;) {
    progress = false;
    for (int rank = 0; rank < s.p; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      const auto list = s.of_rank(rank);
      for (; next[r] < list.size(); ++next[r]) {
        const Action& a = list[next[r]];
        if (!is_compute(a.kind)) continue;
        const double ready = arrival(rank, a);
        if (ready == pending) break;
        if (clock[r] < ready) clock[r] = ready;
        if (start[r] == pending) start[r] = clock[r];
        const auto slot = at(s.stage(rank, a.chunk), a.microbatch);
        if (a.kind == ActionKind::forward) {
          clock[r] += times.forward;
          forward_end[slot] = clock[r];
          if (++live[r] > timing.peak_per_rank[r]) timing.peak_per_rank[r] = live[r];
        }
        if (gives_input_gradient(a.kind)) {
          clock[r] += times.backward_input;
          if (a.kind == ActionKind::backward) clock[r] += times.backward_weight;
          gradient_end[slot] = clock[r];
        }
        if (a.kind == ActionKind::backward_weight) clock[r] += times.backward_weight;
        if (gives_weight_gradient(a.kind)) --live[r];
        progress = true;
        --left;
      }
    }
  }
  expects(left == 0, ErrorCode::usage, [&] {
    return sentence("the schedule stops with ", left,
                    " compute actions left: ranks wait for each other");
  });
  for (std::size_t r = 0; r < next.size(); ++r) {
    if (clock[r] > timing.makespan) timing.makespan = clock[r];
    if (clock[r] - start[r] > timing.longest_span) timing.longest_span = clock[r] - start[r];
  }
  return timing;
}

}  // namespace mega::inline v0::dpp
