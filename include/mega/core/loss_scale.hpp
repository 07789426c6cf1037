/// @file  LossScale: how far dynamic loss scaling has come; see optim/loss_scaling.hpp.
#pragma once
#include <cstdint>

namespace mega::inline v0 {

/// In device memory while a run lasts, equal on all ranks; part of a checkpoint.
struct LossScale {
  float scale = 1;
  std::int32_t good_steps = 0;     ///< in a row, since the scale is what it is
  std::int64_t skipped_steps = 0;  ///< in all

  friend constexpr bool operator==(const LossScale&, const LossScale&) = default;
};

}  // namespace mega::inline v0
