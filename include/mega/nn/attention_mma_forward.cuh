/// @file  Forward kernel of causal attention in bf16 or fp16 on tensor cores: scores, soft-max and
/// weighted values of a tile of queries in one pass over its keys, nothing of size time^2 in
/// memory. Source: Dao, "FlashAttention-2", arXiv 2307.08691.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/mma.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/attention_task.cuh>

#include <cstddef>
#include <cstdint>

namespace mega::inline v0::cuda::detail {

/// A warp has 32 queries, so that a fragment of keys or values that it reads serves two products;
/// narrow heads keep their queries in registers, wide ones have no room beside the sums.
template <int Dim>
struct ForwardTiles {
  static constexpr int warps = 4;
  static constexpr int m = 2;
  static constexpr int threads = warps * warp_threads;
  static constexpr int blocks = 2;  ///< of a multiprocessor
  static constexpr int warp_queries = 16 * m;
  static constexpr int queries = warps * warp_queries;
  static constexpr int keys = 64;
  static constexpr bool keep_queries = Dim <= 64;
  static constexpr int stage_bytes = SwizzledTile<Dim>::bytes(2 * keys);
  static constexpr std::size_t bytes = SwizzledTile<Dim>::bytes(queries) + 2 * stage_bytes;
};

template <half_storage T, int Dim>
MEGA_KERNEL void __launch_bounds__(ForwardTiles<Dim>::threads, ForwardTiles<Dim>::blocks)
    attend_mma(T* out, float* lse, AttentionTask<T> task) {
  using Tiles = ForwardTiles<Dim>;
  using Tile = SwizzledTile<Dim>;
  constexpr int M = Tiles::m, Columns = Tiles::keys / 8;
  extern __shared__ uint4 shared_attention_tiles[];
  const std::uint32_t query_tile = shared_address(shared_attention_tiles);
  const std::uint32_t ring = query_tile + Tile::bytes(Tiles::queries);

  const nn::AttentionShape& shape = task.shape;
  const int time = task.time(), dim = task.dim();
  const Index width = shape.width();
  const auto [place, turn] = task.order.place(blockIdx.x);
  const int sample = place / static_cast<int>(shape.query_heads);
  const int head = place % static_cast<int>(shape.query_heads);
  const int group = head / static_cast<int>(shape.group());
  const int q0 = (task.order.tiles - 1 - turn) * Tiles::queries;
  const int first_query = q0 + warp_index() * Tiles::warp_queries;
  const T* const rows = task.qkv + task.first_element(sample);

  // Two stages of keys and values: while one is used, the other is filled.
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
  load_stage(0);

  LeftOperand<M, Dim, Tiles::keep_queries> query{
      TileReader<Dim>::by_rows(query_tile, first_query - q0)};
  float weighted[M][Dim / 8][4] = {};
  float largest[M][2], sum[M][2];  // sum: of this lane's columns
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[m][h] = -INFINITY;
      sum[m][h] = 0.0F;
    }
  const float exponent_scale = task.scale * log2_e;

  const int stages = (min(q0 + Tiles::queries, time) - 1) / Tiles::keys + 1;
#pragma unroll 1
  for (int n = 0; n < stages; ++n) {
    wait_async_copies();
    __syncthreads();  // stage n is there, and nobody reads stage n - 1 any more
    if (n + 1 < stages) load_stage(n + 1);
    if (n == 0) query.keep();
    const int k0 = n * Tiles::keys;
    if (k0 >= first_query + Tiles::warp_queries) continue;  // after all queries of this warp

    const std::uint32_t stage = ring + n % 2 * Tiles::stage_bytes;
    float score[M][Columns][4];
    multiply_transposed<T>(score, query, TileReader<Dim>::by_columns(stage, 0), 0);
    if (k0 + Tiles::keys - 1 > first_query) mask_future<ScoreRows::queries>(score, first_query, k0);
      // No query comes before key 0, so from the first stage on the largest score is one that
      // counts.
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float now = largest[m][h];
#pragma unroll
        for (int j = 0; j < Columns; ++j)
          now = fmaxf(now, fmaxf(score[m][j][2 * h], score[m][j][2 * h + 1]));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 2));
        const float offset = now * exponent_scale;
        const float correction = exp2_approximate(largest[m][h] * exponent_scale - offset);
        largest[m][h] = now;
        float added = 0.0F;
#pragma unroll
        for (int j = 0; j < Columns; ++j)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            score[m][j][i] = exp2_approximate(score[m][j][i] * exponent_scale - offset);
            added += score[m][j][i];
          }
        sum[m][h] = sum[m][h] * correction + added;
#pragma unroll
        for (int j = 0; j < Dim / 8; ++j)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) weighted[m][j][i] *= correction;
      }
    }
    if (task.drops()) {
      // The factor of what is kept waits for the end.
      drop(score, kept_scores<ScoreRows::queries, M, Columns>(task, sample, head, first_query, k0),
           1.0F);
    }
    std::uint32_t probability[M][Columns / 2][4];
    round_to_left<T>(probability, score);
    add_product<T, M, Columns / 2, Dim>(
        weighted, probability, TileReader<Dim>::by_rows(stage + Tile::bytes(Tiles::keys), 0), 0);
  }

  float* const lse_of_head = lse + task.first_statistic(sample, head);
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[m][h] += __shfl_xor_sync(0xffffffffU, sum[m][h], 1);
      sum[m][h] += __shfl_xor_sync(0xffffffffU, sum[m][h], 2);
      const int q = first_query + 16 * m + 8 * h + lane_index() / 4;
      if (lane_index() % 4 == 0 && q < time)
        lse_of_head[q] = task.scale * largest[m][h] + logf(sum[m][h]);
    }
  const Index out_width = task.out_width();
  store_rows(out + task.first_out(sample, head) + first_query * out_width, out_width,
             time - first_query, dim, weighted,
             [&](int m, int h) { return task.kept / sum[m][h]; });
}

template <half_storage T>
struct AttentionMmaForward {
  Stream& stream;
  T* out;
  float* lse;
  AttentionTask<T> task;

  template <int Dim>
  void operator()() const {
    using Tiles = ForwardTiles<Dim>;
    AttentionTask<T> ordered = task;
    ordered.order = query_order("attention_forward", task.shape, Tiles::queries);
    launch(stream, "attention_forward", attend_mma<T, Dim>, ordered.order.grid(), Tiles::threads,
           Tiles::bytes, out, lse, ordered);
  }
};

}  // namespace mega::inline v0::cuda::detail
