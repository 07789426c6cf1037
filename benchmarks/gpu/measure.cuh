/// @file  The body of measure_gpt3() and measure_llama3().
#pragma once
#include "chosen_attention.hpp"
#include "kernel_trace.hpp"
#include "measure.hpp"
#include <mega/comm/nccl_memory.hpp>
#include <mega/core/error.hpp>
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/cublas_lt.hpp>

#ifdef MEGA_WITH_NCCL
#include <mega/comm/nccl.hpp>
#endif

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace gpu_step {

using mega::Matrix;
using mega::cuda::check;

/// A place in a stream that remembers when it was passed.
class TimedEvent {
 public:
  TimedEvent() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  TimedEvent(TimedEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  TimedEvent& operator=(TimedEvent&&) = delete;
  ~TimedEvent() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }

  void record(const mega::cuda::Stream& stream) {
    check(cudaEventRecord(event_, stream.native()), "cudaEventRecord");
  }
  /// @pre  both were passed
  [[nodiscard]] double ms_since(const TimedEvent& earlier) const {
    float out = 0;
    check(cudaEventElapsedTime(&out, earlier.event_, event_), "cudaEventElapsedTime");
    return out;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

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

/// With several members, that rank 0 joins: the world, and the axes that have any.
[[nodiscard]] inline std::size_t communicators(const mega::Mesh& mesh) {
  std::size_t out = mesh.size() > 1 ? 1 : 0;
  for (const int degree : {mesh.tensor, mesh.data, mesh.pipeline}) out += degree > 1 ? 1 : 0;
  return out;
}

/// Bytes of rank 0, and what its optimizer updates.
template <class Spec, class Element>
void plan(const Options& o, Measurement& out) {
  const StageFactory<Spec, Element> factory{o};
  const mega::train::MemoryPlan plan = mega::train::plan_memory<mega::train::PlacementOfTraversal>(
      trainer_options(o), 0, [&](mega::StagePosition at, mega::train::PlannedComm& tensor) {
        return factory.make(at, tensor);
      });
  const bool is_bf16 = o.numbers == Numbers::bf16;
  out.planned = {
      {"parameters", plan.parameters},
      {"activations", plan.activations},
      {"workspace", plan.workspace},
      {"exchange", plan.exchange},
      {"matrix products", mega::nn::cublas_lt_workspace_bytes},
      {"attention", is_bf16 ? ChosenAttention::workspace_bytes(attention_shape(o)) : 0},
      {"communicators", communicators(o.mesh) * mega::comm::nccl_communicator_bytes},
  };
  out.owned_parameters = plan.elements / (o.shard_optimizer ? o.mesh.data : 1);
}

inline constexpr double learning_rate = 1e-4;

/// Returns once all ranks are here and no collective is under way: what comes next may wait for the
/// GPUs of all ranks.
template <class Trainer>
void meet(Trainer& trainer) {
  const typename Trainer::Attended scope(trainer);
  trainer.world().barrier(trainer.compute());
}

/// Times steps as a trainer runs them: queued one behind the other, the loss read now and then.
/// A step is what lies between two passages of the same place, the boundary of two steps on the
/// compute stream; so it holds one update whether or not the host has waited in between. The step
/// before the first event brings the GPU there, and the clock of the host counts it too.
template <class Trainer>
void time_steps(Trainer& trainer, const Options& o, const std::array<RandomTokens, 2>& batches,
                Measurement& out) {
  int queued = 0;
  const auto queue = [&] {
    trainer.queue_step(batches[static_cast<std::size_t>(queued++ % 2)], learning_rate);
  };
  const auto read_if_due = [&](int done) {
    if (o.result_every > 0 && done % o.result_every == 0) (void)trainer.result();
  };
  for (int i = 0; i < o.warm_up; ++i) queue();
  (void)trainer.result();

  std::vector<TimedEvent> events(static_cast<std::size_t>(o.steps) + 1);
  meet(trainer);
  const auto begin = std::chrono::steady_clock::now();
  queue();
  read_if_due(o.result_every);
  for (int i = 0; i < o.steps; ++i) {
    events[static_cast<std::size_t>(i)].record(trainer.compute());
    queue();
    read_if_due(i + 1);
  }
  events.back().record(trainer.compute());
  out.loss = trainer.result().loss;
  const std::chrono::duration<double, std::milli> wall = std::chrono::steady_clock::now() - begin;
  out.wall_ms = wall.count() / (o.steps + 1);
  for (std::size_t i = 1; i < events.size(); ++i)
    out.step_ms.push_back(events[i].ms_since(events[i - 1]));
}

/// More steps, which only rank 0 records. A trace that fails takes no measurement with it.
template <class Trainer>
void trace_steps(Trainer& trainer, const Options& o, const std::array<RandomTokens, 2>& batches,
                 bool records, Measurement& out) {
  const auto trace = [&](const auto& call) {
    if (!records || !out.trace_error.empty()) return;
    try {
      call();
    } catch (const mega::Error& e) {
      out.trace_error = e.what();
    }
  };
  trainer.synchronize();
  meet(trainer);
  trace([&] { KernelTrace::start(0); });
  meet(trainer);
  for (int i = 0; i < o.traced_steps; ++i)
    trainer.queue_step(batches[static_cast<std::size_t>(i % 2)], learning_rate);
  trainer.synchronize();
  meet(trainer);
  trace([&] {
    out.activities = KernelTrace::stop();
    out.compute_stream = KernelTrace::stream_id(trainer.compute().native());
    mega::expects(!out.activities.empty(), mega::ErrorCode::device, "CUPTI recorded nothing");
  });
}

template <class Spec, class Element, class Comm>
void run_rank(Comm& world, const Options& o, const std::vector<std::size_t>& free_at_start,
              Measurement& out, std::mutex& mutex) {
  const int rank = world.rank();
  const std::size_t start = free_at_start[static_cast<std::size_t>(rank)];
  const auto drop = [&] {
    const std::size_t now = mega::cuda::free_memory();
    return start > now ? start - now : 0;
  };
  const mega::Cuda device(rank, o.graphs);
  Measurement own;
  own.communicator = drop();
  mega::Trainer<Plan<Spec, Comm, Element>> trainer(world, trainer_options(o),
                                                   StageFactory<Spec, Element>{o}, device);
  const int data = o.mesh.coordinates(rank)[mega::Axis::data];
  const std::array<RandomTokens, 2> batches{RandomTokens(o, data, 0), RandomTokens(o, data, 1)};
  time_steps(trainer, o, batches, own);
  own.used = drop();
  if (o.traced_steps > 0) trace_steps(trainer, o, batches, rank == 0, own);

  const std::lock_guard lock(mutex);
  const std::size_t largest = std::max(out.largest_used, own.used);
  if (rank == 0) {
    own.planned = std::move(out.planned);
    own.owned_parameters = out.owned_parameters;
    out = std::move(own);
  }
  out.largest_used = largest;
}

template <class Spec, class Element>
[[nodiscard]] Measurement measure_with(const Options& o) {
  ChosenAttention::choice = o.attention;
  Measurement out;
  plan<Spec, Element>(o, out);
  if (o.plan_only) return out;
  mega::expects(o.numbers == Numbers::fp32 || ChosenAttention::supports(attention_shape(o)),
                mega::ErrorCode::usage, [&] {
                  return mega::sentence("the loaded cuDNN does not take heads of ",
                                        o.model.head_dim(), " columns and sequences of ",
                                        o.sequence, "; use --attention built-in or another --seq");
                });
  std::mutex mutex;
  const int ranks = o.mesh.size();
  const std::vector<std::size_t> free_at_start = mega::cuda::free_memory_beside_contexts(ranks);
  if (ranks == 1) {
    const mega::Cuda device;
    mega::cuda::SelfComm world;
    run_rank<Spec, Element>(world, o, free_at_start, out, mutex);
    return out;
  }
#ifdef MEGA_WITH_NCCL
  // Ranks that hold other layers time other products, and meanwhile the rest wait for them.
  mega::run_gpus(
      ranks,
      [&](mega::NcclComm& world) { run_rank<Spec, Element>(world, o, free_at_start, out, mutex); },
      {.deadline = std::chrono::minutes(5)});
  return out;
#else
  throw mega::Error(mega::ErrorCode::usage,
                    mega::sentence(to_string(o.mesh), " needs ", ranks,
                                   " GPUs, but this program was built without NCCL; build it with "
                                   "MEGA_WITH_NCCL"));
#endif
}

template <class Spec>
[[nodiscard]] Measurement measure(const Options& o) {
  return o.numbers == Numbers::bf16 ? measure_with<Spec, mega::Bfloat16>(o)
                                    : measure_with<Spec, float>(o);
}

}  // namespace gpu_step
