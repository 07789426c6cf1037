/// @file  Operations on single elements, and the bias with its column sums, on the host.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/detail/dropout_mask.hpp>
#include <mega/nn/detail/exponential.hpp>
#include <mega/nn/detail/lanes.hpp>
#include <mega/nn/detail/shape.hpp>

// Every operation: all fp32, work ordered on `stream`, a wrong shape throws Error(logic) in the
// caller. An output may be one of its inputs where the shapes are equal. Rows are independent.
namespace mega::inline v0::nn {

namespace detail {

/// Runs element(r, c) row by row: an element's place in the vector loop depends on c alone, so its
/// rounding does not depend on the number of rows.
template <class Element>
void for_each_element(Index rows, Index cols, Element element) {
  for (Index r = 0; r < rows; ++r)
    for (Index c = 0; c < cols; ++c) element(r, c);
}

inline constexpr float gelu_slope = 0.7978845608028654f;  // sqrt(2 / pi)
inline constexpr float gelu_cubic = 0.044715f;

/// 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
[[nodiscard]] inline Logistic gelu_gate(float x) noexcept {
  return logistic(2.0f * gelu_slope * (x + gelu_cubic * x * x * x));
}

}  // namespace detail

template <host::host_stream S>
void fill(S& stream, Matrix<float> out, float value) {
  stream.run([=] {
    float* const to = out.data();
    const Index n = out.size();
    for (Index i = 0; i < n; ++i) to[i] = value;
  });
}

/// out = a + b: the residual connection.
template <host::host_stream S>
void add(S& stream, Matrix<float> out, Matrix<const float> a, Matrix<const float> b) {
  detail::expects_shape("add", "out", out, a.rows(), a.cols());
  detail::expects_shape("add", "b", b, a.rows(), a.cols());
  stream.run([=] {
    float* const to = out.data();
    const float* const x = a.data();
    const float* const y = b.data();
    const Index n = out.size();
    for (Index i = 0; i < n; ++i) to[i] = x[i] + y[i];
  });
}

/// y = x + (branch + branch_bias): the residual connection of a branch that ends with a bias, with
/// the bits of bias_add() and add(). branch_bias may be empty. y may be x or branch.
template <host::host_stream S>
void add_branch(S& stream, Matrix<float> y, Matrix<const float> x, Matrix<const float> branch,
                Vector<const float> branch_bias) {
  if (branch_bias.empty()) return add(stream, y, x, branch);
  detail::expects_shape("add_branch", "y", y, x.rows(), x.cols());
  detail::expects_shape("add_branch", "branch", branch, x.rows(), x.cols());
  detail::expects_size("add_branch", "branch_bias", branch_bias, x.cols());
  stream.run([=] {
    const Index cols = x.cols();
    float* const to = y.data();
    const float* const in = x.data();
    const float* const added = branch.data();
    const float* const b = branch_bias.data();
    detail::for_each_element(x.rows(), cols, [=](Index r, Index c) {
      to[r * cols + c] = in[r * cols + c] + (added[r * cols + c] + b[c]);
    });
  });
}

/// out = factor * x
template <host::host_stream S>
void scale(S& stream, Matrix<float> out, Matrix<const float> x, float factor) {
  detail::expects_shape("scale", "out", out, x.rows(), x.cols());
  stream.run([=] {
    float* const to = out.data();
    const float* const in = x.data();
    const Index n = out.size();
    for (Index i = 0; i < n; ++i) to[i] = factor * in[i];
  });
}

/// out = x + bias in each row.
template <host::host_stream S>
void bias_add(S& stream, Matrix<float> out, Matrix<const float> x, Vector<const float> bias) {
  detail::expects_shape("bias_add", "out", out, x.rows(), x.cols());
  detail::expects_size("bias_add", "bias", bias, x.cols());
  stream.run([=] {
    const Index cols = x.cols();
    float* const to = out.data();
    const float* const in = x.data();
    const float* const b = bias.data();
    detail::for_each_element(x.rows(), cols,
                             [=](Index r, Index c) { to[r * cols + c] = in[r * cols + c] + b[c]; });
  });
}

/// dbias += column sums of dout, rows in ascending order.
template <host::host_stream S>
void bias_gradient(S& stream, Vector<float> dbias, Matrix<const float> dout) {
  detail::expects_size("bias_gradient", "dbias", dbias, dout.cols());
  stream.run([=] {
    const Index cols = dout.cols();
    const float* const dy = dout.data();
    detail::add_column_sums(dbias.data(), dout.rows(), cols,
                            [=](Index r, Index c) { return dy[r * cols + c]; });
  });
}

/// out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
/// Source: Hendrycks and Gimpel, arXiv 1606.08415.
template <host::host_stream S>
void gelu_tanh_forward(S& stream, Matrix<float> out, Matrix<const float> x) {
  detail::expects_shape("gelu_tanh_forward", "out", out, x.rows(), x.cols());
  stream.run([=] {
    const Index cols = x.cols();
    float* const to = out.data();
    const float* const in = x.data();
    detail::for_each_element(x.rows(), cols, [=](Index r, Index c) {
      const float v = in[r * cols + c];
      to[r * cols + c] = v * detail::gelu_gate(v).value;
    });
  });
}

template <host::host_stream S>
void gelu_tanh_backward(S& stream, Matrix<float> dx, Matrix<const float> dout,
                        Matrix<const float> x) {
  detail::expects_shape("gelu_tanh_backward", "dx", dx, x.rows(), x.cols());
  detail::expects_shape("gelu_tanh_backward", "dout", dout, x.rows(), x.cols());
  stream.run([=] {
    const Index cols = x.cols();
    float* const to = dx.data();
    const float* const dy = dout.data();
    const float* const in = x.data();
    detail::for_each_element(x.rows(), cols, [=](Index r, Index c) {
      const float v = in[r * cols + c];
      const auto [gate, complement] = detail::gelu_gate(v);
      const float inner = 2.0f * detail::gelu_slope * (1.0f + 3.0f * detail::gelu_cubic * v * v);
      to[r * cols + c] = dy[r * cols + c] * (gate + v * gate * complement * inner);
    });
  });
}

/// gelu_tanh_backward(), then bias_gradient() of dx: dbias is of the bias that x ends with. dx may
/// be dout or x.
template <host::host_stream S>
void gelu_tanh_backward_bias(S& stream, Matrix<float> dx, Vector<float> dbias,
                             Matrix<const float> dout, Matrix<const float> x) {
  detail::expects_size("gelu_tanh_backward_bias", "dbias", dbias, x.cols());
  gelu_tanh_backward(stream, dx, dout, x);
  bias_gradient(stream, dbias, dx);
}

/// out = silu(gate) * up with x = [gate | up], [rows, 2 f], and out [rows, f].
/// Source: Shazeer, arXiv 2002.05202.
template <host::host_stream S>
void swiglu_forward(S& stream, Matrix<float> out, Matrix<const float> x) {
  detail::expects_shape("swiglu_forward", "x", x, out.rows(), 2 * out.cols());
  stream.run([=] {
    const Index cols = out.cols();
    for (Index r = 0; r < out.rows(); ++r) {
      const float* const gate = x.row(r);
      const float* const up = gate + cols;
      float* const to = out.row(r);
      for (Index c = 0; c < cols; ++c) to[c] = gate[c] * detail::logistic(gate[c]).value * up[c];
    }
  });
}

/// dx [rows, 2 f] = [d gate | d up]. dx may be x.
template <host::host_stream S>
void swiglu_backward(S& stream, Matrix<float> dx, Matrix<const float> dout, Matrix<const float> x) {
  detail::expects_shape("swiglu_backward", "x", x, dout.rows(), 2 * dout.cols());
  detail::expects_shape("swiglu_backward", "dx", dx, dout.rows(), 2 * dout.cols());
  stream.run([=] {
    const Index cols = dout.cols();
    for (Index r = 0; r < dout.rows(); ++r) {
      const float* const dy = dout.row(r);
      const float* const gate = x.row(r);
      const float* const up = gate + cols;
      float* const dgate = dx.row(r);
      float* const dup = dgate + cols;
      for (Index c = 0; c < cols; ++c) {
        const float g = gate[c], u = up[c];
        const auto [sigmoid, complement] = detail::logistic(g);
        dgate[c] = dy[c] * u * (sigmoid + g * sigmoid * complement);
        dup[c] = dy[c] * g * sigmoid;
      }
    }
  });
}

/// Where a block of consecutive rows lies in the whole tensor that all ranks hold together: element
/// (r, c) of the block has the global index (first_row + r) * row_stride + first_column + c. A
/// tensor-parallel shard sets first_column, a sequence-parallel or data-parallel one first_row; a
/// sequence shard of several samples is one block a sample.
struct GlobalBlock {
  Index first_row = 0;
  Index row_stride = 0;
  Index first_column = 0;

  [[nodiscard]] MEGA_HD constexpr Index element(Index r, Index c) const noexcept {
    return (first_row + r) * row_stride + first_column + c;
  }
};

/// out = x / (1 - probability) where the element is kept, else 0. Which elements are kept depends
/// on the key and the global element index only, so no layout changes it and nothing is stored.
/// @pre  0 <= probability < 1; block.row_stride is the number of columns of the whole tensor
template <host::host_stream S>
void dropout_forward(S& stream, Matrix<float> out, Matrix<const float> x, float probability,
                     RandomSite key, GlobalBlock block) {
  detail::expects_shape("dropout_forward", "out", out, x.rows(), x.cols());
  expects(probability >= 0.0f && probability < 1.0f, ErrorCode::logic, [&] {
    return sentence("dropout_forward: probability is ", probability, ", it must be in [0, 1)");
  });
  expects(block.row_stride >= block.first_column + x.cols() || x.rows() <= 1, ErrorCode::logic,
          [&] {
            return sentence("dropout_forward: row stride ", block.row_stride, " is less than ",
                            block.first_column + x.cols(), ", the end of the block's columns");
          });
  stream.run([=] {
    if (probability == 0.0f && out.data() == x.data()) return;
    detail::DropoutMask mask(key.read(), probability);
    for (Index r = 0; r < x.rows(); ++r) {
      const float* const in = x.row(r);
      float* const to = out.row(r);
      if (probability == 0.0f) {
        for (Index c = 0; c < x.cols(); ++c) to[c] = in[c];
      } else {
        for (Index c = 0; c < x.cols(); ++c) to[c] = in[c] * mask.factor(block.element(r, c));
      }
    }
  });
}

/// dx = dout times the factors of the forward operation with the same key and block.
template <host::host_stream S>
void dropout_backward(S& stream, Matrix<float> dx, Matrix<const float> dout, float probability,
                      RandomSite key, GlobalBlock block) {
  dropout_forward(stream, dx, dout, probability, key, block);
}

}  // namespace mega::inline v0::nn
