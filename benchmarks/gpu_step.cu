// Training throughput of one model on GPUs, with the memory it takes and, if asked, what every
// kernel takes beside its floor.
//
//   bench_gpu_step --model gpt3-125m --micro-batch 16 --seq 2048 [--kernels 3] [--json FILE]
//   bench_gpu_step --model gpt3-1.3b --micro-batch 2 --num-micro 8 --pp 2 --split 13,11
//
// FLOPs: 6 for each weight of a matrix product and token, the head included, and causal attention
// at half the square; MFU is over 989.4 TFLOP/s, the dense bf16 peak of an H100 or H200.
#include "gpu/chosen_attention.hpp"
#include "gpu/kept_files.hpp"
#include "gpu/kernel_table.hpp"
#include "gpu/kernel_trace.hpp"
#include "gpu/measure.hpp"
#include "gpu/workload.hpp"
#include <mega/core/error.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace gpu_step;
using mega::sentence;

constexpr double peak_tflops = 989.4;

struct CommandLine {
  Options options;
  Rates rates;
  bool tune = false;
  std::string tuned_path, json_path;
};

template <class E, std::size_t N>
void add_choice(CLI::App& app, const char* option, E& value, const trainer::Names<E, N>& names,
                const std::string& help) {
  std::vector<std::string> known;
  for (const auto& [name, meaning] : names) known.emplace_back(name);
  app.add_option_function<std::string>(
         option,
         [&value, &names](const std::string& chosen) {
           for (const auto& [name, meaning] : names)
             if (name == chosen) value = meaning;
         },
         help)
      ->check(CLI::IsMember(known))
      ->default_str(std::string(name_of(value, names)));
}

/// Everything that needs no look at another option.
void describe(CLI::App& app, CommandLine& line, std::string& model,
              std::vector<double>& attention) {
  Options& o = line.options;
  const auto count = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->check(CLI::Range(1, 1'000'000'000))->capture_default_str();
  };
  const auto rate = [&](const char* name, auto& value, const char* help) {
    return app.add_option(name, value, help)->check(CLI::PositiveNumber)->capture_default_str();
  };
  app.add_option("--model", model, "gpt3-125m, -350m, -1.3b, -6.7b, llama3-1b, -8b, -8b-8l")
      ->capture_default_str();
  count("--seq", o.sequence, "tokens of a sample");
  count("--micro-batch", o.micro_batch, "samples of a micro-batch");
  count("--num-micro", o.microbatches, "micro-batches a step and data-parallel rank");
  count("--steps", o.steps, "timed steps");
  count("--warmup", o.warm_up, "steps before them");
  app.add_option("--result-every", o.result_every,
                 "steps between two readings of the loss, which wait for the GPU; 0: at the end")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  count("--tp", o.mesh.tensor, "ranks that divide every layer");
  count("--pp", o.mesh.pipeline, "ranks that divide the layers among them");
  count("--dp", o.mesh.data, "replicas");
  app.add_option("--chunks", o.chunks, "model chunks a pipeline rank; default: the schedule's own")
      ->check(CLI::Range(1, 1'000'000));
  add_choice(app, "--schedule", o.traversal.schedule, trainer::schedule_names,
             "order of a pipeline\'s passes");
  app.add_option("--group-size", o.traversal.group_size,
                 "micro-batches in a row of the same chunk, for --schedule interleaved");
  app.add_option("--split", o.split, "layers of every stage, as 13,11; default: even")
      ->delimiter(',');
  app.add_flag("--zero1", o.shard_optimizer, "divide the optimizer between the replicas");
  app.add_flag("--sequence-parallel", o.sequence_parallel,
               "tensor ranks divide the rows of the residual stream");
  add_choice(app, "--recompute", o.recompute, trainer::recompute_names,
             "what backward computes again");
  app.add_option("--loss-rows", o.loss_rows,
                 "tokens whose logits exist at a time; 0: all, up to 6 GB of logits")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  add_choice(app, "--attention", o.attention, attention_names, "who attends");
  add_choice(app, "--precision", o.numbers, number_names,
             "what parameters and activations are stored as");
  add_choice(
      app, "--graphs", o.graphs, graph_names,
      "what one launch queues: a call, a pass of a micro-batch, or a step if one rank has it");
  app.add_flag("--tune", line.tune, "time the algorithms of each matrix product");
  app.add_option("--tuned", line.tuned_path,
                 "file of chosen algorithms: read if there, written at the end");
  app.add_option("--json", line.json_path, "file for the results");
  app.add_flag("--plan", o.plan_only, "print the planned bytes and end; needs no GPU");
  app.add_option("--kernels", o.traced_steps, "steps to trace after the timing")
      ->check(CLI::NonNegativeNumber);
  rate("--matrix-tflops", line.rates.matrix_tflops, "rate of the products' floor");
  rate("--attention-tflops", attention, "forward and backward rate of attention's floor")
      ->expected(2);
  rate("--bandwidth", line.rates.tb_per_s, "TB/s of the other floors");
}

/// Settles what one option makes of another, and refuses what contradicts itself.
void settle(CLI::App& app, CommandLine& line) {
  Options& o = line.options;
  if (app.count("--chunks") == 0) o.chunks = o.traversal.usual_chunks();
  const bool wants_attention = app.count("--attention") > 0;
  const bool cudnn_fits = has_cudnn && o.numbers == Numbers::bf16;
  if (!wants_attention && !cudnn_fits) o.attention = AttentionChoice::built_in;
  mega::expects(o.attention == AttentionChoice::built_in || cudnn_fits, mega::ErrorCode::usage,
                [&] {
                  return sentence("--attention ", name_of(o.attention, attention_names), " needs ",
                                  has_cudnn ? "--precision bf16" : "a build with MEGA_WITH_CUDNN",
                                  "; use built-in");
                });
  mega::expects(o.traced_steps == 0 || can_trace, mega::ErrorCode::usage,
                "--kernels needs a build where the toolkit's cupti.h is");
}

[[nodiscard]] double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

/// As tp2-sp, pp2, dp2-zero1; none on one GPU.
[[nodiscard]] std::string parallelism(const Options& o) {
  std::string out;
  const auto add = [&](const char* axis, int degree, const char* how) {
    if (degree > 1) out += sentence(out.empty() ? "" : "-", axis, degree, how);
  };
  add("tp", o.mesh.tensor, o.sequence_parallel ? "-sp" : "");
  add("dp", o.mesh.data, o.shard_optimizer ? "-zero1" : "");
  add("pp", o.mesh.pipeline, "");
  return out.empty() ? "none" : out;
}

[[nodiscard]] std::string split_text(const Options& o) {
  std::string out;
  for (const int layers : o.split) out += sentence(out.empty() ? "" : ",", layers);
  return out.empty() ? "even" : out;
}

struct Figures {
  double ms = 0;  ///< median step
  double tokens_per_s = 0;
  double tflops = 0;  ///< a GPU
  double mfu = 0;
};

[[nodiscard]] Figures figures_of(const Options& o, const Measurement& m) {
  Figures f;
  f.ms = median(m.step_ms);
  f.tokens_per_s = static_cast<double>(o.tokens()) * o.mesh.data / f.ms * 1e3;
  f.tflops = f.tokens_per_s * flops_per_token(o.model, o.sequence) / o.mesh.size() / 1e12;
  f.mfu = f.tflops / peak_tflops;
  return f;
}

[[nodiscard]] std::size_t planned_bytes(const Measurement& m) {
  std::size_t sum = 0;
  for (const PlannedBytes& line : m.planned) sum += line.bytes;
  return sum;
}

/// Measured above planned, of the planned, in per cent.
[[nodiscard]] double excess_percent(const Measurement& m) {
  const auto planned = static_cast<double>(planned_bytes(m));
  return 100 * (static_cast<double>(m.used) / planned - 1);
}

constexpr double gib = 1 << 30;
constexpr double mib = 1 << 20;

void print_line(const Options& o, const Measurement& m, const Figures& f) {
  const std::string schedule =
      o.mesh.pipeline == 1
          ? ""
          : sentence(" schedule=", name_of(o.traversal.schedule, trainer::schedule_names),
                     " chunks=", o.chunks);
  std::printf(
      "peer=mega model=%s parallel=%s%s attention=%s precision=%s graphs=%s split=%s gpus=%d "
      "seq=%lld "
      "micro_batch=%lld num_micro=%d ms_per_step=%.2f tokens_per_s=%.0f tflops_per_gpu=%.1f "
      "peak_gib=%.1f mfu=%.4f wall_ms_per_step=%.2f loss=%.4f\n",
      std::string(o.model.name).c_str(), parallelism(o).c_str(), schedule.c_str(),
      std::string(name_of(o.attention, attention_names)).c_str(),
      std::string(name_of(o.numbers, number_names)).c_str(),
      std::string(name_of(o.graphs, graph_names)).c_str(), split_text(o).c_str(), o.mesh.size(),
      static_cast<long long>(o.sequence), static_cast<long long>(o.micro_batch), o.microbatches,
      f.ms, f.tokens_per_s, f.tflops, static_cast<double>(m.largest_used) / gib, f.mfu, m.wall_ms,
      m.loss);
}

void print_memory(const Options& o, const Measurement& m) {
  std::printf("memory of rank 0, MiB:");
  for (const PlannedBytes& line : m.planned)
    std::printf(" %s %.1f,", std::string(line.purpose).c_str(),
                static_cast<double>(line.bytes) / mib);
  std::printf(" planned %.1f", static_cast<double>(planned_bytes(m)) / mib);
  if (!o.plan_only) {
    std::printf("; measured %.1f (%+.2f %%), of which %.1f before the trainer",
                static_cast<double>(m.used) / mib, excess_percent(m),
                static_cast<double>(m.communicator) / mib);
  }
  std::printf("\n");
}

/// In the order of KernelGroup; 0: none is known.
[[nodiscard]] std::array<double, kernel_group_names.size()> group_floors(const Floors& f) {
  return {f.products, f.attention, f.elementwise, f.head, f.optimizer, 0, 0, 0};
}

void print_kernels(const Options& o, const KernelTable& t, const Floors& floors) {
  const auto percent = [&](double us) { return 100 * us / t.step_us; };
  std::printf("kernels of GPU 0, %d traced steps of %.1f us\n", o.traced_steps, t.step_us);
  std::printf("%-26s %12s %8s %12s %8s\n", "group", "us a step", "share %", "floor us", "x floor");
  const auto by_group = group_floors(floors);
  for (std::size_t g = 0; g < by_group.size(); ++g) {
    std::printf("%-26s %12.1f %8.2f", std::string(kernel_group_names[g]).c_str(), t.group_us[g],
                percent(t.group_us[g]));
    if (by_group[g] > 0) std::printf(" %12.1f %8.2f", by_group[g], t.group_us[g] / by_group[g]);
    std::printf("\n");
  }
  // Groups less this and with idle time are the step.
  std::printf("%-26s %12.1f %8.2f\n", "two kernels at once", -t.overlap_us, percent(-t.overlap_us));
  std::printf("%-26s %12.1f %8.2f\n", "idle GPU", t.step_us - t.busy_us,
              percent(t.step_us - t.busy_us));
  std::printf("%-26s %12.1f %8.2f\n", "idle compute stream", t.step_us - t.compute_busy_us,
              percent(t.step_us - t.compute_busy_us));
  std::printf("%-60s %8s %12s %8s  %s\n", "kernel", "calls", "us a step", "share %", "group");
  for (const KernelRow& row : t.rows) {
    std::printf("%-60.60s %8.1f %12.1f %8.2f  %s\n", row.name.c_str(), row.calls, row.us,
                percent(row.us),
                std::string(kernel_group_names[static_cast<std::size_t>(row.group)]).c_str());
  }
}

[[nodiscard]] nlohmann::json to_json(const Options& o, const Measurement& m, const Figures& f,
                                     const Floors& floors) {
  nlohmann::json out = {
      {"peer", "mega"},
      {"model", o.model.name},
      {"parallel", parallelism(o)},
      {"schedule", name_of(o.traversal.schedule, trainer::schedule_names)},
      {"chunks", o.chunks},
      {"split", split_text(o)},
      {"attention", name_of(o.attention, attention_names)},
      {"precision", name_of(o.numbers, number_names)},
      {"recompute", to_string(o.recompute)},
      {"graphs", name_of(o.graphs, graph_names)},
      {"loss_rows", o.run().loss_rows},
      {"gpus", o.mesh.size()},
      {"seq", o.sequence},
      {"micro_batch", o.micro_batch},
      {"num_micro", o.microbatches},
      {"result_every", o.result_every},
  };
  for (const PlannedBytes& line : m.planned)
    out["planned_bytes"][std::string(line.purpose)] = line.bytes;
  out["planned_bytes"]["total"] = planned_bytes(m);
  if (o.plan_only) return out;
  out["used_bytes"] = m.used;
  out["largest_used_bytes"] = m.largest_used;
  out["used_before_trainer_bytes"] = m.communicator;
  out["used_above_planned_percent"] = excess_percent(m);
  out["step_ms"] = m.step_ms;
  out["ms_per_step"] = f.ms;
  out["wall_ms_per_step"] = m.wall_ms;
  out["tokens_per_s"] = f.tokens_per_s;
  out["tflops_per_gpu"] = f.tflops;
  out["mfu"] = f.mfu;
  out["loss"] = m.loss;
  if (m.activities.empty()) return out;
  const KernelTable t = tabulate(m.activities, m.compute_stream, o.traced_steps);
  const auto by_group = group_floors(floors);
  out["traced"] = {{"steps", o.traced_steps},
                   {"step_us", t.step_us},
                   {"busy_us", t.busy_us},
                   {"overlap_us", t.overlap_us},
                   {"compute_stream_busy_us", t.compute_busy_us}};
  for (std::size_t g = 0; g < by_group.size(); ++g)
    out["groups"][std::string(kernel_group_names[g])] = {{"us", t.group_us[g]},
                                                         {"floor_us", by_group[g]}};
  for (const KernelRow& row : t.rows)
    out["kernels"].push_back({{"name", row.name},
                              {"group", kernel_group_names[static_cast<std::size_t>(row.group)]},
                              {"calls", row.calls},
                              {"us", row.us}});
  return out;
}

void run(const CommandLine& line) {
  const Options& o = line.options;
  read_algorithms(line.tune, line.tuned_path);

  const Measurement m = o.model.family == Family::gpt3 ? measure_gpt3(o) : measure_llama3(o);
  const Floors floors = floors_of(o, m.owned_parameters, line.rates);
  const Figures f = o.plan_only ? Figures{} : figures_of(o, m);
  if (!o.plan_only) print_line(o, m, f);
  print_memory(o, m);
  if (!m.trace_error.empty())
    std::fprintf(stderr, "bench_gpu_step: no list of kernels: %s\n", m.trace_error.c_str());
  if (!m.activities.empty())
    print_kernels(o, tabulate(m.activities, m.compute_stream, o.traced_steps), floors);
  if (!o.plan_only) write_algorithms(line.tuned_path);
  if (!line.json_path.empty()) write_file(line.json_path, to_json(o, m, f, floors).dump(2) + "\n");
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine line;
  std::string model(line.options.model.name);
  std::vector<double> attention{line.rates.attention_forward_tflops,
                                line.rates.attention_backward_tflops};
  CLI::App app("Times a training step of a Transformer on GPUs");
  describe(app, line, model, attention);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  try {
    line.options.model = model_named(model);
    line.rates.attention_forward_tflops = attention[0];
    line.rates.attention_backward_tflops = attention[1];
    settle(app, line);
    run(line);
  } catch (const mega::Error& e) {
    std::fprintf(stderr, "bench_gpu_step: %s\n", e.what());
    return exit_code(e.code());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_gpu_step: %s\n", e.what());
    return 3;
  }
  return 0;
}
