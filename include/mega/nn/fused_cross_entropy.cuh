/// @file  Soft-max cross-entropy of a vocabulary that one rank holds whole, on a GPU. The host twin
/// in nn/fused_cross_entropy.hpp says what the operation does.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/cross_entropy.cuh>
#include <mega/nn/cross_entropy.hpp>
#include <mega/nn/detail/shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mega::inline v0::cuda {

namespace detail {

inline constexpr int fused_threads = 512;
/// Of a row of logits, kept on the multiprocessor between the two looks at it; what is longer comes
/// from the cache again. So that two blocks share a multiprocessor of an H200.
inline constexpr Index fused_kept_bytes = Index{110} << 10;

template <storage T>
struct FusedCrossEntropy {
  T* logits;
  double* row_value;  ///< the loss of a row before it is rounded
  float* row_loss;
  const std::int32_t* targets;
  const float* scale;
  Index rows, cols, valid;
  Index kept;  ///< packs of a row that stay in shared memory
};

/// One block a row: the maximum and the sum of exponentials in one pass, the gradient in another.
template <int W, storage T>
MEGA_KERNEL void __launch_bounds__(fused_threads, 2) fused_rows(FusedCrossEntropy<T> op) {
  using Raw = RawPack<T, W>;
  constexpr int batch = 4;
  extern __shared__ __align__(16) unsigned char kept_logits[];
  Raw* const kept = reinterpret_cast<Raw*>(kept_logits);
  const Index packs = op.cols / W, valid_packs = ceil_div(op.valid, W);
  for (Index r = blockIdx.x; r < op.rows; r += gridDim.x) {
    T* const row = op.logits + r * op.cols;
    const Index target = op.targets[r];
    if (target < 0) {
      const float zero[W] = {};
      for (Index i = threadIdx.x; i < packs; i += fused_threads) store_pack(row + i * W, zero);
      if (threadIdx.x == 0) {
        op.row_loss[r] = 0.0F;
        op.row_value[r] = 0.0;
      }
      continue;
    }
    // Read now: the gradient comes to its place.
    const float target_logit =
        threadIdx.x == 0 && target < op.valid ? static_cast<float>(row[target]) : 0.0F;

    // The lowest finite number, so that a difference of two maxima is never one of infinities.
    float largest = -3.402823466e+38F, sum = 0.0F;
    for (Index begin = threadIdx.x; begin < valid_packs; begin += batch * fused_threads) {
      Raw raw[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b)
        if (begin + b * fused_threads < valid_packs)
          raw[b] = load_raw<W>(row + (begin + b * fused_threads) * W);
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const Index i = begin + b * fused_threads;
        if (i >= valid_packs) continue;
        if (i < op.kept) kept[i] = raw[b];
        float x[W];
        unpack(x, raw[b]);
        mask_padding<T>(x, i * W, op.valid);
        float highest = x[0];
#pragma unroll
        for (int w = 1; w < W; ++w) highest = fmaxf(highest, x[w]);
        if (highest > largest) {
          sum *= exponential<T>(largest - highest);
          largest = highest;
        }
#pragma unroll
        for (int w = 0; w < W; ++w) sum += exponential<T>(x[w] - largest);
      }
    }
    const float row_max = block_reduce<Max>(largest);
    sum = block_reduce<Sum>(sum * exponential<T>(largest - row_max));

    const float inverse = 1.0F / sum, scale = *op.scale;
    for (Index begin = threadIdx.x; begin < packs; begin += batch * fused_threads) {
      Raw raw[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const Index i = begin + b * fused_threads;
        if (i < op.kept) {
          raw[b] = kept[i];
        } else if (i < valid_packs) {
          raw[b] = load_raw<W>(row + i * W);
        }
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const Index i = begin + b * fused_threads;
        if (i >= packs) continue;
        float x[W] = {};
        if (i < valid_packs) {
          unpack(x, raw[b]);
          soft_max_gradient<T>(x, i * W, target, op.valid, row_max, inverse, scale);
        }
        store_pack(row + i * W, x);
      }
    }
    if (threadIdx.x == 0) {
      const double value = log(static_cast<double>(sum)) +
                           (static_cast<double>(row_max) - static_cast<double>(target_logit));
      op.row_loss[r] = static_cast<float>(value);
      op.row_value[r] = value;
    }
  }
}

struct AddRowValues {
  double* loss;
  const double* row_value;
  Index rows;
  __device__ void operator()(Index) const {
    const double* const from = row_value;
    const double sum = block_sum<double>(rows, [=](Index r) { return from[r]; });
    if (threadIdx.x == 0) *loss = sum;
  }
};

}  // namespace detail

/// @cost  2 launches; reads the logits once, and again from the cache what of a row is beyond
///        110 KiB, and writes them; scratch of 8 bytes a row
/// @determinism  run to run
template <storage T>
void fused_cross_entropy(Stream& stream, Matrix<T> logits, Vector<double> loss,
                         Vector<float> row_loss, Vector<const std::int32_t> targets,
                         Index valid_columns, Vector<const float> scale) {
  constexpr auto op = "fused_cross_entropy";
  const Index rows = logits.rows(), cols = logits.cols();
  nn::detail::expects_size(op, "loss", loss, 1);
  nn::detail::expects_size(op, "row_loss", row_loss, rows);
  nn::detail::expects_size(op, "targets", targets, rows);
  nn::detail::expects_size(op, "scale", scale, 1);
  nn::detail::expects_shard(op, {0, valid_columns}, cols);
  auto* const row_value =
      static_cast<double*>(stream.scratch(sizeof(double) * static_cast<std::size_t>(rows)));
  detail::with_width<T>(
      detail::packs_fit(logits.data(), cols), [&]<int W>(std::integral_constant<int, W>) {
        constexpr Index bytes_of_pack = sizeof(detail::RawPack<T, W>);
        const Index kept =
            std::min(detail::ceil_div(valid_columns, W), detail::fused_kept_bytes / bytes_of_pack);
        detail::launch(
            stream, op, detail::fused_rows<W, T>, detail::grid_x(rows), detail::fused_threads,
            static_cast<std::size_t>(kept * bytes_of_pack),
            detail::FusedCrossEntropy<T>{logits.data(), row_value, row_loss.data(), targets.data(),
                                         scale.data(), rows, cols, valid_columns, kept});
      });
  detail::for_each_row(stream, op, 1, rows, detail::AddRowValues{loss.data(), row_value, rows});
}

}  // namespace mega::inline v0::cuda
