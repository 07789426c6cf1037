/// @file  The arithmetic of a row's normalisation on a GPU, centred (layer norm) or not (root mean
/// square): forward with or without a branch to add, and backward.
#pragma once
#include <mega/core/bfloat16.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/elementwise.cuh>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <type_traits>

namespace mega::inline v0::cuda::detail {

/// Most threads of a row: so each may use half of the registers there are for one.
inline constexpr int norm_threads = 512;
/// Packs of a row that a thread keeps in registers; rows too long for that are read again instead.
inline constexpr int norm_kept = 4;

/// visit(k, c) for each pack of the row that is this thread's. Kept > 0: k counts up to Kept, and
/// is known to the compiler; Kept == 0: any number of packs, k stays 0.
template <int W, int Kept, class Visit>
__device__ inline void each_pack(Index cols, Visit visit) {
  const Index stride = static_cast<Index>(blockDim.x) * W;
  Index c = static_cast<Index>(threadIdx.x) * W;
  if constexpr (Kept == 0) {
    for (; c < cols; c += stride) visit(0, c);
  } else {
#pragma unroll
    for (int k = 0; k < Kept; ++k, c += stride)
      if (c < cols) visit(k, c);
  }
}

/// Launches a kernel whose blocks are (threads of a row) x (rows at a time). Threads, and with them
/// the order of a row's sums, depend on cols alone.
template <int W, class... Parameters, class Operands>
void launch_rows(Stream& stream, std::string_view op, Index rows, Index cols,
                 void (*kept)(Parameters...), void (*read_again)(Parameters...),
                 const Operands& operands) {
  const Index needed = ceil_div(cols, Index{W} * norm_kept);
  const bool fits = needed <= norm_threads;
  const auto threads = static_cast<unsigned>(
      fits ? std::max<Index>(ceil_div(needed, warp_threads), 1) * warp_threads : norm_threads);
  const dim3 block(threads, threads == warp_threads ? 4 : 1);
  launch(stream, op, fits ? kept : read_again, grid_x(ceil_div(rows, block.y)), block, 0, operands);
}

template <storage T>
struct NormForward {
  T* out;
  T* y;         ///< unused without a branch
  float* mean;  ///< unused where rows are not centred, and so is bias
  float* rstd;
  const T* x;
  const T* branch;       ///< may be null
  const T* branch_bias;  ///< may be null
  const T* weight;
  const T* bias;
  Index rows, cols;
  float epsilon;
};

/// One kernel for both, so that a norm of y computed again has the bits of the one that was fused
/// with the sum.
template <int W, int Kept, bool Centred, storage T>
MEGA_KERNEL void __launch_bounds__(norm_threads) norm_forward_rows(NormForward<T> op) {
  constexpr int held = Kept == 0 ? 1 : Kept;
  const Index cols = op.cols;
  const auto count = static_cast<float>(cols);
  const Index step = static_cast<Index>(gridDim.x) * blockDim.y;
  for (Index r = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y; r < op.rows;
       r += step) {
    float x[held][W];
    const T* in = op.x + r * cols;
    if (op.branch != nullptr) {
      RawPack<T, W> branch[held];
      T* const y = op.y + r * cols;
      const auto load = [&](int k, Index c) {
        load_pack(x[k], in + c);
        branch[k] = load_raw<W>(op.branch + r * cols + c);
      };
      const auto sum = [&](int k, Index c) {
        float b[W];
        unpack(b, branch[k]);
        add_branch_pack(x[k], b, op.branch_bias == nullptr ? nullptr : op.branch_bias + c);
        store_pack(y + c, x[k]);
      };
      if constexpr (Kept == 0) {
        each_pack<W, Kept>(cols, [&](int k, Index c) {
          load(k, c);
          sum(k, c);
        });
      } else {
        each_pack<W, Kept>(cols, load);
        each_pack<W, Kept>(cols, sum);
      }
      in = y;  // Each thread reads what itself has written.
    } else if constexpr (Kept > 0) {
      each_pack<W, Kept>(cols, [&](int k, Index c) { load_pack(x[k], in + c); });
    }
    const auto again = [&](int k, Index c) {
      if constexpr (Kept == 0) load_pack(x[k], in + c);
    };

    float m = 0.0F;
    if constexpr (Centred) {
      each_pack<W, Kept>(cols, [&](int k, Index c) {
        again(k, c);
#pragma unroll
        for (int w = 0; w < W; ++w) m += x[k][w];
      });
      m = block_reduce<Sum>(m) / count;
    }
    float square = 0.0F;
    each_pack<W, Kept>(cols, [&](int k, Index c) {
      again(k, c);
#pragma unroll
      for (int w = 0; w < W; ++w) square += (x[k][w] - m) * (x[k][w] - m);
    });
    const float s = 1.0F / sqrtf(block_reduce<Sum>(square) / count + op.epsilon);

    T* const out = op.out + r * cols;
    each_pack<W, Kept>(cols, [&](int k, Index c) {
      again(k, c);
      float weight[W], bias[W] = {}, normed[W];
      load_constant(weight, op.weight + c);
      if constexpr (Centred) load_constant(bias, op.bias + c);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        normed[w] = (x[k][w] - m) * s * weight[w];
        if constexpr (Centred) normed[w] += bias[w];
      }
      store_pack(out + c, normed);
    });
    if (threadIdx.x == 0) {
      if constexpr (Centred) op.mean[r] = m;
      op.rstd[r] = s;
    }
  }
}

template <storage T>
struct NormBackward {
  T* dx;
  const T* dy;  ///< added to the gradient; may be null
  const T* dout;
  const T* x;
  const T* weight;
  const float* mean;  ///< unused where rows are not centred
  const float* rstd;
  Index rows, cols;
};

/// dx alone.
template <int W, int Kept, bool Centred, storage T>
MEGA_KERNEL void __launch_bounds__(norm_threads) norm_backward_rows(NormBackward<T> op) {
  constexpr int held = Kept == 0 ? 1 : Kept;
  const Index cols = op.cols;
  const auto count = static_cast<float>(cols);
  const Index step = static_cast<Index>(gridDim.x) * blockDim.y;
  for (Index r = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y; r < op.rows;
       r += step) {
    const Index row = r * cols;
    const float m = Centred ? op.mean[r] : 0.0F, s = op.rstd[r];
    // The normalised row, and the gradient of it.
    float unit[held][W], slopes[held][W];
    const auto load = [&](int k, Index c) {
      float weight[W];
      load_pack(unit[k], op.x + row + c);
      load_pack(slopes[k], op.dout + row + c);
      load_constant(weight, op.weight + c);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        unit[k][w] = (unit[k][w] - m) * s;
        slopes[k][w] *= weight[w];
      }
    };
    float average = 0.0F, slope = 0.0F;
    each_pack<W, Kept>(cols, [&](int k, Index c) {
      load(k, c);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        average += slopes[k][w];
        slope += slopes[k][w] * unit[k][w];
      }
    });
    average = Centred ? block_reduce<Sum>(average) / count : 0.0F;
    slope = block_reduce<Sum>(slope) / count;
    each_pack<W, Kept>(cols, [&](int k, Index c) {
      if constexpr (Kept == 0) load(k, c);
      float dx[W], dy[W] = {};
      if (op.dy != nullptr) load_pack(dy, op.dy + row + c);
#pragma unroll
      for (int w = 0; w < W; ++w) dx[w] = dy[w] + s * (slopes[k][w] - average - unit[k][w] * slope);
      store_pack(op.dx + row + c, dx);
    });
  }
}

/// Terms of the gradients of weight and, of a centred norm, bias.
template <bool Centred, storage T>
struct NormWeightTerms {
  static constexpr int count = Centred ? 2 : 1;
  const T* dout;
  const T* x;
  const float* mean;
  const float* rstd;
  Index cols;
  template <int W>
  struct Operands {
    RawPack<T, W> dout, x;
    float mean, rstd;
  };
  template <int W>
  __device__ Operands<W> load(Index r, Index c) const {
    return {load_raw<W>(dout + r * cols + c), load_raw<W>(x + r * cols + c),
            Centred ? mean[r] : 0.0F, rstd[r]};
  }
  template <int W>
  __device__ void finish(Index, Index, const Operands<W>& operands, float (&term)[count][W]) const {
    float dy[W], v[W];
    unpack(dy, operands.dout);
    unpack(v, operands.x);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      term[0][w] = dy[w] * ((v[w] - operands.mean) * operands.rstd);
      if constexpr (Centred) term[1][w] = dy[w];
    }
  }
};

/// Column sums of backward: of the terms of weight, of bias where centred, of dx as stored.
template <bool Centred>
inline constexpr int norm_sums = Centred ? 3 : 2;

/// Sum of both over the threads of a row; `turn` counts the calls. Each call has one barrier: the
/// memory of a call is written again only two calls later, when all threads have read it.
__device__ inline float2 row_reduce(float2 value, int turn) {
  for (int distance = warp_threads / 2; distance > 0; distance /= 2) {
    value.x += __shfl_xor_sync(0xffffffffU, value.x, distance);
    value.y += __shfl_xor_sync(0xffffffffU, value.y, distance);
  }
  if (blockDim.x == warp_threads) return value;
  __shared__ float2 of_warp[2][norm_threads / warp_threads];
  const int warps = blockDim.x / warp_threads, first = threadIdx.y * warps;
  float2* const sums = of_warp[turn % 2];
  if (threadIdx.x % warp_threads == 0) sums[first + threadIdx.x / warp_threads] = value;
  __syncthreads();
  value = sums[first];
  for (int w = 1; w < warps; ++w) {
    value.x += sums[first + w].x;
    value.y += sums[first + w].y;
  }
  return value;
}

/// dx, and partial[block][k][c] = column sums over the rows of a block, in one pass. A thread keeps
/// to its columns, Packs packs of them, and has the next row on its way while it works on one.
template <int W, int Packs, bool Centred, storage T>
MEGA_KERNEL void __launch_bounds__(norm_threads)
    norm_backward_columns(NormBackward<T> op, float* partial) {
  constexpr int sums = norm_sums<Centred>;
  extern __shared__ float norm_tile[];
  using Raw = RawPack<T, W>;
  const Index cols = op.cols;
  const auto count = static_cast<float>(cols);
  const Index step = static_cast<Index>(gridDim.x) * blockDim.y;
  struct Row {
    Raw x[Packs], dout[Packs], dy[Packs];
    float mean, rstd;
  };
  // Beyond the last row and column everything is zero and adds nothing.
  const auto load = [&](Index r) {
    Row row{};
    if (r < op.rows) {
      each_pack<W, Packs>(cols, [&](int k, Index c) {
        row.x[k] = load_raw<W>(op.x + r * cols + c);
        row.dout[k] = load_raw<W>(op.dout + r * cols + c);
        if (op.dy != nullptr) row.dy[k] = load_raw<W>(op.dy + r * cols + c);
      });
      row.mean = Centred ? op.mean[r] : 0.0F;
      row.rstd = op.rstd[r];
    }
    return row;
  };

  float sum[sums][Packs][W] = {}, weight[Packs][W] = {};
  each_pack<W, Packs>(cols, [&](int k, Index c) { load_constant(weight[k], op.weight + c); });
  Index r = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  Row next = load(r);
  // All threads of the block take the same number of turns, since they meet at a barrier.
  int turn = 0;
  for (Index first = r - threadIdx.y; first < op.rows; first += step, r += step, ++turn) {
    const Row row = next;
    next = load(r + step);
    const float m = row.mean, s = row.rstd;
    float unit[Packs][W], slopes[Packs][W];
    float2 total = {0.0F, 0.0F};
#pragma unroll
    for (int k = 0; k < Packs; ++k) {
      unpack(unit[k], row.x[k]);
      unpack(slopes[k], row.dout[k]);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        unit[k][w] = (unit[k][w] - m) * s;
        sum[0][k][w] += slopes[k][w] * unit[k][w];
        if constexpr (Centred) sum[1][k][w] += slopes[k][w];
        slopes[k][w] *= weight[k][w];
        total.x += slopes[k][w];
        total.y += slopes[k][w] * unit[k][w];
      }
    }
    total = row_reduce(total, turn);
    const float average = Centred ? total.x / count : 0.0F, slope = total.y / count;
    float dx[Packs][W];
#pragma unroll
    for (int k = 0; k < Packs; ++k) {
      unpack(dx[k], row.dy[k]);
#pragma unroll
      for (int w = 0; w < W; ++w) dx[k][w] += s * (slopes[k][w] - average - unit[k][w] * slope);
      round_pack<T>(dx[k]);
#pragma unroll
      for (int w = 0; w < W; ++w) sum[sums - 1][k][w] += dx[k][w];
    }
    if (r < op.rows)
      each_pack<W, Packs>(cols, [&](int k, Index c) { store_pack(op.dx + r * cols + c, dx[k]); });
  }

  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int own = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll
  for (int q = 0; q < sums; ++q) {
    if (blockDim.y > 1) {
#pragma unroll
      for (int k = 0; k < Packs; ++k)
#pragma unroll
        for (int w = 0; w < W; ++w) norm_tile[(k * W + w) * threads + own] = sum[q][k][w];
      __syncthreads();
      for (int y = 1; threadIdx.y == 0 && y < blockDim.y; ++y) {
#pragma unroll
        for (int k = 0; k < Packs; ++k)
#pragma unroll
          for (int w = 0; w < W; ++w)
            sum[q][k][w] += norm_tile[(k * W + w) * threads + y * blockDim.x + own];
      }
      __syncthreads();
    }
    if (threadIdx.y == 0) {
      float* const to = partial + (static_cast<Index>(blockIdx.x) * sums + q) * cols;
      each_pack<W, Packs>(cols, [&](int k, Index c) { store_pack(to + c, sum[q][k]); });
    }
  }
}

}  // namespace mega::inline v0::cuda::detail
