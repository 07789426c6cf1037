// Keeps a GPU busy beside whatever else runs there, so that one rank of a job is slow for a reason
// that its own process does not see.
//
//   bench_headline_busy GPU [SECONDS]      until it is killed, or for so long
//
// It prints "busy" once its first kernel is through. CUDA gives two processes on one GPU turns, so
// the other one's kernels stand still for as long as a kernel of this one has the GPU. Exit code 0:
// the seconds are over; 2 wrong usage; 3 the GPU did not do it.
#include <mega/core/error.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

namespace {

/// Every thread counts a clock until `cycles` have passed.
__global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

/// @throws  Error(usage)
double number(const char* what, const char* text, double most) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  mega::expects(
      end != text && *end == '\0' && std::isfinite(value) && value >= 0 && value <= most,
      mega::ErrorCode::usage,
      [&] { return mega::sentence(what, " is '", text, "'; it takes a number from 0 to ", most); });
  return value;
}

/// Two kernels are queued at a time: the next one is there when one ends, and a process that is
/// killed leaves little behind.
void keep_busy(int gpu, double seconds) {
  using mega::cuda::check;
  using Clock = std::chrono::steady_clock;
  check(cudaSetDevice(gpu), "cudaSetDevice");
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, gpu),
        "cudaDeviceGetAttribute");
  mega::cuda::Stream stream;
  constexpr long long cycles = 4'000'000;  // a few milliseconds
  const auto queue = [&] {
    spin<<<2 * multiprocessors, 1024, 0, stream.native()>>>(cycles);
    check(cudaGetLastError(), "spin");
  };
  queue();
  stream.synchronize();
  std::printf("busy\n");
  std::fflush(stdout);
  cudaEvent_t through;
  check(cudaEventCreateWithFlags(&through, cudaEventDisableTiming), "cudaEventCreate");
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (queue(); Clock::now() < end;) {
    check(cudaEventRecord(through, stream.native()), "cudaEventRecord");
    queue();
    check(cudaEventSynchronize(through), "cudaEventSynchronize");
  }
  stream.synchronize();
  check(cudaEventDestroy(through), "cudaEventDestroy");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    mega::expects(argc == 2 || argc == 3, mega::ErrorCode::usage,
                  "usage: bench_headline_busy GPU [SECONDS]");
    keep_busy(static_cast<int>(number("GPU", argv[1], 1023)),
              argc == 3 ? number("SECONDS", argv[2], 1e6) : 1e6);
    return 0;
  } catch (const mega::Error& e) {
    std::fprintf(stderr, "bench_headline_busy: %s\n", e.what());
    return mega::exit_code(e.code());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_headline_busy: %s\n", e.what());
    return 3;
  }
}
