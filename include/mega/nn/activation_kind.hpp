/// @file  The activation function between the two products of an MLP, as kinds.
#pragma once
#include <mega/core/view.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/product.hpp>

#include <string_view>
#include <type_traits>

namespace mega::inline v0::nn {

// An activation kind has: name; inputs, the number of equal parts side by side in its operand
// [rows, inputs * ffn]; forward to [rows, ffn]; backward, whose dx may be x and which adds the
// column sums of dx to dbias where that is not empty; joins_product, and where that is true
// backward_from, which has a product make dx from the gradient behind it, if the sizes admit it.

struct GeluTanh {
  static constexpr std::string_view name = "gelu_tanh";
  static constexpr int inputs = 1;

  template <class S, class T>
  static void forward(S& stream, Matrix<T> out, Matrix<const std::type_identity_t<T>> x) {
    gelu_tanh_forward(stream, out, x);
  }
  template <class S, class T>
  static void backward(S& stream, Matrix<T> dx, Vector<float> dbias,
                       Matrix<const std::type_identity_t<T>> dout,
                       Matrix<const std::type_identity_t<T>> x) {
    if (dbias.empty()) {
      gelu_tanh_backward(stream, dx, dout, x);
    } else {
      gelu_tanh_backward_bias(stream, dx, dbias, dout, x);
    }
  }

  template <class Product, class S>
  static constexpr bool joins_product = fuses_gelu_backward<Product, S>;

  /// dx = (dout W) * gelu'(x) with W [dout.cols(), x.cols()].
  template <class Product, class S, class T>
  static bool backward_from(S& stream, Matrix<T> dx, Vector<float> dbias,
                            Matrix<const std::type_identity_t<T>> dout,
                            Vector<const std::type_identity_t<T>> weight,
                            Matrix<const std::type_identity_t<T>> x) {
    if (!Product::fuses_rows_of(dout.cols()) || !Product::fuses_rows_of(x.cols())) return false;
    Product::gemm_dgelu(stream, Transpose::no, Transpose::no, x.rows(), x.cols(), dout.cols(),
                        dout.data(), dout.cols(), weight.data(), x.cols(), x.data(), dx.data(),
                        x.cols());
    if (!dbias.empty()) bias_gradient(stream, dbias, Matrix<const T>(dx));
    return true;
  }
};

/// silu(gate) * up with gate and up side by side.
struct Swiglu {
  static constexpr std::string_view name = "swiglu";
  static constexpr int inputs = 2;

  template <class, class>
  static constexpr bool joins_product = false;

  template <class S, class T>
  static void forward(S& stream, Matrix<T> out, Matrix<const std::type_identity_t<T>> x) {
    swiglu_forward(stream, out, x);
  }
  template <class S, class T>
  static void backward(S& stream, Matrix<T> dx, Vector<float> dbias,
                       Matrix<const std::type_identity_t<T>> dout,
                       Matrix<const std::type_identity_t<T>> x) {
    swiglu_backward(stream, dx, dout, x);
    if (!dbias.empty()) bias_gradient(stream, dbias, Matrix<const T>(dx));
  }
};

}  // namespace mega::inline v0::nn
