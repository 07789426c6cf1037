/// @file  Tests of bounded look-ahead: its rule against a plain restatement, and its laws (static
/// order at L = 0, order inside sequences, peak, progress) under arbitrary arrivals.
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/dpp/look_ahead.hpp>
#include <mega/dpp/schedule.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

using enum ActionKind;

/// Random choices of a test, in a fixed sequence.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : key_{.seed = seed, .use = RandomUse::test} {}
  int below(int n) { return static_cast<int>(key_.bits(count_++) % static_cast<unsigned>(n)); }
  bool chance(int percent) { return below(100) < percent; }

 private:
  RandomKey key_;
  Index count_ = 0;
};

/// Splits the backwards of every third micro-batch (all: of each) and puts the weight gradient
/// `delay` actions later, but before the next backward that gives one itself.
std::vector<Action> split_backwards(std::span<const Action> list, int delay, bool all) {
  std::vector<Action> out;
  std::vector<std::pair<int, Action>> waiting;
  for (const Action& a : list) {
    const bool split = a.kind == backward && (all || a.microbatch % 3 == 0);
    for (std::size_t k = 0; k < waiting.size();) {
      const bool due = --waiting[k].first <= 0;
      if (due || (a.kind == backward && !split && waiting[k].second.chunk == a.chunk)) {
        out.push_back(waiting[k].second);
        waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(k));
      } else {
        ++k;
      }
    }
    if (!split) {
      out.push_back(a);
      continue;
    }
    out.push_back(make_action(backward_input, a.chunk, a.microbatch));
    waiting.push_back({delay, make_action(backward_weight, a.chunk, a.microbatch)});
  }
  for (const auto& [left, a] : waiting) out.push_back(a);
  return out;
}

/// Fuses each forward with the backward right behind it, where they are of different micro-batches.
std::vector<Action> fuse(std::span<const Action> list) {
  std::vector<Action> out(list.begin(), list.end());
  for (std::size_t i = 0; i + 1 < out.size(); ++i) {
    if (out[i].kind == forward && out[i + 1].kind == backward &&
        (out[i].microbatch != out[i + 1].microbatch || out[i].chunk != out[i + 1].chunk)) {
      out[i].with_next = true;
      ++i;
    }
  }
  return out;
}

std::vector<std::vector<Action>> lists_of(const Schedule& s) {
  std::vector<std::vector<Action>> lists;
  for (int rank = 0; rank < s.view().p; ++rank) {
    lists.emplace_back(s.of_rank(rank).begin(), s.of_rank(rank).end());
  }
  return lists;
}

/// Orders of several kinds: whole, split, partly split and fused backwards.
std::vector<Schedule> various_orders() {
  std::vector<Schedule> found;
  for (const auto& [p, m, v] :
       std::vector<std::array<int, 3>>{{1, 1, 1}, {1, 5, 2}, {2, 3, 1}, {3, 7, 2}, {4, 8, 3}}) {
    const Schedule base = v == 1 ? make_schedule(OneForwardOneBackward{}, p, m, v)
                                 : make_schedule(ScheduleTraversal<DFC>{}, p, m, v);
    found.push_back(base);
    found.push_back(make_schedule(GPipe{}, p, m, v));
    auto all = lists_of(base), some = all, fused = all;
    for (auto& list : all) list = split_backwards(list, 3, true);
    for (auto& list : some) list = split_backwards(list, 2, false);
    for (auto& list : fused) list = fuse(list);
    found.push_back(Schedule::from_lists(m, v, all));
    found.push_back(Schedule::from_lists(m, v, some));
    found.push_back(Schedule::from_lists(m, v, fused));
  }
  return found;
}

/// The rule of the header, restated over flags and a full scan.
class PlainRule {
 public:
  PlainRule(std::vector<Action> list, int limit)
      : list_(std::move(list)), limit_(limit), done_(list_.size(), false) {}

  template <class Ready>
  std::optional<int> next(const Ready& ready) const {
    std::size_t i = 0;
    while (i < list_.size() && done_[i]) ++i;
    if (i == list_.size()) return std::nullopt;
    if (ready(list_[i], false) && (!list_[i].with_next || ready(list_[i + 1], false))) {
      return static_cast<int>(i);
    }
    int ahead = 0;
    for (std::size_t j = i + 1; j < list_.size(); ++j) {
      if (done_[j] && list_[j].kind == forward) ++ahead;
    }
    for (std::size_t j = i + 1; limit_ > 0 && j < list_.size(); ++j) {
      const bool in_pair = list_[j].with_next || list_[j - 1].with_next;
      if (done_[j] || in_pair || !predecessors_done(j)) continue;
      if (list_[j].kind == forward && ahead >= limit_) continue;
      if (ready(list_[j], true)) return static_cast<int>(j);
    }
    return std::nullopt;
  }
  void done(int position) {
    const auto j = static_cast<std::size_t>(position);
    done_[j] = true;
    if (list_[j].with_next) done_[j + 1] = true;
  }

 private:
  bool predecessors_done(std::size_t j) const {
    const Action& a = list_[j];
    for (std::size_t k = 0; k < list_.size(); ++k) {
      const Action& b = list_[k];
      if (done_[k] || k == j || b.chunk != a.chunk) continue;
      const bool same_sequence = (a.kind == forward && b.kind == forward) ||
                                 (gives_input_gradient(a.kind) && gives_input_gradient(b.kind)) ||
                                 (gives_weight_gradient(a.kind) && gives_weight_gradient(b.kind));
      if (same_sequence && b.microbatch < a.microbatch) return false;
      if (b.microbatch != a.microbatch) continue;
      if (a.kind != forward && b.kind == forward) return false;
      if (a.kind == backward_weight && b.kind == backward_input) return false;
    }
    return true;
  }

  std::vector<Action> list_;
  int limit_;
  std::vector<bool> done_;
};

int peak_of(std::span<const Action> list) {
  int live = 0, peak = 0;
  for (const Action& a : list) {
    if (a.kind == forward) peak = std::max(peak, ++live);
    if (gives_weight_gradient(a.kind)) --live;
  }
  return peak;
}

/// All ranks of a pipeline, each with its order, and what has been computed so far.
class Pipeline {
 public:
  Pipeline(const ScheduleView& s, int limit) : s_(s) {
    for (int rank = 0; rank < s.p; ++rank) orders_.emplace_back(s.of_rank(rank), limit);
    forward_done_.assign(static_cast<std::size_t>(s.stages() * s.m), false);
    gradient_done_ = forward_done_;
    ran.resize(static_cast<std::size_t>(s.p));
  }

  LookAheadOrder& order(int rank) { return orders_[static_cast<std::size_t>(rank)]; }
  bool input_is_here(int rank, const Action& a) const {
    const int stage = s_.stage(rank, a.chunk);
    if (a.kind == forward) return stage == 0 || forward_done_[at(stage - 1, a)];
    if (a.kind == backward_weight) return true;
    return stage == s_.stages() - 1 || gradient_done_[at(stage + 1, a)];
  }
  void run(int rank, int position) {
    const Action a = order(rank)[position];
    finish(rank, a);
    if (a.with_next) finish(rank, order(rank)[position + 1]);
    order(rank).done(position);
  }
  bool at_end() const {
    return std::all_of(orders_.begin(), orders_.end(), [](const auto& o) { return o.at_end(); });
  }

  std::vector<std::vector<Action>> ran;

 private:
  std::size_t at(int stage, const Action& a) const {
    return static_cast<std::size_t>(stage * s_.m + a.microbatch);
  }
  void finish(int rank, const Action& a) {
    if (a.kind == forward) forward_done_[at(s_.stage(rank, a.chunk), a)] = true;
    if (gives_input_gradient(a.kind)) gradient_done_[at(s_.stage(rank, a.chunk), a)] = true;
    ran[static_cast<std::size_t>(rank)].push_back(a);
  }

  ScheduleView s_;
  std::vector<LookAheadOrder> orders_;
  std::vector<bool> forward_done_, gradient_done_;
};

}  // namespace

TEST_CASE("dpp: look-ahead takes what a full scan of the order by the rule takes") {
  Dice dice(1);
  int overtakes = 0;
  for (const Schedule& s : various_orders()) {
    for (const int limit : {0, 1, 2, 5}) {
      for (int rank = 0; rank < s.view().p; ++rank) {
        LookAheadOrder order(s.of_rank(rank), limit);
        PlainRule plain({s.of_rank(rank).begin(), s.of_rank(rank).end()}, limit);
        for (int tries = 0; !order.at_end() && tries < 10000; ++tries) {
          std::map<int, bool> drawn;  // one answer an action and turn, from no model of arrivals
          for (int i = 0; i < order.size(); ++i) drawn[i] = dice.chance(30);
          const auto ready = [&](const Action& a, bool ahead) {
            for (int i = 0; i < order.size(); ++i) {
              if (order[i] == a) return drawn[i] && (!ahead || i % 5 != 0);
            }
            return false;
          };
          const auto chosen = order.next(ready);
          REQUIRE(chosen == plain.next(ready));
          if (!chosen) continue;
          if (*chosen != order.statically_next()) ++overtakes;
          order.done(*chosen);
          plain.done(*chosen);
          REQUIRE(order.forwards_ahead() <= limit);
        }
        REQUIRE(order.at_end());
      }
    }
  }
  CHECK(overtakes > 500);
}

TEST_CASE("dpp: look-ahead laws hold for every order of arrivals") {
  Dice dice(2);
  int overtakes = 0, raised = 0;
  for (const Schedule& s : various_orders()) {
    const ScheduleView view = s;
    for (const int limit : {0, 1, 3, 1000}) {
      for (const int percent : {5, 50, 100}) {
        Pipeline pipeline(view, limit);
        // Progress: whatever else is withheld, some rank's static action has its input.
        while (!pipeline.at_end()) {
          const int rank = dice.below(view.p);
          LookAheadOrder& order = pipeline.order(rank);
          const auto chosen = order.next([&](const Action& a, bool ahead) {
            return pipeline.input_is_here(rank, a) && (!ahead || dice.chance(percent));
          });
          bool any = chosen.has_value();
          for (int r = 0; r < view.p && !any; ++r) {
            const LookAheadOrder& other = pipeline.order(r);
            any = !other.at_end() && other
                                         .next([&](const Action& a, bool ahead) {
                                           return !ahead && pipeline.input_is_here(r, a);
                                         })
                                         .has_value();
          }
          REQUIRE(any);
          if (!chosen) continue;
          if (*chosen != order.statically_next()) ++overtakes;
          REQUIRE(pipeline.input_is_here(rank, order[*chosen]));
          pipeline.run(rank, *chosen);
        }
        for (int rank = 0; rank < view.p; ++rank) {
          const auto list = view.of_rank(rank);
          const auto& ran = pipeline.ran[static_cast<std::size_t>(rank)];
          const int peak = peak_of(ran);
          CHECK(peak <= peak_of(list) + limit);
          if (peak > peak_of(list)) ++raised;
          CHECK(ran.size() == list.size());
          CHECK(std::is_permutation(ran.begin(), ran.end(), list.begin(), list.end()));
          if (limit == 0) CHECK(std::equal(ran.begin(), ran.end(), list.begin(), list.end()));
          for (int chunk = 0; chunk < view.v; ++chunk) {
            int forwards = 0, inputs = 0, weights = 0;
            for (const Action& a : ran) {
              if (a.chunk != chunk) continue;
              if (a.kind == forward) CHECK(a.microbatch == forwards++);
              if (gives_input_gradient(a.kind)) {
                CHECK(a.microbatch == inputs++);
                CHECK(inputs <= forwards);
              }
              if (gives_weight_gradient(a.kind)) {
                CHECK(a.microbatch == weights++);
                CHECK(weights <= inputs);
              }
            }
            CHECK(weights == view.m);
          }
        }
      }
    }
  }
  CHECK(overtakes > 500);
  CHECK(raised > 0);  // the bound is one that look-ahead does come near
}

TEST_CASE("dpp: the peak bound of look-ahead is reached") {
  // 1F1B on the last of two ranks: forward, backward, forward, backward; its peak is 1.
  LookAheadOrder order(make_schedule(OneForwardOneBackward{}, 2, 6, 1).of_rank(1), 3);
  const auto no_gradient_yet = [](const Action& a, bool) { return a.kind == forward; };
  for (const int position : {0, 2, 4, 6}) {
    REQUIRE(order.next(no_gradient_yet) == position);
    order.done(position);
  }
  CHECK(order.forwards_ahead() == 3);
  CHECK_FALSE(order.next(no_gradient_yet).has_value());
  CHECK(order.statically_next() == 1);
  order.done(1);
  CHECK(order.forwards_ahead() == 2);  // position 3 is next, so the forward at 2 is no longer ahead
  CHECK(order.next(no_gradient_yet) == 8);
}

TEST_CASE("dpp: look-ahead asks for more where an action is taken out of turn") {
  LookAheadOrder order(make_schedule(OneForwardOneBackward{}, 2, 3, 1).of_rank(0), 1);
  // 0: F0, 1: F1, 2: B0, 3: F2, 4: B1, 5: B2.
  order.done(0);
  order.done(1);
  const auto blocked = [](const Action& a, bool ahead) { return a.kind == forward && !ahead; };
  CHECK_FALSE(order.next(blocked).has_value());
  const auto free = [](const Action& a, bool) { return a.kind == forward; };
  CHECK(order.next(free) == 3);
}

TEST_CASE("dpp: a fused pair keeps its place and is one step") {
  std::vector<Action> list{{forward, false, 0, 0},  {forward, true, 0, 1},
                           {backward, false, 0, 0}, {forward, false, 0, 2},
                           {backward, false, 0, 1}, {backward, false, 0, 2}};
  LookAheadOrder order(list, 2);
  const auto all = [](const Action&, bool) { return true; };
  const auto no_gradient = [](const Action& a, bool) { return a.kind == forward; };
  REQUIRE(order.next(all) == 0);
  order.done(0);
  CHECK_FALSE(order.next(no_gradient).has_value());  // neither half alone, nor F2 before F1
  REQUIRE(order.next(all) == 1);
  order.done(1);
  CHECK(order.statically_next() == 3);
  REQUIRE(order.next(all) == 3);
}

TEST_CASE("dpp: look-ahead begins again after restart and leaves transfers out") {
  const Schedule lowered = lower(make_schedule(ScheduleTraversal<DFC>{}, 2, 3, 2));
  LookAheadOrder order(lowered.of_rank(1), 2);
  CHECK(order.size() == 12);
  const auto all = [](const Action&, bool) { return true; };
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < order.size(); ++i) {
      REQUIRE(order.next(all) == i);
      order.done(i);
      CHECK(order.forwards_ahead() == 0);
    }
    CHECK(order.at_end());
    CHECK_FALSE(order.next(all).has_value());
    order.restart();
    CHECK(order.statically_next() == 0);
    CHECK(order.forwards_ahead() == 0);
  }
}

TEST_CASE("dpp: look-ahead refuses lists that break a chunk's order, and a negative limit") {
  const std::vector<Action> skips{make_action(forward, 0, 0), make_action(forward, 0, 2)};
  CHECK_THROWS_WITH_AS((void)LookAheadOrder(skips, 1),
                       "forward of chunk 0, micro-batch 2 at position 1 of a rank's compute order "
                       "stands before an action of its chunk that it has to follow",
                       Error);
  const std::vector<Action> early{make_action(backward, 0, 0), make_action(forward, 0, 0)};
  CHECK_THROWS_AS((void)LookAheadOrder(early, 1), Error);
  const std::vector<Action> alone{{forward, true, 0, 0}};
  CHECK_THROWS_AS((void)LookAheadOrder(alone, 1), Error);
  const std::vector<Action> nowhere{make_action(forward, -1, 0)};
  CHECK_THROWS_AS((void)LookAheadOrder(nowhere, 1), Error);
  CHECK_THROWS_WITH_AS((void)LookAheadOrder(std::vector<Action>{}, -1),
                       "look-ahead of -1 forwards: it must be 0 (the static order) or more", Error);
  CHECK(LookAheadOrder(std::vector<Action>{}, 1).at_end());
}

static_assert([] {
  LookAheadOrder order(make_schedule(OneForwardOneBackward{}, 2, 2, 1).of_rank(1), 1);
  order.done(0);
  return order.next([](const Action& a, bool) { return a.kind == forward; }) == 2;
}());
