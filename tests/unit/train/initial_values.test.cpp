#include <mega/train/initial_values.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

using mega::Index;
using mega::Parameter;
using mega::Vector;

namespace {
std::vector<float> values(const Parameter& p, int position, int degree, std::uint64_t seed = 3) {
  std::vector<float> out(static_cast<std::size_t>(mega::local_size(p, degree)), 99.0F);
  mega::train::initialise(p, seed, position, degree,
                          Vector<float>(out.data(), static_cast<Index>(out.size())));
  return out;
}
}  // namespace

TEST_CASE("train: a shard holds the numbers of the whole tensor, padding is zero") {
  const Parameter p{.name = "packed",
                    .shape = {13, 6},
                    .shard = {0, {8, 5}},
                    .init = {mega::Init::Kind::normal, 0.02F}};
  const std::vector<float> whole = values(p, 0, 1);
  for (int position = 0; position < 2; ++position) {
    const std::vector<float> part = values(p, position, 2);
    std::vector<bool> set(part.size(), false);
    for (const auto& run : mega::shard_runs(p, position, 2)) {
      for (Index i = 0; i < run.count; ++i) {
        CHECK(part[static_cast<std::size_t>(run.local + i)] ==
              whole[static_cast<std::size_t>(run.global + i)]);
        set[static_cast<std::size_t>(run.local + i)] = true;
      }
    }
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (!set[i]) CHECK(part[i] == 0.0F);
    }
  }
}

TEST_CASE("train: normal values have the asked deviation; name and seed change them") {
  Parameter p{.name = "w", .shape = {100000}, .init = {mega::Init::Kind::normal, 0.5F}};
  const std::vector<float> a = values(p, 0, 1);
  double sum = 0, squares = 0, fourth = 0;
  for (const float x : a) sum += x, squares += std::pow(x, 2), fourth += std::pow(x, 4);
  const double n = static_cast<double>(a.size());
  CHECK(std::abs(sum / n) < 5 * 0.5 / std::sqrt(n));
  CHECK(squares / n == doctest::Approx(0.25).epsilon(0.03));
  CHECK(fourth / n == doctest::Approx(3 * 0.0625).epsilon(0.06));
  CHECK(values(p, 0, 1, 4) != a);
  p.name = "v";
  CHECK(values(p, 0, 1) != a);
  p.tied_to = "w";
  CHECK(values(p, 0, 1) == a);
  p.init = {mega::Init::Kind::ones};
  CHECK(values(p, 0, 1)[5] == 1.0F);
}
