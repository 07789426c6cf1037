/// @file  NvmlDevice: clock, temperature, load and power of an NVIDIA GPU, as its management
/// library says. The library is loaded when one is asked for, so that nothing links it and a
/// machine without it says nothing. Plain C++.
#pragma once
#include <mega/scan/trace.hpp>

#include <dlfcn.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace mega::inline v0::scan {

/// What is used of NVML's C interface, which has kept these signatures since version 2: status 0 is
/// success, a device is an opaque pointer. Functions that are null are not asked.
struct NvmlFunctions {
  struct Utilisation {
    unsigned int gpu, memory;  ///< per cent of the last sample period
  };
  static constexpr int sm_clock = 1, gpu_sensor = 0;

  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*device_by_pci_bus_id)(const char*, void**) = nullptr;
  int (*clock_info)(void*, int clock, unsigned int* mhz) = nullptr;
  int (*temperature)(void*, int sensor, unsigned int* celsius) = nullptr;
  int (*utilisation_rates)(void*, Utilisation*) = nullptr;
  int (*power_usage)(void*, unsigned int* milliwatts) = nullptr;
  int (*clock_event_reasons)(void*, unsigned long long* bits) = nullptr;
};

/// Every call takes microseconds up to a few milliseconds of the calling thread, and no call waits
/// for the GPU's work. Move-only; one thread at a time.
class NvmlDevice {
 public:
  static constexpr const char* default_library = "libnvidia-ml.so.1";

  /// Says nothing.
  NvmlDevice() = default;
  /// @param pci_bus_id  of the GPU, as cudaDeviceGetPCIBusId() writes it
  explicit NvmlDevice(const char* pci_bus_id, const char* library = default_library)
      : NvmlDevice(pci_bus_id, Library(dlopen(library, RTLD_NOW | RTLD_LOCAL))) {}
  /// @param functions  of a library that stays loaded
  NvmlDevice(const char* pci_bus_id, const NvmlFunctions& functions) : functions_(functions) {
    if (functions_.init == nullptr || functions_.shutdown == nullptr ||
        functions_.device_by_pci_bus_id == nullptr || functions_.init() != success)
      return;
    if (functions_.device_by_pci_bus_id(pci_bus_id, &device_) == success && device_ != nullptr)
      return;
    device_ = nullptr;
    (void)functions_.shutdown();
  }
  NvmlDevice(NvmlDevice&& other) noexcept { swap(other); }
  NvmlDevice& operator=(NvmlDevice&& other) noexcept {
    swap(other);
    return *this;
  }
  ~NvmlDevice() {
    if (device_ != nullptr) (void)functions_.shutdown();
  }

  /// Whether there is somebody to ask.
  [[nodiscard]] explicit operator bool() const noexcept { return device_ != nullptr; }

  /// Without rank; nothing where the device says nothing.
  [[nodiscard]] std::optional<DeviceState> state(Nanoseconds at) const {
    if (device_ == nullptr) return {};
    DeviceState out;
    out.at = at;
    unsigned int value = 0;
    const auto keep = [&](std::int32_t& into, bool known) {
      if (known && value <= most) into = static_cast<std::int32_t>(value);
      return known;
    };
    const NvmlFunctions& f = functions_;
    bool known = keep(out.sm_mhz, f.clock_info != nullptr &&
                                      f.clock_info(device_, f.sm_clock, &value) == success);
    known |= keep(out.temperature_c, f.temperature != nullptr &&
                                         f.temperature(device_, f.gpu_sensor, &value) == success);
    NvmlFunctions::Utilisation rates{};
    const bool has_rates =
        f.utilisation_rates != nullptr && f.utilisation_rates(device_, &rates) == success;
    value = rates.gpu;
    known |= keep(out.busy_percent, has_rates);
    known |=
        keep(out.power_mw, f.power_usage != nullptr && f.power_usage(device_, &value) == success);
    unsigned long long bits = 0;
    if (f.clock_event_reasons != nullptr && f.clock_event_reasons(device_, &bits) == success)
      out.clock_limits = static_cast<std::uint32_t>(bits);
    return known ? std::optional(out) : std::nullopt;
  }

 private:
  static constexpr int success = 0;
  static constexpr unsigned int most = std::numeric_limits<std::int32_t>::max();

  struct Close {
    void operator()(void* library) const noexcept { (void)dlclose(library); }
  };
  using Library = std::unique_ptr<void, Close>;

  NvmlDevice(const char* pci_bus_id, Library library)
      : NvmlDevice(pci_bus_id, functions_of(library.get())) {
    library_ = std::move(library);
  }

  [[nodiscard]] static NvmlFunctions functions_of(void* library) {
    NvmlFunctions f;
    if (library == nullptr) return f;
    const auto find = [&]<class F>(F*& into, const char* name) {
      if (into == nullptr) into = reinterpret_cast<F*>(dlsym(library, name));
    };
    find(f.init, "nvmlInit_v2");
    find(f.shutdown, "nvmlShutdown");
    find(f.device_by_pci_bus_id, "nvmlDeviceGetHandleByPciBusId_v2");
    find(f.clock_info, "nvmlDeviceGetClockInfo");
    find(f.temperature, "nvmlDeviceGetTemperature");
    find(f.utilisation_rates, "nvmlDeviceGetUtilizationRates");
    find(f.power_usage, "nvmlDeviceGetPowerUsage");
    find(f.clock_event_reasons, "nvmlDeviceGetCurrentClocksEventReasons");
    find(f.clock_event_reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");  // before driver 535
    return f;
  }

  void swap(NvmlDevice& other) noexcept {
    std::swap(library_, other.library_);
    std::swap(functions_, other.functions_);
    std::swap(device_, other.device_);
  }

  Library library_;  // goes after the last call into it
  NvmlFunctions functions_;
  void* device_ = nullptr;
};

}  // namespace mega::inline v0::scan
