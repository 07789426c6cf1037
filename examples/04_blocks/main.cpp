// Building blocks without Trainer: an order, its proof, an executor, and plain gradient descent.
#include "../common/gate.hpp"
#include <mega/mega.hpp>

#include <cstdio>
#include <vector>

namespace {

/// Hears when a chunk's gradients are complete. One replica has nothing to sum.
struct NoReduction {
  template <class Stream>
  void reduce(Stream&, int) const {}
  template <class Stream>
  void tied_reduce(Stream&) const {}
};

}  // namespace

int main() {
  constexpr int ranks = 2, chunks = 2, microbatches = 8;
  using namespace mega::dpp;
  const Schedule schedule =
      lower(make_schedule(ScheduleTraversal<DFC>{}, ranks, microbatches, chunks));
  const Verdict verdict = verify(schedule);
  if (!verdict.ok()) {
    std::fprintf(stderr, "%s\n", describe(verdict).c_str());
    return 1;
  }
  const Timing timing =
      simulate(schedule, {.forward = 1, .backward_input = 1, .backward_weight = 1});
  std::printf("%s; bubble %.3f; at most %d activations on rank 0\n", describe(verdict).c_str(),
              timing.wall_fraction(), verdict.peak(0));
  const std::vector<int> slots = required_slots(schedule);

  mega::run_threads(ranks, [&](mega::ThreadComm& world) {
    const int rank = world.rank();
    mega::Host device;
    mega::Hooks<> hooks;
    std::vector<example::Gate> stages;
    std::vector<ChunkPlacement> places;
    for (int c = 0; c < chunks; ++c) {
      const mega::StagePosition at{LoopPlacement::stage(rank, c, ranks, chunks), ranks * chunks};
      stages.emplace_back(at);
      places.push_back({at, (rank + ranks - 1) % ranks, (rank + 1) % ranks,
                        slots[static_cast<std::size_t>(rank * chunks + c)]});
    }
    std::vector<float> weights(chunks * example::width, 0.0F), gradients(weights.size());
    for (int c = 0; c < chunks; ++c) {
      const mega::ParameterView<float> view{
          {weights.data() + c * example::width, example::width},
          {gradients.data() + c * example::width, example::width}};
      stages[static_cast<std::size_t>(c)].bind({&view, 1});
    }
    Executor<mega::Host, mega::ThreadComm, example::Gate> executor(
        device, world, stages, places, schedule.of_rank(rank), microbatches, hooks);
    const mega::data::FunctionBatch batch(microbatches, example::samples, example::width,
                                          example::halve);
    executor.loss_scale()(0) = 1.0F / static_cast<float>(batch.valid_targets());
    for (std::uint64_t step = 0; step < 20; ++step) {
      gradients.assign(gradients.size(), 0.0F);
      NoReduction sink;
      executor.train(batch, {.seed = 0, .step = step}, sink);
      executor.synchronize();
      for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= 20 * gradients[i];
      double loss = 0;
      for (const double sum : executor.loss_sums().span()) loss += sum;
      if (rank == ranks - 1)
        std::printf("step %2d  loss %.6f\n", static_cast<int>(step),
                    loss / static_cast<double>(batch.valid_targets()));
    }
  });
}
