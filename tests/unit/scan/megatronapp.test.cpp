#include "../../support/shared_traces.hpp"
#include <mega/scan/import.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/megatronapp.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace mega::scan;

std::string record(const std::string& name, char phase, int ts, int pid, int tid,
                   const std::string& arguments) {
  return R"({"name":")" + name + R"(","cname":"thread_state_running","ph":")" + phase +
         R"(","ts":)" + std::to_string(ts) + R"(,"pid":)" + std::to_string(pid) + R"(,"tid":)" +
         std::to_string(tid) + R"(,"args":{)" + arguments + "}}";
}

/// Iteration 3 of a rank: one forward and backward.
std::string iteration(int pid, int tid, int start) {
  const std::string begins = R"("iteration":3)";
  const std::string ends =
      R"("iteration":3,"microbatch":2,"model_chunk":1,"pp_rank":)" + std::to_string(pid);
  return record("iteration begin", 'i', start, pid, tid, begins) + "," +
         record("forward", 'B', start + 10, pid, tid, begins) + "," +
         record("forward", 'E', start + 30, pid, tid, ends) + "," +
         record("backward", 'B', start + 30, pid, tid, begins) + "," +
         record("backward", 'E', start + 75, pid, tid, ends) + "," +
         record("reduce", 'i', start + 80, pid, tid, begins) + "," +
         record("iteration end", 'i', start + 90, pid, tid, begins);
}

Trace import(const std::string& text) {
  Trace t;
  Source source("trace", text);
  import_megatronapp(t, source, {});
  return t;
}

TEST_CASE("scan: MegatronApp's begins and ends are spans, its marks of iterations one") {
  const std::string text = "[" + iteration(0, 0, 100) + "," + iteration(1, 0, 107) + "]";
  CHECK(looks_like_megatronapp(text));
  const Trace t = import(text);
  REQUIRE(t.ranks.size() == 2);
  CHECK(t.ranks[1].rank == 1);
  CHECK(t.ranks[1].pipeline == 1);
  REQUIRE(t.events.size() == 8);
  CHECK(t.events[0].kind == EventKind::forward);
  CHECK(t.events[0].begin == 110'000);
  CHECK(t.events[0].end == 130'000);
  CHECK(t.events[0].step == 3);
  CHECK(t.events[0].microbatch == 2);
  CHECK(t.events[0].chunk == 1);
  CHECK(t.events[1].kind == EventKind::backward);
  CHECK(t.events[2].kind == EventKind::other);  // "reduce" is a moment, no communication
  CHECK(t.events[2].duration() == 0);
  CHECK(t.events[3].kind == EventKind::iteration);
  CHECK(t.events[3].begin == 100'000);
  CHECK(t.events[3].end == 190'000);
  CHECK(t.defects.overlapping_runs == 0);
  CHECK(t.notes.empty());
}

TEST_CASE("scan: two runs on the same processes are detected and kept apart") {
  for (const int second_thread : {1, 0}) {
    CAPTURE(second_thread);
    const Trace t =
        import("[" + iteration(0, 0, 100) + "," + iteration(0, second_thread, 50) + "]");
    CHECK(t.defects.overlapping_runs == 1);
    REQUIRE(t.notes.size() == 1);
    CHECK(t.notes[0].find("holds 2 runs on the same processes") != std::string::npos);
    CHECK(t.lanes.size() == 2);
    CHECK(t.events.size() == 8);
    CHECK(t.ranks.size() == 1);
  }
}

TEST_CASE("scan: ends without begins and begins without ends are counted") {
  const std::string at = R"("iteration":3)";
  const Trace t =
      import("[" + record("forward", 'E', 5, 0, 0, at) + "," + record("forward", 'B', 7, 0, 0, at) +
             "," + record("layer", 'B', 8, 0, 0, at) + "," + record("forward", 'E', 9, 0, 0, at) +
             "," + record("backward", 'B', 12, 0, 0, at) + "]");
  REQUIRE(t.events.size() == 1);
  CHECK(t.events[0].begin == 7'000);
  CHECK(t.defects.malformed_records == 3);  // an end alone, a layer and a backward without one
  CHECK(t.completeness.window_truncated);
}

/// Of a published file: milliseconds of an iteration of rank 0, the first apart.
double mean_iteration_ms(const Trace& t) {
  double sum = 0;
  int count = 0;
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    const Event& e = t.events[i];
    if (e.kind != EventKind::iteration || e.step == 0 || t.rank(e) != 0) continue;
    sum += static_cast<double>(e.duration()) / 1e6;
    ++count;
  }
  CHECK(count == 19);
  return sum / count;
}

TEST_CASE("scan: MegatronApp's published traces give the published iteration times") {
  struct File {
    std::string name;
    double iteration_ms;
  };
  const std::vector<File> files{{"pp", 722.1}, {"dpp", 954.6}};
  for (const File& file : files) {
    const std::string path = mega_test::shared_trace("megatronapp/data-1-pipeline-4-tensor-1-" +
                                                     file.name + "-aggregated.json.gz");
    if (path.empty()) continue;
    CAPTURE(file.name);
    Trace t;
    for_each_source(path, [&](Source& source) {
      CHECK(looks_like_megatronapp(source.look(4096).substr(0, 4096)));
      import_megatronapp(t, source, {});
    });
    // 10,480 records: 5,120 pairs, 80 pairs of marks of iterations, 80 moments
    CHECK(t.events.size() == 5120 + 80 + 80);
    CHECK(t.defects.malformed_records == 0);
    CHECK(t.defects.negative_durations == 0);
    CHECK(t.defects.overlapping_runs == 0);
    REQUIRE(t.ranks.size() == 4);
    for (const Rank& rank : t.ranks) CHECK(rank.pipeline == rank.rank);
    CHECK(std::abs(mean_iteration_ms(t) - file.iteration_ms) < 0.05);  // printed with one decimal
    if (file.name != "pp") continue;
    // The last stage is twice as slow: mean forward in microseconds, first iteration apart.
    std::array<double, 4> sum{};
    std::array<int, 4> count{};
    for (std::size_t i = 0; i < t.events.size(); ++i) {
      const Event& e = t.events[i];
      if (e.kind != EventKind::forward || e.step == 0) continue;
      const auto stage = static_cast<std::size_t>(t.ranks[t.rank_index(e)].pipeline);
      sum[stage] += static_cast<double>(e.duration()) / 1e3;
      ++count[stage];
    }
    for (std::size_t stage = 0; stage < 4; ++stage) CHECK(count[stage] == 19 * 32);
    CHECK(std::abs(sum[3] / count[3] - 6957) < 1);
    for (std::size_t stage = 0; stage < 3; ++stage) {
      CHECK(sum[stage] / count[stage] > 3328);
      CHECK(sum[stage] / count[stage] < 3566);
    }
  }
}

TEST_CASE("scan: MegatronApp's merged trace is recognised as two runs") {
  const std::string path = mega_test::shared_trace("megatronapp/merged_trace.json");
  if (path.empty()) return;
  Trace t;
  for_each_source(path, [&](Source& source) { import_megatronapp(t, source, {}); });
  CHECK(t.defects.overlapping_runs == 1);
  CHECK(t.ranks.size() == 4);
  CHECK(t.events.size() == 512 + 8 + 8);
  CHECK(t.defects.malformed_records == 0);
}

}  // namespace
