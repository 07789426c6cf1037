/// @file  Executor: walks a rank's action list, moving micro-batches through the slots of its
/// chunks.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/context.hpp>
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/core/hooks.hpp>
#include <mega/core/replay.hpp>
#include <mega/core/stage.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/activation_buffers.hpp>
#include <mega/dpp/dispatch.hpp>
#include <mega/dpp/ports.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

/// What a step trains on: this data-parallel rank's micro-batches, in host memory that stays valid
/// until the step is done.
template <class B, class Stage>
concept batch_of = requires(const B& batch, int microbatch) {
  { batch.microbatches() } -> std::convertible_to<int>;
  { batch.input(microbatch) } -> std::convertible_to<typename Stage::input_type>;
  { batch.target(microbatch) } -> std::convertible_to<typename Stage::target_type>;
  { batch.first_sample(microbatch) } -> std::convertible_to<Index>;
};

/// Called by the executor when gradients are complete; the work goes behind what `compute` holds.
/// Optional prepare(compute, chunk): called before a chunk's first forward of a step, which is that
/// of micro-batch 0, since micro-batches of a chunk ascend in every order that verify() accepts.
template <class G, class Stream>
concept gradient_sink = requires(G& sink, Stream& compute, int chunk) {
  sink.reduce(compute, chunk);
  sink.tied_reduce(compute);
};

/// Where the executor's random numbers come from; step counts from 0.
struct StepKey {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  /// Device memory that holds the step while its work runs; where it is null, `step` is an argument
  /// of the work. Needed where work is replayed.
  const std::int64_t* step_at = nullptr;
};

/// Runs the chunks of one rank. Not copyable; one step at a time, from one thread.
///
/// Everything is queued on `compute` and on one stream a port; the host waits for nothing, and
/// nothing is allocated after construction. A micro-batch of chunk c lives in slot mb % slots: its
/// activation is received there, saved tensors stay there, its gradient is received there. The slot
/// is posted to the sender again when its last backward call has been queued. A fused pair runs as
/// its halves one after the other: on one stream there is nothing to run beside them.
/// A call of a stage, with what it queues on `compute`, is one piece of work of the device's
/// replays (core/replay.hpp); channels, reductions and visits are between the pieces. There is one
/// a kind of call, chunk, micro-batch and mode: at most twice as many as the list has calls.
/// Stages, communicator and hooks must outlive the executor.
template <device_policy Device, class Comm, class Stage, class HookSet = Hooks<>>
class Executor {
 public:
  using stream_type = typename Device::stream_type;
  using context_type = Context<stream_type, HookSet>;
  static_assert(stage<Stage, context_type>,
                "mega: the stage lacks a member; mega::explain<Plan>() names it");
  static_assert(comm::has_channels<Comm, stream_type>,
                "mega: the communicator has no channels on this device's streams");

  /// Collective over the pipeline: opens the channels and checks that both ends of every edge
  /// agree on its extents. Throws Error(usage) naming both ends where they do not, and where the
  /// list has actions that the stage cannot do.
  /// @param actions  a lowered list of this rank (dpp::lower)
  /// @param replays  whether calls of stages may be replayed: a stage queues the same each time,
  ///                 all that it does on the host is to queue, and so do its communicators
  Executor(Device& device, Comm& world, std::span<Stage> stages,
           std::vector<ChunkPlacement> placements, std::span<const Action> actions,
           int microbatches, HookSet& hooks, bool replays = false)
      : stages_(stages),
        placements_(std::move(placements)),
        actions_(actions.data(), actions.data() + actions.size()),
        microbatches_(microbatches),
        hooks_(hooks),
        memory_(device.allocate(required_bytes(stages, placements_, microbatches))),
        greetings_(device.allocate(2 * placements_.size() * sizeof(Hello))),
        buffers_([&] {
          Arena arena(memory_.data(), memory_.bytes());
          return ActivationBuffers<Stage>(arena, stages, placements_, microbatches);
        }()),
        arena_(buffers_.workspace, buffers_.workspace_bytes),
        first_samples_(static_cast<std::size_t>(microbatches), 0),
        compute_(device.make_stream("compute")),
        replays_(make_replays(device)),
        may_replay_(replays && hooks_are_null(hooks)) {
    expect_supported(actions_);
    live_.reserve(placements_.size());
    for (const ChunkPlacement& at : placements_) {
      Ports& port = ports_.emplace_back();
      const auto stage = static_cast<std::uint32_t>(at.position.stage);
      // Edge ids: 2s carries activations into stage s, 2s + 1 carries gradients out of it.
      if (!at.position.first()) {
        port.activation_in.emplace(device, world, at.previous_rank, 2 * stage);
        port.gradient_out.emplace(device, world, at.previous_rank, 2 * stage + 1);
      }
      if (!at.position.last()) {
        port.activation_out.emplace(device, world, at.next_rank, 2 * (stage + 1));
        port.gradient_in.emplace(device, world, at.next_rank, 2 * (stage + 1) + 1);
      }
    }
    shake_hands();
  }

  /// Bytes of device memory that the constructor will allocate. Needs no device.
  [[nodiscard]] static std::size_t required_bytes(std::span<const Stage> stages,
                                                  std::span<const ChunkPlacement> placements,
                                                  int microbatches) {
    Arena counting;
    const ActivationBuffers<Stage> layout(counting, stages, placements, microbatches);
    return counting.used();
  }

  [[nodiscard]] stream_type& compute() noexcept { return compute_; }
  /// Device memory allocated at construction.
  [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }
  [[nodiscard]] int microbatches() const noexcept { return microbatches_; }
  [[nodiscard]] std::span<const Action> actions() const noexcept {
    return {actions_.data(), actions_.size()};
  }
  /// Another order of the same actions from the next step on, on all ranks of the pipeline.
  /// @pre it runs with the slots that the placements have
  void reorder(std::span<const Action> actions) {
    expect_supported(actions);
    actions_.assign(actions.begin(), actions.end());
  }

  /// Changes whenever work that was queued earlier names other memory or numbers than the same call
  /// of a stage would now.
  [[nodiscard]] std::uint64_t revision() const noexcept { return revision_; }
  /// To be called when something has changed that stages name and the executor does not see: what
  /// they are bound to, or how a library does its part.
  void forget_replays() {
    ++revision_;
    replays_.clear();
  }
  /// Calls of stages that are kept to be replayed.
  [[nodiscard]] std::size_t replays() const noexcept { return replays_.size(); }
  /// Most micro-batches that were alive on this rank at once in the last step: forward queued,
  /// weight gradient not yet.
  [[nodiscard]] int peak() const noexcept { return peak_; }

  /// Device memory: one over the number of valid targets of the global batch, read by loss().
  [[nodiscard]] Vector<float> loss_scale() const noexcept { return buffers_.loss_scale; }
  /// Device memory, one a micro-batch: the sums that loss() made; zero where the last chunk is not.
  [[nodiscard]] Vector<double> loss_sums() const noexcept { return buffers_.loss_sums; }

  /// Queues one training step. Gradients are added to the accumulators that the stages were bound
  /// to; `sink` hears of every chunk whose accumulators are complete.
  template <batch_of<Stage> Batch, gradient_sink<stream_type> Sink>
  void train(const Batch& batch, StepKey key, Sink& sink) {
    StaticDispatch::dispatcher<Device, Comm> in_order;
    train(batch, key, sink, in_order);
  }

  /// The same in the order that `dispatcher` decides: a dispatch policy's, made for actions().
  template <batch_of<Stage> Batch, gradient_sink<stream_type> Sink, class Dispatcher>
  void train(const Batch& batch, StepKey key, Sink& sink, Dispatcher& dispatcher) {
    load(batch, Mode::train, key);
    run(sink, dispatcher);
  }

  /// The part of train() or evaluate() that differs from step to step: the inputs go into device
  /// memory, the slots to their senders.
  template <batch_of<Stage> Batch>
  void load(const Batch& batch, Mode mode, StepKey key) {
    expects(batch.microbatches() == microbatches_, ErrorCode::usage, [&] {
      return sentence("the batch has ", batch.microbatches(),
                      " micro-batches but the schedule was made for ", microbatches_);
    });
    mode_ = mode;
    if (key.seed != key_.seed || key.step_at != key_.step_at ||
        (key.step_at == nullptr && key.step != key_.step))
      ++revision_;
    key_ = key;
    for (int mb = 0; mb < microbatches_; ++mb) {
      const auto i = static_cast<std::size_t>(mb);
      const Index first = batch.first_sample(mb);
      if (std::exchange(first_samples_[i], first) != first) ++revision_;
      if (!buffers_.inputs.empty())
        upload(compute_, buffers_.inputs[i], checked(batch.input(mb), buffers_.inputs[i], "input"));
      if (!buffers_.targets.empty())
        upload(compute_, buffers_.targets[i],
               checked(batch.target(mb), buffers_.targets[i], "target"));
    }
    for (std::size_t c = 0; c < ports_.size(); ++c) {
      for (int mb = 0; mb < std::min(placements_[c].slots, microbatches_); ++mb)
        post_activation(c, mb);
    }
  }

  /// The rest of train(). @pre  load() of Mode::train
  template <gradient_sink<stream_type> Sink, class Dispatcher>
  void run(Sink& sink, Dispatcher& dispatcher) {
    begin();
    Step<Sink> step{*this, sink};
    dispatcher.run(actions(), step);
  }

  /// Queues the forward half only, in the same order. `visit(stage, ctx, out)` sees the last
  /// chunk's output before its loss is taken.
  template <batch_of<Stage> Batch, class Visit>
  void evaluate(const Batch& batch, StepKey key, const Visit& visit) {
    load(batch, Mode::evaluate, key);
    begin();
    for (const Action& a : actions_) {
      const auto c = static_cast<std::size_t>(a.chunk);
      switch (a.kind) {
        case ActionKind::recv_forward: await(*ports_[c].activation_in, a); break;
        case ActionKind::send_forward: send_forward(c, a.microbatch); break;
        case ActionKind::forward:
          forward(c, a.microbatch);
          if (placements_[c].position.last()) {
            {
              context_type ctx = context(a);
              visit(stages_[c], ctx, slot(c, a.microbatch).dout);
            }
            loss(c, a.microbatch);
          }
          release(c, a.microbatch);
          break;
        default: break;
      }
    }
  }

  /// Returns when everything queued is done; rethrows what went wrong on any of the streams.
  void synchronize() {
    compute_.synchronize();
    for (Ports& port : ports_) {
      if (port.activation_out) port.activation_out->synchronize();
      if (port.gradient_out) port.gradient_out->synchronize();
      if (port.activation_in) port.activation_in->synchronize();
      if (port.gradient_in) port.gradient_in->synchronize();
    }
  }

 private:
  using edge = typename Stage::edge_type;

  /// The four ends of edges at one chunk; empty where the chunk has no neighbour.
  struct Ports {
    std::optional<Inlet<Device, Comm>> activation_in, gradient_in;
    std::optional<Outlet<Device, Comm>> activation_out, gradient_out;
  };

  /// What a dispatcher gets to work with; see dispatch.hpp.
  template <class Sink>
  struct Step {
    Executor& executor;
    Sink& sink;

    void perform(const Action& a) { executor.perform(a, sink); }
    [[nodiscard]] bool has_arrived(const Action& a) const {
      const Ports& port = executor.ports_[static_cast<std::size_t>(a.chunk)];
      if (a.kind == ActionKind::forward) return !port.activation_in || port.activation_in->ready();
      return !gives_input_gradient(a.kind) || !port.gradient_in || port.gradient_in->ready();
    }
    [[nodiscard]] bool can_leave(const Action& a) const {
      const Ports& port = executor.ports_[static_cast<std::size_t>(a.chunk)];
      if (a.kind == ActionKind::forward)
        return !port.activation_out || port.activation_out->can_send();
      return !gives_input_gradient(a.kind) || !port.gradient_out || port.gradient_out->can_send();
    }
    [[nodiscard]] stream_type& compute() const noexcept { return executor.compute_; }
    [[nodiscard]] auto waiting_for(const Action& a) const {
      const ChunkPlacement& at = executor.placements_[static_cast<std::size_t>(a.chunk)];
      const bool forward = a.kind == ActionKind::forward;
      return executor.wait_span(forward ? ActionKind::recv_forward : ActionKind::recv_backward,
                                static_cast<std::size_t>(a.chunk), a.microbatch,
                                forward ? at.previous_rank : at.next_rank);
    }
  };

  Slot<Stage>& slot(std::size_t chunk, int microbatch) {
    auto& slots = buffers_.chunks[chunk].slots;
    return slots[static_cast<std::size_t>(microbatch) % slots.size()];
  }

  context_type context(const Action& a) {
    arena_.rewind();
    return {compute_,
            arena_,
            hooks_,
            key_.seed,
            key_.step,
            a.chunk,
            a.microbatch,
            first_samples_[static_cast<std::size_t>(a.microbatch)],
            mode_,
            buffers_.loss_scale.data(),
            &buffers_.loss_sums(a.microbatch),
            key_.step_at};
  }

  /// Queues what call(ctx) queues for one compute action, now or when it last was queued.
  template <class Call>
  void perform_call(ActionKind kind, std::size_t c, int mb, const Call& call) {
    const auto queue = [&] {
      context_type ctx = context(dpp::make_action(kind, static_cast<int>(c), mb));
      const auto span = ctx.span(to_string(kind), span_kind(kind));
      call(ctx);
    };
    if (!may_replay_) return queue();
    std::size_t place = static_cast<std::size_t>(kind) * placements_.size() + c;
    place = 2 * (place * static_cast<std::size_t>(microbatches_) + static_cast<std::size_t>(mb));
    replays_.run(place + (mode_ == Mode::train ? 0 : 1), revision_, queue, compute_);
  }

  void begin() {
    peak_ = live_on_rank_ = 0;
    live_.assign(placements_.size(), 0);
    fill_zero(compute_, buffers_.loss_sums);
  }

  /// The batch's view, refused if its extents are not those of the stage.
  template <class V, class B>
  static V checked(V given, const B& buffer, const char* what) {
    for (int d = 0; d < V::rank; ++d) {
      expects(given.extent(d) == buffer.extent(d), ErrorCode::usage, [&] {
        return sentence("extent ", d, " of the batch's ", what, " is ", given.extent(d),
                        " but the stage declares ", buffer.extent(d));
      });
    }
    return given;
  }

  template <class Sink>
  void perform(const Action& a, Sink& sink) {
    const auto c = static_cast<std::size_t>(a.chunk);
    const int mb = a.microbatch;
    switch (a.kind) {
      case ActionKind::recv_forward: await(*ports_[c].activation_in, a); break;
      case ActionKind::recv_backward: await(*ports_[c].gradient_in, a); break;
      case ActionKind::send_forward: send_forward(c, mb); break;
      case ActionKind::send_backward: send_backward(c, mb); break;
      case ActionKind::forward:
        if constexpr (requires { sink.prepare(compute_, a.chunk); }) {
          if (mb == 0) sink.prepare(compute_, a.chunk);
        }
        forward(c, mb);
        break;
      case ActionKind::loss: loss(c, mb); break;
      case ActionKind::backward: backward(c, mb); break;
      case ActionKind::backward_input: backward_input(c, mb); break;
      case ActionKind::backward_weight: backward_weight(c, mb); break;
      case ActionKind::reduce: {
        const auto span = wait_span(a.kind, c, -1, -1);
        sink.reduce(compute_, a.chunk);
        break;
      }
      case ActionKind::tied_reduce: {
        const auto span = wait_span(a.kind, c, -1, -1);
        sink.tied_reduce(compute_);
        break;
      }
    }
  }

  /// Of what moves data between ranks, compute sees the wait; the communicator knows the rest.
  [[nodiscard]] static constexpr SpanKind span_kind(ActionKind kind) noexcept {
    switch (kind) {
      case ActionKind::forward: return SpanKind::forward;
      case ActionKind::loss: return SpanKind::loss;
      case ActionKind::backward:
      case ActionKind::backward_input: return SpanKind::backward;
      case ActionKind::backward_weight: return SpanKind::weight;
      default: return SpanKind::wait;
    }
  }
  [[nodiscard]] auto wait_span(ActionKind kind, std::size_t chunk, int microbatch, int peer) {
    return ScopedSpan(hooks_.recorder, compute_,
                      SpanInfo{.name = to_string(kind),
                               .chunk = static_cast<std::int32_t>(chunk),
                               .microbatch = microbatch,
                               .peer = peer,
                               .kind = span_kind(kind)});
  }

  /// The span is the time that compute waits.
  void await(Inlet<Device, Comm>& inlet, const Action& a) {
    const ChunkPlacement& at = placements_[static_cast<std::size_t>(a.chunk)];
    const bool forward = a.kind == ActionKind::recv_forward;
    const auto span = wait_span(a.kind, static_cast<std::size_t>(a.chunk), a.microbatch,
                                forward ? at.previous_rank : at.next_rank);
    inlet.await(compute_);
  }

  void post_activation(std::size_t c, int mb) {
    if (ports_[c].activation_in) ports_[c].activation_in->post(compute_, bytes_of(slot(c, mb).in));
  }

  /// The micro-batch takes its slot.
  void occupy(std::size_t c) {
    const int slots = placements_[c].slots;
    expects(live_[c] < slots, ErrorCode::usage, [&] {
      return sentence("the order needs more than the ", slots, " slots of chunk ", c, " (stage ",
                      placements_[c].position.stage, ")");
    });
    ++live_[c];
    peak_ = std::max(peak_, ++live_on_rank_);
  }

  /// The micro-batch is through with its slot: the next one that will live there may come.
  void release(std::size_t c, int mb) {
    --live_[c];
    --live_on_rank_;
    const int next = mb + placements_[c].slots;
    if (next < microbatches_) post_activation(c, next);
  }

  void forward(std::size_t c, int mb) {
    occupy(c);
    Slot<Stage>& at = slot(c, mb);
    Ports& port = ports_[c];
    edge out = at.dout;
    if (port.activation_out) {
      port.activation_out->acquire(compute_, mb % 2);
      out = buffers_.chunks[c].out[static_cast<std::size_t>(mb % 2)];
    }
    if (port.gradient_in && mode_ == Mode::train)
      port.gradient_in->post(compute_, bytes_of(at.dout));
    perform_call(ActionKind::forward, c, mb, [&](context_type& ctx) {
      if (placements_[c].position.first()) {
        const typename Stage::input_type in(buffers_.inputs[static_cast<std::size_t>(mb)]);
        stages_[c].forward(ctx, in, out, at.saved);
      } else {
        stages_[c].forward(ctx, const_edge_t<Stage>(at.in), out, at.saved);
      }
    });
  }

  void send_forward(std::size_t c, int mb) {
    const auto span = wait_span(ActionKind::send_forward, c, mb, placements_[c].next_rank);
    ports_[c].activation_out->dispatch(
        compute_, mb % 2, bytes_of(buffers_.chunks[c].out[static_cast<std::size_t>(mb % 2)]));
  }
  void send_backward(std::size_t c, int mb) {
    const auto span = wait_span(ActionKind::send_backward, c, mb, placements_[c].previous_rank);
    ports_[c].gradient_out->dispatch(
        compute_, mb % 2, bytes_of(buffers_.chunks[c].din[static_cast<std::size_t>(mb % 2)]));
  }

  void loss(std::size_t c, int mb) {
    perform_call(ActionKind::loss, c, mb, [&](context_type& ctx) {
      const typename Stage::target_type targets(buffers_.targets[static_cast<std::size_t>(mb)]);
      stages_[c].loss(ctx, slot(c, mb).dout, targets);
    });
  }

  /// The buffer for the gradient of the chunk's input; empty on the first chunk.
  edge acquire_din(std::size_t c, int mb) {
    if (!ports_[c].gradient_out) return {};
    ports_[c].gradient_out->acquire(compute_, mb % 2);
    return buffers_.chunks[c].din[static_cast<std::size_t>(mb % 2)];
  }

  void backward(std::size_t c, int mb) {
    if constexpr (runs_fused_backward<Stage, context_type>) {
      const edge din = acquire_din(c, mb);
      perform_call(ActionKind::backward, c, mb, [&](context_type& ctx) {
        Slot<Stage>& at = slot(c, mb);
        stages_[c].backward(ctx, const_edge_t<Stage>(at.dout), din, at.saved);
      });
      release(c, mb);
    } else {
      backward_input(c, mb);
      backward_weight(c, mb);
    }
  }

  /// Not every stage can split its backward.
  static void expect_supported(std::span<const Action> actions) {
    if constexpr (!runs_split_backward<Stage, context_type>) {
      for (const Action& a : actions) {
        expects(a.kind != ActionKind::backward_input && a.kind != ActionKind::backward_weight,
                ErrorCode::usage, [&] {
                  return sentence("the order has a ", to_string(a),
                                  ", and this stage lacks backward_input() or backward_weight(); "
                                  "choose a schedule that does not split the backward");
                });
      }
    }
  }

  void backward_input([[maybe_unused]] std::size_t c, [[maybe_unused]] int mb) {
    if constexpr (runs_split_backward<Stage, context_type>) {
      const edge din = acquire_din(c, mb);
      perform_call(ActionKind::backward_input, c, mb, [&](context_type& ctx) {
        Slot<Stage>& at = slot(c, mb);
        stages_[c].backward_input(ctx, const_edge_t<Stage>(at.dout), din, at.saved);
      });
    }
  }

  void backward_weight([[maybe_unused]] std::size_t c, [[maybe_unused]] int mb) {
    if constexpr (runs_split_backward<Stage, context_type>) {
      perform_call(ActionKind::backward_weight, c, mb,
                   [&](context_type& ctx) { stages_[c].backward_weight(ctx, slot(c, mb).saved); });
      release(c, mb);
    }
  }

  /// What each end of an edge tells the other before step 0.
  struct Hello {
    std::int64_t element_bytes = 0;
    std::array<Index, 5> extent{};
    friend bool operator==(const Hello&, const Hello&) = default;

    [[nodiscard]] std::string text() const {
      std::string out;
      for (int d = 0; d < edge::rank; ++d)
        out += (d == 0 ? "" : " x ") + std::to_string(extent[static_cast<std::size_t>(d)]);
      return out + sentence(" of ", element_bytes, " bytes");
    }
  };

  static Hello hello(const std::array<Index, edge::rank>& extents) {
    Hello out;
    out.element_bytes = sizeof(typename edge::element_type);
    for (std::size_t d = 0; d < extents.size(); ++d) out.extent[d] = extents[d];
    return out;
  }

  /// Every edge carries one greeting in its forward direction, through the channel that it will
  /// use.
  void shake_hands() {
    const std::size_t n = ports_.size();
    const auto place = [&](std::size_t i) {
      return Vector<std::byte>(greetings_.data() + i * sizeof(Hello), sizeof(Hello));
    };
    std::vector<Hello> mine(n), theirs(n);
    for (std::size_t c = 0; c < n; ++c) {
      if (ports_[c].activation_in) ports_[c].activation_in->post(compute_, place(c));
    }
    for (std::size_t c = 0; c < n; ++c) {
      if (!ports_[c].activation_out) continue;
      mine[c] = hello(stages_[c].edge_extents());
      ports_[c].activation_out->acquire(compute_, 0);
      upload(compute_, place(n + c), Vector<const std::byte>(bytes_of(Vector<Hello>(&mine[c], 1))));
      ports_[c].activation_out->dispatch(compute_, 0, place(n + c));
    }
    for (std::size_t c = 0; c < n; ++c) {
      if (!ports_[c].activation_in) continue;
      ports_[c].activation_in->await(compute_);
      download(compute_, bytes_of(Vector<Hello>(&theirs[c], 1)), Vector<const std::byte>(place(c)));
    }
    synchronize();
    for (std::size_t c = 0; c < n; ++c) {
      if (!ports_[c].activation_in) continue;
      const Hello expected = hello(incoming_extents(stages_[c]));
      expects(theirs[c] == expected, ErrorCode::usage, [&] {
        return sentence("stage ", placements_[c].position.stage - 1, " on rank ",
                        placements_[c].previous_rank, " sends ", theirs[c].text(), " but stage ",
                        placements_[c].position.stage, " expects ", expected.text());
      });
    }
  }

  std::span<Stage> stages_;
  std::vector<ChunkPlacement> placements_;
  std::vector<Action> actions_;
  int microbatches_;
  HookSet& hooks_;
  // Streams and ports come after the memory that their queued work touches: they end first.
  typename Device::memory_type memory_;
  typename Device::memory_type greetings_;
  ActivationBuffers<Stage> buffers_;
  Arena arena_;
  std::vector<Index> first_samples_;  // of each micro-batch, in the global batch
  stream_type compute_;
  [[no_unique_address]] replays_t<Device> replays_;
  bool may_replay_;
  std::uint64_t revision_ = 0;
  std::vector<Ports> ports_;
  std::vector<int> live_;  // micro-batches in the slots of each chunk
  int live_on_rank_ = 0;
  int peak_ = 0;
  Mode mode_ = Mode::train;
  StepKey key_;
};

}  // namespace mega::inline v0::dpp
