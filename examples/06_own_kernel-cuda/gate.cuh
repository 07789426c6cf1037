/// @file  The operations of gate.hpp on a GPU: kernels, and overloads in the namespace of the GPU's
/// stream, where calls with such a stream find them whatever was included first.
#pragma once
#include "../06_own_kernel/gate.hpp"
#include <mega/cuda/check.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>

namespace example {

inline constexpr int block_threads = 128;

/// Blocks of one thread an item. An empty grid is an error to CUDA.
inline unsigned blocks_for(Index items) {
  return static_cast<unsigned>((items + block_threads - 1) / block_threads);
}
__device__ inline Index thread_index() {
  return static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
}

static __global__ void gate_forward_kernel(Matrix<float> y, Matrix<const float> x,
                                           Vector<const float> w) {
  const Index i = thread_index();
  if (i < y.size()) y.data()[i] = gate(x.data()[i], w(i % y.cols()));
}

/// One thread a column: the sum over the rows has the host's order, and nothing is atomic.
static __global__ void gate_backward_kernel(Matrix<float> dx, Vector<float> dw,
                                            Matrix<const float> dy, Matrix<const float> x,
                                            Vector<const float> w) {
  const Index c = thread_index();
  if (c >= x.cols()) return;
  float sum = dw(c);
  for (Index r = 0; r < x.rows(); ++r) {
    const float slope = gate_slope(dy(r, c), x(r, c), w(c));
    sum += slope * x(r, c);
    if (!dx.empty()) dx(r, c) = dy(r, c) + slope * w(c);
  }
  dw(c) = sum;
}

/// One thread a row.
static __global__ void squared_error_kernel(Vector<double> losses, Matrix<float> y,
                                            Matrix<const float> target, const float* scale) {
  const Index r = thread_index();
  if (r >= y.rows()) return;
  double sum = 0;
  for (Index c = 0; c < y.cols(); ++c) {
    const float error = y(r, c) - target(r, c);
    sum += 0.5 * error * error;
    y(r, c) = error * *scale;
  }
  losses(r) = sum;
}

}  // namespace example

namespace mega::cuda {

inline void gate_forward(Stream& stream, Matrix<float> y, Matrix<const float> x,
                         Vector<const float> w) {
  if (y.empty()) return;
  example::gate_forward_kernel<<<example::blocks_for(y.size()), example::block_threads, 0,
                                 stream.native()>>>(y, x, w);
  check(cudaGetLastError(), "gate_forward");  // of the launch; synchronize() tells of the rest
}

inline void gate_backward(Stream& stream, Matrix<float> dx, Vector<float> dw,
                          Matrix<const float> dy, Matrix<const float> x, Vector<const float> w) {
  if (x.empty()) return;
  example::gate_backward_kernel<<<example::blocks_for(x.cols()), example::block_threads, 0,
                                  stream.native()>>>(dx, dw, dy, x, w);
  check(cudaGetLastError(), "gate_backward");
}

inline void squared_error(Stream& stream, Vector<double> losses, Matrix<float> y,
                          Matrix<const float> target, const float* scale) {
  if (y.empty()) return;
  example::squared_error_kernel<<<example::blocks_for(y.rows()), example::block_threads, 0,
                                  stream.native()>>>(losses, y, target, scale);
  check(cudaGetLastError(), "squared_error");
}

}  // namespace mega::cuda
