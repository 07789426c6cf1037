// A whole run on 8 threads, dp x tp x pp, recorded and watched. Who is named is tested on clocks
// that only the work moves, so that it depends on nothing else that runs on the machine. Of real
// time no more is asked than what holds on a busy machine, too: a rest is never shorter than it
// should be.
#include <mega/comm/thread.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/stage.hpp>
#include <mega/data/function_batch.hpp>
#include <mega/host/host.hpp>
#include <mega/scan/injected_faults.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/recorder.hpp>
#include <mega/scan/slow_rank_watch.hpp>
#include <mega/scan/traced_comm.hpp>
#include <mega/train/trainer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

using namespace mega;
using namespace mega::scan;

namespace {

constexpr Index samples = 4, width = 64;
constexpr std::int64_t rest_ns = 2'000'000;

/// y = x + w, and a rest a call, between which tensor ranks meet.
template <class Comm>
struct Resting : UniformStage {
  using saved_type = Matrix<const float>;
  int number;
  Comm* tensor;

  Resting(StagePosition at, Comm& comm)
      : UniformStage{samples, width}, number(at.stage), tensor(&comm) {}
  saved_type make_saved(Arena&) const { return {}; }
  std::vector<Parameter> parameters() const {
    return {{.name = "shift" + std::to_string(number), .shape = {width}}};
  }
  static void rest(auto& ctx) {
    if constexpr (requires { ctx.hooks.recorder.work(rest_ns); }) {
      ctx.hooks.recorder.work(rest_ns);
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(rest_ns));
    }
  }

  void forward(auto& ctx, Matrix<const float> x, Matrix<float> y, saved_type& saved) {
    saved = x;
    {
      const auto span = ctx.span("shift");
      rest(ctx);
      for (Index i = 0; i < y.size(); ++i) y.data()[i] = x.data()[i] + weights[0].value(i % width);
    }
    tensor->all_reduce(ctx.stream, y.flat(), comm::Reduce::max);
  }
  void backward(auto& ctx, Matrix<const float> dy, Matrix<float> dx, saved_type&) {
    rest(ctx);
    for (Index i = 0; i < dy.size(); ++i) {
      weights[0].gradient(i % width) += dy.data()[i];
      if (!dx.empty()) dx.data()[i] = dy.data()[i];
    }
    if (!dx.empty()) tensor->all_reduce(ctx.stream, dx.flat(), comm::Reduce::max);
  }
  void loss(auto& ctx, Matrix<float> y, Matrix<const float> target) {
    for (Index i = 0; i < y.size(); ++i) {
      const float error = y.data()[i] - target.data()[i];
      *ctx.loss_sum += 0.5 * static_cast<double>(error) * error;
      y.data()[i] = error * *ctx.loss_scale;
    }
  }
};

template <class Recorder>
struct Plan : DefaultPlan {
  using communicator = TracedComm<ThreadComm, Recorder>;
  using stage = Resting<communicator>;
  using hooks = Hooks<Recorder>;
};

const Mesh mesh{.tensor = 2, .data = 2, .pipeline = 2};
constexpr int steps = 20, microbatches = 4;

/// A recorder whose clock moves by the work that it is told of, as often longer as its rank is
/// slow. It waits for nobody, so that a step's time is the rank's own work.
class WorkClock {
 public:
  struct Token {
    bool iterates = false;
  };
  WorkClock(int rank, const std::vector<InjectedFault>& faults)
      : state_(std::make_shared<State>()) {
    for (const InjectedFault& f : faults) {
      if (f.kind == InjectedFault::Kind::slow_rank && f.rank == rank) state_->faults.push_back(f);
    }
  }
  void begin_step(std::int64_t step) noexcept { state_->step = step; }
  template <class S>
  Token begin(S&, const SpanInfo& info) noexcept {
    const bool iterates = info.kind == SpanKind::iteration;
    if (iterates) state_->begin = state_->now;
    return {iterates};
  }
  template <class S>
  void end(S&, Token token) noexcept {
    if (!token.iterates) return;
    const double own = (state_->now - state_->begin) / 1e9;
    state_->fastest = state_->fastest < 0 ? own : std::min(state_->fastest, own);
  }
  std::int32_t add_group(const std::string&, const std::vector<int>&) { return 0; }
  void work(double ns) noexcept {
    for (const InjectedFault& f : state_->faults) ns *= state_->step >= f.from_step ? f.factor : 1;
    state_->now += ns;
  }
  double take_fastest_step() noexcept { return std::exchange(state_->fastest, -1.0); }

 private:
  struct State {
    std::vector<InjectedFault> faults;
    std::int64_t step = 0;
    double now = 0, begin = 0, fastest = -1;
  };
  std::shared_ptr<State> state_;
};

struct Outcome {
  Trace trace;
  std::vector<SlowRank> said;
  std::vector<std::int64_t> said_after;  // steps
  double loss = 0;
};

/// Trains on one rank, and calls step_done(step, loss) after each step.
template <class Recorder, class StepDone>
void train(ThreadComm& threads, Recorder& recorder, Host& device, const StepDone& step_done) {
  TracedComm<ThreadComm, Recorder> world(threads, recorder);
  const data::FunctionBatch batch(
      microbatches, samples, width,
      [](Index i) { return std::pair(0.1F * static_cast<float>(i % 7), 1.0F); },
      mesh.coordinates(threads.rank())[Axis::data]);
  Trainer<Plan<Recorder>> trainer(world, {.mesh = mesh, .microbatches = microbatches},
                                  [](StagePosition at, auto& groups) {
                                    return Resting<TracedComm<ThreadComm, Recorder>>(at,
                                                                                     groups.tensor);
                                  },
                                  device, {recorder, {}, {}});
  for (int step = 0; step < steps; ++step) step_done(step, trainer.step(batch, 0.01).loss);
}

/// The run on clocks that only work moves.
Outcome watch(std::string_view faults) {
  Outcome out;
  run_threads(mesh.size(), [&](ThreadComm& threads) {
    WorkClock clock(threads.rank(), parse_faults(faults, mesh.size()));
    Host device;
    SlowRankWatch<Host, ThreadComm> watch(device, threads, mesh, 4);
    train(threads, clock, device, [&](int step, double loss) {
      const auto now = watch.step_done(step, [&] { return clock.take_fastest_step(); });
      if (threads.rank() != 3) return;
      out.loss = loss;
      for (const SlowRank& slow : now) {
        out.said.push_back(slow);
        out.said_after.push_back(step);
      }
    });
  });
  return out;
}

/// The run in real time, recorded.
Trace record(std::string_view faults) {
  TraceCollector collector;
  run_threads(mesh.size(), [&](ThreadComm& threads) {
    const int rank = threads.rank();
    HostRecorder inner(recording_of(mesh, rank), collector.sink());
    FaultyRecorder<HostRecorder> recorder(inner, rank, parse_faults(faults, mesh.size()));
    Host device;
    train(threads, recorder, device, [](int, double) {});
    inner.close();
  });
  return collector.take();
}

/// Milliseconds that each rank spent in spans of these names.
std::vector<double> time_in(const Trace& t, const std::set<std::string_view>& names) {
  std::vector<double> out(static_cast<std::size_t>(mesh.size()), 0);
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    const Event& e = t.events[i];
    if (names.count(t.name(e)) > 0)
      out[static_cast<std::size_t>(t.rank(e))] += static_cast<double>(e.duration()) / 1e6;
  }
  return out;
}

/// "4 7 ", in the order of ranks.
std::string ranks_of(const std::vector<SlowRank>& said) {
  std::set<int> ranks;
  for (const SlowRank& slow : said) ranks.insert(slow.rank);
  std::string out;
  for (const int rank : ranks) out += std::to_string(rank) + " ";
  return out;
}

}  // namespace

TEST_CASE("scan: a run of 8 ranks is recorded whole") {
  const Trace t = record("");
  CHECK(t.completeness.events_dropped == 0);
  REQUIRE(t.ranks.size() == 8);
  std::map<std::pair<int, std::string>, int> count;
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    const Event& e = t.events[i];
    ++count[{t.rank(e), std::string(t.name(e))}];
    CHECK(e.end >= e.begin);
    CHECK(e.step >= 0);
    CHECK(e.step < steps);
    if (t.name(e) == "forward" || t.name(e) == "backward") {
      CHECK(e.microbatch >= 0);
      CHECK(e.microbatch < 4);
      CHECK(e.chunk == 0);
    }
  }
  for (int rank = 0; rank < 8; ++rank) {
    CAPTURE(rank);
    const bool last = rank >= 4;
    CHECK(count[{rank, "step"}] == steps);
    CHECK(count[{rank, "forward"}] == 4 * steps);
    CHECK(count[{rank, "shift"}] == 4 * steps);
    CHECK(count[{rank, "backward"}] == 4 * steps);
    CHECK(count[{rank, "loss"}] == (last ? 4 * steps : 0));
    CHECK(count[{rank, "recv_forward"}] == (last ? 4 * steps : 0));
    CHECK(count[{rank, "send_forward"}] == (last ? 0 : 4 * steps));
    CHECK(count[{rank, "recv_backward"}] == (last ? 0 : 4 * steps));
    CHECK(count[{rank, "recv"}] == 4 * steps);
    CHECK(count[{rank, "send"}] == 4 * steps);
    CHECK(count[{rank, "reduce"}] == steps);
    CHECK(count[{rank, "update"}] == steps);
    CHECK(count[{rank, "clip"}] == steps);
  }
  // Every operation finds all of its ranks, by its number.
  const Matches m = match(t);
  CHECK(m.leftovers.empty());
  CHECK(m.by_signature == 0);
  for (const Instance& i : m.instances) {
    const std::size_t members = t.groups[i.group].ranks.size();
    CHECK(i.count == members);
    // One clock: nobody may leave what synchronises all before the last one came.
    if (!synchronises_all(i.op)) continue;
    Nanoseconds last_begin = 0, first_end = INT64_MAX;
    for (const TableIndex c : m.of(i)) {
      const Event& e = t.events[t.communications[c].event];
      last_begin = std::max(last_begin, e.begin);
      first_end = std::min(first_end, e.end);
    }
    CHECK(last_begin <= first_end);
  }
  // Gradients of dp ranks, activations of tp ranks, the norm of the world, channels both ways.
  std::set<std::string> groups;
  for (const Group& g : t.groups) groups.insert(g.name);
  CHECK(groups ==
        std::set<std::string>{"data", "tensor", "world", "world channel 2", "world channel 3"});
}

TEST_CASE("scan: a slow rank is named within 20 steps, with its factor, and no other") {
  const Outcome out = watch("slow-rank=5,factor=1.5");
  REQUIRE(out.said.size() == 1);
  CHECK(out.said[0].rank == 5);
  CHECK(out.said[0].factor == doctest::Approx(1.5));
  CHECK(out.said[0].since_step == 4);
  CHECK(out.said_after[0] == 15);
  const Outcome healthy = watch("");
  CHECK(healthy.said.empty());
  CHECK(out.loss == healthy.loss);
}

TEST_CASE("scan: two ranks that are slow at once are both named, and too small an effect is not") {
  CHECK(ranks_of(watch("slow-rank=4,factor=2.5;slow-rank=7,factor=2").said) == "4 7 ");
  CHECK(ranks_of(watch("slow-rank=1,factor=2;slow-rank=6,factor=2.5").said) == "1 6 ");
  CHECK(ranks_of(watch("slow-rank=1,factor=1.15").said).empty());
  CHECK(ranks_of(watch("slow-rank=2,factor=1.5,from-step=10").said).empty());
  CHECK(ranks_of(watch("slow-rank=2,factor=1.5,from-step=8").said) == "2 ");
  // Links make no rank slow.
  CHECK(ranks_of(watch("slow-link=2-6,factor=400").said).empty());
}

TEST_CASE("scan: what is injected is in the spans of the rank that it is injected into") {
  // What is added is cut to whole nanoseconds.
  constexpr double least = 0.9999;
  constexpr double calls = steps * microbatches;
  const std::vector<double> work = time_in(record("slow-rank=5,factor=3"), {"shift", "backward"});
  for (std::size_t r = 0; r < work.size(); ++r) {
    CAPTURE(r);
    CHECK(work[r] >= least * (r == 5 ? 3 : 1) * 2 * calls * 1e-6 * rest_ns);
  }
  // 20 us and 1 KiB at 2 GB/s are 20.5 us, of which a slow link adds 399 times as much.
  const std::vector<double> sends = time_in(record("slow-link=2-6,factor=400"), {"send"});
  for (const std::size_t r : {2, 6}) CHECK(sends[r] >= least * calls * 399 * 20.5e-3);
}
