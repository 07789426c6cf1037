/// @file  MpiComm: the laws that ThreadComm obeys too, against the same serial reference, so both
/// give the same bits. Run as: mpirun -np 4 <this>
#include <mega/comm/mpi.hpp>
#include <mega/comm/thread.hpp>

#define DOCTEST_CONFIG_IMPLEMENT
#include "../unit/comm/communicator_laws.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

mega::MpiComm* world = nullptr;

/// Ranks 0 to n - 1 run the law, the others wait for them.
struct Mpi {
  static bool has(int n) { return n <= world->size(); }
  template <class F>
  static void run(int n, const F& f) {
    mega::host::Stream stream;
    auto some = world->split(world->rank() < n ? 0 : -1, world->rank());
    if (world->rank() < n) f(some, stream);
    world->barrier(stream);
  }
};

}  // namespace

TEST_CASE("mpi: laws of MpiComm") {
  laws::everything<Mpi>();
}

TEST_CASE("mpi: processes give the bits of threads") {
  constexpr mega::Index count = 12345;
  const int n = world->size();
  const auto reduce = [&](auto& comm, std::vector<float>& x) {
    mega::host::Stream stream;
    laws::queue_fill(stream, x, comm.rank(), mega::comm::Reduce::sum);
    comm.all_reduce(stream, laws::view(x), mega::comm::Reduce::sum);
  };
  std::vector<float> mine(count);
  reduce(*world, mine);
  std::vector<std::vector<float>> threads(static_cast<std::size_t>(n), std::vector<float>(count));
  mega::run_threads(n, [&](mega::ThreadComm& comm) {
    reduce(comm, threads[static_cast<std::size_t>(comm.rank())]);
  });
  for (const auto& thread : threads)
    CHECK(std::memcmp(mine.data(), thread.data(), sizeof(float) * count) == 0);
}

TEST_CASE("mpi: a channel to itself and slots that are never filled") {
  mega::host::Stream stream;
  std::vector<std::byte> message(1000, std::byte{3}), slot(1000), spare(10);
  auto out = world->open_sender(world->rank(), 77);
  auto in = world->open_receiver(world->rank(), 77);
  in.post(stream, laws::view(slot));
  in.post(stream, laws::view(spare));
  out.send(stream, laws::view(message));
  in.complete(stream);
  CHECK(slot == message);
}

TEST_CASE("mpi: names and arguments") {
  CHECK(world->name() == "world");
  CHECK(world->global_rank() == world->rank());
  mega::host::Stream stream;
  std::vector<float> x(8);
  CHECK_THROWS_AS(world->broadcast(stream, laws::view(x), world->size()), mega::Error);
  CHECK_THROWS_AS((void)world->open_sender(0, mega::comm::max_channel_id + 1), mega::Error);
  CHECK_THROWS_AS((void)world->open_receiver(world->size(), 0), mega::Error);
  std::vector<float> odd(static_cast<std::size_t>(world->size()) * 8 + 1);
  CHECK_THROWS_AS(world->all_gather(stream, laws::view(odd), laws::view(x)), mega::Error);
}

int main(int argc, char** argv) {
  int failed = 0;
  mega::run_mpi(
      [&](mega::MpiComm& comm) {
        world = &comm;
        doctest::Context context(argc, argv);
        context.setOption("minimal", true);  // only failures, of whichever rank
        context.setOption("no-colors", true);
        std::vector<std::int32_t> status{context.run()};
        mega::host::Stream stream;
        comm.all_reduce(stream, laws::view(status), mega::comm::Reduce::max);
        failed = status[0];
        if (comm.rank() == 0)
          std::printf("%d ranks: %s\n", comm.size(), failed == 0 ? "all passed" : "FAILED");
      },
      {.deadline = mega::comm::Seconds(60)});
  return failed;
}
