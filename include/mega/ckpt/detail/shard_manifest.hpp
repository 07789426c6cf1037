/// @file  The user object of a sharded checkpoint's manifest: the state and the model's parameters,
/// to JSON and back.
/// opt-in: needs nlohmann-json.
#pragma once
#include <mega/ckpt/checkpoint_directory.hpp>
#include <mega/ckpt/detail/shard_writing.hpp>
#include <mega/ckpt/safetensors.hpp>
#include <mega/ckpt/sharded_store.hpp>
#include <mega/ckpt/strict_json.hpp>
#include <mega/core/error.hpp>
#include <mega/core/loss_scale.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/view.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt::detail {

/// Version of what the manifest's user object and the files hold.
inline constexpr Index sharded_version = 1;

inline std::string json_text(const nlohmann::json& json) {
  try {
    return json.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::usage, "a parameter name or the model's description is not UTF-8");
  }
}

/// A parameter of the model; in a checkpoint, also the files that hold it.
struct ModelParameter {
  std::string name;
  std::vector<Index> shape;
  Index size = 0;
  std::vector<int> files = {};  ///< places in Manifest::files, ascending
};

inline std::string shape_text(const std::vector<Index>& shape) {
  std::string out = "[";
  for (std::size_t d = 0; d < shape.size(); ++d) out += sentence(d == 0 ? "" : ", ", shape[d]);
  return out + "]";
}

/// The parameters of this rank's stages, told by one rank of each pipeline position.
template <class Sharded>
nlohmann::json own_parameters(const Sharded& sharded) {
  auto out = nlohmann::json::array();
  const Coordinates at = sharded.mesh.coordinates(sharded.world.rank());
  if (at[Axis::tensor] != 0 || at[Axis::context] != 0 || at[Axis::data] != 0) return out;
  for (const auto& e : sharded.store.table().entries()) {
    if (e.parameter.tied_to.empty()) out.push_back({e.order, e.parameter.name, e.parameter.shape});
  }
  return out;
}

/// All parameters of the model in its own order, from own_parameters() of all ranks.
inline std::vector<ModelParameter> whole_model(const std::vector<nlohmann::json>& by_rank,
                                               int count) {
  std::vector<ModelParameter> out(static_cast<std::size_t>(count));
  std::size_t known = 0;
  for (const auto& list : by_rank) {
    for (const auto& item : list) {
      ModelParameter& p = out.at(item.at(0).get<std::size_t>());
      p.name = item.at(1);
      p.shape = item.at(2).get<std::vector<Index>>();
      p.size = 1;
      for (const Index extent : p.shape) p.size *= extent;
      ++known;
    }
  }
  expects(known == out.size(), ErrorCode::logic, [&] {
    return sentence("the ranks of the mesh hold ", known, " parameters of a model of ", count);
  });
  return out;
}

inline nlohmann::json numbers_of(const TrainingState& state) {
  nlohmann::json out{{"steps_done", state.steps_done},
                     {"consumed_samples", state.consumed_samples},
                     {"seed", state.seed}};
  if (state.loss_scale) {
    out["loss_scale"] = {{"scale", state.loss_scale->scale},
                         {"good_steps", state.loss_scale->good_steps},
                         {"skipped_steps", state.loss_scale->skipped_steps}};
  }
  return out;
}

/// The manifest's user object. Throws unless the files hold each element of the model once.
inline nlohmann::json describe(const TrainingState& state, std::vector<ModelParameter> model,
                               const std::vector<SavedShard>& shards) {
  std::vector<Index> stored(model.size());
  for (std::size_t f = 0; f < shards.size(); ++f) {
    for (const auto& [order, count] : shards[f].parts) {
      stored[static_cast<std::size_t>(order)] += count;
      model[static_cast<std::size_t>(order)].files.push_back(static_cast<int>(f));
    }
  }
  nlohmann::json out{
      {"sharded_version", sharded_version}, {"state", numbers_of(state)}, {"model", state.model}};
  auto& list = out["parameters"] = nlohmann::json::array();
  for (std::size_t i = 0; i < model.size(); ++i) {
    const ModelParameter& p = model[i];
    expects(stored[i] == p.size, ErrorCode::logic, [&] {
      return sentence("the ranks wrote ", stored[i], " elements of parameter ", printable(p.name),
                      ", which has ", p.size);
    });
    list.push_back({{"name", p.name}, {"shape", p.shape}, {"files", p.files}});
  }
  return out;
}

/// Members of a JSON object from a file, with errors that say where they are missing.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string where)
      : object_(object), where_(std::move(where)) {
    expects(object_.is_object(), ErrorCode::bad_input,
            [&] { return sentence(where_, " is not a JSON object"); });
  }

  [[nodiscard]] bool contains(const char* key) const { return object_.contains(key); }
  [[nodiscard]] const nlohmann::json& at(const char* key) const {
    expects(object_.contains(key), ErrorCode::bad_input,
            [&] { return sentence(where_, ": key '", key, "' is missing"); });
    return object_.at(key);
  }
  [[nodiscard]] std::uint64_t unsigned_number(const char* key) const {
    expects(at(key).is_number_unsigned(), ErrorCode::bad_input,
            [&] { return sentence(where_, ": '", key, "' is not an integer from 0 to 2^64 - 1"); });
    return at(key).get<std::uint64_t>();
  }
  [[nodiscard]] Index number(const char* key) const { return as_index(at(key), key); }
  [[nodiscard]] float positive_float(const char* key) const {
    const nlohmann::json& value = at(key);
    constexpr double largest = std::numeric_limits<float>::max();
    const double given = value.is_number() ? value.get<double>() : 0;
    expects(given > 0 && given <= largest, ErrorCode::bad_input, [&] {
      return sentence(where_, ": '", key, "' holds ", printable(value.dump()),
                      ", not a positive number up to ", largest);
    });
    return static_cast<float>(given);
  }
  [[nodiscard]] const nlohmann::json& array(const char* key) const {
    expects(at(key).is_array(), ErrorCode::bad_input,
            [&] { return sentence(where_, ": '", key, "' is not an array"); });
    return at(key);
  }
  [[nodiscard]] std::vector<Index> numbers(const char* key) const {
    std::vector<Index> out;
    for (const auto& item : array(key)) out.push_back(as_index(item, key));
    return out;
  }
  [[nodiscard]] std::string text(const char* key) const {
    expects(at(key).is_string(), ErrorCode::bad_input,
            [&] { return sentence(where_, ": '", key, "' is not a string"); });
    return at(key).get<std::string>();
  }

 private:
  [[nodiscard]] Index as_index(const nlohmann::json& value, const char* key) const {
    expects(value.is_number_unsigned() && value.get<std::uint64_t>() >> 63 == 0,
            ErrorCode::bad_input, [&] {
              return sentence(where_, ": '", key, "' holds ", printable(value.dump()),
                              ", not an integer from 0 to 2^63 - 1");
            });
    return value.get<Index>();
  }

  const nlohmann::json& object_;
  std::string where_;
};

inline LossScale read_loss_scale(const JsonFields& fields, Index steps_done,
                                 const std::string& where) {
  const Index good = fields.number("good_steps"), skipped = fields.number("skipped_steps");
  expects(good <= std::numeric_limits<std::int32_t>::max() && skipped <= steps_done,
          ErrorCode::bad_input, [&] {
            return sentence(where, ": ", good, " good steps in a row and ", skipped,
                            " skipped ones do not fit ", steps_done, " steps");
          });
  return {fields.positive_float("scale"), static_cast<std::int32_t>(good), skipped};
}

/// Reads the user object of a manifest that this header's save wrote, or somebody else.
inline TrainingState read_state(const Checkpoint& checkpoint) {
  const std::string where = checkpoint.file(manifest_name);
  const JsonFields user(checkpoint.manifest.user, where);
  const Index version = user.number("sharded_version");
  expects(version == sharded_version, ErrorCode::bad_input, [&] {
    return sentence(where, ": sharded version ", version, " is unknown, this program reads ",
                    sharded_version);
  });
  const JsonFields numbers(user.at("state"), where + ": 'state'");
  TrainingState state{numbers.number("steps_done"), numbers.number("consumed_samples"),
                      numbers.unsigned_number("seed"), user.at("model")};
  expects(state.steps_done == checkpoint.manifest.step, ErrorCode::bad_input, [&] {
    return sentence(where, ": the state is that of step ", state.steps_done,
                    " in a checkpoint of step ", checkpoint.manifest.step);
  });
  if (numbers.contains("loss_scale")) {
    const std::string part = where + ": 'loss_scale'";
    state.loss_scale = read_loss_scale({numbers.at("loss_scale"), part}, state.steps_done, part);
  }
  return state;
}

inline std::vector<ModelParameter> read_parameters(const Checkpoint& checkpoint) {
  const std::string where = checkpoint.file(manifest_name);
  const auto file_count = static_cast<Index>(checkpoint.manifest.files.size());
  std::set<std::string> names;
  std::vector<ModelParameter> out;
  for (const auto& item : JsonFields(checkpoint.manifest.user, where).array("parameters")) {
    const JsonFields fields(item, where + ": an item of 'parameters'");
    ModelParameter p{fields.text("name"), fields.numbers("shape")};
    const auto refuse = [&](const std::string& reason) {
      throw Error(ErrorCode::bad_input,
                  sentence(where, ": parameter ", printable(p.name), ": ", reason));
    };
    if (!names.insert(p.name).second) refuse("it is listed twice");
    const auto bytes = tensor_bytes(DType::f32, p.shape);
    if (!bytes) refuse(sentence("shape ", shape_text(p.shape), " exceeds 2^63 bytes"));
    p.size = *bytes / element_bytes(DType::f32);
    for (const Index file : fields.numbers("files")) {
      if (file >= file_count) {
        refuse(sentence("it is said to be in file ", file, " of ", file_count));
      }
      if (!p.files.empty() && file <= p.files.back()) {
        refuse(sentence("its files ", p.files.back(), ", ", file, " are not ascending"));
      }
      p.files.push_back(static_cast<int>(file));
    }
    out.push_back(std::move(p));
  }
  return out;
}

/// @throws Error bad_input naming the first difference
inline void expect_same_model(const std::vector<ModelParameter>& model,
                              const std::vector<ModelParameter>& stored, const std::string& path) {
  std::map<std::string_view, const ModelParameter*> known;
  for (const ModelParameter& p : stored) known.emplace(p.name, &p);
  for (const ModelParameter& p : model) {
    const auto found = known.find(p.name);
    expects(found != known.end(), ErrorCode::bad_input, [&] {
      return sentence("checkpoint ", path, " is of another model: it has no parameter ",
                      printable(p.name));
    });
    expects(found->second->shape == p.shape, ErrorCode::bad_input, [&] {
      return sentence("checkpoint ", path, " is of another model: parameter ", printable(p.name),
                      " has shape ", shape_text(found->second->shape), " there and ",
                      shape_text(p.shape), " here");
    });
    known.erase(found);
  }
  for (const ModelParameter& p : stored) {
    expects(!known.contains(p.name), ErrorCode::bad_input, [&] {
      return sentence("checkpoint ", path, " is of another model: its parameter ",
                      printable(p.name), " does not exist here");
    });
  }
}

}  // namespace mega::inline v0::ckpt::detail
