/// @file  A whole Transformer in a test: its chunks one after the other, without a trainer.
#pragma once
#include <mega/comm/thread.hpp>
#include <mega/core/arena.hpp>
#include <mega/core/context.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/stage.hpp>
#include <mega/core/view.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/nn/transformer.hpp>
#include <mega/train/initial_values.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace test {

using mega::Index;
using Tensors = std::map<std::string, std::vector<float>>;

/// Norm of the difference over the norm of `expected`. NaN counts as infinite.
inline double relative(const std::vector<float>& got, const std::vector<float>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double d = static_cast<double>(got.at(i)) - static_cast<double>(expected[i]);
    difference += d * d;
    norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  const double out = std::sqrt(difference / norm);
  return std::isnan(out) ? INFINITY : out;
}

/// Hooks that tests switch on; empty functions do nothing.
struct Probe {
  std::function<void(std::string_view, mega::Matrix<const float>)> seen;
  template <class S>
  void observe(S&, std::string_view name, mega::Matrix<const float> values) noexcept {
    if (seen) seen(name, values);
  }
};
struct Injector {
  std::string target;  ///< tensors of this name get their first element raised by 0.5
  template <class S>
  void disturb(S& stream, std::string_view name, mega::Matrix<float> values) noexcept {
    if (name == target) stream.run([values] { values(0, 0) += 0.5F; });
  }
};
using TestHooks = mega::Hooks<mega::NullRecorder, Probe, Injector>;

/// Tokens and targets of consecutive samples of a fixed random text; every fifth target is ignored.
struct Text {
  std::vector<std::int32_t> tokens, targets;
  Index valid = 0;

  Text(Index samples, Index sequence, Index vocab) {
    const mega::RandomKey random{.seed = 5, .use = mega::RandomUse::test};
    for (Index i = 0; i < samples * sequence; ++i) {
      const auto draw = [&](Index at) {
        return static_cast<std::int32_t>(random.bits(at) % static_cast<std::uint32_t>(vocab));
      };
      tokens.push_back(draw(2 * i));
      targets.push_back(i % 5 == 3 ? -1 : draw(2 * i + 1));
      valid += targets.back() >= 0 ? 1 : 0;
    }
  }
};

/// One tensor rank's share of the model. Values come from the parameter's name, `spread` times the
/// declared deviation, so that no gradient is small; biases and norms get random values too.
template <class Spec, class Stream = mega::host::Stream>
class Model {
 public:
  using Stage = mega::nn::Transformer<Spec, mega::ThreadComm>;
  using Ctx = mega::Context<Stream, TestHooks>;

  Model(const mega::nn::TransformerConfig& config, const mega::nn::TransformerRun& run,
        mega::ThreadComm& tensor, std::vector<int> layers_of_stage, Stream stream = Stream{})
      : run_(run), tensor_(tensor), stream_(std::move(stream)) {
    const auto count = static_cast<int>(layers_of_stage.size());
    const mega::dpp::LayerSplit split(config.layers, layers_of_stage);
    for (int s = 0; s < count; ++s)
      stages_.emplace_back(config, run, mega::StagePosition{s, count}, split.of_stage(s), tensor);
    for (Stage& stage : stages_) bind(stage);
    for (Stage& stage : stages_) {
      mega::Arena counting;
      (void)stage.make_saved(counting);
      saved_memory_.emplace_back(counting.used());
      mega::Arena arena(saved_memory_.back().data(), saved_memory_.back().size());
      saved_.push_back(stage.make_saved(arena));
      workspaces_.emplace_back(stage.workspace_bytes());
      const auto extents = stage.edge_extents();
      edges_.emplace_back(static_cast<std::size_t>(extents[0] * extents[1]), NAN);
      rows_ = extents[0];
      hidden_ = extents[1];
    }
  }

  TestHooks hooks;
  std::int32_t microbatch = 0;  ///< of the next run

  [[nodiscard]] std::vector<Stage>& stages() { return stages_; }
  [[nodiscard]] const std::vector<mega::Parameter>& parameters() const { return parameters_; }
  /// This rank's piece.
  [[nodiscard]] std::vector<float>& value(const std::string& name) { return values_.at(name); }
  [[nodiscard]] std::vector<float>& gradient(const std::string& name) {
    return gradients_.at(name);
  }
  void clear_gradients() {
    for (auto& [name, g] : gradients_) std::fill(g.begin(), g.end(), 0.0F);
  }

  /// Sum of losses over `text` from sample `first` on; in training, gradients of that sum times
  /// `scale` are added.
  double run(const Text& text, Index first, mega::Mode mode, float scale = 1.0F,
             const std::function<void(Ctx&, Stage&, mega::Matrix<float>)>& visit = {}) {
    const std::size_t from = static_cast<std::size_t>(first * run_.sequence);
    const mega::Matrix<const std::int32_t> tokens(text.tokens.data() + from, run_.micro_batch,
                                                  run_.sequence);
    const mega::Matrix<const std::int32_t> targets(text.targets.data() + from, run_.micro_batch,
                                                   run_.sequence);
    loss_ = 0;
    scale_ = scale;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      call(s, first, mode, [&](Ctx& ctx) {
        if (s == 0) {
          stages_[s].forward(ctx, tokens, edge(s), saved_[s]);
        } else {
          stages_[s].forward(ctx, mega::Matrix<const float>(edge(s - 1)), edge(s), saved_[s]);
        }
      });
    }
    const std::size_t last = stages_.size() - 1;
    if (visit) call(last, first, mode, [&](Ctx& ctx) { visit(ctx, stages_[last], edge(last)); });
    call(last, first, mode, [&](Ctx& ctx) { stages_[last].loss(ctx, edge(last), targets); });
    for (std::size_t s = stages_.size(); mode == mega::Mode::train && s-- > 0;) {
      // A chunk's input is needed until its last call, so gradients travel in memory of their own.
      const mega::Matrix<const float> dout = s == last ? edge(s) : gradient_edge(s);
      const mega::Matrix<float> din = s == 0 ? mega::Matrix<float>{} : gradient_edge(s - 1);
      if (run_.split_backward) {
        call(s, first, mode,
             [&](Ctx& ctx) { stages_[s].backward_input(ctx, dout, din, saved_[s]); });
        call(s, first, mode, [&](Ctx& ctx) { stages_[s].backward_weight(ctx, saved_[s]); });
      } else {
        call(s, first, mode, [&](Ctx& ctx) { stages_[s].backward(ctx, dout, din, saved_[s]); });
      }
    }
    stream_.synchronize();
    return loss_;
  }

  /// What a trainer's reducer does: partial gradients summed over the tensor ranks, a tied copy
  /// added to its owner.
  void reduce_gradients() {
    for (const mega::Parameter& p : parameters_) {
      std::vector<float>& g = gradients_.at(p.name);
      if (p.partial_over_tensor)
        tensor_.all_reduce(stream_, mega::Vector<float>(g.data(), static_cast<Index>(g.size())),
                           mega::comm::Reduce::sum);
      stream_.synchronize();
      if (p.tied_to.empty()) continue;
      std::vector<float>& owner = gradients_.at(p.tied_to);
      for (std::size_t i = 0; i < g.size(); ++i) owner[i] += g[i];
    }
  }

  /// Whole gradients; call on every rank with the same map and mutex.
  void gather_gradients(Tensors& out, std::mutex& mutex) const {
    const std::lock_guard lock(mutex);
    for (const mega::Parameter& p : parameters_) {
      auto& whole = out[p.name];
      whole.resize(static_cast<std::size_t>(p.size()), std::numeric_limits<float>::quiet_NaN());
      for (const auto& r : mega::shard_runs(p, tensor_.rank(), tensor_.size()))
        std::copy_n(gradients_.at(p.name).begin() + r.local, r.count, whole.begin() + r.global);
    }
  }

 private:
  void bind(Stage& stage) {
    std::vector<mega::ParameterView<float>> views;
    for (mega::Parameter p : stage.parameters()) {
      parameters_.push_back(p);
      const std::string values = p.tied_to.empty() ? p.name : p.tied_to;
      const auto size = static_cast<std::size_t>(mega::local_size(p, tensor_.size()));
      std::vector<float>& gradient = gradients_[p.name];
      gradient.assign(size, 0.0F);
      if (values_.count(values) == 0) {
        std::vector<float>& out = values_[values];
        out.resize(size);
        const float base = p.init.kind == mega::Init::Kind::ones ? 1.0F : 0.0F;
        p.init = {mega::Init::Kind::normal, 0.2F};
        const mega::Vector<float> view(out.data(), static_cast<Index>(size));
        mega::train::initialise(p, 9, tensor_.rank(), tensor_.size(), view);
        for (float& x : out) x += base;
      }
      views.push_back({{values_[values].data(), static_cast<Index>(size)},
                       {gradient.data(), static_cast<Index>(size)}});
    }
    stage.bind(views);
  }

  /// The context dies right after the call, as an executor's does, and the arena is as small as
  /// the stage declares; its old contents are garbage.
  template <class F>
  void call(std::size_t s, Index first, mega::Mode mode, const F& f) {
    mega::Arena arena(workspaces_[s].data(), workspaces_[s].size());
    stream_.run([memory = std::span(workspaces_[s])] {
      std::fill(memory.begin(), memory.end(), std::byte{0xff});
    });
    Ctx ctx{stream_,    arena, hooks, 77,      3,     static_cast<std::int32_t>(s),
            microbatch, first, mode,  &scale_, &loss_};
    f(ctx);
  }

  mega::Matrix<float> edge(std::size_t s) { return {edges_[s].data(), rows_, hidden_}; }
  mega::Matrix<float> gradient_edge(std::size_t s) {
    gradient_edges_.resize(stages_.size());
    gradient_edges_[s].resize(edges_[s].size(), NAN);
    return {gradient_edges_[s].data(), rows_, hidden_};
  }

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  /// Aligned bytes.
  class Memory {
   public:
    explicit Memory(std::size_t bytes) : lines_((bytes + 63) / 64), bytes_(bytes) {}
    std::byte* data() { return reinterpret_cast<std::byte*>(lines_.data()); }
    [[nodiscard]] std::size_t size() const { return bytes_; }
    std::byte* begin() { return data(); }
    std::byte* end() { return data() + bytes_; }

   private:
    std::vector<Line> lines_;
    std::size_t bytes_;
  };

  mega::nn::TransformerRun run_;
  mega::ThreadComm& tensor_;
  std::vector<Stage> stages_;
  std::vector<mega::Parameter> parameters_;
  Tensors values_, gradients_;
  std::vector<Memory> saved_memory_, workspaces_;
  std::vector<typename Stage::saved_type> saved_;
  std::vector<std::vector<float>> edges_, gradient_edges_;
  Index rows_ = 0, hidden_ = 0;
  double loss_ = 0;
  float scale_ = 1;
  Stream stream_;  // last: its pending work reads the rest
};

}  // namespace test
