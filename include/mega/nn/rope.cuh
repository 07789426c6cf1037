/// @file  Rotary position embedding on a GPU. The host twins in nn/rope.hpp and
/// nn/rope_frequencies.hpp say what each operation does.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/rope.hpp>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <type_traits>
#include <vector>

namespace mega::inline v0::cuda {

namespace detail {

/// Numbers that travel as an argument of a kernel.
struct StoreNumbers {
  static constexpr Index capacity = 256;
  float* out;
  float value[capacity];
  __device__ void operator()(Index i) const { out[i] = value[i]; }
};

/// Packs of pairs that a thread has on their way while the angles are computed.
inline constexpr int rope_batch = 2;

/// One block a row: the angles are the same for all its heads. W divides half of the head dim.
template <int W, storage T>
MEGA_KERNEL void __launch_bounds__(block_threads)
    rotate_rows(T* qkv, const float* frequencies, nn::AttentionShape shape, Index first_position,
                float direction) {
  extern __shared__ __align__(16) float cosine[];
  const int half = static_cast<int>(shape.head_dim / 2), threads = static_cast<int>(blockDim.x);
  float* const sine = cosine + half;
  const int packs = half / W;
  const int turned = static_cast<int>(shape.query_heads + shape.kv_heads) * packs;
  for (Index r = blockIdx.x; r < shape.rows(); r += gridDim.x) {
    T* const row = qkv + r * shape.width();
    const auto first_of = [&](int k) { return row + k / packs * shape.head_dim + k % packs * W; };
    for (int begin = 0; begin < turned; begin += rope_batch * threads) {
      RawPack<T, W> first[rope_batch], second[rope_batch];
#pragma unroll
      for (int b = 0; b < rope_batch; ++b) {
        const int k = begin + b * threads + static_cast<int>(threadIdx.x);
        if (k >= turned) continue;
        first[b] = load_raw<W>(first_of(k));
        second[b] = load_raw<W>(first_of(k) + half);
      }
      if (begin == 0) {
        const auto position = static_cast<float>(first_position + r % shape.time);
        for (int i = threadIdx.x; i < half; i += threads) {
          const float angle = position * frequencies[i];
          cosine[i] = cosf(angle);
          sine[i] = direction * sinf(angle);
        }
        __syncthreads();
      }
#pragma unroll
      for (int b = 0; b < rope_batch; ++b) {
        const int k = begin + b * threads + static_cast<int>(threadIdx.x);
        if (k >= turned) continue;
        float x[W], y[W], turned_x[W], turned_y[W];
        unpack(x, first[b]);
        unpack(y, second[b]);
        const int i = k % packs * W;
#pragma unroll
        for (int w = 0; w < W; ++w) {
          turned_x[w] = x[w] * cosine[i + w] - y[w] * sine[i + w];
          turned_y[w] = y[w] * cosine[i + w] + x[w] * sine[i + w];
        }
        store_pack(first_of(k), turned_x);
        store_pack(first_of(k) + half, turned_y);
      }
    }
    __syncthreads();  // before the next row's angles
  }
}

template <storage T>
void rotate_pairs(Stream& stream, std::string_view op, Matrix<T> qkv,
                  Vector<const float> frequencies, nn::AttentionShape shape, Index first_position,
                  float direction) {
  nn::detail::expects_valid(op, shape);
  expects(shape.head_dim % 2 == 0, ErrorCode::logic,
          [&] { return sentence(op, ": head dim ", shape.head_dim, " is odd"); });
  nn::detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
  nn::detail::expects_size(op, "frequencies", frequencies, shape.head_dim / 2);
  with_width<T>(
      packs_fit(qkv.data(), shape.head_dim / 2), [&]<int W>(std::integral_constant<int, W>) {
        const Index turned = (shape.query_heads + shape.kv_heads) * (shape.head_dim / 2 / W);
        const auto threads = static_cast<unsigned>(std::min<Index>(
            block_threads, ceil_div(turned, Index{rope_batch} * warp_threads) * warp_threads));
        launch(stream, op, rotate_rows<W, T>, grid_x(shape.rows()), threads,
               sizeof(float) * static_cast<std::size_t>(shape.head_dim), qkv.data(),
               frequencies.data(), shape, first_position, direction);
      });
}

}  // namespace detail

/// The numbers are made on the host, so they have the bits of the host twin, and go to the GPU as
/// arguments of a kernel: no host memory has to outlive the call.
MEGA_LAUNCHES void rope_frequencies(Stream& stream, Vector<float> frequencies, double theta,
                                    nn::RopeScaling scaling) {
  std::vector<float> numbers(static_cast<std::size_t>(frequencies.size()));
  nn::rope_inverse_frequencies(Vector<float>(numbers.data(), frequencies.size()), theta, scaling);
  using Store = detail::StoreNumbers;
  for (Index first = 0; first < frequencies.size(); first += Store::capacity) {
    const Index count = std::min(Store::capacity, frequencies.size() - first);
    Store store{frequencies.data() + first, {}};
    std::copy_n(numbers.data() + first, count, store.value);
    detail::for_each_index(stream, "rope_frequencies", count, store);
  }
}

/// @cost  1 launch; reads and writes the query and key heads
template <storage T>
void rope_forward(Stream& stream, Matrix<T> qkv, Vector<const float> frequencies,
                  nn::AttentionShape shape, Index first_position) {
  detail::rotate_pairs(stream, "rope_forward", qkv, frequencies, shape, first_position, 1.0F);
}

template <storage T>
void rope_backward(Stream& stream, Matrix<T> dqkv, Vector<const float> frequencies,
                   nn::AttentionShape shape, Index first_position) {
  detail::rotate_pairs(stream, "rope_backward", dqkv, frequencies, shape, first_position, -1.0F);
}

}  // namespace mega::inline v0::cuda
