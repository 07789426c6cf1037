/// @file  Matrix product of the host: the concept, and a model of it that needs no library.
#pragma once
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/detail/scratch.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <string_view>
#include <utility>

namespace mega::inline v0::nn {

/// Whether a matrix enters a product as it is stored or transposed.
enum class Transpose : std::uint8_t { no, yes };

/// P::gemm(stream, trans_a, trans_b, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc) queues
/// C = alpha * op(A) op(B) + beta * C with op(A) m x k, op(B) k x n, C m x n, all row-major. A and
/// B hold P::element; C holds that or, as accumulator of gradients, float. Sums are fp32.
/// @law  beta == 0 overwrites C whatever it held; k == 0 scales C by beta.
template <class P, class Stream>
concept matrix_product = requires(Stream& stream, Transpose trans, Index n, float factor,
                                  const typename P::element* in, typename P::element* out,
                                  float* sums) {
  P::gemm(stream, trans, trans, n, n, n, factor, in, n, in, n, factor, out, n);
  P::gemm(stream, trans, trans, n, n, n, factor, in, n, in, n, factor, sums, n);
};

/// Optional: products with something behind the sum, on matrices whose rows are as long as this
/// accepts.
template <class P>
concept fuses_after_sum = requires(Index row) {
  { P::fuses_rows_of(row) } -> std::same_as<bool>;
};

/// C = op(A) op(B) + bias in each row, in one call.
template <class P, class Stream>
concept fuses_bias = fuses_after_sum<P> &&
    requires(Stream& stream, Transpose trans, Index n, const typename P::element* in,
             typename P::element* out) {
  P::gemm_bias(stream, trans, trans, n, n, n, in, n, in, n, in, out, n);
};

/// C = (op(A) op(B)) * gelu_tanh'(pre), element by element, in one call.
template <class P, class Stream>
concept fuses_gelu_backward = fuses_after_sum<P> &&
    requires(Stream& stream, Transpose trans, Index n, const typename P::element* in,
             typename P::element* out) {
  P::gemm_dgelu(stream, trans, trans, n, n, n, in, n, in, n, in, out, n);
};

namespace detail {

struct GemmArguments {
  Transpose trans_a, trans_b;
  Index m, n, k;
  float alpha;
  const float* a;
  Index lda;
  const float* b;
  Index ldb;
  float beta;
  float* c;
  Index ldc;
};

/// c = a b, or c += a b, for one tile whose height is the number of Row indices and whose width is
/// two vectors. a holds k columns of the tile's rows, b holds k rows of the tile's columns.
template <class Isa, int... Row>
[[gnu::always_inline]] inline void multiply_tile(std::integer_sequence<int, Row...>, Index k,
                                                 const float* a, const float* b, float* c,
                                                 Index ldc, bool accumulate) {
  using Vector = typename Isa::Vector;
  using Unaligned = typename Isa::Unaligned;
  constexpr int rows = sizeof...(Row);
  constexpr int width = sizeof(Vector) / sizeof(float);
  Vector left[rows] = {};
  Vector right[rows] = {};
  for (Index p = 0; p < k; ++p) {
    const Vector b_left = *reinterpret_cast<const Unaligned*>(b);
    const Vector b_right = *reinterpret_cast<const Unaligned*>(b + width);
    ((left[Row] += a[Row] * b_left, right[Row] += a[Row] * b_right), ...);
    a += rows;
    b += 2 * width;
  }
  if (accumulate) {
    ((left[Row] += *reinterpret_cast<const Unaligned*>(c + Row * ldc),
      right[Row] += *reinterpret_cast<const Unaligned*>(c + Row * ldc + width)),
     ...);
  }
  ((*reinterpret_cast<Unaligned*>(c + Row * ldc) = left[Row],
    *reinterpret_cast<Unaligned*>(c + Row * ldc + width) = right[Row]),
   ...);
}

// One struct an instruction set: its vector, and the tile that fills its registers. Rows x two
// vectors of sums, plus one row of b and one broadcast element of a, must fit.
struct Baseline {
  typedef float Vector __attribute__((vector_size(16)));
  typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
  static constexpr int rows = 6;
  static constexpr int cols = 8;
  static void tile(Index k, const float* a, const float* b, float* c, Index ldc, bool accumulate) {
    multiply_tile<Baseline>(std::make_integer_sequence<int, rows>{}, k, a, b, c, ldc, accumulate);
  }
};

#if defined(__x86_64__)
struct Avx2 {
  typedef float Vector __attribute__((vector_size(32)));
  typedef float Unaligned __attribute__((vector_size(32), aligned(4), may_alias));
  static constexpr int rows = 6;
  static constexpr int cols = 16;
  [[gnu::target("avx2,fma")]] static void tile(Index k, const float* a, const float* b, float* c,
                                               Index ldc, bool accumulate) {
    multiply_tile<Avx2>(std::make_integer_sequence<int, rows>{}, k, a, b, c, ldc, accumulate);
  }
};

struct Avx512 {
  typedef float Vector __attribute__((vector_size(64)));
  typedef float Unaligned __attribute__((vector_size(64), aligned(4), may_alias));
  static constexpr int rows = 12;
  static constexpr int cols = 32;
  [[gnu::target("avx512f")]] static void tile(Index k, const float* a, const float* b, float* c,
                                              Index ldc, bool accumulate) {
    multiply_tile<Avx512>(std::make_integer_sequence<int, rows>{}, k, a, b, c, ldc, accumulate);
  }
};
#endif

/// Copies a block of `length` x `depth` elements into panels of `Width` elements by `depth`;
/// element (i, p) lies at x[i * stride + p * depth_stride]. The last panel is filled up with zeros:
/// what they give is not stored, but stale numbers could overflow.
template <int Width>
void pack_panels(float* out, const float* x, Index length, Index depth, Index stride,
                 Index depth_stride, float factor) {
  for (Index first = 0; first < length; first += Width, out += Width * depth) {
    const float* panel = x + first * stride;
    const Index filled = std::min<Index>(Width, length - first);
    if (filled < Width) std::fill(out, out + Width * depth, 0.0f);
    if (stride == 1 && filled == Width) {
      for (Index p = 0; p < depth; ++p)
        for (Index i = 0; i < Width; ++i) out[p * Width + i] = factor * panel[p * depth_stride + i];
    } else if (stride == 1) {
      for (Index p = 0; p < depth; ++p)
        for (Index i = 0; i < filled; ++i)
          out[p * Width + i] = factor * panel[p * depth_stride + i];
    } else {
      for (Index i = 0; i < filled; ++i)
        for (Index p = 0; p < depth; ++p)
          out[p * Width + i] = factor * panel[i * stride + p * depth_stride];
    }
  }
}

inline void scale_block(float* c, Index rows, Index cols, Index ldc, float factor) {
  if (factor == 1.0f) return;
  for (Index r = 0; r < rows; ++r) {
    float* row = c + r * ldc;
    if (factor == 0.0f) {
      std::fill(row, row + cols, 0.0f);
    } else {
      for (Index j = 0; j < cols; ++j) row[j] *= factor;
    }
  }
}

/// The products of one element are added in ascending k inside a block of `depth`, the blocks in
/// ascending order; alpha is multiplied into A while packing and beta into C beforehand, so that no
/// tile position and no remainder rounds differently.
/// Source: the loop order of Goto and van de Geijn, "Anatomy of high-performance matrix
/// multiplication", ACM TOMS 34(3), 2008.
template <class Isa>
void multiply_blocked(const GemmArguments& g) {
  struct BlockOfA {};
  struct BlockOfB {};
  constexpr Index depth = 256;                           // one panel of b stays in the first level
  constexpr Index height = 192 / Isa::rows * Isa::rows;  // the block of a stays in the second
  constexpr Index width = 2048 / Isa::cols * Isa::cols;  // the block of b stays in the last
  static_assert(height % Isa::rows == 0 && width % Isa::cols == 0);

  const Index a_row = g.trans_a == Transpose::no ? g.lda : 1;
  const Index a_col = g.trans_a == Transpose::no ? 1 : g.lda;
  const Index b_row = g.trans_b == Transpose::no ? g.ldb : 1;
  const Index b_col = g.trans_b == Transpose::no ? 1 : g.ldb;
  const auto padded = [](Index x, Index unit) { return (x + unit - 1) / unit * unit; };
  const Index k_max = std::min(depth, g.k);
  float* const block_a = scratch<BlockOfA>(padded(std::min(height, g.m), Isa::rows) * k_max);
  float* const block_b = scratch<BlockOfB>(padded(std::min(width, g.n), Isa::cols) * k_max);
  alignas(64) float edge[Isa::rows * Isa::cols];

  if (g.beta != 0.0f) scale_block(g.c, g.m, g.n, g.ldc, g.beta);
  for (Index j0 = 0; j0 < g.n; j0 += width) {
    const Index n = std::min(width, g.n - j0);
    for (Index p0 = 0; p0 < g.k; p0 += depth) {
      const Index k = std::min(depth, g.k - p0);
      const bool accumulate = p0 > 0 || g.beta != 0.0f;
      pack_panels<Isa::cols>(block_b, g.b + p0 * b_row + j0 * b_col, n, k, b_col, b_row, 1.0f);
      for (Index i0 = 0; i0 < g.m; i0 += height) {
        const Index m = std::min(height, g.m - i0);
        pack_panels<Isa::rows>(block_a, g.a + i0 * a_row + p0 * a_col, m, k, a_row, a_col, g.alpha);
        for (Index j = 0; j < n; j += Isa::cols) {
          for (Index i = 0; i < m; i += Isa::rows) {
            const float* a = block_a + i * k;
            const float* b = block_b + j * k;
            float* c = g.c + (i0 + i) * g.ldc + j0 + j;
            const Index rows = std::min<Index>(Isa::rows, m - i);
            const Index cols = std::min<Index>(Isa::cols, n - j);
            if (rows == Isa::rows && cols == Isa::cols) {
              Isa::tile(k, a, b, c, g.ldc, accumulate);
              continue;
            }
            Isa::tile(k, a, b, edge, Isa::cols, false);
            for (Index r = 0; r < rows; ++r)
              for (Index x = 0; x < cols; ++x)
                c[r * g.ldc + x] = accumulate ? c[r * g.ldc + x] + edge[r * Isa::cols + x]
                                              : edge[r * Isa::cols + x];
          }
        }
      }
    }
  }
}

/// The product in the calling thread, with the widest vectors that this processor has and C fills.
/// Avx2 and Avx512 do the same fused operations on each element, so the choice between them, which
/// looks at n, changes no bit. A template, so that programs with another product do not compile the
/// kernels.
template <class = void>
void multiply(const GemmArguments& g) {
  if (g.m <= 0 || g.n <= 0) return;
  if (g.k <= 0 || g.alpha == 0.0f) return scale_block(g.c, g.m, g.n, g.ldc, g.beta);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && g.n > Avx2::cols) return multiply_blocked<Avx512>(g);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return multiply_blocked<Avx2>(g);
#endif
  multiply_blocked<Baseline>(g);
}

}  // namespace detail

/// Matrix product in plain C++ with the compilers' vector extension: packed, blocked, one thread.
/// @determinism  bitwise: an element's value depends on its row of op(A), its column of op(B), k
///               and the vector width of the processor, not on m, n or its place in the tiles
/// @cost         2 m n k operations; packing buffers of at most 2.3 MB a thread, grown once
struct PortableProduct {
  using element = float;
  static constexpr std::string_view name = "portable";

  /// @pre   C overlaps neither A nor B; lda, ldb, ldc are at least the stored row lengths
  /// @sync  ordered on stream
  template <host::host_stream S>
  static void gemm(S& stream, Transpose trans_a, Transpose trans_b, Index m, Index n, Index k,
                   float alpha, const float* a, Index lda, const float* b, Index ldb, float beta,
                   float* c, Index ldc) {
    const detail::GemmArguments arguments{trans_a, trans_b, m,   n,    k, alpha, a,
                                          lda,     b,       ldb, beta, c, ldc};
    stream.run([arguments] { detail::multiply(arguments); });
  }
};

static_assert(matrix_product<PortableProduct, host::Stream>);

}  // namespace mega::inline v0::nn
