// Attention and the matrix product: GPU against host twin.
#include "twins.cuh"
#include <mega/device.cuh>
#include <mega/nn/attention.hpp>
#include <mega/nn/cublas.hpp>
#include <mega/nn/product.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <type_traits>

using namespace mega::nn;
using mega::RandomKey;
using mega::RandomUse;
using namespace mega_test;

namespace {

using In = Matrix<const float>;

void check_attention(AttentionShape shape, AttentionDropout dropout) {
  CAPTURE(shape.time);
  CAPTURE(shape.query_heads);
  CAPTURE(shape.kv_heads);
  CAPTURE(shape.head_dim);
  CAPTURE(dropout.probability);
  const Index rows = shape.rows(), out_width = shape.query_heads * shape.head_dim;
  Twins t(static_cast<std::uint64_t>(shape.time * 1000 + shape.head_dim));
  auto& qkv = t.random(rows * shape.width(), -2, 2);
  auto& dout = t.random(rows * out_width);
  auto& out = t.poisoned(rows * out_width);
  auto& lse = t.poisoned(shape.batch * shape.query_heads * shape.time);
  auto& dqkv = t.poisoned(rows * shape.width());
  t.run([&](auto& s, auto at) {
    const auto l = lse.view(at, shape.batch, shape.query_heads, shape.time);
    attention_forward(s, out.matrix(at, rows), l, In(qkv.matrix(at, rows)), shape, dropout);
    attention_backward(s, dqkv.matrix(at, rows), In(dout.matrix(at, rows)),
                       In(qkv.matrix(at, rows)), In(out.matrix(at, rows)),
                       mega::View<const float, 3>(l), shape, dropout);
  });
  // Scores of up to 128 products, and sums over up to 200 keys, in another order.
  check_close("attention_forward", out, 4e-6);
  check_close("attention_forward lse", lse, 4e-6);
  check_close("attention_backward", dqkv, 1e-5);
}

}  // namespace

TEST_CASE("gpu: attention") {
  for (const AttentionShape shape :
       {AttentionShape{1, 1, 1, 1, 8}, AttentionShape{2, 5, 2, 2, 16},
        AttentionShape{1, 64, 2, 1, 32}, AttentionShape{2, 65, 4, 2, 8},
        AttentionShape{1, 200, 3, 1, 64}, AttentionShape{1, 130, 4, 4, 128},
        AttentionShape{3, 67, 6, 2, 80}, AttentionShape{1, 33, 2, 1, 5}}) {
    check_attention(shape, {});
    check_attention(shape, {0.2F, RandomKey{7, 1, 3, RandomUse::attention_dropout}, 2, 1,
                            shape.query_heads + 3});
  }
}

TEST_CASE("gpu: attention of no samples is nothing") {
  mega::cuda::Stream stream;
  const AttentionShape shape{0, 8, 1, 1, 16};
  const Matrix<float> out(nullptr, 0, 16), packed(nullptr, 0, 48);
  const mega::View<float, 3> lse(nullptr, 0, 1, 8);
  attention_forward(stream, out, lse, In(packed), shape);
  attention_backward(stream, packed, In(out), In(packed), In(out), mega::View<const float, 3>(lse),
                     shape);
  CHECK_NOTHROW(stream.synchronize());
}

TEST_CASE("gpu: a head that does not fit is refused") {
  mega::cuda::Stream stream;
  const AttentionShape shape{1, 1, 1, 1, 129};
  CHECK_THROWS_WITH_AS(
      attention_forward(stream, Matrix<float>(nullptr, 1, 129),
                        mega::View<float, 3>(nullptr, 1, 1, 1), In(nullptr, 1, 3 * 129), shape),
      "attention_forward: head dim 129 is too large for a GPU's shared memory; use 128 or less",
      mega::Error);
}

TEST_CASE("gpu: matrix product") {
  struct Case {
    Index m, n, k;
    float alpha, beta;
  };
  for (const auto [m, n, k, alpha, beta] :
       {Case{1, 1, 1, 1, 0}, Case{37, 65, 129, 1, 0}, Case{128, 96, 515, 1, 1},
        Case{3, 200, 17, -0.5F, 0.25F}, Case{5, 7, 0, 1, 0.5F}, Case{5, 7, 0, 1, 0},
        Case{0, 4, 4, 1, 0}}) {
    for (const Transpose ta : {Transpose::no, Transpose::yes}) {
      for (const Transpose tb : {Transpose::no, Transpose::yes}) {
        CAPTURE(m);
        CAPTURE(n);
        CAPTURE(k);
        // Rows longer than their part of the product.
        const Index lda = (ta == Transpose::no ? k : m) + 3,
                    ldb = (tb == Transpose::no ? n : k) + 2;
        const Index ldc = n + 5;
        Twins t(41);
        auto& a = t.random((ta == Transpose::no ? m : k) * lda);
        auto& b = t.random((tb == Transpose::no ? k : n) * ldb);
        auto& c = t.random(m * ldc);
        auto& overwritten = t.poisoned(beta == 0 ? m * n : 0);
        t.run([&](auto& s, auto at) {
          using Product = std::conditional_t<std::is_same_v<decltype(at), OnDevice>, CublasProduct,
                                             PortableProduct>;
          Product::gemm(s, ta, tb, m, n, k, alpha, a(at).data(), lda, b(at).data(), ldb, beta,
                        c(at).data(), ldc);
          if (beta == 0)
            Product::gemm(s, ta, tb, m, n, k, alpha, a(at).data(), lda, b(at).data(), ldb, beta,
                          overwritten(at).data(), n);
        });
        // Sums of up to 515 products in another order. TF32 would be wrong by 3e-4.
        check_close("gemm", c, 4e-6);
        check_close("gemm overwrites", overwritten, 4e-6);
      }
    }
  }
}
