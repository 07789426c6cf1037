#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace mega::scan;

/// What a rank's clock shows at true time t.
struct Clock {
  Nanoseconds offset = 0;
  double drift = 0;
  [[nodiscard]] Nanoseconds show(Nanoseconds t) const {
    return t + offset + static_cast<Nanoseconds>(std::llround(drift * static_cast<double>(t)));
  }
};

/// Builds traces of ranks that run operations at known true times.
class Job {
 public:
  explicit Job(std::vector<Clock> clocks) : clocks_(std::move(clocks)) {
    for (std::size_t r = 0; r < clocks_.size(); ++r) {
      Rank rank;
      rank.rank = static_cast<std::int32_t>(r);
      trace.ranks.push_back(rank);
      Lane lane;
      lane.rank = static_cast<TableIndex>(r);
      trace.lanes.push_back(lane);
      everyone_.push_back(rank.rank);
    }
    world = trace.intern_group("world", everyone_);
  }

  void call(int rank, CommunicationOp op, Nanoseconds begin, Nanoseconds end,
            std::int64_t sequence = -1, std::int32_t peer = -1, std::int64_t bytes = 64,
            TableIndex group = 0) {
    const Clock& clock = clocks_[static_cast<std::size_t>(rank)];
    Event e;
    e.begin = clock.show(begin);
    e.end = clock.show(end);
    e.lane = static_cast<TableIndex>(rank);
    const auto at = static_cast<TableIndex>(trace.events.push_back(e));
    Communication c;
    c.group = group;
    c.op = op;
    c.sequence = sequence;
    c.peer = peer;
    c.bytes = bytes;
    trace.attach(at, c);
  }

  /// n all-reduces, 1/n of `window` apart: begins scatter by up to 5 ms, ends by up to 5 us.
  void all_reduces(int n, Nanoseconds window, bool numbered, std::uint32_t seed = 1) {
    std::mt19937 random(seed);
    for (int i = 0; i < n; ++i) {
      const Nanoseconds at = window / n * i;
      std::vector<Nanoseconds> begins;
      for (std::size_t r = 0; r < clocks_.size(); ++r)
        begins.push_back(at + static_cast<Nanoseconds>(random() % 5000000));
      const Nanoseconds end = *std::max_element(begins.begin(), begins.end()) + 200000;
      for (std::size_t r = 0; r < clocks_.size(); ++r) {
        call(static_cast<int>(r), CommunicationOp::all_reduce, begins[r],
             end + static_cast<Nanoseconds>(random() % 5000), numbered ? i : -1, -1, 64 + i % 3);
      }
    }
  }

  /// Largest error of any rank's clock against rank 0's, at the ends of [0, window].
  [[nodiscard]] double worst_error_us(const Alignment& a, Nanoseconds window) const {
    double worst = 0;
    for (const Nanoseconds t : {Nanoseconds{0}, window}) {
      const Nanoseconds reference = a.at(0, clocks_[0].show(t));
      for (std::size_t r = 0; r < clocks_.size(); ++r) {
        const Nanoseconds seen = a.at(static_cast<TableIndex>(r), clocks_[r].show(t));
        worst = std::max(worst, std::abs(static_cast<double>(seen - reference)) / 1000);
      }
    }
    return worst;
  }

  Trace trace;
  TableIndex world = 0;

 private:
  std::vector<Clock> clocks_;
  std::vector<std::int32_t> everyone_;
};

std::vector<Clock> clocks(int n, double seconds, double ppm, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> unit(-1, 1);
  std::vector<Clock> out;
  for (int r = 0; r < n; ++r)
    out.push_back(
        {static_cast<Nanoseconds>(unit(random) * seconds * 1e9), unit(random) * ppm * 1e-6});
  return out;
}

TEST_CASE("scan: recorded sequence numbers match, whatever the order in the file") {
  Job job(clocks(3, 5, 0, 1));
  job.all_reduces(10, 100000000, true);
  const Matches m = match(job.trace);
  REQUIRE(m.instances.size() == 10);
  CHECK(m.by_sequence == 10);
  CHECK(m.leftovers.empty());
  CHECK(m.notes.empty());
  for (const Instance& i : m.instances) {
    CHECK(i.count == 3);
    for (const TableIndex member : m.of(i))
      CHECK(job.trace.communications[member].sequence == i.sequence);
  }
}

TEST_CASE("scan: windows that begin at different operations are shifted onto each other") {
  Job job(clocks(3, 5, 0, 2));
  const std::vector<int> first{0, 4, 2};
  for (int i = 0; i < 40; ++i) {
    for (int r = 0; r < 3; ++r) {
      if (i < first[static_cast<std::size_t>(r)]) continue;
      const Nanoseconds at = i * 10000000LL;
      job.call(r, CommunicationOp::all_reduce, at + r * 1000, at + 900000 + r * 500, -1, -1,
               i % 7 == 0 ? 4096 : 64);
    }
  }
  const Matches m = match(job.trace);
  CHECK(m.by_signature == 38);
  std::size_t complete = 0;
  for (const Instance& i : m.instances) {
    complete += i.count == 3 ? 1 : 0;
    const std::int64_t bytes = job.trace.communications[m.of(i)[0]].bytes;
    for (const TableIndex member : m.of(i)) CHECK(job.trace.communications[member].bytes == bytes);
  }
  CHECK(complete == 36);
  CHECK(m.leftovers.size() == 2);
  CHECK(align(job.trace, m).residual_mad_us < 2);
}

TEST_CASE("scan: periodic signatures are told apart by their ends") {
  Job job(clocks(2, 5, 0, 3));
  std::mt19937 random(3);
  Nanoseconds at = 0;
  for (int i = 0; i < 30; ++i) {
    at += 5000000 + static_cast<Nanoseconds>(random() % 3000000);
    job.call(0, CommunicationOp::all_reduce, at, at + 700000);
    if (i >= 3) job.call(1, CommunicationOp::all_reduce, at + 300000, at + 701000);
  }
  const Matches m = match(job.trace);
  const Alignment a = align(job.trace, m);
  CHECK(m.leftovers.size() == 3);
  CHECK(a.aligned());
  CHECK(job.worst_error_us(a, at) < 2);
}

TEST_CASE("scan: a key that one rank used twice leaves the second use over") {
  Job job(clocks(2, 0, 0, 4));
  job.call(0, CommunicationOp::all_reduce, 0, 10, 7);
  job.call(1, CommunicationOp::all_reduce, 0, 10, 7);
  job.call(0, CommunicationOp::all_reduce, 20, 30, 7);
  const Matches m = match(job.trace);
  CHECK(m.instances.size() == 1);
  CHECK(m.leftovers == std::vector<TableIndex>{2});
}

TEST_CASE("scan: sends and receives of a pair are first in, first out; numbers find the gap") {
  Job job(clocks(2, 1, 0, 5));
  for (int i = 0; i < 4; ++i) {
    job.call(0, CommunicationOp::send, i * 1000, i * 1000 + 500, i, 1);
    if (i != 1) job.call(1, CommunicationOp::recv, i * 1000, i * 1000 + 510, i, 0);
  }
  const Matches m = match(job.trace);
  REQUIRE(m.instances.size() == 3);
  CHECK(m.instances[1].sequence == 2);
  CHECK(m.leftovers.size() == 1);
  CHECK(job.trace.communications[m.leftovers[0]].sequence == 1);
}

TEST_CASE("scan: offsets of seconds and drifts of 50 ppm are recovered to microseconds") {
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    constexpr Nanoseconds window = 20000000000;
    Job job(clocks(8, 5, 50, seed));
    job.all_reduces(300, window, seed % 2 == 0, seed);
    const Alignment a = align(job.trace, match(job.trace));
    REQUIRE(a.aligned());
    CHECK(a.violations == 0);
    CHECK(a.checked == 8 * 300);
    CHECK(job.worst_error_us(a, window) < 5);
    CHECK(a.residual_mad_us < 3);
    CHECK(a.bound_us > 0.4);
  }
}

TEST_CASE("scan: a short window gets no drift") {
  Job job(clocks(4, 5, 50, 9));
  job.all_reduces(8, 20000000, true);
  const Alignment a = align(job.trace, match(job.trace));
  REQUIRE(a.aligned());
  for (const ClockModel& c : a.clocks) CHECK(c.drift == 0);
  CHECK(a.violations == 0);
}

TEST_CASE("scan: files of different runs are refused with the scatter") {
  Job job(clocks(2, 5, 0, 10));
  std::mt19937 random(10);
  Nanoseconds first = 0, second = 0;
  for (int i = 0; i < 20; ++i) {
    first += 1000000 + static_cast<Nanoseconds>(random() % 90000000);
    second += 1000000 + static_cast<Nanoseconds>(random() % 90000000);
    job.call(0, CommunicationOp::all_reduce, first, first + 500000, i);
    job.call(1, CommunicationOp::all_reduce, second, second + 500000, i);
  }
  const Alignment a = align(job.trace, match(job.trace));
  CHECK_FALSE(a.aligned());
  CAPTURE(a.refusal);
  CHECK(a.refusal.find("more than the 50 us") != std::string::npos);
  CHECK(a.clocks[1].offset == 0);
}

TEST_CASE("scan: operations that contradict each other are refused as a wrong matching") {
  Job job(clocks(2, 0, 0, 11));
  for (int i = 0; i < 30; ++i) {
    const Nanoseconds at = i * 1000000LL;
    job.call(0, CommunicationOp::all_reduce, at, at + 100000, i);
    job.call(1, CommunicationOp::all_reduce, at + 1000, at + 100500, i);
  }
  // Rank 1's operation 40 is over before rank 0's has begun, by the clocks that the others fix.
  job.call(0, CommunicationOp::all_reduce, 50000000, 50001000, 40);
  job.call(1, CommunicationOp::all_reduce, 40000000, 40001000, 40);
  job.call(0, CommunicationOp::all_reduce, 60000000, 60001000, 41);
  job.call(1, CommunicationOp::all_reduce, 70000000, 70001000, 41);
  const Alignment a = align(job.trace, match(job.trace));
  CHECK_FALSE(a.aligned());
  CHECK(a.refusal.find("contradict") != std::string::npos);
  std::vector<std::int32_t> cycle = a.contradiction;
  std::sort(cycle.begin(), cycle.end());
  CHECK(cycle == std::vector<std::int32_t>{0, 1});
}

TEST_CASE("scan: ranks joined through different groups and pairs are aligned along the way") {
  Job job(clocks(4, 5, 0, 12));
  const TableIndex left = job.trace.intern_group("tp", {0, 1});
  const TableIndex right = job.trace.intern_group("tp", {2, 3});
  for (int i = 0; i < 20; ++i) {
    const Nanoseconds at = i * 3000000LL;
    for (int r = 0; r < 4; ++r) {
      job.call(r, CommunicationOp::all_reduce, at + r * 2000, at + 100000 + r, i, -1, 64,
               r < 2 ? left : right);
    }
    job.call(1, CommunicationOp::send, at + 200000, at + 300000, i, 2);
    job.call(2, CommunicationOp::recv, at + 150000, at + 300000, i, 1);
  }
  const Alignment a = align(job.trace, match(job.trace));
  REQUIRE(a.aligned());
  CHECK(job.worst_error_us(a, 60000000) < 1);
  CHECK(a.violations == 0);
}

TEST_CASE("scan: groups that only transfers join get their drifts against each other") {
  Job job(clocks(4, 5, 50, 14));
  const TableIndex left = job.trace.intern_group("tp", {0, 1});
  const TableIndex right = job.trace.intern_group("tp", {2, 3});
  constexpr Nanoseconds window = 1000000000;
  for (int i = 0; i < 200; ++i) {
    const Nanoseconds at = i * (window / 200);
    for (int r = 0; r < 4; ++r) {
      job.call(r, CommunicationOp::all_reduce, at + r * 2000, at + 100000 + r, i, -1, 64,
               r < 2 ? left : right);
    }
    // The receiver's end is always 3 us behind the sender's: no drift.
    job.call(1, CommunicationOp::send, at + 200000, at + 300000, i, 2);
    job.call(2, CommunicationOp::recv, at + 150000, at + 303000, i, 1);
  }
  const Alignment a = align(job.trace, match(job.trace));
  REQUIRE(a.aligned());
  CHECK(job.worst_error_us(a, window) < 4);  // the 3 us, which nothing tells from an offset
  CHECK(a.violations == 0);
}

TEST_CASE("scan: a rank whose file is missing does not keep the others from being compared") {
  Job job(clocks(3, 5, 0, 15));
  job.trace.ranks[1].missing = true;
  for (int i = 0; i < 20; ++i) {
    const Nanoseconds at = i * 1000000LL;
    for (const int r : {0, 2}) job.call(r, CommunicationOp::all_reduce, at + r, at + 50000, i);
  }
  const Alignment a = align(job.trace, match(job.trace));
  CHECK(a.aligned());
  const Nanoseconds end = job.trace.events[0].end;
  CHECK(std::abs(a.at(0, end) - a.at(2, job.trace.events[1].end)) < 1000);
}

TEST_CASE("scan: ranks without anything in common are not compared") {
  Job job(clocks(2, 5, 0, 13));
  job.call(0, CommunicationOp::all_reduce, 0, 10, 1);
  const Alignment a = align(job.trace, match(job.trace));
  CHECK(a.refusal.find("share no operation") != std::string::npos);
}

TEST_CASE("scan: ranks of one clock keep it, and one rank has nothing to align") {
  Job job({Clock{}, Clock{}});
  for (Rank& rank : job.trace.ranks) rank.clock = "host a, steady";
  job.call(0, CommunicationOp::all_reduce, 0, 900000, 1);
  job.call(1, CommunicationOp::all_reduce, 0, 100000, 1);
  const Alignment a = align(job.trace, match(job.trace));
  CHECK(a.aligned());
  CHECK(a.clocks[1].offset == 0);

  Job alone({Clock{}});
  alone.call(0, CommunicationOp::all_reduce, 0, 10, 1);
  CHECK(align(alone.trace, match(alone.trace)).aligned());
  CHECK(align(Trace{}, Matches{}).aligned());
}

}  // namespace
