/// @file  The activation function between the two products of an MLP, as kinds.
#pragma once
#include <mega/core/view.hpp>
#include <mega/nn/elementwise.hpp>

#include <string_view>
#include <type_traits>

namespace mega::inline v0::nn {

// An activation kind has: name; inputs, the number of equal parts side by side in its operand
// [rows, inputs * ffn]; forward to [rows, ffn]; backward, whose dx may be x and which adds the
// column sums of dx to dbias where that is not empty.

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
};

/// silu(gate) * up with gate and up side by side.
struct Swiglu {
  static constexpr std::string_view name = "swiglu";
  static constexpr int inputs = 2;

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
