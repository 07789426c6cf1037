#include <mega/core/arena.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <string>

TEST_CASE("core: counting and handing out agree, pieces are aligned") {
  const auto lay_out = [](mega::Arena& arena) {
    (void)arena.take<float>(3, 5);
    (void)arena.take<double>(1);
    (void)arena.take<std::byte>(0);
    return arena.take<int>(7);
  };
  mega::Arena counting;
  CHECK(lay_out(counting).data() == nullptr);
  CHECK(counting.used() == 64 + 64 + 0 + 64);
  alignas(64) std::array<std::byte, 192> block;
  mega::Arena real(block.data(), block.size());
  const auto last = lay_out(real);
  CHECK(reinterpret_cast<std::byte*>(last.data()) == block.data() + 128);
  CHECK(last.extent(0) == 7);
  CHECK(real.used() == counting.used());
}

TEST_CASE("core: a full arena refuses and says by how much, a scope gives back") {
  alignas(64) std::array<std::byte, 128> block;
  mega::Arena arena(block.data(), block.size());
  (void)arena.take<float>(16);
  {
    const mega::ArenaScope scope(arena);
    (void)arena.take<float>(16);
    CHECK(arena.used() == 128);
    try {
      (void)arena.take<float>(1);
      FAIL("took more than the arena has");
    } catch (const mega::Error& e) {
      CHECK(std::string(e.what()).find("arena of 128 bytes cannot hold 192 bytes") !=
            std::string::npos);
    }
  }
  CHECK(arena.used() == 64);
  CHECK(arena.peak() == 192);
}
