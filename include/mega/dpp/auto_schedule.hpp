/// @file  Search for the best pipeline order, on one placement or several, from measured stage
/// times and memory caps. Run time only, for start-up and tools; not part of mega.hpp.
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
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
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
  /// [p*v] slots of the place rank*v + chunk with which the order has to run to its end, as
  /// verify() judges; empty: as many as it requires. No chunk then holds more live activations
  /// either.
  std::vector<int> slots = {};
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
  int tries = 1000;  ///< orders timed by the local search of each placement, each at the cost of
                     ///< all its actions
  double seconds = std::numeric_limits<double>::infinity();  ///< of the whole call
  std::uint64_t seed = 0;
};

/// A candidate of the search that fits the caps, and its figures.
struct ScheduleCandidate {
  std::string name;
  double makespan = 0;
  double longest_span = 0;
  std::string_view placement;  ///< its name
};

struct AutoSchedule {
  Schedule schedule;           ///< compute actions; lower() makes it executable
  std::string candidate;       ///< where it came from
  std::string_view placement;  ///< name of the placement that it is on
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
  for (const std::vector<int>* const room : {&profile.chunk_caps, &profile.slots}) {
    expects(room->empty() || room->size() == stages, ErrorCode::usage, [&] {
      return sentence("the profile has room for micro-batches of ", room->size(),
                      " chunks, not of p*v = ", stages);
    });
    for (const int& count : *room) {
      expects(count >= 1, ErrorCode::usage, [&] {
        return sentence("place ", &count - room->data(), " has room for ", count,
                        " micro-batches; it needs room for at least 1");
      });
    }
  }
  for (const double& cap : profile.caps) {
    expects(cap >= profile.v, ErrorCode::usage, [&] {
      return sentence("rank ", &cap - profile.caps.data(), " may hold ", cap,
                      " live activations, but one micro-batch alone keeps one on each of its "
                      "chunks; the smallest valid cap is v = ",
                      profile.v);
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
    for (std::size_t place = 0; place < profile.slots.size(); ++place)
      chunk_caps[place] = std::min(chunk_caps[place], profile.slots[place]);
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

/// The words as lists of actions of the pipeline.
inline Schedule schedule_of(const Words& words, const ScheduleView& pipeline) {
  Schedule made(pipeline);
  std::vector<Action> list;
  for (const auto& word : words) {
    list.clear();
    number_letters(word, pipeline.v, [&](const Letter& letter, int microbatch) {
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
    if (cost.goal != best.cost.goal) return cost.goal < best.cost.goal;
    if (peak > best.peak + memory_slack) return false;
    return peak < best.peak - memory_slack || cost < best.cost;
  }
};

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
  /// @param empty  a schedule of the pipeline
  /// @param slots  as those of the profile
  ScheduleSearch(const Pipeline& pipeline, const ScheduleView& empty, std::span<const int> slots,
                 ScheduleGoal goal, const SearchBudget& budget)
      : pipe_(pipeline),
        empty_(empty),
        slots_(slots),
        goal_(goal),
        budget_(budget),
        begin_(std::chrono::steady_clock::now()),
        watch_(pipeline),
        random_(budget.seed) {}

  /// Times the words; those that exceed a cap or do not run with the slots are no candidate.
  void consider(std::string_view name, const Words& words) {
    if (!watch_.run(words) || !runs_with_slots(words)) return;
    candidates.push_back({std::string(name), watch_.makespan(), watch_.longest_span(), {}});
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
              if (is_best_list(rules, words)) best_list = std::move(words);
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
      if (is_best_list(rules, words)) keep_if_better("list, rules varied", words);
    }
    move_letters();
  }

  Words best;
  std::string best_name;
  Rating rating;  ///< of the best
  std::vector<ScheduleCandidate> candidates;
  int tries = 0;

 private:
  /// @pre watch_.run(words) and runs_with_slots(words) gave true
  void keep_if_better(std::string_view name, const Words& words) {
    const auto& peaks = watch_.peak_memory();
    const Rating now{cost_of(watch_, goal_), *std::max_element(peaks.begin(), peaks.end())};
    if (!now.is_better_than(rating)) return;
    rating = now;
    best = words;
    best_name = name;
  }

  [[nodiscard]] bool runs_with_slots(const Words& words) const {
    return slots_.empty() ||
           ListRun(lower(schedule_of(words, empty_)).view(), slots_, Transport::slots()).finish();
  }

  /// Times a list schedule, and makes its rules the ones to vary if no other was better.
  bool is_best_list(const ListRules& rules, const Words& words) {
    if (!watch_.run(words)) return false;
    const Cost cost = cost_of(watch_, goal_);
    if (list_cost_ < cost || !runs_with_slots(words)) return false;
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
    if (!watch_.run(words) || !runs_with_slots(words)) return;
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
        moved = !(cost < now) && runs_with_slots(words);
      }
      if (moved) {
        cost = cost_of(watch_, goal_);
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
  ScheduleView empty_;
  std::span<const int> slots_;
  ScheduleGoal goal_;
  SearchBudget budget_;
  std::chrono::steady_clock::time_point begin_;
  Stopwatch watch_;
  SearchRandom random_;
  ListRules rules_;  // of the best list schedule
  Cost list_cost_;
};

/// From `first` to `last`, both included, in even steps of which there are at most 32.
template <class Visit>
void for_each_between(int first, int last, const Visit& visit) {
  const int step = std::max(1, (last - first + 31) / 32);
  for (int value = first; value < last; value += step) visit(value);
  visit(last);
}

/// `pending` weight gradients may wait on the first rank, and `per_rank` more on each next one.
struct EvenDelay {
  static constexpr std::string_view name = "even";
  int start = 0;
  int per_rank = 0;
  [[nodiscard]] constexpr int pending(int rank, int, int, int) const noexcept {
    return start + per_rank * rank;
  }
};

/// Calls visit(name, policy) for a traversal with its weight gradients apart.
template <traversal_policy Base, class Visit>
void with_each_delay(const std::string& name, const Base& base, int p, int m, int v,
                     const Visit& visit) {
  const auto with = [&](const std::string& delay, EvenDelay waits) {
    visit(name + ", W " + delay, SplitBackward<Base, EvenDelay>{base, waits});
  };
  with("at once", {});
  with("by rank", {0, 1});
  with("by rank, twice", {0, 2});
  const int most = std::min(2 * p, m) * v;
  for (int pending = 1; pending <= most; pending *= 2)
    with(sentence("pending ", pending), {pending, 0});
  with("at end", {m * v, 0});
}

/// Calls visit(name, policy) for every named traversal of v chunks: those of one chunk, group sizes
/// from p to m, caps of the V schedules from 2 to 2p (of many sizes or caps 33 each), and pending
/// weight gradients in powers of two. Those that refuse p or m, need another placement, deadlock on
/// this one or exceed a cap drop out later. Of equal orders the first gives its name.
template <class Visit>
void for_each_named_traversal(int p, int m, int v, const Visit& visit) {
  if (v == 1) {
    visit("1f1b", OneForwardOneBackward{});
    visit("zb_h1", ZeroBubbleH1{});
    visit("zb_h2", ZeroBubbleH2{});
    visit("eager_1f1b", EagerOneForwardOneBackward{});
    with_each_delay("1f1b", OneForwardOneBackward{}, p, m, v, visit);
    with_each_delay("eager_1f1b", EagerOneForwardOneBackward{}, p, m, v, visit);
  } else {
    for_each_between(p, std::max(p, m), [&](int group) {
      const std::string name = group == p   ? "dfc"
                               : group == m ? "bfc"
                                            : sentence("group size ", group);
      visit(name, Interleaved{{group}});
      with_each_delay(name, Interleaved{{group}}, p, m, v, visit);
    });
  }
  visit("gpipe", GPipe{});
  with_each_delay("gpipe", GPipe{}, p, m, v, visit);
  if (v != 2) return;
  visit("zb_v", ZeroBubbleV{});
  visit("v_half", VHalf{});
  visit("v_min", VMin{});
  for_each_between(2, 2 * p,
                   [&](int cap) { visit(sentence("v_schedule of cap ", cap), VSchedule{{cap}}); });
  visit("dual_pipe_v", DualPipeV{});
}

/// Where an order may stand.
struct Site {
  Schedule empty;
  std::string_view placement;  ///< its name

  [[nodiscard]] bool has_stages_of(const ScheduleView& other) const {
    const auto own = empty.view().stage_of;
    return std::equal(own.begin(), own.end(), other.stage_of.begin());
  }
};

/// The best order on one site, and its rating.
struct SiteResult {
  AutoSchedule found;
  Rating rating;
};

inline SiteResult search_site(const PipelineProfile& profile, ScheduleGoal goal,
                              const SearchBudget& budget, const Site& site) {
  const int p = profile.p;
  const int m = profile.m;
  const int v = profile.v;
  const auto stage_of = site.empty.view().stage_of;
  const Pipeline pipeline(profile, {stage_of.begin(), stage_of.end()});
  ScheduleSearch search(pipeline, site.empty, profile.slots, goal, budget);
  for_each_named_traversal(p, m, v, [&](const std::string& name, const auto& policy) {
    if constexpr (brings_placement<std::remove_cvref_t<decltype(policy)>>) {
      if (!site.has_stages_of(Schedule(p, m, v, policy.placement()))) return;
    }
    try {
      search.consider(name, words_of(make_schedule(policy, p, m, v)));
    } catch (const Error& refusal) {
      if (refusal.code() != ErrorCode::usage) throw;
    }
  });
  search.try_lists();
  search.improve();
  for (ScheduleCandidate& candidate : search.candidates) candidate.placement = site.placement;
  AutoSchedule found{site.empty, std::move(search.best_name),  site.placement, {},
                     {},         std::move(search.candidates), search.tries};
  if (search.best.empty()) return {std::move(found), {}};
  found.schedule = schedule_of(search.best, site.empty);
  expect_valid(lower(found.schedule));
  Stopwatch watch(pipeline);
  watch.run(search.best);
  found.memory_per_rank = watch.peak_memory();
  found.timing = simulate(found.schedule, std::span<const ActionTimes>(profile.times));
  return {std::move(found), search.rating};
}

inline AutoSchedule search_sites(const PipelineProfile& profile, ScheduleGoal goal,
                                 const SearchBudget& budget, std::span<const Site> sites) {
  const auto begin = std::chrono::steady_clock::now();
  std::optional<SiteResult> best;
  std::vector<ScheduleCandidate> candidates;
  int tries = 0;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    const auto same = [&](const Site& earlier) { return sites[i].has_stages_of(earlier.empty); };
    if (std::any_of(sites.begin(), sites.begin() + static_cast<std::ptrdiff_t>(i), same)) continue;
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    SearchBudget own = budget;
    own.seconds = (budget.seconds - spent.count()) / static_cast<double>(sites.size() - i);
    SiteResult result = search_site(profile, goal, own, sites[i]);
    const auto& found = result.found.candidates;
    candidates.insert(candidates.end(), found.begin(), found.end());
    tries += result.found.tries;
    if (!best || result.rating.is_better_than(best->rating)) best = std::move(result);
  }
  expects(best->rating.peak < never, ErrorCode::usage,
          "the automatic scheduler found no order that runs with the slots of the profile");
  best->found.candidates = std::move(candidates);
  best->found.tries = tries;
  return std::move(best->found);
}

}  // namespace detail

/// The best order found for the profile on the given placements; on LoopPlacement where none is
/// given. auto_schedule(profile, goal, budget, LoopPlacement{}, VPlacement{}) tries both.
///
/// Candidates, on each placement: the named traversals, among them all group sizes from p to m, the
/// V schedules of all caps from 2 to 2p (33 of each where there are more) and backwards split with
/// several delays; and list schedules in which a rank takes an input gradient before a forward
/// before a weight gradient, for several limits of how far forwards run ahead and of how well a
/// weight gradient must fit the gap it fills. Then a local search varies the rules of the best list
/// schedule and moves single actions on the critical path. What exceeds a cap is no candidate; of
/// equally short orders the one with the least peak of any rank wins, then the one that came first.
/// Every order keeps the micro-batches of a (chunk, kind) ascending and is proven by verify().
/// @param places  which rank holds which stage; the times are by stage, so they are the same on
/// all.
///                Policies made for another placement stay out; a placement with every stage where
///                an earlier one has it is passed over
/// Throws Error(usage) where the profile is impossible: a cap below v, which one micro-batch alone
/// needs, times and sizes that do not fit each other, or slots with which no order is found to run.
/// @cost  of each placement, linear in the 3*p*m*v actions: up to some 400 named candidates at 0.05
///        us an action, 240 list schedules, 480 for v > 1, at 0.1 us, and budget.tries at 0.01 us
///        for the moves of the search
/// @determinism  equal arguments give equal orders while budget.seconds is not spent
template <placement... Placements>
[[nodiscard]] AutoSchedule auto_schedule(const PipelineProfile& profile,
                                         ScheduleGoal goal = ScheduleGoal::makespan,
                                         const SearchBudget& budget = {}, Placements... places) {
  if constexpr (sizeof...(places) == 0) {
    return auto_schedule(profile, goal, budget, LoopPlacement{});
  } else {
    detail::expect_profile(profile);
    const auto site = [&]<placement P>(const P& place) {
      return detail::Site{Schedule(profile.p, profile.m, profile.v, place), P::name};
    };
    const std::array<detail::Site, sizeof...(places)> sites{site(places)...};
    return detail::search_sites(profile, goal, budget, sites);
  }
}

}  // namespace mega::inline v0::dpp
