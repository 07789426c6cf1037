/// @file  y = x + dropout(W_out core(W_in norm(x))): both halves of a Transformer layer.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/context.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/norm_kind.hpp>
#include <mega/nn/tensor_parallel.hpp>
#include <mega/nn/transformer_config.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

namespace mega::inline v0::nn {

/// Whether forward runs for the first time, or for backward, which wants its results back.
enum class Pass : std::uint8_t { first, again };

/// Shows a tensor to the probe once; lets the injector disturb it each time, so that what is
/// computed again is what was computed first.
template <class Ctx>
void expose(Ctx& ctx, std::string_view name, Matrix<float> values, Pass pass) {
  if (pass == Pass::first) {
    ctx.expose(name, values);
  } else {
    ctx.hooks.injector.disturb(ctx.stream, name, values);
  }
}

/// Memory that the blocks of a call use one after the other.
struct BlockScratch {
  Vector<float> frequencies;  ///< of rotary positions
  Matrix<float> normed;       ///< [rows, hidden]: gathered, or recomputed
  Matrix<float> partial;      ///< [rows, hidden]: products before their sum over the ranks
  Matrix<float> core_out;     ///< [rows, widest recomputable core]
  Matrix<float> dcore_out;    ///< [rows, widest core]; backward only
};

/// Weights of the two products; a bias may be absent.
struct BlockWeights {
  NormWeights norm;
  ParameterView<float> in, in_bias, out, out_bias;
};

/// x and y are [own rows, hidden] of the residual stream; the core works on all rows.
template <class Spec, class Core, class Product>
class ResidualBlock {
  using Norm = typename Spec::norm;

 public:
  /// What backward needs besides x. Left empty, and made again, under selective recomputation:
  /// normed and the output of a recomputable core.
  struct Saved {
    typename Norm::Saved norm;
    Matrix<float> normed;
    Matrix<float> inner;
    typename Core::Saved core;
    Matrix<float> core_out;
  };

  /// Gradients between the two halves of backward: of the outputs of both products, all rows.
  struct Gradients {
    Matrix<float> inner;
    Matrix<float> out;
  };

  ResidualBlock(const TransformerConfig& config, const TransformerRun& run, int tensor_rank,
                int tensor_degree, int layer)
      : core_(config, run, tensor_rank, tensor_degree, static_cast<std::uint32_t>(layer)),
        hidden_(config.hidden),
        epsilon_(config.norm_epsilon),
        dropout_(config.dropout.residual),
        sequence_(run.sequence),
        layer_(static_cast<std::uint32_t>(layer)),
        prefix_(sentence("layers.", layer, ".", Core::name)),
        exposed_(sentence("layers.", layer, ".", Core::exposed_name)) {}

  [[nodiscard]] const Core& core() const noexcept { return core_; }

  /// visit(Parameter, ParameterView<float>&) for each parameter, in order. `self` may be const.
  template <class Self, class Visit>
  static void for_each_parameter(Self& self, const TransformerConfig& config, bool partial,
                                 const Visit& visit) {
    auto& w = self.weights_;
    const std::string& prefix = self.prefix_;
    const Init normal{Init::Kind::normal, config.init_deviation};
    // The residual stream sums up 2 * layers blocks; this keeps its variance independent of depth.
    const Init residual{
        Init::Kind::normal,
        config.init_deviation / std::sqrt(2.0F * static_cast<float>(config.layers))};
    visit(replicated_vector(prefix + ".norm.weight", config.hidden, {Init::Kind::ones}, partial),
          w.norm.weight);
    if constexpr (Norm::has_bias)
      visit(replicated_vector(prefix + ".norm.bias", config.hidden, {}, partial), w.norm.bias);
    const std::string in = sentence(prefix, ".", Core::in_name);
    visit(column_parallel_weight(in + ".weight", Core::in_parts(config), config.hidden, normal),
          w.in);
    if constexpr (Spec::has_bias)
      visit(column_parallel_bias(in + ".bias", Core::in_parts(config)), w.in_bias);
    const std::string out = sentence(prefix, ".", Core::out_name);
    visit(row_parallel_weight(out + ".weight", config.hidden, Core::out_inputs(config), residual),
          w.out);
    if constexpr (Spec::has_bias)
      visit(replicated_vector(out + ".bias", config.hidden, {}, partial), w.out_bias);
  }

  template <class Region>
  [[nodiscard]] Saved make_saved(Arena& arena, const Region& region, bool selective) const {
    Saved saved;
    saved.norm = Norm::make_saved(arena, region.own_rows());
    if (!selective) saved.normed = arena.take<float>(region.own_rows(), hidden_);
    saved.inner = arena.take<float>(region.rows(), core_.inner_width());
    saved.core = core_.make_saved(arena);
    if (!selective || !Core::recomputable)
      saved.core_out = arena.take<float>(region.rows(), core_.out_width());
    return saved;
  }

  template <class Region>
  [[nodiscard]] Gradients make_gradients(Arena& arena, const Region& region) const {
    return {arena.take<float>(region.rows(), core_.inner_width()),
            arena.take<float>(region.rows(), hidden_)};
  }

  /// y may be x.
  template <class Ctx, class Region>
  void forward(Ctx& ctx, const Region& region, Matrix<const float> x, Matrix<float> y,
               const Saved& saved, const BlockScratch& scratch, Pass pass) const {
    const auto span = ctx.span(Core::name);
    const Matrix<const float> core_out = run_core(ctx, region, x, saved, scratch, pass);
    Linear<Product>::forward(ctx.stream, scratch.partial, core_out, weights_.out.value);
    const Matrix<float> sum = region.reduce(ctx.stream, scratch.partial);
    // Each rank adds the bias to what is already summed.
    if constexpr (Spec::has_bias) bias_add(ctx.stream, sum, sum, weights_.out_bias.value);
    dropout_forward(ctx.stream, sum, sum, probability(ctx), random(ctx), place(ctx, region));
    add(ctx.stream, y, x, sum);
  }

  /// The part of forward that fills saved.
  template <class Ctx, class Region>
  void forward_to_core(Ctx& ctx, const Region& region, Matrix<const float> x, const Saved& saved,
                       const BlockScratch& scratch, Pass pass) const {
    const auto span = ctx.span(Core::name);
    run_core(ctx, region, x, saved, scratch, pass);
  }

  /// dx from dy, and the gradients of biases and norms. dx may be dy.
  template <class Ctx, class Region>
  void backward_input(Ctx& ctx, const Region& region, Matrix<const float> dy, Matrix<float> dx,
                      Matrix<const float> x, const Saved& saved, const Gradients& gradients,
                      const BlockScratch& scratch) const {
    const auto span = ctx.span(Core::name);
    const Matrix<float> dout = region.own(gradients.out);
    dropout_backward(ctx.stream, dout, dy, probability(ctx), random(ctx), place(ctx, region));
    if constexpr (Spec::has_bias) bias_gradient(ctx.stream, weights_.out_bias.gradient, dout);
    region.gather(ctx.stream, gradients.out, dout);

    const Matrix<float> dcore(scratch.dcore_out.data(), region.rows(), core_.out_width());
    Linear<Product>::backward_input(ctx.stream, dcore, gradients.out, weights_.out.value);
    core_.backward(ctx, gradients.inner, dcore, saved.inner, saved.core_out, saved.core,
                   scratch.frequencies);
    if constexpr (Spec::has_bias)
      bias_gradient(ctx.stream, weights_.in_bias.gradient, gradients.inner);

    Linear<Product>::backward_input(ctx.stream, scratch.partial, gradients.inner,
                                    weights_.in.value);
    const Matrix<float> dnormed = region.reduce(ctx.stream, scratch.partial);
    Norm::backward_weight(ctx.stream, weights_.norm, dnormed, x, saved.norm);
    Norm::backward_input(ctx.stream, dnormed, dnormed, x, saved.norm, weights_.norm);
    add(ctx.stream, dx, dy, dnormed);
  }

  /// Adds to the gradients of the two weight matrices.
  template <class Ctx, class Region>
  void backward_weight(Ctx& ctx, const Region& region, Matrix<const float> x, const Saved& saved,
                       const Gradients& gradients, const BlockScratch& scratch) const {
    const auto span = ctx.span(Core::name);
    const Matrix<float> core_out = core_output(region, saved, scratch);
    if constexpr (Core::recomputable) {
      if (saved.core_out.empty()) {
        core_.forward(ctx, core_out, saved.inner, saved.core, scratch.frequencies);
        expose(ctx, exposed_, core_out, Pass::again);
      }
    }
    Linear<Product>::backward_weight(ctx.stream, weights_.out.gradient, gradients.out, core_out);
    const Matrix<const float> normed =
        saved.normed.empty() ? norm_rows(ctx, region, x, saved, scratch)
                             : region.gather(ctx.stream, scratch.normed, saved.normed);
    Linear<Product>::backward_weight(ctx.stream, weights_.in.gradient, gradients.inner, normed);
  }

 private:
  /// core(W_in norm(x)), all rows of it.
  template <class Ctx, class Region>
  Matrix<const float> run_core(Ctx& ctx, const Region& region, Matrix<const float> x,
                               const Saved& saved, const BlockScratch& scratch, Pass pass) const {
    const Matrix<const float> normed = norm_rows(ctx, region, x, saved, scratch);
    Linear<Product>::forward(ctx.stream, saved.inner, normed, weights_.in.value);
    if constexpr (Spec::has_bias)
      bias_add(ctx.stream, saved.inner, saved.inner, weights_.in_bias.value);
    const Matrix<float> core_out = core_output(region, saved, scratch);
    core_.forward(ctx, core_out, saved.inner, saved.core, scratch.frequencies);
    expose(ctx, exposed_, core_out, pass);
    return core_out;
  }

  /// norm(x), all rows of it.
  template <class Ctx, class Region>
  Matrix<const float> norm_rows(Ctx& ctx, const Region& region, Matrix<const float> x,
                                const Saved& saved, const BlockScratch& scratch) const {
    const Matrix<float> own = saved.normed.empty() ? region.own(scratch.normed) : saved.normed;
    Norm::forward(ctx.stream, own, saved.norm, x, weights_.norm, epsilon_);
    return region.gather(ctx.stream, scratch.normed, own);
  }

  template <class Region>
  [[nodiscard]] Matrix<float> core_output(const Region& region, const Saved& saved,
                                          const BlockScratch& scratch) const noexcept {
    return saved.core_out.empty()
               ? Matrix<float>(scratch.core_out.data(), region.rows(), core_.out_width())
               : saved.core_out;
  }

  template <class Ctx>
  [[nodiscard]] float probability(const Ctx& ctx) const noexcept {
    return ctx.training() ? dropout_ : 0.0F;
  }
  template <class Ctx>
  [[nodiscard]] RandomKey random(const Ctx& ctx) const noexcept {
    return ctx.random(layer_, Core::residual_use);
  }
  template <class Ctx, class Region>
  [[nodiscard]] GlobalBlock place(const Ctx& ctx, const Region& region) const noexcept {
    return {ctx.first_sample * sequence_ + region.first_row(), hidden_, 0};
  }

  Core core_;
  BlockWeights weights_;
  Index hidden_;
  float epsilon_;
  float dropout_;
  Index sequence_;
  std::uint32_t layer_;
  std::string prefix_;
  std::string exposed_;
};

}  // namespace mega::inline v0::nn
