/// @file  Elements in device memory with their host copy.
#pragma once
#include <mega/core/view.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>

#include <cstddef>
#include <utility>
#include <vector>

namespace support {

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(mega::Index n)
      : host(static_cast<std::size_t>(n)), memory_(host.size() * sizeof(T)) {}
  DeviceBuffer(mega::cuda::Stream& stream, std::vector<T> values)
      : host(std::move(values)), memory_(host.size() * sizeof(T)) {
    upload(stream, device(), mega::Vector<const T>(host.data(), device().size()));
    stream.synchronize();
  }
  [[nodiscard]] mega::Vector<T> device() const {
    return {reinterpret_cast<T*>(memory_.data()), static_cast<mega::Index>(host.size())};
  }
  [[nodiscard]] mega::Vector<std::byte> bytes() const {
    return {memory_.data(), static_cast<mega::Index>(memory_.bytes())};
  }
  [[nodiscard]] const std::vector<T>& fetch(mega::cuda::Stream& stream) {
    download(stream, mega::Vector<T>(host.data(), device().size()),
             mega::Vector<const T>(device()));
    stream.synchronize();
    return host;
  }
  std::vector<T> host;

 private:
  mega::cuda::Memory memory_;
};

}  // namespace support
