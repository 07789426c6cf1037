/// @file  AdamW over flat buffers, on a GPU. The host twins in optim/adamw.hpp say what each
/// operation does.
#pragma once
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/optim/adamw.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace mega::inline v0::cuda {

namespace detail {

struct Accumulate {
  float* inout;
  const float* values;
  __device__ void operator()(Index i) const { inout[i] += values[i]; }
};

struct Assign {
  std::int64_t* out;
  std::int64_t value;
  __device__ void operator()(Index) const { *out = value; }
};

struct Reciprocal {
  float* out;
  const std::int64_t* count;
  __device__ void operator()(Index) const {
    const std::int64_t n = *count;
    *out = n > 0 ? static_cast<float>(1.0 / static_cast<double>(n)) : 0.0F;
  }
};

/// Elements whose squares one block adds; fixes the order of the sum.
inline constexpr Index squares_of_block = 16384;

struct SquaresOfBlock {
  double* partial;
  const float* values;
  Index size;
  __device__ void operator()(Index block) const {
    const float* const x = values + block * squares_of_block;
    const double sum = block_sum<double>(
        min(squares_of_block, size - block * squares_of_block),
        [=](Index i) { return static_cast<double>(x[i]) * static_cast<double>(x[i]); });
    if (threadIdx.x == 0) partial[block] = sum;
  }
};

struct AddPartials {
  double* out;
  const double* partial;
  Index count;
  __device__ void operator()(Index) const {
    const double* const from = partial;
    const double sum = block_sum<double>(count, [=](Index i) { return from[i]; });
    if (threadIdx.x == 0) *out += sum;
  }
};

struct ClipByNorm {
  optim::UpdateControl* out;
  const double* squares;
  Index count;
  double max_norm;
  __device__ void operator()(Index) const {
    const double* const from = squares;
    const double sum = block_sum<double>(count, [=](Index i) { return from[i]; });
    if (threadIdx.x != 0) return;
    optim::UpdateControl control;
    control.norm = sqrt(sum);
    control.skip = isfinite(control.norm) ? 0 : 1;
    if (max_norm > 0 && control.skip == 0)
      control.gradient_scale = static_cast<float>(fmin(1.0, max_norm / (control.norm + 1e-6)));
    *out = control;
  }
};

struct AdamWNumbers {
  float beta1, beta2, epsilon;
  float keep;       ///< what a weight with decay is multiplied with
  float step_size;  ///< learning rate over the first moment's bias correction
  float root;       ///< of the second moment's bias correction
};

/// A row of blocks of the grid for each segment.
template <int Threads>
MEGA_KERNEL void update_segments(float* values, float* first_moment, float* second_moment,
                                 const float* gradient, const optim::Segment* segments, Index count,
                                 const optim::UpdateControl* control, AdamWNumbers numbers) {
  if (control->skip != 0) return;
  const float scale = control->gradient_scale;
  const float b1 = numbers.beta1, b2 = numbers.beta2;
  const Index step = static_cast<Index>(gridDim.x) * Threads;
  for (Index s = blockIdx.y; s < count; s += gridDim.y) {
    const optim::Segment run = segments[s];
    const float keep = run.decay ? numbers.keep : 1.0F;
    for (Index i = run.begin + static_cast<Index>(blockIdx.x) * Threads + threadIdx.x; i < run.end;
         i += step) {
      const float grad = gradient[i] * scale;
      const float m = b1 * first_moment[i] + (1 - b1) * grad;
      const float v = b2 * second_moment[i] + (1 - b2) * grad * grad;
      first_moment[i] = m;
      second_moment[i] = v;
      values[i] =
          values[i] * keep - numbers.step_size * m / (sqrtf(v) / numbers.root + numbers.epsilon);
    }
  }
}

}  // namespace detail

/// @determinism  run to run: blocks of a fixed size, then their sums, along fixed trees
MEGA_LAUNCHES void add_sum_of_squares(Stream& stream, Vector<double> out,
                                      Vector<const float> values) {
  if (values.empty()) return;
  const Index blocks = detail::ceil_div(values.size(), detail::squares_of_block);
  auto* const partial =
      static_cast<double*>(stream.scratch(sizeof(double) * static_cast<std::size_t>(blocks)));
  detail::for_each_row(stream, "add_sum_of_squares", blocks, detail::squares_of_block,
                       detail::SquaresOfBlock{partial, values.data(), values.size()});
  detail::for_each_row(stream, "add_sum_of_squares", 1, blocks,
                       detail::AddPartials{out.data(), partial, blocks});
}

MEGA_LAUNCHES void accumulate(Stream& stream, Vector<float> inout, Vector<const float> values) {
  detail::for_each_index(stream, "accumulate", inout.size(),
                         detail::Accumulate{inout.data(), values.data()});
}

MEGA_LAUNCHES void assign(Stream& stream, Vector<std::int64_t> out, std::int64_t value) {
  detail::for_each_index(stream, "assign", 1, detail::Assign{out.data(), value});
}

MEGA_LAUNCHES void reciprocal(Stream& stream, Vector<float> out, Vector<const std::int64_t> count) {
  detail::for_each_index(stream, "reciprocal", 1, detail::Reciprocal{out.data(), count.data()});
}

/// @determinism  run to run; the squares are added along a tree, not in the host twin's sequence
MEGA_LAUNCHES void clip_by_norm(Stream& stream, Vector<optim::UpdateControl> out,
                                Vector<const double> squares, double max_norm) {
  detail::for_each_row(stream, "clip_by_norm", 1, squares.size(),
                       detail::ClipByNorm{out.data(), squares.data(), squares.size(), max_norm});
}

MEGA_LAUNCHES void adamw_update(Stream& stream, Vector<float> values, Vector<float> first_moment,
                                Vector<float> second_moment, Vector<const float> gradient,
                                Vector<const optim::Segment> segments,
                                Vector<const optim::UpdateControl> control,
                                optim::AdamWOptions options, float learning_rate,
                                std::int64_t step) {
  const double correction1 =
      1 - std::pow(static_cast<double>(options.beta1), static_cast<double>(step));
  const double correction2 =
      1 - std::pow(static_cast<double>(options.beta2), static_cast<double>(step));
  const detail::AdamWNumbers numbers{
      options.beta1,
      options.beta2,
      options.epsilon,
      1 - learning_rate * options.weight_decay,
      static_cast<float>(static_cast<double>(learning_rate) / correction1),
      static_cast<float>(std::sqrt(correction2))};
  // Sizes of the segments are in device memory, so each gets blocks enough for a large one.
  constexpr Index most_blocks = 1024, elements_a_block = 4 * detail::block_threads;
  const Index blocks = std::min(most_blocks, detail::ceil_div(values.size(), elements_a_block));
  detail::launch(stream, "adamw_update", detail::update_segments<detail::block_threads>,
                 dim3(detail::grid_x(blocks), detail::grid_yz(segments.size())),
                 detail::block_threads, 0, values.data(), first_moment.data(), second_moment.data(),
                 gradient.data(), segments.data(), segments.size(), control.data(), numbers);
}

}  // namespace mega::inline v0::cuda
