/// @file  HostBackend: ranks that compute on the processor, whoever they are.
#pragma once
#include "backend.hpp"
#include <mega/comm/self.hpp>
#include <mega/host/host.hpp>
#include <mega/nn/blas.hpp>
#include <mega/nn/kernels.hpp>
#include <mega/scan/recorder.hpp>

#include <sys/resource.h>

#include <cstddef>
#include <fstream>
#include <string>

namespace trainer {

template <class Comm>
struct HostBackend {
  using device = mega::Host;
  using communicator = Comm;
  using recorder = mega::scan::HostRecorder;
  using kernels = mega::nn::Kernels<mega::nn::CblasProduct>;

  [[nodiscard]] static device make_device(int) { return {}; }
  /// Largest resident set of this process so far.
  [[nodiscard]] static std::size_t used_bytes(int) {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
  }
  [[nodiscard]] static std::size_t planned_bytes(int) { return 0; }
  /// 0 where the system does not say.
  [[nodiscard]] static double memory_share(int) {
    std::ifstream in("/proc/meminfo");
    double total = 0, available = 0;
    std::string key, unit;
    for (double kib = 0; in >> key >> kib; std::getline(in, unit)) {
      if (key == "MemTotal:") total = kib;
      if (key == "MemAvailable:") available = kib;
    }
    return total > 0 && available > 0 ? 1 - available / total : 0;
  }
};

static_assert(backend<HostBackend<mega::SelfComm>>);

}  // namespace trainer
