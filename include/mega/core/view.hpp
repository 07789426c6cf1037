/// @file  View<T, R>: a non-owning, contiguous, row-major array of R extents. Host and device.
#pragma once
#include <mega/core/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace mega::inline v0 {

/// Extents and positions are 64-bit signed: products of sizes never wrap silently at 2^31.
using Index = std::int64_t;

/// Non-owning row-major array with R extents.
/// @pre  data points to size() elements, or is null with size() == 0
/// Trivially copyable, so it can be captured by a queued operation or passed to a kernel.
template <class T, int R>
class View {
  static_assert(R >= 1 && R <= 5, "mega: View has between one and five extents");

 public:
  using element_type = T;
  static constexpr int rank = R;

  constexpr View() noexcept = default;

  template <class... E>
  requires(sizeof...(E) == R && (std::is_convertible_v<E, Index> && ...)) MEGA_HD
      constexpr View(T* data, E... extents) noexcept
      : data_(data), extent_{static_cast<Index>(extents)...} {}

  /// A view of mutable elements converts to a view of const ones.
  template <class U>
  requires(std::is_const_v<T>&& std::is_same_v<const U, T> && !std::is_const_v<U>) MEGA_HD
      constexpr View(const View<U, R>& other) noexcept
      : data_(other.data()) {
    for (int d = 0; d < R; ++d) extent_[d] = other.extent(d);
  }

  [[nodiscard]] MEGA_HD constexpr T* data() const noexcept { return data_; }
  [[nodiscard]] MEGA_HD constexpr Index extent(int d) const noexcept { return extent_[d]; }
  [[nodiscard]] MEGA_HD constexpr bool empty() const noexcept { return size() == 0; }

  /// Number of elements.
  [[nodiscard]] MEGA_HD constexpr Index size() const noexcept {
    Index n = 1;
    for (int d = 0; d < R; ++d) n *= extent_[d];
    return n;
  }

  /// Product of all extents but the last: a matrix is rows() x cols() whatever its rank.
  [[nodiscard]] MEGA_HD constexpr Index rows() const noexcept {
    Index n = 1;
    for (int d = 0; d + 1 < R; ++d) n *= extent_[d];
    return n;
  }
  [[nodiscard]] MEGA_HD constexpr Index cols() const noexcept { return extent_[R - 1]; }

  template <class... At>
  requires(sizeof...(At) == R) [[nodiscard]] MEGA_HD constexpr T& operator()(
      At... position) const noexcept {
    const Index at[R] = {static_cast<Index>(position)...};
    Index offset = at[0];
    for (int d = 1; d < R; ++d) offset = offset * extent_[d] + at[d];
    return data_[offset];
  }

  /// Start of row `i` of the rows() x cols() matrix.
  [[nodiscard]] MEGA_HD constexpr T* row(Index i) const noexcept { return data_ + i * cols(); }

  /// The same elements as a matrix or as a vector.
  [[nodiscard]] MEGA_HD constexpr View<T, 2> matrix() const noexcept {
    return View<T, 2>(data_, rows(), cols());
  }
  [[nodiscard]] MEGA_HD constexpr View<T, 1> flat() const noexcept {
    return View<T, 1>(data_, size());
  }
  [[nodiscard]] constexpr std::span<T> span() const noexcept {
    return {data_, static_cast<std::size_t>(size())};
  }

  /// Elements [first, first + count) of the leading extent.
  [[nodiscard]] MEGA_HD constexpr View slice(Index first, Index count) const noexcept {
    View out = *this;
    Index stride = 1;
    for (int d = 1; d < R; ++d) stride *= extent_[d];
    out.data_ = data_ + first * stride;
    out.extent_[0] = count;
    return out;
  }

 private:
  T* data_ = nullptr;
  Index extent_[R] = {};
};

template <class T>
View(T*, Index) -> View<T, 1>;
template <class T>
View(T*, Index, Index) -> View<T, 2>;

template <class T>
using Vector = View<T, 1>;
template <class T>
using Matrix = View<T, 2>;

static_assert(std::is_trivially_copyable_v<View<float, 3>>);

}  // namespace mega::inline v0
