/// @file  The norms of a Transformer as kinds: LayerNorm and RmsNorm, one interface.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/norm.hpp>

#include <string_view>

namespace mega::inline v0::nn {

/// Parameters of a norm. A kind without a bias leaves it empty.
struct NormWeights {
  ParameterView<float> weight;
  ParameterView<float> bias;
};

// A norm kind has: name; has_bias; Saved, what its backward needs besides x, made by make_saved();
// forward, backward_input (dx may be dout) and backward_weight (adds to the accumulators).

struct LayerNorm {
  static constexpr std::string_view name = "layer_norm";
  static constexpr bool has_bias = true;

  struct Saved {
    Vector<float> mean;
    Vector<float> rstd;
  };
  [[nodiscard]] static Saved make_saved(Arena& arena, Index rows) {
    return {arena.take<float>(rows), arena.take<float>(rows)};
  }

  template <class S>
  static void forward(S& stream, Matrix<float> out, const Saved& saved, Matrix<const float> x,
                      const NormWeights& w, float epsilon) {
    layer_norm_forward(stream, out, saved.mean, saved.rstd, x, w.weight.value, w.bias.value,
                       epsilon);
  }
  template <class S>
  static void backward_input(S& stream, Matrix<float> dx, Matrix<const float> dout,
                             Matrix<const float> x, const Saved& saved, const NormWeights& w) {
    layer_norm_backward_input(stream, dx, dout, x, w.weight.value, saved.mean, saved.rstd);
  }
  template <class S>
  static void backward_weight(S& stream, const NormWeights& w, Matrix<const float> dout,
                              Matrix<const float> x, const Saved& saved) {
    layer_norm_backward_weight(stream, w.weight.gradient, w.bias.gradient, dout, x, saved.mean,
                               saved.rstd);
  }
};

struct RmsNorm {
  static constexpr std::string_view name = "rms_norm";
  static constexpr bool has_bias = false;

  struct Saved {
    Vector<float> rstd;
  };
  [[nodiscard]] static Saved make_saved(Arena& arena, Index rows) {
    return {arena.take<float>(rows)};
  }

  template <class S>
  static void forward(S& stream, Matrix<float> out, const Saved& saved, Matrix<const float> x,
                      const NormWeights& w, float epsilon) {
    rms_norm_forward(stream, out, saved.rstd, x, w.weight.value, epsilon);
  }
  template <class S>
  static void backward_input(S& stream, Matrix<float> dx, Matrix<const float> dout,
                             Matrix<const float> x, const Saved& saved, const NormWeights& w) {
    rms_norm_backward_input(stream, dx, dout, x, w.weight.value, saved.rstd);
  }
  template <class S>
  static void backward_weight(S& stream, const NormWeights& w, Matrix<const float> dout,
                              Matrix<const float> x, const Saved& saved) {
    rms_norm_backward_weight(stream, w.weight.gradient, dout, x, saved.rstd);
  }
};

}  // namespace mega::inline v0::nn
