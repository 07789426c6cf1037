/// @file  Where a rank's parameters lie in its flat buffers, and which of them it answers for.
/// Pure arithmetic: plans, checkpoints and the trainer read the same table.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::train {

/// A rank's place along the axes that divide parameters.
struct ShardPosition {
  int tensor = 0;
  int tensor_degree = 1;
  int data = 0;
  int data_degree = 1;
};

struct TableEntry {
  Parameter parameter;
  int stage = 0;
  int chunk = 0;         ///< local chunk that holds it
  int order = 0;         ///< place in the model's list; a tied parameter has its owner's
  Index size = 0;        ///< local elements, padding included
  Index value = 0;       ///< first element in the flat values
  Index gradient = 0;    ///< first element in the flat gradients
  bool alias = false;    ///< shares the values of an owner on this rank; has its own accumulator
  bool counted = false;  ///< this rank's gradient enters the global norm
};

/// A chunk's part of the flat buffers. Gradients and values have the same positions in it; its size
/// divides by the data degree, and each piece by 16 elements.
struct Region {
  Index begin = 0;
  Index end = 0;
  Index partial_end =
      0;  ///< [begin, partial_end): replicated tensors with gradients partial over tp
  Index cleared_end = 0;  ///< [begin, cleared_end): gradients that must be zero before a step

  [[nodiscard]] Index size() const noexcept { return end - begin; }
};

/// Half-open range of elements.
struct Range {
  Index begin = 0;
  Index end = 0;
  [[nodiscard]] Index size() const noexcept { return std::max<Index>(0, end - begin); }
  [[nodiscard]] Range intersect(Range other) const noexcept {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
};

class ParameterTable {
 public:
  static constexpr Index granule = 16;

  /// @param by_stage    the parameters of every stage of the model, in order
  /// @param own_stages  the stage of each of this rank's chunks
  /// Throws Error(usage) on a name used twice and on a tie that leads nowhere or to another shape.
  ParameterTable(std::span<const std::vector<Parameter>> by_stage, std::span<const int> own_stages,
                 ShardPosition position)
      : position_(position) {
    number(by_stage);
    for (std::size_t c = 0; c < own_stages.size(); ++c) {
      place_chunk(by_stage[static_cast<std::size_t>(own_stages[c])], own_stages[c],
                  static_cast<int>(c));
    }
    names_.clear();
    slots_.clear();
    value_size_ = regions_.empty() ? 0 : regions_.back().end;
    gradient_size_ = value_size_;
    for (TableEntry& entry : entries_) {
      if (!entry.alias) continue;
      entry.value = find_owner(entry)->value;
      entry.gradient = gradient_size_;
      gradient_size_ += round_up(entry.size, granule);
    }
  }

  /// In the order of the chunks and, within each, of the stage's own list.
  [[nodiscard]] const std::vector<TableEntry>& entries() const noexcept { return entries_; }
  [[nodiscard]] const std::vector<Region>& regions() const noexcept { return regions_; }
  [[nodiscard]] ShardPosition position() const noexcept { return position_; }
  /// Elements of the flat values; what the optimizer owns.
  [[nodiscard]] Index value_size() const noexcept { return value_size_; }
  /// Elements of the flat gradients: the values' and the accumulators of aliases behind them.
  [[nodiscard]] Index gradient_size() const noexcept { return gradient_size_; }
  /// Distinct parameters of the whole model.
  [[nodiscard]] int model_parameters() const noexcept { return parameters_; }
  /// Elements of the whole model, each parameter once, without padding.
  [[nodiscard]] Index model_size() const noexcept { return model_size_; }
  [[nodiscard]] bool has_ties() const noexcept { return !tie_targets_.empty(); }
  /// Whether some parameter of the model shares the values of the one named `name`.
  [[nodiscard]] bool ties_lead_to(const std::string& name) const noexcept {
    for (const std::string& target : tie_targets_) {
      if (target == name) return true;
    }
    return false;
  }

  /// The piece of a region that data-parallel rank `data` reduces into and, with a sharded
  /// optimizer, updates.
  [[nodiscard]] Range piece(const Region& region, int data) const noexcept {
    const Index length = region.size() / position_.data_degree;
    return {region.begin + length * data, region.begin + length * (data + 1)};
  }

  /// On this rank, the entry whose values `tied` shares; null when it lives elsewhere.
  [[nodiscard]] const TableEntry* find_owner(const TableEntry& tied) const noexcept {
    if (tied.parameter.tied_to.empty()) return nullptr;
    for (const TableEntry& entry : entries_) {
      if (entry.parameter.name == tied.parameter.tied_to) return &entry;
    }
    return nullptr;
  }

 private:
  /// A parameter of the model and its place in the model's list.
  struct Named {
    const Parameter* parameter;
    int order;
  };

  static constexpr Index round_up(Index n, Index multiple) noexcept {
    return (n + multiple - 1) / multiple * multiple;
  }

  void number(std::span<const std::vector<Parameter>> by_stage) {
    std::size_t count = 1;
    for (const auto& list : by_stage) count += list.size();
    slots_.assign(std::bit_ceil(2 * count), -1);
    for (const auto& list : by_stage) {
      for (const Parameter& p : list) {
        if (!p.tied_to.empty()) continue;
        int& slot = slots_[slot_of(p.name)];
        expects(slot < 0, ErrorCode::usage, [&] {
          return sentence("two parameters of the model are named '", p.name,
                          "'; names must be unique");
        });
        slot = static_cast<int>(names_.size());
        names_.push_back({&p, slot});
        model_size_ += p.size();
      }
    }
    for (const auto& list : by_stage) {
      for (const Parameter& p : list) {
        if (p.tied_to.empty()) continue;
        tie_targets_.push_back(p.tied_to);
        const Named* owner = find(p.tied_to);
        expects(owner != nullptr, ErrorCode::usage, [&] {
          return sentence("parameter '", p.name, "' is tied to '", p.tied_to,
                          "', which no stage declares");
        });
        expects(owner->parameter->shape == p.shape, ErrorCode::usage, [&] {
          return sentence("parameter '", p.name, "' is tied to '", p.tied_to,
                          "', which has another shape");
        });
      }
    }
    parameters_ = static_cast<int>(names_.size());
  }

  /// The slot of a name in an open-addressed table of indices into names_: its own or a free one.
  [[nodiscard]] std::size_t slot_of(std::string_view name) const {
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = name_hash(name) & mask;
    while (slots_[at] >= 0 &&
           names_[static_cast<std::size_t>(slots_[at])].parameter->name != name) {
      at = (at + 1) & mask;
    }
    return at;
  }
  [[nodiscard]] const Named* find(std::string_view name) const {
    const int found = slots_[slot_of(name)];
    return found < 0 ? nullptr : &names_[static_cast<std::size_t>(found)];
  }

  void place_chunk(const std::vector<Parameter>& list, int stage, int chunk) {
    const std::size_t first = entries_.size();
    for (const Parameter& p : list) {
      TableEntry entry{.parameter = p, .stage = stage, .chunk = chunk};
      entry.size = local_size(p, position_.tensor_degree);
      entry.order = find(p.tied_to.empty() ? p.name : p.tied_to)->order;
      entry.alias = find_owner(entry) != nullptr;
      entry.counted = p.tied_to.empty() && (!p.shard.replicated() || position_.tensor == 0);
      entries_.push_back(std::move(entry));
    }
    // Tensors whose gradients are partial over the tensor axis lie together, so that one call sums
    // them all; those that are overwritten first come last, so that one call clears the others.
    Region region{.begin = regions_.empty() ? 0 : regions_.back().end};
    Index at = region.begin;
    const auto place = [&](bool partial, bool overwritten) {
      for (std::size_t i = first; i < entries_.size(); ++i) {
        TableEntry& entry = entries_[i];
        if (entry.alias || entry.parameter.partial_over_tensor != partial ||
            entry.parameter.overwritten_first != overwritten)
          continue;
        entry.value = entry.gradient = at;
        at += round_up(entry.size, granule);
      }
    };
    place(true, true);
    place(true, false);
    region.partial_end = at;
    place(false, false);
    region.cleared_end = at;
    place(false, true);
    region.end = region.begin + round_up(at - region.begin, granule * position_.data_degree);
    regions_.push_back(region);
  }

  ShardPosition position_;
  std::vector<TableEntry> entries_;
  std::vector<Region> regions_;
  std::vector<Named> names_;  // these two only while the table is made
  std::vector<int> slots_;
  int parameters_ = 0;
  Index value_size_ = 0;
  Index gradient_size_ = 0;
  Index model_size_ = 0;
  std::vector<std::string> tie_targets_;
};

}  // namespace mega::inline v0::train
