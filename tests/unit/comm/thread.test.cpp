/// @file  ThreadComm: the laws on inline and asynchronous streams, and what happens when a rank
/// throws, stays away or disagrees: every other rank ends in time and says who and where.
#include "communicator_laws.hpp"
#include <mega/comm/thread.hpp>
#include <mega/core/error.hpp>
#include <mega/host/host_async.hpp>
#include <mega/host/stream.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using mega::ErrorCode;
using mega::HostAsync;
using mega::Index;
using mega::ThreadComm;
using mega::Vector;
using mega::comm::Reduce;
using mega::comm::Seconds;

namespace {

static_assert(mega::comm::communicator<ThreadComm, mega::host::AsyncStream>);

struct Inline {
  static bool has(int) { return true; }
  static mega::host::Stream make_stream(int) { return {}; }
  template <class F>
  static void run(int n, const F& f) {
    mega::run_threads(n, [&](ThreadComm& comm) {
      auto stream = make_stream(comm.rank());
      f(comm, stream);
    });
  }
};

template <int Seed>
struct Async {
  static bool has(int) { return true; }
  static mega::host::AsyncStream make_stream(int rank) {
    return HostAsync(static_cast<std::uint64_t>(100 * Seed + rank), 300).make_stream("comm");
  }
  template <class F>
  static void run(int n, const F& f) {
    mega::run_threads(n, [&](ThreadComm& comm) {
      auto stream = make_stream(comm.rank());
      f(comm, stream);
    });
  }
};

}  // namespace

TEST_CASE_TEMPLATE("comm: laws of ThreadComm", Harness, Inline, Async<1>, Async<2>) {
  laws::everything<Harness>();
}

TEST_CASE("comm: a barrier holds everybody until the last one is there") {
  for (const int n : {2, 5, 8}) {
    std::atomic<int> arrived{0};
    std::atomic<int> too_few{0};
    Inline::run(n, [&](ThreadComm& comm, auto& stream) {
      for (int round = 1; round <= 200; ++round) {
        if (round % 20 == comm.rank()) std::this_thread::sleep_for(std::chrono::microseconds(200));
        arrived.fetch_add(1);
        comm.barrier(stream);
        if (arrived.load() < round * n) too_few.fetch_add(1);
        comm.barrier(stream);
      }
    });
    CHECK(too_few == 0);
  }
}

TEST_CASE("comm: two communicators on two streams of a rank do not disturb each other") {
  mega::run_threads(8, [](ThreadComm& comm) {
    auto row = comm.split(comm.rank() / 4, comm.rank());
    auto column = comm.split(comm.rank() % 4, comm.rank());
    HostAsync device(static_cast<std::uint64_t>(comm.rank()), 100);
    auto a = device.make_stream("a");
    auto b = device.make_stream("b");
    std::vector<double> x{1.0}, y(5000, 1.0);
    for (int round = 0; round < 40; ++round) {
      row.all_reduce(a, laws::view(x), Reduce::sum);
      column.all_reduce(b, laws::view(y), Reduce::sum);
    }
    a.synchronize();
    b.synchronize();
    CHECK(x[0] == 0x1p80);     // 4^40
    CHECK(y[4999] == 0x1p40);  // 2^40
  });
}

TEST_CASE("comm: names and ranks") {
  mega::run_threads(4, [](ThreadComm& comm) {
    CHECK(comm.name() == "world");
    auto odd = comm.split(comm.rank() % 2, -comm.rank());
    CHECK(odd.name() == (comm.rank() % 2 == 1 ? "world/1" : "world/0"));
    CHECK(odd.global_rank() == comm.rank());
    CHECK(odd.rank() == 1 - comm.rank() / 2);
    mega::host::Stream stream;
    odd.barrier(stream);  // the name belongs to all members
    odd.set_name("dp");
    CHECK(odd.name() == "dp");
  });
}

TEST_CASE("comm: run_threads hands out every rank once and refuses none at all") {
  for (const int n : {1, 3}) {
    std::atomic<int> sum{0};
    mega::run_threads(n, [&](ThreadComm& comm) { sum += 1 << (4 * comm.rank()); });
    CHECK(sum == (n == 1 ? 0x1 : 0x111));
  }
  CHECK_THROWS_AS(mega::run_threads(0, [](ThreadComm&) {}), mega::Error);
}

// ---------------------------------------------------------------------------------------------
// Faults

namespace {

constexpr Seconds deadline{0.3};
/// For faults that are told at once: a deadline that must not matter, and what at once means on a
/// loaded machine.
constexpr Seconds patience{30};
constexpr double prompt_s = 5;

struct Outcome {
  ErrorCode code = ErrorCode::usage;
  std::string what;
  double seconds = -1;  // until the rank ended; negative while it has not thrown
};

struct Faulty {
  std::vector<Outcome> ranks;
  std::string cause;  // what run_threads threw
  double seconds = 0;
};

/// A rank's buffer, which outlives the work queued on its stream.
template <class T>
struct Data {
  std::vector<T> values = std::vector<T>(100000, T(1));
  Vector<T> first(Index count) { return {values.data(), count}; }
};

/// Runs f(comm, stream, data) on n ranks and collects how each ended.
template <class Streams, class F>
Faulty run_faulty(int n, const F& f, Seconds limit = deadline) {
  using Clock = std::chrono::steady_clock;
  Faulty result;
  result.ranks.resize(static_cast<std::size_t>(n));
  const auto begin = Clock::now();
  const auto elapsed = [&] { return Seconds(Clock::now() - begin).count(); };
  try {
    mega::run_threads(n,
                      [&](ThreadComm& comm) {
                        Outcome& outcome = result.ranks[static_cast<std::size_t>(comm.rank())];
                        Data<float> data;
                        auto stream = Streams::make_stream(comm.rank());
                        try {
                          f(comm, stream, data);
                          stream.synchronize();
                        } catch (const mega::Error& error) {
                          outcome = {error.code(), error.what(), elapsed()};
                          throw;
                        }
                      },
                      {.deadline = limit});
  } catch (const std::exception& error) {
    result.cause = error.what();
  }
  result.seconds = elapsed();
  return result;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Every rank but `culprit` has thrown in time, one of `codes`, with all `parts` in its sentence.
void check_all_others(const Faulty& run, int culprit, const std::vector<std::string>& parts,
                      double limit = deadline.count() + 0.5) {
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    if (static_cast<int>(r) == culprit) continue;
    const Outcome& outcome = run.ranks[r];
    CAPTURE(r);
    CAPTURE(outcome.what);
    CHECK(outcome.seconds >= 0);
    CHECK(outcome.seconds < limit);
    CHECK((outcome.code == ErrorCode::timeout || outcome.code == ErrorCode::peer_failed));
    for (const std::string& part : parts) CHECK(contains(outcome.what, part));
  }
}

}  // namespace

TEST_CASE_TEMPLATE("comm: a rank that throws ends all others at once", Streams, Inline, Async<3>) {
  for (const Index count : {Index{1}, Index{100000}}) {
    const auto run = run_faulty<Streams>(
        4,
        [&](ThreadComm& comm, auto& stream, auto& data) {
          for (int step = 0; step < 3; ++step) {
            if (comm.rank() == 1 && step == 2) {
              stream.synchronize();
              throw std::runtime_error("disk full");
            }
            comm.all_reduce(stream, data.first(count), Reduce::sum);
          }
          stream.synchronize();
        },
        patience);
    check_all_others(run, 1, {"rank 1 failed: disk full"}, prompt_s);
    CHECK(run.cause == "disk full");
  }
}

TEST_CASE_TEMPLATE("comm: a failure reaches waits in other communicators and channels", Streams,
                   Inline, Async<3>) {
  const auto run = run_faulty<Streams>(
      6,
      [&](ThreadComm& comm, auto& stream, auto& data) {
        std::vector<std::byte> slot(4);
        auto pair = comm.split(comm.rank() / 2, 0);
        auto in = comm.open_receiver((comm.rank() + 1) % 6, 9);
        auto out = comm.open_sender((comm.rank() + 1) % 6, 8);
        if (comm.rank() == 5) throw std::runtime_error("out of memory");
        if (comm.rank() == 0) pair.barrier(stream);
        if (comm.rank() == 1) out.send(stream, laws::view(slot));
        if (comm.rank() == 2) {
          in.post(stream, laws::view(slot));
          in.complete(stream);
        }
        if (comm.rank() == 3) (void)pair.split(0, 0);
        if (comm.rank() == 4) pair.all_reduce(stream, data.first(50), Reduce::sum);
        stream.synchronize();
      },
      patience);
  check_all_others(run, 5, {"rank 5 failed: out of memory"}, prompt_s);
  CHECK(run.cause == "out of memory");
}

TEST_CASE_TEMPLATE("comm: a rank that stays away is named", Streams, Inline, Async<3>) {
  const auto run = run_faulty<Streams>(4, [&](ThreadComm& comm, auto& stream, auto& data) {
    comm.set_name("tp");
    comm.barrier(stream);
    if (comm.rank() == 2) return;
    comm.all_reduce(stream, data.first(1000), Reduce::sum);
  });
  check_all_others(run, 2,
                   {"all_reduce(sum) #2 with 1000 float on communicator tp of ranks 0,1,2,3: rank "
                    "2 did not arrive within 0.3 s"});
  CHECK(contains(run.cause, "rank 2 did not arrive"));
  CHECK_FALSE(contains(run.cause, "failed:"));
}

TEST_CASE("comm: a rank that comes too late fails too and touches nobody's memory") {
  const auto run = run_faulty<Inline>(3, [&](ThreadComm& comm, auto& stream, auto& data) {
    // The others' data is freed when they end, which the address sanitizer would tell.
    if (comm.rank() == 1) std::this_thread::sleep_for(deadline + Seconds(0.3));
    comm.all_reduce(stream, data.first(100000), Reduce::sum);
  });
  check_all_others(run, 1, {"rank 1 did not arrive within 0.3 s", "all_reduce(sum) #1"});
  CHECK(run.ranks[1].code == ErrorCode::peer_failed);
  CHECK(contains(run.ranks[1].what, "rank 1 did not arrive"));
}

TEST_CASE_TEMPLATE("comm: a missing rank in split is named", Streams, Inline, Async<3>) {
  const auto run = run_faulty<Streams>(3, [&](ThreadComm& comm, auto&, auto&) {
    if (comm.rank() != 0) (void)comm.split(0, 0);
  });
  check_all_others(run, 0, {"split #1 on communicator world", "rank 0 did not arrive"});
}

TEST_CASE_TEMPLATE("comm: disagreement on count throws the same sentence on every rank", Streams,
                   Inline, Async<3>) {
  for (const Index count : {Index{100}, Index{99999}}) {
    const auto run = run_faulty<Streams>(
        4,
        [&](ThreadComm& comm, auto& stream, auto& data) {
          comm.set_name("tp");
          for (int i = 0; i < 16; ++i) comm.barrier(stream);
          comm.all_reduce(stream, data.first(count + (comm.rank() == 2 ? 1 : 0)), Reduce::sum);
        },
        patience);
    const std::string n = std::to_string(count), m = std::to_string(count + 1);
    const std::string expected =
        "communicator tp of ranks 0,1,2,3 disagrees: ranks 0,1,3 called all_reduce(sum) #17 with " +
        n + " float, rank 2 called all_reduce(sum) #17 with " + m + " float";
    for (const Outcome& outcome : run.ranks) {
      CHECK(outcome.what == expected);
      CHECK(outcome.code == ErrorCode::peer_failed);
      CHECK(outcome.seconds < prompt_s);
    }
    CHECK(run.cause == expected);
  }
}

TEST_CASE("comm: disagreement on operation, type, reduction or root is named") {
  const auto differ = [&](const std::vector<std::string>& parts, const auto& even,
                          const auto& odd) {
    const auto run = run_faulty<Inline>(
        4,
        [&](ThreadComm& comm, auto& stream, auto& floats) {
          Data<double> doubles;
          if (comm.rank() % 2 == 0)
            even(comm, stream, floats, doubles);
          else
            odd(comm, stream, floats, doubles);
        },
        patience);
    check_all_others(run, -1, parts, prompt_s);
  };
  differ(
      {"ranks 0,2 called all_reduce(sum) #1 with 10 float", "ranks 1,3 called barrier #1"},
      [](auto& c, auto& s, auto& f, auto&) {
        c.all_reduce(s, f.first(10), Reduce::sum);
        c.barrier(s);
      },
      [](auto& c, auto& s, auto& f, auto&) {
        c.barrier(s);
        c.all_reduce(s, f.first(10), Reduce::sum);
      });
  differ(
      {"all_reduce(sum) #1 with 10 float", "all_reduce(sum) #1 with 10 double"},
      [](auto& c, auto& s, auto& f, auto&) { c.all_reduce(s, f.first(10), Reduce::sum); },
      [](auto& c, auto& s, auto&, auto& d) { c.all_reduce(s, d.first(10), Reduce::sum); });
  differ(
      {"all_reduce(sum) #1", "all_reduce(max) #1"},
      [](auto& c, auto& s, auto& f, auto&) { c.all_reduce(s, f.first(10), Reduce::sum); },
      [](auto& c, auto& s, auto& f, auto&) { c.all_reduce(s, f.first(10), Reduce::max); });
  differ(
      {"broadcast #1 with 10 float from rank 0", "broadcast #1 with 10 float from rank 3"},
      [](auto& c, auto& s, auto& f, auto&) { c.broadcast(s, f.first(10), 0); },
      [](auto& c, auto& s, auto& f, auto&) { c.broadcast(s, f.first(10), 3); });
}

TEST_CASE_TEMPLATE("comm: swapped communicators end with a timeout on every rank", Streams, Inline,
                   Async<3>) {
  const auto run = run_faulty<Streams>(4, [&](ThreadComm& comm, auto& stream, auto& data) {
    auto tp = comm.split(0, comm.rank());
    auto dp = comm.split(0, comm.rank());
    tp.set_name("tp");
    dp.set_name("dp");
    comm.barrier(stream);
    auto& first = comm.rank() == 0 ? dp : tp;
    auto& second = comm.rank() == 0 ? tp : dp;
    first.all_reduce(stream, data.first(10), Reduce::sum);
    second.all_reduce(stream, data.first(10), Reduce::sum);
  });
  check_all_others(run, -1,
                   {"all_reduce(sum) #1 with 10 float on communicator ", " of ranks 0,1,2,3: rank",
                    "did not arrive within 0.3 s"});
  CHECK((contains(run.cause, "tp of ranks 0,1,2,3: rank 0 did") ||
         contains(run.cause, "dp of ranks 0,1,2,3: ranks 1,2,3 did")));
}

TEST_CASE_TEMPLATE("comm: a message that does not fit its slot is named on both sides", Streams,
                   Inline, Async<3>) {
  for (const Index bytes : {Index{31}, Index{33}, Index{0}}) {
    const auto run = run_faulty<Streams>(
        2,
        [&](ThreadComm& comm, auto& stream, auto&) {
          std::vector<std::byte> data(64);
          const Vector<std::byte> right(data.data(), 32), wrong(data.data(), bytes);
          if (comm.rank() == 0) {
            auto out = comm.open_sender(1, 7);
            out.send(stream, right);
            out.send(stream, wrong);
            stream.synchronize();
          } else {
            auto in = comm.open_receiver(0, 7);
            in.post(stream, right);
            in.post(stream, right);
            in.complete(stream);
            in.complete(stream);
            stream.synchronize();
          }
        },
        patience);
    check_all_others(run, -1,
                     {"channel 7 from rank 0 to rank 1: message #2 has " + std::to_string(bytes) +
                      " bytes, its slot has 32"},
                     prompt_s);
  }
}

TEST_CASE_TEMPLATE("comm: a channel whose other side stays away ends with its name", Streams,
                   Inline, Async<3>) {
  const auto no_slot = run_faulty<Streams>(2, [&](ThreadComm& comm, auto& stream, auto&) {
    std::vector<std::byte> data(32);
    if (comm.rank() == 1) return;
    auto out = comm.open_sender(1, 3);
    out.send(stream, laws::view(data));
    stream.synchronize();
  });
  check_all_others(
      no_slot, 1, {"send #1 on channel 3 from rank 0 to rank 1: rank 1 posted no slot within 0.3"});
  const auto no_message = run_faulty<Streams>(2, [&](ThreadComm& comm, auto& stream, auto&) {
    std::vector<std::byte> data(32);
    if (comm.rank() == 0) return;
    auto in = comm.open_receiver(0, 3);
    in.post(stream, laws::view(data));
    in.complete(stream);
    stream.synchronize();
  });
  check_all_others(
      no_message, 0,
      {"receive #1 on channel 3 from rank 0 to rank 1: rank 0 sent no message within 0.3"});
  const auto to_itself = run_faulty<Streams>(1, [&](ThreadComm& comm, auto& stream, auto&) {
    std::vector<std::byte> data(32);
    auto out = comm.open_sender(0, 3);
    out.send(stream, laws::view(data));
    stream.synchronize();
  });
  check_all_others(to_itself, -1, {"rank 0 posted no slot within 0.3"});
}

TEST_CASE("comm: nobody leaves a rendezvous while others work on its memory") {
  const auto world = std::make_shared<mega::comm::World>(Seconds(0.05));
  const mega::comm::Roster roster({0, 1}, "pair");
  mega::comm::detail::Rendezvous rendezvous(world, roster);
  std::atomic<bool> done{false};
  bool left_early = false;
  std::thread first([&] {
    try {
      rendezvous.enter(0, {}, {}, []() noexcept {});
    } catch (const mega::Error&) {
    }
    left_early = !done;
  });
  // Long enough for the first member to sleep, so that it is the waiting one.
  std::this_thread::sleep_for(Seconds(0.01));
  rendezvous.enter(1, {}, {}, [&]() noexcept {
    world->fail(7, std::make_exception_ptr(std::runtime_error("elsewhere")));
    std::this_thread::sleep_for(Seconds(0.2));
    done = true;
  });
  first.join();
  CHECK_FALSE(left_early);
  CHECK_THROWS_AS(rendezvous.enter(0, {}, {}, []() noexcept {}), mega::Error);
}

TEST_CASE("comm: one communicator on two streams at once is refused") {
  const auto run = run_faulty<Inline>(2, [&](ThreadComm& comm, auto&, auto&) {
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(Seconds(0.2));
      return;
    }
    HostAsync device(1, 0);
    auto a = device.make_stream("a");
    auto b = device.make_stream("b");
    comm.barrier(a);
    std::this_thread::sleep_for(Seconds(0.05));
    comm.barrier(b);
    b.synchronize();
  });
  CHECK(contains(run.ranks[0].what, "rank 0 called barrier #2"));
  CHECK(contains(run.ranks[0].what, "while its barrier #1 still waits"));
}

TEST_CASE("comm: receivers that end take their slots back") {
  const auto run = run_faulty<Inline>(2, [&](ThreadComm& comm, auto& stream, auto&) {
    std::vector<std::byte> data(32);
    if (comm.rank() == 0) {
      auto out = comm.open_sender(1, 3);
      comm.barrier(stream);
      comm.barrier(stream);
      out.send(stream, laws::view(data));
    } else {
      comm.barrier(stream);
      {
        std::vector<std::byte> gone(32);
        auto in = comm.open_receiver(0, 3);
        in.post(stream, laws::view(gone));
      }
      comm.barrier(stream);
    }
  });
  CHECK(contains(run.ranks[0].what, "rank 1 posted no slot within 0.3 s"));
}

TEST_CASE("comm: ranks that fail at any moment leave no dangling reads") {
  // Large buffers are freed by unwinding ranks while others may be inside a collective.
  for (int round = 0; round < 30; ++round) {
    const auto run = run_faulty<Inline>(
        4,
        [&](ThreadComm& comm, auto& stream, auto&) {
          std::vector<float> data(200000, 1.0f);
          auto pair = comm.split(comm.rank() / 2, 0);
          for (int step = 0;; ++step) {
            if (comm.rank() == 3 && step == round) throw std::runtime_error("gone");
            pair.all_reduce(stream, laws::view(data), Reduce::max);
            if (step % 3 == 0) comm.all_reduce(stream, laws::view(data), Reduce::max);
          }
        },
        patience);
    check_all_others(run, 3, {"rank 3 failed: gone"}, prompt_s);
    CHECK(run.cause == "gone");
  }
}

TEST_CASE("comm: a poll ends with the deadline, and with another rank's failure") {
  std::string waited, told;
  try {
    mega::run_threads(2,
                      [&](ThreadComm& comm) {
                        if (comm.rank() == 0) {
                          try {
                            comm.poll([] { return false; },
                                      [](const std::string& when) { return "no tide " + when; });
                          } catch (const mega::Error& e) {
                            CHECK(e.code() == ErrorCode::timeout);
                            waited = e.what();
                            throw;
                          }
                        }
                        // Begins later, so that rank 0 is late first.
                        std::this_thread::sleep_for(std::chrono::milliseconds(100));
                        try {
                          comm.poll([] { return false; },
                                    [](const std::string&) { return std::string(); });
                        } catch (const mega::Error& e) {
                          told = e.what();
                          throw;
                        }
                      },
                      {.deadline = Seconds(0.2)});
  } catch (const mega::Error&) {
  }
  CHECK(waited == "no tide within 0.2 s");
  CHECK(told == "rank 0 failed: no tide within 0.2 s");
  std::string echo;
  CHECK_THROWS_AS(mega::run_threads(2,
                                    [&](ThreadComm& comm) {
                                      if (comm.rank() == 0) throw std::runtime_error("fell over");
                                      try {
                                        comm.poll([] { return false; },
                                                  [](const std::string&) { return std::string(); });
                                      } catch (const mega::Error& e) {
                                        CHECK(e.code() == ErrorCode::peer_failed);
                                        echo = e.what();
                                        throw;
                                      }
                                    }),
                  std::runtime_error);
  CHECK(echo == "rank 0 failed: fell over");
}
