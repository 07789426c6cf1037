/// @file  Block reduction has the bits of the tree element by element; shares cover every element.
#include "communicator_laws.hpp"
#include <mega/comm/call.hpp>
#include <mega/comm/reduce.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

using mega::Index;
using mega::comm::Piece;
using mega::comm::Reduce;

TEST_CASE("comm: the tree is balanced and order matters in the test data") {
  const auto text = [](int n) {
    return mega::comm::tree_reduce(
        0, n, [](int i) { return std::to_string(i); },
        [](const std::string& a, const std::string& b) { return "(" + a + "+" + b + ")"; });
  };
  CHECK(text(1) == "0");
  CHECK(text(3) == "((0+1)+2)");
  CHECK(text(6) == "(((0+1)+(2+3))+(4+5))");
  // Serial order gives other bits for many elements, so a wrong order cannot pass the laws.
  int other = 0;
  for (Index i = 0; i < 1000; ++i) {
    float serial = 0;
    for (int r = 0; r < 8; ++r) serial += laws::operand<float>(r, i, Reduce::sum);
    if (serial != laws::reduced<float>(8, i, Reduce::sum)) ++other;
  }
  CHECK(other > 100);
}

TEST_CASE("comm: reduce_along_tree equals the tree of each element bit for bit") {
  for (const Reduce reduce : {Reduce::sum, Reduce::max}) {
    for (int ranks = 1; ranks <= 17; ++ranks) {
      const Index count = 3000;
      std::vector<std::vector<float>> x(static_cast<std::size_t>(ranks));
      for (int r = 0; r < ranks; ++r)
        for (Index i = 0; i < count; ++i)
          x[static_cast<std::size_t>(r)].push_back(laws::operand<float>(r, i, reduce));
      std::vector<float> out(static_cast<std::size_t>(count), 5.0f);
      const Piece piece{7, 2500};
      mega::comm::reduce_along_tree<float>(
          reduce, ranks, [&](int r) { return x[static_cast<std::size_t>(r)].data(); }, piece,
          [&](Piece at, const float* values) {
            for (Index i = 0; i < at.count; ++i)
              out[static_cast<std::size_t>(at.first + i)] = values[i];
          });
      CHECK(laws::differences(out, [&](Index i) {
              const bool inside = i >= 7 && i < 2507;
              return inside ? laws::reduced<float>(ranks, i, reduce) : 5.0f;
            }) == 0);
    }
  }
}

TEST_CASE("comm: max propagates NaN from either side") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(mega::comm::combine(Reduce::max, nan, 1.0f)));
  CHECK(std::isnan(mega::comm::combine(Reduce::max, 1.0f, nan)));
  CHECK(mega::comm::combine(Reduce::max, -2.0f, -1.0f) == -1.0f);
  CHECK(mega::comm::combine(Reduce::max, std::int64_t{-2}, std::int64_t{-3}) == -2);
}

TEST_CASE("comm: shares are disjoint, in order, and cover everything") {
  for (const Index count : {Index{0}, Index{1}, Index{63}, Index{64}, Index{65}, Index{100003}}) {
    for (int parts = 1; parts <= 9; ++parts) {
      Index next = 0;
      for (int part = 0; part < parts; ++part) {
        const Piece piece = mega::comm::share_of(count, part, parts);
        CHECK(piece.first == next);
        CHECK(piece.count >= 0);
        next += piece.count;
      }
      CHECK(next == count);
    }
  }
}

TEST_CASE("comm: a disagreement names every side once") {
  using mega::comm::Call;
  using mega::comm::ElementType;
  using mega::comm::Operation;
  const mega::comm::Roster roster({4, 5, 7, 9}, "tp");
  const Call a{Operation::all_reduce, ElementType::float32, Reduce::sum, 0, 100, 17};
  Call b = a;
  b.count = 101;
  const Call c{Operation::broadcast, ElementType::byte, {}, 3, 8, 17};
  const std::vector<Call> calls{a, b, a, c};
  CHECK(mega::comm::describe_disagreement(calls, roster) ==
        "communicator tp of ranks 4,5,7,9 disagrees: ranks 4,7 called all_reduce(sum) #17 with 100 "
        "float, rank 5 called all_reduce(sum) #17 with 101 float, rank 9 called broadcast #17 with "
        "8 byte from rank 9");
}
