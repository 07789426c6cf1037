/// @file  Sums whose order depends on the shape of the operands only: not on the GPU, not on luck.
#pragma once
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/stream.hpp>

#include <cstddef>
#include <string_view>

namespace mega::inline v0::cuda::detail {

struct Sum {
  template <class T>
  static __device__ T identity() {
    return T{0};
  }
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

/// Passes over a NaN.
struct Max {
  template <class T>
  static __device__ T identity() {
    return -INFINITY;
  }
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Combines `value` of all threads of the block, whose number is a multiple of 32; every thread
/// gets the result. All threads of the block call it.
template <class Combine, class T>
__device__ T block_reduce(T value) {
  const Combine combine;
  for (int distance = warp_threads / 2; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffU, value, distance));
  if (blockDim.x == warp_threads) return value;
  __shared__ T of_warp[warp_threads];
  const unsigned lane = threadIdx.x % warp_threads, warps = blockDim.x / warp_threads;
  if (lane == 0) of_warp[threadIdx.x / warp_threads] = value;
  __syncthreads();
  value = lane < warps ? of_warp[lane] : Combine::template identity<T>();
  for (int distance = warp_threads / 2; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffU, value, distance));
  __syncthreads();  // of_warp may be written again
  return value;
}

/// Sum of term(i) for 0 <= i < n, by the whole block.
template <class T, class Term>
__device__ T block_sum(Index n, Term term) {
  T sum{0};
  for (Index i = threadIdx.x; i < n; i += blockDim.x) sum += term(i);
  return block_reduce<Sum>(sum);
}

/// Rows whose column sums one block forms; fixes the order of the sums.
inline constexpr Index column_sum_rows = 128;
inline constexpr int column_sum_height = 8;

/// partial[chunk][k][c] = sum over the chunk's rows of the k-th term.
template <int N, class Terms>
MEGA_KERNEL void sum_columns_of_chunk(float* partial, Index rows, Index cols, Terms terms) {
  __shared__ float tile[N][column_sum_height][warp_threads];
  const Index c = static_cast<Index>(blockIdx.x) * warp_threads + threadIdx.x;
  const Index chunks = ceil_div(rows, column_sum_rows);
  for (Index chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
    const Index end = min((chunk + 1) * column_sum_rows, rows);
    float sum[N] = {};
    if (c < cols) {
      for (Index r = chunk * column_sum_rows + threadIdx.y; r < end; r += column_sum_height) {
        float term[N];
        terms(r, c, term);
        for (int k = 0; k < N; ++k) sum[k] += term[k];
      }
    }
    for (int k = 0; k < N; ++k) tile[k][threadIdx.y][threadIdx.x] = sum[k];
    __syncthreads();
    if (threadIdx.y < N && c < cols) {
      const int k = threadIdx.y;
      float total = 0.0F;
      for (int y = 0; y < column_sum_height; ++y) total += tile[k][y][threadIdx.x];
      partial[(chunk * N + k) * cols + c] = total;
    }
    __syncthreads();
  }
}

template <int N>
struct ColumnTargets {
  float* out[N];
};

template <int N>
struct AddChunks {
  ColumnTargets<N> targets;
  const float* partial;
  Index chunks, cols;

  __device__ void operator()(Index k, Index c) const {
    float sum = 0.0F;
    for (Index chunk = 0; chunk < chunks; ++chunk) sum += partial[(chunk * N + k) * cols + c];
    targets.out[k][c] += sum;
  }
};

/// targets.out[k][c] += sum over the rows of the k-th number that terms(r, c, float (&)[N]) writes.
/// @cost  one pass over the operands, and scratch of N * cols floats for each 128 rows
template <int N, class Terms>
void add_column_sums(Stream& stream, std::string_view op, ColumnTargets<N> targets, Index rows,
                     Index cols, Terms terms) {
  static_assert(N <= column_sum_height);
  if (rows == 0 || cols == 0) return;
  const Index chunks = ceil_div(rows, column_sum_rows);
  auto* const partial = static_cast<float*>(
      stream.scratch(sizeof(float) * static_cast<std::size_t>(chunks * N * cols)));
  launch(stream, op, sum_columns_of_chunk<N, Terms>,
         dim3(grid_x(ceil_div(cols, warp_threads)), grid_yz(chunks)),
         dim3(warp_threads, column_sum_height), 0, partial, rows, cols, terms);
  for_each_element(stream, op, N, cols, AddChunks<N>{targets, partial, chunks, cols});
}

}  // namespace mega::inline v0::cuda::detail
