/// @file  SelfComm: the laws with one rank, and refusal of what one rank can never do.
#include "communicator_laws.hpp"
#include <mega/comm/self.hpp>
#include <mega/core/error.hpp>
#include <mega/host/host_async.hpp>
#include <mega/host/stream.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

namespace {

static_assert(mega::comm::communicator<mega::SelfComm, mega::host::AsyncStream>);

struct SelfInline {
  static bool has(int n) { return n == 1; }
  template <class F>
  static void run(int, const F& f) {
    mega::SelfComm comm;
    mega::host::Stream stream;
    f(comm, stream);
  }
};

struct SelfAsync {
  static bool has(int n) { return n == 1; }
  template <class F>
  static void run(int, const F& f) {
    mega::SelfComm comm;
    auto stream = mega::HostAsync(3, 20).make_stream("comm");
    f(comm, stream);
  }
};

template <class F>
mega::Error error_of(const F& f) {
  try {
    f();
  } catch (const mega::Error& error) {
    return error;
  }
  FAIL("no Error was thrown");
  return {mega::ErrorCode::logic, ""};
}

}  // namespace

TEST_CASE_TEMPLATE("comm: laws of SelfComm", Harness, SelfInline, SelfAsync) {
  laws::everything<Harness>();
}

TEST_CASE("comm: SelfComm refuses at once what nobody could ever satisfy") {
  mega::SelfComm comm;
  mega::host::Stream stream;
  std::vector<std::byte> bytes(8);
  const mega::Vector<std::byte> eight(bytes.data(), 8);
  auto out = comm.open_sender(0, 4);
  auto in = comm.open_receiver(0, 4);

  const auto unsent = error_of([&] { out.send(stream, eight); });
  CHECK(unsent.code() == mega::ErrorCode::logic);
  CHECK(std::string(unsent.what()).find("send #1 on channel 4 from rank 0 to rank 0") == 0);

  const auto unposted = error_of([&] { in.complete(stream); });
  CHECK(std::string(unposted.what()).find("only 0 slots were posted") != std::string::npos);

  in.post(stream, eight);
  const auto unfilled = error_of([&] { in.complete(stream); });
  CHECK(unfilled.code() == mega::ErrorCode::logic);
  CHECK(std::string(unfilled.what()).find("receive #1 on channel 4") == 0);

  const auto mismatch = error_of([&] { out.send(stream, eight.slice(0, 3)); });
  CHECK(mismatch.code() == mega::ErrorCode::peer_failed);
  CHECK(std::string(mismatch.what()) ==
        "channel 4 from rank 0 to rank 0: message #1 has 3 bytes, its slot has 8");
}

TEST_CASE("comm: SelfComm checks arguments") {
  mega::SelfComm comm;
  mega::host::Stream stream;
  std::vector<float> data(8);
  const mega::Vector<float> x(data.data(), 8);
  const auto gather = error_of([&] { comm.all_gather(stream, x, x.slice(0, 7)); });
  CHECK(std::string(gather.what()) ==
        "all_gather over 1 ranks needs 7 elements (1 pieces of 7), not 8");
  CHECK_THROWS_AS(comm.reduce_scatter(stream, x.slice(0, 4), x, mega::comm::Reduce::sum),
                  mega::Error);
  CHECK_THROWS_AS(comm.broadcast(stream, x, 1), mega::Error);
  CHECK_THROWS_AS(comm.broadcast(stream, x, -1), mega::Error);
  CHECK_THROWS_AS(comm.all_to_all(stream, x, x.slice(0, 4)), mega::Error);
  CHECK_THROWS_AS((void)comm.open_sender(1, 0), mega::Error);
  CHECK_THROWS_AS((void)comm.open_receiver(0, mega::comm::max_channel_id + 1), mega::Error);
}

TEST_CASE("comm: a SelfComm channel between two asynchronous streams waits") {
  mega::SelfComm comm(mega::comm::Seconds(10));
  mega::HostAsync device(1, 200);
  auto sending = device.make_stream("send");
  auto receiving = device.make_stream("receive");
  std::vector<std::byte> message(5, std::byte{42}), slot(5);
  auto out = comm.open_sender(0, 0);
  auto in = comm.open_receiver(0, 0);
  out.send(sending, laws::view(message));
  in.post(receiving, laws::view(slot));
  in.complete(receiving);
  receiving.synchronize();
  sending.synchronize();
  CHECK(slot == message);
}
