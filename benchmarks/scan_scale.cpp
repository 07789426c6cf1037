/// @file  How long the analysis of a large job takes: 1,024 ranks of about 2,000 events each, with
/// a slow GPU. Prints the seconds of each stage on one core; the limit is 10 s in all.
#include "../tests/support/scan_generator.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/critical_path.hpp>
#include <mega/scan/delay_cost.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/replay.hpp>
#include <mega/scan/wait_states.hpp>
#include <mega/scan/what_if.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace {

template <class Work>
auto timed(const char* what, double& sum, const Work& work) {
  using clock = std::chrono::steady_clock;
  const auto begin = clock::now();
  auto out = work();
  const double s = std::chrono::duration<double>(clock::now() - begin).count();
  std::printf("%-16s %7.2f s\n", what, s);
  sum += s;
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
  double unused = 0, sum = 0;
  const auto job = timed("(generate)", unused, [&] { return mega_test::generate(spec, 1); });
  std::printf("%d ranks, %zu events, %.0f a rank\n", spec.ranks(), job.trace.events.size(),
              static_cast<double>(job.trace.events.size()) / spec.ranks());
  const auto matches = timed("match", sum, [&] { return scan::match(job.trace); });
  const auto alignment = timed("align", sum, [&] { return scan::align(job.trace, matches); });
  const auto waits =
      timed("waits", sum, [&] { return scan::find_waits(job.trace, matches, alignment); });
  const auto costs = timed("delay costs", sum, [&] {
    return scan::find_delay_costs(job.trace, matches, alignment, waits);
  });
  const auto graph = timed("dependencies", sum,
                           [&] { return scan::build_dependencies(job.trace, matches, alignment); });
  const auto path =
      timed("critical path", sum, [&] { return scan::find_critical_path(job.trace, graph); });
  const auto answer = timed("what-if", sum, [&] { return scan::what_if(job.trace, graph); });
  const auto d =
      timed("verdicts", sum, [&] { return scan::diagnose(job.trace, matches, alignment); });
  std::printf("%-16s %7.2f s; aligned: %s; S %.3f; path %.1f ms; cost of rank %d: %.1f ms\n", "all",
              sum, alignment.aligned() ? "yes" : alignment.refusal.c_str(), answer.slowdown,
              static_cast<double>(path.length()) / 1e6, slow.rank,
              costs.cost(static_cast<scan::TableIndex>(slow.rank)) / 1e6);
  for (const scan::Verdict& v : d.verdicts)
    std::printf("%s: %s\n", std::string(to_string(v.what)).c_str(), v.evidence[0].c_str());
  const bool right = d.verdicts.size() == 1 && d.verdicts[0].what == scan::VerdictClass::slow_gpu &&
                     d.verdicts[0].ranks == std::vector<std::int32_t>{slow.rank};
  return right && sum <= 10 ? 0 : 1;
}
