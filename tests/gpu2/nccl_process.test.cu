// NcclProcessComm on two GPUs: each case starts two processes of this very program, which run the
// case process_ranks::rank_case below; this process itself never touches CUDA.
#include "tests/support/process_ranks.hpp"
#include <mega/comm/nccl_process.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/storage.hpp>
#include <mega/cuda/memory.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using mega::Index;
using mega::NcclProcessComm;
using mega::Vector;
using mega::comm::Reduce;
using mega::cuda::Memory;
using mega::cuda::Stream;
using process_ranks::expect_success;
using process_ranks::free_port;
using process_ranks::Rank;
using process_ranks::start_up;

constexpr double deadline = 5;

// What a rank does.

/// Elements in device memory with their host copy.
template <class T>
class Buffer {
 public:
  explicit Buffer(Index n) : host(static_cast<std::size_t>(n)), memory_(host.size() * sizeof(T)) {}
  Buffer(Stream& stream, std::vector<T> values)
      : host(std::move(values)), memory_(host.size() * sizeof(T)) {
    upload(stream, device(), Vector<const T>(host.data(), device().size()));
    stream.synchronize();
  }
  [[nodiscard]] Vector<T> device() const {
    return {reinterpret_cast<T*>(memory_.data()), static_cast<Index>(host.size())};
  }
  [[nodiscard]] const std::vector<T>& fetch(Stream& stream) {
    download(stream, Vector<T>(host.data(), device().size()), Vector<const T>(device()));
    stream.synchronize();
    return host;
  }
  std::vector<T> host;

 private:
  Memory memory_;
};

template <class T>
std::vector<T> values(int rank, Index n) {
  const mega::RandomKey key{.seed = 3, .use = mega::RandomUse::test};
  std::vector<T> out;
  for (Index i = 0; i < n; ++i)
    out.push_back(static_cast<T>(
        static_cast<float>(static_cast<double>(key.bits(2 * i + rank)) / 65537.0 - 30000.0)));
  return out;
}

Vector<std::byte> bytes(Vector<std::int32_t> v) {
  return {reinterpret_cast<std::byte*>(v.data()), v.size() * 4};
}
Vector<const std::byte> message(Vector<std::int32_t> v) {
  return bytes(v);
}

template <class T>
void check_collectives(NcclProcessComm& comm, Stream& stream, Index n) {
  const int me = comm.rank();
  const std::array<std::vector<T>, 2> in{values<T>(0, 2 * n), values<T>(1, 2 * n)};
  const auto& mine = in[static_cast<std::size_t>(me)];
  const auto piece = [n](const std::vector<T>& v, int k) {
    return std::vector<T>(v.begin() + k * n, v.begin() + (k + 1) * n);
  };
  const auto joined = [](std::vector<T> a, const std::vector<T>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  for (const Reduce reduce : {Reduce::sum, Reduce::max}) {
    std::vector<T> expected;
    for (std::size_t i = 0; i < mine.size(); ++i)
      expected.push_back(reduce == Reduce::sum ? static_cast<T>(in[0][i] + in[1][i])
                                               : std::max(in[0][i], in[1][i]));
    Buffer<T> all(stream, mine);
    comm.all_reduce(stream, all.device(), reduce);
    CHECK((all.fetch(stream) == expected));
    Buffer<T> whole(stream, mine), out(n);
    comm.reduce_scatter(stream, out.device(), whole.device(), reduce);
    CHECK((out.fetch(stream) == piece(expected, me)));
    CHECK((whole.fetch(stream) == mine));
    // In place.
    comm.reduce_scatter(stream, whole.device().slice(me * n, n), whole.device(), reduce);
    CHECK((piece(whole.fetch(stream), me) == piece(expected, me)));
  }
  const std::vector<T> pieces = joined(piece(in[0], 0), piece(in[1], 1));
  Buffer<T> part(stream, piece(mine, me)), gathered(2 * n);
  comm.all_gather(stream, gathered.device(), part.device());
  CHECK((gathered.fetch(stream) == pieces));
  Buffer<T> in_place(stream, mine);
  comm.all_gather(stream, in_place.device(), in_place.device().slice(me * n, n));
  CHECK((in_place.fetch(stream) == pieces));
  for (int root = 0; root < 2; ++root) {
    Buffer<T> told(stream, mine);
    comm.broadcast(stream, told.device(), root);
    CHECK((told.fetch(stream) == in[static_cast<std::size_t>(root)]));
  }
  Buffer<T> source(stream, mine), target(2 * n);
  comm.all_to_all(stream, target.device(), source.device());
  CHECK((target.fetch(stream) == joined(piece(in[0], me), piece(in[1], me))));
}

void collectives(NcclProcessComm& comm) {
  CHECK(comm.size() == 2);
  Stream stream;
  for (const Index n : {Index{0}, Index{1}, Index{3}, Index{1000003}}) {
    CAPTURE(n);
    check_collectives<float>(comm, stream, n);
    check_collectives<double>(comm, stream, n);
    check_collectives<mega::Bfloat16>(comm, stream, n);
    check_collectives<mega::Float16>(comm, stream, n);
    check_collectives<std::int32_t>(comm, stream, n);
    check_collectives<std::int64_t>(comm, stream, n);
  }
  Buffer<float> wrong(3);
  CHECK_THROWS_WITH_AS(comm.all_gather(stream, wrong.device(), wrong.device()),
                       doctest::Contains("6"), mega::Error);
  // A barrier holds the stream until both have come.
  comm.barrier(stream);
  stream.synchronize();
  if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const auto begin = std::chrono::steady_clock::now();
  comm.barrier(stream);
  stream.synchronize();
  const double waited =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (comm.rank() == 0) CHECK(waited > 0.3);
}

void split(NcclProcessComm& comm) {
  Stream stream;
  NcclProcessComm swapped = comm.split(7, -comm.rank());
  CHECK(swapped.size() == 2);
  CHECK(swapped.rank() == 1 - comm.rank());
  CHECK(swapped.global_rank() == comm.rank());
  Buffer<std::int64_t> told(stream, {comm.rank() + 40});
  swapped.broadcast(stream, told.device(), 0);
  CHECK(told.fetch(stream)[0] == 41);
  NcclProcessComm apart = comm.split(comm.rank(), 0);
  NcclProcessComm alone = comm.split(comm.rank() == 0 ? 3 : -1, 0);
  for (NcclProcessComm* one : {&apart, &alone}) {
    CHECK(one->size() == 1);
    CHECK(one->rank() == 0);
    Buffer<float> same(stream, {1.5F, 2.5F}), copied(2);
    one->all_reduce(stream, same.device(), Reduce::sum);
    one->barrier(stream);
    CHECK((same.fetch(stream) == std::vector<float>{1.5F, 2.5F}));
    one->all_to_all(stream, copied.device(), same.device());
    CHECK((copied.fetch(stream) == same.host));
  }
  // The first communicator still works, and so does one that was moved, and one of a split.
  NcclProcessComm moved = std::move(swapped);
  moved.all_reduce(stream, told.device(), Reduce::sum);
  comm.all_reduce(stream, told.device(), Reduce::sum);
  CHECK(told.fetch(stream)[0] == 164);
  NcclProcessComm again = moved.split(0, 0);
  CHECK(again.rank() == moved.rank());
  again.all_reduce(stream, told.device(), Reduce::max);
  CHECK(told.fetch(stream)[0] == 164);
}

/// Splits while collectives and messages are under way, and where slots are posted.
void split_amid_messages(NcclProcessComm& comm) {
  constexpr Index n = (16 << 20) + 3;
  const int peer = 1 - comm.rank();
  Stream stream, receiving;
  const std::vector<std::int32_t> mine(static_cast<std::size_t>(n), comm.rank() + 5);
  Buffer<std::int32_t> x(stream, mine), sent(stream, mine), got(n), told(stream, {comm.rank()});
  NcclProcessComm other = comm.split(0, 0);
  auto sender = comm.open_sender(peer, 1);
  auto receiver = comm.open_receiver(peer, 1);
  receiver.post(receiving, bytes(got.device()));
  for (int i = 0; i < 20; ++i) other.all_reduce(stream, x.device(), Reduce::max);
  sender.send(stream, message(sent.device()));
  receiver.complete(receiving);
  NcclProcessComm second = comm.split(0, -comm.rank());
  CHECK(second.rank() == peer);
  second.broadcast(stream, told.device(), 0);
  CHECK(told.fetch(stream)[0] == 1);
  CHECK((got.fetch(receiving) == std::vector<std::int32_t>(mine.size(), peer + 5)));
  CHECK((x.fetch(stream) == std::vector<std::int32_t>(mine.size(), 6)));
  // A posted slot is refused on both ranks, and harms nothing.
  receiver.post(receiving, bytes(told.device()));
  const std::string slot =
      "split #3 on communicator world of ranks 0,1: slot #2 on channel 1 from rank " +
      std::to_string(peer) + " to rank " + std::to_string(comm.rank()) + " is posted";
  CHECK_THROWS_WITH_AS((void)comm.split(0, 0), doctest::Contains(slot.c_str()), mega::Error);
  sender.send(stream, message(sent.device().slice(0, 1)));
  receiver.complete(receiving);
  NcclProcessComm third = comm.split(0, 0);
  third.all_reduce(receiving, told.device(), Reduce::sum);
  CHECK(told.fetch(receiving)[0] == 11);
  {
    auto given_up = comm.open_receiver(peer, 2);
    auto unused = comm.open_sender(peer, 2);
    given_up.post(receiving, bytes(got.device()));
    comm.barrier(stream);
    stream.synchronize();
  }
  NcclProcessComm fourth = comm.split(0, 0);
  fourth.all_reduce(receiving, told.device(), Reduce::sum);
  CHECK(told.fetch(receiving)[0] == 22);
}

/// Both ranks post, then send to each other on two channels, and use their slots again.
void channels(NcclProcessComm& comm) {
  constexpr Index words = (8 << 20) / 4 + 1;
  constexpr int messages = 40, slots = 3;
  const int peer = 1 - comm.rank();
  Memory slot_memory(slots * words * 4);
  Stream out, in;
  // The receiver is open, and its slots are posted, before the other side opens anything.
  auto receiver = comm.open_receiver(peer, 5);
  const auto slot = [&](int k) {
    return Vector<std::int32_t>(reinterpret_cast<std::int32_t*>(slot_memory.data()), slots * words)
        .slice(k % slots * words, words);
  };
  // Message k of rank r is k * words + i + r.
  std::vector<std::int32_t> all;
  for (Index i = 0; i < messages * words; ++i)
    all.push_back(static_cast<std::int32_t>(i) + comm.rank());
  Buffer<std::int32_t> sent(out, all), got(messages * words);
  Buffer<std::int32_t> small(out, {comm.rank() + 70, 0});
  auto second = comm.open_receiver(peer, 6);
  auto sender = comm.open_sender(peer, 5);
  auto second_sender = comm.open_sender(peer, 6);
  for (int k = 0; k < slots; ++k) receiver.post(in, bytes(slot(k)));
  second.post(in, bytes(small.device().slice(1, 1)));
  for (int k = 0; k < messages; ++k) {
    sender.send(out, message(sent.device().slice(k * words, words)));
    receiver.complete(in);
    copy(in, got.device().slice(k * words, words), Vector<const std::int32_t>(slot(k)));
    if (k + slots < messages) receiver.post(in, bytes(slot(k)));
  }
  second_sender.send(out, message(small.device().slice(0, 1)));
  second.complete(in);
  CHECK(small.fetch(in)[1] == peer + 70);
  out.synchronize();
  // Messages of no bytes count, too; and the size may change.
  second.post(in, bytes(small.device().slice(1, 0)));
  second.post(in, bytes(small.device()));
  second_sender.send(out, message(small.device().slice(0, 0)));
  second_sender.send(out, message(sent.device().slice(0, 2)));
  second.complete(in);
  second.complete(in);
  CHECK((small.fetch(in) == std::vector<std::int32_t>{peer, peer + 1}));
  CHECK_THROWS_WITH_AS(second.complete(in), doctest::Contains("only 3 slots were posted"),
                       mega::Error);
  out.synchronize();
  const auto& received = got.fetch(in);
  Index wrong = 0;
  for (Index i = 0; i < messages * words; ++i)
    wrong += received[static_cast<std::size_t>(i)] != static_cast<std::int32_t>(i) + peer ? 1 : 0;
  CHECK(wrong == 0);

  // To itself.
  auto to_me = comm.open_sender(comm.rank(), 9);
  auto from_me = comm.open_receiver(comm.rank(), 9);
  from_me.post(in, bytes(slot(1)));
  to_me.send(out, message(slot(0)));
  from_me.complete(in);
  CHECK_THROWS_AS(from_me.complete(in), mega::Error);
  in.synchronize();
  // One that is never used, and one that ends with a slot posted.
  auto unused = comm.open_sender(peer, 20);
  auto unused_receiver = comm.open_receiver(peer, 20);
  auto given_up = comm.open_receiver(peer, 21);
  auto given_up_sender = comm.open_sender(peer, 21);
  given_up.post(in, bytes(slot(2)));
  comm.barrier(out);
  out.synchronize();
}

/// Steps without end: a collective and a message each way.
void steps(NcclProcessComm& comm) {
  Stream stream, receiving;
  Buffer<float> x(50001);
  Buffer<std::int32_t> outgoing(100001), incoming(100001);
  auto sender = comm.open_sender(1 - comm.rank(), 1);
  auto receiver = comm.open_receiver(1 - comm.rank(), 1);
  for (int step = 0;; ++step) {
    comm.all_reduce(stream, x.device(), Reduce::max);
    receiver.post(receiving, bytes(incoming.device()));
    sender.send(stream, message(outgoing.device()));
    receiver.complete(receiving);
    stream.synchronize();
    receiving.synchronize();
    comm.throw_if_failed();
    if (step == 20) {
      std::puts("running");
      std::fflush(stdout);
    }
  }
}

void misbehave(NcclProcessComm& comm, const std::string& work) {
  Stream stream;
  Buffer<float> x(1000);
  comm.all_reduce(stream, x.device(), Reduce::sum);
  stream.synchronize();
  const bool faulty = comm.rank() == 1;
  if (work == "throw" && faulty) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    throw mega::Error(mega::ErrorCode::bad_input, "the disk is gone");
  }
  if (work == "stall" && faulty) std::this_thread::sleep_for(std::chrono::seconds(600));
  // NCCL takes a message of 8 bytes at once, and keeps a stream waiting with one of 64 MiB.
  Buffer<std::byte> memory(work == "no_slot_large" ? 64 << 20 : 8);
  if (work == "no_slot_at_end") {
    if (faulty) return (void)comm.open_receiver(0, 2);
    return comm.open_sender(1, 2).send(stream, Vector<const std::byte>(memory.device()));
  }
  if (work == "no_message" || work == "no_call") {
    // Rank 0 comes to its end long before rank 1 waits for it.
    if (!faulty && work == "no_message") return (void)comm.open_sender(1, 2);
    if (!faulty) return;
    if (work == "no_message") {
      auto receiver = comm.open_receiver(0, 2);
      receiver.post(stream, memory.device());
      std::this_thread::sleep_for(std::chrono::seconds(2));
      receiver.complete(stream);
      stream.synchronize();
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(2));
      comm.all_reduce(stream, x.device(), Reduce::max);
    }
  } else if (work == "no_slot" || work == "no_slot_large" || work == "message_size") {
    if (faulty) {
      auto receiver = comm.open_receiver(0, 2);
      if (work == "message_size") {
        receiver.post(stream, memory.device().slice(0, 7));
        receiver.complete(stream);
      }
      stream.synchronize();
      for (int i = 0; i < 1000; ++i) {
        comm.throw_if_failed();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
    // So that what rank 1 has told of its slot is here.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    comm.open_sender(1, 2).send(stream, Vector<const std::byte>(memory.device()));
  } else if (work == "mismatch" && faulty) {
    // More than rank 0 will ever send.
    Buffer<float> longer(8 << 20);
    comm.all_reduce(stream, longer.device(), Reduce::max);
    stream.synchronize();
  } else {
    comm.all_reduce(stream, x.device(), Reduce::max);
  }
  stream.synchronize();
  comm.throw_if_failed();
}

/// A program that ends its session by itself, without finish(), where rank 1 has still a slot
/// posted.
void leave_with_a_slot() {
  mega::comm::NcclProcessSession session({.deadline = mega::comm::Seconds(deadline)});
  NcclProcessComm comm = session.world();
  Stream stream;
  Buffer<std::byte> memory(1 << 20);
  if (comm.rank() == 0) {
    auto sender = comm.open_sender(1, 2);
    std::this_thread::sleep_for(std::chrono::seconds(1));
  } else {
    auto receiver = comm.open_receiver(0, 2);
    receiver.post(stream, memory.device());
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

struct Ends {
  std::array<int, 2> code{};
  std::array<std::string, 2> text;
};
Ends ends_of(const std::string& work) {
  const int port = free_port();
  Rank zero(work, 0, 2, port), one(work, 1, 2, port);
  CHECK(zero.ends_within(start_up));
  // No rank outlives the others for long.
  CHECK(one.ends_within(deadline));
  const Ends out{{zero.exit_code(), one.exit_code()}, {zero.text(), one.text()}};
  std::printf("%s:\n  %d %s  %d %s", work.c_str(), out.code[0], out.text[0].c_str(), out.code[1],
              out.text[1].c_str());
  return out;
}
bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE(process_ranks::rank_case* doctest::skip()) {
  const std::string work = process_ranks::own_work();
  if (work == "leave_with_a_slot") return leave_with_a_slot();
  mega::run_nccl(
      [&](NcclProcessComm& comm) {
        if (work == "collectives") return collectives(comm);
        if (work == "split") return split(comm);
        if (work == "split_amid_messages") return split_amid_messages(comm);
        if (work == "channels") return channels(comm);
        if (work == "steps") return steps(comm);
        if (work == "one") {
          Stream stream;
          Buffer<float> x(stream, {2.0F});
          comm.all_reduce(stream, x.device(), Reduce::sum);
          comm.barrier(stream);
          CHECK(comm.split(0, 0).size() == 1);
          CHECK(x.fetch(stream)[0] == 2.0F);
          return;
        }
        misbehave(comm, work);
      },
      {.deadline = mega::comm::Seconds(deadline)});
}

TEST_CASE("nccl process: one process, and collectives of two give the serial result bit for bit") {
  expect_success("one", 1);
  expect_success("collectives", 2);
}

TEST_CASE("nccl process: split orders by key, and a negative color is alone") {
  expect_success("split", 2);
}

TEST_CASE("nccl process: split waits for what is under way, and refuses where a slot is posted") {
  expect_success("split_amid_messages", 2);
}

TEST_CASE("nccl process: channels carry messages both ways in order, and slots are used again") {
  expect_success("channels", 2);
}

TEST_CASE("nccl process: a rank that is killed or stopped amid steps ends the other in time") {
  for (const int number : {SIGKILL, SIGSTOP}) {
    for (const int culprit : {1, 0}) {
      CAPTURE(number);
      CAPTURE(culprit);
      const int port = free_port();
      Rank zero("steps", 0, 2, port), one("steps", 1, 2, port);
      REQUIRE(zero.says_within("running", start_up));
      REQUIRE(one.says_within("running", start_up));
      Rank& gone = culprit == 0 ? zero : one;
      Rank& other = culprit == 0 ? one : zero;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      const auto begin = std::chrono::steady_clock::now();
      gone.signal(number);
      CHECK(other.ends_within(deadline));
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      CHECK(other.exit_code() == 3);
      const std::string text = other.text();
      std::printf("signal %d to rank %d: after %.1f s: %s", number, culprit, seconds, text.c_str());
      const std::string who = "rank " + std::to_string(culprit) + " failed: it";
      CHECK(has(text,
                (who + (number == SIGKILL ? "s process ended" : " gave no live sign")).c_str()));
      const bool names =
          has(text, "all_reduce(max) #") || has(text, "send #") || has(text, "receive #");
      CHECK(names);
    }
  }
}

TEST_CASE("nccl process: a rank that throws ends the other at once, with its own exit code") {
  const Ends ends = ends_of("throw");
  CHECK(ends.code[1] == 2);
  CHECK(has(ends.text[1], "rank 1: the disk is gone"));
  CHECK(ends.code[0] == 3);
  CHECK(has(ends.text[0], "rank 0: rank 1 failed: the disk is gone"));
  CHECK(has(ends.text[0], "all_reduce(max) #2 with 1000 float on communicator world of ranks 0,1"));
}

TEST_CASE("nccl process: a rank that does not come is named, and ended though it sleeps") {
  const Ends ends = ends_of("stall");
  const char* const text =
      "all_reduce(max) #2 with 1000 float on communicator world of ranks 0,1: rank 1 did not call "
      "it within 5 s";
  for (int r = 0; r < 2; ++r) {
    CHECK(ends.code[static_cast<std::size_t>(r)] == 3);
    CHECK(has(ends.text[static_cast<std::size_t>(r)], text));
  }
}

TEST_CASE("nccl process: ranks that call different collectives are told so") {
  const Ends ends = ends_of("mismatch");
  for (int r = 0; r < 2; ++r) {
    const std::string& text = ends.text[static_cast<std::size_t>(r)];
    CHECK(ends.code[static_cast<std::size_t>(r)] == 3);
    CHECK(has(text, "communicator world of ranks 0,1 disagrees"));
    CHECK(has(text, "rank 0 called all_reduce(max) #2 with 1000 float"));
    CHECK(has(text, "rank 1 called all_reduce(max) #2 with 8388608 float"));
  }
}

TEST_CASE("nccl process: channels whose slot does not fit, or never comes") {
  const Ends misfit = ends_of("message_size");
  CHECK(misfit.code[0] == 3);
  CHECK(has(misfit.text[0],
            "channel 2 from rank 0 to rank 1: message #1 has 8 bytes, its slot has 7"));
  for (const char* work : {"no_slot", "no_slot_large"}) {
    CAPTURE(work);
    const Ends late = ends_of(work);
    for (int r = 0; r < 2; ++r) {
      CHECK(late.code[static_cast<std::size_t>(r)] == 3);
      CHECK(has(late.text[static_cast<std::size_t>(r)],
                "send #1 on channel 2 from rank 0 to rank 1: rank 1 posted no slot within 5 s"));
    }
  }
}

TEST_CASE("nccl process: a rank at its end names what another waits for, and what nobody took") {
  constexpr std::array<std::array<const char*, 2>, 3> cases{{
      {"no_slot_at_end",
       "send #1 on channel 2 from rank 0 to rank 1: rank 1 posted no slot before its end"},
      {"no_message",
       "receive #1 on channel 2 from rank 0 to rank 1: rank 0 sent no message within 5 s"},
      {"no_call",
       "all_reduce(max) #2 with 1000 float on communicator world of ranks 0,1: rank 0 did not call "
       "it within 5 s"},
  }};
  for (const auto& [work, text] : cases) {
    CAPTURE(work);
    const Ends ends = ends_of(work);
    for (int r = 0; r < 2; ++r) {
      CHECK(ends.code[static_cast<std::size_t>(r)] == 3);
      CHECK(has(ends.text[static_cast<std::size_t>(r)], text));
    }
  }
}

TEST_CASE("nccl process: a session that is left without finish() gives up what was posted") {
  const Ends ends = ends_of("leave_with_a_slot");
  CHECK(ends.code[1] == 0);
  CHECK(has(ends.text[1], "SUCCESS"));
  // Rank 0 may or may not have seen the other go, but no destructor ends it.
  CHECK(ends.code[0] >= 0);
  CHECK_FALSE(has(ends.text[0], "terminate called"));
}
