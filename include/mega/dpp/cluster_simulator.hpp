/// @file  A schedule's step on an imperfect cluster: stages of different cost, slow ranks, links of
/// finite bandwidth, random delays, finite slots, and ranks that choose their next action by
/// different rules. Included by name.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/look_ahead.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/timeline.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

/// A directed link between two ranks. It takes one message after the other, each for its bytes over
/// the bandwidth; a message arrives one latency after it has been taken, the next may follow at
/// once.
struct Link {
  double latency = 0;
  double bandwidth = std::numeric_limits<double>::infinity();  ///< bytes in a unit of time
};

/// Random disturbance. Each action and message has its own draw, whatever the order of execution,
/// so runs of one seed differ by their rules only.
struct Jitter {
  double compute = 0;     ///< durations are multiplied by a factor uniform in [1 - x, 1 + x)
  double link_delay = 0;  ///< mean of an exponential delay added to each message's latency
  std::uint64_t seed = 1;
};

/// What a schedule runs on. The default is the ideal machine of simulate(schedule, times).
struct Cluster {
  /// By stage, or a single entry for all. `hop` adds to the latency of the link.
  std::vector<ActionTimes> times{ActionTimes{}};
  std::vector<double> slowness{};  ///< [p] factors on the durations of a rank; empty: 1
  /// [p*p] link from rank a to b at a*p + b; a single entry for all; empty: ideal.
  std::vector<Link> links{};
  double message_bytes = 0;  ///< an activation or a gradient between two stages
  Jitter jitter{};
  /// [p*v] micro-batches that the chunk at rank*v + chunk can hold, as in verify(); empty:
  /// unlimited. With finite slots a chunk has two send buffers in each direction, as the executor
  /// has: one is filled while the other leaves.
  std::vector<int> slots{};
};

/// How a rank chooses its next action when it is free.
enum class DispatchRule : std::uint8_t {
  static_order,  ///< the next of its list, waiting for it
  look_ahead,    ///< LookAheadOrder over its list, `limit` forwards ahead
  /// No list: a backward and a forward in turn, each the first that is ready, breadth first:
  /// forwards by ascending chunk, backwards by descending chunk, then by micro-batch, in whatever
  /// order those arrive. Nothing bounds the activations. For comparison only. Source: the run-time
  /// rule of MegaDPP (OpenSQZ MegatronApp).
  greedy,
  /// greedy, with no forward while `limit` activations of the rank are live. Deadlocks easily:
  /// early chunks fill the memory that later chunks need before any backward can begin.
  capped_greedy,
};

[[nodiscard]] constexpr std::string_view to_string(DispatchRule rule) noexcept {
  switch (rule) {
    case DispatchRule::static_order: return "static order";
    case DispatchRule::look_ahead: return "look-ahead";
    case DispatchRule::greedy: return "greedy";
    case DispatchRule::capped_greedy: return "capped greedy";
  }
  return "unknown";
}

struct Dispatch {
  DispatchRule rule = DispatchRule::static_order;
  int limit = 0;
};

/// A rank that waits for ever, and one action that it has not done.
struct StuckRank {
  int rank = 0;
  Action action{};
};

struct ClusterRun {
  /// Of what has been run; makespan includes start skew, see Timing's two bubbles.
  Timing timing;
  Timeline timeline;
  TransferTime transfers;        ///< transfer_time(timeline)
  std::vector<StuckRank> stuck;  ///< empty unless the ranks came to wait for each other
  int unfinished = 0;            ///< compute actions not run for that reason

  [[nodiscard]] bool deadlocked() const noexcept { return unfinished > 0; }
};

/// A run without its timeline.
struct ClusterEstimate {
  Timing timing;
  TransferTime transfers;
  bool finished = true;  ///< false: the ranks came to wait for each other
};

namespace detail {

/// The greedy rules for one rank.
class GreedyOrder {
 public:
  GreedyOrder(std::span<const Action> actions, int m, int v, int cap) : m_(m), v_(v), cap_(cap) {
    done_[0].assign(place(v, 0), true);
    done_[1] = done_[0];
    for (const Action& a : actions) {
      if (!is_compute(a.kind)) continue;
      const bool whole = a.kind == ActionKind::forward || a.kind == ActionKind::backward;
      expects(whole && !a.with_next, ErrorCode::usage, [&] {
        return sentence("the greedy rules run forwards and whole backwards, not ", to_string(a));
      });
      done_[a.kind == ActionKind::backward][place(a.chunk, a.microbatch)] = false;
      ++left_;
    }
    first_[0].assign(place(v, 0) / static_cast<std::size_t>(m), 0);
    first_[1] = first_[0];
  }

  [[nodiscard]] int left() const noexcept { return left_; }

  template <readiness Ready>
  [[nodiscard]] std::optional<Action> next(const Ready& ready) const {
    for (const bool backwards : {backward_turn_, !backward_turn_}) {
      if (!backwards && live_ >= cap_) continue;
      const auto found = first_of(backwards, [&](const Action& a) {
        return (!backwards || done_[0][place(a.chunk, a.microbatch)]) && ready(a, false);
      });
      if (found) return found;
    }
    return std::nullopt;
  }

  void done(const Action& a) {
    const bool is_backward = a.kind == ActionKind::backward;
    done_[is_backward][place(a.chunk, a.microbatch)] = true;
    int& first = first_[is_backward][static_cast<std::size_t>(a.chunk)];
    while (first < m_ && done_[is_backward][place(a.chunk, first)]) ++first;
    live_ += is_backward ? -1 : 1;
    backward_turn_ = !is_backward;
    --left_;
  }

  /// One action not done. @pre left() > 0
  [[nodiscard]] Action any_left() const {
    const auto all = [](const Action&) { return true; };
    const auto found = first_of(false, all);
    return found ? *found : first_of(true, all).value();
  }

 private:
  [[nodiscard]] std::size_t place(int chunk, int microbatch) const noexcept {
    return static_cast<std::size_t>(chunk) * static_cast<std::size_t>(m_) +
           static_cast<std::size_t>(microbatch);
  }

  template <class Accept>
  [[nodiscard]] std::optional<Action> first_of(bool backwards, const Accept& accept) const {
    for (int i = 0; i < v_; ++i) {
      const int chunk = backwards ? v_ - 1 - i : i;
      for (int mb = first_[backwards][static_cast<std::size_t>(chunk)]; mb < m_; ++mb) {
        const Action a =
            make_action(backwards ? ActionKind::backward : ActionKind::forward, chunk, mb);
        if (!done_[backwards][place(chunk, mb)] && accept(a)) return a;
      }
    }
    return std::nullopt;
  }

  int m_, v_, cap_;
  std::vector<bool> done_[2];  // forwards, backwards; by chunk and micro-batch
  std::vector<int> first_[2];  // by chunk: all micro-batches below are done
  int live_ = 0;
  int left_ = 0;
  bool backward_turn_ = true;
};

/// A schedule's pipeline on a cluster: what actions and messages take.
class ClusterModel {
 protected:
  ClusterModel(const ScheduleView& schedule, const Cluster& cluster)
      : s_(schedule), cluster_(cluster) {
    check();
    for (int stage = 0; stage < s_.stages(); ++stage) rank_of_.push_back(s_.rank_of(stage));
    number_links();
  }

  static constexpr std::size_t index(int i) noexcept { return static_cast<std::size_t>(i); }

  const ActionTimes& times(int stage) const {
    return cluster_.times[cluster_.times.size() == 1 ? 0 : index(stage)];
  }
  [[nodiscard]] int rank_of(int stage) const { return rank_of_[index(stage)]; }
  [[nodiscard]] std::size_t cell(int stage, int microbatch) const {
    return index(stage) * index(s_.m) + index(microbatch);
  }
  [[nodiscard]] std::size_t link_place(int from, int to) const {
    return index(from) * index(s_.p) + index(to);
  }

  [[nodiscard]] std::size_t wires() const noexcept { return wires_.size(); }

  /// Directed links that some message takes, however many stages share them.
  void number_links() {
    std::vector<std::size_t> places;
    const auto each_edge = [&](const auto& visit) {
      for (int stage = 0; stage < s_.stages(); ++stage) {
        if (stage + 1 < s_.stages()) visit(0, stage, s_.rank_of(stage), s_.rank_of(stage + 1));
        if (stage > 0) visit(1, stage, s_.rank_of(stage), s_.rank_of(stage - 1));
      }
    };
    each_edge([&](int, int, int from, int to) { places.push_back(link_place(from, to)); });
    std::sort(places.begin(), places.end());
    places.erase(std::unique(places.begin(), places.end()), places.end());
    for (const std::size_t place : places) {
      const Link link = cluster_.links.empty()       ? Link{}
                        : cluster_.links.size() == 1 ? cluster_.links[0]
                                                     : cluster_.links[place];
      wires_.push_back({link.latency, cluster_.message_bytes / link.bandwidth, 0.0});
    }
    for (auto& wire : wire_of_) wire.assign(index(s_.stages()), 0);
    each_edge([&](int direction, int stage, int from, int to) {
      const auto at = std::lower_bound(places.begin(), places.end(), link_place(from, to));
      wire_of_[direction][index(stage)] = static_cast<std::size_t>(at - places.begin());
    });
  }

  /// Uniform in [0, 1), by what the draw is for.
  [[nodiscard]] double draw(int stage, int microbatch, int use) const {
    const RandomKey key{.seed = cluster_.jitter.seed,
                        .layer = static_cast<std::uint32_t>(stage),
                        .use = RandomUse::sample};
    return key.uniform(Index{microbatch} * 16 + use);
  }

  [[nodiscard]] double duration(int rank, const Action& a, const Action* partner) const {
    const int stage = s_.stage(rank, a.chunk);
    double time =
        partner == nullptr
            ? times(stage).of(a.kind)
            : pair_time(times(stage), a.kind, times(s_.stage(rank, partner->chunk)), partner->kind);
    if (!cluster_.slowness.empty()) time *= cluster_.slowness[index(rank)];
    if (cluster_.jitter.compute > 0) {
      time *= 1 + cluster_.jitter.compute *
                      (2 * draw(stage, a.microbatch, static_cast<int>(a.kind)) - 1);
    }
    return time;
  }

  /// A message between two ranks.
  struct Passage {
    int from = 0;
    int to = 0;
    std::size_t wire = 0;
    double start = 0;
    double left = 0;  ///< its buffer is free again
    double arrival = 0;
  };

  /// The message that a stage has ready at `now`; in the order in which its rank has them ready.
  /// @pre  the stage that consumes it is on another rank
  [[nodiscard]] Passage carry(int stage, bool gradient, int microbatch, double now) {
    const std::size_t number = wire_of_[gradient ? 1 : 0][index(stage)];
    Wire& wire = wires_[number];
    Passage way{rank_of(stage), rank_of(gradient ? stage - 1 : stage + 1), number,
                std::max(now, wire.free)};
    way.left = wire.free = way.start + wire.occupied;
    way.arrival = wire.free + wire.latency + times(stage).hop;
    if (cluster_.jitter.link_delay > 0) {
      way.arrival -=
          cluster_.jitter.link_delay * std::log1p(-draw(stage, microbatch, gradient ? 15 : 14));
    }
    return way;
  }

  ScheduleView s_;
  const Cluster& cluster_;

 private:
  struct Wire {
    double latency = 0;
    double occupied = 0;  ///< time that a message takes it for
    double free = 0;      ///< when it takes the next message
  };

  void check() const {
    const auto p = index(s_.p);
    const auto fits = [&](std::size_t given, std::size_t wanted, std::string_view what) {
      expects(given == wanted, ErrorCode::usage, [&] {
        return sentence("the cluster has ", what, " for ", given, " entries, not ", wanted);
      });
    };
    if (cluster_.times.size() != 1) fits(cluster_.times.size(), s_.place_of.size(), "stage times");
    if (!cluster_.slowness.empty()) fits(cluster_.slowness.size(), p, "slowness");
    if (cluster_.links.size() > 1) fits(cluster_.links.size(), p * p, "links");
    if (!cluster_.slots.empty()) fits(cluster_.slots.size(), s_.place_of.size(), "slots");
    expects(cluster_.jitter.compute >= 0 && cluster_.jitter.compute <= 1, ErrorCode::usage, [&] {
      return sentence("compute jitter ", cluster_.jitter.compute, " is outside 0..1");
    });
  }

  std::vector<int> rank_of_;  // by stage
  std::vector<Wire> wires_;
  std::vector<std::size_t> wire_of_[2];  // by stage that sends: outputs, gradients
};

/// One run of a schedule, event by event.
class ClusterSimulation : private ClusterModel {
 public:
  ClusterSimulation(const ScheduleView& schedule, const Cluster& cluster, Dispatch dispatch)
      : ClusterModel(schedule, cluster), greedy_rule_(is_greedy(dispatch.rule)) {
    check(dispatch);
    const auto p = index(s_.p);
    const auto stages = index(s_.stages());
    for (int rank = 0; rank < s_.p; ++rank) {
      if (greedy_rule_) {
        const bool capped = dispatch.rule == DispatchRule::capped_greedy;
        greedy_.emplace_back(s_.of_rank(rank), s_.m, s_.v,
                             capped ? dispatch.limit : std::numeric_limits<int>::max());
      } else {
        ordered_.emplace_back(s_.of_rank(rank),
                              dispatch.rule == DispatchRule::look_ahead ? dispatch.limit : 0);
      }
    }
    ranks_.resize(p);
    run_.timeline.ranks.resize(p);
    for (int rank = 0; rank < s_.p; ++rank) {
      run_.timeline.ranks[index(rank)].reserve(s_.of_rank(rank).size());
    }
    here_[0].assign(stages * index(s_.m), false);
    here_[1] = here_[0];
    occupied_.assign(stages, 0);
    for (auto& used : buffers_used_) used.assign(stages, 0);
    waiting_.resize(stages);
  }

  ClusterRun run() {
    for (int rank = 0; rank < s_.p; ++rank) start_next(rank);
    while (!events_.empty()) {
      now_ = events_.top().time;
      // All that happens at one time happens before anyone chooses.
      while (!events_.empty() && events_.top().time == now_) {
        const Event event = events_.top();
        events_.pop();
        happen(event);
      }
      for (const int rank : touched_) {
        ranks_[index(rank)].touched = false;
        start_next(rank);
      }
      touched_.clear();
    }
    return report();
  }

 private:
  static constexpr int send_buffers = 2;
  static constexpr bool is_greedy(DispatchRule rule) noexcept {
    return rule == DispatchRule::greedy || rule == DispatchRule::capped_greedy;
  }

  struct Rank {
    std::optional<Action> running;  ///< with its partner, if it is the first half of a fused pair
    Action partner{};
    bool touched = false;  ///< something happened that it may have waited for
    bool started = false;
    int live = 0;
    int peak = 0;
    double busy = 0;
    double first_start = 0;
    double last_end = 0;
  };

  enum class Happening : std::uint8_t { computed, arrived, left };

  struct Event {
    double time = 0;
    std::uint64_t number = 0;  ///< events of one time happen in the order in which they were made
    Happening what = Happening::computed;
    bool gradient = false;
    int where = 0;  ///< computed: rank; arrived: stage that consumes; left: stage that produced
    int microbatch = 0;

    friend bool operator>(const Event& a, const Event& b) noexcept {
      return a.time != b.time ? a.time > b.time : a.number > b.number;
    }
  };

  static void check(Dispatch dispatch) {
    expects(
        dispatch.rule != DispatchRule::capped_greedy || dispatch.limit >= 1, ErrorCode::usage, [&] {
          return sentence("the cap of ", dispatch.limit, " live activations must be at least 1");
        });
  }

  // --- choosing ---

  [[nodiscard]] bool finite() const noexcept { return !cluster_.slots.empty(); }
  [[nodiscard]] bool slot_is_free(int stage) const {
    return occupied_[index(stage)] < cluster_.slots[index(s_.place_of[index(stage)])];
  }

  [[nodiscard]] bool is_ready(int rank, const Action& a, bool ahead) const {
    if (a.kind == ActionKind::backward_weight) return true;
    const int stage = s_.stage(rank, a.chunk);
    const bool is_forward = a.kind == ActionKind::forward;
    const int source = is_forward ? stage - 1 : stage + 1;
    const bool needs_message = 0 <= source && source < s_.stages();
    if (needs_message && !here_[is_forward ? 0 : 1][cell(stage, a.microbatch)]) return false;
    if (!finite()) return true;
    const int target = is_forward ? stage + 1 : stage - 1;
    const bool sends = 0 <= target && target < s_.stages();
    if (sends && buffers_used_[is_forward ? 0 : 1][index(stage)] == send_buffers) return false;
    if (is_forward && stage == 0 && !slot_is_free(0)) return false;
    return !(ahead && is_forward && sends && !slot_is_free(target));
  }

  void touch(int rank) {
    Rank& at = ranks_[index(rank)];
    if (at.touched || at.running) return;
    at.touched = true;
    touched_.push_back(rank);
  }

  void start_next(int rank) {
    Rank& at = ranks_[index(rank)];
    if (at.running) return;
    const auto ready = [&](const Action& a, bool ahead) { return is_ready(rank, a, ahead); };
    const Action* partner = nullptr;
    if (greedy_rule_) {
      at.running = greedy_[index(rank)].next(ready);
      if (!at.running) return;
      greedy_[index(rank)].done(*at.running);
    } else {
      LookAheadOrder& order = ordered_[index(rank)];
      const auto position = order.next(ready);
      if (!position) return;
      at.running = order[*position];
      if (at.running->with_next) {
        at.partner = order[*position + 1];
        partner = &at.partner;
      }
      order.done(*position);
    }
    begin(rank, *at.running);
    if (partner != nullptr) begin(rank, *partner);
    const double time = duration(rank, *at.running, partner);
    if (!at.started) at.first_start = now_;
    at.started = true;
    at.busy += time;
    at.last_end = now_ + time;
    run_.timeline.ranks[index(rank)].push_back({*at.running, now_, at.last_end});
    if (partner != nullptr) {
      run_.timeline.ranks[index(rank)].push_back({*partner, now_, at.last_end});
    }
    add(at.last_end, Happening::computed, rank);
  }

  /// What an action takes as it starts: a slot of the first stage, a send buffer.
  void begin(int rank, const Action& a) {
    const int stage = s_.stage(rank, a.chunk);
    const bool is_forward = a.kind == ActionKind::forward;
    if (is_forward && stage == 0) ++occupied_[0];
    if (is_forward && stage + 1 < s_.stages()) ++buffers_used_[0][index(stage)];
    if (gives_input_gradient(a.kind) && stage > 0) ++buffers_used_[1][index(stage)];
  }

  // --- what happens ---

  void add(double time, Happening what, int where, bool gradient = false, int microbatch = 0) {
    events_.push({time, events_made_++, what, gradient, where, microbatch});
  }

  void happen(const Event& event) {
    switch (event.what) {
      case Happening::computed: {
        Rank& at = ranks_[index(event.where)];
        const Action a = *at.running;
        at.running.reset();
        // Both halves of a pair hold their activations until it ends: the forward counts first.
        const bool forward_second = a.with_next && a.kind != ActionKind::forward;
        if (forward_second) finish(event.where, at.partner);
        finish(event.where, a);
        if (a.with_next && !forward_second) finish(event.where, at.partner);
        touch(event.where);
        break;
      }
      case Happening::arrived:
        here_[event.gradient ? 1 : 0][cell(event.where, event.microbatch)] = true;
        touch(s_.rank_of(event.where));
        break;
      case Happening::left:
        --buffers_used_[event.gradient ? 1 : 0][index(event.where)];
        touch(s_.rank_of(event.where));
        break;
    }
  }

  void finish(int rank, const Action& a) {
    Rank& at = ranks_[index(rank)];
    const int stage = s_.stage(rank, a.chunk);
    if (a.kind == ActionKind::forward) {
      at.peak = std::max(at.peak, ++at.live);
      if (stage + 1 < s_.stages()) {
        if (finite() && !slot_is_free(stage + 1)) {
          waiting_[index(stage + 1)].push(a.microbatch);
        } else {
          enter(stage + 1, a.microbatch);
        }
      }
    }
    if (gives_input_gradient(a.kind) && stage > 0) send(stage, true, a.microbatch);
    if (!gives_weight_gradient(a.kind)) return;
    --at.live;
    --occupied_[index(stage)];
    if (!finite() || stage == 0) return;
    if (auto& queue = waiting_[index(stage)]; !queue.empty()) {
      enter(stage, queue.front());
      queue.pop();
    }
    touch(s_.rank_of(stage - 1));
  }

  /// The micro-batch takes a slot of the stage and sets out for it.
  void enter(int stage, int microbatch) {
    ++occupied_[index(stage)];
    send(stage - 1, false, microbatch);
  }

  void send(int stage, bool gradient, int microbatch) {
    const int target = gradient ? stage - 1 : stage + 1;
    const int from = rank_of(stage);
    const int to = rank_of(target);
    if (from == to) {
      here_[gradient ? 1 : 0][cell(target, microbatch)] = true;
      --buffers_used_[gradient ? 1 : 0][index(stage)];
      return;  // the rank itself is about to choose
    }
    const Passage way = carry(stage, gradient, microbatch, now_);
    add(way.arrival, Happening::arrived, target, gradient, microbatch);
    if (finite()) add(way.left, Happening::left, stage, gradient);
    const auto action = [&](ActionKind kind, int of) {
      return make_action(kind, s_.chunk_of(of), microbatch);
    };
    run_.timeline.transfers.push_back(
        {from, to, action(gradient ? ActionKind::send_backward : ActionKind::send_forward, stage),
         action(gradient ? ActionKind::recv_backward : ActionKind::recv_forward, target), way.start,
         way.arrival});
  }

  ClusterRun report() {
    Timing& timing = run_.timing;
    for (int rank = 0; rank < s_.p; ++rank) {
      const Rank& at = ranks_[index(rank)];
      timing.peak_per_rank.push_back(at.peak);
      timing.busy = std::max(timing.busy, at.busy);
      timing.makespan = std::max(timing.makespan, at.last_end);
      timing.longest_span = std::max(timing.longest_span, at.last_end - at.first_start);
      int left = 0;
      if (greedy_rule_) {
        left = greedy_[index(rank)].left();
        if (left > 0) run_.stuck.push_back({rank, greedy_[index(rank)].any_left()});
      } else {
        const LookAheadOrder& order = ordered_[index(rank)];
        left = order.size() - static_cast<int>(run_.timeline.ranks[index(rank)].size());
        if (left > 0) run_.stuck.push_back({rank, order[order.statically_next()]});
      }
      run_.unfinished += left;
    }
    auto& transfers = run_.timeline.transfers;
    const auto earlier = [](const Transfer& a, const Transfer& b) { return a.start < b.start; };
    if (!std::is_sorted(transfers.begin(), transfers.end(), earlier)) {
      std::stable_sort(transfers.begin(), transfers.end(), earlier);
    }
    run_.transfers = transfer_time(run_.timeline);
    return std::move(run_);
  }

  bool greedy_rule_;
  std::vector<LookAheadOrder> ordered_;  // by rank; empty under the greedy rules
  std::vector<GreedyOrder> greedy_;      // by rank; empty otherwise
  std::vector<Rank> ranks_;
  std::vector<bool> here_[2];             // [stages, m] input activation, gradient of the output
  std::vector<int> occupied_;             // slots of the stage taken
  std::vector<int> buffers_used_[2];      // by stage: outputs, gradients of inputs not yet gone
  std::vector<std::queue<int>> waiting_;  // by stage: micro-batches that want one of its slots
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t events_made_ = 0;
  std::vector<int> touched_;
  double now_ = 0;
  ClusterRun run_;
};

/// A run in the static order on slots without end. Then nobody chooses, so ranks can be run one
/// after the other, each as far as its inputs are known, and no event has to be kept.
class StaticSimulation : private ClusterModel {
 public:
  StaticSimulation(const ScheduleView& schedule, const Cluster& cluster)
      : ClusterModel(schedule, cluster), ranks_(index(s_.p)), under_way_(wires()) {
    expects(cluster.slots.empty(), ErrorCode::usage,
            "an estimate knows no slots; simulate() the schedule instead");
    for (auto& here : here_) here.assign(cell(s_.stages(), 0), not_here);
  }

  ClusterEstimate run() {
    std::vector<int> runnable;
    for (int rank = s_.p - 1; rank >= 0; --rank) runnable.push_back(rank);
    while (!runnable.empty()) {
      const int rank = runnable.back();
      runnable.pop_back();
      advance(rank, runnable);
    }
    return report();
  }

 private:
  static constexpr double not_here = -1;

  struct Span {
    double start = 0;
    double end = 0;
  };
  /// Messages of a link, which takes them in the order of their starts.
  struct UnderWay {
    int to = 0;
    std::vector<Span> spans{};
  };
  struct Rank {
    std::size_t next = 0;  ///< of its list
    bool waits = false;    ///< for its next action's input
    double free = 0;
    double busy = 0;
    double first_start = -1;
    int live = 0, peak = 0;
    std::vector<Span> computed;  ///< neighbours that touch are one
  };

  static void join(std::vector<Span>& spans, double start, double end) {
    if (start == end) return;
    if (!spans.empty() && start <= spans.back().end) {
      spans.back().end = std::max(spans.back().end, end);
    } else {
      spans.push_back({start, end});
    }
  }

  /// When the input is here, or not_here.
  [[nodiscard]] double input(int rank, const Action& a) const {
    if (a.kind == ActionKind::backward_weight) return 0;
    const int stage = s_.stage(rank, a.chunk);
    const bool gradient = a.kind != ActionKind::forward;
    const int source = gradient ? stage + 1 : stage - 1;
    if (source < 0 || source == s_.stages()) return 0;
    return here_[gradient ? 1 : 0][cell(stage, a.microbatch)];
  }

  void advance(int rank, std::vector<int>& runnable) {
    Rank& at = ranks_[index(rank)];
    at.waits = false;
    const auto list = s_.of_rank(rank);
    for (;;) {
      while (at.next < list.size() && !is_compute(list[at.next].kind)) ++at.next;
      if (at.next == list.size()) return;
      const Action& a = list[at.next];
      const Action* const partner = a.with_next ? &list[at.next + 1] : nullptr;
      const double own = input(rank, a);
      const double other = partner != nullptr ? input(rank, *partner) : 0;
      at.waits = own == not_here || other == not_here;
      if (at.waits) return;
      const double start = std::max({at.free, own, other});
      const double time = duration(rank, a, partner);
      at.free = start + time;
      at.busy += time;
      if (at.first_start < 0) at.first_start = start;
      join(at.computed, start, at.free);
      at.next += partner != nullptr ? 2 : 1;
      // Both halves of a pair hold their activations until it ends: the forward counts first.
      const bool forward_second = partner != nullptr && a.kind != ActionKind::forward;
      if (forward_second) finish(rank, *partner, runnable);
      finish(rank, a, runnable);
      if (partner != nullptr && !forward_second) finish(rank, *partner, runnable);
    }
  }

  void finish(int rank, const Action& a, std::vector<int>& runnable) {
    Rank& at = ranks_[index(rank)];
    const int stage = s_.stage(rank, a.chunk);
    if (a.kind == ActionKind::forward) {
      at.peak = std::max(at.peak, ++at.live);
      if (stage + 1 < s_.stages()) deliver(rank, stage, false, a.microbatch, runnable);
    }
    if (gives_input_gradient(a.kind) && stage > 0)
      deliver(rank, stage, true, a.microbatch, runnable);
    if (gives_weight_gradient(a.kind)) --at.live;
  }

  void deliver(int rank, int stage, bool gradient, int microbatch, std::vector<int>& runnable) {
    const int target = gradient ? stage - 1 : stage + 1;
    double& arrival = here_[gradient ? 1 : 0][cell(target, microbatch)];
    arrival = ranks_[index(rank)].free;
    const int to = rank_of(target);
    if (to == rank) return;
    const Passage way = carry(stage, gradient, microbatch, arrival);
    arrival = way.arrival;
    UnderWay& messages = under_way_[way.wire];
    messages.to = to;
    join(messages.spans, way.start, way.arrival);
    Rank& receiver = ranks_[index(to)];
    if (!receiver.waits) return;
    receiver.waits = false;
    runnable.push_back(to);
  }

  ClusterEstimate report() {
    ClusterEstimate out;
    std::vector<std::vector<const UnderWay*>> incoming(ranks_.size());
    for (const UnderWay& messages : under_way_) incoming[index(messages.to)].push_back(&messages);
    for (int rank = 0; rank < s_.p; ++rank) {
      const Rank& at = ranks_[index(rank)];
      out.timing.peak_per_rank.push_back(at.peak);
      out.timing.busy = std::max(out.timing.busy, at.busy);
      out.timing.makespan = std::max(out.timing.makespan, at.free);
      out.timing.longest_span = std::max(out.timing.longest_span, at.free - at.first_start);
      out.finished = out.finished && !at.waits;
      Timeline own;  // the rank by itself, of joined spans
      auto& computed = own.ranks.emplace_back();
      for (const Span& span : at.computed) computed.push_back({{}, span.start, span.end});
      for (const UnderWay* const messages : incoming[index(rank)]) {
        const auto before = static_cast<std::ptrdiff_t>(own.transfers.size());
        for (const Span& span : messages->spans)
          own.transfers.push_back({0, 0, {}, {}, span.start, span.end});
        const auto earlier = [](const Transfer& a, const Transfer& b) { return a.start < b.start; };
        std::inplace_merge(own.transfers.begin(), own.transfers.begin() + before,
                           own.transfers.end(), earlier);
      }
      const TransferTime time = transfer_time(own);
      out.transfers.total += time.total;
      out.transfers.covered += time.covered;
    }
    return out;
  }

  std::vector<Rank> ranks_;
  std::vector<UnderWay> under_way_;  // by wire
  std::vector<double> here_[2];      // [stages, m] when the input activation, the gradient arrives
};

}  // namespace detail

/// Runs the compute actions of a schedule, lowered or not, on a cluster. Reductions take no time.
/// Equal arguments give equal results. A deadlock ends the run and is reported, not thrown.
/// Throws Error(usage) where the cluster's extents are not those of the schedule, where a rank's
/// list breaks the order of a chunk, or where a greedy rule meets split or fused backwards.
/// @pre actions within the pipeline's bounds   @cost  O(log p) an action, 64 bytes an action and
/// its message
[[nodiscard]] inline ClusterRun simulate(const ScheduleView& schedule, const Cluster& cluster,
                                         Dispatch dispatch = {}) {
  return detail::ClusterSimulation(schedule, cluster, dispatch).run();
}

/// The figures of simulate(schedule, cluster) in the static order without keeping a timeline: some
/// ten times as fast, for pipelines of a thousand stages. Transfers are summed in another order.
/// Throws Error(usage) for a cluster of finite slots, and where simulate() does.
/// @pre actions within the pipeline's bounds   @cost  O(1) an action, 16 bytes a micro-batch
/// of a stage
[[nodiscard]] inline ClusterEstimate estimate(const ScheduleView& schedule,
                                              const Cluster& cluster) {
  return detail::StaticSimulation(schedule, cluster).run();
}

}  // namespace mega::inline v0::dpp
