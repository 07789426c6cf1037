// The same training under other policies: one alias a line, and the losses agree to the last bit.
#include "../common/gate.hpp"
#include <mega/host/host_async.hpp>
#include <mega/mega.hpp>

#include <cstdio>
#include <string_view>

/// The plan's aliases are all that varies.
template <class Traversal, class Device>
struct Plan : mega::DefaultPlan {
  using stage = example::Gate;
  using communicator = mega::ThreadComm;
  using traversal = Traversal;
  using device = Device;
};

template <class Traversal, class Device = mega::Host>
void train(std::string_view what, mega::Mesh mesh, int chunks, Traversal traversal = {}) {
  mega::run_threads(mesh.size(), [&](mega::ThreadComm& world) {
    const mega::data::FunctionBatch batch(8, example::samples, example::width, example::halve);
    typename mega::Trainer<Plan<Traversal, Device>>::options_type options;
    options.mesh = mesh;
    options.chunks = chunks;
    options.microbatches = 8;
    options.traversal = traversal;
    mega::Trainer<Plan<Traversal, Device>> trainer(
        world, options, [](mega::StagePosition at) { return example::Gate(at); }, Device());
    mega::StepResult result;
    for (int step = 0; step < 10; ++step) result = trainer.step(batch, 0.05);
    if (world.rank() == 0)
      std::printf("%-44.*s loss %.17g\n", static_cast<int>(what.size()), what.data(), result.loss);
  });
}

int main() {
  using namespace mega::dpp;
  train<GPipe>("one rank, four chunks", {}, 4);
  train<OneForwardOneBackward>("1F1B on four ranks", {.pipeline = 4}, 1);
  train<ScheduleTraversal<DFC>>("depth first, two ranks of two chunks", {.pipeline = 2}, 2);
  train<ScheduleTraversal<BFC>>("breadth first, two ranks of two chunks", {.pipeline = 2}, 2);
  train<ScheduleTraversal<GroupSize>>("groups of three micro-batches", {.pipeline = 2}, 2, {{3}});
  train<ScheduleTraversal<BFC>, mega::HostAsync>("breadth first, on queues that run late",
                                                 {.pipeline = 2}, 2);
}
