/// @file  Token and position embeddings: shards, repeated tokens, positions.
#include "support.hpp"
#include <mega/core/error.hpp>
#include <mega/nn/embedding.hpp>

#include <doctest/doctest.h>

using namespace mega;
using test::at;
using test::Floats;

TEST_CASE("nn embedding: the shards' sum is the unsharded embedding; gradients likewise") {
  host::Stream s;
  constexpr Index vocab = 11, width = 5, split = 4;
  const std::vector<std::int32_t> ids{0, 3, 4, 10, 3, 3, 4};
  const auto n = static_cast<Index>(ids.size());
  const Vector<const std::int32_t> tokens(ids.data(), n);
  const Floats table = test::random_floats(vocab * width, 1),
               dout = test::random_floats(n * width, 2);
  Floats low(at(n * width), 9.0f), high(at(n * width), 9.0f);
  Floats dlow(at(split * width), 0.25f), dhigh(at((vocab - split) * width), 0.25f);
  nn::embedding_forward(s, test::matrix(low, n, width), tokens,
                        Matrix<const float>(table.data(), split, width), 0);
  nn::embedding_forward(s, test::matrix(high, n, width), tokens,
                        Matrix<const float>(table.data() + split * width, vocab - split, width),
                        split);
  nn::embedding_backward(s, test::matrix(dlow, split, width), test::matrix(dout, n, width), tokens,
                         0);
  nn::embedding_backward(s, test::matrix(dhigh, vocab - split, width), test::matrix(dout, n, width),
                         tokens, split);
  Floats want(at(vocab * width), 0.25f);
  for (Index r = 0; r < n; ++r) {
    for (Index c = 0; c < width; ++c) {
      const std::size_t i = at(r * width + c), t = at(ids[at(r)] * width + c);
      CHECK(low[i] + high[i] == table[t]);
      CHECK((low[i] == 0.0f || high[i] == 0.0f));
      want[t] += dout[i];  // token order, the order promised
    }
  }
  dlow.insert(dlow.end(), dhigh.begin(), dhigh.end());
  CHECK(dlow == want);
}

TEST_CASE("nn embedding: learned positions") {
  host::Stream s;
  constexpr Index samples = 3, time = 2, width = 3, first = 4, positions = 6;
  const Floats table = test::random_floats(positions * width, 1);
  const Floats x = test::random_floats(samples * time * width, 2);
  Floats y = x, dtable(table.size(), 1.0f), want(table.size(), 1.0f);
  nn::position_embedding_forward(s, test::matrix(y, samples * time, width),
                                 test::matrix(y, samples * time, width),
                                 test::matrix(table, positions, width), time, first);
  nn::position_embedding_backward(s, test::matrix(dtable, positions, width),
                                  test::matrix(x, samples * time, width), time, first);
  for (Index r = 0; r < samples * time; ++r)
    for (Index c = 0; c < width; ++c) {
      const std::size_t i = at(r * width + c), p = at((first + r % time) * width + c);
      CHECK(y[i] == x[i] + table[p]);
      want[p] += x[i];
    }
  CHECK(dtable == want);
  CHECK_THROWS_WITH_AS(
      nn::position_embedding_forward(s, test::matrix(y, samples * time, width),
                                     test::matrix(x, samples * time, width),
                                     test::matrix(table, positions, width), time, first + 1),
      "position_embedding_forward: positions 5 to 6 do not lie in a table of 6 "
      "positions",
      Error);
}
