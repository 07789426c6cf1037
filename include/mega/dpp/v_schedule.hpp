/// @file  Zero-bubble schedules of two chunks a rank on a V, under a cap on the live activations:
/// ZB-V, V-Half, V-Min and every cap between and below.
///
/// The stages go down the ranks and up again, so rank r holds a stage of the first half and one of
/// the second. What the one keeps alive longest on the first rank the other keeps longest on the
/// last one, hence memory is even over the ranks, and the loss and the embedding share a rank.
/// Backwards are split: input gradients are urgent, weight gradients fill what would be idle.
///
/// A micro-batch has six actions on each rank, all of one unit of time here:
///   F0 down the ranks, F1 up, I1 down, I0 up, and a W for each I at any later time.
/// The order of all ranks comes out of one run on these units: at each unit every rank begins one
/// action that has its input and fits the cap. Whenever F0 is admitted at least one place stays
/// free for F1, which is why the run never stops short: of the oldest micro-batch that is not done,
/// F0 finds a place because all older ones have left, F1 because F0 leaves it one, and the rest
/// needs none.
/// What remains free is which action comes first. No one preference is best for all caps, so a few
/// are run and the best order is taken.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/value.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/traversal.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

namespace mega::inline v0::dpp {

namespace detail {

/// A micro-batch's actions on a rank of the V. Even steps up to i1 go down the ranks, odd ones up.
enum VStep : std::uint8_t { f0, f1, i1, i0, w1, w0, v_steps };

[[nodiscard]] constexpr Action v_action(VStep step, int microbatch) noexcept {
  using enum ActionKind;
  constexpr ActionKind kinds[] = {forward,        forward,         backward_input,
                                  backward_input, backward_weight, backward_weight};
  return make_action(kinds[step], step == f1 || step == i1 || step == w1 ? 1 : 0, microbatch);
}

/// When a weight gradient goes before the other actions that are ready.
enum WeightTurn : std::uint8_t {
  when_idle,       ///< never
  when_held_back,  ///< when the cap holds back a forward that would be next
  when_full,       ///< when the cap is reached
};

struct VPreference {
  VStep first[4];
  WeightTurn weights;
};

/// How a rank chooses among its actions.
struct VRule {
  VPreference steady;
  VPreference drain;  ///< from the last but one F0 of the rank on
  /// Places that F0 leaves to F1, in tenths: on rank 0, and more for each rank below at cap 2p.
  int spare;
  int spare_growth;
  /// No action begins more than `lead` units before the time it would have if micro-batches started
  /// 6 units apart and passed all stages without a wait; negative: no such limit.
  int lead;
};

/// The first is the one for cap 2p: no bubble for any p. The others were picked from some ten
/// thousand by how many (p, m, cap) they are the best for; see the test for what they reach.
inline constexpr VRule v_rules[] = {
    {{{i0, f1, f0, i1}, when_full}, {{f1, i0, f0, i1}, when_full}, 10, 0, -1},
    {{{f1, f0, i0, i1}, when_held_back}, {{i0, f1, f0, i1}, when_held_back}, 20, 8, -1},
    {{{f1, i1, i0, f0}, when_idle}, {{f1, f0, i1, i0}, when_held_back}, 25, 2, -1},
    {{{i1, i0, f1, f0}, when_idle}, {{f1, f0, i1, i0}, when_held_back}, 20, 6, -1},
    {{{f1, i0, i1, f0}, when_idle}, {{f1, f0, i1, i0}, when_full}, 15, 0, 3},
    {{{i1, f1, i0, f0}, when_idle}, {{f0, f1, i0, i1}, when_idle}, 20, 8, -1},
    {{{i0, i1, f1, f0}, when_held_back}, {{f0, i1, f1, i0}, when_held_back}, 15, 0, 9},
    {{{i0, f1, f0, i1}, when_held_back}, {{f0, f1, i1, i0}, when_full}, 20, 4, 11},
    {{{f1, i1, i0, f0}, when_held_back}, {{f1, i1, f0, i0}, when_idle}, 10, 2, 0},
    {{{f1, i0, i1, f0}, when_held_back}, {{i0, i1, f1, f0}, when_idle}, 15, 2, 8},
    {{{i1, f1, f0, i0}, when_idle}, {{f1, i1, f0, i0}, when_full}, 25, 4, -1},
    {{{i1, f1, i0, f0}, when_held_back}, {{f0, f1, i0, i1}, when_full}, 25, 6, -1},
};

/// A rule names every step once, and F0 leaves a place on every rank, so that no run stops short.
constexpr bool v_rules_are_sound() noexcept {
  for (const VRule& rule : v_rules) {
    for (const VPreference& preference : {rule.steady, rule.drain}) {
      unsigned named = 0;
      for (const VStep step : preference.first) named |= 1U << step;
      if (named != (1U << w1) - 1U) return false;
    }
    if (rule.spare < 10 || rule.spare_growth < 0) return false;
  }
  return true;
}
static_assert(v_rules_are_sound());

struct VLength {
  int span = 0;  ///< longest time from a rank's first action to its last
  int makespan = 0;

  [[nodiscard]] constexpr bool operator<(const VLength& other) const noexcept {
    return span != other.span ? span < other.span : makespan < other.makespan;
  }
};

/// A preference as tables over sets of f0, f1, i1 and i0, one bit a step.
struct VChoice {
  VStep first_of[16] = {};              ///< the step of the set that comes first; v_steps: empty
  unsigned ahead_of[v_steps + 1] = {};  ///< the steps that come before a step; of v_steps all
  WeightTurn weights = when_idle;

  constexpr explicit VChoice(const VPreference& preference) : weights(preference.weights) {
    for (unsigned set = 0; set < 16; ++set) {
      first_of[set] = v_steps;
      for (int i = 3; i >= 0; --i) {
        if ((set & bit(preference.first[i])) != 0) first_of[set] = preference.first[i];
      }
    }
    unsigned before = 0;
    for (const VStep step : preference.first) {
      ahead_of[step] = before;
      before |= bit(step);
    }
    ahead_of[v_steps] = before;
  }

  static constexpr unsigned bit(VStep step) noexcept { return 1U << step; }
};

/// One run on unit times. @pre p, m >= 1, cap >= 2
class VRun {
 public:
  constexpr VRun(int p, int m, int cap, const VRule& rule)
      : p_(p),
        m_(m),
        cap_(cap),
        lead_(rule.lead),
        steady_(rule.steady),
        drain_(rule.drain),
        done_(static_cast<std::size_t>(v_steps * (p + 2)), 0),
        room_(static_cast<std::size_t>(p), 0),
        ready_(room_.size(), 0),
        fitting_(room_.size(), 0),
        ranks_(room_.size(), Rank{}),
        begun_(room_.size(), v_steps) {
    done(f0, -1) = m;
    for (int rank = 0; rank < p; ++rank) {
      const int spare = (rule.spare * 2 * p + rule.spare_growth * cap * rank) / (20 * p);
      room_[at(rank)] = cap - (spare < cap ? spare : cap - 1);
    }
  }
  constexpr ~VRun() = default;  // nvcc 13 does not see that the implicit one is constexpr

  /// @param lists  [p] receives each rank's actions; empty: only the length is wanted
  /// @param longest_span  a run that will have a longer one ends early, with the span that is sure
  constexpr VLength run(std::span<std::vector<Action>> lists = {},
                        int longest_span = std::numeric_limits<int>::max()) {
    VLength length;
    for (int left = v_steps * m_ * p_; left > 0; ++now_) {
      if (length.span > longest_span) return length;
      look();
      for (int rank = 0; rank < p_; ++rank) begun_[at(rank)] = choose(rank);
      for (int rank = 0; rank < p_; ++rank) {
        const VStep step = begun_[at(rank)];
        if (step == v_steps) continue;
        Rank& r = ranks_[at(rank)];
        if (!lists.empty()) lists[at(rank)].push_back(v_action(step, done(step, rank)));
        if (r.start < 0) r.start = now_;
        ++done(step, rank);
        --left;
        // What the rank has still to do takes a unit each at least.
        const int span = now_ + 1 - r.start + v_steps * m_ - ++r.begun;
        if (span > length.span) length.span = span;
      }
      // Where the way turns, what comes in is what the rank itself has done.
      done(f1, p_) = done(f0, p_ - 1);
      done(i1, -1) = done(f1, 0);
      done(i0, p_) = done(i1, p_ - 1);
    }
    length.makespan = now_;
    return length;
  }

 private:
  struct Rank {
    int begun = 0;  ///< of all steps
    int start = -1;
  };

  static constexpr std::size_t at(int rank) noexcept { return static_cast<std::size_t>(rank); }

  /// How often a rank has done a step. Ranks -1 and p stand for where the first one and the last
  /// one get a step's input from.
  [[nodiscard]] constexpr int& done(VStep step, int rank) {
    return done_[at(step * (p_ + 2) + rank + 1)];
  }
  [[nodiscard]] constexpr int done(VStep step, int rank) const {
    return done_[at(step * (p_ + 2) + rank + 1)];
  }

  [[nodiscard]] constexpr int live(int rank) const {
    return done(f0, rank) + done(f1, rank) - done(w1, rank) - done(w0, rank);
  }

  /// Of each rank, the steps that have their input, and those of them that fit the cap. Without a
  /// branch, since this is where the time goes.
  constexpr void look() {
    const auto row = [&](VStep step) { return done_.data() + step * (p_ + 2) + 1; };
    const int* const of_f0 = row(f0);
    const int* const of_f1 = row(f1);
    const int* const of_i1 = row(i1);
    const int* const of_i0 = row(i0);
    const int* const of_w1 = row(w1);
    const int* const of_w0 = row(w0);
    for (int r = 0; r < p_; ++r) {
      const int first_chunk = of_f0[r] - of_w0[r];
      const unsigned is_full = first_chunk + of_f1[r] - of_w1[r] == cap_ ? 1U : 0U;
      const unsigned keeps_f0 = is_full | (first_chunk >= room_[at(r)] ? 1U : 0U);
      const unsigned ready =
          (of_f0[r - 1] > of_f0[r] ? 1U : 0U) << f0 | (of_f1[r + 1] > of_f1[r] ? 1U : 0U) << f1 |
          (of_i1[r - 1] > of_i1[r] ? 1U : 0U) << i1 | (of_i0[r + 1] > of_i0[r] ? 1U : 0U) << i0;
      ready_[at(r)] = ready;
      fitting_[at(r)] = ready & ~(keeps_f0 << f0 | is_full << f1);
    }
  }

  /// The steps of `steps` that begin no more than `lead_` units early.
  [[nodiscard]] constexpr unsigned due(int rank, unsigned steps) const {
    for (const VStep step : {f0, f1, i1, i0}) {
      const int way = step % 2 == 0 ? rank : 2 * p_ - 1 - rank;
      const int time = way + (step >= i1 ? 2 * p_ : 0) + v_steps * done(step, rank);
      if (now_ < time - lead_) steps &= ~VChoice::bit(step);
    }
    return steps;
  }

  /// The action that the rank begins now, or v_steps.
  [[nodiscard]] constexpr VStep choose(int rank) const {
    unsigned ready = ready_[at(rank)];
    if (lead_ >= 0) ready = due(rank, ready);
    const unsigned fitting = fitting_[at(rank)] & ready;
    const VChoice& choice = done(f0, rank) < m_ - 1 ? steady_ : drain_;
    const VStep next = choice.first_of[fitting];
    const bool held_back = (ready & ~fitting & choice.ahead_of[next]) != 0;
    const bool wants_weight = next == v_steps || (choice.weights == when_held_back && held_back) ||
                              (choice.weights == when_full && live(rank) == cap_);
    if (!wants_weight) return next;
    const bool w1_first = done(w1, rank) <= done(w0, rank);
    for (const VStep step : {w1_first ? w1 : w0, w1_first ? w0 : w1}) {
      if (done(step == w1 ? i1 : i0, rank) > done(step, rank)) return step;
    }
    return next;
  }

  int p_;
  int m_;
  int cap_;
  int lead_;
  VChoice steady_;
  VChoice drain_;
  int now_ = 0;
  std::vector<int> done_;          // [steps, p + 2]
  std::vector<int> room_;          // [p] micro-batches for whose first chunk there is a place
  std::vector<unsigned> ready_;    // [p] as look() found
  std::vector<unsigned> fitting_;  // [p]
  std::vector<Rank> ranks_;
  std::vector<VStep> begun_;
};

/// The rule that is shortest under the cap, of equally short ones the first.
/// @param guess  the one that is run first: the better it is, the earlier the others can end
[[nodiscard]] constexpr std::size_t v_best_rule(int p, int m, int cap, std::size_t guess) {
  const VLength ideal{v_steps * m, v_steps * m + p - 1};
  std::size_t best = guess;
  VLength shortest = VRun(p, m, cap, v_rules[guess]).run();
  for (std::size_t i = 0; i < std::size(v_rules); ++i) {
    if (i == guess) continue;
    if (best < i && !(ideal < shortest)) break;
    const VLength length = VRun(p, m, cap, v_rules[i]).run({}, shortest.span);
    const bool is_equal = !(length < shortest) && !(shortest < length);
    if (!(length < shortest || (is_equal && i < best))) continue;
    best = i;
    shortest = length;
  }
  return best;
}

/// The order of the rule that is shortest under the cap.
[[nodiscard]] constexpr std::vector<std::vector<Action>> v_orders(int p, int m, int cap) {
  // What is good for a small pipeline of the same proportions mostly is for a large one.
  constexpr int scale = 16;
  std::size_t guess = 0;
  if (p >= 4 * scale && m >= scale && cap >= 4 * scale)
    guess = v_best_rule(p / scale, m / scale, cap / scale, 0);
  const VRule& best = v_rules[v_best_rule(p, m, cap, guess)];
  std::vector<std::vector<Action>> lists(static_cast<std::size_t>(p));
  for (auto& list : lists) list.reserve(static_cast<std::size_t>(v_steps * m));
  VRun(p, m, cap, best).run({lists.data(), lists.size()});
  return lists;
}

}  // namespace detail

template <class C>
concept gives_live_cap = requires(const C cap, int p) {
  { cap.live(p) } -> std::same_as<int>;
};

/// How many activations of a chunk a rank may hold at a time; two make one of a whole rank.
template <class C>
concept live_cap = semiregular<C> && has_traversal_name<C> && gives_live_cap<C>;

/// A number chosen at run time, at least 2.
struct LiveChunks {
  static constexpr std::string_view name = "v_schedule";
  int value = 0;
  [[nodiscard]] constexpr int live(int /*p*/) const noexcept { return value; }
};

/// What 1F1B holds on its first rank: p activations of a whole rank.
struct WholeMemory {
  static constexpr std::string_view name = "zb_v";
  [[nodiscard]] static constexpr int live(int p) noexcept { return 2 * p; }
};

/// A half of it.
struct HalfMemory {
  static constexpr std::string_view name = "v_half";
  [[nodiscard]] static constexpr int live(int p) noexcept { return 2 * ((p + 2) / 2); }
};

/// A third of it, about the least with which a steady state has no bubble.
struct LeastMemory {
  static constexpr std::string_view name = "v_min";
  [[nodiscard]] static constexpr int live(int p) noexcept { return 2 * ((p + 4) / 3); }
};

/// Zero-bubble schedule of two chunks a rank on a V with at most Cap live activations on any rank.
/// Every p, m >= 1; v must be 2; every cap from 2 on. More than 2p is not used.
/// Idle time between a rank's first and last action, for F, I and W of a chunk that take T each,
/// m >= 2p and a cap of M:
///   M = 2p, ZeroBubbleV   0
///   M = 2p-1              3T
///   M from VMin on        (6p-1-3M)T, which holds for p = 4 and 8; a few T more for other p
///   M below VMin          grows with m, because the cap limits the throughput
/// The step as a whole idles at least (p-1)T, as ranks start one after the other. With uneven times
/// ZeroBubbleV idles about 2(p-1)(T_I - T_W) for T_I > T_W.
/// When to use it: memory decides. ZeroBubbleV hides the bubble in the memory of 1F1B; VHalf and
/// VMin trade the memory for a bubble still below 1F1B's, and what is saved can go into larger
/// micro-batches. The skew of the ranks' ends is only gained where the optimizer step of a rank may
/// begin before the others end.
/// Deterministic. Cost of orders(): one run over the 6pm actions for each of a dozen rules, 0.2 s
/// for p 64, m 256; of order(): the same for one rank, since no rank's order is known alone.
/// Source: Qi et al., Pipeline parallelism with controllable memory (V placement, named points).
template <live_cap Cap>
struct VTraversal {
  static constexpr std::string_view name = Cap::name;
  static constexpr bool splits_backward = true;
  [[no_unique_address]] Cap cap{};

  [[nodiscard]] static constexpr VPlacement placement() noexcept { return {}; }

  [[nodiscard]] static constexpr int length(int /*p*/, int m, int /*v*/) noexcept { return 6 * m; }

  [[nodiscard]] constexpr std::vector<std::vector<Action>> orders(int p, int m, int v) const {
    detail::expect_pipeline(0, p, m, v);
    expects(v == 2, ErrorCode::usage, [&] {
      return sentence("the V schedule ", name, " runs 2 chunks a rank, not v ", v, "; use v 2");
    });
    const int live = cap.live(p);
    expects(live >= 2, ErrorCode::usage, [&] {
      return sentence("a cap of ", live, " on live activations is too low for the V schedule ",
                      name,
                      ": a micro-batch needs one for each of its 2 chunks on a rank, so the "
                      "smallest valid cap is 2");
    });
    return detail::v_orders(p, m, live < 2 * p ? live : 2 * p);
  }

  constexpr int order(int rank, int p, int m, int v, ActionSpan out) const {
    detail::expect_pipeline(rank, p, m, v);
    ActionSink sink(out);
    const auto lists = orders(p, m, v);
    for (const Action& a : lists[static_cast<std::size_t>(rank)]) {
      sink.put(a.kind, a.chunk, a.microbatch);
    }
    return sink.count();
  }
};

using VSchedule = VTraversal<LiveChunks>;
using ZeroBubbleV = VTraversal<WholeMemory>;
using VHalf = VTraversal<HalfMemory>;
using VMin = VTraversal<LeastMemory>;

static_assert(live_cap<LiveChunks> && live_cap<WholeMemory> && live_cap<HalfMemory> &&
              live_cap<LeastMemory>);
static_assert(traversal_policy<VSchedule> && traversal_policy<ZeroBubbleV> &&
              orders_all_ranks<VHalf> && brings_placement<VMin>);

}  // namespace mega::inline v0::dpp
