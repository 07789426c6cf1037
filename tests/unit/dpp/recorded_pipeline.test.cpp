/// @file  Tests of how a trainer's own recording becomes the record whose windows are measured.
#include "tools/mega-plan/recorded_pipeline.hpp"

#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/metrics.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <string_view>

using namespace mega;
using namespace mega::dpp;

namespace {

/// Two ranks of a pipeline on one clock, a chunk each, built span by span in microseconds.
struct Recording {
  scan::Trace trace;
  std::int64_t sent[2] = {0, 0}, received[2] = {0, 0};

  explicit Recording(int ranks = 2) {
    for (int r = 0; r < ranks; ++r) add_rank(r, 0, r);
  }
  void add_rank(int global, int data, int stage) {
    scan::Rank rank;
    rank.rank = global;
    rank.data = data;
    rank.pipeline = stage;
    rank.tensor = 0;
    rank.clock = "one";
    trace.ranks.push_back(rank);
    trace.lanes.push_back(
        {static_cast<scan::TableIndex>(trace.ranks.size() - 1), 0, 0, scan::LaneKind::device, ""});
  }
  scan::TableIndex span(std::size_t rank, std::string_view name, scan::EventKind kind, int begin,
                        int end, int microbatch = -1, int step = 4) {
    scan::Event e;
    e.begin = begin * 1000;
    e.end = end * 1000;
    e.name = trace.names.intern(name);
    e.lane = static_cast<scan::TableIndex>(rank);
    e.step = step;
    e.microbatch = microbatch;
    e.chunk = static_cast<std::int16_t>(microbatch < 0 ? -1 : 0);
    e.kind = kind;
    return static_cast<scan::TableIndex>(trace.events.push_back(e));
  }
  void message(std::size_t from, std::size_t to, const char* group, int microbatch, int send_begin,
               int send_end, int recv_begin, int recv_end) {
    scan::Communication c;
    c.group = trace.intern_group(group, {0, 1});
    c.bytes = 64;
    c.sequence = sent[from]++;
    c.op = scan::CommunicationOp::send;
    c.peer = static_cast<std::int32_t>(to);
    trace.attach(
        span(from, "send", scan::EventKind::communication, send_begin, send_end, microbatch), c);
    c.op = scan::CommunicationOp::recv;
    c.peer = static_cast<std::int32_t>(from);
    trace.attach(span(to, "recv", scan::EventKind::communication, recv_begin, recv_end, microbatch),
                 c);
  }
};

/// One micro-batch: forward on rank 0 and 1, loss, backward on 1 and 0.
Recording one_microbatch() {
  using enum scan::EventKind;
  Recording r;
  r.span(0, "step", iteration, 0, 100);
  r.span(1, "step", iteration, 0, 100);
  r.span(0, "forward", forward, 0, 10, 0);
  r.span(0, "product", compute, 1, 9, 0);
  r.message(0, 1, "down", 0, 10, 14, 5, 16);
  r.span(1, "forward", forward, 20, 30, 0);
  r.span(1, "loss", loss, 30, 34, 0);
  r.span(1, "backward", backward, 36, 56, 0);
  r.message(1, 0, "up", 0, 57, 60, 65, 66);
  r.span(0, "backward", backward, 70, 90, 0);
  return r;
}

}  // namespace

TEST_CASE("dpp: a recording of two ranks becomes windows, transfers and hand-overs") {
  const Recording r = one_microbatch();
  const PipelineRecord record = plan::recorded_pipeline(r.trace);
  CHECK(record.p == 2);
  CHECK(record.compute.size() == 4);
  REQUIRE(record.hand_overs.size() == 1);
  CHECK(record.hand_overs[0] == HandOver{0, 0, 1, 0});
  REQUIRE(record.transfers.size() == 2);

  const PipelineMetrics m = measure(record);
  CHECK(m.iterations == std::vector<int>{4});
  REQUIRE(m.sends.size() == 2);
  CHECK(m.sends[0].window_ns == 10'000);  // 10 to 20 us
  CHECK(m.sends[1].window_ns == 14'000);  // 56 to 70
  CHECK(m.sends[0].ratio == doctest::Approx(0.10));
  CHECK(m.ranks[1].compute_ratio == doctest::Approx((14 + 20) / 100.0));  // the loss is forward
  CHECK(m.ranks[0].reduce_window_ns == 10'000);
  CHECK(m.ranks[1].reduce_window_ns == 44'000);
  CHECK(m.ranks[1].gradient_window_ns == 44'000);
  // The receiver that waits has it from 10 to 16; one that comes late, from when it was sent.
  CHECK(m.ranks[1].incoming_ns.total == 6'000);
  CHECK(m.ranks[0].incoming_ns.total == 3'000);
  CHECK(m.transfer_ns->covered == 0);
}

TEST_CASE("dpp: a loss behind another forward counts to its backward") {
  using enum scan::EventKind;
  for (const bool late : {false, true}) {
    Recording r(1);
    r.span(0, "step", iteration, 0, 100);
    r.span(0, "forward", forward, 0, 10, 0);
    if (late) r.span(0, "forward", forward, 10, 25, 1);
    r.span(0, "loss", loss, late ? 25 : 10, late ? 29 : 14, 0);
    r.span(0, "backward", backward, 30, 50, 0);
    const PipelineRecord record = plan::recorded_pipeline(r.trace);
    REQUIRE(record.compute.size() == (late ? 3U : 2U));
    CHECK(record.compute.front().end_ns == (late ? 10'000 : 14'000));
    CHECK(record.compute.back().start_ns == (late ? 25'000 : 30'000));
    CHECK(measure(record).ranks[0].compute_ratio == doctest::Approx(late ? 0.5 : 0.34));
  }
}

TEST_CASE("dpp: a recording may begin within a step, and hold other pipelines") {
  Recording r = one_microbatch();
  r.span(1, "backward", scan::EventKind::backward, -30, -10, 0, 3);  // step 3 has no iteration
  r.span(1, "step", scan::EventKind::iteration, 100, 200, -1, 5);    // step 5 of one rank only
  r.add_rank(2, 1, 0);
  r.add_rank(3, 1, 1);
  r.span(2, "step", scan::EventKind::iteration, 0, 300);
  const PipelineRecord record = plan::recorded_pipeline(r.trace);
  CHECK(record.p == 2);
  CHECK(record.compute.size() == 4);
  CHECK(record.iterations.size() == 2);
  CHECK(measure(record).iteration_ns == 100'000);
}

TEST_CASE("dpp: a recording without a pipeline, or of a part of one, is refused") {
  scan::Trace none;
  CHECK(mega_test::refusal_of([&] { (void)plan::recorded_pipeline(none); }, ErrorCode::bad_input)
            .find("no rank of the trace says") != std::string::npos);

  Recording twice;
  twice.add_rank(2, 0, 1);
  CHECK(mega_test::refusal_of([&] { (void)plan::recorded_pipeline(twice.trace); },
                              ErrorCode::bad_input)
            .find("2 traces are of pipeline rank 1 of 2") != std::string::npos);

  Recording half(1);
  scan::Communication c;
  c.group = half.trace.intern_group("down", {0, 1});
  c.op = scan::CommunicationOp::send;
  c.peer = 1;
  c.sequence = 0;
  half.trace.attach(half.span(0, "send", scan::EventKind::communication, 10, 14, 0), c);
  CHECK(mega_test::refusal_of([&] { (void)plan::recorded_pipeline(half.trace); },
                              ErrorCode::bad_input)
            .find("rank 0 exchanges messages with rank 1") != std::string::npos);
}
