/// @file  Models in the Hugging Face layout, GPT-2 and Llama families: config.json, safetensors.
/// opt-in: needs nlohmann-json.
#pragma once
#include <mega/ckpt/durable_file.hpp>
#include <mega/ckpt/safetensors.hpp>
#include <mega/ckpt/strict_json.hpp>
#include <mega/core/error.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt {

/// The sizes that a config.json names, in the members of nn::TransformerConfig.
template <class C>
concept describes_transformer = std::default_initializable<C> && requires(C c) {
  c.layers = 1;
  c.hidden = c.heads = c.kv_heads = c.head_dim = c.ffn = c.vocab = c.max_positions = Index{1};
  c.norm_epsilon = c.init_deviation = 1.0F;
  c.rope.theta = c.rope.scaling.factor = 1.0;
  c.rope.scaling.low_freq_factor = c.rope.scaling.high_freq_factor = 1.0;
  c.rope.scaling.original_max_position_embeddings = Index{1};
  c.rope.scaling.kind = decltype(c.rope.scaling.kind)::none;
  c.rope.scaling.kind = decltype(c.rope.scaling.kind)::linear;
  c.rope.scaling.kind = decltype(c.rope.scaling.kind)::llama3;
  c.dropout.embedding = c.dropout.attention = c.dropout.residual = 0.0F;
  c.tied_head = true;
};

enum class HuggingFaceFamily : std::uint8_t { gpt2, llama };

[[nodiscard]] constexpr std::string_view to_string(HuggingFaceFamily family) noexcept {
  return family == HuggingFaceFamily::gpt2 ? "gpt2" : "llama";
}

template <describes_transformer Config>
struct HuggingFaceConfig {
  HuggingFaceFamily family = HuggingFaceFamily::gpt2;
  Config model{};
};

namespace detail {

/// Typed access to the fields of one JSON object; null counts as absent, a fault names the key.
class Fields {
 public:
  Fields(const nlohmann::json& object, std::string where)
      : object_(object), where_(std::move(where)) {
    expects(object_.is_object(), ErrorCode::bad_input,
            [&] { return sentence(where_, " is not a JSON object"); });
  }

  [[nodiscard]] const std::string& where() const noexcept { return where_; }

  [[nodiscard]] const nlohmann::json* find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }

  [[nodiscard]] Index count(const char* key, std::optional<Index> absent = {},
                            Index most = Index{1} << 31) const {
    const auto* const value = required(key, absent.has_value());
    if (value == nullptr) return *absent;
    // Products of two counts stay inside Index.
    expects(value->is_number_integer() && *value >= 1 && *value <= most, ErrorCode::bad_input,
            [&] { return refusal(key, *value, sentence("a count of 1 to ", most)); });
    return value->get<Index>();
  }
  /// Bounded lower: the list of tensors is made from it before any file is looked at.
  [[nodiscard]] int layers(const char* key) const {
    return static_cast<int>(count(key, {}, 100'000));
  }

  [[nodiscard]] double number(const char* key, std::optional<double> absent = {}) const {
    const auto* const value = required(key, absent.has_value());
    if (value == nullptr) return *absent;
    expects(value->is_number(), ErrorCode::bad_input,
            [&] { return refusal(key, *value, "a number"); });
    return value->get<double>();
  }

  [[nodiscard]] float probability(const char* key, double absent) const {
    const double p = number(key, absent);
    expects(p >= 0.0 && p < 1.0, ErrorCode::bad_input,
            [&] { return refusal(key, *find(key), "a probability in [0, 1)"); });
    return static_cast<float>(p);
  }

  [[nodiscard]] bool flag(const char* key, bool absent) const {
    const auto* const value = find(key);
    if (value == nullptr) return absent;
    expects(value->is_boolean(), ErrorCode::bad_input,
            [&] { return refusal(key, *value, "true or false"); });
    return value->get<bool>();
  }

  /// One of the accepted words.
  std::string word(const char* key, std::initializer_list<std::string_view> accepted,
                   std::string_view absent) const {
    const auto* const value = find(key);
    if (value == nullptr && !absent.empty()) return std::string(absent);
    std::string all;
    for (const std::string_view w : accepted) all += sentence(all.empty() ? "" : ", ", w);
    expects(value != nullptr, ErrorCode::bad_input,
            [&] { return sentence(where_, " has no ", key, "; accepted are ", all); });
    const bool known =
        value->is_string() && std::find(accepted.begin(), accepted.end(),
                                        value->get_ref<const std::string&>()) != accepted.end();
    expects(known, ErrorCode::bad_input, [&] { return refusal(key, *value, all); });
    return value->get<std::string>();
  }

  /// A switch that changes the model and of which only one position is implemented.
  void only(const char* key, bool accepted) const {
    expects(flag(key, accepted) == accepted, ErrorCode::bad_input,
            [&] { return refusal(key, *find(key), accepted ? "true" : "false"); });
  }

  [[nodiscard]] std::string refusal(std::string_view key, const nlohmann::json& value,
                                    std::string_view accepted) const {
    using handler = nlohmann::json::error_handler_t;
    return sentence(where_, ": ", key, " is ",
                    printable(value.dump(-1, ' ', true, handler::replace)),
                    "; accepted: ", accepted);
  }

 private:
  [[nodiscard]] const nlohmann::json* required(const char* key, bool has_default) const {
    const auto* const value = find(key);
    expects(value != nullptr || has_default, ErrorCode::bad_input,
            [&] { return sentence(where_, " has no ", key); });
    return value;
  }

  const nlohmann::json& object_;
  std::string where_;
};

/// Both spellings of rotary embedding: rope_theta with rope_scaling beside it, and rope_parameters,
/// which holds both.
template <class Rope>
void read_rope(const Fields& config, Rope& rope) {
  const auto* const newer = config.find("rope_parameters");
  const auto* const older = config.find("rope_scaling");
  expects(newer == nullptr || older == nullptr || *newer == *older, ErrorCode::bad_input, [&] {
    return sentence(config.where(), " has both rope_parameters and rope_scaling, and they differ");
  });
  rope.theta = config.number("rope_theta", 10000.0);
  const auto* const object = newer != nullptr ? newer : older;
  if (object != nullptr) {
    const Fields fields(
        *object, config.where() + (newer != nullptr ? ": rope_parameters" : ": rope_scaling"));
    const double theta = fields.number("rope_theta", rope.theta);
    expects(config.find("rope_theta") == nullptr || theta == rope.theta, ErrorCode::bad_input, [&] {
      return sentence(fields.where(), ": rope_theta is ", theta, " but ", rope.theta,
                      " outside of it");
    });
    rope.theta = theta;
    const char* const key = fields.find("rope_type") != nullptr ? "rope_type" : "type";
    const std::string type = fields.word(key, {"default", "linear", "llama3"}, "default");
    auto& scaling = rope.scaling;
    using Kind = decltype(scaling.kind);
    if (type != "default") scaling.factor = fields.number("factor");
    if (type == "linear") scaling.kind = Kind::linear;
    if (type == "llama3") {
      scaling.kind = Kind::llama3;
      scaling.low_freq_factor = fields.number("low_freq_factor");
      scaling.high_freq_factor = fields.number("high_freq_factor");
      scaling.original_max_position_embeddings = fields.count("original_max_position_embeddings");
    }
    expects(fields.number("partial_rotary_factor", 1.0) == 1.0, ErrorCode::bad_input, [&] {
      return fields.refusal("partial_rotary_factor", *fields.find("partial_rotary_factor"), "1");
    });
  }
  expects(rope.theta > 0.0, ErrorCode::bad_input, [&] {
    return sentence(config.where(), ": rope_theta is ", rope.theta, "; it must be positive");
  });
}

/// The double with the fewest digits that reads back as the same float.
[[nodiscard]] inline double shortest(float value) {
  char digits[32] = {};
  const auto end = std::to_chars(digits, digits + 31, value);
  *end.ptr = '\0';
  return std::strtod(digits, nullptr);
}

[[nodiscard]] inline Index divided(const Fields& fields, std::string_view what, Index n,
                                   std::string_view by, Index d) {
  expects(n % d == 0, ErrorCode::bad_input, [&] {
    return sentence(fields.where(), ": ", what, " ", n, " is not a multiple of ", by, " ", d);
  });
  return n / d;
}

}  // namespace detail

/// Reads a config.json. Fields that change the arithmetic and that the Transformer does not have
/// are refused by name; other unknown fields are passed over.
/// @throws Error bad_input
template <describes_transformer Config>
[[nodiscard]] HuggingFaceConfig<Config> parse_hugging_face_config(std::string_view json,
                                                                  const std::string& where) {
  const nlohmann::json parsed = parse_json_strictly(json, where);
  const detail::Fields f(parsed, where);
  HuggingFaceConfig<Config> out;
  Config& c = out.model;
  const std::string type = f.word("model_type", {"gpt2", "llama"}, "");
  c.vocab = f.count("vocab_size");
  c.init_deviation = static_cast<float>(f.number("initializer_range", 0.02));
  expects(f.find("quantization_config") == nullptr, ErrorCode::bad_input, [&] {
    return sentence(where, ": quantization_config is set; only plain weights are read");
  });
  if (type == "gpt2") {
    out.family = HuggingFaceFamily::gpt2;
    c.layers = f.layers("n_layer");
    c.hidden = f.count("n_embd");
    c.heads = c.kv_heads = f.count("n_head");
    c.head_dim = detail::divided(f, "n_embd", c.hidden, "n_head", c.heads);
    c.ffn = f.count("n_inner", 4 * c.hidden);
    c.max_positions = f.count("n_positions");
    c.norm_epsilon = static_cast<float>(f.number("layer_norm_epsilon", 1e-5));
    c.dropout.embedding = f.probability("embd_pdrop", 0.1);
    c.dropout.attention = f.probability("attn_pdrop", 0.1);
    c.dropout.residual = f.probability("resid_pdrop", 0.1);
    c.tied_head = f.flag("tie_word_embeddings", true);
    f.word("activation_function", {"gelu_new", "gelu_pytorch_tanh"}, "gelu_new");
    f.only("scale_attn_weights", true);
    f.only("scale_attn_by_inverse_layer_idx", false);
    f.only("add_cross_attention", false);
  } else {
    out.family = HuggingFaceFamily::llama;
    c.layers = f.layers("num_hidden_layers");
    c.hidden = f.count("hidden_size");
    c.heads = f.count("num_attention_heads");
    c.kv_heads = f.count("num_key_value_heads", c.heads);
    (void)detail::divided(f, "num_attention_heads", c.heads, "num_key_value_heads", c.kv_heads);
    c.head_dim = f.find("head_dim") != nullptr
                     ? f.count("head_dim")
                     : detail::divided(f, "hidden_size", c.hidden, "num_attention_heads", c.heads);
    c.ffn = f.count("intermediate_size");
    c.max_positions = f.count("max_position_embeddings");
    c.norm_epsilon = static_cast<float>(f.number("rms_norm_eps", 1e-6));
    c.dropout.attention = f.probability("attention_dropout", 0.0);
    c.tied_head = f.flag("tie_word_embeddings", false);
    f.word("hidden_act", {"silu"}, "silu");
    f.only("attention_bias", false);
    f.only("mlp_bias", false);
    detail::read_rope(f, c.rope);
  }
  return out;
}

/// The text of a config.json that parse_hugging_face_config() reads back to the same sizes.
/// @throws Error usage where the family has no word for a size
template <describes_transformer Config>
[[nodiscard]] std::string hugging_face_config_text(HuggingFaceFamily family, const Config& c) {
  using detail::shortest;
  nlohmann::json out = {{"model_type", std::string(to_string(family))},
                        {"vocab_size", c.vocab},
                        {"initializer_range", shortest(c.init_deviation)},
                        {"tie_word_embeddings", c.tied_head},
                        {"dtype", "float32"}};
  if (family == HuggingFaceFamily::gpt2) {
    expects(c.kv_heads == c.heads && c.heads * c.head_dim == c.hidden, ErrorCode::usage, [&] {
      return sentence("gpt2 has no config for ", c.heads, " heads, ", c.kv_heads,
                      " kv heads of dim ", c.head_dim, " at hidden ", c.hidden,
                      "; it needs kv_heads = heads and heads * head_dim = hidden");
    });
    out.update({{"architectures", {"GPT2LMHeadModel"}},
                {"n_layer", c.layers},
                {"n_embd", c.hidden},
                {"n_head", c.heads},
                {"n_inner", c.ffn},
                {"n_positions", c.max_positions},
                {"layer_norm_epsilon", shortest(c.norm_epsilon)},
                {"embd_pdrop", shortest(c.dropout.embedding)},
                {"attn_pdrop", shortest(c.dropout.attention)},
                {"resid_pdrop", shortest(c.dropout.residual)},
                {"activation_function", "gelu_new"}});
  } else {
    expects(c.dropout.embedding == 0 && c.dropout.residual == 0, ErrorCode::usage,
            "llama has no config for dropout of embeddings or of the residual stream; set both to "
            "0");
    using Kind = decltype(c.rope.scaling.kind);
    const auto& scaling = c.rope.scaling;
    nlohmann::json rope = {{"rope_theta", c.rope.theta}, {"rope_type", "default"}};
    if (scaling.kind != Kind::none) {
      rope["rope_type"] = scaling.kind == Kind::linear ? "linear" : "llama3";
      rope["factor"] = scaling.factor;
    }
    if (scaling.kind == Kind::llama3) {
      rope["low_freq_factor"] = scaling.low_freq_factor;
      rope["high_freq_factor"] = scaling.high_freq_factor;
      rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings;
    }
    out.update({{"architectures", {"LlamaForCausalLM"}},
                {"num_hidden_layers", c.layers},
                {"hidden_size", c.hidden},
                {"num_attention_heads", c.heads},
                {"num_key_value_heads", c.kv_heads},
                {"head_dim", c.head_dim},
                {"intermediate_size", c.ffn},
                {"max_position_embeddings", c.max_positions},
                {"rms_norm_eps", shortest(c.norm_epsilon)},
                {"attention_dropout", shortest(c.dropout.attention)},
                {"attention_bias", false},
                {"mlp_bias", false},
                {"hidden_act", "silu"},
                {"rope_parameters", rope}});
  }
  return out.dump(2) + "\n";
}

/// A tensor of a file.
struct HuggingFaceTensor {
  std::string name;
  std::vector<Index> shape;
};

/// A parameter of the Transformer, and the file's tensors of which it is made: their rows one after
/// the other, or one tensor that is stored as [inputs, outputs].
struct HuggingFaceParameter {
  std::string name;
  std::vector<Index> shape;
  bool transposed = false;
  std::vector<HuggingFaceTensor> pieces;
};

/// All parameters of the model, the head always among them. A name of the file is given with the
/// prefix that the family writes.
template <describes_transformer Config>
[[nodiscard]] std::vector<HuggingFaceParameter> hugging_face_parameters(HuggingFaceFamily family,
                                                                        const Config& c) {
  std::vector<HuggingFaceParameter> out;
  const auto plain = [&](std::string name, std::string source, std::vector<Index> shape) {
    out.push_back({std::move(name), shape, false, {{std::move(source), std::move(shape)}}});
  };
  // Rows of several tensors, all with `cols` columns.
  const auto packed = [&](std::string name, Index cols,
                          std::vector<std::pair<std::string, Index>> sources) {
    HuggingFaceParameter p{std::move(name), {0, cols}, false, {}};
    for (auto& [source, rows] : sources) {
      p.shape[0] += rows;
      p.pieces.push_back({std::move(source), {rows, cols}});
    }
    out.push_back(std::move(p));
  };
  // GPT-2's Conv1D keeps [inputs, outputs].
  const auto conv = [&](const std::string& name, const std::string& source, Index outputs,
                        Index inputs) {
    out.push_back(
        {name + ".weight", {outputs, inputs}, true, {{source + ".weight", {inputs, outputs}}}});
    plain(name + ".bias", source + ".bias", {outputs});
  };
  const auto norm = [&](const std::string& name, const std::string& source) {
    plain(name + ".weight", source + ".weight", {c.hidden});
    if (family == HuggingFaceFamily::gpt2) plain(name + ".bias", source + ".bias", {c.hidden});
  };
  const Index query = c.heads * c.head_dim, key = c.kv_heads * c.head_dim;
  if (family == HuggingFaceFamily::gpt2) {
    plain("embedding.token.weight", "transformer.wte.weight", {c.vocab, c.hidden});
    plain("embedding.position.weight", "transformer.wpe.weight", {c.max_positions, c.hidden});
    for (int layer = 0; layer < c.layers; ++layer) {
      const std::string to = sentence("layers.", layer), from = sentence("transformer.h.", layer);
      norm(to + ".attention.norm", from + ".ln_1");
      conv(to + ".attention.qkv", from + ".attn.c_attn", query + 2 * key, c.hidden);
      conv(to + ".attention.out", from + ".attn.c_proj", c.hidden, query);
      norm(to + ".mlp.norm", from + ".ln_2");
      conv(to + ".mlp.up", from + ".mlp.c_fc", c.ffn, c.hidden);
      conv(to + ".mlp.down", from + ".mlp.c_proj", c.hidden, c.ffn);
    }
    norm("final_norm", "transformer.ln_f");
  } else {
    plain("embedding.token.weight", "model.embed_tokens.weight", {c.vocab, c.hidden});
    for (int layer = 0; layer < c.layers; ++layer) {
      const std::string to = sentence("layers.", layer), from = sentence("model.layers.", layer);
      norm(to + ".attention.norm", from + ".input_layernorm");
      packed(to + ".attention.qkv.weight", c.hidden,
             {{from + ".self_attn.q_proj.weight", query},
              {from + ".self_attn.k_proj.weight", key},
              {from + ".self_attn.v_proj.weight", key}});
      plain(to + ".attention.out.weight", from + ".self_attn.o_proj.weight", {c.hidden, query});
      norm(to + ".mlp.norm", from + ".post_attention_layernorm");
      packed(to + ".mlp.up.weight", c.hidden,
             {{from + ".mlp.gate_proj.weight", c.ffn}, {from + ".mlp.up_proj.weight", c.ffn}});
      plain(to + ".mlp.down.weight", from + ".mlp.down_proj.weight", {c.hidden, c.ffn});
    }
    norm("final_norm", "model.norm");
  }
  plain("head.weight", "lm_head.weight", {c.vocab, c.hidden});
  return out;
}

/// The tensors of one model, in one file or in several that an index names.
class HuggingFaceTensors {
 public:
  /// Opens `directory`/`file`; without it, the files that `file`.index.json names, which must lie
  /// in the same directory. @throws Error bad_input
  explicit HuggingFaceTensors(const std::string& directory,
                              const std::string& file = "model.safetensors") {
    const std::string whole = directory + "/" + file, index = whole + ".index.json";
    if (::access(whole.c_str(), F_OK) == 0 || ::access(index.c_str(), F_OK) != 0) {
      files_.emplace_back(whole);
      for (const TensorEntry& t : files_[0].tensors()) places_.emplace(t.name, 0);
      return;
    }
    const nlohmann::json parsed = parse_json_strictly(read_file(index, index_limit), index);
    const detail::Fields fields(parsed, index);
    const auto* const map = fields.find("weight_map");
    expects(map != nullptr && map->is_object(), ErrorCode::bad_input,
            [&] { return sentence(index, " has no object weight_map"); });
    std::map<std::string, std::size_t> opened;
    for (const auto& item : map->items()) {
      const nlohmann::json& value = item.value();
      expects(value.is_string() && is_plain(value.get_ref<const std::string&>()),
              ErrorCode::bad_input, [&] {
                return fields.refusal(printable(item.key()), value,
                                      "the plain name of a file beside");
              });
      const auto& name = value.get_ref<const std::string&>();
      const auto [at, is_new] = opened.emplace(name, files_.size());
      if (is_new) files_.emplace_back(directory + "/" + name);
      (void)files_[at->second].at(item.key());
      places_.emplace(item.key(), at->second);
    }
  }

  [[nodiscard]] bool holds(const std::string& name) const { return places_.count(name) != 0; }
  [[nodiscard]] const TensorEntry& entry(const std::string& name) const {
    return file(name).at(name);
  }
  /// Elements [first, first + out.size()) of a tensor as fp32.
  void read(const std::string& name, Index first, std::span<float> out) const {
    file(name).read_f32(entry(name), first, out);
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& place : places_) out.push_back(place.first);
    return out;
  }

 private:
  static constexpr Index index_limit = 100'000'000;

  /// Letters, digits, '-', '_' and '.', the last not in front: nothing that leads elsewhere.
  static bool is_plain(std::string_view name) {
    const auto allowed = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             c == '-' || c == '_' || c == '.';
    };
    return !name.empty() && name[0] != '.' && std::all_of(name.begin(), name.end(), allowed);
  }
  [[nodiscard]] const SafetensorsReader& file(const std::string& name) const {
    const auto at = places_.find(name);
    expects(at != places_.end(), ErrorCode::bad_input,
            [&] { return sentence("the model's files hold no tensor ", printable(name)); });
    return files_[at->second];
  }

  std::vector<SafetensorsReader> files_;
  std::map<std::string, std::size_t> places_;
};

/// A model directory open for reading. Every tensor is checked against config.json, and none may be
/// left over. Reads are const: several ranks that are threads may share one object.
///
/// Tied embeddings (tie_word_embeddings): the file may hold the token embedding, the head, or both
/// with equal bits; two different ones are refused. Untied: it holds both.
template <describes_transformer Config>
class HuggingFaceModel {
 public:
  /// @param file  another file of the same tensors, such as their gradients
  /// @throws Error bad_input
  explicit HuggingFaceModel(const std::string& directory,
                            const std::string& file = "model.safetensors")
      : where_(directory + "/config.json"),
        config_(parse_hugging_face_config<Config>(read_file(where_, config_limit), where_)),
        tensors_(directory, file) {
    for (HuggingFaceParameter& p : hugging_face_parameters(config_.family, config_.model)) {
      for (HuggingFaceTensor& piece : p.pieces) piece.name = stored_name(piece.name);
      parameters_.emplace(p.name, std::move(p));
    }
    resolve_tie();
    for (const auto& [name, p] : parameters_) check(p);
    check_leftovers();
  }

  [[nodiscard]] HuggingFaceFamily family() const noexcept { return config_.family; }
  [[nodiscard]] const Config& config() const noexcept { return config_.model; }

  /// Fills the piece that rank `position` of `degree` tensor ranks holds; padding becomes zero.
  /// @param p  as the Transformer declares it
  /// @throws Error usage if the model has no such parameter or it has another shape
  void load(const Parameter& p, int position, int degree, Vector<float> out) const {
    const auto at = parameters_.find(p.name);
    expects(at != parameters_.end() && at->second.shape == p.shape, ErrorCode::usage, [&] {
      return sentence("the model described by ", where_, " has no parameter '", p.name,
                      "' of this shape; was the Transformer made from its config?");
    });
    expects(out.size() == local_size(p, degree), ErrorCode::logic, [&] {
      return sentence("parameter '", p.name, "' needs ", local_size(p, degree), " elements, not ",
                      out.size());
    });
    std::fill(out.data(), out.data() + out.size(), 0.0F);
    const std::vector<ShardRun> runs = shard_runs(p, position, degree);
    if (at->second.transposed) {
      load_transposed(at->second, runs, out);
    } else {
      for (const ShardRun& run : runs) load_run(at->second, run, out);
    }
  }

 private:
  static constexpr Index config_limit = 1'000'000;

  /// The name as the files spell it: with the prefix, or, from a model without its head, without.
  [[nodiscard]] std::string stored_name(const std::string& name) const {
    if (tensors_.holds(name)) return name;
    const std::string_view prefix =
        config_.family == HuggingFaceFamily::gpt2 ? "transformer." : "model.";
    const bool has_prefix = name.compare(0, prefix.size(), prefix) == 0;
    const std::string bare = has_prefix ? name.substr(prefix.size()) : name;
    return tensors_.holds(bare) ? bare : name;
  }

  void resolve_tie() {
    HuggingFaceTensor& token = parameters_.at("embedding.token.weight").pieces[0];
    HuggingFaceTensor& head = parameters_.at("head.weight").pieces[0];
    const bool has_token = tensors_.holds(token.name), has_head = tensors_.holds(head.name);
    if (!config_.model.tied_head) {
      expects(has_token && has_head, ErrorCode::bad_input, [&] {
        return sentence(where_, " says tie_word_embeddings false, but the files hold no ",
                        has_token ? head.name : token.name);
      });
      return;
    }
    if (has_token && has_head) {
      expects(equal(token.name, head.name), ErrorCode::bad_input, [&] {
        return sentence(where_, " says tie_word_embeddings true, but ", token.name, " and ",
                        head.name, " differ; set it to false or remove one of the two");
      });
      tied_copy_ = head.name;
    }
    if (!has_token && has_head) token.name = head.name;
    head.name = token.name;
  }

  [[nodiscard]] bool equal(const std::string& a, const std::string& b) const {
    const TensorEntry &x = tensors_.entry(a), &y = tensors_.entry(b);
    if (x.shape != y.shape || x.dtype != y.dtype) return false;
    constexpr Index block = 1 << 18;
    const Index elements = x.bytes / element_bytes(x.dtype);
    std::vector<float> left(block), right(block);
    for (Index first = 0; first < elements; first += block) {
      const auto count = static_cast<std::size_t>(std::min(block, elements - first));
      tensors_.read(a, first, std::span(left).first(count));
      tensors_.read(b, first, std::span(right).first(count));
      if (!std::equal(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(count),
                      right.begin()))
        return false;
    }
    return true;
  }

  void check(const HuggingFaceParameter& p) const {
    for (const HuggingFaceTensor& piece : p.pieces) {
      const TensorEntry& stored = tensors_.entry(piece.name);
      expects(stored.shape == piece.shape, ErrorCode::bad_input, [&] {
        return sentence("tensor ", printable(piece.name), " is ", text(stored.shape), " but ",
                        where_, " asks for ", text(piece.shape));
      });
    }
  }

  /// Weights that nothing reads mean another model than config.json describes.
  void check_leftovers() const {
    std::map<std::string, int> used;
    for (const auto& [name, p] : parameters_) {
      for (const HuggingFaceTensor& piece : p.pieces) ++used[piece.name];
    }
    if (!tied_copy_.empty()) ++used[tied_copy_];
    for (const std::string& name : tensors_.names()) {
      expects(used.count(name) != 0 || is_buffer(name), ErrorCode::bad_input, [&] {
        return sentence("tensor ", printable(name), " has no place in the model that ", where_,
                        " describes");
      });
    }
  }

  /// Constants that older exports keep beside the weights.
  static bool is_buffer(std::string_view name) {
    for (const std::string_view end : {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"}) {
      if (name.size() >= end.size() && name.substr(name.size() - end.size()) == end) return true;
    }
    return false;
  }

  static std::string text(const std::vector<Index>& shape) {
    std::string out = "[";
    for (const Index extent : shape) out += sentence(out.size() > 1 ? ", " : "", extent);
    return out + "]";
  }
  static Index elements(const HuggingFaceTensor& t) {
    Index n = 1;
    for (const Index extent : t.shape) n *= extent;
    return n;
  }

  void load_run(const HuggingFaceParameter& p, const ShardRun& run, Vector<float> out) const {
    Index begin = 0;
    for (const HuggingFaceTensor& piece : p.pieces) {
      const Index end = begin + elements(piece);
      const Index first = std::max(begin, run.global);
      const Index count = std::min(end, run.global + run.count) - first;
      if (count > 0)
        tensors_.read(piece.name, first - begin,
                      out.slice(run.local + first - run.global, count).span());
      begin = end;
    }
  }

  void load_transposed(const HuggingFaceParameter& p, const std::vector<ShardRun>& runs,
                       Vector<float> out) const {
    const Index outputs = p.shape[0], inputs = p.shape[1];
    std::vector<float> stored(static_cast<std::size_t>(outputs * inputs));
    tensors_.read(p.pieces[0].name, 0, stored);
    for (const ShardRun& run : runs) {
      for (Index i = 0; i < run.count; ++i) {
        const Index row = (run.global + i) / inputs, col = (run.global + i) % inputs;
        out(run.local + i) = stored[static_cast<std::size_t>(col * outputs + row)];
      }
    }
  }

  std::string where_;
  HuggingFaceConfig<Config> config_;
  HuggingFaceTensors tensors_;
  std::map<std::string, HuggingFaceParameter> parameters_;
  std::string tied_copy_;
};

/// Writes config.json and model.safetensors into `directory`, which may exist but holds neither;
/// config.json comes last, so a directory that has it is complete. A tied head is written once, as
/// the token embedding. Holds two copies of one parameter in memory.
/// @param values  values(name, span) fills the whole parameter of that name, [outputs, inputs],
///                without padding of the vocabulary
/// @throws Error usage, not_durable
template <describes_transformer Config, class Values>
requires std::invocable<const Values&, const std::string&, std::span<float>>
void export_hugging_face(const std::string& directory, HuggingFaceFamily family,
                         const Config& config, const Values& values) {
  const std::string text = hugging_face_config_text(family, config);
  std::vector<HuggingFaceParameter> parameters = hugging_face_parameters(family, config);
  if (config.tied_head) parameters.pop_back();
  std::vector<TensorSpec> specs;
  for (const HuggingFaceParameter& p : parameters) {
    for (const HuggingFaceTensor& piece : p.pieces)
      specs.push_back({piece.name, DType::f32, piece.shape});
  }
  make_directories(directory);
  SafetensorsWriter<> writer(directory + "/model.safetensors", std::move(specs),
                             {{"format", "pt"}});
  std::vector<float> whole, stored;
  for (const HuggingFaceParameter& p : parameters) {
    std::size_t count = 1;
    for (const Index extent : p.shape) count *= static_cast<std::size_t>(extent);
    whole.assign(count, 0.0F);
    values(p.name, std::span<float>(whole));
    if (p.transposed) {
      const auto outputs = static_cast<std::size_t>(p.shape[0]);
      const auto inputs = static_cast<std::size_t>(p.shape[1]);
      stored.resize(count);
      for (std::size_t o = 0; o < outputs; ++o)
        for (std::size_t i = 0; i < inputs; ++i) stored[i * outputs + o] = whole[o * inputs + i];
      whole.swap(stored);
    }
    std::span<const float> rest(whole);
    for (const HuggingFaceTensor& piece : p.pieces) {
      std::size_t size = 1;
      for (const Index extent : piece.shape) size *= static_cast<std::size_t>(extent);
      writer.write(piece.name, std::as_bytes(rest.first(size)));
      rest = rest.subspan(size);
    }
  }
  writer.finish();
  DurableFile file(directory + "/config.json");
  file.write(std::as_bytes(std::span(text)));
  file.finish();
  fsync_directory(directory);
}

}  // namespace mega::inline v0::ckpt
