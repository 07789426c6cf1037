#include "step_model.hpp"

#include "arguments.hpp"
#include <mega/ckpt/durable_file.hpp>
#include <mega/ckpt/hugging_face.hpp>
#include <mega/core/error.hpp>
#include <mega/dpp/balance.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/nn/transformer_config.hpp>

#include <array>
#include <cstddef>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace plan {

namespace dpp = mega::dpp;
using mega::ErrorCode;
using mega::expects;
using mega::sentence;

namespace {

struct Model {
  std::string_view name;
  int layers;
  int kv_heads;
  dpp::TransformerShape shape;
};

constexpr Model gpt3(std::string_view name, int layers, int hidden, int heads) {
  return {name,
          layers,
          heads,
          {.hidden = double(hidden),
           .heads = double(heads),
           .kv_heads = double(heads),
           .head_dim = double(hidden / heads),
           .ffn = 4.0 * hidden,
           .mlp_matrices = 2,
           .vocab = 50257}};
}
constexpr Model llama3(std::string_view name, int layers, int hidden, int ffn) {
  return {name,
          layers,
          8,
          {.hidden = double(hidden),
           .heads = 32,
           .kv_heads = 8,
           .head_dim = double(hidden) / 32,
           .ffn = double(ffn),
           .mlp_matrices = 3,
           .vocab = 128256}};
}

constexpr std::array<Model, 5> bundled{
    {gpt3("gpt3-125m", 12, 768, 12), gpt3("gpt3-1.3b", 24, 2048, 16),
     gpt3("gpt3-6.7b", 32, 4096, 32), llama3("llama3-1b", 16, 2048, 8192),
     llama3("llama3-8b", 32, 4096, 14336)}};

Model model_of(const std::string& name) {
  for (const Model& model : bundled) {
    if (model.name == name) return model;
  }
  std::error_code unknown;
  expects(name.ends_with(".json") || std::filesystem::exists(name, unknown), ErrorCode::usage, [&] {
    return sentence("there is no model '", name, "'; valid are ", bundled_models(),
                    ", or the path of a config.json");
  });
  constexpr mega::Index largest_file = 1 << 20;
  const auto read = mega::ckpt::parse_hugging_face_config<mega::nn::TransformerConfig>(
      mega::ckpt::read_file(name, largest_file), name);
  const auto& c = read.model;
  const bool gated = read.family == mega::ckpt::HuggingFaceFamily::llama;
  return {name,
          c.layers,
          static_cast<int>(c.kv_heads),
          {.hidden = double(c.hidden),
           .heads = double(c.heads),
           .kv_heads = double(c.kv_heads),
           .head_dim = double(c.head_dim),
           .ffn = double(c.ffn),
           .mlp_matrices = gated ? 3.0 : 2.0,
           .vocab = double(c.vocab)}};
}

}  // namespace

std::string bundled_models() {
  std::string all;
  for (const Model& model : bundled) all += sentence(all.empty() ? "" : ", ", model.name);
  return all;
}

TransformerParts transformer_parts(const std::string& name, const TransformerRunArguments& run) {
  Model model = model_of(name);
  const auto expect_count = [](std::string_view option, int count) {
    expects(count >= 1, ErrorCode::usage,
            [&] { return sentence(option, " is ", count, "; the least is 1"); });
  };
  expect_count("--tp", run.tensor_degree);
  expect_count("--seq-length", run.sequence);
  expect_count("--micro-batch-size", run.micro_batch);
  expects(run.flops >= 1 && run.flops <= 1e21, ErrorCode::usage, [&] {
    return sentence("--flops is ", run.flops,
                    "; valid are 1 to 1e+21 operations a second of one device");
  });
  expects(model.kv_heads % run.tensor_degree == 0 && run.sequence % run.tensor_degree == 0,
          ErrorCode::usage, [&] {
            return sentence("--tp ", run.tensor_degree, " must divide the ", model.kv_heads,
                            " key and value heads of the model and --seq-length ", run.sequence);
          });
  model.shape.sequence = run.sequence;
  const dpp::TransformerShape& s = model.shape;
  const dpp::LayerCosts costs = dpp::transformer_costs(s);
  const double tokens = double(run.sequence) * run.micro_batch;
  const double seconds = tokens / run.tensor_degree / run.flops;  // of one operation a token
  // A product with a weight has one product in each of F, I and W; one of two activations, as
  // attention's are, has both of its gradients in I.
  const double attention = 2 * s.heads * s.head_dim * (s.sequence + 1);
  const double forward = costs.layer / 3;
  TransformerParts parts;
  parts.layers = model.layers;
  parts.layer = {.forward = forward * seconds,
                 .backward_input = (forward + attention) * seconds,
                 .backward_weight = (forward - attention) * seconds};
  parts.head = {.forward = costs.head / 3 * seconds,
                .backward_input = costs.head / 3 * seconds,
                .backward_weight = costs.head / 3 * seconds};
  constexpr double element = 2;  // bytes
  const double own_tokens = tokens / run.tensor_degree;
  parts.layer_bytes =
      element * own_tokens *
      (4 * s.hidden + 2 * s.head_dim * (s.heads + s.kv_heads) + s.mlp_matrices * s.ffn);
  parts.message_bytes = element * own_tokens * s.hidden;
  return parts;
}

StageCosts StepModel::stages(int v, bool on_v) const {
  StageCosts costs;
  const auto count = static_cast<std::size_t>(p) * static_cast<std::size_t>(v);
  if (!transformer) {
    const dpp::ActionTimes& t = rank_times;
    costs.times.assign(count, {.forward = t.forward / v,
                               .backward_input = t.backward_input / v,
                               .backward_weight = t.backward_weight / v,
                               .hop = hop,
                               .pair = t.pair < 0 ? t.pair : t.pair / v});
    costs.memory.assign(count, 1.0 / v);
    return costs;
  }
  const TransformerParts& parts = *transformer;
  const auto sum = [](const dpp::ActionTimes& t) {
    return t.forward + t.backward_input + t.backward_weight;
  };
  const dpp::LayerCosts loads{.layer = sum(parts.layer), .head = sum(parts.head)};
  const dpp::LayerSplit split =
      on_v ? dpp::balance_layers(parts.layers, p, v, loads, dpp::VPlacement{})
           : dpp::balance_layers(parts.layers, p, v, loads, dpp::LoopPlacement{});
  for (int stage = 0; stage < split.stages(); ++stage) {
    const int layers = split.of_stage(stage).count();
    const double heads = stage + 1 == split.stages() ? 1 : 0;
    costs.layers.push_back(layers);
    costs.memory.push_back(layers * parts.layer_bytes);
    costs.times.push_back(
        {.forward = layers * parts.layer.forward + heads * parts.head.forward,
         .backward_input = layers * parts.layer.backward_input + heads * parts.head.backward_input,
         .backward_weight =
             layers * parts.layer.backward_weight + heads * parts.head.backward_weight,
         .hop = hop});
  }
  return costs;
}

}  // namespace plan
