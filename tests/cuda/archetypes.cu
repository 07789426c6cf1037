// The trainer with a stand-in for the GPU device, through nvcc.
#include "../unit/train/archetypes.inc.hpp"

void instantiate(mega_test::archetype::Communicator& world) {
  mega_test::use_everything(world);
}
