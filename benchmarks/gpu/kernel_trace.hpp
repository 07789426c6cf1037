/// @file  What a GPU did, as CUPTI's activity interface tells it. Compiled in where CUPTI's header
/// is, and then needs CUPTI to link.
#pragma once
#include "kernel_table.hpp"
#include <mega/core/error.hpp>

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#if __has_include(<cupti.h>)
#include <cupti.h>

#include <cstddef>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#endif

namespace gpu_step {

#if __has_include(<cupti.h>)

inline constexpr bool can_trace = true;

namespace detail {

inline void check_cupti(CUptiResult status, std::string_view call) {
  if (status == CUPTI_SUCCESS) return;
  const char* text = "an unknown error";
  (void)cuptiGetResultString(status, &text);
  throw mega::Error(mega::ErrorCode::device, mega::sentence(call, " failed with ", text));
}

}  // namespace detail

/// Records one GPU of the process from start() to stop(). One at a time.
class KernelTrace {
 public:
  /// @pre  the calling thread has waited for its GPU, of which `device` is the ordinal
  static void start(int device) {
    State& s = state();
    {
      const std::lock_guard lock(s.mutex);
      s.device = static_cast<std::uint32_t>(device);
      s.activities.clear();
    }
    detail::check_cupti(cuptiActivityRegisterCallbacks(&give_buffer, &take_buffer),
                        "cuptiActivityRegisterCallbacks");
    for (const CUpti_ActivityKind kind : kinds)
      detail::check_cupti(cuptiActivityEnable(kind), "cuptiActivityEnable");
  }

  /// @pre  the calling thread has waited for its GPU
  [[nodiscard]] static std::vector<Activity> stop() {
    // Other GPUs of the process may be at work, and their records share the buffers.
    detail::check_cupti(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED),
                        "cuptiActivityFlushAll");
    for (const CUpti_ActivityKind kind : kinds)
      detail::check_cupti(cuptiActivityDisable(kind), "cuptiActivityDisable");
    State& s = state();
    const std::lock_guard lock(s.mutex);
    mega::expects(s.dropped == 0, mega::ErrorCode::device, [&] {
      return mega::sentence("CUPTI dropped ", s.dropped, " records; trace fewer steps");
    });
    return std::exchange(s.activities, {});
  }

  [[nodiscard]] static std::uint32_t stream_id(cudaStream_t stream) {
    std::uint32_t id = 0;
    detail::check_cupti(cuptiGetStreamIdEx(nullptr, stream, 0, &id), "cuptiGetStreamIdEx");
    return id;
  }

 private:
  struct State {
    std::mutex mutex;
    std::uint32_t device = 0;
    std::vector<Activity> activities;
    std::size_t dropped = 0;

    /// Records of other GPUs, and those of work under way, which have no end, pass by.
    void keep(const CUpti_Activity& record) {
      const auto add = [this](const auto& r, const char* name) {
        if (r.deviceId == device && r.end > r.start)
          activities.push_back({name, r.start, r.end, r.streamId});
      };
      switch (record.kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
          const auto& r = reinterpret_cast<const CUpti_ActivityKernel10&>(record);
          return add(r, r.name);
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
          const auto& r = reinterpret_cast<const CUpti_ActivityMemcpy6&>(record);
          return add(r, copy_name(r.copyKind));
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY2:
          return add(reinterpret_cast<const CUpti_ActivityMemcpyPtoP4&>(record),
                     "memcpy peer to peer");
        case CUPTI_ACTIVITY_KIND_MEMSET:
          return add(reinterpret_cast<const CUpti_ActivityMemset4&>(record), "memset");
        default: return;
      }
    }
  };

  // Kernels of several streams run at once, as without the trace.
  static constexpr CUpti_ActivityKind kinds[] = {
      CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
      CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET};
  static constexpr std::size_t buffer_bytes = std::size_t{8} << 20;
  static constexpr std::align_val_t buffer_alignment{8};

  [[nodiscard]] static State& state() {
    static State state;
    return state;
  }

  static void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* records) {
    *buffer =
        static_cast<std::uint8_t*>(::operator new(buffer_bytes, buffer_alignment, std::nothrow));
    *size = *buffer == nullptr ? 0 : buffer_bytes;
    *records = 0;  // as many as fit
  }

  static void CUPTIAPI take_buffer(CUcontext context, std::uint32_t stream, std::uint8_t* buffer,
                                   std::size_t, std::size_t valid) {
    State& s = state();
    {
      const std::lock_guard lock(s.mutex);
      CUpti_Activity* record = nullptr;
      while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) s.keep(*record);
      std::size_t dropped = 0;
      (void)cuptiActivityGetNumDroppedRecords(context, stream, &dropped);
      s.dropped += dropped;
    }
    ::operator delete(buffer, buffer_alignment);
  }

  [[nodiscard]] static const char* copy_name(std::uint8_t kind) {
    switch (kind) {
      case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD: return "memcpy host to device";
      case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH: return "memcpy device to host";
      case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD: return "memcpy device to device";
      case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP: return "memcpy peer to peer";
      default: return "memcpy";
    }
  }
};

#else

inline constexpr bool can_trace = false;

/// Stands for the one that a build with CUPTI has.
class KernelTrace {
 public:
  static void start(int) {
    throw mega::Error(mega::ErrorCode::usage,
                      "this program was built without CUPTI, so it cannot list kernels; build it "
                      "where the toolkit's cupti.h is, or leave --kernels out");
  }
  [[nodiscard]] static std::vector<Activity> stop() { return {}; }
  [[nodiscard]] static std::uint32_t stream_id(cudaStream_t) { return 0; }
};

#endif

}  // namespace gpu_step
