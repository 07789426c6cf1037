/// @file  Which rank holds which stage of the model: p ranks with v chunks each hold p*v stages.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/value.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

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
concept placement = semiregular<P> && has_placement_name<P> && gives_stage_of_chunk<P> &&
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

/// Any map of stages to ranks, given as a table: for imported schedules and for experiments. The
/// ranks hold equally many stages, and a rank's chunks are its stages in ascending order.
class TablePlacement {
 public:
  static constexpr std::string_view name = "table";

  /// One stage on one rank.
  constexpr TablePlacement() : TablePlacement({&first_rank, 1}) {}

  /// @param rank_of_stage  [p*v] the rank of each stage
  /// Throws Error(usage) unless the ranks are 0..p-1 and hold equally many stages.
  constexpr explicit TablePlacement(std::span<const int> rank_of_stage) {
    int last = -1;
    for (const int rank : rank_of_stage) last = rank > last ? rank : last;
    // A rank beyond the number of stages cannot be right; this also bounds the memory.
    const bool plausible = last >= 0 && static_cast<std::size_t>(last) < rank_of_stage.size();
    p_ = plausible ? last + 1 : 1;
    const auto stages = static_cast<int>(rank_of_stage.size());
    v_ = stages / p_;
    stage_of_.assign(rank_of_stage.size(), 0);
    place_of_.assign(rank_of_stage.size(), 0);
    std::vector<int> held(static_cast<std::size_t>(p_), 0);
    for (int stage = 0; stage < stages; ++stage) {
      const int rank = rank_of_stage[static_cast<std::size_t>(stage)];
      const bool fits =
          0 <= rank && rank < p_ && held[static_cast<std::size_t>(rank)] < v_ && v_ * p_ == stages;
      expects(fits, ErrorCode::usage, [&] {
        return sentence("a placement table with stage ", stage, " on rank ", rank,
                        " does not give each rank equally many of the ", stages,
                        " stages; use ranks 0..p-1, each as often");
      });
      const int place = rank * v_ + held[static_cast<std::size_t>(rank)]++;
      stage_of_[static_cast<std::size_t>(place)] = stage;
      place_of_[static_cast<std::size_t>(stage)] = place;
    }
    expects(stages > 0, ErrorCode::usage, "a placement table needs at least 1 stage");
  }

  [[nodiscard]] constexpr int stage(int rank, int chunk, int p, int v) const {
    expect_shape(p, v);
    return stage_of_[static_cast<std::size_t>(rank * v + chunk)];
  }
  [[nodiscard]] constexpr int rank_of(int stage, int p, int v) const {
    expect_shape(p, v);
    return place_of_[static_cast<std::size_t>(stage)] / v;
  }
  [[nodiscard]] constexpr int chunk_of(int stage, int p, int v) const {
    expect_shape(p, v);
    return place_of_[static_cast<std::size_t>(stage)] % v;
  }

  [[nodiscard]] constexpr int ranks() const noexcept { return p_; }
  [[nodiscard]] constexpr int chunks() const noexcept { return v_; }

 private:
  static constexpr int first_rank = 0;

  constexpr void expect_shape(int p, int v) const {
    expects(p == p_ && v == v_, ErrorCode::usage, [&] {
      return sentence("the placement table is for p ", p_, ", v ", v_, ", not for p ", p, ", v ",
                      v);
    });
  }

  int p_ = 1;
  int v_ = 1;
  std::vector<int> stage_of_;  // [p*v] by place
  std::vector<int> place_of_;  // [p*v] by stage
};

/// A traversal policy that is right on one placement only says which by a member placement().
template <class Policy>
concept brings_placement = requires(const Policy policy) {
  { policy.placement() } -> placement;
};

/// The placement that `policy` was made for; `otherwise` where any will do.
template <class Policy, placement Otherwise = LoopPlacement>
[[nodiscard]] constexpr auto placement_of([[maybe_unused]] const Policy& policy,
                                          [[maybe_unused]] Otherwise otherwise = {}) {
  if constexpr (brings_placement<Policy>) {
    return policy.placement();
  } else {
    return otherwise;
  }
}

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
static_assert(placement<TablePlacement>);

}  // namespace mega::inline v0::dpp
