/// @file  The split of layers over stages that keeps the busiest rank least busy.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/layers.hpp>
#include <mega/dpp/placement.hpp>

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

namespace mega::inline v0::dpp {

/// Forward and backward of the parts of a model for one micro-batch, in one unit: measured seconds,
/// or counted operations.
struct LayerCosts {
  double layer = 1;      ///< each
  double embedding = 0;  ///< on the first stage
  double head = 0;       ///< on the last stage: final norm, head and loss
};

/// Sizes of a decoder-only Transformer, as plain numbers.
struct TransformerShape {
  double hidden = 0;
  double heads = 0;     ///< query heads
  double kv_heads = 0;  ///< key and value heads
  double head_dim = 0;
  double ffn = 0;
  double mlp_matrices = 2;  ///< 3 for gated activations
  double vocab = 0;
  double sequence = 0;
  bool recompute_layers = false;  ///< backward runs the forward of every layer again
};

/// Floating-point operations of a token's matrix products, causal attention counted as half of the
/// square. A backward is two forwards. The embedding, a copy of rows, has none. Tensor parallelism
/// divides all of it alike, so it changes no balance.
///
///   layer  2 hidden head_dim (2 heads + 2 kv_heads) + 2 mlp_matrices hidden ffn
///          + 2 heads head_dim (sequence + 1)
///   head   2 hidden vocab
///
/// On a device whose speed differs between these products, measured seconds are the better input.
[[nodiscard]] constexpr LayerCosts transformer_costs(const TransformerShape& s) noexcept {
  const double projections = 2 * s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads);
  const double mlp = 2 * s.mlp_matrices * s.hidden * s.ffn;
  const double scores_and_values = 2 * s.heads * s.head_dim * (s.sequence + 1);
  const double passes = s.recompute_layers ? 4 : 3;
  return {.layer = passes * (projections + mlp + scores_and_values),
          .embedding = 0,
          .head = 3 * 2 * s.hidden * s.vocab};
}

/// What a split costs, in the unit of its LayerCosts.
struct SplitCost {
  double rank = 0;   ///< of the busiest rank: the sum of its chunks
  double stage = 0;  ///< of the largest stage
  double mean = 0;   ///< of a rank; rank / mean is 1 where all are equally busy
};

namespace detail {

/// Costs of p ranks with v chunks that do not depend on the layers given to them. Totals are always
/// formed as fixed + count*layer, so that equal loads compare equal.
class StageLoads {
 public:
  template <placement Placement>
  constexpr StageLoads(int p, int v, const LayerCosts& costs, Placement place)
      : layer_(costs.layer) {
    expects(p >= 1 && v >= 1, ErrorCode::usage, [&] {
      return sentence("a pipeline needs at least 1 rank and 1 chunk a rank, not p ", p, ", v ", v);
    });
    expects(costs.layer > 0 && is_cost(costs.layer), ErrorCode::usage, [&] {
      return sentence("the cost of a layer is ", costs.layer, "; it must be finite and above 0");
    });
    expects(is_cost(costs.embedding) && is_cost(costs.head), ErrorCode::usage, [&] {
      return sentence("the costs of embedding and head are ", costs.embedding, " and ", costs.head,
                      "; they must be finite and not negative");
    });
    const int stages = p * v;
    of_stage_.assign(index(stages), 0);
    of_rank_.assign(index(p), 0);
    of_stage_.front() += costs.embedding;
    of_stage_.back() += costs.head;
    for (int s = 0; s < stages; ++s) {
      rank_of_.push_back(place.rank_of(s, p, v));
      of_rank_[index(rank_of_.back())] += of_stage_[index(s)];
    }
  }

  [[nodiscard]] constexpr int stages() const noexcept { return static_cast<int>(of_stage_.size()); }
  [[nodiscard]] constexpr int ranks() const noexcept { return static_cast<int>(of_rank_.size()); }
  [[nodiscard]] constexpr int rank_of(int stage) const noexcept { return rank_of_[index(stage)]; }
  [[nodiscard]] constexpr double stage(int s, int layers) const noexcept {
    return of_stage_[index(s)] + layers * layer_;
  }
  [[nodiscard]] constexpr double rank(int r, int layers) const noexcept {
    return of_rank_[index(r)] + layers * layer_;
  }

  /// Finite and not negative; false for NaN.
  [[nodiscard]] static constexpr bool is_cost(double x) noexcept {
    return x >= 0 && x <= std::numeric_limits<double>::max();
  }

 private:
  [[nodiscard]] static constexpr std::size_t index(int i) noexcept {
    return static_cast<std::size_t>(i);
  }

  double layer_;
  std::vector<double> of_stage_, of_rank_;
  std::vector<int> rank_of_;
};

/// Layers that a stage must hold: none at the ends of the pipeline, one between them.
[[nodiscard]] constexpr int least_layers(int stage, int stages) noexcept {
  return stage == 0 || stage + 1 == stages ? 0 : 1;
}

constexpr void expects_enough_layers(int layers, int stages) {
  expects(layers >= 0 && stages <= layers + 2, ErrorCode::usage, [&] {
    return sentence("cannot balance ", layers, " layers over ", stages,
                    " stages: every stage but the first and the last needs one, so at most ",
                    layers < 0 ? 2 : layers + 2, " stages have enough");
  });
}

/// Contiguous split of `layers` layers that minimises merge(value before, cost of the stage) over
/// all stages; costs below `limit` only.
/// @param stage_cost  stage_cost(stage, begin, end)
template <class StageCost, class Merge>
[[nodiscard]] constexpr std::vector<int> best_split(int layers, int stages, double limit,
                                                    const StageCost& stage_cost,
                                                    const Merge& merge) {
  constexpr double unreachable = std::numeric_limits<double>::infinity();
  const auto width = static_cast<std::size_t>(layers) + 1;
  std::vector<double> before(width, unreachable), after(width, unreachable);
  std::vector<int> begin(width * static_cast<std::size_t>(stages), 0);
  before[0] = 0;
  for (int s = 0; s < stages; ++s) {
    for (int end = 0; end <= layers; ++end) {
      double best = unreachable;
      // The first of equal ones: it leaves the later stage more layers.
      for (int from = 0; from + least_layers(s, stages) <= end; ++from) {
        const double own = stage_cost(s, from, end);
        if (own > limit || before[static_cast<std::size_t>(from)] == unreachable) continue;
        const double value = merge(before[static_cast<std::size_t>(from)], own);
        if (value >= best) continue;
        best = value;
        begin[static_cast<std::size_t>(s) * width + static_cast<std::size_t>(end)] = from;
      }
      after[static_cast<std::size_t>(end)] = best;
    }
    before.swap(after);
  }
  std::vector<int> counts(static_cast<std::size_t>(stages), 0);
  for (int s = stages - 1, end = layers; s >= 0; --s) {
    const int from = begin[static_cast<std::size_t>(s) * width + static_cast<std::size_t>(end)];
    counts[static_cast<std::size_t>(s)] = end - from;
    end = from;
  }
  return counts;
}

}  // namespace detail

/// The loads that a split gives to p ranks with v chunks each. @pre  split.stages() == p*v
template <placement Placement = LoopPlacement>
[[nodiscard]] constexpr SplitCost cost_of(const LayerSplit& split, int p, int v,
                                          const LayerCosts& costs, Placement place = {}) {
  const detail::StageLoads loads(p, v, costs, place);
  expects(split.stages() == loads.stages(), ErrorCode::usage, [&] {
    return sentence("a split over ", split.stages(), " stages is not one for ", p, " ranks with ",
                    v, " chunks each");
  });
  SplitCost cost;
  std::vector<int> held(static_cast<std::size_t>(p), 0);
  for (int s = 0; s < loads.stages(); ++s) {
    const int layers = split.of_stage(s).count();
    held[static_cast<std::size_t>(loads.rank_of(s))] += layers;
    if (loads.stage(s, layers) > cost.stage) cost.stage = loads.stage(s, layers);
  }
  for (int r = 0; r < p; ++r) {
    const double total = loads.rank(r, held[static_cast<std::size_t>(r)]);
    if (total > cost.rank) cost.rank = total;
  }
  cost.mean = (split.layers() * costs.layer + costs.embedding + costs.head) / p;
  return cost;
}

/// The best split of equal layers over p ranks with v chunks each:
///
///   1. the busiest rank, as the sum of its chunks, is least busy: in the steady state of a
///      pipeline every rank waits for it, so a step takes about m times its cost;
///   2. of those splits, the largest stage is smallest, then the second largest, and so on: the
///      fill and the drain of the pipeline pass through single chunks;
///   3. of those, later stages hold more, since earlier ones keep the most micro-batches alive.
///
/// The first and the last stage may end up with the embedding or the head alone; every other stage
/// holds a layer.
///
/// Exact: both passes hand out the layers one by one to the smallest resulting load, which is
/// optimal for equal layers under limits of stages and ranks (a polymatroid; Federgruen and
/// Groenevelt, 1986).
/// Cost: O(layers * stages). Deterministic. Throws Error(usage) for p*v > layers + 2 and for costs
/// that are not finite.
template <placement Placement = LoopPlacement>
[[nodiscard]] constexpr LayerSplit balance_layers(int layers, int p, int v, const LayerCosts& costs,
                                                  Placement place = {}) {
  const detail::StageLoads loads(p, v, costs, place);
  const int stages = loads.stages();
  detail::expects_enough_layers(layers, stages);
  std::vector<int> counts(static_cast<std::size_t>(stages), 0);
  std::vector<int> held(static_cast<std::size_t>(p), 0);
  int left = layers;
  for (int s = 0; s < stages; ++s) {
    const int least = detail::least_layers(s, stages);
    counts[static_cast<std::size_t>(s)] = least;
    held[static_cast<std::size_t>(loads.rank_of(s))] += least;
    left -= least;
  }

  double limit = 0;
  std::vector<int> totals = held;
  for (int i = 0; i < left; ++i) {
    int best = 0;
    for (int r = 1; r < p; ++r) {
      if (loads.rank(r, totals[static_cast<std::size_t>(r)] + 1) <=
          loads.rank(best, totals[static_cast<std::size_t>(best)] + 1))
        best = r;
    }
    ++totals[static_cast<std::size_t>(best)];
  }
  for (int r = 0; r < p; ++r) {
    const double total = loads.rank(r, totals[static_cast<std::size_t>(r)]);
    if (total > limit) limit = total;
  }

  for (int i = 0; i < left; ++i) {
    int best = -1;
    for (int s = 0; s < stages; ++s) {
      const int r = loads.rank_of(s);
      if (loads.rank(r, held[static_cast<std::size_t>(r)] + 1) > limit) continue;
      if (best < 0 || loads.stage(s, counts[static_cast<std::size_t>(s)] + 1) <=
                          loads.stage(best, counts[static_cast<std::size_t>(best)] + 1))
        best = s;
    }
    ++counts[static_cast<std::size_t>(best)];
    ++held[static_cast<std::size_t>(loads.rank_of(best))];
  }
  return {layers, counts};
}

/// The best split of unequal layers over stages of one rank each: the largest stage is smallest;
/// of those splits, the sum of the squares of the stages' costs is smallest, which evens out the
/// others. The first and the last stage may hold no layer. `embedding` and `head` are costs on the
/// first and the last stage.
/// Exact, by dynamic programming. Cost: O(stages * layers^2). Throws Error(usage) as above.
[[nodiscard]] constexpr LayerSplit balance_layers(std::span<const double> layer_costs, int stages,
                                                  double embedding, double head) {
  const int layers = static_cast<int>(layer_costs.size());
  expects(stages >= 1, ErrorCode::usage, [&] {
    return sentence("cannot balance layers over ", stages, " stages; the least is 1");
  });
  detail::expects_enough_layers(layers, stages);
  expects(detail::StageLoads::is_cost(embedding) && detail::StageLoads::is_cost(head),
          ErrorCode::usage, [&] {
            return sentence("the costs of embedding and head are ", embedding, " and ", head,
                            "; they must be finite and not negative");
          });
  std::vector<double> sum_before(1, 0.0);
  for (int i = 0; i < layers; ++i) {
    const double cost = layer_costs[static_cast<std::size_t>(i)];
    expects(detail::StageLoads::is_cost(cost), ErrorCode::usage, [&] {
      return sentence("the cost of layer ", i, " is ", cost,
                      "; it must be finite and not negative");
    });
    sum_before.push_back(sum_before.back() + cost);
  }
  const auto stage_cost = [&](int stage, int begin, int end) {
    return sum_before[static_cast<std::size_t>(end)] - sum_before[static_cast<std::size_t>(begin)] +
           (stage == 0 ? embedding : 0) + (stage + 1 == stages ? head : 0);
  };
  const auto largest =
      detail::best_split(layers, stages, std::numeric_limits<double>::infinity(), stage_cost,
                         [](double before, double own) { return before > own ? before : own; });
  double limit = 0;
  for (int s = 0, begin = 0; s < stages; ++s) {
    const int end = begin + largest[static_cast<std::size_t>(s)];
    if (stage_cost(s, begin, end) > limit) limit = stage_cost(s, begin, end);
    begin = end;
  }
  return {layers, detail::best_split(layers, stages, limit, stage_cost,
                                     [](double before, double own) { return before + own * own; })};
}

}  // namespace mega::inline v0::dpp
