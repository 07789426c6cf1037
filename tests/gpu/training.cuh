/// @file  What tests that train on a GPU share: plans, batches, and the ranks of a run.
#pragma once
#include <mega/comm/device_thread.cuh>
#include <mega/device.cuh>
#include <mega/mega.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

namespace support {

template <class Spec, class Product, class Comm = mega::DeviceSelfComm,
          class Attention = mega::nn::BuiltInAttention>
struct GpuPlan : mega::DefaultPlan {
  using device = mega::Cuda;
  using communicator = Comm;
  using kernels = mega::nn::Kernels<Product, Attention>;
  using stage = mega::nn::Transformer<Spec, Comm, kernels>;
};

/// The sizes as a model of the family has them: heads of keys and values of its own number for
/// Llama 3 alone, and GPT-3's head tied to its embedding.
template <class Spec>
[[nodiscard]] mega::nn::TransformerConfig config_of(mega::nn::TransformerConfig sizes,
                                                    mega::Index llama_kv_heads) {
  constexpr bool gpt = std::is_same_v<Spec, mega::nn::Gpt3>;
  sizes.kv_heads = gpt ? sizes.heads : llama_kv_heads;
  sizes.tied_head = gpt;
  return sizes;
}

/// Makes a trainer's stages, with the layers divided evenly among them.
template <class Stage>
[[nodiscard]] auto even_stages(const mega::nn::TransformerConfig& config,
                               const mega::nn::TransformerRun& run) {
  return [=](mega::StagePosition at, auto& groups) {
    return Stage(config, run, at,
                 mega::dpp::split_layers(config.layers, at.stages).of_stage(at.stage),
                 groups.tensor);
  };
}

/// Page-locked memory of the host, from which copies to a GPU hold nobody up.
template <class T>
struct PageLocked {
  using value_type = T;
  [[nodiscard]] T* allocate(std::size_t n) {
    void* memory = nullptr;
    mega::cuda::check(cudaMallocHost(&memory, n * sizeof(T)), "cudaMallocHost");
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t) noexcept { (void)cudaFreeHost(memory); }
  friend bool operator==(const PageLocked&, const PageLocked&) = default;
};

/// The micro-batches of a data-parallel rank: random tokens, other ones in each step, of whose
/// targets every seventh does not count.
template <class Allocator = std::allocator<std::int32_t>>
class Batch {
 public:
  Batch(const mega::nn::TransformerRun& run, int vocab, int microbatches, int step = 0,
        int data_rank = 0)
      : run_(run), microbatches_(microbatches), data_rank_(data_rank) {
    const mega::RandomKey key{9, static_cast<std::uint64_t>(step), 0, mega::RandomUse::test};
    const auto token = [&](mega::Index i) {
      return static_cast<std::int32_t>(key.bits(i) % static_cast<std::uint32_t>(vocab));
    };
    for (mega::Index i = 0; i < microbatches * run.rows(); ++i) {
      tokens_.push_back(token(i));
      targets_.push_back((i + step) % 7 == 0 ? -1 : token(i + 1));
      valid_ += targets_.back() < 0 ? 0 : 1;
    }
  }
  [[nodiscard]] int microbatches() const { return microbatches_; }
  [[nodiscard]] mega::Matrix<const std::int32_t> input(int mb) const { return at(tokens_, mb); }
  [[nodiscard]] mega::Matrix<const std::int32_t> target(int mb) const { return at(targets_, mb); }
  [[nodiscard]] mega::Index first_sample(int mb) const {
    return (data_rank_ * microbatches_ + mb) * run_.micro_batch;
  }
  [[nodiscard]] std::int64_t valid_targets() const { return valid_; }

 private:
  using Tokens = std::vector<std::int32_t, Allocator>;

  [[nodiscard]] mega::Matrix<const std::int32_t> at(const Tokens& all, int mb) const {
    return {all.data() + mb * run_.rows(), run_.micro_batch, run_.sequence};
  }
  mega::nn::TransformerRun run_;
  int microbatches_, data_rank_;
  Tokens tokens_, targets_;
  std::int64_t valid_ = 0;
};

/// Calls run_rank(communicator&) on every rank; ranks of several are threads that share the GPU.
template <class Comm, class RunRank>
void run_ranks(int ranks, const RunRank& run_rank) {
  if constexpr (std::is_same_v<Comm, mega::DeviceSelfComm>) {
    Comm world;
    run_rank(world);
  } else {
    mega::run_device_threads(ranks, run_rank);
  }
}

/// Device memory, once what the stream holds is done.
template <class Stream, class T>
[[nodiscard]] std::vector<std::remove_const_t<T>> fetch(Stream& stream, mega::Vector<T> values) {
  using Value = std::remove_const_t<T>;
  std::vector<Value> out(static_cast<std::size_t>(values.size()));
  download(stream, mega::Vector<Value>(out.data(), values.size()),
           mega::Vector<const Value>(values));
  stream.synchronize();
  return out;
}

template <class T>
[[nodiscard]] bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace support
