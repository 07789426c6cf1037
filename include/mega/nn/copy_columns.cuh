/// @file  Placing a narrow matrix among the columns of a wide one, on a GPU. Host twin:
/// nn/copy_columns.hpp.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/shape.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

namespace mega::inline v0::cuda {

template <storage T>
void copy_columns(Stream& stream, Matrix<T> out, Index first_column,
                  Matrix<const std::type_identity_t<T>> in, Index columns) {
  nn::detail::expects_shape("copy_columns", "in", in, out.rows(), in.cols());
  expects(columns >= 0 && columns <= in.cols() && first_column >= 0 &&
              first_column + columns <= out.cols(),
          ErrorCode::logic, [&] {
            return sentence("copy_columns: ", columns, " of ", in.cols(), " columns do not fit at ",
                            first_column, " of ", out.cols());
          });
  if (columns == 0 || out.rows() == 0) return;
  const auto bytes = [](Index n) { return sizeof(T) * static_cast<std::size_t>(n); };
  check(cudaMemcpy2DAsync(out.data() + first_column, bytes(out.cols()), in.data(), bytes(in.cols()),
                          bytes(columns), static_cast<std::size_t>(out.rows()),
                          cudaMemcpyDeviceToDevice, stream.native()),
        "copy_columns");
}

}  // namespace mega::inline v0::cuda
