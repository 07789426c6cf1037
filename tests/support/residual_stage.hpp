/// @file  The stage of the contract tests: several layers x + tanh(x W) + b, with both forms of
/// backward, written against the contract alone.
#pragma once
#include <mega/core/parameter.hpp>
#include <mega/core/stage.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

namespace mega_test {

using mega::Index;
using mega::Matrix;
using mega::Vector;
using mega::View;

struct ResidualShape {
  Index rows = 3;
  Index width = 5;
  int layers = 4;     ///< of the whole model
  bool tied = false;  ///< the last layer shares the first one's weight
};

/// layers are dealt evenly in order, remainders to the first stages.
template <bool Fused>
class ResidualStage : public mega::UniformStage {
 public:
  struct saved_type {
    View<float, 3> x;   ///< input of each layer
    View<float, 3> t;   ///< tanh of each layer
    View<float, 3> dy;  ///< gradient of each layer's output
    View<float, 3> dz;  ///< gradient before each tanh
  };

  ResidualStage(ResidualShape shape, mega::StagePosition at)
      : UniformStage{shape.rows, shape.width}, shape_(shape) {
    const int base = shape.layers / at.stages, rest = shape.layers % at.stages;
    first_ = at.stage * base + std::min(at.stage, rest);
    count_ = base + (at.stage < rest ? 1 : 0);
  }

  [[nodiscard]] saved_type make_saved(mega::Arena& arena) const {
    return {arena.take<float>(count_ + 1, rows, cols), arena.take<float>(count_, rows, cols),
            arena.take<float>(count_, rows, cols), arena.take<float>(count_, rows, cols)};
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    mega::Arena counting;
    (void)counting.take<float>(rows, cols);
    return counting.used();
  }
  [[nodiscard]] std::vector<mega::Parameter> parameters() const {
    std::vector<mega::Parameter> out;
    for (int l = first_; l < first_ + count_; ++l) {
      const bool tied = shape_.tied && l == shape_.layers - 1 && l > 0;
      out.push_back({.name = "layer." + std::to_string(l) + ".weight",
                     .shape = {cols, cols},
                     .init = {mega::Init::Kind::normal, 0.3F},
                     .tied_to = tied ? "layer.0.weight" : ""});
      out.push_back({.name = "layer." + std::to_string(l) + ".bias",
                     .shape = {cols},
                     .init = {mega::Init::Kind::normal, 0.1F},
                     .decay = false});
    }
    return out;
  }

  void forward(auto& ctx, Matrix<const float> in, Matrix<float> out, saved_type& saved) {
    const auto x = saved.x;
    ctx.stream.run([=, n = count_] {
      std::copy(in.data(), in.data() + in.size(), x.data());
      if (n == 0) std::copy(in.data(), in.data() + in.size(), out.data());
    });
    for (int l = 0; l < count_; ++l) {
      const auto w = weights[static_cast<std::size_t>(2 * l)].value;
      const auto b = weights[static_cast<std::size_t>(2 * l) + 1].value;
      ctx.stream.run([=, t = saved.t, last = l + 1 == count_] {
        const Index n = out.cols();
        for (Index r = 0; r < out.rows(); ++r) {
          for (Index c = 0; c < n; ++c) {
            float z = 0;
            for (Index k = 0; k < n; ++k) z += x(l, r, k) * w(k * n + c);
            t(l, r, c) = std::tanh(z);
            x(l + 1, r, c) = x(l, r, c) + t(l, r, c) + b(c);
            if (last) out(r, c) = x(l + 1, r, c);
          }
        }
      });
    }
  }

  void backward_input(auto& ctx, Matrix<const float> dout, Matrix<float> din,
                      saved_type& saved) requires(!Fused) {
    input_half(ctx, dout, din, saved);
  }
  void backward_weight(auto& ctx, saved_type& saved) requires(!Fused) { weight_half(ctx, saved); }
  void backward(auto& ctx, Matrix<const float> dout, Matrix<float> din,
                saved_type& saved) requires(Fused) {
    input_half(ctx, dout, din, saved);
    weight_half(ctx, saved);
  }

  void loss(auto& ctx, Matrix<float> out, Matrix<const float> target) {
    ctx.stream.run([=, sum = ctx.loss_sum, scale = ctx.loss_scale, train = ctx.training()] {
      for (Index i = 0; i < out.size(); ++i) {
        const float error = out.data()[i] - target.data()[i];
        *sum += 0.5 * static_cast<double>(error) * error;
        if (train) out.data()[i] = error * *scale;
      }
    });
  }

 private:
  void input_half(auto& ctx, Matrix<const float> dout, Matrix<float> din, saved_type& saved) {
    const auto d = ctx.arena.template take<float>(rows, cols);
    ctx.stream.run([=] { std::copy(dout.data(), dout.data() + dout.size(), d.data()); });
    for (int l = count_ - 1; l >= 0; --l) {
      const auto w = weights[static_cast<std::size_t>(2 * l)].value;
      ctx.stream.run([=, t = saved.t, dy = saved.dy, dz = saved.dz] {
        const Index n = d.cols();
        for (Index r = 0; r < d.rows(); ++r) {
          for (Index c = 0; c < n; ++c) {
            dy(l, r, c) = d(r, c);
            dz(l, r, c) = d(r, c) * (1 - t(l, r, c) * t(l, r, c));
          }
          for (Index k = 0; k < n; ++k) {
            float sum = d(r, k);
            for (Index c = 0; c < n; ++c) sum += dz(l, r, c) * w(k * n + c);
            d(r, k) = sum;
          }
        }
      });
    }
    ctx.stream.run([=] {
      if (!din.empty()) std::copy(d.data(), d.data() + d.size(), din.data());
    });
  }

  void weight_half(auto& ctx, saved_type& saved) {
    for (int l = 0; l < count_; ++l) {
      const auto w = weights[static_cast<std::size_t>(2 * l)].gradient;
      const auto b = weights[static_cast<std::size_t>(2 * l) + 1].gradient;
      ctx.stream.run([=, x = saved.x, dy = saved.dy, dz = saved.dz] {
        const Index n = dz.extent(2);
        for (Index k = 0; k < n; ++k) {
          for (Index c = 0; c < n; ++c) {
            float sum = 0;
            for (Index r = 0; r < dz.extent(1); ++r) sum += x(l, r, k) * dz(l, r, c);
            w(k * n + c) += sum;
          }
        }
        for (Index c = 0; c < n; ++c) {
          float sum = 0;
          for (Index r = 0; r < dz.extent(1); ++r) sum += dy(l, r, c);
          b(c) += sum;
        }
      });
    }
  }

  ResidualShape shape_;
  int first_ = 0;
  int count_ = 0;
};

}  // namespace mega_test
