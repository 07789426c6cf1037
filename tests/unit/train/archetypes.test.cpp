#include "archetypes.inc.hpp"
#include <mega/host/host.hpp>

#include <doctest/doctest.h>

TEST_CASE("train: a plan of archetypes compiles, and disabled hooks take no space") {
  CHECK(std::is_same_v<decltype(&mega_test::use_everything),
                       void (*)(mega_test::archetype::Communicator&)>);
  struct Plain {
    int a;
  };
  struct Hooked {
    [[no_unique_address]] mega::Hooks<> hooks;
    int a;
  };
  CHECK(sizeof(Hooked) == sizeof(Plain));
  CHECK(std::is_empty_v<mega::Hooks<>>);
}

namespace {
struct NoStage : mega::DefaultPlan {};
struct NoLoss : mega::DefaultPlan {
  struct stage : mega_test::archetype::Stage {
    void loss() = delete;
  };
};
}  // namespace
static_assert(!mega::names_a_stage<NoStage> && !mega::plan<NoStage>);
static_assert(!mega::computes_loss<NoLoss::stage, mega::plan_context_t<NoLoss>> &&
              !mega::plan<NoLoss>);
