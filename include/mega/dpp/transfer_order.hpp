/// @file  Order of the transfers for links that hold both ends until a message has passed.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/verifier.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

namespace mega::inline v0::dpp {

namespace detail {

/// Compute actions of a schedule on ideal links, in units of one forward, one input gradient or one
/// weight gradient.
class UnitRun {
 public:
  /// @pre verify(schedule).ok()
  constexpr explicit UnitRun(const ScheduleView& schedule)
      : s_(schedule), ready_(index(2 * s_.stages() * s_.m), pending), start_(s_.actions.size(), 0) {
    std::vector<int> next(s_.first.begin(), s_.first.end() - 1);
    std::vector<int> clock(next.size(), 0);
    for (bool progress = true; progress;) {
      progress = false;
      for (int rank = 0; rank < s_.p; ++rank) {
        int& at = next[index(rank)];
        while (at < s_.first[index(rank + 1)]) {
          const int count = s_.actions[index(at)].with_next ? 2 : 1;
          if (!run(rank, at, count, clock[index(rank)])) break;
          at += count;
          progress = true;
        }
      }
    }
  }

  /// When the message of a channel is there to be sent.
  [[nodiscard]] constexpr int ready(int channel, int microbatch) const {
    return ready_[index(channel * s_.m + microbatch)];
  }
  /// Start of the compute action at `position` among the actions of all ranks.
  [[nodiscard]] constexpr int start(int position) const { return start_[index(position)]; }

 private:
  static constexpr int pending = -1;

  /// Runs `count` actions from `at` on that begin together, unless an input of theirs is missing.
  constexpr bool run(int rank, int at, int count, int& clock) {
    int begin = clock;
    int length = 0;
    for (int i = at; i < at + count; ++i) {
      const int input = arrival(rank, s_.actions[index(i)]);
      if (input == pending) return false;
      begin = input > begin ? input : begin;
      length += duration(s_.actions[index(i)].kind);
    }
    clock = begin + length;
    for (int i = at; i < at + count; ++i) {
      const Action& a = s_.actions[index(i)];
      start_[index(i)] = begin;
      const int stage = s_.stage(rank, a.chunk);
      if (a.kind == ActionKind::forward) ready_[index(2 * stage * s_.m + a.microbatch)] = clock;
      if (gives_input_gradient(a.kind)) {
        ready_[index((2 * stage + 1) * s_.m + a.microbatch)] = clock;
      }
    }
    return true;
  }

  [[nodiscard]] static constexpr int duration(ActionKind kind) noexcept {
    if (kind == ActionKind::backward) return 2;
    return is_compute(kind) ? 1 : 0;
  }

  /// When what the action consumes is there, or pending.
  [[nodiscard]] constexpr int arrival(int rank, const Action& a) const {
    const int stage = s_.stage(rank, a.chunk);
    if (a.kind == ActionKind::forward && stage > 0) return ready(2 * (stage - 1), a.microbatch);
    if (gives_input_gradient(a.kind) && stage < s_.stages() - 1) {
      return ready(2 * (stage + 1) + 1, a.microbatch);
    }
    return 0;
  }

  ScheduleView s_;
  std::vector<int> ready_;  // by channel and micro-batch
  std::vector<int> start_;  // by position among all actions
};

}  // namespace detail

/// Moves the sends and recvs of a lowered schedule to where they fall in one order that all ranks
/// share: that of the messages' completion if links were ideal. The compute order stays.
///
/// The earliest transfer that has not passed can then always pass, for its two ranks wait for no
/// later one. So the result is free of deadlock on links that hold both ends, grouped or one by
/// one (Transport::blocking() and Transport::rendezvous(0)), and messages between two ranks are
/// received in the order of their sending, whatever the compute order. What it costs: a recv
/// may stand before compute actions that could run without it, so a late message delays them, and
/// it takes its slot earlier: required_slots() of the result may be larger.
/// lower() alone is enough for the executor, which posts its receives ahead.
/// Throws Error(usage) if the schedule is not valid on Transport::slots().
/// @cost  one run of the lists and a sort of the messages
[[nodiscard]] constexpr Schedule order_transfers(const ScheduleView& lowered) {
  expect_valid(lowered);
  const detail::UnitRun run(lowered);
  struct Entry {
    int time = 0;
    int place = 0;  // among those of one time: transfers by message, then the rest as it stood
    Action action{};
  };
  std::vector<Entry> entries;
  Schedule made(lowered);
  std::vector<Action> list;
  for (int rank = 0; rank < lowered.p; ++rank) {
    entries.clear();
    // A transfer's time is that of its message. Everything else goes with the compute action that
    // follows it, so a transfer comes before all that starts no earlier.
    int time = std::numeric_limits<int>::max();
    for (int i = lowered.first[detail::index(rank + 1)];
         i-- > lowered.first[detail::index(rank)];) {
      const Action& a = lowered.actions[detail::index(i)];
      if (is_compute(a.kind)) time = run.start(i);
      const int channel = detail::channel_of(a.kind, lowered.stage(rank, a.chunk));
      if (channel < 0 ||
          detail::sender_of(lowered, channel) == detail::receiver_of(lowered, channel)) {
        entries.push_back({time, 2 * lowered.stages() * lowered.m + i, a});
      } else {
        entries.push_back(
            {run.ready(channel, a.microbatch), channel * lowered.m + a.microbatch, a});
      }
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return a.time != b.time ? a.time < b.time : a.place < b.place;
    });
    list.clear();
    for (const Entry& entry : entries) list.push_back(entry.action);
    made.append(list);
  }
  return made;
}

}  // namespace mega::inline v0::dpp
