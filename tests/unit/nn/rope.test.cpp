/// @file  Rotary embedding: frequencies of each scaling, rotation, inverse, global positions.
#include "support.hpp"
#include <mega/core/error.hpp>
#include <mega/nn/rope.hpp>

#include <doctest/doctest.h>

#include <complex>

using namespace mega;
using test::at;
using test::Floats;

namespace {

Floats frequencies(Index head_dim, double theta, const nn::RopeScaling& scaling = {}) {
  Floats out(at(head_dim / 2));
  nn::rope_inverse_frequencies(test::vector(out), theta, scaling);
  return out;
}

}  // namespace

// fp32 pow and division: three roundings, the exponent's amplified by ln(theta) = 13.
TEST_CASE("nn rope: frequencies in closed form") {
  const Floats plain = frequencies(128, 500000.0);
  const Floats linear =
      frequencies(128, 500000.0, {.kind = nn::RopeScalingKind::linear, .factor = 4.0});
  for (Index i = 0; i < 64; ++i) {
    const double want = std::pow(500000.0, -2.0 * static_cast<double>(i) / 128.0);
    CHECK(plain[at(i)] == doctest::Approx(want).epsilon(2e-6));
    CHECK(linear[at(i)] == doctest::Approx(want / 4.0).epsilon(2e-6));
  }
  CHECK(plain[0] == 1.0f);
}

TEST_CASE("nn rope: llama3 scaling keeps short waves, divides long ones, blends between") {
  // Wave length in tokens decides: below 8192 / 4 kept, above 8192 / 1 divided by 8.
  const nn::RopeScaling scaling{.kind = nn::RopeScalingKind::llama3,
                                .factor = 8.0,
                                .low_freq_factor = 1.0,
                                .high_freq_factor = 4.0,
                                .original_max_position_embeddings = 8192};
  const Floats scaled = frequencies(128, 500000.0, scaling);
  int kept = 0, divided = 0, blended = 0;
  for (Index i = 0; i < 64; ++i) {
    const double f = std::pow(500000.0, -2.0 * static_cast<double>(i) / 128.0);
    const double wave = 2.0 * M_PI / f;
    double want = f;
    if (wave > 8192.0) {
      want = f / 8.0;
      ++divided;
    } else if (wave < 2048.0) {
      ++kept;
    } else {
      const double smooth = (8192.0 / wave - 1.0) / 3.0;
      want = (1.0 - smooth) * f / 8.0 + smooth * f;
      ++blended;
    }
    CHECK(scaled[at(i)] == doctest::Approx(want).epsilon(1e-5));
  }
  CHECK(kept == 29);
  CHECK(blended == 6);
  CHECK(divided == 29);
}

TEST_CASE("nn rope: values that no configuration may hold are refused") {
  using Kind = nn::RopeScalingKind;
  CHECK_THROWS_AS(frequencies(8, 0.0), Error);
  CHECK_THROWS_AS(frequencies(8, 1e4, {.kind = Kind::linear, .factor = 0.0}), Error);
  CHECK_THROWS_AS(
      frequencies(8, 1e4, {.kind = Kind::llama3, .factor = 8.0, .low_freq_factor = 4.0}), Error);
}

TEST_CASE("nn rope: rotates pairs i and i + head_dim / 2 by position times frequency") {
  host::Stream s;
  for (const Index dim : {2, 8, 16})
    for (const Index time : {1, 5}) {
      const nn::AttentionShape shape{2, time, 4, 2, dim};
      const Index first = 1000, width = shape.width();
      const Floats f = frequencies(dim, 10000.0);
      const Floats x = test::random_floats(shape.rows() * width, 1);
      Floats y = x;
      nn::rope_forward(s, test::matrix(y, shape.rows(), width), test::vector(f), shape, first);
      for (Index r = 0; r < shape.rows(); ++r)
        for (Index h = 0; h < 8; ++h)
          for (Index i = 0; i < dim / 2; ++i) {
            const std::size_t a = at(r * width + h * dim + i), b = a + at(dim / 2);
            const bool rotated = h < 6;  // four query heads, two key heads; values stay
            const float angle = static_cast<float>(first + r % time) * f[at(i)];
            const auto want = std::complex<double>(x[a], x[b]) *
                              (rotated ? std::polar(1.0, static_cast<double>(angle)) : 1.0);
            CHECK(std::abs(y[a] - want.real()) < 4e-7);  // cosine, sine, two products, a sum
            CHECK(std::abs(y[b] - want.imag()) < 4e-7);
            if (!rotated) CHECK(y[a] == x[a]);
          }
      nn::rope_backward(s, test::matrix(y, shape.rows(), width), test::vector(f), shape, first);
      CHECK(test::error(y, x) < 1e-6);
    }
}

TEST_CASE("nn rope: a shard of the sequence gets the rotation of the whole") {
  host::Stream s;
  const nn::AttentionShape whole{1, 6, 2, 1, 8}, half{1, 3, 2, 1, 8};
  const Floats f = frequencies(8, 500000.0);
  Floats x = test::random_floats(whole.rows() * whole.width(), 1);
  Floats tail(x.begin() + 3 * whole.width(), x.end());
  nn::rope_forward(s, test::matrix(x, 6, whole.width()), test::vector(f), whole, 0);
  nn::rope_forward(s, test::matrix(tail, 3, whole.width()), test::vector(f), half, 3);
  CHECK(tail == Floats(x.begin() + 3 * whole.width(), x.end()));
}
