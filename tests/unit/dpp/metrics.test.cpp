/// @file  Tests of the measured windows, ratios and coverage: by hand on a small file, against the
/// published figures of two public traces where MEGA_SHARED names a directory with them, and
/// against the simulator on timelines.
#include "tests/support/refusal.hpp"
#include "tools/mega-plan/trace_file.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/metrics.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/timeline_json.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace mega;
using namespace mega::dpp;
using enum mega::dpp::ActionKind;
using doctest::Approx;
using nlohmann::json;

namespace {

const std::string own_file = "tests/unit/dpp/data/megatronapp_2rank_2mb_2chunk.json";

/// Doubles that differ by rounding only.
Approx near(double value) {
  return Approx(value).epsilon(1e-12);
}
bool is_unknown(double value) {
  return std::isnan(value);
}

/// The value as a table prints it.
std::string printed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string refusal(const std::function<void()>& act, ErrorCode code = ErrorCode::bad_input) {
  return mega_test::refusal_of(act, code);
}
std::string refusal(const PipelineRecord& record, int skip = 0) {
  return refusal([&] { (void)measure(record, skip); });
}
std::string refusal(const json& trace) {
  return refusal([&] { (void)plan::parse_trace(trace.dump(), "t.json"); });
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

json own_events() {
  return json::parse(plan::read_unpacked(own_file, 1 << 20));
}

/// Two ranks, one chunk, one micro-batch: rank 0 runs 0..10 and 60..80, rank 1 20..30 and 30..50.
PipelineRecord small_record() {
  PipelineRecord record;
  record.p = 2;
  record.iterations = {{0, 5, 0, 100, 80}, {1, 5, 0, 90, 50}};
  record.compute = {{0, 5, make_action(forward, 0, 0), 0, 10},
                    {0, 5, make_action(backward, 0, 0), 60, 80},
                    {1, 5, make_action(forward, 0, 0), 20, 30},
                    {1, 5, make_action(backward, 0, 0), 30, 50}};
  record.hand_overs = hand_overs(LoopPlacement{}, 2, 1);
  return record;
}

void check_same(const PipelineMetrics& a, const PipelineMetrics& b) {
  CHECK(a.iterations == b.iterations);
  CHECK(a.iteration_ns == near(b.iteration_ns));
  REQUIRE(a.ranks.size() == b.ranks.size());
  for (std::size_t r = 0; r < a.ranks.size(); ++r) {
    CHECK(a.ranks[r].compute_window_ns == near(b.ranks[r].compute_window_ns));
    CHECK(a.ranks[r].compute_ratio == near(b.ranks[r].compute_ratio));
    CHECK(a.ranks[r].reduce_window_ns == near(b.ranks[r].reduce_window_ns));
    CHECK(a.ranks[r].peak_live == b.ranks[r].peak_live);
    CHECK(a.ranks[r].incoming_ns.total == near(b.ranks[r].incoming_ns.total));
    CHECK(a.ranks[r].incoming_ns.covered == near(b.ranks[r].incoming_ns.covered));
  }
  REQUIRE(a.sends.size() == b.sends.size());
  for (std::size_t k = 0; k < a.sends.size(); ++k) {
    CHECK(a.sends[k].kind == b.sends[k].kind);
    CHECK(a.sends[k].from == b.sends[k].from);
    CHECK(a.sends[k].to == b.sends[k].to);
    CHECK(a.sends[k].messages == b.sends[k].messages);
    CHECK(a.sends[k].window_ns == near(b.sends[k].window_ns));
  }
}

}  // namespace

TEST_CASE("dpp: hand-overs go round the ranks, and inside a rank there are none") {
  using Found = std::vector<HandOver>;
  CHECK(hand_overs(LoopPlacement{}, 3, 2) ==
        Found{{0, 0, 1, 0}, {1, 0, 2, 0}, {2, 0, 0, 1}, {0, 1, 1, 1}, {1, 1, 2, 1}});
  CHECK(hand_overs(VPlacement{}, 2, 2) == Found{{0, 0, 1, 0}, {1, 1, 0, 1}});
  CHECK(hand_overs(LoopPlacement{}, 1, 4).empty());
}

// The file holds three iterations of the same actions, the first ten times as slow. Times below are
// microseconds since the beginning of an iteration, read off the file's lines:
//   rank 0, from 1:  F00 2-6  F01 6-10  F10 14-18  F11 20-24  B10 39-45  B11 45-51  B00 56-62  B01
//   65-71 rank 1, from 0:  F00 7-12 F01 12-17 F10 20-25  B10 25-32  F11 32-37  B11 37-44  B00 48-55
//   B01 55-62
// (kind, chunk, micro-batch). Iterations 1 and 2 end at 91 and 361 on rank 0, at 100 and 400 on
// rank 1.
TEST_CASE("dpp: metrics of a small trace by hand") {
  const plan::TraceFile trace = plan::read_trace(own_file);
  CHECK(trace.format == "MegatronApp");
  const PipelineMetrics metrics = measure(trace.record, 1);
  constexpr double us = 1000;
  CHECK(metrics.iterations == std::vector{1, 2});
  CHECK(metrics.iteration_ns == near((90 + 360 + 100 + 400) / 4.0 * us));
  CHECK_FALSE(metrics.transfer_ns.has_value());

  REQUIRE(metrics.ranks.size() == 2);
  const RankMetrics &r0 = metrics.ranks[0], &r1 = metrics.ranks[1];
  CHECK(r0.iteration_ns == near(225 * us));
  CHECK(r1.iteration_ns == near(250 * us));
  CHECK(r0.compute_window_ns == near((4 * 4 + 4 * 6) / 8.0 * us));
  CHECK(r1.compute_window_ns == near((4 * 5 + 4 * 7) / 8.0 * us));
  // A geometric mean: the square root of 90 * 360 is 180, of 100 * 400 it is 200.
  CHECK(r0.compute_ratio == near(40 / 180.0));
  CHECK(r1.compute_ratio == near(48 / 200.0));
  CHECK(r0.reduce_window_ns == near((20 + 290) / 2.0 * us));
  CHECK(r1.reduce_window_ns == near((38 + 338) / 2.0 * us));
  CHECK(r0.reduce_ratio == near(std::sqrt(20 / 90.0 * 290 / 360.0)));
  CHECK(r1.reduce_ratio == near(std::sqrt(38 / 100.0 * 338 / 400.0)));
  CHECK(r0.peak_live == 4);
  CHECK(r1.peak_live == 3);

  struct Expected {
    ActionKind kind;
    int from, to;
    int messages;  // in two iterations
    double sum;    // of the windows of one iteration
  };
  const Expected expected[] = {
      {send_forward, 0, 1, 8, (7 - 6) + (12 - 10) + (20 - 18) + (32 - 24)},
      {send_forward, 1, 0, 4, (14 - 12) + (20 - 17)},   // chunk 0 to chunk 1
      {send_backward, 0, 1, 4, (48 - 45) + (55 - 51)},  // chunk 1 to chunk 0
      {send_backward, 1, 0, 8, (39 - 32) + (45 - 44) + (56 - 55) + (65 - 62)},
  };
  REQUIRE(metrics.sends.size() == std::size(expected));
  for (std::size_t k = 0; k < metrics.sends.size(); ++k) {
    const SendWindow& send = metrics.sends[k];
    CAPTURE(k);
    CHECK(send.kind == expected[k].kind);
    CHECK(send.from == expected[k].from);
    CHECK(send.to == expected[k].to);
    CHECK(send.messages == expected[k].messages);
    CHECK(send.window_ns == near(2 * expected[k].sum / expected[k].messages * us));
    // All pairs divide by the last rank's iteration.
    CHECK(send.ratio == near(expected[k].sum / 200.0));
  }
}

TEST_CASE("dpp: the first iterations are left out, or not") {
  const PipelineRecord record = plan::read_trace(own_file).record;
  CHECK(measure(record).iterations == std::vector{0, 1, 2});
  CHECK(measure(record).ranks[0].compute_window_ns == near((400 + 40 + 40) / 24.0 * 1000));
  CHECK(measure(record, 2).iterations == std::vector{2});
  CHECK(measure(record, 2).iteration_ns == near(380'000));
  CHECK(contains(refusal(record, 3), "3 iterations are recorded, of which the first 3"));
  CHECK(contains(refusal(record, -1), "the first -1 are to be left out"));
}

TEST_CASE("dpp: metrics of MegatronApp's published traces, to the printed digits") {
  struct Send {
    int from, to;
    const char *window_ms, *ratio;
  };
  struct Published {
    const char *name, *iteration_ms;
    int first_peak, last_peak;
    std::array<const char*, 4> compute_ms, compute_ratio, reduce_ms, reduce_ratio;
    std::array<Send, 8> sends;
  };
  const Published published[] = {
      {"pp",
       "722.18",
       19,
       13,
       {"5.250", "5.028", "5.116", "8.389"},
       {"0.4654", "0.4457", "0.4535", "0.7435"},
       {"44.388", "51.932", "61.569", "69.526"},
       {"0.0583", "0.0691", "0.0828", "0.0940"},
       {{{0, 1, "10.590", "0.4692"},
         {1, 2, "13.063", "0.5789"},
         {2, 3, "15.484", "0.6861"},
         {3, 0, "5.291", "0.1758"},
         {0, 3, "10.644", "0.3538"},
         {1, 0, "10.970", "0.4861"},
         {2, 1, "2.944", "0.1304"},
         {3, 2, "2.763", "0.1224"}}}},
      {"dpp",
       "954.67",
       32,
       25,
       {"7.136", "6.338", "6.288", "10.423"},
       {"0.4783", "0.4245", "0.4207", "0.6983"},
       {"44.128", "54.286", "70.959", "99.253"},
       {"0.0438", "0.0548", "0.0727", "0.1026"},
       {{{0, 1, "10.495", "0.3468"},
         {1, 2, "8.096", "0.2687"},
         {2, 3, "39.627", "1.3260"},
         {3, 0, "19.113", "0.4660"},
         {0, 3, "57.263", "1.4372"},
         {1, 0, "5.523", "0.1850"},
         {2, 1, "7.795", "0.2541"},
         {3, 2, "22.711", "0.7425"}}}},
  };
  const char* const shared = std::getenv("MEGA_SHARED");
  for (const Published& expected : published) {
    const std::string path = std::string(shared == nullptr ? "" : shared) +
                             "/traces/megatronapp/data-1-pipeline-4-tensor-1-" + expected.name +
                             "-aggregated.json.gz";
    if (shared == nullptr || !std::ifstream(path).good()) {
      MESSAGE("skipped: MEGA_SHARED names no directory with ", path);
      continue;
    }
    CAPTURE(expected.name);
    const PipelineMetrics metrics = measure(plan::read_trace(path).record, 1);
    CHECK(metrics.iterations.front() == 1);
    CHECK(metrics.iterations.back() == 19);
    CHECK(printed(metrics.iteration_ns / 1e6, 2) == expected.iteration_ms);
    REQUIRE(metrics.ranks.size() == 4);
    CHECK(metrics.ranks[0].peak_live == expected.first_peak);
    CHECK(metrics.ranks[3].peak_live == expected.last_peak);
    for (std::size_t r = 0; r < 4; ++r) {
      CHECK(printed(metrics.ranks[r].compute_window_ns / 1e6, 3) == expected.compute_ms[r]);
      CHECK(printed(metrics.ranks[r].compute_ratio, 4) == expected.compute_ratio[r]);
      CHECK(printed(metrics.ranks[r].reduce_window_ns / 1e6, 3) == expected.reduce_ms[r]);
      CHECK(printed(metrics.ranks[r].reduce_ratio, 4) == expected.reduce_ratio[r]);
    }
    REQUIRE(metrics.sends.size() == expected.sends.size());
    for (std::size_t k = 0; k < metrics.sends.size(); ++k) {
      const SendWindow& send = metrics.sends[k];
      CHECK(send.kind == (k < 4 ? send_forward : send_backward));
      CHECK(send.from == expected.sends[k].from);
      CHECK(send.to == expected.sends[k].to);
      const bool wraps = std::abs(send.from - send.to) == 3;
      CHECK(send.messages == 19 * 8 * (wraps ? 3 : 4));
      CHECK(printed(send.window_ns / 1e6, 3) == expected.sends[k].window_ms);
      CHECK(printed(send.ratio, 4) == expected.sends[k].ratio);
    }
  }
}

TEST_CASE("dpp: a file of two runs is refused") {
  // One behind the other, each with its own beginning of time.
  json twice = own_events();
  for (const json& event : own_events()) twice.push_back(event);
  CHECK(contains(refusal(twice),
                 "t.json has in event 114 rank 1 going back in time, from 2400000 to "
                 "0 ns, in iteration 0: it holds more than one run"));
  // The same sorted by time.
  std::stable_sort(twice.begin(), twice.end(), [](const json& a, const json& b) {
    return a["ts"].get<double>() < b["ts"].get<double>();
  });
  CHECK(contains(refusal(twice),
                 "'iteration begin' of rank 1, iteration 0, before the iteration "
                 "before has ended"));
  // One behind the other in time too.
  twice = own_events();
  for (json event : own_events()) {
    event["ts"] = event["ts"].get<int>() + 5000;
    twice.push_back(event);
  }
  const PipelineRecord both = plan::parse_trace(twice.dump(), "t.json").record;
  CHECK(contains(refusal(both),
                 "rank 0 runs iteration 0 twice, from 10000 ns and from 5010000 ns: "
                 "more than one run is recorded"));

  const char* const shared = std::getenv("MEGA_SHARED");
  const std::string path =
      std::string(shared == nullptr ? "" : shared) + "/traces/megatronapp/merged_trace.json";
  if (shared == nullptr || !std::ifstream(path).good()) {
    MESSAGE("skipped: MEGA_SHARED names no directory with ", path);
    return;
  }
  CHECK(contains(refusal([&] { (void)plan::read_trace(path); }),
                 "event 524 rank 3 going back in time, from 970439000 to 0 ns"));
}

TEST_CASE("dpp: coverage counts messages side by side once, and never exceeds 1") {
  PipelineRecord record = small_record();
  // To rank 1, which computes 20..50: under way 5..25 and 15..40 together, then 45..60, 48..52
  // inside it, and 70..70. Union 35 + 15; covered 20..40 and 45..50.
  record.transfers = {
      {0, 1, 5, 15, 40}, {0, 1, 5, 5, 25}, {0, 1, 5, 48, 52}, {0, 1, 5, 45, 60}, {0, 1, 5, 70, 70}};
  PipelineMetrics metrics = measure(record);
  CHECK(metrics.ranks[1].incoming_ns.total == 50);
  CHECK(metrics.ranks[1].incoming_ns.covered == 25);
  CHECK(metrics.ranks[1].incoming_ns.exposed() == 25);
  CHECK(metrics.ranks[1].incoming_ns.coverage() == 0.5);
  CHECK(metrics.ranks[0].incoming_ns.total == 0);
  CHECK(metrics.ranks[0].incoming_ns.coverage() == 1);
  REQUIRE(metrics.transfer_ns.has_value());
  CHECK(metrics.transfer_ns->total == 50);

  // To rank 0, which computes 0..10 and 60..80: 50..90 twice. What covers a message is the
  // receiver's compute, not the sender's.
  record.transfers.push_back({1, 0, 5, 50, 90});
  record.transfers.push_back({1, 0, 5, 50, 90});
  metrics = measure(record);
  CHECK(metrics.ranks[0].incoming_ns.total == 40);
  CHECK(metrics.ranks[0].incoming_ns.covered == 20);
  CHECK(metrics.ranks[1].incoming_ns.total == 50);
  CHECK(metrics.transfer_ns->total == 90);
  CHECK(metrics.transfer_ns->covered == 45);

  // Wholly covered, and by a fused pair, whose halves take the same time.
  record = small_record();
  record.compute[3] = {1, 5, make_action(backward, 0, 0), 20, 30};
  record.transfers = {{0, 1, 5, 21, 29}, {0, 1, 5, 22, 30}};
  metrics = measure(record);
  CHECK(metrics.ranks[1].incoming_ns.total == 9);
  CHECK(metrics.ranks[1].incoming_ns.coverage() == 1);
  CHECK(metrics.ranks[1].compute_ratio == near(10 / 90.0));
  CHECK(metrics.ranks[1].compute_window_ns == 10);
}

TEST_CASE("dpp: transfers of skipped iterations count for nothing, and long times lose no digit") {
  PipelineRecord record = small_record();
  constexpr std::int64_t late = 3'999'999'999'000'000'000;
  for (const IterationRecord i : small_record().iterations) {
    record.iterations.push_back(
        {i.rank, 9, late + i.begin_ns, late + i.end_ns, late + i.reduce_ns.value()});
  }
  for (const ComputeRecord& c : small_record().compute)
    record.compute.push_back({c.rank, 9, c.action, late + c.start_ns, late + c.end_ns});
  record.transfers = {{0, 1, 5, 0, 20}};
  CHECK(measure(record, 1).transfer_ns->total == 0);
  CHECK(measure(record, 0).transfer_ns->total == 20);
  record.transfers.push_back({0, 1, 9, late + 17, late + 24});
  CHECK(measure(record, 1).transfer_ns->total == 7);
  CHECK(measure(record, 1).transfer_ns->covered == 4);
  CHECK(measure(record, 1).sends[0].window_ns == 10);
  CHECK(measure(record, 1).ranks[1].reduce_window_ns == 40);
}

TEST_CASE("dpp: what is not known is NaN, and the rest stands") {
  PipelineRecord record = small_record();
  CHECK(measure(record).sends[0].ratio == near(10 / 90.0));
  record.iterations[0].reduce_ns.reset();
  CHECK(is_unknown(measure(record).ranks[0].reduce_window_ns));
  CHECK(is_unknown(measure(record).ranks[0].reduce_ratio));
  CHECK(measure(record).ranks[1].reduce_window_ns == 40);
  // Clocks that disagree: the consumer starts before its input is made.
  record = small_record();
  record.compute[2].start_ns = 4;
  const PipelineMetrics metrics = measure(record);
  CHECK(metrics.sends[0].window_ns == -6);
  CHECK(is_unknown(metrics.sends[0].ratio));
  CHECK(metrics.sends[1].ratio == near(10 / 90.0));
}

TEST_CASE("dpp: a gradient window begins when the first chunk has its last weight gradient") {
  PipelineRecord record;
  record.p = 1;
  record.iterations = {{0, 0, 0, 100, {}}, {0, 1, 100, 300, {}}};
  const auto add = [&](int iteration, std::int64_t end, ActionKind kind, int chunk,
                       int microbatch) {
    record.compute.push_back({0, iteration, make_action(kind, chunk, microbatch), end - 5, end});
  };
  for (const int iteration : {0, 1}) {
    int end = 100 * iteration;
    for (const int microbatch : {0, 1})
      for (const int chunk : {0, 1}) add(iteration, end += 5, forward, chunk, microbatch);
    add(iteration, 100 * iteration + 30, backward_input, 1, 0);
    add(iteration, 100 * iteration + 40, backward, 1, 1);
    // Not complete before its postponed half.
    add(iteration, 100 * iteration + 60 + 20 * iteration, backward_weight, 1, 0);
    add(iteration, 100 * iteration + 87, backward, 0, 0);
    add(iteration, 100 * iteration + 95, backward, 0, 1);
  }
  const RankMetrics metrics = measure(record).ranks[0];
  CHECK(metrics.gradient_window_ns == near((40 + 120) / 2.0));
  CHECK(metrics.gradient_ratio == near(std::sqrt(0.4 * 0.6)));
  // One iteration that only runs forward.
  std::erase_if(record.compute,
                [](const auto& c) { return c.iteration == 0 && c.action.kind != forward; });
  CHECK(is_unknown(measure(record).ranks[0].gradient_window_ns));
  CHECK(is_unknown(measure(record).ranks[0].gradient_ratio));
  CHECK(measure(record, 1).ranks[0].gradient_window_ns == 120);
}

TEST_CASE("dpp: an activation lives until its weight gradient") {
  PipelineRecord record;
  record.p = 1;
  record.iterations = {{0, 0, 0, 100, {}}};
  // The forward of micro-batch 2 ends with the weight gradient of 0 still to come; that of
  // micro-batch 3 runs as a pair with the backward of 2, which holds its activation to the end.
  record.compute = {
      {0, 0, make_action(forward, 0, 0), 0, 1}, {0, 0, make_action(backward_input, 0, 0), 1, 2},
      {0, 0, make_action(forward, 0, 1), 2, 3}, {0, 0, make_action(backward, 0, 1), 3, 4},
      {0, 0, make_action(forward, 0, 2), 4, 5}, {0, 0, make_action(backward_weight, 0, 0), 5, 6}};
  CHECK(measure(record).ranks[0].peak_live == 2);
  record.compute[3] = {0, 0, make_action(backward, 0, 1), 6, 7};
  CHECK(measure(record).ranks[0].peak_live == 3);
  record.compute = {{0, 0, make_action(forward, 0, 2), 0, 1},
                    {0, 0, make_action(backward, 0, 2), 1, 3},
                    {0, 0, make_action(forward, 0, 3), 1, 3},
                    {0, 0, make_action(backward, 0, 3), 3, 4}};
  CHECK(measure(record).ranks[0].peak_live == 2);
}

TEST_CASE("dpp: a record that is not one whole run is refused") {
  CHECK(refusal(small_record()) == "accepted");
  const auto changed = [](const std::function<void(PipelineRecord&)>& change) {
    PipelineRecord record = small_record();
    change(record);
    return refusal(record);
  };
  CHECK(contains(refusal(PipelineRecord{}), "0 iterations are recorded"));
  CHECK(contains(changed([](auto& r) { r.iterations.pop_back(); }),
                 "rank 1 did not begin and end iteration 5"));
  CHECK(contains(changed([](auto& r) { r.iterations.erase(r.iterations.begin()); }),
                 "rank 0 did not begin and end iteration 5"));
  CHECK(contains(changed([](auto& r) { r.iterations.push_back(r.iterations[0]); }),
                 "rank 0 runs iteration 5 twice"));
  CHECK(contains(changed([](auto& r) { r.iterations[1].rank = 2; }), "rank 2 is recorded"));
  CHECK(contains(changed([](auto& r) { r.iterations[1].end_ns = -1; }), "from 0 to -1 ns"));
  CHECK(contains(changed([](auto& r) { r.iterations[0].reduce_ns = 101; }),
                 "rank 0 is ready to reduce at 101 ns, outside iteration 5"));
  CHECK(contains(changed([](auto& r) {
                   for (int rank : {0, 1}) r.iterations.push_back({rank, 6, 95, 200, {}});
                 }),
                 "iteration 6 of rank 0 lasts from 95 to 200 ns"));
  CHECK(contains(changed([](auto& r) {
                   for (int rank : {0, 1}) r.iterations.push_back({rank, 6, 100, 200, {}});
                 }),
                 "rank 0 computes nothing in iteration 6"));
  CHECK(contains(changed([](auto& r) { r.compute[0].iteration = 4; }), "in iteration 4"));
  CHECK(contains(changed([](auto& r) { r.compute[1].end_ns = 101; }), "outside iteration 5"));
  CHECK(contains(changed([](auto& r) { r.compute[3].start_ns = 29; }),
                 "rank 1 runs the backward of chunk 0, micro-batch 0 from 29 ns in iteration 5, "
                 "before its forward of chunk 0, micro-batch 0 ends at 30 ns"));
  // Where the clock cannot tell 2 ns, an overlap of 3 is one.
  CHECK(contains(changed([](auto& r) {
                   r.resolution_ns = 2;
                   r.compute[3].start_ns = 27;
                 }),
                 "from 27 ns in iteration 5, before its forward"));
  CHECK(contains(changed([](auto& r) { r.compute[0].action.kind = send_forward; }),
                 "no compute action"));
  CHECK(contains(changed([](auto& r) { r.compute[0].action.chunk = -1; }), "no compute action"));
  CHECK(contains(changed([](auto& r) { r.compute[1].action.kind = forward; }),
                 "rank 0 runs the forward of chunk 0, micro-batch 0 twice"));
  // The partner of a pass is missing: as consumer, as producer.
  CHECK(contains(changed([](auto& r) { r.compute[2].action.microbatch = 1; }),
                 "rank 0 runs the forward of chunk 0, micro-batch 0 in iteration 5, but rank 1"));
  CHECK(contains(changed([](auto& r) { r.compute.erase(r.compute.begin()); }),
                 "rank 1 runs the forward of chunk 0, micro-batch 0 in iteration 5, but rank 0"));
  CHECK(contains(changed([](auto& r) { r.transfers = {{0, 2, 5, 0, 1}}; }), "rank 2 is recorded"));
  CHECK(contains(changed([](auto& r) { r.transfers = {{0, 1, 6, 0, 1}}; }), "in iteration 6"));
  PipelineRecord branches = small_record();
  branches.hand_overs.push_back({0, 0, 1, 1});
  CHECK(contains(refusal([&] { (void)measure(branches); }, ErrorCode::logic),
                 "chunk 0 of rank 0 has more than one"));
}

TEST_CASE("dpp: metrics of timelines agree with the simulator, and so do their traces") {
  struct Case {
    const char* name;
    Schedule schedule;
    std::vector<HandOver> edges;
  };
  const Case cases[] = {
      {"gpipe, one rank", make_schedule(GPipe{}, 1, 3, 1), {}},
      {"1f1b", make_schedule(OneForwardOneBackward{}, 3, 5, 1), hand_overs(LoopPlacement{}, 3, 1)},
      {"bfc", make_schedule(ScheduleTraversal<BFC>{}, 4, 8, 2), hand_overs(LoopPlacement{}, 4, 2)},
      {"zb-v", make_schedule(ZeroBubbleV{}, 3, 7, 2), hand_overs(VPlacement{}, 3, 2)},
      {"dualpipev", make_schedule(DualPipeV{}, 2, 6, 2), hand_overs(VPlacement{}, 2, 2)},
  };
  for (const Case& c : cases) {
    CAPTURE(c.name);
    Cluster cluster;
    cluster.times = {
        ActionTimes{.forward = 1, .backward_input = 1.25, .backward_weight = 0.75, .hop = 0.25}};
    const ClusterRun run = simulate(c.schedule.view(), cluster);
    REQUIRE_FALSE(run.deadlocked());
    const PipelineRecord record = record_of(run.timeline, 1000);
    auto edges = c.edges;
    std::sort(edges.begin(), edges.end());
    CHECK(record.hand_overs == edges);
    const PipelineMetrics metrics = measure(record);
    CHECK(metrics.iteration_ns == near(run.timing.makespan * 1000));
    double idle_after = 0;
    for (std::size_t r = 0; r < metrics.ranks.size(); ++r) {
      CHECK(metrics.ranks[r].peak_live == run.timing.peak_per_rank[r]);
      idle_after += metrics.ranks[r].reduce_window_ns;
      CHECK(metrics.ranks[r].compute_ratio <= 1);
    }
    CHECK(idle_after >= 0);
    CHECK(metrics.transfer_ns.has_value() == (metrics.ranks.size() > 1));
    if (metrics.transfer_ns) {
      CHECK(metrics.transfer_ns->total == near(run.transfers.total * 1000));
      CHECK(metrics.transfer_ns->covered == near(run.transfers.covered * 1000));
      CHECK(metrics.transfer_ns->coverage() <= 1);
    }
    for (const SendWindow& send : metrics.sends) CHECK(send.window_ns >= 250);

    const plan::TraceFile trace =
        plan::parse_trace(to_trace_json(run.timeline, 1000), "timeline.json");
    CHECK(trace.format == "mega-plan");
    CHECK(trace.record.hand_overs == edges);
    check_same(measure(trace.record), metrics);
  }
}

TEST_CASE("dpp: a timeline of two ranks by hand") {
  Timeline timeline;
  timeline.ranks = {{{make_action(forward, 0, 0), 0, 2}, {make_action(backward, 0, 0), 7, 10}},
                    {{make_action(forward, 0, 0), 3, 4}, {make_action(backward, 0, 0), 4, 6}}};
  timeline.transfers = {
      {0, 1, make_action(send_forward, 0, 0), make_action(recv_forward, 0, 0), 2, 2.5},
      {1, 0, make_action(send_backward, 0, 0), make_action(recv_backward, 0, 0), 6, 7}};
  const PipelineMetrics metrics = measure(record_of(timeline));
  CHECK(metrics.iteration_ns == 10e6);
  CHECK(metrics.ranks[0].compute_ratio == near(0.5));
  CHECK(metrics.ranks[1].reduce_window_ns == 4e6);
  // The rank that ends the step leaves no time to reduce, and no mean of ratios.
  CHECK(metrics.ranks[0].reduce_window_ns == 0);
  CHECK(is_unknown(metrics.ranks[0].reduce_ratio));
  REQUIRE(metrics.sends.size() == 2);
  CHECK(metrics.sends[0].window_ns == 1e6);
  CHECK(metrics.sends[1].window_ns == 1e6);
  CHECK(metrics.transfer_ns->total == 1.5e6);
  CHECK(metrics.transfer_ns->covered == 0);

  timeline.ranks[0][1].end = std::numeric_limits<double>::quiet_NaN();
  CHECK(contains(refusal([&] { (void)record_of(timeline); }, ErrorCode::usage),
                 "no number of nanoseconds"));
  CHECK(contains(refusal(record_of(Timeline{})), "0 iterations are recorded"));
  timeline = {};
  timeline.ranks.resize(1);
  CHECK(contains(refusal(record_of(timeline)), "iteration 0 of rank 0 lasts from 0 to 0 ns"));
}

TEST_CASE("dpp: files that are no trace, or a damaged one, are refused") {
  const auto text_refusal = [](const std::string& text) {
    return refusal([&] { (void)plan::parse_trace(text, "t.json"); });
  };
  CHECK(contains(text_refusal(" \n"), "t.json is empty"));
  CHECK(contains(text_refusal("[{}"), "t.json is not JSON: byte 4"));
  CHECK(contains(text_refusal("3"), "t.json is no trace: it has no list of events"));
  CHECK(contains(text_refusal("{\"traceEvents\":7}"), "has no list of events"));
  CHECK(contains(text_refusal("[]"), "is no trace of a pipeline; valid are MegatronApp's"));
  CHECK(contains(text_refusal("[1,null,{\"name\":4,\"ph\":\"X\",\"cat\":\"kernel\"}]"),
                 "is no trace of a pipeline"));
  CHECK(contains(text_refusal("[{\"name\":\"iteration begin\"}]"), "event 0 no valid pid"));

  // Each change is to one event of a good file, which is found by its text.
  const auto changed = [](std::size_t i, const std::function<void(json&)>& change) {
    json events = own_events();
    change(events.at(i));
    return refusal(events);
  };
  const json events = own_events();
  REQUIRE(refusal(events) == "accepted");
  REQUIRE(events[0]["name"] == "iteration begin");
  std::size_t begin = 0, end = 0;
  while (events[begin]["name"] != "forward") ++begin;
  while (events[end]["ph"] != "E") ++end;
  CHECK(contains(changed(0, [](json& e) { e["ts"] = "soon"; }), "event 0 no number ts"));
  CHECK(contains(changed(0, [](json& e) { e["ts"] = 1e300; }), "event 0 ts 1e+300; valid are"));
  CHECK(contains(changed(0, [](json& e) { e["pid"] = 1LL << 40; }), "event 0 no valid pid"));
  CHECK(contains(changed(0, [](json& e) { e["pid"] = 1.5; }), "event 0 no valid pid"));
  CHECK(contains(changed(0, [](json& e) { e.erase("args"); }), "event 0 no args with a iteration"));
  CHECK(contains(changed(begin, [](json& e) { e["ph"] = "X"; }), "neither begins nor ends"));
  CHECK(contains(changed(begin, [](json& e) { e["ph"] = "E"; }), "which the rank has not begun"));
  CHECK(
      contains(changed(end, [](json& e) { e["ph"] = "B"; }), "before the action before has ended"));
  CHECK(contains(changed(end, [](json& e) { e["name"] = "backward"; }), "has not begun"));
  CHECK(contains(changed(end, [](json& e) { e["args"]["iteration"] = 1; }), "has not begun"));
  CHECK(contains(changed(end, [](json& e) { e["args"]["pp_rank"] = 1; }), "another pp_rank"));
  CHECK(contains(changed(end, [](json& e) { e["args"]["model_chunk"] = 40000; }),
                 "model_chunk 40000; valid are 0 to 32767"));
  CHECK(contains(changed(end, [](json& e) { e["args"]["model_chunk"] = 30000; }),
                 "has 48 actions, too few for 2 ranks with 30001 chunks each"));
  CHECK(
      contains(changed(end, [](json& e) { e["args"]["microbatch"] = -1; }), "no valid microbatch"));
  json cut = events;
  cut.erase(cut.end() - 1);
  CHECK(contains(refusal(cut), "ends while rank 1 is within an iteration"));
  // Other systems' events between ours do not disturb.
  json more = events;
  more.insert(more.begin(), json{{"name", "gc"}, {"ph", "B"}});
  CHECK(refusal(more) == "accepted");
  CHECK(refusal(json{{"traceEvents", events}}) == "accepted");
}

TEST_CASE("dpp: a damaged trace of a timeline is refused") {
  const Schedule schedule = make_schedule(OneForwardOneBackward{}, 2, 2, 1);
  Cluster cluster;
  cluster.times = {ActionTimes{.hop = 0.5}};
  const json good = json::parse(to_trace_json(simulate(schedule.view(), cluster).timeline));
  REQUIRE(refusal(good) == "accepted");
  const auto changed = [&](const char* phase, const char* name,
                           const std::function<void(json&)>& change) {
    json trace = good;
    for (json& event : trace["traceEvents"]) {
      if (event["ph"] != phase || !event["name"].get<std::string>().starts_with(name)) continue;
      change(event);
      return refusal(trace);
    }
    return std::string("no such event");
  };
  CHECK(contains(changed("X", "forward", [](json& e) { e["name"] = "sleep 0"; }),
                 "'sleep 0'; compute is forward,"));
  CHECK(contains(changed("X", "forward", [](json& e) { e["tid"] = 1 << 24; }),
                 "of fewer events than that"));
  CHECK(contains(changed("X", "activation", [](json& e) { e["tid"] = 9; }), "names no link"));
  CHECK(contains(changed("t", "message", [](json& e) { e["ts"] = 1; }),
                 "which passes through no transfer"));
  CHECK(contains(changed("f", "message", [](json& e) { e["ts"] = 1; }),
                 "an arrow to where no action uses its message"));
  CHECK(contains(changed("f", "message", [](json& e) { e["id"] = 99; }),
                 "an arrow that has not begun"));
  json moved = good;
  for (json& event : moved["traceEvents"]) {
    if (event["ph"] == "M" && event["args"].value("name", "") == "rank 0 to 1")
      event["args"]["name"] = "rank 0 to 7";
  }
  CHECK(contains(refusal(moved), "a transfer from rank 0 to 7; valid are 0 to 1"));
}

TEST_CASE("dpp: traces are read packed and plain, and damaged ones are refused") {
  const std::string text = plan::read_unpacked(own_file, 1 << 20);
  const std::string path = "metrics_test_" + std::to_string(std::rand()) + ".json.gz";
  gzFile out = gzopen(path.c_str(), "wb");
  REQUIRE(out != nullptr);
  REQUIRE(gzwrite(out, text.data(), static_cast<unsigned>(text.size())) ==
          static_cast<int>(text.size()));
  REQUIRE(gzclose(out) == Z_OK);
  CHECK(plan::read_unpacked(path, text.size()) == text);
  CHECK(contains(refusal([&] { (void)plan::read_unpacked(path, text.size() - 1); }),
                 "the most that is read"));
  std::string packed;
  {
    std::ifstream in(path, std::ios::binary);
    packed.assign(std::istreambuf_iterator<char>(in), {});
  }
  const auto damaged = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    return refusal([&] { (void)plan::read_unpacked(path, 1 << 20); });
  };
  CHECK(
      contains(damaged(packed.substr(0, packed.size() / 2)), "the packed data is damaged or cut"));
  packed[packed.size() / 2] = static_cast<char>(packed[packed.size() / 2] ^ 0x55);
  CHECK(contains(damaged(packed), "the packed data is damaged or cut"));
  std::remove(path.c_str());
  CHECK(contains(refusal([&] { (void)plan::read_trace(path); }), "cannot be opened"));
  CHECK(contains(refusal([] { (void)plan::read_trace("tests"); }), "cannot be read"));
}
