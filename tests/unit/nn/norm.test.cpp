/// @file  Normalisations against double-precision loops and central differences.
#include "support.hpp"
#include <mega/core/error.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/norm.hpp>

#include <doctest/doctest.h>

#include <tuple>
#include <utility>

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

TEST_CASE("nn norm: the sum and its norm have the bits of bias_add, add and the norm") {
  for (const auto& [rows, cols] : {std::pair<Index, Index>{1, 1}, {3, 17}, {5, 131}})
    for (const bool with_bias : {false, true})
      for (const bool in_place : {false, true}) {
        CAPTURE(cols);
        CAPTURE(with_bias);
        CAPTURE(in_place);
        const Index n = rows * cols;
        // Of different sizes, so that another order of the sum would show.
        const Floats x = test::random_floats(n, 1, 2.7f);
        const Floats branch = test::random_floats(n, 2, 0.013f);
        const Floats branch_bias = test::random_floats(with_bias ? cols : 0, 3, 41.3f);
        const Floats weight = test::random_floats(cols, 4), bias = test::random_floats(cols, 5);
        const auto b = test::matrix(branch, rows, cols);
        const auto w = test::vector(weight);
        host::Stream s;

        Floats biased = branch, sum(at(n)), normed(at(n)), rms_normed(at(n));
        Floats mean(at(rows)), rstd(at(rows)), rms(at(rows));
        if (with_bias)
          nn::bias_add(s, test::matrix(biased, rows, cols), b, test::vector(branch_bias));
        nn::add(s, test::matrix(sum, rows, cols), test::matrix(x, rows, cols),
                test::matrix(biased, rows, cols));
        const Matrix<const float> y = test::matrix(sum, rows, cols);
        nn::layer_norm_forward(s, test::matrix(normed, rows, cols), test::vector(mean),
                               test::vector(rstd), y, w, test::vector(bias), 1e-5f);
        nn::rms_norm_forward(s, test::matrix(rms_normed, rows, cols), test::vector(rms), y, w,
                             1e-5f);

        Floats z = in_place ? x : Floats(at(n)), out(at(n)), m(at(rows)), r(at(rows));
        const Matrix<const float> in = test::matrix(in_place ? z : x, rows, cols);
        nn::add_layer_norm_forward(s, test::matrix(z, rows, cols), test::matrix(out, rows, cols),
                                   test::vector(m), test::vector(r), in, b,
                                   test::vector(branch_bias), w, test::vector(bias), 1e-5f);
        CHECK(z == sum);
        CHECK(out == normed);
        CHECK(m == mean);
        CHECK(r == rstd);
        if (in_place) z = x;
        nn::add_rms_norm_forward(s, test::matrix(z, rows, cols), test::matrix(out, rows, cols),
                                 test::vector(r), in, b, test::vector(branch_bias), w, 1e-5f);
        CHECK(z == sum);
        CHECK(out == rms_normed);
        CHECK(r == rms);
        Floats t(at(n));
        nn::add_branch(s, test::matrix(t, rows, cols), test::matrix(x, rows, cols), b,
                       test::vector(branch_bias));
        CHECK(t == sum);
      }
}

TEST_CASE("nn norm: backward in one has the bits of its parts, in place too") {
  enum class Place { own, dy, dout };
  for (const auto& [rows, cols] : {std::pair<Index, Index>{1, 1}, {3, 17}, {70, 131}})
    for (const bool centred : {false, true})
      for (const bool residual : {false, true})
        for (const Place place : {Place::own, Place::dy, Place::dout}) {
          if (place == Place::dy && !residual) continue;
          CAPTURE(cols);
          CAPTURE(centred);
          CAPTURE(residual);
          CAPTURE(static_cast<int>(place));
          const Index n = rows * cols;
          const Floats x = test::random_floats(n, 1), weight = test::random_floats(cols, 2);
          const Floats mean = test::random_floats(rows, 3), rstd = test::random_floats(rows, 4);
          Floats dout = test::random_floats(n, 5);
          Floats dy = test::random_floats(residual ? n : 0, 6);
          const auto in = test::matrix(x, rows, cols);
          const auto w = test::vector(weight), m = test::vector(mean), r = test::vector(rstd);
          const Floats before = test::random_floats(cols, 7);
          host::Stream s;

          Floats dweight = before, dbias = before, dbranch = before, dnormed(at(n)), expected;
          const Matrix<const float> gradient = test::matrix(std::as_const(dout), rows, cols);
          const Matrix<float> part = test::matrix(dnormed, rows, cols);
          if (centred) {
            nn::layer_norm_backward_weight(s, test::vector(dweight), test::vector(dbias), gradient,
                                           in, m, r);
            nn::layer_norm_backward_input(s, part, gradient, in, w, m, r);
          } else {
            nn::rms_norm_backward_weight(s, test::vector(dweight), gradient, in, r);
            nn::rms_norm_backward_input(s, part, gradient, in, w, r);
          }
          expected = dnormed;
          if (residual)
            nn::add(s, test::matrix(expected, rows, cols),
                    test::matrix(std::as_const(dy), rows, cols), part);
          nn::bias_gradient(s, test::vector(dbranch),
                            test::matrix(std::as_const(expected), rows, cols));

          Floats dx(at(n)), dw = before, db = before, dc = before;
          Floats& result = place == Place::own ? dx : place == Place::dy ? dy : dout;
          const Matrix<const float> rest =
              test::matrix(std::as_const(dy), residual ? rows : 0, residual ? cols : 0);
          if (centred) {
            nn::layer_norm_backward(s, test::matrix(result, rows, cols), test::vector(dw),
                                    test::vector(db), rest, gradient, in, w, m, r,
                                    test::vector(dc));
            CHECK(db == dbias);
          } else {
            nn::rms_norm_backward(s, test::matrix(result, rows, cols), test::vector(dw), rest,
                                  gradient, in, w, r, test::vector(dc));
          }
          CHECK(result == expected);
          CHECK(dw == dweight);
          CHECK(dc == dbranch);
        }
}

TEST_CASE("nn norm: the gradient of GELU and its column sums have the bits of the two") {
  constexpr Index rows = 6, cols = 77;
  const Floats x = test::random_floats(rows * cols, 1, 4.0f);
  Floats dout = test::random_floats(rows * cols, 2), dx(at(rows * cols));
  Floats dbias(at(cols), 0.5f), sums(at(cols), 0.5f);
  host::Stream s;
  nn::gelu_tanh_backward(s, test::matrix(dx, rows, cols),
                         test::matrix(std::as_const(dout), rows, cols),
                         test::matrix(x, rows, cols));
  nn::bias_gradient(s, test::vector(dbias), test::matrix(std::as_const(dx), rows, cols));
  nn::gelu_tanh_backward_bias(s, test::matrix(dout, rows, cols), test::vector(sums),
                              test::matrix(std::as_const(dout), rows, cols),
                              test::matrix(x, rows, cols));
  CHECK(dout == dx);
  CHECK(sums == dbias);
}
