/// @file  Which stage holds which layers: as even as possible, or what the run asked for.
#pragma once
#include "config.hpp"
#include "schedule_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/balance.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/dpp/layout.hpp>
#include <mega/nn/transformer_config.hpp>

namespace trainer {

/// Operations of the model's parts, for one token.
template <class Spec>
[[nodiscard]] mega::dpp::LayerCosts counted_costs(const Config& c,
                                                  const mega::nn::TransformerConfig& model) {
  const auto number = [](Index n) { return static_cast<double>(n); };
  return mega::dpp::transformer_costs(
      {.hidden = number(model.hidden),
       .heads = number(model.heads),
       .kv_heads = number(model.kv_heads),
       .head_dim = number(model.head_dim),
       .ffn = number(model.ffn),
       .mlp_matrices = 1.0 + Spec::activation::inputs,
       .vocab = number(model.vocab),
       .sequence = number(c.sequence),
       .recompute_layers = c.recompute == mega::nn::Recompute::full});
}

/// Refuses two answers to one question.
inline void check_layer_choice(const Config& c) {
  const bool fixes_ends = c.first_layers != 0 || c.last_layers != 0;
  mega::expects((c.layout.empty() ? 0 : 1) + (fixes_ends ? 1 : 0) + (c.balance ? 1 : 0) <= 1,
                mega::ErrorCode::usage,
                "--pipeline-model-parallel-layout, --decoder-first-pipeline-num-layers or "
                "--decoder-last-pipeline-num-layers, and --balance-layers each say which stage "
                "holds which layers; give one");
}

/// Chunks of a pipeline rank: the run's number, or the one that the layout's stages give, or that
/// the schedule needs.
[[nodiscard]] inline int chosen_chunks(const Config& c) {
  if (c.chunks > 0) return c.chunks;
  if (c.layout.empty()) return ChosenTraversal{c.schedule, c.group_size}.usual_chunks();
  return mega::dpp::Layout(c.layout).chunks(c.pipeline);
}

/// @pre  c.pipeline and c.chunks are at least 1, and the model's sizes are valid
/// Throws Error(usage) with the numbers and what would be valid.
template <class Spec>
[[nodiscard]] mega::dpp::LayerSplit chosen_layers(const Config& c,
                                                  const mega::nn::TransformerConfig& model) {
  using namespace mega::dpp;
  const ChosenPlacement placement = ChosenTraversal{c.schedule, c.group_size}.placement();
  if (!c.layout.empty()) return Layout(c.layout).split(model.layers, c.pipeline, c.chunks);
  if (c.balance)
    return balance_layers(model.layers, c.pipeline, c.chunks, counted_costs<Spec>(c, model),
                          placement);
  return split_layers(model.layers, c.pipeline, c.chunks, {c.first_layers, c.last_layers},
                      placement);
}

}  // namespace trainer
