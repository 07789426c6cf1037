/// @file  Tests of balanced splits, against all splits of small pipelines and known best splits.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/balance.hpp>
#include <mega/dpp/placement.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

std::vector<int> counts_of(const LayerSplit& split) {
  std::vector<int> counts;
  for (int stage = 0; stage < split.stages(); ++stage)
    counts.push_back(split.of_stage(stage).count());
  return counts;
}

/// Every way to give `layers` layers to `stages` stages.
void for_each_split(int layers, int stages, const std::function<void(const LayerSplit&)>& use) {
  std::vector<int> counts(static_cast<std::size_t>(stages), 0);
  const std::function<void(int, int)> fill = [&](int stage, int left) {
    int& own = counts[static_cast<std::size_t>(stage)];
    if (stage + 1 == stages) {
      own = left;
      use(LayerSplit(layers, counts));
      return;
    }
    for (own = stage == 0 ? 0 : 1; own <= left; ++own) fill(stage + 1, left - own);
  };
  fill(0, layers);
}

/// What balance_layers promises to minimise, in this order: the busiest rank, then the stages from
/// the largest down. Added up layer by layer, apart from the library.
template <class Placement>
std::vector<double> objective(const LayerSplit& split, int p, int v, const LayerCosts& costs) {
  std::vector<double> ranks(static_cast<std::size_t>(p), 0.0), out;
  for (int s = 0; s < split.stages(); ++s) {
    double cost = s == 0 ? costs.embedding : 0.0;
    for (int i = 0; i < split.of_stage(s).count(); ++i) cost += costs.layer;
    if (s + 1 == split.stages()) cost += costs.head;
    ranks[static_cast<std::size_t>(Placement::rank_of(s, p, v))] += cost;
    out.push_back(cost);
  }
  std::sort(out.begin(), out.end(), std::greater<>());
  out.insert(out.begin(), *std::max_element(ranks.begin(), ranks.end()));
  return out;
}

template <class Placement>
int compare_with_all_splits(const LayerCosts& costs) {
  int compared = 0;
  for (int p = 1; p <= 4; ++p) {
    for (int v = 1; v <= 3 && p * v <= 6; ++v) {
      for (int layers = std::max(0, p * v - 2); layers <= 9; ++layers) {
        const LayerSplit split = balance_layers(layers, p, v, costs, Placement{});
        const std::vector<double> got = objective<Placement>(split, p, v, costs);
        std::vector<double> best;
        for_each_split(layers, p * v, [&](const LayerSplit& other) {
          const std::vector<double> value = objective<Placement>(other, p, v, costs);
          if (best.empty() || value < best) best = value;
        });
        CAPTURE(p);
        CAPTURE(v);
        CAPTURE(layers);
        CHECK(got == best);
        const SplitCost cost = cost_of(split, p, v, costs, Placement{});
        CHECK(cost.rank == best[0]);
        CHECK(cost.stage == best[1]);
        CHECK(cost.mean == (layers * costs.layer + costs.embedding + costs.head) / p);
        ++compared;
      }
    }
  }
  return compared;
}

constexpr TransformerShape gpt3_1b3(double vocab) {
  return {.hidden = 2048,
          .heads = 16,
          .kv_heads = 16,
          .head_dim = 128,
          .ffn = 8192,
          .mlp_matrices = 2,
          .vocab = vocab,
          .sequence = 2048};
}

constexpr TransformerShape llama3_1b{.hidden = 2048,
                                     .heads = 32,
                                     .kv_heads = 8,
                                     .head_dim = 64,
                                     .ffn = 8192,
                                     .mlp_matrices = 3,
                                     .vocab = 128256,
                                     .sequence = 4096};

}  // namespace

static_assert(balance_layers(24, 2, 1, transformer_costs(gpt3_1b3(50304))).of_stage(0).count() ==
              13);

TEST_CASE("dpp: the best splits of GPT-3 1.3B and Llama-3 1B on two ranks") {
  for (const double vocab : {50257.0, 50304.0}) {
    const LayerSplit split = balance_layers(24, 2, 1, transformer_costs(gpt3_1b3(vocab)));
    CHECK(counts_of(split) == std::vector<int>{13, 11});
  }
  CHECK(counts_of(balance_layers(16, 2, 1, transformer_costs(llama3_1b))) ==
        std::vector<int>{10, 6});
}

TEST_CASE("dpp: operations of a layer and of the head, by hand") {
  // GPT-3 1.3B, a token: 24 h^2 in the products of a layer, h (T + 1) twice for attention.
  const LayerCosts gpt = transformer_costs(gpt3_1b3(50304));
  CHECK(gpt.layer == 3.0 * (24.0 * 2048 * 2048 + 2.0 * 2048 * 2049));
  CHECK(gpt.head == 3.0 * 2 * 2048 * 50304);
  CHECK(gpt.embedding == 0);
  // Llama-3 1B: query and output 2048 x 2048, key and value 2048 x 512, three matrices in the MLP.
  const LayerCosts llama = transformer_costs(llama3_1b);
  CHECK(llama.layer == 3.0 * (2.0 * (2 * 2048.0 * 2048 + 2 * 2048.0 * 512 + 3 * 2048.0 * 8192) +
                              2.0 * 2048 * 4097));
  TransformerShape again = llama3_1b;
  again.recompute_layers = true;
  CHECK(transformer_costs(again).layer * 3 == llama.layer * 4);
  CHECK(transformer_costs(again).head == llama.head);
}

TEST_CASE("dpp: no split of a small pipeline is better") {
  // Dyadic numbers, so that sums in any order are equal.
  for (const LayerCosts& costs :
       {LayerCosts{}, LayerCosts{1, 0, 1.875}, LayerCosts{1, 0, 3.5}, LayerCosts{1, 0.5, 0.5},
        LayerCosts{1, 2.25, 0}, LayerCosts{0.25, 1, 8}, LayerCosts{4, 1, 1}, LayerCosts{1, 1, 1},
        LayerCosts{2, 1, 3}}) {
    CHECK(compare_with_all_splits<LoopPlacement>(costs) > 40);
    CHECK(compare_with_all_splits<VPlacement>(costs) > 40);
  }
}

TEST_CASE("dpp: equal costs give even splits, a large head its stage to itself") {
  CHECK(counts_of(balance_layers(8, 4, 1, {})) == std::vector<int>{2, 2, 2, 2});
  CHECK(counts_of(balance_layers(9, 4, 1, {1, 0, 0.5})) == std::vector<int>{2, 2, 3, 2});
  CHECK(counts_of(balance_layers(10, 4, 1, {1, 0, 1.9})) == std::vector<int>{3, 3, 3, 1});
  CHECK(counts_of(balance_layers(6, 3, 1, {1, 0, 100})) == std::vector<int>{3, 3, 0});
  CHECK(counts_of(balance_layers(2, 2, 2, {1, 0, 1})) == std::vector<int>{0, 1, 1, 0});
  CHECK(counts_of(balance_layers(7, 1, 1, {1, 5, 9})) == std::vector<int>{7});
  CHECK(counts_of(balance_layers(0, 1, 1, {})) == std::vector<int>{0});
  CHECK(counts_of(balance_layers(1, 1, 1, {})) == std::vector<int>{1});
}

TEST_CASE("dpp: a rank's chunks count together") {
  // The head's rank gives up a layer in either chunk; the stage of the head gives up first.
  CHECK(counts_of(balance_layers(12, 2, 2, {1, 0, 2})) == std::vector<int>{3, 3, 4, 2});
  // On a V the first and the last stage share rank 0.
  const LayerSplit v = balance_layers(14, 2, 2, {1, 1, 1}, VPlacement{});
  CHECK(counts_of(v) == std::vector<int>{3, 4, 4, 3});
  CHECK(cost_of(v, 2, 2, {1, 1, 1}, VPlacement{}).rank == 8);
  CHECK(cost_of(v, 2, 2, {1, 1, 1}, LoopPlacement{}).rank == 8);
  CHECK(cost_of(v, 2, 2, {1, 1, 1}, LoopPlacement{}).mean == 8);
  CHECK(cost_of(split_layers(14, 4), 2, 2, {1, 1, 1}, VPlacement{}).stage == 4);
}

TEST_CASE("dpp: 126 layers on 16 ranks with 7 chunks each, and 2000 on 64 with 16") {
  const LayerCosts costs{1, 0, 2.5};
  const LayerSplit split = balance_layers(126, 16, 7, costs);
  CHECK(split.layers() == 126);
  // 15 ranks hold 8 layers; the last one a layer in each of its chunks but that of the head.
  CHECK(cost_of(split, 16, 7, costs).rank == 8.5);
  CHECK(split.of_stage(111).count() == 0);
  CHECK(balance_layers(2000, 64, 16, costs).stages() == 1024);
}

TEST_CASE("dpp: unequal layers: no contiguous split is better") {
  std::mt19937 random(3);
  int compared = 0;
  for (int layers = 0; layers <= 9; ++layers) {
    for (int stages = 1; stages <= std::min(6, layers + 2); ++stages) {
      for (int i = 0; i < 8; ++i) {
        std::vector<double> costs;
        for (int l = 0; l < layers; ++l) costs.push_back(static_cast<double>(random() % 7));
        const double embedding = static_cast<double>(random() % 3);
        const double head = static_cast<double>(random() % 12);
        const auto value = [&](const LayerSplit& split) {
          double largest = 0, squares = 0;
          for (int s = 0; s < stages; ++s) {
            double own = s == 0 ? embedding : 0;
            for (int l = split.of_stage(s).begin; l < split.of_stage(s).end; ++l)
              own += costs[static_cast<std::size_t>(l)];
            if (s + 1 == stages) own += head;
            largest = std::max(largest, own);
            squares += own * own;
          }
          return std::vector<double>{largest, squares};
        };
        std::vector<double> best;
        for_each_split(layers, stages, [&](const LayerSplit& other) {
          if (best.empty() || value(other) < best) best = value(other);
        });
        CHECK(value(balance_layers(costs, stages, embedding, head)) == best);
        ++compared;
      }
    }
  }
  CHECK(compared == 8 * 50);
}

TEST_CASE("dpp: both searches agree on equal layers, one rank a stage") {
  for (int layers = 1; layers <= 40; ++layers) {
    for (int stages = 1; stages <= std::min(layers + 2, 12); ++stages) {
      const LayerCosts costs{3, 1, 7};
      const std::vector<double> each(static_cast<std::size_t>(layers), costs.layer);
      const auto one = cost_of(balance_layers(layers, stages, 1, costs), stages, 1, costs);
      const auto other =
          cost_of(balance_layers(each, stages, costs.embedding, costs.head), stages, 1, costs);
      CHECK(one.rank == other.rank);
    }
  }
  // Three cheap layers, then dear ones.
  const std::vector<double> dense_then_experts{1, 1, 1, 2, 2, 2, 2, 2};
  CHECK(counts_of(balance_layers(dense_then_experts, 3, 0, 1)) == std::vector<int>{4, 2, 2});
}

TEST_CASE("dpp: what cannot be balanced is refused with its numbers") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinite = std::numeric_limits<double>::infinity();
  const auto said = [](int layers, int p, int v, const LayerCosts& costs) {
    return mega_test::refusal_of([&] { (void)balance_layers(layers, p, v, costs); });
  };
  CHECK(said(4, 7, 1, {}) ==
        "cannot balance 4 layers over 7 stages: every stage but the first and the last needs one, "
        "so at most 6 stages have enough");
  CHECK(said(-3, 1, 1, {}).find("cannot balance -3 layers") == 0);
  CHECK(said(4, 0, 1, {}).find("p 0, v 1") != std::string::npos);
  CHECK(said(4, 2, -1, {}).find("p 2, v -1") != std::string::npos);
  CHECK(said(4, 2, 1, {0, 0, 0}) == "the cost of a layer is 0; it must be finite and above 0");
  for (const double wrong : {nan, infinite, -1.0}) {
    CHECK(said(4, 2, 1, {wrong, 0, 0}).find("the cost of a layer is") == 0);
    CHECK(said(4, 2, 1, {1, wrong, 0}).find("the costs of embedding and head are") == 0);
    CHECK(said(4, 2, 1, {1, 0, wrong}).find("the costs of embedding and head are") == 0);
    const std::vector<double> costs{1, wrong};
    CHECK(mega_test::refusal_of([&] {
            (void)balance_layers(costs, 2, 0, 0);
          }).find("the cost of layer 1 is") == 0);
    CHECK(mega_test::refusal_of([&] {
            (void)balance_layers(std::span<const double>(costs).first(1), 1, 0, wrong);
          }).find("the costs of embedding and head are") == 0);
  }
  const std::vector<double> costs{1, 1};
  CHECK(mega_test::refusal_of([&] { (void)balance_layers(costs, 0, 0, 0); }) ==
        "cannot balance layers over 0 stages; the least is 1");
  CHECK(mega_test::refusal_of([&] {
          (void)balance_layers(costs, 5, 0, 0);
        }).find("at most 4 stages") != std::string::npos);
  CHECK(mega_test::refusal_of([] { (void)cost_of(split_layers(4, 4), 2, 1, {}); }) ==
        "a split over 4 stages is not one for 2 ranks with 1 chunks each");
}
