// The windows that MegatronApp published for its depth-first and breadth-first orders, measured on
// the library's executor: 4 thread ranks that compute nothing and take the stated times, over
// emulated links.
//
//   bench_published_windows [--clock wall|logical] [--steps 2] [--chunks 2,4,8]
//                           [--microbatches 8,16] [--bandwidths 25] [--latency 5] [--tflops 400]
//
// Prints a Markdown table. On the wall's clock ranks sleep; on the logical one they count, so its
// figures are exact. A rank's share of activations is one of each of its chunks; overrun is how
// much longer than stated the stages took under each order. Stage times: counted operations of
// GPT-3 6.7B (2048 tokens) and Llama-3 8B (8192 tokens), one sample a micro-batch, over the stated
// rate, layers balanced with the head. A message is a micro-batch's activation in 16 bits.
#include "emulated_pipeline.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/balance.hpp>
#include <mega/dpp/traversal.hpp>

#include <CLI/CLI.hpp>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace {

using namespace mega::dpp;
using emulation::Windows;
using emulation::Workload;

struct Model {
  const char* name;
  int layers;
  TransformerShape shape;
  double published_send, published_all_reduce;  ///< gain of breadth first over depth first
};

constexpr Model gpt3{"GPT-3 6.7B",
                     32,
                     {.hidden = 4096,
                      .heads = 32,
                      .kv_heads = 32,
                      .head_dim = 128,
                      .ffn = 16384,
                      .mlp_matrices = 2,
                      .vocab = 50257,
                      .sequence = 2048},
                     1.76,
                     1.31};
constexpr Model llama3{"Llama-3 8B",
                       32,
                       {.hidden = 4096,
                        .heads = 32,
                        .kv_heads = 8,
                        .head_dim = 128,
                        .ffn = 14336,
                        .mlp_matrices = 3,
                        .vocab = 128256,
                        .sequence = 8192},
                       1.93,
                       2.0};

/// Times of the stages in seconds, on p ranks of v chunks.
std::vector<ActionTimes> stage_times(const Model& model, int p, int v, double flops) {
  const LayerCosts costs = transformer_costs(model.shape);
  const LayerSplit split = balance_layers(model.layers, p, v, costs, LoopPlacement{});
  std::vector<ActionTimes> times;
  for (int s = 0; s < split.stages(); ++s) {
    const double operations =
        split.of_stage(s).count() * costs.layer + (s + 1 == split.stages() ? costs.head : 0);
    const double third = operations * model.shape.sequence / flops / 3;
    times.push_back({.forward = third, .backward_input = third, .backward_weight = third});
  }
  return times;
}

std::string both(double dfc, double bfc, int digits) {
  char text[96];
  std::snprintf(text, sizeof text, "%.*f > %.*f (%.2f)", digits, dfc, digits, bfc, bfc / dfc);
  return text;
}

/// Without the sign of what shows as zero.
double percent(double part) {
  return std::abs(part) < 5e-4 ? 0.0 : 100 * part;
}

template <class Clock>
void compare(const Model& model, const Workload& work) {
  const Windows dfc = emulation::run_windows<Clock>(work, ScheduleTraversal<DFC>{});
  const Windows bfc = emulation::run_windows<Clock>(work, ScheduleTraversal<BFC>{});
  mega::expects(dfc.loss == bfc.loss, mega::ErrorCode::logic,
                "the two orders computed different losses");
  std::string missed;
  const auto expect = [&](bool reached, const char* what) {
    if (!reached) missed += (missed.empty() ? "" : ", ") + std::string(what);
  };
  expect(bfc.send_ratio >= model.published_send * dfc.send_ratio, "sending");
  expect(bfc.all_reduce_window >= model.published_all_reduce * dfc.all_reduce_window, "all-reduce");
  expect(bfc.transfers.exposed() <= 0.5 * dfc.transfers.exposed(), "exposed");
  expect(bfc.step_s <= dfc.step_s, "step");
  std::printf(
      "| %s | %g | %d | %d | %s | %s | %s | %.0f > %.0f | %s | %s | %.1f, %.1f | %s |\n",
      model.name, work.hop.bytes_per_s / 1e9, work.v, work.m,
      both(dfc.send_ratio, bfc.send_ratio, 3).c_str(),
      both(dfc.all_reduce_window, bfc.all_reduce_window, 3).c_str(),
      both(1e3 * dfc.transfers.exposed(), 1e3 * bfc.transfers.exposed(), 1).c_str(),
      100 * dfc.transfers.coverage(), 100 * bfc.transfers.coverage(),
      both(1e3 * dfc.step_s, 1e3 * bfc.step_s, 1).c_str(),
      both(static_cast<double>(dfc.peak) / work.v, static_cast<double>(bfc.peak) / work.v, 1)
          .c_str(),
      percent(dfc.overrun), percent(bfc.overrun), missed.empty() ? "none" : missed.c_str());
  std::fflush(stdout);
}

void describe(const Model& model, double latency_us, double tflops) {
  const LayerCosts costs = transformer_costs(model.shape);
  const double layer_ms = costs.layer / 3 * model.shape.sequence / tflops / 1e9;
  std::printf(
      "- %s: %d layers, a layer's forward %.2f ms at %.0f TFLOP/s, the head %.2f ms; messages of "
      "%.1f MB, "
      "%.0f us latency; bars: sending %.2f, all-reduce %.2f\n",
      model.name, model.layers, layer_ms, tflops, layer_ms * costs.head / costs.layer,
      2e-6 * model.shape.sequence * model.shape.hidden, latency_us, model.published_send,
      model.published_all_reduce);
}

}  // namespace

int main(int argc, char** argv) {
  std::string clock = "wall";
  int steps = 2;
  std::vector<int> chunks{2, 4, 8}, microbatches{8, 16};
  std::vector<double> bandwidths{25};
  double latency = 5, tflops = 400;
  CLI::App app("Sending and all-reduce windows of BFC and DFC on emulated links");
  app.add_option("--clock", clock, "wall sleeps the stated times, logical counts them")
      ->check(CLI::IsMember({"wall", "logical"}))
      ->capture_default_str();
  app.add_option("--steps", steps, "measured steps of each order")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--chunks", chunks, "chunks a rank")
      ->delimiter(',')
      ->check(CLI::Range(2, 8))
      ->capture_default_str();
  app.add_option("--microbatches", microbatches, "micro-batches of a step")
      ->delimiter(',')
      ->check(CLI::Range(4, 512))
      ->capture_default_str();
  app.add_option("--bandwidths", bandwidths, "of a link and direction, in GB/s")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--latency", latency, "of a message, in microseconds")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--tflops", tflops, "10^12 operations a second that a stage sustains")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  constexpr int p = 4;
  std::printf("p %d, %s clock, %d steps after a first one; DFC > BFC (BFC over DFC)\n\n", p,
              clock.c_str(), steps);
  for (const Model& model : {gpt3, llama3}) describe(model, latency, tflops);
  std::printf(
      "\n| model | GB/s | v | m | sending ratio | all-reduce window | exposed, ms a step | "
      "covered, "
      "%% | step, ms | peak, ranks' shares | overrun, %% | bars missed "
      "|\n|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  try {
    for (const Model& model : {gpt3, llama3}) {
      for (const double bandwidth : bandwidths) {
        for (const int v : chunks) {
          for (const int m : microbatches) {
            Workload work{.p = p, .m = m, .v = v, .steps = steps};
            work.times = stage_times(model, p, v, tflops * 1e12);
            work.message_bytes = 2 * model.shape.sequence * model.shape.hidden;
            work.hop = {.latency_s = latency * 1e-6, .bytes_per_s = bandwidth * 1e9};
            if (clock == "wall") {
              compare<mega::comm::WallClock>(model, work);
            } else {
              compare<mega::comm::LogicalClock>(model, work);
            }
          }
        }
      }
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_published_windows: %s\n", e.what());
    return 1;
  }
}
