/// @file  Causal attention in bf16 or fp16 through cuDNN's graph C API. Opt-in: needs the CUDA and
/// cuDNN headers, and cuDNN to link. Plain C++, no nvcc. Source: the operation pattern that cuDNN's
/// developer guide documents for flash attention.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/cudnn_graph.hpp>
#include <mega/nn/detail/shape.hpp>

#include <cudnn_graph.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace mega::inline v0::nn {

namespace detail {

/// Tensors of attention that are in memory. `inner` is a query's inner product of out and dout,
/// `dquery_sum` the fp32 sums of dquery, to which all blocks of keys add in no fixed order.
struct CudnnAttentionId {
  enum : std::int64_t {
    query = 1,
    key,
    value,
    out,
    lse,
    dout,
    dquery,
    dkey,
    dvalue,
    inner,
    dquery_sum
  };
};

enum class CudnnAttentionPass : std::uint8_t { forward, backward, deterministic_backward };

/// The part of an attention that one plan computes: some samples, and in them some heads.
struct CudnnAttentionPart {
  AttentionShape shape;  ///< of the part
  Index qkv_width = 0;   ///< elements of a row of the whole packed matrix
  Index out_width = 0;   ///< and of the whole output
  CudnnAttentionPass pass = CudnnAttentionPass::forward;
  cudnnDataType_t stored = CUDNN_DATA_BFLOAT16;  ///< what rows and rounded products are

  using Key = std::array<Index, 9>;
  [[nodiscard]] Key key() const {
    return {shape.batch,
            shape.time,
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            qkv_width,
            out_width,
            static_cast<Index>(pass),
            static_cast<Index>(stored)};
  }
  [[nodiscard]] float scale() const { return 1.0F / std::sqrt(static_cast<float>(shape.head_dim)); }

  [[nodiscard]] CudnnLayout query() const { return in_rows(shape.query_heads, qkv_width); }
  [[nodiscard]] CudnnLayout key_or_value() const { return in_rows(shape.kv_heads, qkv_width); }
  [[nodiscard]] CudnnLayout out() const { return in_rows(shape.query_heads, out_width); }
  /// [.., time, time], [.., time, 1] and [.., time, head_dim] of the query heads.
  [[nodiscard]] CudnnLayout scores() const { return contiguous(shape.time); }
  [[nodiscard]] CudnnLayout per_query() const { return contiguous(1); }
  [[nodiscard]] CudnnLayout heads() const { return contiguous(shape.head_dim); }

 private:
  [[nodiscard]] CudnnLayout in_rows(Index heads, Index width) const {
    return CudnnLayout::packed(shape.batch, heads, shape.time, shape.head_dim, width);
  }
  [[nodiscard]] CudnnLayout contiguous(Index cols) const {
    return CudnnLayout::contiguous(shape.batch, shape.query_heads, shape.time, cols);
  }
};

/// The engines recognise the graph by its pattern: order and types of the operations are theirs.
inline CudnnGraph attention_forward_graph(const CudnnAttentionPart& part) {
  using Id = CudnnAttentionId;
  const cudnnDataType_t stored = part.stored;
  CudnnGraph g;
  const auto query = g.memory(Id::query, stored, part.query());
  const auto key = g.memory(Id::key, stored, part.key_or_value().transposed());
  const auto value = g.memory(Id::value, stored, part.key_or_value());
  const auto out = g.memory(Id::out, stored, part.out());
  const auto lse = g.memory(Id::lse, CUDNN_DATA_FLOAT, part.per_query());

  auto score = g.multiply(query, key, g.temporary(part.scores()));
  score = g.pointwise(CUDNN_POINTWISE_MUL, score, g.number(part.scale()));
  score = g.mask_causal(score);
  const auto largest = g.reduce(CUDNN_REDUCE_TENSOR_MAX, score, g.temporary(part.per_query()));
  const auto shifted = g.pointwise(CUDNN_POINTWISE_SUB, score, largest);
  const auto weight = g.pointwise(CUDNN_POINTWISE_EXP, shifted);
  const auto sum = g.reduce(CUDNN_REDUCE_TENSOR_ADD, weight, g.temporary(part.per_query()));
  g.pointwise(CUDNN_POINTWISE_ADD, largest, g.pointwise(CUDNN_POINTWISE_LOG, sum), lse);
  const auto probability =
      g.pointwise(CUDNN_POINTWISE_DIV, weight, sum, g.temporary(part.scores(), stored));
  g.multiply(probability, value, out);
  return g;
}

/// Ordinary: blocks of keys add to dquery_sum as they finish. Deterministic: the engine stores the
/// scores' gradients, of which one product makes dquery.
inline CudnnGraph attention_backward_graph(const CudnnAttentionPart& part) {
  using Id = CudnnAttentionId;
  const cudnnDataType_t stored = part.stored;
  constexpr auto fp32 = CUDNN_DATA_FLOAT;
  CudnnGraph g;
  const auto query = g.memory(Id::query, stored, part.query());
  const auto key = g.memory(Id::key, stored, part.key_or_value().transposed());
  const auto value = g.memory(Id::value, stored, part.key_or_value().transposed());
  const auto out = g.memory(Id::out, stored, part.out());
  const auto dout = g.memory(Id::dout, stored, part.out());
  const auto lse = g.memory(Id::lse, fp32, part.per_query());
  const auto dquery = g.memory(Id::dquery, stored, part.query());
  const auto dkey = g.memory(Id::dkey, stored, part.key_or_value());
  const auto dvalue = g.memory(Id::dvalue, stored, part.key_or_value());
  const auto inner = g.memory(Id::inner, fp32, part.per_query());
  const auto scale = g.number(part.scale());
  // to = weights^T rows, summed over the query heads of a group.
  const auto add_over_queries = [&](CudnnTensor weights, CudnnTensor rows, CudnnTensor to) {
    const auto transposed = g.transpose(weights, stored);
    if (part.shape.group() == 1)
      g.multiply(transposed, rows, to);
    else
      g.reduce(CUDNN_REDUCE_TENSOR_ADD,
               g.multiply(transposed, rows, g.temporary(part.heads(), stored)), to);
  };

  const auto products = g.pointwise(CUDNN_POINTWISE_MUL, dout, out, g.temporary(part.heads()));
  const auto sums = g.reduce(CUDNN_REDUCE_TENSOR_ADD, products, g.temporary(part.per_query()));
  // The pattern has a factor here, which dropout would use.
  g.pointwise(CUDNN_POINTWISE_MUL, sums, g.number(1.0F), inner);

  auto score = g.multiply(query, key, g.temporary(part.scores()));
  score = g.pointwise(CUDNN_POINTWISE_MUL, score, scale);
  score = g.pointwise(CUDNN_POINTWISE_SUB, score, lse);
  score = g.mask_causal(score);
  const auto probability = g.pointwise(CUDNN_POINTWISE_EXP, score);
  add_over_queries(probability, dout, dvalue);

  auto dscore = g.multiply(dout, value, g.temporary(part.scores()));
  dscore = g.pointwise(CUDNN_POINTWISE_SUB, dscore, inner);
  dscore = g.pointwise(CUDNN_POINTWISE_MUL, dscore, probability);
  dscore = g.pointwise(CUDNN_POINTWISE_MUL, dscore, scale);
  add_over_queries(dscore, query, dkey);

  const auto keys = g.transpose(key, stored);
  if (part.pass == CudnnAttentionPass::deterministic_backward) {
    g.multiply(dscore, keys, dquery);
  } else {
    const auto sum = g.memory(Id::dquery_sum, fp32, part.heads());
    g.multiply(dscore, keys, sum);
    g.convert(CUDNN_POINTWISE_IDENTITY, sum, dquery);
  }
  return g;
}

/// One stream's handle and plans.
class CudnnAttentionPlans {
 public:
  explicit CudnnAttentionPlans(const cuda::Stream& stream) {
    check_cudnn(cudnnSetStream(handle(), stream.native()), "cudnnSetStream");
  }

  [[nodiscard]] cudnnHandle_t handle() const noexcept { return handle_.native(); }

  /// Built at the first request. @pre  at that one, the stream is not capturing
  [[nodiscard]] const CudnnPlan& plan(const CudnnAttentionPart& part) {
    const auto key = part.key();
    for (const Known& known : known_)
      if (known.key == key) return *known.plan;
    const bool forward = part.pass == CudnnAttentionPass::forward;
    const AttentionShape& s = part.shape;
    known_.push_back(
        {key,
         std::make_unique<CudnnPlan>(
             handle(), forward ? attention_forward_graph(part) : attention_backward_graph(part),
             sentence(forward ? "attention_forward" : "attention_backward", " of batch ", s.batch,
                      ", time ", s.time, ", query heads ", s.query_heads, ", kv heads ", s.kv_heads,
                      ", head dim ", s.head_dim))});
    return *known_.back().plan;
  }

 private:
  struct Known {
    CudnnAttentionPart::Key key;
    std::unique_ptr<const CudnnPlan> plan;
  };
  CudnnHandle handle_;
  std::vector<Known> known_;  // few, so searched in turn
};

constexpr Index round_up(Index n, Index multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// Bytes of the stored gradients of the scores of one key head's group, as the engine pads them.
constexpr Index stored_score_bytes(const AttentionShape& s) {
  return 2 * s.group() * round_up(s.time, 64) * round_up(s.time, 128);
}

/// Shape of the largest part that one backward plan computes: all, unless scores' gradients are
/// stored; then samples, and if need be key heads of one sample, in even parts of at most 1 GiB.
/// A length that is not a multiple of 4 is not split, since parts of lse would not be aligned.
constexpr AttentionShape backward_part(AttentionShape shape, bool deterministic) {
  if (!deterministic || shape.rows() == 0 || shape.time % 4 != 0) return shape;
  const auto even = [](Index total, Index most) {
    const Index parts = (total + most - 1) / most;
    return (total + parts - 1) / parts;
  };
  const Index most = std::max<Index>(1, (Index{1} << 30) / stored_score_bytes(shape));
  AttentionShape part = shape;
  part.batch = even(shape.batch, std::max<Index>(1, most / shape.kv_heads));
  part.kv_heads = even(shape.kv_heads, most);
  part.query_heads = part.kv_heads * shape.group();
  return part;
}

/// Places of what a backward pass needs beside its operands, each aligned to 256 bytes.
struct CudnnBackwardScratch {
  std::size_t inner = 0, dquery_sum, workspace, bytes;

  constexpr CudnnBackwardScratch(const AttentionShape& part, bool deterministic,
                                 std::size_t workspace_bytes)
      : dquery_sum(after(0, 4 * part.rows() * part.query_heads)),
        workspace(deterministic
                      ? dquery_sum
                      : after(dquery_sum, 4 * part.rows() * part.query_heads * part.head_dim)),
        bytes(workspace + workspace_bytes) {}

 private:
  static constexpr std::size_t after(std::size_t place, Index bytes) {
    return place + static_cast<std::size_t>(round_up(bytes, 256));
  }
};

/// @param operands  addresses with their names
inline void expects_aligned(
    std::string_view op, std::initializer_list<std::pair<std::string_view, const void*>> operands) {
  for (const auto& [operand, data] : operands) {
    const std::uintptr_t beyond = reinterpret_cast<std::uintptr_t>(data) % 16;
    expects(beyond == 0, ErrorCode::logic, [&, op_name = op, name = operand] {
      return sentence(op_name, ": ", name, " must be aligned to 16 bytes for cuDNN, it lies ",
                      beyond, " beyond");
    });
  }
}

template <half_storage T>
inline constexpr cudnnDataType_t cudnn_data_type =
    std::is_same_v<T, Float16> ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16;

template <half_storage T>
void cudnn_attention_forward(cuda::Stream& stream, T* out, float* lse, const T* qkv,
                             const AttentionShape& shape) {
  using Id = CudnnAttentionId;
  expects_aligned("attention_forward", {{"out", out}, {"lse", lse}, {"qkv", qkv}});
  auto& plans = stream.resource<CudnnAttentionPlans>();
  const CudnnPlan& plan = plans.plan({shape, shape.width(), shape.query_heads * shape.head_dim,
                                      CudnnAttentionPass::forward, cudnn_data_type<T>});
  const CudnnPlan::Binding bindings[] = {{Id::query, qkv + shape.query_column(0)},
                                         {Id::key, qkv + shape.key_column(0)},
                                         {Id::value, qkv + shape.value_column(0)},
                                         {Id::out, out},
                                         {Id::lse, lse}};
  plan.run(plans.handle(), bindings, stream.scratch(plan.workspace_bytes()));
}

template <half_storage T>
void cudnn_attention_backward(cuda::Stream& stream, T* dqkv, const T* dout, const T* qkv,
                              const T* out, const float* lse, const AttentionShape& shape,
                              bool deterministic) {
  using Id = CudnnAttentionId;
  expects_aligned("attention_backward",
                  {{"dqkv", dqkv}, {"dout", dout}, {"qkv", qkv}, {"out", out}, {"lse", lse}});
  const Index out_width = shape.query_heads * shape.head_dim;
  const AttentionShape largest = backward_part(shape, deterministic);
  auto& plans = stream.resource<CudnnAttentionPlans>();
  for (Index sample = 0; sample < shape.batch; sample += largest.batch)
    for (Index head = 0; head < shape.kv_heads; head += largest.kv_heads) {
      AttentionShape part = largest;
      part.batch = std::min(largest.batch, shape.batch - sample);
      part.kv_heads = std::min(largest.kv_heads, shape.kv_heads - head);
      part.query_heads = part.kv_heads * shape.group();
      const CudnnPlan& plan = plans.plan({part, shape.width(), out_width,
                                          deterministic ? CudnnAttentionPass::deterministic_backward
                                                        : CudnnAttentionPass::backward,
                                          cudnn_data_type<T>});
      const CudnnBackwardScratch place(part, deterministic, plan.workspace_bytes());
      auto* const scratch = static_cast<std::byte*>(stream.scratch(place.bytes));
      const Index query_head = head * shape.group();
      const Index in_packed = sample * shape.time * shape.width();
      const Index in_out = sample * shape.time * out_width + query_head * shape.head_dim;
      const Index query = in_packed + shape.query_column(query_head);
      const Index key = in_packed + shape.key_column(head);
      const Index value = in_packed + shape.value_column(head);
      const CudnnPlan::Binding bindings[] = {
          {Id::query, qkv + query},
          {Id::key, qkv + key},
          {Id::value, qkv + value},
          {Id::out, out + in_out},
          {Id::lse, lse + (sample * shape.query_heads + query_head) * shape.time},
          {Id::dout, dout + in_out},
          {Id::dquery, dqkv + query},
          {Id::dkey, dqkv + key},
          {Id::dvalue, dqkv + value},
          {Id::inner, scratch + place.inner},
          {Id::dquery_sum, scratch + place.dquery_sum}};
      // The deterministic graph has no sums, and what a graph lacks may not be bound.
      plan.run(plans.handle(), std::span(bindings).first(std::size(bindings) - deterministic),
               scratch + place.workspace);
    }
}

}  // namespace detail

/// Attention of bf16 and fp16 through cuDNN. What it does not support, float included, goes to the
/// library's own operation on the stream, which the caller has included. A shape's plans are built
/// at its first use on a stream, about a second each, and kept with the stream; from then on
/// forward and backward may be captured.
/// @tparam Deterministic  whether backward gives the same bits run to run on one kind of GPU, as
///         forward always does. It then stores the scores' gradients, in parts of up to 1 GiB of
///         scratch (more where the query heads of one key head alone need more, or where time is no
///         multiple of 4), and is slower.
/// @throws  Error(device) with cuDNN's own words
template <bool Deterministic = false>
struct CudnnAttention {
  static constexpr std::string_view name = "cudnn";

  /// Whether cuDNN computes this: no dropout, head_dim a multiple of 8 up to 128, time above 1, and
  /// for the loaded version: 9.14 or later, before 9.15.1 only a time that is a multiple of 128.
  [[nodiscard]] static bool supports(const AttentionShape& shape, const AttentionDropout& dropout) {
    const std::size_t version = cudnnGetVersion();
    return dropout.probability == 0.0F && shape.batch > 0 && shape.time > 1 &&
           shape.head_dim % 8 == 0 && shape.head_dim <= 128 && version >= 91400 &&
           (shape.time % 128 == 0 || version >= 91501);
  }

  /// As attention_forward of nn/attention.hpp: lse is exactly that of the library's own operations.
  /// @pre   out does not overlap qkv; operands are aligned to 16 bytes   @sync  ordered on stream
  template <class T>
  static void forward(cuda::Stream& stream, Matrix<T> out, View<float, 3> lse,
                      Matrix<const std::type_identity_t<T>> qkv, const AttentionShape& shape,
                      const AttentionDropout& dropout = {}) {
    constexpr auto op = "attention_forward";
    detail::expects_valid(op, shape, dropout);
    detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
    detail::expects_shape(op, "out", out, shape.rows(), shape.query_heads * shape.head_dim);
    detail::expects_shape(op, "lse", lse.matrix(), shape.batch * shape.query_heads, shape.time);
    if constexpr (half_storage<T>)
      if (supports(shape, dropout))
        return detail::cudnn_attention_forward(stream, out.data(), lse.data(), qkv.data(), shape);
    attention_forward(stream, out, lse, qkv, shape, dropout);
  }

  /// As attention_backward of nn/attention.hpp. Probabilities and gradients of scores are rounded
  /// to T before they are multiplied.
  /// @pre   the operands of the forward pass, unchanged; dqkv overlaps none of the inputs; operands
  ///        are aligned to 16 bytes   @sync  ordered on stream
  /// @determinism  not bitwise unless Deterministic: sums of dquery are added in any order
  template <class T>
  static void backward(cuda::Stream& stream, Matrix<T> dqkv,
                       Matrix<const std::type_identity_t<T>> dout,
                       Matrix<const std::type_identity_t<T>> qkv,
                       Matrix<const std::type_identity_t<T>> out, View<const float, 3> lse,
                       const AttentionShape& shape, const AttentionDropout& dropout = {}) {
    constexpr auto op = "attention_backward";
    const Index out_width = shape.query_heads * shape.head_dim;
    detail::expects_valid(op, shape, dropout);
    detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
    detail::expects_shape(op, "dqkv", dqkv, shape.rows(), shape.width());
    detail::expects_shape(op, "out", out, shape.rows(), out_width);
    detail::expects_shape(op, "dout", dout, shape.rows(), out_width);
    detail::expects_shape(op, "lse", lse.matrix(), shape.batch * shape.query_heads, shape.time);
    if constexpr (half_storage<T>)
      if (supports(shape, dropout))
        return detail::cudnn_attention_backward(stream, dqkv.data(), dout.data(), qkv.data(),
                                                out.data(), lse.data(), shape, Deterministic);
    attention_backward(stream, dqkv, dout, qkv, out, lse, shape, dropout);
  }

  /// Scratch of the stream that both passes of a supported shape need at most: without a
  /// device, for the memory plan. What cuDNN itself takes is a rule found by asking version 9.19.
  /// @param compute_capability  of the GPU, 80 to 90; engines before 90 hold sums of dquery again
  [[nodiscard]] static constexpr std::size_t workspace_bytes(const AttentionShape& shape,
                                                             int compute_capability = 90) {
    const AttentionShape part = detail::backward_part(shape, Deterministic);
    const Index of_a_row = 4 * part.query_heads * part.head_dim;
    Index of_cudnn = 4096;
    if (shape.group() > 1) of_cudnn += part.rows() * of_a_row;
    if (Deterministic)
      of_cudnn += part.batch * part.kv_heads * detail::stored_score_bytes(part);
    else if (compute_capability < 90)
      of_cudnn += part.batch * detail::round_up(part.time, 64) * of_a_row;
    return detail::CudnnBackwardScratch(part, Deterministic, static_cast<std::size_t>(of_cudnn))
        .bytes;
  }
};

}  // namespace mega::inline v0::nn
