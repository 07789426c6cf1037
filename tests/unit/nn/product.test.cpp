/// @file  PortableProduct against a double-precision triple loop.
#include "support.hpp"
#include <mega/host/host_async.hpp>
#include <mega/nn/product.hpp>

#include <doctest/doctest.h>

#include <limits>

using namespace mega;
using namespace mega::nn;
using test::at;
using test::Floats;

namespace {

struct Case {
  Transpose ta, tb;
  Index m, n, k;
  float alpha, beta;
  Index pad;  // leading dimensions exceed the row lengths by this
};

constexpr Transpose both[] = {Transpose::no, Transpose::yes};

/// Largest error of C over k, in units of 2^-24 times the sum of absolute products.
template <class Multiply>
double product_error(const Case& t, std::uint64_t seed, Multiply multiply) {
  const bool na = t.ta == Transpose::no, nb = t.tb == Transpose::no;
  const Index lda = (na ? t.k : t.m) + t.pad, ldb = (nb ? t.n : t.k) + t.pad, ldc = t.n + t.pad;
  const Floats a = test::random_floats((na ? t.m : t.k) * lda + 1, seed);
  const Floats b = test::random_floats((nb ? t.k : t.n) * ldb + 1, seed + 1);
  Floats c = test::random_floats(t.m * ldc + 1, seed + 2);
  const Floats before = c;
  if (t.beta == 0.0f)
    for (Index i = 0; i < t.m; ++i)
      for (Index j = 0; j < t.n; ++j) c[at(i * ldc + j)] = std::numeric_limits<float>::quiet_NaN();
  multiply(t.ta, t.tb, t.m, t.n, t.k, t.alpha, a.data(), lda, b.data(), ldb, t.beta, c.data(), ldc);

  double worst = 0.0;
  for (Index i = 0; i < t.m; ++i) {
    for (Index j = 0; j < ldc; ++j) {
      const double old = before[at(i * ldc + j)], now = c[at(i * ldc + j)];
      if (j >= t.n) {
        if (now != old) return INFINITY;  // wrote between the rows
        continue;
      }
      double sum = 0.0, size = 1e-30;
      for (Index p = 0; p < t.k; ++p) {
        const double x = a[at(na ? i * lda + p : p * lda + i)];
        const double y = b[at(nb ? p * ldb + j : j * ldb + p)];
        sum += x * y;
        size += std::abs(x * y);
      }
      const double want = t.alpha * sum + (t.beta == 0.0f ? 0.0 : t.beta * old);
      size = std::abs(t.alpha) * size + std::abs(t.beta * old) + 1e-30;
      const double e = std::abs(now - want) / size * 0x1p24;
      worst = std::isnan(e) ? INFINITY : std::max(worst, e);
    }
  }
  if (c[at(t.m * ldc)] != before[at(t.m * ldc)]) return INFINITY;
  return worst / static_cast<double>(t.k + 4);
}

const auto portable = [](auto... arguments) {
  host::Stream stream;
  PortableProduct::gemm(stream, arguments...);
};

}  // namespace

// Each of the k + 4 roundings (k sums, alpha, beta, the block sums) errs by at most one unit of
// 2^-24 relative to the sum of absolute products: the bound is 1.
TEST_CASE("nn product: hard shapes, all transposes, alpha and beta") {
  const Index sizes[][3] = {{0, 3, 2},   {3, 0, 2},    {3, 2, 0},    {1, 1, 1},     {1, 7, 300},
                            {7, 1, 5},   {5, 6, 7},    {12, 32, 9},  {13, 33, 257}, {6, 16, 256},
                            {193, 5, 3}, {4, 2050, 3}, {25, 65, 513}};
  std::uint64_t seed = 1;
  for (const auto& s : sizes)
    for (const Transpose ta : both)
      for (const Transpose tb : both)
        for (const float beta : {0.0f, 1.0f, 0.5f})
          for (const float alpha : {1.0f, -0.25f, 0.0f, 0.3f}) {
            const Case t{ta, tb, s[0], s[1], s[2], alpha, beta, static_cast<Index>(seed % 3)};
            CAPTURE(t.m);
            CAPTURE(t.n);
            CAPTURE(t.k);
            CHECK(product_error(t, ++seed, portable) <= 1.0);
          }
}

TEST_CASE("nn product: random shapes") {
  const RandomKey key{.seed = 9, .use = RandomUse::test};
  for (Index i = 0; i < 60; ++i) {
    const auto draw = [&](Index j, std::uint32_t limit) {
      return static_cast<Index>(key.bits(8 * i + j) % limit);
    };
    const Case t{both[draw(0, 2)],
                 both[draw(1, 2)],
                 draw(2, 90),
                 draw(3, 90),
                 draw(4, 600),
                 1.0f,
                 draw(5, 2) == 0 ? 0.0f : 0.5f,
                 draw(6, 4)};
    CAPTURE(t.m);
    CAPTURE(t.n);
    CAPTURE(t.k);
    CHECK(product_error(t, static_cast<std::uint64_t>(100 + i), portable) <= 1.0);
  }
}

TEST_CASE("nn product: every instruction set that this processor has") {
  const auto with = [](auto isa) {
    return [isa](Transpose ta, Transpose tb, Index m, Index n, Index k, float alpha, const float* a,
                 Index lda, const float* b, Index ldb, float beta, float* c, Index ldc) {
      (void)isa;
      nn::detail::multiply_blocked<decltype(isa)>(
          {ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc});
    };
  };
  for (const Transpose ta : both)
    for (const Transpose tb : both) {
      const Case t{ta, tb, 29, 67, 300, 1.0f, 1.0f, 1};
      CHECK(product_error(t, 5, with(nn::detail::Baseline{})) <= 1.0);
#if defined(__x86_64__)
      if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        CHECK(product_error(t, 5, with(nn::detail::Avx2{})) <= 1.0);
      if (__builtin_cpu_supports("avx512f"))
        CHECK(product_error(t, 5, with(nn::detail::Avx512{})) <= 1.0);
#endif
    }
}

TEST_CASE("nn product: an element does not depend on m, n or its place") {
  constexpr Index m = 205, n = 77, k = 530;
  const Floats a = test::random_floats(m * k, 1), b = test::random_floats(k * n, 2);
  Floats whole = test::random_floats(m * n, 3);
  const Floats start = whole;
  host::Stream s;
  const auto part = [&](Floats& c, Index i0, Index rows, Index j0, Index cols) {
    PortableProduct::gemm(s, Transpose::no, Transpose::no, rows, cols, k, 0.3f, a.data() + i0 * k,
                          k, b.data() + j0, n, 0.7f, c.data() + i0 * n + j0, n);
  };
  part(whole, 0, m, 0, n);
  for (const Index rows : {1, 5, 64}) {
    for (const Index cols : {1, 16, 19, 77}) {
      Floats split = start;
      for (Index i = 0; i < m; i += rows)
        for (Index j = 0; j < n; j += cols)
          part(split, i, std::min(rows, m - i), j, std::min(cols, n - j));
      CHECK(split == whole);  // bitwise, none is NaN
    }
  }
}

TEST_CASE("nn product: queued on a worker, operands are held by value") {
  host::HostAsync device{7};
  auto stream = device.make_stream("compute");
  const Floats a = test::random_floats(15 * 4, 1), b = test::random_floats(4 * 9, 2);
  Floats now(15 * 9), later(15 * 9);
  portable(Transpose::no, Transpose::no, Index{15}, Index{9}, Index{4}, 1.0f, a.data(), Index{4},
           b.data(), Index{9}, 0.0f, now.data(), Index{9});
  PortableProduct::gemm(stream, Transpose::no, Transpose::no, 15, 9, 4, 1.0f, a.data(), 4, b.data(),
                        9, 0.0f, later.data(), 9);
  stream.synchronize();
  CHECK(now == later);
}
