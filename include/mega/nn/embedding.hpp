/// @file  Token and learned position embeddings on the host.
#pragma once
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/detail/shape.hpp>

#include <cstdint>
#include <string_view>

// Every operation: all fp32, work ordered on `stream`, a wrong shape throws Error(logic) in the
// caller.
namespace mega::inline v0::nn {

/// out(r) = row tokens(r) of the vocabulary. `table` [rows, width] holds the vocabulary's rows from
/// first_row on; a token outside of it gives zeros, so that the sum over the ranks' shards is the
/// embedding.
template <host::host_stream S>
void embedding_forward(S& stream, Matrix<float> out, Vector<const std::int32_t> tokens,
                       Matrix<const float> table, Index first_row) {
  detail::expects_shape("embedding_forward", "out", out, tokens.size(), table.cols());
  stream.run([=] {
    for (Index r = 0; r < tokens.size(); ++r) {
      const Index at = tokens(r) - first_row;
      float* const to = out.row(r);
      if (at >= 0 && at < table.rows()) {
        const float* const from = table.row(at);
        for (Index c = 0; c < table.cols(); ++c) to[c] = from[c];
      } else {
        for (Index c = 0; c < table.cols(); ++c) to[c] = 0.0f;
      }
    }
  });
}

/// dtable += dout in token order, for the tokens that the shard holds.
template <host::host_stream S>
void embedding_backward(S& stream, Matrix<float> dtable, Matrix<const float> dout,
                        Vector<const std::int32_t> tokens, Index first_row) {
  detail::expects_shape("embedding_backward", "dout", dout, tokens.size(), dtable.cols());
  stream.run([=] {
    for (Index r = 0; r < tokens.size(); ++r) {
      const Index at = tokens(r) - first_row;
      if (at < 0 || at >= dtable.rows()) continue;
      float* const to = dtable.row(at);
      const float* const dy = dout.row(r);
      for (Index c = 0; c < dtable.cols(); ++c) to[c] += dy[c];
    }
  });
}

namespace detail {
inline void expects_positions(std::string_view op, Index rows, Index table_rows, Index time,
                              Index first_position) {
  expects(time > 0 && rows % time == 0, ErrorCode::logic, [&] {
    return sentence(op, ": ", rows, " rows are not a multiple of the sequence length ", time);
  });
  expects(first_position >= 0 && first_position + time <= table_rows, ErrorCode::logic, [&] {
    return sentence(op, ": positions ", first_position, " to ", first_position + time - 1,
                    " do not lie in a table of ", table_rows, " positions");
  });
}
}  // namespace detail

/// out = x + table(first_position + r % time) in row r: learned positions, for rows ordered as
/// [sample, time]. out may be x.
template <host::host_stream S>
void position_embedding_forward(S& stream, Matrix<float> out, Matrix<const float> x,
                                Matrix<const float> table, Index time, Index first_position) {
  detail::expects_shape("position_embedding_forward", "out", out, x.rows(), table.cols());
  detail::expects_shape("position_embedding_forward", "x", x, x.rows(), table.cols());
  detail::expects_positions("position_embedding_forward", x.rows(), table.rows(), time,
                            first_position);
  stream.run([=] {
    for (Index r = 0; r < x.rows(); ++r) {
      const float* const in = x.row(r);
      const float* const position = table.row(first_position + r % time);
      float* const to = out.row(r);
      for (Index c = 0; c < x.cols(); ++c) to[c] = in[c] + position[c];
    }
  });
}

/// dtable += dout, samples in ascending order. The gradient of x is dout itself.
template <host::host_stream S>
void position_embedding_backward(S& stream, Matrix<float> dtable, Matrix<const float> dout,
                                 Index time, Index first_position) {
  detail::expects_shape("position_embedding_backward", "dout", dout, dout.rows(), dtable.cols());
  detail::expects_positions("position_embedding_backward", dout.rows(), dtable.rows(), time,
                            first_position);
  stream.run([=] {
    for (Index r = 0; r < dout.rows(); ++r) {
      const float* const dy = dout.row(r);
      float* const to = dtable.row(first_position + r % time);
      for (Index c = 0; c < dout.cols(); ++c) to[c] += dy[c];
    }
  });
}

}  // namespace mega::inline v0::nn
