/// @file  The laws of communicators as one suite: every model runs the same checks against a serial
/// reference. A harness has
///   static bool has(int n)          whether it can make a communicator of n ranks
///   static void run(int n, f)       calls f(comm, stream) on each rank
#pragma once
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/reduce.hpp>
#include <mega/core/view.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace laws {

using mega::Index;
using mega::Vector;
using mega::comm::Reduce;

inline constexpr int rank_counts[] = {1, 2, 3, 5, 8};
inline constexpr Index sizes[] = {0, 1, 7, 1000, 100003};
/// Where a buffer holds one such piece for each rank.
inline constexpr Index piece_sizes[] = {0, 1, 7, 1000, 20011};

/// Bits without a pattern in rank or i (the finishing steps of a hash, cheap enough for millions).
inline std::uint32_t scrambled(int rank, Index i) {
  auto x = static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15u +
           static_cast<std::uint64_t>(rank + 1) * 0xD1B54A32D192ED03u;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
  return static_cast<std::uint32_t>(x >> 32);
}

/// Element i of rank's operand. Sums of these depend on their order; all maxima over some elements
/// are negative, and now and then one is NaN.
template <class T>
T operand(int rank, Index i, Reduce reduce) {
  const std::uint32_t bits = scrambled(rank, i);
  if constexpr (std::same_as<T, std::byte>) {
    return static_cast<std::byte>(bits & 0xff);
  } else if constexpr (std::integral<T>) {
    return static_cast<T>(static_cast<std::int32_t>(bits)) / 16;
  } else if (reduce == Reduce::max) {
    if (bits % 997 == 0) return std::numeric_limits<T>::quiet_NaN();
    return -static_cast<T>(1 + bits % 1000) / 8;
  } else {
    // Beyond 2^24 (2^53) a one is lost unless it meets its like first.
    const T large = std::same_as<T, float> ? T(1e8) : T(1e16);
    const T values[] = {large, -large, T(1), T(0.1), T(-3), -large};
    return values[bits % 6];
  }
}

template <class T>
T reduced(int ranks, Index i, Reduce reduce) {
  return mega::comm::tree_reduce(
      0, ranks, [&](int rank) { return operand<T>(rank, i, reduce); },
      [&](T left, T right) -> T {
        if (reduce == Reduce::sum) return left + right;
        if constexpr (std::floating_point<T>)
          if (std::isnan(left) || std::isnan(right)) return std::numeric_limits<T>::quiet_NaN();
        return std::max(left, right);
      });
}

/// Queues the filling of `out` with this rank's operand from element `first` on.
template <class S, class T>
void queue_fill(S& stream, std::vector<T>& out, int rank, Reduce reduce, Index first = 0) {
  stream.run([&out, rank, reduce, first] {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = operand<T>(rank, first + static_cast<Index>(i), reduce);
  });
}

template <class T>
Vector<T> view(std::vector<T>& data) {
  return {data.data(), static_cast<Index>(data.size())};
}

/// How many elements differ in any bit from expected(i).
template <class T, class Expected>
int differences(Vector<const T> got, const Expected& expected) {
  int count = 0;
  for (Index i = 0; i < got.size(); ++i) {
    const T want = expected(i);
    if (std::memcmp(&got(i), &want, sizeof(T)) != 0) ++count;
  }
  return count;
}
template <class T, class Expected>
int differences(std::vector<T>& got, const Expected& expected) {
  return differences(Vector<const T>(view(got)), expected);
}

template <class Harness, class F>
void for_rank_counts(const F& f) {
  int tried = 0;
  for (const int n : rank_counts) {
    if (!Harness::has(n)) continue;
    ++tried;
    f(n);
  }
  CHECK(tried > 0);
}

template <class Harness, class T>
void all_reduce(Reduce reduce) {
  for_rank_counts<Harness>([&](int n) {
    Harness::run(n, [&](auto& comm, auto& stream) {
      REQUIRE(comm.size() == n);
      for (const Index count : sizes) {
        std::vector<T> x(static_cast<std::size_t>(count));
        queue_fill(stream, x, comm.rank(), reduce);
        comm.all_reduce(stream, view(x), reduce);
        stream.synchronize();
        CHECK(differences(x, [&](Index i) { return reduced<T>(n, i, reduce); }) == 0);
      }
    });
  });
}

template <class Harness, class T>
void reduce_scatter(Reduce reduce) {
  for_rank_counts<Harness>([&](int n) {
    Harness::run(n, [&](auto& comm, auto& stream) {
      for (const Index count : piece_sizes) {
        const Index first = comm.rank() * count;
        const auto expected = [&](Index i) { return reduced<T>(n, first + i, reduce); };
        std::vector<T> in(static_cast<std::size_t>(n * count)),
            out(static_cast<std::size_t>(count));
        queue_fill(stream, in, comm.rank(), reduce);
        comm.reduce_scatter(stream, view(out), view(in), reduce);
        const Vector<T> own = view(in).slice(first, count);
        stream.synchronize();
        CHECK(differences(out, expected) == 0);
        CHECK(differences(in, [&](Index i) { return operand<T>(comm.rank(), i, reduce); }) == 0);
        comm.reduce_scatter(stream, own, view(in), reduce);
        stream.synchronize();
        CHECK(differences(Vector<const T>(own), expected) == 0);
      }
    });
  });
}

template <class Harness, class T>
void all_gather() {
  for_rank_counts<Harness>([&](int n) {
    Harness::run(n, [&](auto& comm, auto& stream) {
      for (const Index count : piece_sizes) {
        const auto expected = [&](Index i) {
          return operand<T>(static_cast<int>(i / count), i % count, Reduce::sum);
        };
        std::vector<T> in(static_cast<std::size_t>(count)),
            out(static_cast<std::size_t>(n * count));
        std::vector<T> whole(out.size());
        queue_fill(stream, in, comm.rank(), Reduce::sum);
        comm.all_gather(stream, view(out), view(in));
        const Vector<T> own = view(whole).slice(comm.rank() * count, count);
        stream.run([own, &in] { std::copy(in.begin(), in.end(), own.data()); });
        comm.all_gather(stream, view(whole), own);
        stream.synchronize();
        CHECK(differences(out, expected) == 0);
        CHECK(differences(whole, expected) == 0);
      }
    });
  });
}

template <class Harness, class T>
void broadcast() {
  for_rank_counts<Harness>([&](int n) {
    Harness::run(n, [&](auto& comm, auto& stream) {
      for (int root = 0; root < n; ++root) {
        for (const Index count : sizes) {
          std::vector<T> x(static_cast<std::size_t>(count));
          queue_fill(stream, x, comm.rank(), Reduce::sum);
          comm.broadcast(stream, view(x), root);
          stream.synchronize();
          CHECK(differences(x, [&](Index i) { return operand<T>(root, i, Reduce::sum); }) == 0);
        }
      }
    });
  });
}

template <class Harness, class T>
void all_to_all() {
  for_rank_counts<Harness>([&](int n) {
    Harness::run(n, [&](auto& comm, auto& stream) {
      for (const Index count : piece_sizes) {
        std::vector<T> in(static_cast<std::size_t>(n * count)), out(in.size());
        queue_fill(stream, in, comm.rank(), Reduce::sum);
        comm.all_to_all(stream, view(out), view(in));
        stream.synchronize();
        CHECK(differences(out, [&](Index i) {
                return operand<T>(static_cast<int>(i / count), comm.rank() * count + i % count,
                                  Reduce::sum);
              }) == 0);
      }
    });
  });
}

/// The ranks of a communicator as its members see them, by all_gather of `value`.
template <class C, class S>
std::vector<std::int64_t> gathered(C& comm, S& stream, std::int64_t value) {
  std::vector<std::int64_t> one{value}, all(static_cast<std::size_t>(comm.size()));
  comm.all_gather(stream, view(all), view(one));
  stream.synchronize();
  return all;
}

template <class Harness>
void split() {
  for_rank_counts<Harness>([&](int n) {
    Harness::run(n, [&](auto& comm, auto& stream) {
      const int rank = comm.rank();
      // Rows and columns of a grid two wide.
      auto row = comm.split(rank / 2, rank);
      auto column = comm.split(rank % 2, rank);
      std::vector<std::int64_t> in_row, in_column;
      for (int r = 0; r < n; ++r) {
        if (r / 2 == rank / 2) in_row.push_back(r);
        if (r % 2 == rank % 2) in_column.push_back(r);
      }
      CHECK(gathered(row, stream, rank) == in_row);
      CHECK(gathered(column, stream, rank) == in_column);
      CHECK(in_row[static_cast<std::size_t>(row.rank())] == rank);
      CHECK(in_column[static_cast<std::size_t>(column.rank())] == rank);

      // Keys turn the order round; equal keys keep it.
      auto reversed = comm.split(0, -rank);
      CHECK(reversed.rank() == n - 1 - rank);
      auto halves = comm.split(5, rank % 2);
      std::vector<std::int64_t> even_first;
      for (int odd = 0; odd < 2; ++odd)
        for (int r = odd; r < n; r += 2) even_first.push_back(r);
      CHECK(gathered(halves, stream, rank) == even_first);

      // Rank 0 steps out.
      auto rest = comm.split(rank == 0 ? -1 : 3, 0);
      CHECK(rest.size() == (rank == 0 ? 1 : n - 1));
      auto again = rest.split(0, 0);
      CHECK(gathered(again, stream, rank).size() == static_cast<std::size_t>(rest.size()));
      comm.barrier(stream);
      stream.synchronize();
    });
  });
}

/// Messages of many sizes to both neighbours, `ahead` slots posted ahead, buffers reused.
template <class Harness>
void channels(int ahead) {
  for_rank_counts<Harness>([&](int n) {
    Harness::run(n, [&](auto& comm, auto& stream) {
      constexpr int messages = 24;
      constexpr Index lengths[] = {4096, 0, 1, 100003, 17};
      const int next = (comm.rank() + 1) % n, previous = (comm.rank() + n - 1) % n;
      std::vector<std::vector<std::byte>> slots(static_cast<std::size_t>(2 * messages));
      std::vector<std::byte> message;
      auto up = comm.open_sender(next, 0);
      auto down = comm.open_sender(previous, mega::comm::max_channel_id);
      auto from_previous = comm.open_receiver(previous, 0);
      auto from_next = comm.open_receiver(next, mega::comm::max_channel_id);
      const auto length = [&](int k) { return lengths[k % 5]; };
      const auto post = [&](int k) {
        for (int way = 0; way < 2; ++way) {
          auto& slot = slots[static_cast<std::size_t>(2 * k + way)];
          slot.resize(static_cast<std::size_t>(length(k)));
          (way == 0 ? from_previous : from_next).post(stream, view(slot));
        }
      };
      const auto send = [&](int k, int way) {
        stream.run([&, k, way] {
          message.resize(static_cast<std::size_t>(length(k)));
          for (std::size_t i = 0; i < message.size(); ++i)
            message[i] = operand<std::byte>(comm.rank() + 100 * k + 10000 * way,
                                            static_cast<Index>(i), Reduce::sum);
        });
        // The vector may move when it grows, so its address is settled before the send is queued.
        stream.synchronize();
        (way == 0 ? up : down).send(stream, view(message));
      };
      for (int k = 0; k < ahead; ++k) post(k);
      for (int k = 0; k < messages; ++k) {
        if (k + ahead < messages) post(k + ahead);
        send(k, 0);
        send(k, 1);
        from_previous.complete(stream);
        from_next.complete(stream);
      }
      stream.synchronize();
      for (int k = 0; k < messages; ++k) {
        for (int way = 0; way < 2; ++way) {
          const int source = way == 0 ? previous : next;
          CHECK(differences(slots[static_cast<std::size_t>(2 * k + way)], [&](Index i) {
                  return operand<std::byte>(source + 100 * k + 10000 * way, i, Reduce::sum);
                }) == 0);
        }
      }
    });
  });
}

/// What a rank can ask its channels before it uses them, with an exact answer at every point where
/// the other side cannot be under way.
template <class Harness>
void channel_queries() {
  for_rank_counts<Harness>([&](int n) {
    Harness::run(n, [&](auto& comm, auto& stream) {
      const int next = (comm.rank() + 1) % n, previous = (comm.rank() + n - 1) % n;
      auto out = comm.open_sender(next, 5);
      auto in = comm.open_receiver(previous, 5);
      const auto all_here = [&] {
        comm.barrier(stream);
        stream.synchronize();
      };
      const auto late = [](const std::string& when) { return "nothing changed " + when; };
      std::vector<std::byte> first(70), second(1), message(70, std::byte(comm.rank() + 1));
      CHECK(!out.can_send());
      CHECK(!in.ready());
      all_here();
      in.post(stream, view(first));
      in.post(stream, view(second));
      comm.poll([&] { return out.can_send(); }, late);
      CHECK(!in.ready());
      all_here();
      out.send(stream, view(message));
      stream.synchronize();
      comm.poll([&] { return out.can_send(); }, late);
      comm.poll([&] { return in.ready(); }, late);
      in.complete(stream);
      stream.synchronize();
      CHECK(first == std::vector<std::byte>(70, std::byte(previous + 1)));
      CHECK(!in.ready());
      all_here();
      out.send(stream, view(message).slice(0, 1));
      stream.synchronize();
      CHECK(!out.can_send());
      comm.poll([&] { return in.ready(); }, late);
      in.complete(stream);
      stream.synchronize();
      CHECK(!in.ready());
      all_here();
    });
  });
}

template <class Harness>
void everything() {
  SUBCASE("all_reduce") {
    all_reduce<Harness, float>(Reduce::sum);
    all_reduce<Harness, float>(Reduce::max);
    all_reduce<Harness, double>(Reduce::sum);
    all_reduce<Harness, double>(Reduce::max);
    all_reduce<Harness, std::int64_t>(Reduce::sum);
    all_reduce<Harness, std::int32_t>(Reduce::max);
  }
  SUBCASE("reduce_scatter") {
    reduce_scatter<Harness, float>(Reduce::sum);
    reduce_scatter<Harness, std::int64_t>(Reduce::max);
  }
  SUBCASE("all_gather") {
    all_gather<Harness, float>();
    all_gather<Harness, std::byte>();
  }
  SUBCASE("broadcast") {
    broadcast<Harness, double>();
    broadcast<Harness, std::byte>();
  }
  SUBCASE("all_to_all") {
    all_to_all<Harness, float>();
    all_to_all<Harness, std::int32_t>();
  }
  SUBCASE("split") {
    split<Harness>();
  }
  SUBCASE("channels, one slot ahead") {
    channels<Harness>(1);
  }
  SUBCASE("channels, five slots ahead") {
    channels<Harness>(5);
  }
  SUBCASE("channel queries") {
    channel_queries<Harness>();
  }
}

}  // namespace laws
