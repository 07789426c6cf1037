#include <mega/scan/input.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/nccl_inspector.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

namespace {

using namespace mega::scan;

std::string header(const std::string& id, int rank, int ranks) {
  return R"({"header":{"id":")" + id + R"(","rank":)" + std::to_string(rank) + R"(,"n_ranks":)" +
         std::to_string(ranks) +
         R"(,"nnodes":1},"metadata":{"inspector_output_format_version":"v4.0","git_rev":"",)" +
         R"("rec_mechanism":"nccl_profiler_interface","dump_timestamp_us":1752867229276385,)" +
         R"("hostname":"host","pid":438776},)";
}

/// A collective of the job's communicator, with times.
std::string verbose(int rank, std::int64_t begin, std::int64_t end) {
  return header("0xaa", rank, 8) + R"("coll_perf":{"coll":"ReduceScatter","coll_sn":1231,)" +
         R"("coll_msg_size_bytes":2147483648,"coll_exec_time_us":41057,)" +
         R"("coll_algobw_gbs":418.4,"coll_busbw_gbs":366.1,"event_trace_ts":{)" +
         R"("coll_start_ts":1752867229235059,"coll_stop_ts":1752867229235064,"kernel_events":[)" +
         R"({"channel_id":0,"kernel_start_ts":)" + std::to_string(begin + 7) +
         R"(,"kernel_stop_ts":)" + std::to_string(end) +
         R"(,"kernel_record_ts":1752867229275811},{"channel_id":1,"kernel_start_ts":)" +
         std::to_string(begin) + R"(,"kernel_stop_ts":)" + std::to_string(end - 9) +
         R"(},{"channel_id":2,"kernel_start_ts":0,"kernel_stop_ts":0}]}}})";
}

Trace import(const std::string& text, const ImportOptions& options = {}) {
  Trace t;
  Source source("host-pid438776.log", text);
  import_nccl_inspector(t, source, options);
  return t;
}

TEST_CASE("scan: an inspector's line with times spans the kernels of all channels") {
  const std::string text = verbose(4, 1752867229235181, 1752867229275811) + "\n";
  CHECK(looks_like_nccl_inspector(text));
  const Trace t = import(text);
  REQUIRE(t.events.size() == 1);
  CHECK(t.events[0].begin == 1752867229235181000);
  CHECK(t.events[0].end == 1752867229275811000);
  CHECK(t.name(t.events[0]) == "ReduceScatter");
  REQUIRE(t.ranks.size() == 1);
  CHECK(t.ranks[0].rank == 4);
  CHECK(t.communications[0].op == CommunicationOp::reduce_scatter);
  CHECK(t.communications[0].sequence == 1231);
  CHECK(t.communications[0].bytes == 2147483648);
  REQUIRE(t.groups.size() == 1);
  CHECK(t.groups[0].ranks.size() == 8);
  CHECK(t.notes.empty());
}

TEST_CASE("scan: an inspector's line without times lies before its dump, and a note says so") {
  const Trace t = import(header("0xaa", 2, 8) +
                         R"("coll_perf":{"coll":"AllReduce","coll_sn":1407,)"
                         R"("coll_msg_size_bytes":17179869184,"coll_exec_time_us":61974}})");
  REQUIRE(t.events.size() == 1);
  CHECK(t.events[0].end == 1752867229276385000);
  CHECK(t.events[0].duration() == 61974000);
  REQUIRE(t.notes.size() == 1);
  CHECK(t.notes[0].find("no times of begin and end for 1 operations") != std::string::npos);
}

TEST_CASE("scan: ranks and peers of smaller communicators are not global ones") {
  const Trace t = import(header("0xbb", 0, 2) +
                         R"("p2p_perf":{"p2p":"Send","p2p_sn":3,"p2p_peer":1,)"
                         R"("p2p_msg_size_bytes":4096,"p2p_exec_time_us":12}})"
                         "\n" +
                         header("0xaa", 6, 8) +
                         R"("p2p_perf":{"p2p":"Recv","p2p_sn":4,"p2p_peer":5,)"
                         R"("p2p_msg_size_bytes":4096,"p2p_exec_time_us":12}})"
                         "\n");
  REQUIRE(t.communications.size() == 2);
  CHECK(t.ranks[0].rank == 6);
  CHECK(t.communications[0].op == CommunicationOp::send);
  CHECK(t.communications[0].peer == -1);
  CHECK(t.communications[1].peer == 5);
  CHECK(t.groups[t.communications[0].group].ranks.empty());
  CHECK(t.groups[t.communications[1].group].ranks.size() == 8);
  CHECK(t.lanes.size() == 2);
}

TEST_CASE("scan: logs of two processes match by communicator and number") {
  Trace t;
  for (const int rank : {4, 5}) {
    const std::string text = verbose(rank, 1752867229235181 + rank, 1752867229275811);
    Source source("log", text);
    import_nccl_inspector(t, source, {});
  }
  const Matches m = match(t);
  CHECK(m.by_sequence == 1);
  CHECK(m.leftovers.empty());
  CHECK(t.groups.size() == 1);
}

TEST_CASE("scan: inspector's lines that are none are counted, reversed times too") {
  const Trace t =
      import("\n{\"header\":{}}\nnothing\n" + verbose(1, 1752867229235181, 1752867229235100) +
             "\n" + header("0xaa", 1, 8) + "\"coll_perf\":{\"coll\":\"AllRed");
  CHECK(t.defects.malformed_records == 3);
  CHECK(t.defects.negative_durations == 1);
  REQUIRE(t.events.size() == 1);
  CHECK(t.events[0].duration() == 0);
  CHECK(import("").events.size() == 0);
  CHECK(import(verbose(1, 5, 50), {.rank = 3}).ranks[0].rank == 3);
}

TEST_CASE("scan: lines that claim a million ranks each do not make a list for each") {
  constexpr int million = 1 << 20;
  std::string text;
  for (int i = 0; i < 50; ++i) {
    text += header("0x" + std::to_string(i), 1, million) +
            R"("coll_perf":{"coll":"AllReduce","coll_sn":1,"coll_msg_size_bytes":8,)" +
            R"("coll_exec_time_us":10}})" + "\n";
  }
  const Trace t = import(text);
  REQUIRE(t.groups.size() == 50);
  std::size_t listed = 0;
  for (const Group& group : t.groups) listed += group.ranks.size();
  CHECK(listed == million);
}

}  // namespace
