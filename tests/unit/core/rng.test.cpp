#include <mega/core/rng.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <set>
#include <type_traits>
#include <vector>

using mega::PhiloxBlock;
using mega::RandomKey;
using mega::RandomSite;
using mega::RandomUse;

TEST_CASE("core: Philox4x32-10 gives the published known answers") {
  CHECK(mega::philox4x32({{0, 0, 0, 0}}, 0, 0) ==
        PhiloxBlock{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  CHECK(mega::philox4x32({{~0U, ~0U, ~0U, ~0U}}, ~0U, ~0U) ==
        PhiloxBlock{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  static_assert(mega::philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822,
                                 0x299f31d0) ==
                PhiloxBlock{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

TEST_CASE("core: every part of a random key changes the numbers") {
  const RandomKey base{.seed = 1, .step = 2, .layer = 3, .use = RandomUse::mlp_dropout};
  std::set<std::uint32_t> seen{base.bits(0)};
  const auto differs = [&](RandomKey key, mega::Index i = 0) {
    return seen.insert(key.bits(i)).second;
  };
  RandomKey k = base;
  k.seed = 2;
  CHECK(differs(k));
  k.seed = 1 + (std::uint64_t{1} << 32);
  CHECK(differs(k));
  k = base;
  k.step = 3;
  CHECK(differs(k));
  k.step = 2 + (std::uint64_t{1} << 32);
  CHECK(differs(k));
  k = base;
  k.layer = 4;
  CHECK(differs(k));
  k = base;
  k.use = RandomUse::attention_dropout;
  CHECK(differs(k));
  CHECK(differs(base, 1));
  CHECK(differs(base, mega::Index{1} << 40));
}

TEST_CASE("core: neighbours share a block, and uniform numbers fill [0, 1)") {
  const RandomKey key{.seed = 9};
  for (mega::Index i = 0; i < 16; ++i) CHECK(key.bits(i) == key.block(i / 4).word[i % 4]);
  double sum = 0, squares = 0;
  constexpr int n = 100000;
  float low = 1, high = 0;
  for (int i = 0; i < n; ++i) {
    const float u = key.uniform(i);
    sum += u;
    squares += static_cast<double>(u) * u;
    low = u < low ? u : low;
    high = u > high ? u : high;
  }
  // five standard deviations of the mean of n uniform numbers
  CHECK(sum / n == doctest::Approx(0.5).epsilon(5 * 0.289 / 316));
  CHECK(squares / n == doctest::Approx(1.0 / 3).epsilon(0.02));
  CHECK(low >= 0.0F);
  CHECK(high < 1.0F);
}

TEST_CASE("core: a site draws the numbers of the step that stands in memory when it is read") {
  std::int64_t step = 7;
  const RandomSite in_memory{1, 999, 3, RandomUse::mlp_dropout, &step};
  for (const std::int64_t now : {std::int64_t{0}, std::int64_t{8}, (std::int64_t{5} << 32) + 8}) {
    step = now;
    const RandomKey key{1, static_cast<std::uint64_t>(now), 3, RandomUse::mlp_dropout};
    for (const mega::Index i : {mega::Index{0}, mega::Index{6}, mega::Index{1} << 40})
      CHECK(in_memory.read().bits(i) == key.bits(i));
  }
  // A key is a site whose step is known, and stays the key that it was.
  const RandomKey key{.seed = 4, .step = 6, .layer = 5, .use = RandomUse::attention_dropout};
  const RandomSite known = key;
  CHECK(known.step_at == nullptr);
  CHECK(known.read().block(9) == key.block(9));
  static_assert(RandomSite{.seed = 4, .step = 6}.read().bits(3) ==
                RandomKey{.seed = 4, .step = 6}.bits(3));
  // No numbers come out of a site whose step was not read.
  static_assert(std::is_convertible_v<RandomKey, RandomSite>);
  static_assert(!std::is_convertible_v<RandomSite, RandomKey>);
}
