/// @file  Clock alignment: the offset and drift of every rank's clock, from the operations that the
/// ranks ran together anyway.
///
/// Two independent answers. The soft one: members of a synchronising collective end together within
/// microseconds, however unequal their begins, so medians of differences of ends give the offsets;
/// a drift is fitted only where the window is long enough to tell it from noise. The hard one: no
/// member can end before the last has begun, which bounds every pair of clocks; closing these
/// difference constraints over all ranks by shortest paths gives a corridor that holds the true
/// offset for certain. A cycle of negative length contradicts itself: something was matched
/// wrongly. Sources: Scalasca's linear offset interpolation; Cormen et al., difference constraints.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/detail/threads.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// Aligned time = t + offset + drift * (t - pivot).
struct ClockModel {
  Nanoseconds offset = 0;
  double drift = 0;  ///< relative: 1e-6 is 1 ppm
  Nanoseconds pivot = 0;

  [[nodiscard]] Nanoseconds apply(Nanoseconds t) const noexcept {
    return t + offset +
           static_cast<Nanoseconds>(std::llround(drift * static_cast<double>(t - pivot)));
  }
};

struct Alignment {
  std::vector<ClockModel> clocks;  ///< by index into Trace::ranks
  std::string refusal;             ///< why the clocks cannot be aligned; empty: they are
  bool mismatched = false;         ///< refused because operations do not fit together in time: the
                                   ///< files are not of one run, or the matching is wrong
  double residual_mad_us = 0;      ///< of the members' ends around their common end
  double residual_p99_us = 0;
  double bound_us = 0;          ///< width of the widest corridor: no offset is off by more
  std::int64_t violations = 0;  ///< members that end before the last one begins, after alignment
  std::int64_t checked = 0;     ///< members that this was asked of
  std::vector<std::int32_t>
      contradiction;  ///< ranks of a cycle of constraints that cannot all hold
  std::vector<std::string> notes;

  [[nodiscard]] bool aligned() const noexcept { return refusal.empty(); }
  [[nodiscard]] Nanoseconds at(TableIndex rank_index, Nanoseconds t) const noexcept {
    return clocks[rank_index].apply(t);
  }
};

struct AlignOptions {
  double refuse_above_us = 50;    ///< median absolute deviation of the ends
  double drift_window_s = 0.05;   ///< shorter windows get no drift
  double drift_significance = 4;  ///< a slope below this many standard errors is taken as zero
  double keep_below_us =
      10;                   ///< clocks that agree this well, without a violation, stay as they are
  std::size_t threads = 0;  ///< 0: as many as the machine runs at once
};

namespace detail {

class Aligner {
 public:
  Aligner(const Trace& trace, const Matches& matches, const AlignOptions& options)
      : t_(trace), matches_(matches), options_(options), clock_of_(trace.ranks.size()) {
    std::map<std::string_view, std::size_t> shared;
    for (std::size_t r = 0; r < t_.ranks.size(); ++r) {
      const std::string& name = t_.ranks[r].clock;
      const auto [at, is_new] = shared.try_emplace(name, models_.size());
      if (!name.empty() && !is_new) {
        clock_of_[r] = at->second;
        continue;
      }
      clock_of_[r] = models_.size();
      models_.emplace_back();
    }
  }

  Alignment run() {
    collect();
    if (models_.size() > 1) {
      place();
      if (out_.refusal.empty()) list_samples();
      for (int sweep = 0; sweep < sweeps && out_.refusal.empty(); ++sweep) {
        if (refine(sweep > 0) < settled && sweep > 1) break;
      }
      anchor();
      if (out_.refusal.empty()) keep_good_clocks();
    }
    out_.clocks.resize(t_.ranks.size());
    if (out_.refusal.empty()) {
      judge_residuals();
      if (models_.size() > 1 && out_.refusal.empty()) corridor();
    }
    if (!out_.refusal.empty()) models_.assign(models_.size(), ClockModel{});
    for (std::size_t r = 0; r < t_.ranks.size(); ++r) out_.clocks[r] = models_[clock_of_[r]];
    count_violations();
    if (out_.refusal.empty()) doubt_violations();
    return std::move(out_);
  }

 private:
  struct Member {
    std::size_t clock;
    Nanoseconds begin, end;
  };
  /// An operation whose members end together.
  struct Meeting {
    std::size_t first, count;  // into members_
    bool proven;               // every begin precedes every end by the nature of the operation
  };
  /// By the nature of the operation `before` began before `after` ended.
  struct Order {
    Member before, after;
  };

  [[nodiscard]] Nanoseconds begin(const Member& m) const noexcept {
    return models_[m.clock].apply(m.begin);
  }
  [[nodiscard]] Nanoseconds end(const Member& m) const noexcept {
    return models_[m.clock].apply(m.end);
  }

  void collect() {
    for (const Instance& instance : matches_.instances) {
      const std::size_t first = members_.size();
      std::size_t sender = absent, receiver = absent;
      std::int32_t root = -1;
      for (std::size_t k = instance.first; k < instance.first + instance.count; ++k) {
        const Communication& c = t_.communications[matches_.members[k]];
        const Event& e = t_.events[c.event];
        if (c.op == CommunicationOp::send) sender = members_.size();
        if (c.op == CommunicationOp::recv) receiver = members_.size();
        if (c.peer >= 0) root = c.peer;
        members_.push_back({clock_of_[matches_.ranks[k]], e.begin, e.end});
      }
      if (sender != absent && receiver != absent) {
        orders_.push_back({members_[sender], members_[receiver]});
        pairs_.push_back({first, instance.count, false});
        continue;
      }
      const bool rooted =
          instance.op == CommunicationOp::broadcast || instance.op == CommunicationOp::reduce;
      if (rooted) {
        add_rooted(instance, first, root);
      } else {
        meetings_.push_back({first, instance.count, synchronises_all(instance.op)});
      }
    }
  }

  void add_rooted(const Instance& instance, std::size_t first, std::int32_t root) {
    const auto members = matches_.of(instance);
    for (std::size_t r = 0; r < members.size(); ++r) {
      const Event& e = t_.events[t_.communications[members[r]].event];
      if (t_.rank(e) != root) continue;
      for (std::size_t k = 0; k < members.size(); ++k) {
        if (k == r) continue;
        const Member& at_root = members_[first + r];
        const Member& other = members_[first + k];
        orders_.push_back(instance.op == CommunicationOp::broadcast ? Order{at_root, other}
                                                                    : Order{other, at_root});
      }
    }
  }

  [[nodiscard]] static double median(std::vector<double>& values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  /// What the soft estimate rests on: pairs, whose ends agree less, only where nothing else is.
  [[nodiscard]] const std::vector<Meeting>& evidence() const noexcept {
    return meetings_.empty() ? pairs_ : meetings_;
  }

  /// The common end of a meeting's members whose clocks are known. `ends` is scratch.
  [[nodiscard]] bool common_end(const Meeting& meeting, const std::vector<char>& known,
                                Nanoseconds& out, std::vector<Nanoseconds>& ends) const {
    ends.clear();
    for (std::size_t k = 0; k < meeting.count; ++k) {
      const Member& m = members_[meeting.first + k];
      if (known[m.clock] != 0) ends.push_back(end(m));
    }
    if (ends.empty()) return false;
    const auto middle = ends.begin() + static_cast<std::ptrdiff_t>(ends.size() / 2);
    std::nth_element(ends.begin(), middle, ends.end());
    out = *middle;
    if (ends.size() % 2 == 0) out -= (out - *std::max_element(ends.begin(), middle)) / 2;
    return true;
  }

  /// First offsets, from the lowest rank's clock outwards; collectives before pairs, whose ends
  /// agree less.
  void place() {
    std::vector<char> known(models_.size(), 1);
    const std::vector<char> silent = find_silent();
    for (std::size_t r = 0; r < t_.ranks.size(); ++r) {
      // A rank without a record has no clock to find.
      if (!t_.ranks[r].missing && silent[r] == 0) known[clock_of_[r]] = 0;
    }
    auto left = static_cast<std::size_t>(std::count(known.begin(), known.end(), 0));
    if (left == 0) return;
    const auto seed = [&] {
      for (std::size_t c = 0; c < known.size(); ++c) {
        if (known[c] != 0) continue;
        known[c] = 1;
        --left;
        return;
      }
    };
    seed();
    std::vector<std::vector<double>> differences(models_.size());
    int components = 1;
    while (left > 0) {
      std::size_t placed = place_wave(meetings_, known, differences);
      if (placed == 0) placed = place_wave(pairs_, known, differences);
      left -= placed;
      if (placed != 0) continue;
      seed();
      ++components;
    }
    if (components > 1) {
      out_.refusal = sentence("the ranks fall into ", components,
                              " sets that share no operation, so their clocks cannot be compared");
    }
  }

  /// Ranks whose files hold no operation with others at all, as where a profile lacks the device's
  /// part; none where there are no two others that could be aligned without them.
  [[nodiscard]] std::vector<char> find_silent() {
    std::vector<char> silent(t_.ranks.size(), 1);
    for (std::size_t i = 0; i < t_.communications.size(); ++i)
      silent[t_.rank_index(t_.events[t_.communications[i].event])] = 0;
    const auto heard = std::count(silent.begin(), silent.end(), 0);
    if (heard < 2) return std::vector<char>(t_.ranks.size(), 0);
    for (std::size_t r = 0; r < t_.ranks.size(); ++r) {
      if (silent[r] == 0 || t_.ranks[r].missing) continue;
      out_.notes.push_back(sentence("rank ", t_.ranks[r].rank,
                                    " has no operation with others in its file, so its clock is "
                                    "left as it is"));
    }
    return silent;
  }

  std::size_t place_wave(const std::vector<Meeting>& meetings, std::vector<char>& known,
                         std::vector<std::vector<double>>& differences) {
    for (auto& d : differences) d.clear();
    std::vector<Nanoseconds> base(models_.size(), 0);
    for (const Meeting& meeting : meetings) {
      Nanoseconds common = 0;
      if (!common_end(meeting, known, common, ends_)) continue;
      for (std::size_t k = 0; k < meeting.count; ++k) {
        const Member& m = members_[meeting.first + k];
        if (known[m.clock] != 0) continue;
        // Differences of nearly equal size, so that a double holds them to the nanosecond.
        if (differences[m.clock].empty()) base[m.clock] = common - m.end;
        differences[m.clock].push_back(static_cast<double>(common - m.end - base[m.clock]));
      }
    }
    std::size_t placed = 0;
    for (std::size_t c = 0; c < models_.size(); ++c) {
      if (differences[c].empty()) continue;
      models_[c].offset = base[c] + static_cast<Nanoseconds>(std::llround(median(differences[c])));
      known[c] = 1;
      ++placed;
    }
    return placed;
  }

  /// A member of an operation, as its clock sees it.
  struct Sample {
    Nanoseconds t;          // of the clock itself
    std::uint32_t meeting;  // into common_
    bool slope_only;        // tells of the drift, but not of the offset
    double residual;        // common end - own end
  };

  /// Ends of a transfer may differ, but by the same each time: transfers tell of drifts, and groups
  /// that only transfers join have nothing else.
  void list_samples() {
    const auto add = [&](const std::vector<Meeting>& meetings, bool slope_only) {
      for (const Meeting& meeting : meetings) {
        const auto at = static_cast<std::uint32_t>(asked_.size());
        asked_.push_back(&meeting);
        for (std::size_t k = 0; k < meeting.count; ++k) {
          const Member& m = members_[meeting.first + k];
          samples_[m.clock].push_back({m.end, at, slope_only, 0});
        }
      }
    };
    samples_.resize(models_.size());
    add(evidence(), false);
    offset_evidence_ = asked_.size();
    if (&evidence() != &pairs_) add(pairs_, true);
    common_.resize(asked_.size());
    on_threads(samples_.size(), useful_threads(options_.threads, samples_.size()),
               [&](std::size_t clock, std::size_t) {
                 std::sort(samples_[clock].begin(), samples_[clock].end(),
                           [](const Sample& a, const Sample& b) {
                             return std::pair(a.t, a.meeting) < std::pair(b.t, b.meeting);
                           });
               });
  }

  /// Every clock moves to the median of its residuals; with `drift`, also turns by their slope.
  /// Returns the largest move in ns, drift included.
  double refine(bool drift) {
    const std::vector<char> all(models_.size(), 1);
    const std::size_t count = drift ? asked_.size() : offset_evidence_;
    constexpr std::size_t at_once = 1024;
    const std::size_t pieces = (count + at_once - 1) / at_once;
    std::size_t threads = useful_threads(options_.threads, pieces);
    std::vector<std::vector<Nanoseconds>> ends(threads, std::vector<Nanoseconds>(models_.size()));
    on_threads(pieces, threads, [&](std::size_t piece, std::size_t worker) {
      for (std::size_t i = piece * at_once; i < std::min(count, (piece + 1) * at_once); ++i)
        (void)common_end(*asked_[i], all, common_[i], ends[worker]);
    });
    threads = useful_threads(options_.threads, models_.size());
    std::vector<std::vector<double>> values(threads);
    for (std::vector<double>& v : values) v.reserve(most_samples());
    std::vector<double> moves(models_.size(), 0);
    on_threads(models_.size(), threads, [&](std::size_t clock, std::size_t worker) {
      moves[clock] = refine(clock, drift, values[worker]);
    });
    return *std::max_element(moves.begin(), moves.end());
  }

  [[nodiscard]] std::size_t most_samples() const {
    std::size_t most = 0;
    for (const auto& own : samples_) most = std::max(most, own.size());
    return most;
  }

  /// One clock; returns its move. `values` is scratch for as many as it has samples.
  double refine(std::size_t clock, bool drift, std::vector<double>& values) {
    std::vector<Sample>& own = samples_[clock];
    ClockModel& model = models_[clock];
    for (Sample& s : own) {
      if (drift || !s.slope_only)
        s.residual = static_cast<double>(common_[s.meeting] - model.apply(s.t));
    }
    double largest = drift && !own.empty() ? turn(model, own, values) : 0;
    values.clear();
    for (const Sample& s : own) {
      if (!s.slope_only) values.push_back(s.residual);
    }
    if (values.empty()) return largest;
    const double move = median(values);
    model.offset += static_cast<Nanoseconds>(std::llround(move));
    return std::max(largest, std::abs(move));
  }

  /// Theil-Sen over pairs half a window apart; the residuals are updated. Returns how far an end of
  /// the window turned, in ns.
  double turn(ClockModel& model, std::vector<Sample>& own, std::vector<double>& values) const {
    const double span = static_cast<double>(own.back().t - own.front().t);
    if (own.size() < 16 || span < options_.drift_window_s * 1e9) return 0;
    const std::size_t half = own.size() / 2;
    values.clear();
    for (std::size_t i = 0; i + half < own.size(); ++i) {
      const double run = static_cast<double>(own[i + half].t - own[i].t);
      if (run > 0) values.push_back((own[i + half].residual - own[i].residual) / run);
    }
    if (values.size() < 8) return 0;
    const double slope = median(values);
    const Nanoseconds pivot = own.front().t + (own.back().t - own.front().t) / 2;
    const auto predicted = [&](const Sample& s) {
      return slope * static_cast<double>(s.t - pivot);
    };
    values.clear();
    for (const Sample& s : own) values.push_back(s.residual - predicted(s));
    const double center = median(values);
    for (double& v : values) v = std::abs(v - center);
    const double sigma = 1.4826 * median(values);
    const double error = sigma / span * std::sqrt(12.0 / static_cast<double>(own.size()));
    if (std::abs(slope) <= options_.drift_significance * error) return 0;
    for (Sample& s : own) s.residual -= predicted(s);
    // The model turns about one pivot: an earlier turn about another is carried over.
    model.offset += static_cast<Nanoseconds>(
        std::llround(model.drift * static_cast<double>(pivot - model.pivot)));
    model.pivot = pivot;
    model.drift += slope;
    return std::abs(slope) * span / 2;
  }

  /// The reference clock becomes the time of all: every model is seen through the inverse of its
  /// one.
  void anchor() {
    const ClockModel reference = models_[0];
    for (ClockModel& model : models_) {
      const auto distance =
          static_cast<double>(model.pivot - reference.pivot + model.offset - reference.offset);
      const double seen = distance / (1 + reference.drift);
      const Nanoseconds whole = model.pivot - reference.pivot;
      model.offset = static_cast<Nanoseconds>(std::llround(seen)) - whole;
      model.drift = (1 + model.drift) / (1 + reference.drift) - 1;
    }
  }

  /// Clocks that read one source already would only get the noise of the estimate added.
  void keep_good_clocks() {
    for (const ClockModel& model : models_) {
      if (model.drift != 0 ||
          std::abs(static_cast<double>(model.offset)) > options_.keep_below_us * 1000)
        return;
    }
    std::vector<ClockModel> estimate(models_.size());
    std::swap(estimate, models_);
    count_violations();
    const bool is_good = out_.violations == 0;
    out_.violations = out_.checked = 0;
    if (is_good) {
      out_.notes.push_back("the clocks agree already and were left as they are");
    } else {
      std::swap(estimate, models_);
    }
  }

  void judge_residuals() {
    std::vector<double> values;
    const std::vector<char> all(models_.size(), 1);
    for (const Meeting& meeting : evidence()) {
      Nanoseconds common = 0;
      (void)common_end(meeting, all, common, ends_);
      for (std::size_t k = 0; k < meeting.count; ++k)
        values.push_back(std::abs(static_cast<double>(end(members_[meeting.first + k]) - common)));
    }
    if (values.empty()) {
      if (t_.ranks.size() > 1 && models_.size() > 1)
        out_.refusal = "the ranks have no operation in common, so their clocks cannot be compared";
      return;
    }
    out_.residual_mad_us = median(values) / 1000;
    const auto p99 = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) * 99 / 100);
    std::nth_element(values.begin(), p99, values.end());
    out_.residual_p99_us = *p99 / 1000;
    if (models_.size() > 1 && out_.residual_mad_us > options_.refuse_above_us) {
      out_.mismatched = true;
      out_.refusal =
          sentence("the ends of matched operations scatter by ", out_.residual_mad_us,
                   " us around each other (median), more than the ", options_.refuse_above_us,
                   " us of an operation that ended together: these files are not of one run, or "
                   "the matching "
                   "is wrong");
    }
  }

  /// d[after] - d[before] >= begin(before) - end(after): weights of the graph of corrections d.
  void constrain(const Member& before, const Member& after) {
    if (before.clock == after.clock) return;
    const Nanoseconds room = end(after) - begin(before);
    const auto [at, is_new] = edges_.try_emplace({before.clock, after.clock}, room);
    if (!is_new) at->second = std::min(at->second, room);
  }

  void corridor() {
    for (const Order& o : orders_) constrain(o.before, o.after);
    for (const Meeting& meeting : meetings_) {
      const auto member = [&](std::size_t k) -> const Member& {
        return members_[meeting.first + k];
      };
      std::size_t last = 0, earliest = 0;
      for (std::size_t k = 1; k < meeting.count; ++k) {
        if (begin(member(k)) > begin(member(last))) last = k;
        if (end(member(k)) < end(member(earliest))) earliest = k;
      }
      // Operations that need not synchronise are believed where they visibly did.
      if (!meeting.proven && begin(member(last)) > end(member(earliest))) continue;
      for (std::size_t k = 0; k < meeting.count; ++k) {
        constrain(member(last), member(k));
        constrain(member(k), member(earliest));
        if (meeting.count > few_members) continue;
        for (std::size_t j = 0; j < meeting.count; ++j) constrain(member(k), member(j));
      }
    }
    // Correction d of the clocks: d[before] - d[after] <= room.
    std::vector<Nanoseconds> upper, lower;
    if (!shortest(true, upper) || !shortest(false, lower)) {
      std::string who;
      for (const std::int32_t rank : out_.contradiction)
        who += sentence(who.empty() ? "rank " : ", rank ", rank);
      out_.mismatched = true;
      out_.refusal =
          sentence("the matched operations contradict each other whatever the clocks: ", who,
                   " ended before the next of them had begun, in a circle; ",
                   "something was matched wrongly");
      return;
    }
    Nanoseconds widest = 0;
    for (std::size_t c = 0; c < models_.size(); ++c) {
      if (upper[c] == unbounded || lower[c] == unbounded) {
        out_.notes.push_back("some clocks are bounded on one side only; the bound leaves them out");
        continue;
      }
      widest = std::max(widest, upper[c] + lower[c]);
    }
    out_.bound_us = static_cast<double>(widest) / 1000;
    pull_into_corridor(upper, lower);
  }

  /// The soft estimate moves towards the middle of the corridor just as far as it must.
  void pull_into_corridor(const std::vector<Nanoseconds>& upper,
                          const std::vector<Nanoseconds>& lower) {
    const auto middle = [&](std::size_t c) {
      const bool both = upper[c] != unbounded && lower[c] != unbounded;
      return both ? static_cast<double>(upper[c] - lower[c]) / 2 : 0.0;
    };
    double share = 0;
    for (const auto& [ends, room] : edges_) {
      if (room >= 0) continue;
      const double step = middle(ends.first) - middle(ends.second);
      if (step < 0) share = std::max(share, std::min(1.0, static_cast<double>(room) / step));
    }
    if (share == 0) return;
    for (std::size_t c = 0; c < models_.size(); ++c)
      models_[c].offset += static_cast<Nanoseconds>(std::llround(share * middle(c)));
  }

  /// Bellman-Ford from the reference clock. Edge before -> after says d[before] <= d[after] + room.
  /// `towards`: distances give upper bounds of d, else upper bounds of -d. False: negative cycle.
  bool shortest(bool towards, std::vector<Nanoseconds>& distance) {
    const std::size_t n = models_.size();
    distance.assign(n, unbounded);
    distance[0] = 0;
    std::vector<std::size_t> through(n, n);
    std::size_t moved = n;
    for (std::size_t round = 0; round <= n; ++round) {
      moved = n;
      for (const auto& [ends, room] : edges_) {
        const std::size_t from = towards ? ends.second : ends.first;
        const std::size_t to = towards ? ends.first : ends.second;
        if (distance[from] == unbounded || distance[from] + room >= distance[to]) continue;
        distance[to] = distance[from] + room;
        through[to] = from;
        moved = to;
      }
      if (moved == n) return true;
    }
    for (std::size_t step = 0; step < n; ++step) moved = through[moved];
    std::size_t at = moved;
    do {
      out_.contradiction.push_back(rank_with_clock(at));
      at = through[at];
    } while (at != moved);
    return false;
  }

  [[nodiscard]] std::int32_t rank_with_clock(std::size_t clock) const {
    for (std::size_t r = 0; r < clock_of_.size(); ++r) {
      if (clock_of_[r] == clock) return t_.ranks[r].rank;
    }
    return -1;
  }

  void count_violations() {
    for (const Meeting& meeting : meetings_) {
      if (!meeting.proven) continue;
      Nanoseconds last = std::numeric_limits<Nanoseconds>::min();
      for (std::size_t k = 0; k < meeting.count; ++k)
        last = std::max(last, begin(members_[meeting.first + k]));
      for (std::size_t k = 0; k < meeting.count; ++k) {
        ++out_.checked;
        out_.violations += end(members_[meeting.first + k]) < last ? 1 : 0;
      }
    }
    for (const Order& o : orders_) {
      ++out_.checked;
      out_.violations += end(o.after) < begin(o.before) ? 1 : 0;
    }
  }

  /// Where ranks read one clock, nothing is left to fit. A few stamps may be wrong.
  void doubt_violations() {
    if (out_.violations < 3 || out_.violations * 20 <= out_.checked) return;
    out_.mismatched = true;
    out_.refusal = sentence("the ranks read one clock, says the recorder, yet ", out_.violations,
                            " of ", out_.checked,
                            " members end before their operation can have begun: these files are "
                            "not of one run, or the matching is wrong");
  }

  static constexpr std::size_t absent = std::numeric_limits<std::size_t>::max();
  static constexpr Nanoseconds unbounded = std::numeric_limits<Nanoseconds>::max();
  /// Passes of the soft estimate: offsets first, then drifts against an ever better common time.
  static constexpr int sweeps = 24;
  static constexpr double settled = 100;  // ns; moves below end the sweeps
  /// Up to here every pair of members is constrained; above, only the pairs that can be tight.
  static constexpr std::size_t few_members = 16;

  const Trace& t_;
  const Matches& matches_;
  AlignOptions options_;
  std::vector<std::size_t> clock_of_;  // by rank index
  std::vector<ClockModel> models_;     // by clock; clock 0 is the reference
  std::vector<Member> members_;
  std::vector<Meeting> meetings_;
  std::vector<Meeting> pairs_;
  std::vector<Order> orders_;
  std::map<std::pair<std::size_t, std::size_t>, Nanoseconds> edges_;
  std::vector<Nanoseconds> ends_;
  std::vector<const Meeting*> asked_;         // what the samples are of, offsets' evidence first
  std::size_t offset_evidence_ = 0;           // of asked_
  std::vector<Nanoseconds> common_;           // ends of asked_
  std::vector<std::vector<Sample>> samples_;  // by clock, in order of time
  Alignment out_;
};

}  // namespace detail

/// Whether it is known when the members of an operation came and went, one against the other: by
/// clocks that are aligned, or by the one that all of them read.
[[nodiscard]] inline bool is_timed(const Trace& trace, const Matches& matches,
                                   const Alignment& alignment, const Instance& instance) {
  if (alignment.aligned()) return true;
  const auto ranks = matches.ranks_of(instance);
  const std::string& clock = trace.ranks[ranks.front()].clock;
  return !alignment.mismatched && !clock.empty() &&
         std::all_of(ranks.begin(), ranks.end(),
                     [&](TableIndex r) { return trace.ranks[r].clock == clock; });
}

/// Of all operations.
[[nodiscard]] inline bool are_timed(const Trace& trace, const Matches& matches,
                                    const Alignment& alignment) {
  return alignment.aligned() ||
         std::all_of(matches.instances.begin(), matches.instances.end(),
                     [&](const Instance& i) { return is_timed(trace, matches, alignment, i); });
}

/// The clock of the first rank is the reference. A refusal leaves every clock as it was.
/// Cost: a few passes over the matched communications, and Bellman-Ford over pairs of clocks that
/// met. Deterministic, whatever the number of threads.
[[nodiscard]] inline Alignment align(const Trace& trace, const Matches& matches,
                                     const AlignOptions& options = {}) {
  return detail::Aligner(trace, matches, options).run();
}

}  // namespace mega::inline v0::scan
