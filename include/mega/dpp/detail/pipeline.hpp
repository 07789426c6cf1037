/// @file  A profile that was checked, with the tables that the loops of a search read.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/search_problem.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/traversal.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp::detail {

constexpr double never = std::numeric_limits<double>::infinity();
/// Caps and peaks are sums of fractions: differences below this are rounding.
constexpr double memory_slack = 1e-9;

inline void expect_profile(const PipelineProfile& profile) {
  expect_pipeline(0, profile.p, profile.m, profile.v);
  const auto stages = static_cast<std::size_t>(profile.p) * static_cast<std::size_t>(profile.v);
  expects(profile.times.size() == 1 || profile.times.size() == stages, ErrorCode::usage, [&] {
    return sentence("the profile has times of ", profile.times.size(),
                    " stages, not of p*v = ", stages, "; 1 serves them all");
  });
  const auto is_time = [](double t) { return t >= 0 && t < never; };
  for (const ActionTimes& t : profile.times) {
    const double all = t.forward + t.backward_input + t.backward_weight;
    const bool valid = is_time(t.forward) && is_time(t.backward_input) &&
                       is_time(t.backward_weight) && is_time(t.hop) && is_time(all) && all > 0 &&
                       t.pair < never;
    expects(valid, ErrorCode::usage, [&] {
      return sentence("stage ", &t - profile.times.data(), " has forward ", t.forward,
                      ", backward_input ", t.backward_input, ", backward_weight ",
                      t.backward_weight, ", hop ", t.hop, " and pair ", t.pair,
                      "; times are finite, none but pair is negative, and a stage takes some");
    });
  }
  expects(profile.released_by_input >= 0 && profile.released_by_input <= 1, ErrorCode::usage, [&] {
    return sentence("released_by_input ", profile.released_by_input, " is outside 0..1");
  });
  const auto ranks = static_cast<std::size_t>(profile.p);
  expects(profile.caps.empty() || profile.caps.size() == ranks, ErrorCode::usage, [&] {
    return sentence("the profile has memory caps of ", profile.caps.size(),
                    " ranks, not of p = ", profile.p);
  });
  for (const std::vector<int>* const room : {&profile.chunk_caps, &profile.slots}) {
    expects(room->empty() || room->size() == stages, ErrorCode::usage, [&] {
      return sentence("the profile has room for micro-batches of ", room->size(),
                      " chunks, not of p*v = ", stages);
    });
    for (const int& count : *room) {
      expects(count >= 1, ErrorCode::usage, [&] {
        return sentence("place ", &count - room->data(), " has room for ", count,
                        " micro-batches; it needs room for at least 1");
      });
    }
  }
  expects(profile.activation_sizes.empty() || profile.activation_sizes.size() == stages,
          ErrorCode::usage, [&] {
            return sentence("the profile has sizes of activations of ",
                            profile.activation_sizes.size(), " stages, not of p*v = ", stages);
          });
  for (const double& size : profile.activation_sizes) {
    expects(size >= 0 && size < never, ErrorCode::usage, [&] {
      return sentence("an activation of stage ", &size - profile.activation_sizes.data(),
                      " has the size ", size, "; sizes are finite and not negative");
    });
  }
  if (!profile.activation_sizes.empty()) return;  // which ranks have them, a placement says
  for (const double& cap : profile.caps) {
    expects(cap >= profile.v, ErrorCode::usage, [&] {
      return sentence("rank ", &cap - profile.caps.data(), " may hold ", cap,
                      " live activations, but one micro-batch alone keeps one on each of its "
                      "chunks; the smallest valid cap is v = ",
                      profile.v);
    });
  }
}

/// A profile with the tables that the inner loops read.
class Pipeline {
 public:
  /// @param stage_of_place  [p*v] stage of the place rank*v + chunk
  Pipeline(const PipelineProfile& profile, std::vector<int> stage_of_place)
      : p(profile.p),
        m(profile.m),
        v(profile.v),
        kept(1 - profile.released_by_input),
        caps(profile.caps),
        chunk_caps(profile.chunk_caps),
        times(profile.times),
        stage_of(std::move(stage_of_place)),
        rank_of(stage_of.size(), 0),
        hop_down(stage_of.size(), 0.0),
        hop_up(stage_of.size(), 0.0) {
    if (times.size() == 1) times.assign(stage_of.size(), profile.times.front());
    for (std::size_t i = 0; i < stage_of.size(); ++i) {
      rank_of[at(stage_of[i])] = static_cast<int>(i) / v;
    }
    for (std::size_t s = 0; s + 1 < rank_of.size(); ++s) {
      if (rank_of[s] == rank_of[s + 1]) continue;
      hop_down[s] = times[s].hop;
      hop_up[s + 1] = times[s + 1].hop;
    }
    measure_work();
    measure_memory(profile.activation_sizes);
    if (chunk_caps.empty()) chunk_caps.assign(stage_of.size(), m);
    for (std::size_t place = 0; place < profile.slots.size(); ++place)
      chunk_caps[place] = std::min(chunk_caps[place], profile.slots[place]);
  }

  [[nodiscard]] static std::size_t at(int i) noexcept { return static_cast<std::size_t>(i); }
  [[nodiscard]] std::size_t slot(int stage, int microbatch) const noexcept {
    return at(stage) * at(m) + at(microbatch);
  }
  [[nodiscard]] int stage(int rank, int chunk) const noexcept {
    return stage_of[at(rank * v + chunk)];
  }
  [[nodiscard]] int last_stage() const noexcept { return p * v - 1; }
  [[nodiscard]] double duration(ActionKind kind, int stage_index) const noexcept {
    return times[at(stage_index)].of(kind);
  }
  /// What the action adds to the memory of its rank.
  [[nodiscard]] double memory(ActionKind kind, int stage_index) const noexcept {
    const double size = sizes[at(stage_index)];
    switch (kind) {
      case ActionKind::forward: return size;
      case ActionKind::backward: return -size;
      case ActionKind::backward_input: return (kept - 1) * size;
      default: return -kept * size;
    }
  }

  /// What a rank has to do in a step, and what its input gradients make others do.
  struct Work {
    double all = 0;
    double urgent = 0;  ///< of it without weight gradients
    double head = 0;    ///< from the begin of the step to that of its first action, at least
    double tail = 0;  ///< from the end of its last input gradient to the end of the step, at least
  };

  /// No order is shorter; 0 where pairs may overlap, which this does not foresee.
  [[nodiscard]] double bound(ScheduleGoal goal) const {
    double most = 0;
    for (const Work& own : work) {
      const double from_first = std::max(own.all, own.urgent + own.tail);
      most = std::max(most, goal == ScheduleGoal::makespan ? own.head + from_first : own.all);
    }
    const auto is_paired = [](const ActionTimes& t) { return t.pair >= 0; };
    return std::any_of(times.begin(), times.end(), is_paired) ? 0 : most;
  }

  int p;
  int m;
  int v;
  double kept;                      ///< of an activation between its I and its W
  double unit = 1;                  ///< of caps and sizes: the largest of the profile's sizes
  std::vector<double> caps;         ///< [p]
  std::vector<double> sizes;        ///< [p*v] by stage, of one activation
  std::vector<double> micro_sizes;  ///< [p] of one micro-batch's activations
  std::vector<int> chunk_caps;      ///< [p*v] by place
  std::vector<ActionTimes> times;   ///< [p*v] by stage
  std::vector<int> stage_of;        ///< [p*v] by place rank*v + chunk
  std::vector<int> rank_of;         ///< [p*v] by stage
  std::vector<double> hop_down;     ///< [p*v] from a stage to the next one, 0 on the same rank
  std::vector<double> hop_up;       ///< [p*v] from a stage to the one before it
  std::vector<Work> work;           ///< [p]

 private:
  void measure_memory(const std::vector<double>& given) {
    sizes = given;
    if (sizes.empty()) sizes.assign(stage_of.size(), 1.0);
    unit = *std::max_element(sizes.begin(), sizes.end());
    if (unit == 0) unit = 1;
    for (double& size : sizes) size /= unit;
    micro_sizes.assign(at(p), 0.0);
    for (std::size_t s = 0; s < sizes.size(); ++s) micro_sizes[at(rank_of[s])] += sizes[s];
    if (caps.empty()) caps.assign(at(p), never);
    for (int rank = 0; rank < p; ++rank) {
      double& cap = caps[at(rank)];
      cap /= unit;
      expects(cap >= micro_sizes[at(rank)] * (1 - memory_slack), ErrorCode::usage, [&] {
        return sentence("rank ", rank, " may hold ", cap * unit,
                        ", but one micro-batch alone keeps ", micro_sizes[at(rank)] * unit,
                        " on its chunks");
      });
    }
  }

  void measure_work() {
    work.assign(at(p), {});
    double head = 0;
    double tail = duration(ActionKind::backward_weight, 0);
    for (int s = 0; s <= last_stage(); ++s) {
      Work& own = work[at(rank_of[at(s)])];
      if (own.all == 0) {
        own.head = head;
        own.tail = tail;
      }
      head += times[at(s)].forward + hop_down[at(s)];
      const double urgent = m * (times[at(s)].forward + times[at(s)].backward_input);
      own.urgent += urgent;
      own.all += urgent + m * times[at(s)].backward_weight;
      tail += times[at(s)].backward_input;
      if (s < last_stage()) tail += hop_up[at(s + 1)];
    }
  }
};

/// Tells early that an order will not be short enough, or hold too much.
struct Cutoff {
  ScheduleGoal goal = ScheduleGoal::makespan;
  double longest = never;  ///< what the goal may be
  double fullest = never;  ///< below which every rank has to keep; for list schedules

  /// True if the goal will surely exceed `longest`.
  /// @param kind  of the action that the rank begins now   @param begin  when it began its first
  /// @param left  that action and all that it has to do after it
  [[nodiscard]] bool is_exceeded(ActionKind kind, double now, double begin,
                                 const Pipeline::Work& left) const {
    // Sums in another order differ by rounding, which is no reason.
    const double bound = longest * (1 + 1e-9);
    if (goal == ScheduleGoal::longest_span) return now - begin + left.all > bound;
    if (now + left.all > bound) return true;
    return kind != ActionKind::backward_weight && now + left.urgent + left.tail > bound;
  }
};

}  // namespace mega::inline v0::dpp::detail
