/// @file  Which layers of the model each pipeline stage holds.
#pragma once
#include <mega/core/error.hpp>

#include <cstddef>
#include <span>
#include <vector>

namespace mega::inline v0::dpp {

/// Layers [begin, end) of the model, counted from 0.
struct LayerRange {
  int begin = 0;
  int end = 0;

  [[nodiscard]] constexpr int count() const noexcept { return end - begin; }
  friend constexpr bool operator==(const LayerRange&, const LayerRange&) = default;
};

/// Every layer of the model in exactly one stage, consecutive layers in consecutive stages.
class LayerSplit {
 public:
  /// @param counts  layers of each stage. 0 is allowed for the first and the last stage only, which
  ///                then hold just the embedding or the head
  /// Throws Error(usage) unless the counts sum up to `layers`.
  constexpr LayerSplit(int layers, std::span<const int> counts) {
    expects(!counts.empty(), ErrorCode::usage, "a layer split needs the count of at least 1 stage");
    begin_.push_back(0);
    for (std::size_t stage = 0; stage < counts.size(); ++stage) {
      const bool is_end = stage == 0 || stage + 1 == counts.size();
      expects(counts[stage] >= (is_end ? 0 : 1), ErrorCode::usage, [&] {
        return sentence("stage ", stage, " of ", counts.size(), " has ", counts[stage],
                        " layers; the least is ", is_end ? 0 : 1);
      });
      begin_.push_back(begin_.back() + counts[stage]);
    }
    expects(begin_.back() == layers, ErrorCode::usage, [&] {
      return sentence("the layer counts of ", counts.size(), " stages sum up to ", begin_.back(),
                      ", but the model has ", layers, " layers");
    });
  }

  [[nodiscard]] constexpr int layers() const noexcept { return begin_.back(); }
  [[nodiscard]] constexpr int stages() const noexcept {
    return static_cast<int>(begin_.size()) - 1;
  }
  /// @pre 0 <= stage < stages()
  [[nodiscard]] constexpr LayerRange of_stage(int stage) const noexcept {
    const auto s = static_cast<std::size_t>(stage);
    return {begin_[s], begin_[s + 1]};
  }
  /// @pre 0 <= layer < layers()
  [[nodiscard]] constexpr int stage_of(int layer) const noexcept {
    int stage = 0;
    while (of_stage(stage).end <= layer) ++stage;
    return stage;
  }

 private:
  std::vector<int> begin_;  // [stages + 1]
};

/// As even as possible. Of layers that do not divide, the stages right before the last one take one
/// more each: the last stage also computes the head and the loss, and early stages hold the most
/// micro-batches, so they are the ones to keep small.
/// Throws Error(usage) if some stage would have no layer.
[[nodiscard]] constexpr LayerSplit split_layers(int layers, int stages) {
  expects(stages >= 1, ErrorCode::usage,
          [&] { return sentence("cannot split layers over ", stages, " stages; the least is 1"); });
  expects(stages <= layers, ErrorCode::usage, [&] {
    return sentence("cannot split ", layers, " layers over ", stages, " stages: at most ", layers,
                    " stages have a layer each");
  });
  std::vector<int> counts(static_cast<std::size_t>(stages), layers / stages);
  const int extra = layers % stages;
  for (int i = 0; i < extra; ++i) ++counts[static_cast<std::size_t>(stages - 2 - i)];
  return {layers, counts};
}

}  // namespace mega::inline v0::dpp
