// NcclComm on two GPUs: collectives against serial sums, channels, split, and how runs fail.
#include "tests/support/device_buffer.hpp"
#include <mega/comm/nccl.hpp>
#include <mega/core/rng.hpp>
#include <mega/cuda/device.hpp>
#include <mega/cuda/memory.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

using mega::Index;
using mega::NcclComm;
using mega::Vector;
using mega::comm::Reduce;
using mega::cuda::Memory;
using mega::cuda::Stream;

template <class T>
using Buffer = support::DeviceBuffer<T>;

template <class T>
std::vector<T> values(int rank, Index n, std::uint64_t seed = 3) {
  const mega::RandomKey key{.seed = seed, .use = mega::RandomUse::test};
  std::vector<T> out;
  for (Index i = 0; i < n; ++i)
    out.push_back(static_cast<T>(static_cast<double>(key.bits(2 * i + rank)) / 65537.0 - 30000.0));
  return out;
}

template <class T>
T combine(Reduce reduce, T a, T b) {
  return reduce == Reduce::sum ? static_cast<T>(a + b) : std::max(a, b);
}

template <class T>
void check_collectives(NcclComm& comm, Stream& stream, Index n) {
  const int me = comm.rank();
  const std::array<std::vector<T>, 2> in{values<T>(0, 2 * n), values<T>(1, 2 * n)};
  const auto& mine = in[static_cast<std::size_t>(me)];
  const auto piece = [n](const std::vector<T>& v, int k) {
    return std::vector<T>(v.begin() + k * n, v.begin() + (k + 1) * n);
  };
  for (const Reduce reduce : {Reduce::sum, Reduce::max}) {
    std::vector<T> expected;
    for (std::size_t i = 0; i < mine.size(); ++i)
      expected.push_back(combine(reduce, in[0][i], in[1][i]));
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
  std::vector<T> pieces = piece(in[0], 0);
  const std::vector<T> second = piece(in[1], 1);
  pieces.insert(pieces.end(), second.begin(), second.end());
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
  std::vector<T> exchanged = piece(in[0], me);
  const std::vector<T> theirs = piece(in[1], me);
  exchanged.insert(exchanged.end(), theirs.begin(), theirs.end());
  Buffer<T> source(stream, mine), target(2 * n);
  comm.all_to_all(stream, target.device(), source.device());
  CHECK((target.fetch(stream) == exchanged));
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// What run_gpus() throws, and what it took.
struct End {
  mega::ErrorCode code{};
  std::string text;
  double seconds = 0;
};
template <class F>
End end_of(double deadline, const F& f) {
  End out;
  const auto begin = std::chrono::steady_clock::now();
  try {
    mega::run_gpus(2, f, {.deadline = mega::comm::Seconds(deadline)});
  } catch (const mega::Error& e) {
    out.code = e.code();
    out.text = e.what();
  }
  out.seconds = seconds_since(begin);
  std::printf("after %.1f s: %s\n", out.seconds, out.text.c_str());
  std::fflush(stdout);
  return out;
}
bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("nccl: collectives of two ranks give the serial result bit for bit") {
  mega::run_gpus(2, [](NcclComm& comm) {
    CHECK(comm.size() == 2);
    int current = -1;
    mega::cuda::check(cudaGetDevice(&current), "cudaGetDevice");
    CHECK(current == comm.rank());
    Stream stream;
    for (const Index n : {Index{0}, Index{1}, Index{3}, Index{1000003}}) {
      CAPTURE(n);
      check_collectives<float>(comm, stream, n);
      check_collectives<double>(comm, stream, n);
      check_collectives<std::int32_t>(comm, stream, n);
      check_collectives<std::int64_t>(comm, stream, n);
    }
    Buffer<float> wrong(3);
    CHECK_THROWS_WITH_AS(comm.all_gather(stream, wrong.device(), wrong.device()),
                         doctest::Contains("6"), mega::Error);
  });
}

TEST_CASE("nccl: multicast is off unless the environment has it on") {
  const auto value = [](const char* set) {
    if (set == nullptr)
      ::unsetenv("NCCL_NVLS_ENABLE");
    else
      ::setenv("NCCL_NVLS_ENABLE", set, 1);
    mega::run_gpus(1, [](NcclComm&) {});
    return std::string(std::getenv("NCCL_NVLS_ENABLE"));
  };
  const char* before = std::getenv("NCCL_NVLS_ENABLE");
  const std::string kept = before == nullptr ? "0" : before;
  CHECK(value("00") == "00");  // off as well: no test is to turn it on
  CHECK(value(nullptr) == "0");
  CHECK(value(kept.c_str()) == kept);
}

TEST_CASE("nccl: a barrier holds the stream until all ranks have come") {
  std::atomic<bool> came{false};
  mega::run_gpus(2, [&](NcclComm& comm) {
    Stream stream;
    comm.barrier(stream);
    stream.synchronize();
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      came = true;
    }
    comm.barrier(stream);
    stream.synchronize();
    CHECK(came);
  });
}

TEST_CASE("nccl: split orders by key, and a negative color is alone") {
  mega::run_gpus(2, [](NcclComm& comm) {
    Stream stream;
    NcclComm swapped = comm.split(7, -comm.rank());
    CHECK(swapped.size() == 2);
    CHECK(swapped.rank() == 1 - comm.rank());
    CHECK(swapped.global_rank() == comm.rank());
    Buffer<std::int64_t> told(stream, {comm.rank() + 40});
    swapped.broadcast(stream, told.device(), 0);
    CHECK(told.fetch(stream)[0] == 41);
    NcclComm apart = comm.split(comm.rank(), 0);
    NcclComm alone = comm.split(comm.rank() == 0 ? 3 : -1, 0);
    for (NcclComm* one : {&apart, &alone}) {
      CHECK(one->size() == 1);
      CHECK(one->rank() == 0);
      Buffer<float> same(stream, {1.5F, 2.5F}), copied(2);
      one->all_reduce(stream, same.device(), Reduce::sum);
      one->barrier(stream);
      CHECK((same.fetch(stream) == std::vector<float>{1.5F, 2.5F}));
      one->all_to_all(stream, copied.device(), same.device());
      CHECK((copied.fetch(stream) == same.host));
    }
    // The first communicator still works, and so does one that was moved.
    NcclComm moved = std::move(swapped);
    moved.all_reduce(stream, told.device(), Reduce::sum);
    comm.all_reduce(stream, told.device(), Reduce::sum);
    CHECK(told.fetch(stream)[0] == 164);
  });
}

TEST_CASE("nccl: channels carry messages both ways in order, and slots are used again") {
  constexpr Index words = (8 << 20) / 4 + 1;
  constexpr int messages = 40, slots = 3;
  mega::run_gpus(2, [&](NcclComm& comm) {
    const int peer = 1 - comm.rank();
    auto sender = comm.open_sender(peer, 5);
    Stream out, in;
    Memory slot_memory(slots * words * 4);
    auto receiver = comm.open_receiver(peer, 5);
    const auto bytes = [](Vector<std::int32_t> v) {
      return Vector<std::byte>(reinterpret_cast<std::byte*>(v.data()), v.size() * 4);
    };
    const auto slot = [&](int k) {
      return Vector<std::int32_t>(reinterpret_cast<std::int32_t*>(slot_memory.data()),
                                  slots * words)
          .slice(k % slots * words, words);
    };
    // Message k of rank r is k * words + i + r.
    std::vector<std::int32_t> all;
    for (Index i = 0; i < messages * words; ++i)
      all.push_back(static_cast<std::int32_t>(i) + comm.rank());
    Buffer<std::int32_t> sent(out, all), got(messages * words);
    // Work that keeps the receiver far behind, so that a sender that did not wait for a free slot
    // would overwrite messages that nobody has read.
    constexpr Index ballast_words = (256 << 20) / 4;
    Memory ballast(2 * ballast_words * 4);
    const auto half = [&](int k) {
      return Vector<std::int32_t>(reinterpret_cast<std::int32_t*>(ballast.data()),
                                  2 * ballast_words)
          .slice(k * ballast_words, ballast_words);
    };
    for (int k = 0; k < slots; ++k) receiver.post(in, bytes(slot(k)));
    // The slot is free again only once it was copied out, which nothing but events tells the peer.
    for (int k = 0; k < messages; ++k) {
      sender.send(out, Vector<const std::byte>(bytes(sent.device().slice(k * words, words))));
      receiver.complete(in);
      copy(in, half(0), Vector<const std::int32_t>(half(1)));
      copy(in, got.device().slice(k * words, words), Vector<const std::int32_t>(slot(k)));
      if (k + slots < messages) receiver.post(in, bytes(slot(k)));
    }
    out.synchronize();
    const auto& received = got.fetch(in);
    Index wrong = 0;
    for (Index i = 0; i < messages * words; ++i)
      wrong += received[static_cast<std::size_t>(i)] != static_cast<std::int32_t>(i) + peer ? 1 : 0;
    CHECK(wrong == 0);

    // To itself.
    auto to_me = comm.open_sender(comm.rank(), 9);
    auto from_me = comm.open_receiver(comm.rank(), 9);
    CHECK_THROWS_WITH_AS(to_me.send(out, Vector<const std::byte>(bytes(slot(0)))),
                         doctest::Contains("only one that could"), mega::Error);
    from_me.post(in, bytes(slot(1)));
    to_me.send(out, Vector<const std::byte>(bytes(slot(0))));
    from_me.complete(in);
    CHECK_THROWS_AS(from_me.complete(in), mega::Error);
    in.synchronize();
  });
}

TEST_CASE("nccl: a sender waits for a late slot") {
  mega::run_gpus(2, [](NcclComm& comm) {
    Stream stream;
    Buffer<std::byte> one(stream, {std::byte{static_cast<unsigned char>(comm.rank() + 1)}});
    if (comm.rank() == 0) {
      auto sender = comm.open_sender(1, 0);
      sender.send(stream, Vector<const std::byte>(one.device()));
      stream.synchronize();
    } else {
      auto receiver = comm.open_receiver(0, 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      receiver.post(stream, one.device());
      receiver.complete(stream);
      CHECK(one.fetch(stream)[0] == std::byte{1});
    }
  });
}

TEST_CASE("nccl: a rank that throws ends the others at once") {
  std::string other;
  const End end = end_of(30, [&](NcclComm& comm) {
    Stream stream;
    Buffer<float> x(1000);
    comm.all_reduce(stream, x.device(), Reduce::sum);
    stream.synchronize();
    if (comm.rank() == 1) throw mega::Error(mega::ErrorCode::bad_input, "the disk is gone");
    try {
      comm.all_reduce(stream, x.device(), Reduce::sum);
      stream.synchronize();  // ends, though rank 1 never comes
      comm.throw_if_failed();
    } catch (const mega::Error& e) {
      CHECK(e.code() == mega::ErrorCode::peer_failed);
      other = e.what();
      throw;
    }
  });
  CHECK(end.code == mega::ErrorCode::bad_input);
  CHECK(has(end.text, "the disk is gone"));
  CHECK(has(other, "rank 1 failed: the disk is gone"));
  CHECK(end.seconds < 15);
}

TEST_CASE("nccl: a rank that unwinds past a waiting stream is let go, and its error is the run's") {
  const End end = end_of(1, [&](NcclComm& comm) {
    Stream stream;
    Buffer<float> x(1000);
    comm.all_reduce(stream, x.device(), Reduce::sum);
    stream.synchronize();
    if (comm.rank() == 1) {
      comm.all_reduce(stream, x.device(), Reduce::sum);
      throw mega::Error(mega::ErrorCode::bad_input, "the disk is gone");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  });
  CHECK(end.code == mega::ErrorCode::bad_input);
  CHECK(has(end.text, "the disk is gone"));
  CHECK(end.seconds < 15);
}

TEST_CASE("nccl: a rank that does not come is named after the deadline") {
  const End end = end_of(1, [&](NcclComm& comm) {
    Stream stream;
    Buffer<float> x(1000);
    comm.all_reduce(stream, x.device(), Reduce::sum);
    stream.synchronize();
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    } else {
      comm.all_reduce(stream, x.device(), Reduce::max);
      stream.synchronize();
    }
    comm.throw_if_failed();
  });
  CHECK(end.code == mega::ErrorCode::timeout);
  CHECK(has(end.text,
            "all_reduce(max) #2 with 1000 float on communicator world of ranks 0,1: rank "
            "1 did not call it within 1 s"));
  CHECK(end.seconds < 15);
}

TEST_CASE("nccl: ranks that call different collectives are told so") {
  const End end = end_of(30, [&](NcclComm& comm) {
    Stream stream;
    Buffer<float> x(1000);
    comm.all_reduce(stream, x.device().slice(0, comm.rank() == 0 ? 1000 : 999), Reduce::sum);
    stream.synchronize();
    comm.throw_if_failed();
  });
  CHECK(end.code == mega::ErrorCode::peer_failed);
  CHECK(has(end.text, "communicator world of ranks 0,1 disagrees"));
  CHECK(has(end.text, "all_reduce(sum) #1 with 999 float"));
  CHECK(end.seconds < 15);
}

TEST_CASE("nccl: channels whose slot does not fit, or never comes") {
  const End misfit = end_of(30, [&](NcclComm& comm) {
    Stream stream;
    Buffer<std::byte> x(8);
    if (comm.rank() == 0) {
      comm.open_sender(1, 2).send(stream, Vector<const std::byte>(x.device()));
    } else {
      auto receiver = comm.open_receiver(0, 2);
      receiver.post(stream, x.device().slice(0, 7));
      receiver.complete(stream);
    }
    stream.synchronize();
  });
  CHECK(
      has(misfit.text, "channel 2 from rank 0 to rank 1: message #1 has 8 bytes, its slot has 7"));
  const End late = end_of(1, [&](NcclComm& comm) {
    Stream stream;
    Buffer<std::byte> x(8);
    if (comm.rank() == 0) comm.open_sender(1, 2).send(stream, Vector<const std::byte>(x.device()));
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  });
  CHECK(late.code == mega::ErrorCode::timeout);
  CHECK(has(late.text, "rank 1 posted no slot within 1 s"));
}

TEST_CASE("nccl: the next run works after one that failed") {
  mega::run_gpus(2, [](NcclComm& comm) {
    Stream stream;
    Buffer<float> x(stream, {1.0F + static_cast<float>(comm.rank())});
    comm.all_reduce(stream, x.device(), Reduce::sum);
    CHECK(x.fetch(stream)[0] == 3.0F);
  });
  CHECK_THROWS_WITH_AS(mega::run_gpus(1000, [](NcclComm&) {}), doctest::Contains("not 1000"),
                       mega::Error);
}
