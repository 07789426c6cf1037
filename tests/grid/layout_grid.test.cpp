// Every layout of up to eight ranks either trains as one rank does or is refused with a reason.
#include "transformer_run.hpp"
#include <mega/nn/gpt3.hpp>
#include <mega/nn/llama3.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

using namespace grid;
using mega::nn::Gpt3;
using mega::nn::Llama3;
using mega::nn::Recompute;

namespace {

std::vector<Layout> all_layouts() {
  std::vector<Layout> out;
  for (int tp = 1; tp <= 8; ++tp) {
    for (int dp = 1; tp * dp <= 8; ++dp) {
      for (int pp = 1; tp * dp * pp <= 8; ++pp) {
        for (const int chunks : {1, 2}) {
          for (const bool sp : {false, true}) {
            for (const bool zero : {false, true}) {
              for (const Recompute recompute :
                   {Recompute::none, Recompute::selective, Recompute::full}) {
                out.push_back(
                    {{.tensor = tp, .data = dp, .pipeline = pp}, chunks, sp, zero, recompute});
              }
            }
          }
        }
      }
    }
  }
  return out;
}

/// Whether the sizes allow the layout; written from the rules, not from the library's checks.
bool possible(const Model& m, const Layout& l) {
  return m.config.heads % l.mesh.tensor == 0 && m.config.kv_heads % l.mesh.tensor == 0 &&
         m.config.ffn % l.mesh.tensor == 0 &&
         (!l.sequence_parallel || m.micro_batch * m.sequence % l.mesh.tensor == 0) &&
         m.global_microbatches % l.mesh.data == 0 && l.mesh.pipeline * l.chunks <= m.config.layers;
}

template <class Spec>
void walk(const Model& model) {
  const Outcome one = run_host<Spec>(model, {});
  REQUIRE(one.losses.size() == 3);
  CHECK(one.losses[2] < one.losses[0]);
  std::map<std::tuple<int, int, bool>, Outcome>
      same_sums;  // by what may change the grouping of sums
  int trained = 0, refused = 0;
  for (const Layout& layout : all_layouts()) {
    CAPTURE(layout.text());
    Outcome got;
    try {
      got = run_host<Spec>(model, layout);
    } catch (const mega::Error& e) {
      CHECK(e.code() == mega::ErrorCode::usage);
      CHECK_MESSAGE(!possible(model, layout), e.what());
      CHECK(std::string(e.what()).size() > 20);
      ++refused;
      continue;
    }
    ++trained;
    CHECK(possible(model, layout));
    const bool divides = layout.sequence_parallel && layout.mesh.tensor > 1;
    if (layout.mesh.tensor == 1 && layout.mesh.data == 1) {
      CHECK(got == one);
    } else {
      CHECK(difference(got, one) == "");
      // Depth, chunks and recomputation change no bit; of a sharded optimizer only the pieces of
      // the norm move with the depth.
      if (layout.shard_optimizer) continue;
      const auto [known, fresh] =
          same_sums.emplace(std::tuple(layout.mesh.tensor, layout.mesh.data, divides), got);
      if (!fresh) CHECK(known->second.first_gradients == got.first_gradients);
      if (!fresh) CHECK(known->second.losses[0] == got.losses[0]);
    }
  }
  MESSAGE(Spec::name, ": ", trained, " layouts trained, ", refused, " refused");
  CHECK(trained > 400);
  CHECK(refused > 50);
}

}  // namespace

TEST_SUITE("full") {
  TEST_CASE("grid: GPT-3, tied head") {
    walk<Gpt3>(gpt());
  }
  TEST_CASE("grid: GPT-3, own head") {
    walk<Gpt3>(gpt(false));
  }
  TEST_CASE("grid: Llama-3, own head") {
    walk<Llama3>(llama());
  }
  TEST_CASE("grid: Llama-3, tied head") {
    walk<Llama3>(llama(true));
  }
}
