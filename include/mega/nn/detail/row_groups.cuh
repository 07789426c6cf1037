/// @file  Groups of warps that each work through rows of matrices, with the next rows on their way
/// from memory meanwhile: in registers, or in shared memory.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/mma.cuh>
#include <mega/cuda/pack.cuh>

#include <cstdint>

namespace mega::inline v0::cuda::detail {

/// A block of Groups groups, which have a row each at a time; the lanes of Warps warps with Packs
/// packs each cover a row. A kernel's blocks are (threads of a group) x (groups).
template <int Warps, int Packs, int Groups>
struct RowGroups {
  static constexpr int warps = Warps, packs = Packs, groups = Groups;
  static constexpr int row_threads = Warps * warp_threads, threads = row_threads * Groups;
  static_assert(threads <= 1024 && Groups < 16);  // barriers 1 to 15 are the groups'

  /// First column of the calling thread's k-th pack of W.
  template <int W>
  [[nodiscard]] static __device__ Index column(int k) {
    return (static_cast<Index>(k) * row_threads + threadIdx.x) * W;
  }
  [[nodiscard]] static __device__ Index first_row() {
    return static_cast<Index>(blockIdx.x) * Groups + threadIdx.y;
  }
  [[nodiscard]] static __device__ Index row_step() {
    return static_cast<Index>(gridDim.x) * Groups;
  }
  /// First of the rows that the block has in the turn in which the calling group has row r.
  [[nodiscard]] static __device__ Index block_row(Index r) { return r - threadIdx.y; }
};

/// All threads of a group meet.
template <class Shape>
__device__ inline void group_barrier() {
  if constexpr (Shape::warps == 1) {
    __syncwarp();
  } else if constexpr (Shape::groups == 1) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1U), "n"(Shape::row_threads) : "memory");
  }
}

/// Sums over the threads of a group, in an order that Warps alone decides; `turn` counts the calls.
/// One barrier of the group: what a call writes is written again two calls later, when all threads
/// have read it.
template <class Shape, int N>
__device__ inline void group_reduce(float (&value)[N], int turn) {
#pragma unroll
  for (int distance = warp_threads / 2; distance > 0; distance /= 2)
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] += __shfl_xor_sync(0xffffffffU, value[n], distance);
  if constexpr (Shape::warps > 1) {
    __shared__ float of_warp[2][Shape::groups][Shape::warps][N];
    auto& sums = of_warp[turn & 1][threadIdx.y];
    if (threadIdx.x % warp_threads == 0)
#pragma unroll
      for (int n = 0; n < N; ++n) sums[threadIdx.x / warp_threads][n] = value[n];
    group_barrier<Shape>();
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] = 0.0F;
#pragma unroll
    for (int w = 0; w < Shape::warps; ++w)
#pragma unroll
      for (int n = 0; n < N; ++n) value[n] += sums[w][n];
  }
}

/// Loads that stay where they stand: one for the next turn does not sink below this turn's work.
[[nodiscard]] __device__ inline uint4 load_pack_early(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
[[nodiscard]] __device__ inline float load_early(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}

/// The rows of a group of Parts matrices of one shape, one row ahead in registers. For each row in
/// turn: begin(r), then pack(part, k). Packs beyond the last column are zero.
template <class Shape, int Parts, storage T>
class RowsInRegisters {
 public:
  static constexpr int W = pack_size<T>;

  __device__ RowsInRegisters(const T* const (&from)[Parts], Index rows, Index cols)
      : rows_(rows), cols_(cols) {
#pragma unroll
    for (int p = 0; p < Parts; ++p) from_[p] = from[p];
    load(Shape::first_row());
  }
  __device__ void begin(Index r) {
#pragma unroll
    for (int p = 0; p < Parts; ++p)
#pragma unroll
      for (int k = 0; k < Shape::packs; ++k) row_[p][k] = next_[p][k];
    load(r + Shape::row_step());
  }
  [[nodiscard]] __device__ RawPack<T, W> pack(int part, int k) const {
    return {{row_[part][k]}};
  }

 private:
  __device__ void load(Index r) {
#pragma unroll
    for (int p = 0; p < Parts; ++p)
#pragma unroll
      for (int k = 0; k < Shape::packs; ++k) {
        const Index c = Shape::template column<W>(k);
        next_[p][k] = uint4{};
        if (r < rows_ && c < cols_) next_[p][k] = load_pack_early(from_[p] + r * cols_ + c);
      }
  }

  const T* from_[Parts];
  Index rows_, cols_;
  uint4 row_[Parts][Shape::packs], next_[Parts][Shape::packs];
};

/// The rows of a group of Parts matrices of one shape, several of them on their way to a ring in
/// shared memory. For each row in turn: begin(), then pack(part, k) as often as wanted, then
/// end(r). Each thread copies what it itself reads, so no thread waits for another. A null matrix
/// is zero, and so are packs beyond the last column.
template <class Shape, int Depth, int Parts, storage T>
class RowRing {
 public:
  static constexpr int W = pack_size<T>;
  static constexpr std::uint32_t pack_bytes = 16U * Shape::threads;  ///< from a pack to the next
  static constexpr std::uint32_t stage_bytes = pack_bytes * Parts * Shape::packs;

  /// @param shared  depth * stage_bytes, aligned to 16
  /// @param depth  rows on their way, from 2 to Depth
  __device__ RowRing(unsigned char* shared, int depth, const T* const (&from)[Parts], Index rows,
                     Index cols)
      : rows_(rows), cols_(cols), depth_(depth) {
    own_ = shared_address(shared) + 16U * (threadIdx.y * Shape::row_threads + threadIdx.x);
#pragma unroll
    for (int p = 0; p < Parts; ++p) from_[p] = from[p];
#pragma unroll 1
    for (int d = 0; d < depth; ++d)
      fill(own_ + static_cast<std::uint32_t>(d) * stage_bytes,
           Shape::first_row() + d * Shape::row_step());
  }
  __device__ void begin() const {
    wait<Depth>();
  }
  [[nodiscard]] __device__ RawPack<T, W> pack(int part, int k) const {
    const std::uint32_t at =
        own_ + stage_ + static_cast<std::uint32_t>(part * Shape::packs + k) * pack_bytes;
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return {{v}};
  }
  /// This thread reads no more of row r.
  __device__ void end(Index r) {
    fill(own_ + stage_, r + depth_ * Shape::row_step());
    stage_ += stage_bytes;
    if (stage_ == static_cast<std::uint32_t>(depth_) * stage_bytes) stage_ = 0;
  }

 private:
  /// For all but the newest depth - 1 rows. The instruction takes constants alone.
  template <int D>
  __device__ void wait() const {
    if constexpr (D > 2)
      if (depth_ < D) return wait<D - 1>();
    asm volatile("cp.async.wait_group %0;" ::"n"(D - 1) : "memory");
  }
  __device__ void fill(std::uint32_t to, Index r) const {
    if (r < rows_) {
#pragma unroll
      for (int p = 0; p < Parts; ++p)
#pragma unroll
        for (int k = 0; k < Shape::packs; ++k) {
          const Index c = Shape::template column<W>(k);
          copy_async_16(to + static_cast<std::uint32_t>(p * Shape::packs + k) * pack_bytes,
                        from_[p] + r * cols_ + c, from_[p] != nullptr && c < cols_);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");  // also where empty, to keep the count
  }

  const T* from_[Parts];
  Index rows_, cols_;
  int depth_;
  std::uint32_t own_, stage_ = 0;
};

}  // namespace mega::inline v0::cuda::detail
