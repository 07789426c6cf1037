/// @file  What a rank of a layout will allocate, computed without a device and without its peers.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/loss_scale.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/stage.hpp>
#include <mega/dpp/activation_buffers.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/train/parameter_store.hpp>
#include <mega/train/parameter_table.hpp>
#include <mega/train/pipeline.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mega::inline v0::train {

/// A rank of a communicator that carries nothing: enough to make stages for planning.
struct PlannedComm {
  int position = 0;
  int degree = 1;
  [[nodiscard]] int rank() const noexcept { return position; }
  [[nodiscard]] int size() const noexcept { return degree; }
};

/// Bytes by purpose. total() is what Trainer::device_bytes() will report.
struct MemoryPlan {
  std::size_t parameters = 0;  ///< values, gradients, moments and masters
  /// Slots, those for look-ahead included, transfer buffers, the step's inputs and targets.
  std::size_t activations = 0;
  std::size_t workspace = 0;  ///< of the largest call of a stage
  std::size_t exchange = 0;   ///< norms, losses, counts, decisions of the dispatch policy
  Index elements = 0;         ///< parameters this rank holds, padding included
  std::vector<int> stages;

  [[nodiscard]] std::size_t total() const noexcept {
    return parameters + activations + workspace + exchange;
  }
};

/// Device memory of the figures that ranks exchange at the end of a step, and of what the step is
/// told at its beginning.
struct ExchangeBuffers {
  Vector<double> sums;  ///< squares of every tensor of the model, then losses of every micro-batch
  Vector<optim::UpdateControl> control;
  Vector<optim::StepInputs> inputs;
  Vector<LossScale> loss_scale;  ///< of the step that runs, then of the next

  ExchangeBuffers(Arena& arena, int tensors, int global_microbatches)
      : sums(arena.take<double>(tensors + global_microbatches)),
        control(arena.take<optim::UpdateControl>(1)),
        inputs(arena.take<optim::StepInputs>(1)),
        loss_scale(arena.take<LossScale>(1)) {}

  [[nodiscard]] Vector<std::int64_t> targets() const noexcept {
    return {&inputs.data()->targets, 1};
  }
  /// For random numbers.
  [[nodiscard]] const std::int64_t* step() const noexcept { return &inputs.data()->step; }

  [[nodiscard]] static std::size_t required_bytes(int tensors, int global_microbatches) {
    Arena counting;
    const ExchangeBuffers layout(counting, tensors, global_microbatches);
    return counting.used();
  }
};

/// The plan of `rank`. @param factory  factory(StagePosition, PlannedComm& tensor) -> a stage of
/// the same sizes as the one that will run; its communicator type may differ
template <class Placement, class Options, class Factory>
[[nodiscard]] MemoryPlan plan_memory(const Options& options, int rank, const Factory& factory) {
  using Traversal = std::remove_cvref_t<decltype(options.traversal)>;
  const Pipeline<Traversal, Placement> pipeline(options, rank, options.mesh.size());
  const Coordinates at = options.mesh.coordinates(rank);
  PlannedComm tensor{at[Axis::tensor], options.mesh.tensor};
  using Stage = decltype(factory(StagePosition{}, tensor));

  std::vector<std::vector<Parameter>> lists;
  for (int s = 0; s < pipeline.stages(); ++s) {
    lists.push_back(factory(StagePosition{s, pipeline.stages()}, tensor).parameters());
  }
  MemoryPlan plan;
  plan.stages = pipeline.own_stages();
  const ParameterTable table(
      lists, plan.stages,
      {at[Axis::tensor], options.mesh.tensor, at[Axis::data], options.mesh.data});
  std::vector<Stage> stages;
  for (const int s : plan.stages)
    stages.push_back(factory(StagePosition{s, pipeline.stages()}, tensor));
  Arena counting;
  const dpp::ActivationBuffers<Stage> buffers(
      counting, stages, pipeline.placements(table.has_ties(), options.dispatch.ahead),
      options.microbatches);
  plan.parameters =
      StoreBuffers<stage_value_t<Stage>>::required_bytes(table, options.shard_optimizer);
  plan.workspace = buffers.workspace_bytes;
  plan.activations = counting.used() - plan.workspace;
  plan.exchange = ExchangeBuffers::required_bytes(table.model_parameters(),
                                                  options.microbatches * options.mesh.data) +
                  options.dispatch.required_bytes(options.mesh);
  for (const TableEntry& e : table.entries()) {
    if (!e.alias) plan.elements += e.size;
  }
  return plan;
}

}  // namespace mega::inline v0::train
