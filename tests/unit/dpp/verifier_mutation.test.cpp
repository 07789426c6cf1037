/// @file  The verifier against a second judge, on random damage to valid schedules: the two must
/// agree on every one, for every transport.
#include "channel_model.hpp"
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/transfer_order.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <random>
#include <string>
#include <utility>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

using Lists = std::vector<std::vector<Action>>;

/// Numbers that do not depend on the standard library's distributions.
class Dice {
 public:
  explicit Dice(unsigned seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool one_in(int n) { return below(n) == 0; }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
};

struct Case {
  int m = 1;
  int v = 1;
  bool folded = false;  // VPlacement
  Lists lists;

  [[nodiscard]] Schedule schedule() const {
    return folded ? Schedule::from_lists(m, v, lists, VPlacement{})
                  : Schedule::from_lists(m, v, lists);
  }
};

Lists lists_of(const ScheduleView& s) {
  Lists lists;
  for (int rank = 0; rank < s.p; ++rank) {
    const auto list = s.of_rank(rank);
    lists.emplace_back(list.begin(), list.end());
  }
  return lists;
}

/// A compute order of one of the policies, small enough to be judged 60,000 times.
Case compute_order(Dice& dice) {
  const int p = dice.between(1, 5);
  Case made;
  made.m = dice.between(1, 6);
  made.v = dice.between(1, 3);
  made.folded = dice.one_in(3);
  const auto with = [&](const auto& policy) {
    made.lists = lists_of(make_schedule(policy, p, made.m, made.v));
  };
  if (made.folded) {
    const int choice = dice.below(6);
    // Right on any placement: all forwards, then all backwards.
    if (choice == 0 || (choice == 5 && made.m < 2 * p)) {
      with(GPipe{});
      return made;
    }
    made.v = 2;
    switch (choice) {
      case 1: with(ZeroBubbleV{}); break;
      case 2: with(VHalf{}); break;
      case 3: with(VMin{}); break;
      case 4: with(VSchedule{{dice.between(2, 2 * p)}}); break;
      default: with(DualPipeV{});
    }
    return made;
  }
  switch (dice.below(8)) {
    case 0: with(GPipe{}); break;
    case 1: with(ScheduleTraversal<BFC>{}); break;
    case 2: with(Interleaved{{dice.between(p, std::max(p, made.m))}}); break;
    case 3: with(ScheduleTraversal<DFC>{}); break;
    case 4: with(SplitBackward<ScheduleTraversal<DFC>, WeightsPending>{{}, {dice.below(4)}}); break;
    case 5:
      made.v = 1;
      with(ZeroBubbleH1{});
      break;
    case 6:
      made.v = 1;
      with(ZeroBubbleH2{});
      break;
    default: made.v = 1; with(OneForwardOneBackward{});
  }
  return made;
}

/// Replaces whole backwards by their halves, the second up to `delay` actions later.
void split_backwards(Case& c, int delay) {
  for (auto& list : c.lists) {
    std::vector<Action> made;
    std::vector<std::pair<std::size_t, Action>> waiting;
    const auto release = [&](std::size_t now) {
      while (!waiting.empty() && waiting.front().first <= now) {
        made.push_back(waiting.front().second);
        waiting.erase(waiting.begin());
      }
    };
    for (std::size_t i = 0; i < list.size(); ++i) {
      release(i);
      Action a = list[i];
      if (a.kind == ActionKind::backward) {
        a.kind = ActionKind::backward_input;
        Action weight = a;
        weight.kind = ActionKind::backward_weight;
        waiting.emplace_back(i + 1 + static_cast<std::size_t>(delay), weight);
      }
      made.push_back(a);
    }
    release(list.size() + static_cast<std::size_t>(delay));
    list = made;
  }
}

/// Flags neighbours that may run side by side, each with probability 1/2.
void fuse_pairs(Case& c, Dice& dice) {
  for (auto& list : c.lists) {
    for (std::size_t i = 0; i + 1 < list.size(); ++i) {
      const Action& a = list[i];
      const Action& b = list[i + 1];
      const bool opposite = (a.kind == ActionKind::forward && gives_input_gradient(b.kind)) ||
                            (b.kind == ActionKind::forward && gives_input_gradient(a.kind));
      const bool different = a.chunk != b.chunk || a.microbatch != b.microbatch;
      if (!opposite || !different || dice.one_in(2)) continue;
      list[i].with_next = true;
      ++i;
    }
  }
}

/// One piece of damage somewhere; mostly moves, which may well leave the schedule valid.
void mutate(Case& c, Dice& dice) {
  auto& list = c.lists[static_cast<std::size_t>(dice.below(static_cast<int>(c.lists.size())))];
  if (list.empty()) return;
  const int size = static_cast<int>(list.size());
  const int at = dice.below(size);
  Action& here = list[static_cast<std::size_t>(at)];
  const auto move = [&](int from, int to) {
    const Action moved = list[static_cast<std::size_t>(from)];
    list.erase(list.begin() + from);
    list.insert(list.begin() + std::clamp(to, 0, size - 1), moved);
  };
  switch (dice.below(40)) {
    case 0: list.erase(list.begin() + at); break;
    case 1: list.insert(list.begin() + dice.below(size + 1), Action(here)); break;
    case 2: here.chunk = static_cast<std::int16_t>(dice.between(-1, c.v)); break;
    case 3: here.microbatch = dice.between(-1, c.m); break;
    case 4: here.kind = static_cast<ActionKind>(dice.below(12)); break;
    case 5: {
      auto& other = c.lists[static_cast<std::size_t>(dice.below(static_cast<int>(c.lists.size())))];
      if (!other.empty()) {
        std::swap(here,
                  other[static_cast<std::size_t>(dice.below(static_cast<int>(other.size())))]);
      }
      break;
    }
    case 6: here.with_next = !here.with_next; break;
    case 7: std::swap(here, list[static_cast<std::size_t>(dice.below(size))]); break;
    case 8: {
      // Two micro-batches of one kind and chunk trade places.
      for (Action& other : list) {
        if (other.kind == here.kind && other.chunk == here.chunk &&
            other.microbatch == here.microbatch + 1) {
          std::swap(other, here);
          break;
        }
      }
      break;
    }
    case 9: move(at, dice.below(size)); break;
    default: {
      // A transfer drifts: the first one from here on.
      int from = at;
      for (int k = 0; k < size && is_compute(list[static_cast<std::size_t>(from)].kind); ++k) {
        from = (from + 1) % size;
      }
      move(from, from + dice.between(-4, 4));
    }
  }
}

/// Slot counts near those that the schedule needs.
std::vector<int> some_slots(const ScheduleView& s, Dice& dice) {
  const Verdict verdict = verify(s);
  std::vector<int> slots = verdict.ok()
                               ? (dice.one_in(2) ? required_slots(s) : verdict.peak_per_chunk)
                               : std::vector<int>(static_cast<std::size_t>(s.stages()), s.m);
  for (int& count : slots) {
    if (dice.one_in(8)) count = std::max(0, count + dice.between(-1, 2));
  }
  return slots;
}

std::string text_of(const ScheduleView& s) {
  std::string text = sentence("p ", s.p, ", m ", s.m, ", v ", s.v, "\n");
  for (int rank = 0; rank < s.p; ++rank) {
    text += sentence("rank ", rank, ":\n");
    for (const Action& a : s.of_rank(rank)) {
      text += sentence("  ", to_string(a), a.with_next ? " with the next" : "", "\n");
    }
  }
  return text;
}

bool has_pairs(const ScheduleView& s) {
  return std::any_of(s.actions.begin(), s.actions.end(),
                     [](const Action& a) { return a.with_next; });
}

/// Each rank of a deadlock waits for the next one, the last for the first.
bool is_cycle(const ScheduleView& s, const std::vector<Blocked>& cycle) {
  for (std::size_t i = 0; i < cycle.size(); ++i) {
    const Blocked& b = cycle[i];
    if (b.waits_for != cycle[(i + 1) % cycle.size()].rank) return false;
    if (s.of_rank(b.rank)[static_cast<std::size_t>(b.position)] != b.action) return false;
  }
  return !cycle.empty();
}

constexpr std::size_t faults = static_cast<std::size_t>(Fault::deadlock) + 1;

}  // namespace

TEST_CASE("dpp: 20,000 damaged schedules are judged alike by the verifier and a channel model") {
  Dice dice(20240229);
  // How often each fault was found: on slots, on rendezvous, on blocking groups.
  std::array<std::array<int, faults>, 3> found{};
  int fused = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    Case c = compute_order(dice);
    if (dice.one_in(3)) split_backwards(c, dice.below(4));
    if (dice.one_in(3)) fuse_pairs(c, dice);
    if (dice.one_in(6)) mutate(c, dice);
    const Schedule before = lower(c.schedule(), {.tied_ends = dice.one_in(2)});
    const bool shares_order = verify(before).ok() && dice.one_in(3);
    const Schedule shared = shares_order ? order_transfers(before) : before;
    const std::vector<int> slots = some_slots(shared, dice);
    c.lists = lists_of(shared);
    for (int n = dice.below(3); n > 0; --n) mutate(c, dice);

    const Schedule judged = c.schedule();
    const bool sound = mega_test::lists_are_sound(judged);
    const std::array<Transport, 3> transports{
        Transport::slots(), Transport::rendezvous(dice.below(4)), Transport::blocking()};
    for (std::size_t k = 0; k < transports.size(); ++k) {
      const std::vector<int> given = dice.one_in(k == 0 ? 4 : 2) ? std::vector<int>{} : slots;
      const Verdict verdict = verify(judged, given, transports[k]);
      using enum mega_test::Outcome;
      const mega_test::Outcome said = verdict.ok()                       ? valid
                                      : verdict.fault == Fault::deadlock ? deadlock
                                                                         : invalid;
      const mega_test::Outcome seen =
          sound ? mega_test::run_channels(judged, given, transports[k], dice.engine()) : invalid;
      ++found[k][static_cast<std::size_t>(verdict.fault)];
      if (verdict.ok() && has_pairs(judged)) ++fused;
      if (verdict.fault == Fault::deadlock) REQUIRE(is_cycle(judged, verdict.cycle));
      if (said == seen) continue;
      const std::string schedule = text_of(judged);
      CAPTURE(trial);
      CAPTURE(k);
      CAPTURE(transports[k].buffers);
      CAPTURE(schedule);
      CAPTURE(describe(verdict));
      REQUIRE(said == seen);
    }
  }
  // The two agree on something: every transport and every fault is there in numbers.
  for (std::size_t k = 0; k < found.size(); ++k) {
    for (std::size_t f = 0; f < faults; ++f) {
      CAPTURE(k);
      const std::string fault(to_string(static_cast<Fault>(f)));
      CAPTURE(fault);
      CHECK(found[k][f] >= 100);
    }
  }
  CHECK(fused >= 1000);
}
