// The ring between a recording thread and the one that drains it.
#include <mega/scan/ring.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <thread>

using mega::scan::SpscRing;

TEST_CASE("scan: a ring gives back in order what it took, and refuses when it is full") {
  SpscRing<int> ring(3);
  CHECK(ring.capacity() == 4);
  int out = -1;
  CHECK_FALSE(ring.pop(out));
  CHECK(ring.front() == nullptr);
  CHECK(out == -1);
  // Around the end of the memory several times.
  int next_in = 0, next_out = 0;
  for (int round = 0; round < 7; ++round) {
    while (ring.push(next_in)) ++next_in;
    CHECK(next_in - next_out == 4);
    for (int k = 0; k < 3; ++k) {
      REQUIRE(ring.front() != nullptr);
      CHECK(*ring.front() == next_out);
      REQUIRE(ring.pop(out));
      CHECK(out == next_out++);
    }
  }
  CHECK(SpscRing<int>(0).capacity() == 2);
}

TEST_CASE("scan: two threads exchange a million values through a small ring, none lost or torn") {
  struct Value {
    std::uint64_t a, b, c;
  };
  SpscRing<Value> ring(64);
  constexpr std::uint64_t count = 1'000'000;
  std::thread producer([&] {
    for (std::uint64_t i = 0; i < count;) {
      if (ring.push({i, ~i, i * 3}))
        ++i;
      else
        std::this_thread::yield();
    }
  });
  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < count;) {
    Value v{};
    if (!ring.pop(v)) {
      std::this_thread::yield();
      continue;
    }
    wrong += v.a != i || v.b != ~i || v.c != i * 3 ? 1 : 0;
    ++i;
  }
  producer.join();
  CHECK(wrong == 0);
  Value rest{};
  CHECK_FALSE(ring.pop(rest));
}
