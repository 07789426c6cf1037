/// @file  Tests of the trace of a timeline, read back by a JSON parser.
#include <mega/core/error.hpp>
#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/timeline_json.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

using namespace mega;
using namespace mega::dpp;
using nlohmann::json;

namespace {

using enum ActionKind;

struct Span {
  long long start = 0, end = 0;  ///< nanoseconds
};
using Track = std::pair<int, int>;

long long ns(const json& microseconds) {
  return std::llround(microseconds.get<double>() * 1000);
}

std::map<Track, std::vector<Span>> slices(const json& trace) {
  std::map<Track, std::vector<Span>> found;
  for (const json& e : trace["traceEvents"]) {
    if (e["ph"] != "X") continue;
    const long long start = ns(e["ts"]);
    found[{e["pid"], e["tid"]}].push_back({start, start + ns(e["dur"])});
  }
  return found;
}

}  // namespace

TEST_CASE("dpp: trace of one message, event by event") {
  Timeline timeline;
  timeline.ranks = {{{make_action(forward, 0, 7), 0, 0.1234567}},
                    {{make_action(forward, 1, 7), 0.5, 1}}};
  timeline.transfers = {
      {0, 1, make_action(send_forward, 0, 7), make_action(recv_forward, 1, 7), 0.1234567, 0.25}};
  const std::string text = to_trace_json(timeline);
  // Times are written as decimals of microseconds, with the nanoseconds to the digit.
  CHECK(text.find("\"ts\":0.000,\"dur\":123.457,") != text.npos);
  CHECK(text.find("\"ts\":123.457,\"dur\":126.543,") != text.npos);
  CHECK(text.find("\"ts\":500.000,\"dur\":500.000,") != text.npos);
  const json trace = json::parse(text);
  std::vector<json> compute, transfer, flow, names;
  for (const json& e : trace["traceEvents"]) {
    if (e["ph"] == "M") {
      if (e["name"] == "thread_name") names.push_back(e);
    } else if (e["ph"] != "X") {
      flow.push_back(e);
    } else {
      (e["cat"] == "compute" ? compute : transfer).push_back(e);
    }
  }
  REQUIRE(names.size() == 3);
  CHECK(names[0]["args"]["name"] == "rank 0");
  CHECK(names[2]["args"]["name"] == "rank 0 to 1");
  REQUIRE(compute.size() == 2);
  CHECK(compute[0]["name"] == "forward 7");
  CHECK(compute[0]["tid"] == 0);
  CHECK(compute[1]["tid"] == 1);
  CHECK(compute[1]["args"] == json{{"chunk", 1}, {"microbatch", 7}});
  REQUIRE(transfer.size() == 1);
  CHECK(transfer[0]["name"] == "activation 7");
  CHECK(transfer[0]["pid"] == 1);
  REQUIRE(flow.size() == 3);
  const char* const phases[] = {"s", "t", "f"};
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(flow[i]["ph"] == phases[i]);
    CHECK(flow[i]["id"] == flow[0]["id"]);
    CHECK(flow[i]["name"] == flow[0]["name"]);
    CHECK(flow[i]["cat"] == flow[0]["cat"]);
  }
  CHECK(ns(flow[0]["ts"]) == 123456);  // the last nanosecond of its slice
  CHECK(ns(flow[1]["ts"]) == 123457);
  CHECK(ns(flow[2]["ts"]) == 500000);
  CHECK(flow[2]["bp"] == "e");
}

TEST_CASE("dpp: slices of a track never cross, and every message has its arrow") {
  const auto schedule = make_schedule(ScheduleTraversal<DFC>{}, 3, 7, 2);
  Cluster cluster;
  cluster.jitter = {.compute = 0.4, .link_delay = 3, .seed = 5};
  cluster.links = {{.latency = 2}};
  const ClusterRun run = simulate(schedule, cluster, {DispatchRule::look_ahead, 2});
  const json trace = json::parse(to_trace_json(run.timeline, 1e3));
  auto tracks = slices(trace);
  std::size_t compute = 0, transfers = 0, lanes = 0;
  for (auto& [track, spans] : tracks) {
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return a.start < b.start; });
    for (std::size_t i = 1; i < spans.size(); ++i) CHECK(spans[i - 1].end <= spans[i].start);
    (track.first == 0 ? compute : transfers) += spans.size();
    lanes += track.first == 1 ? 1U : 0U;
  }
  CHECK(compute == 2 * 3 * 2 * 7);
  CHECK(transfers == run.timeline.transfers.size());
  CHECK(transfers == 2 * 5 * 7);
  CHECK(lanes > 6);  // links have messages side by side here
  const auto inside = [&](const json& e) {
    const auto& spans = tracks[{e["pid"], e["tid"]}];
    return std::any_of(spans.begin(), spans.end(), [&](const Span& s) {
      return s.start <= ns(e["ts"]) && ns(e["ts"]) < s.end;
    });
  };
  std::map<int, std::vector<long long>> arrows;
  for (const json& e : trace["traceEvents"]) {
    if (e["ph"] != "s" && e["ph"] != "t" && e["ph"] != "f") continue;
    CHECK(inside(e));
    arrows[e["id"]].push_back(ns(e["ts"]));
  }
  CHECK(arrows.size() == transfers);
  for (const auto& [id, times] : arrows) {
    REQUIRE(times.size() == 3);
    CHECK(times[0] < times[1]);
    CHECK(times[1] < times[2]);
  }
}

TEST_CASE("dpp: traces without transfers, without ranks, and of no time that can be told") {
  CHECK(json::parse(to_trace_json(Timeline{}))["traceEvents"].size() == 1);
  const ClusterRun run = simulate(make_schedule(GPipe{}, 1, 2, 1), Cluster{});
  const json trace = json::parse(to_trace_json(run.timeline));
  CHECK(slices(trace).size() == 1);
  Timeline endless;
  endless.ranks = {{{make_action(forward, 0, 0), 0, std::numeric_limits<double>::quiet_NaN()}}};
  CHECK_THROWS_AS((void)to_trace_json(endless), Error);
  endless.ranks[0][0].end = 1e30;
  CHECK_THROWS_AS((void)to_trace_json(endless), Error);
}
