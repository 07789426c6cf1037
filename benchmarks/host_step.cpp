// A training step of GPT-2 124M on one host rank, against the machine's own SGEMM rate and, if a
// command is given, against another trainer's step.
//
//   bench_host_step [--batch 4] [--sequence 64] [--steps 10] [--threads 0] [--peer 'COMMAND']
//
// COMMAND is run by the shell; every "took N ms" that it prints is one of its steps, the first is
// left out. Prints one JSON object. FLOPs: 6 for each weight of a matrix product and token, the
// head included, attention's own products left out.
#include "random_tokens.hpp"
#include <mega/comm/self.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/host/host.hpp>
#include <mega/nn/blas.hpp>
#include <mega/nn/gpt3.hpp>
#include <mega/nn/transformer.hpp>
#include <mega/train/trainer.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace {

using mega::Index;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Plan : mega::DefaultPlan {
  using stage = mega::nn::Transformer<mega::nn::Gpt3, mega::comm::SelfComm,
                                      mega::nn::Kernels<mega::nn::CblasProduct>>;
};

/// GFLOP/s of C = A B with square matrices, median of several.
double sgemm_rate(Index n) {
  std::vector<float> a(static_cast<std::size_t>(n * n)), b(a.size()), c(a.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    a[i] = b[i] = mega::RandomKey{4}.uniform(static_cast<Index>(i)) - 0.5F;
  std::vector<double> times;
  mega::host::Stream stream;
  for (int i = 0; i < 7; ++i) {
    const auto begin = Clock::now();
    mega::nn::CblasProduct::gemm(stream, mega::nn::Transpose::no, mega::nn::Transpose::no, n, n, n,
                                 1, a.data(), n, b.data(), n, 0, c.data(), n);
    times.push_back(seconds_since(begin));
  }
  return 2e-9 * static_cast<double>(n * n * n) / median(times);
}

/// Steps of the peer in seconds.
std::vector<double> peer_steps(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  std::vector<double> out;
  char line[1024];
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    const std::string text = line;
    const std::size_t at = text.find("took ");
    if (at != std::string::npos) out.push_back(std::strtod(text.c_str() + at + 5, nullptr) / 1000);
  }
  pclose(pipe);
  if (!out.empty()) out.erase(out.begin());
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  Index batch = 4, sequence = 64;
  int steps = 10, threads = 0;
  std::string peer;
  CLI::App app("Times a training step of GPT-2 124M on the host");
  app.add_option("--batch", batch, "samples")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--sequence", sequence, "tokens of a sample")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--steps", steps, "timed steps")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", threads, "BLAS threads; 0: the cores")->check(CLI::NonNegativeNumber);
  app.add_option("--peer", peer,
                 "command of another trainer that prints \"took N ms\" for each step");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (threads == 0) threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  mega::nn::set_blas_threads(threads);

  mega::nn::TransformerConfig config{.layers = 12,
                                     .hidden = 768,
                                     .heads = 12,
                                     .kv_heads = 12,
                                     .head_dim = 64,
                                     .ffn = 3072,
                                     .vocab = 50257,
                                     .max_positions = 1024,
                                     .tied_head = true};
  const mega::nn::TransformerRun run{.micro_batch = batch, .sequence = sequence};
  mega::comm::SelfComm world;
  mega::Trainer<Plan> trainer(world, {}, [&](mega::StagePosition at, auto& groups) {
    return Plan::stage(config, run, at,
                       mega::dpp::split_layers(config.layers, at.stages).of_stage(at.stage),
                       groups.tensor);
  });
  const benchmarks::RandomTokens tokens(batch, sequence, config.vocab);
  std::vector<double> times;
  for (int step = 0; step < steps + 2; ++step) {
    const auto begin = Clock::now();
    (void)trainer.step(tokens, 1e-4);
    if (step >= 2) times.push_back(seconds_since(begin));
  }
  const double seconds = median(times);
  const double weights = static_cast<double>(config.layers) * 12.0 * 768 * 768 +
                         static_cast<double>(config.vocab) * 768;
  const double flops = 6 * weights * static_cast<double>(batch * sequence);
  const double square = sgemm_rate(1024);
  const std::vector<double> theirs = peer.empty() ? std::vector<double>{} : peer_steps(peer);
  std::printf(
      "{\"threads\": %d, \"step_ms\": %.2f, \"tokens_per_s\": %.1f, \"product_gflops\": %.1f, "
      "\"sgemm_gflops\": %.1f, "
      "\"of_sgemm\": %.3f, \"peer_step_ms\": %.2f, \"speedup\": %.3f}\n",
      threads, seconds * 1e3, static_cast<double>(batch * sequence) / seconds,
      flops / seconds / 1e9, square, flops / seconds / 1e9 / square, median(theirs) * 1e3,
      theirs.empty() ? 0.0 : median(theirs) / seconds);
}
