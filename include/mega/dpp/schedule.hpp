/// @file  The pipeline schedule of one step: a list of actions for each rank, and the pass that
/// adds transfers, loss and gradient reductions to the compute order.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/traversal.hpp>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

/// A schedule in arrays that someone else owns; what the verifier and the simulator read.
struct ScheduleView {
  int p = 1;                        ///< ranks
  int m = 1;                        ///< micro-batches
  int v = 1;                        ///< chunks a rank
  std::span<const int> stage_of;    ///< [p*v] stage of the place rank*v + chunk
  std::span<const int> place_of;    ///< [p*v] place of the stage
  std::span<const Action> actions;  ///< the ranks' lists, one after the other
  std::span<const int> first;       ///< [p+1] where each rank's list begins in `actions`

  [[nodiscard]] constexpr int stages() const noexcept { return p * v; }
  [[nodiscard]] constexpr int stage(int rank, int chunk) const noexcept {
    return stage_of[static_cast<std::size_t>(rank * v + chunk)];
  }
  [[nodiscard]] constexpr int rank_of(int stage) const noexcept {
    return place_of[static_cast<std::size_t>(stage)] / v;
  }
  [[nodiscard]] constexpr int chunk_of(int stage) const noexcept {
    return place_of[static_cast<std::size_t>(stage)] % v;
  }
  [[nodiscard]] constexpr std::span<const Action> of_rank(int rank) const noexcept {
    const auto r = static_cast<std::size_t>(rank);
    return actions.subspan(static_cast<std::size_t>(first[r]),
                           static_cast<std::size_t>(first[r + 1] - first[r]));
  }
};

/// Owns the lists of all ranks. Built by make_schedule, from_lists or lower; then constant.
class Schedule {
 public:
  /// @param lists  one list for each of the p ranks, in rank order
  template <placement Placement = LoopPlacement>
  [[nodiscard]] static constexpr Schedule from_lists(int m, int v,
                                                     const std::vector<std::vector<Action>>& lists,
                                                     Placement place = {}) {
    Schedule made(static_cast<int>(lists.size()), m, v, place);
    for (const auto& list : lists) made.append({list.data(), list.size()});
    return made;
  }

  /// No rank has a list yet: append() gives them theirs in rank order.
  template <placement Placement>
  constexpr Schedule(int p, int m, int v, Placement place) : p_(p), m_(m), v_(v) {
    detail::expect_pipeline(0, p, m, v);
    const auto stages = static_cast<std::size_t>(p * v);
    constexpr int nowhere = -1;
    stage_of_.assign(stages, 0);
    place_of_.assign(stages, nowhere);
    for (int rank = 0; rank < p; ++rank) {
      for (int chunk = 0; chunk < v; ++chunk) {
        const int stage = place.stage(rank, chunk, p, v);
        const bool is_new =
            0 <= stage && stage < p * v && place_of_[static_cast<std::size_t>(stage)] == nowhere;
        expects(is_new, ErrorCode::logic, [&] {
          return sentence("the placement ", Placement::name, " puts stage ", stage, " on chunk ",
                          chunk, " of rank ", rank, "; each of 0..", p * v - 1, " has one place");
        });
        stage_of_[static_cast<std::size_t>(rank * v + chunk)] = stage;
        place_of_[static_cast<std::size_t>(stage)] = rank * v + chunk;
      }
    }
    first_.push_back(0);
  }

  /// An empty schedule of the same pipeline as `other`.
  constexpr explicit Schedule(const ScheduleView& other)
      : p_(other.p),
        m_(other.m),
        v_(other.v),
        stage_of_(other.stage_of.data(), other.stage_of.data() + other.stage_of.size()),
        place_of_(other.place_of.data(), other.place_of.data() + other.place_of.size()) {
    first_.push_back(0);
  }

  /// Takes memory for that many actions of all ranks at once, which counts for large pipelines.
  constexpr void reserve(std::size_t actions) { actions_.reserve(actions); }

  /// The list of the next rank. @pre fewer than p ranks have theirs
  constexpr void append(std::span<const Action> list) {
    expects(first_.size() <= static_cast<std::size_t>(p_), ErrorCode::logic,
            [&] { return sentence("all ", p_, " ranks of the schedule have their list already"); });
    for (const Action& a : list) actions_.push_back(a);
    first_.push_back(static_cast<int>(actions_.size()));
  }

  [[nodiscard]] constexpr ScheduleView view() const noexcept {
    return {p_,
            m_,
            v_,
            {stage_of_.data(), stage_of_.size()},
            {place_of_.data(), place_of_.size()},
            {actions_.data(), actions_.size()},
            {first_.data(), first_.size()}};
  }
  // NOLINTNEXTLINE(google-explicit-constructor): a Schedule is read wherever a view is.
  constexpr operator ScheduleView() const noexcept { return view(); }

  [[nodiscard]] constexpr std::span<const Action> of_rank(int rank) const noexcept {
    return view().of_rank(rank);
  }

 private:
  int p_;
  int m_;
  int v_;
  std::vector<int> stage_of_;
  std::vector<int> place_of_;
  std::vector<Action> actions_;
  std::vector<int> first_;
};

/// The compute actions of all ranks in the policy's order; lower() makes them executable.
/// @param place  where the policy brings no placement of its own
/// Throws Error(usage) where the policy refuses p, m or v, Error(logic) where its length(), order()
/// or orders() contradict each other.
template <traversal_policy Policy, placement Placement = LoopPlacement>
[[nodiscard]] constexpr Schedule make_schedule(const Policy& policy, int p, int m, int v,
                                               Placement place = {}) {
  Schedule made(p, m, v, placement_of(policy, place));
  if constexpr (orders_all_ranks<Policy>) {
    const std::vector<std::vector<Action>> lists = policy.orders(p, m, v);
    expects(lists.size() == static_cast<std::size_t>(p), ErrorCode::logic, [&] {
      return sentence("orders() of the policy ", Policy::name, " gives ", lists.size(),
                      " lists for ", p, " ranks");
    });
    made.reserve(lists.size() * lists.front().size());
    for (const auto& list : lists) made.append(list);
    return made;
  }
  const int length = policy.length(p, m, v);
  expects(length >= 0, ErrorCode::logic, [&] {
    return sentence("length() of the policy ", Policy::name, " is ", length, " for p ", p, ", m ",
                    m, ", v ", v, "; it must be at least 0");
  });
  std::vector<Action> list(static_cast<std::size_t>(length), Action{});
  made.reserve(static_cast<std::size_t>(p) * list.size());
  for (int rank = 0; rank < p; ++rank) {
    const int count = policy.order(rank, p, m, v, ActionSpan({list.data(), list.size()}));
    expects(0 <= count && count <= length, ErrorCode::logic, [&] {
      return sentence("order() of the policy ", Policy::name, " returns ", count, " for rank ",
                      rank, " of p ", p, ", m ", m, ", v ", v, "; its length() allows 0..", length);
    });
    made.append({list.data(), static_cast<std::size_t>(count)});
  }
  return made;
}

struct Lowering {
  /// The first and the last stage share parameters (token embedding and output head).
  bool tied_ends = false;
};

/// Adds to a compute order, rank by rank:
///   recv_*       right before the action that consumes what arrives
///   loss         right before the last stage's backward of the micro-batch
///   send_*       right after the action that produces what leaves, on same-rank hops too
///   reduce       right after the chunk's last weight gradient
///   tied_reduce  with tied_ends, on the ranks of the first and the last stage: after all their
///                backwards, because the two ranks wait for each other there; the reduce of the
///                tied chunks comes after it, since data-parallel sums take the tied sum as input
/// Nothing comes between the halves of a fused pair: what either consumes arrives before the pair,
/// what either produces leaves behind it.
/// Of a send the chunk is the producing one, of a recv the consuming one.
/// The pass is mechanical and accepts any order; verify() judges the result.
[[nodiscard]] constexpr Schedule lower(const ScheduleView& compute, Lowering options = {}) {
  using enum ActionKind;
  Schedule made(compute);
  std::size_t most = static_cast<std::size_t>(compute.p) * static_cast<std::size_t>(compute.v + 1);
  for (const Action& a : compute.actions) {
    most += a.kind == forward || gives_input_gradient(a.kind) ? 3U : 1U;
  }
  made.reserve(most);
  const int last_stage = compute.stages() - 1;
  std::vector<Action> list;
  std::vector<int> gradients_left(static_cast<std::size_t>(compute.v), 0);
  const auto computes = [&](const Action& a) {
    return is_compute(a.kind) && 0 <= a.chunk && a.chunk < compute.v;
  };
  for (int rank = 0; rank < compute.p; ++rank) {
    list.clear();
    for (int& left : gradients_left) left = 0;
    for (const Action& a : compute.of_rank(rank)) {
      if (computes(a) && gives_weight_gradient(a.kind)) {
        ++gradients_left[static_cast<std::size_t>(a.chunk)];
      }
    }
    const auto is_tied = [&](int chunk) {
      const int stage = compute.stage(rank, chunk);
      return options.tied_ends && (stage == 0 || stage == last_stage);
    };
    const auto put = [&](ActionKind kind, const Action& of) {
      list.push_back(make_action(kind, of.chunk, of.microbatch));
    };
    const auto put_inputs = [&](const Action& a) {
      if (!computes(a)) return;
      const int stage = compute.stage(rank, a.chunk);
      if (a.kind == forward && stage > 0) put(recv_forward, a);
      if (gives_input_gradient(a.kind)) put(stage == last_stage ? loss : recv_backward, a);
    };
    const auto put_outputs = [&](const Action& a) {
      if (!computes(a)) return;
      const int stage = compute.stage(rank, a.chunk);
      if (a.kind == forward && stage < last_stage) put(send_forward, a);
      if (gives_input_gradient(a.kind) && stage > 0) put(send_backward, a);
      if (gives_weight_gradient(a.kind) &&
          --gradients_left[static_cast<std::size_t>(a.chunk)] == 0 && !is_tied(a.chunk)) {
        list.push_back(make_action(reduce, a.chunk, all_microbatches));
      }
    };
    const auto order = compute.of_rank(rank);
    const Action* const end = order.data() + order.size();
    for (const Action* at = order.data(); at != end;) {
      const Action& a = *at++;
      const Action* partner = a.with_next && at != end ? at++ : nullptr;
      put_inputs(a);
      if (partner != nullptr) put_inputs(*partner);
      list.push_back(a);
      if (partner != nullptr) list.push_back(*partner);
      put_outputs(a);
      if (partner != nullptr) put_outputs(*partner);
    }
    bool summed = false;
    for (int chunk = 0; chunk < compute.v; ++chunk) {
      if (!is_tied(chunk)) continue;
      if (!summed) list.push_back(make_action(tied_reduce, chunk, all_microbatches));
      summed = true;
    }
    for (int chunk = 0; chunk < compute.v; ++chunk) {
      if (is_tied(chunk)) list.push_back(make_action(reduce, chunk, all_microbatches));
    }
    made.append({list.data(), list.size()});
  }
  return made;
}

}  // namespace mega::inline v0::dpp
