/// @file  AdamW over flat buffers, on a GPU. The host twins in optim/adamw.hpp say what each
/// operation does.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/optim/adamw.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mega::inline v0::cuda {

namespace detail {

struct Rounded {
  __device__ float operator()(float x) const { return x; }
};

template <class T>
struct Assign {
  T* out;
  T value;
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
    if (threadIdx.x == 0) *out = optim::detail::clipped(sum, max_norm);
  }
};

struct CorrectBias {
  optim::UpdateControl* control;
  const optim::StepInputs* inputs;
  optim::AdamWOptions options;
  __device__ void operator()(Index) const {
    *control = optim::detail::bias_corrected(*control, *inputs, options);
  }
};

struct AdamWNumbers {
  float beta1, beta2, epsilon;
  float keep;       ///< what a weight with decay is multiplied with
  float step_size;  ///< learning rate over the first moment's bias correction
  float root;       ///< of the second moment's bias correction
};

template <storage T>
struct AdamWBuffers {
  T* values;  ///< rounded masters, where T is not float
  float* master;
  float* first_moment;
  float* second_moment;
  const float* gradient;
};

/// Elements of the flat buffers that one block updates.
inline constexpr Index elements_of_update = 16384;
inline constexpr int update_batch = 2;

/// Updates [begin, end) by the whole block, in packs of W that begin at multiples of W.
template <int W, storage T>
__device__ void update_run(const AdamWBuffers<T>& at, Index begin, Index end, float keep,
                           float scale, const AdamWNumbers& numbers) {
  const float b1 = numbers.beta1, b2 = numbers.beta2;
  const auto updated = [&](float w, float grad, float& m, float& v) {
    grad *= scale;
    m = b1 * m + (1 - b1) * grad;
    v = b2 * v + (1 - b2) * grad * grad;
    return w * keep - numbers.step_size * m / (sqrtf(v) / numbers.root + numbers.epsilon);
  };
  const Index stride = static_cast<Index>(block_threads) * W;
  for (Index first = begin / W * W + static_cast<Index>(threadIdx.x) * W; first < end;
       first += update_batch * stride) {
    RawPack<float, W> w[update_batch], m[update_batch], v[update_batch], g[update_batch];
#pragma unroll
    for (int k = 0; k < update_batch; ++k) {
      const Index i = first + k * stride;
      if (i < begin || i + W > end) continue;
      w[k] = load_raw<W>(at.master + i);
      m[k] = load_raw<W>(at.first_moment + i);
      v[k] = load_raw<W>(at.second_moment + i);
      g[k] = load_raw<W>(at.gradient + i);
    }
#pragma unroll
    for (int k = 0; k < update_batch; ++k) {
      const Index i = first + k * stride;
      if (i >= begin && i + W <= end) {
        float weight[W], moment1[W], moment2[W], grad[W];
        unpack(weight, w[k]);
        unpack(moment1, m[k]);
        unpack(moment2, v[k]);
        unpack(grad, g[k]);
#pragma unroll
        for (int j = 0; j < W; ++j) weight[j] = updated(weight[j], grad[j], moment1[j], moment2[j]);
        store_pack(at.master + i, weight);
        store_pack(at.first_moment + i, moment1);
        store_pack(at.second_moment + i, moment2);
        if constexpr (!std::is_same_v<T, float>) store_pack(at.values + i, weight);
      } else {  // a pack that the run has only a part of
#pragma unroll 1
        for (Index j = max(i, begin); j < min(i + W, end); ++j) {
          const float weight =
              updated(at.master[j], at.gradient[j], at.first_moment[j], at.second_moment[j]);
          at.master[j] = weight;
          if constexpr (!std::is_same_v<T, float>) at.values[j] = T(weight);
        }
      }
    }
  }
}

/// One block for each elements_of_update of the buffers. It looks at all segments, since they come
/// in any order, and updates what of them lies in its range.
template <int W, storage T>
MEGA_KERNEL void __launch_bounds__(block_threads)
    update_ranges(AdamWBuffers<T> at, Index size, const optim::Segment* segments, Index count,
                  const optim::UpdateControl* control, optim::AdamWOptions options) {
  __shared__ Index run_begin[block_threads], run_end[block_threads];
  __shared__ float run_keep[block_threads];
  __shared__ int runs;
  if (control->skip != 0) return;
  const float scale = control->gradient_scale;
  const AdamWNumbers numbers{
      options.beta1,      options.beta2,
      options.epsilon,    1 - __fmul_rn(control->learning_rate, options.weight_decay),
      control->step_size, control->root};
  const Index begin = blockIdx.x * elements_of_update;
  const Index end = min(begin + elements_of_update, size);
  for (Index base = 0; base < count; base += block_threads) {
    __syncthreads();  // all have left the runs that were found before
    if (threadIdx.x == 0) runs = 0;
    __syncthreads();
    if (base + threadIdx.x < count) {
      const optim::Segment segment = segments[base + threadIdx.x];
      const Index from = max(segment.begin, begin), to = min(segment.end, end);
      if (from < to) {
        // Elements are updated one by one, so the order of the runs does not matter.
        const int run = atomicAdd(&runs, 1);
        run_begin[run] = from;
        run_end[run] = to;
        run_keep[run] = segment.decay ? numbers.keep : 1.0F;
      }
    }
    __syncthreads();
    for (int run = 0; run < runs; ++run)
      update_run<W>(at, run_begin[run], run_end[run], run_keep[run], scale, numbers);
  }
}

template <storage T>
void adamw_update(Stream& stream, const AdamWBuffers<T>& at, Index size,
                  Vector<const optim::Segment> segments, Vector<const optim::UpdateControl> control,
                  optim::AdamWOptions options) {
  const bool packs =
      all_packs_fit(Index{0}, at.values, at.master, at.first_moment, at.second_moment, at.gradient);
  with_width<float>(packs, [&]<int W>(std::integral_constant<int, W>) {
    launch(stream, "adamw_update", update_ranges<W, T>, grid_x(ceil_div(size, elements_of_update)),
           block_threads, 0, at, size, segments.data(), segments.size(), control.data(), options);
  });
}

/// Finds the piece of squares_of_block elements that a block adds: pieces count through the ranges
/// in their order, and none crosses from one range into another. One partial sum a piece.
template <int Threads>
MEGA_KERNEL void __launch_bounds__(Threads)
    add_squares_of_piece(double* partial, const float* values, const optim::SquareRange* ranges,
                         Index count) {
  constexpr int warps = Threads / warp_threads;
  __shared__ Index of_warp[warps];
  __shared__ Index piece_begin, piece_end;
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  const Index piece = blockIdx.x;
  Index before = 0;
  for (Index base = 0; base < count && before <= piece; base += Threads) {
    optim::SquareRange range{};
    if (base + threadIdx.x < count) range = ranges[base + threadIdx.x];
    const Index own = ceil_div(range.end - range.begin, squares_of_block);
    Index sum = own;
    for (int distance = 1; distance < warp_threads; distance *= 2) {
      const Index lower = __shfl_up_sync(0xffffffffU, sum, distance);
      if (lane >= distance) sum += lower;
    }
    if (lane == warp_threads - 1) of_warp[warp] = sum;
    __syncthreads();
    Index first = before + sum - own;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) first += of_warp[w];
      before += of_warp[w];
    }
    if (piece >= first && piece < first + own) {
      piece_begin = range.begin + (piece - first) * squares_of_block;
      piece_end = min(piece_begin + squares_of_block, range.end);
    }
    __syncthreads();
  }
  if (before <= piece) return;  // fewer pieces than the host allowed for
  const Index begin = piece_begin, end = piece_end;
  constexpr int width = pack_size<float>, batch = 4;
  const bool packs = reinterpret_cast<std::uintptr_t>(values + begin) % 16 == 0;
  double sum = 0.0;
  for (Index first = begin + threadIdx.x * width; first < end; first += batch * Threads * width) {
    float x[batch][width] = {};
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      const Index i = first + b * Threads * width;
      if (packs && i + width <= end) {
        load_constant(x[b], values + i);
      } else {
#pragma unroll
        for (int w = 0; w < width; ++w)
          if (i + w < end) x[b][w] = values[i + w];
      }
    }
#pragma unroll
    for (int b = 0; b < batch; ++b)
#pragma unroll
      for (int w = 0; w < width; ++w)
        sum += static_cast<double>(x[b][w]) * static_cast<double>(x[b][w]);
  }
  sum = block_reduce<Sum>(sum);
  if (threadIdx.x == 0) partial[piece] = sum;
}

/// One block a range. Ranges of one slot are added by the block of the first of them, in order.
struct AddPieces {
  double* out;
  const double* partial;
  const optim::SquareRange* ranges;
  Index count;

  [[nodiscard]] __device__ Index pieces(Index r) const {
    return ceil_div(ranges[r].end - ranges[r].begin, squares_of_block);
  }
  __device__ void operator()(Index r) const {
    const Index slot = ranges[r].slot;
    bool earlier = false, later = false;
    Index first = 0;
    for (Index i = threadIdx.x; i < count; i += blockDim.x) {
      if (i < r) first += pieces(i);
      if (i < r && ranges[i].slot == slot) earlier = true;
      if (i > r && ranges[i].slot == slot) later = true;
    }
    if (__syncthreads_or(earlier) != 0) return;
    first = block_reduce<Sum>(first);
    double total = out[slot];
    const Index end = __syncthreads_or(later) != 0 ? count : r + 1;
    for (Index i = r; i < end; ++i) {
      const Index n = pieces(i);
      if (ranges[i].slot == slot) {
        const double* const from = partial + first;
        total += block_sum<double>(n, [=](Index k) { return from[k]; });
      }
      first += n;
    }
    if (threadIdx.x == 0) out[slot] = total;
  }
};

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

/// out[range.slot] += sum of the squares of the range, for every range.
/// @pre  no two ranges overlap; each lies within values
/// @cost  2 launches; reads what the ranges hold once; scratch of 8 bytes for each 16384 values and
///        each range
/// @determinism  run to run: pieces of a fixed size from the beginning of a range on, then their
///               sums, along fixed trees
MEGA_LAUNCHES void sums_of_squares(Stream& stream, Vector<double> out, Vector<const float> values,
                                   Vector<const optim::SquareRange> ranges) {
  constexpr auto op = "sums_of_squares";
  if (ranges.empty()) return;
  const Index most_pieces = values.size() / detail::squares_of_block + ranges.size();
  auto* const partial =
      static_cast<double*>(stream.scratch(sizeof(double) * static_cast<std::size_t>(most_pieces)));
  detail::launch(stream, op, detail::add_squares_of_piece<detail::block_threads>,
                 detail::grid_x(most_pieces), detail::block_threads, 0, partial, values.data(),
                 ranges.data(), ranges.size());
  detail::for_each_row(stream, op, ranges.size(), detail::squares_of_block,
                       detail::AddPieces{out.data(), partial, ranges.data(), ranges.size()});
}

/// out = in, rounded to the storage of out.
template <storage T>
void to_storage(Stream& stream, Vector<T> out, Vector<const float> in) {
  detail::map<1>(stream, "to_storage", out.size(), out.data(), in.data(), in.data(),
                 detail::Rounded{});
}

MEGA_LAUNCHES void accumulate(Stream& stream, Vector<float> inout, Vector<const float> values) {
  detail::map<2>(stream, "accumulate", inout.size(), inout.data(),
                 static_cast<const float*>(inout.data()), values.data(), detail::Sum{});
}

/// The value travels as an argument of the kernel.
template <class T>
void assign(Stream& stream, Vector<T> out, std::type_identity_t<T> value) {
  detail::for_each_index(stream, "assign", 1, detail::Assign<T>{out.data(), value});
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

MEGA_LAUNCHES void correct_bias(Stream& stream, Vector<optim::UpdateControl> control,
                                Vector<const optim::StepInputs> inputs,
                                optim::AdamWOptions options) {
  detail::for_each_index(stream, "correct_bias", 1,
                         detail::CorrectBias{control.data(), inputs.data(), options});
}

/// Segments may come in any order.
/// @cost  1 launch; every block of 16384 elements looks at all segments
MEGA_LAUNCHES void adamw_update(Stream& stream, Vector<float> values, Vector<float> first_moment,
                                Vector<float> second_moment, Vector<const float> gradient,
                                Vector<const optim::Segment> segments,
                                Vector<const optim::UpdateControl> control,
                                optim::AdamWOptions options) {
  detail::adamw_update<float>(
      stream, {nullptr, values.data(), first_moment.data(), second_moment.data(), gradient.data()},
      values.size(), segments, control, options);
}

/// The same on fp32 masters, and values = the masters rounded, where they were updated.
/// @cost  1 launch; reads 16 and writes 14 bytes an element
template <half_storage T>
void adamw_update(Stream& stream, Vector<T> values, Vector<float> master,
                  Vector<float> first_moment, Vector<float> second_moment,
                  Vector<const float> gradient, Vector<const optim::Segment> segments,
                  Vector<const optim::UpdateControl> control, optim::AdamWOptions options) {
  detail::adamw_update<T>(
      stream,
      {values.data(), master.data(), first_moment.data(), second_moment.data(), gradient.data()},
      values.size(), segments, control, options);
}

}  // namespace mega::inline v0::cuda
