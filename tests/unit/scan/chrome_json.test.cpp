#include "../../support/timeline_trace.hpp"
#include <mega/scan/chrome_json.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/kineto.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;
using Json = nlohmann::json;
using mega_test::Timeline;

std::string written(const Timeline& of) {
  std::string text;
  write_chrome_json(of.trace, of.matches, of.alignment,
                    [&](std::string_view piece) { text += piece; });
  return text;
}

/// The slice of that name. Names of the timeline but "nccl all_reduce" are unique.
const Json& slice(const Json& trace, const std::string& name, int rank_index = 0) {
  for (const Json& e : trace["traceEvents"]) {
    if (e["ph"] == "X" && e["name"] == name && e["pid"] == rank_index + 1) return e;
  }
  FAIL("no slice " << name);
  return trace;
}

TEST_CASE("scan: Chrome JSON holds every event at its aligned time, as exact decimals") {
  const Timeline timeline;
  const std::string text = written(timeline);
  const Json trace = Json::parse(text);  // strict: UTF-8, escapes, commas
  CHECK(trace["baseTimeNanoseconds"] == mega_test::timeline_start);
  std::size_t slices = 0;
  for (const Json& e : trace["traceEvents"]) slices += e["ph"] == "X" ? 1 : 0;
  CHECK(slices == timeline.trace.events.size());
  CHECK(text.find("\"ts\":2.500,\"dur\":0.501,") != std::string::npos);  // rank 6, aligned
  const Json& outer = slice(trace, "outer");
  CHECK(outer["cat"] == "forward");
  CHECK(outer["args"] == Json{{"step", 3}, {"microbatch", 2}, {"chunk", 1}});
  const Json& reduce = slice(trace, "nccl all_reduce", 1);
  CHECK(reduce["args"] == Json{{"op", "all_reduce"},
                               {"group", "dp"},
                               {"sequence", 41},
                               {"bytes", 4096},
                               {"dtype", "bf16"}});
  CHECK(slice(trace, "send")["args"]["peer"] == 6);
  slice(trace, "a \"b\" \\ \n\x01 \xE2\x86\x92 \xEF\xBF\xBD");  // the bad byte is replaced
}

TEST_CASE("scan: Chrome JSON names processes after ranks and threads after streams") {
  const Timeline timeline;
  const Json trace = Json::parse(written(timeline));
  std::map<std::pair<int, int>, std::string> names;
  for (const Json& e : trace["traceEvents"]) {
    const bool process = e["name"] == "process_name";
    if (e["ph"] == "M" && (process || e["name"] == "thread_name"))
      names[{e["pid"], process ? 0 : e["tid"].get<int>()}] = e["args"]["name"];
  }
  CHECK(names[{1, 0}] == "rank 4 (pp0)");
  CHECK(names[{2, 0}] == "rank 6 (pp1)");
  CHECK(names[{1, slice(trace, "outer")["tid"]}] == "stream 7");
  CHECK(names[{1, slice(trace, "overlaps")["tid"]}] == "stream 7, overlapping 1");
  CHECK(names[{1, slice(trace, "launch")["tid"]}] == "python");
  CHECK(slice(trace, "neighbour")["tid"] == slice(trace, "outer")["tid"]);
  CHECK(slice(trace, "until its end")["tid"] == slice(trace, "outer")["tid"]);
}

TEST_CASE("scan: arrows of Chrome JSON join the slices of matched operations") {
  const Timeline timeline;
  const Json trace = Json::parse(written(timeline));
  std::map<std::string, std::vector<Json>> flows;
  for (const Json& e : trace["traceEvents"]) {
    if (e["ph"] == "s" || e["ph"] == "t" || e["ph"] == "f") flows[e["id"]].push_back(e);
  }
  CHECK(flows.size() == 3);  // all-reduce, transfer, launch
  const auto at = [](const Json& flow, const Json& slice) {
    return flow["pid"] == slice["pid"] && flow["tid"] == slice["tid"] && flow["ts"] == slice["ts"];
  };
  std::set<std::string> names;
  for (const auto& [id, ends] : flows) {
    REQUIRE(ends.size() == 2);
    const Json& start = ends[0]["ph"] == "s" ? ends[0] : ends[1];
    const Json& end = ends[0]["ph"] == "s" ? ends[1] : ends[0];
    CHECK(end["ph"] == "f");
    CHECK(start["ts"] <= end["ts"]);
    names.insert(start["name"].get<std::string>());
    if (start["name"] == "all_reduce") {
      CHECK(at(start, slice(trace, "nccl all_reduce", 0)));
      CHECK(at(end, slice(trace, "nccl all_reduce", 1)));
    } else if (start["name"] == "send_recv") {
      CHECK(at(start, slice(trace, "recv", 1)));  // was posted first
      CHECK(at(end, slice(trace, "send", 0)));
    }
  }
  CHECK(names == std::set<std::string>{"all_reduce", "launch", "send_recv"});
}

TEST_CASE("scan: arrows' ids are of 64 bits and those of different jobs are apart") {
  Timeline a;
  Timeline b;
  for (Rank& rank : a.trace.ranks) rank.source = "first";
  for (Rank& rank : b.trace.ranks) rank.source = "second";
  std::set<std::string> ids;
  for (const Timeline* t : {&a, &b}) {
    const Json trace = Json::parse(written(*t));
    for (const Json& e : trace["traceEvents"]) {
      if (e["ph"] == "s") ids.insert(e["id"].get<std::string>());
    }
  }
  CHECK(ids.size() == 6);
}

TEST_CASE("scan: what Chrome JSON holds can be imported again, to the nanosecond") {
  const Timeline timeline;
  const std::string text = written(timeline);
  REQUIRE(looks_like_kineto(text));
  Trace again;
  Source source("rank_4.json", text);
  import_kineto(again, source, {});
  std::multiset<std::pair<Nanoseconds, Nanoseconds>> expected, got;
  for (std::size_t i = 0; i < timeline.trace.events.size(); ++i) {
    const Event& e = timeline.trace.events[i];
    const TableIndex rank = timeline.trace.rank_index(e);
    expected.insert({timeline.alignment.at(rank, e.begin), timeline.alignment.at(rank, e.end)});
  }
  for (std::size_t i = 0; i < again.events.size(); ++i)
    got.insert({again.events[i].begin, again.events[i].end});
  CHECK(got == expected);
  CHECK(again.defects.partial_overlaps == 0);
}

TEST_CASE("scan: microseconds are exact at the ends of the range") {
  const auto spelled = [](Nanoseconds ns) {
    std::string text;
    detail::append_microseconds(text, ns);
    return text;
  };
  CHECK(spelled(0) == "0.000");
  CHECK(spelled(7) == "0.007");
  CHECK(spelled(-7) == "-0.007");
  CHECK(spelled(-1'000'020) == "-1000.020");
  CHECK(spelled(std::numeric_limits<Nanoseconds>::max()) == "9223372036854775.807");
  CHECK(spelled(std::numeric_limits<Nanoseconds>::min()) == "-9223372036854775.808");
}

TEST_CASE("scan: an empty trace is a valid Chrome JSON file") {
  std::string text;
  write_chrome_json({}, {}, {}, [&](std::string_view piece) { text += piece; });
  CHECK(Json::parse(text)["traceEvents"].empty());
}

}  // namespace
