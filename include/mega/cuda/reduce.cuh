/// @file  Sums whose order depends on the shape of the operands only: not on the GPU, not on luck.
#pragma once
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <type_traits>

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

/// Of an H200. A constant, so that the order of sums does not depend on the GPU.
inline constexpr Index multiprocessors = 132;

/// Threads across the rows of a block that forms column sums, and of one that adds such sums.
inline constexpr int column_sum_height = 8;
inline constexpr int chunk_sum_height = 32;
/// Fewer rows are not worth a block.
inline constexpr Index column_sum_least_rows = 32;

/// Rows that a thread has on their way at a time, and blocks that share the rows and columns of a
/// matrix: fewer blocks, and so fewer partial sums, where a thread can have more on its way.
template <class Operands>
inline constexpr bool column_sum_of_one = sizeof(Operands) <= 16;
template <class Operands>
inline constexpr int column_sum_batch = column_sum_of_one<Operands> ? 8 : 2;
template <class Operands>
inline constexpr Index column_sum_blocks = multiprocessors*(column_sum_of_one<Operands> ? 2 : 4);

/// The kernel that the stream has next may begin, if it was queued to overlap: it still waits for
/// this one's end where it says so. Nothing before sm_90.
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
/// Until the kernel before has ended and its stores are seen.
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <int N>
struct ColumnTargets {
  float* out[N];  ///< null: nobody wants this sum
};

/// partial[chunk][k][c] = sum over the chunk's rows of the k-th term.
template <int W, int N, class Terms>
MEGA_KERNEL void __launch_bounds__(warp_threads* column_sum_height, 4)
    sum_columns_of_chunk(float* partial, Index rows, Index cols, Index chunk_rows, Terms terms) {
  using Operands = typename Terms::template Operands<W>;
  constexpr int batch = column_sum_batch<Operands>, height = column_sum_height;
  let_next_kernel_begin();
  __shared__ float tile[height][W][warp_threads];
  const Index c = (static_cast<Index>(blockIdx.x) * warp_threads + threadIdx.x) * W;
  const Index begin = blockIdx.y * chunk_rows, end = min(begin + chunk_rows, rows);
  float sum[N][W] = {};
  // `whole`: no row of the batch is beyond the end, and no load waits for a comparison.
  const auto add_batch = [&](Index first, auto whole) {
    Operands operands[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i)
      if (decltype(whole)::value || first + i * height < end)
        operands[i] = terms.template load<W>(first + i * height, c);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (!decltype(whole)::value && first + i * height >= end) continue;
      float term[N][W];
      terms.template finish<W>(first + i * height, c, operands[i], term);
#pragma unroll
      for (int k = 0; k < N; ++k)
#pragma unroll
        for (int w = 0; w < W; ++w) sum[k][w] += term[k][w];
    }
  };
  if (c < cols) {
    Index r = begin + threadIdx.y;
    for (; r + (batch - 1) * height < end; r += batch * height) add_batch(r, std::true_type{});
    if (r < end) add_batch(r, std::false_type{});
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
#pragma unroll
    for (int w = 0; w < W; ++w) tile[threadIdx.y][w][threadIdx.x] = sum[k][w];
    __syncthreads();
    if (c < cols) {
      for (int w = threadIdx.y; w < W; w += height) {
        float total = 0.0F;
        for (int y = 0; y < height; ++y) total += tile[y][w][threadIdx.x];
        partial[(static_cast<Index>(blockIdx.y) * N + k) * cols + c + w] = total;
      }
    }
    __syncthreads();
  }
}

template <int N>
MEGA_KERNEL void __launch_bounds__(warp_threads* chunk_sum_height)
    add_chunks(ColumnTargets<N> targets, const float* partial, Index chunks, Index cols) {
  __shared__ float tile[chunk_sum_height][warp_threads];
  const Index c = static_cast<Index>(blockIdx.x) * warp_threads + threadIdx.x;
  const int k = blockIdx.y;
  wait_for_kernel_before();
  if (targets.out[k] == nullptr) return;
  float sum = 0.0F;
  if (c < cols) {
#pragma unroll 8
    for (Index chunk = threadIdx.y; chunk < chunks; chunk += chunk_sum_height)
      sum += partial[(chunk * N + k) * cols + c];
  }
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= cols) return;
  float total = 0.0F;
  for (int y = 0; y < chunk_sum_height; ++y) total += tile[y][threadIdx.x];
  targets.out[k][c] += total;
}

/// Whether add_chunks() may begin before the kernel in front of it has ended: its code for the
/// stream's device is of sm_90 or later, and waits.
template <int N>
struct __attribute__((visibility("hidden"))) ChunksOverlap {
  explicit ChunksOverlap(Stream&) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(add_chunks<N>)),
          "cudaFuncGetAttributes");
    possible = attributes.ptxVersion >= 90;
  }
  bool possible;
};

/// targets.out[k][c] += sum over the chunks of partial[chunk][k][c]. The kernel before it on the
/// stream is the one that makes the partial sums.
template <int N>
void add_partial_sums(Stream& stream, std::string_view op, ColumnTargets<N> targets,
                      const float* partial, Index chunks, Index cols) {
  if (cols == 0) return;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_x(ceil_div(cols, warp_threads)), N);
  config.blockDim = dim3(warp_threads, chunk_sum_height);
  config.stream = stream.native();
  config.attrs = &overlap;
  config.numAttrs = stream.resource<ChunksOverlap<N>>().possible ? 1 : 0;
  check(cudaLaunchKernelEx(&config, add_chunks<N>, targets, partial, chunks, cols), op);
}

/// targets.out[k][c] += sum over the rows of the k-th number that the terms have there:
/// terms.load<W>(r, c) brings the Operands<W> of W columns, and terms.finish<W>(r, c, operands,
/// float (&term)[N][W]) makes the numbers of them; what it stores may be where operands lay.
/// @pre  W divides cols
/// @cost  2 launches, one pass over the operands, at most min(rows / 32 + 1, 528) * N * cols
///        floats of scratch
/// @determinism  the order of the sums depends on rows, cols, W and the size of Operands<W> alone
template <int W, int N, class Terms>
void add_column_sums(Stream& stream, std::string_view op, ColumnTargets<N> targets, Index rows,
                     Index cols, Terms terms) {
  if (rows == 0 || cols == 0) return;
  const Index across = ceil_div(cols, warp_threads * W);
  const Index blocks = column_sum_blocks<typename Terms::template Operands<W>>;
  const Index chunk_rows =
      ceil_div(rows, std::clamp(blocks / across, Index{1}, ceil_div(rows, column_sum_least_rows)));
  const Index chunks = ceil_div(rows, chunk_rows);
  auto* const partial = static_cast<float*>(
      stream.scratch(sizeof(float) * static_cast<std::size_t>(chunks * N * cols)));
  launch(stream, op, sum_columns_of_chunk<W, N, Terms>,
         dim3(grid_x(across), static_cast<unsigned>(chunks)), dim3(warp_threads, column_sum_height),
         0, partial, rows, cols, chunk_rows, terms);
  add_partial_sums(stream, op, targets, partial, chunks, cols);
}

}  // namespace mega::inline v0::cuda::detail
