// Orders that part input from weight gradients, and stages with a whole backward only.
#include "../../support/refusal.hpp"
#include <mega/comm/thread.hpp>
#include <mega/data/function_batch.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/zero_bubble.hpp>
#include <mega/train/trainer.hpp>

#include <doctest/doctest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace mega::dpp;
using mega::Index;
using mega::Matrix;

namespace {

/// y = x, of which nothing is to be learned but who may call what.
struct Whole : mega::UniformStage {
  struct saved_type {};
  explicit Whole(mega::StagePosition at) : UniformStage{2, 3}, number(at.stage) {}
  int number;

  saved_type make_saved(mega::Arena&) const { return {}; }
  std::vector<mega::Parameter> parameters() const {
    return {{.name = "w" + std::to_string(number), .shape = {1}}};
  }
  void forward(auto& ctx, Matrix<const float> x, Matrix<float> y, saved_type&) {
    ctx.stream.run([x, y] {
      for (Index i = 0; i < y.size(); ++i) y.data()[i] = x.data()[i];
    });
  }
  void backward(auto&, Matrix<const float>, Matrix<float>, saved_type&) {}
  void loss(auto&, Matrix<float>, Matrix<const float>) {}
};

/// Splits or not as a run says: no type can tell.
struct Either {
  static constexpr std::string_view name = "either";
  bool split = false;
  static constexpr int length(int, int m, int v) { return 3 * m * v; }
  int order(int rank, int p, int m, int v, ActionSpan out) const {
    return split ? ZeroBubbleH1{}.order(rank, p, m, v, out)
                 : OneForwardOneBackward::order(rank, p, m, v, out);
  }
};

template <class Stage, class Traversal>
struct Plan : mega::DefaultPlan {
  using stage = Stage;
  using communicator = mega::ThreadComm;
  using traversal = Traversal;
};
template <class Traversal>
constexpr bool suits_whole = mega::plan<Plan<Whole, Traversal>>;

struct Saying {
  static constexpr std::string_view name = "saying";
  static constexpr bool splits_backward = false;
  static constexpr int length(int, int, int) { return 0; }
  static constexpr int order(int, int, int, int, ActionSpan) { return 0; }
};
/// A member function of the name says nothing about the type.
struct Asked : Saying {
  bool splits_backward() const { return true; }
};

static_assert(suits_whole<OneForwardOneBackward> && suits_whole<ScheduleTraversal<BFC>>);
static_assert(suits_whole<Saying> && suits_whole<Asked> && suits_whole<Either>);
static_assert(!suits_whole<ZeroBubbleH1> && !suits_whole<ZeroBubbleH2> && !suits_whole<DualPipeV>);
static_assert(!suits_whole<ZeroBubbleV> && !suits_whole<VSchedule>);
static_assert(!suits_whole<SplitBackward<GPipe, WeightAtOnce>>);
static_assert(suits_whole<FullBackward<ZeroBubbleH1>> && suits_whole<FullBackward<DualPipeV>>);
static_assert(mega::plan<Plan<Whole, GPipe>> && splits_backward<VMin>);

struct NoWeightHalf : Whole {
  using Whole::Whole;
  void backward_input(auto&, Matrix<const float>, Matrix<float>, saved_type&) {}
};
static_assert(!mega::plan<Plan<NoWeightHalf, ZeroBubbleH1>> &&
              mega::plan<Plan<NoWeightHalf, GPipe>>);

std::string trains(bool split) {
  return mega_test::refusal_of([&] {
    mega::run_threads(2, [&](mega::ThreadComm& world) {
      mega::Trainer<Plan<Whole, Either>> trainer(
          world, {.mesh = {.pipeline = 2}, .microbatches = 3, .traversal = {split}},
          [](mega::StagePosition at) { return Whole(at); });
      const mega::data::FunctionBatch batch(3, 2, 3, [](Index) { return std::pair(1.0, 1.0); });
      (void)trainer.step(batch, 0.1);
    });
  });
}

}  // namespace

TEST_CASE("train: an order that turns out to split is refused when the trainer is made") {
  CHECK(trains(false) == "accepted");
  const std::string refused = trains(true);
  CHECK(refused.find("the order has a backward_input of chunk 0, micro-batch 0") !=
        std::string::npos);
  CHECK(refused.find("choose a schedule that does not split the backward") != std::string::npos);
}
