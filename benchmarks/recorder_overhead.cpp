// What recording costs a training step of a GPT-3 family model on one host rank: the records of a
// step times the measured cost of one, against the step, and the steps with and without recording
// that alternate in one run.
//
//   bench_recorder_overhead [--layers 4] [--hidden 128] [--batch 2] [--sequence 128] [--steps 60]
//
// The defaults are those of mega-gpt3. Prints one JSON object; ends with 1 if the records' cost is
// above 0.5 % of the step.
#include "random_tokens.hpp"
#include <mega/comm/self.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/host/host.hpp>
#include <mega/nn/blas.hpp>
#include <mega/nn/gpt3.hpp>
#include <mega/nn/transformer.hpp>
#include <mega/scan/recorder.hpp>
#include <mega/train/trainer.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string_view>
#include <vector>

namespace {

using mega::Index;
using mega::scan::HostRecorder;

struct Plan : mega::DefaultPlan {
  using stage = mega::nn::Transformer<mega::nn::Gpt3, mega::comm::SelfComm,
                                      mega::nn::Kernels<mega::nn::CblasProduct>>;
  using hooks = mega::Hooks<HostRecorder>;
};

/// Counts and forgets, as fast as a file could take it.
struct CountingSink final : mega::scan::RecordSink {
  mega::scan::RecordingTotals* totals;
  explicit CountingSink(mega::scan::RecordingTotals* to) : totals(to) {}
  void start(const mega::scan::RecordingInfo&) override {}
  void lane(int, std::string_view) override {}
  void group(int, std::string_view, std::span<const int>) override {}
  void anchor(const mega::scan::ClockAnchor&) override {}
  void record(const mega::scan::Record&) override {}
  void finish(const mega::scan::RecordingTotals& all) override { *totals = all; }
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  Index hidden = 128, batch = 2, sequence = 128;
  int layers = 4, steps = 60;
  CLI::App app("Measures what recording a step costs");
  app.add_option("--layers", layers, "layers")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--hidden", hidden, "width; heads have 32")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", batch, "samples of one of 8 micro-batches")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--sequence", sequence, "tokens of a sample")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", steps, "timed steps, half of them recorded")
      ->check(CLI::Range(4, 1000000))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  mega::nn::set_blas_threads(1);
  const mega::nn::TransformerConfig config{.layers = layers,
                                           .hidden = hidden,
                                           .heads = hidden / 32,
                                           .kv_heads = hidden / 32,
                                           .head_dim = 32,
                                           .ffn = 4 * hidden,
                                           .vocab = 257,
                                           .max_positions = sequence,
                                           .tied_head = true};
  const mega::nn::TransformerRun run{.micro_batch = batch, .sequence = sequence};
  mega::scan::RecordingTotals totals;
  HostRecorder recorder({}, std::make_unique<CountingSink>(&totals), {.interval = 2});
  mega::comm::SelfComm world;
  mega::Trainer<Plan> trainer(
      world, {.microbatches = 8},
      [&](mega::StagePosition at, auto& groups) {
        return Plan::stage(config, run, at,
                           mega::dpp::split_layers(config.layers, at.stages).of_stage(at.stage),
                           groups.tensor);
      },
      {}, {recorder, {}, {}});
  const benchmarks::RandomTokens tokens(batch, sequence, config.vocab, 8);
  std::vector<double> on, off;
  int recorded_steps = 0;
  for (int step = 0; step < steps + 4; ++step) {
    const auto begin = mega::scan::steady_now();
    (void)trainer.step(tokens, 1e-4);
    const double ms = static_cast<double>(mega::scan::steady_now() - begin) / 1e6;
    recorded_steps += step % 2 == 0 ? 1 : 0;
    if (step >= 4) (step % 2 == 0 ? on : off).push_back(ms);
  }
  const double cost_ns = recorder.info().cost_ns_per_event;
  recorder.close();
  const double records = static_cast<double>(totals.recorded + totals.dropped) / recorded_steps;
  const double share = records * cost_ns / 1e6 / median(off);
  // Paired differences of neighbouring steps, and the 95 % interval of their mean.
  double sum = 0, squares = 0;
  const std::size_t n = std::min(on.size(), off.size());
  for (std::size_t i = 0; i < n; ++i) {
    const double d = on[i] / off[i] - 1;
    sum += d;
    squares += d * d;
  }
  const double mean = sum / static_cast<double>(n);
  const double error =
      1.96 * std::sqrt(std::max(0.0, squares / static_cast<double>(n) - mean * mean) /
                       static_cast<double>(n));
  std::printf(
      "{\"records_per_step\": %.0f, \"ns_per_record\": %.1f, \"step_ms\": %.3f, "
      "\"recorded_step_ms\": %.3f, \"share\": %.5f, \"measured_share\": %.4f, "
      "\"measured_share_error\": %.4f, \"dropped\": %lld}\n",
      records, cost_ns, median(off), median(on), share, mean, error,
      static_cast<long long>(totals.dropped));
  return share <= 0.005 ? 0 : 1;
}
