/// @file  Causal attention with grouped-query heads on a GPU in bf16 or fp16, on tensor cores. The
/// host twins in nn/attention.hpp say what the operations do.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_mma_backward.cuh>
#include <mega/nn/attention_mma_forward.cuh>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/attention_task.cuh>
#include <mega/nn/detail/shape.hpp>

#include <cstddef>
#include <type_traits>

namespace mega::inline v0::cuda {

/// Scores, soft-max, sums and lse are fp32; probabilities are rounded to T before they weigh the
/// values.
/// @pre   head_dim is a multiple of 8 up to 128; the matrices are aligned to 16 bytes
/// @cost  2 * batch * query_heads * time^2 * head_dim operations on tensor cores, head_dim
///        rounded up to 32, 64, 96 or 128; no memory beside the operands
/// @determinism  bitwise run to run; a query's result depends on its own and earlier rows of its
///               sample only
template <half_storage T>
void attention_forward(Stream& stream, Matrix<T> out, View<float, 3> lse,
                       Matrix<const std::type_identity_t<T>> qkv, const nn::AttentionShape& shape,
                       const nn::AttentionDropout& dropout = {}) {
  constexpr auto op = "attention_forward";
  nn::detail::expects_valid(op, shape, dropout);
  nn::detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
  nn::detail::expects_shape(op, "out", out, shape.rows(), shape.query_heads * shape.head_dim);
  nn::detail::expects_shape(op, "lse", lse.matrix(), shape.batch * shape.query_heads, shape.time);
  detail::expects_aligned(op, "out", out.data());
  detail::with_tile_dim(
      op, shape.head_dim,
      detail::AttentionMmaForward<T>{stream, out.data(), lse.data(),
                                     detail::attention_task<T>(op, shape, dropout, qkv)});
}

/// Probabilities and scores' gradients are rounded to T before they enter a product.
/// @pre   as attention_forward
/// @cost  7 * batch * query_heads * time^2 * head_dim operations on tensor cores: scores are made
///        twice, so that every sum has one owner and one order; scratch of one float a query and
///        head
/// @determinism  bitwise run to run
template <half_storage T>
void attention_backward(Stream& stream, Matrix<T> dqkv, Matrix<const std::type_identity_t<T>> dout,
                        Matrix<const std::type_identity_t<T>> qkv,
                        Matrix<const std::type_identity_t<T>> out, View<const float, 3> lse,
                        const nn::AttentionShape& shape, const nn::AttentionDropout& dropout = {}) {
  constexpr auto op = "attention_backward";
  const Index out_width = shape.query_heads * shape.head_dim;
  nn::detail::expects_valid(op, shape, dropout);
  nn::detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
  nn::detail::expects_shape(op, "dqkv", dqkv, shape.rows(), shape.width());
  nn::detail::expects_shape(op, "out", out, shape.rows(), out_width);
  nn::detail::expects_shape(op, "dout", dout, shape.rows(), out_width);
  nn::detail::expects_shape(op, "lse", lse.matrix(), shape.batch * shape.query_heads, shape.time);
  detail::expects_aligned(op, "dqkv", dqkv.data());
  detail::expects_aligned(op, "out", out.data());
  detail::expects_aligned(op, "dout", dout.data());
  const auto task = detail::attention_task<T>(op, shape, dropout, qkv);
  if (dqkv.empty()) return;
  auto* const inner = static_cast<float*>(
      stream.scratch(sizeof(float) * static_cast<std::size_t>(shape.rows() * shape.query_heads)));
  detail::with_tile_dim(
      op, shape.head_dim,
      detail::AttentionMmaBackward<T>{
          stream, dqkv.data(), out.data(), {dout.data(), lse.data(), inner}, inner, task});
}

}  // namespace mega::inline v0::cuda
