/// @file  Aligned host memory that the host devices allocate.
#pragma once
#include <cstddef>
#include <new>
#include <utility>

namespace mega::inline v0::host {

/// Owned block of host memory, aligned to 64 bytes, contents indeterminate. Move-only.
class Memory {
 public:
  static constexpr std::align_val_t alignment{64};

  Memory() noexcept = default;
  explicit Memory(std::size_t bytes)
      : data_(bytes == 0 ? nullptr : static_cast<std::byte*>(::operator new(bytes, alignment))),
        bytes_(bytes) {}
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() { ::operator delete(data_, alignment); }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace mega::inline v0::host
