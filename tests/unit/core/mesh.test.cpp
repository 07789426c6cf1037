#include <mega/core/mesh.hpp>

#include <doctest/doctest.h>

#include <set>
#include <string>

using mega::Axis;
using mega::Coordinates;
using mega::Mesh;

TEST_CASE("core: ranks and coordinates are one-to-one, tensor fastest and pipeline slowest") {
  for (int t = 1; t <= 3; ++t) {
    for (int c = 1; c <= 2; ++c) {
      for (int d = 1; d <= 3; ++d) {
        for (int p = 1; p <= 3; ++p) {
          const Mesh mesh{t, c, d, p};
          for (int rank = 0; rank < mesh.size(); ++rank) {
            const Coordinates at = mesh.coordinates(rank);
            CHECK(mesh.rank(at) == rank);
            CHECK(at[Axis::tensor] == rank % t);
            CHECK(at[Axis::pipeline] == rank / (t * c * d));
          }
        }
      }
    }
  }
}

TEST_CASE("core: groups along an axis partition the world") {
  constexpr Mesh mesh{2, 1, 3, 4};
  static_assert(mesh.size() == 24);
  for (const Axis axis : {Axis::tensor, Axis::data, Axis::pipeline}) {
    std::set<int> colors;
    for (int rank = 0; rank < mesh.size(); ++rank) {
      const int color = mesh.group(rank, axis);
      colors.insert(color);
      CHECK(mesh.coordinates(color)[axis] == 0);
      for (int i = 0; i < mesh.degree(axis); ++i)
        CHECK(mesh.group(mesh.moved(rank, axis, i), axis) == color);
    }
    CHECK(colors.size() == static_cast<std::size_t>(mesh.size() / mesh.degree(axis)));
  }
}

TEST_CASE("core: a mesh that does not fit is refused with its numbers") {
  const auto refusal = [](const Mesh& mesh, int world) -> std::string {
    try {
      mega::validate(mesh, world);
    } catch (const mega::Error& e) {
      CHECK(e.code() == mega::ErrorCode::usage);
      return e.what();
    }
    return "accepted";
  };
  CHECK(refusal({2, 1, 2, 2}, 8) == "accepted");
  CHECK(refusal({2, 1, 2, 2}, 6) == "tp2 x dp2 x pp2 needs 8 ranks but the world has 6");
  CHECK(refusal({0, 1, 2, 2}, 0).find("is 0 in tp0 x dp2 x pp2") != std::string::npos);
}
