/// @file  A rank's flat buffers: values, gradients, moments.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/device.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/train/initial_values.hpp>
#include <mega/train/parameter_table.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mega::inline v0::train {

/// What the optimizer of this rank updates of one chunk: a range of the flat values, and the
/// moments for just this range.
struct OwnedRange {
  Range values;
  Index moments = 0;  ///< first element in the flat moments
};

/// One a chunk: what a rank's optimizer updates. With a sharded optimizer (ZeRO stage 1) this is
/// the rank's piece of each region, else the whole.
[[nodiscard]] inline std::vector<OwnedRange> owned_ranges(const ParameterTable& table,
                                                          bool shard_optimizer) {
  std::vector<OwnedRange> out;
  Index moments = 0;
  for (const Region& region : table.regions()) {
    const Range values = shard_optimizer ? table.piece(region, table.position().data)
                                         : Range{region.begin, region.end};
    out.push_back({values, moments});
    moments += values.size();
  }
  return out;
}

/// The chunk's tensors inside its owned range, relative to it; padding belongs to none.
[[nodiscard]] inline std::vector<optim::Segment> decay_runs(const ParameterTable& table,
                                                            Range owned, int chunk) {
  std::vector<optim::Segment> runs;
  for (const TableEntry& e : table.entries()) {
    if (e.chunk != chunk || e.alias) continue;
    const Range part = owned.intersect({e.value, e.value + e.size});
    if (part.size() > 0) {
      runs.push_back({part.begin - owned.begin, part.end - owned.begin, e.parameter.decay});
    }
  }
  return runs;
}

/// The flat buffers' places in one block. The constructor is the layout: on a counting arena it
/// measures.
struct StoreBuffers {
  Vector<float> values, gradients, first_moments, second_moments;
  std::vector<Vector<optim::Segment>> segments;  ///< one a chunk

  StoreBuffers(Arena& arena, const ParameterTable& table, const std::vector<OwnedRange>& owned) {
    Index moments = 0;
    for (const OwnedRange& range : owned) moments += range.values.size();
    values = arena.take<float>(table.value_size());
    gradients = arena.take<float>(table.gradient_size());
    first_moments = arena.take<float>(moments);
    second_moments = arena.take<float>(moments);
    for (std::size_t c = 0; c < owned.size(); ++c) {
      segments.push_back(arena.take<optim::Segment>(
          decay_runs(table, owned[c].values, static_cast<int>(c)).size()));
    }
  }

  /// Bytes that a store of this table allocates. Needs no device.
  [[nodiscard]] static std::size_t required_bytes(const ParameterTable& table,
                                                  bool shard_optimizer) {
    Arena counting;
    const StoreBuffers layout(counting, table, owned_ranges(table, shard_optimizer));
    return counting.used();
  }
};

template <device_policy Device>
class ParameterStore {
 public:
  ParameterStore(Device& device, ParameterTable table, bool shard_optimizer)
      : table_(std::move(table)),
        shard_optimizer_(shard_optimizer),
        owned_(owned_ranges(table_, shard_optimizer)),
        memory_(device.allocate(StoreBuffers::required_bytes(table_, shard_optimizer))),
        buffers_([&] {
          Arena arena(memory_.data(), memory_.bytes());
          return StoreBuffers(arena, table_, owned_);
        }()) {}

  [[nodiscard]] const ParameterTable& table() const noexcept { return table_; }
  [[nodiscard]] bool shards_optimizer() const noexcept { return shard_optimizer_; }
  /// One a chunk.
  [[nodiscard]] const std::vector<OwnedRange>& owned() const noexcept { return owned_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }

  [[nodiscard]] Vector<float> values() const noexcept { return buffers_.values; }
  [[nodiscard]] Vector<float> gradients() const noexcept { return buffers_.gradients; }
  [[nodiscard]] Vector<float> first_moments() const noexcept { return buffers_.first_moments; }
  [[nodiscard]] Vector<float> second_moments() const noexcept { return buffers_.second_moments; }
  /// Device memory: the runs of owned()[chunk], relative to its begin.
  [[nodiscard]] Vector<const optim::Segment> segments(std::size_t chunk) const noexcept {
    return buffers_.segments[chunk];
  }

  [[nodiscard]] Vector<float> values(const TableEntry& e) const noexcept {
    return buffers_.values.slice(e.value, e.size);
  }
  [[nodiscard]] Vector<float> gradients(const TableEntry& e) const noexcept {
    return buffers_.gradients.slice(e.gradient, e.size);
  }

  /// Views for stage.bind(), in the order of the stage's parameters().
  [[nodiscard]] std::vector<ParameterView<float>> views(int chunk) const {
    std::vector<ParameterView<float>> out;
    for (const TableEntry& e : table_.entries()) {
      if (e.chunk == chunk) out.push_back({values(e), gradients(e)});
    }
    return out;
  }

  /// Writes the initial values and clears gradients and moments. Blocks until done.
  template <stream S>
  void initialise(S& stream, std::uint64_t seed) {
    fill_zero(stream, buffers_.values);
    fill_zero(stream, buffers_.gradients);
    fill_zero(stream, buffers_.first_moments);
    fill_zero(stream, buffers_.second_moments);
    std::vector<float> host;
    for (const TableEntry& e : table_.entries()) {
      if (e.alias) continue;
      host.resize(static_cast<std::size_t>(e.size));
      const Vector<float> piece(host.data(), e.size);
      train::initialise(e.parameter, seed, table_.position().tensor,
                        table_.position().tensor_degree, piece);
      upload(stream, values(e), Vector<const float>(piece));
      stream.synchronize();
    }
    for (std::size_t c = 0; c < owned_.size(); ++c) {
      const std::vector<optim::Segment> runs =
          decay_runs(table_, owned_[c].values, static_cast<int>(c));
      upload(stream, buffers_.segments[c],
             Vector<const optim::Segment>(runs.data(), static_cast<Index>(runs.size())));
      stream.synchronize();
    }
  }

 private:
  ParameterTable table_;
  bool shard_optimizer_;
  std::vector<OwnedRange> owned_;
  typename Device::memory_type memory_;
  StoreBuffers buffers_;
};

}  // namespace mega::inline v0::train
