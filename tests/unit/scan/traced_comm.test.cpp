// TracedComm on threads: what is recorded, what ranks agree on, and that results are Comm's own.
#include <mega/comm/self.hpp>
#include <mega/comm/thread.hpp>
#include <mega/host/host.hpp>
#include <mega/host/host_async.hpp>
#include <mega/scan/injected_faults.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/recorder.hpp>
#include <mega/scan/traced_comm.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

using namespace mega;
using namespace mega::scan;

using Traced = TracedComm<ThreadComm, HostRecorder>;

// All capabilities of the communicator inside, and none besides.
static_assert(comm::communicator<Traced, host::Stream>);
static_assert(comm::communicator<Traced, host::AsyncStream>);
static_assert(comm::has_channel_queries<Traced, host::Stream>);
static_assert(comm::communicator<TracedComm<SelfComm, NullRecorder>, host::Stream>);
static_assert(
    comm::communicator<TracedComm<ThreadComm, FaultyRecorder<HostRecorder>>, host::Stream>);
static_assert(!comm::has_attended_calls<Traced>);

namespace {
struct OnlyReduces {
  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 2; }
  void all_reduce(host::Stream&, Vector<float>, comm::Reduce) {}
};
struct Attends : OnlyReduces {
  void attend(bool) {}
};
using TracedOnlyReduces = TracedComm<OnlyReduces, HostRecorder>;
static_assert(comm::has_all_reduce<TracedOnlyReduces, host::Stream, float>);
static_assert(!comm::has_all_reduce<TracedOnlyReduces, host::Stream, double>);
static_assert(!comm::has_barrier<TracedOnlyReduces, host::Stream>);
static_assert(!comm::has_split<TracedOnlyReduces>);
static_assert(!comm::has_channels<TracedOnlyReduces, host::Stream>);
static_assert(!comm::has_attended_calls<TracedOnlyReduces>);
static_assert(comm::has_attended_calls<TracedComm<Attends, HostRecorder>>);

/// Communications of a trace by what identifies them.
struct Seen {
  std::int32_t rank;
  std::string op, group;
  std::int64_t sequence, bytes;
  std::string dtype;
  std::int32_t peer;
  friend bool operator==(const Seen&, const Seen&) = default;
};
std::vector<Seen> seen(const Trace& t, int rank) {
  std::vector<Seen> out;
  for (std::size_t i = 0; i < t.communications.size(); ++i) {
    const Communication& c = t.communications[i];
    if (t.rank(t.events[c.event]) != rank) continue;
    out.push_back({rank, std::string(to_string(c.op)), t.groups[c.group].name, c.sequence, c.bytes,
                   c.dtype == none ? "" : std::string(t.names[c.dtype]), c.peer});
  }
  return out;
}
}  // namespace

TEST_CASE("scan: every operation is recorded with group, sequence, bytes, dtype and peer") {
  TraceCollector collector;
  run_threads(4, [&](ThreadComm& threads) {
    RecordingInfo info;
    info.rank = threads.rank();
    HostRecorder recorder(info, collector.sink());
    Traced world(threads, recorder);
    CHECK(world.size() == 4);
    CHECK(world.name() == "world");
    host::Stream stream;
    const int r = world.rank();
    std::vector<float> f(8, static_cast<float>(r + 1));
    std::vector<double> d(3, r);
    std::vector<std::int64_t> wide(4), one{r};
    recorder.begin_step(0);
    world.all_reduce(stream, Vector<float>(f.data(), 8), comm::Reduce::sum);
    CHECK(f[5] == 10);
    // Pairs {0, 2} and {1, 3}; not recorded: split moves nothing on a stream.
    Traced pair = world.split(r % 2, r);
    pair.set_name("pair");
    CHECK(pair.members()[1] == r % 2 + 2);
    recorder.begin_step(1);
    pair.all_reduce(stream, Vector<double>(d.data(), 3), comm::Reduce::max);
    CHECK(d[0] == r % 2 + 2);
    world.all_gather(stream, Vector<std::int64_t>(wide.data(), 4),
                     Vector<const std::int64_t>(one.data(), 1));
    CHECK(wide[3] == 3);
    world.broadcast(stream, Vector<float>(f.data(), 2), 3);
    world.barrier(stream);
    world.reduce_scatter(stream, Vector<float>(f.data(), 2), Vector<const float>(f.data(), 8),
                         comm::Reduce::sum);
    // A communicator of one rank moves nothing.
    Traced alone = world.split(-1, 0);
    alone.all_reduce(stream, Vector<float>(f.data(), 8), comm::Reduce::sum);
    recorder.close();
  });
  const Trace& t = collector.trace();
  for (int r = 0; r < 4; ++r) {
    const std::vector<Seen> expected{
        {r, "all_reduce", "world", 1, 32, "float32", -1},
        {r, "all_reduce", "pair", 1, 24, "float64", -1},
        {r, "all_gather", "world", 2, 8, "int64", -1},
        {r, "broadcast", "world", 3, 8, "float32", 3},
        {r, "barrier", "world", 4, 0, "", -1},
        {r, "reduce_scatter", "world", 5, 32, "float32", -1},
    };
    CHECK(seen(t, r) == expected);
  }
  // Five operations of the world and one of each pair; none is left over.
  const Matches m = match(t);
  CHECK(m.instances.size() == 7);
  CHECK(m.by_sequence == 7);
  CHECK(m.leftovers.empty());
  for (const Instance& i : m.instances)
    CHECK(i.count == (t.groups[i.group].name == "pair" ? 2U : 4U));
}

TEST_CASE("scan: numbers go on in steps that are not recorded, so windows of ranks still match") {
  TraceCollector collector;
  run_threads(2, [&](ThreadComm& threads) {
    RecordingInfo info;
    info.rank = threads.rank();
    HostRecorder recorder(info, collector.sink(), {.interval = 4});
    Traced world(threads, recorder);
    host::Stream stream;
    float value = 1;
    for (int step = 1; step < 10; ++step) {
      recorder.begin_step(step);
      for (int k = 0; k < 3; ++k)
        world.all_reduce(stream, Vector<float>(&value, 1), comm::Reduce::max);
    }
    recorder.close();
  });
  const std::vector<Seen> on_first = seen(collector.trace(), 0);
  REQUIRE(on_first.size() == 6);
  CHECK(on_first[0].sequence == 10);
  CHECK(on_first[5].sequence == 24);
  CHECK(match(collector.trace()).instances.size() == 6);
}

TEST_CASE("scan: channels are matched by number, also several between two ranks, both ways") {
  TraceCollector collector;
  run_threads(2, [&](ThreadComm& threads) {
    RecordingInfo info;
    info.rank = threads.rank();
    HostRecorder recorder(info, collector.sink());
    Traced world(threads, recorder);
    host::Stream stream;
    const int peer = 1 - world.rank();
    auto out = world.open_sender(peer, world.rank() == 0 ? 4U : 5U);
    auto in = world.open_receiver(peer, world.rank() == 0 ? 5U : 4U);
    std::vector<std::byte> slots(300), message(300, std::byte{7});
    recorder.begin_step(3);
    // Sizes differ, as a greeting's and a tensor's do.
    for (const Index size : {100, 20, 180}) in.post(stream, Vector<std::byte>(slots.data(), size));
    for (const Index size : {100, 20, 180})
      out.send(stream, Vector<const std::byte>(message.data(), size));
    for (int k = 0; k < 3; ++k) in.complete(stream);
    CHECK(slots[179] == std::byte{7});
    recorder.close();
  });
  const Trace& t = collector.trace();
  CHECK(seen(t, 0) == std::vector<Seen>{{0, "send", "world channel 4", 1, 100, "byte", 1},
                                        {0, "send", "world channel 4", 2, 20, "byte", 1},
                                        {0, "send", "world channel 4", 3, 180, "byte", 1},
                                        {0, "recv", "world channel 5", 1, 100, "byte", 1},
                                        {0, "recv", "world channel 5", 2, 20, "byte", 1},
                                        {0, "recv", "world channel 5", 3, 180, "byte", 1}});
  const Matches m = match(t);
  CHECK(m.instances.size() == 6);
  CHECK(m.leftovers.empty());
}

TEST_CASE("scan: faults are read from text, and refused with what is valid") {
  const auto faults =
      parse_faults("slow-rank=3,factor=1.5;slow-link=2-0,factor=4,from-step=7;late-host=1,ms=5", 4);
  REQUIRE(faults.size() == 3);
  CHECK(faults[0].kind == InjectedFault::Kind::slow_rank);
  CHECK(faults[0].rank == 3);
  CHECK(faults[0].factor == 1.5);
  CHECK(faults[0].from_step == 0);
  CHECK(faults[1].kind == InjectedFault::Kind::slow_link);
  CHECK(faults[1].rank == 2);
  CHECK(faults[1].peer == 0);
  CHECK(faults[1].from_step == 7);
  CHECK(faults[2].ms == 5);
  CHECK(parse_faults("", 4).empty());
  for (const char* wrong : {"slow-rank=4,factor=2",
                            "slow-rank=1",
                            "slow-rank=1,factor=0.5",
                            "slow-rank=1,factor=x",
                            "slow-link=2,factor=2",
                            "slow-link=2-2,factor=2",
                            "late-host=1,factor=2",
                            "fast-rank=1",
                            "slow-rank=1,factor=nan",
                            "slow-rank=1.5,factor=2",
                            "factor=2",
                            "slow-rank=-1,factor=2",
                            "slow-rank=1,factor=1e12",
                            "slow-rank=1,factor=1e300",
                            "late-host=1,ms=1e99",
                            "late-host=1,ms=-1",
                            "slow-rank=1,factor=2,from-step=-1",
                            "slow-rank=1,factor=2,from-step=1.5",
                            "slow-rank=1,factor=2,from-step=1e300",
                            "slow-rank=1,slow-rank=2,factor=2",
                            "slow-rank=1,factor=2;;late-host=1,ms=5",
                            ";"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS((void)parse_faults(wrong, 4), Error);
  }
  for (const auto& [wrong, says] : std::map<std::string, std::string>{
           {"slow-rank=1,factor=2,factor=3", "says factor twice"},
           {"late-host=1,ms=2,ms=2", "says ms twice"},
           {"slow-link=0-1,from-step=1,factor=2,from-step=0", "says from-step twice"}}) {
    CAPTURE(wrong);
    CHECK_THROWS_WITH_AS((void)parse_faults("late-host=1,ms=5;" + wrong, 4),
                         doctest::Contains(("the fault '" + wrong + "' " + says).c_str()), Error);
  }
  // Each fault has its own.
  CHECK(parse_faults("slow-rank=1,factor=2;slow-rank=1,factor=3,from-step=5", 4).size() == 2);
}

TEST_CASE("scan: each span of a slow rank is longer by the factor, none at the cost of another") {
  TraceCollector collector;
  HostRecorder inner({}, collector.sink());
  FaultyRecorder<HostRecorder> recorder(inner, 0, parse_faults("slow-rank=0,factor=1.5", 1));
  host::Stream stream;
  recorder.begin_step(0);
  std::vector<Nanoseconds> worked;
  // From spans that are shorter than any sleep to those that a scheduler may interrupt.
  for (int i = 0; i < 300; ++i) {
    const Nanoseconds least = i % 3 == 0 ? 1'500 : i % 3 == 1 ? 30'000 : 900'000;
    const ScopedSpan span(recorder, stream, SpanInfo{.name = "op", .kind = SpanKind::compute});
    const Nanoseconds begin = steady_now();
    while (steady_now() < begin + least) continue;
    worked.push_back(steady_now() - begin);
  }
  inner.close();
  const Trace& t = collector.trace();
  REQUIRE(t.events.size() == worked.size());
  for (std::size_t i = 0; i < worked.size(); ++i) {
    CAPTURE(i);
    // What is added is cut to whole nanoseconds.
    CHECK(static_cast<double>(t.events[i].duration()) + 1 >= 1.5 * static_cast<double>(worked[i]));
  }
}

TEST_CASE("scan: faults end when the run is to stop, and no more begin") {
  std::atomic<bool> stop{false};
  HostRecorder none;
  host::Stream stream;
  // A minute each; the slow rank's follows from its work.
  FaultyRecorder<HostRecorder> recorder(
      none, 0, parse_faults("late-host=0,ms=60000;slow-rank=0,factor=1000", 2), &stop);
  const Nanoseconds begin = steady_now();
  std::thread signal([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stop = true;
  });
  recorder.begin_step(0);
  const Nanoseconds stopped = steady_now();
  CHECK(stopped - begin >= 100'000'000);
  for (int i = 0; i < 3; ++i) {
    recorder.begin_step(i);
    const ScopedSpan span(recorder, stream, SpanInfo{.name = "op", .kind = SpanKind::compute});
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
  }
  signal.join();
  CHECK(steady_now() - begin < Nanoseconds{30'000'000'000});
  // In the middle of a slow span, too.
  stop = false;
  FaultyRecorder<HostRecorder> slow(none, 0, parse_faults("slow-rank=0,factor=1000", 1), &stop);
  std::thread again([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    stop = true;
  });
  const Nanoseconds slow_begin = steady_now();
  {
    slow.begin_step(0);
    const ScopedSpan span(slow, stream, SpanInfo{.name = "op", .kind = SpanKind::compute});
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
  }
  again.join();
  CHECK(steady_now() - slow_begin >= 200'000'000);
  CHECK(steady_now() - slow_begin < Nanoseconds{30'000'000'000});
}

TEST_CASE("scan: a slow rank's spans are longer by the factor, its waits are not") {
  TraceCollector collector;
  HostRecorder inner({}, collector.sink());
  FaultyRecorder<HostRecorder> recorder(inner, 2,
                                        parse_faults("slow-rank=2,factor=2,from-step=1", 4));
  host::Stream stream;
  constexpr int steps = 6;
  for (int step = 0; step < steps; ++step) {
    recorder.begin_step(step);
    const ScopedSpan outer(recorder, stream,
                           SpanInfo{.name = "forward", .kind = SpanKind::forward});
    std::this_thread::sleep_for(std::chrono::milliseconds(6));
    {
      const ScopedSpan op(recorder, stream, SpanInfo{.name = "op"});
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const ScopedSpan wait(recorder, stream, SpanInfo{.name = "wait", .kind = SpanKind::wait});
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
  }
  inner.close();
  const Trace& t = collector.trace();
  REQUIRE(t.events.size() == 3 * steps);
  const auto ms = [&](std::size_t i) { return static_cast<double>(t.events[i].duration()) / 1e6; };
  // In the order in which they end: op, wait, forward. A sleep may end late, on a busy machine by
  // much, but never early: every bound from below is sure, one from above holds for the shortest.
  CHECK(ms(0) >= 10);
  CHECK(ms(2) >= 31);
  CHECK(ms(3) >= 2 * 10);
  double shortest_wait = ms(4), forward = 0;
  for (std::size_t step = 1; step < steps; ++step) {
    CAPTURE(step);
    CHECK(ms(3 * step + 1) >= 15);
    shortest_wait = std::min(shortest_wait, ms(3 * step + 1));
    forward += ms(3 * step + 2);
  }
  // What one span waits too long the next ones wait less, so only the sum is sure.
  CHECK(forward >= (steps - 1) * (2 * 16 + 15));
  CHECK(shortest_wait < 2 * 15);
}

TEST_CASE("scan: a slow link holds back what crosses it, and nothing else") {
  constexpr int ranks = 3, steps = 2;
  constexpr std::int64_t bytes = 4'000'000;
  TraceCollector collector;
  std::barrier together(ranks);
  run_threads(ranks, [&](ThreadComm& threads) {
    RecordingInfo info;
    info.rank = threads.rank();
    HostRecorder inner(info, collector.sink());
    using Recorder = FaultyRecorder<HostRecorder>;
    // 20 us + 4 MB at 2 GB/s is 2.02 ms; 501 times that is 1.01 s more.
    Recorder recorder(inner, threads.rank(), parse_faults("slow-link=0-1,factor=501", ranks));
    TracedComm<ThreadComm, Recorder> world(threads, recorder);
    host::Stream stream;
    const auto next = (world.rank() + 1) % ranks, last = (world.rank() + 2) % ranks;
    auto out = world.open_sender(next, static_cast<std::uint32_t>(world.rank()));
    auto in = world.open_receiver(last, static_cast<std::uint32_t>(last));
    const std::vector<std::byte> sent(bytes);
    std::vector<std::byte> slot(bytes);
    for (int step = 0; step < steps; ++step) {
      recorder.begin_step(step);
      in.post(stream, Vector<std::byte>(slot.data(), bytes));
      together.arrive_and_wait();  // every slot is posted, so no send waits for one
      out.send(stream, Vector<const std::byte>(sent.data(), bytes));
      in.complete(stream);
    }
    inner.close();
  });
  const Trace& t = collector.trace();
  std::map<int, std::vector<double>> send_ms;
  for (std::size_t i = 0; i < t.events.size(); ++i)
    if (t.name(t.events[i]) == "send")
      send_ms[t.rank(t.events[i])].push_back(static_cast<double>(t.events[i].duration()) / 1e6);
  REQUIRE(send_ms.size() == ranks);
  for (const auto& [rank, times] : send_ms) {
    CAPTURE(rank);
    REQUIRE(times.size() == steps);
    // A starved thread makes some sends slow, a slow link all of them.
    const double fastest = *std::min_element(times.begin(), times.end());
    if (rank == 0)
      CHECK(fastest >= 1010);
    else
      CHECK(fastest < 1010);
  }
}
