/// @file  Cuda: the device policy of one NVIDIA GPU.
#pragma once
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/core/replay.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/event.hpp>
#include <mega/cuda/graph.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <string_view>
#include <vector>

namespace mega::inline v0::cuda {

/// GPU `ordinal` of this process. The constructor makes it the current device of the calling
/// thread; what the device makes is used by threads whose current device it is.
/// @throws  Error(device) where there is no such GPU
class Device {
 public:
  static constexpr std::string_view name = "cuda";
  using stream_type = Stream;
  using memory_type = Memory;
  using replays_type = GraphReplays;

  /// @param replays  how much of a training step is launched as one graph
  explicit Device(int ordinal = 0, ReplayScope replays = ReplayScope::none)
      : ordinal_(ordinal), replays_(replays) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    expects(ordinal >= 0 && ordinal < count, ErrorCode::device, [&] {
      return sentence("there is no GPU ", ordinal, "; this process sees ", count,
                      ", counted from 0");
    });
    check(cudaSetDevice(ordinal), "cudaSetDevice");
  }

  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] Stream make_stream(const char*) const { return {}; }
  [[nodiscard]] Event make_event() const { return {}; }
  [[nodiscard]] Memory allocate(std::size_t bytes) const { return Memory(bytes); }
  [[nodiscard]] ReplayScope replay_scope() const noexcept { return replays_; }
  [[nodiscard]] GraphReplays make_replays() const { return {}; }

 private:
  int ordinal_;
  ReplayScope replays_;
};

static_assert(device_policy<Device> && replays_work<Device>);

/// Free memory of the current GPU in bytes, as CUDA sees it.
[[nodiscard]] inline std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

/// Free memory of each of the first `gpus` GPUs once its context is there: what a plan is measured
/// against, if this process has put nothing else there yet. Changes the current GPU.
[[nodiscard]] inline std::vector<std::size_t> free_memory_beside_contexts(int gpus) {
  std::vector<std::size_t> out;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    const Device device(gpu);
    check(cudaFree(nullptr), "cudaFree");
    out.push_back(free_memory());
  }
  return out;
}

}  // namespace mega::inline v0::cuda

namespace mega::inline v0 {
using Cuda = cuda::Device;
}
