/// @file  Tests of the schedule's action type.
#include <mega/dpp/action.hpp>

#include <doctest/doctest.h>

#include <set>
#include <string>

using namespace mega::dpp;

static_assert(sizeof(Action) == 8);
static_assert(make_action(ActionKind::loss, 3, 7) == Action{ActionKind::loss, false, 3, 7});
static_assert(make_action(ActionKind::loss, 3, 7) != Action{ActionKind::loss, false, 3, 8});
static_assert(make_action(ActionKind::loss, 3, 7) != Action{ActionKind::loss, false, 2, 7});
static_assert(make_action(ActionKind::loss, 3, 7) != Action{ActionKind::reduce, false, 3, 7});

TEST_CASE("dpp: an action prints its kind, chunk and micro-batch") {
  CHECK(to_string(make_action(ActionKind::forward, 1, 3)) == "forward of chunk 1, micro-batch 3");
  CHECK(to_string(make_action(ActionKind::reduce, 0, all_microbatches)) == "reduce of chunk 0");
  CHECK(to_string(make_action(ActionKind::recv_backward, 32767, 100000)) ==
        "recv_backward of chunk 32767, micro-batch 100000");
}

TEST_CASE("dpp: every action kind has a name of its own") {
  std::set<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(ActionKind::tied_reduce); ++kind) {
    names.emplace(to_string(static_cast<ActionKind>(kind)));
  }
  CHECK(names.size() == 11);
  CHECK(names.count("unknown") == 0);
  CHECK(to_string(static_cast<ActionKind>(11)) == "unknown");
}

TEST_CASE("dpp: a whole backward gives both gradients, the halves one each") {
  CHECK(gives_input_gradient(ActionKind::backward));
  CHECK(gives_weight_gradient(ActionKind::backward));
  CHECK(gives_input_gradient(ActionKind::backward_input));
  CHECK_FALSE(gives_weight_gradient(ActionKind::backward_input));
  CHECK_FALSE(gives_input_gradient(ActionKind::backward_weight));
  CHECK(gives_weight_gradient(ActionKind::backward_weight));
  CHECK_FALSE(is_compute(ActionKind::send_forward));
  CHECK_FALSE(is_compute(ActionKind::loss));
}
