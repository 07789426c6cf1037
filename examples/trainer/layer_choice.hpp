/// @file  Which stage holds which layers: as even as possible, or what the run asked for.
#pragma once
#include "config.hpp"
#include "schedule_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/balance.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/dpp/layout.hpp>
#include <mega/nn/transformer_config.hpp>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

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

/// The layout of the run's text.
/// @pre  c.pipeline is at least 1
/// @throws  Error(usage) where its stages are not those of --pp and --vpp, with what would be valid
[[nodiscard]] inline mega::dpp::Layout chosen_layout(const Config& c) {
  const mega::dpp::Layout layout(c.layout);
  const std::int64_t stages = layout.stages(), p = c.pipeline, wanted = p * c.chunks;
  const bool divides = stages % p == 0;
  mega::expects(c.chunks == 0 ? divides : stages == wanted, mega::ErrorCode::usage, [&] {
    const std::string numbers =
        c.chunks == 0 ? mega::sentence(", which --pp ", p, " does not divide")
                      : mega::sentence(", but --pp ", p, " times --vpp ", c.chunks, " is ", wanted);
    const auto ranks = [&] {  // the nearest number that divides the stages
      std::int64_t nearest = 1;
      for (std::int64_t d = 2; d <= stages; ++d) {
        if (stages % d == 0 && std::abs(d - p) < std::abs(nearest - p)) nearest = d;
      }
      return nearest;
    }();
    const std::string flags = divides ? std::string() : mega::sentence(" --pp ", ranks);
    const std::string chunks =
        c.chunks == 0 ? std::string() : mega::sentence(" --vpp ", stages / (divides ? p : ranks));
    const std::int64_t below = stages / p * p;
    const std::string fitting = c.chunks > 0 ? std::to_string(wanted)
                                : below > 0  ? mega::sentence(below, " or ", below + p)
                                             : std::to_string(p);
    return mega::sentence("--pipeline-model-parallel-layout has ", stages,
                          stages == 1 ? " stage" : " stages", numbers, "; give", flags, chunks,
                          ", or a layout of ", fitting, " stages");
  });
  return layout;
}

/// Chunks of a pipeline rank: the run's number, or the one that the layout's stages give, or that
/// the schedule needs.
[[nodiscard]] inline int chosen_chunks(const Config& c) {
  if (!c.layout.empty()) return chosen_layout(c).stages() / c.pipeline;
  return c.chunks > 0 ? c.chunks : chosen_traversal(c).usual_chunks();
}

/// @pre  c.pipeline and c.chunks are at least 1, and the model's sizes are valid
/// Throws Error(usage) with the numbers and what would be valid.
template <class Spec>
[[nodiscard]] mega::dpp::LayerSplit chosen_layers(const Config& c,
                                                  const mega::nn::TransformerConfig& model) {
  using namespace mega::dpp;
  const ChosenPlacement placement = chosen_traversal(c).placement();
  if (!c.layout.empty()) return chosen_layout(c).split(model.layers, c.pipeline, c.chunks);
  if (c.balance)
    return balance_layers(model.layers, c.pipeline, c.chunks, counted_costs<Spec>(c, model),
                          placement);
  for (const auto& [option, count] :
       {std::pair("--decoder-first-pipeline-num-layers", c.first_layers),
        std::pair("--decoder-last-pipeline-num-layers", c.last_layers)}) {
    mega::expects(count <= model.layers, mega::ErrorCode::usage, [&, option = option, n = count] {
      return mega::sentence(option, " is ", n, "; valid are 0 to the ", model.layers,
                            " layers of the model");
    });
  }
  return split_layers(model.layers, c.pipeline, c.chunks, {c.first_layers, c.last_layers},
                      placement);
}

}  // namespace trainer
