// What choosing actions at run time is worth: static orders, bounded look-ahead over them, and the
// greedy rules without and with a cap, on the simulated cluster's flaws.
//
//   bench_look_ahead [--runs 30] [--ranks 4] [--microbatches 16] [--chunks 2] [--sets N] [--large]
//
// Prints a Markdown table: mean step time over the runs in units of a chunk's forward (a backward
// takes 2), highest peak of live activations of any rank, share of runs that deadlocked. --sets
// repeats look-ahead over g = 2p for N sets of runs with seeds of their own: how far a mean of so
// many runs can be trusted. --large also times the simulator itself: 1F1B of 1,024 ranks and 2,048
// micro-batches.
#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace mega::dpp;
using enum DispatchRule;

struct Flaw {
  std::string name;
  Cluster cluster;
};

struct Contender {
  std::string name;
  Schedule order;
  Dispatch dispatch{};
};

struct Result {
  double mean = 0;
  double deviation = 0;  ///< of one run
  int peak = 0;
  int deadlocks = 0;
};

Result measure(const Contender& who, Cluster cluster, int runs, int first_seed = 1) {
  Result result;
  double squares = 0;
  for (int run = first_seed; run < first_seed + runs; ++run) {
    cluster.jitter.seed = static_cast<std::uint64_t>(run);
    const ClusterRun done = simulate(who.order, cluster, who.dispatch);
    const double time = done.timing.makespan;
    result.mean += time / runs;
    squares += time * time / runs;
    result.deadlocks += done.deadlocked() ? 1 : 0;
    for (const int peak : done.timing.peak_per_rank) result.peak = std::max(result.peak, peak);
  }
  result.deviation = std::sqrt(std::max(0.0, squares - result.mean * result.mean));
  return result;
}

void print_table(int p, int m, int v, int runs) {
  const auto dfc = make_schedule(ScheduleTraversal<DFC>{}, p, m, v);
  const Interleaved twice{{std::max(p, std::min(2 * p, m))}};
  const auto wide = make_schedule(twice, p, m, v);
  const auto split = make_schedule(SplitBackward<Interleaved, WeightAtOnce>{twice, {}}, p, m, v);
  const auto narrow_peaks = simulate(dfc).peak_per_rank;
  const int narrow_peak = *std::max_element(narrow_peaks.begin(), narrow_peaks.end());

  std::vector<Flaw> flaws(5);
  flaws[0] = {"latency 0.2", {.links = {{.latency = 0.2}}}};
  flaws[1] = {"compute +-30 %", {.jitter = {.compute = 0.3}}};
  flaws[2] = {"one rank 1.3x", {.slowness = std::vector<double>(static_cast<std::size_t>(p), 1.0)}};
  flaws[2].cluster.slowness[static_cast<std::size_t>(p / 2)] = 1.3;
  flaws[3] = {"link exp(0.6)", {.jitter = {.link_delay = 0.6}}};
  flaws[4] = {"link exp(1.2)", {.jitter = {.link_delay = 1.2}}};

  const std::vector<Contender> contenders{
      {"static g=p (DFC)", dfc},
      {"static g=2p", wide},
      {"looped breadth first", make_schedule(GPipe{}, p, m, v)},
      {"greedy, no cap", dfc, {greedy}},
      {"greedy, cap of DFC's peak", dfc, {capped_greedy, narrow_peak}},
      {"g=p, look-ahead 1", dfc, {look_ahead, 1}},
      {"g=p, look-ahead 4", dfc, {look_ahead, 4}},
      {"g=2p, look-ahead 1", wide, {look_ahead, 1}},
      {"g=2p, look-ahead 4", wide, {look_ahead, 4}},
      {"g=2p, split backward, static", split},
      {"g=2p, split backward, look-ahead 1", split, {look_ahead, 1}},
      {"g=2p, split backward, look-ahead 4", split, {look_ahead, 4}},
  };

  std::printf("p %d, m %d, v %d; mean of %d runs / peak; in brackets the share of DFC's time\n\n",
              p, m, v, runs);
  std::printf("| order and rule |");
  for (const Flaw& flaw : flaws) std::printf(" %s |", flaw.name.c_str());
  std::printf("\n|---|");
  for (std::size_t i = 0; i < flaws.size(); ++i) std::printf("---|");
  std::vector<Result> base;
  for (const Contender& who : contenders) {
    std::printf("\n| %s |", who.name.c_str());
    for (std::size_t i = 0; i < flaws.size(); ++i) {
      const Result r = measure(who, flaws[i].cluster, runs);
      if (base.size() <= i) base.push_back(r);
      if (r.deadlocks > 0) {
        std::printf(" deadlock %d/%d |", r.deadlocks, runs);
      } else {
        std::printf(" %.1f / %d (%.3f) |", r.mean, r.peak, r.mean / base[i].mean);
      }
    }
  }
  std::printf("\n\nDeviation of one run of DFC:");
  for (std::size_t i = 0; i < flaws.size(); ++i) {
    std::printf(" %s %.1f%s", flaws[i].name.c_str(), base[i].deviation,
                i + 1 < flaws.size() ? ";" : ".\n");
  }
}

void print_sets(int p, int m, int v, int runs, int sets) {
  const Contender dfc{"", make_schedule(ScheduleTraversal<DFC>{}, p, m, v)};
  const auto wide = make_schedule(Interleaved{{std::max(p, std::min(2 * p, m))}}, p, m, v);
  std::printf(
      "\n%d sets of %d runs, g=2p: share of DFC's time over all, deviation of a set, sets "
      "within the bar\n\n| look-ahead | exp(0.6), bar 0.95 | exp(1.2), bar 0.86 |\n"
      "|---|---|---|",
      sets, runs);
  for (const int limit : {1, 2, 4}) {
    const Contender who{"", wide, {look_ahead, limit}};
    std::printf("\n| %d |", limit);
    for (const auto& [delay, bar] : {std::pair(0.6, 0.95), std::pair(1.2, 0.86)}) {
      const Cluster cluster{.jitter = {.link_delay = delay}};
      double sum = 0, squares = 0;
      int within = 0;
      for (int set = 0; set < sets; ++set) {
        const double share = measure(who, cluster, runs, 1 + set * runs).mean /
                             measure(dfc, cluster, runs, 1 + set * runs).mean;
        sum += share;
        squares += share * share;
        within += share <= bar ? 1 : 0;
      }
      const double mean = sum / sets;
      std::printf(" %.4f +- %.4f, %d |", mean,
                  std::sqrt(std::max(0.0, squares / sets - mean * mean)), within);
    }
  }
  std::printf("\n");
}

void print_large() {
  const auto order = make_schedule(OneForwardOneBackward{}, 1024, 2048, 1);
  Cluster cluster;
  cluster.links = {{.latency = 0.1, .bandwidth = 100}};
  cluster.message_bytes = 10;
  cluster.jitter = {.compute = 0.1, .link_delay = 0.5, .seed = 1};
  for (const Dispatch dispatch : {Dispatch{}, Dispatch{look_ahead, 4}}) {
    const auto begin = std::chrono::steady_clock::now();
    const ClusterRun run = simulate(order, cluster, dispatch);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf(
        "1,024 ranks, 2,048 micro-batches, %zu actions, %s: step %.0f, simulated in %.1f s\n",
        order.view().actions.size(), std::string(to_string(dispatch.rule)).c_str(),
        run.timing.makespan, seconds.count());
  }
}

}  // namespace

int main(int argc, char** argv) {
  int runs = 30, ranks = 4, microbatches = 16, chunks = 2;
  int sets = 0;
  bool large = false;
  CLI::App app("Compares static orders, bounded look-ahead and greedy rules on a flawed cluster");
  app.add_option("--runs", runs, "seeds")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--ranks", ranks, "pipeline ranks")
      ->check(CLI::Range(2, 256))
      ->capture_default_str();
  app.add_option("--microbatches", microbatches, "micro-batches")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--chunks", chunks, "chunks a rank")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--sets", sets, "sets of runs that look-ahead is repeated for")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_flag("--large", large, "also time the simulator on 1,024 ranks");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  print_table(ranks, microbatches, chunks, runs);
  if (sets > 0) print_sets(ranks, microbatches, chunks, runs, sets);
  if (large) print_large();
}
