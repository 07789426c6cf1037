/// @file  What a stage says about a parameter: name, global shape, how tensor parallelism splits
/// it. Everything that must not depend on the layout (initial values, checkpoints, the norm) is
/// derived from this description.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0 {

/// How the ranks of the tensor axis divide a tensor: along `dim`, each of its parts separately.
/// A packed [q; k; v] matrix has three parts, so every rank owns whole heads of each. A part that
/// does not divide is padded at its end: rank t owns ceil(part / T) rows from t * ceil(part / T)
/// on.
struct Shard {
  int dim = -1;              ///< -1: every rank of the axis holds the whole tensor
  std::vector<Index> parts;  ///< sizes along dim, in order; their sum is shape[dim]

  [[nodiscard]] bool replicated() const noexcept { return dim < 0; }
};

struct Init {
  enum class Kind : std::uint8_t { zeros, ones, normal };
  Kind kind = Kind::zeros;
  float deviation = 0.0F;  ///< of the normal distribution, mean 0
};

struct Parameter {
  std::string name = {};          ///< global and unique: the key of checkpoints and random numbers
  std::vector<Index> shape = {};  ///< global and without padding
  Shard shard = {};
  Init init = {};
  bool decay = true;                 ///< weight decay applies
  bool partial_over_tensor = false;  ///< a replicated tensor whose gradient must be summed over tp
  /// The stage writes the whole gradient at a step's first micro-batch and adds from the second on,
  /// so that nobody need clear it.
  bool overwritten_first = false;
  std::string tied_to = {};  ///< name of the parameter whose values this one shares, or empty

  [[nodiscard]] Index size() const noexcept {
    Index n = 1;
    for (const Index extent : shape) n *= extent;
    return n;
  }
};

/// Consecutive elements that lie together both in the whole tensor and in a rank's piece of it.
struct ShardRun {
  Index global = 0;  ///< first element in the whole, row-major tensor
  Index local = 0;   ///< first element in the rank's tensor
  Index count = 0;
  friend bool operator==(const ShardRun&, const ShardRun&) = default;
};

/// Shape of the piece that one of `degree` ranks holds, padding included.
[[nodiscard]] inline std::vector<Index> local_shape(const Parameter& p, int degree) {
  std::vector<Index> shape = p.shape;
  if (p.shard.replicated()) return shape;
  Index& extent = shape[static_cast<std::size_t>(p.shard.dim)];
  extent = 0;
  for (const Index part : p.shard.parts) extent += (part + degree - 1) / degree;
  return shape;
}

/// Number of elements of local_shape().
[[nodiscard]] inline Index local_size(const Parameter& p, int degree) {
  Index n = 1;
  for (const Index extent : local_shape(p, degree)) n *= extent;
  return n;
}

/// Where the elements of rank `position` of `degree` lie in the whole tensor, ascending in both.
/// Padding belongs to no run.
[[nodiscard]] inline std::vector<ShardRun> shard_runs(const Parameter& p, int position,
                                                      int degree) {
  std::vector<ShardRun> runs;
  if (p.shard.replicated()) {
    runs.push_back({0, 0, p.size()});
    return runs;
  }
  const auto dim = static_cast<std::size_t>(p.shard.dim);
  Index outer = 1, inner = 1;
  for (std::size_t d = 0; d < p.shape.size(); ++d)
    (d < dim ? outer : inner) *= d == dim ? 1 : p.shape[d];
  const Index local_extent = local_shape(p, degree)[dim];
  for (Index o = 0; o < outer; ++o) {
    Index global_part = 0, local_part = 0;
    for (const Index part : p.shard.parts) {
      const Index piece = (part + degree - 1) / degree;
      const Index begin = piece * position < part ? piece * position : part;
      const Index end = piece * (position + 1) < part ? piece * (position + 1) : part;
      const Index count = end - begin;
      const ShardRun run{(o * p.shape[dim] + global_part + begin) * inner,
                         (o * local_extent + local_part) * inner, count * inner};
      if (!runs.empty() && runs.back().global + runs.back().count == run.global &&
          runs.back().local + runs.back().count == run.local) {
        runs.back().count += run.count;
      } else if (run.count > 0) {
        runs.push_back(run);
      }
      global_part += part;
      local_part += piece;
    }
  }
  return runs;
}

/// Stable 32-bit name of a tensor for RandomKey::layer (FNV-1a).
[[nodiscard]] constexpr std::uint32_t name_hash(std::string_view name) noexcept {
  std::uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

/// Where a stage finds a parameter: its values and the fp32 accumulator of its gradient, both in
/// local_shape() order. Several parameters may share values (tied ones), never accumulators.
template <class W = float>
struct ParameterView {
  Vector<W> value;
  Vector<float> gradient;
};

}  // namespace mega::inline v0
