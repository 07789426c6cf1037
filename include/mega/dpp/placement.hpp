/// @file  Which rank holds which stage of the model: p ranks with v chunks each hold p*v stages.
#pragma once
#include <concepts>
#include <string_view>

namespace mega::inline v0::dpp {

template <class P>
concept has_placement_name = requires {
  { P::name } -> std::convertible_to<std::string_view>;
};

template <class P>
concept gives_stage_of_chunk = requires(const P placement, int rank, int chunk, int p, int v) {
  { placement.stage(rank, chunk, p, v) } -> std::same_as<int>;
};

template <class P>
concept gives_rank_of_stage = requires(const P placement, int stage, int p, int v) {
  { placement.rank_of(stage, p, v) } -> std::same_as<int>;
};

template <class P>
concept gives_chunk_of_stage = requires(const P placement, int stage, int p, int v) {
  { placement.chunk_of(stage, p, v) } -> std::same_as<int>;
};

/// A placement is a bijection between (rank, chunk) and the stages 0..p*v-1.
template <class P>
concept placement = std::semiregular<P> && has_placement_name<P> && gives_stage_of_chunk<P> &&
    gives_rank_of_stage<P> && gives_chunk_of_stage<P>;

/// Stages go round the ranks v times: the last rank hands over to the first.
struct LoopPlacement {
  static constexpr std::string_view name = "loop";

  [[nodiscard]] static constexpr int stage(int rank, int chunk, int p, int /*v*/) noexcept {
    return chunk * p + rank;
  }
  [[nodiscard]] static constexpr int rank_of(int stage, int p, int /*v*/) noexcept {
    return stage % p;
  }
  [[nodiscard]] static constexpr int chunk_of(int stage, int p, int /*v*/) noexcept {
    return stage / p;
  }
};

/// Stages go down the ranks and up again: a V for v = 2, a wave for more. Where the direction turns
/// two consecutive stages share a rank, and for even v so do the first and the last stage.
struct VPlacement {
  static constexpr std::string_view name = "v";

  [[nodiscard]] static constexpr int stage(int rank, int chunk, int p, int /*v*/) noexcept {
    return chunk * p + (chunk % 2 == 0 ? rank : p - 1 - rank);
  }
  [[nodiscard]] static constexpr int rank_of(int stage, int p, int /*v*/) noexcept {
    return (stage / p) % 2 == 0 ? stage % p : p - 1 - stage % p;
  }
  [[nodiscard]] static constexpr int chunk_of(int stage, int p, int /*v*/) noexcept {
    return stage / p;
  }
};

namespace detail {
template <class P>
constexpr bool is_bijection(int p, int v) noexcept {
  for (int s = 0; s < p * v; ++s) {
    if (P{}.stage(P{}.rank_of(s, p, v), P{}.chunk_of(s, p, v), p, v) != s) return false;
  }
  return true;
}
}  // namespace detail

static_assert(placement<LoopPlacement> && detail::is_bijection<LoopPlacement>(3, 2));
static_assert(placement<VPlacement> && detail::is_bijection<VPlacement>(3, 2));

}  // namespace mega::inline v0::dpp
