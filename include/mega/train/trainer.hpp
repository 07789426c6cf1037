/// @file  Trainer<Plan>: one training step, composed of the blocks of the library.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/context.hpp>
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/stage.hpp>
#include <mega/dpp/dispatch.hpp>
#include <mega/dpp/executor.hpp>
#include <mega/optim/adamw.hpp>
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
#include <utility>
#include <vector>

namespace mega::inline v0 {

/// The sizes of a run. Kinds are types and stand in the plan.
template <class Traversal = dpp::ScheduleTraversal<dpp::DFC>>
struct TrainerOptions {
  Mesh mesh{};
  int chunks = 1;        ///< model chunks a pipeline rank
  int microbatches = 1;  ///< a step and data-parallel rank
  Traversal traversal{};
  bool shard_optimizer = false;  ///< ZeRO stage 1
  double clip_norm = 1.0;        ///< 0: no clipping
  optim::AdamWOptions adamw{};
  std::uint64_t seed = 0;
};

/// What a step came to; equal on all ranks.
struct StepResult {
  double loss = 0;           ///< mean over the valid targets of the global batch
  double gradient_norm = 0;  ///< of the global gradient, before clipping
  std::int64_t targets = 0;  ///< valid ones in the global batch
  bool skipped = false;      ///< the norm was not finite, so no parameter changed
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
  using options_type = TrainerOptions<typename Plan::traversal>;
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
                  pipeline_.placements(store_.table().has_ties(), Plan::dispatch::ahead),
                  pipeline_.actions(store_.table().has_ties()), options.microbatches, hooks_),
        dispatcher_(device_, world, options.mesh, executor_.actions()),
        transfer_(device_.make_stream("transfer")),
        optimizer_(device_.make_stream("optimizer")),
        reducer_(device_, store_, groups_, transfer_),
        computed_(device_.make_event()),
        clipped_(device_.make_event()) {
    for (std::size_t c = 0; c < stages_.size(); ++c) {
      updated_.push_back(device_.make_event());
      available_.push_back(device_.make_event());
    }
    store_.initialise(executor_.compute(), options.seed);
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
    const Attended first_use(*this, !std::exchange(trained_, true));
    stream_type& compute = executor_.compute();
    count_targets(batch);
    Gradients gradients{*this};
    gradients.clear_aliases(compute);
    executor_.train(batch, {options_.seed, step_}, gradients, dispatcher_);
    compute.record(computed_);
    transfer_.wait(computed_);
    gather_norm_and_losses();
    clip();
    ++step_;
    update(static_cast<float>(learning_rate));
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
    const Attended first_use(*this, !std::exchange(evaluated_, true));
    stream_type& compute = executor_.compute();
    count_targets(batch);
    for (const auto& event : available_) compute.wait(event);
    executor_.evaluate(batch, {options_.seed, step_}, visit);
    compute.record(computed_);
    transfer_.wait(computed_);
    fill_zero(transfer_, exchange_.sums);
    gather_losses();
    StepResult out = result();
    out.gradient_norm = 0;
    out.skipped = false;
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
             Vector<const std::int64_t>(exchange_.targets));
    synchronize();
    double loss = 0;
    for (auto i = static_cast<std::size_t>(store_.table().model_parameters()); i < sums.size(); ++i)
      loss += sums[i];
    return {targets > 0 ? loss / static_cast<double>(targets) : 0.0, control.norm, targets,
            control.skip != 0};
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
  void reorder(const typename Plan::traversal& traversal) requires dpp::names_alternatives<
      typename Plan::traversal> && std::same_as<typename Plan::dispatch, dpp::StaticDispatch> {
    options_.traversal = traversal;
    pipeline_.reorder(traversal);
    executor_.reorder(pipeline_.actions(store_.table().has_ties()));
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
           Plan::dispatch::required_bytes(options_.mesh);
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

  template <class Batch>
  void count_targets(const Batch& batch) {
    using optim::assign, optim::reciprocal;
    stream_type& compute = executor_.compute();
    // The last step's counts and gradients have been read; its values are waited for chunk by
    // chunk.
    compute.wait(clipped_);
    assign(compute, exchange_.targets, static_cast<std::int64_t>(batch.valid_targets()));
    groups_.data.all_reduce(compute, exchange_.targets, comm::Reduce::sum);
    reciprocal(compute, executor_.loss_scale(), Vector<const std::int64_t>(exchange_.targets));
  }

  /// Every sum has exactly one place, filled by one pipeline stage, so adding the ranks' vectors
  /// adds zeros to it except over the axes that really divide the tensor.
  void gather_norm_and_losses() {
    using optim::sums_of_squares;
    fill_zero(transfer_, exchange_.sums);
    sums_of_squares(transfer_, exchange_.sums, Vector<const float>(store_.gradients()),
                    store_.squares());
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
    using optim::clip_by_norm;
    clip_by_norm(transfer_, exchange_.control,
                 Vector<const double>(exchange_.sums.slice(0, store_.table().model_parameters())),
                 options_.clip_norm);
    transfer_.record(clipped_);
  }

  void update(float learning_rate) {
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
                     options_.adamw, learning_rate, steps_done());
      };
      if constexpr (std::same_as<value_type, float>) {
        update_with(values);
      } else {
        update_with(values, store_.masters(c, own.values));
      }
      optimizer_.record(updated_[c]);
      transfer_.wait(updated_[c]);
      const train::Region& region = store_.table().regions()[c];
      if (store_.shards_optimizer())
        groups_.data.all_gather(transfer_, store_.values().slice(region.begin, region.size()),
                                Vector<const value_type>(values));
      transfer_.record(available_[c]);
    }
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
  typename stream_type::event_type computed_, clipped_;
  std::vector<typename stream_type::event_type> updated_, available_;  // of each chunk's values
  std::uint64_t step_ = 0;
  bool trained_ = false, evaluated_ = false;
  int attended_ = 0;  // scopes
};

}  // namespace mega::inline v0
