/// @file  Reduction of the buffers of many ranks along the canonical tree, block by block.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/config.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>

namespace mega::inline v0::comm {

/// Element types that can be summed and compared.
template <class T>
concept reducible = element<T> && !std::same_as<T, std::byte>;

/// The combination of two operands, the left one from the lower ranks. A NaN wins every max.
template <reducible T>
[[nodiscard]] MEGA_HD constexpr T combine(Reduce reduce, T left, T right) noexcept {
  if (reduce == Reduce::sum) return static_cast<T>(left + right);
  return left < right || right != right ? right : left;
}

/// Elements [first, first + count) of a buffer.
struct Piece {
  Index first = 0;
  Index count = 0;
};

/// Share `part` of `count` elements cut into `parts`, on cache-line borders so that two ranks never
/// write to one line. Late parts may be empty.
[[nodiscard]] constexpr Piece share_of(Index count, int part, int parts) noexcept {
  constexpr Index line = 64;
  const Index lines = (count + line - 1) / line;
  const Index first = std::min(count, lines * part / parts * line);
  return {first, std::min(count, lines * (part + 1) / parts * line) - first};
}

namespace detail {

/// Large enough to hide the walk over the tree, small enough to keep a level of it in cache.
inline constexpr Index block_elements = 1024;

// Two loops, since only a promise of no overlap lets compilers vectorise them.
template <Reduce Op, class T>
void combine_onto(T* MEGA_RESTRICT left, const T* MEGA_RESTRICT right, Index count) {
  for (Index i = 0; i < count; ++i) left[i] = combine(Op, left[i], right[i]);
}
template <Reduce Op, class T>
void combine_into(T* MEGA_RESTRICT out, const T* MEGA_RESTRICT left, const T* MEGA_RESTRICT right,
                  Index count) {
  for (Index i = 0; i < count; ++i) out[i] = combine(Op, left[i], right[i]);
}

/// Reduces elements [first, first + count) of operands lo .. hi - 1, count <= block_elements.
/// @return  `out`, or the operand itself when it is the only one
template <Reduce Op, class T, class Operand>
const T* reduce_block(int lo, int hi, const Operand& operand, Piece piece, T* out) {
  if (hi - lo == 1) return operand(lo) + piece.first;
  alignas(64) T upper[block_elements];
  const int middle = tree_middle(lo, hi);
  const T* left = reduce_block<Op>(lo, middle, operand, piece, out);
  const T* right = reduce_block<Op>(middle, hi, operand, piece, upper);
  if (left == out)
    combine_onto<Op>(out, right, piece.count);
  else
    combine_into<Op>(out, left, right, piece.count);
  return out;
}

template <Reduce Op, class T, class Operand, class Store>
void reduce_blocks(int operands, const Operand& operand, Piece piece, const Store& store) {
  alignas(64) T lower[block_elements];
  const Index end = piece.first + piece.count;
  for (Index first = piece.first; first < end; first += block_elements) {
    const Piece block{first, std::min(block_elements, end - first)};
    store(block, reduce_block<Op, T>(0, operands, operand, block, lower));
  }
}

}  // namespace detail

/// Reduces `piece` of the buffers operand(0) .. operand(operands - 1), each a const T*, and hands
/// every finished block to store(Piece, const T* values). A block's operands are read before it is
/// stored, so the result may overwrite them.
/// @cost  reads operands * piece.count elements once; no allocation
/// @determinism  the bits of tree_reduce() of each element
template <reducible T, class Operand, class Store>
void reduce_along_tree(Reduce reduce, int operands, const Operand& operand, Piece piece,
                       const Store& store) {
  if (reduce == Reduce::sum)
    detail::reduce_blocks<Reduce::sum, T>(operands, operand, piece, store);
  else
    detail::reduce_blocks<Reduce::max, T>(operands, operand, piece, store);
}

}  // namespace mega::inline v0::comm
