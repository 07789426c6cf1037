/// @file  Tests of data/sampler.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/data/sampler.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

namespace data = mega::data;
using mega::ErrorCode;
using mega::Index;
using mega::tests::contains;
using mega::tests::sentence_of;
using mega::tests::throws_code;

TEST_CASE("sampler: every epoch visits every window once, in an order of its own") {
  for (const Index windows : {1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 1000}) {
    CAPTURE(windows);
    const Index length = 7;
    const data::ShuffledWindows sampler(windows * length + 1, length, 42);
    REQUIRE(sampler.windows() == windows);
    std::vector<Index> before;
    for (const Index epoch : {Index{0}, Index{1}, Index{2}, Index{1} << 33}) {
      std::vector<Index> order;
      std::vector<int> seen(static_cast<std::size_t>(windows));
      for (Index i = 0; i < windows; ++i) {
        const Index first = sampler.sample(epoch * windows + i);
        REQUIRE(first % length == 0);
        REQUIRE(first >= 0);
        REQUIRE(first / length < windows);
        ++seen[static_cast<std::size_t>(first / length)];
        order.push_back(first / length);
      }
      CHECK(seen == std::vector<int>(static_cast<std::size_t>(windows), 1));
      if (windows >= 16) {
        CHECK(order != before);
        CHECK_FALSE(std::is_sorted(order.begin(), order.end()));
      }
      before = order;
    }
  }
}

TEST_CASE("sampler: seeds give different orders, one seed always the same") {
  const data::ShuffledWindows a(10'001, 10, 1), b(10'001, 10, 2), c(10'001, 10, 1);
  int equal = 0;
  for (Index i = 0; i < 1000; ++i) {
    equal += a.sample(i) == b.sample(i);
    CHECK(a.sample(i) == c.sample(i));
  }
  CHECK(equal < 12);  // 1 expected by chance; 12 or more have a probability below 1e-8
}

TEST_CASE("sampler: the permutations of three are equally likely") {
  std::map<std::array<Index, 3>, int> counts;
  const int epochs = 6000;
  for (std::uint64_t epoch = 0; epoch < epochs; ++epoch) {
    ++counts[{data::shuffled(0, 3, 9, epoch), data::shuffled(1, 3, 9, epoch),
              data::shuffled(2, 3, 9, epoch)}];
  }
  CHECK(counts.size() == 6);
  // 1000 expected with a standard deviation of 29: five of them are 145.
  for (const auto& [order, count] : counts) CHECK(std::abs(count - 1000) < 145);
}

TEST_CASE("sampler: a window's place in the epoch is uniform") {
  // Chi-square of 17 places over 17000 epochs for each of 3 windows; 16 degrees of freedom have
  // mean 16 and standard deviation 5.7, so 55 is beyond 6 of them.
  for (const Index window : {0, 8, 16}) {
    std::array<int, 17> counts{};
    for (std::uint64_t epoch = 0; epoch < 17'000; ++epoch) {
      ++counts[static_cast<std::size_t>(data::shuffled(window, 17, 3, epoch))];
    }
    double chi_square = 0;
    for (const int count : counts) chi_square += (count - 1000.0) * (count - 1000.0) / 1000.0;
    CHECK(chi_square < 55);
  }
}

TEST_CASE("sampler: any 64-bit sample number and any size") {
  constexpr Index huge = std::numeric_limits<Index>::max();
  const data::ShuffledWindows one(11, 10, 5);
  CHECK(one.sample(huge) == 0);
  const data::ShuffledWindows many(huge, 1, 5);  // 2^63 - 2 windows
  const Index first = many.sample(huge);
  CHECK(first >= 0);
  CHECK(first < huge - 1);
  CHECK(many.sample(0) != many.sample(1));
  CHECK(throws_code(ErrorCode::logic, [&] { (void)one.sample(-1); }));
  // Beyond 2^31 windows a 32-bit number would wrap.
  const data::ShuffledWindows large(Index{1} << 42, 256, 5);
  bool beyond = false;
  for (Index i = 0; i < 64; ++i) beyond = beyond || large.sample(i) > (Index{1} << 41);
  CHECK(beyond);
}

TEST_CASE("sampler: every token but the first is a target exactly once") {
  const Index tokens = 103, length = 10;
  const data::ShuffledWindows sampler(tokens, length, 8);
  CHECK(sampler.windows() == 10);
  std::vector<int> targets(static_cast<std::size_t>(tokens));
  for (Index i = 0; i < sampler.windows(); ++i) {
    for (Index t = 1; t <= length; ++t) {
      ++targets.at(static_cast<std::size_t>(sampler.sample(i) + t));
    }
  }
  CHECK(targets[0] == 0);
  CHECK(std::accumulate(targets.begin() + 1, targets.begin() + 101, 0) == 100);
  CHECK(*std::max_element(targets.begin(), targets.end()) == 1);
  CHECK(targets[101] + targets[102] == 0);
}

TEST_CASE("sampler: too little data is refused with the numbers and a fix") {
  CHECK_NOTHROW(data::SequentialWindows(11, 10));
  const auto said = sentence_of([] { data::ShuffledWindows(10, 10, 1); });
  CHECK(contains(said, "10 tokens"));
  CHECK(contains(said, "10 + 1"));
  CHECK(contains(said, "at most 9"));
  for (const Index tokens : {0, 1, 2}) {
    CHECK(throws_code(ErrorCode::bad_input, [&] { data::SequentialWindows(tokens, 10); }));
  }
  CHECK(throws_code(ErrorCode::usage, [] { data::SequentialWindows(10, 0); }));
  CHECK(throws_code(ErrorCode::usage, [] { data::SequentialWindows(10, -3); }));
}

TEST_CASE("sampler: the validation tail shares no token with training") {
  const auto split = data::split_tokens(1000, 0.1);
  CHECK(split.train == data::TokenRange{0, 900});
  CHECK(split.valid == data::TokenRange{900, 100});
  CHECK(data::split_tokens(1000, 0).valid.count == 0);
  CHECK(data::split_tokens(7, 0.5).train.count == 4);
  for (const double wrong : {-0.1, 1.0, 2.0, std::nan("")}) {
    CHECK(throws_code(ErrorCode::usage, [&] { (void)data::split_tokens(10, wrong); }));
  }
  const data::ShuffledWindows train(split.train, 8, 1);
  const data::SequentialWindows valid(split.valid, 8);
  for (Index i = 0; i < train.windows(); ++i) CHECK(train.sample(i) + 8 < 900);
  for (Index i = 0; i < valid.windows(); ++i) CHECK(valid.sample(i) == 900 + 8 * i);
  CHECK(valid.windows() == 12);
  CHECK(valid.sample(12) == 900);
  CHECK(throws_code(ErrorCode::bad_input,
                    [] { data::SequentialWindows(data::split_tokens(1000, 0.001).valid, 8); }));
}
