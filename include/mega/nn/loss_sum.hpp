/// @file  Adding up the loss of the row blocks of a micro-batch, on the host.
#pragma once
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/detail/shape.hpp>

namespace mega::inline v0::nn {

/// total(0) += parts(0) + parts(1) + ..., added in this order in fp64 before the total.
/// @sync  ordered on stream   @determinism  bitwise
template <host::host_stream S>
void add_loss_parts(S& stream, Vector<double> total, Vector<const double> parts) {
  detail::expects_size("add_loss_parts", "total", total, 1);
  stream.run([=] {
    double sum = 0.0;
    for (Index i = 0; i < parts.size(); ++i) sum += parts(i);
    total(0) += sum;
  });
}

}  // namespace mega::inline v0::nn
