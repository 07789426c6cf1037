/// @file  Which elements dropout keeps: a pure function of the key and the global element index.
#pragma once
#include <mega/core/rng.hpp>

namespace mega::inline v0::nn::detail {

/// Factor of dropout for consecutive elements: 0 with the given probability, otherwise
/// 1 / (1 - probability). Remembers the Philox block of the last element, which serves four.
class DropoutMask {
 public:
  /// @pre  0 <= probability < 1
  MEGA_HD constexpr DropoutMask(const RandomKey& key, float probability) noexcept
      : key_(key), probability_(probability), kept_(1.0f / (1.0f - probability)) {}

  [[nodiscard]] MEGA_HD constexpr float factor(Index element) noexcept {
    if (element >> 2 != quad_) {
      quad_ = element >> 2;
      block_ = key_.block(quad_);
    }
    const float uniform = static_cast<float>(block_.word[element & 3] >> 8) * 0x1p-24f;
    return uniform < probability_ ? 0.0f : kept_;
  }

 private:
  RandomKey key_;
  float probability_;
  float kept_;
  Index quad_ = -1;
  PhiloxBlock block_{};
};

}  // namespace mega::inline v0::nn::detail
