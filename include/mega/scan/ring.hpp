/// @file  A ring between two threads: one puts in, one takes out, neither waits.
#pragma once
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace mega::inline v0::scan {

/// Bounded queue of trivially copyable values for one producer and one consumer. Each side may move
/// between threads if something else orders its uses.
/// @cost  a push or a pop is a copy and one store that the other side sees; each side reads the
///        other's position only when its copy of it says that the ring is full, or empty
template <class T>
class SpscRing {
 public:
  /// @param capacity  rounded up to a power of two
  explicit SpscRing(std::size_t capacity)
      : mask_(std::bit_ceil(capacity < 2 ? std::size_t{2} : capacity) - 1),
        values_(std::make_unique<T[]>(mask_ + 1)) {}

  [[nodiscard]] std::size_t capacity() const noexcept { return mask_ + 1; }

  /// Producer. False where the ring is full: nothing was put in.
  bool push(const T& value) noexcept {
    const std::uint64_t at = pushed_.load(std::memory_order_relaxed);
    if (at - seen_popped_ > mask_) {
      seen_popped_ = popped_.load(std::memory_order_acquire);
      if (at - seen_popped_ > mask_) return false;
    }
    values_[at & mask_] = value;
    pushed_.store(at + 1, std::memory_order_release);
    return true;
  }

  /// Consumer. The oldest value, which stays; null where the ring is empty.
  [[nodiscard]] const T* front() noexcept {
    const std::uint64_t at = popped_.load(std::memory_order_relaxed);
    if (at == seen_pushed_) {
      seen_pushed_ = pushed_.load(std::memory_order_acquire);
      if (at == seen_pushed_) return nullptr;
    }
    return &values_[at & mask_];
  }
  /// Consumer. @pre  front() is not null
  void pop() noexcept {
    popped_.store(popped_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  /// Consumer. False where the ring is empty.
  bool pop(T& out) noexcept {
    const T* const oldest = front();
    if (oldest == nullptr) return false;
    out = *oldest;
    pop();
    return true;
  }

 private:
  // The sides write to cache lines of their own.
  static constexpr std::size_t line = 64;

  std::uint64_t mask_;
  std::unique_ptr<T[]> values_;
  alignas(line) std::atomic<std::uint64_t> pushed_{0};
  std::uint64_t seen_popped_ = 0;
  alignas(line) std::atomic<std::uint64_t> popped_{0};
  std::uint64_t seen_pushed_ = 0;
};

}  // namespace mega::inline v0::scan
