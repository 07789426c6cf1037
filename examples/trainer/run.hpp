/// @file  The outer loop of a trainer: data in, steps, validation, checkpoints, a sample at the
/// end.
#pragma once
#include "backend.hpp"
#include "config.hpp"
#include "console.hpp"
#include "corpus.hpp"
#include "decisions.hpp"
#include "hugging_face.hpp"
#include "inputs.hpp"
#include "job.hpp"
#include "listing.hpp"
#include "log_file.hpp"
#include "order_choice.hpp"
#include "sampler.hpp"
#include "stage_clock.hpp"
#include "stages.hpp"
#include "stop.hpp"
#include "tracing.hpp"
#include <mega/ckpt/directory_lock.hpp>
#include <mega/ckpt/sharded_checkpoint.hpp>
#include <mega/core/error.hpp>
#include <mega/data/batch.hpp>
#include <mega/data/sampler.hpp>
#include <mega/nn/transformer.hpp>
#include <mega/scan/slow_rank_watch.hpp>
#include <mega/train/agreement.hpp>
#include <mega/train/dial.hpp>
#include <mega/train/plan.hpp>
#include <mega/train/trainer.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trainer {

/// Bytes of a model that may have learnt little, safe to print: what is no UTF-8 becomes the
/// replacement character, control characters but line breaks and tabs become question marks.
[[nodiscard]] inline std::string printable_text(const std::string& bytes) {
  using nlohmann::json;
  const std::string valid = json(bytes).dump(-1, ' ', false, json::error_handler_t::replace);
  std::string text = json::parse(valid).get<std::string>();
  for (char& c : text) {
    if ((static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f) c = '?';
  }
  return text;
}

template <class Spec, backend Backend>
struct Plan : mega::DefaultPlan {
  using device = typename Backend::device;
  using communicator = RunComm<Backend>;
  using stage = mega::nn::Transformer<Spec, communicator, typename Backend::kernels>;
  using traversal = ChosenTraversal;
  using dispatch = mega::dpp::BoundedLookAhead;
  using hooks = RunHooks<Backend>;
};

/// One rank's run.
template <class Spec, backend Backend>
class TrainingRun {
  using Device = typename Backend::device;
  using Comm = typename Backend::communicator;
  using Factory = StageFactory<Spec, typename Backend::kernels>;
  using Trainer = mega::Trainer<Plan<Spec, Backend>>;

 public:
  /// @param start_from  weights to begin with, or null
  TrainingRun(const Backend& backend, const Job& job, const Corpus& corpus,
              const HuggingFaceModel* start_from, Comm& world)
      : backend_(backend),
        job_(job),
        corpus_(corpus),
        start_from_(start_from),
        windows_(corpus.split.train, job.run.sequence, job.config.seed),
        log_(world.rank() == 0 ? own_log(job.config) : nullptr),
        save_folder_(world.rank() == 0 ? own_save_folder(job.config) : std::nullopt),
        console_(job.config, world.rank() == 0, log_.get()),
        device_(backend.make_device(world.rank())),
        recorder_(make_recorder<typename Backend::recorder>(job, world.rank())),
        world_(world, recorder_),
        agreement_(device_, world),
        found_(find_common_order(world)),
        trainer_(world_, options(), Factory{job}, device_, {recorder_, {}, {}}),
        watch_(device_, world, job.options.mesh, job.config.watch_interval),
        data_rank_(job.options.mesh.coordinates(world.rank())[mega::Axis::data]) {
    if (corpus.split.valid.count > job.run.sequence)
      validation_.emplace(corpus.split.valid, job.run.sequence);
    if (job.config.schedule == Schedule::adaptive) {
      dial_.emplace(device_, world,
                    job.config.replay_path.empty()
                        ? job.options.traversal.dial()
                        : mega::dpp::AdaptiveTraversal::replay(job.recorded.moves));
    }
  }

  void run() {
    const Config& c = job_.config;
    start();
    bool stopped = false;
    if (trainer_.steps_done() >= job_.steps && job_.steps > 0) {
      console_.say(mega::sentence("nothing to train: ", trainer_.steps_done(),
                                  " steps are done and --train-iters is ", job_.steps));
    }
    while (trainer_.steps_done() < job_.steps && !stopped) {
      step();
      const std::int64_t done = trainer_.steps_done();
      if (c.eval_interval > 0 && done % c.eval_interval == 0 && done < job_.steps) validate();
      stopped = agreement_.largest(stop_requested ? 1 : 0) > 0;
      if (!stopped && c.save_interval > 0 && done % c.save_interval == 0 && done < job_.steps)
        save();
    }
    if (!c.trace_dir.empty()) {
      recorder_.recorder().close();
      console_.say(mega::sentence("traces of ", job_.world(), " ranks are in ", c.trace_dir,
                                  "; mega-scan report ", c.trace_dir, "/* says what held them up"));
    }
    if (stopped)
      console_.say(mega::sentence("stopped by a signal after step ", trainer_.steps_done()));
    if (!stopped) validate();
    if (!c.save_dir.empty()) save();
    if (stopped) return;
    if (!c.export_dir.empty()) {
      const typename Trainer::Attended scope(trainer_);
      export_weights<Spec>(trainer_, device_, job_.model, c.export_dir);
      console_.say(mega::sentence("exported to ", c.export_dir));
    }
    if (c.sample_tokens > 0) sample();
    compare_memory();
    suggest();
  }

 private:
  void start() {
    const Config& c = job_.config;
    const typename Trainer::Attended scope(trainer_);
    if (start_from_ != nullptr) import_weights(trainer_, *start_from_);
    if (!c.load_dir.empty()) {
      const mega::ckpt::LoadedCheckpoint loaded =
          mega::ckpt::load_latest_checkpoint(trainer_, c.load_dir, device_);
      for (const auto& skipped : loaded.skipped)
        console_.say(mega::sentence("passed over ", skipped.path, ": ", skipped.reason));
      mega::expects(loaded.state.seed == c.seed, mega::ErrorCode::usage, [&] {
        return mega::sentence(
            "--seed is ", c.seed, " but the checkpoint was trained with ", loaded.state.seed,
            "; give that one, so that samples and dropout go on where they stopped");
      });
      const nlohmann::json own = describe_model();
      for (const auto& part : own.items()) {
        const nlohmann::json saved = loaded.state.model.value(part.key(), nlohmann::json());
        mega::expects(saved == part.value(), mega::ErrorCode::usage, [&] {
          return mega::sentence("the checkpoint in ", loaded.path, " is of a model with ",
                                part.key(), " ", saved.dump(), ", not ", part.value().dump());
        });
      }
      if (dial_) resume_dial(loaded.state.model);
      consumed_ = loaded.state.consumed_samples;
      saved_at_ = loaded.state.steps_done;
      console_.say(
          mega::sentence("resumed from ", loaded.path, " after step ", loaded.state.steps_done));
    }
    console_.detail(Listing::of(c));
    console_.say(mega::sentence(
        Spec::name, " with ", trainer_.parameters().table().model_size(), " parameters on ",
        to_string(job_.options.mesh), " = ", job_.world(), " ranks; ", corpus_.tokens.size(),
        " tokens of text, ", windows_.windows(), " samples an epoch",
        corpus_.tokens.empty_documents() > 0
            ? mega::sentence("; ", corpus_.tokens.empty_documents(), " empty documents passed over")
            : std::string()));
  }

  /// Collective. Where the dial is to stand after the steps that are done: by the log that is
  /// repeated, else as the checkpoint left it if that was of the same pipeline.
  void resume_dial(const nlohmann::json& saved) {
    const int p = job_.options.mesh.pipeline, m = job_.options.microbatches;
    if (!job_.config.replay_path.empty()) {
      mega::expects(job_.recorded.first_step <= trainer_.steps_done() + 1, mega::ErrorCode::usage,
                    [&] {
                      return mega::sentence("--replay-decisions ", job_.config.replay_path,
                                            " begins with step ", job_.recorded.first_step,
                                            ", and this run with step ", trainer_.steps_done() + 1);
                    });
      if (trainer_.steps_done() > 0) (void)dial_->turn(trainer_, {}, order_of_dial());
      return;
    }
    const auto stood = saved.find("dial");
    if (stood == saved.end()) return;
    for (const int size : dial_->traversal().group_sizes(p, m)) {
      if (*stood == dial_of(size, decided_pipeline(job_)))
        dial_->begin_at(trainer_, size, order_of_dial());
    }
  }

  /// Where the dial stands, for the log and checkpoints.
  [[nodiscard]] nlohmann::json describe_dial() const {
    return dial_of(
        dial_->traversal().group_size(job_.options.mesh.pipeline, job_.options.microbatches),
        decided_pipeline(job_));
  }
  [[nodiscard]] auto order_of_dial() const {
    return [this](const mega::dpp::AdaptiveTraversal& dial) {
      return job_.options.traversal.turned_to(
          dial.group_size(job_.options.mesh.pipeline, job_.options.microbatches));
    };
  }

  /// Collective. The order of --schedule auto: rank 0 searches, all take it over.
  [[nodiscard]] std::optional<FoundOrder> find_common_order(Comm& world) {
    const Config& c = job_.config;
    if (c.schedule != Schedule::automatic) return std::nullopt;
    const StageTimes times = job_.found ? job_.found->times : time_stages(world);
    std::string message;
    if (world.rank() == 0) {
      message = message_of(
          job_.found ? *job_.found
                     : find_order(SearchLimits(job_.options.traversal, c.pipeline,
                                               job_.options.microbatches, c.chunks, c.memory_cap),
                                  times));
    }
    FoundOrder order = order_of(agreement_.text_of(0, message));
    console_.say(mega::sentence("decision: order ", to_string(order)));
    return order;
  }

  /// Collective. What the stages take for one micro-batch at a time, by a trainer of their own
  /// whose weights are thrown away; of ranks that hold equal stages the slowest counts.
  [[nodiscard]] StageTimes time_stages(Comm& world) {
    constexpr int steps = 6;  // the first of them warms up
    const mega::Mesh& mesh = job_.options.mesh;
    StageClock clock(job_.options.chunks);
    RunRecorder<Backend> recorder = with_faults(
        typename Backend::recorder(mega::scan::recording_of(mesh, world.rank()), clock.sink(), {}),
        job_, world.rank());
    {
      // Channels are ordered by their first use, so these are no channels of the world.
      Comm own = world.split(0, world.rank());
      RunComm<Backend> traced(own, recorder);
      RunOptions options = job_.options;
      options.microbatches = 1;
      options.dispatch = {};
      Trainer trainer(traced, options, Factory{job_}, device_, {recorder, {}, {}});
      for (int step = 0; step < steps; ++step) {
        batch_.fill(corpus_.tokens, windows_, 0, mesh.coordinates(world.rank())[mega::Axis::data],
                    mesh.data, 1, job_.config.micro_batch, std::numeric_limits<Index>::max());
        (void)trainer.step(batch_, 0.0);
      }
      recorder.recorder().close();
      (void)agreement_.largest(0);  // nobody leaves while another still works
    }
    const int p = mesh.pipeline, v = job_.options.chunks;
    const int position = mesh.coordinates(world.rank())[mega::Axis::pipeline];
    StageTimes times(static_cast<std::size_t>(p * v));
    for (int stage = 0; stage < p * v; ++stage) {
      mega::dpp::ActionTimes own{0, 0, 0};
      const ChosenPlacement place = job_.options.traversal.placement();
      if (place.rank_of(stage, p, v) == position) own = clock.times(place.chunk_of(stage, p, v));
      times[static_cast<std::size_t>(stage)] = {slowest(own.forward), slowest(own.backward_input),
                                                slowest(own.backward_weight)};
    }
    return times;
  }

  /// Collective. The largest of the ranks' seconds, to the nanosecond.
  [[nodiscard]] double slowest(double seconds) {
    return static_cast<double>(agreement_.largest(static_cast<std::int64_t>(seconds * 1e9))) / 1e9;
  }

  /// The job's, with the order that was found.
  [[nodiscard]] RunOptions options() const {
    RunOptions out = job_.options;
    if (found_) out.traversal.found = found_->lists;
    return out;
  }

  /// What a checkpoint must agree on although no tensor's shape shows it.
  [[nodiscard]] nlohmann::json describe_model() const {
    const mega::nn::TransformerConfig& m = job_.model;
    return {{"family", Spec::name},           {"heads", m.heads},
            {"kv_heads", m.kv_heads},         {"head_dim", m.head_dim},
            {"norm_epsilon", m.norm_epsilon}, {"rope_theta", m.rope.theta},
            {"tied_head", m.tied_head}};
  }

  void step() {
    const Config& c = job_.config;
    const auto begin = std::chrono::steady_clock::now();
    batch_.fill(corpus_.tokens, windows_, consumed_, data_rank_, job_.options.mesh.data,
                job_.options.microbatches, c.micro_batch,
                c.samples > 0 ? c.samples : std::numeric_limits<Index>::max());
    const double rate = job_.learning_rate.at(trainer_.steps_done());
    StepReport report;
    const auto queued = std::chrono::steady_clock::now();
    report.result = trainer_.step(batch_, rate);
    const double step_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - queued).count();
    consumed_ += c.global_batch;
    report.step = trainer_.steps_done();
    report.steps = job_.steps;
    report.scales_loss = Trainer::scales_loss;
    report.learning_rate = rate;
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    report.tokens = report.result.targets;
    report.memory_bytes = backend_.used_bytes(rank());
    report.planned_bytes = backend_.planned_bytes(rank());
    const bool is_first = !std::exchange(told_order_, true);
    if (found_ && is_first) report.decision = decision_of(*found_, decided_pipeline(job_)).dump();
    if (dial_ && is_first) report.dial = describe_dial().dump();
    if (dial_ && turn_dial(step_seconds)) {
      mega::dpp::DialMove move = dial_->log().back();
      report.decision = decision_of(move, decided_pipeline(job_)).dump();
      move.step = report.step;  // counted from 1, as all that is printed
      console_.say("decision: " + to_string(move));
    }
    console_.step(report);
    const auto slow = watch_.step_done(report.step - 1, [&] {
      (void)own_seconds();
      return std::exchange(fastest_seconds_, -1.0);
    });
    for (const mega::scan::SlowRank& rank : slow)
      console_.say(mega::sentence("warning: ", mega::scan::to_string(rank)));
    // A loss scale that can still come down explains a skipped step.
    const bool explained =
        Trainer::scales_loss && report.result.loss_scale > job_.options.loss_scaling.minimum;
    skipped_ = report.result.skipped && !explained ? skipped_ + 1 : 0;
    mega::expects(skipped_ < 10, mega::ErrorCode::logic,
                  "ten steps in a row had a gradient norm that is not finite; lower --lr or look "
                  "at the data");
  }

  /// This rank's own work in the newest step that its recorder knows, in seconds; negative where it
  /// knows none.
  double own_seconds() {
    const double taken = recorder_.recorder().take_fastest_step();
    if (taken >= 0) {
      own_seconds_ = taken;
      fastest_seconds_ = fastest_seconds_ < 0 ? taken : std::min(fastest_seconds_, taken);
    }
    return own_seconds_;
  }

  /// Collective. Exposed is what the step took beyond the work of its busiest rank and the bubble
  /// that such work has over links without delay.
  bool turn_dial(double step_seconds) {
    const double own = own_seconds();
    const double actions = static_cast<double>(job_.options.microbatches) * job_.options.chunks;
    const double bubble = (job_.options.mesh.pipeline - 1) / actions;
    const double beyond = own < 0 ? 0 : std::max(0.0, step_seconds - own * (1 + bubble));
    const auto nanoseconds = static_cast<std::int64_t>(beyond * 1e9);
    const double exposed = -static_cast<double>(agreement_.largest(-nanoseconds)) / 1e9;
    return dial_->turn(trainer_, {step_seconds, exposed, backend_.memory_share(rank())},
                       order_of_dial());
  }

  /// Exact mean over the first windows of the validation split; a last batch is filled up with
  /// targets that do not count.
  void validate() {
    if (!validation_ && job_.config.valid_fraction > 0) {
      console_.say(mega::sentence("no validation: its ", corpus_.split.valid.count,
                                  " tokens hold no sample of ", job_.run.sequence, " + 1"));
    }
    if (!validation_ || job_.config.eval_steps == 0) return;
    const Index wanted =
        std::min<Index>(validation_->windows(),
                        static_cast<Index>(job_.config.eval_steps) * job_.config.global_batch);
    double loss = 0;
    std::int64_t targets = 0;
    for (Index first = 0; first < wanted; first += job_.config.global_batch) {
      batch_.fill(corpus_.tokens, *validation_, first, data_rank_, job_.options.mesh.data,
                  job_.options.microbatches, job_.config.micro_batch, wanted);
      const mega::StepResult r = trainer_.evaluate(batch_);
      loss += r.loss * static_cast<double>(r.targets);
      targets += r.targets;
    }
    const double mean = loss / static_cast<double>(targets);
    char text[128];
    std::snprintf(text, sizeof text, "validation loss %.4f, perplexity %.2f over %lld tokens", mean,
                  std::exp(mean), static_cast<long long>(targets));
    console_.say(text);
  }

  void save() {
    const Config& c = job_.config;
    if (saved_at_ == trainer_.steps_done() && c.load_dir == c.save_dir) return;
    const typename Trainer::Attended scope(trainer_);
    mega::ckpt::TrainingState state;
    state.consumed_samples = consumed_;
    state.model = describe_model();
    if (dial_) state.model["dial"] = describe_dial();
    const std::string path =
        mega::ckpt::save_checkpoint(trainer_, c.save_dir, state, c.keep, device_);
    saved_at_ = trainer_.steps_done();
    console_.say(mega::sentence("checkpoint of step ", saved_at_, " is durable in ", path));
  }

  /// What to try next.
  void suggest() {
    const Config& c = job_.config;
    std::string text =
        "next: --data FILE trains on your own text; --dry-run with other --tp, --pp, --dp shows "
        "what they need";
    if (!c.save_dir.empty()) {
      text += mega::sentence("; --load ", c.save_dir, " --train-iters ", 2 * job_.steps,
                             " goes on from here, at any layout");
    }
    console_.say(text);
  }

  /// Collective. Where memory was planned: what the ranks took of it.
  void compare_memory() {
    if (backend_.planned_bytes(rank()) == 0) return;
    const auto largest = [&](std::size_t bytes) {
      return readable_bytes(
          static_cast<std::size_t>(agreement_.largest(static_cast<std::int64_t>(bytes))));
    };
    const std::string used = largest(backend_.used_bytes(rank()));
    const std::string planned = largest(backend_.planned_bytes(rank()));
    console_.say(
        mega::sentence("memory of the fullest rank: ", used, " measured, ", planned, " planned"));
  }

  void sample() {
    const Config& c = job_.config;
    const typename Trainer::Attended scope(trainer_);
    std::vector<std::int32_t> prompt;
    for (const char byte : c.prompt) prompt.push_back(static_cast<unsigned char>(byte));
    const auto tokens = continue_text(trainer_, device_, prompt, c.sample_tokens, c.temperature,
                                      Factory{job_, sampling_run(job_)});
    std::string text = c.prompt;
    for (const std::int32_t token : tokens) text += token < 256 ? static_cast<char>(token) : '\n';
    console_.say("sampled continuation:\n" + printable_text(text));
  }

  [[nodiscard]] int rank() { return trainer_.world().rank(); }

  const Backend& backend_;
  const Job& job_;
  const Corpus& corpus_;
  const HuggingFaceModel* start_from_;
  mega::data::ShuffledWindows windows_;
  std::unique_ptr<LogFile> log_;  // before anything is written, as the folder is
  std::optional<mega::ckpt::DirectoryLock> save_folder_;
  Console console_;
  std::optional<mega::data::SequentialWindows> validation_;
  Device device_;
  RunRecorder<Backend> recorder_;
  RunComm<Backend> world_;
  mega::train::Agreement<Device, Comm> agreement_;
  mega::data::TokenBatch batch_;
  std::optional<FoundOrder> found_;  // by --schedule auto
  Trainer trainer_;
  std::optional<mega::train::Dial<Device, Comm>> dial_;  // of --schedule adaptive
  mega::scan::SlowRankWatch<Device, Comm> watch_;
  int data_rank_;
  double own_seconds_ = -1, fastest_seconds_ = -1;
  bool told_order_ = false;
  std::int64_t consumed_ = 0;
  std::int64_t saved_at_ = -1;
  int skipped_ = 0;
};

}  // namespace trainer
