/// @file  Backward kernels of causal attention in bf16 or fp16 on tensor cores. Scores are made
/// again twice, once by the owners of keys and once by the owners of queries, so that every sum has
/// one owner and one order, and no number is added atomically. Source: Dao, "FlashAttention-2",
/// arXiv 2307.08691.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/mma.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/attention_task.cuh>

#include <cstddef>
#include <cstdint>

namespace mega::inline v0::cuda::detail {

/// inner(b, h, t) = inner product of out and dout of a query, which is the mean of its
/// probabilities' gradients under the soft-max. Lanes, a power of two, share a query.
template <half_storage T, int Lanes>
MEGA_KERNEL void attention_mma_inner_products(float* inner, const T* out, const T* dout,
                                              nn::AttentionShape shape) {
  constexpr int pack = pack_size<T>;
  const Index count = shape.rows() * shape.query_heads;
  const Index at = (static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x) / Lanes;
  const int lane = static_cast<int>(threadIdx.x) % Lanes;
  float sum = 0.0F;
  if (at < count && lane * pack < shape.head_dim) {
    const Index begin = at * shape.head_dim + lane * pack;  // a row holds its heads side by side
    float a[pack], b[pack];
    load_pack(a, out + begin);
    load_pack(b, dout + begin);
#pragma unroll
    for (int i = 0; i < pack; ++i) sum += a[i] * b[i];
  }
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffU, sum, distance);
  if (lane == 0 && at < count) {
    const Index row = at / shape.query_heads, head = at % shape.query_heads;
    inner[(row / shape.time * shape.query_heads + head) * shape.time + row % shape.time] = sum;
  }
}

/// What the backward kernels read beside the packed operands.
template <half_storage T>
struct AttentionGradients {
  const T* dout;
  const float* lse;
  const float* inner;
};

/// Wide heads leave a warp room for the sums of 16 keys only, and then for the keys and values
/// themselves; narrow ones have 32 keys and read them from shared memory.
template <int Dim>
struct BackwardKeyTiles {
  static constexpr int m = Dim <= 64 ? 2 : 1;
  static constexpr int warps = 8 / m;
  static constexpr int threads = warps * warp_threads;
  static constexpr int blocks = m;  ///< of a multiprocessor
  static constexpr int warp_keys = 16 * m;
  static constexpr int keys = warps * warp_keys;
  static constexpr int queries = 64;  ///< of a stage
  static constexpr int columns = 32;  ///< queries at a time
  static constexpr bool keep_keys = m == 1;
  static constexpr int statistics_at = SwizzledTile<Dim>::bytes(2 * queries);
  static constexpr int stage_bytes = statistics_at + 2 * queries * int{sizeof(float)};
  static constexpr std::size_t bytes = SwizzledTile<Dim>::bytes(2 * keys) + 2 * stage_bytes;
};

/// dkey and dvalue: a block a tile of keys of a key head, whose query heads it adds up in ascending
/// order. Scores are transposed, a row a key, so that probabilities and gradients are left operands
/// where they lie.
template <half_storage T, int Dim>
MEGA_KERNEL void __launch_bounds__(BackwardKeyTiles<Dim>::threads, BackwardKeyTiles<Dim>::blocks)
    attend_mma_backward_keys(T* dqkv, AttentionGradients<T> given, AttentionTask<T> task) {
  using Tiles = BackwardKeyTiles<Dim>;
  using Tile = SwizzledTile<Dim>;
  constexpr int M = Tiles::m, Columns = Tiles::columns / 8;
  extern __shared__ uint4 shared_attention_tiles[];
  const std::uint32_t key_tile = shared_address(shared_attention_tiles);
  const std::uint32_t value_tile = key_tile + Tile::bytes(Tiles::keys);
  const std::uint32_t ring = value_tile + Tile::bytes(Tiles::keys);

  const nn::AttentionShape& shape = task.shape;
  const int time = task.time(), dim = task.dim();
  const Index width = shape.width(), out_width = task.out_width();
  const auto [place, turn] = task.order.place(blockIdx.x);
  const int sample = place / static_cast<int>(shape.kv_heads);
  const int group = place % static_cast<int>(shape.kv_heads);
  const int heads = static_cast<int>(shape.group());
  const int k0 = turn * Tiles::keys;
  const int first_key = k0 + warp_index() * Tiles::warp_keys;
  const T* const rows = task.qkv + task.first_element(sample);

  // Stages run through the queries from k0 on of one head after the other.
  static_assert(Tiles::keys % Tiles::queries == 0);
  const int stages_of_head = (time - k0 - 1) / Tiles::queries + 1;
  const int stages = heads * stages_of_head;
  const auto head_of = [&](int n) { return group * heads + n / stages_of_head; };
  const auto query_of = [&](int n) { return k0 + n % stages_of_head * Tiles::queries; };
  const auto load_stage = [&](int n) {
    const int head = head_of(n), q0 = query_of(n);
    const std::uint32_t stage = ring + n % 2 * Tiles::stage_bytes;
    Tile::template load<Tiles::queries, Tiles::threads>(
        stage, rows + q0 * width + shape.query_column(head), width, time - q0, dim);
    Tile::template load<Tiles::queries, Tiles::threads>(
        stage + Tile::bytes(Tiles::queries),
        given.dout + task.first_out(sample, head) + q0 * out_width, out_width, time - q0, dim);
    const int at = static_cast<int>(threadIdx.x);
    if (at < 2 * Tiles::queries) {
      const float* const from = at < Tiles::queries ? given.lse : given.inner;
      const int q = q0 + at % Tiles::queries;
      copy_async_4(stage + Tiles::statistics_at + 4 * at,
                   from + task.first_statistic(sample, head) + min(q, time - 1), q < time);
    }
  };
  const T* const from = rows + k0 * width;
  Tile::template load<Tiles::keys, Tiles::threads>(key_tile, from + shape.key_column(group), width,
                                                   time - k0, dim);
  Tile::template load<Tiles::keys, Tiles::threads>(value_tile, from + shape.value_column(group),
                                                   width, time - k0, dim);
  load_stage(0);

  LeftOperand<M, Dim, Tiles::keep_keys> key{TileReader<Dim>::by_rows(key_tile, first_key - k0)};
  LeftOperand<M, Dim, Tiles::keep_keys> value{TileReader<Dim>::by_rows(value_tile, first_key - k0)};
  float dkey[M][Dim / 8][4] = {}, dvalue[M][Dim / 8][4] = {};
  const float exponent_scale = task.scale * log2_e;

#pragma unroll 1
  for (int n = 0; n < stages; ++n) {
    wait_async_copies();
    __syncthreads();  // stage n is there, and nobody reads stage n - 1 any more
    if (n + 1 < stages) load_stage(n + 1);
    if (n == 0) {
      key.keep();
      value.keep();
    }
    const std::uint32_t query_tile = ring + n % 2 * Tiles::stage_bytes;
    const std::uint32_t dout_tile = query_tile + Tile::bytes(Tiles::queries);
    const auto* const statistics =
        reinterpret_cast<const float*>(reinterpret_cast<const char*>(shared_attention_tiles) +
                                       (query_tile + Tiles::statistics_at - key_tile));
#pragma unroll 1
    for (int c0 = 0; c0 < Tiles::queries; c0 += Tiles::columns) {
      const int q0 = query_of(n) + c0;
      if (q0 + Tiles::columns <= first_key || q0 >= time) continue;  // before all keys of this warp

      float p[M][Columns][4], ds[M][Columns][4];
      multiply_transposed<T>(p, key, TileReader<Dim>::by_columns(query_tile, 0), c0);
      multiply_transposed<T>(ds, value, TileReader<Dim>::by_columns(dout_tile, 0), c0);
      if (q0 < first_key + Tiles::warp_keys - 1) mask_future<ScoreRows::keys>(p, q0, first_key);
      std::uint64_t kept = 0;
      if (task.drops()) {
        kept = kept_scores<ScoreRows::keys, M, Columns>(task, sample, head_of(n), q0, first_key);
        drop(ds, kept, task.kept);
      }
      // Queries past the end are zeros, as are their statistics: they add zero.
#pragma unroll
      for (int j = 0; j < Columns; ++j) {
        const float* const of_queries = statistics + c0 + 8 * j + lane_index() % 4 * 2;
        const auto lse = *reinterpret_cast<const float2*>(of_queries);
        const auto inner = *reinterpret_cast<const float2*>(of_queries + Tiles::queries);
        const float offset[2] = {lse.x * log2_e, lse.y * log2_e}, mean[2] = {inner.x, inner.y};
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            p[m][j][i] = exp2_approximate(p[m][j][i] * exponent_scale - offset[i % 2]);
            ds[m][j][i] = p[m][j][i] * (ds[m][j][i] - mean[i % 2]);
          }
      }
      // The gradient above is of the probability before dropout, as the soft-max made it; the
      // factor of what is kept waits for the end.
      if (task.drops()) drop(p, kept, 1.0F);
      std::uint32_t left[M][Columns / 2][4];
      round_to_left<T>(left, p);
      add_product<T, M, Columns / 2, Dim>(dvalue, left, TileReader<Dim>::by_rows(dout_tile, 0), c0);
      round_to_left<T>(left, ds);
      add_product<T, M, Columns / 2, Dim>(dkey, left, TileReader<Dim>::by_rows(query_tile, 0), c0);
    }
  }
  T* const to = dqkv + task.first_element(sample) + first_key * width;
  store_rows(to + shape.key_column(group), width, time - first_key, dim, dkey,
             [&](int, int) { return task.scale; });
  store_rows(to + shape.value_column(group), width, time - first_key, dim, dvalue,
             [&](int, int) { return task.kept; });
}

/// Stages are short for wide heads, so that two blocks fit on a multiprocessor.
template <int Dim>
struct BackwardQueryTiles {
  static constexpr int m = 2;
  static constexpr int warps = 4;
  static constexpr int threads = warps * warp_threads;
  static constexpr int blocks = 2;  ///< of a multiprocessor
  static constexpr int warp_queries = 16 * m;
  static constexpr int queries = warps * warp_queries;
  static constexpr int keys = Dim <= 64 ? 64 : 32;  ///< of a stage
  static constexpr int columns = 32;                ///< keys at a time
  static constexpr bool keep_queries = Dim <= 64;
  static constexpr int stage_bytes = SwizzledTile<Dim>::bytes(2 * keys);
  static constexpr std::size_t bytes = SwizzledTile<Dim>::bytes(2 * queries) + 2 * stage_bytes;
};

/// dquery: a block a tile of queries of a head.
template <half_storage T, int Dim>
MEGA_KERNEL void __launch_bounds__(BackwardQueryTiles<Dim>::threads,
                                   BackwardQueryTiles<Dim>::blocks)
    attend_mma_backward_queries(T* dqkv, AttentionGradients<T> given, AttentionTask<T> task) {
  using Tiles = BackwardQueryTiles<Dim>;
  using Tile = SwizzledTile<Dim>;
  constexpr int M = Tiles::m, Columns = Tiles::columns / 8;
  extern __shared__ uint4 shared_attention_tiles[];
  const std::uint32_t query_tile = shared_address(shared_attention_tiles);
  const std::uint32_t dout_tile = query_tile + Tile::bytes(Tiles::queries);
  const std::uint32_t ring = dout_tile + Tile::bytes(Tiles::queries);

  const nn::AttentionShape& shape = task.shape;
  const int time = task.time(), dim = task.dim();
  const Index width = shape.width(), out_width = task.out_width();
  const auto [place, turn] = task.order.place(blockIdx.x);
  const int sample = place / static_cast<int>(shape.query_heads);
  const int head = place % static_cast<int>(shape.query_heads);
  const int group = head / static_cast<int>(shape.group());
  const int q0 = (task.order.tiles - 1 - turn) * Tiles::queries;
  const int first_query = q0 + warp_index() * Tiles::warp_queries;
  const T* const rows = task.qkv + task.first_element(sample);

  const auto load_stage = [&](int n) {
    const int k0 = n * Tiles::keys;
    const std::uint32_t stage = ring + n % 2 * Tiles::stage_bytes;
    const T* const from = rows + k0 * width;
    Tile::template load<Tiles::keys, Tiles::threads>(stage, from + shape.key_column(group), width,
                                                     time - k0, dim);
    Tile::template load<Tiles::keys, Tiles::threads>(
        stage + Tile::bytes(Tiles::keys), from + shape.value_column(group), width, time - k0, dim);
  };
  Tile::template load<Tiles::queries, Tiles::threads>(
      query_tile, rows + q0 * width + shape.query_column(head), width, time - q0, dim);
  Tile::template load<Tiles::queries, Tiles::threads>(
      dout_tile, given.dout + task.first_out(sample, head) + q0 * out_width, out_width, time - q0,
      dim);
  load_stage(0);

  LeftOperand<M, Dim, Tiles::keep_queries> query{
      TileReader<Dim>::by_rows(query_tile, first_query - q0)};
  LeftOperand<M, Dim, Tiles::keep_queries> dout{
      TileReader<Dim>::by_rows(dout_tile, first_query - q0)};
  float dquery[M][Dim / 8][4] = {};
  float offset[M][2], mean[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A query past the end is zeros and not stored; it takes the numbers of the last.
      const int q = min(first_query + 16 * m + 8 * h + lane_index() / 4, time - 1);
      offset[m][h] = given.lse[task.first_statistic(sample, head) + q] * log2_e;
      mean[m][h] = given.inner[task.first_statistic(sample, head) + q];
    }
  const float exponent_scale = task.scale * log2_e;

  const int stages = (min(q0 + Tiles::queries, time) - 1) / Tiles::keys + 1;
#pragma unroll 1
  for (int n = 0; n < stages; ++n) {
    wait_async_copies();
    __syncthreads();  // stage n is there, and nobody reads stage n - 1 any more
    if (n + 1 < stages) load_stage(n + 1);
    if (n == 0) {
      query.keep();
      dout.keep();
    }
    const std::uint32_t key_tile = ring + n % 2 * Tiles::stage_bytes;
    const std::uint32_t value_tile = key_tile + Tile::bytes(Tiles::keys);
#pragma unroll 1
    for (int c0 = 0; c0 < Tiles::keys; c0 += Tiles::columns) {
      const int k0 = n * Tiles::keys + c0;
      if (k0 >= first_query + Tiles::warp_queries) continue;  // after all queries of this warp

      float score[M][Columns][4], ds[M][Columns][4];
      multiply_transposed<T>(score, query, TileReader<Dim>::by_columns(key_tile, 0), c0);
      multiply_transposed<T>(ds, dout, TileReader<Dim>::by_columns(value_tile, 0), c0);
      if (k0 + Tiles::columns - 1 > first_query)
        mask_future<ScoreRows::queries>(score, first_query, k0);
      if (task.drops()) {
        drop(ds, kept_scores<ScoreRows::queries, M, Columns>(task, sample, head, first_query, k0),
             task.kept);
      }
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int j = 0; j < Columns; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float p = exp2_approximate(score[m][j][i] * exponent_scale - offset[m][i / 2]);
            ds[m][j][i] = p * (ds[m][j][i] - mean[m][i / 2]);
          }
      std::uint32_t left[M][Columns / 2][4];
      round_to_left<T>(left, ds);
      add_product<T, M, Columns / 2, Dim>(dquery, left, TileReader<Dim>::by_rows(key_tile, 0), c0);
    }
  }
  store_rows(dqkv + task.first_element(sample) + first_query * width + shape.query_column(head),
             width, time - first_query, dim, dquery, [&](int, int) { return task.scale; });
}

template <half_storage T>
struct AttentionMmaBackward {
  Stream& stream;
  T* dqkv;
  const T* out;
  AttentionGradients<T> given;
  float* inner;
  AttentionTask<T> task;

  template <int Dim>
  void operator()() const {
    constexpr auto op = "attention_backward";
    const nn::AttentionShape& shape = task.shape;
    constexpr int lanes = Dim > 64 ? 16 : Dim / 8;
    launch(stream, op, attention_mma_inner_products<T, lanes>,
           grid_x(ceil_div(shape.rows() * shape.query_heads, block_threads / lanes)), block_threads,
           0, inner, out, given.dout, shape);

    AttentionTask<T> ordered = task;
    ordered.order = TileOrder::of(op, shape.batch * shape.kv_heads,
                                  ceil_div(shape.time, BackwardKeyTiles<Dim>::keys),
                                  4 * shape.time * shape.head_dim * shape.group());
    launch(stream, op, attend_mma_backward_keys<T, Dim>, ordered.order.grid(),
           BackwardKeyTiles<Dim>::threads, BackwardKeyTiles<Dim>::bytes, dqkv, given, ordered);

    ordered.order = query_order(op, shape, BackwardQueryTiles<Dim>::queries);
    launch(stream, op, attend_mma_backward_queries<T, Dim>, ordered.order.grid(),
           BackwardQueryTiles<Dim>::threads, BackwardQueryTiles<Dim>::bytes, dqkv, given, ordered);
  }
};

}  // namespace mega::inline v0::cuda::detail
