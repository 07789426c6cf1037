#include <mega/scan/align.hpp>
#include <mega/scan/import.hpp>
#include <mega/scan/kineto.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/wait_states.hpp>

#include <doctest/doctest.h>
#include <tests/support/temporary_directory.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace mega::scan;

Trace imported(const std::string& text, const std::string& name = "trace.json") {
  Trace trace;
  Source source(name, text);
  import_kineto(trace, source);
  return trace;
}

void import_into(Trace& trace, const std::string& text, const std::string& name) {
  Source source(name, text);
  import_kineto(trace, source);
}

std::string records(const std::string& inside, const std::string& before = "",
                    const std::string& after = "") {
  return "{" + before + "\"traceEvents\": [" + inside + "]" + after + "}";
}

/// Path of a real trace, or "" with a message where it is not there.
std::string real(const std::string& name) {
  const char* const shared = std::getenv("MEGA_SHARED");
  const std::string path = std::string(shared == nullptr ? "" : shared) + "/traces/" + name;
  if (shared != nullptr && std::filesystem::exists(path)) return path;
  MESSAGE("skipped: MEGA_SHARED names no directory with traces/", name);
  return {};
}

std::size_t count(const Trace& t, EventKind kind) {
  std::size_t n = 0;
  for (std::size_t i = 0; i < t.events.size(); ++i) n += t.events[i].kind == kind ? 1 : 0;
  return n;
}
std::size_t count(const Trace& t, CommunicationOp op) {
  std::size_t n = 0;
  for (std::size_t i = 0; i < t.communications.size(); ++i)
    n += t.communications[i].op == op ? 1 : 0;
  return n;
}

TEST_CASE("scan: a thread's label is its own, though its process and thread are escaped texts") {
  const Trace t = imported(records(
      R"({"ph": "M", "name": "thread_name", "pid": "p\u00e9", "tid": "t\u00e9 1",)"
      R"( "args": {"name": "caf\u00e9"}},)"
      R"({"ph": "X", "name": "a", "pid": "p\u00e9", "tid": "t\u00e9 1", "ts": 1, "dur": 2})"));
  REQUIRE(t.lanes.size() == 1);
  CHECK(t.lanes[0].label == "caf\xC3\xA9");
  REQUIRE(t.events.size() == 1);
  CHECK(t.events[0].duration() == 2000);
}

TEST_CASE("scan: a Kineto file gives lanes, kinds, launches, steps and communication") {
  const Trace t = imported(records(R"~(
  {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#7", "pid": 10, "tid": 11, "ts": 100, "dur": 50},
  {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 10, "tid": 11, "ts": 101.5, "dur": 2.25,
   "args": {"Input Dims": [[1, 2], ["]", {}]], "correlation": 99}},
  {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 10, "tid": 11, "ts": 102, "dur": 1, "args": {"correlation": 5}},
  {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 10, "tid": 11, "ts": 120, "dur": 10, "args": {"correlation": 6}},
  {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 160, "dur": 3, "args": {"stream": 7, "correlation": 5}},
  {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 7, "ts": 170, "dur": 3, "args": {"correlation": 8}},
  {"ph": "X", "cat": "cuda_sync", "name": "Stream Sync", "pid": 0, "tid": 7, "ts": 175, "dur": 3, "args": {"correlation": 6}},
  {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", "pid": 0, "tid": 20, "ts": 180, "dur": 4,
   "args": {
  "correlation" : 4294967301,
      "Collective name" : "allreduce",
                          "In msg nelems" : 10,
                          "dtype" : "BFloat16",
                                    "Seq" : 41,
                                    "Process Group Name" : "3",
                                                           "Process Group Ranks" : "[4, 0]"}},
  {"ph": "X", "cat": "kernel", "name": "void deep_ep::internode::dispatch<false>(int)", "pid": 0, "tid": 20, "ts": 190, "dur": 4, "args": {"correlation": 5}},
  {"ph": "B", "name": "outer", "pid": 10, "tid": 12, "ts": 1}, {"ph": "B", "name": "inner", "pid": 10, "tid": 12, "ts": 2},
  {"ph": "E", "pid": 10, "tid": 12, "ts": 3}, {"ph": "E", "pid": 10, "tid": 12, "ts": 9}, {"ph": "E", "pid": 10, "tid": 12, "ts": 10},
  {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
  {"ph": "C", "name": "memory", "pid": 0, "ts": 1, "args": {"value": 3}})~",
                                   "", R"(, "distributedInfo": {"rank": 4, "world_size": 8})"));
  REQUIRE(t.events.size() == 11);
  CHECK(t.ranks.at(0).rank == 4);  // though it stood behind the events
  CHECK(count(t, EventKind::iteration) == 1);
  CHECK(t.events[1].begin == 101500);
  CHECK(t.events[1].end == 103750);
  CHECK(t.events[1].step == 7);
  CHECK(t.events[2].kind == EventKind::launch);
  CHECK(t.events[3].kind == EventKind::synchronize);
  CHECK(t.events[4].kind == EventKind::compute);
  CHECK(t.events[4].launch == 2);
  CHECK(t.events[4].step == 7);  // its launch's, though it ran later
  CHECK(t.events[5].kind == EventKind::memory);
  CHECK(t.events[5].launch == none);
  CHECK(t.events[6].kind == EventKind::synchronize);
  CHECK(t.events[6].launch == 3);
  CHECK(t.lanes[t.events[4].lane].kind == LaneKind::device);
  CHECK(t.lanes[t.events[4].lane].label == "stream 7");
  CHECK(t.lanes[t.events[1].lane].kind == LaneKind::host);
  REQUIRE(t.communications.size() == 2);
  const Communication& c = t.communications[0];
  CHECK(c.op == CommunicationOp::all_reduce);
  CHECK(c.bytes == 20);
  CHECK(c.sequence == 41);
  CHECK(t.groups.at(c.group).ranks == std::vector<std::int32_t>{0, 4});
  CHECK(t.events[7].launch == none);  // 2^32 + 5 is not 5
  CHECK(t.communications[1].op == CommunicationOp::all_to_all);
  CHECK(t.name(t.events[9]) == "outer");
  CHECK(t.events[9].end == 9000);
  CHECK(t.events[10].end == 3000);
  CHECK(t.defects.kernels_without_launch == 1);
  CHECK(t.defects.duplicate_correlations == 1);
  CHECK(t.defects.malformed_records == 1);  // an E too many
}

TEST_CASE("scan: every defect of a Kineto file is counted and costs its own record at most") {
  const std::string good =
      R"({"ph": "X", "cat": "cpu_op", "name": "good", "pid": 1, "tid": 1, "ts": 5, "dur": 1})";
  struct Row {
    const char* what;
    std::string record;
    std::int64_t Defects::*counter;
    std::int64_t times;
    std::size_t events;  // with the good ones on both sides
  };
  const Row rows[] = {
      {"inf in arguments",
       R"({"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 5, "dur": 0, "args": {"bw": inf, "y": NaN}})",
       &Defects::not_a_number, 2, 3},
      {"NaN as duration", R"({"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 5, "dur": NaN})",
       &Defects::not_a_number, 1, 3},
      {"NaN as time", R"({"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": -nan, "dur": 1})",
       &Defects::malformed_records, 1, 2},
      {"control character",
       "{\"ph\": \"X\", \"name\": \"a\x02\", \"pid\": 1, \"tid\": 2, \"ts\": 5}",
       &Defects::control_characters, 1, 3},
      {"quotes", R"({"ph": "X", "name": "a "b" c", "pid": 1, "tid": 2, "ts": 5})",
       &Defects::bad_escapes, 2, 3},
      {"backslash", R"({"ph": "X", "name": "C:\users", "pid": 1, "tid": 2, "ts": 5})",
       &Defects::bad_escapes, 1, 3},
      {"newline", "{\"ph\": \"X\", \"name\": \"a\nb\", \"pid\": 1, \"tid\": 2, \"ts\": 5}",
       &Defects::control_characters, 1, 3},
      {"UTF-8", "{\"ph\": \"X\", \"name\": \"a\xFF\", \"pid\": 1, \"tid\": 2, \"ts\": 5}",
       &Defects::bad_utf8, 1, 3},
      {"missing quote", R"({"ph": "X", "name": "a", "pid": 1, tid": 2, "ts": 5})",
       &Defects::bad_escapes, 1, 3},
      {"negative duration", R"({"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 5, "dur": -3})",
       &Defects::negative_durations, 1, 3},
      {"negative fraction",
       R"({"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": -5.-660, "dur": 1})",
       &Defects::malformed_numbers, 1, 3},
      {"string time with a tail",
       R"({"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": "5us", "dur": 1})",
       &Defects::malformed_numbers, 1, 3},
      {"no phase", R"({"name": "a", "pid": 1, "tid": 2, "ts": 5})", &Defects::malformed_records, 1,
       2},
      {"no record", R"("text")", &Defects::malformed_records, 1, 2},
      {"lost end", R"({"ph": "X", "name": "a", "pid": 1, "tid": 2, )", &Defects::malformed_records,
       1, 2},
      {"overlap", R"({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 5.5, "dur": 1})",
       &Defects::partial_overlaps, 1, 3},
      {"flow without end",
       R"({"ph": "s", "id": 18446744073709551615, "cat": "x", "pid": 1, "tid": 1, "ts": 5})",
       &Defects::dangling_flows, 1, 2},
  };
  for (const Row& row : rows) {
    CAPTURE(row.what);
    const Trace t = imported(records(good + ",\n" + row.record + ",\n" + good + ",\n"));
    CHECK(t.defects.*row.counter == row.times);
    CHECK(t.events.size() == row.events);
    CHECK(t.name(t.events[t.events.size() - 1]) == "good");
    CHECK(t.defects.truncated_files == 0);
  }
}

TEST_CASE("scan: identities beyond 2^63, repeated flow numbers, keys in any order and twice") {
  const Trace t = imported(R"([
    {"args": {"correlation": 18446744073709551615}, "dur": 1, "ts": 1, "tid": 18446744073709551615, "pid": "Spans", "name": "k", "cat": "kernel", "ph": "X"},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 9, "ts": 0.5, "dur": 0, "pid": "Spans", "tid": 18446744073709551614,
     "args": {"correlation": 18446744073709551615}},
    {"ph": "s", "id": "0x1", "cat": "a", "pid": 1, "tid": 1, "ts": 1}, {"ph": "s", "id": "0x1", "cat": "a", "pid": 1, "tid": 1, "ts": 1},
    {"ph": "f", "id": "0x1", "cat": "a", "pid": 1, "tid": 1, "ts": 2},
    {"ph": "f", "id": "0x1", "cat": "other", "pid": 1, "tid": 1, "ts": 2})");
  REQUIRE(t.events.size() == 2);
  CHECK(t.events[0].launch == 1);
  CHECK(t.events[1].begin == 500);
  CHECK(t.events[0].lane != t.events[1].lane);
  CHECK(t.defects.dangling_flows == 1);
  CHECK(t.defects.truncated_files == 1);  // no closing bracket
}

TEST_CASE("scan: a file cut at any byte keeps the records before") {
  std::string text = "{\"traceEvents\": [";
  for (int i = 0; i < 3; ++i)
    text +=
        R"({"ph": "X", "cat": "cpu_op", "name": "a\"b", "pid": 1, "tid": 1, "ts": 5, "args": {"x": [1]}},)";
  const std::size_t from = text.find('[') + 1;
  const std::size_t record = (text.size() - from) / 3;
  for (std::size_t size = from; size < text.size(); ++size) {
    const Trace t = imported(text.substr(0, size));
    CHECK(t.defects.truncated_files == 1);
    const std::size_t whole = (size - from + 1) / record;  // the comma may be missing
    CHECK(t.events.size() == whole);
    CHECK(t.defects.malformed_records == 0);
  }
}

TEST_CASE("scan: base times of processes on both sides of a quarter's boundary become one time") {
  const std::string early =
      R"({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 7889237000000.5, "dur": 1})";
  const std::string late =
      R"({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 500000, "dur": 1})";
  Trace based;
  import_into(based, records(early, "\"baseTimeNanoseconds\": 1704075408000000000, "),
              "rank0.json");
  import_into(based, records(late, "", ", \"baseTimeNanoseconds\": 1711964646000000000"),
              "rank1.json");
  CHECK(based.events[1].begin - based.events[0].begin == 1499999500);
  CHECK(based.events[1].begin == 1711964646500000000);
  CHECK(based.defects.clock_base_adjusted == 1);
  Trace bare;
  import_into(bare, records(early), "rank0.json");
  import_into(bare, records(late), "rank1.json");
  CHECK(bare.events[1].begin - bare.events[0].begin == 1499999500);
  CHECK(bare.defects.clock_base_adjusted == 1);
  Trace same;
  import_into(same, records(late), "rank0.json");
  import_into(same, records(late), "rank1.json");
  CHECK(same.defects.clock_base_adjusted == 0);
}

TEST_CASE("scan: the rank is what the user, the file, its name or its place says, in this order") {
  const std::string silent = records(R"({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1})");
  const std::string says = records("", "\"distributedInfo\": {\"rank\": 5}, ");
  CHECK(imported(says, "rank-34.json").ranks[0].rank == 5);
  CHECK(imported(silent, "dir/rank-34.Jul_15.pt.trace.json").ranks[0].rank == 34);
  CHECK(imported(silent, "x.tar.gz:d/worker3_step_12.1694.json").ranks[0].rank == 3);
  Trace t;
  import_into(t, silent, "first.json");
  import_into(t, silent, "rank0.json");
  CHECK(t.ranks[0].rank == 0);
  CHECK(t.ranks[1].rank == 1);  // 0 is taken
  CHECK(t.defects.rank_guessed == 2);
  Source source("rank7.json", says);
  ImportOptions options;
  options.rank = 9;
  import_kineto(t, source, options);
  CHECK(t.ranks[2].rank == 9);
  CHECK_THROWS_WITH_AS((void)imported("{\"schema\": \"1\", \"nodes\": []}", "et.json"),
                       doctest::Contains("et.json has no list of trace events"), mega::Error);
}

TEST_CASE("scan: the dialect of a file is found, and one that is none is refused by name") {
  const mega::tests::TemporaryDirectory directory;
  Trace t;
  import_file(
      t, directory.write(
             "rank2.json",
             records(R"({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1})",
                     R"("schemaVersion": 1, "distributedInfo": {"rank": 2, "pg_config": []}, )")));
  CHECK(t.ranks.at(0).rank == 2);
  CHECK_THROWS_WITH_AS(
      import_file(t, directory.write("et.json", R"({"schema": "1.0.2", "nodes": []})")),
      doctest::Contains("has operators but no times"), mega::Error);
  CHECK_THROWS_WITH_AS(import_file(t, directory.write("what.txt", "hello")),
                       doctest::Contains("is of no known kind; known are"), mega::Error);
}

TEST_CASE("scan: real files give the figures that an independent checker gave") {
  struct Row {
    const char* path;
    std::size_t compute, communication;
    std::int64_t overlaps, duplicates, unlaunched, dangling, guessed;
    int rank;
  };
  const Row rows[] = {
      {"hta/nccl_parser_config/nccl_data.json.gz", 2679, 21, 0, 0, 0, 4966, 0, 0},
      {"hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz", 4350, 0, 0, 0, 0,
       9234, 0, 0},
      {"hta/trace_filter/sampled_rank-1.json.gz", 1094, 10, 0, 0, 0, 0, 0, 1},
      {"hta/rank_unavailable/rank_not_found.json.gz", 0, 0, 0, 0, 0, 0, 1, 0},
      {"hta/rank_non_gpu/rank_non_gpu.json.gz", 0, 0, 0, 0, 0, 0, 0, 0},
      {"hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 0, 0, 0, 0, 0, 0, 0, 34},
      {"hta/critical_path/simple_add/benchmark_result_493459_1694039959_trace.json.gz", 79, 0, 7, 0,
       0, 192, 0, 0},
      {"hta/df_index_resolver/df_index_resolver.json.gz", 17350, 2020, 0, 0, 0, 20083, 0, 1},
      {"hta/trace_diff/control/control.json.gz", 8508, 60, 0, 0, 0, 15242, 0, 3},
      {"hta/trace_diff/test/test.json.gz", 9812, 64, 25, 4452, 546, 11797, 0, 1},
      {"hta/negative_queue_length_values_check/rank0.json.gz", 6000, 80, 1, 74, 705, 28196, 0, 0},
      {"profile-data/train.json", 931, 32, 0, 0, 0, 2910, 0, 0},
  };
  for (const Row& row : rows) {
    const std::string path = real(row.path);
    if (path.empty()) continue;
    CAPTURE(row.path);
    Trace t;
    import_file(t, path);
    REQUIRE(t.ranks.size() == 1);
    CHECK(t.ranks[0].rank == row.rank);
    CHECK(count(t, EventKind::compute) == row.compute);
    CHECK(t.communications.size() == row.communication);
    CHECK(t.defects.partial_overlaps == row.overlaps);
    CHECK(t.defects.duplicate_correlations == row.duplicates);
    CHECK(t.defects.kernels_without_launch == row.unlaunched);
    CHECK(t.defects.dangling_flows == row.dangling);
    CHECK(t.defects.rank_guessed == row.guessed);
    CHECK(t.defects.malformed_records + t.defects.bad_escapes + t.defects.truncated_files == 0);
  }
  if (const std::string path = real(rows[0].path); !path.empty()) {
    Trace t;
    import_file(t, path);
    CHECK(count(t, CommunicationOp::all_reduce) == 15);
    CHECK(count(t, CommunicationOp::broadcast) == 6);
    CHECK(t.groups.at(0).ranks == std::vector<std::int32_t>{0, 1});
    for (std::size_t i = 0; i < t.communications.size(); ++i) {
      CHECK(t.communications[i].bytes > 0);
      CHECK(t.communications[i].sequence == -1);
    }
    CHECK(t.events[0].begin > 1711964646000000000);
  }
  if (const std::string path = real(rows[5].path); !path.empty()) {
    Trace t;
    import_file(t, path);
    CHECK(t.groups.size() == 11);
    for (const Group& group : t.groups) CHECK(group.ranks.size() == 300);
    CHECK(t.notes.at(0).ends_with("has no GPU activity"));
  }
}

TEST_CASE("scan: eight real ranks: who was waited for, to the microsecond") {
  const std::string path = real("param/dlrm_kineto.tar.gz");
  if (path.empty()) return;
  Trace t;
  import_file(t, path);
  REQUIRE(t.ranks.size() == 8);
  CHECK(t.communications.size() == 64);
  CHECK(t.defects.kernels_without_launch == 128);
  const Matches matches = match(t);
  REQUIRE(matches.instances.size() == 8);
  CHECK(matches.leftovers.empty());
  const Alignment alignment = align(t, matches);
  CHECK(alignment.refusal == "");
  CHECK(alignment.violations == 0);
  const WaitReport waits = find_waits(t, matches, alignment);
  std::vector<std::int64_t> spreads;
  std::vector<std::int32_t> last;
  for (const OperationTiming& timing : waits.operations) {
    spreads.push_back(timing.end_spread / 1000);
    last.push_back(t.ranks[timing.last_arriver].rank);
  }
  CHECK(spreads == std::vector<std::int64_t>{2, 2, 1, 2, 5, 3, 5, 7});
  CHECK(last == std::vector<std::int32_t>{7, 7, 7, 7, 7, 5, 5, 4});
  std::map<std::int32_t, std::int64_t> caused, suffered;
  for (std::size_t r = 0; r < t.ranks.size(); ++r) {
    caused[t.ranks[r].rank] = waits.caused[r] / 1000;
    suffered[t.ranks[r].rank] = waits.suffered[r] / 1000;
  }
  CHECK(caused == std::map<std::int32_t, std::int64_t>{
                      {0, 0}, {1, 0}, {2, 0}, {3, 0}, {4, 5009}, {5, 6282}, {6, 0}, {7, 35552}});
  CHECK(
      suffered ==
      std::map<std::int32_t, std::int64_t>{
          {0, 5580}, {1, 11125}, {2, 3280}, {3, 9571}, {4, 6370}, {5, 6041}, {6, 3342}, {7, 1534}});
}

TEST_CASE("scan: clocks that are seconds and parts per million apart come back to 5 us") {
  const std::string path = real("param/dlrm_kineto.tar.gz");
  if (path.empty()) return;
  Trace t;
  import_file(t, path);
  const std::size_t n = t.events.size();
  std::vector<Event> original;
  Nanoseconds first = t.events[0].begin;
  for (std::size_t i = 0; i < n; ++i) {
    original.push_back(t.events[i]);
    first = std::min(first, t.events[i].begin);
  }
  std::mt19937 random(11);
  std::uniform_real_distribution<double> unit(-1, 1);
  std::vector<double> errors;
  for (int trial = 0; trial < 40; ++trial) {
    std::vector<std::int64_t> offset;
    std::vector<double> drift;
    for (std::size_t r = 0; r < t.ranks.size(); ++r) {
      offset.push_back(static_cast<std::int64_t>(unit(random) * 5e9));
      drift.push_back(unit(random) * 50e-6);
    }
    const auto show = [&](std::size_t r, Nanoseconds at) {
      return at + offset[r] + std::llround(drift[r] * static_cast<double>(at - first));
    };
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t r = t.rank_index(original[i]);
      t.events[i].begin = show(r, original[i].begin);
      t.events[i].end = show(r, original[i].end);
    }
    const Matches matches = match(t);
    REQUIRE(matches.instances.size() == 8);
    const Alignment alignment = align(t, matches);
    REQUIRE(alignment.refusal == "");
    CHECK(alignment.violations == 0);
    // Where the operations end, against rank 0's clock.
    for (const Instance& instance : matches.instances) {
      const Event& e = original[t.communications[matches.of(instance)[0]].event];
      const Nanoseconds reference = alignment.at(0, show(0, e.end));
      for (std::size_t r = 1; r < t.ranks.size(); ++r) {
        const Nanoseconds seen = alignment.at(static_cast<TableIndex>(r), show(r, e.end));
        errors.push_back(std::abs(static_cast<double>(seen - reference)) / 1000);
      }
    }
  }
  std::sort(errors.begin(), errors.end());
  MESSAGE("p50 ", errors[errors.size() / 2], " us, p99 ", errors[errors.size() * 99 / 100],
          " us, most ", errors.back(), " us");
  CHECK(errors[errors.size() * 99 / 100] <= 5);
}

TEST_CASE("scan: two ranks whose operations are not the same are not aligned") {
  const std::string first = real("hta/trace_filter/sampled_rank-0.json.gz");
  const std::string second = real("hta/trace_filter/sampled_rank-1.json.gz");
  if (first.empty() || second.empty()) return;
  Trace t;
  import_file(t, first);
  import_file(t, second);
  CHECK(count(t, CommunicationOp::send_recv) == 20);
  const Alignment alignment = align(t, match(t));
  CHECK_FALSE(alignment.aligned());
  MESSAGE(alignment.refusal);
  for (const ClockModel& clock : alignment.clocks) CHECK(clock.offset == 0);
}

TEST_CASE("scan: groups that a record claims are bounded, listed ones are sorted") {
  const auto kernel = [](const std::string& group, const std::string& ranks,
                         const std::string& more) {
    return R"({"ph":"X","cat":"kernel","name":"ncclDevKernel_AllReduce","pid":0,"tid":7,"ts":1,)"
           R"("dur":1,"args":{"Collective name":"allreduce","Process Group Name":")" +
           group + R"(","Process Group Ranks":")" + ranks + "\"" + more + "}},";
  };
  const std::string claim = R"(,"Group size":900000,"Global rank start":3,"Global rank stride":2)";
  std::string descending = "[";
  for (int rank = 20000; rank > 0; --rank) descending += std::to_string(rank) + ", ";
  const std::string text =
      "[" + kernel("a", "[3, 5, ...]", claim) + kernel("b", "[3, 5, ...]", claim) +
      kernel("c", descending + "0]", "") +
      kernel("d", "[7, ...]",
             R"(,"Group size":9,"Global rank start":2147483646,"Global rank stride":1)") +
      "]";
  Trace t;
  Source source("rank0.json", text);
  import_kineto(t, source);
  REQUIRE(t.groups.size() == 4);
  CHECK(t.groups[0].ranks.size() == 900000);
  CHECK(t.groups[0].ranks[1] == 5);
  CHECK(t.groups[1].ranks.size() == (1 << 20) - 900000);
  REQUIRE(t.groups[2].ranks.size() == 20001);
  CHECK(t.groups[2].ranks[20000] == 20000);
  CHECK(t.groups[3].ranks.empty());  // nothing is left of the limit
}

}  // namespace
