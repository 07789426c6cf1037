/// @file  The body of measure_gpt3() and measure_llama3().
#pragma once
#include "kernel_trace.hpp"
#include "measure.hpp"
#include "training.cuh"
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
  expect_attention(o);
  std::mutex mutex;
  const int ranks = o.mesh.size();
  const std::vector<std::size_t> free_at_start = mega::cuda::free_memory_beside_contexts(ranks);
  if (ranks == 1) {
    const mega::Cuda device;
    mega::DeviceSelfComm world;
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
