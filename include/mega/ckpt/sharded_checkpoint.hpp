/// @file  Checkpoints that every rank writes a part of and that load under any other layout: tp,
/// dp, pp, chunks a rank, sharded optimizer or not.
/// opt-in: needs nlohmann-json and xxhash (link xxhash).
///
/// Stored are the values and both moments of every parameter of the model, in fp32, by name, in
/// the coordinates of the whole tensor without padding. Each rank that owns elements writes one
/// safetensors file; per parameter it holds
///   runs/NAME           I64 [n, 2]  first element and count of each run, in the whole tensor
///   value/NAME          F32 [m]     the runs' elements one after the other
///   first_moment/NAME   F32 [m]
///   second_moment/NAME  F32 [m]
/// The runs of all files tile each tensor exactly once; nothing is written twice. The manifest's
/// user object lists every parameter with its shape and its files.
#pragma once
#include <mega/ckpt/checkpoint_directory.hpp>
#include <mega/ckpt/durable_file.hpp>
#include <mega/ckpt/safetensors.hpp>
#include <mega/ckpt/strict_json.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/core/loss_scale.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>

#include <nlohmann/json.hpp>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt {

/// How far a run has come, and of what. Random numbers need no more: they are keyed by seed and
/// step.
struct TrainingState {
  Index steps_done = 0;
  Index consumed_samples = 0;  ///< of all data-parallel ranks together, so any layout can go on
  std::uint64_t seed = 0;
  nlohmann::json model = nlohmann::json::object();  ///< the caller's description; rank 0's is kept
  std::optional<LossScale> loss_scale = std::nullopt;  ///< of training in fp16
};

struct LoadedCheckpoint {
  std::string path;
  TrainingState state;
  std::vector<SkippedCheckpoint> skipped;  ///< newer ones that are incomplete or damaged, and why
};

template <class S>
concept has_parameter_table = requires(const S& store) {
  store.table().entries();
  store.table().regions();
  store.table().position();
  store.table().model_parameters();
};

template <class S>
concept has_flat_buffers = requires(const S& store) {
  store.owned();
  store.masters(std::size_t{0}, store.owned()[0].values);
  store.first_moments();
  store.second_moments();
};

/// Model: train::ParameterStore.
template <class S>
concept parameter_store = has_parameter_table<S> && has_flat_buffers<S>;

template <class C, class Device>
concept gathers_bytes =
    comm::has_rank_and_size<C> && comm::has_all_gather<C, typename Device::stream_type, std::byte>;

/// A rank's parameters, its place in the mesh and its way to the other ranks: what a collective
/// save or load needs of it. Refers to all, owns nothing.
template <parameter_store Store, device_policy Device, gathers_bytes<Device> Comm>
struct ShardedStore {
  Store& store;
  Mesh mesh;  ///< of `world`
  Comm& world;
  Device& device;  ///< allocates the memory of the exchanges
  typename Device::stream_type& stream;
};
template <class Store, class Device, class Comm>
ShardedStore(Store&, Mesh, Comm&, Device&, typename Device::stream_type&)
    -> ShardedStore<Store, Device, Comm>;

namespace detail {

/// Version of what the manifest's user object and the files hold.
inline constexpr Index sharded_version = 1;

inline constexpr std::string_view runs_prefix = "runs/";
inline constexpr std::array<std::string_view, 3> data_prefixes{"value/", "first_moment/",
                                                               "second_moment/"};

inline std::string tensor_name(std::string_view prefix, std::string_view parameter) {
  return std::string(prefix) + std::string(parameter);
}
inline std::string shard_file_name(int rank) {
  std::array<char, 40> name{};
  std::snprintf(name.data(), name.size(), "rank-%05d.safetensors", rank);
  return name.data();
}
inline std::string last_component(std::string_view path) {
  return std::string(path.substr(path.rfind('/') + 1));
}

inline std::string json_text(const nlohmann::json& json) {
  try {
    return json.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::usage, "a parameter name or the model's description is not UTF-8");
  }
}

/// What a failed save is called on all ranks: a wrong request stays one.
enum class Purpose : std::uint8_t { save, load };

/// Lets the ranks of a save or load go on together or stop together.
template <class Device, class Comm>
class Agreement {
 public:
  template <class Store>
  Agreement(const ShardedStore<Store, Device, Comm>& sharded, Purpose purpose)
      : world_(sharded.world),
        device_(sharded.device),
        stream_(sharded.stream),
        purpose_(purpose) {}

  /// The strings of all ranks, in rank order.
  [[nodiscard]] std::vector<std::string> gather(const std::string& mine) {
    const auto ranks = static_cast<std::size_t>(world_.size());
    const std::uint64_t size = mine.size();
    std::vector<std::uint64_t> sizes(ranks);
    gather_blocks(std::as_bytes(std::span(&size, 1)), std::as_writable_bytes(std::span(sizes)));
    const auto longest = static_cast<std::size_t>(*std::max_element(sizes.begin(), sizes.end()));
    std::string padded = mine;
    padded.resize(longest);
    std::string all(longest * ranks, '\0');
    if (longest > 0) {
      gather_blocks(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
    }
    std::vector<std::string> out;
    for (std::size_t r = 0; r < ranks; ++r)
      out.push_back(all.substr(r * longest, static_cast<std::size_t>(sizes[r])));
    return out;
  }

  /// Runs work() -> std::string on every rank and returns the results of all; if it threw anywhere,
  /// every rank throws what the first failing one said.
  template <class Work>
  std::vector<std::string> all_or_none(const Work& work) {
    std::string reply;
    try {
      reply = "+" + work();
    } catch (const Error& fault) {
      reply = failure(fault.code(), fault.what());
    } catch (const std::exception& fault) {
      reply = failure(ErrorCode::peer_failed, fault.what());
    } catch (...) {
      reply = failure(ErrorCode::peer_failed, "an exception that is not a std::exception");
    }
    auto replies = gather(reply);
    for (std::size_t r = 0; r < replies.size(); ++r) {
      if (replies[r].front() != '+') {
        const auto code = static_cast<ErrorCode>(replies[r].front());
        replies[r].erase(0, 1);
        throw Error(code, replies.size() == 1 ? replies[r]
                                              : sentence("rank ", r, ": ", std::move(replies[r])));
      }
      replies[r].erase(0, 1);
    }
    return replies;
  }

 private:
  static_assert(static_cast<int>(ErrorCode::logic) < '+');

  [[nodiscard]] std::string failure(ErrorCode code, const char* what) const {
    if (purpose_ == Purpose::save && code != ErrorCode::usage) code = ErrorCode::not_durable;
    return static_cast<char>(code) + std::string(what);
  }

  void gather_blocks(std::span<const std::byte> mine, std::span<std::byte> out) {
    const auto memory = device_.allocate(out.size());
    const auto count = static_cast<Index>(mine.size());
    const Vector<std::byte> all(memory.data(), static_cast<Index>(out.size()));
    const Vector<std::byte> own = all.slice(world_.rank() * count, count);
    upload(stream_, own, Vector<const std::byte>(mine.data(), count));
    world_.all_gather(stream_, all, Vector<const std::byte>(own));
    download(stream_, Vector<std::byte>(out.data(), all.size()), Vector<const std::byte>(all));
    stream_.synchronize();
  }

  Comm& world_;
  Device& device_;
  typename Device::stream_type& stream_;
  Purpose purpose_;
};
template <class Store, class Device, class Comm>
Agreement(const ShardedStore<Store, Device, Comm>&, Purpose) -> Agreement<Device, Comm>;

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

template <class Sharded>
void check_layout(const Sharded& sharded) {
  validate(sharded.mesh, sharded.world.size());
  const auto place = sharded.store.table().position();
  const Coordinates at = sharded.mesh.coordinates(sharded.world.rank());
  expects(place.tensor == at[Axis::tensor] && place.tensor_degree == sharded.mesh.tensor &&
              place.data == at[Axis::data] && place.data_degree == sharded.mesh.data,
          ErrorCode::usage, [&] {
            return sentence("the parameter table is that of tensor rank ", place.tensor, " of ",
                            place.tensor_degree, " and data rank ", place.data, " of ",
                            place.data_degree, ", not of rank ", sharded.world.rank(), " in ",
                            to_string(sharded.mesh));
          });
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

/// The runs of a rank's tensor inside its local elements [begin, end).
inline std::vector<ShardRun> runs_within(const Parameter& p, int position, int degree, Index begin,
                                         Index end) {
  std::vector<ShardRun> out;
  for (const ShardRun& run : shard_runs(p, position, degree)) {
    const Index first = std::max(begin, run.local);
    const Index last = std::min(end, run.local + run.count);
    if (first < last) out.push_back({run.global + first - run.local, first, last - first});
  }
  return out;
}

/// What this rank writes of one parameter.
struct SavedPart {
  int order = 0;
  std::size_t chunk = 0;
  std::string name;
  std::vector<ShardRun> runs;  ///< `local` counts from the part's first element
  Index extent = 0;            ///< elements of the part with padding
  Index count = 0;             ///< and without
  Index value = 0;             ///< its first element in the flat values
  Index moment = 0;            ///< and in the flat moments
};

/// Every element of the model has one writer: the owner of a tied parameter, tensor rank 0 of a
/// replicated one, context rank 0, and of the data-parallel ranks the one whose piece it lies in,
/// whether or not the optimizer is sharded.
template <class Sharded>
std::vector<SavedPart> saved_parts(const Sharded& sharded) {
  std::vector<SavedPart> out;
  if (sharded.mesh.coordinates(sharded.world.rank())[Axis::context] != 0) return out;
  const auto& table = sharded.store.table();
  const auto place = table.position();
  for (const auto& e : table.entries()) {
    const bool replica = e.parameter.shard.replicated() && place.tensor != 0;
    if (!e.parameter.tied_to.empty() || replica) continue;
    const auto chunk = static_cast<std::size_t>(e.chunk);
    const auto part =
        table.piece(table.regions()[chunk], place.data).intersect({e.value, e.value + e.size});
    if (part.size() == 0) continue;
    const Index first = part.begin - e.value;
    SavedPart saved{
        e.order, chunk, e.parameter.name,
        runs_within(e.parameter, place.tensor, place.tensor_degree, first, first + part.size())};
    if (saved.runs.empty()) continue;
    for (ShardRun& run : saved.runs) {
      run.local -= first;
      saved.count += run.count;
    }
    const auto& own = sharded.store.owned()[chunk];
    saved.extent = part.size();
    saved.value = part.begin;
    saved.moment = own.moments + part.begin - own.values.begin;
    out.push_back(std::move(saved));
  }
  return out;
}

/// Writes this rank's file, one tensor in host memory at a time.
template <class Sharded>
FileRecord write_shard(const Sharded& sharded, const CheckpointWriter& writer,
                       const std::vector<SavedPart>& parts) {
  std::vector<TensorSpec> specs;  // wide elements first
  for (const SavedPart& part : parts) {
    specs.push_back({tensor_name(runs_prefix, part.name),
                     DType::i64,
                     {static_cast<Index>(part.runs.size()), 2}});
  }
  for (const SavedPart& part : parts) {
    for (const auto prefix : data_prefixes)
      specs.push_back({tensor_name(prefix, part.name), DType::f32, {part.count}});
  }
  SafetensorsWriter file(writer.add_file(shard_file_name(sharded.world.rank())), std::move(specs));
  for (const SavedPart& part : parts) {
    std::vector<Index> numbers;
    for (const ShardRun& run : part.runs) numbers.insert(numbers.end(), {run.global, run.count});
    file.write(tensor_name(runs_prefix, part.name), std::as_bytes(std::span(numbers)));
  }
  std::vector<float> host;
  for (const SavedPart& part : parts) {
    const std::array<Vector<float>, 3> sources{
        sharded.store.masters(part.chunk, {part.value, part.value + part.extent}),
        sharded.store.first_moments().slice(part.moment, part.extent),
        sharded.store.second_moments().slice(part.moment, part.extent)};
    for (std::size_t k = 0; k < sources.size(); ++k) {
      host.resize(static_cast<std::size_t>(part.extent));
      download(sharded.stream, Vector<float>(host.data(), part.extent),
               Vector<const float>(sources[k]));
      sharded.stream.synchronize();
      Index kept = 0;  // padding between the runs is left out
      for (const ShardRun& run : part.runs) {
        if (run.local != kept) {
          std::memmove(host.data() + kept, host.data() + run.local,
                       sizeof(float) * static_cast<std::size_t>(run.count));
        }
        kept += run.count;
      }
      file.write(tensor_name(data_prefixes[k], part.name),
                 std::as_bytes(std::span(host).first(static_cast<std::size_t>(kept))));
    }
  }
  return file.finish();
}

/// One rank's file as the others see it.
struct SavedShard {
  int rank = 0;
  FileRecord file;
  std::vector<std::pair<int, Index>> parts;  ///< order and elements of each parameter
};

inline nlohmann::json shard_to_json(const FileRecord& file, const std::vector<SavedPart>& parts) {
  nlohmann::json out{{"name", file.name}, {"bytes", file.bytes}, {"xxh3", file.xxh3}};
  auto& list = out["parts"] = nlohmann::json::array();
  for (const SavedPart& part : parts) list.push_back({part.order, part.count});
  return out;
}
/// Ranks without elements of their own wrote nothing and replied nothing.
inline std::vector<SavedShard> shards_from_json(const std::vector<std::string>& replies) {
  std::vector<SavedShard> out;
  for (std::size_t rank = 0; rank < replies.size(); ++rank) {
    if (replies[rank].empty()) continue;
    const auto json = nlohmann::json::parse(replies[rank]);
    out.push_back({static_cast<int>(rank),
                   {json.at("name").get<std::string>(), json.at("bytes").get<Index>(),
                    json.at("xxh3").get<std::uint64_t>()},
                   json.at("parts").get<std::vector<std::pair<int, Index>>>()});
  }
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

/// The files of a checkpoint, opened when needed and some of them kept open.
class ShardReaders {
 public:
  explicit ShardReaders(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  /// Valid until the next call.
  [[nodiscard]] const SafetensorsReader& operator()(int file) {
    if (const auto open = open_.find(file); open != open_.end()) return open->second;
    if (open_.size() == most_open) open_.clear();
    const auto& record = checkpoint_.manifest.files[static_cast<std::size_t>(file)];
    return open_.try_emplace(file, checkpoint_.file(record.name)).first->second;
  }

 private:
  static constexpr std::size_t most_open = 64;  // far below a process's limit of descriptors

  const Checkpoint& checkpoint_;
  std::map<int, SafetensorsReader> open_;
};

/// @throws Error bad_input if a file holds a tensor that the manifest does not place there
inline void expect_nothing_extra(const SafetensorsReader& reader, int file,
                                 const std::map<std::string_view, const ModelParameter*>& known) {
  for (const TensorEntry& tensor : reader.tensors()) {
    const auto listed = [&](std::string_view prefix) {
      if (!tensor.name.starts_with(prefix)) return false;
      const auto found = known.find(std::string_view(tensor.name).substr(prefix.size()));
      return found != known.end() &&
             std::binary_search(found->second->files.begin(), found->second->files.end(), file);
    };
    expects(listed(runs_prefix) || std::any_of(data_prefixes.begin(), data_prefixes.end(), listed),
            ErrorCode::bad_input, [&] {
              return sentence(reader.path(), ": tensor ", printable(tensor.name),
                              " is not among those that the manifest places in this file");
            });
  }
}

/// Consecutive elements of a parameter, where a file has them.
struct StoredRun {
  Index global = 0;
  Index count = 0;
  int file = 0;
  Index position = 0;  ///< first element in the file's tensors
};

/// Appends what one file says about a parameter. Every number is checked before it is used.
inline void append_runs(std::vector<StoredRun>& out, const SafetensorsReader& reader, int file,
                        const ModelParameter& p) {
  const auto refuse = [&](std::string_view tensor, const std::string& reason) {
    throw Error(ErrorCode::bad_input,
                sentence(reader.path(), ": tensor ", printable(tensor), ": ", reason));
  };
  const std::string name = tensor_name(runs_prefix, p.name);
  const TensorEntry& runs = reader.at(name);
  if (runs.dtype != DType::i64 || runs.shape.size() != 2 || runs.shape[1] != 2) {
    refuse(name, sentence("runs are I64 of shape [n, 2], not ", to_string(runs.dtype), " ",
                          shape_text(runs.shape)));
  }
  std::vector<Index> numbers(static_cast<std::size_t>(runs.bytes) / sizeof(Index));
  reader.read(runs, std::as_writable_bytes(std::span(numbers)));
  Index position = 0;
  for (std::size_t i = 0; i < numbers.size(); i += 2) {
    const Index global = numbers[i], count = numbers[i + 1];
    if (global < 0 || count < 1 || global > p.size || count > p.size - global) {
      refuse(name, sentence("run ", i / 2, " of ", count, " elements from element ", global,
                            " does not lie in a tensor of ", p.size));
    }
    if (count > p.size - position) {
      refuse(name, sentence("its runs have more elements than the tensor's ", p.size));
    }
    out.push_back({global, count, file, position});
    position += count;
  }
  for (const auto prefix : data_prefixes) {
    const std::string data_name = tensor_name(prefix, p.name);
    const TensorEntry& data = reader.at(data_name);
    if (data.dtype != DType::f32 || data.shape != std::vector<Index>{position}) {
      refuse(data_name, sentence("the runs need F32 [", position, "], not ", to_string(data.dtype),
                                 " ", shape_text(data.shape)));
    }
  }
}

/// Where all elements of a parameter are stored, ascending.
/// @throws Error bad_input if the files do not tile the tensor
inline std::vector<StoredRun> stored_runs(ShardReaders& readers, const Checkpoint& checkpoint,
                                          const ModelParameter& p) {
  std::vector<StoredRun> runs;
  for (const int file : p.files) append_runs(runs, readers(file), file, p);
  std::sort(runs.begin(), runs.end(), [](const StoredRun& a, const StoredRun& b) {
    return a.global != b.global ? a.global < b.global : a.file < b.file;
  });
  const auto file_name = [&](const StoredRun& run) {
    return checkpoint.manifest.files[static_cast<std::size_t>(run.file)].name;
  };
  const auto refuse_hole = [&](Index begin, Index end) {
    throw Error(ErrorCode::bad_input,
                sentence("checkpoint ", checkpoint.path, ": parameter ", printable(p.name),
                         ": elements ", begin, " to ", end - 1, " of ", p.size, " are in no file"));
  };
  Index next = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    expects(runs[i].global >= next, ErrorCode::bad_input, [&] {
      return sentence("checkpoint ", checkpoint.path, ": parameter ", printable(p.name),
                      ": element ", runs[i].global, " is stored twice, in ", file_name(runs[i - 1]),
                      " and in ", file_name(runs[i]));
    });
    if (runs[i].global > next) refuse_hole(next, runs[i].global);
    next = runs[i].global + runs[i].count;
  }
  if (next < p.size) refuse_hole(next, p.size);
  return runs;
}

/// One read: `count` elements from `position` of a file's tensor to `local` of a rank's.
struct ShardRead {
  int file = 0;
  Index position = 0;
  Index local = 0;
  Index count = 0;
};

/// The reads that fill `needed`, as few as possible: under the layout of the save, one a file.
/// @pre  `stored` tiles the tensor
inline std::vector<ShardRead> plan_reads(const std::vector<StoredRun>& stored,
                                         const std::vector<ShardRun>& needed) {
  std::vector<ShardRead> out;
  for (const ShardRun& want : needed) {
    auto at = std::upper_bound(stored.begin(), stored.end(), want.global,
                               [](Index g, const StoredRun& run) { return g < run.global; });
    --at;
    for (Index done = 0; done < want.count; ++at) {
      const Index skipped = want.global + done - at->global;
      const ShardRead read{at->file, at->position + skipped, want.local + done,
                           std::min(at->count - skipped, want.count - done)};
      done += read.count;
      if (!out.empty() && out.back().file == read.file &&
          out.back().position + out.back().count == read.position &&
          out.back().local + out.back().count == read.local) {
        out.back().count += read.count;
      } else {
        out.push_back(read);
      }
    }
  }
  return out;
}

/// Fills this rank's values and moments; padding becomes zero. Tied copies read their owner's.
template <class Sharded>
void read_shards(const Sharded& sharded, ShardReaders& readers,
                 const std::map<std::string_view, std::vector<StoredRun>>& stored) {
  std::vector<float> host;
  const auto read = [&](std::string_view prefix, const std::string& name,
                        const std::vector<ShardRead>& reads, Index first, Index count) {
    host.assign(static_cast<std::size_t>(count), 0.0F);
    for (const ShardRead& one : reads) {
      const SafetensorsReader& reader = readers(one.file);
      reader.read_f32(reader.at(tensor_name(prefix, name)), one.position,
                      std::span(host).subspan(static_cast<std::size_t>(one.local - first),
                                              static_cast<std::size_t>(one.count)));
    }
    return Vector<const float>(host.data(), count);
  };
  const auto fetch = [&](std::string_view prefix, const std::string& name,
                         const std::vector<ShardRead>& reads, Index first, Vector<float> to) {
    upload(sharded.stream, to, read(prefix, name, reads, first, to.size()));
    sharded.stream.synchronize();
  };
  auto& store = sharded.store;
  const auto place = store.table().position();
  for (const auto& e : store.table().entries()) {
    if (e.alias) continue;
    const std::string& name = e.parameter.tied_to.empty() ? e.parameter.name : e.parameter.tied_to;
    const std::vector<StoredRun>& runs = stored.at(name);
    const auto reads = [&](Index begin, Index end) {
      return plan_reads(runs,
                        runs_within(e.parameter, place.tensor, place.tensor_degree, begin, end));
    };
    store.load(sharded.stream, e, read(data_prefixes[0], name, reads(0, e.size), 0, e.size));
    const auto& own = store.owned()[static_cast<std::size_t>(e.chunk)];
    const auto part = own.values.intersect({e.value, e.value + e.size});
    if (part.size() == 0) continue;
    const Index first = part.begin - e.value;
    const Index moment = own.moments + part.begin - own.values.begin;
    const auto moment_reads = reads(first, first + part.size());
    fetch(data_prefixes[1], name, moment_reads, first,
          store.first_moments().slice(moment, part.size()));
    fetch(data_prefixes[2], name, moment_reads, first,
          store.second_moments().slice(moment, part.size()));
  }
}

/// The checkpoint in `directory`, if all ranks find the same one there.
template <class Device, class Comm>
Checkpoint open_together(Agreement<Device, Comm>& agreement, int rank,
                         const std::string& directory) {
  Checkpoint out{directory, {}};
  const auto read = [&] {
    out.manifest = read_manifest(directory);
    const std::string text = read_file(out.file(manifest_name), manifest_limit, Links::refuse);
    return hex(XXH3_64bits(text.data(), text.size()));
  };
  const auto replies = agreement.all_or_none([&] { return rank == 0 ? read() : std::string(); });
  agreement.all_or_none([&] {
    if (rank == 0) return std::string();
    std::string reason = "it is another one";
    try {
      if (read() == replies.front()) return std::string();
    } catch (const Error& fault) {
      reason = fault.what();
    }
    throw Error(ErrorCode::bad_input,
                sentence("checkpoint ", directory, " is not the one that rank 0 reads: ", reason,
                         "; all ranks need one shared directory"));
  });
  return out;
}

/// Sizes and checksums of all files, each looked at by one rank; nothing if all are right.
template <class Device, class Comm>
std::optional<std::string> fault_found_together(Agreement<Device, Comm>& agreement, int rank,
                                                int ranks, const Checkpoint& checkpoint) {
  Checkpoint share{checkpoint.path, {}};
  for (std::size_t f = 0; f < checkpoint.manifest.files.size(); ++f) {
    if (static_cast<int>(f % static_cast<std::size_t>(ranks)) == rank)
      share.manifest.files.push_back(checkpoint.manifest.files[f]);
  }
  for (auto& reply : agreement.gather(fault_of(share, Verify::checksums).value_or("")))
    if (!reply.empty()) return std::move(reply);
  return std::nullopt;
}

/// Loads a checkpoint whose files were verified. Nothing is changed before all of it is accepted.
template <class Sharded, class Device, class Comm>
TrainingState load_together(const Sharded& sharded, Agreement<Device, Comm>& agreement,
                            const Checkpoint& checkpoint) {
  const auto told = agreement.all_or_none([&] {
    check_layout(sharded);
    return json_text(own_parameters(sharded));
  });
  std::vector<nlohmann::json> lists;
  for (const auto& text : told) lists.push_back(nlohmann::json::parse(text));

  TrainingState state;
  std::vector<ModelParameter> parameters;
  ShardReaders readers(checkpoint);
  std::map<std::string_view, std::vector<StoredRun>> stored;
  agreement.all_or_none([&] {
    state = read_state(checkpoint);
    parameters = read_parameters(checkpoint);
    expect_same_model(whole_model(lists, sharded.store.table().model_parameters()), parameters,
                      checkpoint.path);
    std::map<std::string_view, const ModelParameter*> known;
    for (const ModelParameter& p : parameters) known.emplace(p.name, &p);
    const auto files = static_cast<int>(checkpoint.manifest.files.size());
    for (int f = sharded.world.rank(); f < files; f += sharded.world.size())
      expect_nothing_extra(readers(f), f, known);
    for (const auto& e : sharded.store.table().entries()) {
      const ModelParameter& p =
          *known.at(e.parameter.tied_to.empty() ? e.parameter.name : e.parameter.tied_to);
      if (!stored.contains(p.name)) stored.emplace(p.name, stored_runs(readers, checkpoint, p));
    }
    return std::string();
  });
  agreement.all_or_none([&] {
    read_shards(sharded, readers, stored);
    return std::string();
  });
  return state;
}

}  // namespace detail

/// Saves values, moments and `state` as the checkpoint of state.steps_done in `root`, and then
/// removes all but the `keep` newest complete ones; 0 keeps all. Collective over the world: all
/// ranks return together or throw the same sentence. Blocks until the checkpoint is durable.
///
/// Every rank reads the next one's file back, and compares checksums, before rank 0 makes the
/// checkpoint visible; so nothing older is removed for the sake of one that cannot be read.
/// @param root  of the same directory on all ranks, under whatever path each of them knows it
/// @return the checkpoint's directory
/// @throws Error not_durable with the first failing rank and what it said. Unless the sentence says
///         that the checkpoint is complete, the one before is still the latest and nothing of this
///         one is visible; only if the very flush behind its renaming failed, it is visible, whole,
///         and a power cut may take it. usage for impossible numbers, and for figures that differ
///         between ranks
/// @cost   writes 12 bytes an element of the model once, reads them once; host memory for the
///         largest tensor
template <class Store, class Device, class Comm>
std::string save_checkpoint(const ShardedStore<Store, Device, Comm>& sharded,
                            const std::string& root, const TrainingState& state, int keep) {
  detail::Agreement agreement(sharded, detail::Purpose::save);
  const int rank = sharded.world.rank(), ranks = sharded.world.size();
  std::optional<CheckpointWriter> writer;

  const auto told = agreement.all_or_none([&] {
    detail::check_layout(sharded);
    expects(keep >= 0 && state.consumed_samples >= 0, ErrorCode::usage, [&] {
      return sentence("cannot keep ", keep, " checkpoints and ", state.consumed_samples,
                      " consumed samples; neither may be negative");
    });
    if (rank == 0) writer.emplace(root, state.steps_done);
    return detail::json_text(
        {{"state", detail::numbers_of(state)},
         {"parameters", detail::own_parameters(sharded)},
         {"directory", writer ? detail::last_component(writer->directory()) : std::string()}});
  });
  std::vector<nlohmann::json> announced;
  for (const auto& text : told) announced.push_back(nlohmann::json::parse(text));

  const auto written = agreement.all_or_none([&] {
    const auto& numbers = announced[static_cast<std::size_t>(rank)].at("state");
    expects(numbers == announced.front().at("state"), ErrorCode::usage, [&] {
      return sentence("the state to save, ", numbers.dump(), ", differs from rank 0's ",
                      announced.front().at("state").dump());
    });
    if (rank != 0) {
      // Its name cannot be guessed, so who sees this directory sees rank 0's file system.
      const std::string directory =
          root + "/" + announced.front().at("directory").get<std::string>();
      expects(detail::exists(directory), ErrorCode::not_durable, [&] {
        return sentence("directory ", directory,
                        ", which rank 0 made, is not there; all ranks need one shared directory");
      });
      writer.emplace(CheckpointWriter::join(directory));
    }
    const auto parts = detail::saved_parts(sharded);
    if (parts.empty()) return std::string();
    return detail::json_text(
        detail::shard_to_json(detail::write_shard(sharded, *writer, parts), parts));
  });
  const auto shards = detail::shards_from_json(written);

  agreement.all_or_none([&] {
    for (const auto& shard : shards) {
      if (shard.rank == (rank + 1) % ranks)
        verify_files(writer->directory(), {state.steps_done, 0, {shard.file}, {}},
                     Verify::checksums);
    }
    return std::string();
  });

  const auto committed = agreement.all_or_none([&] {
    if (rank != 0) return std::string();
    std::vector<nlohmann::json> lists;
    for (const auto& one : announced) lists.push_back(one.at("parameters"));
    std::vector<FileRecord> files;
    for (const auto& shard : shards) files.push_back(shard.file);
    const auto model = detail::whole_model(lists, sharded.store.table().model_parameters());
    const std::string path =
        writer->commit(std::move(files), detail::describe(state, model, shards));
    try {
      if (keep > 0) retain(root, keep, Verify::sizes);
    } catch (const Error& fault) {
      throw Error(ErrorCode::not_durable,
                  sentence("checkpoint ", path,
                           " is complete, but older ones were not removed: ", fault.what()));
    }
    return detail::last_component(path);
  });
  return root + "/" + committed.front();
}

/// Loads the checkpoint in `directory`, whatever layout saved it. Collective over the world: all
/// ranks return together or throw the same sentence. Blocks until the device holds everything.
/// Sizes and checksums of all files are verified first, each file by one rank.
/// @throws Error bad_input, and then nothing was changed: a damaged file, another model (with the
///         first difference), files that do not tile a tensor (with the element), ranks that see
///         different directories. If a file cannot be read after it was verified, parameters are
///         indeterminate.
/// @cost   reads each file once for its checksum, then of each only what the rank needs; host
///         memory for the largest tensor
template <class Store, class Device, class Comm>
LoadedCheckpoint load_checkpoint(const ShardedStore<Store, Device, Comm>& sharded,
                                 const std::string& directory) {
  detail::Agreement agreement(sharded, detail::Purpose::load);
  const int rank = sharded.world.rank();
  const Checkpoint checkpoint = detail::open_together(agreement, rank, directory);
  if (auto fault = detail::fault_found_together(agreement, rank, sharded.world.size(), checkpoint))
    throw Error(ErrorCode::bad_input, *fault);
  return {checkpoint.path, detail::load_together(sharded, agreement, checkpoint), {}};
}

/// Loads the checkpoint committed last in `root` whose files verify; see load_checkpoint().
/// @throws Error bad_input also when there is none: whether to begin anew is the caller's decision
template <class Store, class Device, class Comm>
LoadedCheckpoint load_latest_checkpoint(const ShardedStore<Store, Device, Comm>& sharded,
                                        const std::string& root) {
  detail::Agreement agreement(sharded, detail::Purpose::load);
  const int rank = sharded.world.rank();
  const auto told = agreement.all_or_none([&] {
    if (rank != 0) return std::string();
    nlohmann::json out{{"readable", nlohmann::json::array()}, {"skipped", nlohmann::json::array()}};
    const auto inventory = detail::take_inventory(root);
    for (const auto& c : inventory.readable)
      out["readable"].push_back(detail::last_component(c.path));
    for (const auto& c : inventory.skipped) out["skipped"].push_back({c.path, c.reason});
    return out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  });
  const auto inventory = nlohmann::json::parse(told.front());
  std::vector<SkippedCheckpoint> skipped;
  for (const auto& one : inventory.at("skipped")) skipped.push_back({one.at(0), one.at(1)});
  for (const std::string name : inventory.at("readable")) {
    const Checkpoint checkpoint = detail::open_together(agreement, rank, root + "/" + name);
    auto fault = detail::fault_found_together(agreement, rank, sharded.world.size(), checkpoint);
    if (!fault) {
      return {checkpoint.path, detail::load_together(sharded, agreement, checkpoint),
              std::move(skipped)};
    }
    skipped.push_back({checkpoint.path, std::move(*fault)});
  }
  throw Error(ErrorCode::bad_input,
              skipped.empty() ? sentence("there is no checkpoint in ", root)
                              : sentence("there is no complete checkpoint in ", root, "; of ",
                                         skipped.size(), " the first, ", skipped.front().path,
                                         ", was passed over because ", skipped.front().reason));
}

/// Model: Trainer.
template <class T>
concept holds_a_training_run = requires(T& trainer, Index steps) {
  typename T::device_type;
  trainer.synchronize();
  trainer.parameters();
  trainer.world();
  trainer.compute();
  trainer.options().mesh;
  trainer.options().seed;
  trainer.steps_done();
  trainer.resume_at(steps);
};

/// Model: Trainer of a stage in fp16.
template <class T>
concept holds_a_loss_scale = requires(T& trainer, LossScale scale) {
  { trainer.loss_scale() } -> std::same_as<LossScale>;
  trainer.restore_loss_scale(scale);
};

namespace detail {

/// A checkpoint without a loss scale, of other storage than fp16, begins with the initial one.
template <class T>
void resume(T& trainer, const TrainingState& state) {
  trainer.resume_at(state.steps_done);
  if constexpr (holds_a_loss_scale<T>)
    trainer.restore_loss_scale(
        state.loss_scale.value_or(LossScale{trainer.options().loss_scaling.initial}));
}

}  // namespace detail

/// Saves a trainer after the steps queued so far; `state`'s steps, seed and loss
/// scale are the trainer's.
/// @param device  allocates the memory of the exchanges
template <holds_a_training_run T>
std::string save_checkpoint(T& trainer, const std::string& root, TrainingState state, int keep,
                            typename T::device_type device = typename T::device_type()) {
  trainer.synchronize();
  state.steps_done = trainer.steps_done();
  state.seed = trainer.options().seed;
  if constexpr (holds_a_loss_scale<T>) state.loss_scale = trainer.loss_scale();
  return save_checkpoint(ShardedStore{trainer.parameters(), trainer.options().mesh, trainer.world(),
                                      device, trainer.compute()},
                         root, state, keep);
}

/// Loads a trainer, which then goes on at the checkpoint's step. Its seed stays its own: compare it
/// with the loaded state's if random numbers are to go on too.
template <holds_a_training_run T>
LoadedCheckpoint load_checkpoint(T& trainer, const std::string& directory,
                                 typename T::device_type device = typename T::device_type()) {
  trainer.synchronize();
  auto loaded = load_checkpoint(ShardedStore{trainer.parameters(), trainer.options().mesh,
                                             trainer.world(), device, trainer.compute()},
                                directory);
  detail::resume(trainer, loaded.state);
  return loaded;
}
template <holds_a_training_run T>
LoadedCheckpoint load_latest_checkpoint(
    T& trainer, const std::string& root,
    typename T::device_type device = typename T::device_type()) {
  trainer.synchronize();
  auto loaded = load_latest_checkpoint(ShardedStore{trainer.parameters(), trainer.options().mesh,
                                                    trainer.world(), device, trainer.compute()},
                                       root);
  detail::resume(trainer, loaded.state);
  return loaded;
}

}  // namespace mega::inline v0::ckpt
