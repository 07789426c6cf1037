/// @file  An owned CUDA event that orders streams and measures nothing.
#pragma once
#include <mega/cuda/check.hpp>

#include <cuda_runtime.h>

#include <utility>

namespace mega::inline v0::cuda {

/// Made on the calling thread's current device. Move-only.
class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }

  [[nodiscard]] cudaEvent_t native() const noexcept { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace mega::inline v0::cuda
