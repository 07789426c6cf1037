/// @file  CblasProduct agrees with PortableProduct. Links a CBLAS.
#include "support.hpp"
#include <mega/nn/blas.hpp>

#include <doctest/doctest.h>

#include <limits>

using namespace mega;
using namespace mega::nn;

// Both products err by at most k units of 2^-24 relative to sums of up to k values of order one.
TEST_CASE("nn blas: agrees with the portable product") {
  set_blas_threads(1);
  host::Stream s;
  std::uint64_t seed = 1;
  for (const auto ta : {Transpose::no, Transpose::yes})
    for (const auto tb : {Transpose::no, Transpose::yes})
      for (const float beta : {0.0f, 1.0f, 0.5f})
        for (const Index k : {Index{0}, Index{1}, Index{37}}) {
          constexpr Index m = 13, n = 21;
          const test::Floats a = test::random_floats(m * k + 1, ++seed);
          const test::Floats b = test::random_floats(n * k + 1, ++seed);
          test::Floats c = test::random_floats(m * n, ++seed);
          if (beta == 0.0f) c.assign(c.size(), std::numeric_limits<float>::quiet_NaN());
          test::Floats d = c;
          const Index lda = ta == Transpose::no ? k : m, ldb = tb == Transpose::no ? n : k;
          CblasProduct::gemm(s, ta, tb, m, n, k, 0.5f, a.data(), lda, b.data(), ldb, beta, c.data(),
                             n);
          PortableProduct::gemm(s, ta, tb, m, n, k, 0.5f, a.data(), lda, b.data(), ldb, beta,
                                d.data(), n);
          CHECK(test::error(c, d) < 38 * 0x1p-23);
        }
}

TEST_CASE("nn blas: no row or no column is no work") {
  host::Stream s;
  float c = 3.0f;
  CblasProduct::gemm(s, Transpose::no, Transpose::no, 0, 1, 1, 1.0f, &c, 1, &c, 1, 0.0f, &c, 1);
  CblasProduct::gemm(s, Transpose::no, Transpose::no, 1, 0, 1, 1.0f, &c, 1, &c, 1, 0.0f, &c, 1);
  CHECK(c == 3.0f);
}
