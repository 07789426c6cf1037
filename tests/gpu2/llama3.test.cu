// Llama-3 on two GPUs against one GPU.
#include "tests/gpu2/layouts.cuh"

#include <chrono>
#include <cstdio>
#include <string>

TEST_CASE("two gpus: small Llama-3, every layout of two ranks") {
  two_gpus::compare<mega::nn::Llama3>("llama3 small", grid::llama(), true);
}
TEST_CASE("two gpus: Llama-3 with grouped-query heads, every layout of two ranks") {
  two_gpus::compare<mega::nn::Llama3>("llama3 grouped", two_gpus::large(false), false);
}

TEST_CASE("two gpus: a rank that throws within a step ends the run within the deadline") {
  using Plan = two_gpus::Plan<mega::nn::Llama3, mega::NcclComm>;
  for (const mega::Mesh mesh : {mega::Mesh{.tensor = 2}, mega::Mesh{.pipeline = 2}}) {
    CAPTURE(to_string(mesh));
    const grid::Model model = grid::llama();
    const mega::nn::TransformerRun run{.micro_batch = 2, .sequence = 6, .loss_rows = 4};
    const auto begin = std::chrono::steady_clock::now();
    std::string first;
    try {
      mega::run_gpus(2,
                     [&](mega::NcclComm& world) {
                       mega::Trainer<Plan> trainer(
                           world, {.mesh = mesh, .microbatches = 6},
                           [&](mega::StagePosition p, auto& groups) {
                             return Plan::stage(
                                 model.config, run, p,
                                 mega::dpp::split_layers(4, p.stages).of_stage(p.stage),
                                 groups.tensor);
                           },
                           mega::Cuda(world.rank()));
                       two_gpus::Broken batch(model, 6, 0);
                       trainer.step(batch, 1e-3);
                       batch.breaks = world.rank() == 1;
                       trainer.step(batch, 1e-3);
                       world.throw_if_failed();
                       trainer.step(batch, 1e-3);
                     },
                     {.deadline = mega::comm::Seconds(4)});
    } catch (const mega::Error& e) {
      first = e.what();
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%s: ended after %.1f s with: %s\n", to_string(mesh).c_str(), seconds,
                first.c_str());
    CHECK(first.find("micro-batch 3 is unreadable") != std::string::npos);
    // Set-up, the deadline, the end.
    CHECK(seconds < 15);
  }
}
