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

template <device_policy Device>
class ParameterStore {
 public:
  /// @param shard_optimizer  ZeRO stage 1: moments for this rank's piece of each region only
  ParameterStore(Device& device, ParameterTable table, bool shard_optimizer)
      : table_(std::move(table)), shard_optimizer_(shard_optimizer) {
    for (const Region& region : table_.regions()) {
      const Range values = shard_optimizer ? table_.piece(region, table_.position().data)
                                           : Range{region.begin, region.end};
      owned_.push_back({values, moment_size_});
      moment_size_ += values.size();
    }
    Arena counting;
    lay_out(counting);
    memory_ = device.allocate(counting.used());
    Arena arena(memory_.data(), memory_.bytes());
    lay_out(arena);
  }

  [[nodiscard]] const ParameterTable& table() const noexcept { return table_; }
  [[nodiscard]] bool shards_optimizer() const noexcept { return shard_optimizer_; }
  /// One a chunk.
  [[nodiscard]] const std::vector<OwnedRange>& owned() const noexcept { return owned_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }

  [[nodiscard]] Vector<float> values() const noexcept { return values_; }
  [[nodiscard]] Vector<float> gradients() const noexcept { return gradients_; }
  [[nodiscard]] Vector<float> first_moments() const noexcept { return first_moments_; }
  [[nodiscard]] Vector<float> second_moments() const noexcept { return second_moments_; }
  /// Device memory: the runs of owned()[chunk], relative to its begin.
  [[nodiscard]] Vector<const optim::Segment> segments(std::size_t chunk) const noexcept {
    return segments_[chunk];
  }

  [[nodiscard]] Vector<float> values(const TableEntry& e) const noexcept {
    return values_.slice(e.value, e.size);
  }
  [[nodiscard]] Vector<float> gradients(const TableEntry& e) const noexcept {
    return gradients_.slice(e.gradient, e.size);
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
    fill_zero(stream, values_);
    fill_zero(stream, gradients_);
    fill_zero(stream, first_moments_);
    fill_zero(stream, second_moments_);
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
      const std::vector<optim::Segment> runs = decay_runs(static_cast<int>(c));
      upload(stream, segments_[c],
             Vector<const optim::Segment>(runs.data(), static_cast<Index>(runs.size())));
      stream.synchronize();
    }
  }

 private:
  void lay_out(Arena& arena) {
    values_ = arena.take<float>(table_.value_size());
    gradients_ = arena.take<float>(table_.gradient_size());
    first_moments_ = arena.take<float>(moment_size_);
    second_moments_ = arena.take<float>(moment_size_);
    segments_.clear();
    for (std::size_t c = 0; c < owned_.size(); ++c) {
      segments_.push_back(arena.take<optim::Segment>(decay_runs(static_cast<int>(c)).size()));
    }
  }

  /// The chunk's tensors inside the owned range; padding between them belongs to none.
  [[nodiscard]] std::vector<optim::Segment> decay_runs(int chunk) const {
    std::vector<optim::Segment> runs;
    const Range owned = owned_[static_cast<std::size_t>(chunk)].values;
    for (const TableEntry& e : table_.entries()) {
      if (e.chunk != chunk || e.alias) continue;
      const Range part = owned.intersect({e.value, e.value + e.size});
      if (part.size() > 0)
        runs.push_back({part.begin - owned.begin, part.end - owned.begin, e.parameter.decay});
    }
    return runs;
  }

  ParameterTable table_;
  bool shard_optimizer_;
  std::vector<OwnedRange> owned_;
  Index moment_size_ = 0;
  typename Device::memory_type memory_;
  Vector<float> values_, gradients_, first_moments_, second_moments_;
  std::vector<Vector<optim::Segment>> segments_;
};

}  // namespace mega::inline v0::train
