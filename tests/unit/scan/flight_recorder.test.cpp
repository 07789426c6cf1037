#include "../../support/pickled.hpp"
#include "../../support/refusal.hpp"
#include "../../support/shared_traces.hpp"
#include <mega/core/error.hpp>
#include <mega/scan/flight_recorder.hpp>
#include <mega/scan/hang.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;
using namespace std::string_literals;
namespace pickled = mega_test::pickled;

struct Call {
  std::string group;
  std::string name;
  std::int64_t sequence = 0;
  bool done = false;
  bool transfer = false;
};

struct Dump {
  std::vector<std::pair<std::string, std::string>> groups;  // name, members
  std::vector<Call> calls;
  std::vector<std::int64_t> enqueued, completed;  // by number of the group

  static constexpr std::int64_t start = 1758580156069309184;

  [[nodiscard]] std::string pickle() const {
    using namespace pickled;
    std::vector<std::pair<std::string, std::string>> config, status;
    std::vector<std::string> entries;
    for (const auto& [name, members] : groups) {
      config.emplace_back(name, dictionary({{"name", text(name)},
                                            {"desc", text("group " + name)},
                                            {"ranks", text(members)}}));
    }
    for (std::size_t i = 0; i < enqueued.size(); ++i) {
      status.emplace_back(std::to_string(i),
                          dictionary({{"last_enqueued_collective", integer(enqueued[i])},
                                      {"last_started_collective", integer(-1)},
                                      {"last_completed_collective", integer(completed[i])}}));
    }
    std::int64_t id = 0;
    for (const Call& call : calls) {
      entries.push_back(dictionary(
          {{"record_id", integer(id)},
           {"pg_id", integer(number(call.group))},
           {"process_group", pair(text(call.group), text("group " + call.group))},
           {"collective_seq_id", integer(call.sequence)},
           {"profiling_name", text(call.name)},
           {"time_created_ns", integer(start + 1000 * id)},
           {"input_sizes", list({list({integer(2048), integer(1), integer(5120)})})},
           {"input_dtypes", list({text("BFloat16")})},
           {"state", text(call.done ? "completed" : "scheduled")},
           {"time_discovered_completed_ns", call.done ? integer(start + 1000 * id + 500) : null()},
           {"retired", truth(call.done)},
           {"is_p2p", truth(call.transfer)}}));
      ++id;
    }
    std::reverse(entries.begin(), entries.end());  // the importer goes by record_id
    return file(dictionary({{"version", text("2.9")},
                            {"pg_config", dictionary(config)},
                            {"pg_status", dictionary(status)},
                            {"entries", list(entries)}}));
  }

  [[nodiscard]] std::string json() const {
    std::string out = R"({"version":"2.9","pg_config":{)";
    for (std::size_t i = 0; i < groups.size(); ++i) {
      out += (i > 0 ? "," : "") + ("\"" + groups[i].first) + R"(":{"name":")" + groups[i].first +
             R"(","desc":"group )" + groups[i].first + R"(","ranks":")" + groups[i].second + "\"}";
    }
    out += R"(},"pg_status":{)";
    for (std::size_t i = 0; i < enqueued.size(); ++i) {
      out += (i > 0 ? ",\"" : "\"") + std::to_string(i) + R"(":{"last_enqueued_collective":)" +
             std::to_string(enqueued[i]) + R"(,"last_started_collective":-1)" +
             R"(,"last_completed_collective":)" + std::to_string(completed[i]) + "}";
    }
    out += R"(},"entries":[)";
    std::int64_t id = 0;
    for (const Call& call : calls) {
      const std::string created = std::to_string(start + 1000 * id);
      out += (id > 0 ? ",{" : "{") + (R"("record_id":)" + std::to_string(id)) + R"(,"pg_id":)" +
             std::to_string(number(call.group)) + R"(,"process_group":[")" + call.group +
             R"(","group )" + call.group + R"("],"collective_seq_id":)" +
             std::to_string(call.sequence) + R"(,"profiling_name":")" + call.name +
             R"(","time_created_ns":)" + created +
             R"(,"input_sizes":[[2048,1,5120]],"input_dtypes":["BFloat16"],"state":")" +
             (call.done ? "completed" : "scheduled") + R"(","time_discovered_completed_ns":)" +
             (call.done ? std::to_string(start + 1000 * id + 500) : "null") + R"(,"retired":)" +
             (call.done ? "true" : "false") + R"(,"is_p2p":)" + (call.transfer ? "true" : "false") +
             "}";
      ++id;
    }
    return out + "]}";
  }

 private:
  [[nodiscard]] std::int64_t number(const std::string& group) const {
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if (groups[i].first == group) return static_cast<std::int64_t>(i);
    }
    return -1;
  }
};

void import(Trace& trace, const std::string& name, const std::string& bytes,
            const ImportOptions& options = {}) {
  Source source(name, bytes);
  import_flight_recorder(trace, source, options);
}

const std::vector<std::pair<std::string, std::string>> world{{"0", "[0, 1, 2, 3]"}};

/// A rank that completed all_reduce 10 in the world and, if it called it, hangs in 11.
Dump rank_in_world(bool called) {
  Dump dump;
  dump.groups = world;
  dump.calls = {{"0", "nccl:all_reduce", 10, true}};
  if (called) dump.calls.push_back({"0", "nccl:all_reduce", 11});
  dump.enqueued = {called ? 11 : 10};
  dump.completed = {10};
  return dump;
}

TEST_CASE("scan: a flight recorder dump, pickled and as JSON, says the same") {
  Dump dump;
  dump.groups = {{"0", "[0, 1, 2, 3]"}, {"7", "[1, 3]"}, {"31", "[1]"}};
  dump.calls = {{"0", "nccl:_all_gather_base", 10, true},
                {"7", "nccl:recv 0<-1", 4, false, true},
                {"0", "nccl:_reduce_scatter_base", 11}};
  dump.enqueued = {11, 5, 1};
  dump.completed = {10, 4, 1};
  for (const bool pickle : {true, false}) {
    CAPTURE(pickle);
    const std::string bytes = pickle ? dump.pickle() : dump.json();
    CHECK(looks_like_flight_recorder(bytes));
    Trace t;
    import(t, "some/_dump_of_a_rank", bytes);
    REQUIRE(t.ranks.size() == 1);
    CHECK(t.ranks[0].rank == 1);  // the only one in all of its groups
    CHECK_FALSE(t.ranks[0].missing);
    CHECK(t.defects.rank_guessed == 0);
    REQUIRE(t.groups.size() == 3);
    const auto group = [&](TableIndex g) { return t.groups[g].name; };
    REQUIRE(t.events.size() == 3);
    CHECK(t.name(t.events[0]) == "nccl:_all_gather_base");
    CHECK(t.events[0].begin == Dump::start);
    CHECK(t.events[0].end == Dump::start + 500);
    CHECK(t.events[1].begin == Dump::start + 1000);
    CHECK(t.events[1].duration() == 0);
    const Communication& gather = t.communications[0];
    CHECK(gather.op == CommunicationOp::all_gather);
    CHECK(gather.sequence == 10);
    CHECK(gather.bytes == 2048 * 5120 * 2);
    CHECK(group(gather.group) == "group 0 (0)");
    const Communication& receive = t.communications[1];
    CHECK(receive.op == CommunicationOp::recv);
    CHECK(receive.peer == 3);       // rank 1 of the group {1, 3}
    CHECK(receive.sequence == -1);  // transfers of a group share no numbers
    CHECK(t.outstanding == std::vector<TableIndex>{1, 2});
    // No entry says which number is group "31": numbers and names rise together.
    REQUIRE(t.progress.size() == 3);
    CHECK(group(t.progress[2].group) == "group 31 (31)");
    CHECK(t.progress[2].last_completed == 1);
    CHECK(t.progress[0].last_enqueued == 11);
    CHECK(t.progress[0].last_started == -1);
  }
}

TEST_CASE("scan: numbers of groups are not guessed against what entries say") {
  Dump dump;
  dump.groups = {{"5", "[0]"}, {"0", "[0, 1]"}};  // the entry makes number 0 the group "5"
  dump.calls = {{"5", "nccl:all_reduce", 1}};
  dump.enqueued = {1, 9};
  dump.completed = {0, 9};
  Trace t;
  import(t, "_dump_0", dump.pickle());
  REQUIRE(t.progress.size() == 1);
  CHECK(t.groups[t.progress[0].group].name == "group 5 (5)");
}

TEST_CASE("scan: the rank of a dump comes from the user, the groups or the file's name") {
  Dump dump;
  dump.groups = world;
  dump.calls = {{"0", "nccl:all_reduce", 1}};
  Trace t;
  import(t, "x/nccl_trace_rank_2", dump.pickle());
  CHECK(t.ranks[0].rank == 2);
  CHECK(t.defects.rank_guessed == 1);
  import(t, "x/_dump_9", dump.json(), {.rank = 3});
  CHECK(t.ranks[1].rank == 3);
  CHECK(t.defects.rank_guessed == 1);
}

TEST_CASE("scan: empty and cut dumps make their ranks missing") {
  Trace t;
  import(t, "x/_dump_12", "");
  import(t, "x/_dump_13", rank_in_world(true).pickle().substr(0, 400));
  REQUIRE(t.ranks.size() == 2);
  CHECK(t.ranks[0].rank == 12);
  CHECK(t.ranks[0].missing);
  CHECK(t.ranks[1].rank == 13);
  CHECK(t.ranks[1].missing);
  CHECK(t.defects.truncated_files == 1);
  CHECK(t.events.empty());
  CHECK(is_flight_recorder_name("x/_dump_12"));
  CHECK_FALSE(is_flight_recorder_name("dump_x/trace.json"));
}

TEST_CASE("scan: what is no dump is refused; broken entries are counted") {
  Trace t;
  CHECK(mega_test::refusal_of([&] { import(t, "file", "{\"version\": 2}"); },
                              mega::ErrorCode::bad_input) ==
        "file is no flight recorder dump: it has neither \"entries\" nor \"pg_config\"");
  CHECK(mega_test::refusal_of(
            [&] {
              import(t, "file",
                     "\x80\x02"
                     "cos\nsystem\n."s);
            },
            mega::ErrorCode::bad_input)
            .find("GLOBAL") != std::string::npos);
  CHECK(t.ranks.empty());
  import(t, "_dump_0", R"({"entries":[1,{"state":"scheduled"},{"time_created_ns":5}]})");
  CHECK(t.defects.malformed_records == 2);
  CHECK(t.events.size() == 1);
}

TEST_CASE("scan: who never called what the others are in is the suspect") {
  Trace t;
  for (int rank = 0; rank < 4; ++rank)
    import(t, "_dump_" + std::to_string(rank), rank_in_world(rank != 2).pickle());
  const HangReport hang = find_hang(t);
  CHECK(hang.hung);
  CHECK(hang.suspects == std::vector<std::int32_t>{2});
  REQUIRE(hang.evidence.size() == 1);
  CHECK(
      hang.evidence[0] ==
      "rank 2 never called nccl:all_reduce 11 of group group 0 (0), in which 3 ranks wait for it");
  REQUIRE(hang.groups.size() == 1);
  CHECK(hang.groups[0].behind_in_calls == std::vector<std::int32_t>{2});
  CHECK(hang.groups[0].behind_in_results.empty());
  CHECK(hang.ranks[0].waits_for == std::vector<std::int32_t>{2});
  CHECK(hang.ranks[0].outstanding == 1);
  CHECK(hang.ranks[0].earliest_outstanding == Dump::start + 1000);
}

TEST_CASE("scan: who did not complete what the others completed is the suspect") {
  Trace t;
  for (int rank = 0; rank < 4; ++rank) {
    Dump dump = rank_in_world(true);
    if (rank == 1) {
      dump.calls = {
          {"0", "nccl:all_reduce", 9}, {"0", "nccl:all_reduce", 10}, {"0", "nccl:all_reduce", 11}};
      dump.completed = {8};
    }
    import(t, "_dump_" + std::to_string(rank), dump.pickle());
  }
  const HangReport hang = find_hang(t);
  CHECK(hang.suspects == std::vector<std::int32_t>{1});
  CHECK(hang.groups[0].behind_in_results == std::vector<std::int32_t>{1});
  CHECK(hang.groups[0].behind_in_calls.empty());
}

TEST_CASE("scan: a rank that waits for another is its victim, not a suspect") {
  // 0 waits in the world for 1, which waits for a transfer from 2, whose dump is empty.
  Trace t;
  import(t, "_dump_0", rank_in_world(true).pickle());
  Dump middle = rank_in_world(false);
  middle.groups.push_back({"9", "[1, 2]"});
  middle.calls.push_back({"9", "nccl:recv 0<-1", 3, false, true});
  middle.enqueued.push_back(3);
  middle.completed.push_back(2);
  import(t, "_dump_1", middle.pickle(), {.rank = 1});
  import(t, "_dump_2", "");
  import(t, "_dump_3", rank_in_world(true).pickle());
  const HangReport hang = find_hang(t);
  CHECK(hang.suspects == std::vector<std::int32_t>{2});
  CHECK(hang.evidence[0].find("rank 2 has called nothing that is unfinished while ") == 0);
  CHECK(hang.ranks[0].waits_for == std::vector<std::int32_t>{1, 2});
  CHECK(hang.ranks[1].waits_for == std::vector<std::int32_t>{2});
}

TEST_CASE("scan: ranks that wait for each other in a circle are suspects together") {
  Trace t;
  Dump zero = rank_in_world(false);
  zero.groups.push_back({"9", "[0, 1]"});
  zero.calls.push_back({"9", "nccl:recv 0<-1", 3, false, true});
  import(t, "_dump_0", zero.pickle(), {.rank = 0});
  for (int rank = 1; rank < 4; ++rank)
    import(t, "_dump_" + std::to_string(rank), rank_in_world(true).pickle());
  const HangReport hang = find_hang(t);
  CHECK(hang.suspects == std::vector<std::int32_t>{0, 1});
  CHECK(hang.evidence[0].find("one of 2 ranks that wait for each other") != std::string::npos);
}

TEST_CASE("scan: where all are in the same operation nobody is accused") {
  Trace t;
  for (int rank = 0; rank < 4; ++rank)
    import(t, "_dump_" + std::to_string(rank), rank_in_world(true).pickle());
  const HangReport hang = find_hang(t);
  CHECK(hang.hung);
  CHECK(hang.suspects.empty());
  CHECK(hang.notes.size() == 1);
}

TEST_CASE("scan: a job that is through does not hang") {
  Trace t;
  for (int rank = 0; rank < 4; ++rank)
    import(t, "_dump_" + std::to_string(rank), rank_in_world(false).pickle());
  const HangReport hang = find_hang(t);
  CHECK_FALSE(hang.hung);
  CHECK(hang.suspects.empty());
  CHECK(hang.notes.empty());
}

TEST_CASE("scan: absent dumps count where most are there, not where the user gave a few") {
  Trace most;
  for (const int rank : {0, 1, 3})
    import(most, "_dump_" + std::to_string(rank), rank_in_world(true).pickle());
  CHECK(find_hang(most).suspects == std::vector<std::int32_t>{2});
  CHECK(find_hang(most).evidence[0].find("rank 2 left no dump while 3 ranks wait") == 0);
  Trace one;
  import(one, "_dump_0", rank_in_world(true).pickle());
  CHECK(find_hang(one).suspects.empty());
  CHECK(find_hang(one).notes.size() == 2);
}

TEST_CASE("scan: transfers make the counters of a group incomparable") {
  // In the world rank 0 has sent to 1 only: its count is ahead, and nobody is behind.
  Trace t;
  for (int rank = 0; rank < 4; ++rank) {
    Dump dump = rank_in_world(true);
    if (rank == 0) {
      dump.calls.insert(dump.calls.begin(), {"0", "nccl:send 0->1", 10, true, true});
      dump.enqueued = {12};
      dump.completed = {11};
    }
    import(t, "_dump_" + std::to_string(rank), dump.pickle());
  }
  const HangReport hang = find_hang(t);
  CHECK_FALSE(hang.groups[0].comparable);
  CHECK(hang.groups[0].behind_in_calls.empty());
  CHECK(hang.suspects.empty());
}

TEST_CASE("scan: the ranks in which faults were injected are found in real dumps") {
  struct Set {
    std::string name;
    std::vector<std::int32_t> injected;
  };
  const std::vector<Set> sets{{"gpu_error_1st", {12, 14}},
                              {"gpu_error_2nd", {9, 14}},
                              {"lock_gil_1st", {9, 14}},
                              {"lock_gil_2nd", {10, 15}}};
  for (const Set& set : sets) {
    const std::string folder = mega_test::shared_trace("nvrx_fr/" + set.name);
    if (folder.empty()) continue;
    CAPTURE(set.name);
    Trace t;
    for_each_source(folder, [&](Source& source) {
      if (is_flight_recorder_name(source.name())) import_flight_recorder(t, source, {});
    });
    REQUIRE(t.ranks.size() == 16);
    CHECK(t.defects.rank_guessed == 0);  // each has a group of its own
    for (int rank = 0; rank < 16; ++rank)
      CHECK(t.ranks[static_cast<std::size_t>(rank)].rank == rank);
    const HangReport hang = find_hang(t);
    for (const std::string& line : hang.evidence) INFO(line);
    CHECK(hang.suspects == set.injected);
    CHECK(hang.evidence.size() == set.injected.size());
    if (set.name.starts_with("lock_gil")) {
      for (const Rank& rank : t.ranks) {
        const bool injected =
            std::find(set.injected.begin(), set.injected.end(), rank.rank) != set.injected.end();
        CHECK(rank.missing == injected);
      }
    }
  }
}

}  // namespace
