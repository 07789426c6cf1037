/// @file  The stage of the first example, for the examples that vary something else.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/stage.hpp>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace example {

using mega::Index;
using mega::Matrix;
inline constexpr Index samples = 8, width = 16;

/// y = x + tanh(w x), one weight a column, squared error.
struct Gate : mega::UniformStage {
  using saved_type = Matrix<const float>;
  int number;
  explicit Gate(mega::StagePosition at) : UniformStage{samples, width}, number(at.stage) {}

  [[nodiscard]] saved_type make_saved(mega::Arena&) const { return {}; }
  [[nodiscard]] std::vector<mega::Parameter> parameters() const {
    return {{.name = "gate" + std::to_string(number), .shape = {width}}};
  }
  void forward(auto& ctx, Matrix<const float> x, Matrix<float> y, saved_type& saved) {
    saved = x;
    ctx.stream.run([x, y, w = weights[0].value] {
      for (Index r = 0; r < samples; ++r)
        for (Index c = 0; c < width; ++c) y(r, c) = x(r, c) + std::tanh(w(c) * x(r, c));
    });
  }
  void backward(auto& ctx, Matrix<const float> dy, Matrix<float> dx, saved_type& x) {
    ctx.stream.run([dy, dx, x, w = weights[0]] {
      for (Index r = 0; r < samples; ++r)
        for (Index c = 0; c < width; ++c) {
          const float t = std::tanh(w.value(c) * x(r, c)), dz = dy(r, c) * (1 - t * t);
          w.gradient(c) += dz * x(r, c);
          if (!dx.empty()) dx(r, c) = dy(r, c) + dz * w.value(c);
        }
    });
  }
  void loss(auto& ctx, Matrix<float> y, Matrix<const float> target) {
    ctx.stream.run([y, target, sum = ctx.loss_sum, scale = ctx.loss_scale] {
      for (Index i = 0; i < y.size(); ++i) {
        const float error = y.data()[i] - target.data()[i];
        *sum += 0.5 * error * error;
        y.data()[i] = error * *scale;
      }
    });
  }
};

/// Element i of the data: a number and its half.
inline std::pair<float, float> halve(Index i) {
  const float x = mega::RandomKey{1}.uniform(i) - 0.5F;
  return {x, x / 2};
}

}  // namespace example
