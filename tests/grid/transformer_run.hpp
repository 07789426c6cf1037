/// @file  Trains a small Transformer under a layout and gathers whole tensors by name, whichever
/// ranks hold their pieces.
#pragma once
#include <mega/comm/thread.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/host/host.hpp>
#include <mega/nn/transformer.hpp>
#include <mega/train/trainer.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace grid {

using mega::Index;
using mega::Matrix;

struct Layout {
  mega::Mesh mesh{};
  int chunks = 1;
  bool sequence_parallel = false;
  bool shard_optimizer = false;
  mega::nn::Recompute recompute = mega::nn::Recompute::none;

  [[nodiscard]] std::string text() const {
    return to_string(mesh) + mega::sentence(" vpp", chunks, sequence_parallel ? " sp" : "",
                                            shard_optimizer ? " zero1" : "", " recompute ",
                                            to_string(recompute));
  }
};

struct Model {
  mega::nn::TransformerConfig config{};
  Index micro_batch = 2;
  Index sequence = 6;
  int global_microbatches = 12;
  int steps = 3;
};

/// Tokens and targets by global sample; every fifth target does not count, and one sample has none.
class Text {
 public:
  Text(const Model& model, int microbatches, int first_microbatch)
      : microbatches_(microbatches),
        b_(model.micro_batch),
        t_(model.sequence),
        first_(first_microbatch * model.micro_batch) {
    const mega::RandomKey random{.seed = 5, .use = mega::RandomUse::test};
    for (Index i = first_ * t_; i < (first_ + microbatches * b_) * t_; ++i) {
      const auto token = [&](Index at) {
        return static_cast<std::int32_t>(random.bits(at) %
                                         static_cast<std::uint32_t>(model.config.vocab));
      };
      tokens_.push_back(token(i));
      targets_.push_back(i % 5 == 3 || i / t_ == 2 ? -1 : token(i + 1));
      valid_ += targets_.back() >= 0 ? 1 : 0;
    }
  }
  [[nodiscard]] int microbatches() const { return microbatches_; }
  [[nodiscard]] Matrix<const std::int32_t> input(int mb) const {
    return {tokens_.data() + mb * b_ * t_, b_, t_};
  }
  [[nodiscard]] Matrix<const std::int32_t> target(int mb) const {
    return {targets_.data() + mb * b_ * t_, b_, t_};
  }
  [[nodiscard]] Index first_sample(int mb) const { return first_ + mb * b_; }
  [[nodiscard]] std::int64_t valid_targets() const { return valid_; }

 private:
  int microbatches_;
  Index b_, t_, first_;
  std::vector<std::int32_t> tokens_, targets_;
  std::int64_t valid_ = 0;
};

using Tensors = std::map<std::string, std::vector<float>>;

struct Outcome {
  std::vector<double> losses, norms;
  Tensors first_gradients, values, first_moments, second_moments;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

template <class Spec, class Device>
struct Plan : mega::DefaultPlan {
  using device = Device;
  using communicator = mega::comm::ThreadComm;
  using stage = mega::nn::Transformer<Spec, communicator>;
};

/// Adds this rank's part of a tensor to the whole one.
/// @param at  element(i) -> the value of local element i of the flat buffer, range -> which exist
template <class Element>
void gather(Tensors& out, const mega::train::TableEntry& e,
            const mega::train::ParameterTable& table, mega::train::Range exist,
            const Element& element) {
  std::vector<float>& whole = out[e.parameter.name];
  whole.resize(static_cast<std::size_t>(e.parameter.size()), 0.0F);
  for (const mega::ShardRun& run :
       mega::shard_runs(e.parameter, table.position().tensor, table.position().tensor_degree)) {
    for (Index i = 0; i < run.count; ++i) {
      const Index flat = e.value + run.local + i;
      if (flat >= exist.begin && flat < exist.end)
        whole[static_cast<std::size_t>(run.global + i)] = element(flat);
    }
  }
}

template <class ThePlan, class MakeDevice>
Outcome run(const Model& model, const Layout& layout, const MakeDevice& make_device) {
  using Stage = typename ThePlan::stage;
  mega::expects(model.global_microbatches % layout.mesh.data == 0, mega::ErrorCode::usage, [&] {
    return mega::sentence(model.global_microbatches, " micro-batches do not divide over dp ",
                          layout.mesh.data);
  });
  mega::nn::TransformerRun run{.micro_batch = model.micro_batch,
                               .sequence = model.sequence,
                               .sequence_parallel = layout.sequence_parallel,
                               .recompute = layout.recompute};
  run.loss_rows = 4;  // several pieces a micro-batch
  const int m = model.global_microbatches / layout.mesh.data;
  Outcome outcome;
  std::mutex mutex;
  mega::comm::run_threads(layout.mesh.size(), [&](mega::comm::ThreadComm& base) {
    typename ThePlan::communicator world(std::move(base));
    const mega::Coordinates at = layout.mesh.coordinates(world.rank());
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
        make_device(world.rank()));
    const auto& store = trainer.parameters();
    const auto& table = store.table();
    const Text text(model, m, at[mega::Axis::data] * m);
    for (int step = 0; step < model.steps; ++step) {
      const mega::StepResult r = trainer.step(text, 1e-3);
      if (world.rank() == 0) {
        outcome.losses.push_back(r.loss);
        outcome.norms.push_back(r.gradient_norm);
      }
      if (step > 0) continue;
      const std::lock_guard lock(mutex);
      for (const auto& e : table.entries()) {
        if (!e.parameter.tied_to.empty()) continue;
        gather(outcome.first_gradients, e, table,
               store.owned()[static_cast<std::size_t>(e.chunk)].values,
               [&](Index i) { return store.gradients()(i); });
      }
    }
    const std::lock_guard lock(mutex);
    for (const auto& e : table.entries()) {
      if (e.alias) continue;
      const auto& own = store.owned()[static_cast<std::size_t>(e.chunk)];
      gather(outcome.values, e, table, {0, table.value_size()},
             [&](Index i) { return store.values()(i); });
      gather(outcome.first_moments, e, table, own.values,
             [&](Index i) { return store.first_moments()(own.moments + i - own.values.begin); });
      gather(outcome.second_moments, e, table, own.values,
             [&](Index i) { return store.second_moments()(own.moments + i - own.values.begin); });
    }
  });
  // A head that lives away from its embedding is compared with it, then counted once.
  for (Tensors* tensors : {&outcome.values, &outcome.first_moments, &outcome.second_moments}) {
    const auto head = tensors->find("head.weight");
    if (head == tensors->end() || !model.config.tied_head) continue;
    if (head->second != tensors->at("embedding.token.weight"))
      outcome.losses.push_back(-1);  // never equal to a reference
    tensors->erase(head);
  }
  return outcome;
}

template <class Spec>
Outcome run_host(const Model& model, const Layout& layout) {
  return run<Plan<Spec, mega::Host>>(model, layout, [](int) { return mega::Host{}; });
}

/// |a - b| / |b|, Euclidean; +infinity where the sizes differ.
inline double relative(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

/// GPT's key bias shifts all scores of a query alike, so its gradient is zero but for rounding, and
/// AdamW turns rounding into steps of the learning rate. Takes it out of a fused bias.
inline std::vector<float> without_key_bias(const std::string& name, std::vector<float> values) {
  if (name.find("attention.qkv.bias") == std::string::npos) return values;
  const auto third = static_cast<std::ptrdiff_t>(values.size() / 3);  // q, k and v are equally wide
  values.erase(values.begin() + third, values.begin() + 2 * third);
  return values;
}

/// The first difference that is larger than rounding allows, in words; empty when there is none.
inline std::string difference(const Outcome& got, const Outcome& reference) {
  if (got.losses.size() != reference.losses.size())
    return "tied copies or the number of steps differ";
  for (std::size_t i = 0; i < got.losses.size(); ++i) {
    if (!(std::abs(got.losses[i] - reference.losses[i]) <= 1e-5 * reference.losses[i]))
      return "loss of step " + std::to_string(i);
    if (!(std::abs(got.norms[i] - reference.norms[i]) <= 1e-5 * reference.norms[i]))
      return "norm of step " + std::to_string(i);
  }
  const auto compare = [](const char* what, const Tensors& a, const Tensors& b,
                          double bar) -> std::string {
    if (a.size() != b.size()) return std::string(what) + ": other tensors";
    for (const auto& [name, values] : b) {
      const auto found = a.find(name);
      if (found == a.end()) return std::string(what) + " lacks " + name;
      const double error =
          relative(without_key_bias(name, found->second), without_key_bias(name, values));
      if (!(error <= bar))
        return std::string(what) + " of " + name + " by " + std::to_string(error * 1e6) + "e-6";
    }
    return "";
  };
  std::string out = compare("gradient", got.first_gradients, reference.first_gradients, 1e-5);
  if (out.empty()) out = compare("values", got.values, reference.values, 1e-5);
  if (out.empty()) out = compare("first moment", got.first_moments, reference.first_moments, 1e-4);
  if (out.empty())
    out = compare("second moment", got.second_moments, reference.second_moments, 1e-4);
  return out;
}

inline Model gpt(bool tied = true) {
  Model m;
  m.config.layers = 4;
  m.config.hidden = 16;
  m.config.heads = m.config.kv_heads = 4;
  m.config.head_dim = 4;
  m.config.ffn = 24;
  m.config.vocab = 29;  // odd: padded for every tp
  m.config.max_positions = 8;
  m.config.tied_head = tied;
  m.config.init_deviation = 0.2F;
  return m;
}

inline Model llama(bool tied = false) {
  Model m = gpt(tied);
  m.config.heads = 8;
  m.config.head_dim = 2;
  return m;
}

}  // namespace grid
