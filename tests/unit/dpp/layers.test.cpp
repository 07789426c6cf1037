/// @file  Tests of the split of layers over stages.
#include <mega/core/error.hpp>
#include <mega/dpp/layers.hpp>

#include <doctest/doctest.h>

#include <string>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

std::vector<int> counts_of(const LayerSplit& split) {
  std::vector<int> counts;
  for (int stage = 0; stage < split.stages(); ++stage) {
    counts.push_back(split.of_stage(stage).count());
  }
  return counts;
}

template <class F>
std::string refusal(F make) {
  try {
    make();
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::usage);
    return e.what();
  }
  return "accepted";
}

}  // namespace

static_assert(split_layers(7, 3).of_stage(1) == LayerRange{2, 5});

TEST_CASE("dpp: layers that do not divide go right before the last stage") {
  CHECK(counts_of(split_layers(8, 4)) == std::vector<int>{2, 2, 2, 2});
  CHECK(counts_of(split_layers(9, 4)) == std::vector<int>{2, 2, 3, 2});
  CHECK(counts_of(split_layers(10, 4)) == std::vector<int>{2, 3, 3, 2});
  CHECK(counts_of(split_layers(11, 4)) == std::vector<int>{3, 3, 3, 2});
  CHECK(counts_of(split_layers(5, 1)) == std::vector<int>{5});
  CHECK(counts_of(split_layers(3, 3)) == std::vector<int>{1, 1, 1});
}

TEST_CASE("dpp: every layer is in exactly one stage, for 80 layers on 32 stages too") {
  for (int layers = 1; layers <= 80; ++layers) {
    for (int stages = 1; stages <= layers; ++stages) {
      const auto split = split_layers(layers, stages);
      REQUIRE(split.stages() == stages);
      REQUIRE(split.layers() == layers);
      int next = 0;
      for (int stage = 0; stage < stages; ++stage) {
        const auto range = split.of_stage(stage);
        CHECK(range.begin == next);
        CHECK((range.count() == layers / stages || range.count() == layers / stages + 1));
        CHECK(split.stage_of(range.begin) == stage);
        CHECK(split.stage_of(range.end - 1) == stage);
        next = range.end;
      }
      CHECK(next == layers);
      CHECK(split.of_stage(stages - 1).count() == layers / stages);
    }
  }
}

TEST_CASE("dpp: explicit counts, with the embedding or the head alone") {
  const LayerSplit split(6, std::vector<int>{0, 4, 2, 0});
  CHECK(counts_of(split) == std::vector<int>{0, 4, 2, 0});
  CHECK(split.stage_of(0) == 1);
  CHECK(split.stage_of(4) == 2);
}

TEST_CASE("dpp: wrong layer counts are refused with their numbers") {
  CHECK(refusal([] { (void)split_layers(4, 6); }) ==
        "cannot split 4 layers over 6 stages: at most 4 stages have a layer each");
  CHECK(refusal([] { (void)split_layers(0, 1); }).find("cannot split 0 layers") == 0);
  CHECK(refusal([] { (void)split_layers(4, 0); }) ==
        "cannot split layers over 0 stages; the least is 1");
  CHECK(refusal([] { (void)split_layers(4, -1); }) != "accepted");
  CHECK(refusal([] {
          (void)LayerSplit(5, std::vector<int>{2, 2});
        }) == "the layer counts of 2 stages sum up to 4, but the model has 5 layers");
  CHECK(refusal([] {
          (void)LayerSplit(4, std::vector<int>{2, 0, 2});
        }) == "stage 1 of 3 has 0 layers; the least is 1");
  CHECK(refusal([] {
          (void)LayerSplit(4, std::vector<int>{5, -1});
        }) == "stage 1 of 2 has -1 layers; the least is 0");
  CHECK(refusal([] { (void)LayerSplit(0, std::vector<int>{}); }) != "accepted");
}
