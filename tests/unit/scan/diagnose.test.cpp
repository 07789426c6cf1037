#include "../../support/diagnosis.hpp"
#include "../../support/hand_trace.hpp"
#include "../../support/scan_generator.hpp"
#include "../../support/scan_verdict_score.hpp"
#include "../../support/shared_traces.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/megatronapp.hpp>
#include <mega/scan/straggler_timeline.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace mega::scan;
using namespace mega_test;

JobSpec small(int dp, int tp, int pp) {
  JobSpec s;
  s.dp = dp, s.tp = tp, s.pp = pp;
  s.microbatches = std::max(4, pp);
  return s;
}

TEST_CASE("scan: drawn jobs: every culprit is named and nobody else") {
  int right = 0;
  constexpr int jobs = 24;
  for (std::uint64_t seed = 200; seed < 200 + jobs; ++seed) {
    const JobSpec spec = draw_job(seed);
    const SyntheticJob job = generate(spec, seed);
    const Diagnosis d = diagnosis_of(job.trace);
    const bool ok = score_of(spec, d).right();
    CAPTURE(describe(spec));
    CAPTURE(text(d));
    CHECK(ok);
    right += ok ? 1 : 0;
  }
  CHECK(right == jobs);
}

TEST_CASE("scan: healthy jobs of every shape are healthy at 5 % noise") {
  for (const int dp : {2, 8}) {
    for (const int tp : {1, 4}) {
      for (const int pp : {1, 4}) {
        JobSpec spec = small(dp, tp, pp);
        spec.noise = 0.05;
        const auto seed = static_cast<std::uint64_t>(100 * dp + 10 * tp + pp);
        const Diagnosis d = diagnosis_of(generate(spec, seed).trace);
        CAPTURE(text(d));
        CHECK(d.healthy());
        CHECK(d.step_time > 0);
      }
    }
  }
}

TEST_CASE("scan: a slow GPU: factor, first step, cost and path") {
  JobSpec spec = small(4, 2, 2);
  spec.steps = 6;
  Fault f;
  f.rank = 5;
  f.factor = 1.5;
  f.from_step = 3;
  spec.faults = {f};
  const SyntheticJob job = generate(spec, 7);
  const Diagnosis d = diagnosis_of(job.trace);
  CAPTURE(text(d));
  REQUIRE(d.verdicts.size() == 1);
  const Verdict& v = d.verdicts[0];
  CHECK(v.what == VerdictClass::slow_gpu);
  CHECK(v.ranks == std::vector<std::int32_t>{5});
  CHECK(v.since_step == 3);
  CHECK(v.factor == doctest::Approx(1.5).epsilon(0.05));
  CHECK(v.cost_per_step > 0);
  REQUIRE(v.path.size() > 1);
  CHECK(v.path[0] == 5);
  // Its tensor-parallel mate waits for every kernel, the next stage for every micro-batch.
  CHECK((v.path[1] == 4 || v.path[1] == 13));
  CHECK(v.evidence[0].find("rank 5") != std::string::npos);
}

TEST_CASE("scan: two slow GPUs, also in one stage, are two verdicts") {
  JobSpec spec = small(4, 1, 2);
  Fault a, b;
  a.rank = 1, a.factor = 1.6;
  b.rank = 2, b.factor = 1.4;
  spec.faults = {a, b};
  const Diagnosis d = diagnosis_of(generate(spec, 8).trace);
  CAPTURE(text(d));
  CHECK(score_of(spec, d).right());
}

TEST_CASE("scan: of two ranks that always differed either may be wrong; a change tells which") {
  JobSpec spec = small(2, 1, 1);
  spec.steps = 6;
  Fault f;
  f.rank = 1;
  f.factor = 1.6;
  spec.faults = {f};
  const Diagnosis always = diagnosis_of(generate(spec, 9).trace);
  REQUIRE(always.verdicts.size() == 1);
  CHECK(always.verdicts[0].what == VerdictClass::ambiguous);
  CHECK(always.verdicts[0].ranks == std::vector<std::int32_t>{0, 1});
  spec.faults[0].from_step = 3;
  const Diagnosis since = diagnosis_of(generate(spec, 9).trace);
  REQUIRE(since.verdicts.size() == 1);
  CHECK(since.verdicts[0].what == VerdictClass::slow_gpu);
  CHECK(since.verdicts[0].ranks == std::vector<std::int32_t>{1});
}

TEST_CASE("scan: a stage with longer kernels and no peers accuses no GPU") {
  HandTrace h(4);
  for (int step = 0; step < 5; ++step) {
    for (int r = 0; r < 4; ++r) {
      std::int64_t at = step * 100'000'000;
      for (int m = 0; m < 4; ++m) {
        h.run(r, "forward", at, at + (r == 3 ? 7'000'000 : 3'500'000), step);
        h.run(r, "backward", at + 7'000'000, at + (r == 3 ? 17'000'000 : 14'000'000), step);
        at += 20'000'000;
      }
    }
  }
  const Diagnosis d = diagnosis_of(h.trace);
  CAPTURE(text(d));
  REQUIRE(d.verdicts.size() == 1);
  CHECK(d.verdicts[0].what == VerdictClass::stage_imbalance);
  CHECK(d.verdicts[0].stages == std::vector<std::int32_t>{3});
  CHECK(d.verdicts[0].ranks.empty());
  CHECK(d.verdicts[0].factor == doctest::Approx(17.0 / 10.5).epsilon(0.01));
}

TEST_CASE("scan: nothing to judge is healthy") {
  CHECK(diagnosis_of(Trace{}).healthy());
  HandTrace one(1);
  one.run(0, "k", 0, 10);
  CHECK(diagnosis_of(one.trace).healthy());
}

std::vector<const Verdict*> of_class(const Diagnosis& d, VerdictClass c) {
  std::vector<const Verdict*> out;
  for (const Verdict& v : d.verdicts) {
    if (v.what == c) out.push_back(&v);
  }
  return out;
}

TEST_CASE("scan: public timelines: a slow last stage and uneven sequences accuse no worker") {
  for (const char* const name : {"ST", "SE"}) {
    const std::string path = shared_trace(std::string("straggler/timeline-") + name + ".json.gz");
    if (path.empty()) continue;
    Trace t;
    for_each_source(path, [&](Source& source) { import_straggler_timeline(t, source, {}); });
    const Diagnosis d = diagnosis_of(t);
    CAPTURE(text(d));
    CHECK(of_class(d, VerdictClass::slow_gpu).empty());
    if (std::string(name) == "ST") {
      REQUIRE(of_class(d, VerdictClass::stage_imbalance).size() == 1);
      CHECK(of_class(d, VerdictClass::stage_imbalance)[0]->stages == std::vector<std::int32_t>{3});
    } else {
      CHECK(of_class(d, VerdictClass::data_imbalance).size() == 1);
    }
  }
}

TEST_CASE("scan: MegatronApp's pipeline: stage 3 has more work, no GPU is to blame") {
  const std::string path =
      shared_trace("megatronapp/data-1-pipeline-4-tensor-1-pp-aggregated.json.gz");
  if (path.empty()) return;
  Trace t;
  for_each_source(path, [&](Source& source) { import_megatronapp(t, source, {}); });
  const Diagnosis d = diagnosis_of(t);
  CAPTURE(text(d));
  CHECK(of_class(d, VerdictClass::slow_gpu).empty());
  const auto stages = of_class(d, VerdictClass::stage_imbalance);
  REQUIRE(stages.size() == 1);
  CHECK(stages[0]->stages == std::vector<std::int32_t>{3});
}

}  // namespace
