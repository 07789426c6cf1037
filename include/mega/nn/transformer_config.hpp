/// @file  Sizes of a Transformer, which arrive at run time, and the layouts that they admit.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/rope.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace mega::inline v0::nn {

/// Rotary embedding; models with learned positions pass over it.
struct RopeConfig {
  double theta = 10000.0;
  RopeScaling scaling{};
};

struct DropoutConfig {
  float embedding = 0.0F;  ///< of the sum of token and position embedding
  float attention = 0.0F;  ///< of attention probabilities
  float residual = 0.0F;   ///< of what a block adds to the residual stream
};

/// The model, whole: nothing here depends on the layout or on the batch.
struct TransformerConfig {
  int layers = 0;
  Index hidden = 0;  ///< width of the residual stream
  Index heads = 0;   ///< query heads
  Index kv_heads = 0;
  Index head_dim = 0;
  Index ffn = 0;  ///< width of the activations inside the MLP
  Index vocab = 0;
  Index max_positions = 0;  ///< rows of the learned position table; rotary models may go beyond
  float norm_epsilon = 1e-5F;
  RopeConfig rope{};
  DropoutConfig dropout{};
  bool tied_head = false;  ///< the head's weight is the token embedding
  float init_deviation = 0.02F;
};

/// What backward computes again instead of keeping it. Every choice gives the same bits.
enum class Recompute : std::uint8_t {
  none,       ///< nothing
  selective,  ///< outputs of norms and activation functions: cheap, and a third of the memory
  full,       ///< everything but the input of each layer
};

[[nodiscard]] constexpr std::string_view to_string(Recompute recompute) noexcept {
  switch (recompute) {
    case Recompute::none: return "none";
    case Recompute::selective: return "selective";
    case Recompute::full: return "full";
  }
  return "unknown";
}

/// How a run feeds the model.
struct TransformerRun {
  Index micro_batch = 1;           ///< samples
  Index sequence = 0;              ///< tokens of a sample
  bool sequence_parallel = false;  ///< tensor-parallel ranks divide the rows of the residual stream
  Recompute recompute = Recompute::none;
  bool split_backward = false;  ///< the schedule runs backward_input and backward_weight apart
  Index loss_rows = 512;        ///< tokens whose logits exist at a time; bounds the loss's memory

  /// Tokens of a micro-batch: rows of the whole residual stream.
  [[nodiscard]] constexpr Index rows() const noexcept { return micro_batch * sequence; }
};

namespace detail {

/// The divisors of n next to d, as words: "1 or 4".
[[nodiscard]] inline std::string nearest_divisors(Index n, Index d) {
  Index below = d < n ? d : n, above = d;
  while (below > 1 && n % below != 0) --below;
  while (above < n && n % above != 0) ++above;
  if (above >= n) above = n;
  return below == above ? std::to_string(below) : sentence(below, " or ", above);
}

inline void expects_divisible(std::string_view what, Index n, int tensor_degree) {
  expects(n % tensor_degree == 0, ErrorCode::usage, [&] {
    return sentence(what, " ", n, " does not divide over tensor degree ", tensor_degree,
                    "; nearest that does: ", nearest_divisors(n, tensor_degree));
  });
}

inline void expects_positive(std::string_view what, Index n) {
  expects(n > 0, ErrorCode::usage,
          [&] { return sentence(what, " is ", n, "; it must be at least 1"); });
}

inline void expects_probability(std::string_view what, float p) {
  expects(p >= 0.0F && p < 1.0F, ErrorCode::usage,
          [&] { return sentence(what, " dropout is ", p, "; it must be in [0, 1)"); });
}

}  // namespace detail

/// Refuses, with the numbers and the nearest valid ones, what a model of this specification cannot
/// be or cannot be divided into. A vocabulary that does not divide is padded and masked, so every
/// size of it is accepted.
/// @throws Error usage
template <class Spec>
void validate(const TransformerConfig& config, const TransformerRun& run, int tensor_degree,
              int stages) {
  detail::expects_positive("layers", config.layers);
  detail::expects_positive("hidden", config.hidden);
  detail::expects_positive("heads", config.heads);
  detail::expects_positive("kv_heads", config.kv_heads);
  detail::expects_positive("head_dim", config.head_dim);
  detail::expects_positive("ffn", config.ffn);
  detail::expects_positive("vocab", config.vocab);
  detail::expects_positive("micro_batch", run.micro_batch);
  detail::expects_positive("sequence", run.sequence);
  detail::expects_positive("loss_rows", run.loss_rows);
  detail::expects_positive("tensor degree", tensor_degree);
  expects(config.heads % config.kv_heads == 0, ErrorCode::usage, [&] {
    return sentence(
        "heads ", config.heads, " is not a multiple of kv_heads ", config.kv_heads,
        "; nearest that divides it: ", detail::nearest_divisors(config.heads, config.kv_heads));
  });
  detail::expects_divisible("heads", config.heads, tensor_degree);
  detail::expects_divisible("kv_heads", config.kv_heads, tensor_degree);
  detail::expects_divisible("ffn", config.ffn, tensor_degree);
  if (run.sequence_parallel)
    detail::expects_divisible("sequence-parallel rows (micro_batch * sequence)", run.rows(),
                              tensor_degree);
  expects(stages >= 1 && stages <= config.layers + 2, ErrorCode::usage, [&] {
    return sentence(config.layers, " layers cannot be dealt to ", stages, " stages; it takes 1 to ",
                    config.layers + 2, ", the first and the last of which may hold no layer");
  });
  detail::expects_probability("embedding", config.dropout.embedding);
  detail::expects_probability("attention", config.dropout.attention);
  detail::expects_probability("residual", config.dropout.residual);
  expects(!run.split_backward || run.recompute != Recompute::full, ErrorCode::usage,
          "full recompute needs the fused backward: it holds the activations of one layer at a "
          "time; use recompute none or selective with a schedule that splits the backward");
  Spec::position::validate(config, run);
}

}  // namespace mega::inline v0::nn
