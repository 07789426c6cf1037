/// @file  The specification of GPT-3 and GPT-2. Source: Brown et al., arXiv 2005.14165.
#pragma once
#include <mega/nn/activation_kind.hpp>
#include <mega/nn/norm_kind.hpp>
#include <mega/nn/position_kind.hpp>

#include <string_view>

namespace mega::inline v0::nn {

/// LayerNorm before each block, learned positions, GELU, a bias in every product. The checkpoints'
/// head shares the token embedding (TransformerConfig::tied_head).
struct Gpt3 {
  static constexpr std::string_view name = "gpt3";
  static constexpr bool has_bias = true;
  using norm = LayerNorm;
  using position = LearnedPosition;
  using activation = GeluTanh;
};

}  // namespace mega::inline v0::nn
