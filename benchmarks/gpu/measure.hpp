/// @file  Measuring a training run on GPUs: what comes out, and who does it for each family of
/// models.
#pragma once
#include "kernel_table.hpp"
#include "workload.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpu_step {

/// One purpose of device memory.
struct PlannedBytes {
  std::string_view purpose;
  std::size_t bytes = 0;
};

/// Of rank 0, unless said otherwise.
struct Measurement {
  std::vector<double> step_ms;  ///< of each timed step, between events of the compute stream
  double wall_ms = 0;           ///< a step, over all of them, on the host's clock
  double loss = 0;              ///< of the last timed step
  std::vector<PlannedBytes> planned;
  std::size_t used = 0;          ///< drop of free device memory since there was only the context
  std::size_t communicator = 0;  ///< part of `used` that was gone before the trainer came
  std::size_t largest_used = 0;  ///< over all ranks
  Index owned_parameters = 0;    ///< that the rank's optimizer updates
  std::vector<Activity> activities;
  std::uint32_t compute_stream = 0;  ///< as activities name it
  std::string trace_error;           ///< why activities are missing
};

/// Trains, or with Options::plan_only fills `planned` and `owned_parameters` without a GPU.
/// @throws Error for what cannot run
[[nodiscard]] Measurement measure_gpt3(const Options& options);
[[nodiscard]] Measurement measure_llama3(const Options& options);

}  // namespace gpu_step
