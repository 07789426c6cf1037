// A pipeline order of your own: proven by the compiler, timed, and trained with.
#include "../common/gate.hpp"
#include <mega/dpp/proof.hpp>
#include <mega/mega.hpp>

#include <algorithm>
#include <cstdio>
#include <string_view>

using namespace mega::dpp;

/// 1F1B in which every rank runs `slack` forwards more before its first backward: messages may be
/// that much later before a rank waits for them, and it holds as many activations more.
struct SlackOneForwardOneBackward {
  static constexpr std::string_view name = "slack_1f1b";
  int slack = 1;

  static constexpr int length(int /*p*/, int m, int /*v*/) { return 2 * m; }

  constexpr int order(int rank, int p, int m, int v, ActionSpan out) const {
    mega::expects(v == 1 && slack >= 0, mega::ErrorCode::usage, [&] {
      return mega::sentence("1F1B with slack takes v 1 and a slack of at least 0, not v ", v,
                            " and slack ", slack);
    });
    ActionSink list(out);
    const int ahead = std::min(m, p - 1 - rank + slack);
    for (int i = 0; i < m + ahead; ++i) {
      if (i < m) list.put(ActionKind::forward, 0, i);
      if (i >= ahead) list.put(ActionKind::backward, 0, i - ahead);
    }
    return list.count();
  }
};

constexpr Schedule lowered(int slack, int p, int m) {
  return lower(make_schedule(SlackOneForwardOneBackward{slack}, p, m, 1));
}
static_assert(proven([] { return lowered(0, 4, 8); }));
static_assert(proven([] { return lowered(1, 4, 8); }));
static_assert(proven([] { return lowered(3, 3, 1); }));  // fewer micro-batches than ranks
static_assert(proven([] { return lowered(2, 1, 5); }));  // one rank
static_assert(verify(lowered(1, 4, 8)).peak(0) == 5);

struct Plan : mega::DefaultPlan {
  using stage = example::Gate;
  using communicator = mega::ThreadComm;
  using traversal = SlackOneForwardOneBackward;
};

int main() {
  constexpr int ranks = 4, microbatches = 8;
  for (const int slack : {0, 1, 2}) {
    const Schedule schedule = lowered(slack, ranks, microbatches);
    const Verdict verdict = verify(schedule);
    if (!verdict.ok()) {
      std::fprintf(stderr, "%s\n", describe(verdict).c_str());
      return 1;
    }
    const Timing timing =
        simulate(schedule, {.forward = 1, .backward_input = 1, .backward_weight = 1, .hop = 0.5});
    mega::run_threads(ranks, [&](mega::ThreadComm& world) {
      const mega::data::FunctionBatch batch(microbatches, example::samples, example::width,
                                            example::halve);
      mega::Trainer<Plan> trainer(
          world, {.mesh = {.pipeline = ranks}, .microbatches = microbatches, .traversal = {slack}},
          [](mega::StagePosition at) { return example::Gate(at); });
      mega::StepResult result;
      for (int step = 0; step < 10; ++step) result = trainer.step(batch, 0.05);
      if (world.rank() == 0)
        std::printf("slack %d: step %g, at most %d activations, loss %.17g\n", slack,
                    timing.makespan, verdict.peak(0), result.loss);
    });
  }
}
