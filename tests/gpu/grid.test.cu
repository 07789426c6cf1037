// Layouts of up to eight ranks on one GPU against one rank.
#include "tests/support/device_layouts.cuh"
#include <mega/comm/device_thread.cuh>

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

namespace {

using grid::Layout;

template <class Spec>
grid::Outcome train(const grid::Model& model, const Layout& layout) {
  grid::Outcome outcome;
  std::mutex mutex;
  mega::run_device_threads(layout.mesh.size(), [&](mega::DeviceThreadComm& world) {
    device_layouts::train_rank<Spec>(world, mega::Cuda(), model, layout, outcome, mutex);
  });
  device_layouts::join_ties(outcome, model.config.tied_head);
  return outcome;
}

const std::vector<Layout> layouts_of_four_layers{
    {.mesh = {.tensor = 2, .data = 2, .pipeline = 2}},
    {.mesh = {.tensor = 4, .data = 2}},
    {.mesh = {.tensor = 2, .data = 2, .pipeline = 2},
     .chunks = 2,
     .sequence_parallel = true,
     .shard_optimizer = true},
    {.mesh = {.data = 2, .pipeline = 4}, .shard_optimizer = true},
    {.mesh = {.tensor = 2, .pipeline = 2}, .sequence_parallel = true},
    {.mesh = {.tensor = 4}, .sequence_parallel = true},
    {.mesh = {.data = 4}, .shard_optimizer = true},
    {.mesh = {.pipeline = 4}},
    {.mesh = {.tensor = 2}},
    {.mesh = {.pipeline = 2}, .chunks = 2},
    {.mesh = {.data = 2}},
};
const std::vector<Layout> layouts_of_eight_layers{
    {.mesh = {.data = 2, .pipeline = 4}, .chunks = 2, .shard_optimizer = true},
    {.mesh = {.pipeline = 8}},
};
const std::vector<Layout> layouts_of_odd_sizes{
    {.mesh = {.tensor = 2, .data = 2, .pipeline = 2}},
    {.mesh = {.tensor = 2, .pipeline = 2}, .chunks = 2},
};

grid::Model deep(grid::Model model) {
  model.config.layers = 8;
  return model;
}

template <class Spec>
void compare(const char* what, const grid::Model& model, bool every_value,
             const std::vector<Layout>& layouts) {
  device_layouts::compare<Spec>(what, model, every_value, layouts, train<Spec>);
}

}  // namespace

TEST_CASE("one gpu: small GPT-3 with a tied head, layouts of two to eight ranks") {
  compare<mega::nn::Gpt3>("gpt3 small", grid::gpt(), true, layouts_of_four_layers);
  compare<mega::nn::Gpt3>("gpt3 deep", deep(grid::gpt()), false, layouts_of_eight_layers);
}
TEST_CASE("one gpu: small Llama-3, layouts of two to eight ranks") {
  compare<mega::nn::Llama3>("llama3 small", grid::llama(), true, layouts_of_four_layers);
  compare<mega::nn::Llama3>("llama3 deep", deep(grid::llama()), false, layouts_of_eight_layers);
}
TEST_CASE("one gpu: GPT-3 with dropout and odd sizes") {
  grid::Model model = device_layouts::large(true);
  model.config.dropout = {0.1F, 0.1F, 0.1F};
  compare<mega::nn::Gpt3>("gpt3 dropout", model, false, layouts_of_odd_sizes);
}
TEST_CASE("one gpu: Llama-3 with grouped-query heads and odd sizes") {
  compare<mega::nn::Llama3>("llama3 grouped", device_layouts::large(false), false,
                            layouts_of_odd_sizes);
}

TEST_CASE("one gpu: a rank that throws within a step ends all others, who name it") {
  using Plan = device_layouts::Plan<mega::nn::Llama3, mega::DeviceThreadComm>;
  const grid::Model model = grid::llama();
  const mega::nn::TransformerRun run{
      .micro_batch = model.micro_batch, .sequence = model.sequence, .loss_rows = 4};
  std::array<std::string, 8> ends;
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH_AS(
      mega::run_device_threads(
          8,
          [&](mega::DeviceThreadComm& world) {
            try {
              mega::Trainer<Plan> trainer(
                  world, {.mesh = {.tensor = 2, .data = 2, .pipeline = 2}, .microbatches = 6},
                  [&](mega::StagePosition p, auto& groups) {
                    return Plan::stage(model.config, run, p,
                                       mega::dpp::split_layers(4, p.stages).of_stage(p.stage),
                                       groups.tensor);
                  },
                  mega::Cuda());
              device_layouts::Broken batch(model, 6, 0);
              trainer.step(batch, 1e-3);
              batch.breaks = world.rank() == 7;  // on the last stage
              trainer.step(batch, 1e-3);
              trainer.step(batch, 1e-3);
            } catch (const mega::Error& e) {
              ends[static_cast<std::size_t>(world.rank())] = e.what();
              throw;
            }
          },
          {.deadline = mega::comm::Seconds(20)}),
      doctest::Contains("micro-batch 3 is unreadable"), mega::Error);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (std::size_t rank = 0; rank < 8; ++rank) {
    CAPTURE(rank);
    CHECK(ends[rank].find("micro-batch 3 is unreadable") != std::string::npos);
    CHECK((rank == 7 || ends[rank].find("rank 7 failed: ") != std::string::npos));
  }
  std::printf("a rank threw: all ended after %.1f s\n", seconds);
  CHECK(seconds < 15);
}
