/// @file  Everything a user builds, built from archetypes. Included by a .cpp for g++ and a .cu for
/// nvcc: the trainer must need nothing beyond the concepts under either compiler.
#pragma once
#include "../../support/archetypes.hpp"
#include <mega/dpp/executor.hpp>
#include <mega/train/trainer.hpp>

#include <type_traits>

namespace mega_test {

struct ArchetypePlan : mega::DefaultPlan {
  using stage = archetype::Stage;
  using device = archetype::Device;
  using communicator = archetype::Communicator;
  using traversal = mega::dpp::ScheduleTraversal<mega::dpp::BFC>;
  using hooks = mega::Hooks<archetype::Recorder>;
};
static_assert(mega::plan<ArchetypePlan>);
static_assert((mega::explain<ArchetypePlan>(), true));

/// Instantiates every member; never has to run.
inline void use_everything(archetype::Communicator& world) {
  mega::Trainer<ArchetypePlan> trainer(world, {},
                                       [](mega::StagePosition) { return archetype::Stage{}; });
  archetype::Batch batch;
  trainer.queue_step(batch, 0.1);
  (void)trainer.step(batch, 0.1);
  (void)trainer.evaluate(batch);
  (void)trainer.device_bytes();
}

}  // namespace mega_test
