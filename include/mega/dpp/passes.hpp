/// @file  Passes from schedule to schedule: joining and splitting backwards, and moving between
/// mega's lowered lists and those of systems that leave some actions unsaid.
///
/// A pass is mechanical, keeps the order of what it keeps, and accepts any schedule of known
/// chunks; verify() judges the result. Cost: one walk over the actions.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/schedule.hpp>

#include <cstddef>
#include <span>
#include <vector>

namespace mega::inline v0::dpp {

namespace detail {

/// Applies pass(rank, list, out) to every rank's list.
template <class Pass>
[[nodiscard]] constexpr Schedule rewrite(const ScheduleView& schedule, const Pass& pass) {
  Schedule made(schedule);
  std::vector<Action> out;
  for (int rank = 0; rank < schedule.p; ++rank) {
    out.clear();
    pass(rank, schedule.of_rank(rank), out);
    made.append(out);
  }
  return made;
}

}  // namespace detail

/// Only the compute actions: undoes lower(), and is the part of an imported schedule that any
/// runtime can lower anew.
[[nodiscard]] constexpr Schedule compute_order(const ScheduleView& schedule) {
  return detail::rewrite(schedule, [](int, std::span<const Action> list, std::vector<Action>& out) {
    for (const Action& a : list) {
      if (is_compute(a.kind)) out.push_back(a);
    }
  });
}

/// Joins every backward_input with the backward_weight of the same chunk and micro-batch that
/// stands right after it into one backward, which is cheaper where nothing is gained by the split.
/// Halves of a pair stay as they are. A joined backward may overtake an earlier micro-batch's
/// backward_weight of its chunk that stands later in the list; verify() refuses that.
[[nodiscard]] constexpr Schedule merge_backward(const ScheduleView& schedule) {
  return detail::rewrite(schedule, [](int, std::span<const Action> list, std::vector<Action>& out) {
    bool paired = false;  // the action is the second half of a pair
    for (std::size_t i = 0; i < list.size(); ++i) {
      Action a = list[i];
      if (a.kind == ActionKind::backward_input && !a.with_next && !paired && i + 1 < list.size()) {
        Action sequel = make_action(ActionKind::backward_weight, a.chunk, a.microbatch);
        if (list[i + 1] == sequel) {
          a.kind = ActionKind::backward;
          ++i;
        }
      }
      if (is_compute(a.kind)) paired = a.with_next;
      out.push_back(a);
    }
  });
}

/// Splits every backward into backward_input and backward_weight, one right after the other: the
/// inverse of merge_backward(). Halves of a pair stay whole.
[[nodiscard]] constexpr Schedule split_backward(const ScheduleView& schedule) {
  return detail::rewrite(schedule, [](int, std::span<const Action> list, std::vector<Action>& out) {
    bool paired = false;
    for (const Action& a : list) {
      if (a.kind == ActionKind::backward && !a.with_next && !paired) {
        out.push_back(make_action(ActionKind::backward_input, a.chunk, a.microbatch));
        out.push_back(make_action(ActionKind::backward_weight, a.chunk, a.microbatch));
      } else {
        out.push_back(a);
      }
      if (is_compute(a.kind)) paired = a.with_next;
    }
  });
}

/// Drops what PyTorch's runtime does without being told, and has no word for: the loss, the
/// hand-over between two stages of one rank, and the sum over tied ends (which PyTorch leaves to
/// the user). What is left of a lowered schedule can run there.
[[nodiscard]] constexpr Schedule strip_implicit(const ScheduleView& schedule) {
  using enum ActionKind;
  return detail::rewrite(
      schedule, [&](int rank, std::span<const Action> list, std::vector<Action>& out) {
        const auto is_here = [&](int stage) {
          return 0 <= stage && stage < schedule.stages() && schedule.rank_of(stage) == rank;
        };
        for (const Action& a : list) {
          const int stage = schedule.stage(rank, a.chunk);
          const bool hands_over =
              ((a.kind == send_forward || a.kind == recv_backward) && is_here(stage + 1)) ||
              ((a.kind == recv_forward || a.kind == send_backward) && is_here(stage - 1));
          if (!hands_over && a.kind != loss && a.kind != tied_reduce) out.push_back(a);
        }
      });
}

/// Adds to a schedule with transfers what strip_implicit() drops except tied_reduce, and the reduce
/// of every chunk that has none, so that verify() can judge the order of an imported schedule's
/// transfers. The places are those that lower() chooses.
/// @pre  none of the loss and same-rank hand-overs is there yet
[[nodiscard]] constexpr Schedule insert_implicit(const ScheduleView& schedule) {
  using enum ActionKind;
  const int last_stage = schedule.stages() - 1;
  return detail::rewrite(
      schedule, [&](int rank, std::span<const Action> list, std::vector<Action>& out) {
        const auto is_here = [&](int stage) { return schedule.rank_of(stage) == rank; };
        std::vector<int> gradients_left(static_cast<std::size_t>(schedule.v), 0);
        for (const Action& a : list) {
          int& left = gradients_left[static_cast<std::size_t>(a.chunk)];
          if (gives_weight_gradient(a.kind)) ++left;
          if (a.kind == reduce) left = -1;  // never counts down to 0
        }
        std::size_t end = 0;
        for (std::size_t begin = 0; begin < list.size(); begin = end) {
          // A pair is one unit: its inputs arrive before it, its results leave after it.
          end = begin + 1;
          if (list[begin].with_next) {
            while (end < list.size() && !is_compute(list[end++].kind)) {
            }
          }
          const auto unit = list.subspan(begin, end - begin);
          for (const Action& a : unit) {
            const int stage = schedule.stage(rank, a.chunk);
            const auto put = [&](ActionKind kind) {
              out.push_back(make_action(kind, a.chunk, a.microbatch));
            };
            if (a.kind == forward && stage > 0 && is_here(stage - 1)) put(recv_forward);
            if (!gives_input_gradient(a.kind)) continue;
            if (stage == last_stage) {
              put(loss);
            } else if (is_here(stage + 1)) {
              put(recv_backward);
            }
          }
          out.insert(out.end(), unit.begin(), unit.end());
          for (const Action& a : unit) {
            const int stage = schedule.stage(rank, a.chunk);
            const auto put = [&](ActionKind kind) {
              out.push_back(make_action(kind, a.chunk, a.microbatch));
            };
            if (a.kind == forward && stage < last_stage && is_here(stage + 1)) put(send_forward);
            if (gives_input_gradient(a.kind) && stage > 0 && is_here(stage - 1)) {
              put(send_backward);
            }
            if (gives_weight_gradient(a.kind) &&
                --gradients_left[static_cast<std::size_t>(a.chunk)] == 0) {
              out.push_back(make_action(reduce, a.chunk, all_microbatches));
            }
          }
        }
      });
}

}  // namespace mega::inline v0::dpp
