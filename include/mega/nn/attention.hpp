/// @file  Causal attention with grouped-query heads on the host, tile by tile.
/// Source: the online soft-max of Milakov and Gimelshein, arXiv 1805.02867, and the recomputing
/// backward pass of Dao et al., arXiv 2205.14135.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/dropout_mask.hpp>
#include <mega/nn/detail/exponential.hpp>
#include <mega/nn/detail/lanes.hpp>
#include <mega/nn/detail/scratch.hpp>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/product.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

namespace mega::inline v0::nn {

/// Dropout of attention probabilities. An element is addressed by its global (sample, head, query,
/// key), so a shard of samples or heads says where it begins and how many heads there are in all.
struct AttentionDropout {
  float probability = 0.0f;
  RandomSite key{};
  Index first_sample = 0;
  Index first_head = 0;
  Index global_heads = 0;

  /// Global index of key 0 of one query row, `time` being the keys of a row.
  [[nodiscard]] MEGA_HD constexpr Index element(Index sample, Index head, Index query,
                                                Index time) const noexcept {
    return (((first_sample + sample) * global_heads + first_head + head) * time + query) * time;
  }
};

namespace detail {

/// Queries and keys of one tile. It fixes the order of the sums, so changing it changes results.
inline constexpr Index attention_tile = 64;

inline void expects_valid(std::string_view op, const AttentionShape& shape,
                          const AttentionDropout& dropout) {
  expects_valid(op, shape);
  expects(dropout.probability >= 0.0f && dropout.probability < 1.0f, ErrorCode::logic, [&] {
    return sentence(op, ": dropout probability is ", dropout.probability, ", it must be in [0, 1)");
  });
  expects(
      dropout.probability == 0.0f || dropout.global_heads >= dropout.first_head + shape.query_heads,
      ErrorCode::logic, [&] {
        return sentence(op, ": dropout.global_heads is ", dropout.global_heads,
                        ", the shard's heads end at ", dropout.first_head + shape.query_heads);
      });
}

/// One head of one sample: pointers to its first row, and the length of a packed row.
struct AttentionHead {
  Index time, dim, width;
  const float* query;
  const float* key;
  const float* value;
  AttentionDropout dropout;
  Index sample, head;

  AttentionHead(const AttentionShape& shape, const float* qkv, const AttentionDropout& drop,
                Index at_sample, Index at_head)
      : time(shape.time),
        dim(shape.head_dim),
        width(shape.width()),
        dropout(drop),
        sample(at_sample),
        head(at_head) {
    const float* const rows = qkv + at_sample * shape.time * width;
    const Index group = at_head / shape.group();
    query = rows + shape.query_column(at_head);
    key = rows + shape.key_column(group);
    value = rows + shape.value_column(group);
  }

  [[nodiscard]] float scale() const { return 1.0f / std::sqrt(static_cast<float>(dim)); }

  /// out [queries, tile] = scale * Q K^T for queries from q0 and keys from k0, minus infinity where
  /// the key comes after the query.
  template <class = void>
  void scores(float* out, Index q0, Index queries, Index k0, Index keys) const {
    multiply({Transpose::no, Transpose::yes, queries, keys, dim, scale(), query + q0 * width, width,
              key + k0 * width, width, 0.0f, out, attention_tile});
    for (Index r = 0; r < queries; ++r)
      for (Index j = q0 + r - k0 + 1; j < keys; ++j)
        out[r * attention_tile + j] = -std::numeric_limits<float>::infinity();
  }

  /// Calls apply(j, factor) for the keys k0 + j, j < count, of query q.
  template <class Apply>
  void for_each_factor(Index q, Index k0, Index count, Apply apply) const {
    DropoutMask mask(dropout.key.read(), dropout.probability);
    const Index first = dropout.element(sample, head, q, time) + k0;
    for (Index j = 0; j < count; ++j) apply(j, mask.factor(first + j));
  }
};

template <class = void>  // compiled where it is called
void attend_forward(float* out, Index out_width, float* lse, const AttentionHead& head) {
  struct Scores {};
  struct Sums {};
  constexpr Index tile = attention_tile;
  float* const p = scratch<Scores>(tile * tile);
  float* const sum_of_values = scratch<Sums>(tile * head.dim);
  for (Index q0 = 0; q0 < head.time; q0 += tile) {
    const Index queries = std::min(tile, head.time - q0);
    float largest[tile], sum[tile];
    std::fill(largest, largest + queries, -std::numeric_limits<float>::infinity());
    std::fill(sum, sum + queries, 0.0f);
    std::fill(sum_of_values, sum_of_values + queries * head.dim, 0.0f);
    for (Index k0 = 0; k0 < q0 + queries; k0 += tile) {
      const Index keys = std::min(tile, head.time - k0);
      head.scores(p, q0, queries, k0, keys);
      for (Index r = 0; r < queries; ++r) {
        float* const row = p + r * tile;
        const float before = largest[r];
        const float tile_max = lane_max(keys, row);
        const float now = tile_max > before ? tile_max : before;
        for (Index j = 0; j < keys; ++j) row[j] = exponential(row[j] - now);
        const float correction = exponential(before - now);
        sum[r] = sum[r] * correction + lane_sum(keys, [=](Index j) { return row[j]; });
        largest[r] = now;
        float* const values = sum_of_values + r * head.dim;
        for (Index c = 0; c < head.dim; ++c) values[c] *= correction;
        if (head.dropout.probability > 0.0f)
          head.for_each_factor(q0 + r, k0, keys, [=](Index j, float f) { row[j] *= f; });
      }
      multiply({Transpose::no, Transpose::no, queries, head.dim, keys, 1.0f, p, tile,
                head.value + k0 * head.width, head.width, 1.0f, sum_of_values, head.dim});
    }
    for (Index r = 0; r < queries; ++r) {
      const float* const values = sum_of_values + r * head.dim;
      float* const to = out + (q0 + r) * out_width;
      for (Index c = 0; c < head.dim; ++c) to[c] = values[c] / sum[r];
      lse[q0 + r] = largest[r] + std::log(sum[r]);
    }
  }
}

/// Adds this query head's part to dquery, dkey and dvalue, key tiles outside, query tiles inside.
/// `inner` holds for each query the inner product of out and dout, which is the mean of the
/// probabilities' gradients under the soft-max, with or without dropout.
template <class = void>
void attend_backward(float* dquery, float* dkey, float* dvalue, const float* dout, Index out_width,
                     const float* lse, const float* inner, const AttentionHead& head) {
  struct Scores {};
  struct Gradients {};
  constexpr Index tile = attention_tile;
  float* const p = scratch<Scores>(tile * tile);
  float* const dp = scratch<Gradients>(tile * tile);
  const float scale = head.scale();
  for (Index k0 = 0; k0 < head.time; k0 += tile) {
    const Index keys = std::min(tile, head.time - k0);
    for (Index q0 = k0; q0 < head.time; q0 += tile) {
      const Index queries = std::min(tile, head.time - q0);
      const float* const dout_tile = dout + q0 * out_width;
      head.scores(p, q0, queries, k0, keys);
      multiply({Transpose::no, Transpose::yes, queries, keys, head.dim, 1.0f, dout_tile, out_width,
                head.value + k0 * head.width, head.width, 0.0f, dp, tile});
      for (Index r = 0; r < queries; ++r) {
        float* const row = p + r * tile;
        float* const drow = dp + r * tile;
        const float offset = lse[q0 + r], mean = inner[q0 + r];
        for (Index j = 0; j < keys; ++j) row[j] = exponential(row[j] - offset);
        if (head.dropout.probability > 0.0f) {
          head.for_each_factor(q0 + r, k0, keys, [=](Index j, float f) {
            drow[j] = scale * row[j] * (f * drow[j] - mean);
            row[j] *= f;
          });
        } else {
          for (Index j = 0; j < keys; ++j) drow[j] = scale * row[j] * (drow[j] - mean);
        }
      }
      multiply({Transpose::yes, Transpose::no, keys, head.dim, queries, 1.0f, p, tile, dout_tile,
                out_width, 1.0f, dvalue + k0 * head.width, head.width});
      multiply({Transpose::yes, Transpose::no, keys, head.dim, queries, 1.0f, dp, tile,
                head.query + q0 * head.width, head.width, 1.0f, dkey + k0 * head.width,
                head.width});
      multiply({Transpose::no, Transpose::no, queries, head.dim, keys, 1.0f, dp, tile,
                head.key + k0 * head.width, head.width, 1.0f, dquery + q0 * head.width,
                head.width});
    }
  }
}

}  // namespace detail

/// out = softmax(Q K^T / sqrt(head_dim), over the keys not after the query) V, head by head.
/// @param  out  [batch * time, query_heads * head_dim]
/// @param  lse  [batch, query_heads, time]: log of the sum of exponentials of a query's scores,
///              all that the backward pass needs besides out
/// @param  qkv  [batch * time, shape.width()], packed as AttentionShape says
/// @pre    out does not overlap qkv   @sync  ordered on stream
/// @cost   2 * batch * query_heads * time^2 * head_dim operations; working memory of a few tiles a
///         thread, none of it proportional to time
/// @determinism  bitwise; while all rows are finite, a query's result depends on its own
///               and earlier rows of its sample only
template <host::host_stream S>
void attention_forward(S& stream, Matrix<float> out, View<float, 3> lse, Matrix<const float> qkv,
                       AttentionShape shape, AttentionDropout dropout = {}) {
  detail::expects_valid("attention_forward", shape, dropout);
  detail::expects_shape("attention_forward", "qkv", qkv, shape.rows(), shape.width());
  detail::expects_shape("attention_forward", "out", out, shape.rows(),
                        shape.query_heads * shape.head_dim);
  detail::expects_shape("attention_forward", "lse", lse.matrix(), shape.batch * shape.query_heads,
                        shape.time);
  stream.run([=] {
    for (Index b = 0; b < shape.batch; ++b)
      for (Index h = 0; h < shape.query_heads; ++h)
        detail::attend_forward(out.row(b * shape.time) + h * shape.head_dim, out.cols(),
                               lse.row(b * shape.query_heads + h),
                               detail::AttentionHead(shape, qkv.data(), dropout, b, h));
  });
}

/// dqkv = d loss / d qkv, overwritten. Probabilities are computed again from qkv and lse, dropout's
/// mask from its key; the query heads of a group add to their key head in ascending order.
/// @pre    the operands of the forward pass, unchanged; dqkv overlaps none of the inputs
/// @sync   ordered on stream   @determinism  bitwise
/// @cost   5 * batch * query_heads * time^2 * head_dim operations; working memory of a few tiles
///         and one number a query position
template <host::host_stream S>
void attention_backward(S& stream, Matrix<float> dqkv, Matrix<const float> dout,
                        Matrix<const float> qkv, Matrix<const float> out, View<const float, 3> lse,
                        AttentionShape shape, AttentionDropout dropout = {}) {
  const Index out_width = shape.query_heads * shape.head_dim;
  detail::expects_valid("attention_backward", shape, dropout);
  detail::expects_shape("attention_backward", "qkv", qkv, shape.rows(), shape.width());
  detail::expects_shape("attention_backward", "dqkv", dqkv, shape.rows(), shape.width());
  detail::expects_shape("attention_backward", "out", out, shape.rows(), out_width);
  detail::expects_shape("attention_backward", "dout", dout, shape.rows(), out_width);
  detail::expects_shape("attention_backward", "lse", lse.matrix(), shape.batch * shape.query_heads,
                        shape.time);
  stream.run([=] {
    struct Inner {};
    float* const inner = detail::scratch<Inner>(shape.time);
    std::fill(dqkv.data(), dqkv.data() + dqkv.size(), 0.0f);
    for (Index b = 0; b < shape.batch; ++b) {
      const Index row0 = b * shape.time;
      for (Index h = 0; h < shape.query_heads; ++h) {
        const Index column = h * shape.head_dim, group = h / shape.group();
        for (Index t = 0; t < shape.time; ++t) {
          const float* const y = out.row(row0 + t) + column;
          const float* const dy = dout.row(row0 + t) + column;
          inner[t] = detail::lane_sum(shape.head_dim, [=](Index c) { return y[c] * dy[c]; });
        }
        float* const drows = dqkv.row(row0);
        detail::attend_backward(drows + shape.query_column(h), drows + shape.key_column(group),
                                drows + shape.value_column(group), dout.row(row0) + column,
                                out_width, lse.row(b * shape.query_heads + h), inner,
                                detail::AttentionHead(shape, qkv.data(), dropout, b, h));
      }
    }
  });
}

}  // namespace mega::inline v0::nn
