// What recording costs training on one GPU: a trainer that records as the programs do with --trace,
// and one whose recorder is NullRecorder, take turns in one process, block by block, in the order
// on off off on, so that drift of the clocks cancels in each pair of neighbours.
//
//   bench_gpu_recorder_overhead --model gpt3-125m --micro-batch 16 --tune [--blocks 100]
//   bench_gpu_recorder_overhead --model gpt3-1.3b --micro-batch 8 --tuned FILE --trace FILE
//
// Both launch every operation by its own call: while a recorder records, no step is a graph. Every
// step waits for its loss, as the programs do, and a block is timed on the host from idle to idle.
// What the recorder still has to read when a block ends, it reads before the next one begins.
// Ends with 1 if the upper end of the interval is above 0.5 %, or if records were dropped.
#include "gpu/chosen_attention.hpp"
#include "gpu/kept_files.hpp"
#include "gpu/paired_blocks.hpp"
#include "gpu/training.cuh"
#include "gpu/workload.hpp"
#include <mega/comm/device_self.hpp>
#include <mega/core/error.hpp>
#include <mega/nn/gpt3.hpp>
#include <mega/scan/cuda_recorder.hpp>
#include <mega/scan/own_format_writer.hpp>
#include <mega/scan/record.hpp>
#include <mega/scan/traced_comm.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace gpu_step;
using mega::DeviceSelfComm;
using mega::scan::CudaRecorder;

constexpr double bar = 1.005;

using OffPlan = Plan<mega::nn::Gpt3, DeviceSelfComm, mega::Bfloat16>;
using RecordedComm = mega::scan::TracedComm<DeviceSelfComm, CudaRecorder>;
struct OnPlan : Plan<mega::nn::Gpt3, RecordedComm, mega::Bfloat16> {
  using hooks = mega::Hooks<CudaRecorder>;
};

struct CommandLine {
  Options options;
  std::string model = "gpt3-125m";
  int blocks = 100, steps_per_block = 2;
  std::int64_t interval = 1;
  bool tune = false;
  std::string tuned_path, json_path;
  std::string trace_path = "/dev/null";
};

/// Writes the trace as the programs do, and keeps what the recorder says of itself.
class CountedTrace final : public mega::scan::RecordSink {
 public:
  struct Counts {
    mega::scan::RecordingTotals totals;
    std::int64_t device_states = 0;
  };
  CountedTrace(const std::string& path, Counts& counts) : file_(path), counts_(counts) {}

  void start(const mega::scan::RecordingInfo& info) override { file_.start(info); }
  void lane(int lane, std::string_view label) override { file_.lane(lane, label); }
  void group(int group, std::string_view name, std::span<const int> ranks) override {
    file_.group(group, name, ranks);
  }
  void anchor(const mega::scan::ClockAnchor& anchor) override { file_.anchor(anchor); }
  void record(const mega::scan::Record& record) override { file_.record(record); }
  void device(const mega::scan::DeviceState& state) override {
    file_.device(state);
    ++counts_.device_states;
  }
  void flush() override { file_.flush(); }
  void finish(const mega::scan::RecordingTotals& totals) override {
    file_.finish(totals);
    counts_.totals = totals;
  }

 private:
  mega::scan::OwnFormatWriter file_;
  Counts& counts_;
};

/// One program: its steps and their milliseconds.
template <class ThePlan>
class Program {
 public:
  Program(typename ThePlan::communicator& world, const Options& o,
          typename ThePlan::hooks hooks = {})
      : trainer_(world, trainer_options(o), StageFactory<mega::nn::Gpt3, mega::Bfloat16>{o},
                 mega::Cuda(0, mega::ReplayScope::none), std::move(hooks)) {}

  /// Milliseconds a step.
  double run(int steps, const std::array<RandomTokens, 2>& batches) {
    trainer_.synchronize();
    const mega::scan::Nanoseconds begin = mega::scan::steady_now();
    for (int i = 0; i < steps; ++i) {
      loss_ = trainer_.step(batches[static_cast<std::size_t>(taken_++ % 2)], learning_rate).loss;
    }
    return static_cast<double>(mega::scan::steady_now() - begin) / 1e6 / steps;
  }
  [[nodiscard]] double loss() const { return loss_; }
  [[nodiscard]] std::int64_t steps_taken() const { return taken_; }

 private:
  mega::Trainer<ThePlan> trainer_;
  std::int64_t taken_ = 0;
  double loss_ = 0;
};

struct Outcome {
  std::vector<double> on_ms, off_ms;  ///< of the pairs, milliseconds a step
  double on_loss = 0, off_loss = 0;
  std::int64_t on_steps = 0;  ///< warm-up and all, recorded or between recorded ones
  double ns_per_record = 0;
  CountedTrace::Counts counts;
};

Outcome measure(const CommandLine& line) {
  const Options& o = line.options;
  ChosenAttention::choice = o.attention;
  expect_attention(o);
  const mega::Cuda device;
  const std::array<RandomTokens, 2> batches{RandomTokens(o, 0, 0), RandomTokens(o, 0, 1)};
  Outcome out;
  CudaRecorder recorder(mega::scan::recording_of(o.mesh, 0),
                        std::make_unique<CountedTrace>(line.trace_path, out.counts),
                        {.interval = line.interval});
  DeviceSelfComm world;
  RecordedComm recorded_world(world, recorder);
  Program<OffPlan> off(world, o);
  Program<OnPlan> on(recorded_world, o, {recorder, {}, {}});
  const auto run_on = [&](int steps) {
    const double ms = on.run(steps, batches);
    recorder.flush();
    return ms;
  };
  (void)off.run(o.warm_up, batches);
  (void)run_on(o.warm_up);
  for (int pair = 0; pair < line.blocks / 2; ++pair) {
    const bool on_first = pair % 2 == 0;
    if (on_first) out.on_ms.push_back(run_on(line.steps_per_block));
    out.off_ms.push_back(off.run(line.steps_per_block, batches));
    if (!on_first) out.on_ms.push_back(run_on(line.steps_per_block));
  }
  out.on_loss = on.loss();
  out.off_loss = off.loss();
  out.on_steps = on.steps_taken();
  out.ns_per_record = recorder.info().cost_ns_per_event;
  recorder.close();
  return out;
}

[[nodiscard]] double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// @return  whether the bar is held
bool report(const CommandLine& line, const Outcome& out) {
  const Options& o = line.options;
  const MeanInterval ratio = mean_ratio(out.on_ms, out.off_ms);
  const mega::scan::RecordingTotals& totals = out.counts.totals;
  const double records =
      static_cast<double>(totals.recorded + totals.dropped) / static_cast<double>(out.on_steps);
  const double off = median(out.off_ms), on = median(out.on_ms);
  const bool held = ratio.high <= bar && totals.dropped == 0;
  std::printf(
      "%s, seq %lld, micro-batch %lld x %d, bf16, no graphs, %d blocks of %d steps, every "
      "%lld recorded\n",
      line.model.c_str(), static_cast<long long>(o.sequence), static_cast<long long>(o.micro_batch),
      o.microbatches, line.blocks, line.steps_per_block, static_cast<long long>(line.interval));
  std::printf("%-26s %10.3f ms a step, median of %zu blocks, loss %.4f\n", "NullRecorder", off,
              out.off_ms.size(), out.off_loss);
  std::printf("%-26s %10.3f ms a step, median of %zu blocks, loss %.4f\n", "CudaRecorder", on,
              out.on_ms.size(), out.on_loss);
  std::printf("%-26s %10.5f, 95 %% interval [%.5f, %.5f]: %s\n", "on / off, mean of pairs",
              ratio.mean, ratio.low, ratio.high,
              ratio.high <= bar ? "within 0.5 %" : "not within 0.5 %");
  std::printf("%-26s %10.1f a step, %.0f ns each, %.3f %% of the step; %lld dropped\n", "records",
              records, out.ns_per_record, records * out.ns_per_record / 1e4 / off,
              static_cast<long long>(totals.dropped));
  std::printf("%-26s %10lld\n", "samples of the device",
              static_cast<long long>(out.counts.device_states));
  const nlohmann::json json = {
      {"model", line.model},
      {"seq", o.sequence},
      {"micro_batch", o.micro_batch},
      {"num_micro", o.microbatches},
      {"graphs", "none"},
      {"blocks", line.blocks},
      {"steps_per_block", line.steps_per_block},
      {"interval", line.interval},
      {"off_ms", off},
      {"on_ms", on},
      {"ratio", ratio.mean},
      {"ratio_low", ratio.low},
      {"ratio_high", ratio.high},
      {"records_per_step", records},
      {"ns_per_record", out.ns_per_record},
      {"dropped", totals.dropped},
      {"device_samples", out.counts.device_states},
      {"held", held},
  };
  std::printf("%s\n", json.dump().c_str());
  if (!line.json_path.empty()) {
    nlohmann::json all = json;
    all["on_block_ms"] = out.on_ms;
    all["off_block_ms"] = out.off_ms;
    write_file(line.json_path, all.dump(2) + "\n");
  }
  return held;
}

void describe(CLI::App& app, CommandLine& line) {
  Options& o = line.options;
  const auto count = [&](const char* name, auto& value, const char* help, int least = 1) {
    app.add_option(name, value, help)
        ->check(CLI::Range(least, 1'000'000'000))
        ->capture_default_str();
  };
  app.add_option("--model", line.model, "gpt3-125m, -350m or -1.3b; the GPU holds it twice")
      ->capture_default_str();
  count("--seq", o.sequence, "tokens of a sample");
  count("--micro-batch", o.micro_batch, "samples of a micro-batch");
  count("--num-micro", o.microbatches, "micro-batches a step");
  count("--warmup", o.warm_up, "steps of each program before the blocks");
  count("--blocks", line.blocks, "blocks, half of them recorded; a multiple of 4", 16);
  count("--steps-per-block", line.steps_per_block, "steps of a block");
  count("--interval", line.interval, "steps from one that is recorded to the next");
  app.add_flag("--tune", line.tune, "time the algorithms of each matrix product");
  app.add_option("--tuned", line.tuned_path,
                 "file of chosen algorithms: read if there, written at the end");
  app.add_option("--trace", line.trace_path, "file that gets the trace")->capture_default_str();
  app.add_option("--json", line.json_path, "file for the results, with the time of every block");
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine line;
  CLI::App app("Measures what recording costs training on a GPU");
  describe(app, line);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  try {
    Options& o = line.options;
    o.model = model_named(line.model);
    o.attention = has_cudnn ? AttentionChoice::cudnn : AttentionChoice::built_in;
    mega::expects(o.model.family == Family::gpt3, mega::ErrorCode::usage, [&] {
      return mega::sentence("--model ", std::string_view(line.model),
                            " is not measured here; take one of the GPT-3 family");
    });
    mega::expects(line.blocks % 4 == 0, mega::ErrorCode::usage, [&] {
      return mega::sentence("--blocks ", line.blocks,
                            " does not hold whole turns of on off off on; take a multiple of 4");
    });
    read_algorithms(line.tune, line.tuned_path);
    const Outcome out = measure(line);
    write_algorithms(line.tuned_path);
    return report(line, out) ? 0 : 1;
  } catch (const mega::Error& e) {
    std::fprintf(stderr, "bench_gpu_recorder_overhead: %s\n", e.what());
    return exit_code(e.code());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_gpu_recorder_overhead: %s\n", e.what());
    return 3;
  }
}
