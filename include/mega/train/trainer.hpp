/// @file  Trainer<Plan>: one training step, composed of the blocks of the library.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/context.hpp>
#include <mega/core/error.hpp>
#include <mega/core/loss_scale.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/replay.hpp>
#include <mega/core/stage.hpp>
#include <mega/core/storage.hpp>
#include <mega/dpp/dispatch.hpp>
#include <mega/dpp/executor.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/optim/loss_scaling.hpp>
#include <mega/train/groups.hpp>
#include <mega/train/memory_plan.hpp>
#include <mega/train/parameter_store.hpp>
#include <mega/train/parameter_table.hpp>
#include <mega/train/pipeline.hpp>
#include <mega/train/plan.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0 {

/// The sizes of a run. Kinds are types and stand in the plan.
template <class Traversal = dpp::ScheduleTraversal<dpp::DFC>,
          dpp::dispatch_policy Dispatch = dpp::StaticDispatch>
struct TrainerOptions {
  Mesh mesh{};
  int chunks = 1;        ///< model chunks a pipeline rank
  int microbatches = 1;  ///< a step and data-parallel rank
  Traversal traversal{};
  Dispatch dispatch{};
  bool shard_optimizer = false;  ///< ZeRO stage 1
  double clip_norm = 1.0;        ///< 0: no clipping
  optim::AdamWOptions adamw{};
  optim::LossScalingOptions loss_scaling{};  ///< of stages whose values are Float16
  std::uint64_t seed = 0;
};

/// What a step came to; equal on all ranks.
struct StepResult {
  double loss = 0;           ///< mean over the valid targets of the global batch
  double gradient_norm = 0;  ///< of the global gradient, before clipping
  std::int64_t targets = 0;  ///< valid ones in the global batch
  bool skipped = false;      ///< the norm was not finite, so no parameter changed
  double loss_scale = 1;     ///< of the gradient; not 1 only where values are Float16
};

/// Besides the micro-batches, a training batch tells how many of its targets count.
template <class B, class Stage>
concept training_batch = dpp::batch_of<B, Stage> && requires(const B& batch) {
  { batch.valid_targets() } -> std::convertible_to<std::int64_t>;
};

/// Owns one rank's share of a training step: schedule, slots, flat buffers, reductions, optimizer.
///
/// A step, as the data sees it: count the valid targets of the global batch; run the action list,
/// in which a chunk's first forward waits for its values and clears its gradients, and its last
/// backward starts their reduction; gather the squares of all tensors and the losses of all
/// micro-batches; clip; update the owned pieces chunk by chunk; gather each chunk's new values.
/// Three streams: `compute`, `transfer` of the collectives, `optimizer`. So with several chunks the
/// reductions run beside the backward pass, updates and gathers beside the next forward pass.
/// What a device can queue again by one call (core/replay.hpp), it does: the calls of stages, or
/// the whole step where one rank holds one chunk and a static order. Hooks that are not null, and
/// collectives within stages that cannot be replayed, keep it from doing so; bits do not change.
/// Every member function is collective over the world. World outlives the trainer.
template <class Plan>
class Trainer {
  static_assert((explain<Plan>(), true));

 public:
  using device_type = typename Plan::device;
  using communicator_type = typename Plan::communicator;
  using stage_type = typename Plan::stage;
  using hooks_type = typename Plan::hooks;
  using stream_type = typename device_type::stream_type;
  using groups_type = train::Groups<communicator_type>;
  using store_type = train::ParameterStore<device_type, stage_value_t<stage_type>>;
  using options_type = TrainerOptions<typename Plan::traversal, typename Plan::dispatch>;
  /// Whether the gradient is that of a multiple of the loss; see optim/loss_scaling.hpp.
  static constexpr bool scales_loss = std::same_as<stage_value_t<stage_type>, Float16>;
  using dispatcher_type =
      typename Plan::dispatch::template dispatcher<device_type, communicator_type>;

  /// @param factory  makes the stage of a position: factory(StagePosition) or
  ///                 factory(StagePosition, Groups&). Also called for stages of other ranks, to
  ///                 learn their parameters, so it allocates nothing large.
  /// Throws Error(usage) on a layout that cannot run, with the numbers.
  template <class Factory>
  Trainer(communicator_type& world, const options_type& options, const Factory& factory,
          device_type device = device_type(), hooks_type hooks = hooks_type())
      : device_(std::move(device)),
        hooks_(std::move(hooks)),
        options_(options),
        world_(world),
        pipeline_(options, world.rank(), world.size()),
        groups_(groups_type::make(world, options.mesh, pipeline_.rank_of(0),
                                  pipeline_.rank_of(pipeline_.stages() - 1))),
        store_(device_, make_table(factory), options.shard_optimizer),
        memory_(device_.allocate(train::ExchangeBuffers::required_bytes(
            store_.table().model_parameters(), options.microbatches * options.mesh.data))),
        exchange_([&] {
          Arena arena(memory_.data(), memory_.bytes());
          return train::ExchangeBuffers(arena, store_.table().model_parameters(),
                                        options.microbatches * options.mesh.data);
        }()),
        stages_(make_stages(factory)),
        executor_(device_, world, stages_,
                  pipeline_.placements(store_.table().has_ties(), options.dispatch.ahead),
                  pipeline_.actions(store_.table().has_ties()), options.microbatches, hooks_,
                  replay_scope() == ReplayScope::actions),
        dispatcher_(options.dispatch, device_, world, options.mesh, executor_.actions()),
        transfer_(device_.make_stream("transfer")),
        optimizer_(device_.make_stream("optimizer")),
        reducer_(device_, store_, groups_, transfer_),
        computed_(device_.make_event()),
        clipped_(device_.make_event()),
        joined_(device_.make_event()),
        replays_(make_replays(device_)) {
    for (std::size_t c = 0; c < stages_.size(); ++c) {
      updated_.push_back(device_.make_event());
      available_.push_back(device_.make_event());
    }
    name_stream(hooks_.recorder, executor_.compute(), "compute");
    name_stream(hooks_.recorder, transfer_, "transfer");
    name_stream(hooks_.recorder, optimizer_, "optimizer");
    store_.initialise(executor_.compute(), options.seed);
    if constexpr (scales_loss) restore_loss_scale({.scale = options.loss_scaling.initial});
    for (std::size_t c = 0; c < stages_.size(); ++c)
      stages_[c].bind(store_.views(static_cast<int>(c)));
  }

  /// Queues a step and waits for its result. `batch` holds this data-parallel rank's micro-batches.
  template <training_batch<stage_type> Batch>
  StepResult step(const Batch& batch, double learning_rate) {
    queue_step(batch, learning_rate);
    return result();
  }

  /// Queues a step without waiting; the batch stays valid until result() or synchronize().
  template <training_batch<stage_type> Batch>
  void queue_step(const Batch& batch, double learning_rate) {
    const Attended first_use(*this, is_first_use(trained_));
    const RecordedStep recorded(hooks_.recorder, executor_.compute(), steps_done());
    const bool whole = replay_scope() == ReplayScope::step;
    // In front of the inputs, which are written over.
    if (whole) join();
    begin(batch.valid_targets(), learning_rate);
    executor_.load(batch, Mode::train, step_key());
    if (whole) {
      const auto work = [&] {
        fork();
        queue_work();
        join();
      };
      replays_.run(0, executor_.revision(), work, executor_.compute(), transfer_, optimizer_);
      fork();
    } else {
      queue_work();
    }
    ++step_;
  }

  /// Mean loss over the batch with dropout off; no parameter changes.
  template <training_batch<stage_type> Batch>
  StepResult evaluate(const Batch& batch) {
    return evaluate(batch, [](auto&&...) {});
  }

  /// `visit(stage, ctx, out)` is called on the ranks of the last chunk with each micro-batch's
  /// output.
  template <training_batch<stage_type> Batch, class Visit>
  StepResult evaluate(const Batch& batch, const Visit& visit) {
    const Attended first_use(*this, is_first_use(evaluated_));
    stream_type& compute = executor_.compute();
    begin(batch.valid_targets(), 0);
    for (const auto& event : available_) compute.wait(event);
    executor_.evaluate(batch, step_key(), visit);
    compute.record(computed_);
    transfer_.wait(computed_);
    fill_zero(transfer_, exchange_.sums);
    gather_losses();
    StepResult out = result();
    out.gradient_norm = 0;
    out.skipped = false;
    out.loss_scale = 1;
    return out;
  }

  /// Waits for everything queued and reads the last step's figures.
  StepResult result() {
    std::vector<double> sums(static_cast<std::size_t>(exchange_.sums.size()));
    optim::UpdateControl control;
    std::int64_t targets = 0;
    download(transfer_, Vector<double>(sums.data(), exchange_.sums.size()),
             Vector<const double>(exchange_.sums));
    download(transfer_, Vector<optim::UpdateControl>(&control, 1),
             Vector<const optim::UpdateControl>(exchange_.control));
    download(transfer_, Vector<std::int64_t>(&targets, 1),
             Vector<const std::int64_t>(exchange_.targets()));
    synchronize();
    double loss = 0;
    for (auto i = static_cast<std::size_t>(store_.table().model_parameters()); i < sums.size(); ++i)
      loss += sums[i];
    return {targets > 0 ? loss / static_cast<double>(targets) : 0.0, control.norm, targets,
            control.skip != 0, static_cast<double>(control.loss_scale)};
  }

  /// Waits for everything queued; rethrows what failed.
  void synchronize() {
    executor_.synchronize();
    optimizer_.synchronize();
    transfer_.synchronize();
  }

  /// Steps done, counted from 0; set when a checkpoint is loaded.
  [[nodiscard]] std::int64_t steps_done() const noexcept {
    return static_cast<std::int64_t>(step_);
  }
  void resume_at(std::int64_t steps_done) noexcept {
    step_ = static_cast<std::uint64_t>(steps_done);
  }

  /// Of the next step. Waits for everything queued.
  [[nodiscard]] LossScale loss_scale() requires scales_loss {
    LossScale out;
    download(transfer_, Vector<LossScale>(&out, 1), Vector<const LossScale>(exchange_.loss_scale));
    synchronize();
    return out;
  }
  /// Another one from the next step on; equal on all ranks. Waits for everything queued.
  void restore_loss_scale(const LossScale& scale) requires scales_loss {
    using optim::assign;
    synchronize();
    assign(transfer_, exchange_.loss_scale, scale);
    synchronize();
  }

  /// The flat buffers: what a checkpoint reads and writes between steps.
  [[nodiscard]] store_type& parameters() noexcept { return store_; }
  [[nodiscard]] std::span<stage_type> stages() noexcept { return stages_; }
  [[nodiscard]] groups_type& groups() noexcept { return groups_; }
  [[nodiscard]] hooks_type& hooks() noexcept { return hooks_; }
  [[nodiscard]] communicator_type& world() noexcept { return world_; }
  [[nodiscard]] stream_type& compute() noexcept { return executor_.compute(); }
  [[nodiscard]] const options_type& options() const noexcept { return options_; }
  /// Of the plan's dispatch policy: LookAhead's tells what it executed, Replay's is told.
  [[nodiscard]] dispatcher_type& dispatcher() noexcept { return dispatcher_; }

  /// Another order from the next step on: the same traversal type, whose slots were made for all
  /// that it names as alternatives. Equal on all ranks; no result changes by it.
  void reorder(const typename Plan::traversal& traversal) requires
      dpp::names_alternatives<typename Plan::traversal> && dpp::takes_new_orders<dispatcher_type> {
    options_.traversal = traversal;
    pipeline_.reorder(traversal);
    executor_.reorder(pipeline_.actions(store_.table().has_ties()));
    dispatcher_.reorder(executor_.actions());
    replays_.clear();
  }

  /// How much of a step is replayed: what the device offers, as far as it can be done here.
  [[nodiscard]] ReplayScope replay_scope() const noexcept {
    if (!hooks_are_null(hooks_) || !comm::is_replayable(groups_.tensor)) return ReplayScope::none;
    const ReplayScope offered = replay_scope_of(device_);
    const bool whole =
        options_.dispatch.ahead == 0 && pipeline_.stages() == 1 && comm::is_replayable(world_);
    return offered == ReplayScope::step && !whole ? ReplayScope::actions : offered;
  }
  /// To be called between steps, on all ranks, when something has changed that queued work names
  /// and the trainer does not see: what stages are bound to, or how a library does its part. The
  /// next steps are first uses again.
  void forget_replays() {
    executor_.forget_replays();
    replays_.clear();
    trained_ = evaluated_ = 0;
  }
  /// Pieces of work that are kept to be replayed.
  [[nodiscard]] std::size_t replays() const noexcept {
    return executor_.replays() + replays_.size();
  }
  /// Most micro-batches that were alive on this rank at once in the last step.
  [[nodiscard]] int peak_microbatches() const noexcept { return executor_.peak(); }
  /// Has the collectives of the world and of all groups attended while it lives; see
  /// comm::has_attended_calls. For what allocates or does something for the first time between
  /// steps, on all ranks; the first step and the first evaluation see to it themselves.
  class [[nodiscard]] Attended {
   public:
    /// @param wanted  false: a scope like any other
    explicit Attended(Trainer& trainer, bool wanted = true) : trainer_(trainer), wanted_(wanted) {
      if (wanted_ && trainer_.attended_++ == 0) attend(true);
    }
    Attended(const Attended&) = delete;
    Attended& operator=(const Attended&) = delete;
    ~Attended() {
      if (wanted_ && --trainer_.attended_ == 0) attend(false);
    }

   private:
    void attend(bool on) {
      trainer_.groups_.attend(on);
      if constexpr (comm::has_attended_calls<communicator_type>) trainer_.world_.attend(on);
    }

    Trainer& trainer_;
    bool wanted_;
  };

  /// Device memory this rank has allocated through the trainer.
  [[nodiscard]] std::size_t device_bytes() const noexcept {
    return store_.bytes() + executor_.bytes() + memory_.bytes() +
           options_.dispatch.required_bytes(options_.mesh);
  }

 private:
  /// The executor's gradient sink: the plan's reducer, and what comes before a chunk's first use.
  struct Gradients {
    Trainer& trainer;

    void prepare(stream_type& compute, int chunk) {
      const auto c = static_cast<std::size_t>(chunk);
      compute.wait(trainer.available_[c]);
      const train::Region& region = trainer.store_.table().regions()[c];
      fill_zero(compute,
                trainer.store_.gradients().slice(region.begin, region.cleared_end - region.begin));
    }
    void clear_aliases(stream_type& compute) {
      for (const train::TableEntry& e : trainer.store_.table().entries()) {
        if (e.alias && !e.parameter.overwritten_first)
          fill_zero(compute, trainer.store_.gradients(e));
      }
    }
    void reduce(stream_type& compute, int chunk) { trainer.reducer_.reduce(compute, chunk); }
    void tied_reduce(stream_type& compute) { trainer.reducer_.tied_reduce(compute); }
  };

  template <class Factory>
  [[nodiscard]] stage_type make_stage(const Factory& factory, int stage) {
    const StagePosition position{stage, pipeline_.stages()};
    if constexpr (std::invocable<const Factory&, StagePosition, groups_type&>) {
      return factory(position, groups_);
    } else {
      return factory(position);
    }
  }

  template <class Factory>
  [[nodiscard]] std::vector<stage_type> make_stages(const Factory& factory) {
    std::vector<stage_type> out;
    for (const int stage : pipeline_.own_stages()) out.push_back(make_stage(factory, stage));
    return out;
  }

  template <class Factory>
  [[nodiscard]] train::ParameterTable make_table(const Factory& factory) {
    std::vector<std::vector<Parameter>> lists;
    for (int s = 0; s < pipeline_.stages(); ++s)
      lists.push_back(make_stage(factory, s).parameters());
    const Coordinates at = options_.mesh.coordinates(world_.rank());
    return {lists,
            pipeline_.own_stages(),
            {at[Axis::tensor], options_.mesh.tensor, at[Axis::data], options_.mesh.data}};
  }

  /// Gives the step its inputs, and counts the targets of the global batch.
  void begin(std::int64_t targets, double learning_rate) {
    using optim::assign, optim::reciprocal;
    stream_type& compute = executor_.compute();
    // The last step's inputs and gradients have been read; its values are waited for chunk by
    // chunk.
    compute.wait(clipped_);
    const auto counting = span(compute, "count_targets", SpanKind::other);
    assign(compute, exchange_.inputs,
           optim::StepInputs{targets, steps_done(), static_cast<float>(learning_rate)});
    groups_.data.all_reduce(compute, exchange_.targets(), comm::Reduce::sum);
    const Vector<const std::int64_t> all_targets(exchange_.targets());
    if constexpr (scales_loss) {
      reciprocal(compute, executor_.loss_scale(), all_targets,
                 Vector<const LossScale>(exchange_.loss_scale));
    } else {
      reciprocal(compute, executor_.loss_scale(), all_targets);
    }
  }

  /// What a step does behind its inputs, from the first forward to the gather of the values.
  void queue_work() {
    stream_type& compute = executor_.compute();
    Gradients gradients{*this};
    gradients.clear_aliases(compute);
    executor_.run(gradients, dispatcher_);
    compute.record(computed_);
    transfer_.wait(computed_);
    gather_norm_and_losses();
    clip();
    update();
  }

  /// Later work of `compute` comes after all that the other streams hold.
  void join() {
    for (stream_type* stream : {&transfer_, &optimizer_}) {
      stream->record(joined_);
      executor_.compute().wait(joined_);
    }
  }
  /// Later work of the other streams, and whoever waits for a step's events, comes after all that
  /// `compute` holds. Between fork() and join() no event is waited for that is older than both.
  void fork() {
    stream_type& compute = executor_.compute();
    for (std::size_t c = 0; c < updated_.size(); ++c) {
      compute.record(updated_[c]);
      compute.record(available_[c]);
    }
    compute.record(clipped_);
    for (stream_type* stream : {&transfer_, &optimizer_}) stream->wait(clipped_);
  }

  /// Of the step that begins, where its work finds it.
  [[nodiscard]] dpp::StepKey step_key() const noexcept {
    return {options_.seed, step_, exchange_.step()};
  }

  /// Whether a kind of step does something for the first time: it runs or, where it is replayed, is
  /// recorded, which a first run that made more room for scratch puts off by one step.
  [[nodiscard]] bool is_first_use(int& uses) const noexcept {
    const int first_uses = replay_scope() == ReplayScope::none ? 1 : 3;
    if (uses == first_uses) return false;
    ++uses;
    return true;
  }

  /// Every sum has exactly one place, filled by one pipeline stage, so adding the ranks' vectors
  /// adds zeros to it except over the axes that really divide the tensor.
  void gather_norm_and_losses() {
    using optim::sums_of_squares;
    {
      const auto squaring = span(transfer_, "gradient_squares", SpanKind::optimizer);
      fill_zero(transfer_, exchange_.sums);
      sums_of_squares(transfer_, exchange_.sums, Vector<const float>(store_.gradients()),
                      store_.squares());
    }
    gather_losses();
  }

  void gather_losses() {
    const Coordinates at = options_.mesh.coordinates(world_.rank());
    if (pipeline_.holds_last() && at[Axis::tensor] == 0) {
      copy(transfer_,
           exchange_.sums.slice(
               store_.table().model_parameters() + at[Axis::data] * options_.microbatches,
               options_.microbatches),
           Vector<const double>(executor_.loss_sums()));
    }
    world_.all_reduce(transfer_, exchange_.sums, comm::Reduce::sum);
  }

  void clip() {
    using optim::clip_by_norm, optim::correct_bias;
    const auto clipping = span(transfer_, "clip", SpanKind::optimizer);
    const Vector<const double> squares(exchange_.sums.slice(0, store_.table().model_parameters()));
    if constexpr (scales_loss) {
      clip_by_norm(transfer_, exchange_.control, exchange_.loss_scale, squares, options_.clip_norm,
                   options_.loss_scaling);
    } else {
      clip_by_norm(transfer_, exchange_.control, squares, options_.clip_norm);
    }
    correct_bias(transfer_, exchange_.control, Vector<const optim::StepInputs>(exchange_.inputs),
                 options_.adamw);
    transfer_.record(clipped_);
  }

  void update() {
    using optim::adamw_update;
    using value_type = typename store_type::value_type;
    optimizer_.wait(clipped_);
    for (std::size_t c = 0; c < store_.owned().size(); ++c) {
      const train::OwnedRange& own = store_.owned()[c];
      const Index size = own.values.size();
      const Vector<value_type> values = store_.values().slice(own.values.begin, size);
      const auto update_with = [&](auto... stored) {
        adamw_update(optimizer_, stored..., store_.first_moments().slice(own.moments, size),
                     store_.second_moments().slice(own.moments, size),
                     Vector<const float>(store_.gradients().slice(own.values.begin, size)),
                     store_.segments(c), Vector<const optim::UpdateControl>(exchange_.control),
                     options_.adamw);
      };
      {
        const auto updating = span(optimizer_, "update", SpanKind::optimizer, static_cast<int>(c));
        if constexpr (std::same_as<value_type, float>) {
          update_with(values);
        } else {
          update_with(values, store_.masters(c, own.values));
        }
      }
      optimizer_.record(updated_[c]);
      transfer_.wait(updated_[c]);
      const train::Region& region = store_.table().regions()[c];
      const auto gathering = span(transfer_, "gather_values", SpanKind::wait, static_cast<int>(c));
      if (store_.shards_optimizer())
        groups_.data.all_gather(transfer_, store_.values().slice(region.begin, region.size()),
                                Vector<const value_type>(values));
      transfer_.record(available_[c]);
    }
  }

  /// A step as the recorder sees it: from its inputs until the last of it is queued; as a span, the
  /// time of all that on `compute`.
  class RecordedStep {
    using recorder_type = typename hooks_type::recorder_type;

   public:
    RecordedStep(recorder_type& recorder, stream_type& compute, std::int64_t step) noexcept
        : announced_(recorder, step),
          span_(recorder, compute, SpanInfo{.name = "step", .kind = SpanKind::iteration}) {}

   private:
    struct Announced {
      Announced(recorder_type& to, std::int64_t step) noexcept : recorder(to) {
        begin_step(recorder, step);
      }
      Announced(const Announced&) = delete;
      Announced& operator=(const Announced&) = delete;
      ~Announced() { begin_step(recorder, no_step); }
      recorder_type& recorder;
    };
    Announced announced_;
    ScopedSpan<recorder_type, stream_type> span_;
  };

  [[nodiscard]] auto span(stream_type& stream, std::string_view name, SpanKind kind,
                          int chunk = -1) noexcept {
    return ScopedSpan(hooks_.recorder, stream,
                      SpanInfo{.name = name, .chunk = chunk, .kind = kind});
  }

  device_type device_;
  [[no_unique_address]] hooks_type hooks_;
  options_type options_;
  communicator_type& world_;
  train::Pipeline<typename Plan::traversal, typename Plan::placement> pipeline_;
  groups_type groups_;
  store_type store_;
  // Streams come after the memory that their queued work touches: they end first.
  typename device_type::memory_type memory_;
  train::ExchangeBuffers exchange_;
  std::vector<stage_type> stages_;
  dpp::Executor<device_type, communicator_type, stage_type, hooks_type> executor_;
  [[no_unique_address]] dispatcher_type dispatcher_;
  stream_type transfer_, optimizer_;
  typename Plan::template reducer<device_type, communicator_type, store_type> reducer_;
  typename stream_type::event_type computed_, clipped_, joined_;
  std::vector<typename stream_type::event_type> updated_, available_;  // of each chunk's values
  [[no_unique_address]] replays_t<device_type> replays_;               // of the whole step
  std::uint64_t step_ = 0;
  int trained_ = 0, evaluated_ = 0;  // first uses that were made
  int attended_ = 0;                 // scopes
};

}  // namespace mega::inline v0
