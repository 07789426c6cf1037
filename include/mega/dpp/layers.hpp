/// @file  Which layers of the model each pipeline stage holds.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/placement.hpp>

#include <cstddef>
#include <span>
#include <string>
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
  return {layers, {counts.data(), counts.size()}};
}

/// Layers of the first and the last rank, those of all their chunks together; 0: not fixed.
struct EndLayers {
  int first = 0;
  int last = 0;
};

/// The ends of the pipeline hold as many layers as `ends` says, evenly over their chunks; the ranks
/// between them, and an end that is not fixed, share the rest as evenly as possible, later stages
/// one more than earlier ones where it does not divide, but the last stage never.
/// Throws Error(usage), with the numbers, for what does not divide or leaves a stage without a
/// layer. Source: Megatron-LM, options --decoder-{first,last}-pipeline-num-layers, which moreover
/// want the rest to divide.
template <placement Placement = LoopPlacement>
[[nodiscard]] constexpr LayerSplit split_layers(int layers, int p, int v, EndLayers ends,
                                                Placement place = {}) {
  if (ends.first == 0 && ends.last == 0) return split_layers(layers, p * v);
  expects(p >= 2 && v >= 1, ErrorCode::usage, [&] {
    return sentence("fixing the layers of the first or the last rank takes at least 2 ranks and 1 ",
                    "chunk a rank, not p ", p, ", v ", v);
  });
  const auto expect_holds = [&](const char* which, int count) {
    expects(count >= 0 && count <= layers, ErrorCode::usage, [&] {
      return sentence("the ", which, " rank cannot hold ", count, " of ", layers, " layers");
    });
    expects(count % v == 0, ErrorCode::usage, [&] {
      const int below = count / v * v;
      return sentence("the ", which, " rank cannot hold ", count, " layers in ", v,
                      " chunks alike; the nearest numbers are ",
                      below > 0 ? sentence(below, " and ", below + v) : std::to_string(v));
    });
  };
  expect_holds("first", ends.first);
  expect_holds("last", ends.last);
  const int rest = layers - ends.first - ends.last;
  const int sharing = p - (ends.first > 0 ? 1 : 0) - (ends.last > 0 ? 1 : 0);
  expects(sharing > 0 || rest == 0, ErrorCode::usage, [&] {
    return sentence("the two ranks hold ", ends.first, " and ", ends.last,
                    " layers, but the model has ", layers,
                    "; leave one of the two numbers out, and that rank holds the rest");
  });
  expects(rest >= sharing * v, ErrorCode::usage, [&] {
    return sentence("the first rank's ", ends.first, " and the last rank's ", ends.last, " of ",
                    layers, " layers leave ", rest, " for ", sharing * v,
                    " stages, each of which needs one; ",
                    layers > sharing * v ? sentence("fix at most ", layers - sharing * v, " in all")
                                         : std::string("use fewer stages"));
  });
  const int stages = p * v;
  std::vector<int> counts(static_cast<std::size_t>(stages), 0);
  int extra = sharing > 0 ? rest % (sharing * v) : 0;
  for (int s = stages - 1; s >= 0; --s) {
    const int rank = place.rank_of(s, p, v);
    int& count = counts[static_cast<std::size_t>(s)];
    if (rank == 0 && ends.first > 0) {
      count = ends.first / v;
    } else if (rank == p - 1 && ends.last > 0) {
      count = ends.last / v;
    } else {
      count = rest / (sharing * v);
      if (extra > 0 && s + 1 < stages) ++count, --extra;
    }
  }
  return {layers, {counts.data(), counts.size()}};
}

}  // namespace mega::inline v0::dpp
