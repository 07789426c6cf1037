// DeviceThreadComm on one GPU: collectives against the canonical tree on the host, order on the
// streams, channels, split, and how runs fail.
#include "tests/support/device_buffer.hpp"
#include <mega/comm/device_thread.cuh>
#include <mega/comm/thread.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/storage.hpp>
#include <mega/host/stream.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using mega::DeviceThreadComm;
using mega::Index;
using mega::Vector;
using mega::comm::Reduce;
using mega::cuda::Stream;
template <class T>
using Buffer = support::DeviceBuffer<T>;

/// Eight of them add up to a number that Float16 holds.
template <class T>
std::vector<T> values(int rank, Index n) {
  const mega::RandomKey key{.seed = 3, .use = mega::RandomUse::test};
  std::vector<T> out;
  for (Index i = 0; i < n; ++i)
    out.push_back(static_cast<T>(static_cast<double>(key.bits(64 * i + rank)) / 655370.0 - 3000.0));
  return out;
}

template <class T>
std::vector<T> piece(const std::vector<T>& v, int k, Index n) {
  return std::vector<T>(v.begin() + k * n, v.begin() + (k + 1) * n);
}
template <class T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

/// The inputs of all ranks, `ranks` pieces of n elements each, and their reductions.
template <class T>
struct Inputs {
  Inputs(int r, Index elements) : ranks(r), n(elements) {
    for (int rank = 0; rank < ranks; ++rank) in.push_back(values<T>(rank, ranks * n));
    for (std::size_t i = 0; i < in[0].size(); ++i) {
      sum.push_back(tree(i, [](T a, T b) { return static_cast<T>(a + b); }));
      max.push_back(tree(i, [](T a, T b) { return std::max(a, b); }));
    }
  }
  template <class Combine>
  [[nodiscard]] T tree(std::size_t i, const Combine& combine) const {
    return mega::comm::tree_reduce(
        0, ranks, [&](int rank) { return in[static_cast<std::size_t>(rank)][i]; }, combine);
  }
  [[nodiscard]] const std::vector<T>& of(int rank) const {
    return in[static_cast<std::size_t>(rank)];
  }
  int ranks;
  Index n;
  std::vector<std::vector<T>> in;
  std::vector<T> sum, max;
};

template <class T>
void check_reductions(DeviceThreadComm& comm, Stream& stream, const Inputs<T>& inputs) {
  const int me = comm.rank();
  const Index n = inputs.n;
  const std::vector<T>& mine = inputs.of(me);
  for (const Reduce reduce : {Reduce::sum, Reduce::max}) {
    const std::vector<T>& expected = reduce == Reduce::sum ? inputs.sum : inputs.max;
    Buffer<T> all(stream, mine);
    comm.all_reduce(stream, all.device(), reduce);
    CHECK((all.fetch(stream) == expected));
    // One element past a border of 16 bytes, with neighbours that stay.
    std::vector<T> framed{T{7}};
    append(framed, mine);
    framed.push_back(T{8});
    Buffer<T> shifted(stream, framed);
    comm.all_reduce(stream, shifted.device().slice(1, static_cast<Index>(mine.size())), reduce);
    std::copy(expected.begin(), expected.end(), framed.begin() + 1);
    CHECK((shifted.fetch(stream) == framed));
    Buffer<T> whole(stream, mine), out(n);
    comm.reduce_scatter(stream, out.device(), whole.device(), reduce);
    CHECK((out.fetch(stream) == piece(expected, me, n)));
    CHECK((whole.fetch(stream) == mine));
    // In place.
    comm.reduce_scatter(stream, whole.device().slice(me * n, n), whole.device(), reduce);
    std::vector<T> scattered = mine;
    std::copy_n(expected.begin() + me * n, n, scattered.begin() + me * n);
    CHECK((whole.fetch(stream) == scattered));
  }
}

template <class T>
void check_copies(DeviceThreadComm& comm, Stream& stream, const Inputs<T>& inputs) {
  const int me = comm.rank();
  const Index n = inputs.n;
  const std::vector<T>& mine = inputs.of(me);
  std::vector<T> pieces, exchanged;
  for (int rank = 0; rank < comm.size(); ++rank) {
    append(pieces, piece(inputs.of(rank), rank, n));
    append(exchanged, piece(inputs.of(rank), me, n));
  }
  Buffer<T> part(stream, piece(mine, me, n)), gathered(comm.size() * n);
  comm.all_gather(stream, gathered.device(), part.device());
  CHECK((gathered.fetch(stream) == pieces));
  // In place.
  Buffer<T> in_place(stream, mine);
  comm.all_gather(stream, in_place.device(), in_place.device().slice(me * n, n));
  CHECK((in_place.fetch(stream) == pieces));
  for (int root = 0; root < comm.size(); ++root) {
    Buffer<T> told(stream, mine);
    comm.broadcast(stream, told.device(), root);
    CHECK((told.fetch(stream) == inputs.of(root)));
  }
  Buffer<T> source(stream, mine), target(comm.size() * n);
  comm.all_to_all(stream, target.device(), source.device());
  CHECK((target.fetch(stream) == exchanged));
  CHECK((source.fetch(stream) == mine));
}

template <class T>
void check_collectives(int ranks, Index n) {
  const Inputs<T> inputs(ranks, n);
  mega::run_device_threads(ranks, [&](DeviceThreadComm& comm) {
    Stream stream;
    check_reductions(comm, stream, inputs);
    check_copies(comm, stream, inputs);
  });
}

/// Holds a stream back until it is opened.
struct Gate {
  static void CUDART_CB hold(void* gate) {
    auto& self = *static_cast<Gate*>(gate);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!self.open && !self.late) {
      if (std::chrono::steady_clock::now() > end) self.late = true;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  void close_on(Stream& stream) {
    mega::cuda::check(cudaLaunchHostFunc(stream.native(), hold, this), "cudaLaunchHostFunc");
  }
  std::atomic<bool> open{false};
  std::atomic<bool> late{false};  // nobody opened it: a host waited for the GPU
};

template <class Done>
void await(DeviceThreadComm& comm, const Done& done) {
  comm.poll(done, [](const std::string& when) { return "the other ranks did not come " + when; });
}

/// What ended a run and each rank of it.
template <int Ranks>
struct End {
  mega::ErrorCode code{};
  std::string text;
  std::array<std::string, Ranks> of;
  double seconds = 0;
};
template <int Ranks, class F>
End<Ranks> end_of(double deadline, const F& f) {
  End<Ranks> out;
  const auto begin = std::chrono::steady_clock::now();
  try {
    mega::run_device_threads(Ranks,
                             [&](DeviceThreadComm& comm) {
                               const auto rank = static_cast<std::size_t>(comm.rank());
                               try {
                                 f(comm);
                               } catch (const mega::Error& e) {
                                 out.of[rank] = e.what();
                                 throw;
                               }
                             },
                             {.deadline = mega::comm::Seconds(deadline)});
  } catch (const mega::Error& e) {
    out.code = e.code();
    out.text = e.what();
  }
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("after %.1f s: %s\n", out.seconds, out.text.c_str());
  std::fflush(stdout);
  return out;
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("device threads: collectives give the canonical tree bit for bit") {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const Index n : {Index{0}, Index{1}, Index{7}, Index{1000}, Index{100003}}) {
      CAPTURE(ranks);
      CAPTURE(n);
      check_collectives<float>(ranks, n);
      check_collectives<double>(ranks, n);
      check_collectives<mega::Bfloat16>(ranks, n);
      check_collectives<mega::Float16>(ranks, n);
      check_collectives<std::int32_t>(ranks, n);
      check_collectives<std::int64_t>(ranks, n);
    }
  }
}

TEST_CASE("device threads: bytes, of any number") {
  for (const int ranks : {2, 3}) {
    for (const Index n : {Index{0}, Index{1}, Index{16}, Index{333}}) {
      std::vector<std::vector<std::byte>> in;
      for (int rank = 0; rank < ranks; ++rank) {
        std::vector<std::byte> mine;
        for (Index i = 0; i < n; ++i) mine.push_back(static_cast<std::byte>(37 * rank + i));
        in.push_back(mine);
      }
      mega::run_device_threads(ranks, [&](DeviceThreadComm& comm) {
        Stream stream;
        Buffer<std::byte> mine(stream, in[static_cast<std::size_t>(comm.rank())]);
        Buffer<std::byte> all(ranks * n);
        comm.all_gather(stream, all.device(), mine.device());
        std::vector<std::byte> expected;
        for (const auto& part : in) append(expected, part);
        CHECK((all.fetch(stream) == expected));
        comm.broadcast(stream, mine.device(), ranks - 1);
        CHECK((mine.fetch(stream) == in.back()));
      });
    }
  }
}

TEST_CASE("device threads: sums have the bits of ThreadComm, and no other order has them") {
  for (const int ranks : {5, 8, 13}) {
    CAPTURE(ranks);
    const Index n = 4099;
    std::vector<std::vector<float>> host(static_cast<std::size_t>(ranks)), device(host);
    std::vector<float> serial(static_cast<std::size_t>(n), 0.0F);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<float> mine = values<float>(rank, n);
      for (std::size_t i = 0; i < mine.size(); ++i) serial[i] += mine[i];
    }
    mega::run_threads(ranks, [&](mega::ThreadComm& comm) {
      mega::host::Stream stream;
      std::vector<float> mine = values<float>(comm.rank(), n);
      comm.all_reduce(stream, Vector<float>(mine.data(), n), Reduce::sum);
      host[static_cast<std::size_t>(comm.rank())] = mine;
    });
    mega::run_device_threads(ranks, [&](DeviceThreadComm& comm) {
      Stream stream;
      Buffer<float> mine(stream, values<float>(comm.rank(), n));
      comm.all_reduce(stream, mine.device(), Reduce::sum);
      device[static_cast<std::size_t>(comm.rank())] = mine.fetch(stream);
    });
    CHECK((device == host));
    CHECK((device[0] != serial));
  }
}

TEST_CASE("device threads: a NaN wins every max") {
  mega::run_device_threads(3, [](DeviceThreadComm& comm) {
    Stream stream;
    for (int who = 0; who < 3; ++who) {
      const float mine = comm.rank() == who ? std::numeric_limits<float>::quiet_NaN() : 2.0F;
      Buffer<float> x(stream, std::vector<float>(5, mine));
      comm.all_reduce(stream, x.device(), Reduce::max);
      for (const float v : x.fetch(stream)) CHECK(std::isnan(v));
    }
  });
}

TEST_CASE("device threads: a collective waits on the streams of all ranks and on no host") {
  constexpr int ranks = 3, rounds = 2 * ranks;
  constexpr Index n = 1000;
  std::array<Gate, rounds> gates;
  std::atomic<int> warm{0}, returned{0};
  mega::run_device_threads(ranks, [&](DeviceThreadComm& comm) {
    Stream stream;
    const auto fill = [&](float value) { return std::vector<float>(n, value); };
    const auto me = static_cast<float>(comm.rank());
    Buffer<float> before(stream, fill(-9.0F)), mine(stream, fill(1.0F + me));
    Buffer<float> after(stream, fill(-7.0F)), x(n), all(ranks * n);
    // Whatever CUDA loads late it loads here, since that may wait for the whole GPU.
    copy(stream, x.device(), Vector<const float>(before.device()));
    comm.all_reduce(stream, x.device(), Reduce::sum);
    comm.all_gather(stream, all.device(), mine.device());
    stream.synchronize();
    ++warm;
    await(comm, [&] { return warm == ranks; });
    for (int round = 0; round < rounds; ++round) {
      CAPTURE(round);
      Gate& gate = gates[static_cast<std::size_t>(round)];
      const bool reduces = round < ranks;
      copy(stream, x.device(), Vector<const float>(before.device()));
      if (comm.rank() == round % ranks) gate.close_on(stream);
      // What is queued before must be seen, what is queued after must not.
      copy(stream, x.device(), Vector<const float>(mine.device()));
      if (reduces) {
        comm.all_reduce(stream, x.device(), Reduce::sum);
        copy(stream, all.device().slice(0, n), Vector<const float>(x.device()));
      } else {
        comm.all_gather(stream, all.device(), x.device());
      }
      copy(stream, x.device(), Vector<const float>(after.device()));
      ++returned;
      await(comm, [&] { return returned == (round + 1) * ranks; });
      CHECK(cudaStreamQuery(stream.native()) == cudaErrorNotReady);
      (void)cudaGetLastError();
      ++warm;
      await(comm, [&] { return warm == (round + 2) * ranks; });
      gate.open = true;
      const std::vector<float>& got = all.fetch(stream);
      for (int m = 0; m < (reduces ? 1 : ranks); ++m)
        CHECK((piece(got, m, n) == fill(reduces ? 6.0F : 1.0F + static_cast<float>(m))));
      CHECK_FALSE(gate.late);
    }
  });
}

TEST_CASE("device threads: hundreds of collectives without waiting keep their order") {
  constexpr int ranks = 5, calls = 300;
  constexpr Index n = 515, ballast = 1 << 22;
  mega::run_device_threads(ranks, [&](DeviceThreadComm& comm) {
    Stream stream;
    std::vector<std::int64_t> numbers;
    for (Index i = 0; i < calls * n; ++i) numbers.push_back(i * ranks + comm.rank());
    Buffer<std::int64_t> table(stream, numbers), log(calls * n), told(n), a(ballast), b(ballast);
    for (int k = 0; k < calls; ++k) {
      // A rank that lags behind, another one each time.
      if (k * 7 % ranks == comm.rank())
        copy(stream, a.device(), Vector<const std::int64_t>(b.device()));
      const auto row = [&](const Buffer<std::int64_t>& of) { return of.device().slice(k * n, n); };
      copy(stream, told.device(), Vector<const std::int64_t>(row(table)));
      comm.broadcast(stream, told.device(), k % ranks);
      copy(stream, row(log), Vector<const std::int64_t>(told.device()));
    }
    const auto& got = log.fetch(stream);
    Index wrong = 0;
    for (Index i = 0; i < calls * n; ++i)
      wrong += got[static_cast<std::size_t>(i)] != i * ranks + i / n % ranks ? 1 : 0;
    CHECK(wrong == 0);
  });
}

TEST_CASE("device threads: a barrier holds every stream until all have come") {
  Gate gate;
  std::atomic<int> warm{0}, returned{0};
  mega::run_device_threads(2, [&](DeviceThreadComm& comm) {
    Stream stream;
    comm.barrier(stream);
    stream.synchronize();
    ++warm;
    await(comm, [&] { return warm == 2; });
    if (comm.rank() == 1) gate.close_on(stream);
    comm.barrier(stream);
    ++returned;
    await(comm, [&] { return returned == 2; });
    if (comm.rank() == 0) {
      CHECK(cudaStreamQuery(stream.native()) == cudaErrorNotReady);
      (void)cudaGetLastError();
      gate.open = true;
    }
    stream.synchronize();
    CHECK(gate.open);
    CHECK_FALSE(gate.late);
  });
}

TEST_CASE("device threads: split orders by key, and a negative color is alone") {
  mega::run_device_threads(8, [](DeviceThreadComm& comm) {
    Stream stream;
    const int me = comm.rank();
    DeviceThreadComm pair = comm.split(me / 2, -me);
    CHECK(pair.size() == 2);
    CHECK(pair.rank() == 1 - me % 2);
    CHECK(pair.global_rank() == me);
    Buffer<std::int64_t> told(stream, {me + 40});
    pair.broadcast(stream, told.device(), 0);
    CHECK(told.fetch(stream)[0] == (me / 2) * 2 + 41);
    DeviceThreadComm four = comm.split(me % 2, me);
    CHECK(four.size() == 4);
    CHECK(four.rank() == me / 2);
    Buffer<std::int64_t> x(stream, {me});
    four.all_reduce(stream, x.device(), Reduce::sum);
    CHECK(x.fetch(stream)[0] == (me % 2 == 0 ? 0 + 2 + 4 + 6 : 1 + 3 + 5 + 7));
    DeviceThreadComm alone = comm.split(me == 3 ? 0 : -1, 0);
    CHECK(alone.size() == 1);
    CHECK(alone.rank() == 0);
    Buffer<float> same(stream, {1.5F, 2.5F}), copied(2);
    alone.all_reduce(stream, same.device(), Reduce::sum);
    alone.barrier(stream);
    CHECK((same.fetch(stream) == std::vector<float>{1.5F, 2.5F}));
    alone.all_to_all(stream, copied.device(), same.device());
    CHECK((copied.fetch(stream) == same.host));
    // The first communicator still works, and so does one that was moved.
    DeviceThreadComm moved = std::move(pair);
    moved.all_reduce(stream, x.device(), Reduce::max);
    comm.all_reduce(stream, x.device(), Reduce::sum);
    CHECK(x.fetch(stream)[0] == 8 * 16);
  });
}

TEST_CASE("device threads: channels around a ring, several slots ahead") {
  constexpr Index words = 100003;
  constexpr int ranks = 8, messages = 24, slots = 3;
  mega::run_device_threads(ranks, [&](DeviceThreadComm& comm) {
    const int me = comm.rank(), from = (me + ranks - 1) % ranks;
    Stream out, in;
    Buffer<std::int32_t> slot_memory(slots * words), got(messages * words);
    std::vector<std::int32_t> numbers;
    for (Index i = 0; i < messages * words; ++i)
      numbers.push_back(static_cast<std::int32_t>(i * ranks) + me);
    Buffer<std::int32_t> sent(out, numbers);
    // Work that keeps receivers far behind, so that a sender that did not wait for a free slot
    // would overwrite messages that nobody has read.
    Buffer<std::int32_t> a(1 << 22), b(1 << 22);
    auto sender = comm.open_sender((me + 1) % ranks, 5);
    auto receiver = comm.open_receiver(from, 5);
    const auto bytes = [](Vector<std::int32_t> v) {
      return Vector<std::byte>(reinterpret_cast<std::byte*>(v.data()), v.size() * 4);
    };
    const auto slot = [&](int k) { return slot_memory.device().slice(k % slots * words, words); };
    for (int k = 0; k < slots; ++k) receiver.post(in, bytes(slot(k)));
    for (int k = 0; k < messages; ++k) {
      sender.send(out, Vector<const std::byte>(bytes(sent.device().slice(k * words, words))));
      receiver.complete(in);
      copy(in, a.device(), Vector<const std::int32_t>(b.device()));
      copy(in, got.device().slice(k * words, words), Vector<const std::int32_t>(slot(k)));
      if (k + slots < messages) receiver.post(in, bytes(slot(k)));
    }
    out.synchronize();
    const auto& received = got.fetch(in);
    Index wrong = 0;
    for (Index i = 0; i < messages * words; ++i)
      wrong += received[static_cast<std::size_t>(i)] != static_cast<std::int32_t>(i * ranks) + from
                   ? 1
                   : 0;
    CHECK(wrong == 0);

    // To itself.
    auto to_me = comm.open_sender(me, 9);
    auto from_me = comm.open_receiver(me, 9);
    CHECK_THROWS_WITH_AS(to_me.send(out, Vector<const std::byte>(bytes(slot(0)))),
                         doctest::Contains("only one that could"), mega::Error);
    from_me.post(in, bytes(slot(1)));
    to_me.send(out, Vector<const std::byte>(bytes(slot(0))));
    from_me.complete(in);
    CHECK_THROWS_AS(from_me.complete(in), mega::Error);
    in.synchronize();
  });
}

TEST_CASE("device threads: the state of a channel is that of the GPU, not of the host") {
  Gate slot_gate, message_gate;
  std::atomic<int> warm{0};
  std::atomic<bool> posted{false}, sent{false}, looked{false};
  mega::run_device_threads(2, [&](DeviceThreadComm& comm) {
    Stream stream;
    Buffer<std::int32_t> x(stream, {comm.rank() + 5}), y(1);
    copy(stream, y.device(), Vector<const std::int32_t>(x.device()));
    stream.synchronize();
    // Nobody allocates while a gate is closed, since that may wait for the whole GPU.
    ++warm;
    await(comm, [&] { return warm == 2; });
    if (comm.rank() == 0) {
      auto sender = comm.open_sender(1, 0);
      CHECK_FALSE(sender.can_send());
      await(comm, [&] { return posted.load(); });
      CHECK_FALSE(sender.can_send());  // posted, but the receiver's stream still uses the slot
      slot_gate.open = true;
      await(comm, [&] { return sender.can_send(); });
      message_gate.close_on(stream);
      sender.send(stream, Vector<const std::byte>(x.bytes()));
      CHECK_FALSE(sender.can_send());
      sent = true;
      await(comm, [&] { return looked.load(); });
      message_gate.open = true;
      stream.synchronize();
    } else {
      auto receiver = comm.open_receiver(0, 0);
      slot_gate.close_on(stream);
      receiver.post(stream, x.bytes());
      posted = true;
      await(comm, [&] { return sent.load(); });
      CHECK_FALSE(receiver.ready());  // queued, but the sender's stream has not come to it
      looked = true;
      await(comm, [&] { return receiver.ready(); });
      receiver.complete(stream);
      CHECK(x.fetch(stream)[0] == 5);
    }
    CHECK_FALSE(slot_gate.late);
    CHECK_FALSE(message_gate.late);
  });
}

TEST_CASE("device threads: a rank that throws ends the others at once") {
  for (const bool by_channel : {false, true}) {
    CAPTURE(by_channel);
    const auto end = end_of<3>(30, [&](DeviceThreadComm& comm) {
      Stream stream;
      Buffer<float> x(1000), y(1000);
      auto sender = comm.open_sender((comm.rank() + 1) % 3, 1);
      auto receiver = comm.open_receiver((comm.rank() + 2) % 3, 1);
      receiver.post(stream, y.bytes());
      comm.all_reduce(stream, x.device(), Reduce::sum);
      if (comm.rank() == 1) throw mega::Error(mega::ErrorCode::bad_input, "the disk is gone");
      // Rank 0 sends to the rank that throws, whether its slot is still there or not.
      if (by_channel) {
        while (true) {
          sender.send(stream, Vector<const std::byte>(x.bytes()));
          receiver.complete(stream);
          receiver.post(stream, y.bytes());
        }
      } else {
        comm.all_reduce(stream, x.device(), Reduce::sum);
      }
    });
    CHECK(end.code == mega::ErrorCode::bad_input);
    CHECK(end.text == end.of[1]);
    CHECK(has(end.text, "the disk is gone"));
    for (const std::size_t other : {0, 2}) {
      CAPTURE(other);
      CHECK(has(end.of[other], "rank 1 failed: "));
      CHECK(has(end.of[other], "the disk is gone"));
    }
    CHECK(end.seconds < 15);
  }
}

TEST_CASE("device threads: a rank that does not come is named after the deadline") {
  const auto end = end_of<3>(1, [](DeviceThreadComm& comm) {
    Stream stream;
    Buffer<float> x(1000);
    comm.all_reduce(stream, x.device(), Reduce::sum);
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    comm.all_reduce(stream, x.device(), Reduce::max);
  });
  CHECK(end.code == mega::ErrorCode::timeout);
  for (const std::string& text : end.of) {
    CHECK(has(text,
              "all_reduce(max) #2 with 1000 float on communicator world of ranks 0,1,2: rank 1 did "
              "not arrive within 1 s"));
  }
  CHECK(end.seconds < 15);
}

TEST_CASE("device threads: ranks that call different collectives are all told so") {
  const auto end = end_of<3>(30, [](DeviceThreadComm& comm) {
    Stream stream;
    Buffer<float> x(1000);
    DeviceThreadComm named = comm.split(0, 0);
    named.set_name("tp");
    named.all_reduce(stream, x.device(), Reduce::sum);
    named.all_reduce(stream, x.device().slice(0, comm.rank() == 1 ? 999 : 1000), Reduce::sum);
  });
  CHECK(end.code == mega::ErrorCode::peer_failed);
  for (const std::string& text : end.of) {
    CHECK(has(text,
              "communicator tp of ranks 0,1,2 disagrees: ranks 0,2 called all_reduce(sum) #2 with "
              "1000 float, rank 1 called all_reduce(sum) #2 with 999 float"));
  }
  CHECK(end.seconds < 15);
}

TEST_CASE("device threads: buffers that do not fit are refused before anybody meets") {
  mega::run_device_threads(2, [](DeviceThreadComm& comm) {
    Stream stream;
    Buffer<float> wrong(3);
    CHECK_THROWS_WITH_AS(comm.all_gather(stream, wrong.device(), wrong.device()),
                         doctest::Contains("6"), mega::Error);
    CHECK_THROWS_WITH_AS(comm.reduce_scatter(stream, wrong.device(), wrong.device(), Reduce::sum),
                         doctest::Contains("6"), mega::Error);
    CHECK_THROWS_AS(comm.all_to_all(stream, wrong.device(), wrong.device()), mega::Error);
    CHECK_THROWS_WITH_AS(comm.broadcast(stream, wrong.device(), 2), doctest::Contains("0 to 1"),
                         mega::Error);
    CHECK_THROWS_AS((void)comm.open_sender(-1, 0), mega::Error);
  });
}

TEST_CASE("device threads: channels whose slot does not fit, or never comes") {
  const auto misfit = end_of<2>(30, [](DeviceThreadComm& comm) {
    Stream stream;
    Buffer<std::byte> x(8);
    if (comm.rank() == 0) {
      comm.open_sender(1, 2).send(stream, Vector<const std::byte>(x.device()));
    } else {
      auto receiver = comm.open_receiver(0, 2);
      receiver.post(stream, x.device().slice(0, 7));
      receiver.complete(stream);
    }
  });
  for (const std::string& text : misfit.of) {
    CHECK(has(text, "channel 2 from rank 0 to rank 1: message #1 has 8 bytes, its slot has 7"));
  }
  const auto late = end_of<2>(1, [](DeviceThreadComm& comm) {
    Stream stream;
    Buffer<std::byte> x(8);
    if (comm.rank() == 0) comm.open_sender(1, 2).send(stream, Vector<const std::byte>(x.device()));
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  });
  CHECK(late.code == mega::ErrorCode::timeout);
  CHECK(has(late.text, "rank 1 posted no slot within 1 s"));
}

TEST_CASE("device threads: the next run works after one that failed") {
  mega::run_device_threads(2, [](DeviceThreadComm& comm) {
    Stream stream;
    Buffer<float> x(stream, {1.0F + static_cast<float>(comm.rank())});
    comm.all_reduce(stream, x.device(), Reduce::sum);
    CHECK(x.fetch(stream)[0] == 3.0F);
  });
  CHECK_THROWS_WITH_AS(mega::run_device_threads(65, [](DeviceThreadComm&) {}),
                       doctest::Contains("not 65"), mega::Error);
  CHECK_THROWS_WITH_AS(mega::run_device_threads(2, [](DeviceThreadComm&) {}, {.device = 1000}),
                       doctest::Contains("no GPU 1000"), mega::Error);
}
