#include <mega/core/error.hpp>
#include <mega/scan/import.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>
#include <tests/support/temporary_directory.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace {

using namespace mega::scan;
using mega::sentence;

/// A recording of `rank` that has steps of 100 ns each.
std::string recording(int rank, int first_step, int last_step, std::int64_t start,
                      const std::string& clock = "one", int world = 4) {
  std::string text =
      sentence("{\"mega_trace\":1,\"rank\":", rank, ",\"world\":", world, ",\"clock\":\"", clock,
               "\"}\n{\"lane\":0,\"label\":\"compute\"}\n{\"device\":", start,
               ",\"mhz\":", 1000 + first_step, "}\n");
  int count = 0;
  for (int step = first_step; step <= last_step; ++step, ++count) {
    text += sentence("{\"b\":", start + 100 * count, ",\"d\":", 60 + 3 * rank,
                     ",\"n\":\"forward\",\"k\":\"forward\",\"l\":0,\"s\":", step, "}\n");
  }
  return text + sentence("{\"recorded\":", count, ",\"dropped\":0}\n");
}

struct Given {
  std::string name, text;
};

Trace import(const std::vector<Given>& files, const ImportOptions& options = {}) {
  Trace t;
  for (const Given& file : files) {
    Source source(file.name, file.text);
    import_source(t, source, options);
  }
  return t;
}

std::string refusal(const std::vector<Given>& files, const ImportOptions& options = {}) {
  return mega::tests::sentence_of([&] { (void)import(files, options); });
}

TEST_CASE("scan: windows of one rank are parts of one recording, in any order") {
  const Trace t = import(
      {{"b", recording(1, 5, 6, 900)}, {"c", recording(3, 0, 2, 0)}, {"a", recording(1, 0, 2, 0)}});
  REQUIRE(t.ranks.size() == 2);
  CHECK(t.ranks[0].rank == 1);
  CHECK(t.ranks[1].rank == 3);
  REQUIRE(t.lanes.size() == 3);
  CHECK(t.lanes[2].rank == 0);
  CHECK(t.rank(t.events[7]) == 1);
  REQUIRE(t.device_states.size() == 3);
  CHECK(t.device_states[2].sm_mhz == 1005);
  CHECK(t.device_states[2].rank == 0);
  REQUIRE(t.notes.size() == 1);
  CHECK(t.notes[0] == "a is taken for a part of the recording that b has of rank 1");
  CHECK(t.warnings.empty());
  CHECK(t.files.size() == 3);
}

TEST_CASE("scan: a step may be torn between two files, but not be in both whole") {
  CHECK(refusal({{"a", recording(0, 0, 3, 0)}, {"b", recording(0, 3, 5, 355)}}).empty());
  CHECK(refusal({{"a", recording(0, 0, 3, 0)}, {"b", recording(0, 3, 5, 100)}}) ==
        "a and b are both of rank 0 and are no parts of one recording: both have step 3; leave one "
        "out");
  CHECK(mega::tests::contains(
      refusal({{"a", recording(0, 0, 3, 0)}, {"b", recording(0, 2, 5, 9000)}}), "steps 2 to 3"));
  // One step each, and the same: the second run of a job, not the second part of a step.
  CHECK(mega::tests::contains(
      refusal({{"a", recording(0, 3, 3, 0)}, {"b", recording(0, 3, 3, 9000)}}),
      "both have step 3"));
}

TEST_CASE("scan: files that do not belong together are refused by name") {
  using mega::tests::contains;
  const std::string one = recording(0, 0, 3, 0);
  CHECK(contains(refusal({{"a", one}, {"b", one}}),
                 "a and b are both of rank 0 and are no parts of one recording: they hold the same "
                 "events"));
  CHECK(refusal({{"a", one}, {"a", one}}) == "a is given twice");
  CHECK(contains(refusal({{"a", one}, {"b", recording(0, 4, 5, 900, "two")}}), "different clocks"));
  CHECK(refusal({{"a", one}, {"b", recording(1, 0, 3, 0, "one", 8)}}) ==
        "a is of a job of 4 ranks and b of one of 8; give the files of one job");
  // The user's number counts, but makes no two ranks of one, nor one of two.
  ImportOptions zero;
  zero.rank = 0;
  CHECK(contains(refusal({{"a", one}, {"b", recording(1, 0, 3, 0)}}, zero),
                 "a and b both count as rank 0"));
  Trace t = import({{"a", one}});
  Source copy("b", one);
  ImportOptions other;
  other.rank = 1;
  CHECK(mega::tests::sentence_of([&] { import_source(t, copy, other); }) ==
        "a and b hold the same events, though they count as ranks 0 and 1; leave one out");
  // What two files say of themselves may be equal: ranks of a simulation are.
  std::string twin = one;
  twin.replace(twin.find("\"rank\":0"), 8, "\"rank\":2");
  CHECK(refusal({{"a", one}, {"b", twin}}).empty());
}

TEST_CASE("scan: parts without steps follow each other in time") {
  const auto kernels = [](int from, int count) {
    std::string text = R"({"distributedInfo":{"rank":5,"world_size":8},"traceEvents":[)";
    for (int i = 0; i < count; ++i) {
      text += sentence(i == 0 ? "" : ",", R"({"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,)",
                       R"("ts":)", from + 10 * i, R"(,"dur":9})");
    }
    return text + "]}";
  };
  const Trace t = import({{"a", kernels(0, 100)}, {"b", kernels(990, 50)}});
  CHECK(t.ranks.size() == 1);
  CHECK(t.ranks[0].world == 8);
  CHECK(mega::tests::contains(refusal({{"a", kernels(0, 100)}, {"b", kernels(900, 50)}}),
                              "they overlap in time"));
}

TEST_CASE("scan: what is missing of the input stands in the warnings") {
  const mega::tests::TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "node1");
  directory.write("rank0", recording(0, 0, 3, 0));
  const std::string whole = recording(1, 0, 3, 0);
  directory.write("rank1", whole.substr(0, whole.size() - 40));
  directory.write("a.txt", "hello");
  directory.write("b.txt", "");
  Trace t;
  import_file(t, directory.path());
  CHECK(t.ranks.size() == 2);
  CHECK(t.defects.truncated_files == 1);
  REQUIRE(t.warnings.size() == 3);
  CHECK(t.warnings[0] == directory / "rank1 is cut off: what it held beyond is missing");
  CHECK(t.warnings[1] ==
        "a.txt and b.txt in " + directory.path() + " are no traces and were passed over");
  CHECK(t.warnings[2] == "the folder node1 in " + directory.path() +
                             " was not searched: name what belongs to the job");
  remark_on_job(t);
  REQUIRE(t.notes.size() == 1);
  CHECK(t.notes[0] == "the job has 4 ranks, of which there are files of 2");
  CHECK(t.warnings.size() == 3);
}

TEST_CASE("scan: ranks that were recorded on different days are doubted") {
  const std::int64_t day = 86'400'000'000'000, date = 20'000 * day;
  const auto warned = [&](std::vector<Given> files) {
    Trace t = import(files);
    remark_on_job(t);
    return t.warnings.size();
  };
  CHECK(warned({{"a", recording(0, 0, 3, date)}, {"b", recording(1, 0, 3, date + day / 1000)}}) ==
        0);
  CHECK(warned({{"a", recording(0, 0, 3, date)}, {"b", recording(1, 0, 3, date + day)}}) == 1);
  // Stamps that count from the start of a machine say nothing.
  CHECK(warned({{"a", recording(0, 0, 3, day)}, {"b", recording(1, 0, 3, 9 * day)}}) == 0);
  // Windows a day apart, of both ranks.
  CHECK(warned({{"a", recording(0, 0, 3, date)},
                {"b", recording(0, 8, 9, date + day)},
                {"c", recording(1, 8, 9, date + day)}}) == 0);
}

}  // namespace
