/// @file  Search for the best pipeline order from measured stage times and memory caps. Run time
/// only, for start-up and tools; not part of mega.hpp.
///
/// Every named traversal that fits the caps is a candidate, so is what a list scheduler makes with
/// several rules, and the best of all is improved by a local search. All are timed by one function,
/// so the result is never slower than any named candidate under that clock.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

/// A pipeline as measured: what its stages cost and what its ranks can hold.
struct PipelineProfile {
  int p = 1;                       ///< ranks
  int m = 1;                       ///< micro-batches
  int v = 1;                       ///< chunks a rank
  std::vector<ActionTimes> times;  ///< [p*v] by stage, or one entry for all
  /// [p] live activations of a chunk that a rank may hold, fractions allowed; empty: any number.
  std::vector<double> caps;
  /// [p*v] micro-batches that the place rank*v + chunk has room for; empty: for all. What is laid
  /// out for each chunk limits more than a rank's sum does.
  std::vector<int> chunk_caps = {};
  /// Part of an activation that the input gradient has released already, in [0, 1]; the weight
  /// gradient releases the rest. 0: all is kept for the weight gradient.
  double released_by_input = 0;
};

/// What the search makes small; ties go to less memory, then to the other of the two.
enum class ScheduleGoal : std::uint8_t {
  makespan,      ///< the step from its first action to its last: all ranks wait at its end
  longest_span,  ///< the longest time from a rank's first action to its last: ranks need not wait
                 ///< for each other between steps
};

/// When the local search stops. With `seconds` unlimited the result depends on nothing but the
/// arguments.
struct SearchBudget {
  int tries = 1000;  ///< orders timed by the local search, each at the cost of all its actions
  double seconds = std::numeric_limits<double>::infinity();  ///< of the whole call
  std::uint64_t seed = 0;
};

/// A candidate of the search that fits the caps, and its figures.
struct ScheduleCandidate {
  std::string name;
  double makespan = 0;
  double longest_span = 0;
};

struct AutoSchedule {
  Schedule schedule;      ///< compute actions; lower() makes it executable
  std::string candidate;  ///< where it came from
  Timing timing;
  std::vector<double> memory_per_rank;        ///< [p] peak, in activations of a chunk
  std::vector<ScheduleCandidate> candidates;  ///< all that fit, in the order of their trial
  int tries = 0;                              ///< orders that the local search timed
};

namespace detail {

constexpr double never = std::numeric_limits<double>::infinity();
/// Caps and peaks are sums of fractions: differences below this are rounding.
constexpr double memory_slack = 1e-9;

inline void expect_profile(const PipelineProfile& profile) {
  expect_pipeline(0, profile.p, profile.m, profile.v);
  const auto stages = static_cast<std::size_t>(profile.p) * static_cast<std::size_t>(profile.v);
  expects(profile.times.size() == 1 || profile.times.size() == stages, ErrorCode::usage, [&] {
    return sentence("the profile has times of ", profile.times.size(),
                    " stages, not of p*v = ", stages, "; 1 serves them all");
  });
  const auto is_time = [](double t) { return t >= 0 && t < never; };
  for (const ActionTimes& t : profile.times) {
    const double all = t.forward + t.backward_input + t.backward_weight;
    const bool valid = is_time(t.forward) && is_time(t.backward_input) &&
                       is_time(t.backward_weight) && is_time(t.hop) && is_time(all) && all > 0 &&
                       t.pair < never;
    expects(valid, ErrorCode::usage, [&] {
      return sentence("stage ", &t - profile.times.data(), " has forward ", t.forward,
                      ", backward_input ", t.backward_input, ", backward_weight ",
                      t.backward_weight, ", hop ", t.hop, " and pair ", t.pair,
                      "; times are finite, none but pair is negative, and a stage takes some");
    });
  }
  expects(profile.released_by_input >= 0 && profile.released_by_input <= 1, ErrorCode::usage, [&] {
    return sentence("released_by_input ", profile.released_by_input, " is outside 0..1");
  });
  const auto ranks = static_cast<std::size_t>(profile.p);
  expects(profile.caps.empty() || profile.caps.size() == ranks, ErrorCode::usage, [&] {
    return sentence("the profile has memory caps of ", profile.caps.size(),
                    " ranks, not of p = ", profile.p);
  });
  expects(profile.chunk_caps.empty() || profile.chunk_caps.size() == stages, ErrorCode::usage, [&] {
    return sentence("the profile has room for micro-batches of ", profile.chunk_caps.size(),
                    " chunks, not of p*v = ", stages);
  });
  for (const int& cap : profile.chunk_caps) {
    expects(cap >= 1, ErrorCode::usage, [&] {
      return sentence("place ", &cap - profile.chunk_caps.data(), " has room for ", cap,
                      " micro-batches; it needs room for at least 1");
    });
  }
  for (const double& cap : profile.caps) {
    expects(cap >= profile.v, ErrorCode::usage, [&] {
      return sentence("rank ", &cap - profile.caps.data(), " may hold ", cap,
                      " live activations, but one micro-batch alone keeps one on each of its v = ",
                      profile.v, " chunks; the smallest valid cap is ", profile.v);
    });
  }
}

/// A profile with the tables that the inner loops read.
class Pipeline {
 public:
  /// @param stage_of_place  [p*v] stage of the place rank*v + chunk
  Pipeline(const PipelineProfile& profile, std::vector<int> stage_of_place)
      : p(profile.p),
        m(profile.m),
        v(profile.v),
        kept(1 - profile.released_by_input),
        caps(profile.caps),
        chunk_caps(profile.chunk_caps),
        times(profile.times),
        stage_of(std::move(stage_of_place)),
        rank_of(stage_of.size(), 0),
        hop_down(stage_of.size(), 0.0),
        hop_up(stage_of.size(), 0.0) {
    if (times.size() == 1) times.assign(stage_of.size(), profile.times.front());
    for (std::size_t i = 0; i < stage_of.size(); ++i) {
      rank_of[at(stage_of[i])] = static_cast<int>(i) / v;
    }
    for (std::size_t s = 0; s + 1 < rank_of.size(); ++s) {
      if (rank_of[s] == rank_of[s + 1]) continue;
      hop_down[s] = times[s].hop;
      hop_up[s + 1] = times[s + 1].hop;
    }
    if (caps.empty()) caps.assign(at(p), never);
    if (chunk_caps.empty()) chunk_caps.assign(stage_of.size(), m);
  }

  [[nodiscard]] static std::size_t at(int i) noexcept { return static_cast<std::size_t>(i); }
  [[nodiscard]] std::size_t slot(int stage, int microbatch) const noexcept {
    return at(stage) * at(m) + at(microbatch);
  }
  [[nodiscard]] int stage(int rank, int chunk) const noexcept {
    return stage_of[at(rank * v + chunk)];
  }
  [[nodiscard]] int last_stage() const noexcept { return p * v - 1; }
  [[nodiscard]] double duration(ActionKind kind, int stage_index) const noexcept {
    return times[at(stage_index)].of(kind);
  }
  /// What the action adds to the live activations of its rank.
  [[nodiscard]] double memory(ActionKind kind) const noexcept {
    switch (kind) {
      case ActionKind::forward: return 1;
      case ActionKind::backward: return -1;
      case ActionKind::backward_input: return kept - 1;
      default: return -kept;
    }
  }

  int p;
  int m;
  int v;
  double kept;                     ///< of an activation between its I and its W
  std::vector<double> caps;        ///< [p]
  std::vector<int> chunk_caps;     ///< [p*v] by place
  std::vector<ActionTimes> times;  ///< [p*v] by stage
  std::vector<int> stage_of;       ///< [p*v] by place rank*v + chunk
  std::vector<int> rank_of;        ///< [p*v] by stage
  std::vector<double> hop_down;    ///< [p*v] from a stage to the next one, 0 on the same rank
  std::vector<double> hop_up;      ///< [p*v] from a stage to the one before it
};

/// An order as a word for each rank: which kind on which chunk comes next. The micro-batch is the
/// number of equal letters before it, so every word keeps micro-batches ascending.
struct Letter {
  ActionKind kind = ActionKind::forward;
  bool with_next = false;
  std::int16_t chunk = 0;
  friend bool operator==(const Letter&, const Letter&) = default;
};
using Words = std::vector<std::vector<Letter>>;

inline Words words_of(const ScheduleView& schedule) {
  Words words(static_cast<std::size_t>(schedule.p));
  for (int rank = 0; rank < schedule.p; ++rank) {
    for (const Action& a : schedule.of_rank(rank)) {
      if (!is_compute(a.kind)) continue;
      words[static_cast<std::size_t>(rank)].push_back({a.kind, a.with_next, a.chunk});
    }
  }
  return words;
}

/// The words with each whole backward as I and W and no pairs: the search moves single letters.
inline Words split_words(const Words& words) {
  Words split;
  for (const auto& word : words) {
    auto& letters = split.emplace_back();
    for (const Letter& letter : word) {
      const bool whole = letter.kind == ActionKind::backward;
      letters.push_back({whole ? ActionKind::backward_input : letter.kind, false, letter.chunk});
      if (whole) letters.push_back({ActionKind::backward_weight, false, letter.chunk});
    }
  }
  return split;
}

/// Calls visit(letter, micro-batch) for each letter of the word of a rank with v chunks.
template <class Visit>
void number_letters(const std::vector<Letter>& word, int v, const Visit& visit) {
  struct Seen {
    int forward = 0;
    int input = 0;
    int weight = 0;
  };
  std::vector<Seen> seen(static_cast<std::size_t>(v));
  for (const Letter& letter : word) {
    Seen& of_chunk = seen[static_cast<std::size_t>(letter.chunk)];
    switch (letter.kind) {
      case ActionKind::forward: visit(letter, of_chunk.forward++); break;
      case ActionKind::backward_input: visit(letter, of_chunk.input++); break;
      case ActionKind::backward_weight: visit(letter, of_chunk.weight++); break;
      default: ++of_chunk.weight; visit(letter, of_chunk.input++);
    }
  }
}

/// The words as lists of actions.
template <placement Placement>
Schedule schedule_of(const Words& words, int m, int v, const Placement& place) {
  Schedule made(static_cast<int>(words.size()), m, v, place);
  std::vector<Action> list;
  for (const auto& word : words) {
    list.clear();
    number_letters(word, v, [&](const Letter& letter, int microbatch) {
      list.push_back({letter.kind, letter.with_next, letter.chunk, microbatch});
    });
    made.append(list);
  }
  return made;
}

/// Times words. Keeps its tables between calls.
/// The clock of simulate(), with caps: every rank starts a letter as soon as its list and its input
/// allow. A rank that waits is woken by the one action it waits for, so a run is O(actions).
class Stopwatch {
 public:
  explicit Stopwatch(const Pipeline& pipeline) : pipe_(pipeline) {}

  /// False where ranks wait for each other for ever or a rank or a chunk exceeds its cap.
  bool run(const Words& words) {
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
          chunk_is_full_)
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
      const double end = begin + duration(rank, word, next_[r], size);
      first_[r] = std::min(first_[r], begin);
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
    live_[r] += pipe_.memory(letter.kind);
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
  bool chunk_is_full_ = false;  // beyond its cap
  std::vector<int> awake_;
  std::vector<std::vector<double>> starts_;
  std::vector<Done> done_;  // [p*v]
};

/// The rules of one run of the list scheduler.
struct ListRules {
  std::vector<double> lead;  ///< [p*v] by place: forwards that may wait for their I, >= 1
  double patience = 0;       ///< W runs if the next arrival is further than this part of its time
  bool alternate = false;    ///< F and I in turn where both are there, otherwise I first
  bool deep = true;  ///< of two chunks the later comes first, otherwise the older micro-batch
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
        forward_at_(Pipeline::at(pipeline.p * pipeline.v) * Pipeline::at(pipeline.m), never),
        gradient_at_(forward_at_.size(), never),
        places_(Pipeline::at(pipeline.p * pipeline.v)),
        ranks_(Pipeline::at(pipeline.p)),
        held_(Pipeline::at(pipeline.p) * Pipeline::at(pipeline.m), 0.0),
        words_(Pipeline::at(pipeline.p)) {}

  Words run() {
    for (int i = 0; i < pipe_.m; ++i) forward_at_[pipe_.slot(0, i)] = 0;
    for (int rank = 0; rank < pipe_.p; ++rank) {
      words_[Pipeline::at(rank)].reserve(Pipeline::at(3 * pipe_.m * pipe_.v));
      events_.push({0.0, rank});
    }
    while (!events_.empty()) {
      const auto [now, rank] = events_.top();
      events_.pop();
      if (ranks_[Pipeline::at(rank)].free_at <= now) start_one(rank, now);
    }
    return std::move(words_);
  }

 private:
  struct Place {
    int forward = 0;  // micro-batches whose action has begun
    int input = 0;
    int weight = 0;
  };
  struct RankState {
    double free_at = 0;
    double memory = 0;
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
    if (ranks_[Pipeline::at(rank)].memory + 1 > cap) return false;
    int oldest = own.forward;
    int newest = own.forward;
    for (int c = 0; c < pipe_.v; ++c) {
      oldest = std::min(oldest, place(rank, c).forward);
      newest = std::max(newest, place(rank, c).forward);
    }
    double later = 1;  // what micro-batches from k on hold, with the new forward
    for (int k = std::min(newest, pipe_.m - 1); k >= oldest; --k) {
      later += held_[Pipeline::at(rank) * Pipeline::at(pipe_.m) + Pipeline::at(k)];
      if (k >= own.forward) continue;
      int to_come = 0;
      for (int c = 0; c < pipe_.v; ++c) to_come += place(rank, c).forward <= k ? 1 : 0;
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
      const double at = gradient_at_[pipe_.slot(pipe_.stage(rank, chunk), own.input)];
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
      const double at = forward_at_[pipe_.slot(pipe_.stage(rank, chunk), own.forward)];
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
    const Choice forward = pick_forward(rank, now);
    const int weight = pick_weight(rank);
    const bool turn = rules_.alternate && ranks_[Pipeline::at(rank)].forward_next;
    if (input.chunk >= 0 && !(turn && forward.chunk >= 0)) {
      return start(rank, ActionKind::backward_input, input.chunk, now);
    }
    if (forward.chunk >= 0) return start(rank, ActionKind::forward, forward.chunk, now);
    // Nothing to do but W: it may fill the gap until the next arrival, or make room for a forward.
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
    const double end = now + pipe_.duration(kind, stage);
    words_[Pipeline::at(rank)].push_back({kind, false, static_cast<std::int16_t>(chunk)});
    state.free_at = end;
    events_.push({end, rank});
    int microbatch = 0;
    if (kind == ActionKind::forward) {
      microbatch = own.forward++;
      if (stage == pipe_.last_stage()) {
        gradient_at_[pipe_.slot(stage, microbatch)] = end;
      } else {
        deliver(forward_at_, stage + 1, microbatch, end + pipe_.hop_down[Pipeline::at(stage)]);
      }
    } else if (kind == ActionKind::backward_input) {
      microbatch = own.input++;
      if (stage > 0) {
        deliver(gradient_at_, stage - 1, microbatch, end + pipe_.hop_up[Pipeline::at(stage)]);
      }
    } else {
      microbatch = own.weight++;
    }
    if (kind != ActionKind::backward_weight) state.forward_next = kind != ActionKind::forward;
    state.memory += pipe_.memory(kind);
    held_[Pipeline::at(rank) * Pipeline::at(pipe_.m) + Pipeline::at(microbatch)] +=
        pipe_.memory(kind);
  }

  void deliver(std::vector<double>& table, int stage, int microbatch, double at) {
    table[pipe_.slot(stage, microbatch)] = at;
    events_.push({at, pipe_.rank_of[Pipeline::at(stage)]});
  }

  using Event = std::pair<double, int>;  // time, rank
  const Pipeline& pipe_;
  const ListRules& rules_;
  std::vector<double> forward_at_;   // [stages, m] arrival of the input, or never
  std::vector<double> gradient_at_;  // [stages, m] arrival of the output's gradient, or never
  std::vector<Place> places_;        // [p*v]
  std::vector<RankState> ranks_;     // [p]
  std::vector<double> held_;         // [p, m] memory of one micro-batch on one rank
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Words words_;
};

/// Numbers of the search, one stream for each seed.
class SearchRandom {
 public:
  explicit SearchRandom(std::uint64_t seed) noexcept : key_{seed} {}
  /// In 0..bound-1. @pre bound >= 1
  int below(int bound) noexcept {
    return static_cast<int>(key_.bits(drawn_++) % static_cast<std::uint32_t>(bound));
  }

 private:
  RandomKey key_;
  Index drawn_ = 0;
};

/// What a search compares: the goal, and the other figure where the goal is equal.
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

/// The actions that decide when the step ends, as (rank, position): from the last action of the
/// rank that the goal is measured on back to the first of the pipeline, each beginning when the
/// next one listed ends or, across ranks, when its data has arrived.
class CriticalPath {
 public:
  struct Node {
    int rank = 0;
    int position = 0;
  };

  /// @pre watch.run(words) gave true
  CriticalPath(const Pipeline& pipe, const Words& words, const Stopwatch& watch,
               ScheduleGoal goal) {
    std::vector<Node> forward(Pipeline::at(pipe.p * pipe.v) * Pipeline::at(pipe.m));
    std::vector<Node> gradient(forward.size());
    std::vector<std::vector<int>> microbatch(words.size());
    int worst = 0;
    for (int rank = 0; rank < pipe.p; ++rank) {
      number_letters(words[Pipeline::at(rank)], pipe.v, [&](const Letter& letter, int i) {
        const Node here{rank, static_cast<int>(microbatch[Pipeline::at(rank)].size())};
        const std::size_t slot = pipe.slot(pipe.stage(rank, letter.chunk), i);
        if (letter.kind == ActionKind::forward) forward[slot] = here;
        if (letter.kind == ActionKind::backward_input) gradient[slot] = here;
        microbatch[Pipeline::at(rank)].push_back(i);
      });
      const bool later = goal == ScheduleGoal::makespan ? watch.end(rank) > watch.end(worst)
                                                        : watch.span(rank) > watch.span(worst);
      if (later) worst = rank;
    }
    Node node{worst, static_cast<int>(words[Pipeline::at(worst)].size()) - 1};
    for (;;) {
      nodes.push_back(node);
      const auto& word = words[Pipeline::at(node.rank)];
      const auto position = Pipeline::at(node.position);
      const Letter letter = word[position];
      const int stage = pipe.stage(node.rank, letter.chunk);
      const int i = microbatch[Pipeline::at(node.rank)][position];
      const auto& starts = watch.starts(node.rank);
      if (position > 0) {
        const Letter before = word[position - 1];
        const double end =
            starts[position - 1] + pipe.duration(before.kind, pipe.stage(node.rank, before.chunk));
        if (end == starts[position]) {
          --node.position;
          continue;
        }
      }
      if (letter.kind == ActionKind::forward) {
        if (stage == 0) return;
        node = forward[pipe.slot(stage - 1, i)];
      } else if (letter.kind == ActionKind::backward_weight) {
        node = gradient[pipe.slot(stage, i)];
      } else if (stage == pipe.last_stage()) {
        node = forward[pipe.slot(stage, i)];
      } else {
        node = gradient[pipe.slot(stage + 1, i)];
      }
    }
  }

  std::vector<Node> nodes;
};

/// Moves one letter of `word` to another place; the letters between close up.
inline void move_letter(std::vector<Letter>& word, int from, int to) {
  const auto begin = word.begin();
  if (from < to) {
    std::rotate(begin + from, begin + from + 1, begin + to + 1);
  } else {
    std::rotate(begin + to, begin + from, begin + from + 1);
  }
}

/// The search itself: named candidates, list schedules, then random changes to the best.
class ScheduleSearch {
 public:
  ScheduleSearch(const Pipeline& pipeline, ScheduleGoal goal, const SearchBudget& budget)
      : pipe_(pipeline),
        goal_(goal),
        budget_(budget),
        begin_(std::chrono::steady_clock::now()),
        watch_(pipeline),
        random_(budget.seed) {}

  /// Times the words; those that exceed a cap are no candidate.
  void consider(std::string_view name, const Words& words) {
    if (!watch_.run(words)) return;
    candidates.push_back({std::string(name), watch_.makespan(), watch_.longest_span()});
    keep_if_better(name, words);
  }

  /// List schedules from cautious to greedy: how many forwards run ahead, when W fills a gap.
  /// At least one of them, however little time there is; the best joins the candidates.
  void try_lists() {
    Words best_list;
    for (const double part : {0.5, 0.6, 0.75, 0.9, 1.0, 1.05, 1.1, 1.25, 1.5, 1e9}) {
      for (const double more : {0.0, 0.5, 1.0}) {
        for (const double patience : {0.0, 0.25, 0.5, 1.0}) {
          for (const bool alternate : {false, true}) {
            for (const bool deep : {true, false}) {
              if (!deep && pipe_.v == 1) continue;  // no two chunks to choose from
              if (!best_list.empty() && out_of_time()) break;
              const ListRules rules{lead(part, more), patience, alternate, deep};
              Words words = ListScheduler(pipe_, rules).run();
              if (is_better_list(rules, words)) best_list = std::move(words);
            }
          }
        }
      }
    }
    if (!best_list.empty()) consider("list", best_list);
  }

  /// A quarter of the tries, which cost some ten times the others, vary the rules of the best list
  /// schedule; the others move letters of the best of all.
  void improve() {
    for (; tries < budget_.tries / 4 && !out_of_time(); ++tries) {
      const ListRules rules = varied(rules_);
      const Words words = ListScheduler(pipe_, rules).run();
      if (is_better_list(rules, words)) keep_if_better("list, rules varied", words);
    }
    move_letters();
  }

  Words best;
  std::string best_name;
  std::vector<ScheduleCandidate> candidates;
  int tries = 0;

 private:
  /// Of equally short orders the one whose fullest rank holds least stays.
  void keep_if_better(std::string_view name, const Words& words) {
    const Cost cost = cost_of(watch_, goal_);
    if (cost_.goal < cost.goal) return;
    const auto& peaks = watch_.peak_memory();
    const double peak = *std::max_element(peaks.begin(), peaks.end());
    if (cost.goal == cost_.goal) {
      const bool fuller = peak > peak_ + memory_slack;
      const bool emptier = peak < peak_ - memory_slack;
      if (fuller || (!emptier && !(cost < cost_))) return;
    }
    cost_ = cost;
    peak_ = peak;
    best = words;
    best_name = name;
  }

  /// Times a list schedule, and makes its rules the ones to vary if no other was better.
  bool is_better_list(const ListRules& rules, const Words& words) {
    if (!watch_.run(words)) return false;
    const Cost cost = cost_of(watch_, goal_);
    if (list_cost_ < cost) return false;
    list_cost_ = cost;
    rules_ = rules;
    return true;
  }

  /// One forward more or less ahead, on some ranks in a row, for one chunk or all.
  [[nodiscard]] ListRules varied(ListRules rules) {
    const int first = random_.below(pipe_.p);
    const int end = first + 1 + random_.below(pipe_.p - first);
    const int chunk = random_.below(pipe_.v + 1);  // v: all of them
    const double step = random_.below(2) == 0 ? -1 : 1;
    for (int place = first * pipe_.v; place < end * pipe_.v; ++place) {
      double& lead = rules.lead[Pipeline::at(place)];
      if (chunk == pipe_.v || place % pipe_.v == chunk) lead = std::max(1.0, lead + step);
    }
    if (random_.below(4) == 0) rules.patience = 0.125 * random_.below(10);
    if (random_.below(8) == 0) rules.alternate = !rules.alternate;
    return rules;
  }

  [[nodiscard]] bool out_of_time() const {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin_;
    return spent.count() > budget_.seconds;
  }

  /// For each place, `part` of the number of forwards that fit in the time until the gradient of
  /// the first one can be back, plus `more`. A rank's forwards of a micro-batch count as one.
  [[nodiscard]] std::vector<double> lead(double part, double more) const {
    std::vector<double> back(pipe_.times.size(), 0.0);  // from the start of F to that of its I
    double way = 0;
    for (int stage = pipe_.last_stage(); stage >= 0; --stage) {
      const ActionTimes& t = pipe_.times[Pipeline::at(stage)];
      way += t.forward + pipe_.hop_down[Pipeline::at(stage)];
      back[Pipeline::at(stage)] = way;
      way += t.backward_input + pipe_.hop_up[Pipeline::at(stage)];
    }
    std::vector<double> lead;
    for (int rank = 0; rank < pipe_.p; ++rank) {
      double forward = 0;
      for (int chunk = 0; chunk < pipe_.v; ++chunk) {
        forward += pipe_.duration(ActionKind::forward, pipe_.stage(rank, chunk));
      }
      for (int chunk = 0; chunk < pipe_.v; ++chunk) {
        const double fit = back[Pipeline::at(pipe_.stage(rank, chunk))] / forward;
        const double count = forward > 0 ? std::floor(part * fit + more) : pipe_.m;
        lead.push_back(std::clamp<double>(count, 1, pipe_.m));
      }
    }
    return lead;
  }

  void move_letters() {
    if (best.empty()) return;
    Words words = split_words(best);
    if (!watch_.run(words)) return;
    Cost cost = cost_of(watch_, goal_);
    keep_if_better(best_name + ", split", words);
    bool moved = true;
    std::vector<CriticalPath::Node> path;
    std::vector<std::vector<int>> gaps;
    for (; tries < budget_.tries && !out_of_time(); ++tries) {
      if (moved) {
        watch_.run(words);
        path = CriticalPath(pipe_, words, watch_, goal_).nodes;
        gaps = gaps_of(words);
      }
      const auto [rank, from] = path[Pipeline::at(random_.below(static_cast<int>(path.size())))];
      const auto r = Pipeline::at(rank);
      const int length = static_cast<int>(words[r].size());
      int to = from;
      if (words[r][Pipeline::at(from)].kind == ActionKind::backward_weight && !gaps[r].empty() &&
          random_.below(2) == 0) {
        to = gaps[r][Pipeline::at(random_.below(static_cast<int>(gaps[r].size())))];
      } else {
        const int reach = 1 << random_.below(6);
        to = std::clamp(from - reach + random_.below(2 * reach + 1), 0, length - 1);
      }
      moved = false;
      if (to == from) continue;
      move_letter(words[r], from, to);
      if (watch_.run(words)) {
        const Cost now = cost_of(watch_, goal_);
        moved = !(cost < now);
        if (moved) cost = now;
        keep_if_better(best_name.ends_with("moved") ? best_name : best_name + ", letters moved",
                       words);
      }
      if (!moved) move_letter(words[r], to, from);
    }
  }

  /// Positions before which each rank waits. @pre watch_.run(words) gave true
  [[nodiscard]] std::vector<std::vector<int>> gaps_of(const Words& words) const {
    std::vector<std::vector<int>> gaps(words.size());
    for (int rank = 0; rank < pipe_.p; ++rank) {
      const auto r = Pipeline::at(rank);
      const auto& starts = watch_.starts(rank);
      for (std::size_t i = 1; i < words[r].size(); ++i) {
        const Letter before = words[r][i - 1];
        const double end =
            starts[i - 1] + pipe_.duration(before.kind, pipe_.stage(rank, before.chunk));
        if (end < starts[i]) gaps[r].push_back(static_cast<int>(i));
      }
    }
    return gaps;
  }

  const Pipeline& pipe_;
  ScheduleGoal goal_;
  SearchBudget budget_;
  std::chrono::steady_clock::time_point begin_;
  Stopwatch watch_;
  SearchRandom random_;
  Cost cost_;
  double peak_ = never;
  ListRules rules_;  // of the best list schedule
  Cost list_cost_;
};

/// Calls visit(name, policy) for every named traversal. Those that refuse p, m or v, need another
/// placement or exceed a cap drop out later.
/// @param live  whole activations that the smallest cap holds
template <class Visit>
void for_each_named_traversal(int p, int m, int live, const Visit& visit) {
  visit("gpipe", GPipe{});
  visit("1f1b", OneForwardOneBackward{});
  visit("eager_1f1b", EagerOneForwardOneBackward{});
  visit("zb_h1", ZeroBubbleH1{});
  visit("zb_h2", ZeroBubbleH2{});
  visit("dfc", ScheduleTraversal<DFC>{});
  visit("dfc, W at once", SplitBackward<ScheduleTraversal<DFC>, WeightAtOnce>{});
  visit("dfc, W by rank", SplitBackward<ScheduleTraversal<DFC>, WeightByRank<1>>{});
  visit("dfc, W at end", SplitBackward<ScheduleTraversal<DFC>, WeightAtEnd>{});
  visit("group size 2p", Interleaved{{std::clamp(2 * p, p, std::max(p, m))}});
  visit("bfc", ScheduleTraversal<BFC>{});
  visit("bfc, W at once", SplitBackward<ScheduleTraversal<BFC>, WeightAtOnce>{});
  visit("gpipe, W at end", SplitBackward<GPipe, WeightAtEnd>{});
  visit("zb_v", ZeroBubbleV{});
  visit("v_half", VHalf{});
  visit("v_min", VMin{});
  visit("v_schedule", VSchedule{{live}});
  visit("dual_pipe_v", DualPipeV{});
}

}  // namespace detail

/// The best order found for the profile on the given placement.
///
/// Candidates: the named traversals, and list schedules in which a rank takes an input gradient
/// before a forward before a weight gradient, for several limits of how far forwards run ahead and
/// of how well a weight gradient must fit the gap it fills. Then a local search varies the rules of
/// the best list schedule and moves single actions on the critical path. What exceeds a cap is no
/// candidate; of equally short orders the one with the least peak of any rank wins, then the one
/// that came first. Every order keeps the micro-batches of a (chunk, kind)
/// ascending and is proven by verify().
/// @param place  which rank holds which stage; policies made for another placement stay out
/// Throws Error(usage) where the profile is impossible: a cap below v, which one micro-batch alone
/// needs, or times and sizes that do not fit each other.
/// @cost  linear in the 3*p*m*v actions: 240 list schedules, 480 for v > 1, and budget.tries; about
///        0.1 us an action of a list schedule, 0.01 us of the moves of the search
/// @determinism  equal arguments give equal orders while budget.seconds is not spent
template <placement Placement = LoopPlacement>
[[nodiscard]] AutoSchedule auto_schedule(const PipelineProfile& profile,
                                         ScheduleGoal goal = ScheduleGoal::makespan,
                                         const SearchBudget& budget = {}, Placement place = {}) {
  detail::expect_profile(profile);
  const int p = profile.p;
  const int m = profile.m;
  const int v = profile.v;
  const Schedule empty(p, m, v, place);
  const auto stage_of = empty.view().stage_of;
  const detail::Pipeline pipeline(profile, {stage_of.begin(), stage_of.end()});
  detail::ScheduleSearch search(pipeline, goal, budget);
  const double cap = *std::min_element(pipeline.caps.begin(), pipeline.caps.end());
  const int live = static_cast<int>(std::min(cap, 1.0 * m * v));
  detail::for_each_named_traversal(p, m, live, [&](std::string_view name, const auto& policy) {
    if constexpr (std::same_as<decltype(placement_of(policy, place)), Placement>) {
      try {
        search.consider(name, detail::words_of(make_schedule(policy, p, m, v, place)));
      } catch (const Error& refusal) {
        if (refusal.code() != ErrorCode::usage) throw;
      }
    }
  });
  search.try_lists();
  search.improve();
  expects(!search.best.empty(), ErrorCode::logic, "the automatic scheduler found no order at all");
  Schedule schedule = detail::schedule_of(search.best, m, v, place);
  expect_valid(lower(schedule));
  detail::Stopwatch watch(pipeline);
  watch.run(search.best);
  Timing timing = simulate(schedule, std::span<const ActionTimes>(profile.times));
  return {std::move(schedule), std::move(search.best_name),  std::move(timing),
          watch.peak_memory(), std::move(search.candidates), search.tries};
}

}  // namespace mega::inline v0::dpp
