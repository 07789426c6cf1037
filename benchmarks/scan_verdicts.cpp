/// @file  How often mega-scan names the right culprit and class, over synthetic jobs with known
/// faults: `scan_verdicts [first seed] [jobs] [-v]`. Prints a table by class and each miss.
#include "../tests/support/scan_verdict_score.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/match.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>

namespace {

struct Row {
  int faults = 0, found = 0;
};

double seconds() {
  using clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int argc, char** argv) {
  namespace scan = mega::scan;
  using namespace mega_test;
  const auto first = static_cast<std::uint64_t>(argc > 1 ? std::atoll(argv[1]) : 1000);
  const int jobs = argc > 2 ? std::atoi(argv[2]) : 200;
  const bool verbose = argc > 3 && std::string_view(argv[3]) == "-v";
  std::map<std::string, Row> rows;
  int right = 0, healthy = 0, accused = 0, refused = 0, most_ranks = 0;
  std::int64_t events = 0;
  double spent = 0;
  for (int i = 0; i < jobs; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    const JobSpec spec = draw_job(seed);
    const SyntheticJob job = generate(spec, seed);
    const double begin = seconds();
    const scan::Matches matches = scan::match(job.trace);
    const scan::Alignment alignment = scan::align(job.trace, matches);
    const scan::Diagnosis d = scan::diagnose(job.trace, matches, alignment);
    spent += seconds() - begin;
    events += static_cast<std::int64_t>(job.trace.events.size());
    most_ranks = std::max(most_ranks, spec.ranks());
    refused += alignment.aligned() ? 0 : 1;
    const Score score = score_of(spec, d);
    right += score.right() ? 1 : 0;
    if (spec.faults.empty()) {
      ++healthy;
      accused += d.healthy() ? 0 : 1;
    }
    for (std::size_t f = 0; f < spec.faults.size(); ++f) {
      Row& row = rows[name_of(spec.faults[f])];
      ++row.faults;
      row.found += score.found[f] ? 1 : 0;
    }
    if (score.right() && !verbose) continue;
    std::printf("%s seed %llu: %s\n", score.right() ? "right" : "WRONG",
                static_cast<unsigned long long>(seed), describe(spec).c_str());
    for (const scan::Verdict& v : d.verdicts) {
      std::printf("    said %s", std::string(to_string(v.what)).c_str());
      for (const auto r : v.ranks) std::printf(" rank %d", r);
      for (const auto s : v.stages) std::printf(" stage %d", s);
      std::printf(" x%.2f since %d cost %.2f ms\n", v.factor, v.since_step,
                  static_cast<double>(v.cost_per_step) / 1e6);
      for (const std::string& e : v.evidence) std::printf("        %s\n", e.c_str());
    }
  }
  std::printf("\n%-28s %6s %6s\n", "fault", "jobs", "found");
  for (const auto& [name, row] : rows)
    std::printf("%-28s %6d %6d\n", name.c_str(), row.faults, row.found);
  std::printf("\n%d jobs from seed %llu, up to %d ranks, %lld events, analysed in %.1f s\n", jobs,
              static_cast<unsigned long long>(first), most_ranks, static_cast<long long>(events),
              spent);
  std::printf("all culprits and classes right, nobody else accused: %d of %d (%.1f %%)\n", right,
              jobs, 100.0 * right / jobs);
  std::printf("healthy: %d, of which accused: %d; alignment refused: %d\n", healthy, accused,
              refused);
  return right * 100 >= jobs * 99 && accused == 0 ? 0 : 1;
}
