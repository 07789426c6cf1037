/// @file  Rotary position embedding on the host, with the scalings that checkpoints name.
/// Sources: Su et al., arXiv 2104.09864; Chen et al., arXiv 2306.15595 (linear); the Llama 3.1
/// model configuration (llama3).
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/scratch.hpp>
#include <mega/nn/detail/shape.hpp>

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace mega::inline v0::nn {

enum class RopeScalingKind : std::uint8_t {
  none,    ///< frequencies as trained
  linear,  ///< every frequency divided by factor
  llama3,  ///< long waves divided by factor, short ones kept, a ramp in frequency between
};

/// The fields of a Hugging Face rope_scaling entry; each kind reads only what it names.
struct RopeScaling {
  RopeScalingKind kind = RopeScalingKind::none;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  Index original_max_position_embeddings = 8192;
};

/// Radians per position of each of the head_dim / 2 pairs: theta^(-2 i / head_dim), scaled.
/// Computed in fp32, as the checkpoints' own training code does. Runs at once: it belongs to
/// start-up.
/// @pre  frequencies.size() == head_dim / 2
/// @throws  Error(bad_input) for values that no configuration may hold
inline void rope_inverse_frequencies(Vector<float> frequencies, double theta,
                                     const RopeScaling& scaling = {}) {
  const bool scaled = scaling.kind != RopeScalingKind::none;
  expects(theta > 0.0, ErrorCode::bad_input,
          [&] { return sentence("rope: theta is ", theta, ", it must be positive"); });
  expects(!scaled || scaling.factor > 0.0, ErrorCode::bad_input, [&] {
    return sentence("rope: the scaling factor is ", scaling.factor, ", it must be positive");
  });
  expects(
      scaling.kind != RopeScalingKind::llama3 ||
          (scaling.low_freq_factor > 0.0 && scaling.high_freq_factor > scaling.low_freq_factor &&
           scaling.original_max_position_embeddings > 0),
      ErrorCode::bad_input, [&] {
        return sentence(
            "rope: llama3 scaling needs 0 < low_freq_factor < high_freq_factor and "
            "a positive original_max_position_embeddings, it has ",
            scaling.low_freq_factor, ", ", scaling.high_freq_factor, " and ",
            scaling.original_max_position_embeddings);
      });
  const auto factor = static_cast<float>(scaling.factor);
  const auto low = static_cast<float>(scaling.low_freq_factor);
  const auto high = static_cast<float>(scaling.high_freq_factor);
  const auto context = static_cast<float>(scaling.original_max_position_embeddings);
  const auto pairs = static_cast<float>(frequencies.size());
  for (Index i = 0; i < frequencies.size(); ++i) {
    float f = 1.0f / std::pow(static_cast<float>(theta), static_cast<float>(i) / pairs);
    if (scaling.kind == RopeScalingKind::linear) f /= factor;
    if (scaling.kind == RopeScalingKind::llama3) {
      // How often the wave turns within the context that the model was first trained on.
      const float turns = context * f / (2.0f * std::numbers::pi_v<float>);
      if (turns < low) {
        f /= factor;
      } else if (turns <= high) {
        const float kept = (turns - low) / (high - low);
        f = (1.0f - kept) * (f / factor) + kept * f;
      }
    }
    frequencies(i) = f;
  }
}

namespace detail {

/// Turns the pairs (i, i + head_dim / 2) of all query and key heads by direction * angle.
template <host::host_stream S>
void rotate_pairs(S& stream, std::string_view op, Matrix<float> qkv,
                  Vector<const float> frequencies, AttentionShape shape, Index first_position,
                  float direction) {
  expects_valid(op, shape);
  expects(shape.head_dim % 2 == 0, ErrorCode::logic,
          [&] { return sentence(op, ": head dim ", shape.head_dim, " is odd"); });
  expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
  expects_size(op, "frequencies", frequencies, shape.head_dim / 2);
  stream.run([=] {
    struct Rotation {};
    const Index half = shape.head_dim / 2;
    float* const cosine = scratch<Rotation>(2 * half);
    float* const sine = cosine + half;
    for (Index t = 0; t < shape.time; ++t) {
      for (Index i = 0; i < half; ++i) {
        const float angle = static_cast<float>(first_position + t) * frequencies(i);
        cosine[i] = std::cos(angle);
        sine[i] = direction * std::sin(angle);
      }
      for (Index sample = 0; sample < shape.batch; ++sample) {
        float* const row = qkv.row(sample * shape.time + t);
        for (Index head = 0; head < shape.query_heads + shape.kv_heads; ++head) {
          float* const first = row + head * shape.head_dim;
          float* const second = first + half;
          for (Index i = 0; i < half; ++i) {
            const float x = first[i], y = second[i];
            first[i] = x * cosine[i] - y * sine[i];
            second[i] = y * cosine[i] + x * sine[i];
          }
        }
      }
    }
  });
}

}  // namespace detail

/// Rotates the query and key heads of the packed matrix in place; row [sample, t] has the global
/// position first_position + t. Angles are fp32 products of position and frequency.
/// @sync  ordered on stream
template <host::host_stream S>
void rope_forward(S& stream, Matrix<float> qkv, Vector<const float> frequencies,
                  AttentionShape shape, Index first_position) {
  detail::rotate_pairs(stream, "rope_forward", qkv, frequencies, shape, first_position, 1.0f);
}

/// The inverse rotation, in place on the gradient of the packed matrix.
template <host::host_stream S>
void rope_backward(S& stream, Matrix<float> dqkv, Vector<const float> frequencies,
                   AttentionShape shape, Index first_position) {
  detail::rotate_pairs(stream, "rope_backward", dqkv, frequencies, shape, first_position, -1.0f);
}

}  // namespace mega::inline v0::nn
