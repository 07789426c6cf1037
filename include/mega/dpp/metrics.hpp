/// @file  Windows and ratios of a measured pipeline as MegatronApp defines them, with the coverage
/// of transfers by compute that they leave out. Knows no file format. Included by name.
///
/// - send window of ranks a -> b: mean over messages of (start of the consumer - end of the
///   producer): the time that a transfer may take unseen, not the time that it takes
/// - send ratio: geometric mean over iterations of (sum of the windows / iteration of the LAST
///   rank); windows overlap, so it may exceed 1
/// - compute window of a rank: mean duration of a compute action
/// - compute ratio: geometric mean over iterations of (time in compute / iteration)
/// - reduce window of a rank: mean of (end of the iteration - when its last compute action was
///   done): gradient reduction, optimizer and waiting for both
/// - reduce ratio: geometric mean over iterations of (the same / iteration)
/// - gradient window of a rank: mean of (end of the iteration - when the first of its chunks had
/// its
///   last weight gradient): what a reduction of that chunk has without keeping the step waiting
/// - gradient ratio: geometric mean over iterations of (the same / iteration)
/// - coverage: of the time in which messages are under way to a rank, the part in which it
///   computes, at most 1; the rest is exposed
///
/// Source: OpenSQZ/MegatronApp, profiling/process_*.py. Kept from there: all send ratios divide by
/// the last rank's iteration, whatever the pair; the last stage sends no activation and the first
/// no gradient, so pairs that wrap round the ranks average fewer messages; the first iteration,
/// which is set-up, is for the caller to skip. Gradient windows are ours: where all chunks are
/// reduced behind the last, as there, reduce windows are the same for every order. Not kept:
/// constant iteration times in the ratio of backward sends; the k-th begin matched with the k-th
/// end, which pairs wrong ones where an event is missing. Such a record is refused.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/timeline.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

/// A compute action as it ran.
struct ComputeRecord {
  int rank = 0;
  int iteration = 0;
  Action action{};
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

/// A message as it travelled.
struct TransferRecord {
  int from = 0;  ///< ranks
  int to = 0;
  int iteration = 0;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

struct IterationRecord {
  int rank = 0;
  int iteration = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  /// When the rank's last compute action was done and gradient reduction could begin.
  std::optional<std::int64_t> reduce_ns;
};

/// The output of a chunk is the input of a chunk of another rank; gradients go the other way.
struct HandOver {
  int from_rank = 0;
  int from_chunk = 0;
  int to_rank = 0;
  int to_chunk = 0;

  friend constexpr auto operator<=>(const HandOver&, const HandOver&) = default;
};

/// What ran on a pipeline, on one clock. Records stand in any order.
struct PipelineRecord {
  int p = 0;
  /// What the clock of a rank cannot tell: by so much its actions may overlap, reach out of their
  /// iteration, or iterations begin before the one ahead has ended.
  std::int64_t resolution_ns = 0;
  std::vector<IterationRecord> iterations;  ///< one for each rank and iteration
  std::vector<ComputeRecord> compute;
  std::vector<TransferRecord> transfers;  ///< empty where they are not known
  std::vector<HandOver> hand_overs;  ///< each chunk at most once a source, at most once a target
};

/// All hand-overs between different ranks. With LoopPlacement the last rank hands chunk c to chunk
/// c + 1 of the first rank.
template <placement Placement>
[[nodiscard]] std::vector<HandOver> hand_overs(const Placement& place, int p, int v) {
  std::vector<HandOver> found;
  for (int stage = 0; stage + 1 < p * v; ++stage) {
    const HandOver next{place.rank_of(stage, p, v), place.chunk_of(stage, p, v),
                        place.rank_of(stage + 1, p, v), place.chunk_of(stage + 1, p, v)};
    if (next.from_rank != next.to_rank) found.push_back(next);
  }
  return found;
}

/// A timeline as iteration 0 of all ranks, from time 0 to its end. A rank's reduction may begin
/// when its own last action is done. Chunks are joined as the transfers join them.
/// @param nanoseconds_per_unit  of the timeline's times; the default reads them as milliseconds
/// Throws Error(usage) for a time that is no number of nanoseconds within 9e18.
[[nodiscard]] inline PipelineRecord record_of(const Timeline& timeline,
                                              double nanoseconds_per_unit = 1e6) {
  const auto ns = [&](double time) {
    const double scaled = time * nanoseconds_per_unit;
    expects(std::abs(scaled) < 9e18, ErrorCode::usage, [&] {
      return sentence("time ", time, " of the timeline is no number of nanoseconds within 9e18");
    });
    return static_cast<std::int64_t>(std::llround(scaled));
  };
  PipelineRecord record;
  record.p = static_cast<int>(timeline.ranks.size());
  const std::int64_t step_end = ns(timeline.end());
  for (int rank = 0; rank < record.p; ++rank) {
    std::int64_t last = 0;
    for (const TimedAction& a : timeline.ranks[static_cast<std::size_t>(rank)]) {
      record.compute.push_back({rank, 0, a.action, ns(a.start), ns(a.end)});
      last = std::max(last, record.compute.back().end_ns);
    }
    record.iterations.push_back({rank, 0, 0, step_end, last});
  }
  for (const Transfer& t : timeline.transfers) {
    record.transfers.push_back({t.from, t.to, 0, ns(t.start), ns(t.end)});
    const HandOver along{t.from, t.sent.chunk, t.to, t.received.chunk};
    const HandOver against{t.to, t.received.chunk, t.from, t.sent.chunk};
    record.hand_overs.push_back(t.sent.kind == ActionKind::send_forward ? along : against);
  }
  std::sort(record.hand_overs.begin(), record.hand_overs.end());
  record.hand_overs.erase(std::unique(record.hand_overs.begin(), record.hand_overs.end()),
                          record.hand_overs.end());
  return record;
}

/// NaN stands for a geometric mean of ratios that are not all positive, and for what is not known.
struct RankMetrics {
  double iteration_ns = 0;  ///< mean
  double compute_window_ns = 0;
  double compute_ratio = 0;
  double reduce_window_ns = 0;
  double reduce_ratio = 0;
  double gradient_window_ns = 0;  ///< NaN where an iteration has no weight gradients
  double gradient_ratio = 0;
  int peak_live = 0;         ///< activations of a chunk: forward done, weight gradient not
  TransferTime incoming_ns;  ///< of all measured iterations
};

struct SendWindow {
  ActionKind kind = ActionKind::send_forward;  ///< or send_backward
  int from = 0;                                ///< ranks
  int to = 0;
  std::int64_t messages = 0;
  double window_ns = 0;
  double ratio = 0;
};

struct PipelineMetrics {
  std::vector<int> iterations;  ///< the measured ones, ascending
  double iteration_ns = 0;      ///< mean over iterations and ranks
  std::vector<RankMetrics> ranks;
  std::vector<SendWindow> sends;            ///< forward before backward, then by sender
  std::optional<TransferTime> transfer_ns;  ///< sum over ranks; none where no transfer is recorded
};

namespace detail {

/// NaN unless all values are positive.
inline double geometric_mean(const std::vector<double>& values) {
  double logs = 0;
  for (const double value : values) {
    if (!(value > 0)) return std::numeric_limits<double>::quiet_NaN();
    logs += std::log(value);
  }
  return std::exp(logs / static_cast<double>(values.size()));
}

class Measurement {
 public:
  Measurement(const PipelineRecord& record, int skipped) : record_(record), skipped_(skipped) {
    order_iterations();
    order_compute();
    check_times();
    for (const HandOver& h : record.hand_overs) {
      successors_.push_back({{h.from_rank, h.from_chunk}, {h.to_rank, h.to_chunk}});
      predecessors_.push_back({{h.to_rank, h.to_chunk}, {h.from_rank, h.from_chunk}});
    }
    for (std::vector<Link>* const links : {&successors_, &predecessors_}) {
      std::sort(links->begin(), links->end());
      const auto twice =
          std::adjacent_find(links->begin(), links->end(),
                             [](const Link& a, const Link& b) { return a.first == b.first; });
      expects(twice == links->end(), ErrorCode::logic, [&] {
        return sentence("chunk ", twice->first.second, " of rank ", twice->first.first,
                        " has more than one successor or predecessor");
      });
    }
  }

  PipelineMetrics result() {
    PipelineMetrics metrics;
    metrics.iterations.assign(numbers_.begin() + skipped_, numbers_.end());
    double sum = 0;
    for (int rank = 0; rank < record_.p; ++rank) {
      metrics.ranks.push_back(of_rank(rank));
      sum += metrics.ranks.back().iteration_ns;
    }
    metrics.iteration_ns = sum / record_.p;
    add_sends(metrics.sends);
    if (!record_.transfers.empty()) add_transfers(metrics);
    return metrics;
  }

 private:
  using Chunk = std::pair<int, int>;  // rank, chunk
  using Link = std::pair<Chunk, Chunk>;
  /// Position of the iteration, rank, pass, chunk, micro-batch.
  using Key = std::tuple<int, int, int, int, int>;
  struct Entry {
    Key key;
    const ComputeRecord* record;
  };

  /// A whole backward and the input half of a split one are the same link in the chain of
  /// gradients.
  static int pass_of(ActionKind kind) {
    return kind == ActionKind::forward ? 0 : gives_input_gradient(kind) ? 1 : 2;
  }
  static std::size_t at(int index) { return static_cast<std::size_t>(index); }

  /// Place of an iteration among those recorded.
  [[nodiscard]] int position(int iteration) const {
    const auto found = std::lower_bound(numbers_.begin(), numbers_.end(), iteration);
    expects(found != numbers_.end() && *found == iteration, ErrorCode::bad_input, [&] {
      return sentence("something ran in iteration ", iteration, ", which no rank began and ended");
    });
    return static_cast<int>(found - numbers_.begin());
  }
  void expect_rank(int rank) const {
    expects(0 <= rank && rank < record_.p, ErrorCode::bad_input, [&] {
      return sentence("rank ", rank, " is recorded; valid are 0 to ", record_.p - 1);
    });
  }
  /// Times stay so small that no difference overflows.
  static void expect_span(std::int64_t start, std::int64_t end, int rank) {
    constexpr std::int64_t latest = 4'000'000'000'000'000'000;
    expects(-latest <= start && start <= end && end <= latest, ErrorCode::bad_input, [&] {
      return sentence("rank ", rank, " is recorded from ", start, " to ", end,
                      " ns; valid are spans that do not end before they start, within 4e18 ns");
    });
  }

  void order_iterations() {
    for (const IterationRecord& i : record_.iterations) {
      expect_rank(i.rank);
      expect_span(i.begin_ns, i.end_ns, i.rank);
      numbers_.push_back(i.iteration);
    }
    std::sort(numbers_.begin(), numbers_.end());
    numbers_.erase(std::unique(numbers_.begin(), numbers_.end()), numbers_.end());
    const int count = static_cast<int>(numbers_.size());
    expects(0 <= skipped_ && skipped_ < count, ErrorCode::bad_input, [&] {
      return sentence(count, " iterations are recorded, of which the first ", skipped_,
                      " are to be left out; at least one must remain");
    });
    for (const IterationRecord& i : record_.iterations) iterations_.push_back(&i);
    std::sort(iterations_.begin(), iterations_.end(), [](const auto* a, const auto* b) {
      return std::tie(a->iteration, a->rank, a->begin_ns) <
             std::tie(b->iteration, b->rank, b->begin_ns);
    });
    for (std::size_t k = 0; k < iterations_.size(); ++k) {
      const IterationRecord& i = *iterations_[k];
      expects(k == 0 || iterations_[k - 1]->iteration != i.iteration ||
                  iterations_[k - 1]->rank != i.rank,
              ErrorCode::bad_input, [&] {
                return sentence("rank ", i.rank, " runs iteration ", i.iteration, " twice, from ",
                                iterations_[k - 1]->begin_ns, " ns and from ", i.begin_ns,
                                " ns: more than one run is recorded");
              });
    }
    // Sorted and without doubles, the records are complete if and only if each is in its place.
    const std::size_t p = at(record_.p);
    for (std::size_t k = 0; k < numbers_.size() * p; ++k) {
      const int rank = static_cast<int>(k % p);
      expects(k < iterations_.size() && iterations_[k]->rank == rank &&
                  iterations_[k]->iteration == numbers_[k / p],
              ErrorCode::bad_input, [&] {
                return sentence("rank ", rank, " did not begin and end iteration ", numbers_[k / p],
                                ", which other ranks did");
              });
    }
    for (std::size_t k = 0; k < iterations_.size(); ++k) {
      const IterationRecord& i = *iterations_[k];
      expects(i.begin_ns < i.end_ns &&
                  (k < p || iterations_[k - p]->end_ns - record_.resolution_ns <= i.begin_ns),
              ErrorCode::bad_input, [&] {
                return sentence("iteration ", i.iteration, " of rank ", i.rank, " lasts from ",
                                i.begin_ns, " to ", i.end_ns,
                                " ns; it must last, and begin after the one before has ended");
              });
      expects(!i.reduce_ns || (i.begin_ns - record_.resolution_ns <= *i.reduce_ns &&
                               *i.reduce_ns <= i.end_ns + record_.resolution_ns),
              ErrorCode::bad_input, [&] {
                return sentence("rank ", i.rank, " is ready to reduce at ", *i.reduce_ns,
                                " ns, outside iteration ", i.iteration);
              });
    }
  }
  [[nodiscard]] const IterationRecord& iteration(int position, int rank) const {
    return *iterations_[at(position) * at(record_.p) + at(rank)];
  }

  void order_compute() {
    for (const ComputeRecord& c : record_.compute) {
      expect_rank(c.rank);
      expect_span(c.start_ns, c.end_ns, c.rank);
      expects(is_compute(c.action.kind) && c.action.chunk >= 0 && c.action.microbatch >= 0,
              ErrorCode::bad_input, [&] {
                return sentence("rank ", c.rank, " is recorded to compute a ", to_string(c.action),
                                ", which is no compute action");
              });
      const Key key{position(c.iteration), c.rank, pass_of(c.action.kind), c.action.chunk,
                    c.action.microbatch};
      by_key_.push_back({key, &c});
    }
    std::sort(by_key_.begin(), by_key_.end(),
              [](const Entry& a, const Entry& b) { return a.key < b.key; });
    const auto twice =
        std::adjacent_find(by_key_.begin(), by_key_.end(),
                           [](const Entry& a, const Entry& b) { return a.key == b.key; });
    expects(twice == by_key_.end(), ErrorCode::bad_input, [&] {
      const ComputeRecord& c = *twice->record;
      return sentence("rank ", c.rank, " runs the ", to_string(c.action), " twice in iteration ",
                      c.iteration);
    });
    by_time_ = by_key_;
    std::sort(by_time_.begin(), by_time_.end(), [](const Entry& a, const Entry& b) {
      const ComputeRecord &x = *a.record, &y = *b.record;
      return std::tie(std::get<0>(a.key), x.rank, x.start_ns, x.end_ns) <
             std::tie(std::get<0>(b.key), y.rank, y.start_ns, y.end_ns);
    });
  }

  /// Actions lie in their iteration and one after the other; a fused pair runs as one.
  void check_times() const {
    const ComputeRecord* before = nullptr;
    for (const Entry& entry : by_time_) {
      const ComputeRecord& c = *entry.record;
      const IterationRecord& i = iteration(std::get<0>(entry.key), c.rank);
      expects(i.begin_ns - record_.resolution_ns <= c.start_ns &&
                  c.end_ns <= i.end_ns + record_.resolution_ns,
              ErrorCode::bad_input, [&] {
                return sentence("rank ", c.rank, " runs the ", to_string(c.action), " from ",
                                c.start_ns, " to ", c.end_ns, " ns, outside iteration ",
                                c.iteration);
              });
      const bool same_list =
          before != nullptr && before->rank == c.rank && before->iteration == c.iteration;
      const auto fused = [&] {
        return before->start_ns == c.start_ns && before->end_ns == c.end_ns &&
               (before->action.kind == ActionKind::forward) !=
                   (c.action.kind == ActionKind::forward);
      };
      expects(!same_list || before->end_ns - record_.resolution_ns <= c.start_ns || fused(),
              ErrorCode::bad_input, [&] {
                return sentence("rank ", c.rank, " runs the ", to_string(c.action), " from ",
                                c.start_ns, " ns in iteration ", c.iteration, ", before its ",
                                to_string(before->action), " ends at ", before->end_ns, " ns");
              });
      before = &c;
    }
  }

  /// Calls use(record) for the rank's actions of one iteration in order of time.
  template <class Use>
  void each_action(int position, int rank, const Use& use) const {
    const auto before = [](const Entry& e, const Chunk& wanted) {
      return Chunk{std::get<0>(e.key), e.record->rank} < wanted;
    };
    for (auto entry =
             std::lower_bound(by_time_.begin(), by_time_.end(), Chunk{position, rank}, before);
         entry != by_time_.end() && std::get<0>(entry->key) == position &&
         entry->record->rank == rank;
         ++entry) {
      use(*entry->record);
    }
  }
  [[nodiscard]] int positions() const { return static_cast<int>(numbers_.size()); }

  [[nodiscard]] RankMetrics of_rank(int rank) const {
    RankMetrics metrics;
    std::vector<double> compute_ratios, reduce_ratios, gradient_ratios;
    double durations = 0, waits = 0, gradients = 0;
    std::size_t actions = 0;
    for (int k = skipped_; k < positions(); ++k) {
      const IterationRecord& i = iteration(k, rank);
      const auto length = static_cast<double>(i.end_ns - i.begin_ns);
      double computed = 0;
      std::int64_t seen = i.begin_ns;  // the halves of a fused pair take their time once
      std::size_t of_iteration = 0;
      each_action(k, rank, [&](const ComputeRecord& c) {
        durations += static_cast<double>(c.end_ns - c.start_ns);
        computed += static_cast<double>(std::max(c.end_ns, seen) - std::max(c.start_ns, seen));
        seen = std::max(seen, c.end_ns);
        ++of_iteration;
      });
      expects(of_iteration > 0, ErrorCode::bad_input, [&] {
        return sentence("rank ", rank, " computes nothing in iteration ", i.iteration);
      });
      actions += of_iteration;
      compute_ratios.push_back(computed / length);
      const double wait = i.reduce_ns ? static_cast<double>(i.end_ns - *i.reduce_ns)
                                      : std::numeric_limits<double>::quiet_NaN();
      waits += wait;
      reduce_ratios.push_back(wait / length);
      const double gradient = gradient_window(k, rank);
      gradients += gradient;
      gradient_ratios.push_back(gradient / length);
      metrics.iteration_ns += length;
      metrics.peak_live = std::max(metrics.peak_live, peak_live(k, rank));
    }
    const double count = positions() - skipped_;
    metrics.iteration_ns /= count;
    metrics.compute_window_ns = durations / static_cast<double>(actions);
    metrics.compute_ratio = geometric_mean(compute_ratios);
    metrics.reduce_window_ns = waits / count;
    metrics.reduce_ratio = geometric_mean(reduce_ratios);
    metrics.gradient_window_ns = gradients / count;
    metrics.gradient_ratio = geometric_mean(gradient_ratios);
    return metrics;
  }

  [[nodiscard]] double gradient_window(int position, int rank) const {
    std::map<int, std::int64_t> complete;  // by chunk
    each_action(position, rank, [&](const ComputeRecord& c) {
      if (!gives_weight_gradient(c.action.kind)) return;
      const auto [chunk, fresh] = complete.try_emplace(c.action.chunk, c.end_ns);
      chunk->second = std::max(chunk->second, c.end_ns);
    });
    std::optional<std::int64_t> first;
    for (const auto& [chunk, end] : complete) first = std::min(first.value_or(end), end);
    return first ? static_cast<double>(iteration(position, rank).end_ns - *first)
                 : std::numeric_limits<double>::quiet_NaN();
  }

  /// The forward of a fused pair fills its activation while the backward still holds its own.
  [[nodiscard]] int peak_live(int position, int rank) const {
    std::vector<std::pair<std::int64_t, int>> changes;  // time; 0 an activation more, 1 one less
    each_action(position, rank, [&](const ComputeRecord& c) {
      if (c.action.kind == ActionKind::forward) changes.push_back({c.end_ns, 0});
      if (gives_weight_gradient(c.action.kind)) changes.push_back({c.end_ns, 1});
    });
    std::sort(changes.begin(), changes.end());
    int live = 0, peak = 0;
    for (const auto& [time, less] : changes) {
      live += less != 0 ? -1 : 1;
      peak = std::max(peak, live);
    }
    return peak;
  }

  static const Chunk* linked(const std::vector<Link>& links, const Chunk& chunk) {
    const auto found =
        std::lower_bound(links.begin(), links.end(), chunk,
                         [](const Link& link, const Chunk& wanted) { return link.first < wanted; });
    return found != links.end() && found->first == chunk ? &found->second : nullptr;
  }
  /// The same pass of the same micro-batch on the chunk before or behind.
  [[nodiscard]] const ComputeRecord* partner(const Entry& entry, const Chunk* chunk) const {
    if (chunk == nullptr) return nullptr;
    Key key = entry.key;
    std::get<1>(key) = chunk->first;
    std::get<3>(key) = chunk->second;
    const auto found =
        std::lower_bound(by_key_.begin(), by_key_.end(), key,
                         [](const Entry& e, const Key& wanted) { return e.key < wanted; });
    expects(found != by_key_.end() && found->key == key, ErrorCode::bad_input, [&] {
      const ComputeRecord& c = *entry.record;
      return sentence("rank ", c.rank, " runs the ", to_string(c.action), " in iteration ",
                      c.iteration, ", but rank ", chunk->first, " never does so on its chunk ",
                      chunk->second, ", the next stage or the one before");
    });
    return found->record;
  }

  void add_sends(std::vector<SendWindow>& sends) const {
    struct Sums {
      std::tuple<bool, int, int> pair;  // gradient, from, to
      double window = 0;
      std::int64_t messages = 0;
      std::vector<double> by_iteration;
    };
    std::vector<Sums> sums;
    for (const HandOver& h : record_.hand_overs) {
      sums.push_back({{false, h.from_rank, h.to_rank}, 0, 0, {}});
      sums.push_back({{true, h.to_rank, h.from_rank}, 0, 0, {}});
    }
    const auto less = [](const Sums& a, const Sums& b) { return a.pair < b.pair; };
    const auto same = [](const Sums& a, const Sums& b) { return a.pair == b.pair; };
    std::sort(sums.begin(), sums.end(), less);
    sums.erase(std::unique(sums.begin(), sums.end(), same), sums.end());
    const int count = positions() - skipped_;
    for (Sums& s : sums) s.by_iteration.assign(at(count), 0.0);

    for (const Entry& entry : by_key_) {
      const auto [position, rank, pass, chunk, microbatch] = entry.key;
      if (position < skipped_ || pass == 2) continue;
      const bool gradient = pass == 1;
      const ComputeRecord* const behind = partner(entry, linked(successors_, {rank, chunk}));
      const ComputeRecord* const before = partner(entry, linked(predecessors_, {rank, chunk}));
      const ComputeRecord* const consumer = gradient ? before : behind;
      if (consumer == nullptr) continue;
      const Sums wanted{{gradient, rank, consumer->rank}, 0, 0, {}};
      Sums& s = *std::lower_bound(sums.begin(), sums.end(), wanted, less);
      const auto window = static_cast<double>(consumer->start_ns - entry.record->end_ns);
      s.window += window;
      s.messages += 1;
      s.by_iteration[at(position - skipped_)] += window;
    }
    for (Sums& s : sums) {
      if (s.messages == 0) continue;
      for (int k = 0; k < count; ++k) {
        const IterationRecord& last = iteration(skipped_ + k, record_.p - 1);
        s.by_iteration[at(k)] /= static_cast<double>(last.end_ns - last.begin_ns);
      }
      const auto [gradient, from, to] = s.pair;
      sends.push_back({gradient ? ActionKind::send_backward : ActionKind::send_forward, from, to,
                       s.messages, s.window / static_cast<double>(s.messages),
                       geometric_mean(s.by_iteration)});
    }
  }

  void add_transfers(PipelineMetrics& metrics) const {
    std::vector<Timeline> incoming(at(record_.p));  // of one rank each, which stands at 0
    // Nanoseconds since the first measured iteration, so that a double holds them without loss.
    const std::int64_t origin = iteration(skipped_, 0).begin_ns;
    const auto since = [&](std::int64_t ns) { return static_cast<double>(ns - origin); };
    for (const TransferRecord& t : record_.transfers) {
      expect_rank(t.from);
      expect_rank(t.to);
      expect_span(t.start_ns, t.end_ns, t.to);
      if (position(t.iteration) < skipped_) continue;
      incoming[at(t.to)].transfers.push_back(
          {.from = 0, .to = 0, .start = since(t.start_ns), .end = since(t.end_ns)});
    }
    metrics.transfer_ns.emplace();
    for (int rank = 0; rank < record_.p; ++rank) {
      Timeline& timeline = incoming[at(rank)];
      auto& computed = timeline.ranks.emplace_back();
      for (int k = skipped_; k < positions(); ++k) {
        each_action(k, rank, [&](const ComputeRecord& c) {
          computed.push_back({c.action, since(c.start_ns), since(c.end_ns)});
        });
      }
      const TransferTime time = transfer_time(timeline);
      metrics.ranks[at(rank)].incoming_ns = time;
      metrics.transfer_ns->total += time.total;
      metrics.transfer_ns->covered += time.covered;
    }
  }

  const PipelineRecord& record_;
  int skipped_;
  std::vector<int> numbers_;                        // of the iterations, ascending
  std::vector<const IterationRecord*> iterations_;  // [iteration, rank]
  std::vector<Entry> by_key_;
  std::vector<Entry> by_time_;  // by iteration, rank, time
  std::vector<Link> successors_;
  std::vector<Link> predecessors_;
};

}  // namespace detail

/// Windows, ratios, peak of live activations, and coverage where transfers are recorded.
/// @param skipped_iterations  how many of the first to leave out
/// Throws Error(bad_input) for a record that is not one whole run: an iteration, action or partner
/// that is missing or there twice, actions of a rank that overlap without being a fused pair, times
/// outside their iteration, no iteration left; Error(logic) for hand-overs that branch.
/// @cost  O(n log n) in the records
[[nodiscard]] inline PipelineMetrics measure(const PipelineRecord& record,
                                             int skipped_iterations = 0) {
  return detail::Measurement(record, skipped_iterations).result();
}

}  // namespace mega::inline v0::dpp
