/// @file  TextSampler: continues a prompt with the trainer's weights, through the same pipeline. It
/// is a second executor with one micro-batch of one sample over the same flat parameters.
#pragma once
#include <mega/core/rng.hpp>
#include <mega/core/stage.hpp>
#include <mega/dpp/executor.hpp>
#include <mega/train/agreement.hpp>
#include <mega/train/trainer.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace trainer {

using mega::Index;
using mega::Matrix;
using mega::Vector;

/// A window of tokens as a batch of one sample without targets.
struct Prompt {
  std::vector<std::int32_t> tokens, targets;

  explicit Prompt(Index length)
      : tokens(static_cast<std::size_t>(length), 0),
        targets(static_cast<std::size_t>(length), -1) {}
  [[nodiscard]] int microbatches() const noexcept { return 1; }
  [[nodiscard]] Matrix<const std::int32_t> input(int) const noexcept {
    return {tokens.data(), 1, static_cast<Index>(tokens.size())};
  }
  [[nodiscard]] Matrix<const std::int32_t> target(int) const noexcept {
    return {targets.data(), 1, static_cast<Index>(targets.size())};
  }
  [[nodiscard]] Index first_sample(int) const noexcept { return 0; }
};

/// Draws from soft-max(logits / temperature); temperature 0 takes the largest, the first of equals.
[[nodiscard]] inline std::int32_t draw(const float* logits, Index vocab, double temperature,
                                       float uniform) {
  const float* const top = std::max_element(logits, logits + vocab);
  if (temperature <= 0) return static_cast<std::int32_t>(top - logits);
  double total = 0;
  for (Index i = 0; i < vocab; ++i)
    total += std::exp((static_cast<double>(logits[i]) - *top) / temperature);
  double left = static_cast<double>(uniform) * total;
  for (Index i = 0; i < vocab; ++i) {
    left -= std::exp((static_cast<double>(logits[i]) - *top) / temperature);
    if (left < 0) return static_cast<std::int32_t>(i);
  }
  return static_cast<std::int32_t>(vocab - 1);
}

/// Collective over the trainer's world. The drawing is the host's, on logits that it downloads.
/// @param device      of the trainer
/// @param make_stage  make_stage(StagePosition, groups) for a run of micro-batch 1
/// @returns `count` tokens, equal on all ranks
template <class Trainer, class MakeStage>
[[nodiscard]] std::vector<std::int32_t> continue_text(Trainer& trainer,
                                                      typename Trainer::device_type device,
                                                      const std::vector<std::int32_t>& prompt,
                                                      int count, double temperature,
                                                      const MakeStage& make_stage) {
  using Device = typename Trainer::device_type;
  using Comm = typename Trainer::communicator_type;
  using Stage = typename Trainer::stage_type;
  using T = mega::stage_value_t<Stage>;
  auto options = trainer.options();
  options.microbatches = 1;
  options.traversal = options.traversal.of_one_microbatch();
  const mega::train::Pipeline<std::remove_cvref_t<decltype(options.traversal)>,
                              mega::dpp::LoopPlacement>
      pipeline(options, trainer.world().rank(), trainer.world().size());
  std::vector<Stage> stages;
  for (const int s : pipeline.own_stages()) {
    stages.push_back(make_stage(mega::StagePosition{s, pipeline.stages()}, trainer.groups()));
    stages.back().bind(trainer.parameters().views(static_cast<int>(stages.size()) - 1));
  }
  mega::Hooks<> hooks;
  const auto& run = stages.front().run();
  const Index length = run.sequence, vocab = stages.front().config().vocab;
  // Before the executor, whose streams end first.
  const auto memory = device.allocate(
      pipeline.holds_last() ? sizeof(T) * static_cast<std::size_t>(run.rows() * vocab) : 0);
  const Matrix<T> logits(reinterpret_cast<T*>(memory.data()), run.rows(), vocab);
  // Channels are ordered by their first use; a communicator of its own keeps them apart from the
  // trainer's.
  Comm world = trainer.world().split(0, trainer.world().rank());
  mega::dpp::Executor<Device, Comm, Stage> executor(
      device, world, stages, pipeline.placements(false), pipeline.actions(false), 1, hooks);
  mega::train::Agreement<Device, Comm> agreement(device, trainer.world());

  std::vector<std::int32_t> text = prompt;
  if (text.empty()) text.push_back(0);
  std::vector<T> stored(static_cast<std::size_t>(vocab));
  std::vector<float> row(stored.size());
  const bool speaks = pipeline.holds_last() && trainer.options().mesh.coordinates(
                                                   trainer.world().rank())[mega::Axis::tensor] == 0;
  for (int i = 0; i < count; ++i) {
    Prompt window(length);
    const auto used = std::min<std::size_t>(text.size(), static_cast<std::size_t>(length));
    std::copy(text.end() - static_cast<std::ptrdiff_t>(used), text.end(), window.tokens.begin());
    executor.evaluate(window, {options.seed, 0}, [&](Stage& stage, auto& ctx, Matrix<T> hidden) {
      stage.logits(ctx, Matrix<const T>(hidden), logits);
      download(ctx.stream, Vector<T>(stored.data(), vocab),
               Vector<const T>(logits.row(static_cast<Index>(used) - 1), vocab));
    });
    executor.synchronize();
    std::int64_t token = 0;
    if (speaks) {
      const float uniform = mega::RandomKey{options.seed, 0, 0, mega::RandomUse::sample}.uniform(i);
      std::copy(stored.begin(), stored.end(), row.begin());
      token = draw(row.data(), vocab, temperature, uniform);
    }
    text.push_back(static_cast<std::int32_t>(agreement.largest(token)));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(text.size()) - count, text.end()};
}

}  // namespace trainer
