#include <mega/host/host_async.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

using mega::HostAsync;

TEST_CASE("host: one stream keeps its order whatever the delays") {
  HostAsync device(5, 200);
  auto stream = device.make_stream("s");
  std::vector<int> seen;
  for (int i = 0; i < 100; ++i) stream.run([&seen, i] { seen.push_back(i); });
  stream.synchronize();
  REQUIRE(seen.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(seen[static_cast<std::size_t>(i)] == i);
}

TEST_CASE(
    "host: a wait holds for the most recent record at the time of the wait, and only for it") {
  HostAsync device(6, 0);
  auto first = device.make_stream("a"), second = device.make_stream("b");
  auto event = device.make_event();
  second.wait(event);  // never recorded: holds nothing back
  second.synchronize();
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> value{0};
    std::atomic<int> read{-1};
    first.run([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      value = 1;
    });
    first.record(event);
    second.wait(event);
    second.run([&] { read = value.load(); });
    second.synchronize();
    CHECK(read == 1);
    first.synchronize();
  }
}

TEST_CASE(
    "host: the first exception comes out of synchronize once, later work is skipped, events pass") {
  HostAsync device(7, 50);
  auto stream = device.make_stream("a"), other = device.make_stream("b");
  auto event = device.make_event();
  bool ran = false;
  stream.run([] { throw std::runtime_error("first"); });
  stream.run([&] { ran = true; });
  stream.record(event);
  other.wait(event);
  other.synchronize();
  CHECK_THROWS_WITH(stream.synchronize(), "first");
  CHECK(!ran);
  stream.run([&] { ran = true; });
  stream.synchronize();
  CHECK(ran);
}
