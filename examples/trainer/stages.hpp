/// @file  The stages of a job, and what every rank will allocate for them, known before a rank
/// starts.
#pragma once
#include "console.hpp"
#include "job.hpp"
#include "layer_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/stage.hpp>
#include <mega/dpp/balance.hpp>
#include <mega/dpp/layout.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/nn/kernels.hpp>
#include <mega/nn/transformer.hpp>
#include <mega/train/memory_plan.hpp>

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace trainer {

/// Makes stages of a job; `run` may differ from the job's, for sampling.
template <class Spec, mega::nn::kernels Kernels>
struct StageFactory {
  const Job& job;
  mega::nn::TransformerRun run = job.run;

  template <class Groups>
  [[nodiscard]] auto operator()(mega::StagePosition at, Groups& groups) const {
    return make(at, groups.tensor);
  }
  template <class TensorComm>
  [[nodiscard]] auto make(mega::StagePosition at, TensorComm& tensor) const {
    return mega::nn::Transformer<Spec, TensorComm, Kernels>(job.model, run, at,
                                                            job.split.of_stage(at.stage), tensor);
  }
};

/// The run of one sample that continues a prompt.
[[nodiscard]] inline mega::nn::TransformerRun sampling_run(const Job& job) {
  mega::nn::TransformerRun one = job.run;
  one.micro_batch = 1;
  one.sequence_parallel = false;
  return one;
}

/// One purpose of a rank's memory.
struct MemoryLine {
  std::string_view purpose;
  std::size_t bytes = 0;
};

/// What a rank holds.
struct RankPlan {
  std::vector<int> stages;
  Index parameters = 0;
  std::vector<MemoryLine> memory;

  [[nodiscard]] std::size_t total() const noexcept {
    std::size_t sum = 0;
    for (const MemoryLine& line : memory) sum += line.bytes;
    return sum;
  }
};

/// "12.3 GiB (parameters and optimizer 1.0 GiB, ...)".
[[nodiscard]] inline std::string memory_text(const RankPlan& plan) {
  std::string lines;
  for (const MemoryLine& line : plan.memory) {
    lines +=
        mega::sentence(lines.empty() ? "" : ", ", line.purpose, ' ', readable_bytes(line.bytes));
  }
  return mega::sentence(readable_bytes(plan.total()), " (", lines, ")");
}

/// Place of a rank in the pipeline. Ranks at one place hold pieces of equal size.
[[nodiscard]] inline std::size_t place_of(const Job& job, int rank) {
  return static_cast<std::size_t>(job.options.mesh.coordinates(rank)[mega::Axis::pipeline]);
}

/// Memory of the rank at each place of the pipeline, for `options` and `run` in the stead of the
/// job's own.
template <class Spec, class Kernels, class Options>
[[nodiscard]] std::vector<mega::train::MemoryPlan> plan_places(
    const Job& job, const Options& options, const mega::nn::TransformerRun& run) {
  const StageFactory<Spec, Kernels> factory{job, run};
  std::vector<mega::train::MemoryPlan> out;
  for (int p = 0; p < options.mesh.pipeline; ++p) {
    out.push_back(mega::train::plan_memory<mega::dpp::LoopPlacement>(
        options, options.mesh.moved(0, mega::Axis::pipeline, p),
        [&](mega::StagePosition at, mega::train::PlannedComm& tensor) {
          return factory.make(at, tensor);
        }));
  }
  return out;
}

/// What the trainer of a rank allocates, at each place of the pipeline.
template <class Spec, class Kernels>
[[nodiscard]] std::vector<RankPlan> plan_ranks(const Job& job) {
  std::vector<RankPlan> out;
  RunOptions options = job.options;
  options.dispatch.ahead += job.added_slots;
  for (mega::train::MemoryPlan& plan : plan_places<Spec, Kernels>(job, options, job.run)) {
    out.push_back({std::move(plan.stages),
                   plan.elements,
                   {{"parameters and optimizer", plan.parameters},
                    {"activations", plan.activations},
                    {"workspace", plan.workspace},
                    {"exchange", plan.exchange}}});
  }
  return out;
}

/// Which stage holds which layers, and how far the busiest rank is above the mean.
template <class Spec>
[[nodiscard]] std::string describe_split(const Job& job) {
  const auto cost = mega::dpp::cost_of(job.split, job.options.mesh.pipeline, job.options.chunks,
                                       counted_costs<Spec>(job.config, job.model),
                                       job.options.traversal.placement());
  char above[32];
  std::snprintf(above, sizeof above, "%.1f %%", 100 * (cost.rank / cost.mean - 1));
  return mega::sentence("stages ", mega::dpp::layout_text(job.split),
                        "; the busiest pipeline rank has ", above,
                        " more operations than the mean\n");
}

/// Parameters of the whole model, tied ones once.
template <class Spec>
[[nodiscard]] Index model_parameters(const Job& job) {
  const StageFactory<Spec, mega::nn::Kernels<>> factory{job};
  mega::train::PlannedComm alone;
  Index count = 0;
  for (int s = 0; s < job.split.stages(); ++s) {
    for (const mega::Parameter& p : factory.make({s, job.split.stages()}, alone).parameters())
      count += p.tied_to.empty() ? p.size() : 0;
  }
  return count;
}

/// What is decided by measurements, and for what its memory is planned. Empty for a fixed order.
[[nodiscard]] inline std::string describe_order(const Job& job) {
  const ChosenTraversal& traversal = job.options.traversal;
  std::string out;
  if (job.found) out = mega::sentence("order ", to_string(*job.found), '\n');
  if (traversal.schedule == Schedule::automatic && !job.found) {
    out = mega::sentence("order searched once stages are timed, planned with ", job.added_slots,
                         " slots a chunk more than the order that the search begins with\n");
  }
  if (traversal.schedule == Schedule::adaptive) {
    std::string sizes;
    for (const int size :
         traversal.dial().group_sizes(job.options.mesh.pipeline, job.options.microbatches))
      sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    out = mega::sentence("order with groups of ", sizes,
                         " micro-batches, planned for each of them\n");
  }
  if (job.options.dispatch.ahead > 0)
    out += mega::sentence("look-ahead of ", job.options.dispatch.ahead, " forwards\n");
  return out;
}

/// Layout, parameters and planned bytes of every rank. @param plans  one a place of the pipeline
template <class Spec>
[[nodiscard]] std::string describe_plan(const Job& job, const std::vector<RankPlan>& plans) {
  std::string out =
      mega::sentence(Spec::name, ": ", job.model.layers, " layers, hidden ", job.model.hidden, ", ",
                     job.model.heads, " heads (", job.model.kv_heads, " key-value) of ",
                     job.model.head_dim, ", ffn ", job.model.ffn, ", vocabulary ", job.model.vocab,
                     "\nlayout ", to_string(job.options.mesh), ", ", job.options.chunks,
                     job.options.chunks == 1 ? " chunk a rank, " : " chunks a rank, ",
                     job.options.microbatches,
                     job.options.microbatches == 1 ? " micro-batch of " : " micro-batches of ",
                     job.run.micro_batch, " x ", job.run.sequence, " tokens\n") +
      describe_split<Spec>(job) + describe_order(job) +
      mega::sentence(model_parameters<Spec>(job), " parameters in the model\n");
  for (int rank = 0; rank < job.world(); ++rank) {
    const RankPlan& plan = plans[place_of(job, rank)];
    out += mega::sentence("rank ", rank, ": stages");
    for (const int stage : plan.stages) out += mega::sentence(' ', stage);
    out += mega::sentence(", ", plan.parameters, " parameters, ", memory_text(plan), "\n");
  }
  return out;
}

}  // namespace trainer
