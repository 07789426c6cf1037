/// @file  Packs: neighbours that move in one access as they are stored and are computed with as
/// floats, and the loops over arrays of them.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/stream.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace mega::inline v0::cuda::detail {

/// Elements of the widest access, 16 bytes.
template <storage T>
inline constexpr int pack_size = 16 / static_cast<int>(sizeof(T));

/// W neighbours as stored. W = 1 is what odd widths and addresses are left with.
template <storage T, int W>
struct RawPack {
  static constexpr int bytes = W * static_cast<int>(sizeof(T));
  using Access = std::conditional_t<W == 1, T, std::conditional_t<bytes % 16 == 0, uint4, uint2>>;
  static constexpr int accesses = bytes / static_cast<int>(sizeof(Access));
  static_assert(bytes == accesses * static_cast<int>(sizeof(Access)));

  Access part[accesses];
};

/// @pre  here and below: the address is a multiple of the size of an access
template <int W, storage T>
[[nodiscard]] __device__ inline RawPack<T, W> load_raw(const T* from) {
  using Raw = RawPack<T, W>;
  Raw raw;
#pragma unroll
  for (int i = 0; i < Raw::accesses; ++i)
    raw.part[i] = reinterpret_cast<const typename Raw::Access*>(from)[i];
  return raw;
}

/// Two neighbours as one word, the first in the lower half.
template <half_storage T>
[[nodiscard]] __device__ inline std::uint32_t pack_pair(float first, float second) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}
template <half_storage T>
[[nodiscard]] __device__ inline float2 unpack_pair(std::uint32_t word) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000U)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}

template <storage T, int W>
__device__ inline void unpack(float (&out)[W], const RawPack<T, W>& raw) {
  if constexpr (W == 1) {
    out[0] = raw.part[0];
  } else {
    const auto* const word = reinterpret_cast<const std::uint32_t*>(raw.part);
#pragma unroll
    for (int i = 0; i < RawPack<T, W>::bytes / 4; ++i) {
      if constexpr (half_storage<T>) {
        const float2 pair = unpack_pair<T>(word[i]);
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
      } else {
        out[i] = __uint_as_float(word[i]);
      }
    }
  }
}

template <storage T, int W>
__device__ inline void load_pack(float (&out)[W], const T* from) {
  unpack(out, load_raw<W>(from));
}

/// The same through the path of constant data.
/// @pre  nothing writes to the memory while the kernel runs, so loads may pass over its stores
template <storage T, int W>
__device__ inline void load_constant(float (&out)[W], const T* from) {
  using Raw = RawPack<T, W>;
  if constexpr (W == 1) {
    out[0] = *from;
  } else {
    Raw raw;
#pragma unroll
    for (int i = 0; i < Raw::accesses; ++i)
      raw.part[i] = __ldg(reinterpret_cast<const typename Raw::Access*>(from) + i);
    unpack(out, raw);
  }
}

template <storage T, int W>
__device__ inline void store_pack(T* to, const float (&in)[W]) {
  using Raw = RawPack<T, W>;
  if constexpr (W == 1) {
    *to = T(in[0]);
  } else {
    Raw raw;
    auto* const word = reinterpret_cast<std::uint32_t*>(raw.part);
#pragma unroll
    for (int i = 0; i < Raw::bytes / 4; ++i) {
      if constexpr (half_storage<T>) {
        word[i] = pack_pair<T>(in[2 * i], in[2 * i + 1]);
      } else {
        word[i] = __float_as_uint(in[i]);
      }
    }
    // An assignment would leave the compiler free to take the access apart, and it does.
#pragma unroll
    for (int i = 0; i < Raw::accesses; ++i)
      __stwb(reinterpret_cast<typename Raw::Access*>(to) + i, raw.part[i]);
  }
}

/// The values that store_pack() leaves in memory.
template <storage T, int W>
__device__ inline void round_pack(float (&inout)[W]) {
  if constexpr (W == 1) {
    inout[0] = T(inout[0]);
  } else if constexpr (half_storage<T>) {
#pragma unroll
    for (int i = 0; i < W; i += 2) {
      const float2 pair = unpack_pair<T>(pack_pair<T>(inout[i], inout[i + 1]));
      inout[i] = pair.x;
      inout[i + 1] = pair.y;
    }
  }
}

/// Whether rows of `cols` elements from `data` on can be moved in packs.
template <class T>
[[nodiscard]] inline bool packs_fit(const T* data, Index cols) noexcept {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         cols * static_cast<Index>(sizeof(T)) % 16 == 0;
}
/// The same of several operands with rows of one length; a null pointer is no obstacle.
template <class... T>
[[nodiscard]] inline bool all_packs_fit(Index cols, const T*... data) noexcept {
  return (packs_fit(data, cols) && ...);
}

/// f(integral_constant<int, W>) with the width of the accesses.
template <storage T, class F>
void with_width(bool packs, F f) {
  if (packs) {
    f(std::integral_constant<int, pack_size<T>>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

template <int W, class Body>
MEGA_KERNEL void run_each_pack(Index rows, Index cols, Body body) {
  const Index c = (static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x) * W;
  if (c >= cols) return;
  const Index step = static_cast<Index>(gridDim.y) * blockDim.y;
  for (Index r = static_cast<Index>(blockIdx.y) * blockDim.y + threadIdx.y; r < rows; r += step)
    body.template at<W>(r, c);
}

/// body.at<W>(r, c) for every pack of a matrix, neighbours of a row in neighbouring threads.
/// @pre  W divides cols
template <int W, class Body>
void for_each_pack(Stream& stream, std::string_view op, Index rows, Index cols, Body body) {
  const Index packs = ceil_div(cols, W);
  const auto across = static_cast<unsigned>(
      std::min<Index>(ceil_div(packs, warp_threads) * warp_threads, block_threads));
  if (across == 0) return;
  const dim3 block(across, block_threads / across);
  launch(stream, op, run_each_pack<W, Body>,
         dim3(grid_x(ceil_div(packs, across)), grid_yz(ceil_div(rows, block.y))), block, 0, rows,
         cols, body);
}

/// Packs that a thread has on their way at a time where nothing else keeps memory busy.
inline constexpr int map_batch = 2;

template <int W, int Inputs, class F, storage T, storage In>
MEGA_KERNEL void __launch_bounds__(block_threads)
    map_packs(Index n, T* out, const In* a, const In* b, F f) {
  static_assert(Inputs == 1 || Inputs == 2);
  const auto value = [&](float x, float y) {
    if constexpr (Inputs == 1) {
      return f(x);
    } else {
      return f(x, y);
    }
  };
  const Index first =
      (static_cast<Index>(blockIdx.x) * map_batch * block_threads + threadIdx.x) * W;
  // All loads come before the first store, which might hit what is still to be loaded.
  RawPack<In, W> raw[map_batch][Inputs];
#pragma unroll
  for (int k = 0; k < map_batch; ++k) {
    const Index i = first + k * block_threads * W;
    if (i + W > n) continue;
    raw[k][0] = load_raw<W>(a + i);
    if constexpr (Inputs == 2) raw[k][1] = load_raw<W>(b + i);
  }
#pragma unroll
  for (int k = 0; k < map_batch; ++k) {
    const Index i = first + k * block_threads * W;
    if (i + W <= n) {
      float x[W], y[W];
      unpack(x, raw[k][0]);
      unpack(y, raw[k][Inputs - 1]);
#pragma unroll
      for (int w = 0; w < W; ++w) x[w] = value(x[w], y[w]);
      store_pack(out + i, x);
    } else {
#pragma unroll 1
      for (Index j = i; j < n; ++j) out[j] = T(value(a[j], Inputs == 2 ? b[j] : a[j]));
    }
  }
}

/// out[i] = f(a[i]) or f(a[i], b[i]) for 0 <= i < n. out may be an input of the same storage.
template <int Inputs, class F, storage T, storage In>
void map(Stream& stream, std::string_view op, Index n, T* out, const In* a, const In* b, F f) {
  // The wider storage gives the number of elements of 16 bytes.
  constexpr int width = std::min(pack_size<T>, pack_size<In>);
  const auto run = [&]<int W>(std::integral_constant<int, W>) {
    launch(stream, op, map_packs<W, Inputs, F, T, In>,
           grid_x(ceil_div(n, map_batch * block_threads * W)), block_threads, 0, n, out, a, b, f);
  };
  if (all_packs_fit(Index{0}, out, a, b)) {
    run(std::integral_constant<int, width>{});
  } else {
    run(std::integral_constant<int, 1>{});
  }
}

}  // namespace mega::inline v0::cuda::detail
