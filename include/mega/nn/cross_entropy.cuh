/// @file  Soft-max cross-entropy over a vocabulary that may be split between ranks, on a GPU. The
/// host twins in nn/cross_entropy.hpp say what each operation does.
#pragma once
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/cross_entropy.hpp>
#include <mega/nn/detail/shape.hpp>

#include <cstdint>

namespace mega::inline v0::cuda {

namespace detail {

struct RowMax {
  float* row_max;
  const float* logits;
  Index cols, valid;
  __device__ void operator()(Index r) const {
    const float* const x = logits + r * cols;
    float largest = Max::identity<float>();
    for (Index c = threadIdx.x; c < valid; c += blockDim.x) largest = fmaxf(largest, x[c]);
    largest = block_reduce<Max>(largest);
    if (threadIdx.x == 0) row_max[r] = largest;
  }
};

struct SumExp {
  float* sum_exp;
  float* target_logit;
  const float* logits;
  const std::int32_t* targets;
  const float* row_max;
  Index cols;
  nn::VocabShard shard;
  __device__ void operator()(Index r) const {
    const float* const x = logits + r * cols;
    const float largest = row_max[r];
    const float sum = block_sum<float>(shard.valid, [=](Index c) { return expf(x[c] - largest); });
    if (threadIdx.x != 0) return;
    const Index target = targets[r] - shard.first;
    sum_exp[r] = sum;
    target_logit[r] = target >= 0 && target < shard.valid ? x[target] : 0.0F;
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

struct GivenFactor {
  float value;
  __device__ float operator()() const { return value; }
};
struct FactorInMemory {
  const float* value;
  __device__ float operator()() const { return *value; }
};

template <class Factor>
struct CrossEntropyBackward {
  float* dlogits;
  const float* logits;
  const std::int32_t* targets;
  const float* row_max;
  const float* sum_exp;
  Index cols;
  nn::VocabShard shard;
  Factor factor;
  __device__ void operator()(Index r, Index c) const {
    const std::int32_t token = targets[r];
    float gradient = 0.0F;
    if (token >= 0 && c < shard.valid) {
      gradient = expf(logits[r * cols + c] - row_max[r]) * (1.0F / sum_exp[r]);
      if (c == token - shard.first) gradient -= 1.0F;
      gradient *= factor();
    }
    dlogits[r * cols + c] = gradient;
  }
};

template <class Factor>
void cross_entropy_backward(Stream& stream, Matrix<float> dlogits, Matrix<const float> logits,
                            Vector<const std::int32_t> targets, Vector<const float> row_max,
                            Vector<const float> sum_exp, nn::VocabShard shard, Factor factor) {
  constexpr auto op = "cross_entropy_backward";
  const Index rows = logits.rows(), cols = logits.cols();
  nn::detail::expects_shape(op, "dlogits", dlogits, rows, cols);
  nn::detail::expects_size(op, "targets", targets, rows);
  nn::detail::expects_size(op, "row_max", row_max, rows);
  nn::detail::expects_size(op, "sum_exp", sum_exp, rows);
  nn::detail::expects_shard(op, shard, cols);
  for_each_element(
      stream, op, rows, cols,
      CrossEntropyBackward<Factor>{dlogits.data(), logits.data(), targets.data(), row_max.data(),
                                   sum_exp.data(), cols, shard, factor});
}

}  // namespace detail

MEGA_LAUNCHES void cross_entropy_row_max(Stream& stream, Vector<float> row_max,
                                         Matrix<const float> logits, nn::VocabShard shard) {
  constexpr auto op = "cross_entropy_row_max";
  nn::detail::expects_size(op, "row_max", row_max, logits.rows());
  nn::detail::expects_shard(op, shard, logits.cols());
  detail::for_each_row(stream, op, logits.rows(), logits.cols(),
                       detail::RowMax{row_max.data(), logits.data(), logits.cols(), shard.valid});
}

MEGA_LAUNCHES void cross_entropy_sum_exp(Stream& stream, Vector<float> sum_exp,
                                         Vector<float> target_logit, Matrix<const float> logits,
                                         Vector<const std::int32_t> targets,
                                         Vector<const float> row_max, nn::VocabShard shard) {
  constexpr auto op = "cross_entropy_sum_exp";
  const Index rows = logits.rows();
  nn::detail::expects_size(op, "sum_exp", sum_exp, rows);
  nn::detail::expects_size(op, "target_logit", target_logit, rows);
  nn::detail::expects_size(op, "targets", targets, rows);
  nn::detail::expects_size(op, "row_max", row_max, rows);
  nn::detail::expects_shard(op, shard, logits.cols());
  detail::for_each_row(stream, op, rows, logits.cols(),
                       detail::SumExp{sum_exp.data(), target_logit.data(), logits.data(),
                                      targets.data(), row_max.data(), logits.cols(), shard});
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

MEGA_LAUNCHES void cross_entropy_backward(Stream& stream, Matrix<float> dlogits,
                                          Matrix<const float> logits,
                                          Vector<const std::int32_t> targets,
                                          Vector<const float> row_max, Vector<const float> sum_exp,
                                          nn::VocabShard shard, float scale) {
  detail::cross_entropy_backward(stream, dlogits, logits, targets, row_max, sum_exp, shard,
                                 detail::GivenFactor{scale});
}

MEGA_LAUNCHES void cross_entropy_backward(Stream& stream, Matrix<float> dlogits,
                                          Matrix<const float> logits,
                                          Vector<const std::int32_t> targets,
                                          Vector<const float> row_max, Vector<const float> sum_exp,
                                          nn::VocabShard shard, Vector<const float> scale) {
  nn::detail::expects_size("cross_entropy_backward", "scale", scale, 1);
  detail::cross_entropy_backward(stream, dlogits, logits, targets, row_max, sum_exp, shard,
                                 detail::FactorInMemory{scale.data()});
}

}  // namespace mega::inline v0::cuda
