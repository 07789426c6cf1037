/// @file  Soft-max cross-entropy over a vocabulary that may be split between ranks, on a GPU. The
/// host twins in nn/cross_entropy.hpp say what each operation does.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/cross_entropy.hpp>
#include <mega/nn/detail/activations.cuh>
#include <mega/nn/detail/shape.hpp>

#include <cstdint>
#include <type_traits>

namespace mega::inline v0::cuda {

namespace detail {

/// A pack of logits, minus infinity in the columns that are padding.
template <storage T, int W>
__device__ inline void mask_padding(float (&logits)[W], Index c, Index valid) {
  if (c + W <= valid) return;
#pragma unroll
  for (int w = 0; w < W; ++w)
    if (c + w >= valid) logits[w] = -INFINITY;
}

/// visit(c, logits) for the packs of a row with valid columns, by the whole block.
template <int W, storage T, class Visit>
__device__ inline void each_logits(const T* row, Index valid, Visit visit) {
#pragma unroll 4
  for (Index c = static_cast<Index>(threadIdx.x) * W; c < valid;
       c += static_cast<Index>(blockDim.x) * W) {
    float logits[W];
    load_constant(logits, row + c);
    mask_padding<T>(logits, c, valid);
    visit(c, logits);
  }
}

template <int W, storage T>
struct RowMax {
  float* row_max;
  const T* logits;
  Index cols, valid;
  __device__ void operator()(Index r) const {
    float largest = Max::identity<float>();
    each_logits<W>(logits + r * cols, valid, [&](Index, const float(&x)[W]) {
      for (int w = 0; w < W; ++w) largest = fmaxf(largest, x[w]);
    });
    largest = block_reduce<Max>(largest);
    if (threadIdx.x == 0) row_max[r] = largest;
  }
};

template <int W, storage T>
struct SumExp {
  float* sum_exp;
  float* target_logit;
  const T* logits;
  const std::int32_t* targets;
  const float* row_max;
  Index cols;
  nn::VocabShard shard;
  __device__ void operator()(Index r) const {
    const T* const row = logits + r * cols;
    const float largest = row_max[r];
    float sum = 0.0F;
    each_logits<W>(row, shard.valid, [&](Index, const float(&x)[W]) {
      for (int w = 0; w < W; ++w) sum += exponential<T>(x[w] - largest);
    });
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x != 0) return;
    const Index target = targets[r] - shard.first;
    sum_exp[r] = sum;
    target_logit[r] = target >= 0 && target < shard.valid ? static_cast<float>(row[target]) : 0.0F;
  }
};

/// By one block: there are as many rows as logits exist at a time.
struct CrossEntropyLoss {
  double* loss;
  float* row_loss;
  const std::int32_t* targets;
  const float* row_max;
  const float* sum_exp;
  const float* target_logit;
  Index rows;
  __device__ void operator()(Index) const {
    double sum = 0.0;
    for (Index r = threadIdx.x; r < rows; r += blockDim.x) {
      double value = 0.0;
      if (targets[r] >= 0)
        value = log(static_cast<double>(sum_exp[r])) +
                (static_cast<double>(row_max[r]) - static_cast<double>(target_logit[r]));
      row_loss[r] = static_cast<float>(value);
      sum += value;
    }
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) *loss = sum;
  }
};

/// logits become gradients: scale * (probability - [column is the target]), 0 in padding.
template <storage T, int W>
__device__ inline void soft_max_gradient(float (&x)[W], Index c, Index target, Index valid,
                                         float largest, float inverse, float scale) {
#pragma unroll
  for (int w = 0; w < W; ++w) x[w] = exponential<T>(x[w] - largest) * inverse;
  if (target >= c && target < c + W) {
#pragma unroll
    for (int w = 0; w < W; ++w)
      if (c + w == target) x[w] -= 1.0F;
  }
#pragma unroll
  for (int w = 0; w < W; ++w) x[w] *= scale;
  if (c + W <= valid) return;
#pragma unroll
  for (int w = 0; w < W; ++w)
    if (c + w >= valid) x[w] = 0.0F;
}

struct GivenFactor {
  float value;
  __device__ float operator()() const { return value; }
};
struct FactorInMemory {
  const float* value;
  __device__ float operator()() const { return *value; }
};

template <storage T, class Factor>
struct CrossEntropyBackward {
  T* dlogits;
  const T* logits;
  const std::int32_t* targets;
  const float* row_max;
  const float* sum_exp;
  Index cols;
  nn::VocabShard shard;
  Factor factor;
  template <int W>
  __device__ void at(Index r, Index c) const {
    const std::int32_t token = targets[r];
    float x[W] = {};
    if (token >= 0 && c < shard.valid) {
      load_pack(x, logits + r * cols + c);
      const Index target = token - shard.first;
      soft_max_gradient<T>(x, c, target, shard.valid, row_max[r], 1.0F / sum_exp[r], factor());
    }
    store_pack(dlogits + r * cols + c, x);
  }
};

template <storage T, class Factor>
void cross_entropy_backward(Stream& stream, Matrix<T> dlogits, Matrix<const T> logits,
                            Vector<const std::int32_t> targets, Vector<const float> row_max,
                            Vector<const float> sum_exp, nn::VocabShard shard, Factor factor) {
  constexpr auto op = "cross_entropy_backward";
  const Index rows = logits.rows(), cols = logits.cols();
  nn::detail::expects_shape(op, "dlogits", dlogits, rows, cols);
  nn::detail::expects_size(op, "targets", targets, rows);
  nn::detail::expects_size(op, "row_max", row_max, rows);
  nn::detail::expects_size(op, "sum_exp", sum_exp, rows);
  nn::detail::expects_shard(op, shard, cols);
  const CrossEntropyBackward<T, Factor> body{dlogits.data(), logits.data(),  targets.data(),
                                             row_max.data(), sum_exp.data(), cols,
                                             shard,          factor};
  with_width<T>(all_packs_fit(cols, body.dlogits, body.logits),
                [&]<int W>(std::integral_constant<int, W>) {
                  for_each_pack<W>(stream, op, rows, cols, body);
                });
}

}  // namespace detail

/// @tparam E  here and below, element of the logits: a storage, const or not
template <class E>
requires storage<std::remove_const_t<E>>
void cross_entropy_row_max(Stream& stream, Vector<float> row_max, Matrix<E> logits,
                           nn::VocabShard shard) {
  using T = std::remove_const_t<E>;
  constexpr auto op = "cross_entropy_row_max";
  const Index rows = logits.rows(), cols = logits.cols();
  nn::detail::expects_size(op, "row_max", row_max, rows);
  nn::detail::expects_shard(op, shard, cols);
  detail::with_width<T>(
      detail::packs_fit(logits.data(), cols), [&]<int W>(std::integral_constant<int, W>) {
        detail::for_each_row(
            stream, op, rows, cols,
            detail::RowMax<W, T>{row_max.data(), logits.data(), cols, shard.valid});
      });
}

template <class E>
requires storage<std::remove_const_t<E>>
void cross_entropy_sum_exp(Stream& stream, Vector<float> sum_exp, Vector<float> target_logit,
                           Matrix<E> logits, Vector<const std::int32_t> targets,
                           Vector<const float> row_max, nn::VocabShard shard) {
  using T = std::remove_const_t<E>;
  constexpr auto op = "cross_entropy_sum_exp";
  const Index rows = logits.rows(), cols = logits.cols();
  nn::detail::expects_size(op, "sum_exp", sum_exp, rows);
  nn::detail::expects_size(op, "target_logit", target_logit, rows);
  nn::detail::expects_size(op, "targets", targets, rows);
  nn::detail::expects_size(op, "row_max", row_max, rows);
  nn::detail::expects_shard(op, shard, cols);
  detail::with_width<T>(
      detail::packs_fit(logits.data(), cols), [&]<int W>(std::integral_constant<int, W>) {
        detail::for_each_row(
            stream, op, rows, cols,
            detail::SumExp<W, T>{sum_exp.data(), target_logit.data(), logits.data(), targets.data(),
                                 row_max.data(), cols, shard});
      });
}

/// @determinism  run to run; the fp64 sum is a tree over the rows, not the host twin's sequence
MEGA_LAUNCHES void cross_entropy_loss(Stream& stream, Vector<double> loss, Vector<float> row_loss,
                                      Vector<const std::int32_t> targets,
                                      Vector<const float> row_max, Vector<const float> sum_exp,
                                      Vector<const float> target_logit) {
  constexpr auto op = "cross_entropy_loss";
  const Index rows = targets.size();
  nn::detail::expects_size(op, "loss", loss, 1);
  nn::detail::expects_size(op, "row_loss", row_loss, rows);
  nn::detail::expects_size(op, "row_max", row_max, rows);
  nn::detail::expects_size(op, "sum_exp", sum_exp, rows);
  nn::detail::expects_size(op, "target_logit", target_logit, rows);
  detail::for_each_row(
      stream, op, 1, rows,
      detail::CrossEntropyLoss{loss.data(), row_loss.data(), targets.data(), row_max.data(),
                               sum_exp.data(), target_logit.data(), rows});
}

template <storage T>
void cross_entropy_backward(Stream& stream, Matrix<T> dlogits,
                            Matrix<const std::type_identity_t<T>> logits,
                            Vector<const std::int32_t> targets, Vector<const float> row_max,
                            Vector<const float> sum_exp, nn::VocabShard shard, float scale) {
  detail::cross_entropy_backward<T>(stream, dlogits, logits, targets, row_max, sum_exp, shard,
                                    detail::GivenFactor{scale});
}

template <storage T>
void cross_entropy_backward(Stream& stream, Matrix<T> dlogits,
                            Matrix<const std::type_identity_t<T>> logits,
                            Vector<const std::int32_t> targets, Vector<const float> row_max,
                            Vector<const float> sum_exp, nn::VocabShard shard,
                            Vector<const float> scale) {
  nn::detail::expects_size("cross_entropy_backward", "scale", scale, 1);
  detail::cross_entropy_backward<T>(stream, dlogits, logits, targets, row_max, sum_exp, shard,
                                    detail::FactorInMemory{scale.data()});
}

}  // namespace mega::inline v0::cuda
