#include "../../support/hand_trace.hpp"
#include "../../support/scan_generator.hpp"
#include "../../support/timeline_trace.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/chrome_json.hpp>
#include <mega/scan/diagnose.hpp>
#include <mega/scan/import.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;

std::string written(const Trace& trace) {
  std::string text;
  const Matches matches = match(trace);
  write_chrome_json(trace, matches, align(trace, matches),
                    [&](std::string_view piece) { text += piece; });
  return text;
}

Trace read(const std::string& text) {
  Trace out;
  Source source("joined.json", text);
  import_source(out, source);
  return out;
}

TEST_CASE("scan: Chrome JSON of several ranks is read back with its ranks, lanes and groups") {
  const mega_test::Timeline timeline;
  const Trace& was = timeline.trace;
  const std::string text = written(was);
  CHECK(dialect_of(text.substr(0, 4096)) == "the Chrome JSON of mega-scan convert");
  const Trace t = read(text);
  REQUIRE(t.ranks.size() == 2);
  CHECK(t.ranks[0].rank == 4);
  CHECK(t.ranks[1].rank == 6);
  CHECK(t.ranks[1].pipeline == 1);
  CHECK(t.ranks[1].data == -1);
  REQUIRE(t.groups.size() == 1);
  CHECK(t.groups[0].name == "dp");
  CHECK(t.groups[0].ranks == std::vector<std::int32_t>{4, 6});
  REQUIRE(t.lanes.size() == 3);  // rank 6 runs nothing on its host
  CHECK(t.lanes[0].track == 7);
  CHECK(t.lanes[1].label == "python");
  CHECK(t.lanes[1].kind == LaneKind::host);
  REQUIRE(t.events.size() == was.events.size());

  // The begins of the timeline are unique in a rank, but for the outer event and what it holds.
  using Key = std::tuple<std::int32_t, std::string_view, Nanoseconds>;
  const auto keyed = [](const Trace& trace) {
    std::map<Key, const Event*> out;
    for (std::size_t i = 0; i < trace.events.size(); ++i) {
      const Event& e = trace.events[i];
      out[{trace.rank(e), trace.name(e), e.duration()}] = &e;
    }
    return out;
  };
  const auto before = keyed(was), after = keyed(t);
  for (const auto& [key, e] : before) {
    const auto at = after.find(key);
    if (at == after.end()) continue;  // the name that is no text
    const Event& same = *at->second;
    CHECK(same.kind == e->kind);
    CHECK(same.step == e->step);
    CHECK(same.microbatch == e->microbatch);
    CHECK(same.chunk == e->chunk);
    CHECK((same.launch != none) == (e->launch != none));
    REQUIRE((same.detail != none) == (e->detail != none));
    if (e->detail == none) continue;
    const Communication &a = was.communications[e->detail], &b = t.communications[same.detail];
    CHECK(a.op == b.op);
    CHECK(a.sequence == b.sequence);
    CHECK(a.peer == b.peer);
    CHECK(a.bytes == b.bytes);
    CHECK(b.group == 0);
    CHECK(t.names[b.dtype] == "bf16");
  }
  CHECK(after.size() == before.size());
  CHECK(t.defects.malformed_records == 0);
  CHECK(t.defects.dangling_flows == 0);
  CHECK(match(t).instances.size() == match(was).instances.size());
}

Diagnosis judged(const Trace& t) {
  const Matches m = match(t);
  const Alignment a = align(t, m);
  CHECK(a.refusal == "");
  return diagnose(t, m, a);
}

TEST_CASE("scan: a job that was joined has the verdicts that its files have") {
  mega_test::JobSpec spec;
  spec.dp = 2, spec.tp = 2, spec.pp = 2;
  spec.faults = {{.kind = mega_test::FaultKind::slow_gpu, .rank = 5, .factor = 1.5}};
  const Trace files = mega_test::generate(spec, 7).trace;
  const Trace joined = read(written(files));
  CHECK(joined.ranks.size() == 8);
  const Diagnosis before = judged(files), after = judged(joined);
  REQUIRE(before.verdicts.size() == 1);
  REQUIRE(after.verdicts.size() == 1);
  CHECK(after.verdicts[0].what == VerdictClass::slow_gpu);
  CHECK(after.verdicts[0].ranks == std::vector<std::int32_t>{5});
  CHECK(after.verdicts[0].factor == doctest::Approx(before.verdicts[0].factor).epsilon(0.001));
}

TEST_CASE("scan: launches stand in a joined timeline, so that late ones are found") {
  mega_test::HandTrace hand(2, 2);
  for (int rank = 0; rank < 2; ++rank) {
    Nanoseconds now = 0;
    for (int i = 0; i < 40; ++i) {
      if (rank == 0) now += 1'000'000;  // the device is ready, and nothing comes
      const TableIndex launch = hand.launch(rank, now - 1000, now, i / 5);
      hand.trace.events[hand.run(rank, "gemm", now, now + 2'000'000, i / 5)].launch = launch;
      now += 2'000'000;
    }
  }
  const Trace joined = read(written(hand.trace));
  const Diagnosis before = judged(hand.trace), after = judged(joined);
  REQUIRE(before.verdicts.size() == 1);
  REQUIRE(after.verdicts.size() == 1);
  CHECK(after.verdicts[0].what == VerdictClass::host_delay);
  CHECK(after.verdicts[0].ranks == std::vector<std::int32_t>{0});
  CHECK(after.verdicts[0].cost_per_step == before.verdicts[0].cost_per_step);
}

TEST_CASE("scan: a joined timeline that is cut has the ranks that stand at its begin") {
  const mega_test::Timeline timeline;
  const std::string text = written(timeline.trace);
  for (std::size_t size = text.size() / 2; size < text.size() - 4; size += 7) {
    Trace t;
    const std::string cut = text.substr(0, size);
    Source source("joined.json", cut);
    import_source(t, source);
    CHECK(t.ranks.size() == 2);
    CHECK(t.defects.truncated_files == 1);
  }
}

}  // namespace
