/// @file  Learning-rate schedules with warm-up; a pure function of the step, so a resumed run
/// continues the same curve.
#pragma once
#include <mega/core/error.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace mega::inline v0::optim {

enum class Decay : std::uint8_t {
  constant,
  linear,
  cosine,
  inverse_square_root,
  warmup_stable_decay
};

[[nodiscard]] constexpr std::string_view to_string(Decay decay) noexcept {
  switch (decay) {
    case Decay::constant: return "constant";
    case Decay::linear: return "linear";
    case Decay::cosine: return "cosine";
    case Decay::inverse_square_root: return "inverse-square-root";
    case Decay::warmup_stable_decay: return "WSD";
  }
  return "unknown";
}

struct LearningRate {
  Decay decay = Decay::cosine;
  double peak = 3e-4;
  double minimum = 0;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 1;      ///< the minimum is reached at this step, warm-up included
  std::int64_t wsd_decay_steps = 0;  ///< length of the final descent of warmup_stable_decay

  /// Rate of step `step`, counted from 0. Warm-up is linear and reaches the peak at its last step.
  [[nodiscard]] double at(std::int64_t step) const noexcept {
    if (step < warmup_steps) {
      return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
    }
    if (decay == Decay::constant) return peak;
    if (decay == Decay::inverse_square_root) {
      const auto anchor = static_cast<double>(std::max<std::int64_t>(warmup_steps, 1));
      return std::max(
          minimum, peak * std::sqrt(anchor / static_cast<double>(std::max<std::int64_t>(step, 1))));
    }
    if (step >= decay_steps) return minimum;
    const std::int64_t begin = decay == Decay::warmup_stable_decay
                                   ? std::max(warmup_steps, decay_steps - wsd_decay_steps)
                                   : warmup_steps;
    if (step < begin) return peak;
    const double progress =
        static_cast<double>(step - begin) / static_cast<double>(decay_steps - begin);
    const double left = decay == Decay::cosine
                            ? 0.5 * (1 + std::cos(3.14159265358979323846 * progress))
                            : 1 - progress;
    return minimum + (peak - minimum) * left;
  }
};

/// Refuses rates that are not finite or not ordered, and windows that do not fit.
inline void validate(const LearningRate& rate, SourceLocation at = SourceLocation::current()) {
  expects(
      std::isfinite(rate.peak) && rate.peak >= 0, ErrorCode::usage,
      [&] {
        return sentence("the learning rate is ", rate.peak, "; it must be finite and not negative");
      },
      at);
  expects(
      rate.minimum >= 0 && rate.minimum <= rate.peak, ErrorCode::usage,
      [&] {
        return sentence("the minimum learning rate is ", rate.minimum,
                        "; it must lie between 0 and the learning rate ", rate.peak);
      },
      at);
  expects(
      rate.warmup_steps >= 0 && rate.wsd_decay_steps >= 0, ErrorCode::usage,
      [&] {
        return sentence("warm-up of ", rate.warmup_steps, " steps and final descent of ",
                        rate.wsd_decay_steps, " steps; neither may be negative");
      },
      at);
  const bool decays = rate.decay == Decay::linear || rate.decay == Decay::cosine ||
                      rate.decay == Decay::warmup_stable_decay;
  expects(
      !decays || rate.decay_steps > rate.warmup_steps, ErrorCode::usage,
      [&] {
        return sentence("the learning rate decays over ", rate.decay_steps,
                        " steps, of which warm-up takes ", rate.warmup_steps,
                        "; the decay must be longer than the warm-up");
      },
      at);
}

}  // namespace mega::inline v0::optim
