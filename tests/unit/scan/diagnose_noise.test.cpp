// Verdicts where something is in the way of the work: ranks that share processors, bursts of other
// jobs. What varies for that reason is nobody's data and nobody's slow GPU; faults beneath it are
// still found.
#include "../../support/diagnosis.hpp"
#include "../../support/scan_generator.hpp"
#include "../../support/scan_verdict_score.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/match.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;
using namespace mega_test;

enum class Noise {
  preemption,  ///< one kernel in ten loses the processor for a few milliseconds, with a heavy tail
  bursts,      ///< for a while all of a rank's kernels take up to three times as long
  waves,       ///< kernels get slower and faster again over some micro-batches
};

/// The job as if its ranks had been delayed: kernels get longer, and what the rank does behind them
/// happens later by as much.
void delay(Trace& t, Noise noise, std::uint64_t seed) {
  const mega_test::detail::Noise draw(seed);
  std::vector<std::vector<std::size_t>> of_rank(t.ranks.size());
  for (std::size_t i = 0; i < t.events.size(); ++i) of_rank[t.rank_index(t.events[i])].push_back(i);
  for (std::size_t r = 0; r < of_rank.size(); ++r) {
    std::vector<std::pair<Nanoseconds, Nanoseconds>> delays;  // end of a kernel, added there
    std::vector<std::size_t> kernels;
    for (const std::size_t i : of_rank[r]) {
      if (is_compute(t.events[i].kind)) kernels.push_back(i);
    }
    std::sort(kernels.begin(), kernels.end(),
              [&](std::size_t a, std::size_t b) { return t.events[a].begin < t.events[b].begin; });
    bool contended = false;
    double until = 0;
    for (std::size_t k = 0; k < kernels.size(); ++k) {
      const Event& e = t.events[kernels[k]];
      const auto u = [&](std::uint64_t salt) { return draw.uniform(r, k, salt); };
      double added = 0;
      if (noise == Noise::preemption) {
        if (u(1) < 0.1) added = 1.5e6 * std::pow(1 - u(2), -0.6);
      } else if (noise == Noise::waves) {
        const auto now = static_cast<double>(e.begin - t.events[kernels[0]].begin);
        added = 0.5 * static_cast<double>(e.duration()) *
                (1 + std::sin(now / 9e6 + 6 * draw.uniform(r, 0, 5)));
      } else {
        const auto now = static_cast<double>(e.begin - t.events[kernels[0]].begin);
        while (now > until) {
          contended = !contended;
          until +=
              (contended ? 6e6 : 18e6) * -std::log(1 - draw.uniform(r, std::uint64_t(until), 3));
        }
        if (contended) added = static_cast<double>(e.duration()) * (1 + u(4));
      }
      if (added > 0) delays.emplace_back(e.end, static_cast<Nanoseconds>(std::min(added, 1e9)));
    }
    std::vector<Nanoseconds> sums{0};
    for (const auto& [at, added] : delays) sums.push_back(sums.back() + added);
    // What ends a kernel is later with it; what begins then, too.
    const auto later = [&](Nanoseconds time) {
      const auto behind = std::upper_bound(
          delays.begin(), delays.end(), time,
          [](Nanoseconds x, const std::pair<Nanoseconds, Nanoseconds>& d) { return x < d.first; });
      return time + sums[static_cast<std::size_t>(behind - delays.begin())];
    };
    for (const std::size_t i : of_rank[r]) {
      t.events[i].begin = later(t.events[i].begin);
      t.events[i].end = later(t.events[i].end);
    }
  }
}

JobSpec shaped(int dp, int tp, int pp, bool labelled = true) {
  JobSpec s;
  s.dp = dp, s.tp = tp, s.pp = pp;
  s.microbatches = 8;
  s.steps = 8;
  s.labelled = labelled;
  return s;
}

Diagnosis delayed(const JobSpec& spec, Noise noise, std::uint64_t seed) {
  SyntheticJob job = generate(spec, seed);
  delay(job.trace, noise, seed);
  const Matches m = match(job.trace);
  return diagnose(job.trace, m, align(job.trace, m));
}

bool says(const Diagnosis& d, VerdictClass what) {
  return std::any_of(d.verdicts.begin(), d.verdicts.end(),
                     [&](const Verdict& v) { return v.what == what; });
}

TEST_CASE("scan: healthy ranks that get in each other's way have no unequal data and no slow GPU") {
  for (const Noise noise : {Noise::preemption, Noise::bursts, Noise::waves}) {
    for (const auto& [dp, tp, pp] : {std::tuple(8, 1, 1), std::tuple(4, 1, 2), std::tuple(2, 2, 2),
                                     std::tuple(2, 1, 4), std::tuple(4, 2, 1)}) {
      for (std::uint64_t seed = 1; seed <= 6; ++seed) {
        const Diagnosis d = delayed(shaped(dp, tp, pp), noise, seed);
        CAPTURE(dp);
        CAPTURE(pp);
        CAPTURE(seed);
        CAPTURE(static_cast<int>(noise));
        CAPTURE(text(d));
        CHECK(!says(d, VerdictClass::data_imbalance));
        // Steps that are slow as a whole, one after the other, are what a slow GPU's are.
        if (noise == Noise::waves) continue;
        CHECK(!says(d, VerdictClass::slow_gpu));
        CHECK(!says(d, VerdictClass::stage_imbalance));
      }
    }
  }
}

TEST_CASE("scan: unequal data are found beneath preemption, with and without micro-batch numbers") {
  for (const bool labelled : {true, false}) {
    JobSpec spec = shaped(4, 1, 2, labelled);
    Fault f;
    f.kind = FaultKind::data_imbalance;
    f.factor = 0.5;
    spec.faults = {f};
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      const Diagnosis d = delayed(spec, Noise::preemption, seed);
      CAPTURE(labelled);
      CAPTURE(seed);
      CAPTURE(text(d));
      CHECK(says(d, VerdictClass::data_imbalance));
      CHECK(!says(d, VerdictClass::slow_gpu));
    }
  }
}

TEST_CASE("scan: a slow GPU is found beneath other delays, and named first") {
  for (const Noise noise : {Noise::preemption, Noise::bursts}) {
    JobSpec spec = shaped(4, 1, 2);
    Fault f;
    f.rank = 5;
    f.factor = 1.8;
    spec.faults = {f};
    const Diagnosis d = delayed(spec, noise, 4);
    CAPTURE(static_cast<int>(noise));
    CAPTURE(text(d));
    REQUIRE(!d.verdicts.empty());
    CHECK(d.verdicts[0].what == VerdictClass::slow_gpu);
    CHECK(d.verdicts[0].ranks == std::vector<std::int32_t>{5});
    CHECK(d.verdicts[0].factor == doctest::Approx(1.8).epsilon(0.2));
    CHECK(!says(d, VerdictClass::data_imbalance));
  }
}

/// A rank's steps as mega's own recorder has them: operations of one name in both passes.
Trace two_passes(double backward_factor, double slow) {
  Trace t;
  constexpr int ranks = 4, steps = 6, microbatches = 6;
  for (int r = 0; r < ranks; ++r) {
    Rank rank;
    rank.rank = r;
    rank.data = r;
    rank.pipeline = 0;
    rank.clock = "one";
    t.ranks.push_back(rank);
    t.lanes.push_back({static_cast<TableIndex>(r), 0, 0, LaneKind::device, "stream"});
    Nanoseconds at = 0;
    for (int s = 0; s < steps; ++s) {
      // Two forwards ahead, then in turns.
      std::vector<std::pair<bool, int>> order{{false, 0}, {false, 1}};
      for (int m = 0; m < microbatches; ++m) {
        order.emplace_back(true, m);
        if (m + 2 < microbatches) order.emplace_back(false, m + 2);
      }
      for (const auto& [backward, m] : order) {
        const auto add = [&](const char* name, EventKind kind, Nanoseconds begin, Nanoseconds end) {
          Event e;
          e.begin = begin, e.end = end;
          e.name = t.names.intern(name);
          e.lane = static_cast<TableIndex>(r);
          e.step = s;
          e.microbatch = m;
          e.kind = kind;
          t.events.push_back(e);
        };
        const double length = 1e6 * (backward ? backward_factor : 1.0) * (r == 2 ? slow : 1.0);
        const auto each = static_cast<Nanoseconds>(length);
        add(backward ? "backward" : "forward", backward ? EventKind::backward : EventKind::forward,
            at, at + 2 * each + 1000);
        add("qkv", EventKind::compute, at + 100, at + 100 + each);
        add("down", EventKind::compute, at + 200 + each, at + 200 + 2 * each);
        at += 2 * each + 2000;
      }
    }
  }
  return t;
}

TEST_CASE("scan: an operation of one name in two passes is two kernels, and their turns no load") {
  const Trace healthy = two_passes(2.5, 1);
  const Matches m = match(healthy);
  const Diagnosis d = diagnose(healthy, m, align(healthy, m));
  CAPTURE(text(d));
  CHECK(d.healthy());
  const verdicts::KernelTimes times =
      verdicts::tabulate_kernels(healthy, verdicts::lay_out(healthy));
  CHECK(times.kernels.size() == 4);

  const Trace slow = two_passes(2.5, 1.3);
  const Matches n = match(slow);
  const Diagnosis found = diagnose(slow, n, align(slow, n));
  CAPTURE(text(found));
  REQUIRE(found.verdicts.size() == 1);
  CHECK(found.verdicts[0].what == VerdictClass::slow_gpu);
  CHECK(found.verdicts[0].ranks == std::vector<std::int32_t>{2});
  CHECK(found.verdicts[0].factor == doctest::Approx(1.3).epsilon(0.01));
}

TEST_CASE("scan: a level that is no more than flicker between steps does not last") {
  verdicts::RankSpeeds steady;
  steady.steps = 6;
  steady.limit = 0.1;
  steady.significance = 6;
  steady.known.assign(12, 1);
  steady.excess = {0.01, 0.0, 0.02, 0.0, 0.01, 0.0, 0.4, 0.41, 0.42, 0.4, 0.41, 0.4};
  verdicts::RankSpeeds flickers = steady;
  flickers.excess = {0.0, 0.5, 0.0, 0.4, 0.0, 0.1, 0.1, 0.9, 0.11, 0.8, 0.12, 0.5};
  steady.flicker = verdicts::measure_flicker(steady);
  flickers.flicker = verdicts::measure_flicker(flickers);
  CHECK(steady.flicker < 0.02);
  CHECK(flickers.flicker > 0.2);
  CHECK(steady.lasts(steady.onset(1)));
  CHECK(!steady.lasts(steady.onset(0)));
  CHECK(flickers.onset(1).lasts());
  CHECK(!flickers.lasts(flickers.onset(1)));
}

}  // namespace
