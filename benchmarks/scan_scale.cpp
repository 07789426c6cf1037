/// @file  How long the analysis of a large job takes: 1,024 ranks of about 2,000 events each, with
/// a slow GPU. Prints the seconds of a Study, which is all that a report says, and then of each of
/// its stages alone: on the clock, and of all cores together. The limit is 10 s for the Study.
#include "../tests/support/scan_generator.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/critical_path.hpp>
#include <mega/scan/delay_cost.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/replay.hpp>
#include <mega/scan/study.hpp>
#include <mega/scan/wait_states.hpp>
#include <mega/scan/what_if.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Seconds {
  double wall = 0, cores = 0;
};

template <class Work>
auto timed(const char* what, const Work& work, Seconds* spent = nullptr) {
  using clock = std::chrono::steady_clock;
  const auto begin = clock::now();
  const std::clock_t ticks = std::clock();
  auto out = work();
  const Seconds s{std::chrono::duration<double>(clock::now() - begin).count(),
                  static_cast<double>(std::clock() - ticks) / CLOCKS_PER_SEC};
  std::printf("%-16s %7.2f s, cores %7.2f s\n", what, s.wall, s.cores);
  if (spent != nullptr) *spent = s;
  return out;
}

}  // namespace

int main() {
  namespace scan = mega::scan;
  mega_test::JobSpec spec;
  spec.dp = 32, spec.tp = 4, spec.pp = 8, spec.layers = 1, spec.microbatches = 8, spec.steps = 10;
  mega_test::Fault slow;
  slow.rank = 345;
  slow.factor = 1.6;
  spec.faults = {slow};
  auto job = timed("(generate)", [&] { return mega_test::generate(spec, 1); });
  std::printf("%d ranks, %zu events, %.0f a rank\n", spec.ranks(), job.trace.events.size(),
              static_cast<double>(job.trace.events.size()) / spec.ranks());
  Seconds all;
  const auto study = timed(
      "study", [&] { return scan::Study(std::move(job.trace)); }, &all);

  const scan::Trace& trace = study.trace;
  const auto matches = timed("  match", [&] { return scan::match(trace); });
  const auto alignment = timed("  align", [&] { return scan::align(trace, matches); });
  const auto waits = timed("  waits", [&] { return scan::find_waits(trace, matches, alignment); });
  const auto costs =
      timed("  delay costs", [&] { return scan::find_delay_costs(trace, matches, waits); });
  const auto graph =
      timed("  dependencies", [&] { return scan::build_dependencies(trace, matches, alignment); });
  const auto path =
      timed("  critical path", [&] { return scan::find_critical_path(trace, graph); });
  const auto answer = timed("  what-if", [&] { return scan::what_if(trace, graph); });
  (void)timed("  verdicts",
              [&] { return scan::diagnose(trace, matches, alignment, waits, costs); });

  std::printf("aligned: %s; S %.3f; path %.1f ms; cost of rank %d: %.1f ms\n",
              alignment.aligned() ? "yes" : alignment.refusal.c_str(), answer.slowdown,
              static_cast<double>(path.length()) / 1e6, slow.rank,
              costs.cost(static_cast<scan::TableIndex>(slow.rank)) / 1e6);
  const scan::Diagnosis& d = study.diagnosis;
  for (const scan::Verdict& v : d.verdicts)
    std::printf("%s: %s\n", std::string(to_string(v.what)).c_str(), v.evidence[0].c_str());
  const bool right = d.verdicts.size() == 1 && d.verdicts[0].what == scan::VerdictClass::slow_gpu &&
                     d.verdicts[0].ranks == std::vector<std::int32_t>{slow.rank};
  return right && all.wall <= 10 ? 0 : 1;
}
