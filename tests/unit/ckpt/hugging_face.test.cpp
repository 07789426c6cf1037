#include <mega/ckpt/hugging_face.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/nn/transformer_config.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mega::Index;
using mega::ckpt::HuggingFaceFamily;
using mega::nn::RopeScalingKind;
using mega::nn::TransformerConfig;
using Model = mega::ckpt::HuggingFaceModel<TransformerConfig>;
using Tensors = std::map<std::string, std::vector<float>>;
using nlohmann::json;
namespace fs = std::filesystem;

const std::string gpt3 = "tests/oracle/gpt3-tiny";
const std::string llama3 = "tests/oracle/llama3-tiny";

/// An empty directory that is removed again.
class Folder {
 public:
  Folder()
      : path_((fs::temp_directory_path() /
               mega::sentence("mega_hugging_face_", ::getpid(), "_", ++count_))
                  .string()) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  [[nodiscard]] const std::string& path() const { return path_; }
  void text(const std::string& name, const std::string& content) const {
    std::ofstream(path_ + "/" + name) << content;
  }

 private:
  static inline int count_ = 0;
  std::string path_;
};

std::string text_of(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

std::string refusal(const auto& call) {
  try {
    call();
  } catch (const mega::Error& error) {
    CHECK(error.code() == mega::ErrorCode::bad_input);
    return error.what();
  }
  return "";
}
bool contains(const std::string& all, const std::string& part) {
  return all.find(part) != std::string::npos;
}

/// What the config of a family becomes when `edit` has changed it.
auto parse(const std::string& directory, const auto& edit) {
  json config = json::parse(text_of(directory + "/config.json"));
  edit(config);
  return mega::ckpt::parse_hugging_face_config<TransformerConfig>(config.dump(), "config.json");
}
std::string refused(const std::string& directory, const auto& edit) {
  return refusal([&] { (void)parse(directory, edit); });
}

/// The whole of each parameter, by canonical name.
Tensors load_all(const Model& model) {
  Tensors out;
  for (const auto& p : mega::ckpt::hugging_face_parameters(model.family(), model.config())) {
    const mega::Parameter parameter{.name = p.name, .shape = p.shape};
    auto& whole = out[p.name];
    whole.resize(static_cast<std::size_t>(parameter.size()), NAN);
    model.load(parameter, 0, 1, mega::Vector<float>(whole.data(), parameter.size()));
  }
  return out;
}

std::vector<float> raw(const mega::ckpt::SafetensorsReader& file, const std::string& name) {
  std::vector<float> out(static_cast<std::size_t>(file.at(name).bytes / 4));
  file.read_f32(name, out);
  return out;
}

/// A file of tensors, each with its name's values unless given.
struct Contents {
  std::map<std::string, std::pair<std::vector<Index>, std::vector<float>>> tensors;

  void add(const std::string& name, const std::vector<Index>& shape) {
    Index count = 1;
    for (const Index extent : shape) count *= extent;
    const mega::RandomKey random{.layer = mega::name_hash(name)};
    std::vector<float> values;
    for (Index i = 0; i < count; ++i) values.push_back(random.uniform(i));
    tensors[name] = {shape, values};
  }
  void write(const std::string& path) const {
    std::vector<mega::ckpt::TensorSpec> specs;
    for (const auto& [name, t] : tensors) specs.push_back({name, mega::ckpt::DType::f32, t.first});
    mega::ckpt::SafetensorsWriter<> writer(path, specs);
    for (const auto& [name, t] : tensors) writer.write(name, std::as_bytes(std::span(t.second)));
    writer.finish();
  }
};

TransformerConfig small_llama(Index heads, Index kv_heads, bool tied) {
  TransformerConfig c{.layers = 2,
                      .hidden = 12,
                      .heads = heads,
                      .kv_heads = kv_heads,
                      .head_dim = 6,
                      .ffn = 10,
                      .vocab = 7,
                      .max_positions = 32,
                      .norm_epsilon = 1e-5F};
  c.tied_head = tied;
  return c;
}

/// The tensors that a model of this config has in a file.
Contents contents_of(HuggingFaceFamily family, const TransformerConfig& config) {
  Contents out;
  for (const auto& p : mega::ckpt::hugging_face_parameters(family, config)) {
    for (const auto& piece : p.pieces) out.add(piece.name, piece.shape);
  }
  if (config.tied_head) out.tensors.erase("lm_head.weight");
  return out;
}

void write_model(const Folder& folder, const TransformerConfig& config, const Contents& contents,
                 HuggingFaceFamily family = HuggingFaceFamily::llama) {
  folder.text("config.json", mega::ckpt::hugging_face_config_text(family, config));
  fs::remove(folder.path() + "/model.safetensors");
  contents.write(folder.path() + "/model.safetensors");
}

}  // namespace

TEST_CASE("hugging_face: configs of both families") {
  const Model gpt(gpt3);
  CHECK(gpt.family() == HuggingFaceFamily::gpt2);
  CHECK(gpt.config().layers == 4);
  CHECK(gpt.config().head_dim == 16);
  CHECK(gpt.config().ffn == 256);
  CHECK(gpt.config().max_positions == 64);
  CHECK(gpt.config().norm_epsilon == 1e-5F);
  CHECK(gpt.config().dropout.residual == 0.0F);
  CHECK(gpt.config().tied_head);
  const Model llama(llama3);
  CHECK(llama.family() == HuggingFaceFamily::llama);
  CHECK(llama.config().kv_heads == 4);
  CHECK(llama.config().head_dim == 8);
  CHECK(llama.config().vocab == 384);
  CHECK(llama.config().rope.theta == 500000.0);
  CHECK(llama.config().rope.scaling.kind == RopeScalingKind::none);
  CHECK_FALSE(llama.config().tied_head);
}

TEST_CASE("hugging_face: elements land where the layouts say") {
  const Tensors gpt = load_all(Model(gpt3));
  const mega::ckpt::SafetensorsReader gpt_file(gpt3 + "/model.safetensors");
  const auto conv = raw(gpt_file, "transformer.h.2.attn.c_attn.weight");  // [64, 192]
  for (const std::size_t output : {0U, 70U, 191U}) {
    for (const std::size_t input : {0U, 1U, 63U})
      CHECK(gpt.at("layers.2.attention.qkv.weight")[output * 64 + input] ==
            conv[input * 192 + output]);
  }
  CHECK(gpt.at("head.weight") == gpt.at("embedding.token.weight"));
  CHECK(gpt.at("layers.3.mlp.down.bias") == raw(gpt_file, "transformer.h.3.mlp.c_proj.bias"));

  const Tensors llama = load_all(Model(llama3));
  const mega::ckpt::SafetensorsReader file(llama3 + "/model.safetensors");
  std::vector<float> qkv;
  for (const std::string part : {"q", "k", "v"}) {
    const auto piece = raw(file, "model.layers.1.self_attn." + part + "_proj.weight");
    qkv.insert(qkv.end(), piece.begin(), piece.end());
  }
  CHECK(llama.at("layers.1.attention.qkv.weight") == qkv);
  CHECK(llama.at("layers.0.mlp.norm.weight") ==
        raw(file, "model.layers.0.post_attention_layernorm.weight"));
  CHECK(llama.at("head.weight") == raw(file, "lm_head.weight"));
}

TEST_CASE("hugging_face: each tensor rank gets its runs, and zeros as padding") {
  const TransformerConfig config = small_llama(4, 2, false);
  const Folder folder;
  write_model(folder, config, contents_of(HuggingFaceFamily::llama, config));
  const Model model(folder.path());
  const Tensors whole = load_all(model);
  const std::vector<mega::Parameter> parameters{
      {.name = "layers.1.attention.qkv.weight", .shape = {48, 12}, .shard = {0, {24, 12, 12}}},
      {.name = "layers.0.mlp.up.weight", .shape = {20, 12}, .shard = {0, {10, 10}}},
      {.name = "layers.0.mlp.down.weight", .shape = {12, 10}, .shard = {1, {10}}},
      {.name = "head.weight", .shape = {7, 12}, .shard = {0, {7}}},
      {.name = "final_norm.weight", .shape = {12}}};
  for (const mega::Parameter& p : parameters) {
    CAPTURE(p.name);
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<float> piece(static_cast<std::size_t>(mega::local_size(p, 2)), NAN);
      model.load(p, rank, 2, mega::Vector<float>(piece.data(), static_cast<Index>(piece.size())));
      std::vector<float> expected(piece.size(), 0.0F);
      for (const auto& run : mega::shard_runs(p, rank, 2))
        std::copy_n(whole.at(p.name).begin() + run.global, run.count, expected.begin() + run.local);
      CHECK(piece == expected);
    }
  }
  const mega::Parameter wrong{.name = "head.weight", .shape = {12, 7}};
  std::vector<float> out(84);
  CHECK_THROWS_AS(model.load(wrong, 0, 1, mega::Vector<float>(out.data(), 84)), mega::Error);
}

TEST_CASE("hugging_face: an export reads back bit-equal, file by file") {
  for (const std::string& directory : {gpt3, llama3}) {
    CAPTURE(directory);
    const Model model(directory);
    const Tensors values = load_all(model);
    const Folder folder;
    const std::string target = folder.path() + "/new";
    mega::ckpt::export_hugging_face(
        target, model.family(), model.config(), [&](const std::string& name, std::span<float> out) {
          REQUIRE(out.size() == values.at(name).size());
          std::copy(values.at(name).begin(), values.at(name).end(), out.begin());
        });
    const Model again(target);
    CHECK(load_all(again) == values);
    CHECK(mega::ckpt::hugging_face_config_text(again.family(), again.config()) ==
          mega::ckpt::hugging_face_config_text(model.family(), model.config()));
    const mega::ckpt::SafetensorsReader before(directory + "/model.safetensors");
    const mega::ckpt::SafetensorsReader after(target + "/model.safetensors");
    REQUIRE(after.tensors().size() == before.tensors().size());
    for (const auto& t : before.tensors()) {
      CAPTURE(t.name);
      CHECK(after.at(t.name).shape == t.shape);
      CHECK(raw(after, t.name) == raw(before, t.name));
    }
    // An existing model is not overwritten.
    CHECK_THROWS_AS(mega::ckpt::export_hugging_face(target, model.family(), model.config(),
                                                    [](const std::string&, std::span<float>) {}),
                    mega::Error);
  }
}

TEST_CASE("hugging_face: grouped queries whose group is not the number of groups round-trip") {
  for (const auto& [heads, kv_heads] : {std::pair<Index, Index>{8, 2}, {4, 1}}) {
    const TransformerConfig config = small_llama(heads, kv_heads, false);
    const Folder folder;
    const Contents contents = contents_of(HuggingFaceFamily::llama, config);
    write_model(folder, config, contents);
    const Tensors values = load_all(Model(folder.path()));
    mega::ckpt::export_hugging_face(folder.path() + "/new", HuggingFaceFamily::llama, config,
                                    [&](const std::string& name, std::span<float> out) {
                                      std::copy(values.at(name).begin(), values.at(name).end(),
                                                out.begin());
                                    });
    const mega::ckpt::SafetensorsReader after(folder.path() + "/new/model.safetensors");
    for (const auto& [name, t] : contents.tensors) CHECK(raw(after, name) == t.second);
  }
}

TEST_CASE("hugging_face: tied embeddings may be stored either way, but only one of them") {
  const TransformerConfig tied = small_llama(2, 2, true);
  const std::string token = "model.embed_tokens.weight", head = "lm_head.weight";
  const Contents only_token = contents_of(HuggingFaceFamily::llama, tied);
  const std::vector<float> values = only_token.tensors.at(token).second;
  Contents only_head = only_token;
  only_head.tensors[head] = only_head.tensors.at(token);
  Contents both = only_head;
  only_head.tensors.erase(token);
  for (const Contents& contents : {only_token, only_head, both}) {
    const Folder folder;
    write_model(folder, tied, contents);
    const Tensors loaded = load_all(Model(folder.path()));
    CHECK(loaded.at("embedding.token.weight") == values);
    CHECK(loaded.at("head.weight") == values);
  }
  both.tensors[head].second[83] += 1.0F;
  const Folder folder;
  write_model(folder, tied, both);
  CHECK(contains(refusal([&] { Model(folder.path()); }), "lm_head.weight differ"));
  const TransformerConfig untied = small_llama(2, 2, false);
  write_model(folder, untied, both);
  CHECK(load_all(Model(folder.path())).at("head.weight") == both.tensors[head].second);
  write_model(folder, untied, only_token);
  CHECK(contains(refusal([&] { Model(folder.path()); }), "hold no lm_head.weight"));
  write_model(folder, untied, only_head);
  CHECK(contains(refusal([&] { Model(folder.path()); }), "hold no model.embed_tokens.weight"));
}

TEST_CASE("hugging_face: names may lack the prefix of the family") {
  const TransformerConfig config = small_llama(2, 2, false);
  const Contents contents = contents_of(HuggingFaceFamily::llama, config);
  Contents bare;
  for (const auto& [name, t] : contents.tensors)
    bare.tensors[name.rfind("model.", 0) == 0 ? name.substr(6) : name] = t;
  const Folder with, without;
  write_model(with, config, contents);
  write_model(without, config, bare);
  CHECK(load_all(Model(with.path())) == load_all(Model(without.path())));
}

TEST_CASE("hugging_face: tensors spread over the files of an index") {
  const TransformerConfig config = small_llama(2, 1, false);
  const Contents contents = contents_of(HuggingFaceFamily::llama, config);
  const Folder whole, split;
  write_model(whole, config, contents);
  split.text("config.json", mega::ckpt::hugging_face_config_text(HuggingFaceFamily::llama, config));
  Contents files[2];
  json index = {{"weight_map", json::object()}};
  int next = 0;
  for (const auto& [name, t] : contents.tensors) {
    index["weight_map"][name] = mega::sentence("part-", next, ".safetensors");
    files[next].tensors[name] = t;
    next = 1 - next;
  }
  for (const int i : {0, 1})
    files[i].write(split.path() + mega::sentence("/part-", i, ".safetensors"));
  split.text("model.safetensors.index.json", index.dump());
  CHECK(load_all(Model(split.path())) == load_all(Model(whole.path())));

  for (const json& hostile : {json("../part-0.safetensors"), json("/etc/passwd"), json(".hidden"),
                              json(""), json("a/b"), json(7), json("part-0.safetensors\n")}) {
    json bad = index;
    bad["weight_map"]["lm_head.weight"] = hostile;
    split.text("model.safetensors.index.json", bad.dump());
    CHECK(contains(refusal([&] { Model(split.path()); }), "plain name of a file"));
  }
  json bad = index;
  bad["weight_map"]["lm_head.weight"] = "part-9.safetensors";
  split.text("model.safetensors.index.json", bad.dump());
  CHECK(contains(refusal([&] { Model(split.path()); }), "part-9.safetensors cannot be opened"));
  bad["weight_map"]["lm_head.weight"] =
      index["weight_map"]["lm_head.weight"] == "part-0.safetensors" ? "part-1.safetensors"
                                                                    : "part-0.safetensors";
  split.text("model.safetensors.index.json", bad.dump());
  CHECK(contains(refusal([&] { Model(split.path()); }), "holds no tensor 'lm_head.weight'"));
  split.text("model.safetensors.index.json", "{}");
  CHECK(contains(refusal([&] { Model(split.path()); }), "weight_map"));
}

TEST_CASE("hugging_face: tensors that the config does not describe are refused") {
  const TransformerConfig config = small_llama(2, 2, false);
  const Contents good = contents_of(HuggingFaceFamily::llama, config);
  const Folder folder;
  const auto refused_with = [&](const auto& edit) {
    Contents contents = good;
    edit(contents.tensors);
    write_model(folder, config, contents);
    return refusal([&] { Model(folder.path()); });
  };
  CHECK(refused_with([](auto&) {}) == "");
  CHECK(refused_with([](auto& t) {
          t["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{3}, {1, 2, 3}};
        }) == "");
  CHECK(contains(refused_with([](auto& t) {
                   t["model.layers.0.self_attn.q_proj.bias"] = {{1}, {1}};
                 }),
                 "q_proj.bias' has no place"));
  CHECK(contains(refused_with([](auto& t) { t.erase("model.norm.weight"); }),
                 "no tensor 'model.norm.weight'"));
  CHECK(contains(refused_with([](auto& t) {
                   t.at("lm_head.weight").first = {12, 7};
                 }),
                 "is [12, 7] but"));
}

TEST_CASE("hugging_face: what the model cannot do is refused by name") {
  const auto set = [](const std::string& directory, const char* key, const json& value) {
    return refused(directory, [&](json& c) { c[key] = value; });
  };
  CHECK(contains(set(gpt3, "activation_function", "gelu"), "activation_function is '\"gelu\"'"));
  CHECK(contains(set(gpt3, "scale_attn_by_inverse_layer_idx", true), "scale_attn_by_inverse"));
  CHECK(contains(set(gpt3, "scale_attn_weights", false), "scale_attn_weights"));
  CHECK(contains(set(gpt3, "add_cross_attention", true), "add_cross_attention"));
  CHECK(contains(set(gpt3, "n_head", 5), "n_embd 64 is not a multiple of n_head 5"));
  CHECK(contains(set(gpt3, "attn_pdrop", 1.0), "attn_pdrop"));
  CHECK(contains(set(llama3, "hidden_act", "gelu"), "accepted: silu"));
  CHECK(contains(set(llama3, "attention_bias", true), "attention_bias is 'true'"));
  CHECK(contains(set(llama3, "mlp_bias", true), "mlp_bias"));
  CHECK(contains(set(llama3, "mlp_bias", "no"), "true or false"));
  CHECK(contains(set(llama3, "num_key_value_heads", 3), "num_key_value_heads 3"));
  CHECK(contains(set(llama3, "quantization_config", json::object()), "quantization_config"));
  CHECK(contains(set(llama3, "model_type", "mistral"), "accepted: gpt2, llama"));
  CHECK(contains(set(llama3, "model_type", nullptr), "no model_type"));
  CHECK(contains(set(llama3, "hidden_size", nullptr), "no hidden_size"));
  for (const json& count : {json(0), json(-4), json(64.0), json("64"), json(1e300),
                            json(18446744073709551615U), json::array()})
    CHECK(contains(set(llama3, "hidden_size", count), "hidden_size"));
  CHECK(contains(set(gpt3, "n_layer", 2000000000), "n_layer"));
  CHECK(contains(
      refusal([] { (void)mega::ckpt::parse_hugging_face_config<TransformerConfig>("[]", "c"); }),
      "not a JSON object"));
  // Absent where the families have a default.
  const auto bare = parse(llama3, [](json& c) {
    for (const char* key : {"head_dim", "num_key_value_heads", "tie_word_embeddings",
                            "rope_parameters", "rms_norm_eps", "hidden_act"})
      c.erase(key);
  });
  CHECK(bare.model.head_dim == 8);
  CHECK(bare.model.kv_heads == 8);
  CHECK_FALSE(bare.model.tied_head);
  CHECK(bare.model.rope.theta == 10000.0);
  CHECK(bare.model.norm_epsilon == 1e-6F);
  CHECK(parse(gpt3, [](json& c) { c.erase("tie_word_embeddings"); }).model.tied_head);
  CHECK(parse(gpt3, [](json& c) { c["n_inner"] = 100; }).model.ffn == 100);
}

TEST_CASE("hugging_face: rotary embedding in both spellings") {
  const json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  const auto check_llama3 = [](const TransformerConfig& c) {
    CHECK(c.rope.theta == 500000.0);
    CHECK(c.rope.scaling.kind == RopeScalingKind::llama3);
    CHECK(c.rope.scaling.factor == 8.0);
    CHECK(c.rope.scaling.high_freq_factor == 4.0);
    CHECK(c.rope.scaling.original_max_position_embeddings == 8192);
  };
  const auto older = [&](json& c) {
    c.erase("rope_parameters");
    c["rope_theta"] = 500000.0;
    c["rope_scaling"] = scaling;
  };
  const auto newer = [&](json& c) {
    c["rope_parameters"] = scaling;
    c["rope_parameters"]["rope_theta"] = 500000.0;
  };
  check_llama3(parse(llama3, older).model);
  check_llama3(parse(llama3, newer).model);
  check_llama3(mega::ckpt::parse_hugging_face_config<TransformerConfig>(
                   mega::ckpt::hugging_face_config_text(HuggingFaceFamily::llama,
                                                        parse(llama3, older).model),
                   "again")
                   .model);
  const auto linear = parse(llama3, [](json& c) {
    c.erase("rope_parameters");
    c["rope_scaling"] = {{"type", "linear"}, {"factor", 2}};
  });
  CHECK(linear.model.rope.scaling.kind == RopeScalingKind::linear);
  CHECK(linear.model.rope.scaling.factor == 2.0);
  CHECK(linear.model.rope.theta == 10000.0);

  CHECK(contains(refused(llama3,
                         [&](json& c) {
                           newer(c);
                           c["rope_parameters"]["rope_type"] = "yarn";
                         }),
                 "rope_type is '\"yarn\"'; accepted: default, linear, llama3"));
  CHECK(contains(refused(llama3,
                         [&](json& c) {
                           older(c);
                           c["rope_scaling"].erase("low_freq_factor");
                         }),
                 "has no low_freq_factor"));
  CHECK(contains(refused(llama3,
                         [&](json& c) {
                           newer(c);
                           c["rope_theta"] = 10000.0;
                         }),
                 "rope_theta"));
  CHECK(contains(refused(llama3, [&](json& c) { c["rope_scaling"] = scaling; }), "they differ"));
  CHECK(contains(refused(llama3, [&](json& c) { c["rope_parameters"]["rope_theta"] = 0; }),
                 "must be positive"));
  CHECK(contains(
      refused(llama3, [&](json& c) { c["rope_parameters"]["partial_rotary_factor"] = 0.5; }),
      "partial_rotary_factor"));
}
