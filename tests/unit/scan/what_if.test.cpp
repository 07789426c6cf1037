#include "../../support/hand_trace.hpp"
#include "../../support/scan_generator.hpp"
#include "../../support/shared_traces.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/replay.hpp>
#include <mega/scan/straggler_timeline.hpp>
#include <mega/scan/what_if.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
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

TEST_CASE("scan: what holds other spans is counted once") {
  // A layer of 1000 us: qkv 400, nothing 100, out 500 of which the last 200 are an all-reduce.
  HandTrace h(2, 2);
  for (int step = 0; step < 4; ++step) {
    for (int r = 0; r < 2; ++r) {
      const std::int64_t at = step * 10'000'000;
      const auto us = [&](std::int64_t t) { return at + 1000 * t; };
      h.run(r, "layer", us(0), us(1000), step);
      h.run(r, "qkv", us(0), us(400), step);
      h.run(r, "out", us(500), us(1000), step);
      const TableIndex call = h.call(r, all_reduce, "reduce", us(800), us(1000), step, step);
      h.trace.events[call].lane = static_cast<TableIndex>(3 * r);
      h.run(r, "update", us(1000), us(1050), step);
    }
  }
  const Matches m = match(h.trace);
  const DependencyGraph graph = build_dependencies(h.trace, m, align(h.trace, m));
  CHECK(graph.nodes.size() == 4 * 2 * 4);
  const WhatIf w = what_if(h.trace, graph, {});
  CHECK(w.actual_ns == doctest::Approx(1'050'000));
  CHECK(w.no_delay_ns == doctest::Approx(950'000));
  CHECK(w.ideal_ns == doctest::Approx(950'000));
}

TEST_CASE("scan: a computation with communications inside is what they leave of it") {
  HandTrace h(2, 2);
  for (int r = 0; r < 2; ++r) {
    h.run(r, "embedding", 0, 1000);
    for (const auto& [begin, end, number] : {std::tuple{0, 100, 0}, std::tuple{400, 500, 1}}) {
      const TableIndex call = h.call(r, all_reduce, "reduce", begin, end, number);
      h.trace.events[call].lane = static_cast<TableIndex>(3 * r);
    }
    // Begins inside, and ends behind it.
    h.run(r, "norm", 900, 1200);
  }
  const Matches m = match(h.trace);
  const DependencyGraph graph = build_dependencies(h.trace, m, align(h.trace, m));
  std::vector<std::pair<Nanoseconds, Nanoseconds>> parts;
  for (const DependencyGraph::Node& n : graph.nodes) {
    if (n.rank == 0 && h.trace.name(h.trace.events[n.event]) == "embedding")
      parts.emplace_back(n.begin, n.end);
  }
  CHECK(parts == std::vector<std::pair<Nanoseconds, Nanoseconds>>{{100, 400}, {500, 1000}});
  CHECK(graph.nodes.size() == 2 * 5);
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

TEST_CASE("scan: only the chosen steps count, for the usual times and for the mean") {
  HandTrace h = replicas(2, 2.0);
  Trace& t = h.trace;
  // Steps from 5 on are three times as long.
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    Event& e = t.events[i];
    if (e.step < 5) continue;
    const std::int64_t at = e.step * 10'000'000LL;
    e.begin = at + 3 * (e.begin - at);
    e.end = at + 3 * (e.end - at);
  }
  WhatIfOptions options;
  options.steps = {3, 1, 1};
  CHECK(ask(t, options).ideal_ns == doctest::Approx(1'450'000));
  CHECK(ask(t, options).actual_ns == doctest::Approx(2'200'000));
  options.steps = {9};
  CHECK(ask(t, options).ideal_ns == doctest::Approx(3 * 1'450'000));
  options.steps = {77};
  CHECK(ask(t, options).ideal_ns == 0);
}

/// Every scenario once more, one after the other.
void check_against_single_replays(const Trace& t) {
  const Matches m = match(t);
  const DependencyGraph g = build_dependencies(t, m, align(t, m));
  WhatIfOptions options;
  options.threads = 1;
  const WhatIf w = what_if(t, g, options);
  options.threads = 3;
  const WhatIf again = what_if(t, g, options);
  CHECK(w.by_name == again.by_name);
  CHECK(w.by_data == again.by_data);
  CHECK(w.worst_share == again.worst_share);

  const auto is_transfer = [&](const auto& n) {
    return t.events[n.event].kind == EventKind::communication;
  };
  std::map<std::pair<TableIndex, std::int64_t>, std::vector<double>> kinds;
  const auto kind = [&](const auto& n) -> std::vector<double>& {
    const Event& e = t.events[n.event];
    return kinds[{e.name, is_transfer(n) ? t.communications[e.detail].bytes : -1}];
  };
  for (const auto& n : g.nodes) kind(n).push_back(n.work);
  for (auto& [key, all] : kinds) std::sort(all.begin(), all.end());
  const auto usual = [&](const auto& n) {
    const std::vector<double>& all = kind(n);
    const std::size_t half = all.size() / 2;
    if (is_transfer(n)) return all.size() % 2 != 0 ? all[half] : (all[half - 1] + all[half]) / 2;
    double sum = 0;
    for (const double x : all) sum += x;
    return sum / static_cast<double>(all.size());
  };
  const auto step_where = [&](const auto& own) {
    std::vector<double> work;
    for (const auto& n : g.nodes) work.push_back(own(n) ? n.work : usual(n));
    ReplayTimes times;
    replay(g, work, false, times);
    return times.mean_step();
  };
  // Sums of a kind are taken in another order.
  const auto same = [](double x) { return doctest::Approx(x).epsilon(1e-9); };
  const double ideal = step_where([](const auto&) { return false; });
  CHECK(w.ideal_ns == same(ideal));
  CHECK(w.no_delay_ns == same(step_where([](const auto&) { return true; })));
  for (const auto& [data, s] : w.by_data) {
    CHECK(s ==
          same(step_where([&](const auto& n) { return t.ranks[n.rank].data == data; }) / ideal));
  }
  for (const auto& [stage, s] : w.by_stage) {
    CHECK(s == same(step_where([&](const auto& n) { return t.ranks[n.rank].pipeline == stage; }) /
                    ideal));
  }
  for (const auto& [name, s] : w.by_name) {
    CHECK(s == same(step_where([&](const auto& n) { return t.name(t.events[n.event]) == name; }) /
                    ideal));
  }
  const double lost = w.no_delay_ns - w.ideal_ns;
  if (lost == 0) return;
  CHECK(w.worst_share == doctest::Approx((w.no_delay_ns - step_where([&](const auto& n) {
                                            return std::count(w.worst.begin(), w.worst.end(),
                                                              t.ranks[n.rank].rank) == 0;
                                          })) /
                                         lost)
                             .epsilon(1e-6));
}

TEST_CASE("scan: replays side by side and on threads say what single ones say") {
  mega_test::JobSpec spec;
  spec.dp = 5, spec.tp = 2, spec.pp = 3, spec.microbatches = 4, spec.steps = 3;
  mega_test::Fault slow;
  slow.rank = 7;
  slow.factor = 1.7;
  spec.faults = {slow};
  check_against_single_replays(mega_test::generate(spec, 4).trace);
}

TEST_CASE("scan: an operation whose members count their steps apart joins the steps") {
  HandTrace h(2);
  for (int step = 0; step < 3; ++step) {
    const std::int64_t at = step * 1'000'000;
    h.run(0, "k", at, at + 100'000, step);
    h.run(1, "k", at, at + 400'000, step + 1);
    h.call(0, all_reduce, "reduce", at + 100'000, at + 450'000, step, step);
    h.call(1, all_reduce, "reduce", at + 400'000, at + 450'000, step, step + 1);
  }
  check_against_single_replays(h.trace);
}

Trace timeline(const std::string& path) {
  Trace t;
  for_each_source(path, [&](Source& source) { import_straggler_timeline(t, source, {}); });
  return t;
}

// Transfers are stamped to the microsecond and worse; shares are of differences of few percent.
doctest::Approx published(double x) {
  return doctest::Approx(x).epsilon(0.0005);
}
doctest::Approx published_share(double x) {
  return doctest::Approx(x).epsilon(0.003);
}

TEST_CASE("scan: what-if of a public timeline with a slow last stage is as published") {
  const std::string path = mega_test::shared_trace("straggler/timeline-ST.json.gz");
  if (path.empty()) return;
  const WhatIf w = ask(timeline(path));
  CHECK(w.actual_ns / 1e9 == published(2.2144478));
  CHECK(w.no_delay_ns / 1e9 == published(2.1726968));
  CHECK(w.ideal_ns / 1e9 == published(1.8432958));
  CHECK(w.slowdown == published(1.1787022));
  CHECK(w.worst == std::vector<std::int32_t>{7});
  CHECK(w.worst_share == published_share(0.0314043));
  CHECK(w.last_stage_share == published_share(1.2193564));
  CHECK(w.by_data.at(0) == published(1.1730828));
  CHECK(w.by_data.at(1) == published(1.1778704));
  CHECK(w.by_stage.at(0) == published(0.9980451));
  CHECK(w.by_stage.at(1) == published(0.9830563));
  CHECK(w.by_stage.at(2) == published(0.9824931));
  CHECK(w.by_stage.at(3) == published(1.2322560));
  CHECK(w.by_name.at("forward-compute") == published(1.0874990));
  CHECK(w.by_name.at("backward-compute") == published(1.0741565));
  CHECK(w.by_name.at("grads-reduce-scatter") == published(1.0026670));
}

TEST_CASE("scan: what-if of a public timeline with unequal sequences is as published") {
  const std::string path = mega_test::shared_trace("straggler/timeline-SE.json.gz");
  if (path.empty()) return;
  const Trace t = timeline(path);
  // The published analysis is of all steps of the file but two.
  WhatIfOptions options;
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    const std::int32_t step = t.events[i].step;
    if (step == 31 || step == 32) continue;
    if (options.steps.empty() || options.steps.back() != step) options.steps.push_back(step);
  }
  const WhatIf w = ask(t, options);
  CHECK(w.no_delay_ns / 1e9 == published(9.0665554));
  CHECK(w.ideal_ns / 1e9 == published(5.8974783));
  CHECK(w.slowdown == published(1.5373614));
  CHECK(w.worst == std::vector<std::int32_t>{80, 118});
  CHECK(w.worst_share == published_share(0.0250623));
  CHECK(w.last_stage_share == published_share(0.6877109));
  CHECK(w.by_data.at(8) == published(1.2044798));
  CHECK(w.by_data.at(24) == published(1.1180441));
  CHECK(w.by_stage.at(1) == published(1.4354480));
  CHECK(w.by_name.at("backward-compute") == published(1.4127706));

  // With all steps other ranks are the worst, so nearly equal are they. The figures are those of
  // the published dependencies, replayed apart from this library.
  const WhatIf all = ask(t);
  CHECK(all.slowdown == published(1.5361721));
  CHECK(all.worst == std::vector<std::int32_t>{80, 114});
  CHECK(all.worst_share == published_share(0.0197380));
}

}  // namespace
