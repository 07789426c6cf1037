// CUDA graphs: what is captured, what a capture refuses, and that training with graphs gives the
// bits of training without.
#include "../support/device_buffer.hpp"
#include "training.cuh"
#include <mega/comm/device_thread.cuh>
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/cublas_lt.hpp>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using mega::Bfloat16;
using mega::Index;
using mega::Matrix;
using mega::RandomKey;
using mega::RandomSite;
using mega::RandomUse;
using mega::ReplayScope;
using mega::Vector;
using mega::cuda::Event;
using mega::cuda::ExecutableGraph;
using mega::cuda::Graph;
using mega::cuda::GraphReplays;
using mega::cuda::Memory;
using mega::cuda::Stream;
using support::DeviceBuffer;
using support::fetch;
using support::same_bits;

std::vector<float> ones(Index n) {
  return std::vector<float>(static_cast<std::size_t>(n), 1.0F);
}

}  // namespace

TEST_CASE("gpu graphs: what is captured runs when it is launched, as often as it is launched") {
  Stream stream;
  DeviceBuffer<float> sum(stream, ones(1000)), one(stream, ones(1000));
  const Graph graph = mega::cuda::capture(
      stream, [&] { accumulate(stream, sum.device(), Vector<const float>(one.device())); });
  CHECK_FALSE(stream.is_capturing());
  CHECK(graph.nodes() == 1);
  CHECK(sum.fetch(stream) == ones(1000));
  ExecutableGraph executable = graph.instantiate();
  executable.launch(stream);
  executable.launch(stream);
  CHECK(sum.fetch(stream) == std::vector<float>(1000, 3.0F));
  // One that is under way may end.
  executable.launch(stream);
  executable = ExecutableGraph();
  CHECK_FALSE(executable);
  CHECK(sum.fetch(stream) == std::vector<float>(1000, 4.0F));
}

TEST_CASE("gpu graphs: a capture takes in the streams that wait for it") {
  Stream stream, other;
  DeviceBuffer<float> a(stream, ones(10)), b(stream, ones(10));
  Event forked, joined;
  const auto queue = [&] {
    accumulate(stream, a.device(), Vector<const float>(a.device()));
    stream.record(forked);
    other.wait(forked);
    accumulate(other, b.device(), Vector<const float>(a.device()));
    other.record(joined);
    stream.wait(joined);
    accumulate(stream, a.device(), Vector<const float>(b.device()));
  };
  const ExecutableGraph graph = mega::cuda::capture(stream, queue).instantiate();
  graph.launch(stream);  // a 2, b 3, a 5
  CHECK(a.fetch(stream) == std::vector<float>(10, 5.0F));
  // Both streams and the events are as good as new.
  queue();  // a 10, b 13, a 23
  CHECK(a.fetch(stream) == std::vector<float>(10, 23.0F));
}

TEST_CASE("gpu graphs: an error inside of a capture leaves it, and leaves the stream well") {
  Stream stream, other;
  DeviceBuffer<float> sum(stream, ones(10)), one(stream, ones(10));
  const auto add = [&] { accumulate(stream, sum.device(), Vector<const float>(one.device())); };
  struct Own {};
  CHECK_THROWS_AS((void)mega::cuda::capture(stream,
                                            [&] {
                                              add();
                                              throw Own{};
                                            }),
                  Own);
  // With a stream that has not come back.
  CHECK_THROWS_AS((void)mega::cuda::capture(stream,
                                            [&] {
                                              Event forked;
                                              stream.record(forked);
                                              other.wait(forked);
                                              throw Own{};
                                            }),
                  Own);
  try {
    (void)mega::cuda::capture(stream, [&] { (void)stream.scratch(1 << 20); });
    FAIL("scratch grew in a capture");
  } catch (const mega::Error& e) {
    CHECK(e.code() == mega::ErrorCode::logic);
    CHECK(std::string(e.what()).find("1048576 bytes") != std::string::npos);
  }
  for (Stream* s : {&stream, &other}) {
    CHECK_FALSE(s->is_capturing());
    accumulate(*s, sum.device(), Vector<const float>(one.device()));
    s->synchronize();
  }
  CHECK(sum.fetch(stream) == std::vector<float>(10, 3.0F));
  CHECK(cudaGetLastError() == cudaSuccess);
}

/// Calls of CUDA fail in these, on purpose: compute-sanitizer is told to report none of them.
TEST_SUITE_BEGIN("provokes API errors");

TEST_CASE("gpu graphs: a call that no graph can hold leaves the capture, and the stream well") {
  Stream stream;
  DeviceBuffer<float> sum(stream, ones(10)), one(stream, ones(10));
  const auto add = [&] { accumulate(stream, sum.device(), Vector<const float>(one.device())); };
  CHECK_THROWS_AS((void)mega::cuda::capture(stream,
                                            [&] {
                                              add();
                                              const Memory memory(4096);
                                            }),
                  mega::Error);
  CHECK_THROWS_AS((void)mega::cuda::capture(stream, [&] { stream.synchronize(); }), mega::Error);
  CHECK_FALSE(stream.is_capturing());
  add();
  CHECK(sum.fetch(stream) == std::vector<float>(10, 2.0F));
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_SUITE_END();

TEST_CASE("gpu graphs: other threads allocate and wait while this one captures") {
  Stream stream;
  DeviceBuffer<float> sum(stream, ones(10)), one(stream, ones(10));
  bool done = false;
  const Graph graph = mega::cuda::capture(stream, [&] {
    std::thread([&] {
      const mega::Cuda device;
      const Memory memory(4096);
      Stream own;
      fill_zero(own, Vector<std::byte>(memory.data(), 4096));
      own.synchronize();
      done = true;
    }).join();
    accumulate(stream, sum.device(), Vector<const float>(one.device()));
  });
  CHECK(done);
  CHECK(graph.nodes() == 1);
}

TEST_CASE(
    "gpu graphs: replays run, capture, launch, and begin anew when what they name has moved") {
  Stream stream, other;
  GraphReplays replays;
  DeviceBuffer<float> sum(stream, std::vector<float>{0.0F}), one(stream, ones(1));
  int bodies = 0;
  const auto body = [&] {
    ++bodies;
    auto* const copy = static_cast<float*>(stream.scratch(sizeof(float)));
    mega::cuda::copy(stream, Vector<float>(copy, 1), Vector<const float>(one.device()));
    accumulate(stream, sum.device(), Vector<const float>(copy, 1));
  };
  const auto run = [&](int times, std::uint64_t revision) {
    bodies = 0;
    for (int i = 0; i < times; ++i) replays.run(3, revision, body, stream, other);
    return bodies;
  };
  CHECK(run(1, 7) == 1);
  CHECK(replays.size() == 0);
  CHECK(run(1, 7) == 1);
  CHECK(replays.size() == 1);
  CHECK(replays.nodes() == 2);
  CHECK(run(5, 7) == 0);
  CHECK(sum.fetch(stream) == std::vector<float>{7.0F});
  // Another revision, or scratch of either stream that has moved: once by the body, once captured.
  CHECK(run(5, 8) == 2);
  (void)stream.scratch(std::size_t{8} << 20);
  CHECK(run(5, 8) == 2);
  (void)other.scratch(std::size_t{1} << 20);
  CHECK(run(5, 8) == 2);
  (void)other.scratch(1);  // there already
  CHECK(run(5, 8) == 0);
  replays.clear();
  CHECK(replays.size() == 0);
  CHECK(run(5, 8) == 2);
  CHECK(sum.fetch(stream) == std::vector<float>{32.0F});
}

namespace {

constexpr std::uint64_t steps[] = {0, 5, (std::uint64_t{1} << 40) + 3};

/// Checks that draw(site, out) gives the same bits whether the step is an argument or in memory,
/// and that a graph of it draws those of the step that is in memory when it is launched.
template <class T, class Draw>
void check_step_in_memory(Index count, const Draw& draw) {
  Stream stream;
  DeviceBuffer<T> out(count);
  DeviceBuffer<std::int64_t> step(1);
  const RandomSite in_memory{17, 999, 4, RandomUse::mlp_dropout, step.device().data()};
  const auto set_step = [&](std::uint64_t value) {
    mega::cuda::assign(stream, step.device(), static_cast<std::int64_t>(value));
  };
  set_step(1);
  draw(stream, in_memory, out.device());  // first uses
  const ExecutableGraph graph =
      mega::cuda::capture(stream, [&] { draw(stream, in_memory, out.device()); }).instantiate();
  std::vector<T> before;
  for (const std::uint64_t value : steps) {
    draw(stream, RandomKey{17, value, 4, RandomUse::mlp_dropout}, out.device());
    const std::vector<T> expected = out.fetch(stream);
    CHECK_FALSE(same_bits(expected, before));
    for (const bool launch : {false, true}) {
      mega::cuda::fill_zero(stream, out.device());
      set_step(value);
      launch ? graph.launch(stream) : draw(stream, in_memory, out.device());
      CHECK(same_bits(out.fetch(stream), expected));
    }
    before = expected;
  }
}

template <class T>
void check_dropout() {
  // Rows that begin with a Philox block, and rows that do not.
  for (const Index cols : {Index{64}, Index{45}}) {
    constexpr Index rows = 37;
    Stream stream;
    DeviceBuffer<T> x(stream, std::vector<T>(static_cast<std::size_t>(rows * cols), T(1.0F)));
    check_step_in_memory<T>(rows * cols, [&](Stream& s, RandomSite site, Vector<T> out) {
      dropout_forward(s, Matrix<T>(out.data(), rows, cols),
                      Matrix<const T>(x.device().data(), rows, cols), 0.4F, site,
                      {2, cols + 12, 4});
    });
  }
}

template <class T>
void check_attention() {
  // Lengths that are a multiple of four, and not: two ways to draw on tensor cores.
  for (const Index time : {Index{132}, Index{131}}) {
    const mega::nn::AttentionShape shape{2, time, 4, 2, 32};
    const Index rows = shape.rows(), width = shape.query_heads * shape.head_dim;
    Stream stream;
    const RandomKey key{.seed = 3, .use = RandomUse::test};
    std::vector<T> values(static_cast<std::size_t>(rows * shape.width()));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = T(key.uniform(static_cast<Index>(i)) - 0.5F);
    DeviceBuffer<T> qkv(stream, values), attended(rows * width);
    DeviceBuffer<float> lse(rows * shape.query_heads);
    // The result of forward, then the gradient.
    const Index count = rows * (width + shape.width());
    check_step_in_memory<T>(count, [&](Stream& s, RandomSite site, Vector<T> out) {
      const mega::nn::AttentionDropout dropout{0.3F, site, 5, 1, 7};
      const Matrix<T> y(out.data(), rows, width), dqkv(y.data() + y.size(), rows, shape.width());
      const Matrix<const T> in(qkv.device().data(), rows, shape.width());
      const mega::View<float, 3> sums(lse.device().data(), shape.batch, shape.query_heads, time);
      attention_forward(s, y, sums, in, shape, dropout);
      attention_backward(s, dqkv, Matrix<const T>(y), in, Matrix<const T>(y),
                         mega::View<const float, 3>(sums), shape, dropout);
    });
  }
}

}  // namespace

TEST_CASE("gpu graphs: dropout draws the step that stands in memory") {
  check_dropout<float>();
  check_dropout<Bfloat16>();
}

TEST_CASE("gpu graphs: attention draws the step that stands in memory") {
  check_attention<float>();
  check_attention<Bfloat16>();
}

namespace {

constexpr int layers = 2, vocab = 517, train_steps = 6;

template <class Spec>
mega::nn::TransformerConfig config() {
  return support::config_of<Spec>({.layers = layers,
                                   .hidden = 128,
                                   .heads = 4,
                                   .head_dim = 32,
                                   .ffn = 256,
                                   .vocab = vocab,
                                   .max_positions = 72,
                                   .dropout = {0.1F, 0.2F, 0.1F}},
                                  2);
}

constexpr mega::nn::TransformerRun run{.micro_batch = 2, .sequence = 72, .loss_rows = 100};

/// Other tokens in each step, in pageable memory.
using Batch = support::Batch<>;

template <class Spec, class Element, class Comm>
using Plan = support::GpuPlan<Spec, mega::nn::CublasLtProduct<Element>, Comm>;

enum class Between { nothing, scratch, evaluate, queue_ahead };

struct Setup {
  mega::Mesh mesh{};
  int chunks = 1;
  int microbatches = 3;
  Between between = Between::nothing;
};

/// What a rank's training leaves behind.
struct Outcome {
  std::vector<double> figures;
  std::vector<float> first_moments, second_moments, masters;
  std::vector<std::uint8_t> values;
  std::size_t graphs = 0;
};

bool equal(const Outcome& a, const Outcome& b) {
  return same_bits(a.figures, b.figures) && same_bits(a.first_moments, b.first_moments) &&
         same_bits(a.second_moments, b.second_moments) && same_bits(a.masters, b.masters) &&
         same_bits(a.values, b.values);
}

template <class ThePlan>
Outcome train_rank(typename ThePlan::communicator& world, const Setup& setup, ReplayScope scope) {
  typename mega::Trainer<ThePlan>::options_type options;
  options.mesh = setup.mesh;
  options.chunks = setup.chunks;
  options.microbatches = setup.microbatches;
  options.seed = 77;
  mega::Trainer<ThePlan> trainer(world, options,
                                 support::even_stages<typename ThePlan::stage>(
                                     config<typename ThePlan::stage::spec_type>(), run),
                                 mega::Cuda(0, scope));
  Outcome out;
  std::vector<Batch> batches;
  for (int step = 0; step < train_steps; ++step)
    batches.emplace_back(run, vocab, setup.microbatches, step);
  const auto keep = [&](const mega::StepResult& result) {
    out.figures.push_back(result.loss);
    out.figures.push_back(result.gradient_norm);
  };
  for (int step = 0; step < train_steps; ++step) {
    const Batch& batch = batches[static_cast<std::size_t>(step)];
    const double learning_rate = 1e-3 * (step + 1);
    if (setup.between == Between::queue_ahead && step + 1 < train_steps) {
      trainer.queue_step(batch, learning_rate);
      continue;
    }
    keep(trainer.step(batch, learning_rate));
    if (setup.between == Between::scratch && step == 3)
      (void)trainer.compute().scratch(std::size_t{64} << 20);
    if (setup.between == Between::evaluate) keep(trainer.evaluate(batches[0]));
  }
  const auto& store = trainer.parameters();
  Stream& compute = trainer.compute();
  out.first_moments = fetch(compute, store.first_moments());
  out.second_moments = fetch(compute, store.second_moments());
  using value_type = typename std::remove_cvref_t<decltype(store)>::value_type;
  if constexpr (!std::is_same_v<value_type, float>) {
    for (std::size_t c = 0; c < store.owned().size(); ++c) {
      const auto masters = fetch(compute, store.masters(c, store.owned()[c].values));
      out.masters.insert(out.masters.end(), masters.begin(), masters.end());
    }
  }
  const auto values = store.values();
  out.values =
      fetch(compute, Vector<std::uint8_t>(reinterpret_cast<std::uint8_t*>(values.data()),
                                          values.size() * static_cast<Index>(sizeof(value_type))));
  out.graphs = trainer.replays();
  return out;
}

/// Outcomes of all ranks.
template <class ThePlan>
std::vector<Outcome> train(const Setup& setup, ReplayScope scope) {
  std::vector<Outcome> out(static_cast<std::size_t>(setup.mesh.size()));
  using Comm = typename ThePlan::communicator;
  support::run_ranks<Comm>(setup.mesh.size(), [&](Comm& world) {
    out[static_cast<std::size_t>(world.rank())] = train_rank<ThePlan>(world, setup, scope);
  });
  return out;
}

/// @param graphs  of rank 0, by scope
template <class ThePlan>
void check_equal_bits(const Setup& setup, std::size_t graphs_of_actions,
                      std::size_t graphs_of_step) {
  CAPTURE(static_cast<int>(setup.between));
  const auto reference = train<ThePlan>(setup, ReplayScope::none);
  CHECK(reference[0].graphs == 0);
  CHECK(reference[0].figures.front() > 0);
  for (const ReplayScope scope : {ReplayScope::actions, ReplayScope::step}) {
    CAPTURE(static_cast<int>(scope));
    const auto replayed = train<ThePlan>(setup, scope);
    CHECK(replayed[0].graphs == (scope == ReplayScope::step ? graphs_of_step : graphs_of_actions));
    for (std::size_t rank = 0; rank < reference.size(); ++rank) {
      CAPTURE(rank);
      CHECK(equal(replayed[rank], reference[rank]));
    }
  }
}

template <class Spec, class Element>
void check_one_rank() {
  using ThePlan = Plan<Spec, Element, mega::DeviceSelfComm>;
  // forward, loss and backward a micro-batch
  check_equal_bits<ThePlan>({}, 9, 1);
  check_equal_bits<ThePlan>({.between = Between::queue_ahead}, 9, 1);
  check_equal_bits<ThePlan>({.between = Between::scratch}, 9, 1);
  // and forward and loss of evaluations
  check_equal_bits<ThePlan>({.between = Between::evaluate}, 15, 1);
}

}  // namespace

TEST_CASE("gpu graphs: GPT-3 in bf16 with dropout trains to the same bits") {
  check_one_rank<mega::nn::Gpt3, Bfloat16>();
}
TEST_CASE("gpu graphs: Llama-3 in bf16 with dropout trains to the same bits") {
  check_one_rank<mega::nn::Llama3, Bfloat16>();
}
TEST_CASE("gpu graphs: several chunks on one rank") {
  // Channels are between the chunks, so a step is no graph.
  check_equal_bits<Plan<mega::nn::Gpt3, Bfloat16, mega::DeviceSelfComm>>({.chunks = 2}, 15, 15);
}
TEST_CASE("gpu graphs: ranks that share a GPU") {
  using Ranks = Plan<mega::nn::Gpt3, Bfloat16, mega::DeviceThreadComm>;
  check_equal_bits<Ranks>({.mesh = {.pipeline = 2}}, 6, 6);
  check_equal_bits<Ranks>({.mesh = {.data = 2}}, 9, 9);
  check_equal_bits<Ranks>({.mesh = {.tensor = 2}}, 0, 0);
}
