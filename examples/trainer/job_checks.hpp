/// @file  What a run's numbers must be, each alone and together, so that a refusal comes before
/// anything is made. They look at the configuration only; job.hpp makes the job of what passes.
#pragma once
#include "config.hpp"
#include <mega/core/error.hpp>
#include <mega/nn/transformer_config.hpp>
#include <mega/optim/learning_rate.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace trainer {

/// Refuses what no run can mean, before arithmetic on it leaves its type.
/// @throws  Error(usage)
inline void expects_between(const char* option, std::int64_t value, std::int64_t least,
                            std::int64_t most) {
  mega::expects(value >= least && value <= most, mega::ErrorCode::usage, [&] {
    return mega::sentence("--", option, " is ", value, "; it must be at least ", least,
                          " and at most ", most);
  });
}

/// @throws  Error(usage)
inline void expects_not_negative(const char* option, double value) {
  mega::expects(std::isfinite(value) && value >= 0, mega::ErrorCode::usage, [&] {
    return mega::sentence("--", option, " is ", value, "; it must be finite and not negative");
  });
}

/// Refuses sizes of a model that are wrong whatever the run is.
/// @throws  Error(usage)
inline void check_model_numbers(const Config& c) {
  constexpr std::int64_t widest = 100'000'000, longest = 1'000'000'000;
  expects_between("num-layers", c.layers, 1, 100'000);
  expects_between("hidden-size", c.hidden, 1, widest);
  expects_between("ffn-hidden-size", c.ffn, 0, widest);
  expects_between("num-attention-heads", c.heads, 1, widest);
  expects_between("num-query-groups", c.kv_heads, 0, widest);
  expects_between("kv-channels", c.head_dim, 0, widest);
  expects_between("max-position-embeddings", c.max_positions, 0, longest);
  expects_between("seq-length", c.sequence, 1, longest);
  expects_not_negative("norm-epsilon", c.norm_epsilon);
  expects_not_negative("init-method-std", c.init_deviation);
  mega::expects(std::isfinite(c.rope_theta) && c.rope_theta > 0, mega::ErrorCode::usage, [&] {
    return mega::sentence("--rotary-base is ", c.rope_theta, "; it must be finite and above 0");
  });
  mega::expects(c.head_dim > 0 || c.hidden % c.heads == 0, mega::ErrorCode::usage, [&] {
    return mega::sentence("--hidden-size ", c.hidden, " does not divide by --num-attention-heads ",
                          c.heads, "; choose heads that divide it, or give --kv-channels");
  });
  mega::expects(!(c.tie && c.untie), mega::ErrorCode::usage,
                "--tie-embeddings-and-output-weights and --untie-embeddings-and-output-weights "
                "contradict each other; give one");
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
  expects_not_negative("adam-eps", c.epsilon);
  expects_not_negative("weight-decay", c.weight_decay);
  expects_not_negative("clip-grad", c.clip);
  expects_not_negative("temperature", c.temperature);
  expects_not_negative("distributed-timeout-seconds", c.deadline_s);
  const auto below_one = [](const char* option, double value) {
    mega::expects(value >= 0 && value < 1, mega::ErrorCode::usage, [&] {
      return mega::sentence("--", option, " is ", value, "; it must be in [0, 1)");
    });
  };
  below_one("adam-beta1", c.beta1);
  below_one("adam-beta2", c.beta2);
  below_one("valid-fraction", c.valid_fraction);
}

/// Refuses options without those that they belong to.
/// @throws  Error(usage)
inline void check_companions(const Config& c) {
  mega::expects(c.save_interval == 0 || !c.save_dir.empty(), mega::ErrorCode::usage,
                "--save-interval needs --save, the folder to save to");
  const bool wsd = c.decay == mega::optim::Decay::warmup_stable_decay;
  mega::expects(
      wsd == (c.wsd_decay_steps > 0), mega::ErrorCode::usage,
      "--lr-decay-style WSD and --lr-wsd-decay-iters belong together; give both or neither");
}

/// Refuses a learning rate whose parts do not fit one after the other.
/// @pre  c.decay_steps is settled   @throws  Error(usage)
inline void check_decay(const Config& c) {
  mega::expects(c.warmup_steps + c.wsd_decay_steps <= c.decay_steps, mega::ErrorCode::usage, [&] {
    return mega::sentence("--lr-warmup-iters ", c.warmup_steps, " and --lr-wsd-decay-iters ",
                          c.wsd_decay_steps, " do not fit into the ", c.decay_steps,
                          " steps of --lr-decay-iters");
  });
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

}  // namespace trainer
