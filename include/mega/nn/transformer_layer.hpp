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
template <class Spec, class Product>
class TransformerLayer {
  using Attention = ResidualBlock<Spec, AttentionCore<typename Spec::position>, Product>;
  using Mlp = ResidualBlock<Spec, MlpCore<typename Spec::activation>, Product>;

 public:
  struct Saved {
    typename Attention::Saved attention;
    Matrix<float> middle;  ///< of the residual stream, between the blocks
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
            arena.take<float>(region.own_rows(), hidden),
            mlp_.make_saved(arena, region, selective)};
  }
  template <class Region>
  [[nodiscard]] Gradients make_gradients(Arena& arena, const Region& region) const {
    return {attention_.make_gradients(arena, region), mlp_.make_gradients(arena, region)};
  }
  /// Widths that BlockScratch::core_out and dcore_out need.
  [[nodiscard]] Index recomputable_width() const noexcept { return mlp_.core().out_width(); }
  [[nodiscard]] Index core_width() const noexcept {
    return std::max(attention_.core().out_width(), mlp_.core().out_width());
  }

  template <class Ctx, class Region>
  void forward(Ctx& ctx, const Region& region, Matrix<const float> x, Matrix<float> y,
               const Saved& saved, const BlockScratch& scratch, Pass pass) const {
    attention_.forward(ctx, region, x, saved.middle, saved.attention, scratch, pass);
    mlp_.forward(ctx, region, saved.middle, y, saved.mlp, scratch, pass);
    expose(ctx, exposed_, y, pass);
  }

  /// Computes again what saved holds, of which only x is known. Nothing follows from the output of
  /// the last product, so it is not made.
  template <class Ctx, class Region>
  void recompute(Ctx& ctx, const Region& region, Matrix<const float> x, const Saved& saved,
                 const BlockScratch& scratch) const {
    attention_.forward(ctx, region, x, saved.middle, saved.attention, scratch, Pass::again);
    mlp_.forward_to_core(ctx, region, saved.middle, saved.mlp, scratch, Pass::again);
  }

  /// dx may be dy.
  template <class Ctx, class Region>
  void backward_input(Ctx& ctx, const Region& region, Matrix<const float> dy, Matrix<float> dx,
                      Matrix<const float> x, const Saved& saved, const Gradients& gradients,
                      const BlockScratch& scratch) const {
    mlp_.backward_input(ctx, region, dy, dx, saved.middle, saved.mlp, gradients.mlp, scratch);
    attention_.backward_input(ctx, region, dx, dx, x, saved.attention, gradients.attention,
                              scratch);
  }

  template <class Ctx, class Region>
  void backward_weight(Ctx& ctx, const Region& region, Matrix<const float> x, const Saved& saved,
                       const Gradients& gradients, const BlockScratch& scratch) const {
    mlp_.backward_weight(ctx, region, saved.middle, saved.mlp, gradients.mlp, scratch);
    attention_.backward_weight(ctx, region, x, saved.attention, gradients.attention, scratch);
  }

 private:
  Attention attention_;
  Mlp mlp_;
  std::string exposed_;
};

}  // namespace mega::inline v0::nn
