/// @file  Matrix product of a GPU through cuBLAS. Opt-in: needs the CUDA headers and cuBLAS to
/// link.
#pragma once
#include <mega/core/error.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/nn/product.hpp>

#include <cublas_v2.h>

#include <cstddef>
#include <limits>
#include <string_view>

namespace mega::inline v0::nn {

namespace detail {

inline void check_cublas(cublasStatus_t status, std::string_view call,
                         SourceLocation at = SourceLocation::current()) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  throw Error(ErrorCode::device,
              sentence(call, " failed with ", cublasGetStatusName(status), ", ",
                       cublasGetStatusString(status), ", at ", at.file_name(), ":", at.line()),
              at);
}

/// Handle and workspace of one stream: two streams that shared a workspace would spoil each
/// other's sums.
class CublasHandle {
 public:
  explicit CublasHandle(cuda::Stream& stream) : workspace_(workspace_bytes) {
    check_cublas(cublasCreate(&handle_), "cublasCreate");
    check_cublas(cublasSetStream(handle_, stream.native()), "cublasSetStream");
    // Setting a stream resets the workspace, so this comes second.
    check_cublas(cublasSetWorkspace(handle_, workspace_.data(), workspace_.bytes()),
                 "cublasSetWorkspace");
    check_cublas(cublasSetMathMode(handle_, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
  }
  CublasHandle(const CublasHandle&) = delete;
  CublasHandle& operator=(const CublasHandle&) = delete;
  ~CublasHandle() { (void)cublasDestroy(handle_); }

  [[nodiscard]] cublasHandle_t native() const noexcept { return handle_; }

 private:
  /// What the library's manual recommends for compute capability 9.0.
  static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

  cuda::Memory workspace_;
  cublasHandle_t handle_ = nullptr;
};

/// A size as cuBLAS takes it.
[[nodiscard]] inline int cublas_size(std::string_view what, Index n) {
  expects(n >= 0 && n <= std::numeric_limits<int>::max(), ErrorCode::logic, [&] {
    return sentence("gemm: ", what, " is ", n, ", cuBLAS takes 0 to ",
                    std::numeric_limits<int>::max());
  });
  return static_cast<int>(n);
}

}  // namespace detail

/// fp32 in, fp32 sums; TF32 and other reduced arithmetic are off.
/// @determinism  run to run on one kind of GPU, since every stream has its own workspace
struct CublasProduct {
  using element = float;
  static constexpr std::string_view name = "cublas";

  /// @pre   C overlaps neither A nor B; sizes fit an int   @sync  ordered on stream
  static void gemm(cuda::Stream& stream, Transpose trans_a, Transpose trans_b, Index m, Index n,
                   Index k, float alpha, const float* a, Index lda, const float* b, Index ldb,
                   float beta, float* c, Index ldc) {
    if (m <= 0 || n <= 0) return;
    const cublasHandle_t handle = stream.resource<detail::CublasHandle>().native();
    const int rows = detail::cublas_size("m", m), cols = detail::cublas_size("n", n);
    const int row_length = detail::cublas_size("ldc", ldc);
    if (k <= 0) {
      // Leading dimensions of empty operands may be zero, which cuBLAS refuses.
      const float nothing = 0.0F;
      detail::check_cublas(cublasSgeam(handle, CUBLAS_OP_N, CUBLAS_OP_N, cols, rows, &beta, c,
                                       row_length, &nothing, c, row_length, c, row_length),
                           "cublasSgeam");
      return;
    }
    // cuBLAS counts columns first, so it sees every matrix transposed: C^T = op(B)^T op(A)^T.
    const auto flag = [](Transpose t) { return t == Transpose::no ? CUBLAS_OP_N : CUBLAS_OP_T; };
    detail::check_cublas(
        cublasSgemm(handle, flag(trans_b), flag(trans_a), cols, rows, detail::cublas_size("k", k),
                    &alpha, b, detail::cublas_size("ldb", ldb), a, detail::cublas_size("lda", lda),
                    &beta, c, row_length),
        "cublasSgemm");
  }
};

static_assert(matrix_product<CublasProduct, cuda::Stream>);

}  // namespace mega::inline v0::nn
