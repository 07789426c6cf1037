/// @file  What a run of a trainer is: one typed struct. Command line, help and the printed
/// effective configuration are derived from describe(); a reader of files would be one more
/// visitor.
#pragma once
#include <mega/core/view.hpp>
#include <mega/dpp/named_orders.hpp>
#include <mega/nn/transformer_config.hpp>
#include <mega/optim/learning_rate.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace trainer {

using mega::Index;

using Schedule = mega::dpp::NamedOrder;
enum class LogLevel : std::uint8_t { quiet, info, debug };
enum class Precision : std::uint8_t { bf16, fp16, fp32 };

/// Names of the values of an enumeration, as the command line spells them.
template <class E, std::size_t N>
using Names = std::array<std::pair<std::string_view, E>, N>;

inline constexpr auto all_schedule_names = [] {
  Names<Schedule, mega::dpp::order_names.size()> all{};
  for (std::size_t i = 0; i < all.size(); ++i)
    all[i] = {mega::dpp::order_names[i].name, mega::dpp::order_names[i].order};
  return all;
}();
/// Those but the two that are decided by measurements, which stand last.
inline constexpr auto schedule_names = [] {
  Names<Schedule, all_schedule_names.size() - 2> fixed{};
  for (std::size_t i = 0; i < fixed.size(); ++i) fixed[i] = all_schedule_names[i];
  return fixed;
}();
static_assert(all_schedule_names[schedule_names.size()].second == Schedule::adaptive &&
              all_schedule_names.back().second == Schedule::automatic);
inline constexpr Names<mega::optim::Decay, 5> decay_names{
    {{"constant", mega::optim::Decay::constant},
     {"linear", mega::optim::Decay::linear},
     {"cosine", mega::optim::Decay::cosine},
     {"inverse-square-root", mega::optim::Decay::inverse_square_root},
     {"WSD", mega::optim::Decay::warmup_stable_decay}}};
inline constexpr Names<mega::nn::Recompute, 3> recompute_names{
    {{"none", mega::nn::Recompute::none},
     {"selective", mega::nn::Recompute::selective},
     {"full", mega::nn::Recompute::full}}};
inline constexpr Names<LogLevel, 3> log_level_names{
    {{"quiet", LogLevel::quiet}, {"info", LogLevel::info}, {"debug", LogLevel::debug}}};

inline constexpr Names<Precision, 3> precision_names{
    {{"bf16", Precision::bf16}, {"fp16", Precision::fp16}, {"fp32", Precision::fp32}}};

/// What a run on GPUs chooses besides.
struct GpuChoices {
  Precision precision = Precision::bf16;
  double initial_loss_scale = 65536;
  double min_loss_scale = 1;
  int loss_scale_window = 2000;
  double memory_utilization = 0.95;
  std::string memory;  ///< of each GPU; empty: what the GPU says
  bool tune = false;
  std::string algorithms_path;
  bool graphs = false;
};

struct Config {
  // Layout
  int tensor = 1;
  int pipeline = 1;
  int data = 0;          ///< 0: the ranks that tensor and pipeline parallelism leave
  int chunks = 0;        ///< 0: as many as the layout's stages give, 1 without a layout
  std::string layout;    ///< empty: none
  int first_layers = 0;  ///< 0: not fixed
  int last_layers = 0;   ///< 0: not fixed
  bool balance = false;
  bool sequence_parallel = false;
  bool shard_optimizer = false;
  Schedule schedule = Schedule::dfc;
  int group_size = 0;            ///< 0: the schedule's own
  std::string weight_gradients;  ///< empty: by rank
  std::string placement;         ///< empty: the loop, or the schedule's own
  int look_ahead = 0;            ///< 0: the static order
  std::string stage_times;       ///< empty: measured
  int memory_cap = 0;            ///< 0: the schedule's own
  std::string replay_path;       ///< empty: decisions are made
  // Model
  std::string import_dir;
  int layers = 4;
  Index hidden = 128;
  Index ffn = 0;  ///< 0: 4 x hidden, or 8/3 x hidden rounded to 32 for SwiGLU
  Index heads = 4;
  Index kv_heads = 0;       ///< 0: as many as heads
  Index head_dim = 0;       ///< 0: hidden / heads
  Index max_positions = 0;  ///< 0: the sequence length
  double norm_epsilon = 1e-5;
  double rope_theta = 500000;
  double dropout_attention = 0;
  double dropout_hidden = 0;
  double init_deviation = 0.02;
  bool untie = false;
  bool tie = false;
  mega::nn::Recompute recompute = mega::nn::Recompute::none;
  // Training
  Index sequence = 128;
  int micro_batch = 2;
  int global_batch = 16;
  std::int64_t steps = 100;
  std::int64_t samples = 0;  ///< not 0: as many steps as these samples need
  std::int64_t eval_interval = 0;
  int eval_steps = 4;
  std::uint64_t seed = 1234;
  // Optimizer
  double learning_rate = 3e-3;
  double min_learning_rate = 3e-4;
  mega::optim::Decay decay = mega::optim::Decay::cosine;
  std::int64_t decay_steps = 0;  ///< 0: all steps
  std::int64_t wsd_decay_steps = 0;
  std::int64_t warmup_steps = 0;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double clip = 1.0;
  // Data
  std::string data_path;
  double valid_fraction = 0.05;
  // Checkpoints
  std::string save_dir;
  std::string load_dir;
  std::string export_dir;
  std::int64_t save_interval = 0;
  int keep = 2;
  // Output
  std::int64_t log_interval = 1;
  std::string log_json;
  LogLevel log_level = LogLevel::info;
  int sample_tokens = 0;
  std::string prompt = "The ";
  double temperature = 0.8;
  bool dry_run = false;
  // Tracing
  std::string trace_dir;
  std::int64_t trace_interval = 1;
  std::int64_t watch_interval = 4;  ///< 0: ranks are not compared
  std::string inject;
  // Machine
  int blas_threads = 0;  ///< 0: the cores, or 1 where ranks are threads
  double deadline_s = 600;
  std::optional<GpuChoices> gpu;  ///< in the programs for GPUs
};

/// Calls visit.section(title) and visit(names, member, help) for every field, in the order of the
/// help text; visit.choice(names, member, table, help) for enumerations. `names` is the long
/// option, then short forms, separated by commas.
template <class C, class Visitor>
void describe(C& c, Visitor& visit) {
  visit.section("Layout");
  visit("tensor-model-parallel-size,tp", c.tensor, "ranks that divide every layer");
  visit("pipeline-model-parallel-size,pp", c.pipeline, "ranks that divide the layers among them");
  visit("data-parallel-size,dp", c.data,
        "replicas; 0: 1 for threads, the rest of the world for processes");
  visit("num-virtual-stages-per-pipeline-rank,vpp", c.chunks,
        "model chunks a pipeline rank holds; 0: 1, or what the schedule or the layout needs");
  visit("pipeline-model-parallel-layout", c.layout,
        "layers of every stage in turn: 'E t3|t4|t4|t3 L', or 'Et*3|(t*4|)*2,t*3L'");
  visit("decoder-first-pipeline-num-layers", c.first_layers,
        "layers of the first pipeline rank; 0: not fixed");
  visit("decoder-last-pipeline-num-layers", c.last_layers,
        "layers of the last pipeline rank; 0: not fixed");
  visit("balance-layers", c.balance,
        "layers where they keep the busiest rank least busy, by counted operations");
  visit("sequence-parallel,sp", c.sequence_parallel,
        "tensor ranks divide the residual stream's rows");
  visit("use-distributed-optimizer,zero1", c.shard_optimizer,
        "data ranks divide the optimizer's state");
  visit.choice("schedule", c.schedule, all_schedule_names,
               "order of a rank's micro-batches and chunks; adaptive: group sizes between dfc and "
               "bfc by what steps measure; auto: searched from the stages' times");
  visit("microbatch-group-size-per-virtual-pipeline-stage,group-size", c.group_size,
        "micro-batches a chunk runs before the next chunk, for --schedule interleaved and "
        "split-interleaved");
  visit("weight-gradients,weights", c.weight_gradients,
        "when those of --schedule split-<base> run: at-once, by-rank, at-end, or how many may wait "
        "on a rank; without it: by-rank");
  visit("placement", c.placement,
        "of the stages for --schedule auto: loop, round the ranks, or v, down and up again, with 2 "
        "chunks a rank; without it: loop");
  visit("look-ahead", c.look_ahead,
        "forwards that may overtake while the next input is late; 0: none");
  visit("stage-times", c.stage_times,
        "for --schedule auto: forward, input gradient, weight gradient and, if wanted, transfer of "
        "a chunk, as 2,2,1,0.1; with ; between them one for each stage; without it: measured");
  visit("memory-cap", c.memory_cap,
        "activations of a chunk that a rank may hold, for --schedule v, adaptive and auto; 0: "
        "adaptive any, auto no more than zb-h1, split-dfc or zb-v");
  visit("replay-decisions", c.replay_path,
        "file that --log-json wrote, whose decisions of --schedule adaptive or auto are repeated");

  visit.section("Model");
  visit("import-hf", c.import_dir,
        "start from a Hugging Face folder; its config.json sets the sizes");
  visit("num-layers", c.layers, "layers");
  visit("hidden-size", c.hidden, "width of the residual stream");
  visit("ffn-hidden-size", c.ffn, "width inside the MLP; 0: 4 x hidden, 8/3 x hidden for SwiGLU");
  visit("num-attention-heads", c.heads, "query heads");
  visit("num-query-groups,kv-heads", c.kv_heads, "key and value heads; 0: as many as query heads");
  visit("kv-channels", c.head_dim, "width of a head; 0: hidden / heads");
  visit("max-position-embeddings", c.max_positions,
        "rows of a learned position table; 0: the sequence length");
  visit("norm-epsilon", c.norm_epsilon, "added to the variance in norms");
  visit("rotary-base", c.rope_theta, "base of the rotary embedding");
  visit("attention-dropout", c.dropout_attention, "probability for attention weights");
  visit("hidden-dropout", c.dropout_hidden, "probability for embeddings and block outputs");
  visit("init-method-std", c.init_deviation, "standard deviation of initial weights");
  visit("untie-embeddings-and-output-weights", c.untie, "GPT: a head of its own");
  visit("tie-embeddings-and-output-weights", c.tie, "Llama: the head shares the embedding");
  visit.choice("recompute-granularity,recompute", c.recompute, recompute_names,
               "what backward computes again instead of keeping it");

  visit.section("Training");
  visit("seq-length", c.sequence, "tokens of a sample");
  visit("micro-batch-size", c.micro_batch, "samples of a micro-batch");
  visit("global-batch-size", c.global_batch, "samples of a step over all ranks");
  visit("train-iters,steps", c.steps, "steps in all, those of a loaded checkpoint included");
  visit("num-samples", c.samples, "run the whole path on this many samples; 0: --train-iters");
  visit("eval-interval", c.eval_interval, "steps between validations; 0: at the end only");
  visit("eval-iters", c.eval_steps, "batches of a validation");
  visit("seed", c.seed, "of initial weights, order of samples, dropout");

  visit.section("Optimizer");
  visit("lr", c.learning_rate, "peak learning rate");
  visit("min-lr", c.min_learning_rate, "learning rate at the end of the decay");
  visit.choice("lr-decay-style", c.decay, decay_names, "curve from the peak to the end");
  visit("lr-decay-iters", c.decay_steps, "steps until the end of the decay; 0: --train-iters");
  visit("lr-wsd-decay-iters", c.wsd_decay_steps, "steps of WSD's final descent");
  visit("lr-warmup-iters", c.warmup_steps, "steps of linear warm-up");
  visit("weight-decay", c.weight_decay, "decoupled; not for biases and norms");
  visit("adam-beta1", c.beta1, "decay of the first moment");
  visit("adam-beta2", c.beta2, "decay of the second moment");
  visit("adam-eps", c.epsilon, "added to the root of the second moment");
  visit("clip-grad", c.clip, "largest global gradient norm; 0: no clipping");

  visit.section("Data");
  visit("data-path,data", c.data_path,
        "text file, folder of text files, or .jsonl with the key text");
  visit("valid-fraction", c.valid_fraction, "end of the data that is kept for validation");

  visit.section("Checkpoints");
  visit("save", c.save_dir,
        "folder for checkpoints; written at the end, on SIGTERM and by interval");
  visit("load", c.load_dir, "folder whose newest complete checkpoint is resumed, at any layout");
  visit("save-interval", c.save_interval, "steps between checkpoints; 0: at the end only");
  visit("keep", c.keep, "newest checkpoints that stay; 0: all");
  visit("export-hf", c.export_dir, "folder for a Hugging Face export at the end");

  visit.section("Output");
  visit("log-interval", c.log_interval, "steps between lines");
  visit("log-json", c.log_json, "file that gets one JSON object a step");
  visit.choice("log-level", c.log_level, log_level_names, "how much is printed");
  visit("sample-tokens", c.sample_tokens, "tokens of a sampled continuation at the end");
  visit("prompt", c.prompt, "what the continuation continues");
  visit("temperature", c.temperature, "of sampling; 0: the likeliest token");
  visit(
      "dry-run", c.dry_run,
      "print layout, parameters and planned bytes of every rank, then stop; reads --import-hf and "
      "--replay-decisions and looks at no other file or folder, which may be on other machines");

  visit.section("Tracing");
  visit("trace", c.trace_dir, "folder that gets a trace file a rank, for mega-scan");
  visit("trace-interval", c.trace_interval, "steps from one that is traced to the next");
  visit("slow-rank-interval", c.watch_interval,
        "steps between comparisons of the ranks, which warn of a slow one; 0: none");
  visit("inject", c.inject,
        "faults on purpose: slow-rank=3,factor=1.5;slow-link=2-3,factor=4;late-host=1,ms=5, each "
        "with ,from-step=N if wanted");

  visit.section("Machine");
  if (!c.gpu)
    visit("blas-threads", c.blas_threads,
          "BLAS threads a rank; 0: the cores, 1 where ranks are threads");
  visit("distributed-timeout-seconds,timeout", c.deadline_s, "longest wait of a rank for another");
  if (!c.gpu) return;
  visit.choice("precision", c.gpu->precision, precision_names,
               "what parameters and activations are stored as; sums and the optimizer are fp32");
  visit("initial-loss-scale", c.gpu->initial_loss_scale,
        "for --precision fp16: what the loss is multiplied with before its gradient, at first");
  visit("min-loss-scale", c.gpu->min_loss_scale, "the least that overflows bring it down to");
  visit("loss-scale-window", c.gpu->loss_scale_window,
        "steps in a row without an overflow after which it is doubled");
  visit("gpu-memory-utilization", c.gpu->memory_utilization,
        "part of a GPU's memory that the plan of a rank may fill");
  visit("gpu-memory", c.gpu->memory,
        "memory of each GPU, as 141GB or 80GiB, to plan without one; without it: ask the GPU");
  visit("tune", c.gpu->tune,
        "time the algorithms of each matrix product before its first use; may change bits");
  visit("gemm-algorithms", c.gpu->algorithms_path,
        "file of chosen algorithms: read if it exists, written at the end");
  visit("cuda-graphs", c.gpu->graphs,
        "launch a step, or each pass of a micro-batch, as one graph; same bits");
}

/// Text of an enumeration's value.
template <class E, std::size_t N>
[[nodiscard]] std::string_view name_of(const Names<E, N>& names, E value) {
  for (const auto& [name, known] : names) {
    if (known == value) return name;
  }
  return "unknown";
}

}  // namespace trainer
