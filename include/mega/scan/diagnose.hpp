/// @file  Verdicts: which rank, link, stage or host makes a job slow, or why it hangs, with the
/// figures that say so.
///
/// Every class leaves its mark in a quantity that the others leave alone, and no quantity needs
/// clocks that agree:
///   slow GPU         every kernel of one rank takes longer than the same kernel of its peers
///   stage imbalance  a stage has more work: more kernels, or longer ones on all of its ranks
///   data imbalance   kernels of a whole replica vary from micro-batch to micro-batch, forward and
///                    backward of the same micro-batch together, and in other ways each step
///   slow link        the transfer itself: of a matched operation's members the last to arrive
///                    waits for nobody, so the shortest span is the transfer
///   host delay       the device was ready before the launch came
///   hang             operations that never ended, and a member that never entered them
/// Who is slow is asked after what all suffer from is taken out, so that several faults are found
/// at once. Where two explanations fit equally, the verdict is `ambiguous` and says between whom.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/align.hpp>
#include <mega/scan/hang.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/wait_states.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

enum class VerdictClass : std::uint8_t {
  slow_gpu,
  slow_link,
  stage_imbalance,
  data_imbalance,
  host_delay,
  hang,
  ambiguous,
};

[[nodiscard]] constexpr std::string_view to_string(VerdictClass c) noexcept {
  switch (c) {
    case VerdictClass::slow_gpu: return "slow_gpu";
    case VerdictClass::slow_link: return "slow_link";
    case VerdictClass::stage_imbalance: return "stage_imbalance";
    case VerdictClass::data_imbalance: return "data_imbalance";
    case VerdictClass::host_delay: return "host_delay";
    case VerdictClass::hang: return "hang";
    case VerdictClass::ambiguous: return "ambiguous";
  }
  return "unknown";
}

struct Verdict {
  VerdictClass what = VerdictClass::ambiguous;
  std::vector<std::int32_t> ranks;    ///< whose fault it is; empty where no rank is to blame
  std::vector<std::int32_t> stages;   ///< pipeline stages concerned
  double confidence = 0;              ///< in [0, 1]
  double factor = 1;                  ///< how many times slower than its peers
  std::int32_t since_step = -1;       ///< first step with it; -1: unknown, or the whole trace
  Nanoseconds cost_per_step = 0;      ///< time of the culprit in excess of its peers', a step
  std::vector<std::string> evidence;  ///< sentences with figures
  std::vector<std::int32_t> path;     ///< ranks, each of which waited most for the one before it
};

struct Diagnosis {
  std::vector<Verdict> verdicts;  ///< dearest first; empty: healthy
  Nanoseconds step_time = 0;      ///< median over ranks and steps
  std::vector<std::string> notes;

  [[nodiscard]] bool healthy() const noexcept { return verdicts.empty(); }
};

/// Below these an effect is not worth a verdict, or not safe to tell from noise.
struct DiagnoseOptions {
  double slow_gpu = 1.10;               ///< a rank's kernels against its peers'
  double slow_link = 1.40;              ///< a transfer against equal ones
  double stage_imbalance = 1.12;        ///< work of a stage against the others'
  double data_variation = 0.06;         ///< relative, common to forward and backward
  double data_cost = 0.03;              ///< of the compute time of a step
  double host_share = 0.05;             ///< of a step, that the device waits for late launches
  double significance = 6;              ///< times the spread of the healthy peers
  Nanoseconds short_transfer = 30'000;  ///< latency; says nothing of a link's speed
  double hang_factor = 20;  ///< an operation that did not end lasted this many steps, or
  Nanoseconds hang_time = 5'000'000'000;  ///< this long
};

namespace detail {

/// Lower median: of two, the smaller, so that one slow rank of two cannot set the standard.
template <class T>
[[nodiscard]] T lower_median(std::vector<T>& values) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

/// Median absolute deviation from `center`, scaled to a standard deviation.
[[nodiscard]] inline double spread_around(const std::vector<double>& values, double center) {
  if (values.empty()) return 0;
  std::vector<double> away;
  for (const double v : values) away.push_back(std::abs(v - center));
  return 1.4826 * lower_median(away);
}

/// Text of a figure, with two digits behind the point.
[[nodiscard]] inline std::string figure(double x) {
  const auto hundredths = static_cast<std::int64_t>(std::llround(std::abs(x) * 100));
  const std::int64_t rest = hundredths % 100;
  return sentence(x < 0 ? "-" : "", hundredths / 100, rest < 10 ? ".0" : ".", rest);
}
[[nodiscard]] inline std::string milliseconds(double ns) {
  return figure(ns / 1e6) + " ms";
}

class Diagnoser {
 public:
  Diagnoser(const Trace& trace, const Matches& matches, const Alignment& alignment,
            const DiagnoseOptions& options)
      : t_(trace), m_(matches), alignment_(alignment), o_(options), n_(trace.ranks.size()) {}

  Diagnosis run() {
    lay_out();
    if (t_.outstanding.empty()) {
      find_pending();
    } else {
      report_outstanding();
    }
    tabulate();
    find_common_variation();
    measure_gpus();
    find_stage_imbalance();
    find_slow_gpus();
    find_data_imbalance();
    find_slow_links();
    find_late_hosts();
    trace_paths();
    judge_evidence();
    std::stable_sort(out_.verdicts.begin(), out_.verdicts.end(),
                     [](const Verdict& a, const Verdict& b) {
                       return std::pair(a.what == VerdictClass::hang, a.cost_per_step) >
                              std::pair(b.what == VerdictClass::hang, b.cost_per_step);
                     });
    return std::move(out_);
  }

 private:
  /// What happened in one or two steps may be an accident of theirs.
  void judge_evidence() {
    if (steps_.size() >= few_steps) return;
    bool doubtful = false;
    for (Verdict& v : out_.verdicts) {
      if (v.what == VerdictClass::hang) continue;
      v.confidence = std::min(v.confidence, 0.5);
      doubtful = true;
    }
    if (doubtful) {
      out_.notes.push_back(sentence("the trace holds ", steps_.size(),
                                    steps_.size() == 1 ? " step" : " steps",
                                    ": too few to tell what lasts from what happened once"));
    }
  }

  /// Kernels of one name on one rank in one step, in order.
  struct Cell {
    std::uint32_t name = 0, rank = 0, step = 0;
    std::size_t first = 0, count = 0;  // into logs_
    double middle = 0;                 // median of the logarithms of the durations
    double total = 0;                  // ns
  };
  /// Kernels of one name, everywhere.
  struct Kernel {
    TableIndex name = none;
    std::size_t first = 0, count = 0;  // into cells_
    double reference = 0;              // lower median over the ranks
    double total = 0;
    double variation = 0;  // that it shares with other kernels of the micro-batch
  };

  // ---- the layout and the steps -----------------------------------------------------------------

  void lay_out() {
    stage_.resize(n_);
    replica_.resize(n_);
    // Where the file does not say, the ranks of a stage are as many replicas.
    std::map<std::int32_t, std::int32_t> seen;
    for (std::size_t r = 0; r < n_; ++r) {
      stage_[r] = std::max(0, t_.ranks[r].pipeline);
      const std::int32_t place = seen[stage_[r]]++;
      replica_[r] = t_.ranks[r].data >= 0 ? t_.ranks[r].data : place;
    }
    std::set<std::int32_t> steps;
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      if (is_device(e)) steps.insert(e.step);
    }
    if (steps.size() > 1) steps.erase(-1);
    steps_.assign(steps.begin(), steps.end());
    for (std::size_t s = 0; s < steps_.size(); ++s) step_index_[steps_[s]] = s;

    struct Span {
      Nanoseconds begin = std::numeric_limits<Nanoseconds>::max();
      Nanoseconds end = std::numeric_limits<Nanoseconds>::min();
    };
    std::vector<Span> spans(n_ * steps_.size());
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      const auto at = step_index_.find(e.step);
      if (!is_device(e) || at == step_index_.end()) continue;
      Span& span = spans[t_.rank_index(e) * steps_.size() + at->second];
      span.begin = std::min(span.begin, e.begin);
      span.end = std::max(span.end, e.end);
    }
    std::vector<double> lengths;
    for (const Span& span : spans) {
      if (span.end > span.begin) lengths.push_back(static_cast<double>(span.end - span.begin));
    }
    if (!lengths.empty()) out_.step_time = static_cast<Nanoseconds>(lower_median(lengths));
  }

  [[nodiscard]] bool is_device(const Event& e) const {
    return is_compute(e.kind) || e.kind == EventKind::communication;
  }
  [[nodiscard]] std::int32_t rank_number(std::size_t r) const { return t_.ranks[r].rank; }

  // ---- hangs ------------------------------------------------------------------------------------

  /// The recorder itself said what never completed.
  void report_outstanding() {
    const HangReport report = find_hang(t_);
    if (!report.hung || report.suspects.empty()) return;
    Verdict v;
    v.what = VerdictClass::hang;
    v.ranks = report.suspects;
    v.evidence = report.evidence;
    v.confidence = 0.9;
    out_.verdicts.push_back(std::move(v));
    out_.notes.insert(out_.notes.end(), report.notes.begin(), report.notes.end());
  }

  /// An operation that some members entered and never left, because others never came.
  void find_pending() {
    std::map<std::int32_t, std::size_t> index_of;
    for (std::size_t r = 0; r < n_; ++r) index_of[rank_number(r)] = r;
    const Nanoseconds forever =
        std::max(o_.hang_time,
                 static_cast<Nanoseconds>(o_.hang_factor * static_cast<double>(out_.step_time)));
    std::vector<std::int64_t> waits_for(n_, 0);  // pending operations that lack this rank
    std::vector<char> pends(n_, 0);
    std::int64_t pending = 0;
    std::int32_t first_step = std::numeric_limits<std::int32_t>::max();
    Nanoseconds longest = 0;
    const auto judge = [&](const TableIndex* members, std::size_t count, TableIndex group) {
      std::vector<std::size_t> present;
      for (std::size_t k = 0; k < count; ++k) {
        const Event& e = t_.events[t_.communications[members[k]].event];
        if (e.duration() < forever) return;
        present.push_back(t_.rank_index(e));
      }
      std::vector<std::int32_t> expected;
      if (group != none) expected = t_.groups[group].ranks;
      const Communication& c = t_.communications[members[0]];
      if (c.op == CommunicationOp::send || c.op == CommunicationOp::recv)
        expected = {t_.rank(t_.events[c.event]), c.peer};
      std::int64_t absent = 0;
      for (const std::int32_t rank : expected) {
        const auto at = index_of.find(rank);
        if (at == index_of.end()) continue;
        if (std::find(present.begin(), present.end(), at->second) != present.end()) continue;
        ++waits_for[at->second];
        ++absent;
      }
      if (absent == 0) return;
      ++pending;
      for (const std::size_t r : present) pends[r] = 1;
      for (std::size_t k = 0; k < count; ++k) {
        const Event& e = t_.events[t_.communications[members[k]].event];
        first_step = std::min(first_step, e.step);
        longest = std::max(longest, e.duration());
      }
    };
    for (const Instance& i : m_.instances) judge(&m_.members[i.first], i.count, i.group);
    for (const TableIndex c : m_.leftovers) judge(&c, 1, t_.communications[c].group);
    if (pending == 0) return;

    std::vector<std::size_t> suspects;
    for (std::size_t r = 0; r < n_; ++r) {
      if (waits_for[r] > 0) suspects.push_back(r);
    }
    // A rank that lacks because it waits itself has launched what comes after; the culprit has not.
    std::vector<std::int64_t> progress(n_, 0);
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      const bool launches = e.kind == EventKind::launch;
      if (launches || (is_device(e) && e.launch == none)) ++progress[t_.rank_index(e)];
    }
    std::vector<std::size_t> culprits;
    for (const std::size_t r : suspects) {
      if (t_.ranks[r].missing) culprits.push_back(r);
    }
    if (culprits.empty()) {
      double least = 2;
      for (const std::size_t r : suspects) {
        std::vector<std::int64_t> peers;
        for (std::size_t q = 0; q < n_; ++q) {
          if (q != r && stage_[q] == stage_[r]) peers.push_back(progress[q]);
        }
        if (peers.empty()) peers.push_back(progress[r]);
        const double share = static_cast<double>(progress[r]) /
                             static_cast<double>(std::max<std::int64_t>(
                                 1, *std::max_element(peers.begin(), peers.end())));
        const double score = share + (pends[r] != 0 ? 1e-9 : 0);
        if (score < least) {
          least = score;
          culprits.assign(1, r);
        } else if (score == least) {
          culprits.push_back(r);
        }
      }
    }
    Verdict v;
    v.what = VerdictClass::hang;
    for (const std::size_t r : culprits) {
      v.ranks.push_back(rank_number(r));
      v.stages.push_back(stage_[r]);
      v.evidence.push_back(t_.ranks[r].missing
                               ? sentence("rank ", rank_number(r), " left no record, and ",
                                          waits_for[r], " operations wait for it")
                               : sentence("rank ", rank_number(r), " stopped after ", progress[r],
                                          " operations and never entered ", waits_for[r],
                                          " that other ranks wait in"));
    }
    v.evidence.push_back(sentence(pending, " operations began and did not end within ",
                                  milliseconds(static_cast<double>(longest))));
    v.confidence = culprits.size() == 1 ? 0.99 : 1.0 / static_cast<double>(culprits.size());
    v.since_step = first_step;
    v.cost_per_step = longest;
    out_.verdicts.push_back(std::move(v));
    // What follows judges whole steps only.
    while (!steps_.empty() && steps_.back() >= first_step) steps_.pop_back();
    std::erase_if(step_index_, [&](const auto& s) { return s.first >= first_step; });
  }

  // ---- kernels ----------------------------------------------------------------------------------

  /// Spans that hold others of their lane, by event: their time is that of the others, and of the
  /// waits among them.
  [[nodiscard]] std::vector<char> containers() const {
    struct Span {
      TableIndex lane, event;
      Nanoseconds begin, end;
    };
    std::vector<Span> spans;
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      if (is_compute(e.kind) || e.kind == EventKind::communication)
        spans.push_back({e.lane, static_cast<TableIndex>(i), e.begin, e.end});
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
      return std::tie(a.lane, a.begin, b.end, a.event) < std::tie(b.lane, b.begin, a.end, b.event);
    });
    std::vector<char> out(t_.events.size(), 0);
    for (std::size_t i = 1; i < spans.size(); ++i) {
      const Span& outer = spans[i - 1];
      const Span& next = spans[i];
      if (outer.lane == next.lane && next.begin < outer.end && next.end <= outer.end)
        out[outer.event] = 1;
    }
    return out;
  }

  void tabulate() {
    const std::vector<char> contains = containers();
    struct Item {
      std::uint64_t key;  // name, rank, step
      Nanoseconds begin;
      float log;
    };
    std::vector<Item> items;
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      if (!is_compute(e.kind) || e.duration() <= 0 || e.name == none || contains[i] != 0) continue;
      const auto step = step_index_.find(e.step);
      if (step == step_index_.end()) continue;
      const std::uint64_t key = static_cast<std::uint64_t>(e.name) << 40U |
                                static_cast<std::uint64_t>(t_.rank_index(e)) << 20U | step->second;
      items.push_back({key, e.begin, static_cast<float>(std::log(double(e.duration())))});
    }
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
      return std::tie(a.key, a.begin) < std::tie(b.key, b.begin);
    });
    std::vector<float> scratch;
    for (std::size_t i = 0; i < items.size();) {
      Cell cell;
      cell.name = static_cast<std::uint32_t>(items[i].key >> 40U);
      cell.rank = static_cast<std::uint32_t>(items[i].key >> 20U & 0xFFFFFU);
      cell.step = static_cast<std::uint32_t>(items[i].key & 0xFFFFFU);
      cell.first = logs_.size();
      const std::uint64_t key = items[i].key;
      scratch.clear();
      for (; i < items.size() && items[i].key == key; ++i) {
        logs_.push_back(items[i].log);
        scratch.push_back(items[i].log);
        cell.total += std::exp(static_cast<double>(items[i].log));
      }
      cell.count = scratch.size();
      cell.middle = static_cast<double>(lower_median(scratch));
      if (kernels_.empty() || kernels_.back().name != cell.name) {
        Kernel kernel;
        kernel.name = cell.name;
        kernel.first = cells_.size();
        kernels_.push_back(kernel);
      }
      ++kernels_.back().count;
      kernels_.back().total += cell.total;
      cells_.push_back(cell);
    }
    std::vector<double> of_rank, of_all;
    for (Kernel& k : kernels_) {
      of_all.clear();
      for (std::size_t c = k.first; c < k.first + k.count;) {
        const std::uint32_t rank = cells_[c].rank;
        of_rank.clear();
        for (; c < k.first + k.count && cells_[c].rank == rank; ++c)
          of_rank.push_back(cells_[c].middle);
        of_all.push_back(lower_median(of_rank));
      }
      k.reference = lower_median(of_all);
    }
  }

  /// Which kernels vary together from micro-batch to micro-batch: the k-th attention forward and
  /// the k-th attention backward of a step are of the same micro-batch, and their noise is not.
  void find_common_variation() {
    std::vector<std::size_t> order(kernels_.size());
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = k;
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return kernels_[a].total > kernels_[b].total; });
    if (order.size() > most_kernels) order.resize(most_kernels);
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (std::size_t j = i + 1; j < order.size(); ++j) {
        Kernel& a = kernels_[order[i]];
        Kernel& b = kernels_[order[j]];
        const double together = std::sqrt(std::max(0.0, covariance(a, b)));
        a.variation = std::max(a.variation, together);
        b.variation = std::max(b.variation, together);
      }
    }
  }

  [[nodiscard]] double covariance(const Kernel& a, const Kernel& b) const {
    double sum = 0;
    std::size_t count = 0;
    std::size_t i = a.first, j = b.first;
    while (i < a.first + a.count && j < b.first + b.count) {
      const Cell& x = cells_[i];
      const Cell& y = cells_[j];
      const auto at_x = std::pair(x.rank, x.step), at_y = std::pair(y.rank, y.step);
      if (at_x != at_y) {
        ++(at_x < at_y ? i : j);
        continue;
      }
      ++i, ++j;
      if (x.count != y.count || x.count < 3) continue;
      for (std::size_t k = 0; k < x.count; ++k) {
        const double dx = std::clamp(double(logs_[x.first + k]) - x.middle, -1.0, 1.0);
        const double dy = std::clamp(double(logs_[y.first + k]) - y.middle, -1.0, 1.0);
        sum += dx * dy;
      }
      count += x.count;
    }
    return count < 12 ? 0 : sum / static_cast<double>(count);
  }

  [[nodiscard]] bool varies(const Kernel& k) const { return k.variation > o_.data_variation; }

  /// gpu_[rank][step]: logarithm of how much longer the rank's kernels take than its peers'.
  void measure_gpus() {
    const std::size_t steps = steps_.size();
    struct Vote {
      double shift, weight;
    };
    std::vector<std::vector<Vote>> votes(n_ * steps);
    std::vector<double> mates;
    for (const Kernel& k : kernels_) {
      std::map<std::pair<std::int32_t, std::uint32_t>, std::vector<double>> replicas;
      if (varies(k)) {
        for (std::size_t c = k.first; c < k.first + k.count; ++c)
          replicas[{replica_[cells_[c].rank], cells_[c].step}].push_back(cells_[c].middle);
      }
      for (std::size_t c = k.first; c < k.first + k.count; ++c) {
        const Cell& cell = cells_[c];
        double standard = k.reference;
        if (varies(k)) {
          // The load is common to the replica: only its own members are peers.
          std::vector<double>& all = replicas[{replica_[cell.rank], cell.step}];
          if (all.size() < 2) continue;
          standard = lower_median(all);
        }
        votes[cell.rank * steps + cell.step].push_back({cell.middle - standard, cell.total});
      }
    }
    gpu_.assign(n_ * steps, 0);
    known_.assign(n_ * steps, 0);
    for (std::size_t i = 0; i < votes.size(); ++i) {
      std::vector<Vote>& own = votes[i];
      if (own.empty()) continue;
      std::sort(own.begin(), own.end(),
                [](const Vote& a, const Vote& b) { return a.shift < b.shift; });
      double all = 0, sum = 0;
      for (const Vote& v : own) all += v.weight;
      std::size_t at = 0;
      while (at + 1 < own.size() && (sum += own[at].weight) < all / 2) ++at;
      gpu_[i] = own[at].shift;
      known_[i] = 1;
    }
  }

  struct Onset {
    std::size_t slow = 0, known = 0;
    std::size_t first = 0;  // index of the first step of the slow stretch
    double level = 0;       // median over the slow steps
  };
  /// In how many steps the value of a rank is above the limit.
  template <class Value, class Known>
  [[nodiscard]] Onset onset(const Value& value, const Known& known, double limit) const {
    Onset out;
    std::vector<double> slow;
    bool seen = false;
    for (std::size_t s = 0; s < steps_.size(); ++s) {
      if (!known(s)) continue;
      ++out.known;
      if (value(s) <= limit) continue;
      if (!seen) out.first = s;
      seen = true;
      ++out.slow;
      slow.push_back(value(s));
    }
    if (!slow.empty()) out.level = lower_median(slow);
    return out;
  }
  [[nodiscard]] static bool lasts(const Onset& o) {
    return o.slow > 0 && o.slow * 3 >= o.known && (o.slow > 1 || o.known < 3);
  }
  [[nodiscard]] std::int32_t since(const Onset& o) const {
    return o.slow == 0 ? -1 : steps_[o.first];
  }

  [[nodiscard]] Onset gpu_onset(std::size_t r) const {
    const std::size_t steps = steps_.size();
    return onset([&](std::size_t s) { return gpu_[r * steps + s]; },
                 [&](std::size_t s) { return known_[r * steps + s] != 0; }, gpu_limit_);
  }

  // ---- stages -----------------------------------------------------------------------------------

  void find_stage_imbalance() {
    const std::size_t steps = steps_.size();
    std::vector<double> all;
    for (std::size_t i = 0; i < gpu_.size(); ++i) {
      if (known_[i] != 0) all.push_back(gpu_[i]);
    }
    if (all.empty()) return;
    std::vector<double> copy = all;
    const double middle = lower_median(copy);
    // The spread is that of healthy ranks while most are: a wide one raises the limit, but not so
    // far that many slow ranks could hide behind each other.
    gpu_limit_ = std::max(std::log(o_.slow_gpu),
                          middle + o_.significance * std::min(0.05, spread_around(all, middle)));

    // All ranks of a stage slow alike are not as many faults: the stage's kernels are longer.
    std::map<std::int32_t, std::vector<std::size_t>> stages;
    for (std::size_t r = 0; r < n_; ++r) {
      bool present = false;
      for (std::size_t s = 0; s < steps; ++s) present = present || known_[r * steps + s] != 0;
      if (present) stages[stage_[r]].push_back(r);
    }
    excused_.assign(n_, 0);
    if (stages.size() < 2) return;
    for (const auto& [stage, ranks] : stages) {
      std::vector<double> levels;
      for (const std::size_t r : ranks) {
        const Onset o = gpu_onset(r);
        if (lasts(o)) levels.push_back(o.level);
      }
      if (levels.size() < ranks.size()) continue;
      const auto [least, most] = std::minmax_element(levels.begin(), levels.end());
      if (*most - *least > 0.25 * *most) continue;
      for (const std::size_t r : ranks) excused_[r] = 1;
    }

    // Work of each stage in each replica, with a slow GPU's slowness taken out.
    std::map<std::pair<std::int32_t, std::int32_t>, std::vector<double>> work;
    std::vector<double> totals(n_ * steps, 0);
    for (const Cell& c : cells_) totals[c.rank * steps + c.step] += c.total;
    for (std::size_t r = 0; r < n_; ++r) {
      const bool slow = excused_[r] == 0 && lasts(gpu_onset(r));
      for (std::size_t s = 0; s < steps; ++s) {
        const std::size_t at = r * steps + s;
        if (totals[at] > 0)
          work[{replica_[r], stage_[r]}].push_back(totals[at] / (slow ? std::exp(gpu_[at]) : 1));
      }
    }
    std::map<std::int32_t, std::vector<double>> excess, spent;
    for (const auto& [at, values] : work) {
      std::vector<double> own = values, others;
      for (const auto& [stage, ranks] : stages) {
        const auto other = work.find({at.first, stage});
        if (stage == at.second || other == work.end()) continue;
        std::vector<double> theirs = other->second;
        others.push_back(lower_median(theirs));
      }
      if (others.empty()) continue;
      const double mine = lower_median(own), standard = lower_median(others);
      excess[at.second].push_back(mine / standard);
      spent[at.second].push_back(mine - standard);
    }
    for (auto& [stage, ratios] : excess) {
      const double ratio = lower_median(ratios);
      if (ratio < o_.stage_imbalance) continue;
      Verdict v;
      v.what = VerdictClass::stage_imbalance;
      v.stages = {stage};
      v.factor = ratio;
      v.confidence = std::min(0.99, 0.5 + (ratio - 1) * 2);
      v.cost_per_step = static_cast<Nanoseconds>(lower_median(spent[stage]));
      v.evidence.push_back(sentence(
          "stage ", stage, " computes ", figure(ratio), " times as long as the other stages: ",
          milliseconds(static_cast<double>(v.cost_per_step)), " a step more"));
      v.evidence.push_back(sentence("all ", stages[stage].size(),
                                    stages[stage].size() == 1
                                        ? " rank of the stage does: no peer does the same work"
                                        : " ranks of the stage do, so no GPU is to blame"));
      add_kernel_counts(v, stage);
      out_.verdicts.push_back(std::move(v));
    }
  }

  /// The kernel that the stage runs more often, or longer, than the others.
  void add_kernel_counts(Verdict& v, std::int32_t stage) const {
    double most = 0;
    std::string text;
    for (const Kernel& k : kernels_) {
      std::vector<double> own, others, own_count, others_count;
      for (std::size_t c = k.first; c < k.first + k.count; ++c) {
        const Cell& cell = cells_[c];
        const bool mine = stage_[cell.rank] == stage;
        (mine ? own : others).push_back(cell.total);
        (mine ? own_count : others_count).push_back(static_cast<double>(cell.count));
      }
      if (own.empty()) continue;
      const double more = lower_median(own) - (others.empty() ? 0 : lower_median(others));
      if (more <= most) continue;
      most = more;
      text = sentence("most of it in ", t_.names[k.name], ": ", lower_median(own_count),
                      " a step against ", others.empty() ? 0.0 : lower_median(others_count), ", ",
                      milliseconds(more), " more");
    }
    if (!text.empty()) v.evidence.push_back(std::move(text));
  }

  // ---- GPUs -------------------------------------------------------------------------------------

  void find_slow_gpus() {
    const std::size_t steps = steps_.size();
    std::vector<std::size_t> present;
    for (std::size_t r = 0; r < n_; ++r) {
      for (std::size_t s = 0; s < steps; ++s) {
        if (known_[r * steps + s] == 0) continue;
        present.push_back(r);
        break;
      }
    }
    for (const std::size_t r : present) {
      const Onset o = gpu_onset(r);
      if (!lasts(o) || excused_[r] != 0) continue;
      Verdict v;
      v.factor = std::exp(o.level);
      v.since_step = since(o);
      v.stages = {stage_[r]};
      double busy = 0;
      for (const Cell& c : cells_) {
        if (c.rank == r) busy += c.total / static_cast<double>(steps);
      }
      v.cost_per_step = static_cast<Nanoseconds>(busy * (1 - 1 / v.factor));
      // Two ranks that differ, and no time at which they did not: nothing says who is right.
      const bool two_only = present.size() == 2 && o.slow == o.known;
      v.what = two_only ? VerdictClass::ambiguous : VerdictClass::slow_gpu;
      if (two_only) {
        v.ranks = {rank_number(present[0]), rank_number(present[1])};
      } else {
        v.ranks = {rank_number(r)};
      }
      v.confidence = two_only ? 0.5 : std::min(0.99, 0.6 + o.level);
      v.evidence.push_back(sentence("kernels of rank ", rank_number(r), " take ", figure(v.factor),
                                    " times as long as the same kernels of its peers, in ", o.slow,
                                    " of ", o.known, " steps"));
      v.evidence.push_back(sentence("that is ", milliseconds(static_cast<double>(v.cost_per_step)),
                                    " of its ", milliseconds(busy), " of compute a step"));
      if (two_only)
        v.evidence.push_back("there are two ranks only, so either may be the one that is wrong");
      out_.verdicts.push_back(std::move(v));
    }
  }

  // ---- data -------------------------------------------------------------------------------------

  void find_data_imbalance() {
    const std::size_t steps = steps_.size();
    if (steps < few_steps) return;  // that the load varies cannot be seen
    double variation = 0;
    std::vector<double> affected(n_ * steps, 0), all(n_ * steps, 0);
    for (const Kernel& k : kernels_) {
      variation = std::max(variation, k.variation);
      for (std::size_t c = k.first; c < k.first + k.count; ++c) {
        const std::size_t at = cells_[c].rank * steps + cells_[c].step;
        const bool slow = excused_.empty() || excused_[cells_[c].rank] != 0
                              ? false
                              : known_[at] != 0 && gpu_[at] > gpu_limit_;
        const double total = cells_[c].total / (slow ? std::exp(gpu_[at]) : 1);
        all[at] += total;
        if (varies(k)) affected[at] += total;
      }
    }
    if (variation <= o_.data_variation) return;
    // Time of a replica in a step: of its slowest stage.
    double cost = 0, mean_all = 0;
    std::size_t counted = 0;
    std::map<std::int32_t, std::size_t> slowest;
    for (std::size_t s = 0; s < steps; ++s) {
      std::map<std::int32_t, std::pair<double, double>> replicas;  // affected, all
      for (std::size_t r = 0; r < n_; ++r) {
        auto& [a, b] = replicas[replica_[r]];
        if (all[r * steps + s] > b) b = all[r * steps + s], a = affected[r * steps + s];
      }
      if (replicas.size() < 2) continue;
      double most = 0, sum = 0, sum_all = 0;
      std::int32_t who = -1;
      for (const auto& [replica, time] : replicas) {
        if (time.first > most) most = time.first, who = replica;
        sum += time.first;
        sum_all += time.second;
      }
      const auto n = static_cast<double>(replicas.size());
      cost += most - sum / n;
      mean_all += sum_all / n;
      ++slowest[who];
      ++counted;
    }
    if (counted == 0 || cost < o_.data_cost * mean_all) return;
    Verdict v;
    v.what = VerdictClass::data_imbalance;
    v.cost_per_step = static_cast<Nanoseconds>(cost / static_cast<double>(counted));
    v.factor = 1 + cost / mean_all;
    v.confidence = std::min(0.99, 0.5 + 3 * variation);
    v.evidence.push_back(sentence(
        "work varies by ", figure(100 * variation),
        " % from micro-batch to micro-batch, forward and backward of the same one together"));
    v.evidence.push_back(sentence("the slowest replica computes ",
                                  milliseconds(static_cast<double>(v.cost_per_step)),
                                  " a step longer than the mean one; ", slowest.size(),
                                  " different replicas were the slowest in ", counted, " steps"));
    out_.verdicts.push_back(std::move(v));
  }

  // ---- links ------------------------------------------------------------------------------------

  struct Channel {
    std::vector<std::int32_t> ranks;  // global
    bool pair = false;
    std::vector<std::pair<std::size_t, double>> transfers;  // step, log of the relative transfer
    double excess = 0;                                      // log
    std::size_t first = 0;
    double time = 0;  // ns in excess
    bool slow = false;
  };

  void find_slow_links() {
    // Equal operations of equal groups are peers.
    using Class = std::tuple<CommunicationOp, std::size_t, std::int64_t, TableIndex>;
    struct Transfer {
      Class kind;
      std::size_t channel;
      std::size_t step;
      double log;
    };
    std::vector<Transfer> transfers;
    std::vector<Channel> channels;
    std::map<std::vector<std::int32_t>, std::size_t> index;
    std::vector<std::int32_t> who;
    for (const Instance& i : m_.instances) {
      who.clear();
      Nanoseconds shortest = std::numeric_limits<Nanoseconds>::max();
      const Event* any = nullptr;
      std::int64_t bytes = 0;
      for (const TableIndex c : m_.of(i)) {
        const Event& e = t_.events[t_.communications[c].event];
        who.push_back(t_.rank(e));
        shortest = std::min(shortest, e.duration());
        bytes = std::max(bytes, t_.communications[c].bytes);
        any = &e;
      }
      const auto step = step_index_.find(any->step);
      if (shortest <= 0 || step == step_index_.end()) continue;
      if (i.group != none && i.count < t_.groups[i.group].ranks.size()) continue;
      std::sort(who.begin(), who.end());
      const auto [at, is_new] = index.try_emplace(who, channels.size());
      if (is_new) {
        Channel made;
        made.ranks = who;
        channels.push_back(std::move(made));
      }
      channels[at->second].pair = channels[at->second].pair || i.op == CommunicationOp::send_recv;
      transfers.push_back({{i.op, i.count, bytes, any->name},
                           at->second,
                           step->second,
                           std::log(static_cast<double>(shortest))});
    }
    std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
      return std::tie(a.kind, a.channel) < std::tie(b.kind, b.channel);
    });
    std::vector<double> of_channel, of_class;
    for (std::size_t i = 0; i < transfers.size();) {
      std::size_t end = i;
      of_class.clear();
      while (end < transfers.size() && transfers[end].kind == transfers[i].kind) {
        const std::size_t channel = transfers[end].channel;
        of_channel.clear();
        for (; end < transfers.size() && transfers[end].kind == transfers[i].kind &&
               transfers[end].channel == channel;
             ++end)
          of_channel.push_back(transfers[end].log);
        // The better half of the time: a fault that began in the window leaves the standard alone.
        std::sort(of_channel.begin(), of_channel.end());
        of_class.push_back(of_channel[of_channel.size() / 4]);
      }
      const double standard = lower_median(of_class);
      const bool comparable =
          of_class.size() > 1 && standard > std::log(static_cast<double>(o_.short_transfer));
      for (; i < end; ++i) {
        if (!comparable) continue;
        Channel& c = channels[transfers[i].channel];
        c.transfers.emplace_back(transfers[i].step, transfers[i].log - standard);
        c.time += std::exp(transfers[i].log) - std::exp(standard);
      }
    }
    std::vector<std::size_t> slow;
    for (std::size_t k = 0; k < channels.size(); ++k) {
      if (judge(channels[k])) slow.push_back(k);
    }
    const std::size_t before = out_.verdicts.size();
    blame_links(channels, std::move(slow));
    // As many slow links as that are none: what should be equal is not.
    const std::size_t found = out_.verdicts.size() - before;
    if (found < 3 || found * 4 < n_) return;
    out_.verdicts.resize(before);
    out_.notes.push_back(sentence("equal transfers take unequal times in ", found,
                                  " places, so that none of them is a standard for the others"));
  }

  [[nodiscard]] bool judge(Channel& c) const {
    std::vector<std::vector<double>> steps(steps_.size());
    for (const auto& [step, log] : c.transfers) steps[step].push_back(log);
    const Onset o = onset(
        [&](std::size_t s) {
          std::vector<double> copy = steps[s];
          return lower_median(copy);
        },
        [&](std::size_t s) { return !steps[s].empty(); }, std::log(o_.slow_link));
    c.excess = o.level;
    c.first = o.first;
    c.slow = lasts(o);
    return c.slow;
  }

  /// A rank nearly all of whose channels are slow explains them; what is left are single links.
  void blame_links(const std::vector<Channel>& channels, std::vector<std::size_t> left) {
    struct Record {
      std::size_t slow = 0, healthy = 0;
    };
    std::map<std::int32_t, Record> records;
    for (const Channel& c : channels) {
      if (c.transfers.empty()) continue;
      for (const std::int32_t rank : c.ranks)
        ++(c.slow ? records[rank].slow : records[rank].healthy);
    }
    while (!left.empty()) {
      std::map<std::int32_t, std::vector<std::size_t>> unexplained;
      for (const std::size_t k : left) {
        for (const std::int32_t rank : channels[k].ranks) unexplained[rank].push_back(k);
      }
      std::int32_t best = -1;
      std::pair<std::size_t, double> most{0, 0};
      for (const auto& [rank, own] : unexplained) {
        const Record& record = records[rank];
        const double share =
            static_cast<double>(record.slow) / static_cast<double>(record.slow + record.healthy);
        // One pair speaks for itself. A group does not, but a channel that is explained already may
        // be this rank's fault too.
        const bool says_little = own.size() == 1 && (channels[own[0]].pair || record.slow < 2);
        if (share <= 0.66 || says_little) continue;
        if (std::pair(own.size(), share) > most) {
          most = {own.size(), share};
          best = rank;
        }
      }
      const std::vector<std::size_t> explained =
          best >= 0 ? unexplained[best] : std::vector<std::size_t>{left.front()};
      add_link(channels, explained, best);
      std::erase_if(left, [&](std::size_t k) {
        return std::find(explained.begin(), explained.end(), k) != explained.end();
      });
    }
  }

  void add_link(const std::vector<Channel>& channels, const std::vector<std::size_t>& explained,
                std::int32_t rank) {
    Verdict v;
    const Channel& any = channels[explained.front()];
    v.what = VerdictClass::slow_link;
    v.ranks = rank >= 0 ? std::vector<std::int32_t>{rank} : any.ranks;
    double excess = any.excess, time = 0;
    std::size_t first = any.first;
    for (const std::size_t k : explained) {
      excess = std::min(excess, channels[k].excess);
      first = std::min(first, channels[k].first);
      time += channels[k].time / static_cast<double>(std::max<std::size_t>(1, steps_.size()));
    }
    v.factor = std::exp(excess);
    v.since_step = steps_[first];
    v.cost_per_step = static_cast<Nanoseconds>(time);
    v.confidence =
        rank >= 0 || any.ranks.size() == 2 ? 0.95 : 1.0 / static_cast<double>(any.ranks.size());
    std::string who;
    for (const std::int32_t r : any.ranks) who += sentence(who.empty() ? "" : ", ", r);
    v.evidence.push_back(
        rank >= 0 ? sentence("all transfers of rank ", rank, ", in ", explained.size(),
                             " groups and pairs, take at least ", figure(v.factor),
                             " times as long as equal ones elsewhere")
                  : sentence("transfers between ranks ", who, " take ", figure(v.factor),
                             " times as long as equal ones elsewhere; other transfers of these "
                             "ranks do not"));
    v.evidence.push_back(sentence("that is ", milliseconds(time), " of transfer a step more"));
    out_.verdicts.push_back(std::move(v));
  }

  // ---- hosts ------------------------------------------------------------------------------------

  /// Time for which the device was ready and the launch had not come: by rank and step.
  void find_late_hosts() {
    const std::size_t steps = steps_.size();
    std::vector<double> late(n_ * steps, 0);
    std::vector<char> has(n_, 0);
    std::vector<std::vector<TableIndex>> of_rank(n_);
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      if (is_device(e)) of_rank[t_.rank_index(e)].push_back(static_cast<TableIndex>(i));
    }
    std::vector<Nanoseconds> ends;
    for (std::size_t r = 0; r < n_; ++r) {
      ends.clear();
      for (const TableIndex i : of_rank[r]) ends.push_back(t_.events[i].end);
      std::sort(ends.begin(), ends.end());
      std::sort(of_rank[r].begin(), of_rank[r].end(), [&](TableIndex a, TableIndex b) {
        return t_.events[a].begin < t_.events[b].begin;
      });
      Nanoseconds covered = std::numeric_limits<Nanoseconds>::min();
      for (const TableIndex i : of_rank[r]) {
        const Event& e = t_.events[i];
        const auto step = step_index_.find(e.step);
        if (e.launch == none || step == step_index_.end()) continue;
        has[r] = 1;
        const auto after = std::upper_bound(ends.begin(), ends.end(), e.begin);
        if (after == ends.begin()) continue;
        const Nanoseconds ready = std::max(*(after - 1), covered);
        const Nanoseconds launched = std::min(t_.events[e.launch].end, e.begin);
        if (launched <= ready) continue;
        late[r * steps + step->second] += static_cast<double>(launched - ready);
        covered = launched;
      }
    }
    // What all ranks wait for their hosts, as between steps, is no rank's fault.
    std::vector<double> usual(steps, 0);
    std::vector<double> peers;
    for (std::size_t s = 0; s < steps; ++s) {
      peers.clear();
      for (std::size_t r = 0; r < n_; ++r) {
        if (has[r] != 0) peers.push_back(late[r * steps + s]);
      }
      if (peers.size() > 1) usual[s] = lower_median(peers);
    }
    const double limit = o_.host_share * static_cast<double>(out_.step_time);
    for (std::size_t r = 0; r < n_; ++r) {
      if (has[r] == 0) continue;
      // Stalls may be rare and long: what counts is their share of the whole window.
      const Onset o = onset([&](std::size_t s) { return late[r * steps + s] - usual[s]; },
                            [](std::size_t) { return true; }, limit);
      double sum = 0;
      for (std::size_t s = 0; s < steps; ++s) sum += std::max(0.0, late[r * steps + s] - usual[s]);
      const double mean = sum / static_cast<double>(steps);
      const bool first_only = o.slow == 1 && o.first == 0 && steps > 2;
      if (o.slow == 0 || first_only || mean < limit) continue;
      Verdict v;
      v.what = VerdictClass::host_delay;
      v.ranks = {rank_number(r)};
      v.stages = {stage_[r]};
      v.since_step = since(o);
      v.cost_per_step = static_cast<Nanoseconds>(mean);
      v.factor = 1 + mean / std::max(1.0, static_cast<double>(out_.step_time) - mean);
      v.confidence = 0.95;
      v.evidence.push_back(
          sentence("the device of rank ", rank_number(r), " was ready ", milliseconds(o.level),
                   " before its operations were launched, in ", o.slow, " of ", o.known,
                   " steps; its peers wait ", milliseconds(usual[o.first])));
      out_.verdicts.push_back(std::move(v));
    }
  }

  // ---- consequences -----------------------------------------------------------------------------

  /// From each culprit to the rank that waited longest for it, and on.
  void trace_paths() {
    if (out_.verdicts.empty() || !alignment_.aligned()) return;
    const WaitReport waits = find_waits(t_, m_, alignment_);
    std::map<std::int32_t, std::map<std::int32_t, double>> edges;
    for (const WaitState& w : waits.waits) {
      const std::int32_t waiter = t_.rank(t_.events[t_.communications[w.communication].event]);
      edges[rank_number(w.culprit)][waiter] += static_cast<double>(w.wait);
    }
    for (Verdict& v : out_.verdicts) {
      if (v.ranks.size() != 1) continue;
      v.path = v.ranks;
      double first = 0;
      while (v.path.size() < 5) {
        std::int32_t next = -1;
        double most = 0;
        for (const auto& [waiter, time] : edges[v.path.back()]) {
          if (time <= most || std::find(v.path.begin(), v.path.end(), waiter) != v.path.end())
            continue;
          most = time;
          next = waiter;
        }
        if (first == 0) first = most;
        if (next < 0 || most < 0.05 * first) break;
        v.path.push_back(next);
      }
    }
  }

  /// Pairs of kernels are compared among the ones with the most time.
  static constexpr std::size_t most_kernels = 16;

  const Trace& t_;
  const Matches& m_;
  const Alignment& alignment_;
  const DiagnoseOptions& o_;
  std::size_t n_;
  std::vector<std::int32_t> stage_, replica_;
  std::vector<std::int32_t> steps_;
  std::map<std::int32_t, std::size_t> step_index_;
  static constexpr std::size_t few_steps = 3;
  std::vector<float> logs_;
  std::vector<Cell> cells_;
  std::vector<Kernel> kernels_;
  std::vector<double> gpu_;
  std::vector<char> known_;
  std::vector<char> excused_;  // slow with its whole stage
  double gpu_limit_ = 0;
  Diagnosis out_;
};

}  // namespace detail

/// Cost: a sort of the kernels and a few passes. Deterministic. Works without alignment; only the
/// paths need it.
[[nodiscard]] inline Diagnosis diagnose(const Trace& trace, const Matches& matches,
                                        const Alignment& alignment,
                                        const DiagnoseOptions& options = {}) {
  return detail::Diagnoser(trace, matches, alignment, options).run();
}

}  // namespace mega::inline v0::scan
