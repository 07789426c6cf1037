/// @file  Owned device memory, and the copies between memories that generic code calls.
#pragma once
#include <mega/core/device.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>
#include <utility>

namespace mega::inline v0::cuda {

/// Block of memory of the device that was current when it was made, aligned to 256 bytes, contents
/// indeterminate. Move-only. Ends after the work that touches it.
class Memory {
 public:
  Memory() noexcept = default;
  explicit Memory(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* data = nullptr;
    check(cudaMalloc(&data, bytes), sentence("cudaMalloc of ", bytes, " bytes"));
    data_ = static_cast<std::byte*>(data);
  }
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (data_ != nullptr) (void)cudaFree(data_);
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

static_assert(device_memory<Memory>);

namespace detail {
template <class T, int R>
void transfer(Stream& stream, View<T, R> out, View<const T, R> in, cudaMemcpyKind kind) {
  expects(out.size() == in.size(), ErrorCode::logic, [&] {
    return sentence("copy: ", in.size(), " elements do not fit ", out.size(), " elements");
  });
  if (in.empty()) return;
  check(cudaMemcpyAsync(out.data(), in.data(), sizeof(T) * static_cast<std::size_t>(in.size()),
                        kind, stream.native()),
        "cudaMemcpyAsync");
}
}  // namespace detail

/// @pre  equal sizes, no overlap   @sync  ordered on stream
template <class T, int R>
void copy(Stream& stream, View<T, R> out, View<const std::type_identity_t<T>, R> in) {
  detail::transfer<T, R>(stream, out, in, cudaMemcpyDeviceToDevice);
}

template <class T, int R>
void fill_zero(Stream& stream, View<T, R> out) {
  if (out.empty()) return;
  check(cudaMemsetAsync(out.data(), 0, sizeof(T) * static_cast<std::size_t>(out.size()),
                        stream.native()),
        "cudaMemsetAsync");
}

/// From host memory that stays valid until the stream is synchronised. Pageable memory may hold the
/// host back while CUDA stages it; page-locked memory does not.
template <class T, int R>
void upload(Stream& stream, View<T, R> out, View<const std::type_identity_t<T>, R> host_in) {
  detail::transfer<T, R>(stream, out, host_in, cudaMemcpyHostToDevice);
}
/// To host memory, whole once the stream is synchronised.
template <class T, int R>
void download(Stream& stream, View<T, R> host_out, View<const std::type_identity_t<T>, R> in) {
  detail::transfer<T, R>(stream, host_out, in, cudaMemcpyDeviceToHost);
}

}  // namespace mega::inline v0::cuda
