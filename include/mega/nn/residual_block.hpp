/// @file  y = x + dropout(W_out core(W_in norm(x))): both halves of a Transformer layer.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/context.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/kernels.hpp>
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
template <class Ctx, class T>
void expose(Ctx& ctx, std::string_view name, Matrix<T> values, Pass pass) {
  if (pass == Pass::first) {
    ctx.expose(name, values);
  } else {
    ctx.hooks.injector.disturb(ctx.stream, name, values);
  }
}

/// Memory that the blocks of a call use one after the other.
template <class T>
struct BlockScratch {
  Vector<float> frequencies;  ///< of rotary positions
  Matrix<T> normed;           ///< [rows, hidden]: gathered, or recomputed
  Matrix<T> partial;          ///< [rows, hidden]: products before their sum over the ranks
  Matrix<T> core_out;         ///< [rows, widest recomputable core]
  Matrix<T> dcore_out;        ///< [rows, widest core]; backward only
};

/// Weights of the two products; a bias may be absent.
template <class T>
struct BlockWeights {
  NormWeights<T> norm;
  ParameterView<T> in, in_bias, out, out_bias;
};

/// x and y are [own rows, hidden] of the residual stream; the core works on all rows. The norm that
/// opens a block is done by whatever makes x: by the block before, in the same pass over memory as
/// its sum, or by enter().
template <class Spec, class Core, class Kernels>
class ResidualBlock {
  using T = typename Kernels::element;
  using Product = Linear<typename Kernels::product>;
  using Norm = typename Spec::norm;
  using Scratch = BlockScratch<T>;

 public:
  using Entry = NormEntry<Norm, T>;

  /// What backward needs besides x. Left empty, and made again, under selective recomputation:
  /// normed and the output of a recomputable core.
  struct Saved {
    typename Norm::Saved norm;
    Matrix<T> normed;
    Matrix<T> inner;
    typename Core::Saved core;
    Matrix<T> core_out;
  };

  /// Gradients between the two halves of backward: of the outputs of both products, all rows.
  struct Gradients {
    Matrix<T> inner;
    Matrix<T> out;  ///< empty where it is the gradient of y and stays there
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

  /// visit(Parameter, ParameterView<T>&) for each parameter, in order. `self` may be const.
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
    if (!selective) saved.normed = arena.take<T>(region.own_rows(), hidden_);
    saved.inner = arena.take<T>(region.rows(), core_.inner_width());
    saved.core = core_.make_saved(arena);
    if (!selective || !Core::recomputable)
      saved.core_out = arena.take<T>(region.rows(), core_.out_width());
    return saved;
  }

  /// @param outlives  the gradient of y is overwritten before backward_weight() comes
  template <class Region>
  [[nodiscard]] Gradients make_gradients(Arena& arena, const Region& region, bool outlives) const {
    Gradients gradients;
    gradients.inner = arena.take<T>(region.rows(), core_.inner_width());
    if (outlives || dropout_ > 0 || region.divides_rows())
      gradients.out = arena.take<T>(region.rows(), hidden_);
    return gradients;
  }

  /// Where this block's norm goes.
  template <class Region>
  [[nodiscard]] Entry entry(const Region& region, const Saved& saved,
                            const Scratch& scratch) const noexcept {
    return {&weights_.norm, saved.norm, own_normed(region, saved, scratch), epsilon_};
  }

  /// normed = norm(x), for a block that none comes before.
  template <class Ctx, class Region>
  void enter(Ctx& ctx, const Region& region, Matrix<const T> x, const Saved& saved,
             const Scratch& scratch) const {
    const auto span = ctx.span("norm");
    Norm::forward(ctx.stream, own_normed(region, saved, scratch), saved.norm, x, weights_.norm,
                  epsilon_);
  }

  /// y = x + dropout(branch), and the norm that comes next, if one does. y may be x.
  /// @pre   normed of this block is there
  /// @param shown  name under which y is exposed; empty: it is not
  template <class Ctx, class Region>
  void forward(Ctx& ctx, const Region& region, Matrix<const T> x, Matrix<T> y, const Saved& saved,
               const Scratch& scratch, Pass pass, const Entry* next, std::string_view shown) const {
    const auto span = ctx.span(Core::name);
    const Matrix<const T> core_out = run_core(ctx, region, saved, scratch, pass);
    {
      const auto product = ctx.span(Core::out_name);
      Product::forward(ctx.stream, scratch.partial, core_out, weights_.out.value);
    }
    const Matrix<T> branch = region.reduce(ctx.stream, scratch.partial);
    // Each rank adds the bias to what is already summed.
    Vector<const T> bias = weights_.out_bias.value;
    if (probability(ctx) > 0) {
      const auto dropping = ctx.span("dropout");
      if (!bias.empty()) bias_add(ctx.stream, branch, Matrix<const T>(branch), bias);
      bias = {};
      dropout_forward(ctx.stream, branch, Matrix<const T>(branch), probability(ctx), random(ctx),
                      place(ctx, region));
    }
    const auto adding = ctx.span(next == nullptr ? "add" : "add_norm");
    if (next == nullptr || Ctx::injects) {
      add_branch(ctx.stream, y, x, Matrix<const T>(branch), bias);
      if (!shown.empty()) expose(ctx, shown, y, pass);
      if (next != nullptr)
        Norm::forward(ctx.stream, next->normed, next->saved, Matrix<const T>(y), *next->weights,
                      next->epsilon);
    } else {
      Norm::add_forward(ctx.stream, y, next->normed, next->saved, x, Matrix<const T>(branch), bias,
                        *next->weights, next->epsilon);
      if (!shown.empty()) expose(ctx, shown, y, pass);
    }
  }

  /// The part of forward that fills saved.
  template <class Ctx, class Region>
  void forward_to_core(Ctx& ctx, const Region& region, const Saved& saved, const Scratch& scratch,
                       Pass pass) const {
    const auto span = ctx.span(Core::name);
    run_core(ctx, region, saved, scratch, pass);
  }

  /// The bias whose gradient the norm behind this block can add up on its way; empty where it
  /// cannot.
  [[nodiscard]] Vector<float> passing_gradient() const noexcept {
    return dropout_ > 0 ? Vector<float>{} : weights_.out_bias.gradient;
  }

  /// What backward takes, besides what all blocks share.
  struct Backward {
    Matrix<const T> dy;
    Matrix<T> dx;  ///< may be dy
    Matrix<const T> x;
    bool behind_norm = false;   ///< dy came with passing_gradient() added up
    Vector<float> before = {};  ///< passing_gradient() of the block before
  };

  /// dx from dy, and the gradients of biases and norms.
  template <class Ctx, class Region>
  void backward_input(Ctx& ctx, const Region& region, const Backward& b, const Saved& saved,
                      const Gradients& gradients, const Scratch& scratch) const {
    const auto span = ctx.span(Core::name);
    to_inner(ctx, region, branch_gradient(ctx, region, b, gradients), saved, gradients, scratch);
    to_input(ctx, region, b, saved, gradients, scratch);
  }

  /// Adds to the gradients of the two weight matrices, or at the first micro-batch sets them.
  /// @param dy  as backward_input() had it, unless gradients hold it
  template <class Ctx, class Region>
  void backward_weight(Ctx& ctx, const Region& region, Matrix<const T> dy, Matrix<const T> x,
                       const Saved& saved, const Gradients& gradients,
                       const Scratch& scratch) const {
    const auto span = ctx.span(Core::name);
    to_weights(ctx, region, gradients.out.empty() ? dy : Matrix<const T>(gradients.out), x, saved,
               gradients, scratch);
  }

  /// Both at once: dy is read for the last time before dx is written.
  template <class Ctx, class Region>
  void backward(Ctx& ctx, const Region& region, const Backward& b, const Saved& saved,
                const Gradients& gradients, const Scratch& scratch) const {
    const auto span = ctx.span(Core::name);
    const Matrix<const T> dout = branch_gradient(ctx, region, b, gradients);
    to_inner(ctx, region, dout, saved, gradients, scratch);
    to_weights(ctx, region, dout, b.x, saved, gradients, scratch);
    to_input(ctx, region, b, saved, gradients, scratch);
  }

 private:
  /// core(W_in normed), all rows of it.
  template <class Ctx, class Region>
  Matrix<const T> run_core(Ctx& ctx, const Region& region, const Saved& saved,
                           const Scratch& scratch, Pass pass) const {
    const Matrix<const T> normed =
        region.gather(ctx.stream, scratch.normed, own_normed(region, saved, scratch));
    {
      const auto product = ctx.span(Core::in_name);
      Product::forward(ctx.stream, saved.inner, normed, weights_.in.value, weights_.in_bias.value);
    }
    const Matrix<T> core_out = core_output(region, saved, scratch);
    core_.forward(ctx, core_out, saved.inner, saved.core, scratch.frequencies);
    expose(ctx, exposed_, core_out, pass);
    return core_out;
  }

  /// The gradient of the second product's output, all rows of it.
  template <class Ctx, class Region>
  Matrix<const T> branch_gradient(Ctx& ctx, const Region& region, const Backward& b,
                                  const Gradients& gradients) const {
    Matrix<const T> own = b.dy;
    if (!gradients.out.empty()) {
      const auto dropping = ctx.span("dropout");
      const Matrix<T> kept = region.own(gradients.out);
      dropout_backward(ctx.stream, kept, b.dy, probability(ctx), random(ctx), place(ctx, region));
      own = kept;
    }
    const bool passed = b.behind_norm && !passing_gradient().empty();
    if (Spec::has_bias && !passed) {
      const auto summing = ctx.span("bias");
      bias_gradient(ctx.stream, weights_.out_bias.gradient, own);
    }
    return gradients.out.empty() ? own : region.gather(ctx.stream, gradients.out, own);
  }

  template <class Ctx, class Region>
  void to_inner(Ctx& ctx, const Region& region, Matrix<const T> dout, const Saved& saved,
                const Gradients& gradients, const Scratch& scratch) const {
    if constexpr (Core::template joins_product<typename Kernels::product, decltype(ctx.stream)>) {
      if (core_.backward_from(ctx, gradients.inner, weights_.in_bias.gradient, dout,
                              weights_.out.value, saved.inner, typename Kernels::product{}))
        return;
    }
    const Matrix<T> dcore(scratch.dcore_out.data(), region.rows(), core_.out_width());
    {
      const auto product = ctx.span(Core::out_name);
      Product::backward_input(ctx.stream, dcore, dout, weights_.out.value);
    }
    core_.backward(ctx, gradients.inner, weights_.in_bias.gradient, dcore, saved.inner,
                   saved.core_out, saved.core, scratch.frequencies);
  }

  template <class Ctx, class Region>
  void to_weights(Ctx& ctx, const Region& region, Matrix<const T> dout, Matrix<const T> x,
                  const Saved& saved, const Gradients& gradients, const Scratch& scratch) const {
    const Matrix<T> core_out = core_output(region, saved, scratch);
    if constexpr (Core::recomputable) {
      if (saved.core_out.empty()) {
        core_.forward(ctx, core_out, saved.inner, saved.core, scratch.frequencies);
        expose(ctx, exposed_, core_out, Pass::again);
      }
    }
    const bool first = ctx.microbatch == 0;
    {
      const auto product = ctx.span(Core::out_name);
      Product::backward_weight(ctx.stream, weights_.out.gradient, dout, core_out, first);
    }
    if (saved.normed.empty()) enter(ctx, region, x, saved, scratch);
    const Matrix<const T> normed =
        region.gather(ctx.stream, scratch.normed, own_normed(region, saved, scratch));
    const auto product = ctx.span(Core::in_name);
    Product::backward_weight(ctx.stream, weights_.in.gradient, gradients.inner, normed, first);
  }

  template <class Ctx, class Region>
  void to_input(Ctx& ctx, const Region& region, const Backward& b, const Saved& saved,
                const Gradients& gradients, const Scratch& scratch) const {
    {
      const auto product = ctx.span(Core::in_name);
      Product::backward_input(ctx.stream, scratch.partial, gradients.inner, weights_.in.value);
    }
    const Matrix<T> dnormed = region.reduce(ctx.stream, scratch.partial);
    const auto norming = ctx.span("norm");
    Norm::backward(ctx.stream, b.dx, weights_.norm, b.dy, dnormed, b.x, saved.norm, b.before);
  }

  /// This rank's rows of norm(x).
  template <class Region>
  [[nodiscard]] Matrix<T> own_normed(const Region& region, const Saved& saved,
                                     const Scratch& scratch) const noexcept {
    return saved.normed.empty() ? region.own(scratch.normed) : saved.normed;
  }

  template <class Region>
  [[nodiscard]] Matrix<T> core_output(const Region& region, const Saved& saved,
                                      const Scratch& scratch) const noexcept {
    return saved.core_out.empty()
               ? Matrix<T>(scratch.core_out.data(), region.rows(), core_.out_width())
               : saved.core_out;
  }

  template <class Ctx>
  [[nodiscard]] float probability(const Ctx& ctx) const noexcept {
    return ctx.training() ? dropout_ : 0.0F;
  }
  template <class Ctx>
  [[nodiscard]] RandomSite random(const Ctx& ctx) const noexcept {
    return ctx.random(layer_, Core::residual_use);
  }
  template <class Ctx, class Region>
  [[nodiscard]] GlobalBlock place(const Ctx& ctx, const Region& region) const noexcept {
    return {ctx.first_sample * sequence_ + region.first_row(), hidden_, 0};
  }

  Core core_;
  BlockWeights<T> weights_;
  Index hidden_;
  float epsilon_;
  float dropout_;
  Index sequence_;
  std::uint32_t layer_;
  std::string prefix_;
  std::string exposed_;
};

}  // namespace mega::inline v0::nn
