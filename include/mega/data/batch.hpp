/// @file  A data-parallel rank's share of a global batch: tokens and targets on the host.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/data/sampler.hpp>
#include <mega/data/token_source.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace mega::inline v0::data {

/// Owns the tokens and targets of a step's micro-batches, both [micro_batches, b, T].
/// Target t of a row is the token behind token t; -1 is no target.
class TokenBatch {
 public:
  static constexpr std::int32_t ignored_target = -1;

  /// Reads the samples of dp rank d: row i of micro-batch j is global sample
  /// `first_global_sample + (d * micro_batches + j) * b + i`. So the micro-batches of all ranks, in
  /// rank order, cut the global batch into blocks of b: with dp_size * micro_batches held constant,
  /// the same samples stand together in a micro-batch whatever dp_size is. The global batch has
  /// dp_size * micro_batches * b samples, and the next one begins that much later.
  /// @param end  samples from this number on are padding: token 0, target ignored
  /// @throws Error usage for sizes that are not positive, or a rank outside [0, dp_size)
  /// @cost   no allocation when the shape is the former one
  template <token_source Source, window_sampler Windows>
  void fill(const Source& source, const Windows& windows, Index first_global_sample, Index dp_rank,
            Index dp_size, Index micro_batches, Index b,
            Index end = std::numeric_limits<Index>::max()) {
    expects(micro_batches >= 1 && b >= 1 && dp_rank >= 0 && dp_rank < dp_size, ErrorCode::usage,
            [&] {
              return sentence("no batch of ", micro_batches, " micro-batches of ", b,
                              " samples for rank ", dp_rank, " of ", dp_size,
                              "; sizes must be positive and the rank below dp");
            });
    resize(micro_batches, b, windows.seq_length());
    first_in_batch_ = dp_rank * micro_batches * b;
    const Index first = first_global_sample + first_in_batch_;
    for (Index row = 0; row < micro_batches * b; ++row) {
      std::int32_t* const tokens = tokens_.data() + at(row);
      std::int32_t* const targets = targets_.data() + at(row);
      if (first + row < end) {
        source.read(windows.sample(first + row), window_);
        std::copy(window_.begin(), window_.end() - 1, tokens);
        std::copy(window_.begin() + 1, window_.end(), targets);
      } else {
        std::fill(tokens, tokens + length(), 0);
        std::fill(targets, targets + length(), ignored_target);
      }
    }
  }

  [[nodiscard]] Index microbatches() const noexcept { return micro_batches_; }
  /// Samples in a micro-batch.
  [[nodiscard]] Index micro_batch_size() const noexcept { return b_; }
  [[nodiscard]] Index seq_length() const noexcept { return seq_length_; }

  /// [b, T] of one micro-batch. @pre 0 <= micro_batch < microbatches()
  [[nodiscard]] Matrix<const std::int32_t> input(Index micro_batch) const noexcept {
    return {tokens_.data() + at(micro_batch * b_), b_, seq_length_};
  }
  [[nodiscard]] Matrix<const std::int32_t> target(Index micro_batch) const noexcept {
    return {targets_.data() + at(micro_batch * b_), b_, seq_length_};
  }

  /// Position of a micro-batch's first sample in the global batch.
  [[nodiscard]] Index first_sample(Index micro_batch) const noexcept {
    return first_in_batch_ + micro_batch * b_;
  }

  /// Targets of this rank that are not ignored: its part of the loss divisor.
  [[nodiscard]] Index valid_targets() const noexcept {
    return static_cast<Index>(targets_.size()) -
           std::count(targets_.begin(), targets_.end(), ignored_target);
  }

 private:
  [[nodiscard]] std::size_t length() const noexcept {
    return static_cast<std::size_t>(seq_length_);
  }
  [[nodiscard]] std::size_t at(Index row) const noexcept {
    return static_cast<std::size_t>(row) * length();
  }

  void resize(Index micro_batches, Index b, Index seq_length) {
    micro_batches_ = micro_batches;
    b_ = b;
    seq_length_ = seq_length;
    tokens_.resize(at(micro_batches * b));
    targets_.resize(at(micro_batches * b));
    window_.resize(length() + 1);
  }

  Index micro_batches_ = 0;
  Index b_ = 0;
  Index seq_length_ = 0;
  Index first_in_batch_ = 0;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int32_t> targets_;
  std::vector<std::int32_t> window_;  // one sample with its last target
};

}  // namespace mega::inline v0::data
