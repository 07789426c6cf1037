/// @file  Trains the gate; what varies is the plan.
#pragma once
#include "gate.hpp"
#include <mega/mega.hpp>

#include <cmath>
#include <cstdio>
#include <utility>

namespace example {

/// Two pipeline ranks of two chunks each; the plan's aliases are all that differs between hosts and
/// GPUs.
template <class Plan>
void train(typename Plan::communicator& world, typename Plan::device device) {
  const mega::data::FunctionBatch batch(
      8, samples, width, [](Index i) { return std::pair(std::sin(i), std::sin(i) / 2); });
  mega::Trainer<Plan> trainer(
      world, {.mesh = {.pipeline = 2}, .chunks = 2, .microbatches = 8},
      [](mega::StagePosition at) { return Gate(at); }, device);
  for (int step = 0; step < 20; ++step) {
    const mega::StepResult result = trainer.step(batch, 0.05);
    if (world.rank() == 0) std::printf("step %2d  loss %.6f\n", step, result.loss);
  }
}

}  // namespace example
