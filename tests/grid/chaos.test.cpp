// Every schedule under random delays of streams and messages, in its static order and with
// look-ahead: no hang, the bits of an undisturbed run, and no more memory than promised.
// MEGA_CHAOS_SEEDS sets how many seeds each schedule runs; seeds take turns over meshes, look-ahead
// and kinds of delay.
#include "../support/chaos.hpp"

#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/look_ahead_dispatch.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/dpp/zero_bubble.hpp>
#include <mega/host/host.hpp>
#include <mega/host/host_async.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

using namespace mega_test;
using namespace mega::dpp;

namespace {

int seeds_a_schedule() {
  const char* const wanted = std::getenv("MEGA_CHAOS_SEEDS");
  return wanted == nullptr ? 16 : std::atoi(wanted);
}

/// What a run was, and how far it left the static order.
struct Chaos {
  RunOutcome outcome;
  int overtakings = 0;
  std::string fault;  ///< of memory or of the log
};

/// Compute actions that an earlier one of the static list comes after.
int overtakings(std::span<const Action> executed, std::span<const Action> list) {
  std::vector<Action> compute;
  for (const Action& a : list)
    if (is_compute(a.kind)) compute.push_back(a);
  if (compute.size() != executed.size()) return -1;
  int found = 0;
  std::ptrdiff_t furthest = -1;
  for (const Action& a : executed) {
    const auto at = std::find(compute.begin(), compute.end(), a) - compute.begin();
    if (at < furthest) ++found;
    furthest = std::max(furthest, at);
  }
  return found;
}

/// @param disturbance  0: late streams; 1: late messages on a device that blocks; 2: both
template <class Dispatch>
Chaos run_chaos(const RunSettings& s, const Schedule& schedule, std::uint64_t seed,
                int disturbance) {
  Chaos out;
  const Schedule lowered = lower(schedule);
  const Verdict verdict = verify(lowered);
  const auto check = [&](auto& trainer) {
    const int rank = s.mesh.coordinates(trainer.world().rank())[mega::Axis::pipeline];
    const int peak = trainer.peak_microbatches(), usual = verdict.peak(rank);
    if (peak > usual + Dispatch::ahead || (Dispatch::ahead == 0 && peak != usual))
      out.fault = mega::sentence("rank ", rank, " held ", peak, " activations, ", usual,
                                 " in the static order");
    if constexpr (Dispatch::ahead > 0) {
      const int n = overtakings(trainer.dispatcher().executed(), lowered.of_rank(rank));
      if (n < 0) out.fault = mega::sentence("rank ", rank, " executed another number of actions");
      out.overtakings += n;
    }
  };
  const auto stage = [&](mega::StagePosition at, mega::train::Groups<DelayedComm>& groups) {
    return MeetingStage<DelayedComm>(s.shape, at, groups.tensor);
  };
  const mega::comm::ThreadOptions threads{.deadline = mega::comm::Seconds(20)};
  const auto number = [&](int rank) { return 64 * seed + static_cast<std::uint64_t>(rank); };
  const auto delay_messages = [&](int rank) {
    delays_of_this_rank = {number(rank), disturbance == 0 ? 0 : 300};
  };
  if (disturbance == 1) {
    const auto device = [&](int rank) {
      delay_messages(rank);
      return mega::Host{};
    };
    out.outcome = run_plan<ChaosPlan<mega::Host, Dispatch>>(s, stage, device, given(schedule),
                                                            threads, check);
  } else {
    const auto device = [&](int rank) {
      delay_messages(rank);
      return mega::HostAsync(number(rank), 60);
    };
    out.outcome = run_plan<ChaosPlan<mega::HostAsync, Dispatch>>(s, stage, device, given(schedule),
                                                                 threads, check);
  }
  return out;
}

struct Layout {
  mega::Mesh mesh;
  [[nodiscard]] int microbatches() const { return 2 * mesh.pipeline; }
};
const std::vector<Layout> layouts{{{.pipeline = 8}},
                                  {{.tensor = 2, .pipeline = 4}},
                                  {{.data = 2, .pipeline = 4}},
                                  {{.tensor = 2, .data = 2, .pipeline = 2}}};

RunSettings settings(const mega::Mesh& mesh, int global_microbatches) {
  RunSettings s;
  s.shape = {.rows = 2, .width = 3, .layers = 16};
  s.mesh = mesh;
  s.global_microbatches = global_microbatches;
  s.steps = 2;
  return s;
}

/// One rank, or one a data rank: no pipeline, no delay. Pipelines and tensor ranks change no bit.
const RunOutcome& reference(const Layout& layout) {
  static std::map<std::pair<int, int>, RunOutcome> known;
  const int data = layout.mesh.data, global = layout.microbatches() * data;
  RunOutcome& outcome = known[{data, global}];
  if (outcome.losses.empty()) {
    const RunSettings s = settings({.data = data}, global);
    outcome =
        run_chaos<StaticDispatch>(s, make_schedule(GPipe{}, 1, global / data, 1), 0, 1).outcome;
  }
  return outcome;
}

/// @param make  make(p, m) -> the compute order
template <class Make>
void survives(int chunks, const Make& make) {
  int overtaken = 0;
  const int seeds = seeds_a_schedule();
  for (int seed = 0; seed < seeds; ++seed) {
    const Layout& layout = layouts[static_cast<std::size_t>(seed % 4)];
    RunSettings s = settings(layout.mesh, layout.microbatches() * layout.mesh.data);
    s.chunks = chunks;
    s.wait_each_step = seed % 3 != 0;
    const Schedule schedule = make(layout.mesh.pipeline, layout.microbatches());
    const auto number = static_cast<std::uint64_t>(seed) + 1;
    const int disturbance = (seed + seed / 4 + seed / 16) % 3;
    const auto run = [&] {
      switch (seed / 4 % 4) {
        case 0: return run_chaos<StaticDispatch>(s, schedule, number, disturbance);
        case 1: return run_chaos<LookAhead<1>>(s, schedule, number, disturbance);
        case 2: return run_chaos<LookAhead<2>>(s, schedule, number, disturbance);
        default: return run_chaos<LookAhead<4>>(s, schedule, number, disturbance);
      }
    };
    CAPTURE(seed);
    const Chaos chaos = run();
    CHECK(chaos.fault == "");
    RunOutcome expected = reference(layout);
    if (!s.wait_each_step) {
      expected.losses.erase(expected.losses.begin());
      expected.norms.erase(expected.norms.begin());
    }
    CHECK(chaos.outcome == expected);
    overtaken += chaos.overtakings;
  }
  // Else nothing but the static order was tested.
  if (seeds >= 16) CHECK(overtaken > 0);
}

template <class Policy>
void survives(int chunks, const Policy& policy) requires(traversal_policy<Policy>) {
  survives(chunks, [&](int p, int m) { return make_schedule(policy, p, m, chunks); });
}

}  // namespace

TEST_SUITE_BEGIN("full");
TEST_CASE("grid: chaos, gpipe") {
  survives(1, GPipe{});
}
TEST_CASE("grid: chaos, looped breadth first") {
  survives(2, GPipe{});
}
TEST_CASE("grid: chaos, 1f1b") {
  survives(1, OneForwardOneBackward{});
}
TEST_CASE("grid: chaos, bfc") {
  survives(2, ScheduleTraversal<BFC>{});
}
TEST_CASE("grid: chaos, dfc") {
  survives(3, ScheduleTraversal<DFC>{});
}
TEST_CASE("grid: chaos, group size between") {
  survives(2, [](int p, int m) {
    return make_schedule(ScheduleTraversal<GroupSize>{{p + p / 2}}, p, m, 2);
  });
}
TEST_CASE("grid: chaos, zero bubble h1") {
  survives(1, ZeroBubbleH1{});
}
TEST_CASE("grid: chaos, zero bubble h2") {
  survives(1, ZeroBubbleH2{});
}
TEST_CASE("grid: chaos, dfc with late weight gradients") {
  survives(2, SplitBackward<ScheduleTraversal<DFC>, WeightByRank<1>>{});
}
TEST_CASE("grid: chaos, zero bubble v") {
  survives(2, ZeroBubbleV{});
}
TEST_CASE("grid: chaos, v half") {
  survives(2, VHalf{});
}
TEST_CASE("grid: chaos, v min") {
  survives(2, VMin{});
}
TEST_CASE("grid: chaos, dual pipe v") {
  survives(2, DualPipeV{});
}
TEST_SUITE_END();
