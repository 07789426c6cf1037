/// @file  Job: the configuration made definite. Every default is filled in and every size checked
/// before a rank starts, so a refusal leaves nothing behind.
#pragma once
#include "config.hpp"
#include "decisions.hpp"
#include "job_checks.hpp"
#include "layer_choice.hpp"
#include "order_choice.hpp"
#include "recorded_decisions.hpp"
#include "schedule_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/dpp/adaptive.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/dpp/look_ahead_dispatch.hpp>
#include <mega/nn/transformer_config.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/optim/learning_rate.hpp>
#include <mega/scan/injected_faults.hpp>
#include <mega/train/trainer.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace trainer {

using RunOptions = mega::TrainerOptions<ChosenTraversal, mega::dpp::BoundedLookAhead>;

struct Job {
  Config config;
  mega::nn::TransformerConfig model;
  mega::nn::TransformerRun run;
  mega::dpp::LayerSplit split = mega::dpp::split_layers(1, 1);
  RunOptions options;
  std::optional<FoundOrder> found;  ///< by --schedule auto, where it need not measure
  int added_slots = 0;              ///< of a chunk, for an order that is still to be found
  RecordedDial recorded;            ///< of --schedule adaptive, to be repeated
  mega::optim::LearningRate learning_rate;
  std::int64_t steps = 0;

  [[nodiscard]] int world() const noexcept { return options.mesh.size(); }
};

[[nodiscard]] inline DecidedPipeline decided_pipeline(const Job& job) noexcept {
  return {job.config.pipeline, job.config.chunks, job.options.microbatches,
          job.options.traversal.placement().is_v, job.config.memory_cap};
}

/// Sizes of the model that the flags describe. @param vocab  of the tokenizer
template <class Spec>
[[nodiscard]] mega::nn::TransformerConfig model_from_flags(const Config& c, Index vocab) {
  constexpr bool gated = Spec::activation::inputs == 2;
  check_model_numbers(c);
  mega::nn::TransformerConfig model;
  model.layers = c.layers;
  model.hidden = c.hidden;
  model.heads = c.heads;
  model.kv_heads = c.kv_heads > 0 ? c.kv_heads : c.heads;
  model.head_dim = c.head_dim > 0 ? c.head_dim : c.hidden / c.heads;
  model.ffn = c.ffn > 0 ? c.ffn : gated ? (c.hidden * 8 / 3 + 31) / 32 * 32 : 4 * c.hidden;
  model.vocab = vocab;
  model.max_positions = c.max_positions > 0 ? c.max_positions : c.sequence;
  model.norm_epsilon = static_cast<float>(c.norm_epsilon);
  model.rope.theta = c.rope_theta;
  model.dropout = {static_cast<float>(c.dropout_hidden), static_cast<float>(c.dropout_attention),
                   static_cast<float>(c.dropout_hidden)};
  model.tied_head = c.tie || (!c.untie && Spec::position::has_table);
  model.init_deviation = static_cast<float>(c.init_deviation);
  return model;
}

/// Settles what --schedule adaptive and auto may do, and what they have to repeat.
/// @pre  the job's layout, chunks and micro-batches are settled
/// @throws  Error(usage, bad_input)
inline void choose_order(Job& job) {
  const Config& c = job.config;
  const int p = c.pipeline, m = job.options.microbatches, v = c.chunks;
  ChosenTraversal& traversal = job.options.traversal;
  if (c.schedule == Schedule::adaptive) {
    traversal.largest_group = largest_group(p, m, v, c.memory_cap, job.options.dispatch.ahead);
    if (!c.replay_path.empty()) {
      job.recorded =
          read_dial(c.replay_path, decided_pipeline(job), traversal.dial().group_sizes(p, m));
      mega::expects(
          !c.load_dir.empty() || job.recorded.first_step == 1, mega::ErrorCode::usage, [&] {
            return mega::sentence("--replay-decisions ", c.replay_path, " begins with step ",
                                  job.recorded.first_step,
                                  ", and this run with step 1; give --load the checkpoint that the "
                                  "recorded run went on from");
          });
    }
  } else if (c.schedule == Schedule::automatic) {
    StageTimes times;
    RecordedOrder recorded;
    if (!c.stage_times.empty()) times = parse_stage_times(c.stage_times, p * v);
    if (!c.replay_path.empty()) recorded = read_order(c.replay_path, decided_pipeline(job));
    const SearchLimits limits(traversal, p, m, v, c.memory_cap);
    if (!times.empty()) {
      job.found = find_order(limits, times);
    } else if (!recorded.times.empty()) {
      job.found = find_recorded(c.replay_path, limits, recorded);
    } else {
      job.added_slots = limits.added_slots();
      return;
    }
    traversal.found = job.found->lists;
  }
}

/// Refuses here, rather than on every rank, an order that the schedule does not have.
/// @param given  what the job was made of
/// @throws  Error(usage)
inline void check_order(const Job& job, const Config& given) {
  const Config& c = job.config;
  try {
    (void)mega::dpp::make_schedule(job.options.traversal, c.pipeline, job.options.microbatches,
                                   c.chunks);
  } catch (const mega::Error& refusal) {
    const bool by_layout = given.chunks == 0 && !c.layout.empty();
    throw mega::Error(
        refusal.code(),
        mega::sentence(
            "--schedule ", name_of(all_schedule_names, c.schedule), " with --pp ", c.pipeline,
            by_layout ? mega::sentence(", the layout's ", c.pipeline * c.chunks, " stages")
                      : mega::sentence(", --vpp ", c.chunks),
            " and ", job.options.microbatches, " micro-batches: ", refusal.what()));
  }
}

/// @param world  ranks that are there, or 0 where the layout decides how many to start
/// Throws Error(usage) with the numbers and what would be valid.
template <class Spec>
[[nodiscard]] Job make_job(const Config& config, const mega::nn::TransformerConfig& model,
                           int world) {
  using mega::ErrorCode;
  using mega::expects;
  using mega::sentence;
  Job job;
  job.config = config;
  job.model = model;
  Config& c = job.config;
  check_numbers(c);
  check_order_choice(c);
  check_graphs(c);
  check_companions(c);

  const int model_ranks = c.tensor * c.pipeline;
  if (c.data == 0) {
    expects(world % model_ranks == 0, ErrorCode::usage, [&] {
      return sentence("the ", world, " ranks that were started do not divide by --tp ", c.tensor,
                      " x --pp ", c.pipeline, " = ", model_ranks, "; start a multiple of that");
    });
    c.data = world > 0 ? world / model_ranks : 1;
  }
  job.options.mesh = {.tensor = c.tensor, .data = c.data, .pipeline = c.pipeline};
  mega::validate(job.options.mesh, world > 0 ? world : job.options.mesh.size());
  (void)mega::scan::parse_faults(c.inject, job.world());
  const std::int64_t samples_a_micro_step = std::int64_t{c.micro_batch} * c.data;
  expects(c.global_batch % samples_a_micro_step == 0, ErrorCode::usage, [&] {
    const std::int64_t below = c.global_batch / samples_a_micro_step * samples_a_micro_step;
    return sentence("--global-batch-size ", c.global_batch,
                    " does not divide by --micro-batch-size ", c.micro_batch, " x --dp ", c.data,
                    "; the nearest valid ones are ", below > 0 ? below : samples_a_micro_step,
                    " and ", below + samples_a_micro_step);
  });
  check_layer_choice(c);
  c.chunks = chosen_chunks(c);
  job.options.chunks = c.chunks;
  const std::int64_t microbatches = c.global_batch / samples_a_micro_step;
  const std::int64_t stages = std::int64_t{c.pipeline} * c.chunks;
  constexpr std::int64_t most_passes = 1 << 22;  // so that their order fits into memory
  expects(microbatches <= most_passes / stages, ErrorCode::usage, [&] {
    return sentence(microbatches, " micro-batches times ", stages, " stages are ",
                    "too many passes for a step, which has at most ", most_passes,
                    "; raise --micro-batch-size or lower --global-batch-size");
  });
  job.options.microbatches = static_cast<int>(microbatches);
  check_elements(job.model, {.micro_batch = c.micro_batch, .sequence = c.sequence},
                 job.options.microbatches);
  const int passes = job.options.microbatches * c.chunks;
  job.options.traversal = chosen_traversal(c);
  // No more forwards can be ahead than there are. A cap shifts the peaks of all ranks by what it is
  // beyond the fullest's, so twice as many activations as there are cap none.
  job.options.dispatch = {std::min(c.look_ahead, passes)};
  c.memory_cap = std::min(c.memory_cap, 2 * passes);
  choose_order(job);
  job.options.shard_optimizer = c.shard_optimizer;
  job.options.clip_norm = c.clip;
  job.options.adamw = {static_cast<float>(c.beta1), static_cast<float>(c.beta2),
                       static_cast<float>(c.epsilon), static_cast<float>(c.weight_decay)};
  if (c.gpu) {
    job.options.loss_scaling = {.initial = static_cast<float>(c.gpu->initial_loss_scale),
                                .growth_interval = c.gpu->loss_scale_window,
                                .minimum = static_cast<float>(c.gpu->min_loss_scale)};
  }
  job.options.seed = c.seed;
  if (c.samples > 0) c.steps = (c.samples + c.global_batch - 1) / c.global_batch;
  job.steps = c.steps;
  if (c.decay_steps == 0) c.decay_steps = std::max(c.steps, c.warmup_steps + 1);
  job.learning_rate = {c.decay,        c.learning_rate, c.min_learning_rate,
                       c.warmup_steps, c.decay_steps,   c.wsd_decay_steps};
  mega::optim::validate(job.learning_rate);
  check_decay(c);

  job.run = {.micro_batch = c.micro_batch,
             .sequence = c.sequence,
             .sequence_parallel = c.sequence_parallel && c.tensor > 1,
             .recompute = c.recompute,
             .split_backward = job.options.traversal.splits_backward()};
  mega::nn::validate<Spec>(job.model, job.run, c.tensor, c.pipeline * c.chunks);
  job.split = chosen_layers<Spec>(c, job.model);
  check_order(job, config);
  return job;
}

}  // namespace trainer
