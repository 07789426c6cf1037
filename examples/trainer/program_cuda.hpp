/// @file  main() of a trainer whose ranks are threads of the process with a GPU each.
#pragma once
#include "config.hpp"
#include "console.hpp"
#include "corpus.hpp"
#include "gpu_plan.hpp"
#include "gpu_run.hpp"
#include "inputs.hpp"
#include "job.hpp"
#include "listing.hpp"
#include "stages.hpp"
#include "stop.hpp"
#include <mega/ckpt/durable_file.hpp>
#include <mega/core/error.hpp>
#include <mega/cuda/check.hpp>
#include <mega/nn/cublas_lt.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace trainer {

/// What this process sees.
struct Gpus {
  int count = 0;
  std::string reason;  ///< why there are none

  Gpus() {
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess) return;
    count = 0;
    (void)cudaGetLastError();
    // Without a driver CUDA speaks of its version, which is 0 then.
    int driver = 0;
    const bool no_driver = status == cudaErrorInsufficientDriver &&
                           cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    reason = no_driver ? "no NVIDIA driver was found" : cudaGetErrorString(status);
  }

  /// Memory of the smallest of the first `gpus` GPUs. @pre  1 <= gpus <= count
  [[nodiscard]] static std::size_t memory(int gpus) {
    std::size_t least = 0;
    for (int gpu = 0; gpu < gpus; ++gpu) {
      cudaDeviceProp properties;
      mega::cuda::check(cudaGetDeviceProperties(&properties, gpu), "cudaGetDeviceProperties");
      least = gpu == 0 ? properties.totalGlobalMem : std::min(least, properties.totalGlobalMem);
    }
    return least;
  }
};

/// @throws  Error(usage) with the numbers
inline void check_gpu_choices(const Config& c) {
  mega::expects(c.gpu->memory_utilization > 0 && c.gpu->memory_utilization <= 1,
                mega::ErrorCode::usage, [&] {
                  return mega::sentence("--gpu-memory-utilization is ", c.gpu->memory_utilization,
                                        "; it must be above 0 and at most 1");
                });
  // The inverse, too, is a float.
  const auto invertible = [](const char* name, double value) {
    mega::expects(value >= 1e-37 && value <= 1e37, mega::ErrorCode::usage, [&] {
      return mega::sentence("--", name, " is ", value,
                            "; it must be at least 1e-37 and at most "
                            "1e37");
    });
  };
  invertible("min-loss-scale", c.gpu->min_loss_scale);
  invertible("initial-loss-scale", c.gpu->initial_loss_scale);
  expects_between("loss-scale-window", c.gpu->loss_scale_window, 1,
                  std::numeric_limits<int>::max());
  mega::expects(c.gpu->min_loss_scale <= c.gpu->initial_loss_scale, mega::ErrorCode::usage, [&] {
    return mega::sentence("--min-loss-scale ", c.gpu->min_loss_scale,
                          " is above --initial-loss-scale ", c.gpu->initial_loss_scale);
  });
  const GpuChoices usual;
  const auto of_fp16 = [&](const char* name, double value, double unless_given) {
    mega::expects(c.gpu->precision == Precision::fp16 || value == unless_given,
                  mega::ErrorCode::usage, [&] {
                    return mega::sentence("--", name,
                                          " is for --precision fp16, which alone "
                                          "scales the loss; leave it out with --precision ",
                                          name_of(precision_names, c.gpu->precision));
                  });
  };
  of_fp16("initial-loss-scale", c.gpu->initial_loss_scale, usual.initial_loss_scale);
  of_fp16("min-loss-scale", c.gpu->min_loss_scale, usual.min_loss_scale);
  of_fp16("loss-scale-window", c.gpu->loss_scale_window, usual.loss_scale_window);
  if (c.gpu->memory.empty()) return;
  (void)parse_bytes("--gpu-memory", c.gpu->memory);
  mega::expects(c.dry_run, mega::ErrorCode::usage,
                "--gpu-memory plans for a GPU that is not here; give --dry-run with it");
}

/// @throws  Error(usage, device) where ranks outnumber the GPUs
inline void expects_gpus(const Job& job, const Gpus& gpus) {
  mega::expects(gpus.count > 0, mega::ErrorCode::device, [&] {
    return mega::sentence("CUDA sees no GPU here: ", gpus.reason,
                          "; --dry-run --gpu-memory 141GB plans a run without one, and the program "
                          "without -cuda in its name trains on the processor");
  });
  mega::expects(job.world() <= gpus.count, mega::ErrorCode::usage, [&] {
    return mega::sentence("the layout ", to_string(job.options.mesh), " has ", job.world(),
                          " ranks, one a GPU, and CUDA sees ", gpus.count,
                          "; choose --tp x --pp x --dp of at most ", gpus.count);
  });
#ifndef MEGA_WITH_NCCL
  mega::expects(job.world() == 1, mega::ErrorCode::usage, [&] {
    return mega::sentence("the layout ", to_string(job.options.mesh), " has ", job.world(),
                          " ranks, and this program was built without NCCL; build it with NCCL, or "
                          "choose --tp 1 --pp 1 --dp 1");
  });
#endif
}

/// The algorithms of matrix products that a run begins with and leaves behind.
class AlgorithmsFile {
 public:
  /// @throws  Error(bad_input) where the file is torn or of another cuBLASLt
  explicit AlgorithmsFile(const GpuChoices& choices) : path_(choices.algorithms_path) {
    auto& algorithms = mega::nn::MatmulAlgorithms::of_process();
    if (choices.tune) algorithms.choose_by(mega::nn::AlgorithmChoice::timed);
    if (path_.empty()) return;
    expects_writable("gemm-algorithms", std::filesystem::absolute(path_).parent_path().string());
    std::error_code ignored;
    if (std::filesystem::exists(path_, ignored))
      algorithms.read(mega::ckpt::read_file(path_, mega::Index{1} << 26));
  }

  /// Replaces the file at once, so that no reader sees half of it.
  /// @throws  Error(not_durable)
  void write() const {
    if (path_.empty()) return;
    const std::string part = path_ + ".part";
    std::ofstream out(part, std::ios::binary);
    out << mega::nn::MatmulAlgorithms::of_process().text();
    out.close();
    std::error_code failed;
    if (!out.fail()) std::filesystem::rename(part, path_, failed);
    mega::expects(!out.fail() && !failed, mega::ErrorCode::not_durable,
                  [&] { return mega::sentence("--gemm-algorithms: cannot write ", path_); });
  }

 private:
  std::string path_;
};

/// Prints the plan; throws where it is known not to fit.
template <class Spec>
void dry_run_on_gpus(const Job& job, const std::vector<RankPlan>& plans, const Gpus& gpus) {
  std::printf("%s%s", Listing::of(job.config).c_str(), describe_plan<Spec>(job, plans).c_str());
  const GpuChoices& choices = *job.config.gpu;
  if (choices.memory.empty() && gpus.count == 0) {
    std::printf("no GPU to compare with; --gpu-memory 141GB names one's memory\n");
    return;
  }
  const GpuLimit limit{choices.memory.empty() ? Gpus::memory(std::min(job.world(), gpus.count))
                                              : parse_bytes("--gpu-memory", choices.memory),
                       choices.memory_utilization};
  expects_fit<Spec>(job, plans, limit);
  std::printf("fits: %s of %s at most\n", readable_bytes(plans[fullest(plans)].total()).c_str(),
              readable_bytes(limit.bytes()).c_str());
}

template <class Spec>
int main_on_gpus(const char* program, int argc, char** argv) {
  try {
    Config config;
    config.gpu.emplace();
    config.watch_interval = 0;  // timing each wait would keep steps from being graphs
    config.trace_interval =
        5;  // each event of a traced step keeps the GPU for a microsecond or two
    if (const std::optional<int> code = read_config<Spec>(config, program, argc, argv))
      return *code;
    check_gpu_choices(config);
    const Inputs<Spec> inputs(config, 0);
    const Job& job = inputs.job;
    expects_kernels_take(job);
    const GpuChoices& choices = *job.config.gpu;
    // A module loaded late may wait for a GPU on which a collective waits for this very rank. CUDA
    // reads this once, at its first call.
    if (job.world() > 1) setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    const Gpus gpus;
    const std::vector<RankPlan> plans = plan_gpus<Spec>(job);
    if (config.dry_run) {
      dry_run_on_gpus<Spec>(job, plans, gpus);
      finish_output();
      return 0;
    }
    expects_gpus(job, gpus);
    expects_fit<Spec>(job, plans, {Gpus::memory(job.world()), choices.memory_utilization});
    check_outputs(job.config);
    const AlgorithmsFile algorithms(choices);
    const Corpus corpus(job.config);
    stop_on_signals();
    std::vector<std::size_t> planned;
    for (int rank = 0; rank < job.world(); ++rank)
      planned.push_back(plans[place_of(job, rank)].total());
    const HuggingFaceModel* const start_from = inputs.start_from ? &*inputs.start_from : nullptr;
    with_element(choices.precision, [&]<class Element>(std::type_identity<Element>) {
      train_on_gpus<Spec, Element>(job, corpus, start_from, planned);
    });
    algorithms.write();
    return 0;
  } catch (const std::exception& e) {
    return report(program, e);
  }
}

}  // namespace trainer
