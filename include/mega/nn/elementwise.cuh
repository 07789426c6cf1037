/// @file  Operations on single elements, and the bias with its column sums, on a GPU. The host
/// twins in nn/elementwise.hpp say what each operation does.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/activations.cuh>
#include <mega/nn/detail/dropout_mask.hpp>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/elementwise.hpp>

#include <type_traits>

namespace mega::inline v0::cuda {

namespace detail {

template <storage T>
struct Fill {
  T* out;
  float value;
  template <int W>
  __device__ void at(Index, Index i) const {
    float x[W];
    for (int w = 0; w < W; ++w) x[w] = value;
    store_pack(out + i, x);
  }
};

struct Plus {
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Times {
  float factor;
  __device__ float operator()(float x) const { return factor * x; }
};

/// x += branch + bias, rounded as it will be stored. bias may be null.
template <storage T, int W>
__device__ void add_branch_pack(float (&x)[W], const float (&branch)[W], const T* bias) {
  float b[W] = {};
  if (bias != nullptr) load_constant(b, bias);
#pragma unroll
  for (int w = 0; w < W; ++w) x[w] = x[w] + (bias != nullptr ? branch[w] + b[w] : branch[w]);
  round_pack<T>(x);
}

template <storage T>
struct AddBranch {
  T* y;
  const T* x;
  const T* branch;
  const T* bias;
  Index cols;
  template <int W>
  __device__ void at(Index r, Index c) const {
    float sum[W], b[W];
    load_pack(sum, x + r * cols + c);
    load_pack(b, branch + r * cols + c);
    add_branch_pack(sum, b, bias == nullptr ? nullptr : bias + c);
    store_pack(y + r * cols + c, sum);
  }
};

template <storage T>
struct BiasAdd {
  T* out;
  const T* x;
  const T* bias;
  Index cols;
  template <int W>
  __device__ void at(Index r, Index c) const {
    float sum[W], b[W];
    load_pack(sum, x + r * cols + c);
    load_constant(b, bias + c);
    for (int w = 0; w < W; ++w) sum[w] += b[w];
    store_pack(out + r * cols + c, sum);
  }
};

template <storage T>
struct RowTerms {
  const T* dout;
  Index cols;
  template <int W>
  using Operands = RawPack<T, W>;
  template <int W>
  __device__ Operands<W> load(Index r, Index c) const {
    return load_raw<W>(dout + r * cols + c);
  }
  template <int W>
  __device__ void finish(Index, Index, const Operands<W>& operands, float (&term)[1][W]) const {
    unpack(term[0], operands);
  }
};

/// One thread a Philox block: the elements of row r whose global index over four is that of the
/// row's first element plus q.
template <storage T>
struct Dropout {
  T* out;
  const T* x;
  Index cols;
  float probability;
  RandomSite key;
  nn::GlobalBlock block;

  __device__ void operator()(Index r, Index q) const {
    const Index first = block.element(r, 0);
    nn::detail::DropoutMask mask(key.read(), probability);
    Index c = (first / 4 + q) * 4 - first;
    const Index end = min(c + 4, cols);
    for (c = max(c, Index{0}); c < end; ++c)
      out[r * cols + c] = T(x[r * cols + c] * mask.factor(first + c));
  }
  /// The same where every row begins with a Philox block.
  template <int W>
  __device__ void at(Index r, Index c) const {
    static_assert(W == 4);
    nn::detail::DropoutMask mask(key.read(), probability);
    float v[W];
    load_pack(v, x + r * cols + c);
#pragma unroll
    for (int w = 0; w < W; ++w) v[w] *= mask.factor(block.element(r, c) + w);
    store_pack(out + r * cols + c, v);
  }
};

}  // namespace detail

template <storage T>
void fill(Stream& stream, Matrix<T> out, float value) {
  const Index n = out.size();
  detail::with_width<T>(
      detail::packs_fit(out.data(), n), [&]<int W>(std::integral_constant<int, W>) {
        detail::for_each_pack<W>(stream, "fill", 1, n, detail::Fill<T>{out.data(), value});
      });
}

template <storage T>
void add(Stream& stream, Matrix<T> out, Matrix<const std::type_identity_t<T>> a,
         Matrix<const std::type_identity_t<T>> b) {
  nn::detail::expects_shape("add", "out", out, a.rows(), a.cols());
  nn::detail::expects_shape("add", "b", b, a.rows(), a.cols());
  detail::map<2>(stream, "add", out.size(), out.data(), a.data(), b.data(), detail::Plus{});
}

/// y = x + (branch + branch_bias), the residual connection. branch_bias may be empty. y may be x or
/// branch. Float gives the bits of the host twin.
template <storage T>
void add_branch(Stream& stream, Matrix<T> y, Matrix<const std::type_identity_t<T>> x,
                Matrix<const std::type_identity_t<T>> branch,
                Vector<const std::type_identity_t<T>> branch_bias) {
  nn::detail::expects_shape("add_branch", "y", y, x.rows(), x.cols());
  nn::detail::expects_shape("add_branch", "branch", branch, x.rows(), x.cols());
  if (!branch_bias.empty())
    nn::detail::expects_size("add_branch", "branch_bias", branch_bias, x.cols());
  const T* const bias = branch_bias.empty() ? nullptr : branch_bias.data();
  const detail::AddBranch<T> body{y.data(), x.data(), branch.data(), bias, x.cols()};
  detail::with_width<T>(detail::all_packs_fit(x.cols(), body.y, body.x, body.branch, body.bias),
                        [&]<int W>(std::integral_constant<int, W>) {
                          detail::for_each_pack<W>(stream, "add_branch", x.rows(), x.cols(), body);
                        });
}

template <storage T>
void scale(Stream& stream, Matrix<T> out, Matrix<const std::type_identity_t<T>> x, float factor) {
  nn::detail::expects_shape("scale", "out", out, x.rows(), x.cols());
  detail::map<1>(stream, "scale", out.size(), out.data(), x.data(), x.data(),
                 detail::Times{factor});
}

template <storage T>
void bias_add(Stream& stream, Matrix<T> out, Matrix<const std::type_identity_t<T>> x,
              Vector<const std::type_identity_t<T>> bias) {
  nn::detail::expects_shape("bias_add", "out", out, x.rows(), x.cols());
  nn::detail::expects_size("bias_add", "bias", bias, x.cols());
  const detail::BiasAdd<T> body{out.data(), x.data(), bias.data(), x.cols()};
  detail::with_width<T>(detail::all_packs_fit(x.cols(), body.out, body.x, body.bias),
                        [&]<int W>(std::integral_constant<int, W>) {
                          detail::for_each_pack<W>(stream, "bias_add", x.rows(), x.cols(), body);
                        });
}

/// @tparam E  element of dout: a storage, const or not
template <class E>
requires storage<std::remove_const_t<E>>
void bias_gradient(Stream& stream, Vector<float> dbias, Matrix<E> dout) {
  using T = std::remove_const_t<E>;
  nn::detail::expects_size("bias_gradient", "dbias", dbias, dout.cols());
  const detail::RowTerms<T> terms{dout.data(), dout.cols()};
  detail::with_width<T>(detail::packs_fit(terms.dout, dout.cols()),
                        [&]<int W>(std::integral_constant<int, W>) {
                          detail::add_column_sums<W>(stream, "bias_gradient",
                                                     detail::ColumnTargets<1>{{dbias.data()}},
                                                     dout.rows(), dout.cols(), terms);
                        });
}

template <storage T>
void gelu_tanh_forward(Stream& stream, Matrix<T> out, Matrix<const std::type_identity_t<T>> x) {
  nn::detail::expects_shape("gelu_tanh_forward", "out", out, x.rows(), x.cols());
  detail::map<1>(stream, "gelu_tanh_forward", out.size(), out.data(), x.data(), x.data(),
                 detail::GeluForward<T>{});
}

template <storage T>
void gelu_tanh_backward(Stream& stream, Matrix<T> dx, Matrix<const std::type_identity_t<T>> dout,
                        Matrix<const std::type_identity_t<T>> x) {
  nn::detail::expects_shape("gelu_tanh_backward", "dx", dx, x.rows(), x.cols());
  nn::detail::expects_shape("gelu_tanh_backward", "dout", dout, x.rows(), x.cols());
  detail::map<2>(stream, "gelu_tanh_backward", dx.size(), dx.data(), dout.data(), x.data(),
                 detail::GeluBackward<T>{});
}

/// As gelu_tanh_backward(), and dbias += column sums of dx as stored, in the same pass over memory.
/// dx may be dout or x.
template <storage T>
void gelu_tanh_backward_bias(Stream& stream, Matrix<T> dx, Vector<float> dbias,
                             Matrix<const std::type_identity_t<T>> dout,
                             Matrix<const std::type_identity_t<T>> x) {
  constexpr auto op = "gelu_tanh_backward_bias";
  nn::detail::expects_shape(op, "dx", dx, x.rows(), x.cols());
  nn::detail::expects_shape(op, "dout", dout, x.rows(), x.cols());
  nn::detail::expects_size(op, "dbias", dbias, x.cols());
  const detail::GeluBackwardTerms<T> terms{dx.data(), dout.data(), x.data(), x.cols()};
  detail::with_width<T>(
      detail::all_packs_fit(x.cols(), terms.dout, terms.x) && detail::packs_fit(terms.dx, x.cols()),
      [&]<int W>(std::integral_constant<int, W>) {
        detail::add_column_sums<W>(stream, op, detail::ColumnTargets<1>{{dbias.data()}}, x.rows(),
                                   x.cols(), terms);
      });
}

template <storage T>
void swiglu_forward(Stream& stream, Matrix<T> out, Matrix<const std::type_identity_t<T>> x) {
  nn::detail::expects_shape("swiglu_forward", "x", x, out.rows(), 2 * out.cols());
  const detail::SwigluForward<T> body{out.data(), x.data(), out.cols()};
  detail::with_width<T>(detail::all_packs_fit(out.cols(), body.out, body.x),
                        [&]<int W>(std::integral_constant<int, W>) {
                          detail::for_each_pack<W>(stream, "swiglu_forward", out.rows(), out.cols(),
                                                   body);
                        });
}

template <storage T>
void swiglu_backward(Stream& stream, Matrix<T> dx, Matrix<const std::type_identity_t<T>> dout,
                     Matrix<const std::type_identity_t<T>> x) {
  nn::detail::expects_shape("swiglu_backward", "x", x, dout.rows(), 2 * dout.cols());
  nn::detail::expects_shape("swiglu_backward", "dx", dx, dout.rows(), 2 * dout.cols());
  const detail::SwigluBackward<T> body{dx.data(), dout.data(), x.data(), dout.cols()};
  detail::with_width<T>(detail::all_packs_fit(dout.cols(), body.dx, body.dout, body.x),
                        [&]<int W>(std::integral_constant<int, W>) {
                          detail::for_each_pack<W>(stream, "swiglu_backward", dout.rows(),
                                                   dout.cols(), body);
                        });
}

template <storage T>
void dropout_forward(Stream& stream, Matrix<T> out, Matrix<const std::type_identity_t<T>> x,
                     float probability, RandomSite key, nn::GlobalBlock block) {
  constexpr auto op = "dropout_forward";
  nn::detail::expects_shape(op, "out", out, x.rows(), x.cols());
  expects(probability >= 0.0F && probability < 1.0F, ErrorCode::logic,
          [&] { return sentence(op, ": probability is ", probability, ", it must be in [0, 1)"); });
  expects(block.row_stride >= block.first_column + x.cols() || x.rows() <= 1, ErrorCode::logic,
          [&] {
            return sentence(op, ": row stride ", block.row_stride, " is less than ",
                            block.first_column + x.cols(), ", the end of the block's columns");
          });
  if (probability == 0.0F) {
    if (out.data() != x.data()) cuda::copy(stream, out, x);
    return;
  }
  if (x.empty()) return;
  const detail::Dropout<T> body{out.data(), x.data(), x.cols(), probability, key, block};
  if (block.element(0, 0) % 4 == 0 && block.row_stride % 4 == 0 && x.cols() % 4 == 0 &&
      detail::all_packs_fit(Index{0}, body.out, body.x)) {
    detail::for_each_pack<4>(stream, op, x.rows(), x.cols(), body);
  } else {
    // A row that begins inside of a Philox block touches one block more.
    detail::for_each_element(stream, op, x.rows(), detail::ceil_div(x.cols(), 4) + 1, body);
  }
}

template <storage T>
void dropout_backward(Stream& stream, Matrix<T> dx, Matrix<const std::type_identity_t<T>> dout,
                      float probability, RandomSite key, nn::GlobalBlock block) {
  cuda::dropout_forward(stream, dx, dout, probability, key, block);
}

}  // namespace mega::inline v0::cuda
