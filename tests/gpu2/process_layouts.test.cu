// Trains in two processes with a GPU each and compares with one GPU: every layout in processes of
// its own, which also train alone, and under the layout again in the same session.
#include "tests/grid/transformer_run.hpp"
#include "tests/support/process_ranks.hpp"
#include <mega/comm/nccl_process.hpp>
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/cublas.hpp>
#include <mega/nn/cublas_lt.hpp>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

using mega::Bfloat16;
using mega::Index;
using mega::NcclProcessComm;
using mega::Vector;
using mega::cuda::Memory;
using mega::cuda::Stream;

constexpr double deadline = 15;

const std::array<grid::Layout, 5> layouts{{
    {.mesh = {.tensor = 2}},
    {.mesh = {.tensor = 2}, .sequence_parallel = true},
    {.mesh = {.pipeline = 2}},
    {.mesh = {.pipeline = 2}, .chunks = 2},
    {.mesh = {.data = 2}, .shard_optimizer = true},
}};

template <class Spec, class Product, class Comm>
struct Plan : mega::DefaultPlan {
  using device = mega::Cuda;
  using communicator = Comm;
  using stage = mega::nn::Transformer<Spec, Comm, mega::nn::Kernels<Product>>;
};

/// The small models; in bf16, heads of the least width that attention takes.
template <class Spec, class T>
grid::Model model() {
  constexpr bool gpt = std::is_same_v<Spec, mega::nn::Gpt3>;
  grid::Model m = gpt ? grid::gpt() : grid::llama();
  if constexpr (std::is_same_v<T, Bfloat16>) {
    m.config.hidden = 32;
    m.config.heads = 4;
    m.config.kv_heads = gpt ? 4 : 2;
    m.config.head_dim = 8;
    m.config.ffn = 48;
  }
  return m;
}

int current_device() {
  int device = -1;
  mega::cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

/// What a rank sees of a run: figures that are equal on all ranks, then this rank's own values and
/// moments after the last step.
struct Run {
  std::vector<double> losses, norms;
  std::vector<float> state;
  friend bool operator==(const Run&, const Run&) = default;
};

template <class T>
void append(std::vector<float>& out, Stream& stream, Vector<T> values) {
  std::vector<T> host(static_cast<std::size_t>(values.size()));
  download(stream, Vector<T>(host.data(), values.size()), Vector<const T>(values));
  stream.synchronize();
  for (const T value : host) out.push_back(static_cast<float>(value));
}

template <class Spec, class Product, class Comm>
Run train(Comm& world, const grid::Layout& layout) {
  using ThePlan = Plan<Spec, Product, Comm>;
  const grid::Model m = model<Spec, typename Product::element>();
  mega::nn::TransformerRun run{.micro_batch = m.micro_batch,
                               .sequence = m.sequence,
                               .sequence_parallel = layout.sequence_parallel};
  run.loss_rows = m.sequence - 2;  // several pieces a micro-batch
  typename mega::Trainer<ThePlan>::options_type options;
  options.mesh = layout.mesh;
  options.chunks = layout.chunks;
  options.microbatches = m.global_microbatches / layout.mesh.data;
  options.shard_optimizer = layout.shard_optimizer;
  options.clip_norm = 0.5;
  options.seed = 11;
  mega::Trainer<ThePlan> trainer(
      world, options,
      [&](mega::StagePosition p, auto& groups) {
        return typename ThePlan::stage(
            m.config, run, p, mega::dpp::split_layers(m.config.layers, p.stages).of_stage(p.stage),
            groups.tensor);
      },
      mega::Cuda(current_device()));
  const int data = layout.mesh.coordinates(world.rank())[mega::Axis::data];
  const grid::Text text(m, options.microbatches, data * options.microbatches);
  Run out;
  for (int step = 0; step < m.steps; ++step) {
    const mega::StepResult result = trainer.step(text, 1e-3);
    out.losses.push_back(result.loss);
    out.norms.push_back(result.gradient_norm);
  }
  const auto& store = trainer.parameters();
  append(out.state, trainer.compute(), store.values());
  append(out.state, trainer.compute(), store.first_moments());
  append(out.state, trainer.compute(), store.second_moments());
  return out;
}

/// Largest relative difference; infinite where one is not a number.
double worst(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double out = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double error = std::abs(a[i] / b[i] - 1);
    out = std::isnan(error) ? INFINITY : std::max(out, error);
  }
  return out;
}

// What a rank does.

template <class Spec, class Product>
void train_and_compare(NcclProcessComm& world, const grid::Layout& layout) {
  constexpr bool fp32 = std::is_same_v<typename Product::element, float>;
  const auto begin = std::chrono::steady_clock::now();
  // Under the layout first, since a step that finds all code and handles there proves less.
  const Run first = train<Spec, Product>(world, layout);
  mega::DeviceSelfComm self;
  const Run alone = train<Spec, Product>(self, {});
  const Run second = train<Spec, Product>(world, layout);

  CHECK(alone.losses.size() == 3);
  CHECK(alone.losses.back() < alone.losses.front());
  const double losses = worst(first.losses, alone.losses), norms = worst(first.norms, alone.norms);
  // Rounding of each kind of number; norms in bf16 are told, not bounded.
  CHECK(losses <= (fp32 ? 1e-5 : 2e-2));
  if (fp32) CHECK(norms <= 1e-5);
  CHECK_FALSE(first.state.empty());
  CHECK(std::all_of(first.state.begin(), first.state.end(),
                    [](float x) { return std::isfinite(x); }));
  const bool again = second == first;
  CHECK(again);

  std::string figures = "figures:";
  for (const auto* all : {&first.losses, &first.norms}) {
    for (const double figure : *all) {
      char digits[40];
      std::snprintf(digits, sizeof digits, " %a", figure);  // every bit
      figures += digits;
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%s\nsummary: losses %.1e, norms %.1e, again %s, %.1f s\n", figures.c_str(), losses,
              norms, again ? "bit for bit" : "DIFFERENT", seconds);
  std::fflush(stdout);
}

Vector<std::byte> bytes(const Memory& memory, Index n) {
  return {memory.data(), n};
}
template <class T>
T* numbers(const Memory& memory) {
  return reinterpret_cast<T*>(memory.data());
}

/// On rank 0, what a rank's first step does for the first time, each while a slot is posted. Rank 1
/// sends the message when it hears that the host came back, or after some seconds, and says in it
/// which of the two.
void first_uses(NcclProcessComm& comm, bool attended) {
  constexpr Index n = 64;
  const mega::Cuda device(current_device());
  Stream in, out, work, bf16_work;
  Memory slot(8), words(16), matrices(3 * n * n * sizeof(float)), more;
  fill_zero(work, bytes(matrices, 3 * n * n * 4));
  const std::array<std::int64_t, 2> gave_up_or_heard{0, 1};
  upload(out, Vector<std::int64_t>(numbers<std::int64_t>(words), 2),
         Vector<const std::int64_t>(gave_up_or_heard.data(), 2));
  work.synchronize();
  out.synchronize();
  const int peer = 1 - comm.rank();
  auto sender = comm.open_sender(peer, static_cast<std::uint32_t>(comm.rank()));
  auto receiver = comm.open_receiver(peer, static_cast<std::uint32_t>(peer));
  const auto send = [&](bool heard) {
    sender.send(out, Vector<const std::byte>(words.data() + (heard ? 8 : 0), 8));
  };
  const auto waits = [&] {
    const cudaError_t status = cudaStreamQuery(in.native());
    if (status != cudaErrorNotReady) mega::cuda::check(status, "cudaStreamQuery");
    (void)cudaGetLastError();  // not ready is none
    return status == cudaErrorNotReady;
  };
  /// Whether the host came back before the message.
  const auto probe = [&](const char* what, const auto& use) {
    std::int64_t heard = 0;
    receiver.post(in, bytes(slot, 8));
    if (comm.rank() == 0) {
      std::this_thread::sleep_for(
          std::chrono::milliseconds(50));  // its kernel, if any, runs by now
      const auto begin = std::chrono::steady_clock::now();
      use();
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      send(true);
      receiver.complete(in);
      download(in, Vector<std::int64_t>(&heard, 1),
               Vector<const std::int64_t>(numbers<std::int64_t>(slot), 1));
      in.synchronize();
      std::printf("first use, %s: %s took %.3f s%s\n", attended ? "attended" : "unattended", what,
                  seconds, heard != 0 ? "" : " and WAITED for the message");
      std::fflush(stdout);
    } else {
      receiver.complete(in);
      for (int i = 0; i < 500 && waits(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      heard = waits() ? 0 : 1;
      send(heard != 0);
      in.synchronize();
    }
    out.synchronize();
    return heard != 0;
  };

  // Both ends are connected before the first probe.
  receiver.post(in, bytes(slot, 8));
  send(true);
  receiver.complete(in);
  in.synchronize();
  out.synchronize();
  // Rank 1 must be able to give up, so it does not wait in complete().
  comm.attend(attended && comm.rank() == 0);
  using mega::nn::Transpose;
  const auto multiply = [&](auto product, Stream& stream) {
    using Product = decltype(product);
    auto* const at = numbers<typename Product::element>(matrices);
    Product::gemm(stream, Transpose::no, Transpose::no, n, n, n, 1.0F, at, n, at + n * n, n, 0.0F,
                  at + 2 * n * n, n);
  };
  CHECK(probe("nothing", [] {}));
  int waited = 0;
  const auto count = [&](const char* what, const auto& use) { waited += probe(what, use) ? 0 : 1; };
  count("cudaMalloc", [&] { more = Memory(std::size_t{64} << 20); });
  count("a handle of cuBLAS", [&] { (void)work.resource<mega::nn::detail::CublasHandle>(); });
  count("a product of cuBLAS", [&] { multiply(mega::nn::CublasProduct(), work); });
  count("a product of cuBLASLt",
        [&] { multiply(mega::nn::CublasLtProduct<Bfloat16>(), bf16_work); });
  count("scratch memory", [&] { (void)work.scratch(std::size_t{1} << 20); });
  count("more scratch memory", [&] { (void)work.scratch(std::size_t{64} << 20); });
  if (attended) {
    CHECK(waited == 0);
  } else {
    CHECK(waited > 0);
  }
}

/// Slots that are posted ahead while attended, completed then and later, and given up.
void attended_slots(NcclProcessComm& comm) {
  // NCCL takes the first message at once; the others wait for their receives.
  constexpr std::array<Index, 4> sizes{8, 64 << 20, (64 << 20) + 8, 32 << 20};
  constexpr Index most = (64 << 20) + 8;
  const int me = comm.rank(), peer = 1 - me;
  Stream in, out, beside;
  std::vector<Memory> sent, slots;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    sent.emplace_back(static_cast<std::size_t>(most));
    slots.emplace_back(static_cast<std::size_t>(most));
    const auto fill = [&](const Memory& memory, int value) {
      mega::cuda::check(
          cudaMemsetAsync(memory.data(), value, static_cast<std::size_t>(most), out.native()),
          "cudaMemsetAsync");
    };
    fill(sent[k], 10 * (static_cast<int>(k) + 1) + me);
    fill(slots[k], 99);
  }
  out.synchronize();
  auto sender = comm.open_sender(peer, static_cast<std::uint32_t>(me));
  auto receiver = comm.open_receiver(peer, static_cast<std::uint32_t>(peer));
  // On a stream that nothing orders behind the receives.
  const auto expect = [&](std::size_t k, bool filled) {
    CAPTURE(k);
    std::array<unsigned char, 2> ends{};
    for (std::size_t i = 0; i < 2; ++i)
      download(beside, Vector<std::byte>(reinterpret_cast<std::byte*>(&ends[i]), 1),
               Vector<const std::byte>(slots[k].data() + (i == 0 ? 0 : sizes[k] - 1), 1));
    beside.synchronize();
    const int value = filled ? 10 * (static_cast<int>(k) + 1) + peer : 99;
    CHECK(static_cast<int>(ends[0]) == value);
    CHECK(static_cast<int>(ends[1]) == value);
  };
  comm.attend(true);
  for (std::size_t k = 0; k < sizes.size(); ++k) receiver.post(in, bytes(slots[k], sizes[k]));
  // Also what this sets up comes before a send waits on the GPU.
  expect(0, false);
  for (std::size_t k = 0; k < sizes.size(); ++k)
    sender.send(out, Vector<const std::byte>(bytes(sent[k], sizes[k])));
  for (std::size_t k = 0; k < 2; ++k) {
    for (std::size_t later = k; later < sizes.size(); ++later) expect(later, false);
    receiver.complete(in);
    expect(k, true);
  }
  // The other two were only noted.
  comm.attend(false);
  out.synchronize();
  for (std::size_t k = 2; k < sizes.size(); ++k) {
    receiver.complete(in);
    in.synchronize();
    expect(k, true);
  }
  comm.attend(true);
  const Memory sum(4);
  if (me == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const float own = static_cast<float>(me + 1);
  upload(out, Vector<float>(numbers<float>(sum), 1), Vector<const float>(&own, 1));
  comm.all_reduce(out, Vector<float>(numbers<float>(sum), 1), mega::comm::Reduce::sum);
  float got = 0;
  download(beside, Vector<float>(&got, 1), Vector<const float>(numbers<float>(sum), 1));
  beside.synchronize();
  CHECK(got == 3.0F);
  // The receiver ends with a slot that was only noted.
  receiver.post(in, bytes(slots[0], 8));
}

/// "gpt3 bf16 3": what to train, in which precision, under which of the layouts.
void do_work(NcclProcessComm& comm, const std::string& work) {
  if (work == "unattended first uses") return first_uses(comm, false);
  if (work == "attended first uses") return first_uses(comm, true);
  if (work == "attended slots") return attended_slots(comm);
  std::istringstream in(work);
  std::string spec, precision;
  std::size_t layout = 0;
  in >> spec >> precision >> layout;
  REQUIRE_FALSE(in.fail());
  const auto run = [&]<class Spec>(Spec) {
    if (precision == "fp32")
      return train_and_compare<Spec, mega::nn::CublasProduct>(comm, layouts.at(layout));
    return train_and_compare<Spec, mega::nn::CublasLtProduct<Bfloat16>>(comm, layouts.at(layout));
  };
  return spec == "gpt3" ? run(mega::nn::Gpt3()) : run(mega::nn::Llama3());
}

// What starts the ranks.

/// The line that begins with `what`; empty where there is none.
std::string line_of(const std::string& text, const std::string& what) {
  const std::size_t begin = text.find(what);
  return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
}

void expect_layouts(const std::string& spec, const std::string& precision) {
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const std::string what = spec + " " + precision + " " + layouts[i].text();
    CAPTURE(what);
    const auto texts =
        process_ranks::expect_success(spec + " " + precision + " " + std::to_string(i), 2);
    const std::string figures = line_of(texts[0], "figures:");
    CHECK_FALSE(figures.empty());
    CHECK(line_of(texts[1], "figures:") == figures);
    std::printf("%s: %s\n", what.c_str(), line_of(texts[0], "summary:").c_str());
    std::fflush(stdout);
  }
}

}  // namespace

TEST_CASE(process_ranks::rank_case* doctest::skip()) {
  const std::string work = process_ranks::own_work();
  mega::run_nccl([&](NcclProcessComm& comm) { do_work(comm, work); },
                 {.deadline = mega::comm::Seconds(deadline)});
}

TEST_CASE("process layouts: first uses wait for a posted slot, but not while attended") {
  for (const char* work : {"unattended first uses", "attended first uses"}) {
    const auto texts = process_ranks::expect_success(work, 2);
    std::printf("%s", texts[0].c_str());
    std::fflush(stdout);
  }
}

TEST_CASE("process layouts: attended calls return when done, and slots are received in order") {
  process_ranks::expect_success("attended slots", 2);
}

TEST_CASE("process layouts: small GPT-3 in fp32, every layout of two processes") {
  expect_layouts("gpt3", "fp32");
}
TEST_CASE("process layouts: small Llama-3 in fp32, every layout of two processes") {
  expect_layouts("llama3", "fp32");
}
TEST_CASE("process layouts: small GPT-3 in bf16, every layout of two processes") {
  expect_layouts("gpt3", "bf16");
}
TEST_CASE("process layouts: small Llama-3 in bf16, every layout of two processes") {
  expect_layouts("llama3", "bf16");
}
