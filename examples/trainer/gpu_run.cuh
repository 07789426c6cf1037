/// @file  The body of train_on_gpus(), and GpuBackend: ranks that are threads, one GPU each.
#pragma once
#include "backend.hpp"
#include "console.hpp"
#include "gpu_plan.hpp"
#include "gpu_run.hpp"
#include "run.hpp"
#include <mega/core/error.hpp>
#include <mega/core/replay.hpp>
#include <mega/core/storage.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/device.hpp>
#include <mega/device.cuh>
#include <mega/scan/cuda_recorder.hpp>
#ifdef MEGA_WITH_NCCL
#include <mega/comm/nccl.hpp>
#else
#include <mega/comm/device_self.hpp>
#endif

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace trainer {

template <mega::storage Element>
class GpuBackend {
 public:
  using device = mega::Cuda;
#ifdef MEGA_WITH_NCCL
  using communicator = mega::NcclComm;
#else
  using communicator = mega::DeviceSelfComm;
#endif
  using recorder = mega::scan::CudaRecorder;
  using kernels = GpuKernels<Element>;

  /// Makes the contexts of the ranks' GPUs. @param planned  bytes of every rank
  /// @param replays  how much of a step is launched as one graph
  /// @throws  Error(usage) where less is free
  GpuBackend(const std::vector<std::size_t>& planned, mega::ReplayScope replays)
      : planned_(planned),
        replays_(replays),
        free_at_start_(mega::cuda::free_memory_beside_contexts(static_cast<int>(planned.size()))) {
    for (std::size_t rank = 0; rank < planned_.size(); ++rank) {
      mega::expects(planned_[rank] <= free_at_start_[rank], mega::ErrorCode::usage, [&] {
        return mega::sentence("rank ", rank, " needs ", readable_bytes(planned_[rank]), " of GPU ",
                              rank, ", where only ", readable_bytes(free_at_start_[rank]),
                              " are free; end what else runs there, or choose other GPUs with "
                              "CUDA_VISIBLE_DEVICES");
      });
    }
  }

  [[nodiscard]] device make_device(int rank) const {
    return mega::Cuda(rank, replays_);
  }
  /// Drop of free memory since there were only contexts. @pre  the rank's GPU is current
  [[nodiscard]] std::size_t used_bytes(int rank) const {
    const std::size_t before = free_at_start_[static_cast<std::size_t>(rank)];
    const std::size_t now = mega::cuda::free_memory();
    return before > now ? before - now : 0;
  }
  [[nodiscard]] std::size_t planned_bytes(int rank) const {
    return planned_[static_cast<std::size_t>(rank)];
  }
  /// @pre  the rank's GPU is current
  [[nodiscard]] static double memory_share(int) {
    std::size_t free = 0, total = 0;
    mega::cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return 1 - static_cast<double>(free) / static_cast<double>(total);
  }

 private:
  const std::vector<std::size_t>& planned_;
  mega::ReplayScope replays_;
  std::vector<std::size_t> free_at_start_;
};

static_assert(backend<GpuBackend<float>>);

/// Calls run(communicator&) on every rank.
template <class Run>
void run_ranks(const Job& job, const Run& run) {
#ifdef MEGA_WITH_NCCL
  mega::run_gpus(job.world(), run, {.deadline = mega::comm::Seconds(job.config.deadline_s)});
#else
  mega::expects(job.world() == 1, mega::ErrorCode::usage, [&] {
    return mega::sentence(job.world(), " ranks need NCCL, which this program was built without");
  });
  mega::DeviceSelfComm world;
  run(world);
#endif
}

template <class Spec, mega::storage Element>
void train_on_gpus(const Job& job, const Corpus& corpus, const HuggingFaceModel* start_from,
                   const std::vector<std::size_t>& planned) {
  using Backend = GpuBackend<Element>;
  const Backend gpus(planned,
                     job.config.gpu->graphs ? mega::ReplayScope::step : mega::ReplayScope::none);
  run_ranks(job, [&](typename Backend::communicator& world) {
    TrainingRun<Spec, Backend>(gpus, job, corpus, start_from, world).run();
  });
}

}  // namespace trainer
