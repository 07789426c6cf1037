/// @file  The norms of a Transformer as kinds: LayerNorm and RmsNorm, one interface.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/norm.hpp>

#include <string_view>
#include <type_traits>

namespace mega::inline v0::nn {

/// Parameters of a norm. A kind without a bias leaves it empty.
template <class T>
struct NormWeights {
  ParameterView<T> weight;
  ParameterView<T> bias;
};

// A norm kind has: name; has_bias; Saved, what its backward needs besides x, made by make_saved();
// forward; add_forward, which adds a branch to the residual stream first and leaves the same bits
// in out as forward would on y; backward, which adds to the accumulators and gives
// dx = dy + the gradient of out's operand, dy being empty where nothing else flows back, and to
// dbranch_bias, where that is not empty, the column sums of dx.

template <class T>
using In = Matrix<const std::type_identity_t<T>>;

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

  template <class S, class T>
  static void forward(S& stream, Matrix<T> out, const Saved& saved, In<T> x,
                      const NormWeights<T>& w, float epsilon) {
    layer_norm_forward(stream, out, saved.mean, saved.rstd, x, w.weight.value, w.bias.value,
                       epsilon);
  }
  template <class S, class T>
  static void add_forward(S& stream, Matrix<T> y, Matrix<T> out, const Saved& saved, In<T> x,
                          In<T> branch, Vector<const std::type_identity_t<T>> branch_bias,
                          const NormWeights<T>& w, float epsilon) {
    add_layer_norm_forward(stream, y, out, saved.mean, saved.rstd, x, branch, branch_bias,
                           w.weight.value, w.bias.value, epsilon);
  }
  template <class S, class T>
  static void backward(S& stream, Matrix<T> dx, const NormWeights<T>& w, In<T> dy, In<T> dout,
                       In<T> x, const Saved& saved, Vector<float> dbranch_bias) {
    layer_norm_backward(stream, dx, w.weight.gradient, w.bias.gradient, dy, dout, x, w.weight.value,
                        saved.mean, saved.rstd, dbranch_bias);
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

  template <class S, class T>
  static void forward(S& stream, Matrix<T> out, const Saved& saved, In<T> x,
                      const NormWeights<T>& w, float epsilon) {
    rms_norm_forward(stream, out, saved.rstd, x, w.weight.value, epsilon);
  }
  template <class S, class T>
  static void add_forward(S& stream, Matrix<T> y, Matrix<T> out, const Saved& saved, In<T> x,
                          In<T> branch, Vector<const std::type_identity_t<T>> branch_bias,
                          const NormWeights<T>& w, float epsilon) {
    add_rms_norm_forward(stream, y, out, saved.rstd, x, branch, branch_bias, w.weight.value,
                         epsilon);
  }
  template <class S, class T>
  static void backward(S& stream, Matrix<T> dx, const NormWeights<T>& w, In<T> dy, In<T> dout,
                       In<T> x, const Saved& saved, Vector<float> dbranch_bias) {
    rms_norm_backward(stream, dx, w.weight.gradient, dy, dout, x, w.weight.value, saved.rstd,
                      dbranch_bias);
  }
};

/// The norm that opens a block, as the block before it sees it: what it is made of and where its
/// results go.
template <class Norm, class T>
struct NormEntry {
  const NormWeights<T>* weights = nullptr;
  typename Norm::Saved saved = {};
  Matrix<T> normed = {};
  float epsilon = 0;
};

}  // namespace mega::inline v0::nn
