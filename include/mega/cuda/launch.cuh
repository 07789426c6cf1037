/// @file  Launching kernels: one place for the grid, the error and the loops that most kernels are.
#pragma once
#include <mega/core/config.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_map>

/// Every kernel of the library. A kernel is a template, since nvcc ignores `inline` on kernels, and
/// hidden, so that two shared libraries built for different architectures never run each other's.
#define MEGA_KERNEL __attribute__((visibility("hidden"))) __global__

/// Every function that is no template and launches a kernel: bound to the kernel of its library.
#define MEGA_LAUNCHES __attribute__((visibility("hidden"))) inline

namespace mega::inline v0::cuda {

namespace detail {

inline constexpr int block_threads = 256;
inline constexpr int warp_threads = 32;

[[nodiscard]] MEGA_HD constexpr Index ceil_div(Index n, Index d) noexcept {
  return (n + d - 1) / d;
}

/// Grid size for `n` items; kernels loop where it is cut off.
[[nodiscard]] inline unsigned grid_x(Index n) noexcept {
  return static_cast<unsigned>(std::min<Index>(n, 0x7fffffff));
}
[[nodiscard]] inline unsigned grid_yz(Index n) noexcept {
  return static_cast<unsigned>(std::min<Index>(n, 65535));
}

/// Dynamic shared memory that each kernel of this library was granted on one device, beyond what
/// every kernel has. Asked for at the first launch of a kernel there, and again only where a launch
/// wants more than any before it: never less, so that no launch of one thread is refused because
/// another thread launched the same kernel with less in between. Each device has its own, since a
/// thread may be held while code is loaded for its GPU, which must not hold those of other GPUs.
class __attribute__((visibility("hidden"))) SharedMemoryGrants {
 public:
  static constexpr std::size_t everyone = std::size_t{48} << 10;

  [[nodiscard]] static SharedMemoryGrants& of_device(int device) {
    static std::mutex mutex;
    static std::map<int, SharedMemoryGrants> all;
    const std::lock_guard lock(mutex);
    return all[device];
  }

  /// @pre  the device is current   @throws  Error(device) naming `op` where it has not so much
  void ensure(const void* kernel, std::size_t bytes, std::string_view op) {
    const std::lock_guard lock(mutex_);
    std::size_t& granted = granted_.try_emplace(kernel, everyone).first->second;
    if (bytes <= granted) return;
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (status != cudaSuccess) (void)cudaGetLastError();  // the next launch would be blamed
    check(status, op);
    granted = bytes;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::size_t> granted_;
};

/// Queues a kernel; an empty grid is nothing to do. Any thread may launch any kernel.
/// @throws  Error(device) naming `op` where CUDA refuses the launch
template <class... Parameters, class... Arguments>
void launch(Stream& stream, std::string_view op, void (*kernel)(Parameters...), dim3 grid,
            dim3 block, std::size_t shared_bytes, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > SharedMemoryGrants::everyone) {
    int device = 0;
    check(cudaGetDevice(&device), op);
    SharedMemoryGrants::of_device(device).ensure(reinterpret_cast<const void*>(kernel),
                                                 shared_bytes, op);
  }
  kernel<<<grid, block, shared_bytes, stream.native()>>>(arguments...);
  check(cudaGetLastError(), op);
}

template <class Body>
MEGA_KERNEL void run_each_index(Index n, Body body) {
  const Index step = static_cast<Index>(gridDim.x) * blockDim.x;
  for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    body(i);
}

/// body(i) for 0 <= i < n, one thread each, neighbours in neighbouring threads.
template <class Body>
void for_each_index(Stream& stream, std::string_view op, Index n, Body body) {
  launch(stream, op, run_each_index<Body>, grid_x(ceil_div(n, block_threads)), block_threads, 0, n,
         body);
}

template <class Body>
MEGA_KERNEL void run_each_element(Index rows, Index cols, Body body) {
  const Index c = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= cols) return;
  const Index step = static_cast<Index>(gridDim.y) * blockDim.y;
  for (Index r = static_cast<Index>(blockIdx.y) * blockDim.y + threadIdx.y; r < rows; r += step)
    body(r, c);
}

/// body(r, c) for every element of a matrix, neighbours of a row in neighbouring threads.
template <class Body>
void for_each_element(Stream& stream, std::string_view op, Index rows, Index cols, Body body) {
  unsigned across = warp_threads;
  while (across < block_threads && across < cols) across *= 2;
  const dim3 block(across, block_threads / across);
  launch(stream, op, run_each_element<Body>,
         dim3(grid_x(ceil_div(cols, across)), grid_yz(ceil_div(rows, block.y))), block, 0, rows,
         cols, body);
}

template <class Body>
MEGA_KERNEL void run_each_row(Index rows, Body body) {
  for (Index r = blockIdx.x; r < rows; r += gridDim.x) body(r);
}

/// body(r) for every row, by a whole block each; the size of the block depends on cols alone, so
/// that the order of a row's sums does.
template <class Body>
void for_each_row(Stream& stream, std::string_view op, Index rows, Index cols, Body body) {
  unsigned threads = warp_threads;
  while (threads < block_threads && 4 * threads < cols) threads *= 2;
  launch(stream, op, run_each_row<Body>, grid_x(rows), threads, 0, rows, body);
}

}  // namespace detail

}  // namespace mega::inline v0::cuda
