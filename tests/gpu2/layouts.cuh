// Trains on two GPUs under every layout of two ranks and compares with one GPU.
#pragma once
#include "tests/support/device_layouts.cuh"
#include <mega/comm/nccl.hpp>

#include <mutex>

namespace two_gpus {

using device_layouts::Broken;
using device_layouts::large;
using device_layouts::Plan;

template <class Spec>
grid::Outcome train(const grid::Model& model, const grid::Layout& layout) {
  grid::Outcome outcome;
  std::mutex mutex;
  mega::run_gpus(layout.mesh.size(), [&](mega::NcclComm& world) {
    device_layouts::train_rank<Spec>(world, mega::Cuda(world.rank()), model, layout, outcome,
                                     mutex);
  });
  device_layouts::join_ties(outcome, model.config.tied_head);
  return outcome;
}

template <class Spec>
void compare(const char* what, const grid::Model& model, bool every_value) {
  device_layouts::compare<Spec>(what, model, every_value,
                                {
                                    {.mesh = {.tensor = 2}},
                                    {.mesh = {.tensor = 2}, .sequence_parallel = true},
                                    {.mesh = {.pipeline = 2}},
                                    {.mesh = {.pipeline = 2}, .chunks = 2},
                                    {.mesh = {.data = 2}},
                                    {.mesh = {.data = 2}, .shard_optimizer = true},
                                },
                                train<Spec>);
}

}  // namespace two_gpus
