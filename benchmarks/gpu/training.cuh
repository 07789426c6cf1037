/// @file  The trainer of a measured model: its plan, its stages, its tokens.
#pragma once
#include "chosen_attention.hpp"
#include "workload.hpp"
#include <mega/core/error.hpp>
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/cublas_lt.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace gpu_step {

using mega::Matrix;
using mega::cuda::check;

inline constexpr double learning_rate = 1e-4;

/// One data-parallel rank's micro-batches of random tokens, in page-locked memory, so that sending
/// them does not hold the host back.
class RandomTokens {
 public:
  RandomTokens(const Options& o, int data_rank, std::uint64_t number)
      : micro_batch_(o.micro_batch),
        sequence_(o.sequence),
        microbatches_(o.microbatches),
        first_sample_(data_rank * microbatches_ * micro_batch_) {
    const Index samples = microbatches_ * micro_batch_, count = samples * sequence_;
    check(cudaMallocHost(&memory_, static_cast<std::size_t>(2 * count) * sizeof(std::int32_t)),
          "cudaMallocHost");
    const mega::RandomKey key{.seed = 1, .step = number, .use = mega::RandomUse::sample};
    const auto token = [&](Index sample, Index t) {
      const std::uint32_t bits = key.bits((first_sample_ + sample) * (sequence_ + 1) + t);
      return static_cast<std::int32_t>(bits % static_cast<std::uint32_t>(o.model.vocab));
    };
    for (Index sample = 0; sample < samples; ++sample) {
      for (Index t = 0; t < sequence_; ++t) {
        memory_[sample * sequence_ + t] = token(sample, t);
        memory_[count + sample * sequence_ + t] = token(sample, t + 1);
      }
    }
  }
  RandomTokens(const RandomTokens&) = delete;
  RandomTokens& operator=(const RandomTokens&) = delete;
  ~RandomTokens() { (void)cudaFreeHost(memory_); }

  [[nodiscard]] int microbatches() const { return static_cast<int>(microbatches_); }
  [[nodiscard]] Matrix<const std::int32_t> input(int microbatch) const {
    return {memory_ + microbatch * micro_batch_ * sequence_, micro_batch_, sequence_};
  }
  [[nodiscard]] Matrix<const std::int32_t> target(int microbatch) const {
    return {memory_ + (microbatches_ + microbatch) * micro_batch_ * sequence_, micro_batch_,
            sequence_};
  }
  [[nodiscard]] Index first_sample(int microbatch) const {
    return first_sample_ + microbatch * micro_batch_;
  }
  [[nodiscard]] std::int64_t valid_targets() const {
    return microbatches_ * micro_batch_ * sequence_;
  }

 private:
  Index micro_batch_, sequence_, microbatches_, first_sample_;
  std::int32_t* memory_ = nullptr;
};

template <class Element>
using GpuKernels = mega::nn::Kernels<mega::nn::CublasLtProduct<Element>, ChosenAttention>;

template <class Spec, class Comm, class Element>
struct Plan : mega::DefaultPlan {
  using device = mega::Cuda;
  using communicator = Comm;
  using traversal = trainer::ChosenTraversal;
  using stage = mega::nn::Transformer<Spec, Comm, GpuKernels<Element>>;
};

/// Makes stages of the run.
template <class Spec, class Element>
struct StageFactory {
  const Options& options;
  mega::dpp::LayerSplit layers = options.layers();

  template <class Groups>
  [[nodiscard]] auto operator()(mega::StagePosition at, Groups& groups) const {
    return make(at, groups.tensor);
  }
  template <class TensorComm>
  [[nodiscard]] auto make(mega::StagePosition at, TensorComm& tensor) const {
    return mega::nn::Transformer<Spec, TensorComm, GpuKernels<Element>>(
        options.config(), options.run(), at, layers.of_stage(at.stage), tensor);
  }
};

[[nodiscard]] inline mega::TrainerOptions<trainer::ChosenTraversal> trainer_options(
    const Options& o) {
  return {.mesh = o.mesh,
          .chunks = o.chunks,
          .microbatches = o.microbatches,
          .traversal = o.traversal,
          .shard_optimizer = o.shard_optimizer,
          .seed = 1};
}

[[nodiscard]] inline mega::nn::AttentionShape attention_shape(const Options& o) {
  return {o.micro_batch, o.sequence, o.model.heads / o.mesh.tensor,
          o.model.kv_heads / o.mesh.tensor, o.model.head_dim()};
}

/// @throws Error(usage) where the chosen attention leaves the shape to the built-in one
inline void expect_attention(const Options& o) {
  mega::expects(o.numbers == Numbers::fp32 || ChosenAttention::supports(attention_shape(o)),
                mega::ErrorCode::usage, [&] {
                  return mega::sentence("the loaded cuDNN does not take heads of ",
                                        o.model.head_dim(), " columns and sequences of ",
                                        o.sequence, "; use --attention built-in or another --seq");
                });
}

}  // namespace gpu_step
