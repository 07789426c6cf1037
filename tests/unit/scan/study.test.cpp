#include "../../support/hand_trace.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/study.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;

constexpr int ranks = 4, steps = 12;
constexpr Nanoseconds ms = 1'000'000;

/// Rank 2 computes twice as long, and transfers of ranks 0 and 1 take three times as long as those
/// of ranks 2 and 3.
/// @param scatter  random time between the steps, of each rank its own
/// @param silent  rank whose file holds launches and nothing of its device
Trace job(Nanoseconds scatter, bool one_clock, int silent = -1) {
  mega_test::HandTrace hand(ranks, ranks);
  const TableIndex left = hand.trace.intern_group("left", {0, 1});
  const TableIndex middle = hand.trace.intern_group("middle", {1, 2});
  const TableIndex right = hand.trace.intern_group("right", {2, 3});
  std::mt19937 random(3);
  std::vector<Nanoseconds> now(ranks, 0);
  for (int step = 0; step < steps; ++step) {
    for (int r = 0; r < ranks; ++r) {
      Nanoseconds& t = now[r];
      if (r == silent) {
        hand.launch(r, t, t + ms, step);
        continue;
      }
      if (scatter > 0) t += static_cast<Nanoseconds>(random()) % scatter;
      const Nanoseconds length = (r == 2 ? 4 : 2) * ms;
      for (int k = 0; k < 3; ++k, t += length + ms) hand.run(r, "gemm", t, t + length, step);
    }
    const Nanoseconds met = *std::max_element(now.begin(), now.end());
    for (int r = 0; r < ranks; ++r) {
      const Nanoseconds begin = scatter > 0 ? now[r] : met;
      for (const TableIndex group : {left, middle, right}) {
        const std::vector<std::int32_t>& of = hand.trace.groups[group].ranks;
        if (r == silent || (r != of[0] && r != of[1])) continue;
        const Nanoseconds at = begin + (group == left ? 0 : group == middle ? 4 : 6) * ms;
        const auto event = hand.call(r, CommunicationOp::all_reduce, "reduce", at,
                                     at + (group == left ? 3 : 1) * ms, step, step);
        hand.trace.communications[hand.trace.events[event].detail].group = group;
      }
      now[r] = begin + 8 * ms;
    }
  }
  for (Rank& rank : hand.trace.ranks)
    rank.clock = one_clock ? "one" : "of rank " + std::to_string(rank.rank);
  return std::move(hand.trace);
}

const Verdict* find(const Study& s, VerdictClass what) {
  for (const Verdict& v : s.diagnosis.verdicts) {
    if (v.what == what) return &v;
  }
  return nullptr;
}

TEST_CASE("scan: a study of one run says who waited and judges transfers") {
  for (const bool one_clock : {false, true}) {
    const Study s(job(0, one_clock));
    REQUIRE(s.alignment.aligned());
    CHECK(s.waits.operations.size() == 3 * steps);
    CHECK(s.what_if.has_value());
    REQUIRE(find(s, VerdictClass::slow_gpu) != nullptr);
    CHECK(find(s, VerdictClass::slow_gpu)->confidence > 0.9);
    CHECK(find(s, VerdictClass::slow_link) != nullptr);
  }
}

TEST_CASE("scan: what needs common time is left out where there is none") {
  for (const bool one_clock : {false, true}) {
    CAPTURE(one_clock);
    const Study s(job(300 * ms, one_clock));
    REQUIRE_FALSE(s.alignment.aligned());
    CHECK(s.alignment.mismatched);
    CHECK(s.alignment.refusal.find(one_clock ? "the ranks read one clock" : "scatter by") !=
          std::string::npos);
    CHECK(s.matches.instances.size() == 3 * steps);
    CHECK(s.waits.operations.empty());
    CHECK(s.waits.caused == std::vector<Nanoseconds>(ranks, 0));
    CHECK(s.delays.cost(2) == 0);
    CHECK_FALSE(s.what_if.has_value());
    CHECK(s.critical_path.by_rank.empty());
    REQUIRE(find(s, VerdictClass::slow_link) != nullptr);  // which durations say
    CHECK(find(s, VerdictClass::slow_link)->confidence == 0.5);
    REQUIRE(find(s, VerdictClass::slow_gpu) != nullptr);
    CHECK(find(s, VerdictClass::slow_gpu)->confidence == 0.5);
    CHECK(find(s, VerdictClass::slow_gpu)->path.empty());
    REQUIRE(s.diagnosis.notes.size() == 1);
    CHECK(s.diagnosis.notes[0] ==
          "operations of the ranks do not fit together in time, so no verdict is sure");
  }
}

TEST_CASE("scan: ranks of one clock have common time though others' clocks are unknown") {
  Trace t = job(0, true);
  for (const std::int32_t r : {2, 3}) t.ranks[r].clock = "another";
  // Nothing that both halves did together.
  for (std::size_t i = 0; i < t.communications.size(); ++i) {
    Communication& c = t.communications[i];
    if (t.groups[c.group].name == "middle")
      c.group = t.intern_group("alone", {t.rank(t.events[c.event])});
  }
  const Study s(std::move(t));
  CHECK_FALSE(s.alignment.aligned());
  CHECK_FALSE(s.alignment.mismatched);
  CHECK(s.waits.operations.size() == 2 * steps);
  CHECK(s.what_if.has_value());
}

TEST_CASE("scan: a rank without its device's part neither spoils the others nor is judged") {
  for (const int silent : {0, 3}) {
    CAPTURE(silent);
    const Study s(job(0, false, silent));
    CHECK(s.alignment.refusal == "");
    REQUIRE(s.alignment.notes.size() >= 1);
    CHECK(s.alignment.notes[0] == "rank " + std::to_string(silent) +
                                      " has no operation with others in its file, so its clock is "
                                      "left as it is");
    CHECK(s.waits.operations.size() == 2 * steps);
    CHECK(s.diagnosis.unjudged == std::vector<std::int32_t>{silent});
    REQUIRE(s.diagnosis.verdicts.size() >= 1);
    REQUIRE(find(s, VerdictClass::slow_gpu) != nullptr);
    CHECK(find(s, VerdictClass::slow_gpu)->ranks == std::vector<std::int32_t>{2});
    CHECK(find(s, VerdictClass::slow_gpu)->confidence > 0.9);
  }
}

TEST_CASE(
    "scan: no waiting is blamed where the one that came last may be a rank without a record") {
  // One step, in which all wait for rank 3, and rank 2 is the last of the others.
  const auto one_step = [](bool with_culprit) {
    mega_test::HandTrace hand(ranks, ranks);
    for (int r = 0; r < ranks; ++r) {
      const Nanoseconds begin = (r == 3 ? 60 : r == 2 ? 20 : 5) * ms;
      if (r == 3 && !with_culprit) {
        hand.launch(r, 0, ms);
        continue;
      }
      hand.run(r, "gemm" + std::to_string(r), 0, begin);
      hand.call(r, CommunicationOp::all_reduce, "reduce", begin, 61 * ms, 0);
    }
    return Study(std::move(hand.trace));
  };
  const Study whole = one_step(true), without = one_step(false);
  REQUIRE(whole.diagnosis.verdicts.size() == 1);
  CHECK(whole.diagnosis.verdicts[0].what == VerdictClass::ambiguous);
  CHECK(whole.diagnosis.verdicts[0].ranks == std::vector<std::int32_t>{3});
  CHECK(without.diagnosis.verdicts.empty());
  CHECK(without.diagnosis.unjudged == std::vector<std::int32_t>{3});
}

/// Kernels of 2 ms, each launched when its device has been ready for `late` ms.
void launch_late(mega_test::HandTrace& hand, int rank, int late, int slow_from) {
  Nanoseconds now = 0;
  for (int step = 0; step < steps; ++step) {
    for (int k = 0; k < 5; ++k) {
      now += late * ms;
      const TableIndex launch = hand.launch(rank, now - 10'000, now, step);
      const Nanoseconds length = (step >= slow_from ? 3 : 2) * ms;
      hand.trace.events[hand.run(rank, "gemm", now, now + length, step)].launch = launch;
      now += length;
    }
  }
}

TEST_CASE("scan: a rank without peers is compared with itself, and no verdict is sure") {
  mega_test::HandTrace late(1);
  launch_late(late, 0, 1, steps);
  const Study host(std::move(late.trace));
  REQUIRE(host.diagnosis.verdicts.size() == 1);
  const Verdict& v = host.diagnosis.verdicts[0];
  CHECK(v.what == VerdictClass::host_delay);
  CHECK(v.alone);
  CHECK(v.confidence == 0.5);
  CHECK(v.evidence[0].find("peers") == std::string::npos);
  CHECK(v.evidence[0].find("there is no other rank to say whether that is usual") !=
        std::string::npos);

  mega_test::HandTrace slow(1);
  launch_late(slow, 0, 0, 8);
  const Study gpu(std::move(slow.trace));
  REQUIRE(gpu.diagnosis.verdicts.size() == 1);
  const Verdict& w = gpu.diagnosis.verdicts[0];
  CHECK(w.what == VerdictClass::slow_gpu);
  CHECK(w.alone);
  CHECK(w.confidence == 0.5);
  CHECK(w.since_step == 8);
  CHECK(w.factor == doctest::Approx(1.5).epsilon(0.01));
  CHECK(w.evidence[0].find("as long as the same kernels in its other steps") != std::string::npos);
  CHECK(w.evidence.back() == "there is no other rank, so it may have got more work instead");

  mega_test::HandTrace pair(2, 2);
  launch_late(pair, 0, 1, steps);
  launch_late(pair, 1, 0, steps);
  const Study both(std::move(pair.trace));
  REQUIRE(both.diagnosis.verdicts.size() == 1);
  CHECK(both.diagnosis.verdicts[0].ranks == std::vector<std::int32_t>{0});
  CHECK_FALSE(both.diagnosis.verdicts[0].alone);
  CHECK(both.diagnosis.verdicts[0].confidence == 0.95);
}

}  // namespace
