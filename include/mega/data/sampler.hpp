/// @file  Which window of the tokens a global sample is: shuffled for training, in order for
/// validation. A sample depends on its global number only, so no layout and no restart changes it.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>

#include <bit>
#include <concepts>
#include <cstdint>
#include <utility>

namespace mega::inline v0::data {

/// Tokens [first, first + count) of a source.
struct TokenRange {
  Index first = 0;
  Index count = 0;
  friend constexpr bool operator==(const TokenRange&, const TokenRange&) = default;
};

struct TokenSplit {
  TokenRange train;
  TokenRange valid;
};

/// Sets the last `valid_fraction` of the tokens aside for validation; the ranges share no token.
/// @throws Error usage unless 0 <= valid_fraction < 1
[[nodiscard]] inline TokenSplit split_tokens(Index tokens, double valid_fraction) {
  expects(valid_fraction >= 0 && valid_fraction < 1, ErrorCode::usage, [&] {
    return sentence("validation fraction ", valid_fraction, " is not within [0, 1)");
  });
  const auto valid = static_cast<Index>(static_cast<double>(tokens) * valid_fraction);
  return {{0, tokens - valid}, {tokens - valid, valid}};
}

/// Image of `i` under a permutation of [0, n) chosen by (seed, epoch): a Feistel network on the
/// smallest even number of bits that holds n, applied until the image is below n again.
/// @pre  0 <= i < n
/// @cost about 12 Philox blocks on average, 24 at most; no memory
/// Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
[[nodiscard]] constexpr Index shuffled(Index i, Index n, std::uint64_t seed,
                                       std::uint64_t epoch) noexcept {
  constexpr std::uint32_t rounds = 6;
  const auto bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n - 1)));
  const int half = bits < 2 ? 1 : (bits + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  auto value = static_cast<std::uint64_t>(i);
  do {
    std::uint64_t left = value >> half;
    std::uint64_t right = value & mask;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      const RandomKey key{seed, epoch, round, RandomUse::shuffle};
      left ^= key.bits(static_cast<Index>(right)) & mask;
      std::swap(left, right);
    }
    value = (left << half) | right;
  } while (value >= static_cast<std::uint64_t>(n));
  return static_cast<Index>(value);
}

template <class W>
concept knows_window_length = requires(const W& windows) {
  { windows.seq_length() } -> std::same_as<Index>;
};
template <class W>
concept maps_sample_to_window = requires(const W& windows, Index global_sample) {
  { windows.sample(global_sample) } -> std::same_as<Index>;
};
/// sample(g) is the first of the seq_length() + 1 tokens of global sample g.
template <class W>
concept window_sampler = knows_window_length<W> && maps_sample_to_window<W>;

/// A range cut into windows of seq_length + 1 tokens that overlap in one: the last target of a
/// window is the first token of the next, so every token but the range's first is a target once.
/// Fewer than seq_length tokens at the end stay unused.
class SequentialWindows {
 public:
  /// @throws Error usage if seq_length < 1, bad_input if the range holds no whole window
  SequentialWindows(TokenRange range, Index seq_length) : range_(range), seq_length_(seq_length) {
    expects(seq_length >= 1, ErrorCode::usage,
            [&] { return sentence("sequence length ", seq_length, " is not positive"); });
    expects(range.count > seq_length, ErrorCode::bad_input, [&] {
      return sentence("the data has ", range.count, " tokens but one sample of sequence length ",
                      seq_length, " needs ", seq_length, " + 1; provide more data or ",
                      range.count > 1 ? sentence("a sequence length of at most ", range.count - 1)
                                      : std::string("another split"));
    });
  }
  SequentialWindows(Index tokens, Index seq_length)
      : SequentialWindows(TokenRange{0, tokens}, seq_length) {}

  /// Samples in one pass over the data.
  [[nodiscard]] Index windows() const noexcept { return (range_.count - 1) / seq_length_; }
  [[nodiscard]] Index seq_length() const noexcept { return seq_length_; }

  /// First token of window `w`. @pre 0 <= w < windows()
  [[nodiscard]] Index first_token(Index w) const noexcept { return range_.first + w * seq_length_; }

  /// First token of a global sample; passes follow each other in the same order.
  [[nodiscard]] Index sample(Index global_sample) const {
    check_sample(global_sample);
    return first_token(global_sample % windows());
  }

 protected:
  static void check_sample(Index global_sample) {
    expects(global_sample >= 0, ErrorCode::logic,
            [&] { return sentence("global sample ", global_sample, " is negative"); });
  }

 private:
  TokenRange range_;
  Index seq_length_;
};

/// The same windows in an order of its own for each epoch: every window once an epoch.
class ShuffledWindows : public SequentialWindows {
 public:
  ShuffledWindows(TokenRange range, Index seq_length, std::uint64_t seed)
      : SequentialWindows(range, seq_length), seed_(seed) {}
  ShuffledWindows(Index tokens, Index seq_length, std::uint64_t seed)
      : ShuffledWindows(TokenRange{0, tokens}, seq_length, seed) {}

  [[nodiscard]] Index epoch(Index global_sample) const noexcept {
    return global_sample / windows();
  }

  /// First token of a global sample, 0 <= global_sample < 2^63.
  /// @cost see shuffled()
  [[nodiscard]] Index sample(Index global_sample) const {
    check_sample(global_sample);
    return first_token(shuffled(global_sample % windows(), windows(), seed_,
                                static_cast<std::uint64_t>(epoch(global_sample))));
  }

 private:
  std::uint64_t seed_;
};

static_assert(window_sampler<SequentialWindows> && window_sampler<ShuffledWindows>);
static_assert(shuffled(0, 1, 7, 0) == 0 && shuffled(0, 2, 7, 0) != shuffled(1, 2, 7, 0));

}  // namespace mega::inline v0::data
