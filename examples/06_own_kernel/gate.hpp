/// @file  A stage with operations of its own, for any device. Here: the stage, and its operations
/// on the host. Their twins for a GPU are in gate.cuh.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/config.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/stage.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/loss_sum.hpp>

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

namespace example {

using mega::Index, mega::Matrix, mega::Vector;
inline constexpr Index samples = 8, width = 300;

/// The arithmetic of one element, once for hosts and GPUs.
MEGA_HD inline float gate(float x, float w) {
  return x + std::tanh(w * x);
}
/// The gradient of tanh(w x) before it goes to x and to w.
MEGA_HD inline float gate_slope(float dy, float x, float w) {
  const float t = std::tanh(w * x);
  return dy * (1 - t * t);
}

/// y = x + tanh(w x), one weight a column.   @sync  ordered on stream
template <mega::host::host_stream S>
void gate_forward(S& stream, Matrix<float> y, Matrix<const float> x, Vector<const float> w) {
  stream.run([=] {
    for (Index r = 0; r < y.rows(); ++r)
      for (Index c = 0; c < y.cols(); ++c) y(r, c) = gate(x(r, c), w(c));
  });
}

/// Adds the weights' gradient to dw, and writes that of x to dx unless it is empty.
template <mega::host::host_stream S>
void gate_backward(S& stream, Matrix<float> dx, Vector<float> dw, Matrix<const float> dy,
                   Matrix<const float> x, Vector<const float> w) {
  stream.run([=] {
    for (Index c = 0; c < x.cols(); ++c)
      for (Index r = 0; r < x.rows(); ++r) {
        const float slope = gate_slope(dy(r, c), x(r, c), w(c));
        dw(c) += slope * x(r, c);
        if (!dx.empty()) dx(r, c) = dy(r, c) + slope * w(c);
      }
  });
}

/// losses(r) = half the squared distance of y's row to its target; y becomes its gradient times
/// *scale, which is device memory.
template <mega::host::host_stream S>
void squared_error(S& stream, Vector<double> losses, Matrix<float> y, Matrix<const float> target,
                   const float* scale) {
  stream.run([=] {
    for (Index r = 0; r < y.rows(); ++r) {
      losses(r) = 0;
      for (Index c = 0; c < y.cols(); ++c) {
        const float error = y(r, c) - target(r, c);
        losses(r) += 0.5 * error * error;
        y(r, c) = error * *scale;
      }
    }
  });
}

/// Its calls are unqualified, so the type of ctx.stream picks the overload: those above for the
/// host's streams, those of namespace mega::cuda for a GPU's.
struct Gate : mega::UniformStage {
  using saved_type = Matrix<const float>;
  int number;
  explicit Gate(mega::StagePosition at) : UniformStage{samples, width}, number(at.stage) {}

  [[nodiscard]] saved_type make_saved(mega::Arena&) const { return {}; }
  [[nodiscard]] std::vector<mega::Parameter> parameters() const {
    return {{.name = "gate" + std::to_string(number), .shape = {width}}};
  }
  /// Of loss().
  [[nodiscard]] std::size_t workspace_bytes() const {
    mega::Arena counting;
    (void)counting.take<double>(rows);
    return counting.used();
  }
  void forward(auto& ctx, Matrix<const float> x, Matrix<float> y, saved_type& saved) {
    saved = x;
    gate_forward(ctx.stream, y, x, weights[0].value);
  }
  void backward(auto& ctx, Matrix<const float> dy, Matrix<float> dx, saved_type& x) {
    gate_backward(ctx.stream, dx, weights[0].gradient, dy, x, weights[0].value);
  }
  void loss(auto& ctx, Matrix<float> y, Matrix<const float> target) {
    using mega::nn::add_loss_parts;  // one of the library's: on a GPU, too, its stream finds the
                                     // twin
    const Vector<double> losses = ctx.arena.template take<double>(rows);
    squared_error(ctx.stream, losses, y, target, ctx.loss_scale);
    add_loss_parts(ctx.stream, Vector<double>(ctx.loss_sum, 1), losses);
  }
};

}  // namespace example
