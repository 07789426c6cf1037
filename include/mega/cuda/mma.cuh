/// @file  Tensor-core products of a warp: bf16 or fp16 operands, fp32 sums, operands from swizzled
/// tiles in shared memory. For sm_80 and later.
///
/// The product is mma.m16n8k16, C += A B. With g = lane / 4 and t = lane % 4, a lane holds
///   of A, 16 x 16, four words:   A[g][2t], A[g + 8][2t], A[g][2t + 8], A[g + 8][2t + 8],
///   of B, 16 x 8, two words:     B[2t][g], B[2t + 8][g],
///   of C, 16 x 8, four floats:   C[g][2t], C[g][2t + 1], C[g + 8][2t], C[g + 8][2t + 1],
/// where a word of A holds also the next column and a word of B the next row, in its upper half.
/// So the tiles 2j and 2j + 1 of a row of C, rounded in pairs, are the A of rows 16j of the next
/// product, and need not leave their registers.
///
/// ldmatrix reads four matrices of 8 x 8; lanes 8i to 8i + 7 give the addresses of the rows of
/// matrix i, and a lane receives of each the two elements [g][2t], or with .trans [2t][g] and
/// [2t + 1][g].
/// Source: PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>

#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "mega: GPU code needs compute capability 8.0 or more; compile with -arch=sm_80 or above"
#endif

namespace mega::inline v0::cuda::detail {

[[nodiscard]] __device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x) % warp_threads;
}
[[nodiscard]] __device__ inline int warp_index() {
  return static_cast<int>(threadIdx.x) / warp_threads;
}

[[nodiscard]] __device__ inline std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

/// Copies 16 bytes from global to shared memory, or where not valid reads nothing and writes zeros.
/// Complete for this thread after its next wait_async_copies(), for the block after a barrier
/// behind that.
__device__ inline void copy_async_16(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_4(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
__device__ inline void wait_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ inline void load_matrices(std::uint32_t (&out)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address));
}
__device__ inline void load_transposed_matrices(std::uint32_t (&out)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address));
}

/// c += a b
/// @tparam T  here and below, what the words of operands hold two of
template <half_storage T>
__device__ inline void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// 2^x within 2 units of the last place; 0 where that is denormal.
[[nodiscard]] __device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Transposes 4 x 4 words among the four lanes that differ in the bits Step and 2 * Step of their
/// index: the n-th of them leaves with word n of each, in their order.
template <int Step>
__device__ inline void transpose_words(std::uint32_t (&word)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane_index() & (bit * Step)) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const std::uint32_t got =
          __shfl_xor_sync(0xffffffffU, upper ? word[i] : word[i | bit], bit * Step);
      word[i] = upper ? got : word[i];
      word[i | bit] = upper ? word[i | bit] : got;
    }
  }
}

/// Rows of Dim elements in shared memory. The 16-byte chunks of a row are permuted by exclusive or
/// with a key of the row, such that any chunk of 8 consecutive rows, which begin at a multiple of
/// 8, lies in 8 different groups of 4 banks: ldmatrix reads without conflicts. Rows of 128 and 256
/// bytes begin in the same bank, and have keys of 3 bits; two neighbouring rows of 64 or 192 bytes
/// begin 64 bytes apart, so a key of 2 bits serves two rows.
template <int Dim>
struct SwizzledTile {
  static_assert(Dim % 32 == 0);
  static constexpr int chunks = Dim / 8;
  static constexpr int row_bytes = 2 * Dim;

  [[nodiscard]] static MEGA_HD constexpr int bytes(int rows) noexcept { return rows * row_bytes; }
  [[nodiscard]] static __device__ int key(int row) {
    return chunks % 8 == 0 ? row % 8 : row / 2 % 4;
  }

  /// Begins to copy `rows` rows of `dim` elements, `width` apart; all else of the tile becomes 0.
  /// All threads of the block call it.
  /// @pre  dim is a multiple of 8; `from` and rows are aligned to 16 bytes; rows > 0
  template <int Rows, int Threads, half_storage T>
  static __device__ void load(std::uint32_t tile, const T* from, Index width, int rows, int dim) {
    static_assert(Rows * chunks % Threads == 0);
    constexpr int count = Rows * chunks / Threads, height = Threads / chunks;
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (Threads % chunks == 0 && height % 8 == 0) {
      // A thread's chunks lie below each other, and their rows have one key.
      const int row = thread / chunks, chunk = thread % chunks;
      const std::uint32_t to = tile + row * row_bytes + 16 * (chunk ^ key(row));
      const T* at = from + row * width + 8 * chunk;
      const int end = 8 * chunk < dim ? rows - row : 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        copy_async_16(to + i * height * row_bytes, at, i * height < end);
        at += height * width;
      }
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int row = (thread + i * Threads) / chunks, chunk = (thread + i * Threads) % chunks;
        copy_async_16(tile + row * row_bytes + 16 * (chunk ^ key(row)),
                      from + row * width + 8 * chunk, row < rows && 8 * chunk < dim);
      }
    }
  }
};

/// Where a lane points ldmatrix in a tile.
template <int Dim>
class TileReader {
  using Tile = SwizzledTile<Dim>;

 public:
  /// For blocks of 16 rows and 16 columns in the order [rows 0, columns 0], [8, 0], [0, 8], [8, 8]:
  /// A as it lies; with .trans two B, whose rows are the tile's rows.
  [[nodiscard]] static __device__ TileReader by_rows(std::uint32_t tile, int first_row) {
    return {tile, first_row + lane_index() % 16, lane_index() / 16};
  }
  /// In the order [0, 0], [0, 8], [8, 0], [8, 8]: two B, whose columns are the tile's rows.
  [[nodiscard]] static __device__ TileReader by_columns(std::uint32_t tile, int first_row) {
    return {tile, first_row + lane_index() % 8 + lane_index() / 16 * 8, lane_index() / 8 % 2};
  }

  /// Of the block that begins at `row`, a multiple of 8, and at column 16 * step. With a step known
  /// to the compiler, one of four sums that all blocks share, and a constant.
  [[nodiscard]] __device__ std::uint32_t address(int row, int step) const {
    return row_ + ((step % 4 * 32) ^ low_) + step / 4 * 128 + row * Tile::row_bytes;
  }

 private:
  __device__ TileReader(std::uint32_t tile, int row, int half)
      : row_(tile + row * Tile::row_bytes), low_(16 * (half ^ Tile::key(row))) {}

  std::uint32_t row_;
  std::uint32_t low_;  ///< below 128, so that it meets only the lower part of a column's place
};

/// 16 * M rows of a tile as the left operand of a warp: kept in registers, or read at each use.
template <int M, int Dim, bool Kept>
struct LeftOperand {
  TileReader<Dim> reader;
  std::uint32_t words[Kept ? Dim / 16 : 1][M][4];

  /// Once the tile is there.
  __device__ void keep() {
    if constexpr (Kept)
#pragma unroll
      for (int step = 0; step < Dim / 16; ++step) read(words[step], step);
  }
  __device__ void fragments(std::uint32_t (&a)[M][4], int step) const {
    if constexpr (Kept) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = words[step][m][i];
    } else {
      read(a, step);
    }
  }

 private:
  __device__ void read(std::uint32_t (&a)[M][4], int step) const {
#pragma unroll
    for (int m = 0; m < M; ++m) load_matrices(a[m], reader.address(16 * m, step));
  }
};

/// c = left right^T, the columns of c being the rows of right from `first` on.
template <half_storage T, int M, int Tiles, int Dim, bool Kept>
__device__ inline void multiply_transposed(float (&c)[M][Tiles][4],
                                           const LeftOperand<M, Dim, Kept>& left,
                                           const TileReader<Dim>& right, int first) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int j = 0; j < Tiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[m][j][i] = 0.0F;
#pragma unroll
  for (int step = 0; step < Dim / 16; ++step) {
    std::uint32_t a[M][4];
    left.fragments(a, step);
#pragma unroll
    for (int j = 0; j < Tiles; j += 2) {
      std::uint32_t b[4];
      load_matrices(b, right.address(first + 8 * j, step));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add<T>(c[m][j], a[m], b[0], b[1]);
        multiply_add<T>(c[m][j + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// sum += left right, the rows of right from `first` on being summed over.
template <half_storage T, int M, int Steps, int Dim>
__device__ inline void add_product(float (&sum)[M][Dim / 8][4],
                                   const std::uint32_t (&left)[M][Steps][4],
                                   const TileReader<Dim>& right, int first) {
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
#pragma unroll
    for (int j = 0; j < Dim / 8; j += 2) {
      std::uint32_t b[4];
      load_transposed_matrices(b, right.address(first + 16 * step, j / 2));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add<T>(sum[m][j], left[m][step], b[0], b[1]);
        multiply_add<T>(sum[m][j + 1], left[m][step], b[2], b[3]);
      }
    }
  }
}

/// Rounds a result into the left operand of add_product.
template <half_storage T, int M, int Tiles>
__device__ inline void round_to_left(std::uint32_t (&left)[M][Tiles / 2][4],
                                     const float (&c)[M][Tiles][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
      left[m][j / 2][j % 2 * 2] = pack_pair<T>(c[m][j][0], c[m][j][1]);
      left[m][j / 2][j % 2 * 2 + 1] = pack_pair<T>(c[m][j][2], c[m][j][3]);
    }
}

/// Stores a warp's rows, row r times factor(m, h) with r = 16 m + 8 h + lane / 4: `rows` of them,
/// `dim` elements each, `width` apart.
/// @pre  dim is a multiple of 8; `to` and rows are aligned to 16 bytes
template <half_storage T, int M, int Tiles, class Factor>
__device__ inline void store_rows(T* to, Index width, int rows, int dim,
                                  const float (&c)[M][Tiles][4], const Factor& factor) {
  const int lane = lane_index();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * m + 8 * h + lane / 4;
      const float f = factor(m, h);
#pragma unroll
      for (int j = 0; j < Tiles; j += 4) {
        // Four lanes share a row, two columns of each tile: they trade, for a tile each.
        std::uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word[i] = pack_pair<T>(f * c[m][j + i][2 * h], f * c[m][j + i][2 * h + 1]);
        transpose_words<1>(word);
        const int column = 8 * (j + lane % 4);
        if (row < rows && column < dim)
          *reinterpret_cast<uint4*>(to + row * width + column) =
              uint4{word[0], word[1], word[2], word[3]};
      }
    }
}

}  // namespace mega::inline v0::cuda::detail
