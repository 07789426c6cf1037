/// @file  Soft-max cross-entropy of a vocabulary that one rank holds whole, on the host: loss and
/// gradient by one operation, which a GPU does in one pass over memory.
#pragma once
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/cross_entropy.hpp>
#include <mega/nn/detail/scratch.hpp>
#include <mega/nn/detail/shape.hpp>

#include <cstdint>

namespace mega::inline v0::nn {

/// logits [rows, columns] become scale(0) * (probability - [column is the target]); row_loss(r) is
/// the loss of a row and loss(0) their sum in fp64, not divided. Rows with a negative target are
/// left out: loss and gradient zero. Columns from valid_columns on are padding: outside of the
/// soft-max, gradient zero.
/// The bits are those of cross_entropy_row_max(), cross_entropy_sum_exp(), cross_entropy_loss() and
/// cross_entropy_backward().
/// @sync  ordered on stream
template <host::host_stream S>
void fused_cross_entropy(S& stream, Matrix<float> logits, Vector<double> loss,
                         Vector<float> row_loss, Vector<const std::int32_t> targets,
                         Index valid_columns, Vector<const float> scale) {
  constexpr auto op = "fused_cross_entropy";
  const Index rows = logits.rows();
  detail::expects_size(op, "loss", loss, 1);
  detail::expects_size(op, "row_loss", row_loss, rows);
  detail::expects_size(op, "targets", targets, rows);
  detail::expects_size(op, "scale", scale, 1);
  const VocabShard shard{0, valid_columns};
  detail::expects_shard(op, shard, logits.cols());
  stream.run([=] {
    struct Statistics {};
    host::Stream now;
    float* const numbers = detail::scratch<Statistics>(3 * rows);
    const Vector<float> row_max(numbers, rows), sum_exp(numbers + rows, rows);
    const Vector<float> target_logit(numbers + 2 * rows, rows);
    cross_entropy_row_max(now, row_max, logits, shard);
    cross_entropy_sum_exp(now, sum_exp, target_logit, logits, targets, row_max, shard);
    cross_entropy_loss(now, loss, row_loss, targets, row_max, sum_exp, target_logit);
    cross_entropy_backward(now, logits, logits, targets, row_max, sum_exp, shard, scale);
  });
}

}  // namespace mega::inline v0::nn
