#include "../../support/shared_traces.hpp"
#include <mega/scan/import.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/straggler_timeline.hpp>
#include <mega/scan/study.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace mega::scan;

constexpr int replicas = 2, stages = 4, steps = 6, microbatches = 4;

/// A job whose last stage computes 1.5 times as long as the others.
std::string timeline() {
  std::string text = "[";
  for (int pp = 0; pp < stages; ++pp) {
    for (int dp = 0; dp < replicas; ++dp) {
      const int rank = pp * replicas + dp;
      const int length = pp == stages - 1 ? 1500 : 1000;
      const auto add = [&](const char* name, int thread, int at, int duration, int step, int mb) {
        text += R"({"name":")" + std::string(name) + R"(","pid":)" + std::to_string(dp) +
                R"(,"tid":)" + std::to_string(rank * 5 + thread) + R"(,"ts":)" +
                std::to_string(at) + R"(,"dur":)" + std::to_string(duration) +
                R"(,"ph":"X","args":{"step":)" + std::to_string(step) +
                R"(,"model_chunk":0,"mb_id":)" + std::to_string(mb) + R"(,"seq_id":)" +
                std::to_string(mb) + "}},";
      };
      for (int step = 0; step < steps; ++step) {
        const int from = step * 20'000;
        for (int mb = 0; mb < microbatches; ++mb) {
          add("forward-compute", 0, from + mb * 1600, length, step, mb);
          add("backward-compute", 0, from + 8000 + mb * 1600, length, step, mb);
        }
        add("grads-reduce-scatter", 3, from + 16'000, 100, step, 0);
      }
    }
  }
  for (int pp = 0; pp < stages; ++pp) {
    for (int dp = 0; dp < replicas; ++dp) {
      text += R"({"name":"thread_name","pid":)" + std::to_string(dp) + R"(,"tid":)" +
              std::to_string((pp * replicas + dp) * 5) + R"(,"ph":"M","args":{"name":"PP rank )" +
              std::to_string(pp) + R"(, TP rank 0, compute"}},)";
    }
  }
  text.back() = ']';
  return text;
}

Trace import(const std::string& text) {
  Trace t;
  Source source("timeline", text);
  import_straggler_timeline(t, source, {});
  return t;
}

/// What a report of a file without some of its names must not say.
void check_nobody_is_accused(const Study& s) {
  for (const Verdict& v : s.diagnosis.verdicts) {
    CHECK(v.what != VerdictClass::slow_gpu);
    CHECK(v.what != VerdictClass::stage_imbalance);
    CHECK(v.confidence <= 0.5);
  }
  CHECK_FALSE(s.what_if.has_value());
}

TEST_CASE("scan: a stage with more work is one while the names of threads are there") {
  const Study s(import(timeline()));
  REQUIRE(s.diagnosis.verdicts.size() == 1);
  CHECK(s.diagnosis.verdicts[0].what == VerdictClass::stage_imbalance);
  CHECK(s.diagnosis.verdicts[0].stages == std::vector<std::int32_t>{stages - 1});
  CHECK(s.trace.lost_places() == 0);
  CHECK(s.what_if.has_value());
}

TEST_CASE("scan: a file cut before its names accuses no GPU of its stage's work") {
  const std::string text = timeline();
  std::size_t cut = text.find("{\"name\":\"thread_name\"");
  for (std::size_t names = 0; names < 8; names += 3) {
    CAPTURE(names);
    const Study s(import(text.substr(0, cut - 1)));
    CHECK(s.trace.ranks.size() == 8);
    CHECK(s.trace.lost_places() == 8 - names);
    REQUIRE(s.trace.notes.size() == 1);
    CHECK(s.trace.notes[0] == "timeline does not say which stages " + std::to_string(8 - names) +
                                  " of its 8 ranks are of: the names of their threads, which "
                                  "stand at its end, are missing");
    check_nobody_is_accused(s);
    REQUIRE(s.diagnosis.verdicts.size() == 1);
    const Verdict& v = s.diagnosis.verdicts[0];
    CHECK(v.what == VerdictClass::ambiguous);
    CHECK(v.ranks == std::vector<std::int32_t>{6, 7});
    CHECK(v.confidence == 0.3);
    CHECK(v.factor == doctest::Approx(1.5).epsilon(0.01));
    CHECK(v.evidence.back().find("may be stages with more work") != std::string::npos);
    for (int i = 0; i < 3; ++i) cut = text.find("{\"name\":\"thread_name\"", cut + 1);
  }
}

TEST_CASE("scan: no operation joins ranks of which nothing says that they met") {
  const std::string text = timeline();
  const Study s(import(text.substr(0, text.find("{\"name\":\"thread_name\"") - 1)));
  CHECK(s.matches.instances.empty());
  CHECK(s.matches.leftovers.size() == std::size_t{8} * steps);
}

TEST_CASE("scan: the published timeline of a slow stage accuses nobody where it is cut") {
  const std::string path = mega_test::shared_trace("straggler/timeline-ST.json.gz");
  if (path.empty()) return;
  std::string text;
  for_each_source(path, [&](Source& source) { text = source.everything(std::size_t{1} << 28U); });
  for (const std::size_t share : {70, 90, 99}) {
    CAPTURE(share);
    const Study s(import(text.substr(0, text.size() * share / 100)));
    CHECK(s.trace.lost_places() == s.trace.ranks.size());
    check_nobody_is_accused(s);
  }
}

}  // namespace
