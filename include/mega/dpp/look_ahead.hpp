/// @file  Bounded look-ahead: which compute action a rank runs next when the one that its static
/// order wants has to wait for its input.
///
/// The rule. S is the rank's static list of compute actions, i its first action not done.
///   1. If S[i] is ready, run it.
///   2. Else run the first S[j], j > i, that is the next of its chunk's sequence (forwards, input
///      gradients and weight gradients of a chunk each run in ascending micro-batches), whose
///      predecessors on this rank and chunk are done, that is ready, and that is no half of a fused
///      pair. A forward is taken only while fewer than L forwards beyond position i are done.
///   3. Else wait.
/// So actions overtake each other between sequences only, and gradients add up in the same order
/// as without look-ahead, whatever the arrivals. L = 0 is the static order itself.
///
/// Memory. With F and W the forwards and the weight gradients done, and F_i, W_i those before
/// position i: F <= F_i + L and W >= W_i, so live activations F - W <= F_i - W_i + L, which is at
/// most the peak of the static order plus L. The same holds of each chunk by itself.
///
/// No deadlock, if the static orders of all ranks run to their end together. Let E be the sequence
/// of all ranks' actions in one such static run, and x, on rank r, the first action of E that is
/// not done. All that stands before x in E is done: the earlier actions of r's own list, so x is
/// S[i] of r; the producers of its input; and the actions that, in E, had freed the slot or the
/// buffer that x needs. Each slot and buffer serves one sequence, and sequences run in order, so
/// what x needs is the very slot that those actions freed. Hence x is ready or becomes so, and rule
/// 1 takes it. This needs that r is not held up by anything else: an action taken out of turn must
/// not block, so `ready(action, true)` has to include that its result can leave at once. S[i] may
/// wait for that. A counter of live activations in place of L deadlocks: forwards of later chunks,
/// without which no backward can begin, find the memory full.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>

#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace mega::inline v0::dpp {

/// ready(action, ahead): the action's inputs from other stages are here; if `ahead`, also: running
/// it now will not make the rank wait, neither for a slot or buffer it fills nor for its send.
/// The rule itself sees to what the action needs of its own chunk.
template <class R>
concept readiness = requires(const R& ready, const Action& action, bool ahead) {
  { ready(action, ahead) } -> std::convertible_to<bool>;
};

/// The compute actions of one rank, handed out by the rule above. Allocates at construction only.
/// @cost  O(v) calls of `ready` and O(v) steps for a choice, whatever the length of the list
class LookAheadOrder {
 public:
  /// @param actions  the rank's list, lowered or not: actions that do not compute are left out, and
  ///                 positions count those that do
  /// @param limit    L >= 0: forwards that may be done out of turn
  /// Throws Error(usage) if the list by itself breaks the order of a chunk.
  constexpr LookAheadOrder(std::span<const Action> actions, int limit) : limit_(limit) {
    expects(limit >= 0, ErrorCode::usage, [&] {
      return sentence("look-ahead of ", limit,
                      " forwards: it must be 0 (the static order) or more");
    });
    for (const Action& a : actions) {
      if (is_compute(a.kind)) list_.push_back(a);
    }
    link();
    restart();
  }

  /// Nothing is done: the state before a step.
  constexpr void restart() {
    heads_.clear();
    for (const int head : first_heads_) heads_.push_back(head);
    for (Progress& chunk : chunks_) chunk = {};
    forwards_done_ = 0;
    before_ = 0;
    forwards_before_ = 0;
  }

  [[nodiscard]] constexpr int size() const noexcept { return static_cast<int>(list_.size()); }
  [[nodiscard]] constexpr const Action& operator[](int position) const {
    return list_[at(position)];
  }
  [[nodiscard]] constexpr int limit() const noexcept { return limit_; }

  [[nodiscard]] constexpr bool at_end() const noexcept { return heads_.empty(); }
  /// Position of the first action not done: the one to wait for where next() has none. @pre !at_end
  [[nodiscard]] constexpr int statically_next() const { return heads_.front(); }
  /// Forwards done beyond statically_next(), at most limit().
  [[nodiscard]] constexpr int forwards_ahead() const noexcept {
    return forwards_done_ - forwards_before_;
  }

  /// Position of the action to run now, or none: everything allowed has to wait. Of a fused pair
  /// the first half is named; its second half is the next position, and both are to be run.
  template <readiness Ready>
  [[nodiscard]] constexpr std::optional<int> next(const Ready& ready) const {
    if (at_end()) return std::nullopt;
    const int first = statically_next();
    const bool paired = list_[at(first)].with_next;
    if (ready(list_[at(first)], false) && (!paired || ready(list_[at(first + 1)], false))) {
      return first;
    }
    for (std::size_t k = 1; limit_ > 0 && k < heads_.size(); ++k) {
      const int position = heads_[k];
      if (may_overtake(position) && ready(list_[at(position)], true)) return position;
    }
    return std::nullopt;
  }

  /// The action at `position` has been run, or is queued so that whatever is run later on this rank
  /// comes after it; a fused pair as a whole. @pre next() gave `position`
  constexpr void done(int position) {
    const bool paired = list_[at(position)].with_next;
    finish(position);
    if (paired) finish(position + 1);
    for (; before_ < (at_end() ? size() : statically_next()); ++before_) {
      if (list_[at(before_)].kind == ActionKind::forward) ++forwards_before_;
    }
  }

 private:
  /// How many of a chunk's micro-batches are through: also the micro-batch that is next.
  struct Progress {
    int forwards = 0;
    int input_gradients = 0;
    int weight_gradients = 0;
  };
  static constexpr int none = -1;
  static constexpr std::size_t at(int i) noexcept { return static_cast<std::size_t>(i); }

  /// Next of its sequences, with its predecessors on this rank and chunk done.
  [[nodiscard]] constexpr bool has_turn(const Action& a) const {
    const Progress& chunk = chunks_[at(a.chunk)];
    if (a.kind == ActionKind::forward) return chunk.forwards == a.microbatch;
    if (gives_input_gradient(a.kind)) {
      return chunk.input_gradients == a.microbatch && chunk.forwards > a.microbatch &&
             (a.kind == ActionKind::backward_input || chunk.weight_gradients == a.microbatch);
    }
    return chunk.weight_gradients == a.microbatch && chunk.input_gradients > a.microbatch;
  }

  [[nodiscard]] constexpr bool may_overtake(int position) const {
    const Action& a = list_[at(position)];
    if (a.with_next || list_[at(position - 1)].with_next || !has_turn(a)) return false;
    return a.kind != ActionKind::forward || forwards_ahead() < limit_;
  }

  constexpr void count(const Action& a) {
    Progress& chunk = chunks_[at(a.chunk)];
    if (a.kind == ActionKind::forward) ++chunk.forwards;
    if (gives_input_gradient(a.kind)) ++chunk.input_gradients;
    if (gives_weight_gradient(a.kind)) ++chunk.weight_gradients;
  }

  /// Marks one action done and puts its successor among the heads, which stay sorted.
  constexpr void finish(int position) {
    count(list_[at(position)]);
    if (list_[at(position)].kind == ActionKind::forward) ++forwards_done_;
    std::size_t k = 0;
    while (heads_[k] != position) ++k;
    const int follower = successor_[at(position)];
    for (; k + 1 < heads_.size() && (follower == none || heads_[k + 1] < follower); ++k) {
      heads_[k] = heads_[k + 1];
    }
    if (follower == none) {
      heads_.pop_back();
    } else {
      heads_[k] = follower;
    }
  }

  /// Finds each action's successor: the next forward, backward (whole or input half) or separate
  /// weight gradient of its chunk. The heads are the first actions not done of these sequences, so
  /// the first head is the first action not done at all.
  constexpr void link() {
    successor_.assign(list_.size(), none);
    int chunks = 0;
    for (const Action& a : list_) {
      expects(a.chunk >= 0, ErrorCode::usage,
              [&] { return sentence(to_string(a), " in a rank's order has no chunk"); });
      chunks = a.chunk < chunks ? chunks : a.chunk + 1;
    }
    chunks_.assign(at(chunks), Progress{});
    std::vector<int> last(at(3 * chunks), none);
    for (int position = 0; position < size(); ++position) {
      const Action& a = list_[at(position)];
      expects(has_turn(a), ErrorCode::usage, [&] {
        return sentence(to_string(a), " at position ", position,
                        " of a rank's compute order stands before an action of its chunk that it "
                        "has to follow");
      });
      expects(!a.with_next || position + 1 < size(), ErrorCode::usage, [&] {
        return sentence(to_string(a),
                        " at the end of a rank's compute order is paired with nothing");
      });
      count(a);
      const int kind = a.kind == ActionKind::forward ? 0 : gives_input_gradient(a.kind) ? 1 : 2;
      int& before = last[at(3 * a.chunk + kind)];
      if (before == none) {
        first_heads_.push_back(position);
      } else {
        successor_[at(before)] = position;
      }
      before = position;
    }
    heads_.reserve(first_heads_.size());
  }

  int limit_;
  std::vector<Action> list_;
  std::vector<int> successor_;    // by position
  std::vector<int> first_heads_;  // heads_ before a step
  std::vector<int> heads_;        // ascending
  std::vector<Progress> chunks_;
  int forwards_done_ = 0;
  int before_ = 0;  // all positions below are done and counted in the next member
  int forwards_before_ = 0;
};

}  // namespace mega::inline v0::dpp
