/// @file  Soft-max cross-entropy over a vocabulary that may be split between ranks, on the host.
/// The caller reduces between the steps: row_max by maximum, sum_exp and target_logit by sum.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/detail/exponential.hpp>
#include <mega/nn/detail/lanes.hpp>
#include <mega/nn/detail/shape.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

// Every operation: logits are [rows, columns] fp32, one row a token, targets are token ids of the
// whole vocabulary, -1 (any negative id) leaves the token out; work is ordered on `stream`; a wrong
// shape throws Error(logic) in the caller. Rows are independent.
namespace mega::inline v0::nn {

/// Which token ids a rank's logit columns are: columns [0, valid) are ids [first, first + valid);
/// the columns from `valid` on are padding, outside of the soft-max, with gradient zero.
struct VocabShard {
  Index first = 0;
  Index valid = 0;
};

namespace detail {
inline void expects_shard(std::string_view op, VocabShard shard, Index cols) {
  expects(shard.valid >= 0 && shard.valid <= cols, ErrorCode::logic, [&] {
    return sentence(op, ": the shard has ", shard.valid, " valid columns, the logits have ", cols);
  });
}
}  // namespace detail

/// row_max(r) = largest valid logit of the row; minus infinity for a shard of padding only.
template <host::host_stream S>
void cross_entropy_row_max(S& stream, Vector<float> row_max, Matrix<const float> logits,
                           VocabShard shard) {
  detail::expects_size("cross_entropy_row_max", "row_max", row_max, logits.rows());
  detail::expects_shard("cross_entropy_row_max", shard, logits.cols());
  stream.run([=] {
    for (Index r = 0; r < logits.rows(); ++r)
      row_max(r) = detail::lane_max(shard.valid, logits.row(r));
  });
}

/// sum_exp(r) = sum of exp(logit - row_max(r)) over the shard's valid columns, with the maximum
/// over all shards; target_logit(r) = the target's logit if the shard owns it, else 0.
template <host::host_stream S>
void cross_entropy_sum_exp(S& stream, Vector<float> sum_exp, Vector<float> target_logit,
                           Matrix<const float> logits, Vector<const std::int32_t> targets,
                           Vector<const float> row_max, VocabShard shard) {
  const Index rows = logits.rows();
  detail::expects_size("cross_entropy_sum_exp", "sum_exp", sum_exp, rows);
  detail::expects_size("cross_entropy_sum_exp", "target_logit", target_logit, rows);
  detail::expects_size("cross_entropy_sum_exp", "targets", targets, rows);
  detail::expects_size("cross_entropy_sum_exp", "row_max", row_max, rows);
  detail::expects_shard("cross_entropy_sum_exp", shard, logits.cols());
  stream.run([=] {
    for (Index r = 0; r < rows; ++r) {
      const float* const x = logits.row(r);
      const float largest = row_max(r);
      const Index target = targets(r) - shard.first;
      sum_exp(r) = detail::lane_sum(shard.valid,
                                    [=](Index c) { return detail::exponential(x[c] - largest); });
      target_logit(r) = target >= 0 && target < shard.valid ? x[target] : 0.0f;
    }
  });
}

/// row_loss(r) = -log of the target's probability, 0 for a token left out; loss(0) = their sum, not
/// divided, added in fp64 in row order. The inputs are reduced over all shards.
template <host::host_stream S>
void cross_entropy_loss(S& stream, Vector<double> loss, Vector<float> row_loss,
                        Vector<const std::int32_t> targets, Vector<const float> row_max,
                        Vector<const float> sum_exp, Vector<const float> target_logit) {
  const Index rows = targets.size();
  detail::expects_size("cross_entropy_loss", "loss", loss, 1);
  detail::expects_size("cross_entropy_loss", "row_loss", row_loss, rows);
  detail::expects_size("cross_entropy_loss", "row_max", row_max, rows);
  detail::expects_size("cross_entropy_loss", "sum_exp", sum_exp, rows);
  detail::expects_size("cross_entropy_loss", "target_logit", target_logit, rows);
  stream.run([=] {
    double sum = 0.0;
    for (Index r = 0; r < rows; ++r) {
      double value = 0.0;
      if (targets(r) >= 0)
        value = std::log(static_cast<double>(sum_exp(r))) +
                (static_cast<double>(row_max(r)) - static_cast<double>(target_logit(r)));
      row_loss(r) = static_cast<float>(value);
      sum += value;
    }
    loss(0) = sum;
  });
}

namespace detail {
template <host::host_stream S, class Scale>
void cross_entropy_backward(S& stream, Matrix<float> dlogits, Matrix<const float> logits,
                            Vector<const std::int32_t> targets, Vector<const float> row_max,
                            Vector<const float> sum_exp, VocabShard shard, Scale scale) {
  const Index rows = logits.rows(), cols = logits.cols();
  expects_shape("cross_entropy_backward", "dlogits", dlogits, rows, cols);
  expects_size("cross_entropy_backward", "targets", targets, rows);
  expects_size("cross_entropy_backward", "row_max", row_max, rows);
  expects_size("cross_entropy_backward", "sum_exp", sum_exp, rows);
  expects_shard("cross_entropy_backward", shard, cols);
  stream.run([=] {
    const float factor = scale();
    for (Index r = 0; r < rows; ++r) {
      const float* const x = logits.row(r);
      float* const dx = dlogits.row(r);
      if (targets(r) < 0) {
        std::fill(dx, dx + cols, 0.0f);
        continue;
      }
      const float largest = row_max(r), inverse = 1.0f / sum_exp(r);
      const Index target = targets(r) - shard.first;
      for (Index c = 0; c < shard.valid; ++c) dx[c] = exponential(x[c] - largest) * inverse;
      if (target >= 0 && target < shard.valid) dx[target] -= 1.0f;
      for (Index c = 0; c < shard.valid; ++c) dx[c] *= factor;
      std::fill(dx + shard.valid, dx + cols, 0.0f);
    }
  });
}
}  // namespace detail

/// dlogits = scale * (probability - [column is the target]); rows left out and padding columns get
/// 0. dlogits may be logits. The divisor, one over the global count of valid tokens, is in `scale`.
template <host::host_stream S>
void cross_entropy_backward(S& stream, Matrix<float> dlogits, Matrix<const float> logits,
                            Vector<const std::int32_t> targets, Vector<const float> row_max,
                            Vector<const float> sum_exp, VocabShard shard, float scale) {
  detail::cross_entropy_backward(stream, dlogits, logits, targets, row_max, sum_exp, shard,
                                 [=] { return scale; });
}

/// The same with a scale of one element that earlier work on the stream writes.
template <host::host_stream S>
void cross_entropy_backward(S& stream, Matrix<float> dlogits, Matrix<const float> logits,
                            Vector<const std::int32_t> targets, Vector<const float> row_max,
                            Vector<const float> sum_exp, VocabShard shard,
                            Vector<const float> scale) {
  detail::expects_size("cross_entropy_backward", "scale", scale, 1);
  detail::cross_entropy_backward(stream, dlogits, logits, targets, row_max, sum_exp, shard,
                                 [=] { return scale(0); });
}

}  // namespace mega::inline v0::nn
