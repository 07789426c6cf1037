// CudaRecorder on a GPU: times of known work, order on several streams, no wait of the host, room
// that runs out, graphs.
#include <mega/cuda/device.hpp>
#include <mega/device.cuh>
#include <mega/scan/cuda_recorder.hpp>
#include <mega/scan/injected_faults.hpp>
#include <mega/scan/nvml.hpp>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <thread>

using namespace mega;
using namespace mega::scan;
using mega::cuda::check;

namespace {

/// Keeps one thread of the GPU busy for `ns` of its global timer.
__global__ void busy(long long ns) {
  long long begin = 0, now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}
void work(cuda::Stream& stream, double ms) {
  busy<<<1, 1, 0, stream.native()>>>(static_cast<long long>(ms * 1e6));
}

const Event* find(const Trace& t, std::string_view name, int nth = 0) {
  for (std::size_t i = 0; i < t.events.size(); ++i)
    if (t.name(t.events[i]) == name && nth-- == 0) return &t.events[i];
  return nullptr;
}

/// The global timer ticks once a microsecond on some GPUs.
constexpr Nanoseconds tick = 40'000;

}  // namespace

TEST_CASE("cuda: spans have the times of the device, in the host's clock") {
  const Cuda device(0);
  TraceCollector collector;
  CudaRecorder recorder({}, collector.sink());
  cuda::Stream stream, other;
  busy<<<1, 1>>>(1);  // loads the kernel
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  name_stream(recorder, stream, "compute");
  recorder.begin_step(0);
  const Nanoseconds before = steady_now();
  {
    const ScopedSpan outer(recorder, stream,
                           SpanInfo{.name = "forward", .chunk = 1, .kind = SpanKind::forward});
    work(stream, 3);
    const ScopedSpan inner(recorder, stream, SpanInfo{.name = "inner"});
    work(stream, 5);
  }
  {
    const ScopedSpan beside(recorder, other, SpanInfo{.name = "beside"});
    work(other, 2);
  }
  const Nanoseconds queued = steady_now();
  // Recording waited for nothing: 8 ms of work were queued in less.
  CHECK(queued - before < 5'000'000);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const Nanoseconds after = steady_now();
  recorder.close();
  const Trace& t = collector.trace();
  REQUIRE(t.events.size() == 3);
  const Event* const outer = find(t, "forward");
  const Event* const inner = find(t, "inner");
  const Event* const beside = find(t, "beside");
  CHECK(outer->duration() >= 8'000'000 - tick);
  CHECK(outer->duration() < 8'000'000 + 500'000);
  CHECK(inner->duration() >= 5'000'000 - tick);
  CHECK(inner->duration() < 5'000'000 + 300'000);
  CHECK(beside->duration() >= 2'000'000 - tick);
  CHECK(outer->begin <= inner->begin);
  CHECK(inner->end <= outer->end);
  CHECK(inner->chunk == 1);
  // Both streams ran at once.
  CHECK(beside->begin < outer->end);
  // An anchor is good to the width of its bracket, far below 200 us.
  CHECK(outer->begin > before - 200'000);
  CHECK(outer->end < after + 200'000);
  CHECK(t.completeness.cost_ns_per_event > 200);
  CHECK(t.completeness.cost_ns_per_event < 50'000);
  MESSAGE("ns a record: ", t.completeness.cost_ns_per_event);
}

TEST_CASE("cuda: ten thousand spans come out in order, and the events of the pool come back") {
  const Cuda device(0);
  TraceCollector collector;
  CudaRecorder recorder({}, collector.sink(), {.capacity = 1024});
  cuda::Stream stream;
  for (int step = 0; step < 20; ++step) {
    recorder.begin_step(step);
    for (int i = 0; i < 500; ++i) {
      const ScopedSpan span(recorder, stream, SpanInfo{.name = "op", .microbatch = i});
      busy<<<1, 1, 0, stream.native()>>>(1000);
    }
    stream.synchronize();
    recorder.flush();
  }
  recorder.close();
  const Trace& t = collector.trace();
  CHECK(t.completeness.events_dropped == 0);
  REQUIRE(t.events.size() == 10'000);
  Nanoseconds last_end = 0;
  std::int64_t out_of_order = 0;
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    // Across anchors two microseconds may be missing.
    out_of_order += t.events[i].begin + 30'000 < last_end ? 1 : 0;
    last_end = t.events[i].end;
  }
  CHECK(out_of_order == 0);
}

TEST_CASE("cuda: spans that share an event meet to the nanosecond, however far the anchor is") {
  const Cuda device(0);
  TraceCollector collector;
  CudaRecorder recorder({}, collector.sink());
  cuda::Stream stream;
  busy<<<1, 1>>>(1);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  recorder.begin_step(0);
  // At two seconds CUDA's float milliseconds stand 122 ns apart.
  std::this_thread::sleep_for(std::chrono::seconds(3));
  {
    const ScopedSpan outer(recorder, stream, SpanInfo{.name = "outer"});
    for (int i = 0; i < 200; ++i) {
      const ScopedSpan span(recorder, stream, SpanInfo{.name = "op", .microbatch = i});
      busy<<<1, 1, 0, stream.native()>>>(1000);
    }
  }
  stream.synchronize();
  recorder.close();
  const Trace& t = collector.trace();
  REQUIRE(t.events.size() == 201);
  int met = 0;
  for (int i = 0; i + 1 < 200; ++i) {
    const Event* const here = find(t, "op", i);
    const Event* const next = find(t, "op", i + 1);
    CHECK(next->begin > here->end - 1000);
    met += next->begin == here->end ? 1 : 0;
  }
  // All but those between which the host paused.
  CHECK(met >= 150);
  CHECK(find(t, "outer")->end >= find(t, "op", 199)->end);
}

TEST_CASE("cuda: spans without room are counted") {
  const Cuda device(0);
  TraceCollector collector;
  CudaRecorder recorder({}, collector.sink(), {.capacity = 16});
  cuda::Stream stream;
  recorder.begin_step(0);
  work(stream, 50);
  for (int i = 0; i < 300; ++i) {
    const ScopedSpan span(recorder, stream, SpanInfo{.name = "op"});
  }
  recorder.close();
  const Trace& t = collector.trace();
  CHECK(t.completeness.events_dropped > 200);
  CHECK(t.completeness.events_dropped + static_cast<std::int64_t>(t.events.size()) == 300);
}

TEST_CASE("cuda: a step's own time leaves out the waits on its stream") {
  const Cuda device(0);
  TraceCollector collector;
  CudaRecorder recorder({}, collector.sink(), {.interval = 0});
  cuda::Stream stream, transfer;
  for (int step = 0; step < 3; ++step) {
    recorder.begin_step(step);
    const ScopedSpan whole(recorder, stream, SpanInfo{.name = "step", .kind = SpanKind::iteration});
    work(stream, 6);
    {
      const ScopedSpan wait(recorder, stream,
                            SpanInfo{.name = "all_reduce", .kind = SpanKind::communication});
      work(stream, 10);
    }
    // Overlapped with the step: no wait.
    const ScopedSpan beside(recorder, transfer,
                            SpanInfo{.name = "all_reduce", .kind = SpanKind::communication});
    work(transfer, 4);
  }
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  recorder.flush();
  const double seconds = recorder.take_fastest_step();
  CHECK(seconds > 0.0055);
  CHECK(seconds < 0.0080);
  recorder.close();
  CHECK(collector.trace().events.empty());
}

TEST_CASE("cuda: the spans of a graph are read after each replay that is given the time") {
  const Cuda device(0);
  TraceCollector collector;
  CudaRecorder recorder({}, collector.sink());
  cuda::Stream stream;
  recorder.begin_step(0);
  recorder.begin_capture();
  check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal), "capture");
  {
    const ScopedSpan span(recorder, stream, SpanInfo{.name = "captured"});
    work(stream, 2);
  }
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream.native(), &graph), "end of capture");
  const CudaRecorder::Captured captured = recorder.end_capture();
  cudaGraphExec_t exec = nullptr;
  check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  for (int replay = 0; replay < 3; ++replay) {
    recorder.begin_step(replay);
    recorder.before_replay(captured);
    check(cudaGraphLaunch(exec, stream.native()), "cudaGraphLaunch");
    recorder.replayed(captured, stream);
    stream.synchronize();
    recorder.flush();
  }
  recorder.close();
  const Trace& t = collector.trace();
  CHECK(t.completeness.events_dropped == 0);
  REQUIRE(t.events.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(t.events[i].duration() >= 2'000'000 - tick);
    CHECK(t.events[i].duration() < 2'500'000);
    CHECK(t.events[i].step == static_cast<std::int32_t>(i));
    if (i > 0) CHECK(t.events[i].begin >= t.events[i - 1].end - 30'000);
  }
  check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

TEST_CASE("cuda: the GPU tells its clock while steps are recorded, where NVML is") {
  const Cuda device(0);
  std::array<char, 32> bus{};
  check(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), 0),
        "cudaDeviceGetPCIBusId");
  const bool has_nvml = static_cast<bool>(NvmlDevice(bus.data()));
  TraceCollector collector;
  CudaRecorder recorder({}, collector.sink());
  cuda::Stream stream;
  const Nanoseconds begin = steady_now();
  recorder.begin_step(0);
  work(stream, 400);
  stream.synchronize();
  recorder.close();
  const Nanoseconds end = steady_now();
  const auto& states = collector.trace().device_states;
  if (!has_nvml) {
    MESSAGE("no NVML here");
    CHECK(states.empty());
    return;
  }
  REQUIRE(states.size() >= 2);
  CHECK(states.size() <= 5);
  for (std::size_t i = 0; i < states.size(); ++i) {
    CHECK(states[i].at >= (i == 0 ? begin : states[i - 1].at + 100'000'000));
    CHECK(states[i].at <= end);
    CHECK(states[i].rank == 0);
  }
  const DeviceState& last = states.back();
  MESSAGE("SM clock ", last.sm_mhz, " MHz, ", last.temperature_c, " C, busy ", last.busy_percent,
          " %, ", last.power_mw, " mW, limits ", last.clock_limits);
  CHECK(last.sm_mhz > 100);
  CHECK(last.sm_mhz < 5000);
  CHECK(last.temperature_c > 5);
  CHECK(last.temperature_c < 120);
  CHECK(last.power_mw > 10'000);
  CHECK(last.busy_percent <= 100);
}

TEST_CASE("cuda: an injected slow rank takes the factor longer on the device") {
  const Cuda device(0);
  TraceCollector collector;
  CudaRecorder inner({}, collector.sink());
  FaultyRecorder<CudaRecorder> recorder(inner, 0, parse_faults("slow-rank=0,factor=2", 1));
  cuda::Stream stream;
  recorder.begin_step(0);
  {
    const ScopedSpan span(recorder, stream, SpanInfo{.name = "op"});
    work(stream, 10);
  }
  stream.synchronize();
  inner.close();
  REQUIRE(collector.trace().events.size() == 1);
  CHECK(collector.trace().events[0].duration() >= 20'000'000 - tick);
  CHECK(collector.trace().events[0].duration() < 26'000'000);
}
