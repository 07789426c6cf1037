/// @file  Initial values of a parameter, element by element from its name and global index, so that
/// every layout starts from the same model.
#pragma once
#include <mega/core/config.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace mega::inline v0::train {

/// Standard normal number of element `index` (Box and Muller, 1958): neighbours 2k and 2k + 1 are
/// the two coordinates of one point.
[[nodiscard]] MEGA_HD inline float standard_normal(const RandomKey& key, Index index) noexcept {
  const PhiloxBlock block = key.block(index >> 1);
  // (0, 1], so that the logarithm is finite.
  const double u = (static_cast<double>(block.word[0]) + 1) * 0x1p-32;
  const double angle = static_cast<double>(block.word[1]) * 0x1p-32 * 6.283185307179586476925;
  const double radius = std::sqrt(-2 * std::log(u));
  return static_cast<float>((index & 1) == 0 ? radius * std::cos(angle) : radius * std::sin(angle));
}

/// A tied parameter draws what its owner draws.
[[nodiscard]] inline RandomKey initial_key(const Parameter& p, std::uint64_t seed) {
  return {seed, 0, name_hash(p.tied_to.empty() ? p.name : p.tied_to), RandomUse::init};
}

/// Fills one rank's piece of `p`; padding becomes zero. A tied parameter gets its owner's values.
inline void initialise(const Parameter& p, std::uint64_t seed, int position, int degree,
                       Vector<float> out) {
  std::fill(out.data(), out.data() + out.size(), 0.0F);
  if (p.init.kind == Init::Kind::zeros) return;
  const RandomKey key = initial_key(p, seed);
  for (const ShardRun& run : shard_runs(p, position, degree)) {
    for (Index i = 0; i < run.count; ++i) {
      out(run.local + i) = p.init.kind == Init::Kind::ones
                               ? 1.0F
                               : p.init.deviation * standard_normal(key, run.global + i);
    }
  }
}

/// initialise(), ordered on the stream.
template <host::host_stream S>
void initialise_values(S& stream, Vector<float> out, const Parameter& p, std::uint64_t seed,
                       int position, int degree) {
  stream.run([=] { initialise(p, seed, position, degree, out); });
}

}  // namespace mega::inline v0::train
