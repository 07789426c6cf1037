/// @file  Adding up the loss of the row blocks of a micro-batch, on a GPU. Host twin:
/// nn/loss_sum.hpp.
#pragma once
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/shape.hpp>

namespace mega::inline v0::cuda {

namespace detail {

/// In order: there are only as many parts as a micro-batch has blocks of rows.
struct AddLossParts {
  double* total;
  const double* parts;
  Index count;
  __device__ void operator()(Index) const {
    double sum = 0.0;
    for (Index i = 0; i < count; ++i) sum += parts[i];
    *total += sum;
  }
};

}  // namespace detail

/// Gives the bits of the host twin.
MEGA_LAUNCHES void add_loss_parts(Stream& stream, Vector<double> total,
                                  Vector<const double> parts) {
  nn::detail::expects_size("add_loss_parts", "total", total, 1);
  detail::for_each_index(stream, "add_loss_parts", 1,
                         detail::AddLossParts{total.data(), parts.data(), parts.size()});
}

}  // namespace mega::inline v0::cuda
