/// @file  A pipeline of stages that take stated times, over links that take stated times, run by
/// the library's executor on thread ranks, and what MegatronApp's windows are in it.
#pragma once
#include <mega/comm/emulated_link.hpp>
#include <mega/comm/thread.hpp>
#include <mega/core/context.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/stage.hpp>
#include <mega/dpp/activation_buffers.hpp>
#include <mega/dpp/executor.hpp>
#include <mega/dpp/metrics.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/host/host.hpp>
#include <mega/train/pipeline.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

namespace emulation {

using mega::Index;
using mega::Matrix;
namespace comm = mega::comm;
namespace dpp = mega::dpp;

/// Adds its stage's number to what it gets, and takes its time for it.
template <class Clock>
struct TimedStage : mega::UniformStage {
  struct saved_type {};
  mega::StagePosition at{};
  dpp::ActionTimes times{};  ///< seconds
  Clock* clock = nullptr;

  [[nodiscard]] saved_type make_saved(mega::Arena&) const { return {}; }
  [[nodiscard]] std::vector<mega::Parameter> parameters() const { return {}; }

  template <class Ctx>
  void forward(Ctx& ctx, Matrix<const float> in, Matrix<float> out, saved_type&) {
    work(ctx, in, out, times.forward);
  }
  template <class Ctx>
  void backward(Ctx& ctx, Matrix<const float> dout, Matrix<float> din, saved_type&) {
    work(ctx, dout, din, times.backward_input + times.backward_weight);
  }
  template <class Ctx>
  void loss(Ctx& ctx, Matrix<float> out, Matrix<const float>) {
    ctx.stream.run([sum = ctx.loss_sum, out] { *sum += static_cast<double>(*out.data()); });
  }

 private:
  template <class Ctx>
  void work(Ctx& ctx, Matrix<const float> in, Matrix<float> out, double seconds) {
    ctx.stream.run([=, clock = clock, number = static_cast<float>(at.stage + 1)] {
      const double end = clock->now() + seconds;
      for (Index i = 0; i < out.size(); ++i) out.data()[i] = in.data()[i] + number;
      clock->wait_until(end);
    });
  }
};

/// Keeps the spans of one rank, by its clock. Its stream runs work as it is queued.
template <class Clock>
class SpanRecorder {
 public:
  struct Span {
    mega::SpanInfo info;
    double start_s = 0;
    double end_s = 0;
  };

  SpanRecorder(Clock& clock, std::size_t most) : clock_(&clock) { spans_.reserve(most); }

  /// A span beyond the number that was reserved is lost, and spans() then lacks it.
  std::size_t begin(mega::host::Stream&, const mega::SpanInfo& info) noexcept {
    if (spans_.size() == spans_.capacity()) return spans_.size();
    spans_.push_back({info, clock_->now(), 0});
    return spans_.size() - 1;
  }
  void end(mega::host::Stream&, std::size_t token) noexcept {
    if (token < spans_.size()) spans_[token].end_s = clock_->now();
  }

  [[nodiscard]] const std::vector<Span>& spans() const noexcept { return spans_; }
  void clear() noexcept { spans_.clear(); }

 private:
  Clock* clock_;
  std::vector<Span> spans_;
};

/// What runs: the pipeline and the machine that is emulated.
struct Workload {
  int p = 4, m = 8, v = 4;
  std::vector<dpp::ActionTimes> times{};  ///< [p*v] by stage, seconds; `hop` counts for nothing
  comm::EmulatedHop hop{};                ///< of one message between two stages
  double message_bytes = 0;
  bool roomy = false;  ///< chunks hold all micro-batches: no sender waits for a slot
  int steps = 1;       ///< measured; one more goes before
  double deadline_s = 60;
};

/// What a step of a workload showed; means over the steps.
struct Windows {
  double step_s = 0;
  double send_ratio = 0;          ///< mean over the pairs of ranks
  double all_reduce_window = 0;   ///< (step end - first chunk's gradients complete) / step, mean
  dpp::TransferTime transfers{};  ///< seconds a step, summed over the ranks
  int peak = 0;                   ///< live activations of a chunk, worst rank
  double overrun = 0;  ///< compute took this part longer than stated: the emulation's resolution
  double loss = 0;
};

namespace detail {

inline std::int64_t ns(double seconds) {
  return std::llround(seconds * 1e9);
}

/// One batch of constant numbers.
struct ConstantBatch {
  int m;
  std::vector<float> values = std::vector<float>(message_floats, 1.0F);
  static constexpr Index message_floats = 64;

  [[nodiscard]] int microbatches() const { return m; }
  [[nodiscard]] Matrix<const float> input(int) const { return {values.data(), 1, message_floats}; }
  [[nodiscard]] Matrix<const float> target(int) const { return input(0); }
  [[nodiscard]] Index first_sample(int) const { return 0; }
};

/// When each chunk's gradients were complete.
template <class Clock>
struct CompletionTimes {
  Clock& clock;
  std::vector<double> at;

  void reduce(mega::host::Stream&, int chunk) { at[static_cast<std::size_t>(chunk)] = clock.now(); }
  void tied_reduce(mega::host::Stream&) {}
};

template <class Traversal>
struct PipelineOptions {
  mega::Mesh mesh{};
  int chunks = 1;
  int microbatches = 1;
  Traversal traversal{};
};

/// What the ranks bring together.
struct Gathered {
  std::mutex mutex{};
  dpp::PipelineRecord record{};
  std::vector<double> begins{}, ends{};  ///< of the steps; ends are the latest of all ranks
  std::vector<double> completions{};     ///< by step: sum over ranks of the first chunk's time
  double busy = 0, stated = 0;
  double loss = 0;
};

}  // namespace detail

/// Runs the steps under one order. The messages hold a few floats and count as what the workload
/// states, so that moving them takes no time of the processor.
/// Clock: comm::WallClock sleeps the stated times; comm::LogicalClock counts them.
template <class Clock, dpp::traversal_policy Traversal>
[[nodiscard]] Windows run_windows(const Workload& work, const Traversal& traversal) {
  using Comm = comm::EmulatedLink<comm::ThreadComm, Clock>;
  using Hooks = mega::Hooks<SpanRecorder<Clock>>;
  using Stage = TimedStage<Clock>;
  using detail::ns;
  constexpr double real_bytes = detail::ConstantBatch::message_floats * sizeof(float);
  comm::EmulatedHop hop = work.hop;
  hop.bytes_per_s *= work.message_bytes > 0 ? real_bytes / work.message_bytes : 1.0;
  const auto network = std::make_shared<comm::EmulatedNetwork>(hop);

  detail::Gathered all;
  const int steps = work.steps + 1;
  all.record.p = work.p;
  all.record.hand_overs = dpp::hand_overs(dpp::LoopPlacement{}, work.p, work.v);
  all.begins.assign(static_cast<std::size_t>(steps), 0);
  all.ends = all.completions = all.begins;

  comm::run_threads(
      work.p,
      [&](comm::ThreadComm& threads) {
        Comm world(std::move(threads), network);
        Clock& clock = world.clock();
        const int rank = world.rank();
        const mega::train::Pipeline<Traversal, dpp::LoopPlacement> pipeline(
            detail::PipelineOptions<Traversal>{{.pipeline = work.p}, work.v, work.m, traversal},
            rank, work.p);
        std::vector<Stage> stages;
        double stated = 0;
        for (const int s : pipeline.own_stages()) {
          Stage& stage = stages.emplace_back();
          stage.rows = 1;
          stage.cols = detail::ConstantBatch::message_floats;
          stage.at = {s, pipeline.stages()};
          stage.times = work.times[static_cast<std::size_t>(s)];
          stage.clock = &clock;
          stated += work.m * (stage.times.forward + stage.times.backward_input +
                              stage.times.backward_weight);
        }
        const std::vector<dpp::Action> list = pipeline.actions(false);
        std::vector<dpp::ChunkPlacement> placements = pipeline.placements(false);
        for (dpp::ChunkPlacement& at : placements) at.slots = work.roomy ? work.m : at.slots;
        Hooks hooks{SpanRecorder<Clock>(clock, 2 * list.size()), {}, {}};
        mega::Host device;
        dpp::Executor<mega::Host, Comm, Stage, Hooks> executor(device, world, stages, placements,
                                                               list, work.m, hooks);
        const detail::ConstantBatch batch{work.m};
        detail::CompletionTimes<Clock> sink{clock, std::vector<double>(stages.size())};
        mega::host::Stream stream;
        for (int step = 0; step < steps; ++step) {
          // All ranks begin at one time, a little after the last has come.
          double begin = clock.now();
          world.all_reduce(stream, mega::Vector<double>(&begin, 1), comm::Reduce::max);
          begin += 1e-3;
          clock.wait_until(begin);
          hooks.recorder.clear();
          executor.train(batch, {0, static_cast<std::uint64_t>(step)}, sink);
          executor.synchronize();
          const double own_end = clock.now();
          double end = own_end;
          world.all_reduce(stream, mega::Vector<double>(&end, 1), comm::Reduce::max);

          const std::lock_guard lock(all.mutex);
          const auto at = static_cast<std::size_t>(step);
          all.begins[at] = begin;
          all.ends[at] = end;
          all.completions[at] += *std::min_element(sink.at.begin(), sink.at.end());
          all.record.iterations.push_back({rank, step, ns(begin), ns(end), ns(own_end)});
          for (const auto& span : hooks.recorder.spans()) {
            const std::string_view name = span.info.name;
            if (name != "forward" && name != "backward") continue;
            const auto kind =
                name == "forward" ? dpp::ActionKind::forward : dpp::ActionKind::backward;
            all.record.compute.push_back(
                {rank, step, dpp::make_action(kind, span.info.chunk, span.info.microbatch),
                 ns(span.start_s), ns(span.end_s)});
            all.busy += step > 0 ? span.end_s - span.start_s : 0;
          }
          all.stated += step > 0 ? stated : 0;
          for (Index mb = 0; mb < work.m; ++mb) all.loss += executor.loss_sums().data()[mb];
        }
      },
      {.deadline = comm::Seconds(work.deadline_s)});

  for (const comm::EmulatedPassage& passage : network->passages()) {
    for (int step = 0; step < steps; ++step) {
      const auto at = static_cast<std::size_t>(step);
      if (passage.start_s < all.begins[at] || passage.start_s > all.ends[at]) continue;
      all.record.transfers.push_back(
          {passage.from, passage.to, step, ns(passage.start_s), ns(passage.end_s)});
    }
  }
  // The first step finds threads that have not run yet.
  const dpp::PipelineMetrics metrics = dpp::measure(all.record, 1);
  Windows out;
  for (int step = 1; step < steps; ++step) {
    const auto at = static_cast<std::size_t>(step);
    const double length = all.ends[at] - all.begins[at];
    out.step_s += length / work.steps;
    out.all_reduce_window += (all.ends[at] - all.completions[at] / work.p) / length / work.steps;
  }
  for (const dpp::SendWindow& send : metrics.sends)
    out.send_ratio += send.ratio / static_cast<double>(metrics.sends.size());
  if (metrics.transfer_ns) {
    out.transfers = {metrics.transfer_ns->total * 1e-9 / work.steps,
                     metrics.transfer_ns->covered * 1e-9 / work.steps};
  }
  for (const dpp::RankMetrics& of_rank : metrics.ranks)
    out.peak = std::max(out.peak, of_rank.peak_live);
  out.overrun = all.busy / all.stated - 1;
  out.loss = all.loss;
  return out;
}

}  // namespace emulation
