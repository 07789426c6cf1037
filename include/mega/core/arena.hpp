/// @file  Arena: hands out consecutive aligned pieces of one block; without a block it only counts.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>

#include <cstddef>

namespace mega::inline v0 {

/// Bump allocator over memory it does not own. One layout function serves planning and binding:
/// run on a counting arena it tells the bytes needed, run on a real one it returns the views.
/// Pieces are aligned to 64 bytes. Not thread-safe. Throws Error(logic) when the block is too
/// small.
class Arena {
 public:
  static constexpr std::size_t alignment = 64;

  /// Counts bytes, returns null views of the right extents.
  Arena() noexcept = default;

  Arena(std::byte* data, std::size_t capacity) noexcept
      : data_(data), capacity_(capacity), counting_(false) {}

  template <class T, class... E>
  [[nodiscard]] View<T, static_cast<int>(sizeof...(E))> take(E... extents) {
    const Index count = (Index{1} * ... * static_cast<Index>(extents));
    void* piece = take_bytes(static_cast<std::size_t>(count) * sizeof(T));
    return {static_cast<T*>(piece), static_cast<Index>(extents)...};
  }

  /// Start of `bytes` bytes, or null while counting.
  [[nodiscard]] void* take_bytes(std::size_t bytes) {
    const std::size_t begin = used_;
    used_ += (bytes + alignment - 1) / alignment * alignment;
    if (used_ > peak_) peak_ = used_;
    if (counting_) return nullptr;
    expects(used_ <= capacity_, ErrorCode::logic, [&] {
      return sentence("arena of ", capacity_, " bytes cannot hold ", used_,
                      " bytes; raise the size that the stage declares");
    });
    return data_ + begin;
  }

  [[nodiscard]] bool counting() const noexcept { return counting_; }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }
  /// Largest used() so far.
  [[nodiscard]] std::size_t peak() const noexcept { return peak_; }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }

  /// Gives back everything taken since used() was `mark`.
  void rewind(std::size_t mark = 0) noexcept { used_ = mark; }

 private:
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
  bool counting_ = true;
};

/// Gives back at the end of the scope what was taken from the arena inside it.
class [[nodiscard]] ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) noexcept : arena_(arena), mark_(arena.used()) {}
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;
  ~ArenaScope() { arena_.rewind(mark_); }

 private:
  Arena& arena_;
  std::size_t mark_;
};

}  // namespace mega::inline v0
