// Dispatch policies and placements in the trainer: who overtakes whom, what it costs in memory, how
// it ends when nothing comes, and how it is refused.
#include "../../support/archetypes.hpp"
#include "../../support/chaos.hpp"
#include <mega/dpp/executor.hpp>
#include <mega/dpp/look_ahead_dispatch.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/host/host_async.hpp>
#include <mega/train/memory_plan.hpp>
#include <mega/train/stall_meter.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

using namespace mega_test;
using namespace mega::dpp;
using mega::dpp::detail::Portions;

namespace {

/// Down one leg of the V with all micro-batches, then up the other: the last stage is on rank 0.
/// On the way up each forward is followed by the backward that rank r can have by then, as a fused
/// pair if `fused`, with the weight gradient behind it if `split`.
struct HandMadeV {
  static constexpr std::string_view name = "hand-made-v";
  bool split = true, fused = false;
  static constexpr VPlacement placement() noexcept { return {}; }
  [[nodiscard]] int length(int, int m, int) const noexcept { return (split ? 6 : 4) * m; }
  int order(int rank, int, int m, int, ActionSpan out) const {
    int n = 0;
    const auto put = [&](ActionKind kind, int chunk, int mb) {
      out[static_cast<std::size_t>(n++)] = make_action(kind, chunk, mb);
    };
    const auto back = [&](int chunk, int mb) {
      put(split ? ActionKind::backward_input : ActionKind::backward, chunk, mb);
      if (split) put(ActionKind::backward_weight, chunk, mb);
    };
    for (int mb = 0; mb < m; ++mb) put(ActionKind::forward, 0, mb);
    const int behind = 2 * rank + 1;
    for (int mb = 0; mb < m + behind; ++mb) {
      if (mb < m) put(ActionKind::forward, 1, mb);
      if (mb < m && mb >= behind) out[static_cast<std::size_t>(n - 1)].with_next = fused;
      if (mb >= behind) back(1, mb - behind);
    }
    for (int mb = 0; mb < m; ++mb) back(0, mb);
    return n;
  }
};
static_assert(traversal_policy<HandMadeV> && brings_placement<HandMadeV>);

const auto on_host = [](int) { return mega::Host{}; };

void check_v(const RunSettings& s, const RunOutcome& reference, HandMadeV policy) {
  CAPTURE(policy.split);
  CAPTURE(policy.fused);
  CHECK(run_residual<false>(s, on_host, policy) == reference);
  const auto late = [](int rank) {
    return mega::HostAsync(7 + static_cast<std::uint64_t>(rank), 80);
  };
  CHECK(run_residual<false, mega::HostAsync>(s, late, policy) == reference);
}

template <class Plan, class MakeDevice, class Visit = Nothing, class Prepare = Nothing>
RunOutcome run_dispatch(const RunSettings& s, const Schedule& schedule, const MakeDevice& device,
                        const Visit& visit = {}, const Prepare& prepare = {},
                        double deadline = 20) {
  return run_plan<Plan>(
      s,
      [&](mega::StagePosition at, mega::train::Groups<DelayedComm>& groups) {
        return typename Plan::stage(s.shape, at, groups.tensor);
      },
      device, given(schedule), {.deadline = mega::comm::Seconds(deadline)}, visit, prepare);
}

std::vector<Action> compute_only(std::span<const Action> list) {
  std::vector<Action> out;
  for (const Action& a : list)
    if (is_compute(a.kind)) out.push_back(a);
  return out;
}

template <class F>
std::string sentence_of(mega::ErrorCode code, const F& run) {
  try {
    run();
  } catch (const mega::Error& e) {
    CHECK(e.code() == code);
    return e.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE(
    "train: a traversal brings its V placement, with same-rank hops and both ends on rank 0") {
  RunSettings s;
  for (const int microbatches : {1, 5, 8}) {
    for (const bool tied : {false, true}) {
      s.global_microbatches = microbatches;
      s.shape = {.layers = 8, .tied = tied};
      s.mesh.pipeline = 1;
      s.chunks = 1;
      const RunOutcome reference = run_host(s);
      s.chunks = 2;
      for (const int pipeline : {1, 2, 3, 4}) {
        CAPTURE(microbatches);
        CAPTURE(tied);
        CAPTURE(pipeline);
        s.mesh.pipeline = pipeline;
        check_v(s, reference, {false, false});
        check_v(s, reference, {true, false});
        check_v(s, reference, {true, true});
        check_v(s, reference, {false, true});
      }
    }
  }
}

namespace {
struct OwnPlacement : mega::DefaultPlan {
  using stage = archetype::Stage;
  using device = archetype::Device;
  using communicator = archetype::Communicator;
};
struct ForV : OwnPlacement {
  using traversal = HandMadeV;
};
struct SaysV : ForV {
  using placement = VPlacement;
};
struct SaysLoop : ForV {
  using placement = LoopPlacement;
};
struct LoopGoesWithAll : OwnPlacement {
  using placement = LoopPlacement;
};
struct AsksChannels : OwnPlacement {
  using dispatch = LookAhead<2>;
};
struct AsksNobody : OwnPlacement {
  using dispatch = Replay<2>;
};
struct NoDispatch : OwnPlacement {
  using dispatch = int;
};
}  // namespace

TEST_CASE(
    "train: explain() refuses a placement against the traversal, and look-ahead in the dark") {
  static_assert(mega::plan<ForV> && mega::plan<SaysV> && mega::plan<LoopGoesWithAll>);
  static_assert((mega::explain<ForV>(), mega::explain<SaysV>(), true));
  static_assert(!mega::agrees_on_placement<SaysLoop> && !mega::plan<SaysLoop>);
  static_assert(!mega::answers_its_dispatch<AsksChannels> && !mega::plan<AsksChannels>);
  static_assert(mega::plan<AsksNobody> && !mega::names_a_dispatch<NoDispatch>);
  static_assert(mega::comm::has_channel_queries<mega::ThreadComm, mega::host::AsyncStream>);
  static_assert(mega::comm::has_channel_queries<DelayedComm, mega::host::Stream>);
  // The static order has nothing to keep.
  CHECK(std::is_empty_v<StaticDispatch::dispatcher<mega::Host, mega::ThreadComm>>);
}

TEST_CASE("dpp: portions keep receives before and sends behind, and collectives apart") {
  const auto a = [](ActionKind kind, int chunk, int mb) { return make_action(kind, chunk, mb); };
  using enum ActionKind;
  Action paired = a(forward, 1, 3);
  paired.with_next = true;
  const std::vector<Action> list{a(recv_forward, 0, 4),  a(forward, 0, 4),
                                 a(send_forward, 0, 4),  a(recv_forward, 1, 3),
                                 a(recv_backward, 0, 2), paired,
                                 a(backward, 0, 2),      a(reduce, 0, -1),
                                 a(send_forward, 1, 3),  a(send_backward, 0, 2),
                                 a(loss, 1, 3),          a(backward_input, 1, 3),
                                 a(send_backward, 1, 3), a(backward_weight, 1, 3),
                                 a(tied_reduce, 1, -1),  a(reduce, 1, -1)};
  const Portions portions(list);
  const auto kinds = [&](int position) {
    std::string text;
    for (const Action& x : portions[position]) text += std::string(to_string(x.kind)) + " ";
    return text;
  };
  CHECK(kinds(0) == "recv_forward forward send_forward ");
  CHECK(kinds(1) == "recv_forward recv_backward forward backward send_forward send_backward ");
  CHECK(kinds(2) == "");  // the pair's second half
  CHECK(kinds(3) == "loss backward_input send_backward ");
  CHECK(kinds(4) == "backward_weight ");
  const auto& c = portions.collectives();
  REQUIRE(c.size() == 3);
  CHECK(c[0].behind == 3);
  CHECK(c[0].action == a(reduce, 0, -1));
  CHECK(c[1].behind == 5);
  CHECK(c[1].action.kind == tied_reduce);
  CHECK(c[2].behind == 5);
}

TEST_CASE("train: look-ahead overtakes late messages, within its memory, and replay repeats it") {
  RunSettings s;
  s.shape.layers = 8;
  s.mesh = {.tensor = 2, .pipeline = 4};
  s.chunks = 2;
  s.global_microbatches = 11;
  s.steps = 2;
  RunSettings alone = s;
  alone.mesh = {};
  alone.chunks = 1;
  const RunOutcome reference = run_host(alone);
  const Schedule schedule =
      make_schedule(ScheduleTraversal<DFC>{}, 4, s.global_microbatches, s.chunks);
  const Verdict verdict = verify(lower(schedule));

  int overtaken = 0;
  bool beyond_static = false;
  s.ahead = 2;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    CAPTURE(seed);
    std::map<int, std::vector<Action>> recorded;
    const auto late = [&](int rank) {
      delays_of_this_rank = {100 * seed + static_cast<std::uint64_t>(rank), 500};
      return mega::HostAsync(100 * seed + static_cast<std::uint64_t>(rank), 60);
    };
    const auto watch = [&](auto& trainer) {
      const int rank = trainer.world().rank();
      const int position = s.mesh.coordinates(rank)[mega::Axis::pipeline];
      const auto executed = trainer.dispatcher().executed();
      recorded[rank].assign(executed.begin(), executed.end());
      CHECK(trainer.peak_microbatches() <= verdict.peak(position) + 2);
      beyond_static |= trainer.peak_microbatches() > verdict.peak(position);
    };
    // L as a type and as a value are one rule.
    const RunOutcome run =
        seed % 2 == 0
            ? run_dispatch<ChaosPlan<mega::HostAsync, LookAhead<2>>>(s, schedule, late, watch)
            : run_dispatch<ChaosPlan<mega::HostAsync, BoundedLookAhead>>(s, schedule, late, watch);
    CHECK(run == reference);
    for (int rank = 0; rank < s.mesh.size(); ++rank) {
      const int position = s.mesh.coordinates(rank)[mega::Axis::pipeline];
      overtaken += recorded[rank] == compute_only(schedule.of_rank(position)) ? 0 : 1;
      // Tensor ranks do the same.
      CHECK(recorded[rank] == recorded[s.mesh.group(rank, mega::Axis::tensor)]);
    }

    RunSettings again = s;
    again.steps = 1;
    RunSettings once = alone;
    once.steps = 1;
    std::map<int, std::vector<Action>> replayed;
    const RunOutcome repeated = run_dispatch<ChaosPlan<mega::Host, Replay<2>>>(
        again, schedule, on_host,
        [&](auto& trainer) {
          const auto executed = trainer.dispatcher().executed();
          replayed[trainer.world().rank()].assign(executed.begin(), executed.end());
        },
        [&](auto& trainer) { trainer.dispatcher().follow(recorded.at(trainer.world().rank())); });
    CHECK(repeated == run_host(once));
    CHECK(replayed == recorded);
  }
  CHECK(overtaken > 0);
  CHECK(beyond_static);
}

TEST_CASE("train: a look-ahead of 0 is the static order, with its memory and its broadcasts") {
  RunSettings s;
  s.mesh = {.tensor = 2, .pipeline = 2};
  const Schedule schedule = make_schedule(OneForwardOneBackward{}, 2, s.global_microbatches, 1);
  std::map<int, std::size_t> bytes;
  const auto keep = [&](auto& trainer) { bytes[trainer.world().rank()] = trainer.device_bytes(); };
  const RunOutcome plain =
      run_dispatch<ChaosPlan<mega::Host, StaticDispatch>>(s, schedule, on_host, keep);
  const std::map<int, std::size_t> expected = bytes;
  const auto check_idle = [&](auto& trainer) {
    keep(trainer);
    CHECK(trainer.dispatcher().executed().empty());
  };
  CHECK(run_dispatch<ChaosPlan<mega::Host, BoundedLookAhead>>(s, schedule, on_host, check_idle) ==
        plain);
  CHECK(bytes == expected);
  s.ahead = -1;
  CHECK(sentence_of(mega::ErrorCode::usage, [&] {
          run_dispatch<ChaosPlan<mega::Host, BoundedLookAhead>>(s, schedule, on_host);
        }).find("look-ahead of -1 forwards") != std::string::npos);
}

TEST_CASE("train: replay refuses what look-ahead would not have done") {
  RunSettings s;
  s.mesh.pipeline = 2;
  s.global_microbatches = 4;
  s.steps = 1;
  const Schedule schedule = make_schedule(OneForwardOneBackward{}, 2, 4, 1);
  const auto replay = [&](const auto& change) {
    return sentence_of(mega::ErrorCode::usage, [&] {
      run_dispatch<ChaosPlan<mega::Host, Replay<1>>>(
          s, schedule, on_host, Nothing{}, [&](auto& trainer) {
            std::vector<Action> order = compute_only(schedule.of_rank(trainer.world().rank()));
            if (trainer.world().rank() == 0) change(order);
            trainer.dispatcher().follow(order);
          });
    });
  };
  CHECK(replay([](auto&) {}) == "accepted");
  // F0 F1 B0 F2 B1 F3 B2 B3: F2 may come one turn early, F2 and F3 together may not.
  CHECK(replay([](auto& order) { std::swap(order[2], order[3]); }) == "accepted");
  CHECK(replay([](auto& order) {
          order = {order[0], order[1], order[3], order[5], order[2], order[4], order[6], order[7]};
        }) ==
        "place 3 of the order to replay is forward of chunk 0, micro-batch 3, which look-ahead of "
        "1 forwards would not run there");
  CHECK(replay([](auto& order) { order.pop_back(); }) ==
        "the order to replay has 7 compute actions but the rank's list has 8");
}

TEST_CASE("train: look-ahead says what it waits for when nothing comes") {
  RunSettings s;
  s.mesh.pipeline = 2;
  s.steps = 1;
  const Schedule schedule = make_schedule(GPipe{}, 2, s.global_microbatches, 1);
  std::string said;
  const auto stay_away = [&](auto& trainer) {
    // Rank 0 does not begin the step before rank 1 has given up.
    if (trainer.world().rank() == 1) return;
    try {
      trainer.world().poll(
          [] {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            return false;
          },
          [](const std::string& when) { return "rank 0 was not freed " + when; });
    } catch (const mega::Error& e) {
      said = e.what();
      throw;
    }
  };
  // Rank 1 begins to wait about when rank 0 does, and looks more often.
  const std::string thrown = sentence_of(mega::ErrorCode::timeout, [&] {
    using Plan = ChaosPlan<mega::Host, LookAhead<1>>;
    run_dispatch<Plan>(s, schedule, on_host, Nothing{}, stay_away, 0.35);
  });
  CHECK(thrown ==
        "rank 1: the input of forward of chunk 0, micro-batch 0 did not arrive within 0.35 s");
  CHECK(said == "rank 1 failed: " + thrown);
}

namespace {
/// Fails on its stream in the forward of one micro-batch of the first stage.
class FailingStage : public MeetingStage<DelayedComm> {
 public:
  using MeetingStage::MeetingStage;
  FailingStage(ResidualShape shape, mega::StagePosition at, DelayedComm& tensor)
      : MeetingStage(shape, at, tensor), fails_(at.first()) {}
  void forward(auto& ctx, Matrix<const float> in, Matrix<float> out, saved_type& saved) {
    if (fails_ && ctx.microbatch == 2) {
      ctx.stream.run([] { throw std::runtime_error("the stage broke"); });
    }
    MeetingStage::forward(ctx, in, out, saved);
  }

 private:
  bool fails_;
};
struct FailingPlan : ChaosPlan<mega::HostAsync, LookAhead<2>> {
  using stage = FailingStage;
};
}  // namespace

namespace {
/// Sleeps in each forward of the first stage.
class SleepyStage : public MeetingStage<DelayedComm> {
 public:
  static constexpr std::chrono::milliseconds nap{2};
  SleepyStage(ResidualShape shape, mega::StagePosition at, DelayedComm& tensor)
      : MeetingStage(shape, at, tensor), sleeps_(at.first()) {}
  void forward(auto& ctx, Matrix<const float> in, Matrix<float> out, saved_type& saved) {
    if (sleeps_) std::this_thread::sleep_for(nap);
    MeetingStage::forward(ctx, in, out, saved);
  }

 private:
  bool sleeps_;
};
struct SleepyPlan : ChaosPlan<mega::Host, BoundedLookAhead> {
  using stage = SleepyStage;
  using hooks = mega::Hooks<mega::train::StallMeter>;
};
}  // namespace

TEST_CASE("train: a recorder sees how long look-ahead waits for an input") {
  RunSettings s;
  s.mesh.pipeline = 2;
  s.steps = 1;
  const Schedule schedule = make_schedule(GPipe{}, 2, s.global_microbatches, 1);
  for (const int ahead : {0, 1}) {
    CAPTURE(ahead);
    s.ahead = ahead;
    run_dispatch<SleepyPlan>(s, schedule, on_host, [&](auto& trainer) {
      if (trainer.world().rank() == 0) return;
      // Half of the naps, since rank 1 may have come late itself.
      const std::chrono::duration<double> naps = s.global_microbatches * SleepyStage::nap;
      CHECK(trainer.hooks().recorder.take_seconds() > naps.count() / 2);
    });
  }
}

TEST_CASE("train: a stage that fails on its stream ends look-ahead long before the deadline") {
  RunSettings s;
  s.mesh.pipeline = 2;
  s.steps = 1;
  const Schedule schedule = make_schedule(OneForwardOneBackward{}, 2, s.global_microbatches, 1);
  const auto began = std::chrono::steady_clock::now();
  const auto device = [](int rank) {
    delays_of_this_rank = {};
    return mega::HostAsync(static_cast<std::uint64_t>(rank), 20);
  };
  CHECK_THROWS_WITH_AS(run_dispatch<FailingPlan>(s, schedule, device, Nothing{}, Nothing{}, 60),
                       "the stage broke", std::runtime_error);
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(20));
}

TEST_CASE("train: the memory plan counts the slots of look-ahead, as the trainer allocates them") {
  RunSettings s;
  s.mesh = {.tensor = 2, .pipeline = 2};
  s.chunks = 2;
  s.global_microbatches = 9;
  s.steps = 1;
  const Schedule schedule = make_schedule(ScheduleTraversal<DFC>{}, 2, 9, 2);
  const auto options_with = [&]<class Dispatch>(Dispatch dispatch) {
    mega::TrainerOptions<GivenOrders, Dispatch> options;
    options.mesh = s.mesh;
    options.chunks = s.chunks;
    options.microbatches = 9;
    options.traversal = given(schedule);
    options.dispatch = dispatch;
    return options;
  };
  const auto factory = [&](mega::StagePosition at, auto&) {
    return ResidualStage<false>(s.shape, at);
  };
  const auto check = [&]<class Dispatch>(Dispatch dispatch) {
    s.ahead = dispatch.ahead;
    std::map<int, std::size_t> allocated;
    run_dispatch<ChaosPlan<mega::Host, Dispatch>>(s, schedule, on_host, [&](auto& trainer) {
      allocated[trainer.world().rank()] = trainer.device_bytes();
    });
    std::size_t total = 0;
    for (int rank = 0; rank < s.mesh.size(); ++rank) {
      const auto plan = mega::train::plan_memory<VPlacement>(options_with(dispatch), rank, factory);
      CHECK(plan.total() == allocated[rank]);
      total += plan.activations;
    }
    return total;
  };
  const std::size_t plain = check(StaticDispatch{});
  const std::size_t two = check(LookAhead<2>{});
  const std::size_t all = check(LookAhead<50>{});
  CHECK(check(BoundedLookAhead{0}) == plain);
  CHECK(check(BoundedLookAhead{2}) == two);
  CHECK(check(BoundedLookAhead{50}) == all);
  CHECK(two > plain);
  CHECK(all > two);
  // Micro-batches bound the slots.
  const mega::train::Pipeline<GivenOrders, LoopPlacement> pipeline(options_with(StaticDispatch{}),
                                                                   0, s.mesh.size());
  for (const ChunkPlacement& at : pipeline.placements(false, 50)) CHECK(at.slots == 9);
  const auto few = pipeline.placements(false), more = pipeline.placements(false, 2);
  for (std::size_t c = 0; c < few.size(); ++c)
    CHECK(more[c].slots == std::min(9, few[c].slots + 2));
}

TEST_CASE("dpp: an order that needs more slots than its chunk has is refused, not overwritten") {
  mega::Host device;
  mega::SelfComm world;
  mega::Hooks<> hooks;
  std::vector<ResidualStage<true>> stages{ResidualStage<true>({}, {0, 1})};
  std::vector<float> memory(2000);
  std::vector<mega::ParameterView<float>> views;
  Index at = 0;
  for (const mega::Parameter& p : stages[0].parameters()) {
    Index size = 1;
    for (const auto extent : p.shape) size *= extent;
    views.push_back({{memory.data() + at, size}, {memory.data() + at + 1000, size}});
    at += size;
  }
  stages[0].bind(views);
  const Schedule schedule = lower(make_schedule(GPipe{}, 1, 3, 1));
  struct {
    void reduce(mega::host::Stream&, int) {}
    void tied_reduce(mega::host::Stream&) {}
  } sink;
  const mega::data::FunctionBatch batch(3, 3, 5, sample, 0);
  const auto train = [&](int slots) {
    Executor<mega::Host, mega::SelfComm, ResidualStage<true>> executor(
        device, world, stages, {{{0, 1}, -1, -1, slots}}, schedule.of_rank(0), 3, hooks);
    executor.train(batch, {}, sink);
    return executor.peak();
  };
  CHECK(train(3) == 3);
  CHECK(sentence_of(mega::ErrorCode::usage, [&] { train(2); }) ==
        "the order needs more than the 2 slots of chunk 0 (stage 0)");
}
