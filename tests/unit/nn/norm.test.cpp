/// @file  Normalisations against double-precision loops and central differences.
#include "support.hpp"
#include <mega/core/error.hpp>
#include <mega/nn/norm.hpp>

#include <doctest/doctest.h>

#include <tuple>

using namespace mega;
using test::at;
using test::Doubles;
using test::Floats;

namespace {

constexpr double epsilon = 1e-5;

// Parameters p = [x | weight | bias].
Doubles reference(const Doubles& p, Index rows, Index cols, bool centred) {
  Doubles out;
  for (Index r = 0; r < rows; ++r) {
    double mean = 0.0, variance = 0.0;
    for (Index c = 0; c < cols && centred; ++c) mean += p[at(r * cols + c)];
    mean /= static_cast<double>(cols);
    for (Index c = 0; c < cols; ++c) variance += std::pow(p[at(r * cols + c)] - mean, 2);
    variance /= static_cast<double>(cols);
    for (Index c = 0; c < cols; ++c) {
      const double unit = (p[at(r * cols + c)] - mean) / std::sqrt(variance + epsilon);
      out.push_back(unit * p[at(rows * cols + c)] + (centred ? p[at((rows + 1) * cols + c)] : 0.0));
    }
  }
  return out;
}

struct Result {
  Floats out, dx, dweight, dbias;
};

Result run(const Floats& x, const Floats& weight, const Floats& bias, const Floats& dout,
           Index rows, Index cols, bool centred, float gradient_before) {
  host::Stream s;
  Result y{Floats(x.size()), Floats(x.size()), Floats(weight.size(), gradient_before),
           Floats(weight.size(), gradient_before)};
  Floats mean(at(rows)), rstd(at(rows));
  const auto in = test::matrix(x, rows, cols), dy = test::matrix(dout, rows, cols);
  const auto w = test::vector(weight);
  if (centred) {
    nn::layer_norm_forward(s, test::matrix(y.out, rows, cols), test::vector(mean),
                           test::vector(rstd), in, w, test::vector(bias), 1e-5f);
    nn::layer_norm_backward_input(s, test::matrix(y.dx, rows, cols), dy, in, w, test::vector(mean),
                                  test::vector(rstd));
    nn::layer_norm_backward_weight(s, test::vector(y.dweight), test::vector(y.dbias), dy, in,
                                   test::vector(mean), test::vector(rstd));
  } else {
    nn::rms_norm_forward(s, test::matrix(y.out, rows, cols), test::vector(rstd), in, w, 1e-5f);
    nn::rms_norm_backward_input(s, test::matrix(y.dx, rows, cols), dy, in, w, test::vector(rstd));
    nn::rms_norm_backward_weight(s, test::vector(y.dweight), dy, in, test::vector(rstd));
  }
  return y;
}

}  // namespace

TEST_CASE("nn norm: forward and gradients against double precision") {
  for (const bool centred : {true, false})
    for (const auto& [rows, cols] : {std::pair<Index, Index>{1, 1}, {1, 2}, {3, 17}, {5, 131}}) {
      const Floats x = test::random_floats(rows * cols, 1, 2.0f);
      const Floats weight = test::random_floats(cols, 2), bias = test::random_floats(cols, 3);
      const Floats dout = test::random_floats(rows * cols, 4);
      const Result y = run(x, weight, bias, dout, rows, cols, centred, 0.5f);
      Doubles p = test::widen(x);
      p.insert(p.end(), weight.begin(), weight.end());
      if (centred) p.insert(p.end(), bias.begin(), bias.end());
      // Some ten roundings of values of order one, and a sum over 16 lanes.
      CHECK(test::error(y.out, reference(p, rows, cols, centred)) < 2e-6);
      const Doubles gradient = test::differences(
          [&](const Doubles& q) { return test::inner(dout, reference(q, rows, cols, centred)); }, p,
          test::all_elements(static_cast<Index>(p.size())));
      const auto part = [&](Index first, Index count, double add) {
        Doubles out(gradient.begin() + first, gradient.begin() + first + count);
        for (double& value : out) value += add;
        return out;
      };
      CAPTURE(centred);
      CAPTURE(cols);
      // One or two columns leave next to nothing of terms of order one: their error remains.
      CHECK(test::error(y.dx, part(0, rows * cols, 0.0), 0.5) < 1e-5);
      CHECK(test::error(y.dweight, part(rows * cols, cols, 0.5)) < 5e-6);  // accumulates
      if (centred) CHECK(test::error(y.dbias, part((rows + 1) * cols, cols, 0.5)) < 5e-6);
    }
}

TEST_CASE("nn norm: a large common offset does not cost the variance") {
  // x = 1e4 + {-1, 1}: sums of squares in fp32 would lose the variance of 1 altogether.
  constexpr Index cols = 64;
  Floats x(cols), weight(cols, 1.0f), bias(cols, 0.0f), dout(cols, 0.0f);
  for (Index c = 0; c < cols; ++c) x[at(c)] = c % 2 == 0 ? 9999.0f : 10001.0f;
  const Result y = run(x, weight, bias, dout, 1, cols, true, 0.0f);
  for (Index c = 0; c < cols; ++c)
    CHECK(y.out[at(c)] == doctest::Approx(c % 2 == 0 ? -1.0 : 1.0).epsilon(1e-5));
}

TEST_CASE("nn norm: a row is bitwise the same in every batch") {
  constexpr Index rows = 7, cols = 53;
  const Floats x = test::random_floats(rows * cols, 1), w = test::random_floats(cols, 2);
  const Floats b = test::random_floats(cols, 3), dout = test::random_floats(rows * cols, 4);
  for (const bool centred : {true, false}) {
    const Result whole = run(x, w, b, dout, rows, cols, centred, 0.0f);
    for (Index r = 0; r < rows; ++r) {
      const auto row = [&](const Floats& m) {
        return Floats(m.begin() + r * cols, m.begin() + (r + 1) * cols);
      };
      const Result one = run(row(x), w, b, row(dout), 1, cols, centred, 0.0f);
      CHECK(one.out == row(whole.out));
      CHECK(one.dx == row(whole.dx));
    }
  }
}

TEST_CASE("nn norm: a wrong shape is refused with the numbers") {
  Floats out(12), x(12), w(3), s(4);
  host::Stream stream;
  CHECK_THROWS_WITH_AS(nn::rms_norm_forward(stream, test::matrix(out, 4, 3), test::vector(s),
                                            test::matrix(x, 3, 4), test::vector(w), 1e-5f),
                       "rms_norm_forward: out is 4 x 3, it must be 3 x 4", Error);
}
