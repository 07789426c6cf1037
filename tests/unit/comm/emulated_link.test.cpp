// Emulated links: when messages count as arrived, on a clock that only counts and on the wall's.
#include <mega/comm/emulated_link.hpp>
#include <mega/comm/thread.hpp>
#include <mega/core/error.hpp>
#include <mega/host/host_async.hpp>

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace {

using namespace mega::comm;
using mega::Index;
using mega::Vector;
using Counted = EmulatedLink<ThreadComm, LogicalClock>;
using Timed = EmulatedLink<ThreadComm, WallClock>;

static_assert(communicator<Counted, mega::host::Stream> && communicator<Timed, mega::host::Stream>);
static_assert(has_channel_queries<Timed, mega::host::Stream>);
// Nothing moves the time of a rank that only looks.
static_assert(!has_channel_queries<Counted, mega::host::Stream>);
static_assert(has_channels<Timed, mega::host::AsyncStream>);
// Time that is counted needs one thread a rank.
static_assert(!has_channels<Counted, mega::host::AsyncStream>);

template <class Comm, class F>
std::shared_ptr<EmulatedNetwork> run(int ranks, const EmulatedHop& hop, const F& f,
                                     std::uint64_t seed = 1) {
  const auto network = std::make_shared<EmulatedNetwork>(hop, seed);
  run_threads(ranks,
              [&](ThreadComm& threads) {
                Comm comm(std::move(threads), network);
                f(comm);
              },
              {.deadline = Seconds(20)});
  return network;
}

using Message = std::array<std::byte, 100>;

Vector<std::byte> view(Message& m) {
  return {m.data(), 100};
}

}  // namespace

TEST_CASE("comm: an emulated link takes a direction's messages one after the other") {
  const EmulatedHop hop{.latency_s = 2, .bytes_per_s = 100};
  const auto network = run<Counted>(2, hop, [](Counted& comm) {
    mega::host::Stream s;
    std::array<Message, 3> in{}, out{};
    const int peer = 1 - comm.rank();
    auto first_in = comm.open_receiver(peer, 4);
    auto second_in = comm.open_receiver(peer, 9);
    first_in.post(s, view(in[0]));
    first_in.post(s, view(in[1]));
    second_in.post(s, view(in[2]));
    auto first = comm.open_sender(peer, 4);
    auto second = comm.open_sender(peer, 9);
    out[0].fill(std::byte{7});
    comm.clock().wait_until(5 * comm.rank());
    first.send(s, view(out[0]));
    second.send(s, view(out[2]));
    first.send(s, view(out[1]));
    // Senders do not wait for the link.
    CHECK(comm.clock().now() == 5 * comm.rank());
    const double other = 5 * peer;
    first_in.complete(s);
    CHECK(comm.clock().now() == std::max(5.0 * comm.rank(), other + 3));
    CHECK(in[0][99] == std::byte{7});
    second_in.complete(s);
    CHECK(comm.clock().now() == std::max(5.0 * comm.rank(), other + 4));
    first_in.complete(s);
    CHECK(comm.clock().now() == std::max(5.0 * comm.rank(), other + 5));
    // What has arrived long ago holds nobody up.
    comm.clock().wait_until(100);
    first_in.post(s, view(in[0]));
    first.send(s, view(out[0]));
    comm.clock().wait_until(200);
    first_in.complete(s);
    CHECK(comm.clock().now() == 200);
  });
  const auto all = network->passages();
  REQUIRE(all.size() == 8);
  for (int rank = 0; rank < 2; ++rank) {
    for (int k = 0; k < 3; ++k) {
      const EmulatedPassage& p = all[static_cast<std::size_t>(4 * rank + k)];
      CHECK(p.from == rank);
      CHECK(p.to == 1 - rank);
      CHECK(p.channel == (k == 1 ? 9 : 4));
      CHECK(p.bytes == 100);
      CHECK(p.start_s == 5 * rank + k);
      CHECK(p.end_s == 5 * rank + k + 3);
    }
  }
}

TEST_CASE(
    "comm: a message sets out when its slot is posted, and empty ones need the latency only") {
  run<Counted>(2, {.latency_s = 1, .bytes_per_s = 100}, [](Counted& comm) {
    mega::host::Stream s;
    Message m{};
    if (comm.rank() == 0) {
      auto sender = comm.open_sender(1, 0);
      sender.send(s, view(m));
      CHECK(comm.clock().now() == 6);
      sender.send(s, Vector<const std::byte>(m.data(), 0));
      CHECK(comm.clock().now() == 8);
    } else {
      auto receiver = comm.open_receiver(0, 0);
      comm.clock().wait_until(6);
      receiver.post(s, view(m));
      receiver.complete(s);
      CHECK(comm.clock().now() == 8);
      receiver.post(s, Vector<std::byte>(m.data(), 0));
      receiver.complete(s);
      CHECK(comm.clock().now() == 9);
    }
  });
}

TEST_CASE("comm: emulated ranks reach themselves at once, and collectives know no link") {
  const auto network = run<Counted>(3, {.latency_s = 1e6}, [](Counted& comm) {
    mega::host::Stream s;
    Message in{}, out{};
    auto receiver = comm.open_receiver(comm.rank(), 1);
    auto sender = comm.open_sender(comm.rank(), 1);
    receiver.post(s, view(in));
    sender.send(s, view(out));
    receiver.complete(s);
    double sum = comm.rank();
    comm.all_reduce(s, Vector<double>(&sum, 1), Reduce::sum);
    comm.barrier(s);
    CHECK(sum == 3);
    CHECK(comm.clock().now() == 0);
  });
  CHECK(network->passages().empty());
}

TEST_CASE("comm: channels of a split are others than the world's, on the same links") {
  const auto network = run<Counted>(4, {.latency_s = 1, .bytes_per_s = 100}, [](Counted& comm) {
    mega::host::Stream s;
    // Ranks 2 and 3 with the order turned, so that member 0 is global rank 3.
    Counted half = comm.split(comm.rank() / 2, -comm.rank());
    if (comm.rank() < 2) return;
    Message a{}, b{};
    if (comm.rank() == 2) {
      auto in_world = comm.open_receiver(3, 5);
      auto in_half = half.open_receiver(0, 5);
      in_half.post(s, view(b));
      in_world.post(s, view(a));
      in_half.complete(s);
      CHECK(comm.clock().now() == 3);
      in_world.complete(s);
      CHECK(comm.clock().now() == 3);
    } else {
      auto to_world = comm.open_sender(2, 5);
      auto to_half = half.open_sender(1, 5);
      to_world.send(s, view(a));
      to_half.send(s, view(b));
    }
  });
  const auto all = network->passages();
  REQUIRE(all.size() == 2);
  CHECK((all[0].from == 3 && all[0].to == 2));
  CHECK((all[1].from == 3 && all[1].to == 2));
}

TEST_CASE("comm: on the wall's clock a message is there at its time, not when its data are") {
  constexpr double latency = 0.05;
  run<Timed>(2, {.latency_s = latency}, [&](Timed& comm) {
    mega::host::Stream s;
    Message m{};
    if (comm.rank() == 0) {
      auto sender = comm.open_sender(1, 0);
      sender.send(s, view(m));
      comm.barrier(s);
      sender.send(s, view(m));
    } else {
      auto receiver = comm.open_receiver(0, 0);
      receiver.post(s, view(m));
      receiver.post(s, view(m));
      CHECK(!receiver.ready());
      comm.barrier(s);
      const double begin = comm.clock().now();  // later than the first message, or than both
      comm.poll([&] { return receiver.ready(); }, [](const std::string& when) { return when; });
      receiver.complete(s);
      receiver.complete(s);
      // The second left after the barrier, which this rank may have left late.
      CHECK(comm.clock().now() - begin > 0.0);
    }
  });
  // Alone on a thread: never early.
  run<Timed>(1, {}, [&](Timed& comm) {
    const double begin = comm.clock().now();
    comm.clock().wait_until(begin + latency);
    CHECK(comm.clock().now() >= begin + latency);
    comm.clock().wait_until(begin);
  });
}

TEST_CASE("comm: queued streams keep the deadline of every message") {
  constexpr int count = 5;
  const auto network = run<Timed>(2, {.latency_s = 0.01, .bytes_per_s = 2e4}, [](Timed& comm) {
    mega::HostAsync device(3, 100);
    auto s = device.make_stream("test");
    std::vector<Message> m(count);
    if (comm.rank() == 0) {
      auto sender = comm.open_sender(1, 0);
      for (auto& each : m) {
        each.fill(std::byte{5});
        sender.send(s, view(each));
      }
      s.synchronize();
    } else {
      auto receiver = comm.open_receiver(0, 0);
      for (auto& each : m) receiver.post(s, view(each));
      for (int i = 0; i < count; ++i) receiver.complete(s);
      s.synchronize();
      for (const auto& each : m) CHECK(each[50] == std::byte{5});
    }
  });
  const auto all = network->passages();
  REQUIRE(all.size() == count);
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(all[i].end_s - all[i].start_s == doctest::Approx(0.015).epsilon(1e-6));
    // A message of 5 ms follows the one before at the earliest when that one is through.
    if (i > 0) CHECK(all[i].start_s >= all[i - 1].start_s + 0.005 - 1e-9);
  }
}

TEST_CASE("comm: jitter has its mean, and its seed") {
  const auto delays = [](std::uint64_t seed) {
    constexpr int count = 2000;
    const auto network = run<Counted>(
        2, {.jitter_s = 3},
        [](Counted& comm) {
          mega::host::Stream s;
          std::byte b{};
          for (int i = 0; i < count; ++i) {
            if (comm.rank() == 0) {
              static thread_local auto sender = comm.open_sender(1, 0);
              sender.send(s, Vector<const std::byte>(&b, 1));
            } else {
              static thread_local auto receiver = comm.open_receiver(0, 0);
              receiver.post(s, Vector<std::byte>(&b, 1));
              receiver.complete(s);
            }
          }
        },
        seed);
    std::vector<double> out;
    for (const EmulatedPassage& p : network->passages()) out.push_back(p.end_s - p.start_s);
    REQUIRE(out.size() == count);
    return out;
  };
  const auto first = delays(1);
  double mean = 0;
  for (const double d : first) {
    CHECK(d >= 0);
    mean += d / static_cast<double>(first.size());
  }
  CHECK(mean == doctest::Approx(3).epsilon(0.1));  // 4.5 deviations of a mean of 2000
  const auto again = delays(1);
  const auto other = delays(2);
  // Differences of growing times are rounded.
  CHECK(std::abs(again[1000] - first[1000]) < 1e-9);
  CHECK(std::abs(other[1000] - first[1000]) > 1e-9);
}

TEST_CASE("comm: impossible hops are refused") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const EmulatedHop& hop :
       {EmulatedHop{.latency_s = -1}, EmulatedHop{.latency_s = nan}, EmulatedHop{.bytes_per_s = 0},
        EmulatedHop{.bytes_per_s = nan}, EmulatedHop{.jitter_s = -1e-9}}) {
    CHECK_THROWS_AS(EmulatedNetwork{hop}, mega::Error);
  }
}
