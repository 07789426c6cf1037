// What a steady training step must not do on the GPU: take or give back memory, hold the host back,
// load code. CUPTI tells of every call of the process, and the test counts.
#if __has_include(<cupti.h>)
#include "../support/cuda_calls.hpp"
#include "training.cuh"
#include <mega/comm/device_thread.cuh>
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/cublas_lt.hpp>

#ifdef MEGA_WITH_CUDNN
#include <mega/nn/cudnn_attention.hpp>
#endif

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using mega::Bfloat16;
using mega::Index;
using mega::Matrix;
using mega::cuda::check;
using mega::cuda::Stream;
using mega_test::CallCounter;
using mega_test::Calls;
using mega_test::count_of;
using mega_test::Counts;
using mega_test::is_launch;
using mega_test::is_unsteady;
using mega_test::pageable_copy;
using mega_test::text;
using mega_test::total;

/// A stage that also does in loss() what the test has it do, once a micro-batch.
using Action = void (*)(Stream&);
Action extra_action = nullptr;

struct WithAction {
  explicit WithAction(Action action) { extra_action = action; }
  WithAction(const WithAction&) = delete;
  WithAction& operator=(const WithAction&) = delete;
  ~WithAction() { extra_action = nullptr; }
};

template <class Stage>
struct Acting : Stage {
  using Stage::Stage;

  template <class Ctx>
  void loss(Ctx& ctx, typename Stage::edge_type out_then_dout,
            typename Stage::target_type targets) {
    if (extra_action != nullptr) extra_action(ctx.stream);
    Stage::loss(ctx, out_then_dout, targets);
  }
};

template <class Spec, class Element, class Comm = mega::DeviceSelfComm,
          class Attention = mega::nn::BuiltInAttention>
struct Plan : support::GpuPlan<Spec, mega::nn::CublasLtProduct<Element>, Comm, Attention> {
  using stage = Acting<
      typename support::GpuPlan<Spec, mega::nn::CublasLtProduct<Element>, Comm, Attention>::stage>;
};

struct Setup {
  mega::Mesh mesh{};
  int chunks = 1;
  int microbatches = 3;
  bool sequence_parallel = false;
  bool shard_optimizer = false;
  float dropout = 0;
  mega::nn::Recompute recompute = mega::nn::Recompute::none;
  mega::ReplayScope replays = mega::ReplayScope::none;
};

constexpr int layers = 4, vocab = 1003;
// A graph is captured when its work comes again with nothing moved: the first step makes room, the
// second runs, the third captures.
constexpr int warm_steps = 3, steady_steps = 3;

template <class Spec>
mega::nn::TransformerConfig config(const Setup& setup) {
  return support::config_of<Spec>({.layers = layers,
                                   .hidden = 256,
                                   .heads = 4,
                                   .head_dim = 64,
                                   .ffn = 512,
                                   .vocab = vocab,
                                   .max_positions = 128,
                                   .dropout = {setup.dropout, setup.dropout, setup.dropout}},
                                  2);
}

/// Several pieces of the loss a micro-batch, the last one shorter.
mega::nn::TransformerRun run_of(const Setup& setup) {
  return {.micro_batch = 2,
          .sequence = 128,
          .sequence_parallel = setup.sequence_parallel,
          .recompute = setup.recompute,
          .loss_rows = 100};
}

using Batch = support::Batch<support::PageLocked<std::int32_t>>;

/// The unsteady calls of all ranks.
struct Observed {
  Counts steps, launches, result;
  mega::StepResult last;
};

/// One rank's warm steps, steady ones, and the reading of the result.
template <class ThePlan>
void train_rank(typename ThePlan::communicator& world, const Setup& setup, Observed& observed) {
  using Stage = typename ThePlan::stage;
  const mega::nn::TransformerRun run = run_of(setup);
  typename mega::Trainer<ThePlan>::options_type options;
  options.mesh = setup.mesh;
  options.chunks = setup.chunks;
  options.microbatches = setup.microbatches;
  options.shard_optimizer = setup.shard_optimizer;
  options.seed = 7;
  mega::Trainer<ThePlan> trainer(
      world, options, support::even_stages<Stage>(config<typename Stage::spec_type>(setup), run),
      mega::Cuda(0, setup.replays));
  const Batch batch(run, vocab, setup.microbatches, 0,
                    setup.mesh.coordinates(world.rank())[mega::Axis::data]);
  for (int step = 0; step < warm_steps; ++step) trainer.step(batch, 1e-3);

  // On rank 0, while the others make no calls.
  CallCounter& counter = CallCounter::of_process();
  const auto between_ranks = [&](const auto& act) {
    world.barrier(trainer.compute());
    if (world.rank() == 0) act();
    world.barrier(trainer.compute());
  };
  between_ranks([&] { counter.begin(); });
  for (int step = 0; step < steady_steps; ++step) trainer.queue_step(batch, 1e-3);
  between_ranks([&] {
    const Calls calls = counter.end();
    observed.steps = calls.unsteady;
    observed.launches = calls.launches;
    counter.begin();
  });
  const mega::StepResult last = trainer.result();
  between_ranks([&] {
    observed.result = counter.end().unsteady;
    observed.last = last;
  });
}

template <class ThePlan>
Observed train(const Setup& setup) {
  (void)CallCounter::of_process();  // before the threads of ranks
  Observed observed;
  using Comm = typename ThePlan::communicator;
  support::run_ranks<Comm>(setup.mesh.size(),
                           [&](Comm& world) { train_rank<ThePlan>(world, setup, observed); });
  return observed;
}

/// Streams that result() waits for: three a rank, and one at both ends of the two edges, there and
/// back, between neighbouring stages.
int waits_of_result(const Setup& setup) {
  const int stages = setup.mesh.pipeline * setup.chunks;
  return 3 * setup.mesh.size() + 4 * (stages - 1) * setup.mesh.tensor * setup.mesh.data;
}
/// It reads sums, control and targets into memory that is not page-locked.
int reads_of_result(const Setup& setup) {
  return 3 * setup.mesh.size();
}

/// @return  launches of all ranks in the steady steps
template <class ThePlan>
int check_steady(const std::string& what, const Setup& setup) {
  CAPTURE(what);
  const Observed observed = train<ThePlan>(setup);
  CHECK(text(observed.steps) == "");
  INFO("result(): ", text(observed.result));
  CHECK(count_of(observed.result, "StreamSynchronize") == waits_of_result(setup));
  CHECK(count_of(observed.result, pageable_copy) == reads_of_result(setup));
  CHECK(total(observed.result) == waits_of_result(setup) + reads_of_result(setup));
  // The steps did train.
  CHECK(std::isfinite(observed.last.loss));
  CHECK_FALSE(observed.last.skipped);
  CHECK(observed.last.targets ==
        setup.mesh.data * support::Batch(run_of(setup), vocab, setup.microbatches).valid_targets());
  std::printf("%s: %d steps made %d unsteady calls and %d launches, result() %s\n", what.c_str(),
              steady_steps, total(observed.steps), total(observed.launches),
              text(observed.result).c_str());
  std::fflush(stdout);
  return total(observed.launches);
}

/// The same steps without and with graphs: no call that is not steady, and fewer launches.
template <class ThePlan>
void check_steady_graphs(const std::string& what, Setup setup) {
  const int direct = check_steady<ThePlan>(what, setup);
  setup.replays = mega::ReplayScope::actions;
  const int actions = check_steady<ThePlan>(what + ", graphs of actions", setup);
  // Graphs of the calls of stages; beside them the step's inputs, norm and update.
  const int calls = setup.mesh.size() * setup.chunks * 3 * setup.microbatches * steady_steps;
  CHECK(actions < direct / 4);
  CHECK(actions < calls + 40 * setup.mesh.size() * steady_steps);
  if (setup.mesh.size() > 1 || setup.chunks > 1) return;
  setup.replays = mega::ReplayScope::step;
  const int steps = check_steady<ThePlan>(what + ", a graph a step", setup);
  // The inputs, what divides the loss, the graph.
  CHECK(steps == 3 * steady_steps);
}

template <class Spec, class Element>
void check_one_rank(const std::string& what) {
  using ThePlan = Plan<Spec, Element>;
  check_steady<ThePlan>(what, {});
  check_steady<ThePlan>(what + ", dropout", {.dropout = 0.1F});
  check_steady<ThePlan>(what + ", recompute selective",
                        {.recompute = mega::nn::Recompute::selective});
}

/// Device memory of at least one word that nobody waits for.
void* device_word(Stream& stream) {
  return stream.scratch(sizeof(int));
}
int host_word = 0;

}  // namespace

TEST_CASE("gpu steady state: which calls count") {
  for (const std::string name :
       {"cuMemAlloc", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAllocHost",
        "cuMemAllocManaged", "cuMemHostAlloc", "cuMemHostRegister", "cuMemFree", "cuMemFreeAsync",
        "cuMemFreeHost", "cuMemMap", "cuMemCreate", "cuMemAddressReserve", "cudaMalloc",
        "cudaMallocAsync", "cudaHostAlloc", "cudaFree", "cudaFreeAsync"}) {
    CAPTURE(name);
    CHECK(is_unsteady(name));
  }
  for (const std::string name :
       {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuStreamQuery",
        "cuEventQuery", "cuMemcpy", "cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemcpy2D",
        "cudaDeviceSynchronize", "cudaMemcpy", "cuModuleLoadData", "cuModuleLoadFatBinary",
        "cuLibraryLoadData", "cuGraphInstantiateWithFlags", "cudaStreamBeginCapture"}) {
    CAPTURE(name);
    CHECK(is_unsteady(name));
    CHECK_FALSE(is_launch(name));
  }
  for (const std::string name : {"cuMemcpyAsync",
                                 "cuMemcpyHtoDAsync",
                                 "cuMemcpyDtoDAsync",
                                 "cuMemsetD8Async",
                                 "cuLaunchKernel",
                                 "cuLaunchKernelEx",
                                 "cuEventRecord",
                                 "cuStreamWaitEvent",
                                 "cuMemGetAddressRange",
                                 "cuFuncSetAttribute",
                                 "cuCtxGetCurrent",
                                 "cudaMemcpyAsync",
                                 "cudaMemsetAsync",
                                 "cudaLaunchKernel",
                                 "cudaGetLastError",
                                 "cudaFuncSetAttribute",
                                 "",
                                 "c",
                                 "Free",
                                 "cuGraphLaunch",
                                 "cudaGraphLaunch"}) {
    CAPTURE(name);
    CHECK_FALSE(is_unsteady(name));
  }
  for (const std::string name : {"cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernel",
                                 "cudaLaunchKernelExC", "cuGraphLaunch", "cudaGraphLaunch"})
    CHECK(is_launch(name));
  for (const std::string name : {"cuGraphInstantiate", "cudaLaunchHostFunc", "cuMemcpyAsync", ""})
    CHECK_FALSE(is_launch(name));
}

TEST_CASE("gpu steady state: a step that does what it must not is found out") {
  using Llama3 = Plan<mega::nn::Llama3, float>;
  struct Misdeed {
    std::string what;
    Action action;
    int calls;  // that count
  };
  const std::vector<Misdeed> misdeeds{
      {"nothing", nullptr, 0},
      {"cudaMalloc and cudaFree", [](Stream&) { const mega::cuda::Memory memory(4096); }, 2},
      {"cudaMallocAsync and cudaFreeAsync",
       [](Stream& stream) {
         void* memory = nullptr;
         check(cudaMallocAsync(&memory, 4096, stream.native()), "cudaMallocAsync");
         check(cudaFreeAsync(memory, stream.native()), "cudaFreeAsync");
       },
       2},
      {"cudaMallocHost and cudaFreeHost",
       [](Stream&) {
         void* memory = nullptr;
         check(cudaMallocHost(&memory, 4096), "cudaMallocHost");
         check(cudaFreeHost(memory), "cudaFreeHost");
       },
       2},
      {"cudaMemcpy",
       [](Stream& stream) {
         check(cudaMemcpy(&host_word, device_word(stream), sizeof(int), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
       },
       1},
      {pageable_copy,
       [](Stream& stream) {
         check(cudaMemcpyAsync(&host_word, device_word(stream), sizeof(int), cudaMemcpyDeviceToHost,
                               stream.native()),
               "cudaMemcpyAsync");
       },
       1},
      {"cudaStreamSynchronize", [](Stream& stream) { stream.synchronize(); }, 1},
      {"cudaDeviceSynchronize",
       [](Stream&) { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }, 1},
      {"cudaEventSynchronize",
       [](Stream& stream) {
         mega::cuda::Event event;
         stream.record(event);
         check(cudaEventSynchronize(event.native()), "cudaEventSynchronize");
       },
       1},
      {"cudaEventQuery",
       [](Stream& stream) {
         mega::cuda::Event event;
         stream.record(event);
         (void)cudaEventQuery(event.native());
         (void)cudaGetLastError();  // not ready is no fault
       },
       1},
      {"cudaStreamQuery",
       [](Stream& stream) {
         (void)cudaStreamQuery(stream.native());
         (void)cudaGetLastError();
       },
       1},
  };
  for (const Misdeed& misdeed : misdeeds) {
    CAPTURE(misdeed.what);
    const WithAction with(misdeed.action);
    const Setup setup;
    const Observed observed = train<Llama3>(setup);
    INFO(text(observed.steps));
    CHECK(total(observed.steps) == misdeed.calls * steady_steps * setup.microbatches);
    CHECK(total(observed.result) == waits_of_result(setup) + reads_of_result(setup));
    std::printf("a step with %s: %s\n", misdeed.what.c_str(), text(observed.steps).c_str());
  }
}

#if CUDART_VERSION >= 12080
TEST_CASE("gpu steady state: a step that loads code is found out") {
  const WithAction with([](Stream&) {
    constexpr auto code =
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry idle() { ret; }\n";
    cudaLibrary_t library{};
    check(cudaLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0),
          "cudaLibraryLoadData");
    check(cudaLibraryUnload(library), "cudaLibraryUnload");
  });
  const Setup setup;
  const Observed observed = train<Plan<mega::nn::Llama3, float>>(setup);
  INFO(text(observed.steps));
  CHECK(count_of(observed.steps, "LibraryLoad") == steady_steps * setup.microbatches);
}
#endif

TEST_CASE("gpu steady state: GPT-3 in bf16") {
  check_one_rank<mega::nn::Gpt3, Bfloat16>("GPT-3 bf16");
}
TEST_CASE("gpu steady state: Llama-3 in bf16") {
  check_one_rank<mega::nn::Llama3, Bfloat16>("Llama-3 bf16");
}
TEST_CASE("gpu steady state: GPT-3 in fp32") {
  check_one_rank<mega::nn::Gpt3, float>("GPT-3 fp32");
}
TEST_CASE("gpu steady state: Llama-3 in fp32") {
  check_one_rank<mega::nn::Llama3, float>("Llama-3 fp32");
}

TEST_CASE("gpu steady state: with graphs, in bf16 with dropout") {
  check_steady_graphs<Plan<mega::nn::Gpt3, Bfloat16>>("GPT-3 bf16, dropout", {.dropout = 0.1F});
  check_steady_graphs<Plan<mega::nn::Llama3, Bfloat16>>("Llama-3 bf16, dropout", {.dropout = 0.1F});
}

#ifdef MEGA_WITH_CUDNN
TEST_CASE("gpu steady state: Llama-3 in bf16 with cuDNN's attention") {
  using Attention = mega::nn::CudnnAttention<>;
  REQUIRE(Attention::supports(
      {.batch = 2, .time = 128, .query_heads = 4, .kv_heads = 2, .head_dim = 64}, {}));
  check_steady_graphs<Plan<mega::nn::Llama3, Bfloat16, mega::DeviceSelfComm, Attention>>(
      "Llama-3 bf16, cuDNN", {});
}
#endif

TEST_CASE("gpu steady state: four ranks on one GPU, GPT-3 in bf16") {
  using Ranks = Plan<mega::nn::Gpt3, Bfloat16, mega::DeviceThreadComm>;
  check_steady<Ranks>("four ranks, tp2 pp2", {.mesh = {.tensor = 2, .pipeline = 2},
                                              .sequence_parallel = true,
                                              .dropout = 0.1F,
                                              .recompute = mega::nn::Recompute::selective});
  check_steady_graphs<Ranks>("four ranks, dp2 pp2 vpp2 zero1", {.mesh = {.data = 2, .pipeline = 2},
                                                                .chunks = 2,
                                                                .microbatches = 4,
                                                                .shard_optimizer = true});
}

#else
#include <doctest/doctest.h>

#include <cstdio>

namespace {
/// For a decorator, so that it is said before the tests run.
bool say_what_is_missing() {
  std::puts("steady_state: this build did not find cupti.h, so nothing counts calls; skipped");
  return true;
}
}  // namespace

TEST_CASE("gpu steady state: calls are counted" * doctest::skip(say_what_is_missing())) {
  FAIL("this program was built without CUPTI");
}
#endif
