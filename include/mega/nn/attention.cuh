/// @file  Causal attention with grouped-query heads on a GPU in fp32, tile by tile in shared
/// memory. The host twins in nn/attention.hpp say what the operations do, and where they come from.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_limits.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/dropout_mask.hpp>
#include <mega/nn/detail/shape.hpp>

#include <cmath>
#include <cstddef>
#include <string_view>

namespace mega::inline v0::cuda {

namespace detail {

/// Tiles of one block of 16 x 16 threads: thread (x, y) has the rows 4 y + i, i < 4, of a product,
/// and its columns x + 16 j. Dim is head_dim rounded up, filled with zeros; rows of a tile are
/// padded by 16 bytes, so that neighbouring threads read from different banks.
template <int Dim>
struct AttentionTiles {
  static constexpr int rows = 64;
  static constexpr int side = 16;
  static constexpr int threads = side * side;
  static constexpr int per_thread = rows / side;
  static constexpr int columns = Dim / side;  ///< of a row of a head, a thread
  static constexpr int stride = Dim + 4;
  static constexpr int score_stride = rows + 4;
  static constexpr int head_floats = rows * stride;
  static constexpr int score_floats = rows * score_stride;

  /// Shared memory of a kernel with `heads` tiles of rows of a head and one of scores.
  [[nodiscard]] static constexpr std::size_t bytes(int heads) noexcept {
    return sizeof(float) * static_cast<std::size_t>(heads * head_floats + score_floats);
  }

  using Scores = float[per_thread][per_thread];
  using Rows = float[per_thread][columns];

  [[nodiscard]] static __device__ int x() { return static_cast<int>(threadIdx.x) % side; }
  [[nodiscard]] static __device__ int y() { return static_cast<int>(threadIdx.x) / side; }
  [[nodiscard]] static __device__ int row(int i) { return per_thread * y() + i; }
  [[nodiscard]] static __device__ int column(int j) { return x() + side * j; }

  /// Rows [first, first + 64) of a head, whose row 0 is `from`.
  static __device__ void load(float* tile, const float* from, Index width, Index first, Index time,
                              int dim) {
    for (int i = static_cast<int>(threadIdx.x); i < rows * Dim; i += threads) {
      const int r = i / Dim, c = i % Dim;
      tile[r * stride + c] = first + r < time && c < dim ? from[(first + r) * width + c] : 0.0F;
    }
  }

  static __device__ void store(float* to, Index width, Index first, Index time, int dim,
                               const Rows& value) {
    for (int i = 0; i < per_thread; ++i) {
      if (first + row(i) >= time) continue;
      for (int j = 0; j < columns; ++j)
        if (column(j) < dim) to[(first + row(i)) * width + column(j)] = value[i][j];
    }
  }

  /// out = A B^T
  static __device__ void multiply(Scores& out, const float* a, const float* b) {
    for (int i = 0; i < per_thread; ++i)
      for (int j = 0; j < per_thread; ++j) out[i][j] = 0.0F;
#pragma unroll 4
    for (int c = 0; c < Dim; c += 4) {
      float4 left[per_thread], right[per_thread];
#pragma unroll
      for (int i = 0; i < per_thread; ++i) {
        left[i] = *reinterpret_cast<const float4*>(a + row(i) * stride + c);
        right[i] = *reinterpret_cast<const float4*>(b + column(i) * stride + c);
      }
#pragma unroll
      for (int i = 0; i < per_thread; ++i)
#pragma unroll
        for (int j = 0; j < per_thread; ++j)
          out[i][j] += left[i].x * right[j].x + left[i].y * right[j].y + left[i].z * right[j].z +
                       left[i].w * right[j].w;
    }
  }

  /// Leaves this thread's scores in the tile.
  static __device__ void keep(float* tile, const Scores& scores) {
    for (int i = 0; i < per_thread; ++i)
      for (int j = 0; j < per_thread; ++j) tile[row(i) * score_stride + column(j)] = scores[i][j];
  }

  /// sum += scores * B
  static __device__ void add_product(Rows& sum, const float* scores, const float* b) {
#pragma unroll 4
    for (int k = 0; k < rows; k += 4) {
      float4 weight[per_thread];
#pragma unroll
      for (int i = 0; i < per_thread; ++i)
        weight[i] = *reinterpret_cast<const float4*>(scores + row(i) * score_stride + k);
#pragma unroll
      for (int j = 0; j < columns; ++j) {
        const float* const from = b + k * stride + column(j);
        const float b0 = from[0], b1 = from[stride], b2 = from[2 * stride], b3 = from[3 * stride];
#pragma unroll
        for (int i = 0; i < per_thread; ++i)
          sum[i][j] += weight[i].x * b0 + weight[i].y * b1 + weight[i].z * b2 + weight[i].w * b3;
      }
    }
  }

  /// sum += scores^T * B
  static __device__ void add_transposed_product(Rows& sum, const float* scores, const float* b) {
#pragma unroll 4
    for (int k = 0; k < rows; ++k) {
      const float4 weight = *reinterpret_cast<const float4*>(scores + k * score_stride + row(0));
#pragma unroll
      for (int j = 0; j < columns; ++j) {
        const float from = b[k * stride + column(j)];
        sum[0][j] += weight.x * from;
        sum[1][j] += weight.y * from;
        sum[2][j] += weight.z * from;
        sum[3][j] += weight.w * from;
      }
    }
  }
};

/// The operands of attention as the kernels see them; head h of sample b begins at
/// qkv + b * time * width + its column.
struct AttentionArguments {
  nn::AttentionShape shape;
  nn::AttentionDropout dropout;
  float scale;
  const float* qkv;

  [[nodiscard]] __device__ const float* rows_of(const float* matrix, Index sample) const {
    return matrix + sample * shape.time * shape.width();
  }
  [[nodiscard]] __device__ Index out_width() const { return shape.query_heads * shape.head_dim; }
  /// Factor of dropout of a probability. @param random  of dropout.key
  [[nodiscard]] __device__ float factor(const RandomKey& random, Index sample, Index head,
                                        Index query, Index key) const {
    nn::detail::DropoutMask mask(random, dropout.probability);
    return mask.factor(dropout.element(sample, head, query, shape.time) + key);
  }
};

/// Largest value, or sum, over the 16 threads that share rows; each of them gets it.
template <class Combine>
__device__ float reduce_row(float value) {
  const Combine combine;
  for (int distance = 8; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffU, value, distance));
  return value;
}

/// A block a tile of 64 queries of a head. Late tiles, which see most keys, start first.
template <int Dim>
MEGA_KERNEL void __launch_bounds__(AttentionTiles<Dim>::threads)
    attend(float* out, float* lse, AttentionArguments at) {
  using Tiles = AttentionTiles<Dim>;
  extern __shared__ float4 shared_attention[];
  float* const queries = reinterpret_cast<float*>(shared_attention);
  float* const keys = queries + Tiles::head_floats;
  float* const values = keys + Tiles::head_floats;
  float* const probabilities = values + Tiles::head_floats;

  const RandomKey random = at.dropout.key.read();
  const nn::AttentionShape& shape = at.shape;
  const int dim = static_cast<int>(shape.head_dim);
  const Index width = shape.width(), time = shape.time;
  const Index sample = blockIdx.z, head = blockIdx.y, group = head / shape.group();
  const Index q0 = static_cast<Index>(gridDim.x - 1 - blockIdx.x) * Tiles::rows;
  const float* const rows = at.rows_of(at.qkv, sample);
  Tiles::load(queries, rows + shape.query_column(head), width, q0, time, dim);

  float largest[Tiles::per_thread], sum[Tiles::per_thread];
  typename Tiles::Rows weighted = {};
  for (int i = 0; i < Tiles::per_thread; ++i) {
    largest[i] = -INFINITY;
    sum[i] = 0.0F;
  }
  for (Index k0 = 0; k0 <= q0; k0 += Tiles::rows) {
    __syncthreads();
    Tiles::load(keys, rows + shape.key_column(group), width, k0, time, dim);
    Tiles::load(values, rows + shape.value_column(group), width, k0, time, dim);
    __syncthreads();
    typename Tiles::Scores score;
    Tiles::multiply(score, queries, keys);
#pragma unroll
    for (int i = 0; i < Tiles::per_thread; ++i) {
      const Index query = q0 + Tiles::row(i);
      float tile_largest = -INFINITY;
#pragma unroll
      for (int j = 0; j < Tiles::per_thread; ++j) {
        const Index key = k0 + Tiles::column(j);
        score[i][j] = key <= query && key < time ? at.scale * score[i][j] : -INFINITY;
        tile_largest = fmaxf(tile_largest, score[i][j]);
      }
      // Key 0 is in the first tile and before every query, so this is finite from there on.
      const float now = fmaxf(largest[i], reduce_row<Max>(tile_largest));
      const float correction = expf(largest[i] - now);
      float tile_sum = 0.0F;
#pragma unroll
      for (int j = 0; j < Tiles::per_thread; ++j) {
        score[i][j] = expf(score[i][j] - now);
        tile_sum += score[i][j];
      }
      sum[i] = sum[i] * correction + reduce_row<Sum>(tile_sum);
      largest[i] = now;
#pragma unroll
      for (int j = 0; j < Tiles::columns; ++j) weighted[i][j] *= correction;
      if (at.dropout.probability > 0.0F) {
        for (int j = 0; j < Tiles::per_thread; ++j)
          score[i][j] *= at.factor(random, sample, head, query, k0 + Tiles::column(j));
      }
    }
    Tiles::keep(probabilities, score);
    __syncthreads();
    Tiles::add_product(weighted, probabilities, values);
  }
  float* const lse_of_head = lse + (sample * shape.query_heads + head) * time;
#pragma unroll
  for (int i = 0; i < Tiles::per_thread; ++i) {
    const Index query = q0 + Tiles::row(i);
#pragma unroll
    for (int j = 0; j < Tiles::columns; ++j) weighted[i][j] /= sum[i];
    if (Tiles::x() == 0 && query < time) lse_of_head[query] = largest[i] + logf(sum[i]);
  }
  Tiles::store(out + sample * time * at.out_width() + head * dim, at.out_width(), q0, time, dim,
               weighted);
}

/// inner(b, h, t) = inner product of out and dout of a query, which is the mean of its
/// probabilities' gradients under the soft-max. A warp a query.
template <int Warps>
MEGA_KERNEL void attention_inner_products(float* inner, const float* out, const float* dout,
                                          nn::AttentionShape shape) {
  const Index count = shape.rows() * shape.query_heads;
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  for (Index i = static_cast<Index>(blockIdx.x) * Warps + warp; i < count;
       i += static_cast<Index>(gridDim.x) * Warps) {
    const Index row = i / shape.query_heads, head = i % shape.query_heads;
    const Index begin = i * shape.head_dim;  // rows of out hold the heads side by side
    float sum = 0.0F;
    for (Index c = lane; c < shape.head_dim; c += warp_threads)
      sum += out[begin + c] * dout[begin + c];
    for (int distance = warp_threads / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffU, sum, distance);
    if (lane == 0)
      inner[(row / shape.time * shape.query_heads + head) * shape.time + row % shape.time] = sum;
  }
}

/// Probabilities p and the scores' gradients ds of a tile, from queries q0 on and keys k0 on; p
/// comes with dropout's factor, as the values saw it.
template <int Dim>
__device__ void attention_gradients(typename AttentionTiles<Dim>::Scores& p,
                                    typename AttentionTiles<Dim>::Scores& ds, const float* queries,
                                    const float* keys, const float* values, const float* dout,
                                    const float* lse, const float* inner,
                                    const AttentionArguments& at, Index sample, Index head,
                                    Index q0, Index k0) {
  using Tiles = AttentionTiles<Dim>;
  const RandomKey random = at.dropout.key.read();
  const Index time = at.shape.time;
  Tiles::multiply(p, queries, keys);
  Tiles::multiply(ds, dout, values);
#pragma unroll
  for (int i = 0; i < Tiles::per_thread; ++i) {
    const Index query = q0 + Tiles::row(i);
    const float offset = query < time ? lse[query] : 0.0F;
    const float mean = query < time ? inner[query] : 0.0F;
#pragma unroll
    for (int j = 0; j < Tiles::per_thread; ++j) {
      const Index key = k0 + Tiles::column(j);
      const bool counts = key <= query && query < time;
      const float probability = counts ? expf(at.scale * p[i][j] - offset) : 0.0F;
      const float factor = at.dropout.probability > 0.0F && counts
                               ? at.factor(random, sample, head, query, key)
                               : 1.0F;
      ds[i][j] = at.scale * probability * (factor * ds[i][j] - mean);
      p[i][j] = probability * factor;
    }
  }
}

/// A block a tile of queries of a head.
template <int Dim>
MEGA_KERNEL void __launch_bounds__(AttentionTiles<Dim>::threads)
    attend_backward_queries(float* dqkv, const float* dout, const float* lse, const float* inner,
                            AttentionArguments at) {
  using Tiles = AttentionTiles<Dim>;
  extern __shared__ float4 shared_attention[];
  float* const queries = reinterpret_cast<float*>(shared_attention);
  float* const dout_rows = queries + Tiles::head_floats;
  float* const keys = dout_rows + Tiles::head_floats;
  float* const values = keys + Tiles::head_floats;
  float* const gradients = values + Tiles::head_floats;

  const nn::AttentionShape& shape = at.shape;
  const int dim = static_cast<int>(shape.head_dim);
  const Index width = shape.width(), time = shape.time;
  const Index sample = blockIdx.z, head = blockIdx.y, group = head / shape.group();
  const Index q0 = static_cast<Index>(gridDim.x - 1 - blockIdx.x) * Tiles::rows;
  const Index first_of_head = (sample * shape.query_heads + head) * time;
  const float* const rows = at.rows_of(at.qkv, sample);
  Tiles::load(queries, rows + shape.query_column(head), width, q0, time, dim);
  Tiles::load(dout_rows, dout + sample * time * at.out_width() + head * dim, at.out_width(), q0,
              time, dim);
  typename Tiles::Rows dquery = {};
  for (Index k0 = 0; k0 <= q0; k0 += Tiles::rows) {
    __syncthreads();
    Tiles::load(keys, rows + shape.key_column(group), width, k0, time, dim);
    Tiles::load(values, rows + shape.value_column(group), width, k0, time, dim);
    __syncthreads();
    typename Tiles::Scores p, ds;
    attention_gradients<Dim>(p, ds, queries, keys, values, dout_rows, lse + first_of_head,
                             inner + first_of_head, at, sample, head, q0, k0);
    Tiles::keep(gradients, ds);
    __syncthreads();
    Tiles::add_product(dquery, gradients, keys);
  }
  Tiles::store(dqkv + sample * time * width + shape.query_column(head), width, q0, time, dim,
               dquery);
}

/// A block a tile of keys of a key head, which adds up its query heads in ascending order.
template <int Dim>
MEGA_KERNEL void __launch_bounds__(AttentionTiles<Dim>::threads)
    attend_backward_keys(float* dqkv, const float* dout, const float* lse, const float* inner,
                         AttentionArguments at) {
  using Tiles = AttentionTiles<Dim>;
  extern __shared__ float4 shared_attention[];
  float* const queries = reinterpret_cast<float*>(shared_attention);
  float* const dout_rows = queries + Tiles::head_floats;
  float* const keys = dout_rows + Tiles::head_floats;
  float* const values = keys + Tiles::head_floats;
  float* const weights = values + Tiles::head_floats;

  const nn::AttentionShape& shape = at.shape;
  const int dim = static_cast<int>(shape.head_dim);
  const Index width = shape.width(), time = shape.time;
  const Index sample = blockIdx.z, group = blockIdx.y;
  const Index k0 = static_cast<Index>(blockIdx.x) * Tiles::rows;
  const float* const rows = at.rows_of(at.qkv, sample);
  Tiles::load(keys, rows + shape.key_column(group), width, k0, time, dim);
  Tiles::load(values, rows + shape.value_column(group), width, k0, time, dim);
  typename Tiles::Rows dkey = {}, dvalue = {};
  for (Index head = group * shape.group(); head < (group + 1) * shape.group(); ++head) {
    const Index first_of_head = (sample * shape.query_heads + head) * time;
    const float* const dout_of_head = dout + sample * time * at.out_width() + head * dim;
    for (Index q0 = k0; q0 < time; q0 += Tiles::rows) {
      __syncthreads();
      Tiles::load(queries, rows + shape.query_column(head), width, q0, time, dim);
      Tiles::load(dout_rows, dout_of_head, at.out_width(), q0, time, dim);
      __syncthreads();
      typename Tiles::Scores p, ds;
      attention_gradients<Dim>(p, ds, queries, keys, values, dout_rows, lse + first_of_head,
                               inner + first_of_head, at, sample, head, q0, k0);
      // One tile serves both, or the largest heads would not fit in shared memory.
      Tiles::keep(weights, p);
      __syncthreads();
      Tiles::add_transposed_product(dvalue, weights, dout_rows);
      __syncthreads();
      Tiles::keep(weights, ds);
      __syncthreads();
      Tiles::add_transposed_product(dkey, weights, queries);
    }
  }
  float* const drows = dqkv + sample * time * width;
  Tiles::store(drows + shape.key_column(group), width, k0, time, dim, dkey);
  Tiles::store(drows + shape.value_column(group), width, k0, time, dim, dvalue);
}

/// Calls f.template operator()<Dim>() with the smallest tile that holds head_dim.
template <class F>
void with_head_dim(std::string_view op, Index head_dim, const F& f) {
  constexpr Index largest = attention_limits<float>.head_dim;
  static_assert(largest == 128);
  expects(head_dim <= largest, ErrorCode::usage, [&] {
    return sentence(op, ": head dim ", head_dim, " is too large for a GPU's shared memory; use ",
                    largest, " or less");
  });
  if (head_dim <= 16) return f.template operator()<16>();
  if (head_dim <= 32) return f.template operator()<32>();
  if (head_dim <= 64) return f.template operator()<64>();
  return f.template operator()<128>();
}

inline AttentionArguments attention_arguments(const nn::AttentionShape& shape,
                                              const nn::AttentionDropout& dropout,
                                              Matrix<const float> qkv) {
  return {shape, dropout, 1.0F / std::sqrt(static_cast<float>(shape.head_dim)), qkv.data()};
}

inline dim3 attention_grid(const nn::AttentionShape& shape, Index heads) {
  constexpr AttentionLimits limits = attention_limits<float>;
  expects(heads <= limits.heads && shape.batch <= limits.samples, ErrorCode::usage, [&] {
    return sentence("attention: ", shape.batch, " samples of ", heads,
                    " heads are more than a grid holds, which is ", limits.samples, " of ",
                    limits.heads);
  });
  return {grid_x(ceil_div(shape.time, AttentionTiles<16>::rows)), static_cast<unsigned>(heads),
          static_cast<unsigned>(shape.batch)};
}

struct AttentionForward {
  Stream& stream;
  float* out;
  float* lse;
  AttentionArguments at;
  template <int Dim>
  void operator()() const {
    launch(stream, "attention_forward", attend<Dim>, attention_grid(at.shape, at.shape.query_heads),
           AttentionTiles<Dim>::threads, AttentionTiles<Dim>::bytes(3), out, lse, at);
  }
};

struct AttentionBackward {
  Stream& stream;
  float* dqkv;
  const float* dout;
  const float* lse;
  const float* inner;
  AttentionArguments at;
  template <int Dim>
  void operator()() const {
    using Tiles = AttentionTiles<Dim>;
    launch(stream, "attention_backward", attend_backward_queries<Dim>,
           attention_grid(at.shape, at.shape.query_heads), Tiles::threads, Tiles::bytes(4), dqkv,
           dout, lse, inner, at);
    launch(stream, "attention_backward", attend_backward_keys<Dim>,
           attention_grid(at.shape, at.shape.kv_heads), Tiles::threads, Tiles::bytes(4), dqkv, dout,
           lse, inner, at);
  }
};

}  // namespace detail

/// @pre   head_dim is at most 128
/// @cost  2 * batch * query_heads * time^2 * head_dim operations in fp32 without tensor cores; no
///        memory beside the operands
MEGA_LAUNCHES void attention_forward(Stream& stream, Matrix<float> out, View<float, 3> lse,
                                     Matrix<const float> qkv, nn::AttentionShape shape,
                                     nn::AttentionDropout dropout = {}) {
  constexpr auto op = "attention_forward";
  nn::detail::expects_valid(op, shape, dropout);
  nn::detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
  nn::detail::expects_shape(op, "out", out, shape.rows(), shape.query_heads * shape.head_dim);
  nn::detail::expects_shape(op, "lse", lse.matrix(), shape.batch * shape.query_heads, shape.time);
  detail::with_head_dim(op, shape.head_dim,
                        detail::AttentionForward{stream, out.data(), lse.data(),
                                                 detail::attention_arguments(shape, dropout, qkv)});
}

/// @pre   head_dim is at most 128
/// @cost  7 * batch * query_heads * time^2 * head_dim operations: scores are made twice, so that
///        every sum has one owner and one order; scratch of one number a query
MEGA_LAUNCHES void attention_backward(Stream& stream, Matrix<float> dqkv, Matrix<const float> dout,
                                      Matrix<const float> qkv, Matrix<const float> out,
                                      View<const float, 3> lse, nn::AttentionShape shape,
                                      nn::AttentionDropout dropout = {}) {
  constexpr auto op = "attention_backward";
  const Index out_width = shape.query_heads * shape.head_dim;
  nn::detail::expects_valid(op, shape, dropout);
  nn::detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
  nn::detail::expects_shape(op, "dqkv", dqkv, shape.rows(), shape.width());
  nn::detail::expects_shape(op, "out", out, shape.rows(), out_width);
  nn::detail::expects_shape(op, "dout", dout, shape.rows(), out_width);
  nn::detail::expects_shape(op, "lse", lse.matrix(), shape.batch * shape.query_heads, shape.time);
  if (dqkv.empty()) return;
  auto* const inner = static_cast<float*>(
      stream.scratch(sizeof(float) * static_cast<std::size_t>(shape.rows() * shape.query_heads)));
  constexpr int warps = detail::block_threads / detail::warp_threads;
  detail::launch(stream, op, detail::attention_inner_products<warps>,
                 detail::grid_x(detail::ceil_div(shape.rows() * shape.query_heads, warps)),
                 detail::block_threads, 0, inner, out.data(), dout.data(), shape);
  detail::with_head_dim(
      op, shape.head_dim,
      detail::AttentionBackward{stream, dqkv.data(), dout.data(), lse.data(), inner,
                                detail::attention_arguments(shape, dropout, qkv)});
}

}  // namespace mega::inline v0::cuda
