// Verdicts against what was waited: who causes the waiting is named, and nobody on whom no one
// waited.
#include "../../support/diagnosis.hpp"
#include "../../support/hand_trace.hpp"
#include "../../support/scan_generator.hpp"
#include "../../support/shared_traces.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/import.hpp>
#include <mega/scan/match.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;
using namespace mega_test;

constexpr std::int64_t ms = 1'000'000;

/// One step of four ranks: each computes a millisecond twice and reduces after each, within 0.1 ms
/// of the last arrival.
struct Step {
  HandTrace h{4, 4};
  std::int64_t at[4] = {0, 0, 0, 0};

  void reduce(std::int64_t sequence) {
    std::int64_t last = 0;
    for (const std::int64_t t : at) last = std::max(last, t);
    for (int r = 0; r < 4; ++r) {
      h.call(r, CommunicationOp::all_reduce, "all_reduce", at[r], last + ms / 10, sequence);
      at[r] = last + ms / 10;
    }
  }
  /// A kernel that is launched when the rank is ready, or `late` after that.
  void compute(int rank, std::int64_t late = 0) {
    const std::int64_t ready = at[rank];
    const auto launch = h.launch(rank, ready + late - 10, ready + late);
    const auto run = h.run(rank, "k", ready + late, ready + late + ms);
    h.trace.events[run].launch = launch;
    at[rank] = ready + late + ms;
  }
};

TEST_CASE("scan: one step: the rank that most of the waiting goes back to, without a reason") {
  Step s;
  s.at[2] = 6 * ms;  // enters the window late, and nothing is recorded of why
  for (int r = 0; r < 4; ++r) s.compute(r);
  s.reduce(0);
  for (int r = 0; r < 4; ++r) s.compute(r, r == 1 ? ms : 0);
  s.reduce(1);
  // Late, too, but behind the last operation: nobody waits for it.
  s.compute(3, 3 * ms);
  const Diagnosis d = diagnosis_of(s.h.trace);
  CAPTURE(text(d));
  REQUIRE(d.verdicts.size() == 2);
  CHECK(d.verdicts[0].what == VerdictClass::ambiguous);
  CHECK(d.verdicts[0].ranks == std::vector<std::int32_t>{2});
  // Three ranks waited six milliseconds for rank 2, and one for rank 1.
  CHECK(d.verdicts[0].cost_per_step == 6 * ms);
  CHECK(d.verdicts[0].evidence[0].find("to rank 2 by 85.71 %, to rank 1 by 14.29 %") !=
        std::string::npos);
  CHECK(d.verdicts[1].what == VerdictClass::host_delay);
  CHECK(d.verdicts[1].ranks == std::vector<std::int32_t>{1});
  CHECK(d.verdicts[1].evidence.back().find("14.29 % of all waiting") != std::string::npos);
  for (const Verdict& v : d.verdicts) CHECK(v.confidence == 0.5);
  // Rank 3 is not a verdict, and the notes say why.
  bool noted = false;
  for (const std::string& n : d.notes)
    noted = noted || n.find("0.00 % of all waiting goes back to rank 3") != std::string::npos;
  CHECK(noted);
}

TEST_CASE("scan: one step in which ranks come late by turns accuses nobody") {
  Step s;
  for (int op = 0; op < 4; ++op) {
    s.at[op] += ms;
    for (int r = 0; r < 4; ++r) s.compute(r);
    s.reduce(op);
  }
  const Diagnosis d = diagnosis_of(s.h.trace);
  CAPTURE(text(d));
  CHECK(d.healthy());
}

TEST_CASE(
    "scan: who causes most of the waiting causes half of it, and three times the next one's") {
  const auto found = [](std::vector<double> cost) {
    verdicts::JobLayout job;
    for (std::size_t r = 0; r < cost.size(); ++r) {
      job.number.push_back(static_cast<std::int32_t>(r));
      job.stage.push_back(0);
      job.replica.push_back(static_cast<std::int32_t>(r));
    }
    job.steps = {0};
    job.step_time = 100;
    DelayCosts delays;
    delays.indirect.assign(cost.size(), 0);
    delays.direct = std::move(cost);
    return verdicts::find_unexplained({}, job, verdicts::bill_waits(job, delays), {}).size();
  };
  CHECK(found({60, 20, 20, 0, 0, 0, 0, 0}) == 1);
  CHECK(found({52, 48, 0, 0, 0, 0, 0, 0}) == 0);
  CHECK(found({40, 10, 10, 10, 10, 10, 10, 0}) == 0);
  // Hardly any waiting at all.
  CHECK(found({30, 1, 1, 0, 0, 0, 0, 0}) == 0);
  CHECK(found({60, 0}) == 0);
}

TEST_CASE("scan: healthy jobs of one and two steps are healthy") {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    JobSpec spec;
    spec.dp = 4, spec.pp = seed % 3 == 0 ? 2 : 1;
    spec.steps = seed % 2 == 0 ? 2 : 1;
    spec.noise = 0.04;
    const Diagnosis d = diagnosis_of(generate(spec, seed).trace);
    CAPTURE(seed);
    CAPTURE(text(d));
    CHECK(d.healthy());
  }
}

TEST_CASE("scan: DLRM on eight ranks: rank 7 causes the waits, rank 3 none") {
  const std::string path = shared_trace("param/dlrm_kineto.tar.gz");
  if (path.empty()) return;
  Trace t;
  import_file(t, path);
  const Diagnosis d = diagnosis_of(t);
  CAPTURE(text(d));
  REQUIRE(!d.verdicts.empty());
  CHECK(d.verdicts[0].what == VerdictClass::ambiguous);
  CHECK(d.verdicts[0].ranks == std::vector<std::int32_t>{7});
  for (const Verdict& v : d.verdicts) {
    CHECK(v.ranks != std::vector<std::int32_t>{3});
    CHECK(v.confidence <= 0.5);
  }
}

}  // namespace
