// The stage of 06_own_kernel on a GPU, with the kernels of gate.cuh; both pipeline ranks share one
// GPU. nvcc -std=c++20 -I include examples/06_own_kernel-cuda/main.cu -o 06_own_kernel-cuda
#include "../06_own_kernel/train.hpp"
#include "gate.cuh"
#include <mega/comm/device_thread.cuh>
#include <mega/core/error.hpp>
#include <mega/device.cuh>
#include <mega/mega.hpp>

#include <cstdio>

struct Plan : mega::DefaultPlan {
  using stage = example::Gate;
  using device = mega::Cuda;
  using communicator = mega::DeviceThreadComm;
  using traversal = mega::dpp::ScheduleTraversal<mega::dpp::BFC>;
};

int main() {
  try {
    mega::run_device_threads(
        2, [](mega::DeviceThreadComm& world) { example::train<Plan>(world, mega::Cuda()); });
  } catch (const mega::Error& e) {  // no GPU, among others
    std::fprintf(stderr, "06_own_kernel-cuda: %s\n", e.what());
    return mega::exit_code(e.code());
  }
}
