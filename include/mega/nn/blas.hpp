/// @file  Matrix product of the host through CBLAS. Opt-in: needs <cblas.h> and a BLAS to link.
#pragma once
#include <mega/nn/product.hpp>

#include <cblas.h>

#include <string_view>

extern "C" void openblas_set_num_threads(int) __attribute__((weak));

namespace mega::inline v0::nn {

/// Threads that one BLAS call may use, for the whole process. Returns false where the BLAS linked
/// is not OpenBLAS; its own environment variable then decides. Ranks that are threads want 1, and
/// runs that are compared bitwise want the same number.
inline bool set_blas_threads(int threads) {
  if (&openblas_set_num_threads == nullptr) return false;
  openblas_set_num_threads(threads);
  return true;
}

/// @determinism  run to run for an equal number of BLAS threads; a row's value may depend on m,
///               since libraries pick other kernels for other shapes
struct CblasProduct {
  using element = float;
  static constexpr std::string_view name = "cblas";

  /// @pre   C overlaps neither A nor B; sizes fit the BLAS's int
  /// @sync  ordered on stream
  template <host::host_stream S>
  static void gemm(S& stream, Transpose trans_a, Transpose trans_b, Index m, Index n, Index k,
                   float alpha, const float* a, Index lda, const float* b, Index ldb, float beta,
                   float* c, Index ldc) {
    stream.run([=] {
      if (m <= 0 || n <= 0) return;
      // CBLAS refuses leading dimensions of zero, which empty operands may have.
      if (k <= 0) return detail::scale_block(c, m, n, ldc, beta);
      const auto flag = [](Transpose t) { return t == Transpose::no ? CblasNoTrans : CblasTrans; };
      const auto size = [](Index x) { return static_cast<int>(x); };
      cblas_sgemm(CblasRowMajor, flag(trans_a), flag(trans_b), size(m), size(n), size(k), alpha, a,
                  size(lda), b, size(ldb), beta, c, size(ldc));
    });
  }
};

static_assert(matrix_product<CblasProduct, host::Stream>);

}  // namespace mega::inline v0::nn
