#include <mega/optim/learning_rate.hpp>

#include <doctest/doctest.h>

#include <limits>
#include <string>

using mega::optim::Decay;
using mega::optim::LearningRate;

TEST_CASE("optim: warm-up reaches the peak at its last step, each decay its end") {
  LearningRate r{
      .decay = Decay::cosine, .peak = 1, .minimum = 0.1, .warmup_steps = 4, .decay_steps = 14};
  CHECK(r.at(0) == 0.25);
  CHECK(r.at(3) == 1.0);
  CHECK(r.at(4) == 1.0);
  CHECK(r.at(9) == doctest::Approx(0.55));  // half way: the mean of peak and minimum
  CHECK(r.at(14) == 0.1);
  CHECK(r.at(1000000) == 0.1);
  r.decay = Decay::linear;
  CHECK(r.at(9) == doctest::Approx(0.55));
  CHECK(r.at(5) == doctest::Approx(0.91));
  r.decay = Decay::constant;
  CHECK(r.at(1000) == 1.0);
  r.decay = Decay::inverse_square_root;
  CHECK(r.at(4) == 1.0);
  CHECK(r.at(16) == doctest::Approx(0.5));
  CHECK(r.at(1000000) == 0.1);
  r.decay = Decay::warmup_stable_decay;
  r.wsd_decay_steps = 5;
  CHECK(r.at(8) == 1.0);
  CHECK(r.at(9) == 1.0);
  CHECK(r.at(10) == doctest::Approx(0.82));
  CHECK(r.at(14) == 0.1);
}

TEST_CASE("optim: impossible learning rates are refused") {
  const auto refused = [](LearningRate r) {
    try {
      mega::optim::validate(r);
    } catch (const mega::Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(refused({.peak = 1, .warmup_steps = 2, .decay_steps = 3}).empty());
  CHECK(!refused({.peak = -1, .decay_steps = 3}).empty());
  CHECK(!refused({.peak = std::numeric_limits<double>::quiet_NaN(), .decay_steps = 3}).empty());
  CHECK(!refused({.peak = 1, .minimum = 2, .decay_steps = 3}).empty());
  CHECK(!refused({.peak = 1, .warmup_steps = 3, .decay_steps = 3}).empty());
  CHECK(!refused({.peak = 1, .warmup_steps = -1, .decay_steps = 3}).empty());
  CHECK(
      refused({.decay = Decay::constant, .peak = 1, .warmup_steps = 3, .decay_steps = 1}).empty());
}
