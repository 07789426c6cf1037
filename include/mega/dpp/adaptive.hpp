/// @file  AdaptiveTraversal: turns the dial between DFC and BFC from step to step, by what the
/// steps measured. Pure and deterministic: the same measurements give the same orders.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/traversal.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::dpp {

/// What one step showed. Every rank brings the same figures: agree on the largest of each first.
struct StepMeasurement {
  double step_seconds = 0;     ///< of the slowest rank
  double exposed_seconds = 0;  ///< compute waited for activations or gradients on their way
  double memory_share = 0;     ///< used part of the memory that the run may use, 0..1

  friend constexpr bool operator==(const StepMeasurement&, const StepMeasurement&) = default;
};

enum class DialReason : std::uint8_t {
  none,     ///< stayed
  links,    ///< transfers were exposed: larger groups give them more slack
  memory,   ///< memory was short: smaller groups hold fewer activations
  no_gain,  ///< the last move made steps no faster and is taken back
};

[[nodiscard]] constexpr std::string_view to_string(DialReason reason) noexcept {
  switch (reason) {
    case DialReason::none: return "none";
    case DialReason::links: return "links";
    case DialReason::memory: return "memory";
    case DialReason::no_gain: return "no gain";
  }
  return "unknown";
}

/// One move of the dial: in force from the step after `step`.
struct DialMove {
  std::int64_t step = 0;
  int from = 0;  ///< micro-batch group sizes
  int to = 0;
  DialReason reason = DialReason::none;
  StepMeasurement measured{};  ///< means over the steps since the move before

  friend constexpr bool operator==(const DialMove&, const DialMove&) = default;
};

/// "after step 12: group size 4 -> 8, since transfers were exposed for 7.5 % of the step"
[[nodiscard]] inline std::string to_string(const DialMove& move) {
  std::string text =
      sentence("after step ", move.step, ": group size ", move.from, " -> ", move.to, ", since ");
  const double share = move.measured.step_seconds > 0
                           ? 100 * move.measured.exposed_seconds / move.measured.step_seconds
                           : 0.0;
  switch (move.reason) {
    case DialReason::links:
      return text + sentence("transfers were exposed for ", share, " % of the step");
    case DialReason::memory:
      return text + sentence(100 * move.measured.memory_share, " % of the memory was in use");
    case DialReason::no_gain: return text + "steps had become no faster";
    case DialReason::none: break;
  }
  return text + "nothing changed";
}

/// When the dial moves. Patience, the gap between the two bounds of memory, and rest keep it from
/// swinging: after a move that had to be taken back, for its uselessness or for the memory it cost,
/// larger groups are not tried for `rest` steps, then for twice as many.
struct DialRules {
  double exposed_above = 0.05;  ///< of the step: towards BFC
  double memory_above = 0.95;   ///< share: towards DFC, at once
  double memory_below = 0.85;   ///< share: larger groups are allowed
  double least_gain = 0.01;     ///< by which a step must become faster for a move to stay
  int patience = 4;             ///< steps measured before a move
  int rest = 64;
};

/// Interleaved 1F1B whose group size follows the measurements given to observe(). Begins as DFC.
/// Group sizes on the dial: p, then each at least twice the one before, up to m, without those that
/// skip turns (m mod g between 1 and p-1); limit() caps them at the largest whose activations fit.
/// With one alias the plan is back at a static order: ScheduleTraversal<DFC>.
class AdaptiveTraversal {
 public:
  static constexpr std::string_view name = "adaptive";

  constexpr AdaptiveTraversal() = default;
  constexpr explicit AdaptiveTraversal(const DialRules& rules) : rules_(rules), rest_(rules.rest) {
    expects(rules.memory_below < rules.memory_above, ErrorCode::usage, [&] {
      return sentence("the dial's bound for larger groups, ", rules.memory_below,
                      " of the memory, must lie below that for smaller ones, ", rules.memory_above);
    });
    expects(rules.patience >= 1 && rules.rest >= 1, ErrorCode::usage, [&] {
      return sentence("the dial's patience ", rules.patience, " and rest ", rules.rest,
                      " must be at least 1 step");
    });
  }

  /// Follows a recorded log instead of measurements; observe() then takes the step's number only.
  [[nodiscard]] static constexpr AdaptiveTraversal replay(const std::vector<DialMove>& log) {
    AdaptiveTraversal made;
    made.script_ = log;
    made.replaying_ = true;
    return made;
  }

  [[nodiscard]] static constexpr int length(int /*p*/, int m, int v) noexcept { return 2 * m * v; }
  constexpr int order(int rank, int p, int m, int v, ActionSpan out) const {
    return Interleaved{{group_size(p, m)}}.order(rank, p, m, v, out);
  }

  /// The group size in force.
  [[nodiscard]] constexpr int group_size(int p, int m) const {
    if (current_ == 0 || m <= p) return p;
    return current_;
  }

  /// Ascending; the first is p.
  [[nodiscard]] constexpr std::vector<int> group_sizes(int p, int m) const {
    std::vector<int> sizes(1, p);
    for (int g = p + 1; g <= m; ++g) {
      if (largest_ != 0 && g > largest_) break;
      const bool skips = m % g != 0 && m % g < p;
      if (!skips && (g >= 2 * sizes.back() || g == m)) sizes.push_back(g);
    }
    return sizes;
  }
  /// One of each group size.
  [[nodiscard]] constexpr std::vector<AdaptiveTraversal> alternatives(int p, int m) const {
    std::vector<AdaptiveTraversal> made;
    for (const int size : group_sizes(p, m)) {
      made.push_back(AdaptiveTraversal(rules_));
      made.back().current_ = size;
    }
    return made;
  }
  /// Stands at a size of group_sizes(), as an earlier run has left it; its measurements are gone.
  constexpr void begin_at(int group_size) { current_ = group_size; }
  /// No group size above `largest` is used from now on.
  constexpr void limit(int largest) { largest_ = largest; }

  /// Takes the measurement of step number `step` of a pipeline of p ranks and m micro-batches.
  /// Returns true when the order of the next step differs; its move is the last of the log.
  /// Call it on every rank with equal figures, steps ascending.
  constexpr bool observe(std::int64_t step, const StepMeasurement& measured, int p, int m) {
    if (replaying_) return follow_script(step);
    ++steps_;
    sum_.step_seconds += measured.step_seconds;
    sum_.exposed_seconds += measured.exposed_seconds;
    sum_.memory_share =
        measured.memory_share > sum_.memory_share ? measured.memory_share : sum_.memory_share;
    const std::vector<int> sizes = group_sizes(p, m);
    const int now = group_size(p, m);
    std::size_t at = 0;
    while (at + 1 < sizes.size() && sizes[at] < now) ++at;
    if (sizes[at] > now && at > 0) --at;

    const bool short_of_memory = measured.memory_share > rules_.memory_above;
    if (short_of_memory && at > 0) {
      rest_after(step);
      return move(step, now, sizes[at - 1], DialReason::memory);
    }
    if (steps_ < rules_.patience) return false;

    const double mean = sum_.step_seconds / steps_;
    const double exposed = sum_.step_seconds > 0 ? sum_.exposed_seconds / sum_.step_seconds : 0;
    if (came_from_ != 0) {  // a trial: does it pay?
      const int back = came_from_;
      came_from_ = 0;
      if (mean > (1 - rules_.least_gain) * mean_before_) {
        rest_after(step);
        return move(step, now, back, DialReason::no_gain);
      }
      rest_ = rules_.rest;
    }
    if (exposed > rules_.exposed_above && at + 1 < sizes.size() && step >= quiet_until_ &&
        sum_.memory_share < rules_.memory_below) {
      mean_before_ = mean;
      const bool moved = move(step, now, sizes[at + 1], DialReason::links);
      came_from_ = now;
      return moved;
    }
    forget();
    return false;
  }

  /// Every move so far, oldest first.
  [[nodiscard]] constexpr const std::vector<DialMove>& log() const noexcept { return log_; }

 private:
  constexpr void rest_after(std::int64_t step) {
    quiet_until_ = step + rest_;
    rest_ *= 2;
  }
  constexpr void forget() {
    sum_ = {};
    steps_ = 0;
  }

  constexpr bool move(std::int64_t step, int from, int to, DialReason reason) {
    const double n = steps_;
    log_.push_back({step,
                    from,
                    to,
                    reason,
                    {sum_.step_seconds / n, sum_.exposed_seconds / n, sum_.memory_share}});
    current_ = to;
    came_from_ = 0;
    forget();
    return true;
  }

  constexpr bool follow_script(std::int64_t step) {
    bool moved = false;
    for (; log_.size() < script_.size() && script_[log_.size()].step <= step; moved = true) {
      current_ = script_[log_.size()].to;
      log_.push_back(script_[log_.size()]);
    }
    return moved;
  }

  DialRules rules_{};
  int current_ = 0;  // 0: where DFC is
  int largest_ = 0;  // 0: no limit
  int steps_ = 0;    // since the last move or verdict
  StepMeasurement sum_{};
  int came_from_ = 0;  // 0: the last move is not on trial
  double mean_before_ = 0;
  std::int64_t quiet_until_ = 0;
  std::int64_t rest_ = DialRules{}.rest;
  std::vector<DialMove> log_;
  std::vector<DialMove> script_;
  bool replaying_ = false;
};

static_assert(traversal_policy<AdaptiveTraversal> && names_alternatives<AdaptiveTraversal>);

}  // namespace mega::inline v0::dpp
