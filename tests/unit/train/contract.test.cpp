// The core contract: one stage, every pipeline, every device of the host, the same bits.
#include "../../support/run_residual.hpp"
#include <mega/dpp/traversal.hpp>
#include <mega/host/host_async.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

using namespace mega_test;
using mega::dpp::BFC;
using mega::dpp::DFC;
using mega::dpp::GPipe;
using mega::dpp::GroupSize;
using mega::dpp::OneForwardOneBackward;
using mega::dpp::ScheduleTraversal;

namespace {

const auto on_host = [](int) { return mega::Host{}; };

/// The same training, written without the library: double precision, whole batch at once.
struct PlainReference {
  std::vector<double> losses, norms;
  std::vector<std::vector<double>> tensors;

  explicit PlainReference(const RunSettings& s, const RunOutcome& start) {
    const auto n = static_cast<std::size_t>(s.shape.width);
    const auto rows = static_cast<std::size_t>(s.shape.rows * s.global_microbatches);
    for (int l = 0; l < s.shape.layers; ++l) {
      for (const char* kind : {".weight", ".bias"}) {
        const auto& v = start.values.at("layer." + std::to_string(l) + kind);
        tensors.emplace_back(v.begin(), v.end());
      }
    }
    std::vector<std::vector<double>> m(tensors.size()), v(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i)
      m[i].resize(tensors[i].size()), v[i].resize(tensors[i].size());
    for (int step = 1; step <= s.steps; ++step) {
      std::vector<std::vector<double>> x(1), t;
      for (std::size_t i = 0; i < rows * n; ++i)
        x[0].push_back(sample(static_cast<Index>(i)).first);
      for (std::size_t l = 0; l < tensors.size() / 2; ++l) {
        t.emplace_back(rows * n);
        x.emplace_back(rows * n);
        for (std::size_t r = 0; r < rows; ++r) {
          for (std::size_t c = 0; c < n; ++c) {
            double z = 0;
            for (std::size_t k = 0; k < n; ++k) z += x[l][r * n + k] * tensors[2 * l][k * n + c];
            t[l][r * n + c] = std::tanh(z);
            x[l + 1][r * n + c] = x[l][r * n + c] + t[l][r * n + c] + tensors[2 * l + 1][c];
          }
        }
      }
      std::vector<double> d(rows * n);
      double loss = 0;
      for (std::size_t i = 0; i < rows * n; ++i) {
        const double e = x.back()[i] - sample(static_cast<Index>(i)).second;
        loss += 0.5 * e * e;
        d[i] = e / static_cast<double>(rows * n);
      }
      losses.push_back(loss / static_cast<double>(rows * n));
      std::vector<std::vector<double>> g;
      for (const auto& tensor : tensors) g.emplace_back(tensor.size());
      for (std::size_t l = tensors.size() / 2; l-- > 0;) {
        std::vector<double> before = d;
        for (std::size_t r = 0; r < rows; ++r) {
          for (std::size_t c = 0; c < n; ++c) {
            const double dz = d[r * n + c] * (1 - t[l][r * n + c] * t[l][r * n + c]);
            g[2 * l + 1][c] += d[r * n + c];
            for (std::size_t k = 0; k < n; ++k) {
              g[2 * l][k * n + c] += x[l][r * n + k] * dz;
              before[r * n + k] += dz * tensors[2 * l][k * n + c];
            }
          }
        }
        d = before;
      }
      double squares = 0;
      for (const auto& tensor : g) {
        for (const double value : tensor) squares += value * value;
      }
      norms.push_back(std::sqrt(squares));
      const double scale = std::min(1.0, s.clip / (norms.back() + 1e-6));
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        for (std::size_t j = 0; j < tensors[i].size(); ++j) {
          const double grad = g[i][j] * scale;
          m[i][j] = 0.9 * m[i][j] + 0.1 * grad;
          v[i][j] = 0.95 * v[i][j] + 0.05 * grad * grad;
          if (i % 2 == 0) tensors[i][j] *= 1 - 0.02 * 0.1;
          tensors[i][j] -= 0.02 * (m[i][j] / (1 - std::pow(0.9, step))) /
                           (std::sqrt(v[i][j] / (1 - std::pow(0.95, step))) + 1e-8);
        }
      }
    }
  }
};

}  // namespace

TEST_CASE("train: one rank agrees with a plain double-precision training") {
  RunSettings s;
  RunSettings untrained = s;
  untrained.steps = 0;
  const PlainReference plain(s, run_host(untrained));
  const RunOutcome one = run_host(s);
  for (std::size_t i = 0; i < plain.losses.size(); ++i) {
    // fp32 sums of at most 90 terms against double
    CHECK(one.losses[i] == doctest::Approx(plain.losses[i]).epsilon(2e-6));
    CHECK(one.norms[i] == doctest::Approx(plain.norms[i]).epsilon(2e-6));
  }
  CHECK(plain.norms[0] > s.clip);  // so that clipping is in the comparison
  for (std::size_t l = 0; l < 4; ++l) {
    const auto& weight = one.values.at("layer." + std::to_string(l) + ".weight");
    for (std::size_t i = 0; i < weight.size(); ++i)
      CHECK(weight[i] == doctest::Approx(plain.tensors[2 * l][i]).epsilon(1e-4));
  }
}

TEST_CASE("train: every pipeline depth, traversal and backward form gives the bits of one rank") {
  RunSettings s;
  s.global_microbatches = 7;  // no multiple of any depth
  const RunOutcome reference = run_host(s);
  REQUIRE(reference.losses.size() == 3);
  CHECK(reference.losses[2] < reference.losses[0]);
  for (const int pipeline : {1, 2, 4}) {
    for (const int chunks : {1, 2, 3}) {
      CAPTURE(pipeline);
      CAPTURE(chunks);
      s.mesh.pipeline = pipeline;
      s.chunks = chunks;
      CHECK(run_residual(s, on_host, ScheduleTraversal<BFC>{}) == reference);
      CHECK(run_residual(s, on_host, ScheduleTraversal<DFC>{}) == reference);
      CHECK(run_residual(s, on_host, GPipe{}) == reference);
      CHECK(run_residual<false>(s, on_host, ScheduleTraversal<DFC>{}) == reference);
      CHECK(run_residual(s, on_host, ScheduleTraversal<GroupSize>{{5}}) == reference);
      if (chunks == 1) CHECK(run_residual(s, on_host, OneForwardOneBackward{}) == reference);
    }
  }
}

TEST_CASE("train: fewer micro-batches than stages, and one") {
  RunSettings s;
  for (const int microbatches : {1, 2, 3}) {
    s.mesh = {};
    s.chunks = 1;
    s.global_microbatches = microbatches;
    const RunOutcome reference = run_host(s);
    for (const int chunks : {1, 2}) {
      s.mesh.pipeline = 4;
      s.chunks = chunks;
      CHECK(run_residual(s, on_host, ScheduleTraversal<BFC>{}) == reference);
      CHECK(run_residual(s, on_host, ScheduleTraversal<DFC>{}) == reference);
    }
  }
}

TEST_CASE("train: tied first and last layers stay one parameter wherever they live") {
  RunSettings s;
  s.shape.tied = true;
  const RunOutcome reference = run_host(s);
  CHECK(reference.values.at("layer.3.weight") == reference.values.at("layer.0.weight"));
  for (const int pipeline : {2, 4}) {
    for (const int chunks : {1, 2}) {
      s.mesh.pipeline = pipeline;
      s.chunks = chunks;
      RunOutcome run = run_residual(s, on_host, ScheduleTraversal<BFC>{});
      CHECK(run.values == reference.values);
      CHECK(run.losses == reference.losses);
      CHECK(run.norms == reference.norms);
    }
  }
}

TEST_CASE("train: data parallelism and the sharded optimizer") {
  RunSettings s;
  const RunOutcome reference = run_host(s);
  for (const int data : {2, 3}) {
    for (const bool tied : {false, true}) {
      RunSettings t = s;
      t.shape.tied = tied;
      const RunOutcome one = run_host(t);
      t.mesh.data = data;
      const RunOutcome replicated = run_host(t);
      t.shard_optimizer = true;
      const RunOutcome sharded = run_host(t);
      // The same pieces are summed in the same order, so sharding changes no bit.
      CHECK(sharded == replicated);
      t.mesh.pipeline = 2;
      const RunOutcome pipelined = run_host(t);
      for (const auto& [name, values] : one.values) {
        CAPTURE(name);
        const auto& other = replicated.values.at(name);
        const auto& deep = pipelined.values.at(name);
        double difference = 0, norm = 0, deeper = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
          difference += std::pow(values[i] - other[i], 2);
          deeper += std::pow(values[i] - deep[i], 2);
          norm += std::pow(values[i], 2);
        }
        CHECK(std::sqrt(difference / norm) < 1e-5);
        CHECK(std::sqrt(deeper / norm) < 1e-5);
      }
      CHECK(replicated.losses[0] == doctest::Approx(one.losses[0]).epsilon(1e-7));
    }
  }
  CHECK(reference.values.size() == 8);
}

TEST_CASE("train: queues with random delays change no bit") {
  RunSettings s;
  s.steps = 2;
  s.mesh.data = 1;
  const RunOutcome reference = run_host(s);
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    const auto late = [&](int rank) {
      return mega::HostAsync(seed * 100 + static_cast<std::uint64_t>(rank), 100);
    };
    for (const int pipeline : {1, 2, 4}) {
      for (const int chunks : {1, 2}) {
        CAPTURE(seed);
        CAPTURE(pipeline);
        CAPTURE(chunks);
        s.mesh.pipeline = pipeline;
        s.chunks = chunks;
        CHECK(run_residual<true, mega::HostAsync>(s, late, ScheduleTraversal<BFC>{}) == reference);
        CHECK(run_residual<false, mega::HostAsync>(s, late, ScheduleTraversal<DFC>{}) == reference);
      }
    }
  }
}

TEST_CASE("train: a layout that cannot run is refused in one sentence") {
  const auto sentence_of = [](const auto& run) -> std::string {
    try {
      run();
    } catch (const mega::Error& e) {
      CHECK(e.code() == mega::ErrorCode::usage);
      return e.what();
    }
    return "accepted";
  };
  RunSettings s;
  s.mesh.pipeline = 2;
  CHECK(sentence_of([&] { run_residual(s, on_host, ScheduleTraversal<GroupSize>{{9}}); }) ==
        "accepted");
  s.chunks = 2;
  CHECK(sentence_of([&] {
          run_residual(s, on_host, ScheduleTraversal<GroupSize>{{9}});
        }).find("nearest valid one is 6") != std::string::npos);
  CHECK(sentence_of([&] {
          run_residual(s, on_host, OneForwardOneBackward{});
        }).find("1F1B runs 1 chunk") != std::string::npos);
  s.global_microbatches = 0;
  CHECK(sentence_of([&] { run_host(s); }).find("0 micro-batches") != std::string::npos);
}
