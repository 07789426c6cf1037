/// @file  Cross-entropy: shards, padding, tokens left out, extreme logits, gradients.
#include "support.hpp"
#include <mega/core/error.hpp>
#include <mega/nn/cross_entropy.hpp>

#include <doctest/doctest.h>

#include <limits>

using namespace mega;
using test::at;
using test::Doubles;
using test::Floats;

namespace {

using Tokens = std::vector<std::int32_t>;

Doubles reference(const Doubles& logits, const Tokens& targets, Index vocab) {
  Doubles loss;
  for (Index r = 0; r < static_cast<Index>(targets.size()); ++r) {
    const double* const x = logits.data() + r * vocab;
    const double largest = *std::max_element(x, x + vocab);
    double sum = 0.0;
    for (Index c = 0; c < vocab; ++c) sum += std::exp(x[c] - largest);
    loss.push_back(targets[at(r)] < 0 ? 0.0 : std::log(sum) + largest - x[targets[at(r)]]);
  }
  return loss;
}

struct Result {
  double loss = 0.0;
  Floats row_loss, dlogits;  // dlogits without padding, shards joined
};

/// Splits [rows, vocab] logits into shards of `width` columns, the last one padded with `padding`,
/// and reduces between the steps as ranks would.
Result run(const Floats& logits, const Tokens& ids, Index vocab, Index width, float scale,
           float padding = std::numeric_limits<float>::infinity()) {
  host::Stream s;
  const auto rows = static_cast<Index>(ids.size());
  const Vector<const std::int32_t> targets(ids.data(), rows);
  const Index shards = (vocab + width - 1) / width;
  std::vector<Floats> local(at(shards));
  std::vector<nn::VocabShard> place;
  Floats row_max(at(rows), -std::numeric_limits<float>::infinity()), sum(at(rows)),
      target(at(rows));
  for (Index i = 0; i < shards; ++i) {
    place.push_back({i * width, std::min(width, vocab - i * width)});
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < width; ++c)
        local[at(i)].push_back(c < place.back().valid ? logits[at(r * vocab + i * width + c)]
                                                      : padding);
    Floats part(at(rows));
    nn::cross_entropy_row_max(s, test::vector(part), test::matrix(local[at(i)], rows, width),
                              place[at(i)]);
    for (Index r = 0; r < rows; ++r) row_max[at(r)] = std::max(row_max[at(r)], part[at(r)]);
  }
  for (Index i = 0; i < shards; ++i) {
    Floats part(at(rows)), owned(at(rows));
    nn::cross_entropy_sum_exp(s, test::vector(part), test::vector(owned),
                              test::matrix(local[at(i)], rows, width), targets,
                              test::vector(std::as_const(row_max)), place[at(i)]);
    for (Index r = 0; r < rows; ++r) {
      sum[at(r)] += part[at(r)];
      target[at(r)] += owned[at(r)];
    }
  }
  Result y{0.0, Floats(at(rows)), Floats(at(rows * vocab))};
  nn::cross_entropy_loss(s, Vector<double>(&y.loss, 1), test::vector(y.row_loss), targets,
                         test::vector(std::as_const(row_max)), test::vector(std::as_const(sum)),
                         test::vector(std::as_const(target)));
  for (Index i = 0; i < shards; ++i) {
    const auto in_place = test::matrix(local[at(i)], rows, width);
    const Floats factor{scale};
    if (i % 2 == 0)
      nn::cross_entropy_backward(s, in_place, in_place, targets, test::vector(row_max),
                                 test::vector(sum), place[at(i)], scale);
    else
      nn::cross_entropy_backward(s, in_place, in_place, targets, test::vector(row_max),
                                 test::vector(sum), place[at(i)], test::vector(factor));
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < width; ++c) {
        const float value = local[at(i)][at(r * width + c)];
        if (c < place[at(i)].valid)
          y.dlogits[at(r * vocab + i * width + c)] = value;
        else
          CHECK(value == 0.0f);
      }
  }
  return y;
}

}  // namespace

TEST_CASE("nn cross entropy: loss and gradient, whole and in shards with padding") {
  constexpr Index vocab = 37;
  const Tokens targets{0, 36, -1, 18, 19, 5};
  const auto rows = static_cast<Index>(targets.size());
  const Floats logits = test::random_floats(rows * vocab, 1, 8.0f);
  const Doubles want = reference(test::widen(logits), targets, vocab);
  const Doubles gradient = test::differences(
      [&](const Doubles& p) {
        double sum = 0.0;
        for (const double value : reference(p, targets, vocab)) sum += value;
        return 0.2 * sum;
      },
      test::widen(logits), test::all_elements(rows * vocab));
  const Result whole = run(logits, targets, vocab, vocab, 0.2f);
  for (const Index width : {37, 40, 19, 20, 13}) {
    const Result y = run(logits, targets, vocab, width, 0.2f);
    CAPTURE(width);
    double sum = 0.0;
    for (const double value : want) sum += value;
    CHECK(test::error(y.row_loss, want) < 5e-7);
    CHECK(y.loss == doctest::Approx(sum).epsilon(1e-6));
    CHECK(test::error(y.dlogits, gradient) < 2e-6);
    CHECK(test::error(y.dlogits, whole.dlogits) < 5e-7);
    for (Index c = 0; c < vocab; ++c) CHECK(y.dlogits[at(2 * vocab + c)] == 0.0f);
  }
}

TEST_CASE("nn cross entropy: no valid token gives zero loss and zero gradient") {
  const Result y = run(test::random_floats(2 * 9, 1), {-1, -1}, 9, 5, 0.5f);
  CHECK(y.loss == 0.0);
  CHECK(y.dlogits == Floats(18, 0.0f));
  // The divisor of an empty micro-batch may be infinite or NaN: 0 / 0 must not reach a gradient.
  const Result z = run(test::random_floats(2 * 9, 1), {-1, -1}, 9, 5, NAN);
  CHECK(z.dlogits == Floats(18, 0.0f));
}

TEST_CASE("nn cross entropy: logits of 1e4") {
  const Floats logits{1e4f, -1e4f, 0.0f, 1e4f, 1e4f, -1e4f};
  const Result y = run(logits, {1, 0}, 3, 2, 1.0f);
  CHECK(y.row_loss[0] == 2e4f);
  CHECK(y.row_loss[1] == doctest::Approx(std::log(2.0)).epsilon(1e-6));
  CHECK(y.dlogits == Floats{1.0f, -1.0f, 0.0f, -0.5f, 0.5f, 0.0f});
  // All logits equal and huge: the loss is log(vocabulary).
  const Result z = run(Floats(7, -1e4f), {6}, 7, 4, 1.0f);
  CHECK(z.loss == doctest::Approx(std::log(7.0)).epsilon(1e-6));
}

TEST_CASE("nn cross entropy: NaN is not hidden, padding is") {
  Floats logits = test::random_floats(5, 1);
  logits[3] = NAN;
  CHECK(std::isnan(run(logits, {0}, 5, 5, 1.0f).loss));
  logits[3] = 0.0f;
  CHECK(std::isfinite(run(logits, {0}, 5, 8, 1.0f, NAN).loss));
}

TEST_CASE("nn cross entropy: more valid columns than logits are refused") {
  host::Stream s;
  Floats x(6), m(2);
  CHECK_THROWS_WITH_AS(nn::cross_entropy_row_max(s, test::vector(m), test::matrix(x, 2, 3), {0, 4}),
                       "cross_entropy_row_max: the shard has 4 valid columns, the logits have 3",
                       Error);
}
