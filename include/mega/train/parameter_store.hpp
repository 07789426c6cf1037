/// @file  A rank's flat buffers: values, gradients, moments.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/device.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/train/initial_values.hpp>
#include <mega/train/parameter_table.hpp>

#include <concepts>
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

/// The tensors whose squares this rank adds to the global norm, each with its place in the model.
[[nodiscard]] inline std::vector<optim::SquareRange> square_ranges(const ParameterTable& table) {
  std::vector<optim::SquareRange> out;
  for (const TableEntry& e : table.entries()) {
    if (!e.counted) continue;
    const Region& region = table.regions()[static_cast<std::size_t>(e.chunk)];
    const Range own =
        table.piece(region, table.position().data).intersect({e.value, e.value + e.size});
    if (own.size() > 0) out.push_back({own.begin, own.end, e.order});
  }
  return out;
}

/// The flat buffers' places in one block. The constructor is the layout: on a counting arena it
/// measures. Values that are stored as something less than float have a float master each, on the
/// rank whose optimizer updates them.
template <storage W>
struct StoreBuffers {
  Vector<W> values;
  Vector<float> gradients, first_moments, second_moments;
  Vector<float> masters;  ///< as the moments lie; empty where values are float themselves
  std::vector<Vector<optim::Segment>> segments;  ///< one a chunk
  Vector<optim::SquareRange> squares;

  StoreBuffers(Arena& arena, const ParameterTable& table, const std::vector<OwnedRange>& owned) {
    Index moments = 0;
    for (const OwnedRange& range : owned) moments += range.values.size();
    values = arena.take<W>(table.value_size());
    gradients = arena.take<float>(table.gradient_size());
    first_moments = arena.take<float>(moments);
    second_moments = arena.take<float>(moments);
    if constexpr (!std::same_as<W, float>) masters = arena.take<float>(moments);
    for (std::size_t c = 0; c < owned.size(); ++c) {
      segments.push_back(arena.take<optim::Segment>(
          decay_runs(table, owned[c].values, static_cast<int>(c)).size()));
    }
    squares = arena.take<optim::SquareRange>(square_ranges(table).size());
  }

  /// Bytes that a store of this table allocates. Needs no device.
  [[nodiscard]] static std::size_t required_bytes(const ParameterTable& table,
                                                  bool shard_optimizer) {
    Arena counting;
    const StoreBuffers layout(counting, table, owned_ranges(table, shard_optimizer));
    return counting.used();
  }
};

template <device_policy Device, storage W = float>
class ParameterStore {
 public:
  using value_type = W;

  ParameterStore(Device& device, ParameterTable table, bool shard_optimizer)
      : table_(std::move(table)),
        shard_optimizer_(shard_optimizer),
        owned_(owned_ranges(table_, shard_optimizer)),
        memory_(device.allocate(StoreBuffers<W>::required_bytes(table_, shard_optimizer))),
        buffers_([&] {
          Arena arena(memory_.data(), memory_.bytes());
          return StoreBuffers<W>(arena, table_, owned_);
        }()) {}

  [[nodiscard]] const ParameterTable& table() const noexcept { return table_; }
  [[nodiscard]] bool shards_optimizer() const noexcept { return shard_optimizer_; }
  /// One a chunk.
  [[nodiscard]] const std::vector<OwnedRange>& owned() const noexcept { return owned_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }

  [[nodiscard]] Vector<W> values() const noexcept { return buffers_.values; }
  [[nodiscard]] Vector<float> gradients() const noexcept { return buffers_.gradients; }
  [[nodiscard]] Vector<float> first_moments() const noexcept { return buffers_.first_moments; }
  [[nodiscard]] Vector<float> second_moments() const noexcept { return buffers_.second_moments; }
  /// Device memory: the runs of owned()[chunk], relative to its begin.
  [[nodiscard]] Vector<const optim::Segment> segments(std::size_t chunk) const noexcept {
    return buffers_.segments[chunk];
  }
  /// Device memory: what square_ranges() lists.
  [[nodiscard]] Vector<const optim::SquareRange> squares() const noexcept {
    return buffers_.squares;
  }

  [[nodiscard]] Vector<W> values(const TableEntry& e) const noexcept {
    return buffers_.values.slice(e.value, e.size);
  }
  [[nodiscard]] Vector<float> gradients(const TableEntry& e) const noexcept {
    return buffers_.gradients.slice(e.gradient, e.size);
  }
  /// In full precision, what the optimizer updates: `range` of the flat values, inside
  /// owned()[chunk].
  [[nodiscard]] Vector<float> masters(std::size_t chunk, Range range) const noexcept {
    if constexpr (std::same_as<W, float>) {
      return buffers_.values.slice(range.begin, range.size());
    } else {
      const OwnedRange& own = owned_[chunk];
      return buffers_.masters.slice(own.moments + range.begin - own.values.begin, range.size());
    }
  }

  /// Views for stage.bind(), in the order of the stage's parameters().
  [[nodiscard]] std::vector<ParameterView<W>> views(int chunk) const {
    std::vector<ParameterView<W>> out;
    for (const TableEntry& e : table_.entries()) {
      if (e.chunk == chunk) out.push_back({values(e), gradients(e)});
    }
    return out;
  }

  /// Writes the initial values and clears gradients and moments. Blocks until done.
  template <stream S>
  void initialise(S& stream, std::uint64_t seed) {
    fill_zero(stream, buffers_.values);
    fill_zero(stream, buffers_.masters);
    fill_zero(stream, buffers_.gradients);
    fill_zero(stream, buffers_.first_moments);
    fill_zero(stream, buffers_.second_moments);
    for (const TableEntry& e : table_.entries()) {
      if (e.alias) continue;
      initialise_values(stream, gradients(e), e.parameter, seed, table_.position().tensor,
                        table_.position().tensor_degree);
      adopt(stream, e);
    }
    fill_zero(stream, buffers_.gradients);
    for (std::size_t c = 0; c < owned_.size(); ++c) {
      const std::vector<optim::Segment> runs =
          decay_runs(table_, owned_[c].values, static_cast<int>(c));
      upload(stream, buffers_.segments[c],
             Vector<const optim::Segment>(runs.data(), static_cast<Index>(runs.size())));
      stream.synchronize();
    }
    const std::vector<optim::SquareRange> ranges = square_ranges(table_);
    upload(stream, buffers_.squares,
           Vector<const optim::SquareRange>(ranges.data(), static_cast<Index>(ranges.size())));
    stream.synchronize();
  }

  /// Gives a parameter the values in host memory, and its master. Blocks until done; the gradient
  /// of the parameter is lost.
  template <stream S>
  void load(S& stream, const TableEntry& e, Vector<const float> host) {
    upload(stream, gradients(e), host);
    adopt(stream, e);
    stream.synchronize();
  }
  /// The values as stored, into host memory. Blocks until done.
  template <stream S>
  void read(S& stream, const TableEntry& e, Vector<float> host) const {
    if constexpr (std::same_as<W, float>) {
      download(stream, host, Vector<const float>(values(e)));
      stream.synchronize();
    } else {
      std::vector<W> stored(static_cast<std::size_t>(e.size));
      download(stream, Vector<W>(stored.data(), e.size), Vector<const W>(values(e)));
      stream.synchronize();
      for (Index i = 0; i < e.size; ++i) host(i) = stored[static_cast<std::size_t>(i)];
    }
  }

 private:
  /// Takes what stands in a parameter's gradient, which has float's precision and as much room, for
  /// its values.
  template <stream S>
  void adopt(S& stream, const TableEntry& e) {
    using optim::to_storage;
    const Vector<const float> source = gradients(e);
    to_storage(stream, values(e), source);
    if constexpr (!std::same_as<W, float>) {
      const Range own =
          owned_[static_cast<std::size_t>(e.chunk)].values.intersect({e.value, e.value + e.size});
      if (own.size() > 0)
        copy(stream, masters(static_cast<std::size_t>(e.chunk), own),
             source.slice(own.begin - e.value, own.size()));
    }
  }

  ParameterTable table_;
  bool shard_optimizer_;
  std::vector<OwnedRange> owned_;
  typename Device::memory_type memory_;
  StoreBuffers<W> buffers_;
};

}  // namespace mega::inline v0::train
