/// @file  Tests of data/batch.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/data/batch.hpp>

#include <doctest/doctest.h>

#include <vector>

namespace data = mega::data;
using mega::ErrorCode;
using mega::Index;
using mega::tests::throws_code;

namespace {

struct CountingSource {  // token i is i
  Index tokens;
  [[nodiscard]] Index size() const { return tokens; }
  void read(Index first, std::span<std::int32_t> out) const {
    for (auto& token : out) token = static_cast<std::int32_t>(first++);
  }
};
static_assert(data::token_source<CountingSource>);

using MicroBatch = std::vector<std::int32_t>;

/// Tokens and targets of every micro-batch, dp ranks in order.
std::vector<MicroBatch> micro_batches(const CountingSource& source,
                                      const data::ShuffledWindows& windows, Index first, Index dp,
                                      Index m, Index b) {
  std::vector<MicroBatch> out;
  for (Index rank = 0; rank < dp; ++rank) {
    data::TokenBatch batch;
    batch.fill(source, windows, first, rank, dp, m, b);
    for (Index j = 0; j < m; ++j) {
      auto span = batch.input(j).span();
      MicroBatch all(span.begin(), span.end());
      span = batch.target(j).span();
      all.insert(all.end(), span.begin(), span.end());
      out.push_back(std::move(all));
    }
  }
  return out;
}

}  // namespace

TEST_CASE("batch: rows are the global samples, targets are the tokens shifted by one") {
  const CountingSource source{1000};
  const data::ShuffledWindows windows(source.size(), 6, 3);
  data::TokenBatch batch;
  const Index m = 3, b = 2, first = 24;
  for (Index rank = 0; rank < 4; ++rank) {
    batch.fill(source, windows, first, rank, 4, m, b);
    CHECK(batch.microbatches() == 3);
    CHECK(batch.micro_batch_size() == 2);
    CHECK(batch.seq_length() == 6);
    CHECK(batch.valid_targets() == 36);
    for (Index j = 0; j < m; ++j) {
      const auto tokens = batch.input(j);
      const auto targets = batch.target(j);
      REQUIRE(tokens.extent(0) == b);
      REQUIRE(tokens.extent(1) == 6);
      for (Index i = 0; i < b; ++i) {
        const Index start = windows.sample(first + (rank * m + j) * b + i);
        for (Index t = 0; t < 6; ++t) {
          CHECK(tokens(i, t) == start + t);
          CHECK(targets(i, t) == start + t + 1);
        }
      }
    }
  }
}

TEST_CASE("batch: the micro-batches do not depend on the number of dp ranks") {
  const CountingSource source{5000};
  const data::ShuffledWindows windows(source.size(), 9, 11);
  const auto one = micro_batches(source, windows, 48, 1, 12, 2);
  for (const Index dp : {2, 3, 4, 6, 12}) {
    CAPTURE(dp);
    CHECK(micro_batches(source, windows, 48, dp, 12 / dp, 2) == one);
  }
  // Another micro-batch size cuts the same global batch differently: the same rows in order.
  std::vector<std::int32_t> rows2, rows4;
  data::TokenBatch batch;
  batch.fill(source, windows, 0, 0, 1, 12, 2);
  for (Index j = 0; j < 12; ++j) {
    rows2.insert(rows2.end(), batch.input(j).span().begin(), batch.input(j).span().end());
  }
  batch.fill(source, windows, 0, 0, 1, 6, 4);
  for (Index j = 0; j < 6; ++j) {
    rows4.insert(rows4.end(), batch.input(j).span().begin(), batch.input(j).span().end());
  }
  CHECK(rows2 == rows4);
}

TEST_CASE("batch: five steps and five after a restart with other ranks are ten steps") {
  const CountingSource source{500};
  const Index batch_size = 12;  // ten steps cross an epoch of 55 windows twice
  std::vector<std::vector<MicroBatch>> whole, parts;
  {
    const data::ShuffledWindows windows(source.size(), 9, 11);
    for (Index step = 0; step < 10; ++step) {
      whole.push_back(micro_batches(source, windows, step * batch_size, 2, 3, 2));
    }
  }
  Index consumed_samples = 0;  // what a checkpoint keeps
  for (const Index dp : {3, 1}) {
    const data::ShuffledWindows windows(source.size(), 9, 11);
    for (int step = 0; step < 5; ++step, consumed_samples += batch_size) {
      parts.push_back(micro_batches(source, windows, consumed_samples, dp, 6 / dp, 2));
    }
  }
  CHECK(whole == parts);
}

TEST_CASE("batch: samples past the end are padding without targets") {
  const CountingSource source{31};  // 3 samples of 10
  const data::SequentialWindows windows(source.size(), 10);
  data::TokenBatch batch;
  Index valid = 0;
  for (Index rank = 0; rank < 2; ++rank) {
    batch.fill(source, windows, 0, rank, 2, 1, 2, windows.windows());
    valid += batch.valid_targets();
  }
  CHECK(valid == 30);
  CHECK(batch.input(0)(0, 0) == 20);
  CHECK(batch.target(0)(0, 9) == 30);
  for (Index t = 0; t < 10; ++t) {
    CHECK(batch.input(0)(1, t) == 0);
    CHECK(batch.target(0)(1, t) == data::TokenBatch::ignored_target);
  }
  batch.fill(source, windows, 8, 1, 2, 1, 2, windows.windows());
  CHECK(batch.valid_targets() == 0);
}

TEST_CASE("batch: a steady shape keeps its memory") {
  const CountingSource source{500};
  const data::ShuffledWindows windows(source.size(), 9, 11);
  data::TokenBatch batch;
  batch.fill(source, windows, 0, 0, 1, 4, 3);
  const auto* const tokens = batch.input(0).data();
  const auto* const targets = batch.target(0).data();
  batch.fill(source, windows, 12, 0, 1, 4, 3);
  CHECK(batch.input(0).data() == tokens);
  CHECK(batch.target(0).data() == targets);
}

TEST_CASE("batch: impossible shapes are refused") {
  const CountingSource source{500};
  const data::ShuffledWindows windows(source.size(), 9, 11);
  data::TokenBatch batch;
  const auto refused = [&](Index rank, Index dp, Index m, Index b) {
    return throws_code(ErrorCode::usage, [&] { batch.fill(source, windows, 0, rank, dp, m, b); });
  };
  CHECK(refused(0, 0, 1, 1));
  CHECK(refused(1, 1, 1, 1));
  CHECK(refused(-1, 1, 1, 1));
  CHECK(refused(0, 1, 0, 1));
  CHECK(refused(0, 1, 1, 0));
  CHECK(throws_code(ErrorCode::logic, [&] { batch.fill(source, windows, -1, 0, 1, 1, 1); }));
}
