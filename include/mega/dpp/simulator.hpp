/// @file  How long a schedule takes when every action has a fixed duration: step time, bubble and
/// peak of live activations. Links are ideal: transfers overlap everything and each other.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/schedule.hpp>

#include <cstddef>
#include <span>
#include <vector>

namespace mega::inline v0::dpp {

/// Durations of the actions of one stage, in one unit of the caller's choice.
struct ActionTimes {
  double forward = 1;
  double backward_input = 1;  ///< a whole backward takes backward_input + backward_weight
  double backward_weight = 1;
  double hop = 0;  ///< from the end of an action to its data on another rank
  /// A forward and a whole backward side by side, as a fused pair; negative: their sum.
  double pair = -1;

  /// 0 for actions that do not compute.
  [[nodiscard]] constexpr double of(ActionKind kind) const noexcept {
    double time = kind == ActionKind::forward ? forward : 0.0;
    if (gives_input_gradient(kind)) time += backward_input;
    if (gives_weight_gradient(kind)) time += backward_weight;
    return time;
  }
  [[nodiscard]] constexpr double saved_by_pairing() const noexcept {
    return pair < 0 ? 0.0 : forward + backward_input + backward_weight - pair;
  }
};

/// Duration of a fused pair whose halves may be of different stages: their sum, less the mean of
/// what the two stages save by pairing, but no less than the longer half.
[[nodiscard]] constexpr double pair_time(const ActionTimes& one, ActionKind one_kind,
                                         const ActionTimes& other, ActionKind other_kind) noexcept {
  const double a = one.of(one_kind);
  const double b = other.of(other_kind);
  const double paired = a + b - (one.saved_by_pairing() + other.saved_by_pairing()) / 2;
  const double longer = a > b ? a : b;
  return paired > longer ? paired : longer;
}

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
/// @param times  by stage, or a single entry for all stages
/// Throws Error(usage) if the ranks wait for each other. @pre actions within the pipeline's bounds
[[nodiscard]] constexpr Timing simulate(const ScheduleView& s, std::span<const ActionTimes> times) {
  constexpr double pending = -1;
  const auto at = [&](int stage, int microbatch) {
    return static_cast<std::size_t>(stage * s.m + microbatch);
  };
  expects(times.size() == 1 || times.size() == s.place_of.size(), ErrorCode::usage, [&] {
    return sentence("simulate() was given the times of ", times.size(), " stages for ", s.stages(),
                    "; 1 serves them all");
  });
  const auto times_of = [&](int stage) -> const ActionTimes& {
    return times[times.size() == 1 ? 0 : static_cast<std::size_t>(stage)];
  };
  const int last_stage = s.stages() - 1;
  std::vector<double> forward_end(at(s.stages(), 0), pending);
  std::vector<double> gradient_end(at(s.stages(), 0), pending);  // of the stage's input
  std::vector<std::size_t> next(static_cast<std::size_t>(s.p), 0);
  std::vector<double> clock(next.size(), 0.0);
  std::vector<double> start(next.size(), pending);
  std::vector<double> busy(next.size(), 0.0);
  std::vector<int> live(next.size(), 0);
  Timing timing;
  timing.peak_per_rank.assign(next.size(), 0);

  // Earliest start that the data allows, or pending.
  const auto arrival = [&](int rank, const Action& a) {
    const int stage = s.stage(rank, a.chunk);
    const auto from = [&](const std::vector<double>& ends, int source) {
      const double end = ends[at(source, a.microbatch)];
      return end == pending || s.rank_of(source) == rank ? end : end + times_of(source).hop;
    };
    if (a.kind == ActionKind::forward) return stage == 0 ? 0.0 : from(forward_end, stage - 1);
    if (a.kind == ActionKind::backward_weight) return from(gradient_end, stage);
    return stage == last_stage ? from(forward_end, stage) : from(gradient_end, stage + 1);
  };
  const auto finish = [&](int rank, const Action& a) {
    const auto r = static_cast<std::size_t>(rank);
    const auto slot = at(s.stage(rank, a.chunk), a.microbatch);
    if (a.kind == ActionKind::forward) {
      forward_end[slot] = clock[r];
      if (++live[r] > timing.peak_per_rank[r]) timing.peak_per_rank[r] = live[r];
    }
    if (gives_input_gradient(a.kind)) gradient_end[slot] = clock[r];
    if (gives_weight_gradient(a.kind)) --live[r];
  };

  for (bool progress = true; progress;) {
    progress = false;
    for (int rank = 0; rank < s.p; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      const auto list = s.of_rank(rank);
      while (next[r] < list.size()) {
        const Action& a = list[next[r]];
        if (!is_compute(a.kind)) {
          ++next[r];
          continue;
        }
        double ready = arrival(rank, a);
        double duration = times_of(s.stage(rank, a.chunk)).of(a.kind);
        std::size_t other = next[r];  // second half of a fused pair
        if (a.with_next) {
          do ++other;
          while (other < list.size() && !is_compute(list[other].kind));
          if (other == list.size()) break;
          const Action& b = list[other];
          const double both = arrival(rank, b);
          if (ready != pending && (both == pending || both > ready)) ready = both;
          duration = pair_time(times_of(s.stage(rank, a.chunk)), a.kind,
                               times_of(s.stage(rank, b.chunk)), b.kind);
        }
        if (ready == pending) break;
        if (clock[r] < ready) clock[r] = ready;
        if (start[r] == pending) start[r] = clock[r];
        clock[r] += duration;
        busy[r] += duration;
        // Both halves of a pair hold their activations until it ends: the forward counts first.
        const bool forward_second = a.with_next && a.kind != ActionKind::forward;
        if (forward_second) finish(rank, list[other]);
        finish(rank, a);
        if (a.with_next && !forward_second) finish(rank, list[other]);
        next[r] = other + 1;
        progress = true;
      }
    }
  }
  std::size_t left = 0;
  for (std::size_t r = 0; r < next.size(); ++r) {
    const auto list = s.of_rank(static_cast<int>(r));
    for (std::size_t i = next[r]; i < list.size(); ++i) left += is_compute(list[i].kind) ? 1U : 0U;
  }
  expects(left == 0, ErrorCode::usage, [&] {
    return sentence("the schedule stops with ", left,
                    " compute actions left: ranks wait for each other");
  });
  for (std::size_t r = 0; r < next.size(); ++r) {
    if (busy[r] > timing.busy) timing.busy = busy[r];
    if (clock[r] > timing.makespan) timing.makespan = clock[r];
    if (clock[r] - start[r] > timing.longest_span) timing.longest_span = clock[r] - start[r];
  }
  return timing;
}

/// The same with equal times on all stages.
[[nodiscard]] constexpr Timing simulate(const ScheduleView& s, const ActionTimes& times = {}) {
  return simulate(s, std::span<const ActionTimes>(&times, 1));
}

}  // namespace mega::inline v0::dpp
