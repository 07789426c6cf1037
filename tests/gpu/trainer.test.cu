// Training on the GPU against training on the host: the same plan, dropout on, several
// micro-batches, sequences longer than a tile of attention.
#include "training.cuh"
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/cublas.hpp>
#include <mega/nn/cublas_lt.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using support::same_bits;

template <class Spec>
struct HostPlan : mega::DefaultPlan {
  using stage = mega::nn::Transformer<Spec, mega::SelfComm>;
};

template <class Spec, class Product = mega::nn::CublasProduct>
using GpuPlan = support::GpuPlan<Spec, Product>;

constexpr int batches = 3;

constexpr int vocab = 1003;

template <class Spec>
mega::nn::TransformerConfig config() {
  return support::config_of<Spec>({.layers = 2,
                                   .hidden = 96,
                                   .heads = 6,
                                   .head_dim = 16,
                                   .ffn = 200,
                                   .vocab = vocab,
                                   .max_positions = 150,
                                   .dropout = {0.1F, 0.1F, 0.1F}},
                                  2);
}

const mega::nn::TransformerRun run{.micro_batch = 2, .sequence = 133, .loss_rows = 100};

support::Batch<> tokens() {
  return {run, vocab, batches};
}

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> gradients;  // of the first step
};

template <class Plan>
Outcome train() {
  using Stage = typename Plan::stage;
  typename Plan::communicator world;
  mega::TrainerOptions<> options{.microbatches = batches, .seed = 77};
  mega::Trainer<Plan> trainer(
      world, options, support::even_stages<Stage>(config<typename Stage::spec_type>(), run));
  const auto batch = tokens();
  Outcome out;
  for (int step = 0; step < 4; ++step) {
    const auto result = trainer.step(batch, 1e-3);
    out.losses.push_back(result.loss);
    out.norms.push_back(result.gradient_norm);
    if (step > 0) continue;
    const auto& store = trainer.parameters();
    for (const auto& e : store.table().entries()) {
      if (e.alias) continue;
      out.gradients[e.parameter.name] = support::fetch(trainer.compute(), store.gradients(e));
    }
  }
  return out;
}

template <class Spec>
void compare() {
  const Outcome host = train<HostPlan<Spec>>(), gpu = train<GpuPlan<Spec>>();
  double worst = 0;
  std::string name;
  REQUIRE(host.gradients.size() == gpu.gradients.size());
  for (const auto& [tensor, expected] : host.gradients) {
    const std::vector<float>& got = gpu.gradients.at(tensor);
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double d = static_cast<double>(got[i]) - static_cast<double>(expected[i]);
      difference += d * d;
      norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
    }
    const double error = std::sqrt(difference / norm);
    CAPTURE(tensor);
    CHECK(error <= 1e-5);
    if (error > worst) {
      worst = error;
      name = tensor;
    }
  }
  double loss = 0, gradient_norm = 0;
  for (std::size_t i = 0; i < host.losses.size(); ++i) {
    loss = std::fmax(loss, std::abs(gpu.losses[i] / host.losses[i] - 1));
    gradient_norm = std::fmax(gradient_norm, std::abs(gpu.norms[i] / host.norms[i] - 1));
  }
  std::printf("%s against the host: gradients %.1e (%s), losses %.1e, norms %.1e\n",
              std::string(Spec::name).c_str(), worst, name.c_str(), loss, gradient_norm);
  // Rounding of fp32; AdamW turns it into steps of up to the learning rate where a gradient is
  // nothing but rounding.
  CHECK(loss <= 1e-5);
  CHECK(gradient_norm <= 1e-4);
  CHECK(gpu.losses.back() < gpu.losses.front());
}

struct HalfOutcome {
  std::vector<mega::StepResult> results;
  std::vector<std::vector<mega::Float16>> values;  // after each step
  mega::LossScale scale;
};

/// Without dropout, whose numbers come by the step, skipped or not.
template <class Spec>
HalfOutcome train_half(float initial_scale, int steps) {
  using Plan = GpuPlan<Spec, mega::nn::CublasLtProduct<mega::Float16>>;
  mega::nn::TransformerConfig model = config<Spec>();
  model.dropout = {};
  mega::DeviceSelfComm world;
  const mega::TrainerOptions<> options{
      .microbatches = batches, .loss_scaling = {.initial = initial_scale}, .seed = 77};
  mega::Trainer<Plan> trainer(world, options,
                              support::even_stages<typename Plan::stage>(model, run));
  const auto batch = tokens();
  HalfOutcome out;
  for (int step = 0; step < steps; ++step) {
    out.results.push_back(trainer.step(batch, 1e-3));
    out.values.push_back(support::fetch(trainer.compute(), trainer.parameters().values()));
  }
  out.scale = trainer.loss_scale();
  return out;
}

/// Free memory of the device, with what the stream-ordered allocator holds ready counted as free.
std::size_t free_memory() {
  std::size_t free = 0, total = 0, reserved = 0, used = 0;
  mega::cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  cudaMemPool_t pool{};
  mega::cuda::check(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
  mega::cuda::check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved),
                    "cudaMemPoolGetAttribute");
  mega::cuda::check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used),
                    "cudaMemPoolGetAttribute");
  return free + reserved - used;
}

}  // namespace

TEST_CASE("gpu trainer: memory is taken by the first step at the latest, and given back") {
  using Plan = GpuPlan<mega::nn::Llama3>;
  mega::Cuda device;
  { mega::cuda::Stream first; }  // the context itself
  const auto train = [] {
    const std::size_t at_start = free_memory();
    mega::DeviceSelfComm world;
    mega::Trainer<Plan> trainer(world, {.microbatches = batches},
                                support::even_stages<Plan::stage>(config<mega::nn::Llama3>(), run));
    const auto batch = tokens();
    trainer.step(batch, 1e-3);
    const std::size_t after_one = free_memory();
    CHECK(after_one + trainer.device_bytes() <= at_start);
    for (int i = 0; i < 3; ++i) trainer.step(batch, 1e-3);
    CHECK(free_memory() == after_one);
  };
  // Modules that CUDA loads at their first launch stay.
  train();
  const std::size_t between = free_memory();
  train();
  CHECK(free_memory() == between);
}

TEST_CASE("gpu trainer: GPT-3 with dropout trains as on the host") {
  compare<mega::nn::Gpt3>();
}
TEST_CASE("gpu trainer: Llama-3 with dropout trains as on the host") {
  compare<mega::nn::Llama3>();
}

TEST_CASE_TEMPLATE("gpu trainer: fp16 skips what overflows, halves the scale, and trains on", Spec,
                   mega::nn::Gpt3, mega::nn::Llama3) {
  constexpr float high = 0x1p34F;
  constexpr int steps = 24;
  const HalfOutcome bumpy = train_half<Spec>(high, steps);
  int skipped = 0;  // before the first step that was not
  while (skipped < steps && bumpy.results[static_cast<std::size_t>(skipped)].skipped) ++skipped;
  // The gradient of a logit is up to scale / 684 targets, so that 2^26 is already too much.
  REQUIRE(skipped >= 8);
  REQUIRE(skipped <= steps - 4);
  const float reached = std::ldexp(high, -skipped);
  std::printf("%s in fp16: %d steps skipped down to a loss scale of %g\n",
              std::string(Spec::name).c_str(), skipped, static_cast<double>(reached));

  // Each skipped step halves the scale of the next, whenever it comes, and changes nothing else.
  mega::LossScale expected{.scale = high};
  for (std::size_t i = 0; i < bumpy.results.size(); ++i) {
    CAPTURE(i);
    CHECK(bumpy.results[i].loss_scale == expected.scale);
    const bool skips = bumpy.results[i].skipped;
    expected =
        skips ? mega::LossScale{expected.scale / 2, 0, expected.skipped_steps + 1}
              : mega::LossScale{expected.scale, expected.good_steps + 1, expected.skipped_steps};
    if (i > 0) CHECK(same_bits(bumpy.values[i], bumpy.values[i - 1]) == skips);
  }
  CHECK(bumpy.scale == expected);

  // The same run as if it had begun there.
  const HalfOutcome smooth = train_half<Spec>(reached, steps - skipped);
  for (std::size_t i = static_cast<std::size_t>(skipped); i < bumpy.results.size(); ++i) {
    CAPTURE(i);
    const std::size_t same = i - static_cast<std::size_t>(skipped);
    CHECK(bumpy.results[i].loss == smooth.results[same].loss);
    CHECK(bumpy.results[i].skipped == smooth.results[same].skipped);
    if (!bumpy.results[i].skipped)
      CHECK(bumpy.results[i].gradient_norm == smooth.results[same].gradient_norm);
    CHECK(same_bits(bumpy.values[i], smooth.values[same]));
  }
  CHECK(smooth.results.back().loss < smooth.results.front().loss);
}

TEST_CASE_TEMPLATE("gpu trainer: loss and norm of fp16 are those of fp32, whatever the scale", Spec,
                   mega::nn::Gpt3, mega::nn::Llama3) {
  using Plan = GpuPlan<Spec>;
  mega::nn::TransformerConfig model = config<Spec>();
  model.dropout = {};
  mega::DeviceSelfComm world;
  const mega::TrainerOptions<> options{.microbatches = batches, .seed = 77};
  mega::Trainer<Plan> trainer(world, options,
                              support::even_stages<typename Plan::stage>(model, run));
  const auto single = trainer.step(tokens(), 1e-3);
  for (const float scale : {1024.0F, 65536.0F}) {
    const auto half = train_half<Spec>(scale, 1).results[0];
    CHECK_FALSE(half.skipped);
    CHECK(half.loss == doctest::Approx(single.loss).epsilon(1e-3));
    CHECK(half.gradient_norm == doctest::Approx(single.gradient_norm).epsilon(1e-2));
  }
}
