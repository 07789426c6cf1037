/// @file  Compares a Transformer, in any layout and on any device, with values that Hugging Face
/// transformers computed: logits, loss, gradients, and the losses of twelve AdamW steps.
#pragma once
#include <mega/ckpt/hugging_face.hpp>
#include <mega/mega.hpp>
#include <mega/nn/gpt3.hpp>
#include <mega/nn/llama3.hpp>
#include <mega/nn/transformer.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace oracle {

using mega::Index;

/// How the model is divided and run; every layout must give the same numbers.
struct Layout {
  int tensor = 1;
  int pipeline = 1;
  int data = 1;
  int chunks = 1;  ///< a pipeline rank
  bool sequence_parallel = false;
  bool zero1 = false;
  mega::nn::Recompute recompute = mega::nn::Recompute::none;
};

struct Report {
  double logits_max_abs = 0;
  double loss_rel = 0;
  double grad_worst_rel = 0;    ///< norm of the difference over the norm, worst tensor
  std::string grad_worst_name;  ///< that tensor
  double key_bias_max_abs = 0;  ///< the key bias has gradient zero, so no relative error
  double adamw_worst_rel = 0;
};

/// The files of an oracle's directory.
struct Expected {
  Index samples = 0, sequence = 0, vocab = 0;
  std::vector<std::int32_t> inputs, targets;  // [samples, sequence]
  std::vector<float> logits;                  // [samples, sequence, vocab]
  double loss = 0;
  std::vector<double> adamw_losses;

  explicit Expected(const std::string& directory) {
    const mega::ckpt::SafetensorsReader io(directory + "/io.safetensors");
    const auto& tokens = io.at("tokens");
    samples = tokens.shape.at(0);
    sequence = tokens.shape.at(1) - 1;
    std::vector<std::int64_t> ids(static_cast<std::size_t>(samples * (sequence + 1)));
    io.read(tokens, std::as_writable_bytes(std::span(ids)));
    for (Index s = 0; s < samples; ++s) {
      for (Index t = 0; t < sequence; ++t) {
        const auto at = static_cast<std::size_t>(s * (sequence + 1) + t);
        inputs.push_back(static_cast<std::int32_t>(ids[at]));
        targets.push_back(static_cast<std::int32_t>(ids[at + 1]));
      }
    }
    vocab = io.at("logits").shape.at(2);
    logits.resize(inputs.size() * static_cast<std::size_t>(vocab));
    io.read_f32("logits", logits);
    const std::string where = directory + "/expect.json";
    const auto json =
        mega::ckpt::parse_json_strictly(mega::ckpt::read_file(where, 1'000'000), where);
    loss = json.at("loss").get<double>();
    adamw_losses = json.at("adamw_losses").get<std::vector<double>>();
  }
};

/// One data-parallel rank's micro-batches of the oracle's samples.
class Batch {
 public:
  Batch(const Expected& expected, int data_rank, int data_degree, int microbatches)
      : expected_(expected),
        microbatches_(microbatches),
        samples_(expected.samples / (data_degree * microbatches)),
        first_(data_rank * microbatches * samples_) {}

  [[nodiscard]] int microbatches() const noexcept { return microbatches_; }
  [[nodiscard]] mega::Matrix<const std::int32_t> input(int mb) const {
    return at(expected_.inputs, mb);
  }
  [[nodiscard]] mega::Matrix<const std::int32_t> target(int mb) const {
    return at(expected_.targets, mb);
  }
  [[nodiscard]] Index first_sample(int mb) const noexcept { return first_ + mb * samples_; }
  [[nodiscard]] std::int64_t valid_targets() const noexcept {
    return microbatches_ * samples_ * expected_.sequence;
  }

 private:
  [[nodiscard]] mega::Matrix<const std::int32_t> at(const std::vector<std::int32_t>& ids,
                                                    int mb) const {
    return {ids.data() + first_sample(mb) * expected_.sequence, samples_, expected_.sequence};
  }

  const Expected& expected_;
  int microbatches_;
  Index samples_, first_;
};

/// Whole parameters by name, gathered from ranks that are threads.
class Gathered {
 public:
  /// Each rank adds what it answers for of `flat`, values or gradients.
  template <class Trainer>
  void add(Trainer& trainer, mega::Vector<float> flat) {
    const auto& store = trainer.parameters();
    const auto& table = store.table();
    const auto position = table.position();
    const std::lock_guard lock(mutex_);
    for (const auto& e : table.entries()) {
      if (!e.parameter.tied_to.empty()) continue;
      mega::train::Range own{e.value, e.value + e.size};
      if (store.shards_optimizer()) {
        own = own.intersect(
            table.piece(table.regions()[static_cast<std::size_t>(e.chunk)], position.data));
      }
      auto& whole = tensors_[e.parameter.name];
      whole.resize(static_cast<std::size_t>(e.parameter.size()),
                   std::numeric_limits<float>::quiet_NaN());
      for (const auto& run :
           mega::shard_runs(e.parameter, position.tensor, position.tensor_degree)) {
        for (Index i = 0; i < run.count; ++i) {
          const Index from = e.value + run.local + i;
          if (from >= own.begin && from < own.end)
            whole[static_cast<std::size_t>(run.global + i)] = flat(from);
        }
      }
      parameters_.insert_or_assign(e.parameter.name, e.parameter);
    }
  }

  [[nodiscard]] const std::map<std::string, std::vector<float>>& tensors() const {
    return tensors_;
  }
  [[nodiscard]] const mega::Parameter& parameter(const std::string& name) const {
    return parameters_.at(name);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<float>> tensors_;
  std::map<std::string, mega::Parameter> parameters_;
};

/// Norm of the difference over the norm of `expected`. NaN counts as infinite.
inline double relative(std::span<const float> got, std::span<const float> expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(expected[i]);
    difference += d * d;
    norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  const double out = std::sqrt(difference / norm);
  return std::isnan(out) ? INFINITY : out;
}
inline double relative(double got, double expected) {
  const double out = std::abs(got - expected) / std::abs(expected);
  return std::isnan(out) ? INFINITY : out;
}
inline double max_abs(std::span<const float> got, std::span<const float> expected) {
  double out = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double d = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    out = std::isnan(d) ? INFINITY : std::max(out, d);
  }
  return out;
}

using Model = mega::ckpt::HuggingFaceModel<mega::nn::TransformerConfig>;

inline void compare_gradients(Report& report, const Gathered& got, const Model& expected) {
  for (const auto& [name, values] : got.tensors()) {
    std::vector<float> want(values.size());
    expected.load(got.parameter(name), 0, 1,
                  mega::Vector<float>(want.data(), static_cast<Index>(want.size())));
    std::vector<float> compared = values;
    if (name.find(".qkv.bias") != std::string::npos) {
      const auto& c = expected.config();
      const auto key = static_cast<std::size_t>(c.heads * c.head_dim);
      const auto count = static_cast<std::size_t>(c.kv_heads * c.head_dim);
      report.key_bias_max_abs = std::max(
          report.key_bias_max_abs,
          max_abs(std::span(compared).subspan(key, count), std::span(want).subspan(key, count)));
      std::copy_n(want.begin() + static_cast<std::ptrdiff_t>(key), count,
                  compared.begin() + static_cast<std::ptrdiff_t>(key));
    }
    const double error = relative(compared, want);
    if (error >= report.grad_worst_rel) {
      report.grad_worst_rel = error;
      report.grad_worst_name = name;
    }
  }
}

/// One layout against one oracle directory: made once, run by every rank, then asked.
class Comparison {
 public:
  Comparison(const std::string& directory, const Layout& layout)
      : directory_(directory),
        expected_(directory),
        model_(directory),
        layers_(mega::dpp::split_layers(model_.config().layers, layout.pipeline * layout.chunks)),
        logits_(expected_.logits.size(), std::numeric_limits<float>::quiet_NaN()) {
    mega::expects(expected_.samples % layout.data == 0, mega::ErrorCode::usage, [&] {
      return mega::sentence(expected_.samples, " samples do not divide over dp ", layout.data);
    });
    const auto own_samples = static_cast<int>(expected_.samples) / layout.data;
    const int microbatches = layout.pipeline * layout.chunks > 1 ? own_samples : 1;
    run_ = {.micro_batch = own_samples / microbatches,
            .sequence = expected_.sequence,
            .sequence_parallel = layout.sequence_parallel,
            .recompute = layout.recompute,
            // Two blocks of each sample, the second shorter.
            .loss_rows = 48};
    options_ = {.mesh = {.tensor = layout.tensor, .data = layout.data, .pipeline = layout.pipeline},
                .chunks = layout.chunks,
                .microbatches = microbatches,
                .shard_optimizer = layout.zero1,
                .clip_norm = 1.0,
                .adamw = {.beta1 = 0.9F, .beta2 = 0.95F, .epsilon = 1e-8F, .weight_decay = 0.1F},
                // Such that no step is skipped: all of them are compared.
                .loss_scaling = {.initial = 1024}};
  }

  [[nodiscard]] int ranks() const { return options_.mesh.size(); }
  [[nodiscard]] const Model& model() const { return model_; }

  /// What rank world.rank() does, on the device of the plan. Its stage is a Transformer.
  template <class Plan>
  void run_rank(typename Plan::communicator& world) {
    typename Plan::device device;
    mega::Trainer<Plan> trainer(
        world, options_,
        [&](mega::StagePosition at, auto& groups) {
          return typename Plan::stage(model_.config(), run_, at, layers_.of_stage(at.stage),
                                      groups.tensor);
        },
        device);
    const auto position = trainer.parameters().table().position();
    load(trainer);
    const Batch batch(expected_, position.data, options_.mesh.data, options_.microbatches);
    using T = typename Plan::stage::edge_type::element_type;
    const auto memory =
        device.allocate(static_cast<std::size_t>(run_.rows() * expected_.vocab) * sizeof(T));
    const mega::Matrix<T> own(reinterpret_cast<T*>(memory.data()), run_.rows(), expected_.vocab);
    std::vector<T> all(position.tensor == 0 ? logits_.size() : 0);
    std::vector<std::pair<Index, Index>> mine;  // of all: where this rank's rows begin and end
    const auto evaluated = trainer.evaluate(batch, [&](auto& stage, auto& ctx, auto out) {
      stage.logits(ctx, out, own);
      if (position.tensor != 0) return;
      const Index first = ctx.first_sample * expected_.sequence * expected_.vocab;
      download(ctx.stream, mega::Matrix<T>(all.data() + first, run_.rows(), expected_.vocab),
               mega::Matrix<const T>(own));
      mine.emplace_back(first, first + own.size());
    });
    for (const auto& [begin, end] : mine)
      std::copy(all.begin() + begin, all.begin() + end, logits_.begin() + begin);
    std::vector<double> losses;
    for (std::size_t i = 0; i < expected_.adamw_losses.size(); ++i) {
      const mega::StepResult result = trainer.step(batch, 1e-3);
      losses.push_back(result.loss);
      // Those of the first step are at the given weights; clipping does not touch them.
      if (i == 0) gather_gradients(trainer, 1 / static_cast<float>(result.loss_scale));
    }
    if (world.rank() != 0) return;
    loss_ = evaluated.loss;
    losses_ = std::move(losses);
  }

  /// Once all ranks are through.
  [[nodiscard]] Report report() const {
    Report out;
    out.logits_max_abs = max_abs(logits_, expected_.logits);
    out.loss_rel = relative(loss_, expected_.loss);
    for (std::size_t i = 0; i < losses_.size(); ++i)
      out.adamw_worst_rel =
          std::max(out.adamw_worst_rel, relative(losses_[i], expected_.adamw_losses[i]));
    compare_gradients(out, gradients_, Model(directory_, "grads.safetensors"));
    return out;
  }

  /// What the ranks computed, for comparing two runs.
  [[nodiscard]] const std::vector<float>& logits() const { return logits_; }
  [[nodiscard]] const std::vector<double>& losses() const { return losses_; }
  [[nodiscard]] const std::map<std::string, std::vector<float>>& gradients() const {
    return gradients_.tensors();
  }

 private:
  template <class Trainer>
  void load(Trainer& trainer) const {
    auto& store = trainer.parameters();
    const auto position = store.table().position();
    std::vector<float> host;
    for (const auto& e : store.table().entries()) {
      if (e.alias) continue;
      host.assign(static_cast<std::size_t>(e.size), 0.0F);  // padding is in no file
      const mega::Vector<float> values(host.data(), e.size);
      model_.load(e.parameter, position.tensor, position.tensor_degree, values);
      store.load(trainer.compute(), e, values);
    }
  }

  template <class Trainer>
  void gather_gradients(Trainer& trainer, float factor) {
    const mega::Vector<float> flat = trainer.parameters().gradients();
    std::vector<float> host(static_cast<std::size_t>(flat.size()));
    const mega::Vector<float> to(host.data(), flat.size());
    download(trainer.compute(), to, mega::Vector<const float>(flat));
    trainer.synchronize();
    for (float& g : host) g *= factor;
    gradients_.add(trainer, to);
  }

  std::string directory_;
  Expected expected_;
  Model model_;
  mega::dpp::LayerSplit layers_;
  mega::nn::TransformerRun run_;
  mega::TrainerOptions<> options_;
  Gathered gradients_;
  std::vector<float> logits_;
  double loss_ = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> losses_;
};

/// Ranks are threads of this process, on the host.
template <class Spec>
struct ThreadPlan : mega::DefaultPlan {
  using stage = mega::nn::Transformer<Spec, mega::ThreadComm>;
  using communicator = mega::ThreadComm;
};

/// The family stands in config.json.
inline Report check(const std::string& directory, const Layout& layout) {
  Comparison comparison(directory, layout);
  const bool gpt = comparison.model().family() == mega::ckpt::HuggingFaceFamily::gpt2;
  mega::run_threads(comparison.ranks(), [&](mega::ThreadComm& world) {
    if (gpt) {
      comparison.run_rank<ThreadPlan<mega::nn::Gpt3>>(world);
    } else {
      comparison.run_rank<ThreadPlan<mega::nn::Llama3>>(world);
    }
  });
  return comparison.report();
}

}  // namespace oracle
