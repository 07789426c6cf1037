/// @file  Dynamic loss scaling, on a GPU. The host twins in optim/loss_scaling.hpp say what each
/// operation does.
#pragma once
#include <mega/core/loss_scale.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/optim/loss_scaling.hpp>

#include <cstdint>

namespace mega::inline v0::cuda {

namespace detail {

struct ScaledReciprocal {
  float* out;
  const std::int64_t* count;
  const LossScale* scale;
  __device__ void operator()(Index) const {
    *out = optim::detail::scaled_reciprocal(*count, scale->scale);
  }
};

struct ClipScaled {
  optim::UpdateControl* out;
  LossScale* scale;
  const double* squares;
  Index count;
  double max_norm;
  optim::LossScalingOptions options;
  __device__ void operator()(Index) const {
    const double* const from = squares;
    const double sum = block_sum<double>(count, [=](Index i) { return from[i]; });
    if (threadIdx.x == 0) *out = optim::detail::clipped(sum, max_norm, *scale, options);
  }
};

}  // namespace detail

MEGA_LAUNCHES void reciprocal(Stream& stream, Vector<float> out, Vector<const std::int64_t> count,
                              Vector<const LossScale> scale) {
  detail::for_each_index(stream, "reciprocal", 1,
                         detail::ScaledReciprocal{out.data(), count.data(), scale.data()});
}

/// @determinism  run to run; the squares are added along a tree, not in the host twin's sequence
MEGA_LAUNCHES void clip_by_norm(Stream& stream, Vector<optim::UpdateControl> out,
                                Vector<LossScale> scale, Vector<const double> squares,
                                double max_norm, optim::LossScalingOptions options) {
  detail::for_each_row(stream, "clip_by_norm", 1, squares.size(),
                       detail::ClipScaled{out.data(), scale.data(), squares.data(), squares.size(),
                                          max_norm, options});
}

}  // namespace mega::inline v0::cuda
