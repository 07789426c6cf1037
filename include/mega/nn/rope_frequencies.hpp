/// @file  The rotation speeds of rotary embedding as an operation on a stream.
#pragma once
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/rope.hpp>

namespace mega::inline v0::nn {

/// frequencies(i) = radians per position of pair i; see rope_inverse_frequencies(). A function of
/// sizes only, so a stage keeps no table: the head_dim / 2 numbers are made in its workspace.
/// @sync  ordered on stream
template <host::host_stream S>
void rope_frequencies(S& stream, Vector<float> frequencies, double theta, RopeScaling scaling) {
  stream.run([=] { rope_inverse_frequencies(frequencies, theta, scaling); });
}

}  // namespace mega::inline v0::nn
