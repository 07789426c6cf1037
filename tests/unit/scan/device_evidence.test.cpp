#include <mega/scan/device_evidence.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

using namespace mega::scan;

namespace {

/// Ranks 0 to 3, each in a clock of its own, with a step and a sample every 100.
class Job {
 public:
  static constexpr int ranks = 4, steps = 10;

  Job() {
    for (int r = 0; r < ranks; ++r) {
      Rank rank;
      rank.rank = 10 + r;
      trace.ranks.push_back(rank);
      Lane lane;
      lane.rank = static_cast<TableIndex>(r);
      trace.lanes.push_back(lane);
      for (int step = 0; step < steps; ++step) {
        Event e;
        e.begin = start(r) + 100 * step;
        e.end = e.begin + 90;
        e.lane = static_cast<TableIndex>(r);
        e.step = step;
        trace.events.push_back(e);
      }
    }
  }
  /// Ranks' clocks are a year apart.
  static Nanoseconds start(int r) { return r * 31'536'000'000'000'000; }

  /// Samples of every rank in every step; change(rank, step, sample) has the last word.
  template <class Change>
  void sample(const Change& change) {
    for (int r = 0; r < ranks; ++r) {
      for (int step = 0; step < steps; ++step) {
        DeviceState s{.at = start(r) + 100 * step + 40,
                      .rank = static_cast<TableIndex>(r),
                      .sm_mhz = 1980 - 15 * (step % 2),
                      .temperature_c = 60 + r,
                      .busy_percent = 99,
                      .power_mw = 640'000};
        if (change(r, step, s)) trace.device_states.push_back(s);
      }
    }
  }

  Trace trace;
};

constexpr auto bit = [](ClockLimit l) { return static_cast<std::uint32_t>(l); };
const std::vector<TableIndex> all{0, 1, 2, 3};

}  // namespace

TEST_CASE("scan: a clock that heat keeps down is told beside the peers'") {
  Job job;
  job.sample([](int r, int step, DeviceState& s) {
    if (r == 2) {
      s.sm_mhz = 1200;
      s.temperature_c = 88;
      s.power_mw = 310'000;
      s.clock_limits = step == 0 ? 0 : bit(ClockLimit::hardware_heat);
    }
    return true;
  });
  CHECK(
      device_evidence(job.trace, 2, all) ==
      "its SM clock was 1200 MHz where its peers' was 1980 MHz, kept down by heat in 90 % of the "
      "samples; its temperature was 88 C where its peers' was 61 C; its power was 310 W where its "
      "peers' was 640 W");
  // Nothing of the kind is wrong with a peer, though one of its own peers is slow.
  CHECK(device_evidence(job.trace, 1, all) ==
        "its device was as its peers': SM clock 1980 MHz and 1980 MHz");
}

TEST_CASE("scan: a limit that all devices share is no evidence") {
  Job job;
  job.sample([](int r, int, DeviceState& s) {
    s.clock_limits = bit(ClockLimit::power_cap);
    if (r == 0) s.clock_limits |= bit(ClockLimit::setting);
    return true;
  });
  CHECK(device_evidence(job.trace, 3, all) ==
        "its device was as its peers': SM clock 1980 MHz and 1980 MHz");
  CHECK(device_evidence(job.trace, 0, all) ==
        "its SM clock was kept down by a setting in 100 % of the samples");
}

TEST_CASE("scan: only samples since the step count, in each rank's own clock") {
  Job job;
  job.sample([](int r, int step, DeviceState& s) {
    if (r == 1 && step >= 7) s.sm_mhz = 990;
    return true;
  });
  CHECK(device_evidence(job.trace, 1, all) ==
        "its device was as its peers': SM clock 1965 MHz and 1980 MHz");
  CHECK(device_evidence(job.trace, 1, all, 7) ==
        "its SM clock was 990 MHz where its peers' was 1965 MHz");
  CHECK(device_evidence(job.trace, 1, all, 5) ==
        "its SM clock was 990 MHz where its peers' was 1965 MHz");
  // Too few, and none.
  CHECK(device_evidence(job.trace, 1, all, 8).empty());
  CHECK(device_evidence(job.trace, 1, all, 50).empty());
}

TEST_CASE("scan: a device that waits for its host is told by its load") {
  Job job;
  job.sample([](int r, int, DeviceState& s) {
    if (r == 3) s.busy_percent = 55;
    return true;
  });
  CHECK(device_evidence(job.trace, 3, all) ==
        "its share of time with kernels was 55 % where its peers' was 99 %");
}

TEST_CASE("scan: devices that say nothing are no evidence") {
  const Job silent;
  CHECK(device_evidence(silent.trace, 0, all).empty());
  Job one;
  one.sample([](int r, int, DeviceState&) { return r == 0; });
  CHECK(device_evidence(one.trace, 0, all).empty());
  CHECK(device_evidence(one.trace, 1, all).empty());
  Job lonely;
  lonely.sample([](int, int, DeviceState&) { return true; });
  CHECK(device_evidence(lonely.trace, 0, {}).empty());
  const std::vector<TableIndex> itself{0};
  CHECK(device_evidence(lonely.trace, 0, itself).empty());
  Job clockless;
  clockless.sample([](int, int, DeviceState& s) {
    s.sm_mhz = -1;
    return true;
  });
  CHECK(device_evidence(clockless.trace, 0, all).empty());
}
