#include <mega/core/parameter.hpp>

#include <doctest/doctest.h>

#include <vector>

using mega::Index;
using mega::Parameter;
using mega::ShardRun;

namespace {

/// Where every local element comes from, by brute force: walk the whole tensor.
std::vector<Index> global_of_local(const Parameter& p, int position, int degree) {
  std::vector<Index> out(static_cast<std::size_t>(mega::local_size(p, degree)), -1);
  const std::vector<Index> shape = p.shape, local = mega::local_shape(p, degree);
  for (Index g = 0; g < p.size(); ++g) {
    std::vector<Index> at(shape.size());
    Index rest = g;
    for (std::size_t d = shape.size(); d-- > 0;) at[d] = rest % shape[d], rest /= shape[d];
    if (p.shard.dim >= 0) {
      auto& x = at[static_cast<std::size_t>(p.shard.dim)];
      Index before = 0, local_before = 0;
      bool mine = false;
      for (const Index part : p.shard.parts) {
        const Index piece = (part + degree - 1) / degree;
        if (x >= before && x < before + part) {
          const Index inside = x - before;
          mine = inside / piece == position;
          x = local_before + inside % piece;
          break;
        }
        before += part;
        local_before += piece;
      }
      if (!mine) continue;
    }
    Index l = 0;
    for (std::size_t d = 0; d < local.size(); ++d) l = l * local[d] + at[d];
    out[static_cast<std::size_t>(l)] = g;
  }
  return out;
}

}  // namespace

TEST_CASE("core: shard runs say where every element lies") {
  const std::vector<Parameter> cases{
      {.name = "replicated", .shape = {3, 5}},
      {.name = "rows", .shape = {8, 3}, .shard = {0, {8}}},
      {.name = "columns", .shape = {3, 8}, .shard = {1, {8}}},
      {.name = "packed", .shape = {16, 3}, .shard = {0, {8, 4, 4}}},
      {.name = "vector", .shape = {16}, .shard = {0, {8, 8}}},
      {.name = "padded", .shape = {101, 2}, .shard = {0, {101}}},
      {.name = "middle", .shape = {2, 8, 3}, .shard = {1, {8}}},
      {.name = "tiny", .shape = {1, 2}, .shard = {0, {1}}},
  };
  for (const Parameter& p : cases) {
    for (const int degree : {1, 2, 4}) {
      std::vector<int> covered(static_cast<std::size_t>(p.size()), 0);
      for (int position = 0; position < degree; ++position) {
        CAPTURE(p.name);
        CAPTURE(degree);
        CAPTURE(position);
        const std::vector<Index> expected = global_of_local(p, position, degree);
        std::vector<Index> got(expected.size(), -1);
        Index last = -1;
        for (const ShardRun& run : mega::shard_runs(p, position, degree)) {
          CHECK(run.count > 0);
          CHECK(run.global > last);
          last = run.global;
          for (Index i = 0; i < run.count; ++i) {
            got[static_cast<std::size_t>(run.local + i)] = run.global + i;
            ++covered[static_cast<std::size_t>(run.global + i)];
          }
        }
        CHECK(got == expected);
      }
      for (const int times : covered) CHECK(times == (p.shard.replicated() ? degree : 1));
    }
  }
}

TEST_CASE("core: neighbouring runs are one") {
  const Parameter p{.name = "packed", .shape = {16, 3}, .shard = {0, {8, 4, 4}}};
  CHECK(mega::shard_runs(p, 0, 1) == std::vector<ShardRun>{{0, 0, 48}});
  CHECK(mega::shard_runs(p, 1, 2) == std::vector<ShardRun>{{12, 0, 12}, {30, 12, 6}, {42, 18, 6}});
}
