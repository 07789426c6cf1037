/// @file  The attention that a run chose by name, so that the trainer is compiled once.
#pragma once
#include "workload.hpp"
#include <mega/core/view.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/kernels.hpp>

#ifdef MEGA_WITH_CUDNN
#include <mega/nn/cudnn_attention.hpp>
#endif

#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

namespace gpu_step {

#ifdef MEGA_WITH_CUDNN
inline constexpr bool has_cudnn = true;
#else
inline constexpr bool has_cudnn = false;
#endif

/// One choice a process, made before the first step.
struct ChosenAttention {
  static constexpr std::string_view name = "chosen";
  static inline AttentionChoice choice = AttentionChoice::built_in;

  template <class T>
  static void forward(mega::cuda::Stream& stream, mega::Matrix<T> out, mega::View<float, 3> lse,
                      mega::Matrix<const std::type_identity_t<T>> qkv,
                      const mega::nn::AttentionShape& shape,
                      const mega::nn::AttentionDropout& dropout) {
    with([&]<class Attention>(Attention) {
      Attention::template forward<T>(stream, out, lse, qkv, shape, dropout);
    });
  }
  template <class T>
  static void backward(mega::cuda::Stream& stream, mega::Matrix<T> dqkv,
                       mega::Matrix<const std::type_identity_t<T>> dout,
                       mega::Matrix<const std::type_identity_t<T>> qkv,
                       mega::Matrix<const std::type_identity_t<T>> out,
                       mega::View<const float, 3> lse, const mega::nn::AttentionShape& shape,
                       const mega::nn::AttentionDropout& dropout) {
    with([&]<class Attention>(Attention) {
      Attention::template backward<T>(stream, dqkv, dout, qkv, out, lse, shape, dropout);
    });
  }

  /// Whether it computes the shape itself, and does not leave it to the built-in one.
  [[nodiscard]] static bool supports(const mega::nn::AttentionShape& shape) {
    bool out = true;
    with([&]<class Attention>(Attention) {
      if constexpr (requires { Attention::supports(shape, mega::nn::AttentionDropout{}); })
        out = Attention::supports(shape, {});
    });
    return out;
  }
  /// Device memory that the stream keeps for it.
  [[nodiscard]] static std::size_t workspace_bytes(const mega::nn::AttentionShape& shape) {
    std::size_t out = 0;
    with([&]<class Attention>(Attention) {
      if constexpr (requires { Attention::workspace_bytes(shape); })
        out = Attention::workspace_bytes(shape);
    });
    return out;
  }

 private:
  /// use(policy) with the chosen one.
  template <class Use>
  static void with(const Use& use) {
#ifdef MEGA_WITH_CUDNN
    if (choice == AttentionChoice::cudnn) return use(mega::nn::CudnnAttention<false>{});
    if (choice == AttentionChoice::cudnn_deterministic)
      return use(mega::nn::CudnnAttention<true>{});
#endif
    use(mega::nn::BuiltInAttention{});
  }
};

}  // namespace gpu_step
