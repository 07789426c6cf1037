#include "../../support/shared_traces.hpp"
#include <mega/scan/import.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/straggler_timeline.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;

constexpr int replicas = 2, stages = 3;

std::string span(const std::string& name, int dp, int pp, int thread, const std::string& ts,
                 const std::string& dur, int sequence, int step = 5) {
  const int rank = pp * replicas + dp;
  return R"({"name":")" + name + R"(","cat":")" + name + R"(","pid":)" + std::to_string(dp) +
         R"(,"tid":)" + std::to_string(rank * 5 + thread) + R"(,"ts":)" + ts + R"(,"dur":)" + dur +
         R"(,"ph":"X","args":{"step":)" + std::to_string(step) +
         R"(,"model_chunk":0,"mb_id":1,"seq_id":)" + std::to_string(sequence) + "}}";
}

/// A step of two replicas and three stages, as the writer orders it: names of threads at the end.
std::string job() {
  std::string text = "[";
  for (int dp = 0; dp < replicas; ++dp) {
    for (int pp = 0; pp < stages; ++pp) {
      text +=
          span("forward-compute", dp, pp, 0, "48943.519592285156", "63458.97912979126", 0) + ",";
      text += span("params-all-gather", dp, pp, 3, "5341.5", "100", 0) + ",";
      text += span("layernorm-grads-all-reduce", dp, pp, 3, "6000", "100", 0) + ",";
      text +=
          span("optimizer-clip-main-grad", dp, pp, 3, "7000", dp == 1 ? "-26.9413" : "4", 0) + ",";
      if (pp != 1) text += span("embedding-grads-all-reduce", dp, pp, 3, "6500", "100", 0) + ",";
      if (pp < 2) text += span("forward-send", dp, pp, 1, "8000", "10", 0) + ",";
      if (pp > 0) text += span("forward-recv", dp, pp, 1, "8000", "10", 0) + ",";
      if (pp > 0) text += span("backward-send", dp, pp, 1, "9000", "10", 0) + ",";
      if (pp < 2) text += span("backward-recv", dp, pp, 1, "9000", "10", 0) + ",";
    }
  }
  for (int dp = 0; dp < replicas; ++dp) {
    for (int pp = 0; pp < stages; ++pp) {
      text += R"({"name":"thread_name","pid":)" + std::to_string(dp) + R"(,"tid":)" +
              std::to_string((pp * replicas + dp) * 5) + R"(,"ph":"M","args":{"name":"PP rank )" +
              std::to_string(pp) + R"(, TP rank 0, compute"}},)";
    }
  }
  return text + R"({"name":"process_name","pid":0,"ph":"M","args":{"name":"DP rank [0]"}}])";
}

Trace import(const std::string& text) {
  Trace t;
  Source source("timeline", text);
  import_straggler_timeline(t, source, {});
  return t;
}

TEST_CASE("scan: a straggler timeline has ranks, coordinates and groups from its names") {
  const std::string text = job();
  CHECK(looks_like_straggler_timeline(text));
  const Trace t = import(text);
  REQUIRE(t.ranks.size() == 6);
  CHECK(t.ranks[3].rank == 3);
  CHECK(t.ranks[3].data == 1);
  CHECK(t.ranks[3].pipeline == 1);
  CHECK(t.ranks[3].tensor == 0);
  CHECK(t.events[0].begin == 48943520);  // to the nearest nanosecond
  CHECK(t.events[0].duration() == 63458979);
  CHECK(t.events[0].kind == EventKind::forward);
  CHECK(t.events[0].step == 5);
  CHECK(t.events[0].microbatch == 1);
  CHECK(t.events[0].chunk == 0);
  CHECK(t.lanes[t.events[0].lane].label == "compute");
  CHECK(t.defects.negative_durations == 3);
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    const Event& e = t.events[i];
    if (t.name(e) != "optimizer-clip-main-grad" || t.ranks[t.rank_index(e)].data == 0) continue;
    CHECK(e.end == 7'000'000 - 26'941);  // the end is what was measured
    CHECK(e.duration() == 0);
  }
  CHECK(t.defects.malformed_records == 0);

  std::map<std::string, std::vector<std::int32_t>> groups;
  for (const Group& g : t.groups) groups[g.name] = g.ranks;
  CHECK(groups["data of stage 1"] == std::vector<std::int32_t>{2, 3});
  CHECK(groups["embedding of dp 1"] == std::vector<std::int32_t>{1, 5});
  CHECK(groups["all"] == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5});
  CHECK(groups["forward of dp 0"] == std::vector<std::int32_t>{0, 2, 4});
  CHECK(groups["tensor of stage 2 of dp 0"] == std::vector<std::int32_t>{4});
}

TEST_CASE("scan: communications of a straggler timeline find their partners") {
  const Trace t = import(job());
  const Matches m = match(t);
  std::map<CommunicationOp, int> count;
  for (const Instance& i : m.instances) ++count[i.op];
  CHECK(count[CommunicationOp::all_gather] == stages);
  CHECK(count[CommunicationOp::all_reduce] == 1 + replicas);     // clipping; embeddings
  CHECK(count[CommunicationOp::send_recv] == 2 * 2 * replicas);  // both directions
  CHECK(m.leftovers.size() == stages * replicas);  // layer norms: one tensor rank, no partner
  for (const Instance& i : m.instances) {
    if (i.op != CommunicationOp::send_recv) continue;
    const Communication& sender = t.communications[m.of(i)[0]];
    CHECK(i.sequence == 5'000'000);
    for (std::size_t k = 0; k < i.count; ++k) {
      const Event& e = t.events[t.communications[m.of(i)[k]].event];
      CHECK(m.ranks_of(i)[k] == t.rank_index(e));
    }
    CHECK(sender.peer == t.rank(t.events[t.communications[m.of(i)[1]].event]));
  }
}

TEST_CASE("scan: a straggler timeline without names of threads still has its ranks") {
  const std::string text = job();
  const Trace t = import(text.substr(0, text.find("{\"name\":\"thread_name\"") - 1));
  CHECK(t.ranks.size() == 6);
  CHECK(t.ranks[5].pipeline == -1);
  CHECK(t.defects.truncated_files == 1);
}

TEST_CASE("scan: published straggler timelines have the events and the defects that they have") {
  struct File {
    std::string name;
    std::size_t events, ranks;
    std::int64_t negative, transfers;
  };
  const std::vector<File> files{{"timeline-ST", 6784, 8, 0, 1536},
                                {"ideal-timeline-ST", 6784, 8, 0, 1536},
                                {"timeline-SE", 112320, 64, 8, 23040}};
  for (const File& file : files) {
    const std::string path = mega_test::shared_trace("straggler/" + file.name + ".json.gz");
    if (path.empty()) continue;
    CAPTURE(file.name);
    Trace t;
    for_each_source(path, [&](Source& source) {
      CHECK(looks_like_straggler_timeline(source.look(4096).substr(0, 4096)));
      import_straggler_timeline(t, source, {});
    });
    CHECK(t.events.size() == file.events);
    CHECK(t.ranks.size() == file.ranks);
    CHECK(t.defects.negative_durations == file.negative);
    CHECK(t.defects.malformed_records == 0);
    CHECK(t.defects.truncated_files == 0);
    const Matches m = match(t);
    std::int64_t transfers = 0;
    for (const Instance& i : m.instances) transfers += i.op == CommunicationOp::send_recv ? 1 : 0;
    CHECK(transfers == file.transfers);
    for (const TableIndex i : m.leftovers)  // layer norms meet along an axis of one
      CHECK(t.name(t.events[t.communications[i].event]) == "layernorm-grads-all-reduce");
  }
}

}  // namespace
