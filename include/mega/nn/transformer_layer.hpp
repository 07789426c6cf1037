/// @file  One layer of a Transformer: an attention block, then an MLP block.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/block_core.hpp>
#include <mega/nn/residual_block.hpp>
#include <mega/nn/transformer_config.hpp>

#include <algorithm>
#include <string>

namespace mega::inline v0::nn {

/// Activations [own rows, hidden] of the residual stream enter and leave; see ResidualBlock.
template <class Spec, class Kernels>
class TransformerLayer {
  using T = typename Kernels::element;
  using Attention =
      ResidualBlock<Spec, AttentionCore<typename Spec::position, typename Kernels::attention>,
                    Kernels>;
  using Mlp = ResidualBlock<Spec, MlpCore<typename Spec::activation>, Kernels>;
  using Scratch = BlockScratch<T>;

 public:
  using Entry = NormEntry<typename Spec::norm, T>;

  struct Saved {
    typename Attention::Saved attention;
    Matrix<T> middle;  ///< of the residual stream, between the blocks
    typename Mlp::Saved mlp;
  };
  struct Gradients {
    typename Attention::Gradients attention;
    typename Mlp::Gradients mlp;
  };

  TransformerLayer(const TransformerConfig& config, const TransformerRun& run, int tensor_rank,
                   int tensor_degree, int layer)
      : attention_(config, run, tensor_rank, tensor_degree, layer),
        mlp_(config, run, tensor_rank, tensor_degree, layer),
        exposed_(sentence("layers.", layer, ".output")) {}

  template <class Self, class Visit>
  static void for_each_parameter(Self& self, const TransformerConfig& config, bool partial,
                                 const Visit& visit) {
    Attention::for_each_parameter(self.attention_, config, partial, visit);
    Mlp::for_each_parameter(self.mlp_, config, partial, visit);
  }

  template <class Region>
  [[nodiscard]] Saved make_saved(Arena& arena, const Region& region, Index hidden,
                                 bool selective) const {
    return {attention_.make_saved(arena, region, selective),
            arena.take<T>(region.own_rows(), hidden), mlp_.make_saved(arena, region, selective)};
  }
  /// @param outlives  backward_weight() comes by itself, after the gradients moved on
  template <class Region>
  [[nodiscard]] Gradients make_gradients(Arena& arena, const Region& region, bool outlives) const {
    return {attention_.make_gradients(arena, region, outlives),
            mlp_.make_gradients(arena, region, outlives)};
  }
  /// Widths that BlockScratch::core_out and dcore_out need.
  [[nodiscard]] Index recomputable_width() const noexcept { return mlp_.core().out_width(); }
  [[nodiscard]] Index core_width() const noexcept {
    return std::max(attention_.core().out_width(), mlp_.core().out_width());
  }

  /// Where the layer's first norm goes, and doing it where no layer comes before.
  template <class Region>
  [[nodiscard]] Entry entry(const Region& region, const Saved& saved,
                            const Scratch& scratch) const noexcept {
    return attention_.entry(region, saved.attention, scratch);
  }
  template <class Ctx, class Region>
  void enter(Ctx& ctx, const Region& region, Matrix<const T> x, const Saved& saved,
             const Scratch& scratch) const {
    attention_.enter(ctx, region, x, saved.attention, scratch);
  }

  /// @pre   the layer's first norm is there   @param next  the norm behind the layer, if any
  template <class Ctx, class Region>
  void forward(Ctx& ctx, const Region& region, Matrix<const T> x, Matrix<T> y, const Saved& saved,
               const Scratch& scratch, Pass pass, const Entry* next) const {
    to_middle(ctx, region, x, saved, scratch, pass);
    mlp_.forward(ctx, region, saved.middle, y, saved.mlp, scratch, pass, next, exposed_);
  }

  /// Computes again what saved holds, of which only x is known. Nothing follows from the output of
  /// the last product, so it is not made.
  template <class Ctx, class Region>
  void recompute(Ctx& ctx, const Region& region, Matrix<const T> x, const Saved& saved,
                 const Scratch& scratch) const {
    enter(ctx, region, x, saved, scratch);
    to_middle(ctx, region, x, saved, scratch, Pass::again);
    mlp_.forward_to_core(ctx, region, saved.mlp, scratch, Pass::again);
  }

  /// See ResidualBlock; here for the second block, whose dx is the first one's dy.
  using Backward = typename Mlp::Backward;
  [[nodiscard]] Vector<float> passing_gradient() const noexcept { return mlp_.passing_gradient(); }

  template <class Ctx, class Region>
  void backward_input(Ctx& ctx, const Region& region, const Backward& b, const Saved& saved,
                      const Gradients& gradients, const Scratch& scratch) const {
    mlp_.backward_input(ctx, region, of_mlp(b, saved), saved.mlp, gradients.mlp, scratch);
    attention_.backward_input(ctx, region, of_attention(b), saved.attention, gradients.attention,
                              scratch);
  }

  /// @pre  gradients were made to outlive the gradients of the residual stream
  template <class Ctx, class Region>
  void backward_weight(Ctx& ctx, const Region& region, Matrix<const T> x, const Saved& saved,
                       const Gradients& gradients, const Scratch& scratch) const {
    mlp_.backward_weight(ctx, region, {}, saved.middle, saved.mlp, gradients.mlp, scratch);
    attention_.backward_weight(ctx, region, {}, x, saved.attention, gradients.attention, scratch);
  }

  template <class Ctx, class Region>
  void backward(Ctx& ctx, const Region& region, const Backward& b, const Saved& saved,
                const Gradients& gradients, const Scratch& scratch) const {
    mlp_.backward(ctx, region, of_mlp(b, saved), saved.mlp, gradients.mlp, scratch);
    attention_.backward(ctx, region, of_attention(b), saved.attention, gradients.attention,
                        scratch);
  }

 private:
  template <class Ctx, class Region>
  void to_middle(Ctx& ctx, const Region& region, Matrix<const T> x, const Saved& saved,
                 const Scratch& scratch, Pass pass) const {
    const Entry middle = mlp_.entry(region, saved.mlp, scratch);
    attention_.forward(ctx, region, x, saved.middle, saved.attention, scratch, pass, &middle, {});
  }

  [[nodiscard]] typename Mlp::Backward of_mlp(const Backward& b,
                                              const Saved& saved) const noexcept {
    return {b.dy, b.dx, saved.middle, b.behind_norm, attention_.passing_gradient()};
  }
  [[nodiscard]] typename Attention::Backward of_attention(const Backward& b) const noexcept {
    return {b.dx, b.dx, b.x, true, b.before};
  }

  Attention attention_;
  Mlp mlp_;
  std::string exposed_;
};

}  // namespace mega::inline v0::nn
