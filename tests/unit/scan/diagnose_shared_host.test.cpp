// Verdicts of ranks that share the processors of a host: threads that wait for one are delayed now
// and then, by many times what their work takes. A fault is what is there each time, too.
#include "../../support/diagnosis.hpp"
#include <mega/scan/trace.hpp>
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/rank_speeds.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;
using mega_test::diagnosis_of;
using mega_test::text;

struct Job {
  int ranks = 4, steps = 30, microbatches = 4, kernels = 6;
  double starved = 0.35;  ///< of all spans, those during which the thread waits for a processor
  int slow_rank = -1;
  double slow_factor = 1;
  int late_rank = -1;
  double late_ms = 0;
  int slow_pair = -1;  ///< of ranks r and r + ranks / 2
  double link_factor = 1;
  bool cold = false;  ///< pair 0 moves the smaller message first, and slowly; then a larger one
  int interrupted_rank = -1;  ///< waits in two of three spans, for nine times their work
  int from_step = 0;
  int interval = 1;  ///< steps of which one is recorded
};

/// Ranks r and r + ranks / 2 are a pipeline of two stages, and reduce something small together each
/// step; all ranks meet at the end of the step.
class Starved {
 public:
  Starved(const Job& job, std::uint32_t seed) : j_(job), draw_(seed) {
    std::vector<std::int32_t> all;
    for (int r = 0; r < j_.ranks; ++r) {
      Rank rank;
      rank.rank = r;
      rank.pipeline = r / half();
      rank.data = r % half();
      rank.tensor = 0;
      rank.clock = "one";
      t.ranks.push_back(rank);
      t.lanes.push_back({static_cast<TableIndex>(r), 0, 0, LaneKind::host, "compute"});
      all.push_back(r);
    }
    world_ = t.intern_group("world", all);
    for (int r = 0; r < half(); ++r) pairs_.push_back(t.intern_group("tied", {r, r + half()}));
    at_.assign(static_cast<std::size_t>(j_.ranks), 0);
    for (step_ = 0; step_ < j_.steps; ++step_) run_step();
  }

  Trace t;

 private:
  [[nodiscard]] int half() const { return j_.ranks / 2; }
  [[nodiscard]] double uniform() { return std::uniform_real_distribution<double>(0, 1)(draw_); }
  [[nodiscard]] bool faulty() const { return step_ >= j_.from_step; }
  [[nodiscard]] Nanoseconds& at(int rank) { return at_[static_cast<std::size_t>(rank)]; }

  /// The work, some noise, and maybe a wait for a processor: some slices of four milliseconds, with
  /// a tail that is heavy.
  [[nodiscard]] Nanoseconds span(double ns, double starved) {
    const double noise = 1 + 0.03 * uniform();
    double wait = 0;
    if (uniform() < starved) wait = 4e5 * std::pow(1 - uniform(), -0.8);
    return static_cast<Nanoseconds>(ns * noise + std::min(wait, 1e8));
  }
  TableIndex add(int rank, const char* name, EventKind kind, Nanoseconds begin, Nanoseconds end,
                 int microbatch = -1) {
    if (step_ % j_.interval != 0) return none;
    Event e;
    e.begin = begin, e.end = end;
    e.name = t.names.intern(name);
    e.lane = static_cast<TableIndex>(rank);
    e.step = step_;
    e.microbatch = microbatch;
    e.kind = kind;
    return static_cast<TableIndex>(t.events.push_back(e));
  }
  void meet(const std::vector<int>& ranks, TableIndex group, double ns, double starved,
            std::int64_t bytes = 65'536) {
    const std::int64_t sequence = sequences_[group]++;
    Nanoseconds last = 0;
    for (const int r : ranks) last = std::max(last, at(r));
    const Nanoseconds end = last + span(ns, starved);
    for (const int r : ranks) {
      const TableIndex event = add(r, "all_reduce", EventKind::communication, at(r), end);
      Communication c;
      c.group = group;
      c.op = CommunicationOp::all_reduce;
      c.sequence = sequence;
      c.bytes = bytes;
      if (event != none) t.attach(event, c);
      at(r) = end;
    }
  }
  void run_step() {
    std::vector<int> all;
    std::vector<Nanoseconds> begun;
    for (int r = 0; r < j_.ranks; ++r) {
      all.push_back(r);
      // From one step to the next the host does a little, and may lose its processor.
      at(r) += span(50e3, j_.starved);
      if (r == j_.late_rank && faulty()) at(r) += static_cast<Nanoseconds>(j_.late_ms * 1e6);
      begun.push_back(at(r));
      const double slow = r == j_.slow_rank && faulty() ? j_.slow_factor : 1;
      for (int m = 0; m < j_.microbatches; ++m) {
        for (int k = 0; k < j_.kernels; ++k) {
          static const char* const names[] = {"qkv", "core", "out", "up", "act", "down"};
          Nanoseconds length = span(slow * 1e5 * (k + 1), j_.starved);
          if (r == j_.interrupted_rank && uniform() < 0.67) length *= 9;
          add(r, names[k % 6], EventKind::compute, at(r), at(r) + length, m);
          at(r) += length;
        }
      }
    }
    for (int r = 0; r < half(); ++r) {
      const double slow = r == j_.slow_pair && faulty() ? j_.link_factor : 1;
      // The shorter the operation, the more of it is waiting.
      const TableIndex pair = pairs_[static_cast<std::size_t>(r)];
      meet({r, r + half()}, pair, slow * (j_.cold && r == 0 ? 4 : 1) * 60e3, j_.starved);
      if (j_.cold && r == 0) meet({r, r + half()}, pair, 70e3, j_.starved, 80'000);
    }
    meet(all, world_, 40e3, j_.starved);
    for (int r = 0; r < j_.ranks; ++r)
      add(r, "step", EventKind::iteration, begun[static_cast<std::size_t>(r)], at(r));
  }

  Job j_;
  std::mt19937 draw_;
  TableIndex world_ = 0;
  std::map<TableIndex, std::int64_t> sequences_;
  std::vector<TableIndex> pairs_;
  std::vector<Nanoseconds> at_;
  int step_ = 0;
};

using Ranks = std::vector<std::int32_t>;

/// Over these seeds, how often exactly this is the verdict.
int named(const Job& job, VerdictClass what, const Ranks& ranks, std::string& said) {
  int out = 0;
  for (std::uint32_t seed = 1; seed <= 10; ++seed) {
    const Diagnosis d = diagnosis_of(Starved(job, seed).t);
    const bool right =
        d.verdicts.size() == 1 && d.verdicts[0].what == what && d.verdicts[0].ranks == ranks;
    out += right ? 1 : 0;
    if (!right) said += std::to_string(seed) + ": " + text(d);
  }
  return out;
}

}  // namespace

TEST_CASE("scan: healthy ranks that share processors are accused of nothing") {
  for (const int ranks : {4, 6, 8}) {
    for (const double starved : {0.1, 0.35, 0.6}) {
      for (std::uint32_t seed = 1; seed <= 10; ++seed) {
        Job job;
        job.ranks = ranks;
        job.starved = starved;
        const Diagnosis d = diagnosis_of(Starved(job, seed).t);
        CAPTURE(ranks);
        CAPTURE(starved);
        CAPTURE(seed);
        CAPTURE(text(d));
        CHECK(d.healthy());
      }
    }
  }
}

TEST_CASE("scan: faults are found among ranks that share processors") {
  std::string said;
  Job slow;
  slow.ranks = 8;
  slow.slow_rank = 5;
  for (const auto& [factor, starved] : {std::pair(1.5, 0.35), {2.0, 0.35}, {1.5, 0.6}}) {
    slow.slow_factor = factor;
    slow.microbatches = starved > 0.5 ? 8 : 4;
    slow.starved = starved;
    CHECK_MESSAGE(named(slow, VerdictClass::slow_gpu, {5}, said) == 10, said);
  }
  Job late;
  late.late_rank = 1;
  late.late_ms = 5;
  CHECK_MESSAGE(named(late, VerdictClass::host_delay, {1}, said) == 10, said);
  late.late_rank = 3;
  late.late_ms = 10;
  late.from_step = 12;
  CHECK_MESSAGE(named(late, VerdictClass::host_delay, {3}, said) == 10, said);
  Job link;
  link.slow_pair = 1;
  link.link_factor = 40;
  CHECK_MESSAGE(named(link, VerdictClass::slow_link, {1, 3}, said) == 10, said);
}

TEST_CASE("scan: a host that comes late is found though each fifth step is recorded") {
  std::string said;
  Job late;
  late.steps = 150;
  late.interval = 5;
  for (std::uint32_t seed = 1; seed <= 10; ++seed)
    CHECK(diagnosis_of(Starved(late, seed).t).healthy());
  late.late_rank = 1;
  late.late_ms = 8;
  CHECK_MESSAGE(named(late, VerdictClass::host_delay, {1}, said) >= 9, said);
  late.starved = 0;
  late.late_ms = 3;
  said.clear();
  CHECK_MESSAGE(named(late, VerdictClass::host_delay, {1}, said) == 10, said);
  const Diagnosis d = diagnosis_of(Starved(late, 1).t);
  REQUIRE(d.verdicts.size() == 1);
  CHECK(static_cast<double>(d.verdicts[0].cost_per_step) == doctest::Approx(3e6).epsilon(0.02));
}

TEST_CASE("scan: a link that carries more in less time is not slow") {
  Job job;
  job.cold = true;
  job.starved = 0;
  const Diagnosis cold = diagnosis_of(Starved(job, 1).t);
  CHECK_MESSAGE(cold.healthy(), text(cold));
}

TEST_CASE("scan: a rank that is in something's way most of the time is slow, but not for sure") {
  Job job;
  job.ranks = 8;
  job.starved = 0;
  job.interrupted_rank = 6;
  const Diagnosis d = diagnosis_of(Starved(job, 1).t);
  REQUIRE_MESSAGE(d.verdicts.size() == 1, text(d));
  CHECK(d.verdicts[0].what == VerdictClass::slow_gpu);
  CHECK(d.verdicts[0].ranks == Ranks{6});
  CHECK(d.verdicts[0].confidence <= 0.7);
  CHECK(d.verdicts[0].evidence[0].find("though the fastest do not") != std::string::npos);
}

TEST_CASE("scan: figures of shared processors are those of what nothing delays") {
  Job job;
  job.slow_rank = 2;
  job.slow_factor = 1.5;
  job.from_step = 10;
  const Diagnosis slow = diagnosis_of(Starved(job, 3).t);
  REQUIRE_MESSAGE(slow.verdicts.size() == 1, text(slow));
  CHECK(slow.verdicts[0].factor == doctest::Approx(1.5).epsilon(0.03));
  CHECK(slow.verdicts[0].since_step == 10);

  Job late;
  late.late_rank = 0;
  late.late_ms = 8;
  const Diagnosis host = diagnosis_of(Starved(late, 3).t);
  REQUIRE_MESSAGE(host.verdicts.size() == 1, text(host));
  CHECK(static_cast<double>(host.verdicts[0].cost_per_step) == doctest::Approx(8e6).epsilon(0.1));
  CHECK(host.verdicts[0].since_step == 1);  // before the first one nothing is known
}

TEST_CASE("scan: an undisturbed value is one that a tenth is below") {
  std::vector<double> one{7}, many{5, 9, 1, 8, 2, 7, 3, 6, 4, 10, 11};
  CHECK(verdicts::undisturbed(one) == 7);
  CHECK(verdicts::undisturbed(many) == 2);
  CHECK(verdicts::lower_quantile(many, 0) == 1);
  CHECK(verdicts::lower_quantile(many, 0.75) == 8);
  CHECK(verdicts::lower_median(many) == 6);
}

TEST_CASE("scan: an outlier is above its limit where its peers are not") {
  using verdicts::Figures;
  const std::optional<double> unknown;
  // Peers never are: a third of the steps will do.
  Figures calm(3, std::vector<std::optional<double>>(12, 0.0));
  for (const std::size_t s : {2, 5, 8, 11}) calm[1][s] = 3.0;
  auto found = verdicts::find_outliers(calm, 1);
  CHECK(!found[0].lasts());
  CHECK(found[1].lasts());
  CHECK(found[1].first == 2);
  CHECK(found[1].level == 3);
  // Peers sometimes are: now it has to be there nearly each time.
  calm[0][3] = calm[2][9] = 4.0;
  CHECK(!verdicts::find_outliers(calm, 1)[1].lasts());
  for (std::size_t s = 2; s < 12; ++s) calm[1][s] = 3.0;
  found = verdicts::find_outliers(calm, 1);
  CHECK(found[1].lasts());
  CHECK(found[1].slow == 10);
  calm[1][4] = calm[1][6] = calm[1][9] = 0.0;
  CHECK(!verdicts::find_outliers(calm, 1)[1].lasts());
  // All are from a step on: none is the odd one out.
  Figures all(3, std::vector<std::optional<double>>(40, 0.0));
  for (std::size_t s = 20; s < 40; ++s) all[0][s] = all[2][s] = 2.0 + 0.1 * double(s % 7);
  for (std::size_t s = 20; s < 40; ++s) all[1][s] = 2.3;
  for (const verdicts::Onset& o : verdicts::find_outliers(all, 1)) CHECK(!o.lasts());
  // Peers are not above it as a whole, but are since it is: it has to be above them, too.
  Figures late(3, std::vector<std::optional<double>>(30, 0.0));
  for (std::size_t s = 20; s < 30; ++s) late[1][s] = 2.5;
  CHECK(verdicts::find_outliers(late, 1)[1].lasts());
  for (std::size_t s = 20; s < 27; ++s) late[0][s] = late[2][s] = 3.0;
  CHECK(!verdicts::find_outliers(late, 1)[1].lasts());
  // One alone, and nothing known.
  CHECK(verdicts::find_outliers({{2.0, 2.0, 2.0}}, 1)[0].lasts());
  CHECK(!verdicts::find_outliers({{unknown, unknown}, {unknown}}, 1)[0].lasts());
  CHECK(verdicts::find_outliers({}, 1).empty());
}

TEST_CASE("scan: what all ranks suffer from in a step is no rank's slowness") {
  verdicts::RankSpeeds speeds;
  speeds.steps = 3;
  speeds.known = {1, 1, 1, 1, 1, 1, 1, 1, 0};
  speeds.excess = {0.0, 0.3, -0.1, 0.2, 0.5, 0.2, 0.0, 0.3, 0.0};
  verdicts::remove_common_slowness(speeds);
  const std::vector<double> left{0.0, 0.0, -0.1, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0};
  for (std::size_t i = 0; i < left.size(); ++i) {
    CAPTURE(i);
    CHECK(speeds.excess[i] == doctest::Approx(left[i]));
  }
}
