// Whose fault slow transfers are, where several explanations hold.
#include "../../support/diagnosis.hpp"
#include "../../support/hand_trace.hpp"
#include "../../support/scan_generator.hpp"
#include "../../support/scan_verdict_score.hpp"
#include <mega/scan/diagnose.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;
using namespace mega_test;

constexpr std::int64_t us = 1'000;

/// Two pipelines of two stages, 0 to 2 and 1 to 3. In each of eight steps four messages of 3 us.
struct Messages {
  std::int64_t slow_us = 3;  ///< of those from rank 1, which is
  bool buffered = true;      ///< senders wait for no receiver, or else for theirs
  int first_slow_step = 0;
  bool one_clock = true;

  [[nodiscard]] Trace recorded() const {
    HandTrace h(4, 2);
    const TableIndex pairs[] = {h.trace.intern_group("pair", {0, 2}),
                                h.trace.intern_group("pair", {1, 3})};
    for (std::int64_t step = 0; step < 8; ++step) {
      for (int pair = 0; pair < 2; ++pair) {
        h.world = pairs[pair];
        for (std::int64_t m = 0; m < 4; ++m) {
          const std::int64_t begin = (step * 10 + m * 2) * 1000 * us;
          const bool slow = pair == 1 && step >= first_slow_step;
          const std::int64_t length = (slow ? slow_us : 3) * us + 100 * ((m + step) % 4);
          h.run(pair, "k", begin - 500 * us, begin, static_cast<int>(step));
          // The receiver takes the first two messages late, and has waited for the others.
          const std::int64_t taken = m < 2 ? begin + 900 * us : begin - 700 * us;
          const std::int64_t there = std::max(taken, begin) + length;
          h.call(pair, CommunicationOp::send, "send", begin, buffered ? begin + length : there,
                 4 * step + m, static_cast<int>(step), pair + 2, 4096);
          h.call(pair + 2, CommunicationOp::recv, "recv", taken,
                 buffered && m < 2 ? taken + us / 2 : there, 4 * step + m, static_cast<int>(step),
                 pair, 4096);
          h.run(pair + 2, "k", there + us, there + 501 * us, static_cast<int>(step));
        }
      }
    }
    if (!one_clock) {
      for (Rank& rank : h.trace.ranks) rank.clock.clear();
    }
    return std::move(h.trace);
  }
};

TEST_CASE("scan: short messages that nobody waits for tell of a slow link") {
  CHECK_MESSAGE(diagnosis_of(Messages{}.recorded()).healthy(),
                text(diagnosis_of(Messages{}.recorded())));
  for (const std::int64_t slow : {90, 600}) {
    const Diagnosis d = diagnosis_of(Messages{.slow_us = slow, .first_slow_step = 2}.recorded());
    CAPTURE(text(d));
    REQUIRE(d.verdicts.size() == 1);
    CHECK(d.verdicts[0].what == VerdictClass::slow_link);
    CHECK(d.verdicts[0].ranks == std::vector<std::int32_t>{1, 3});
    CHECK(d.verdicts[0].since_step == 2);
    CHECK(d.verdicts[0].factor == doctest::Approx(static_cast<double>(slow) / 3).epsilon(0.05));
    // Four messages in six of eight steps.
    CHECK(static_cast<double>(d.verdicts[0].cost_per_step) ==
          doctest::Approx(static_cast<double>(slow - 3) * us * 4 * 6 / 8).epsilon(0.05));
  }
}

TEST_CASE("scan: short messages that take as long as latency, or wait, tell of no link") {
  for (const Messages& m : {Messages{.slow_us = 12}, Messages{.slow_us = 90, .buffered = false},
                            Messages{.slow_us = 90, .one_clock = false}}) {
    const Diagnosis d = diagnosis_of(m.recorded());
    CHECK_MESSAGE(d.healthy(), text(d));
  }
}

TEST_CASE(
    "scan: of two ranks that explain as much the one whose transfers are slow alike is slow") {
  // Three stages of five replicas: rank 10 + d has a pair with 5 + d and a group with 10 to 14.
  // With rank b slow and the pair of a, both a and b have one slow pair and the slow group.
  for (const auto& [a, b] : {std::pair(2, 4), std::pair(4, 2), std::pair(0, 1)}) {
    for (const double of_pair : {25.0, 3.0}) {
      JobSpec spec;
      spec.dp = 5, spec.tp = 1, spec.pp = 3;
      spec.layers = 1;
      spec.steps = 6;
      Fault pair, rank;
      pair.kind = FaultKind::slow_edge;
      pair.rank = 5 + a;
      pair.peer = 10 + a;
      pair.factor = of_pair;
      rank.kind = FaultKind::slow_links;
      rank.rank = 10 + b;
      rank.factor = 9;
      spec.faults = {pair, rank};
      for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        const auto d = diagnosis_of(generate(spec, seed).trace);
        CAPTURE(describe(spec));
        CAPTURE(text(d));
        CHECK(score_of(spec, d).right());
      }
    }
  }
}

}  // namespace
