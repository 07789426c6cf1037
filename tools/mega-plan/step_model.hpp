/// @file  What the stages of a pipeline cost: from measured times, or counted for a Transformer.
#pragma once
#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/simulator.hpp>

#include <optional>
#include <string>
#include <vector>

namespace plan {

/// A Transformer's parts for one micro-batch on one tensor-parallel rank, in seconds and bytes.
/// Matrix products only, at one rate for all; a transfer is one activation in 16 bits, and so is
/// everything that backward needs: inputs and outputs of the two norms, queries, keys, values, the
/// attention's output, and the MLP's inner activations, all divided over the tensor ranks.
struct TransformerParts {
  int layers = 0;
  mega::dpp::ActionTimes layer{};
  mega::dpp::ActionTimes head{};
  double layer_bytes = 0;
  double message_bytes = 0;
};

/// How a model is run.
struct TransformerRunArguments {
  int tensor_degree = 1;
  int sequence = 2048;
  int micro_batch = 1;  ///< samples
  double flops = 0;     ///< a second and device, as sustained
};

/// @param model  a bundled name or the path of a Hugging Face config.json
/// Throws Error(usage) for sizes that do not divide, Error(bad_input) for a file that is no model.
[[nodiscard]] TransformerParts transformer_parts(const std::string& model,
                                                 const TransformerRunArguments& run);

/// The bundled names, for sentences and help.
[[nodiscard]] std::string bundled_models();

/// A pipeline by stage.
struct StageCosts {
  std::vector<mega::dpp::ActionTimes> times;  ///< [p*v]
  std::vector<double> memory;                 ///< [p*v] of one live activation
  std::vector<int> layers;                    ///< [p*v]; empty for measured times
};

/// The step that is compared.
struct StepModel {
  int p = 1;
  int m = 1;
  mega::dpp::ActionTimes rank_times{};  ///< of all chunks of a rank together
  std::optional<TransformerParts> transformer{};
  double hop = 0;
  mega::dpp::Link link{};
  double message_bytes = 0;

  /// Each rank's share in v equal chunks, or the layers balanced over p*v stages. Memory counts in
  /// activations of a rank's share, or in bytes.
  [[nodiscard]] StageCosts stages(int v, bool on_v) const;
};

}  // namespace plan
