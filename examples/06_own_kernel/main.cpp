// A stage whose operations are written by hand, on the host. 06_own_kernel-cuda trains the same
// stage on a GPU, with kernels.
#include "train.hpp"
#include <mega/mega.hpp>

struct Plan : mega::DefaultPlan {
  using stage = example::Gate;
  using communicator = mega::ThreadComm;
  using traversal = mega::dpp::ScheduleTraversal<mega::dpp::BFC>;
};

int main() {
  mega::run_threads(2, [](mega::ThreadComm& world) { example::train<Plan>(world, mega::Host()); });
}
