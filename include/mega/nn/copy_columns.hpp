/// @file  Placing a narrow matrix among the columns of a wide one, on the host.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/detail/shape.hpp>

#include <algorithm>

namespace mega::inline v0::nn {

/// out(r, first_column + c) = in(r, c) for c < columns.
/// @pre  no overlap   @sync  ordered on stream
template <host::host_stream S>
void copy_columns(S& stream, Matrix<float> out, Index first_column, Matrix<const float> in,
                  Index columns) {
  detail::expects_shape("copy_columns", "in", in, out.rows(), in.cols());
  expects(columns >= 0 && columns <= in.cols() && first_column >= 0 &&
              first_column + columns <= out.cols(),
          ErrorCode::logic, [&] {
            return sentence("copy_columns: ", columns, " of ", in.cols(), " columns do not fit at ",
                            first_column, " of ", out.cols());
          });
  stream.run([=] {
    for (Index r = 0; r < out.rows(); ++r)
      std::copy_n(in.row(r), columns, out.row(r) + first_column);
  });
}

}  // namespace mega::inline v0::nn
