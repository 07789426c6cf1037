/// @file  Rotary position embedding on a GPU. The host twins in nn/rope.hpp and
/// nn/rope_frequencies.hpp say what each operation does.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/rope.hpp>

#include <algorithm>
#include <cstddef>
#include <string_view>
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

/// One block a row: the angles are the same for all its heads.
template <int Threads>
MEGA_KERNEL void rotate_rows(float* qkv, const float* frequencies, nn::AttentionShape shape,
                             Index first_position, float direction) {
  extern __shared__ float cosine[];
  const int half = static_cast<int>(shape.head_dim / 2);
  float* const sine = cosine + half;
  const Index turned = (shape.query_heads + shape.kv_heads) * half;
  for (Index r = blockIdx.x; r < shape.rows(); r += gridDim.x) {
    const auto position = static_cast<float>(first_position + r % shape.time);
    for (int i = threadIdx.x; i < half; i += Threads) {
      const float angle = position * frequencies[i];
      cosine[i] = cosf(angle);
      sine[i] = direction * sinf(angle);
    }
    __syncthreads();
    float* const row = qkv + r * shape.width();
    for (Index k = threadIdx.x; k < turned; k += Threads) {
      const int i = static_cast<int>(k % half);
      float& first = row[k / half * shape.head_dim + i];
      float& second = (&first)[half];
      const float x = first, y = second;
      first = x * cosine[i] - y * sine[i];
      second = y * cosine[i] + x * sine[i];
    }
    __syncthreads();
  }
}

MEGA_LAUNCHES void rotate_pairs(Stream& stream, std::string_view op, Matrix<float> qkv,
                                Vector<const float> frequencies, nn::AttentionShape shape,
                                Index first_position, float direction) {
  nn::detail::expects_valid(op, shape);
  expects(shape.head_dim % 2 == 0, ErrorCode::logic,
          [&] { return sentence(op, ": head dim ", shape.head_dim, " is odd"); });
  nn::detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
  nn::detail::expects_size(op, "frequencies", frequencies, shape.head_dim / 2);
  launch(stream, op, rotate_rows<block_threads>, grid_x(shape.rows()), block_threads,
         sizeof(float) * static_cast<std::size_t>(shape.head_dim), qkv.data(), frequencies.data(),
         shape, first_position, direction);
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

MEGA_LAUNCHES void rope_forward(Stream& stream, Matrix<float> qkv, Vector<const float> frequencies,
                                nn::AttentionShape shape, Index first_position) {
  detail::rotate_pairs(stream, "rope_forward", qkv, frequencies, shape, first_position, 1.0F);
}

MEGA_LAUNCHES void rope_backward(Stream& stream, Matrix<float> dqkv,
                                 Vector<const float> frequencies, nn::AttentionShape shape,
                                 Index first_position) {
  detail::rotate_pairs(stream, "rope_backward", dqkv, frequencies, shape, first_position, -1.0F);
}

}  // namespace mega::inline v0::cuda
