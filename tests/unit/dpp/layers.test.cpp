/// @file  Tests of the split of layers over stages.
#include "tests/support/refusal.hpp"
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
  CHECK(mega_test::refusal_of([] { (void)split_layers(4, 6); }) ==
        "cannot split 4 layers over 6 stages: at most 4 stages have a layer each");
  CHECK(mega_test::refusal_of([] { (void)split_layers(0, 1); }).find("cannot split 0 layers") == 0);
  CHECK(mega_test::refusal_of([] { (void)split_layers(4, 0); }) ==
        "cannot split layers over 0 stages; the least is 1");
  CHECK(mega_test::refusal_of([] { (void)split_layers(4, -1); }) != "accepted");
  CHECK(mega_test::refusal_of([] {
          (void)LayerSplit(5, std::vector<int>{2, 2});
        }) == "the layer counts of 2 stages sum up to 4, but the model has 5 layers");
  CHECK(mega_test::refusal_of([] {
          (void)LayerSplit(4, std::vector<int>{2, 0, 2});
        }) == "stage 1 of 3 has 0 layers; the least is 1");
  CHECK(mega_test::refusal_of([] {
          (void)LayerSplit(4, std::vector<int>{5, -1});
        }) == "stage 1 of 2 has -1 layers; the least is 0");
  CHECK(mega_test::refusal_of([] { (void)LayerSplit(0, std::vector<int>{}); }) != "accepted");
}

TEST_CASE("dpp: fixed layers at the ends, the rest as even as possible") {
  CHECK(counts_of(split_layers(14, 4, 1, {3, 3})) == std::vector<int>{3, 4, 4, 3});
  CHECK(counts_of(split_layers(13, 4, 1, {3, 3})) == std::vector<int>{3, 3, 4, 3});
  CHECK(counts_of(split_layers(24, 2, 1, {13, 0})) == std::vector<int>{13, 11});
  CHECK(counts_of(split_layers(24, 2, 1, {0, 11})) == std::vector<int>{13, 11});
  CHECK(counts_of(split_layers(24, 2, 1, {13, 11})) == std::vector<int>{13, 11});
  // The last stage shares the rest: it is the last to take one more.
  CHECK(counts_of(split_layers(12, 4, 1, {2, 0})) == std::vector<int>{2, 3, 4, 3});
  CHECK(counts_of(split_layers(13, 4, 1, {0, 2})) == std::vector<int>{3, 4, 4, 2});
  // A rank's layers go to its chunks alike.
  CHECK(counts_of(split_layers(16, 4, 2, {2, 2})) == std::vector<int>{1, 3, 3, 1, 1, 3, 3, 1});
  CHECK(counts_of(split_layers(16, 4, 2, {2, 2}, VPlacement{})) ==
        std::vector<int>{1, 3, 3, 1, 1, 3, 3, 1});
  CHECK(counts_of(split_layers(12, 3, 2, {2, 0}, VPlacement{})) ==
        std::vector<int>{1, 2, 2, 3, 3, 1});
  CHECK(counts_of(split_layers(9, 4, 1, {0, 0})) == counts_of(split_layers(9, 4)));
  static_assert(split_layers(7, 3, 1, {1, 2}).of_stage(1) == LayerRange{1, 5});
}

TEST_CASE("dpp: fixed layers that leave no split are refused with their numbers") {
  const auto said = [](int layers, int p, int v, EndLayers ends) {
    return mega_test::refusal_of([&] { (void)split_layers(layers, p, v, ends); });
  };
  CHECK(said(8, 1, 1, {3, 0}) ==
        "fixing the layers of the first or the last rank takes at least 2 ranks and 1 chunk a "
        "rank, not p 1, v 1");
  CHECK(said(8, 4, 2, {3, 0}) ==
        "the first rank cannot hold 3 layers in 2 chunks alike; the nearest numbers are 2 and 4");
  CHECK(said(8, 4, 2, {2, 1}) ==
        "the last rank cannot hold 1 layers in 2 chunks alike; the nearest numbers are 2");
  CHECK(said(8, 4, 1, {-1, 0}) == "the first rank cannot hold -1 of 8 layers");
  CHECK(said(8, 4, 1, {1, 2147483647}) == "the last rank cannot hold 2147483647 of 8 layers");
  CHECK(said(8, 2, 1, {3, 4}) ==
        "the two ranks hold 3 and 4 layers, but the model has 8; leave one of the two numbers out, "
        "and that rank holds the rest");
  CHECK(said(8, 4, 1, {4, 3}) ==
        "the first rank's 4 and the last rank's 3 of 8 layers leave 1 for 2 stages, each of which "
        "needs one; fix at most 6 in all");
  CHECK(said(6, 3, 2, {4, 0}) ==
        "the first rank's 4 and the last rank's 0 of 6 layers leave 2 for 4 stages, each of which "
        "needs one; fix at most 2 in all");
  CHECK(said(4, 8, 1, {1, 1}).find("use fewer stages") != std::string::npos);
}
