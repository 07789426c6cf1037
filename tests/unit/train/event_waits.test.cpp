// Each kind of event wait in a step is needed: without it, some seed gives other bits or an error.
#include "../../support/forgetful_device.hpp"
#include "../../support/run_residual.hpp"

#include <doctest/doctest.h>

using namespace mega_test;

namespace {

/// Whether some seed shows the loss of the wait.
bool noticed(const RunSettings& s, const RunOutcome& reference, const ForgottenWait& forgotten) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    const auto device = [&](int rank) {
      return ForgetfulDevice(seed * 16 + static_cast<std::uint64_t>(rank), forgotten);
    };
    try {
      const RunOutcome run = run_residual<true, ForgetfulDevice>(
          s, device, mega::dpp::GPipe{}, {.deadline = mega::comm::Seconds(5)});
      if (run != reference) return true;
    } catch (const mega::Error&) {
      return true;
    }
  }
  return false;
}

}  // namespace

// The lost waits are data races on purpose, so no sanitizer runs this.
TEST_SUITE_BEGIN("full");
TEST_CASE("train: a forgotten event wait does not go unnoticed") {
  RunSettings s;
  s.steps = 3;
  s.mesh.pipeline = 2;
  s.mesh.data = 2;
  s.chunks = 2;
  s.global_microbatches = 12;
  s.shape.rows = 4;
  s.wait_each_step = false;
  const RunOutcome reference = run_host(s);
  SUBCASE("none forgotten: no seed differs") {
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      const auto device = [&](int rank) {
        return ForgetfulDevice(seed * 16 + static_cast<std::uint64_t>(rank));
      };
      CHECK(run_residual<true, ForgetfulDevice>(s, device, mega::dpp::GPipe{}) == reference);
    }
  }
  SUBCASE("compute before the activation or gradient arrived") {
    CHECK(noticed(s, reference, {"compute", "receive"}));
  }
  SUBCASE("compute overwrites what is still being sent") {
    CHECK(noticed(s, reference, {"compute", "send"}));
  }
  SUBCASE("compute reads values before they are updated") {
    CHECK(noticed(s, reference, {"compute", "transfer"}));
  }
  SUBCASE("send before the stage has written") {
    CHECK(noticed(s, reference, {"send", "compute"}));
  }
  SUBCASE("reduce before the gradients are complete") {
    CHECK(noticed(s, reference, {"transfer", "compute"}));
  }
}
TEST_SUITE_END();
