/// @file  What a run of gpu_step trains, and what a step of it costs at the least: FLOPs over a
/// rate of matrix products, bytes over a bandwidth.
#pragma once
#include "examples/trainer/schedule_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/replay.hpp>
#include <mega/core/view.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/nn/transformer_config.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gpu_step {

using mega::Index;

enum class Family : std::uint8_t { gpt3, llama3 };

/// Sizes of a published model. The vocabulary of GPT is padded to a multiple of 128.
struct Model {
  std::string_view name;
  int layers;
  Index hidden, heads, kv_heads, ffn, vocab;
  Family family;

  [[nodiscard]] constexpr Index head_dim() const noexcept { return hidden / heads; }
  /// Columns of the packed queries, keys and values.
  [[nodiscard]] constexpr Index qkv() const noexcept { return (heads + 2 * kv_heads) * head_dim(); }
  /// Columns of the first product of the MLP.
  [[nodiscard]] constexpr Index up() const noexcept {
    return family == Family::llama3 ? 2 * ffn : ffn;
  }
  /// Weights of a layer's products.
  [[nodiscard]] constexpr Index layer_weights() const noexcept {
    return hidden * (qkv() + heads * head_dim() + up() + ffn);
  }
};

inline constexpr std::array<Model, 7> models{{
    {"gpt3-125m", 12, 768, 12, 12, 3072, 50304, Family::gpt3},
    {"gpt3-350m", 24, 1024, 16, 16, 4096, 50304, Family::gpt3},
    {"gpt3-1.3b", 24, 2048, 16, 16, 8192, 50304, Family::gpt3},
    {"gpt3-6.7b", 32, 4096, 32, 32, 16384, 50304, Family::gpt3},
    {"llama3-1b", 16, 2048, 32, 8, 8192, 128256, Family::llama3},
    {"llama3-8b", 32, 4096, 32, 8, 14336, 128256, Family::llama3},
    {"llama3-8b-8l", 8, 4096, 32, 8, 14336, 128256, Family::llama3},
}};

/// @throws Error usage
[[nodiscard]] inline const Model& model_named(std::string_view name) {
  const auto found =
      std::find_if(models.begin(), models.end(), [&](const Model& m) { return m.name == name; });
  mega::expects(found != models.end(), mega::ErrorCode::usage, [&] {
    std::string known;
    for (const Model& m : models) known += mega::sentence(known.empty() ? "" : ", ", m.name);
    return mega::sentence("there is no model ", name, "; there are ", std::string_view(known));
  });
  return *found;
}

enum class AttentionChoice : std::uint8_t { cudnn, cudnn_deterministic, built_in };
enum class Numbers : std::uint8_t { bf16, fp32 };

inline constexpr trainer::Names<AttentionChoice, 3> attention_names{
    {{"cudnn", AttentionChoice::cudnn},
     {"cudnn-deterministic", AttentionChoice::cudnn_deterministic},
     {"built-in", AttentionChoice::built_in}}};
inline constexpr trainer::Names<Numbers, 2> number_names{
    {{"bf16", Numbers::bf16}, {"fp32", Numbers::fp32}}};

inline constexpr trainer::Names<mega::ReplayScope, 3> graph_names{
    {{"none", mega::ReplayScope::none},
     {"actions", mega::ReplayScope::actions},
     {"step", mega::ReplayScope::step}}};

template <class E, std::size_t N>
[[nodiscard]] std::string_view name_of(E value, const trainer::Names<E, N>& names) {
  for (const auto& [name, known] : names)
    if (known == value) return name;
  return "unknown";
}

/// Rates that floors are computed from.
struct Rates {
  double matrix_tflops = 680;
  double attention_forward_tflops = 400;
  double attention_backward_tflops = 300;
  double tb_per_s = 4.17;
};

struct Options {
  Model model = models[0];
  Index sequence = 2048;
  Index micro_batch = 8;
  int microbatches = 1;  ///< a step and data-parallel rank
  int steps = 12;        ///< timed
  int warm_up = 4;
  int result_every = 10;  ///< steps between two readings of the loss; 0: only at the end
  mega::Mesh mesh{};
  int chunks = 1;
  trainer::ChosenTraversal traversal{};
  std::vector<int> split;  ///< layers of each stage; empty: even
  bool shard_optimizer = false;
  bool sequence_parallel = false;
  mega::nn::Recompute recompute = mega::nn::Recompute::none;
  Index loss_rows = 0;  ///< 0: all rows, or as few pieces as keep the logits in logits_bytes
  AttentionChoice attention = AttentionChoice::cudnn;
  Numbers numbers = Numbers::bf16;
  mega::ReplayScope graphs = mega::ReplayScope::none;
  int traced_steps = 0;
  bool plan_only = false;

  static constexpr Index logits_bytes = 6'000'000'000;

  [[nodiscard]] Index rows() const noexcept { return micro_batch * sequence; }
  [[nodiscard]] Index element_bytes() const noexcept { return numbers == Numbers::bf16 ? 2 : 4; }
  /// Tokens of a step on one data-parallel rank.
  [[nodiscard]] Index tokens() const noexcept { return microbatches * rows(); }

  [[nodiscard]] mega::nn::TransformerConfig config() const {
    return {.layers = model.layers,
            .hidden = model.hidden,
            .heads = model.heads,
            .kv_heads = model.kv_heads,
            .head_dim = model.head_dim(),
            .ffn = model.ffn,
            .vocab = model.vocab,
            .max_positions = sequence,
            .rope = {.theta = 500000.0},
            .tied_head = model.family == Family::gpt3};
  }
  [[nodiscard]] mega::nn::TransformerRun run() const {
    mega::nn::TransformerRun run{.micro_batch = micro_batch,
                                 .sequence = sequence,
                                 .sequence_parallel = sequence_parallel,
                                 .recompute = recompute};
    run.split_backward = traversal.splits_backward();
    run.loss_rows = loss_rows > 0 ? loss_rows : fitting_loss_rows();
    return run;
  }
  /// @throws Error usage
  [[nodiscard]] mega::dpp::LayerSplit layers() const {
    const int stages = mesh.pipeline * chunks;
    if (split.empty()) return mega::dpp::split_layers(model.layers, stages);
    mega::expects(static_cast<int>(split.size()) == stages, mega::ErrorCode::usage, [&] {
      return mega::sentence("--split names the layers of ", split.size(), " stages, but ",
                            mesh.pipeline, " ranks of ", chunks, " chunks make ", stages);
    });
    return {model.layers, split};
  }

 private:
  /// Equal pieces, whole tiles of 128 rows where they are cut.
  [[nodiscard]] Index fitting_loss_rows() const noexcept {
    const Index row_bytes = (model.vocab + mesh.tensor - 1) / mesh.tensor * element_bytes();
    const Index most = std::max<Index>(128, logits_bytes / row_bytes);
    const Index pieces = (rows() + most - 1) / most;
    if (pieces <= 1) return rows();
    return ((rows() + pieces - 1) / pieces + 127) / 128 * 128;
  }
};

/// 6 for each weight of a product, the head included, and causal attention at half the square. What
/// is computed again does not count.
[[nodiscard]] inline double flops_per_token(const Model& m, Index sequence) {
  return 6.0 * static_cast<double>(m.layers * m.layer_weights() + m.vocab * m.hidden) +
         6.0 * static_cast<double>(m.layers * sequence * m.hidden);
}

/// Least microseconds of a step on the GPU of rank 0, by what they are for.
struct Floors {
  double products = 0;
  double attention = 0;
  double elementwise = 0;
  double head = 0;
  double optimizer = 0;
};

/// Attention: 2 products forward and 5 backward, of half the square. Elementwise, every operand
/// read or written once: both sums of the residual stream with the norm behind them, forward and
/// backward; GELU backward (its forward belongs to the product) and sums of the four bias
/// gradients; or SwiGLU and, in place, the rotation, each in both directions. Head: the logits read
/// for the sums, read again and overwritten by their gradient. Optimizer: values, gradient, master
/// and both moments of AdamW, 30 bytes a parameter.
/// @param owned  parameters that the rank updates
[[nodiscard]] inline Floors floors_of(const Options& o, Index owned, const Rates& rates) {
  const Model& m = o.model;
  const auto number = [](Index n) { return static_cast<double>(n); };
  const mega::dpp::LayerSplit split = o.layers();
  double layers = 0;
  bool holds_head = false;
  const auto place = o.traversal.placement();
  for (int chunk = 0; chunk < o.chunks; ++chunk) {
    const int stage = place.stage(0, chunk, o.mesh.pipeline, o.chunks);
    layers += split.of_stage(stage).count();
    holds_head = holds_head || stage + 1 == split.stages();
  }
  const double tokens = number(o.tokens()), tensor = o.mesh.tensor;
  const double bytes = number(o.element_bytes());
  const double whole = o.sequence_parallel ? tensor : 1;  // ranks that share the residual stream
  const double weights =
      layers * number(m.layer_weights()) + (holds_head ? number(m.vocab * m.hidden) : 0);
  const double square = tokens * layers * number(o.sequence * m.hidden) / tensor;

  double elements = 16 * number(m.hidden) / whole;
  if (m.family == Family::llama3) {
    elements += (8 * number(m.ffn) + 4 * number((m.heads + m.kv_heads) * m.head_dim())) / tensor;
  } else {
    elements +=
        (3 * number(m.ffn) + number(m.qkv() + m.ffn)) / tensor + 2 * number(m.hidden) / whole;
  }
  return {
      .products = 6 * weights * tokens / tensor / (rates.matrix_tflops * 1e6),
      .attention = square * (2 / (rates.attention_forward_tflops * 1e6) +
                             5 / (rates.attention_backward_tflops * 1e6)),
      .elementwise = elements * bytes * layers * tokens / (rates.tb_per_s * 1e6),
      .head =
          holds_head ? 3 * bytes * number(m.vocab) * tokens / tensor / (rates.tb_per_s * 1e6) : 0,
      .optimizer = (o.numbers == Numbers::bf16 ? 30 : 28) * number(owned) / (rates.tb_per_s * 1e6),
  };
}

}  // namespace gpu_step
