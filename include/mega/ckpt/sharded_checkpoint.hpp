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
#include <mega/ckpt/detail/shard_agreement.hpp>
#include <mega/ckpt/detail/shard_manifest.hpp>
#include <mega/ckpt/detail/shard_reading.hpp>
#include <mega/ckpt/detail/shard_writing.hpp>
#include <mega/ckpt/durable_file.hpp>
#include <mega/ckpt/sharded_store.hpp>
#include <mega/core/error.hpp>
#include <mega/core/loss_scale.hpp>
#include <mega/core/view.hpp>

#include <nlohmann/json.hpp>
#include <xxhash.h>

#include <concepts>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt {

struct LoadedCheckpoint {
  std::string path;
  TrainingState state;
  std::vector<SkippedCheckpoint> skipped;  ///< newer ones that are incomplete or damaged, and why
};

namespace detail {

inline std::string last_component(std::string_view path) {
  return std::string(path.substr(path.rfind('/') + 1));
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
