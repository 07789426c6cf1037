/// @file  Job: the configuration made definite. Every default is filled in and every size checked
/// before a rank starts, so a refusal leaves nothing behind.
#pragma once
#include "config.hpp"
#include "decisions.hpp"
#include "layer_choice.hpp"
#include "order_choice.hpp"
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

#include <cmath>
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
  std::optional<FoundOrder> found;         ///< by --schedule auto, where it need not measure
  int added_slots = 0;                     ///< of a chunk, for an order that is still to be found
  std::vector<mega::dpp::DialMove> moves;  ///< of --schedule adaptive, to be repeated
  mega::optim::LearningRate learning_rate;
  std::int64_t steps = 0;

  [[nodiscard]] int world() const noexcept { return options.mesh.size(); }
};

/// Sizes of the model that the flags describe. @param vocab  of the tokenizer
template <class Spec>
[[nodiscard]] mega::nn::TransformerConfig model_from_flags(const Config& c, Index vocab) {
  constexpr bool gated = Spec::activation::inputs == 2;
  mega::nn::TransformerConfig model;
  model.layers = c.layers;
  model.hidden = c.hidden;
  model.heads = c.heads;
  model.kv_heads = c.kv_heads > 0 ? c.kv_heads : c.heads;
  mega::expects(c.heads > 0 && (c.head_dim > 0 || c.hidden % c.heads == 0), mega::ErrorCode::usage,
                [&] {
                  return mega::sentence("--hidden-size ", c.hidden,
                                        " does not divide by --num-attention-heads ", c.heads,
                                        "; choose heads that divide it, or give --kv-channels");
                });
  model.head_dim = c.head_dim > 0 ? c.head_dim : c.hidden / c.heads;
  model.ffn = c.ffn > 0 ? c.ffn : gated ? (c.hidden * 8 / 3 + 31) / 32 * 32 : 4 * c.hidden;
  model.vocab = vocab;
  model.max_positions = c.max_positions > 0 ? c.max_positions : c.sequence;
  model.norm_epsilon = static_cast<float>(c.norm_epsilon);
  model.rope.theta = c.rope_theta;
  model.dropout = {static_cast<float>(c.dropout_hidden), static_cast<float>(c.dropout_attention),
                   static_cast<float>(c.dropout_hidden)};
  mega::expects(!(c.tie && c.untie), mega::ErrorCode::usage,
                "--tie-embeddings-and-output-weights and --untie-embeddings-and-output-weights "
                "contradict each other; give one");
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
    traversal.largest_group = largest_group(p, m, v, c.memory_cap, c.look_ahead);
    if (!c.replay_path.empty()) job.moves = read_decisions(c.replay_path, c.schedule).moves;
    check_moves(job.moves, traversal.dial().group_sizes(p, m));
  } else if (c.schedule == Schedule::automatic) {
    StageTimes times;
    if (!c.stage_times.empty()) times = parse_stage_times(c.stage_times, p * v);
    if (!c.replay_path.empty()) times = read_decisions(c.replay_path, c.schedule).stage_times;
    if (times.empty()) {
      job.added_slots = SearchLimits(p, m, v, c.memory_cap).added_slots();
      return;
    }
    job.found = find_order(p, m, v, times, c.memory_cap);
    traversal.found = job.found->lists;
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
  const auto positive = [](const char* name, std::int64_t value) {
    expects(value >= 1, ErrorCode::usage,
            [&] { return sentence("--", name, " is ", value, "; it must be at least 1"); });
  };
  const auto not_negative = [](const char* name, double value) {
    expects(std::isfinite(value) && value >= 0, ErrorCode::usage, [&] {
      return sentence("--", name, " is ", value, "; it must be finite and not negative");
    });
  };
  positive("tensor-model-parallel-size", c.tensor);
  positive("pipeline-model-parallel-size", c.pipeline);
  positive("micro-batch-size", c.micro_batch);
  positive("global-batch-size", c.global_batch);
  positive("seq-length", c.sequence);
  positive("log-interval", c.log_interval);
  positive("trace-interval", c.trace_interval);
  not_negative("data-parallel-size", c.data);
  not_negative("num-virtual-stages-per-pipeline-rank", c.chunks);
  not_negative("look-ahead", c.look_ahead);
  not_negative("memory-cap", c.memory_cap);
  not_negative("decoder-first-pipeline-num-layers", c.first_layers);
  not_negative("decoder-last-pipeline-num-layers", c.last_layers);
  not_negative("weight-decay", c.weight_decay);
  not_negative("clip-grad", c.clip);
  not_negative("temperature", c.temperature);
  not_negative("train-iters", static_cast<double>(c.steps));
  not_negative("num-samples", static_cast<double>(c.samples));
  not_negative("eval-interval", static_cast<double>(c.eval_interval));
  not_negative("eval-iters", c.eval_steps);
  not_negative("save-interval", static_cast<double>(c.save_interval));
  not_negative("keep", c.keep);
  not_negative("slow-rank-interval", static_cast<double>(c.watch_interval));
  not_negative("sample-tokens", c.sample_tokens);
  not_negative("blas-threads", c.blas_threads);
  not_negative("distributed-timeout-seconds", c.deadline_s);
  const auto below_one = [](const char* name, double value) {
    expects(value >= 0 && value < 1, ErrorCode::usage,
            [&] { return sentence("--", name, " is ", value, "; it must be in [0, 1)"); });
  };
  below_one("adam-beta1", c.beta1);
  below_one("adam-beta2", c.beta2);
  below_one("valid-fraction", c.valid_fraction);
  expects((c.schedule == Schedule::interleaved) == (c.group_size != 0), ErrorCode::usage,
          "--schedule interleaved and --microbatch-group-size-per-virtual-pipeline-stage belong "
          "together; give both or neither");
  check_order_choice(c);
  expects(c.save_interval == 0 || !c.save_dir.empty(), ErrorCode::usage,
          "--save-interval needs --save, the folder to save to");

  const bool wsd = c.decay == mega::optim::Decay::warmup_stable_decay;
  expects(wsd == (c.wsd_decay_steps > 0), ErrorCode::usage,
          "--lr-decay-style WSD and --lr-wsd-decay-iters belong together; give both or neither");

  const int model_ranks = c.tensor * c.pipeline;
  if (c.data == 0) {
    expects(world % model_ranks == 0, ErrorCode::usage, [&] {
      return sentence("a world of ", world, " ranks does not divide by tp ", c.tensor, " x pp ",
                      c.pipeline, " = ", model_ranks);
    });
    c.data = world > 0 ? world / model_ranks : 1;
  }
  job.options.mesh = {.tensor = c.tensor, .data = c.data, .pipeline = c.pipeline};
  mega::validate(job.options.mesh, world > 0 ? world : job.options.mesh.size());
  (void)mega::scan::parse_faults(c.inject, job.world());
  const int samples_a_micro_step = c.micro_batch * c.data;
  expects(c.global_batch % samples_a_micro_step == 0, ErrorCode::usage, [&] {
    const int below = c.global_batch / samples_a_micro_step * samples_a_micro_step;
    return sentence("--global-batch-size ", c.global_batch, " does not divide by micro-batch size ",
                    c.micro_batch, " x dp ", c.data, "; the nearest valid ones are ",
                    below > 0 ? below : samples_a_micro_step, " and ",
                    below + samples_a_micro_step);
  });
  check_layer_choice(c);
  c.chunks = chosen_chunks(c);
  job.options.chunks = c.chunks;
  job.options.microbatches = c.global_batch / samples_a_micro_step;
  job.options.traversal = {c.schedule, c.group_size};
  job.options.dispatch = {c.look_ahead};
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
  expects(c.warmup_steps + c.wsd_decay_steps <= c.decay_steps, ErrorCode::usage, [&] {
    return sentence("warm-up of ", c.warmup_steps, " and a final descent of ", c.wsd_decay_steps,
                    " steps do not fit into the ", c.decay_steps, " steps of --lr-decay-iters");
  });

  job.run = {.micro_batch = c.micro_batch,
             .sequence = c.sequence,
             .sequence_parallel = c.sequence_parallel && c.tensor > 1,
             .recompute = c.recompute,
             .split_backward = job.options.traversal.splits_backward()};
  mega::nn::validate<Spec>(job.model, job.run, c.tensor, c.pipeline * c.chunks);
  job.split = chosen_layers<Spec>(c, job.model);
  // The order of the schedule, refused here rather than on every rank.
  (void)mega::dpp::make_schedule(job.options.traversal, c.pipeline, job.options.microbatches,
                                 c.chunks);
  return job;
}

}  // namespace trainer
