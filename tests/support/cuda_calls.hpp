/// @file  Counts the calls of CUDA that a program makes, as CUPTI tells of them.
#pragma once
#include <mega/core/error.hpp>
#include <mega/cuda/check.hpp>

#include <cuda_runtime.h>
#include <cupti.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega_test {

/// Whether a call of the driver or of the runtime takes or gives back memory of the device or
/// page-locked memory, lets the host wait or ask whether it would have to, loads code, or makes a
/// graph.
/// @param name  without what follows an underscore: versions, and kinds of default streams
inline bool is_unsteady(std::string_view name) {
  const auto begins = [](std::string_view text, std::string_view with) {
    return text.substr(0, with.size()) == with;
  };
  const auto ends = [](std::string_view text, std::string_view with) {
    return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
  };
  name.remove_prefix(begins(name, "cuda") ? 4 : begins(name, "cu") ? 2 : name.size());
  if (ends(name, "Synchronize") || ends(name, "Query")) return true;
  if (begins(name, "Memcpy") || begins(name, "Memset"))
    return name.find("Async") == std::string_view::npos;
  for (const std::string_view unsteady : {"MemAlloc",
                                          "Malloc",
                                          "MemFree",
                                          "Free",
                                          "MemHostAlloc",
                                          "HostAlloc",
                                          "MemHostRegister",
                                          "HostRegister",
                                          "MemHostUnregister",
                                          "HostUnregister",
                                          "MemCreate",
                                          "MemRelease",
                                          "MemMap",
                                          "MemUnmap",
                                          "MemAddress",
                                          "MemPoolCreate",
                                          "MemPoolDestroy",
                                          "MemPoolTrimTo",
                                          "ArrayCreate",
                                          "ArrayDestroy",
                                          "ModuleLoad",
                                          "ModuleUnload",
                                          "LibraryLoad",
                                          "LibraryUnload",
                                          "LinkCreate",
                                          "GraphInstantiate",
                                          "StreamBeginCapture"})
    if (begins(name, unsteady)) return true;
  return false;
}

/// Whether a call of the driver or of the runtime launches a kernel or a graph.
inline bool is_launch(std::string_view name) {
  for (const std::string_view begin :
       {"cuLaunch", "cudaLaunch", "cuGraphLaunch", "cudaGraphLaunch"})
    if (name.substr(0, begin.size()) == begin) return name != "cudaLaunchHostFunc";
  return false;
}

using Counts = std::map<std::string, int>;

inline constexpr auto pageable_copy = "cudaMemcpyAsync of pageable memory";
inline constexpr auto module_loaded = "module loaded";

inline int total(const Counts& counts) {
  int out = 0;
  for (const auto& [name, count] : counts) out += count;
  return out;
}
/// Of all calls that have `part` in their names.
inline int count_of(const Counts& counts, std::string_view part) {
  int out = 0;
  for (const auto& [name, count] : counts) out += name.find(part) == std::string::npos ? 0 : count;
  return out;
}
inline std::string text(const Counts& counts) {
  std::string out;
  for (const auto& [name, count] : counts)
    out += mega::sentence(out.empty() ? "" : ", ", name, " ", count);
  return out;
}

inline void check_cupti(CUptiResult status, std::string_view call) {
  if (status == CUPTI_SUCCESS) return;
  const char* reason = "an unknown error";
  (void)cuptiGetResultString(status, &reason);
  throw mega::Error(mega::ErrorCode::device, mega::sentence(call, " failed with ", reason));
}

struct Calls {
  Counts unsteady, launches;
};

/// Counts the unsteady calls and the launches of all threads, since ranks are threads and libraries
/// may have their own. A call of the runtime that makes one of the driver counts once, under the
/// driver's name.
class CallCounter {
 public:
  /// Lives until the process ends, since CUDA makes calls until then.
  static CallCounter& of_process() {
    static CallCounter& counter = *new CallCounter;
    return counter;
  }

  void begin() {
    const std::lock_guard lock(mutex_);
    calls_ = {};
    copies_.clear();
    counting_ = true;
  }
  /// @pre  no other thread makes calls
  [[nodiscard]] Calls end() {
    counting_ = false;
    const std::lock_guard lock(mutex_);
    for (const auto& [out, in] : copies_)
      if (is_pageable(out) || is_pageable(in)) ++calls_.unsteady[pageable_copy];
    return std::exchange(calls_, {});
  }

 private:
  CallCounter() {
    check_cupti(cuptiSubscribe(&subscriber_, &CallCounter::hear, this), "cuptiSubscribe");
    for (const CUpti_CallbackDomain domain :
         {CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RUNTIME_API})
      check_cupti(cuptiEnableDomain(1, subscriber_, domain), "cuptiEnableDomain");
    // Also heard when the driver loads a kernel at its first launch, which no call tells of.
    check_cupti(cuptiEnableCallback(1, subscriber_, CUPTI_CB_DOMAIN_RESOURCE,
                                    CUPTI_CBID_RESOURCE_MODULE_LOADED),
                "cuptiEnableCallback");
  }

  static void CUPTIAPI hear(void* self, CUpti_CallbackDomain domain, CUpti_CallbackId id,
                            const void* data) {
    auto& counter = *static_cast<CallCounter*>(self);
    if (!counter.counting_) return;
    if (domain == CUPTI_CB_DOMAIN_RESOURCE) return counter.add(&Calls::unsteady, module_loaded);
    counter.hear_call(domain, id, *static_cast<const CUpti_CallbackData*>(data));
  }

  void hear_call(CUpti_CallbackDomain domain, CUpti_CallbackId id, const CUpti_CallbackData& call) {
    const bool enters = call.callbackSite == CUPTI_API_ENTER;
    const bool runtime = domain == CUPTI_CB_DOMAIN_RUNTIME_API;
    if (enters && runtime && id == CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020) {
      const auto& copy = *static_cast<const cudaMemcpyAsync_v3020_params*>(call.functionParams);
      const std::lock_guard lock(mutex_);
      copies_.emplace_back(copy.dst, copy.src);
    }
    std::string_view name = call.functionName;
    name = name.substr(0, name.find('_'));
    const bool unsteady = is_unsteady(name);
    if (!unsteady && !is_launch(name)) return;
    Counts Calls::*const kind = unsteady ? &Calls::unsteady : &Calls::launches;
    if (!runtime) {
      if (!enters) return;
      ++driver_calls;
      add(kind, name);
    } else if (enters) {
      *call.correlationData = driver_calls;
    } else if (*call.correlationData == driver_calls) {
      add(kind, name);
    }
  }

  void add(Counts Calls::*kind, std::string_view name) {
    const std::lock_guard lock(mutex_);
    ++(calls_.*kind)[std::string(name)];
  }

  static bool is_pageable(const void* p) {
    cudaPointerAttributes attributes{};
    mega::cuda::check(cudaPointerGetAttributes(&attributes, p), "cudaPointerGetAttributes");
    return attributes.type == cudaMemoryTypeUnregistered;
  }

  static inline thread_local std::uint64_t driver_calls = 0;  // of this thread, those that count

  CUpti_SubscriberHandle subscriber_ = nullptr;
  std::atomic<bool> counting_ = false;
  std::mutex mutex_;
  Calls calls_;
  std::vector<std::pair<const void*, const void*>> copies_;  // to, from
};

}  // namespace mega_test
