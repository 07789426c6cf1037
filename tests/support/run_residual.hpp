/// @file  Trains ResidualStage under a layout and returns all that a step leaves behind, by name.
#pragma once
#include "residual_stage.hpp"
#include <mega/comm/thread.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/rng.hpp>
#include <mega/data/function_batch.hpp>
#include <mega/host/host.hpp>
#include <mega/train/trainer.hpp>

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mega_test {

struct RunSettings {
  ResidualShape shape{};
  mega::Mesh mesh{};
  int chunks = 1;
  int global_microbatches = 6;
  bool shard_optimizer = false;
  int steps = 3;
  double clip = 0.5;
  int ahead = 0;               ///< look-ahead, of plans whose dispatch takes it as a value
  bool wait_each_step = true;  ///< else all steps are queued at once and one result is read
};

/// Losses and norms of the steps; whole tensors by name after the last one.
struct RunOutcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> values, first_moments, second_moments;
  friend bool operator==(const RunOutcome&, const RunOutcome&) = default;
};

/// Smooth, deterministic training data.
inline std::pair<float, float> sample(Index i) {
  const float x = mega::RandomKey{.seed = 7, .use = mega::RandomUse::test}.uniform(i) - 0.5F;
  return {x, 0.3F - 0.7F * x};
}

template <bool Fused, class Device, class Traversal>
struct ResidualPlan : mega::DefaultPlan {
  using stage = ResidualStage<Fused>;
  using device = Device;
  using communicator = mega::comm::ThreadComm;
  using traversal = Traversal;
};

struct Nothing {
  void operator()(auto&&...) const noexcept {}
};

/// Trains the plan's stage on threads, one a rank.
/// @param make_stage   make_stage(StagePosition, Groups&) -> Plan::stage
/// @param make_device  make_device(rank) -> Plan::device
/// @param visit        visit(trainer) on every rank after each step, one rank at a time
/// @param prepare      prepare(trainer) on every rank before the first step
template <class Plan, class MakeStage, class MakeDevice, class Visit, class Prepare = Nothing>
RunOutcome run_plan(const RunSettings& s, const MakeStage& make_stage,
                    const MakeDevice& make_device, const typename Plan::traversal& traversal,
                    mega::comm::ThreadOptions threads, const Visit& visit,
                    const Prepare& prepare = {}) {
  RunOutcome outcome;
  std::mutex mutex;
  mega::comm::run_threads(
      s.mesh.size(),
      [&](mega::comm::ThreadComm& thread_world) {
        typename Plan::communicator world(std::move(thread_world));
        const mega::Coordinates at = s.mesh.coordinates(world.rank());
        const int m = s.global_microbatches / s.mesh.data;
        const mega::data::FunctionBatch batch(m, s.shape.rows, s.shape.width, sample,
                                              at[mega::Axis::data]);
        typename mega::Trainer<Plan>::options_type options;
        options.mesh = s.mesh;
        options.chunks = s.chunks;
        options.microbatches = m;
        options.traversal = traversal;
        options.shard_optimizer = s.shard_optimizer;
        options.clip_norm = s.clip;
        options.seed = 42;
        if constexpr (requires { options.dispatch.ahead = s.ahead; })
          options.dispatch.ahead = s.ahead;
        mega::Trainer<Plan> trainer(world, options, make_stage, make_device(world.rank()));
        prepare(trainer);
        for (int step = 0; step < s.steps; ++step) {
          trainer.queue_step(batch, 0.02);
          if (!s.wait_each_step && step + 1 < s.steps) continue;
          const mega::StepResult r = trainer.result();
          const std::lock_guard lock(mutex);
          visit(trainer);
          if (world.rank() == 0) {
            outcome.losses.push_back(r.loss);
            outcome.norms.push_back(r.gradient_norm);
          }
        }
        const auto& store = trainer.parameters();
        const std::lock_guard lock(mutex);
        for (const auto& e : store.table().entries()) {
          const auto v = store.values(e);
          std::vector<float> now(v.data(), v.data() + v.size());
          const auto [known, fresh] = outcome.values.emplace(e.parameter.name, now);
          if (!fresh && known->second != now)
            outcome.values[e.parameter.name + " differs on rank " + std::to_string(world.rank())] =
                now;
          if (e.alias) continue;
          const auto& own = store.owned()[static_cast<std::size_t>(e.chunk)];
          const auto part = own.values.intersect({e.value, e.value + e.size});
          auto& first = outcome.first_moments[e.parameter.name];
          auto& second = outcome.second_moments[e.parameter.name];
          first.resize(now.size());
          second.resize(now.size());
          for (Index i = part.begin; i < part.end; ++i) {
            const Index from = own.moments + i - own.values.begin;
            first[static_cast<std::size_t>(i - e.value)] = store.first_moments()(from);
            second[static_cast<std::size_t>(i - e.value)] = store.second_moments()(from);
          }
        }
      },
      threads);
  return outcome;
}

/// @param make_device  make_device(rank) -> Device
template <bool Fused = true, class Device = mega::Host,
          class Traversal = mega::dpp::ScheduleTraversal<mega::dpp::DFC>, class MakeDevice>
RunOutcome run_residual(const RunSettings& s, const MakeDevice& make_device,
                        Traversal traversal = {}, mega::comm::ThreadOptions threads = {}) {
  return run_plan<ResidualPlan<Fused, Device, Traversal>>(
      s, [&](mega::StagePosition p) { return ResidualStage<Fused>(s.shape, p); }, make_device,
      traversal, threads, Nothing{});
}

inline RunOutcome run_host(const RunSettings& s) {
  return run_residual(s, [](int) { return mega::Host{}; });
}

}  // namespace mega_test
