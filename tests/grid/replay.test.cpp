// What is replayed gives the bits of what is queued call by call, and is queued by no call.
#include "../support/replaying_device.hpp"
#include "transformer_run.hpp"
#include <mega/comm/self.hpp>
#include <mega/core/replay.hpp>
#include <mega/dpp/zero_bubble.hpp>
#include <mega/host/host.hpp>
#include <mega/nn/gpt3.hpp>
#include <mega/nn/llama3.hpp>
#include <mega/train/trainer.hpp>

#include <doctest/doctest.h>

#include <map>
#include <string>
#include <vector>

namespace {

using mega::Index;
using mega::ReplayScope;
using mega_test::ReplayCounts;
using mega_test::ReplayingDevice;

struct Setup {
  mega::Mesh mesh{};
  int chunks = 1;
  int microbatches = 3;
  bool shard_optimizer = false;
  mega::nn::Recompute recompute = mega::nn::Recompute::none;
  int steps = 5;
  /// What happens in front of a step: called with the trainer and the number of the step.
  enum class Between {
    nothing,
    evaluate,
    other_samples,
    resume,
    rebind
  } between = Between::nothing;
};

/// Of rank 0: losses and norms, in turn with losses of evaluations, and all values.
struct Result {
  std::vector<double> figures;
  std::vector<float> values;
  int peak = 0;
  std::size_t kept = 0;
  friend bool operator==(const Result& a, const Result& b) {
    return a.figures == b.figures && a.values == b.values && a.peak == b.peak;
  }
};

/// The text, with samples that begin `shift` later in the global batch.
struct Shifted {
  const grid::Text& text;
  Index shift;
  [[nodiscard]] int microbatches() const { return text.microbatches(); }
  [[nodiscard]] auto input(int mb) const { return text.input(mb); }
  [[nodiscard]] auto target(int mb) const { return text.target(mb); }
  [[nodiscard]] Index first_sample(int mb) const { return text.first_sample(mb) + shift; }
  [[nodiscard]] std::int64_t valid_targets() const { return text.valid_targets(); }
};

template <class Spec, class Device, class Traversal>
struct Plan : grid::Plan<Spec, Device> {
  using traversal = Traversal;
};

template <class Spec, class Traversal = mega::dpp::ScheduleTraversal<mega::dpp::DFC>, class Device>
Result train(const Setup& setup, const std::vector<Device>& devices) {
  using ThePlan = Plan<Spec, Device, Traversal>;
  using Between = Setup::Between;
  grid::Model model = std::is_same_v<Spec, mega::nn::Gpt3> ? grid::gpt() : grid::llama();
  model.config.dropout = {0.3F, 0.2F, 0.25F};
  mega::nn::TransformerRun run{
      .micro_batch = model.micro_batch, .sequence = model.sequence, .recompute = setup.recompute};
  run.split_backward = !std::is_same_v<Traversal, mega::dpp::ScheduleTraversal<mega::dpp::DFC>>;
  run.loss_rows = 4;
  Result out;
  mega::comm::run_threads(setup.mesh.size(), [&](mega::comm::ThreadComm& world) {
    typename mega::Trainer<ThePlan>::options_type options;
    options.mesh = setup.mesh;
    options.chunks = setup.chunks;
    options.microbatches = setup.microbatches;
    options.shard_optimizer = setup.shard_optimizer;
    options.clip_norm = 0.5;
    options.seed = 11;
    const int rank = world.rank();
    mega::Trainer<ThePlan> trainer(
        world, options,
        [&](mega::StagePosition p, auto& groups) {
          return typename ThePlan::stage(
              model.config, run, p,
              mega::dpp::split_layers(model.config.layers, p.stages).of_stage(p.stage),
              groups.tensor);
        },
        devices[static_cast<std::size_t>(rank)]);
    const grid::Text text(model, setup.microbatches,
                          setup.mesh.coordinates(rank)[mega::Axis::data] * setup.microbatches);
    const auto keep = [&](const mega::StepResult& r) {
      if (rank != 0) return;
      out.figures.push_back(r.loss);
      out.figures.push_back(r.gradient_norm);
    };
    for (int step = 0; step < setup.steps; ++step) {
      const bool disturbs = step == 2;
      if (setup.between == Between::evaluate && step > 0) keep(trainer.evaluate(text));
      if (setup.between == Between::resume && disturbs) trainer.resume_at(Index{1} << 40);
      if (setup.between == Between::rebind && disturbs) trainer.forget_replays();
      const bool shifts = setup.between == Between::other_samples && step >= 3;
      keep(trainer.step(Shifted{text, shifts ? 64 : 0}, 1e-3 * (step + 1)));
    }
    if (rank != 0) return;
    const auto values = trainer.parameters().values();
    out.values.assign(values.data(), values.data() + values.size());
    out.peak = trainer.peak_microbatches();
    out.kept = trainer.replays();
  });
  return out;
}

struct Replayed {
  Result result;
  std::vector<ReplayCounts> counts;
};

template <class Spec, class... Traversal>
Replayed replay(const Setup& setup, ReplayScope scope) {
  std::vector<ReplayingDevice> devices;
  for (int rank = 0; rank < setup.mesh.size(); ++rank) devices.emplace_back(scope);
  Replayed out{train<Spec, Traversal...>(setup, devices), {}};
  for (const ReplayingDevice& device : devices) out.counts.push_back(device.counts());
  return out;
}
template <class Spec, class... Traversal>
Result reference(const Setup& setup) {
  return train<Spec, Traversal...>(
      setup, std::vector<mega::Host>(static_cast<std::size_t>(setup.mesh.size())));
}

}  // namespace

TEST_CASE("replay: a host without replays pays nothing for them") {
  static_assert(std::is_same_v<mega::replays_t<mega::Host>, mega::NoReplays>);
  static_assert(std::is_empty_v<mega::NoReplays>);
  static_assert(mega::replay_scope_of(mega::Host{}) == ReplayScope::none);
  static_assert(std::is_same_v<mega::replays_t<ReplayingDevice>, mega_test::RecordedReplays>);
  CHECK(mega::replay_scope_of(ReplayingDevice(ReplayScope::step)) == ReplayScope::step);
}

TEST_CASE("replay: a rank's calls of stages, and its whole step, with dropout") {
  for (const auto recompute : {mega::nn::Recompute::none, mega::nn::Recompute::full}) {
    Setup setup;
    setup.recompute = recompute;
    const Result gpt = reference<mega::nn::Gpt3>(setup);
    const Result llama = reference<mega::nn::Llama3>(setup);
    // Dropout draws other numbers in each step, or the test would show nothing.
    CHECK(gpt.figures[0] != gpt.figures[2]);
    for (const ReplayScope scope : {ReplayScope::none, ReplayScope::actions, ReplayScope::step}) {
      CAPTURE(static_cast<int>(scope));
      const Replayed run = replay<mega::nn::Gpt3>(setup, scope);
      CHECK(run.result == gpt);
      CHECK(replay<mega::nn::Llama3>(setup, scope).result == llama);
      // forward, loss and backward a micro-batch
      const int pieces = scope == ReplayScope::none   ? 0
                         : scope == ReplayScope::step ? 1
                                                      : 3 * setup.microbatches;
      CHECK(run.counts[0].direct == pieces);
      CHECK(run.counts[0].recorded == pieces);
      CHECK(run.counts[0].replayed == pieces * (setup.steps - 1));
      CHECK(run.result.kept == static_cast<std::size_t>(pieces));
    }
  }
}

TEST_CASE("replay: pipelines replay calls of stages, since channels are between them") {
  using ZeroBubble = mega::dpp::ZeroBubbleH1;
  Setup setup;
  setup.mesh.pipeline = 2;
  setup.microbatches = 4;
  for (const ReplayScope scope : {ReplayScope::actions, ReplayScope::step}) {
    CAPTURE(static_cast<int>(scope));
    setup.chunks = 2;
    const Replayed loop = replay<mega::nn::Gpt3>(setup, scope);
    CHECK(loop.result == reference<mega::nn::Gpt3>(setup));
    CHECK(loop.counts[0].direct == 2 * 2 * setup.microbatches);
    CHECK(loop.counts[1].direct == (2 * 2 + 1) * setup.microbatches);
    setup.chunks = 1;
    const Replayed split = replay<mega::nn::Llama3, ZeroBubble>(setup, scope);
    CHECK(split.result == reference<mega::nn::Llama3, ZeroBubble>(setup));
    CHECK(split.counts[0].recorded == 3 * setup.microbatches);
    CHECK(split.counts[0].replayed == 3 * setup.microbatches * (setup.steps - 1));
  }
}

TEST_CASE("replay: several chunks on one rank") {
  Setup setup;
  setup.chunks = 2;
  setup.microbatches = 4;
  const Replayed run = replay<mega::nn::Gpt3>(setup, ReplayScope::step);
  CHECK(run.result == reference<mega::nn::Gpt3>(setup));
  CHECK(run.counts[0].recorded == (2 * 2 + 1) * setup.microbatches);
}

TEST_CASE("replay: data-parallel ranks replay, tensor-parallel ones cannot") {
  Setup setup;
  setup.mesh.data = 2;
  setup.shard_optimizer = true;
  const Replayed data = replay<mega::nn::Llama3>(setup, ReplayScope::step);
  CHECK(data.result == reference<mega::nn::Llama3>(setup));
  CHECK(data.counts[1].recorded == 3 * setup.microbatches);
  setup.mesh = {.tensor = 2};
  setup.shard_optimizer = false;
  const Replayed tensor = replay<mega::nn::Llama3>(setup, ReplayScope::step);
  CHECK(tensor.result == reference<mega::nn::Llama3>(setup));
  CHECK(tensor.counts[0].direct + tensor.counts[0].replayed == 0);
}

TEST_CASE("replay: what happens between steps") {
  using Between = Setup::Between;
  const auto check = [](Between between, ReplayScope scope) {
    CAPTURE(static_cast<int>(between));
    CAPTURE(static_cast<int>(scope));
    Setup setup;
    setup.between = between;
    setup.steps = 7;
    const Replayed run = replay<mega::nn::Gpt3>(setup, scope);
    CHECK(run.result == reference<mega::nn::Gpt3>(setup));
    return run.counts[0];
  };
  for (const ReplayScope scope : {ReplayScope::actions, ReplayScope::step}) {
    const int pieces = scope == ReplayScope::step ? 1 : 9;
    // Evaluations have pieces of their own, and disturb none of training.
    const ReplayCounts evaluated = check(Between::evaluate, scope);
    CHECK(evaluated.recorded == (scope == ReplayScope::step ? 1 : 9 + 6));
    // Another step number needs nothing new: it stands in memory.
    CHECK(check(Between::resume, scope).direct == pieces);
    // Other places of samples, and other bindings, do: once direct, once recorded.
    CHECK(check(Between::other_samples, scope).direct == 2 * pieces);
    CHECK(check(Between::other_samples, scope).recorded == 2 * pieces);
    CHECK(check(Between::rebind, scope).direct == 2 * pieces);
  }
}
