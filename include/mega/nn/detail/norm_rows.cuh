/// @file  The arithmetic of a row's normalisation on a GPU, centred (layer norm) or not (root mean
/// square): forward with or without a branch to add, and backward.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/row_groups.cuh>
#include <mega/nn/elementwise.cuh>

#include <algorithm>
#include <cstddef>
#include <string_view>

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

/// Blocks of a multiprocessor: with a branch a thread has twice as much in registers.
template <bool Branch>
inline constexpr int norm_forward_blocks = Branch ? 4 : 8;

/// Rows of packs, one ahead. With a branch the bits are those of the norm of y computed again,
/// since they are those of the rounded sum's.
template <class Shape, bool Centred, bool Branch, storage T>
MEGA_KERNEL void __launch_bounds__(Shape::threads, norm_forward_blocks<Branch>)
    norm_forward_ahead(NormForward<T> op) {
  constexpr int W = pack_size<T>, packs = Shape::packs;
  const Index cols = op.cols;
  const auto count = static_cast<float>(cols);
  const auto column = [](int k) { return Shape::template column<W>(k); };
  auto source = [&] {
    if constexpr (Branch) {
      return RowsInRegisters<Shape, 2, T>({op.x, op.branch}, op.rows, cols);
    } else {
      return RowsInRegisters<Shape, 1, T>({op.x}, op.rows, cols);
    }
  }();
  int turn = 0;
  for (Index r = Shape::first_row(); r < op.rows; r += Shape::row_step(), ++turn) {
    source.begin(r);
    float x[packs][W], m[1] = {}, square[1] = {};
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      unpack(x[k], source.pack(0, k));
      if constexpr (Branch) {
        float branch[W];
        unpack(branch, source.pack(1, k));
        if (column(k) < cols) {
          add_branch_pack(x[k], branch,
                          op.branch_bias == nullptr ? nullptr : op.branch_bias + column(k));
          store_pack(op.y + r * cols + column(k), x[k]);
        }
      }
      if constexpr (Centred)
#pragma unroll
        for (int w = 0; w < W; ++w) m[0] += x[k][w];
    }
    if constexpr (Centred) {
      group_reduce<Shape>(m, 0);
      m[0] /= count;
    }
#pragma unroll
    for (int k = 0; k < packs; ++k)
      if (column(k) < cols)
#pragma unroll
        for (int w = 0; w < W; ++w) square[0] += (x[k][w] - m[0]) * (x[k][w] - m[0]);
    group_reduce<Shape>(square, Centred ? 1 : turn);
    const float s = 1.0F / sqrtf(square[0] / count + op.epsilon);
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      if (column(k) >= cols) continue;
      float weight[W], bias[W] = {};
      load_constant(weight, op.weight + column(k));
      if constexpr (Centred) load_constant(bias, op.bias + column(k));
#pragma unroll
      for (int w = 0; w < W; ++w) {
        x[k][w] = (x[k][w] - m[0]) * s * weight[w];
        if constexpr (Centred) x[k][w] += bias[w];
      }
      store_pack(op.out + r * cols + column(k), x[k]);
    }
    if (threadIdx.x == 0) {
      if constexpr (Centred) op.mean[r] = m[0];
      op.rstd[r] = s;
    }
  }
}

/// Any rows. One kernel for both, so that a norm of y computed again has the bits of the one that
/// was fused with the sum.
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

/// Column sums of backward: of the terms of weight, of bias where centred, and of dx as stored
/// where the branch's bias wants them.
template <bool Centred, bool Branch>
inline constexpr int norm_sums = (Centred ? 2 : 1) + (Branch ? 1 : 0);

/// Groups of norm_backward_ring(): Depth rows of each on their way where shared memory has room,
/// and Blocks of them a multiprocessor.
template <int Warps, int Packs, int Groups, int Depth, int Blocks>
struct NormGroups : RowGroups<Warps, Packs, Groups> {
  static constexpr int depth = Depth, blocks = Blocks;
};
template <class Shape, storage T>
using NormRing = RowRing<Shape, Shape::depth, 3, T>;

/// dx, and partial[block][q][c] = column sums over the rows of a block, in one pass over rows of
/// packs that a ring brings. A thread keeps to its columns.
///
/// Free of races: in the ring a thread reads only what it copied itself. In group_reduce() a group
/// has memory of its own, two halves of it in turn, and the barrier of the turn between stands
/// before a half is written again. So until its last row a group shares nothing with another and
/// keeps no step with it. The groups' sums go where the ring was behind a barrier of the block,
/// which each thread passes when it has read its last row and its last copy is complete. Each group
/// passes as many barriers as any other, also one without a row in the block's last turn, so that
/// who counts barriers, as compute-sanitizer's racecheck does, finds the groups in step at the end.
template <class Shape, bool Centred, bool Branch, storage T>
MEGA_KERNEL void __launch_bounds__(Shape::threads, Shape::blocks)
    norm_backward_ring(NormBackward<T> op, float* partial, int depth) {
  constexpr int W = pack_size<T>, packs = Shape::packs, sums = norm_sums<Centred, Branch>;
  using Ring = NormRing<Shape, T>;
  extern __shared__ __align__(128) unsigned char norm_ring[];
  let_next_kernel_begin();
  const Index cols = op.cols;
  const float inverse = 1.0F / static_cast<float>(cols);
  const auto column = [](int k) { return Shape::template column<W>(k); };

  Ring ring(norm_ring, depth, {op.x, op.dout, op.dy}, op.rows, cols);
  float sum[sums][packs][W] = {};
  RawPack<T, W> weight[packs] = {};
#pragma unroll
  for (int k = 0; k < packs; ++k)
    if (column(k) < cols) weight[k] = load_raw<W>(op.weight + column(k));
  float next_m = 0.0F, next_s = 0.0F;
  const auto load_statistics = [&](Index r) {
    if (r >= op.rows) return;
    if constexpr (Centred) next_m = load_early(op.mean + r);
    next_s = load_early(op.rstd + r);
  };
  load_statistics(Shape::first_row());
  Index r = Shape::first_row();
  for (int turn = 0; r < op.rows; r += Shape::row_step(), ++turn) {
    const float m = next_m, s = next_s;
    load_statistics(r + Shape::row_step());
    ring.begin();
    // The normalised row, and the gradient of it.
    float unit[W], slope[W], factor[W];
    const auto load = [&](int k) {
      unpack(unit, ring.pack(0, k));
      unpack(slope, ring.pack(1, k));
      unpack(factor, weight[k]);
#pragma unroll
      for (int w = 0; w < W; ++w) unit[w] = (unit[w] - m) * s;
    };
    float average = 0.0F, along = 0.0F;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      load(k);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        // Beyond the last column dout is zero, whatever the unit is.
        sum[0][k][w] += slope[w] * unit[w];
        if constexpr (Centred) sum[1][k][w] += slope[w];
        slope[w] *= factor[w];
        if constexpr (Centred) average += slope[w];
        along += slope[w] * unit[w];
      }
    }
    if constexpr (Centred) {
      float both[2] = {average, along};
      group_reduce<Shape>(both, turn);
      average = both[0] * inverse;
      along = both[1] * inverse;
    } else {
      float one[1] = {along};
      group_reduce<Shape>(one, turn);
      along = one[0] * inverse;
    }
    // Loaded and unpacked again: registers are scarcer than instructions.
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      float dx[W];
      load(k);
      unpack(dx, ring.pack(2, k));
#pragma unroll
      for (int w = 0; w < W; ++w) dx[w] += s * (slope[w] * factor[w] - average - unit[w] * along);
      if (column(k) >= cols) continue;
      if constexpr (Branch) {
        round_pack<T>(dx);
#pragma unroll
        for (int w = 0; w < W; ++w) sum[sums - 1][k][w] += dx[w];
      }
      store_pack(op.dx + r * cols + column(k), dx);
    }
    ring.end(r);
  }

  float* const to = partial + static_cast<Index>(blockIdx.x) * sums * cols;
  if constexpr (Shape::groups == 1) {
#pragma unroll
    for (int q = 0; q < sums; ++q)
#pragma unroll
      for (int k = 0; k < packs; ++k)
        if (column(k) < cols) store_pack(to + q * cols + column(k), sum[q][k]);
  } else {
    // The groups' sums meet where the ring was.
    constexpr int width = packs * Shape::row_threads * W;
    static_assert(sizeof(float) * Shape::groups * width <= 2 * Ring::stage_bytes);
    if constexpr (Shape::warps > 1)
      if (Shape::block_row(r) < op.rows) group_barrier<Shape>();  // in place of group_reduce()'s
    wait_async_copies();
    auto* const tile = reinterpret_cast<float*>(norm_ring);
    const Index own = static_cast<Index>(threadIdx.y) * Shape::row_threads + threadIdx.x;
#pragma unroll
    for (int q = 0; q < sums; ++q) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < packs; ++k)
#pragma unroll
        for (int w = 0; w < W; w += 4)
          *reinterpret_cast<float4*>(tile + threadIdx.y * width + column(k) + w) = {
              sum[q][k][w], sum[q][k][w + 1], sum[q][k][w + 2], sum[q][k][w + 3]};
      __syncthreads();
      for (Index c = own * 4; c < cols; c += 4 * Shape::threads) {
        float4 total = *reinterpret_cast<const float4*>(tile + c);
#pragma unroll
        for (int g = 1; g < Shape::groups; ++g) {
          const float4 more = *reinterpret_cast<const float4*>(tile + g * width + c);
          total.x += more.x;
          total.y += more.y;
          total.z += more.z;
          total.w += more.w;
        }
        *reinterpret_cast<float4*>(to + q * cols + c) = total;
      }
    }
  }
}

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

/// Elements of a row that a thread holds where packs do not fit.
inline constexpr int norm_elements = 8;

/// As norm_backward_ring() where packs do not fit, for any sums: rows in elements, norm_elements of
/// them a thread, the next row in registers.
template <bool Centred, storage T>
MEGA_KERNEL void __launch_bounds__(norm_threads)
    norm_backward_elements(NormBackward<T> op, float* partial) {
  constexpr int sums = norm_sums<Centred, true>, held = norm_elements;
  extern __shared__ float norm_tile[];
  let_next_kernel_begin();
  const Index cols = op.cols;
  const auto count = static_cast<float>(cols);
  const Index step = static_cast<Index>(gridDim.x) * blockDim.y;
  struct Row {
    T x[held], dout[held], dy[held];
    float mean, rstd;
  };
  // Beyond the last row and column everything is zero and adds nothing.
  const auto load = [&](Index r) {
    Row row{};
    if (r < op.rows) {
      each_pack<1, held>(cols, [&](int k, Index c) {
        row.x[k] = op.x[r * cols + c];
        row.dout[k] = op.dout[r * cols + c];
        if (op.dy != nullptr) row.dy[k] = op.dy[r * cols + c];
      });
      row.mean = Centred ? op.mean[r] : 0.0F;
      row.rstd = op.rstd[r];
    }
    return row;
  };

  float sum[sums][held] = {}, weight[held] = {};
  each_pack<1, held>(cols, [&](int k, Index c) { weight[k] = op.weight[c]; });
  Index r = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  Row next = load(r);
  // All threads of the block take the same number of turns, since they meet at a barrier.
  int turn = 0;
  for (Index first = r - threadIdx.y; first < op.rows; first += step, r += step, ++turn) {
    const Row row = next;
    next = load(r + step);
    const float m = row.mean, s = row.rstd;
    float unit[held], slopes[held];
    float2 total = {0.0F, 0.0F};
#pragma unroll
    for (int k = 0; k < held; ++k) {
      const float slope = row.dout[k];
      unit[k] = (row.x[k] - m) * s;
      sum[0][k] += slope * unit[k];
      if constexpr (Centred) sum[1][k] += slope;
      slopes[k] = slope * weight[k];
      total.x += slopes[k];
      total.y += slopes[k] * unit[k];
    }
    total = row_reduce(total, turn);
    const float average = Centred ? total.x / count : 0.0F, along = total.y / count;
    T dx[held];
#pragma unroll
    for (int k = 0; k < held; ++k) {
      dx[k] = T(row.dy[k] + s * (slopes[k] - average - unit[k] * along));
      sum[sums - 1][k] += dx[k];
    }
    if (r < op.rows) each_pack<1, held>(cols, [&](int k, Index c) { op.dx[r * cols + c] = dx[k]; });
  }

  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int own = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll
  for (int q = 0; q < sums; ++q) {
    if (blockDim.y > 1) {
#pragma unroll
      for (int k = 0; k < held; ++k) norm_tile[k * threads + own] = sum[q][k];
      __syncthreads();
      for (int y = 1; threadIdx.y == 0 && y < blockDim.y; ++y) {
#pragma unroll
        for (int k = 0; k < held; ++k) sum[q][k] += norm_tile[k * threads + y * blockDim.x + own];
      }
      __syncthreads();
    }
    if (threadIdx.y == 0) {
      float* const to = partial + (static_cast<Index>(blockIdx.x) * sums + q) * cols;
      each_pack<1, held>(cols, [&](int k, Index c) { to[c] = sum[q][k]; });
    }
  }
}

}  // namespace mega::inline v0::cuda::detail
