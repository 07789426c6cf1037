// Training in fp16 on the host, under layouts: what overflows, what is skipped, what is saved.
#include "../../support/temporary_directory.hpp"
#include <mega/ckpt/sharded_checkpoint.hpp>
#include <mega/comm/thread.hpp>
#include <mega/core/float16.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/stage.hpp>
#include <mega/core/view.hpp>
#include <mega/data/function_batch.hpp>
#include <mega/host/host.hpp>
#include <mega/train/trainer.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using mega::Float16;
using mega::Index;
using mega::LossScale;
using mega::Matrix;
using mega::StepResult;

constexpr Index rows = 4, cols = 6;

/// y = x * w + b, a column a weight, all in fp16.
struct HalfStage {
  using value_type = Float16;
  using input_type = Matrix<const float>;
  using target_type = Matrix<const float>;
  using edge_type = Matrix<Float16>;
  struct saved_type {
    Matrix<float> x;
    Matrix<float> dy;
  };

  mega::StagePosition at;
  std::vector<mega::ParameterView<Float16>> weights = {};

  [[nodiscard]] std::array<Index, 2> input_extents() const { return {rows, cols}; }
  [[nodiscard]] std::array<Index, 2> target_extents() const { return {rows, cols}; }
  [[nodiscard]] std::array<Index, 2> edge_extents() const { return {rows, cols}; }
  [[nodiscard]] std::size_t workspace_bytes() const { return 0; }
  [[nodiscard]] saved_type make_saved(mega::Arena& arena) const {
    return {arena.take<float>(rows, cols), arena.take<float>(rows, cols)};
  }
  [[nodiscard]] std::vector<mega::Parameter> parameters() const {
    const std::string name = "layer." + std::to_string(at.stage);
    return {{.name = name + ".weight", .shape = {cols}, .init = {mega::Init::Kind::normal, 0.5F}},
            {.name = name + ".bias", .shape = {cols}, .decay = false}};
  }
  void bind(std::span<const mega::ParameterView<Float16>> views) {
    weights.assign(views.begin(), views.end());
  }

  template <class In>
  void forward(auto& ctx, Matrix<const In> in, edge_type out, saved_type& saved) {
    ctx.stream.run([=, x = saved.x, w = weights[0].value, b = weights[1].value] {
      for (Index i = 0; i < in.size(); ++i) {
        x.data()[i] = in.data()[i];
        out.data()[i] = Float16(x.data()[i] * w(i % cols) + b(i % cols));
      }
    });
  }
  void backward_input(auto& ctx, Matrix<const Float16> dout, edge_type din, saved_type& saved) {
    ctx.stream.run([=, dy = saved.dy, w = weights[0].value] {
      for (Index i = 0; i < dout.size(); ++i) {
        dy.data()[i] = dout.data()[i];
        if (!din.empty()) din.data()[i] = Float16(dout.data()[i] * w(i % cols));
      }
    });
  }
  void backward_weight(auto& ctx, saved_type& saved) {
    ctx.stream.run(
        [=, x = saved.x, dy = saved.dy, w = weights[0].gradient, b = weights[1].gradient] {
          for (Index i = 0; i < x.size(); ++i) {
            w(i % cols) += x.data()[i] * dy.data()[i];
            b(i % cols) += dy.data()[i];
          }
        });
  }
  void loss(auto& ctx, edge_type out, Matrix<const float> target) {
    ctx.stream.run([=, sum = ctx.loss_sum, scale = ctx.loss_scale, train = ctx.training()] {
      for (Index i = 0; i < out.size(); ++i) {
        const float error = out.data()[i] - target.data()[i];
        *sum += 0.5 * static_cast<double>(error) * error;
        if (train) out.data()[i] = Float16(error * *scale);
      }
    });
  }
};

struct HalfPlan : mega::DefaultPlan {
  using stage = HalfStage;
  using communicator = mega::comm::ThreadComm;
};
using Trainer = mega::Trainer<HalfPlan>;

struct Settings {
  mega::Mesh mesh{};
  bool shard_optimizer = false;
  float initial = 65536;
  int steps = 0;
};

struct Outcome {
  std::vector<StepResult> results;
  std::vector<std::vector<std::uint16_t>> values;  ///< of each pipeline rank after each step
  LossScale scale;
};

mega::TrainerOptions<> options_of(const Settings& s) {
  mega::TrainerOptions<> options;
  options.mesh = s.mesh;
  options.microbatches = 4 / s.mesh.data;
  options.shard_optimizer = s.shard_optimizer;
  options.seed = 3;
  options.loss_scaling.initial = s.initial;
  options.loss_scaling.growth_interval = 100;
  return options;
}

mega::data::FunctionBatch batch_of(const Settings& s, int rank) {
  const auto sample = [](Index i) -> std::pair<float, float> {
    const float x = mega::RandomKey{.seed = 7, .use = mega::RandomUse::test}.uniform(i) - 0.5F;
    return {x, 0.3F - 0.7F * x};
  };
  return {4 / s.mesh.data, rows, cols, sample, s.mesh.coordinates(rank)[mega::Axis::data]};
}

std::vector<std::uint16_t> bits_of(Trainer& trainer) {
  std::vector<std::uint16_t> out;
  for (const Float16& value : trainer.parameters().values().span()) out.push_back(value.bits);
  return out;
}

/// run(trainer, batch) on every rank.
template <class Run>
void on_ranks(const Settings& s, const Run& run) {
  mega::comm::run_threads(s.mesh.size(), [&](mega::comm::ThreadComm& world) {
    Trainer trainer(world, options_of(s), [](mega::StagePosition at) { return HalfStage{at}; });
    run(trainer, batch_of(s, world.rank()));
  });
}

Outcome train(const Settings& s) {
  Outcome out;
  std::mutex mutex;
  on_ranks(s, [&](Trainer& trainer, const mega::data::FunctionBatch& batch) {
    for (int step = 0; step < s.steps; ++step) {
      const StepResult result = trainer.step(batch, 0.05);
      const std::lock_guard lock(mutex);
      if (trainer.world().rank() != 0) continue;
      out.results.push_back(result);
      out.values.push_back(bits_of(trainer));
    }
    const LossScale scale = trainer.loss_scale();
    const std::lock_guard lock(mutex);
    if (trainer.world().rank() == 0) out.scale = scale;
    CHECK(trainer.loss_scale() == scale);
  });
  return out;
}

}  // namespace

static_assert(Trainer::scales_loss);
static_assert(mega::ckpt::holds_a_loss_scale<Trainer>);

TEST_CASE("fp16 trainer: an overflow skips, halves the scale, and changes nothing else") {
  for (const Settings layout :
       {Settings{}, Settings{.mesh = {.pipeline = 2}}, Settings{.mesh = {.data = 2}},
        Settings{.mesh = {.data = 2, .pipeline = 2}, .shard_optimizer = true}}) {
    CAPTURE(to_string(layout.mesh));
    Settings high = layout;
    high.initial = 0x1p26F;
    high.steps = 20;
    const Outcome bumpy = train(high);
    std::size_t skipped = 0;
    while (skipped < bumpy.results.size() && bumpy.results[skipped].skipped) ++skipped;
    REQUIRE(skipped >= 2);
    REQUIRE(skipped < 15);

    // The same run as if it had begun with the scale that the skips led to.
    Settings low = layout;
    low.initial = high.initial / static_cast<float>(1 << skipped);
    low.steps = high.steps - static_cast<int>(skipped);
    const Outcome smooth = train(low);
    for (std::size_t i = 0; i < skipped; ++i) {
      CHECK(bumpy.results[i].loss == smooth.results[0].loss);
      CHECK(bumpy.results[i].loss_scale == high.initial / static_cast<float>(1 << i));
      CHECK(bumpy.values[i] == bumpy.values[0]);
    }
    CHECK(bumpy.values[skipped] != bumpy.values[0]);
    for (std::size_t i = 0; i < smooth.results.size(); ++i) {
      CHECK_FALSE(smooth.results[i].skipped);
      CHECK(bumpy.results[skipped + i].loss == smooth.results[i].loss);
      CHECK(bumpy.results[skipped + i].gradient_norm == smooth.results[i].gradient_norm);
      CHECK(bumpy.values[skipped + i] == smooth.values[i]);
    }
    CHECK(bumpy.scale == LossScale{low.initial, low.steps, static_cast<std::int64_t>(skipped)});
    CHECK(smooth.results.back().loss < 0.7 * smooth.results.front().loss);
  }
}

TEST_CASE("fp16 trainer: loss and norm do not depend on the scale, small gradients do") {
  const Outcome one = train({.initial = 1, .steps = 1});
  const Outcome many = train({.initial = 1024, .steps = 1});
  CHECK(one.results[0].loss == many.results[0].loss);
  // Within fp16's rounding of each gradient, 2^-11.
  CHECK(one.results[0].gradient_norm ==
        doctest::Approx(many.results[0].gradient_norm).epsilon(1e-3));
  CHECK(one.results[0].loss_scale == 1.0);
  CHECK(many.results[0].loss_scale == 1024.0);
  // 2^-22 of the loss is below what fp16 has; without scaling up nothing is left to learn from.
  const Outcome tiny = train({.initial = 0x1p-22F, .steps = 1});
  CHECK(tiny.results[0].loss == one.results[0].loss);
  CHECK(tiny.results[0].gradient_norm == 0.0);
}

TEST_CASE("fp16 trainer: an evaluation says what it says without a scale") {
  on_ranks({.initial = 512}, [](Trainer& trainer, const mega::data::FunctionBatch& batch) {
    const StepResult trained = trainer.step(batch, 0.0);
    const StepResult evaluated = trainer.evaluate(batch);
    CHECK(evaluated.loss == trained.loss);
    CHECK(evaluated.loss_scale == 1.0);
    CHECK(trainer.loss_scale() == LossScale{512, 1, 0});
  });
}

TEST_CASE("fp16 trainer: a checkpoint carries the scale, an older one gives the initial scale") {
  const mega::tests::TemporaryDirectory directory;
  const Settings s{.mesh = {.data = 2}, .initial = 0x1p26F};
  LossScale expected;
  std::vector<std::uint16_t> values;
  on_ranks(s, [&](Trainer& trainer, const mega::data::FunctionBatch& batch) {
    for (int step = 0; step < 12; ++step) (void)trainer.step(batch, 0.05);
    mega::ckpt::save_checkpoint(trainer, directory / "new", {}, 0);
    const LossScale scale = trainer.loss_scale();
    (void)trainer.step(batch, 0.05);
    if (trainer.world().rank() == 0) {
      expected = scale;
      values = bits_of(trainer);
    }
  });
  CHECK(expected.skipped_steps > 0);
  CHECK(expected.good_steps > 0);
  on_ranks({.initial = 8}, [&](Trainer& trainer, const mega::data::FunctionBatch& batch) {
    const auto loaded = mega::ckpt::load_latest_checkpoint(trainer, directory / "new");
    CHECK(loaded.state.loss_scale == expected);
    CHECK(trainer.loss_scale() == expected);
    // The next step is the one that the first run took: its moments' bias correction, too.
    (void)trainer.step(batch, 0.05);
    CHECK(bits_of(trainer) == values);

    // What is written without a loss scale, as before there was one.
    const mega::Mesh mesh;
    mega::Host device;
    mega::ckpt::TrainingState state;
    state.steps_done = 99;
    const mega::ckpt::ShardedStore sharded{trainer.parameters(), mesh, trainer.world(), device,
                                           trainer.compute()};
    mega::ckpt::save_checkpoint(sharded, directory / "old", state, 0);
    const auto old = mega::ckpt::load_latest_checkpoint(trainer, directory / "old");
    CHECK_FALSE(old.state.loss_scale.has_value());
    CHECK(trainer.loss_scale() == LossScale{.scale = 8});
    CHECK(trainer.steps_done() == 99);
  });
}
