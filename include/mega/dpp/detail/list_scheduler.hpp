/// @file  Orders made in the order of time, by rules of what a free rank does next.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/detail/order_words.hpp>
#include <mega/dpp/detail/pipeline.hpp>
#include <mega/dpp/simulator.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp::detail {

/// The rules of one run of the list scheduler.
struct ListRules {
  std::vector<double> lead;  ///< [p*v] by place: forwards that may wait for their I, >= 1
  double patience = 0;       ///< W runs if the next arrival is further than this part of its time
  bool alternate = false;    ///< F and I in turn where both are there, otherwise I first
  bool deep = true;  ///< of two chunks the later comes first, otherwise the older micro-batch
  friend bool operator==(const ListRules&, const ListRules&) = default;
};

/// Builds words in the order of time: a rank that is free picks an action whose input is there.
/// A forward is let in only if, with what it takes, the micro-batches before it can still be
/// finished one after the other within the cap (the banker's rule): no cap deadlocks, whatever the
/// placement. Nor does that of a chunk, which holds older micro-batches only.
class ListScheduler {
 public:
  ListScheduler(const Pipeline& pipeline, const ListRules& rules)
      : pipe_(pipeline),
        rules_(rules),
        forward_at_(Pipeline::at(pipeline.p * pipeline.v) * Pipeline::at(pipeline.m)),
        gradient_at_(forward_at_.size()),
        places_(Pipeline::at(pipeline.p * pipeline.v)),
        ranks_(Pipeline::at(pipeline.p)),
        held_(Pipeline::at(pipeline.p) * Pipeline::at(pipeline.m), 0.0),
        words_(Pipeline::at(pipeline.p)) {}

  /// No words where the order would exceed the cutoff.
  Words run(const Cutoff& cutoff = {}) {
    cutoff_ = cutoff;
    for (int i = 0; i < pipe_.m; ++i) forward_at_[pipe_.slot(0, i)] = {0, 0};
    for (int rank = 0; rank < pipe_.p; ++rank) {
      words_[Pipeline::at(rank)].reserve(Pipeline::at(3 * pipe_.m * pipe_.v));
      ranks_[Pipeline::at(rank)].left = pipe_.work[Pipeline::at(rank)];
      events_.push({0.0, rank});
    }
    while (!events_.empty()) {
      const auto [now, rank] = events_.top();
      events_.pop();
      now_ = now;
      if (ranks_[Pipeline::at(rank)].free_at <= now) start_one(rank, now);
      if (is_no_use_) return {};
    }
    return std::move(words_);
  }

 private:
  struct Place {
    int forward = 0;  // micro-batches whose action has begun
    int input = 0;
    int weight = 0;
  };
  /// When an input is there: by the rules, and where each action begins as soon as its list allows,
  /// which is what the order will take.
  struct Arrival {
    double at = never;
    double soonest = 0;
  };
  struct RankState {
    double free_at = 0;
    double memory = 0;
    double begin = never;  // of its first action, as are those below, when the order alone decides
    double end = 0;        // of its last one
    Pipeline::Work left;
    bool forward_next = false;  // the last action but W was an input gradient
  };
  Place& place(int rank, int chunk) { return places_[Pipeline::at(rank * pipe_.v + chunk)]; }

  /// True if the rank may begin the next forward of the chunk.
  bool admits(int rank, int chunk) {
    const Place& own = place(rank, chunk);
    if (own.forward - own.input >= rules_.lead[Pipeline::at(rank * pipe_.v + chunk)]) return false;
    if (own.forward - own.weight >= pipe_.chunk_caps[Pipeline::at(rank * pipe_.v + chunk)])
      return false;
    const double cap = pipe_.caps[Pipeline::at(rank)] + memory_slack;
    const double memory = ranks_[Pipeline::at(rank)].memory;
    const double size = pipe_.sizes[Pipeline::at(pipe_.stage(rank, chunk))];
    if (memory + size > cap) return false;
    // Whatever the other chunks still take.
    if (memory + pipe_.micro_sizes[Pipeline::at(rank)] <= cap) return true;
    int oldest = own.forward;
    int newest = own.forward;
    for (int c = 0; c < pipe_.v; ++c) {
      oldest = std::min(oldest, place(rank, c).forward);
      newest = std::max(newest, place(rank, c).forward);
    }
    double later = size;  // what micro-batches from k on hold, with the new forward
    for (int k = std::min(newest, pipe_.m - 1); k >= oldest; --k) {
      later += held_[Pipeline::at(rank) * Pipeline::at(pipe_.m) + Pipeline::at(k)];
      if (k >= own.forward) continue;
      double to_come = 0;
      for (int c = 0; c < pipe_.v; ++c) {
        if (place(rank, c).forward <= k) to_come += pipe_.sizes[Pipeline::at(pipe_.stage(rank, c))];
      }
      if (to_come > 0 && later + to_come > cap) return false;
    }
    return true;
  }

  struct Choice {
    int chunk = -1;
    double at = never;  // when the earliest of those that are still under way arrives
  };

  /// True if chunk a's micro-batch i goes before chunk b's j.
  [[nodiscard]] bool before(int a, int i, int b, int j) const {
    return rules_.deep || i == j ? a > b : i < j;
  }

  Choice pick_input(int rank, double now) {
    Choice best;
    for (int chunk = 0; chunk < pipe_.v; ++chunk) {
      const Place& own = place(rank, chunk);
      if (own.input >= own.forward) continue;
      const double at = gradient_at_[pipe_.slot(pipe_.stage(rank, chunk), own.input)].at;
      if (at > now) {
        best.at = std::min(best.at, at);
      } else if (best.chunk < 0 ||
                 before(chunk, own.input, best.chunk, place(rank, best.chunk).input)) {
        best.chunk = chunk;
      }
    }
    return best;
  }

  Choice pick_forward(int rank, double now) {
    Choice best;
    for (int chunk = 0; chunk < pipe_.v; ++chunk) {
      const Place& own = place(rank, chunk);
      if (own.forward >= pipe_.m) continue;
      const double at = forward_at_[pipe_.slot(pipe_.stage(rank, chunk), own.forward)].at;
      if (at == never || !admits(rank, chunk)) continue;
      if (at > now) {
        best.at = std::min(best.at, at);
      } else if (best.chunk < 0 ||
                 before(chunk, own.forward, best.chunk, place(rank, best.chunk).forward)) {
        best.chunk = chunk;
      }
    }
    return best;
  }

  int pick_weight(int rank) {
    int best = -1;
    for (int chunk = 0; chunk < pipe_.v; ++chunk) {
      const Place& own = place(rank, chunk);
      if (own.weight >= own.input) continue;
      if (best < 0 || own.weight < place(rank, best).weight) best = chunk;
    }
    return best;
  }

  void start_one(int rank, double now) {
    const Choice input = pick_input(rank, now);
    const bool turn = rules_.alternate && ranks_[Pipeline::at(rank)].forward_next;
    if (input.chunk >= 0 && !turn) return start(rank, ActionKind::backward_input, input.chunk, now);
    const Choice forward = pick_forward(rank, now);
    if (forward.chunk >= 0) return start(rank, ActionKind::forward, forward.chunk, now);
    if (input.chunk >= 0) return start(rank, ActionKind::backward_input, input.chunk, now);
    // Nothing to do but W: it may fill the gap until the next arrival, or make room for a forward.
    const int weight = pick_weight(rank);
    if (weight < 0) return;
    const double gap = std::min(input.at, forward.at) - now;
    const ActionTimes& t = pipe_.times[Pipeline::at(pipe_.stage(rank, weight))];
    if (gap >= rules_.patience * t.backward_weight) {
      start(rank, ActionKind::backward_weight, weight, now);
    }
  }

  void start(int rank, ActionKind kind, int chunk, double now) {
    const int stage = pipe_.stage(rank, chunk);
    Place& own = place(rank, chunk);
    RankState& state = ranks_[Pipeline::at(rank)];
    const double taken = pipe_.duration(kind, stage);
    state.free_at = now + taken;
    events_.push({state.free_at, rank});
    words_[Pipeline::at(rank)].push_back({kind, false, static_cast<std::int16_t>(chunk)});
    int microbatch = 0;
    if (kind == ActionKind::forward) {
      microbatch = own.forward++;
      count(state, kind, taken, forward_at_[pipe_.slot(stage, microbatch)].soonest);
      if (stage == pipe_.last_stage()) {
        gradient_at_[pipe_.slot(stage, microbatch)] = {state.free_at, state.end};
      } else {
        deliver(forward_at_, stage + 1, microbatch, state, pipe_.hop_down[Pipeline::at(stage)]);
      }
    } else if (kind == ActionKind::backward_input) {
      microbatch = own.input++;
      count(state, kind, taken, gradient_at_[pipe_.slot(stage, microbatch)].soonest);
      if (stage > 0) {
        deliver(gradient_at_, stage - 1, microbatch, state, pipe_.hop_up[Pipeline::at(stage)]);
      }
    } else {
      microbatch = own.weight++;
      count(state, kind, taken, 0);
    }
    if (kind != ActionKind::backward_weight) state.forward_next = kind != ActionKind::forward;
    const double added = pipe_.memory(kind, stage);
    state.memory += added;
    is_no_use_ = is_no_use_ || state.memory >= cutoff_.fullest;
    held_[Pipeline::at(rank) * Pipeline::at(pipe_.m) + Pipeline::at(microbatch)] += added;
  }

  /// @param ready  the soonest that its input is there
  void count(RankState& state, ActionKind kind, double taken, double ready) {
    const double begin = std::max(state.end, ready);
    state.begin = std::min(state.begin, begin);
    is_no_use_ = cutoff_.is_exceeded(kind, begin, state.begin, state.left);
    state.end = begin + taken;
    state.left.all -= taken;
    if (kind != ActionKind::backward_weight) state.left.urgent -= taken;
  }

  void deliver(std::vector<Arrival>& table, int stage, int microbatch, const RankState& from,
               double hop) {
    const double at = from.free_at + hop;
    table[pipe_.slot(stage, microbatch)] = {at, from.end + hop};
    const int rank = pipe_.rank_of[Pipeline::at(stage)];
    // One that works until then or later has an event of its own when it is free.
    const double free_at = ranks_[Pipeline::at(rank)].free_at;
    if (free_at < at || at <= now_) events_.push({at, rank});
  }

  using Event = std::pair<double, int>;  // time, rank
  const Pipeline& pipe_;
  const ListRules& rules_;
  std::vector<Arrival> forward_at_;   // [stages, m] of the input
  std::vector<Arrival> gradient_at_;  // [stages, m] of the output's gradient
  std::vector<Place> places_;         // [p*v]
  std::vector<RankState> ranks_;      // [p]
  std::vector<double> held_;          // [p, m] memory of one micro-batch on one rank
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  double now_ = 0;
  Cutoff cutoff_;
  bool is_no_use_ = false;  // whatever comes
  Words words_;
};

}  // namespace mega::inline v0::dpp::detail
