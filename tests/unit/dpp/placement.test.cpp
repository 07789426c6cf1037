/// @file  Tests of the placement of stages on ranks.
#include <mega/dpp/placement.hpp>

#include <doctest/doctest.h>

#include <vector>

using namespace mega::dpp;

namespace {

struct NoName {
  static constexpr int stage(int, int, int, int) { return 0; }
  static constexpr int rank_of(int, int, int) { return 0; }
  static constexpr int chunk_of(int, int, int) { return 0; }
};
static_assert(!placement<NoName>);
static_assert(!placement<int>);

template <class P>
void check_bijection() {
  for (int p = 1; p <= 9; ++p) {
    for (int v = 1; v <= 5; ++v) {
      std::vector<int> hits(static_cast<std::size_t>(p * v), 0);
      for (int rank = 0; rank < p; ++rank) {
        for (int chunk = 0; chunk < v; ++chunk) {
          const int stage = P::stage(rank, chunk, p, v);
          REQUIRE(0 <= stage);
          REQUIRE(stage < p * v);
          ++hits[static_cast<std::size_t>(stage)];
          CHECK(P::rank_of(stage, p, v) == rank);
          CHECK(P::chunk_of(stage, p, v) == chunk);
        }
      }
      for (const int n : hits) CHECK(n == 1);
    }
  }
}

}  // namespace

TEST_CASE("dpp: loop placement goes round the ranks") {
  CHECK(LoopPlacement::stage(2, 1, 4, 2) == 6);
  CHECK(LoopPlacement::rank_of(4, 4, 2) == 0);
  check_bijection<LoopPlacement>();
}

TEST_CASE("dpp: V placement turns at the last rank") {
  CHECK(VPlacement::stage(0, 1, 4, 2) == 7);
  CHECK(VPlacement::stage(3, 0, 4, 2) == 3);
  CHECK(VPlacement::stage(3, 1, 4, 2) == 4);
  CHECK(VPlacement::rank_of(0, 2, 2) == 0);  // map [0, 1, 1, 0] of PyTorch's v_2_rank_4_stage
  CHECK(VPlacement::rank_of(1, 2, 2) == 1);
  CHECK(VPlacement::rank_of(2, 2, 2) == 1);
  CHECK(VPlacement::rank_of(3, 2, 2) == 0);
  check_bijection<VPlacement>();
}
