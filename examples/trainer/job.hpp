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

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
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

/// Refuses what no run can mean, before arithmetic on it leaves its type.
/// @throws  Error(usage)
inline void expects_between(const char* option, std::int64_t value, std::int64_t least,
                            std::int64_t most) {
  mega::expects(value >= least && value <= most, mega::ErrorCode::usage, [&] {
    return mega::sentence("--", option, " is ", value, "; it must be at least ", least,
                          " and at most ", most);
  });
}

/// Sizes of the model that the flags describe. @param vocab  of the tokenizer
template <class Spec>
[[nodiscard]] mega::nn::TransformerConfig model_from_flags(const Config& c, Index vocab) {
  constexpr bool gated = Spec::activation::inputs == 2;
  constexpr std::int64_t widest = 100'000'000, longest = 1'000'000'000;
  expects_between("num-layers", c.layers, 1, 100'000);
  expects_between("hidden-size", c.hidden, 1, widest);
  expects_between("ffn-hidden-size", c.ffn, 0, widest);
  expects_between("num-attention-heads", c.heads, 1, widest);
  expects_between("num-query-groups", c.kv_heads, 0, widest);
  expects_between("kv-channels", c.head_dim, 0, widest);
  expects_between("max-position-embeddings", c.max_positions, 0, longest);
  expects_between("seq-length", c.sequence, 1, longest);
  mega::nn::TransformerConfig model;
  model.layers = c.layers;
  model.hidden = c.hidden;
  model.heads = c.heads;
  model.kv_heads = c.kv_heads > 0 ? c.kv_heads : c.heads;
  mega::expects(c.head_dim > 0 || c.hidden % c.heads == 0, mega::ErrorCode::usage, [&] {
    return mega::sentence("--hidden-size ", c.hidden, " does not divide by --num-attention-heads ",
                          c.heads, "; choose heads that divide it, or give --kv-channels");
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

/// Refuses numbers that are wrong whatever the others are, and more ranks than can be counted.
/// @throws  Error(usage)
inline void check_numbers(const Config& c) {
  constexpr std::int64_t most = 1'000'000'000, most_steps = 1'000'000'000'000'000;
  constexpr std::int64_t most_ranks = 1 << 20;
  expects_between("tensor-model-parallel-size", c.tensor, 1, most_ranks);
  expects_between("pipeline-model-parallel-size", c.pipeline, 1, most_ranks);
  expects_between("data-parallel-size", c.data, 0, most_ranks);
  const std::int64_t model_ranks = std::int64_t{c.tensor} * c.pipeline;
  mega::expects(model_ranks * std::max(c.data, 1) <= most_ranks, mega::ErrorCode::usage, [&] {
    return mega::sentence("tp ", c.tensor, " x pp ", c.pipeline, " x dp ", c.data,
                          " ranks are too many; a run has at most ", most_ranks);
  });
  expects_between("num-virtual-stages-per-pipeline-rank", c.chunks, 0, most_ranks);
  expects_between("decoder-first-pipeline-num-layers", c.first_layers, 0, most);
  expects_between("decoder-last-pipeline-num-layers", c.last_layers, 0, most);
  expects_between("look-ahead", c.look_ahead, 0, std::numeric_limits<int>::max());
  expects_between("memory-cap", c.memory_cap, 0, std::numeric_limits<int>::max());
  expects_between("microbatch-group-size-per-virtual-pipeline-stage", c.group_size, 0, most);
  expects_between("seq-length", c.sequence, 1, most);
  expects_between("micro-batch-size", c.micro_batch, 1, most);
  expects_between("global-batch-size", c.global_batch, 1, most);
  expects_between("train-iters", c.steps, 0, most_steps);
  expects_between("num-samples", c.samples, 0, most_steps);
  expects_between("eval-interval", c.eval_interval, 0, most_steps);
  expects_between("eval-iters", c.eval_steps, 0, most);
  expects_between("lr-decay-iters", c.decay_steps, 0, most_steps);
  expects_between("lr-wsd-decay-iters", c.wsd_decay_steps, 0, most_steps);
  expects_between("lr-warmup-iters", c.warmup_steps, 0, most_steps);
  expects_between("save-interval", c.save_interval, 0, most_steps);
  expects_between("keep", c.keep, 0, most);
  expects_between("log-interval", c.log_interval, 1, most_steps);
  expects_between("sample-tokens", c.sample_tokens, 0, most);
  expects_between("trace-interval", c.trace_interval, 1, most_steps);
  expects_between("slow-rank-interval", c.watch_interval, 0, most_steps);
  expects_between("blas-threads", c.blas_threads, 0, 4096);
  const auto not_negative = [](const char* option, double value) {
    mega::expects(std::isfinite(value) && value >= 0, mega::ErrorCode::usage, [&] {
      return mega::sentence("--", option, " is ", value, "; it must be finite and not negative");
    });
  };
  not_negative("weight-decay", c.weight_decay);
  not_negative("clip-grad", c.clip);
  not_negative("temperature", c.temperature);
  not_negative("distributed-timeout-seconds", c.deadline_s);
  const auto below_one = [](const char* option, double value) {
    mega::expects(value >= 0 && value < 1, mega::ErrorCode::usage, [&] {
      return mega::sentence("--", option, " is ", value, "; it must be in [0, 1)");
    });
  };
  below_one("adam-beta1", c.beta1);
  below_one("adam-beta2", c.beta2);
  below_one("valid-fraction", c.valid_fraction);
}

/// Refuses sizes each of which is possible, but not all of them together.
/// @throws  Error(usage)
inline void check_elements(const mega::nn::TransformerConfig& m,
                           const mega::nn::TransformerRun& run, int microbatches) {
  constexpr double most = 1e16;  // bytes of them and sums over ranks fit into 63 bits
  const auto number = [](Index n) { return static_cast<double>(n); };
  const double attention = number(m.head_dim) * number(m.heads + 2 * m.kv_heads);
  const double layers = number(m.layers), hidden = number(m.hidden);
  const double parameters = layers * hidden * (2 * attention + 3 * number(m.ffn)) +
                            hidden * (2 * number(m.vocab) + number(m.max_positions));
  const double tokens = number(run.micro_batch) * number(run.sequence) * microbatches;
  const double values =
      tokens * (layers * (8 * hidden + 4 * attention + 4 * number(m.ffn)) + number(m.vocab));
  mega::expects(parameters <= most && values <= most, mega::ErrorCode::usage, [&] {
    return mega::sentence("the model has about ", parameters, " parameters and a step about ",
                          values, " activations; more than ", most, " of either are too many");
  });
}

/// Refuses what would keep all that --cuda-graphs is for from being launched as graphs.
/// @pre  check_numbers()   @throws  Error(usage)
inline void check_graphs(const Config& c) {
  if (!c.gpu || !c.gpu->graphs) return;
  const auto excludes = [](bool chosen, const char* option, const char* why) {
    mega::expects(!chosen, mega::ErrorCode::usage, [&] {
      return mega::sentence("--cuda-graphs and ", option, " exclude each other: ", why,
                            ", so nothing would be launched as a graph; leave one of them out");
    });
  };
  excludes(c.tensor > 1, "--tp above 1", "collectives inside of layers cannot be recorded");
  excludes(c.schedule == Schedule::adaptive, "--schedule adaptive", "it times every wait");
  const bool has_peers = c.tensor * c.pipeline * std::max(c.data, 1) > 1;
  excludes(has_peers && c.watch_interval > 0, "--slow-rank-interval", "it times every wait");
  excludes(!c.trace_dir.empty(), "--trace", "it times every call that a graph would replace");
  excludes(!c.inject.empty(), "--inject", "faults act on the calls that a graph would replace");
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
  check_numbers(c);
  expects((c.schedule == Schedule::interleaved) == (c.group_size != 0), ErrorCode::usage,
          "--schedule interleaved and --microbatch-group-size-per-virtual-pipeline-stage belong "
          "together; give both or neither");
  check_order_choice(c);
  check_graphs(c);
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
  const std::int64_t samples_a_micro_step = std::int64_t{c.micro_batch} * c.data;
  expects(c.global_batch % samples_a_micro_step == 0, ErrorCode::usage, [&] {
    const std::int64_t below = c.global_batch / samples_a_micro_step * samples_a_micro_step;
    return sentence("--global-batch-size ", c.global_batch, " does not divide by micro-batch size ",
                    c.micro_batch, " x dp ", c.data, "; the nearest valid ones are ",
                    below > 0 ? below : samples_a_micro_step, " and ",
                    below + samples_a_micro_step);
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
  job.options.traversal = {c.schedule, c.group_size};
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
