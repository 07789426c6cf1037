/// @file  A batch of a language model that is the same in every run: random tokens, each the target
/// of the one before.
#pragma once
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>

#include <cstdint>
#include <vector>

namespace benchmarks {

/// The micro-batches of a step share their tokens.
class RandomTokens {
 public:
  RandomTokens(mega::Index batch, mega::Index sequence, mega::Index vocab, int microbatches = 1)
      : batch_(batch), sequence_(sequence), microbatches_(microbatches) {
    for (mega::Index i = 0; i <= batch * sequence; ++i)
      tokens_.push_back(static_cast<std::int32_t>(mega::RandomKey{3}.bits(i) %
                                                  static_cast<std::uint32_t>(vocab)));
  }
  [[nodiscard]] int microbatches() const { return microbatches_; }
  [[nodiscard]] mega::Matrix<const std::int32_t> input(int) const {
    return {tokens_.data(), batch_, sequence_};
  }
  [[nodiscard]] mega::Matrix<const std::int32_t> target(int) const {
    return {tokens_.data() + 1, batch_, sequence_};
  }
  [[nodiscard]] mega::Index first_sample(int) const { return 0; }
  [[nodiscard]] std::int64_t valid_targets() const { return microbatches_ * batch_ * sequence_; }

 private:
  mega::Index batch_, sequence_;
  int microbatches_;
  std::vector<std::int32_t> tokens_;
};

}  // namespace benchmarks
