/// @file  The activation function between the two products of an MLP, as kinds.
#pragma once
#include <mega/core/view.hpp>
#include <mega/nn/elementwise.hpp>

#include <string_view>

namespace mega::inline v0::nn {

// An activation kind has: name; inputs, the number of equal parts side by side in its operand
// [rows, inputs * ffn]; forward to [rows, ffn]; backward, whose dx may be x.

struct GeluTanh {
  static constexpr std::string_view name = "gelu_tanh";
  static constexpr int inputs = 1;

  template <class S>
  static void forward(S& stream, Matrix<float> out, Matrix<const float> x) {
    gelu_tanh_forward(stream, out, x);
  }
  template <class S>
  static void backward(S& stream, Matrix<float> dx, Matrix<const float> dout,
                       Matrix<const float> x) {
    gelu_tanh_backward(stream, dx, dout, x);
  }
};

/// silu(gate) * up with gate and up side by side.
struct Swiglu {
  static constexpr std::string_view name = "swiglu";
  static constexpr int inputs = 2;

  template <class S>
  static void forward(S& stream, Matrix<float> out, Matrix<const float> x) {
    swiglu_forward(stream, out, x);
  }
  template <class S>
  static void backward(S& stream, Matrix<float> dx, Matrix<const float> dout,
                       Matrix<const float> x) {
    swiglu_backward(stream, dx, dout, x);
  }
};

}  // namespace mega::inline v0::nn
