#include "../../support/hand_trace.hpp"
#include "../../support/shared_traces.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/replay.hpp>
#include <mega/scan/straggler_timeline.hpp>
#include <mega/scan/what_if.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace mega::scan;
using enum CommunicationOp;
using mega_test::HandTrace;

WhatIf ask(const Trace& t, const WhatIfOptions& options = {}) {
  const Matches m = match(t);
  return what_if(t, build_dependencies(t, m, align(t, m)), options);
}

/// One stage of four replicas, ten steps: a kernel, an all-reduce, a short kernel.
HandTrace replicas(int slow, double factor) {
  HandTrace h(4, 4);
  for (int step = 0; step < 10; ++step) {
    const std::int64_t at = step * 10'000'000;
    const auto length = [&](int r) {
      return static_cast<std::int64_t>(r == slow ? 1'000'000 * factor : 1'000'000);
    };
    const std::int64_t all = at + length(slow);
    for (int r = 0; r < 4; ++r) {
      h.run(r, "forward", at, at + length(r), step);
      h.call(r, all_reduce, "reduce", at + length(r), all + 100'000, step, step);
      h.run(r, "optimizer", all + 100'000, all + 200'000, step);
    }
  }
  return h;
}

TEST_CASE("scan: S of one slow replica, by hand") {
  const HandTrace h = replicas(2, 2.0);
  const WhatIf w = ask(h.trace);
  // Real: 2000 + 100 + 100 us. Ideal: the mean kernel of 1250, then the same.
  CHECK(w.no_delay_ns == doctest::Approx(2'200'000));
  CHECK(w.ideal_ns == doctest::Approx(1'450'000));
  CHECK(w.slowdown == doctest::Approx(2200.0 / 1450));
  CHECK(w.delay_slowdown == doctest::Approx(1));
  CHECK(w.by_data.at(2) == doctest::Approx(2200.0 / 1450));
  // Everyone else is faster than the mean, but the step waits for the ideal ones.
  CHECK(w.by_data.at(0) == doctest::Approx(1));
  CHECK(w.by_name.at("forward") == doctest::Approx(2200.0 / 1450));
  CHECK(w.by_name.at("reduce") == doctest::Approx(1));
  CHECK(w.worst == std::vector<std::int32_t>{2});
  CHECK(w.worst_share == doctest::Approx(1));
  CHECK(w.last_stage_share == doctest::Approx(1));  // the only stage is the last one
}

TEST_CASE("scan: equal ranks have no slowdown and nothing to share out") {
  const WhatIf w = ask(replicas(0, 1.0).trace);
  CHECK(w.slowdown == doctest::Approx(1));
  CHECK(w.worst_share == 0);
  CHECK(w.last_stage_share == 0);
}

TEST_CASE("scan: the worst 3 % are rounded up, once") {
  WhatIfOptions options;
  options.worst_fraction = 0.5;
  CHECK(ask(replicas(3, 1.5).trace, options).worst.size() == 2);
  options.worst_fraction = 0.51;
  CHECK(ask(replicas(3, 1.5).trace, options).worst.size() == 3);
}

TEST_CASE("scan: an empty trace has no what-if") {
  CHECK(ask(Trace{}).slowdown == 1);
}

/// `fixed_s`: the step with the worst 3 % of the ranks made ideal, from which M_W follows.
void check_file(const char* name, double s, double last, double ideal_s, double fixed_s) {
  const std::string path = mega_test::shared_trace(name);
  if (path.empty()) return;
  CAPTURE(path);
  Trace t;
  for_each_source(path, [&](Source& source) { import_straggler_timeline(t, source, {}); });
  const WhatIf w = ask(t);
  CHECK(w.slowdown == doctest::Approx(s).epsilon(0.01));
  CHECK(w.last_stage_share == doctest::Approx(last).epsilon(0.01));
  CHECK(w.ideal_ns / 1e9 == doctest::Approx(ideal_s).epsilon(0.01));
  const double fixed = w.no_delay_ns - w.worst_share * (w.no_delay_ns - w.ideal_ns);
  CHECK(fixed / 1e9 == doctest::Approx(fixed_s).epsilon(0.01));
}

TEST_CASE("scan: what-if of public timelines as published: S, M_S and times within 1 %") {
  check_file("straggler/timeline-ST.json.gz", 1.1787, 1.2194, 1.8433, 2.1624);
  check_file("straggler/timeline-SE.json.gz", 1.5374, 0.6877, 5.8975, 8.9871);
}

}  // namespace
