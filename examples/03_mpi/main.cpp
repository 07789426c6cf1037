// The first example on processes: mpirun -np 2 build/bin/03_mpi
#include "../common/gate.hpp"
#include <mega/comm/mpi.hpp>
#include <mega/mega.hpp>

#include <cstdio>

struct Plan : mega::DefaultPlan {
  using stage = example::Gate;
  using communicator = mega::MpiComm;
  using traversal = mega::dpp::ScheduleTraversal<mega::dpp::BFC>;
};

int main() {
  mega::run_mpi([](mega::MpiComm& world) {
    const mega::data::FunctionBatch batch(8, example::samples, example::width, example::halve);
    // As many pipeline ranks as processes; four chunks in all where that divides.
    const int chunks = world.size() < 4 && 4 % world.size() == 0 ? 4 / world.size() : 1;
    mega::Trainer<Plan> trainer(
        world, {.mesh = {.pipeline = world.size()}, .chunks = chunks, .microbatches = 8},
        [](mega::StagePosition at) { return example::Gate(at); });
    for (int step = 0; step < 20; ++step) {
      const mega::StepResult result = trainer.step(batch, 0.05);
      if (world.rank() == 0) std::printf("step %2d  loss %.6f\n", step, result.loss);
    }
  });
}
