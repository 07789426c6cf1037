/// @file  What each rank writes of a sharded checkpoint, and tells the others of it.
/// opt-in: needs nlohmann-json.
#pragma once
#include <mega/ckpt/checkpoint_directory.hpp>
#include <mega/ckpt/detail/shard_names.hpp>
#include <mega/ckpt/safetensors.hpp>
#include <mega/core/device.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>

#include <nlohmann/json.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt::detail {

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

}  // namespace mega::inline v0::ckpt::detail
