/// @file  The specification of Llama 3. Source: Grattafiori et al., arXiv 2407.21783.
#pragma once
#include <mega/nn/activation_kind.hpp>
#include <mega/nn/norm_kind.hpp>
#include <mega/nn/position_kind.hpp>

#include <string_view>

namespace mega::inline v0::nn {

/// RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU, no bias.
struct Llama3 {
  static constexpr std::string_view name = "llama3";
  static constexpr bool has_bias = false;
  using norm = RmsNorm;
  using position = RotaryPosition;
  using activation = Swiglu;
};

}  // namespace mega::inline v0::nn
