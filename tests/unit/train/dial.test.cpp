// The dial in the trainer: orders change between steps, results do not.
#include "../../support/residual_stage.hpp"
#include "../../support/run_residual.hpp"
#include <mega/dpp/adaptive.hpp>
#include <mega/dpp/look_ahead_dispatch.hpp>
#include <mega/train/dial.hpp>
#include <mega/train/stall_meter.hpp>

#include <doctest/doctest.h>

#include <mutex>
#include <vector>

namespace {

using namespace mega_test;
using mega::dpp::AdaptiveTraversal;
using mega::dpp::DFC;
using mega::dpp::DialMove;
using mega::dpp::DialReason;
using mega::dpp::ScheduleTraversal;
using mega::dpp::StepMeasurement;

constexpr int steps = 14;

struct AdaptivePlan : ResidualPlan<true, mega::Host, AdaptiveTraversal> {
  using hooks = mega::Hooks<mega::train::StallMeter>;
  using dispatch = mega::dpp::BoundedLookAhead;
};

struct AdaptiveOutcome {
  std::vector<double> losses, norms;
  std::vector<std::size_t> lengths_of_log;  // of every rank
  std::vector<DialMove> log;
  std::vector<double> waited;  // of every rank, over all steps
  /// Under look-ahead, of every step: whether rank 0 began with seven forwards of its first chunk,
  /// which it does in groups of 8; in groups of 4 it has four, and two may run ahead.
  std::vector<bool> begins_wide;
};

/// pp 4, v 2, m 8, `exposed` seconds of waiting claimed in steps of 1 s.
/// @param begin_at  group size that an earlier run has left; 0: none
AdaptiveOutcome run_adaptive(const AdaptiveTraversal& traversal, double exposed, int ahead = 0,
                             int begin_at = 0) {
  AdaptiveOutcome out;
  out.lengths_of_log.resize(4);
  out.waited.resize(4);
  std::mutex mutex;
  mega::comm::run_threads(4, [&](mega::comm::ThreadComm& world) {
    mega::Trainer<AdaptivePlan>::options_type options;
    options.mesh = {.pipeline = 4};
    options.chunks = 2;
    options.microbatches = 8;
    options.traversal = traversal;
    options.dispatch.ahead = ahead;
    options.clip_norm = 0.5;
    options.seed = 42;
    const ResidualShape shape{.layers = 8};
    const mega::data::FunctionBatch batch(8, shape.rows, shape.width, sample, 0);
    mega::Trainer<AdaptivePlan> trainer(world, options, [&](mega::StagePosition at, auto&) {
      return ResidualStage<true>(shape, at);
    });
    mega::Host device;
    mega::train::Dial<mega::Host, mega::comm::ThreadComm> dial(device, world, traversal);
    if (begin_at > 0) dial.begin_at(trainer, begin_at);
    double waited = 0;
    for (int step = 0; step < steps; ++step) {
      const mega::StepResult r = trainer.step(batch, 0.02);
      waited += trainer.hooks().recorder.take_seconds();
      if (ahead > 0 && world.rank() == 0) {
        bool wide = true;
        for (const auto& action : trainer.dispatcher().executed().first(7))
          wide &= action.kind == mega::dpp::ActionKind::forward && action.chunk == 0;
        out.begins_wide.push_back(wide);
      }
      // Only one rank saw the waiting: all must act on it.
      const double mine = world.rank() == 2 ? exposed : 0.0;
      dial.turn(trainer, {1.0, mine, 0.1});
      if (world.rank() != 0) continue;
      out.losses.push_back(r.loss);
      out.norms.push_back(r.gradient_norm);
    }
    const std::lock_guard lock(mutex);
    out.lengths_of_log[static_cast<std::size_t>(world.rank())] = dial.log().size();
    out.waited[static_cast<std::size_t>(world.rank())] = waited;
    if (world.rank() == 3) out.log = dial.log();
  });
  return out;
}

RunOutcome run_static() {
  RunSettings s;
  s.shape.layers = 8;
  s.mesh = {.pipeline = 4};
  s.chunks = 2;
  s.global_microbatches = 8;
  s.steps = steps;
  using Plan = ResidualPlan<true, mega::Host, ScheduleTraversal<DFC>>;
  return run_plan<Plan>(
      s, [&](mega::StagePosition at, auto&) { return ResidualStage<true>(s.shape, at); },
      [](int) { return mega::Host(); }, {}, {}, [](auto&) {});
}

TEST_CASE("train: an order that changes between steps changes no bit") {
  const RunOutcome expected = run_static();
  const AdaptiveOutcome moved = run_adaptive(AdaptiveTraversal{}, 0.2);
  CHECK(moved.losses == expected.losses);
  CHECK(moved.norms == expected.norms);
  // Up to BFC, and back since the claimed waiting stayed.
  REQUIRE(moved.log.size() == 2);
  CHECK(moved.log[0].reason == DialReason::links);
  CHECK(moved.log[0].from == 4);
  CHECK(moved.log[0].to == 8);
  CHECK(moved.log[0].step == 3);
  CHECK(moved.log[1].reason == DialReason::no_gain);
  CHECK(moved.log[1].to == 4);
  CHECK(moved.lengths_of_log == std::vector<std::size_t>{2, 2, 2, 2});

  const AdaptiveOutcome again = run_adaptive(AdaptiveTraversal::replay(moved.log), 0.0);
  CHECK(again.log == moved.log);
  CHECK(again.losses == expected.losses);
}

TEST_CASE("train: the dial turns under look-ahead too") {
  const AdaptiveOutcome moved = run_adaptive(AdaptiveTraversal{}, 0.2, 2);
  CHECK(moved.losses == run_static().losses);
  REQUIRE(moved.log.size() == 2);
  CHECK(moved.log[0].to == 8);
  CHECK(moved.log[1].to == 4);
  for (int step = 0; step < steps; ++step) {
    CAPTURE(step);
    CHECK(moved.begins_wide[static_cast<std::size_t>(step)] ==
          (moved.log[0].step < step && step <= moved.log[1].step));
  }
}

TEST_CASE("train: the dial goes on from where an earlier run has left it") {
  const AdaptiveOutcome wide = run_adaptive(AdaptiveTraversal{}, 0.0, 2, 8);
  CHECK(wide.losses == run_static().losses);
  CHECK(wide.log.empty());
  CHECK(wide.begins_wide == std::vector<bool>(static_cast<std::size_t>(steps), true));
}

TEST_CASE("train: without exposed transfers the order stays DFC") {
  const AdaptiveOutcome calm = run_adaptive(AdaptiveTraversal{}, 0.0);
  CHECK(calm.log.empty());
  CHECK(calm.losses == run_static().losses);
  for (const double waited : calm.waited) {
    CHECK(waited > 0);  // ranks do wait for each other
    CHECK(waited < 60);
  }
}

}  // namespace
