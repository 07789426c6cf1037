/// @file  Initial values of a parameter, element by element from its name and global index, so that
/// every layout starts from the same model.
#pragma once
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace mega::inline v0::train {

/// Standard normal number of element `index` (Box and Muller, 1958): neighbours 2k and 2k + 1 are
/// the two coordinates of one point.
[[nodiscard]] inline float standard_normal(const RandomKey& key, Index index) noexcept {
  const PhiloxBlock block = key.block(index >> 1);
  // (0, 1], so that the logarithm is finite.
  const double u = (static_cast<double>(block.word[0]) + 1) * 0x1p-32;
  const double angle = static_cast<double>(block.word[1]) * 0x1p-32 * 6.283185307179586476925;
  const double radius = std::sqrt(-2 * std::log(u));
  return static_cast<float>((index & 1) == 0 ? radius * std::cos(angle) : radius * std::sin(angle));
}

/// Fills one rank's piece of `p`; padding becomes zero. A tied parameter gets its owner's values.
inline void initialise(const Parameter& p, std::uint64_t seed, int position, int degree,
                       Vector<float> out) {
  std::fill(out.data(), out.data() + out.size(), 0.0F);
  if (p.init.kind == Init::Kind::zeros) return;
  const RandomKey key{seed, 0, name_hash(p.tied_to.empty() ? p.name : p.tied_to), RandomUse::init};
  for (const ShardRun& run : shard_runs(p, position, degree)) {
    for (Index i = 0; i < run.count; ++i) {
      out(run.local + i) = p.init.kind == Init::Kind::ones
                               ? 1.0F
                               : p.init.deviation * standard_normal(key, run.global + i);
    }
  }
}

}  // namespace mega::inline v0::train
