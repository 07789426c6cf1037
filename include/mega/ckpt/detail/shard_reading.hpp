/// @file  Where a sharded checkpoint holds what a rank needs, and reading it.
/// opt-in: needs nlohmann-json.
#pragma once
#include <mega/ckpt/checkpoint_directory.hpp>
#include <mega/ckpt/detail/shard_manifest.hpp>
#include <mega/ckpt/detail/shard_names.hpp>
#include <mega/ckpt/safetensors.hpp>
#include <mega/ckpt/strict_json.hpp>
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::ckpt::detail {

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

}  // namespace mega::inline v0::ckpt::detail
