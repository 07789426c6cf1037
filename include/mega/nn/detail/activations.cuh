/// @file  Exponential and logistic function on a GPU, and the activations that are made of them.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/pack.cuh>
#include <mega/nn/elementwise.hpp>

#include <type_traits>

namespace mega::inline v0::cuda::detail {

/// e^x. What is rounded to 11 bits or fewer afterwards does without the last units of float's 24.
template <storage T>
[[nodiscard]] __device__ inline float exponential(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return expf(x);
  } else {
    return __expf(x);
  }
}

/// 1 / (1 + e^-x) and its complement, both without cancellation.
struct Logistic {
  float value;
  float complement;
};
template <storage T>
[[nodiscard]] __device__ inline Logistic logistic(float x) {
  const float e = exponential<T>(-fabsf(x));
  const float scale = std::is_same_v<T, float> ? 1.0F / (1.0F + e) : __fdividef(1.0F, 1.0F + e);
  return {(x < 0.0F ? e : 1.0F) * scale, (x < 0.0F ? 1.0F : e) * scale};
}

/// 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
template <storage T>
[[nodiscard]] __device__ inline Logistic gelu_gate(float x) {
  return logistic<T>(2.0F * nn::detail::gelu_slope * (x + nn::detail::gelu_cubic * x * x * x));
}

template <storage T>
struct GeluForward {
  __device__ float operator()(float x) const { return x * gelu_gate<T>(x).value; }
};

template <storage T>
struct GeluBackward {
  __device__ float operator()(float dout, float x) const {
    const Logistic gate = gelu_gate<T>(x);
    const float inner =
        2.0F * nn::detail::gelu_slope * (1.0F + 3.0F * nn::detail::gelu_cubic * x * x);
    return dout * (gate.value + x * gate.value * gate.complement * inner);
  }
};

/// Writes dx and sums up what it wrote.
template <storage T>
struct GeluBackwardTerms {
  T* dx;
  const T* dout;
  const T* x;
  Index cols;
  template <int W>
  struct Operands {
    RawPack<T, W> dout, x;
  };
  template <int W>
  __device__ Operands<W> load(Index r, Index c) const {
    return {load_raw<W>(dout + r * cols + c), load_raw<W>(x + r * cols + c)};
  }
  template <int W>
  __device__ void finish(Index r, Index c, const Operands<W>& operands, float (&term)[1][W]) const {
    float v[W];
    unpack(term[0], operands.dout);
    unpack(v, operands.x);
#pragma unroll
    for (int w = 0; w < W; ++w) term[0][w] = GeluBackward<T>{}(term[0][w], v[w]);
    store_pack(dx + r * cols + c, term[0]);
    round_pack<T>(term[0]);
  }
};

template <storage T>
struct SwigluForward {
  T* out;
  const T* x;
  Index cols;
  template <int W>
  __device__ void at(Index r, Index c) const {
    const T* const from = x + 2 * r * cols + c;
    float gate[W], up[W];
    load_pack(gate, from);
    load_pack(up, from + cols);
#pragma unroll
    for (int w = 0; w < W; ++w) gate[w] = gate[w] * logistic<T>(gate[w]).value * up[w];
    store_pack(out + r * cols + c, gate);
  }
};

template <storage T>
struct SwigluBackward {
  T* dx;
  const T* dout;
  const T* x;
  Index cols;
  template <int W>
  __device__ void at(Index r, Index c) const {
    const Index at_gate = 2 * r * cols + c, at_up = at_gate + cols;
    float gate[W], up[W], dy[W];
    load_pack(gate, x + at_gate);
    load_pack(up, x + at_up);
    load_pack(dy, dout + r * cols + c);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const Logistic sigmoid = logistic<T>(gate[w]);
      const float dup = dy[w] * gate[w] * sigmoid.value;
      gate[w] = dy[w] * up[w] * (sigmoid.value + gate[w] * sigmoid.value * sigmoid.complement);
      up[w] = dup;
    }
    store_pack(dx + at_gate, gate);
    store_pack(dx + at_up, up);
  }
};

}  // namespace mega::inline v0::cuda::detail
