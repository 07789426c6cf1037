// Trains under layouts of several ranks on GPUs and compares with one rank. Who the ranks are, one
// a GPU or many on one, is the caller's.
#pragma once
#include "tests/grid/transformer_run.hpp"
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/cublas.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

namespace device_layouts {

template <class Spec, class Comm>
struct Plan : mega::DefaultPlan {
  using device = mega::Cuda;
  using communicator = Comm;
  using stage = mega::nn::Transformer<Spec, Comm, mega::nn::Kernels<mega::nn::CublasProduct>>;
};

template <class Stream, class T>
std::vector<T> fetch(Stream& stream, mega::Vector<T> values) {
  std::vector<T> out(static_cast<std::size_t>(values.size()));
  download(stream, mega::Vector<T>(out.data(), values.size()), mega::Vector<const T>(values));
  stream.synchronize();
  return out;
}

/// A batch whose micro-batch 3 cannot be read once it breaks.
struct Broken : grid::Text {
  using grid::Text::Text;
  bool breaks = false;
  [[nodiscard]] mega::Matrix<const std::int32_t> target(int mb) const {
    if (breaks && mb == 3)
      throw mega::Error(mega::ErrorCode::bad_input, "micro-batch 3 is unreadable");
    return grid::Text::target(mb);
  }
};

/// One rank of grid::run(), with the buffers in the memory of `device`.
template <class Spec, class Comm>
void train_rank(Comm& world, mega::Cuda device, const grid::Model& model,
                const grid::Layout& layout, grid::Outcome& outcome, std::mutex& mutex) {
  using ThePlan = Plan<Spec, Comm>;
  using Stage = typename ThePlan::stage;
  mega::nn::TransformerRun run{.micro_batch = model.micro_batch,
                               .sequence = model.sequence,
                               .sequence_parallel = layout.sequence_parallel,
                               .recompute = layout.recompute};
  run.loss_rows = model.sequence - 2;  // several pieces a micro-batch
  const int m = model.global_microbatches / layout.mesh.data;
  typename mega::Trainer<ThePlan>::options_type options;
  options.mesh = layout.mesh;
  options.chunks = layout.chunks;
  options.microbatches = m;
  options.shard_optimizer = layout.shard_optimizer;
  options.clip_norm = 0.5;
  options.seed = 11;
  mega::Trainer<ThePlan> trainer(
      world, options,
      [&](mega::StagePosition p, auto& groups) {
        return Stage(model.config, run, p,
                     mega::dpp::split_layers(model.config.layers, p.stages).of_stage(p.stage),
                     groups.tensor);
      },
      device);
  const auto& store = trainer.parameters();
  const auto& table = store.table();
  const int data = layout.mesh.coordinates(world.rank())[mega::Axis::data];
  const grid::Text text(model, m, data * m);
  for (int step = 0; step < model.steps; ++step) {
    const mega::StepResult r = trainer.step(text, 1e-3);
    if (world.rank() == 0) {
      outcome.losses.push_back(r.loss);
      outcome.norms.push_back(r.gradient_norm);
    }
    if (step > 0) continue;
    const auto gradients = fetch(trainer.compute(), store.gradients());
    const std::lock_guard lock(mutex);
    for (const auto& e : table.entries()) {
      if (!e.parameter.tied_to.empty()) continue;
      grid::gather(outcome.first_gradients, e, table,
                   store.owned()[static_cast<std::size_t>(e.chunk)].values,
                   [&](mega::Index i) { return gradients[static_cast<std::size_t>(i)]; });
    }
  }
  const auto values = fetch(trainer.compute(), store.values());
  const auto first = fetch(trainer.compute(), store.first_moments());
  const auto second = fetch(trainer.compute(), store.second_moments());
  const std::lock_guard lock(mutex);
  for (const auto& e : table.entries()) {
    if (e.alias) continue;
    const auto& own = store.owned()[static_cast<std::size_t>(e.chunk)];
    const auto moment = [&](mega::Index i) {
      return static_cast<std::size_t>(own.moments + i - own.values.begin);
    };
    grid::gather(outcome.values, e, table, {0, table.value_size()},
                 [&](mega::Index i) { return values[static_cast<std::size_t>(i)]; });
    grid::gather(outcome.first_moments, e, table, own.values,
                 [&](mega::Index i) { return first[moment(i)]; });
    grid::gather(outcome.second_moments, e, table, own.values,
                 [&](mega::Index i) { return second[moment(i)]; });
  }
}

/// A head that lives away from its embedding is compared with it, then counted once.
inline void join_ties(grid::Outcome& outcome, bool tied) {
  for (grid::Tensors* tensors :
       {&outcome.values, &outcome.first_moments, &outcome.second_moments}) {
    const auto head = tensors->find("head.weight");
    if (head == tensors->end() || !tied) continue;
    CHECK(head->second == tensors->at("embedding.token.weight"));
    tensors->erase(head);
  }
}

/// The run that all layouts are compared with.
template <class Spec>
grid::Outcome train_alone(const grid::Model& model) {
  grid::Outcome outcome;
  std::mutex mutex;
  mega::DeviceSelfComm world;
  train_rank<Spec>(world, mega::Cuda(), model, {}, outcome, mutex);
  join_ties(outcome, model.config.tied_head);
  return outcome;
}

/// Odd sizes, sequences longer than a tile of attention, grouped-query heads.
inline grid::Model large(bool gpt) {
  grid::Model m = gpt ? grid::gpt() : grid::llama();
  m.config.hidden = 96;
  m.config.heads = 6;
  m.config.kv_heads = gpt ? 6 : 2;
  m.config.head_dim = 16;
  m.config.ffn = 200;
  m.config.vocab = 1003;
  m.config.max_positions = 150;
  m.config.init_deviation = 0.02F;
  m.sequence = 133;
  m.global_microbatches = 4;
  return m;
}

inline double worst(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double out = 0;
  for (std::size_t i = 0; i < a.size(); ++i) out = std::max(out, std::abs(a[i] / b[i] - 1));
  return out;
}

/// @param every_value  also compare values and moments after the last step; on larger models some
///                     gradients are nothing but rounding, which AdamW turns into whole steps
/// @param train        train(model, layout) -> grid::Outcome
template <class Spec, class Train>
void compare(const char* what, const grid::Model& model, bool every_value,
             const std::vector<grid::Layout>& layouts, const Train& train) {
  const grid::Outcome one = train_alone<Spec>(model);
  REQUIRE(one.losses.size() == static_cast<std::size_t>(model.steps));
  REQUIRE(one.losses.back() < one.losses.front());
  REQUIRE_FALSE(one.first_gradients.empty());
  for (const grid::Layout& layout : layouts) {
    CAPTURE(layout.text());
    const grid::Outcome several = train(model, layout);
    double gradients = 0;
    std::string name;
    REQUIRE(several.first_gradients.size() == one.first_gradients.size());
    for (const auto& [tensor, expected] : one.first_gradients) {
      const double error =
          grid::relative(grid::without_key_bias(tensor, several.first_gradients.at(tensor)),
                         grid::without_key_bias(tensor, expected));
      CAPTURE(tensor);
      CHECK(error <= 1e-5);
      if (error > gradients) {
        gradients = error;
        name = tensor;
      }
    }
    const double losses = worst(several.losses, one.losses),
                 norms = worst(several.norms, one.norms);
    CHECK(losses <= 1e-5);
    CHECK(norms <= 1e-5);
    if (every_value) CHECK(grid::difference(several, one) == "");
    const bool again = train(model, layout) == several;
    CHECK(again);
    std::printf("%s %s: gradients %.1e (%s), losses %.1e, norms %.1e, again %s\n", what,
                layout.text().c_str(), gradients, name.c_str(), losses, norms,
                again ? "bit for bit" : "DIFFERENT");
    std::fflush(stdout);
  }
}

}  // namespace device_layouts
