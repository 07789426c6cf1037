/// @file  Dial: carries what the ranks measured in a step to an adaptive traversal, and its answer
/// back into the trainer.
#pragma once
#include <mega/core/device.hpp>
#include <mega/dpp/adaptive.hpp>
#include <mega/train/agreement.hpp>

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace mega::inline v0::train {

/// Collective host decisions after a step; every rank ends up with the same order. One all-reduce
/// of 8 bytes for each of three figures a step.
template <device_policy Device, class Comm>
class Dial {
 public:
  /// Collective over `world`. @param traversal  that of the trainer's options
  Dial(Device& device, Comm& world, const dpp::AdaptiveTraversal& traversal)
      : agreement_(device, world), traversal_(traversal) {}

  /// Takes this rank's figures of the step that the trainer has done, agrees on the largest of
  /// each, and gives the trainer its next order. True when that differs.
  /// @param order  order(AdaptiveTraversal) is that traversal as the trainer's plan names it
  template <class Trainer, class Order = std::identity>
  bool turn(Trainer& trainer, const dpp::StepMeasurement& mine, const Order& order = {}) {
    const auto& options = trainer.options();
    const dpp::StepMeasurement all{largest(mine.step_seconds), largest(mine.exposed_seconds),
                                   largest(mine.memory_share)};
    const bool moved = traversal_.observe(trainer.steps_done() - 1, all, options.mesh.pipeline,
                                          options.microbatches);
    if (moved) trainer.reorder(order(traversal_));
    return moved;
  }

  /// Gives the trainer the order of groups of that size, where an earlier run has left the dial. On
  /// every rank, between steps.
  /// @param order  as for turn()
  template <class Trainer, class Order = std::identity>
  void begin_at(Trainer& trainer, int group_size, const Order& order = {}) {
    traversal_.begin_at(group_size);
    trainer.reorder(order(traversal_));
  }

  [[nodiscard]] const dpp::AdaptiveTraversal& traversal() const noexcept { return traversal_; }
  /// Every move so far and why; AdaptiveTraversal::replay() takes it.
  [[nodiscard]] const std::vector<dpp::DialMove>& log() const noexcept { return traversal_.log(); }

 private:
  /// To the nanosecond, and to 1e-9 of a share.
  [[nodiscard]] double largest(double value) {
    return static_cast<double>(
               agreement_.largest(static_cast<std::int64_t>(std::llround(value * 1e9)))) /
           1e9;
  }

  Agreement<Device, Comm> agreement_;
  dpp::AdaptiveTraversal traversal_;
};

}  // namespace mega::inline v0::train
