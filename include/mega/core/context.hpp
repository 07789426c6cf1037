/// @file  Context: what every method of a stage gets, and its only way to the hooks.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/hooks.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>

#include <concepts>
#include <cstdint>

namespace mega::inline v0 {

/// The hooks of a run, owned by whoever owns the trainer.
template <class Recorder = NullRecorder, class Probe = NullProbe, class Injector = NullInjector>
struct Hooks {
  using recorder_type = Recorder;
  [[no_unique_address]] Recorder recorder;
  [[no_unique_address]] Probe probe;
  [[no_unique_address]] Injector injector;
};

/// Whether a set of hooks sees and changes nothing, so that work may be queued without the calls
/// that queued it the first time: all are null, or the recorder records nothing, for good.
template <class HookSet>
[[nodiscard]] constexpr bool hooks_are_null(const HookSet& hooks) noexcept {
  const bool others = std::same_as<decltype(HookSet::probe), NullProbe> &&
                      std::same_as<decltype(HookSet::injector), NullInjector>;
  if constexpr (std::same_as<decltype(HookSet::recorder), NullRecorder>) {
    return others;
  } else if constexpr (requires { hooks.recorder.records(); }) {
    return others && !hooks.recorder.records();
  } else {
    return false;
  }
}

enum class Mode : std::uint8_t {
  train,     ///< dropout on, losses divided for the gradient
  evaluate,  ///< dropout off, no gradient is touched
};

/// Made by the executor for one action; valid during the call only. What a stage queues on `stream`
/// may outlive the call, so it captures views and scalars, never the context.
template <class Stream, class HookSet = Hooks<>>
struct Context {
  Stream& stream;
  Arena& arena;  ///< workspace of this call; empty at the start of every call
  HookSet& hooks;
  std::uint64_t seed;
  std::uint64_t step;  ///< when the work was queued; what runs again in later steps uses random()
  std::int32_t chunk;  ///< local model chunk
  std::int32_t microbatch;  ///< within the step and this data-parallel rank
  Index first_sample;       ///< position of the micro-batch's first sample in the global batch
  Mode mode;
  /// Device memory: one over the count of valid targets in the global batch. Only loss() reads it.
  const float* loss_scale;
  /// Device memory: loss() adds this micro-batch's sum over valid targets here.
  double* loss_sum;
  /// Device memory: the step that runs, for random(); null: `step`.
  const std::int64_t* step_at = nullptr;

  /// Whether exposed tensors may be changed, so that what is made of them must come later.
  static constexpr bool injects = !std::same_as<decltype(HookSet::injector), NullInjector>;

  [[nodiscard]] bool training() const noexcept { return mode == Mode::train; }

  /// Random numbers of this step for a drawing site; index them by global element.
  [[nodiscard]] RandomSite random(std::uint32_t layer, RandomUse use) const noexcept {
    return {seed, step, layer, use, step_at};
  }

  [[nodiscard]] auto span(std::string_view name, SpanKind kind = SpanKind::compute) const {
    return ScopedSpan(
        hooks.recorder, stream,
        SpanInfo{.name = name, .chunk = chunk, .microbatch = microbatch, .kind = kind});
  }
  /// Shows a tensor to the probe, then lets the injector disturb it.
  template <class T>
  void expose(std::string_view name, Matrix<T> values) const {
    hooks.probe.observe(stream, name, values);
    hooks.injector.disturb(stream, name, values);
  }
};

}  // namespace mega::inline v0
