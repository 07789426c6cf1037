/// @file  Dynamic loss scaling: fp16 has no room for small gradients, so that of a multiple of the
/// loss is computed, as large a multiple as overflows seldom. Source: Micikevicius et al., "Mixed
/// precision training", ICLR 2018.
#pragma once
#include <mega/core/config.hpp>
#include <mega/core/loss_scale.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/optim/adamw.hpp>

#include <cstdint>
#include <limits>

namespace mega::inline v0::optim {

/// With powers of two no scaling rounds.
struct LossScalingOptions {
  float initial = 65536;
  float growth = 2;                     ///< factor after growth_interval good steps in a row
  float backoff = 0.5F;                 ///< factor after a step whose gradient is not finite
  std::int32_t growth_interval = 2000;  ///< as PyTorch's
  float minimum = 1;
};

namespace detail {
inline constexpr float largest_scale = std::numeric_limits<float>::max();
}

/// The scale of the step after one that was skipped, or was not. It grows no further than float
/// reaches.
[[nodiscard]] MEGA_HD constexpr LossScale next_loss_scale(LossScale now, bool skipped,
                                                          const LossScalingOptions& options) {
  if (skipped) {
    const float lower = now.scale * options.backoff;
    return {lower > options.minimum ? lower : options.minimum, 0, now.skipped_steps + 1};
  }
  if (now.good_steps + 1 < options.growth_interval)
    return {now.scale, now.good_steps + 1, now.skipped_steps};
  const float higher = now.scale * options.growth;
  return {higher <= detail::largest_scale ? higher : now.scale, 0, now.skipped_steps};
}

namespace detail {

/// clipped() of a gradient made with `scale`, which then becomes the next step's.
[[nodiscard]] MEGA_HD inline UpdateControl clipped(double squares, double max_norm,
                                                   LossScale& scale,
                                                   const LossScalingOptions& options) {
  UpdateControl control = clipped(squares, max_norm, scale.scale);
  control.skipped_steps = scale.skipped_steps;
  scale = next_loss_scale(scale, control.skip != 0, options);
  return control;
}

[[nodiscard]] MEGA_HD constexpr float scaled_reciprocal(std::int64_t count, float scale) {
  return count > 0 ? static_cast<float>(static_cast<double>(scale) / static_cast<double>(count))
                   : 0.0F;
}

}  // namespace detail

/// out[0] = scale / count[0], or 0 where there is nothing to count.
template <host::host_stream S>
void reciprocal(S& stream, Vector<float> out, Vector<const std::int64_t> count,
                Vector<const LossScale> scale) {
  stream.run(
      [=] { out.data()[0] = detail::scaled_reciprocal(count.data()[0], scale.data()->scale); });
}

/// The same as without a scale, for a gradient that was made with it: norm and max_norm are those
/// of the loss itself, and gradient_scale takes the scale out. Then the scale is brought up to
/// date.
template <host::host_stream S>
void clip_by_norm(S& stream, Vector<UpdateControl> out, Vector<LossScale> scale,
                  Vector<const double> squares, double max_norm, LossScalingOptions options) {
  stream.run([=] {
    double sum = 0;
    for (Index i = 0; i < squares.size(); ++i) sum += squares.data()[i];
    out.data()[0] = detail::clipped(sum, max_norm, scale.data()[0], options);
  });
}

}  // namespace mega::inline v0::optim
