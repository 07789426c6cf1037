/// @file  Element-wise operations against double precision; dropout's mean and layout independence.
#include "support.hpp"
#include <mega/core/error.hpp>
#include <mega/nn/elementwise.hpp>

#include <doctest/doctest.h>

#include <limits>

using namespace mega;
using test::at;
using test::Doubles;
using test::Floats;

namespace {

double gelu(double x) {
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}
double silu(double x) {
  return x / (1.0 + std::exp(-x));
}

Floats grid() {
  Floats x;
  for (int i = -600; i <= 600; ++i) x.push_back(static_cast<float>(i) * 0.05f);
  return x;
}

}  // namespace

TEST_CASE("nn elementwise: exponential within 2 ulp, zero far below, NaN kept") {
  for (int i = -876000; i <= 100000; i += 7) {
    const float x = static_cast<float>(i) * 1e-4f;
    const double want = std::exp(static_cast<double>(x));
    CHECK_MESSAGE(std::abs(nn::detail::exponential(x) - want) <= 2.0 * 0x1p-23 * want, x);
  }
  CHECK(nn::detail::exponential(0.0f) == 1.0f);
  CHECK(nn::detail::exponential(-1e4f) == 0.0f);
  CHECK(nn::detail::exponential(-std::numeric_limits<float>::infinity()) == 0.0f);
  CHECK(std::isnan(nn::detail::exponential(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("nn elementwise: sums, bias and column sums") {
  host::Stream s;
  constexpr Index rows = 5, cols = 67;
  const Floats a = test::random_floats(rows * cols, 1), b = test::random_floats(rows * cols, 2);
  const Floats bias = test::random_floats(cols, 3);
  Floats sum(a.size()), biased = a, twice(a.size()), filled(a.size());
  nn::add(s, test::matrix(sum, rows, cols), test::matrix(a, rows, cols),
          test::matrix(b, rows, cols));
  nn::bias_add(s, test::matrix(biased, rows, cols), test::matrix(biased, rows, cols),
               test::vector(bias));
  nn::scale(s, test::matrix(twice, rows, cols), test::matrix(a, rows, cols), 2.0f);
  nn::fill(s, test::matrix(filled, rows, cols), -3.0f);
  Floats dbias(cols, 10.0f);
  nn::bias_gradient(s, test::vector(dbias), test::matrix(a, rows, cols));
  for (Index c = 0; c < cols; ++c) {
    float column = 0.0f;
    for (Index r = 0; r < rows; ++r) {
      const std::size_t i = at(r * cols + c);
      CHECK(sum[i] == a[i] + b[i]);
      CHECK(biased[i] == a[i] + bias[at(c)]);
      CHECK(twice[i] == 2.0f * a[i]);
      CHECK(filled[i] == -3.0f);
      column += a[i];
    }
    CHECK(dbias[at(c)] == 10.0f + column);
  }
}

TEST_CASE("nn elementwise: gelu and its slope over [-30, 30]") {
  host::Stream s;
  const Floats x = grid(), dout = test::random_floats(static_cast<Index>(x.size()), 1);
  const auto n = static_cast<Index>(x.size());
  Floats y(x.size()), dx(x.size());
  nn::gelu_tanh_forward(s, test::matrix(y, 1, n), test::matrix(x, 1, n));
  nn::gelu_tanh_backward(s, test::matrix(dx, 1, n), test::matrix(dout, 1, n),
                         test::matrix(x, 1, n));
  for (Index i = 0; i < n; ++i) {
    const double v = x[at(i)], slope = (gelu(v + 1e-5) - gelu(v - 1e-5)) / 2e-5;
    // The gate's argument errs by 1e-7 relative to itself and lies within +-17 where it matters.
    CHECK(std::abs(y[at(i)] - gelu(v)) <= 1e-6 * std::max(1.0, std::abs(v)));
    CHECK(std::abs(dx[at(i)] - dout[at(i)] * slope) <= 4e-6);
  }
}

TEST_CASE("nn elementwise: swiglu and its gradient") {
  host::Stream s;
  for (const Index cols : {1, 3, 37}) {
    constexpr Index rows = 3;
    Floats x = test::random_floats(rows * 2 * cols, 1, 4.0f);
    x[0] = 80.0f;
    x[at(2 * cols)] = -80.0f;
    const Floats dout = test::random_floats(rows * cols, 2);
    const auto reference = [&](const Doubles& p) {
      Doubles out;
      for (Index r = 0; r < rows; ++r)
        for (Index c = 0; c < cols; ++c)
          out.push_back(silu(p[at(2 * r * cols + c)]) * p[at((2 * r + 1) * cols + c)]);
      return out;
    };
    Floats y(dout.size()), dx = x;
    nn::swiglu_forward(s, test::matrix(y, rows, cols), test::matrix(x, rows, 2 * cols));
    nn::swiglu_backward(s, test::matrix(dx, rows, 2 * cols), test::matrix(dout, rows, cols),
                        test::matrix(dx, rows, 2 * cols));  // in place
    CHECK(test::error(y, reference(test::widen(x))) < 1e-6);
    const Doubles want =
        test::differences([&](const Doubles& p) { return test::inner(dout, reference(p)); },
                          test::widen(x), test::all_elements(rows * 2 * cols));
    CHECK(test::error(dx, want) < 2e-6);
  }
}

TEST_CASE("nn elementwise: dropout keeps the mean and drops the stated share") {
  host::Stream s;
  constexpr Index rows = 401, cols = 503;
  const RandomKey key{.seed = 5, .step = 2, .layer = 1, .use = RandomUse::residual_dropout};
  const Floats ones(at(rows * cols), 1.0f);
  for (const float p : {0.1f, 0.5f, 0.9f}) {
    Floats y(ones.size());
    nn::dropout_forward(s, test::matrix(y, rows, cols), test::matrix(ones, rows, cols), p, key,
                        {0, cols, 0});
    Index dropped = 0;
    for (const float value : y) {
      dropped += value == 0.0f;
      if (value != 0.0f) CHECK(value == 1.0f / (1.0f - p));
    }
    const double n = rows * cols, sigma = std::sqrt(n * p * (1.0 - p));
    CHECK(std::abs(static_cast<double>(dropped) - n * p) < 5.0 * sigma);
  }
}

TEST_CASE("nn elementwise: dropout of shards equals the whole, by columns and by rows") {
  host::Stream s;
  constexpr Index rows = 6, cols = 22, split = 9;
  const RandomKey key{.seed = 1, .use = RandomUse::residual_dropout};
  const Floats x = test::random_floats(rows * cols, 3);
  Floats whole(x.size());
  nn::dropout_forward(s, test::matrix(whole, rows, cols), test::matrix(x, rows, cols), 0.4f, key,
                      {0, cols, 0});
  // tp: columns [0, 9) and [9, 22).
  for (const auto& [first, width] : {std::pair<Index, Index>{0, split}, {split, cols - split}}) {
    Floats part, want;
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < width; ++c) {
        part.push_back(x[at(r * cols + first + c)]);
        want.push_back(whole[at(r * cols + first + c)]);
      }
    nn::dropout_forward(s, test::matrix(part, rows, width), test::matrix(part, rows, width), 0.4f,
                        key, {0, cols, first});
    CHECK(part == want);
  }
  // sp: rows [2, 6).
  Floats below(x.begin() + 2 * cols, x.end());
  nn::dropout_forward(s, test::matrix(below, 4, cols), test::matrix(below, 4, cols), 0.4f, key,
                      {2, cols, 0});
  CHECK(below == Floats(whole.begin() + 2 * cols, whole.end()));
  // backward: the same factors.
  Floats dx(x.size()), ones(x.size(), 1.0f);
  nn::dropout_backward(s, test::matrix(dx, rows, cols), test::matrix(ones, rows, cols), 0.4f, key,
                       {0, cols, 0});
  for (std::size_t i = 0; i < x.size(); ++i) CHECK(x[i] * dx[i] == whole[i]);
  // Another step, another mask.
  Floats other(x.size());
  nn::dropout_forward(s, test::matrix(other, rows, cols), test::matrix(x, rows, cols), 0.4f,
                      {.seed = 1, .step = 1, .use = RandomUse::residual_dropout}, {0, cols, 0});
  CHECK(other != whole);
}

TEST_CASE("nn elementwise: dropout of probability zero copies, of one is refused") {
  host::Stream s;
  const Floats x = test::random_floats(12, 3);
  Floats y(x.size());
  nn::dropout_forward(s, test::matrix(y, 3, 4), test::matrix(x, 3, 4), 0.0f, {}, {0, 4, 0});
  CHECK(x == y);
  for (const float p : {1.0f, -0.1f, std::numeric_limits<float>::quiet_NaN()})
    CHECK_THROWS_AS(
        nn::dropout_forward(s, test::matrix(y, 3, 4), test::matrix(x, 3, 4), p, {}, {0, 4, 0}),
        Error);
  CHECK_THROWS_AS(
      nn::dropout_forward(s, test::matrix(y, 3, 4), test::matrix(x, 3, 4), 0.5f, {}, {0, 4, 1}),
      Error);
}
