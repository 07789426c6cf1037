/// @file  How long an order takes and what it holds, and which of two orders is better.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/detail/order_words.hpp>
#include <mega/dpp/detail/pipeline.hpp>
#include <mega/dpp/search_problem.hpp>
#include <mega/dpp/simulator.hpp>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace mega::inline v0::dpp::detail {

/// Times words. Keeps its tables between calls.
/// The clock of simulate(), with caps: every rank starts a letter as soon as its list and its input
/// allow. A rank that waits is woken by the one action it waits for, so a run is O(actions).
class Stopwatch {
 public:
  explicit Stopwatch(const Pipeline& pipeline) : pipe_(pipeline) {}

  /// False where ranks wait for each other for ever, a rank or a chunk exceeds its cap, or the goal
  /// the cutoff. @pre where there is a cutoff, no pairs
  bool run(const Words& words, const Cutoff& cutoff = {}) {
    cutoff_ = cutoff;
    is_too_long_ = false;
    left_ = pipe_.work;
    const auto stages = Pipeline::at(pipe_.p * pipe_.v);
    forward_.assign(stages * Pipeline::at(pipe_.m), never);
    gradient_.assign(forward_.size(), never);
    waiter_.assign(2 * stages, -1);
    clock_.assign(words.size(), 0.0);
    first_.assign(words.size(), never);
    live_.assign(words.size(), 0.0);
    peak_.assign(words.size(), 0.0);
    next_.assign(words.size(), 0);
    done_.assign(words.size() * Pipeline::at(pipe_.v), {});
    chunk_is_full_ = false;
    starts_.resize(words.size());
    awake_.clear();
    for (int rank = pipe_.p; rank-- > 0;) awake_.push_back(rank);
    std::size_t ended = 0;
    while (!awake_.empty()) {
      const int rank = awake_.back();
      awake_.pop_back();
      starts_[Pipeline::at(rank)].resize(words[Pipeline::at(rank)].size());
      if (advance(rank, words[Pipeline::at(rank)])) ++ended;
      if (peak_[Pipeline::at(rank)] > pipe_.caps[Pipeline::at(rank)] + memory_slack ||
          chunk_is_full_ || is_too_long_)
        return false;
    }
    return ended == words.size();
  }

  // Of the last run that gave true.
  [[nodiscard]] double makespan() const { return *std::max_element(clock_.begin(), clock_.end()); }
  [[nodiscard]] double span(int rank) const {
    return clock_[Pipeline::at(rank)] - first_[Pipeline::at(rank)];
  }
  [[nodiscard]] double longest_span() const {
    double longest = 0;
    for (int rank = 0; rank < pipe_.p; ++rank) longest = std::max(longest, span(rank));
    return longest;
  }
  [[nodiscard]] double end(int rank) const { return clock_[Pipeline::at(rank)]; }
  [[nodiscard]] const std::vector<double>& peak_memory() const noexcept { return peak_; }
  /// [letters] when each letter of the rank's word began.
  [[nodiscard]] const std::vector<double>& starts(int rank) const {
    return starts_[Pipeline::at(rank)];
  }

 private:
  /// Number of forwards, input gradients and weight gradients that a chunk has done.
  struct Done {
    int forward = 0;
    int input = 0;
    int weight = 0;
  };

  /// When the inputs of the chunk's next action of that kind are there; `never` for not known yet,
  /// and then `missing` is what has to happen: 2*stage for its forward, 2*stage + 1 its gradient.
  double arrival(Letter letter, int stage, const Done& done, int& missing) const {
    switch (letter.kind) {
      case ActionKind::forward: {
        if (stage == 0) return 0;
        missing = 2 * (stage - 1);
        return forward_[pipe_.slot(stage - 1, done.forward)] +
               pipe_.hop_down[Pipeline::at(stage - 1)];
      }
      case ActionKind::backward_weight:
        missing = 2 * stage + 1;
        return done.weight < done.input ? 0 : never;
      default: break;
    }
    missing = 2 * stage;
    if (done.input >= done.forward) return never;
    if (stage == pipe_.last_stage()) return 0;
    missing = 2 * (stage + 1) + 1;
    return gradient_[pipe_.slot(stage + 1, done.input)] + pipe_.hop_up[Pipeline::at(stage + 1)];
  }

  /// Runs the rank until it waits; true when its word is at its end.
  bool advance(int rank, const std::vector<Letter>& word) {
    const auto r = Pipeline::at(rank);
    while (next_[r] < word.size()) {
      const std::size_t size = word[next_[r]].with_next && next_[r] + 1 < word.size() ? 2 : 1;
      double begin = clock_[r];
      for (std::size_t k = 0; k < size; ++k) {
        const Letter letter = word[next_[r] + k];
        const int stage = pipe_.stage(rank, letter.chunk);
        int missing = -1;
        const double ready =
            arrival(letter, stage, done_[Pipeline::at(rank * pipe_.v + letter.chunk)], missing);
        if (ready == never) {
          waiter_[Pipeline::at(missing)] = rank;
          return false;
        }
        begin = std::max(begin, ready);
      }
      first_[r] = std::min(first_[r], begin);
      if (cutoff_.longest < never) {
        is_too_long_ = cutoff_.is_exceeded(word[next_[r]].kind, begin, first_[r], left_[r]);
        if (is_too_long_) return false;
      }
      const double taken = duration(rank, word, next_[r], size);
      const double end = begin + taken;
      left_[r].all -= taken;
      if (word[next_[r]].kind != ActionKind::backward_weight) left_[r].urgent -= taken;
      // Both halves of a pair hold their activations until it ends: the forward counts first.
      const bool backwards = size == 2 && word[next_[r]].kind != ActionKind::forward;
      for (std::size_t k = 0; k < size; ++k) {
        starts_[r][next_[r] + k] = begin;
        complete(rank, word[next_[r] + (backwards ? 1 - k : k)], end);
      }
      next_[r] += size;
      clock_[r] = end;
    }
    return true;
  }

  [[nodiscard]] double duration(int rank, const std::vector<Letter>& word, std::size_t at,
                                std::size_t size) const {
    const int stage = pipe_.stage(rank, word[at].chunk);
    if (size == 1) return pipe_.duration(word[at].kind, stage);
    const int other = pipe_.stage(rank, word[at + 1].chunk);
    return pair_time(pipe_.times[Pipeline::at(stage)], word[at].kind,
                     pipe_.times[Pipeline::at(other)], word[at + 1].kind);
  }

  void complete(int rank, Letter letter, double end) {
    const int stage = pipe_.stage(rank, letter.chunk);
    Done& done = done_[Pipeline::at(rank * pipe_.v + letter.chunk)];
    const auto r = Pipeline::at(rank);
    live_[r] += pipe_.memory(letter.kind, stage);
    peak_[r] = std::max(peak_[r], live_[r]);
    if (letter.kind == ActionKind::forward) {
      forward_[pipe_.slot(stage, done.forward++)] = end;
      chunk_is_full_ |= done.forward - done.weight >
                        pipe_.chunk_caps[Pipeline::at(rank * pipe_.v + letter.chunk)];
      wake(2 * stage);
    }
    if (gives_weight_gradient(letter.kind)) ++done.weight;
    if (gives_input_gradient(letter.kind)) {
      gradient_[pipe_.slot(stage, done.input++)] = end;
      wake(2 * stage + 1);
    }
  }

  void wake(int event) {
    int& rank = waiter_[Pipeline::at(event)];
    if (rank >= 0) awake_.push_back(rank);
    rank = -1;
  }

  const Pipeline& pipe_;
  std::vector<double> forward_;   // [stages, m] end, or never
  std::vector<double> gradient_;  // [stages, m] end of I, or never
  std::vector<int> waiter_;       // [2*stages] rank that waits for the event, or -1
  std::vector<double> clock_;     // [p] as are the five below
  std::vector<double> first_;
  std::vector<double> live_;
  std::vector<double> peak_;
  std::vector<std::size_t> next_;
  std::vector<Pipeline::Work> left_;
  Cutoff cutoff_;
  bool is_too_long_ = false;    // whatever comes
  bool chunk_is_full_ = false;  // beyond its cap
  std::vector<int> awake_;
  std::vector<std::vector<double>> starts_;
  std::vector<Done> done_;  // [p*v]
};

/// What the local search compares: the goal, and the other figure where the goal is equal.
struct Cost {
  double goal = never;
  double other = never;
  friend bool operator<(const Cost& a, const Cost& b) {
    return a.goal < b.goal || (a.goal == b.goal && a.other < b.other);
  }
};

inline Cost cost_of(const Stopwatch& watch, ScheduleGoal goal) {
  const double makespan = watch.makespan();
  const double span = watch.longest_span();
  return goal == ScheduleGoal::makespan ? Cost{makespan, span} : Cost{span, makespan};
}

/// What decides between orders: the goal, then the memory of the fullest rank, then the other
/// figure.
struct Rating {
  Cost cost;
  double peak = never;

  [[nodiscard]] bool is_better_than(const Rating& best) const {
    if (!is_equal(cost.goal, best.cost.goal)) return cost.goal < best.cost.goal;
    if (peak > best.peak + memory_slack) return false;
    return peak < best.peak - memory_slack || cost.other < best.cost.other;
  }

  /// But for rounding: sums of the same times in another order.
  static constexpr bool is_equal(double a, double b) noexcept {
    return a == b || (a < never && b < never && (a < b ? b - a : a - b) <= 1e-12 * b);
  }
};

}  // namespace mega::inline v0::dpp::detail
