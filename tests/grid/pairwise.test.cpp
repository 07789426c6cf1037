// A subset of the grid in which every pair of choices meets, on queues with random delays; small
// enough for the sanitizers.
#include "transformer_run.hpp"
#include <mega/host/host_async.hpp>
#include <mega/nn/gpt3.hpp>
#include <mega/nn/llama3.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using namespace grid;
using mega::nn::Recompute;

namespace {

/// Each two of: mesh, chunks, sequence parallelism, sharding, recomputation appear together in all
/// combinations of their values, as far as they can matter.
const std::vector<Layout> pairwise{
    {{.tensor = 2, .data = 2, .pipeline = 2}, 1, true, true, Recompute::none},
    {{.tensor = 2, .data = 2, .pipeline = 2}, 2, false, false, Recompute::full},
    {{.tensor = 2, .data = 1, .pipeline = 2}, 2, true, false, Recompute::selective},
    {{.tensor = 1, .data = 2, .pipeline = 2}, 2, false, true, Recompute::selective},
    {{.tensor = 2, .data = 2, .pipeline = 1}, 1, false, true, Recompute::full},
    {{.tensor = 4, .data = 1, .pipeline = 1}, 1, true, false, Recompute::none},
    {{.tensor = 1, .data = 4, .pipeline = 2}, 1, false, true, Recompute::none},
    {{.tensor = 1, .data = 1, .pipeline = 4}, 1, false, false, Recompute::full},
    {{.tensor = 1, .data = 1, .pipeline = 2}, 2, false, false, Recompute::none},
    {{.tensor = 1, .data = 1, .pipeline = 3}, 1, false, false, Recompute::selective},
    {{.tensor = 2, .data = 1, .pipeline = 4}, 1, true, false, Recompute::full},
};

template <class Spec>
void check(Model model) {
  model.steps = 2;
  const Outcome one = run_host<Spec>(model, {});
  for (std::size_t i = 0; i < pairwise.size(); ++i) {
    CAPTURE(pairwise[i].text());
    const Outcome inlined = run_host<Spec>(model, pairwise[i]);
    CHECK(difference(inlined, one) == "");
    const auto late = [&](int rank) {
      return mega::HostAsync(100 * i + static_cast<std::uint64_t>(rank), 40);
    };
    CHECK(run<Plan<Spec, mega::HostAsync>>(model, pairwise[i], late) == inlined);
  }
}

}  // namespace

TEST_CASE("grid: pairwise, GPT-3") {
  check<mega::nn::Gpt3>(gpt());
}
TEST_CASE("grid: pairwise, Llama-3") {
  check<mega::nn::Llama3>(llama());
}

TEST_CASE("grid: dropout is the same draw in every layout") {
  Model model = gpt();
  model.config.dropout = {0.1F, 0.1F, 0.1F};
  const Outcome one = run_host<mega::nn::Gpt3>(model, {});
  Model dry = model;
  dry.config.dropout = {};
  CHECK(difference(run_host<mega::nn::Gpt3>(dry, {}), one) != "");
  for (const Layout& layout : pairwise) {
    CAPTURE(layout.text());
    CHECK(difference(run_host<mega::nn::Gpt3>(model, layout), one) == "");
  }
}
