/// @file  Operations on single elements, and the bias with its column sums, on a GPU. The host
/// twins in nn/elementwise.hpp say what each operation does.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/dropout_mask.hpp>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/elementwise.hpp>

namespace mega::inline v0::cuda {

namespace detail {

struct Fill {
  float* out;
  float value;
  __device__ void operator()(Index i) const { out[i] = value; }
};

struct Add {
  float* out;
  const float* a;
  const float* b;
  __device__ void operator()(Index i) const { out[i] = a[i] + b[i]; }
};

struct Scale {
  float* out;
  const float* x;
  float factor;
  __device__ void operator()(Index i) const { out[i] = factor * x[i]; }
};

struct BiasAdd {
  float* out;
  const float* x;
  const float* bias;
  Index cols;
  __device__ void operator()(Index r, Index c) const {
    out[r * cols + c] = x[r * cols + c] + bias[c];
  }
};

struct RowTerms {
  const float* dout;
  Index cols;
  __device__ void operator()(Index r, Index c, float (&term)[1]) const {
    term[0] = dout[r * cols + c];
  }
};

/// 1 / (1 + e^-x) and its complement, both without cancellation.
struct Logistic {
  float value;
  float complement;
};
[[nodiscard]] __device__ inline Logistic logistic(float x) {
  const float e = expf(-fabsf(x));
  const float scale = 1.0F / (1.0F + e);
  return {(x < 0.0F ? e : 1.0F) * scale, (x < 0.0F ? 1.0F : e) * scale};
}

/// 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
[[nodiscard]] __device__ inline Logistic gelu_gate(float x) {
  return logistic(2.0F * nn::detail::gelu_slope * (x + nn::detail::gelu_cubic * x * x * x));
}

struct GeluForward {
  float* out;
  const float* x;
  __device__ void operator()(Index i) const {
    const float v = x[i];
    out[i] = v * gelu_gate(v).value;
  }
};

struct GeluBackward {
  float* dx;
  const float* dout;
  const float* x;
  __device__ void operator()(Index i) const {
    const float v = x[i];
    const Logistic gate = gelu_gate(v);
    const float inner =
        2.0F * nn::detail::gelu_slope * (1.0F + 3.0F * nn::detail::gelu_cubic * v * v);
    dx[i] = dout[i] * (gate.value + v * gate.value * gate.complement * inner);
  }
};

struct SwigluForward {
  float* out;
  const float* x;
  Index cols;
  __device__ void operator()(Index r, Index c) const {
    const float gate = x[2 * r * cols + c], up = x[(2 * r + 1) * cols + c];
    out[r * cols + c] = gate * logistic(gate).value * up;
  }
};

struct SwigluBackward {
  float* dx;
  const float* dout;
  const float* x;
  Index cols;
  __device__ void operator()(Index r, Index c) const {
    const Index at_gate = 2 * r * cols + c, at_up = at_gate + cols;
    const float gate = x[at_gate], up = x[at_up], dy = dout[r * cols + c];
    const Logistic sigmoid = logistic(gate);
    dx[at_gate] = dy * up * (sigmoid.value + gate * sigmoid.value * sigmoid.complement);
    dx[at_up] = dy * gate * sigmoid.value;
  }
};

/// One thread a Philox block: the elements of row r whose global index over four is that of the
/// row's first element plus q.
struct Dropout {
  float* out;
  const float* x;
  Index cols;
  float probability;
  RandomKey key;
  nn::GlobalBlock block;

  __device__ void operator()(Index r, Index q) const {
    const Index first = block.element(r, 0);
    nn::detail::DropoutMask mask(key, probability);
    Index c = (first / 4 + q) * 4 - first;
    const Index end = min(c + 4, cols);
    for (c = max(c, Index{0}); c < end; ++c)
      out[r * cols + c] = x[r * cols + c] * mask.factor(first + c);
  }
};

}  // namespace detail

MEGA_LAUNCHES void fill(Stream& stream, Matrix<float> out, float value) {
  detail::for_each_index(stream, "fill", out.size(), detail::Fill{out.data(), value});
}

MEGA_LAUNCHES void add(Stream& stream, Matrix<float> out, Matrix<const float> a,
                       Matrix<const float> b) {
  nn::detail::expects_shape("add", "out", out, a.rows(), a.cols());
  nn::detail::expects_shape("add", "b", b, a.rows(), a.cols());
  detail::for_each_index(stream, "add", out.size(), detail::Add{out.data(), a.data(), b.data()});
}

MEGA_LAUNCHES void scale(Stream& stream, Matrix<float> out, Matrix<const float> x, float factor) {
  nn::detail::expects_shape("scale", "out", out, x.rows(), x.cols());
  detail::for_each_index(stream, "scale", out.size(), detail::Scale{out.data(), x.data(), factor});
}

MEGA_LAUNCHES void bias_add(Stream& stream, Matrix<float> out, Matrix<const float> x,
                            Vector<const float> bias) {
  nn::detail::expects_shape("bias_add", "out", out, x.rows(), x.cols());
  nn::detail::expects_size("bias_add", "bias", bias, x.cols());
  detail::for_each_element(stream, "bias_add", x.rows(), x.cols(),
                           detail::BiasAdd{out.data(), x.data(), bias.data(), x.cols()});
}

MEGA_LAUNCHES void bias_gradient(Stream& stream, Vector<float> dbias, Matrix<const float> dout) {
  nn::detail::expects_size("bias_gradient", "dbias", dbias, dout.cols());
  detail::add_column_sums(stream, "bias_gradient", detail::ColumnTargets<1>{{dbias.data()}},
                          dout.rows(), dout.cols(), detail::RowTerms{dout.data(), dout.cols()});
}

MEGA_LAUNCHES void gelu_tanh_forward(Stream& stream, Matrix<float> out, Matrix<const float> x) {
  nn::detail::expects_shape("gelu_tanh_forward", "out", out, x.rows(), x.cols());
  detail::for_each_index(stream, "gelu_tanh_forward", out.size(),
                         detail::GeluForward{out.data(), x.data()});
}

MEGA_LAUNCHES void gelu_tanh_backward(Stream& stream, Matrix<float> dx, Matrix<const float> dout,
                                      Matrix<const float> x) {
  nn::detail::expects_shape("gelu_tanh_backward", "dx", dx, x.rows(), x.cols());
  nn::detail::expects_shape("gelu_tanh_backward", "dout", dout, x.rows(), x.cols());
  detail::for_each_index(stream, "gelu_tanh_backward", dx.size(),
                         detail::GeluBackward{dx.data(), dout.data(), x.data()});
}

MEGA_LAUNCHES void swiglu_forward(Stream& stream, Matrix<float> out, Matrix<const float> x) {
  nn::detail::expects_shape("swiglu_forward", "x", x, out.rows(), 2 * out.cols());
  detail::for_each_element(stream, "swiglu_forward", out.rows(), out.cols(),
                           detail::SwigluForward{out.data(), x.data(), out.cols()});
}

MEGA_LAUNCHES void swiglu_backward(Stream& stream, Matrix<float> dx, Matrix<const float> dout,
                                   Matrix<const float> x) {
  nn::detail::expects_shape("swiglu_backward", "x", x, dout.rows(), 2 * dout.cols());
  nn::detail::expects_shape("swiglu_backward", "dx", dx, dout.rows(), 2 * dout.cols());
  detail::for_each_element(stream, "swiglu_backward", dout.rows(), dout.cols(),
                           detail::SwigluBackward{dx.data(), dout.data(), x.data(), dout.cols()});
}

MEGA_LAUNCHES void dropout_forward(Stream& stream, Matrix<float> out, Matrix<const float> x,
                                   float probability, RandomKey key, nn::GlobalBlock block) {
  nn::detail::expects_shape("dropout_forward", "out", out, x.rows(), x.cols());
  expects(probability >= 0.0F && probability < 1.0F, ErrorCode::logic, [&] {
    return sentence("dropout_forward: probability is ", probability, ", it must be in [0, 1)");
  });
  expects(block.row_stride >= block.first_column + x.cols() || x.rows() <= 1, ErrorCode::logic,
          [&] {
            return sentence("dropout_forward: row stride ", block.row_stride, " is less than ",
                            block.first_column + x.cols(), ", the end of the block's columns");
          });
  if (probability == 0.0F) {
    if (out.data() != x.data()) cuda::copy(stream, out, x);
    return;
  }
  if (x.empty()) return;
  // A row that begins inside of a Philox block touches one block more.
  detail::for_each_element(
      stream, "dropout_forward", x.rows(), detail::ceil_div(x.cols(), 4) + 1,
      detail::Dropout{out.data(), x.data(), x.cols(), probability, key, block});
}

MEGA_LAUNCHES void dropout_backward(Stream& stream, Matrix<float> dx, Matrix<const float> dout,
                                    float probability, RandomKey key, nn::GlobalBlock block) {
  cuda::dropout_forward(stream, dx, dout, probability, key, block);
}

}  // namespace mega::inline v0::cuda
