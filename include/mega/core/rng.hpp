/// @file  Counter-based random numbers: Philox4x32-10, keyed so that no layout changes a number.
/// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once
#include <mega/core/config.hpp>
#include <mega/core/view.hpp>

#include <cstdint>

namespace mega::inline v0 {

/// Four 32-bit words, the unit in which Philox counts and produces.
struct PhiloxBlock {
  std::uint32_t word[4];
  friend constexpr bool operator==(const PhiloxBlock&, const PhiloxBlock&) = default;
};

/// Ten rounds of Philox4x32. Pure: equal arguments give equal words on host and device.
/// @cost  20 multiplications of 32 x 32 -> 64 bits
[[nodiscard]] MEGA_HD constexpr PhiloxBlock philox4x32(PhiloxBlock counter, std::uint32_t key0,
                                                       std::uint32_t key1) noexcept {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * counter.word[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<std::uint32_t>(p1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<std::uint32_t>(p1),
                static_cast<std::uint32_t>(p0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<std::uint32_t>(p0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

/// What a random number is for. One value an operation of a layer; never renumbered.
enum class RandomUse : std::uint32_t {
  init = 0,
  embedding_dropout = 1,
  attention_dropout = 2,
  residual_dropout = 3,
  mlp_dropout = 4,
  shuffle = 5,
  sample = 6,
  test = 7,
};

struct RandomKey;

/// What names the random numbers of a drawing site: a RandomKey whose step may stand in memory of
/// the device that draws, so that work which was queued once draws other numbers in every step. It
/// has no numbers itself, so that no step is overlooked.
struct RandomSite {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint32_t layer = 0;
  RandomUse use = RandomUse::init;
  const std::int64_t* step_at = nullptr;  ///< where the step stands instead of in `step`, or null

  /// The key of the step as it stands now, once for all numbers that a thread draws.
  [[nodiscard]] MEGA_HD constexpr RandomKey read() const noexcept;
};

/// Random numbers addressed by meaning: (seed, step, layer, use, global element index).
/// Two layouts that own the same element draw the same number for it; nothing is carried over.
/// `layer` may be any stable 32-bit name of the drawing site (a layer index, a hashed tensor name).
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint32_t layer = 0;
  RandomUse use = RandomUse::init;

  /// A site whose step is known when its work is queued.
  [[nodiscard]] MEGA_HD constexpr operator RandomSite() const noexcept {
    return {seed, step, layer, use, nullptr};
  }

  /// 32 random bits for element `index`, 0 <= index < 2^58. Four neighbouring elements share one
  /// Philox block.
  [[nodiscard]] MEGA_HD constexpr std::uint32_t bits(Index index) const noexcept {
    return block(index >> 2).word[index & 3];
  }

  /// The four words of elements [4 * quad, 4 * quad + 4).
  [[nodiscard]] MEGA_HD constexpr PhiloxBlock block(Index quad) const noexcept {
    const auto q = static_cast<std::uint64_t>(quad);
    // Counter: element, use and layer in words of their own, so no two sites share a block; the
    // key holds the seed, stirred with the step's high word so that steps beyond 2^32 differ too.
    return philox4x32(
        {{static_cast<std::uint32_t>(q),
          static_cast<std::uint32_t>(q >> 32) | (static_cast<std::uint32_t>(use) << 24),
          static_cast<std::uint32_t>(step), layer}},
        static_cast<std::uint32_t>(seed),
        static_cast<std::uint32_t>(seed >> 32) ^
            (static_cast<std::uint32_t>(step >> 32) * 0x85EBCA6Bu));
  }

  /// Uniform in [0, 1) with 24 bits.
  [[nodiscard]] MEGA_HD constexpr float uniform(Index index) const noexcept {
    return static_cast<float>(bits(index) >> 8) * 0x1p-24f;
  }
};

MEGA_HD constexpr RandomKey RandomSite::read() const noexcept {
  return {seed, step_at == nullptr ? step : static_cast<std::uint64_t>(*step_at), layer, use};
}

}  // namespace mega::inline v0
