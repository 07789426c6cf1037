/// @file  How a Transformer knows positions, as kinds: a learned table added to the embedding, or a
/// rotation of queries and keys.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/rope.hpp>
#include <mega/nn/rope_frequencies.hpp>
#include <mega/nn/transformer_config.hpp>

#include <string_view>

namespace mega::inline v0::nn {

// A position kind has: name; has_table, whether the embedding adds one; rotates, whether rotate()
// does anything; validate(); frequencies(), how many numbers prepare() writes for a call; rotate()
// and rotate_back(), in place on the packed matrix of queries, keys and values, and on its
// gradient.

struct LearnedPosition {
  static constexpr std::string_view name = "learned";
  static constexpr bool has_table = true;
  static constexpr bool rotates = false;

  static void validate(const TransformerConfig& config, const TransformerRun& run) {
    expects(run.sequence <= config.max_positions, ErrorCode::usage, [&] {
      return sentence("sequence ", run.sequence, " is longer than the ", config.max_positions,
                      " learned positions; use a sequence of at most ", config.max_positions);
    });
  }
  [[nodiscard]] static Index frequencies(const TransformerConfig&) noexcept { return 0; }
  template <class S>
  static void prepare(S&, Vector<float>, const RopeConfig&) noexcept {}
  template <class S, class T>
  static void rotate(S&, Matrix<T>, Vector<const float>, const AttentionShape&) noexcept {}
  template <class S, class T>
  static void rotate_back(S&, Matrix<T>, Vector<const float>, const AttentionShape&) noexcept {}
};

struct RotaryPosition {
  static constexpr std::string_view name = "rotary";
  static constexpr bool has_table = false;
  static constexpr bool rotates = true;

  static void validate(const TransformerConfig& config, const TransformerRun&) {
    expects(config.head_dim % 2 == 0, ErrorCode::usage, [&] {
      return sentence("head_dim ", config.head_dim, " is odd; rotary embedding turns pairs, use ",
                      config.head_dim - 1, " or ", config.head_dim + 1);
    });
  }
  [[nodiscard]] static Index frequencies(const TransformerConfig& config) noexcept {
    return config.head_dim / 2;
  }
  template <class S>
  static void prepare(S& stream, Vector<float> frequencies, const RopeConfig& rope) {
    rope_frequencies(stream, frequencies, rope.theta, rope.scaling);
  }
  template <class S, class T>
  static void rotate(S& stream, Matrix<T> qkv, Vector<const float> frequencies,
                     const AttentionShape& shape) {
    rope_forward(stream, qkv, frequencies, shape, Index{0});
  }
  template <class S, class T>
  static void rotate_back(S& stream, Matrix<T> dqkv, Vector<const float> frequencies,
                          const AttentionShape& shape) {
    rope_backward(stream, dqkv, frequencies, shape, Index{0});
  }
};

}  // namespace mega::inline v0::nn
