#include <mega/host/host.hpp>
#include <mega/host/host_async.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/optim/loss_scaling.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

using mega::Index;
using mega::LossScale;
using mega::Vector;
using mega::optim::LossScalingOptions;
using mega::optim::next_loss_scale;
using mega::optim::StepInputs;
using mega::optim::UpdateControl;

namespace {
template <class T>
Vector<T> view(std::vector<T>& v) {
  return {v.data(), static_cast<Index>(v.size())};
}
template <class T>
Vector<const T> view(const std::vector<T>& v) {
  return {v.data(), static_cast<Index>(v.size())};
}

using Double = std::numeric_limits<double>;
}  // namespace

TEST_CASE("loss scaling: the scale falls at once, rises after a run of good steps") {
  const LossScalingOptions options{
      .initial = 1024, .growth = 2, .backoff = 0.5F, .growth_interval = 3, .minimum = 256};
  LossScale s{.scale = options.initial};
  const auto step = [&](bool skipped) { return s = next_loss_scale(s, skipped, options); };
  CHECK(step(false) == LossScale{1024, 1, 0});
  CHECK(step(false) == LossScale{1024, 2, 0});
  CHECK(step(true) == LossScale{512, 0, 1});  // the run begins anew
  CHECK(step(false) == LossScale{512, 1, 1});
  CHECK(step(false) == LossScale{512, 2, 1});
  CHECK(step(false) == LossScale{1024, 0, 1});
  CHECK(step(true) == LossScale{512, 0, 2});
  CHECK(step(true) == LossScale{256, 0, 3});
  CHECK(step(true) == LossScale{256, 0, 4});  // no lower than the minimum
}

TEST_CASE("loss scaling: the scale grows as far as float reaches") {
  const LossScalingOptions options{.growth = 2, .growth_interval = 1};
  CHECK(next_loss_scale({0x1p126F, 0, 0}, false, options).scale == 0x1p127F);
  CHECK(next_loss_scale({0x1p127F, 0, 7}, false, options) == LossScale{0x1p127F, 0, 7});
}

TEST_CASE("loss scaling: norm, clipping and update are those of the loss itself") {
  mega::host::Stream stream;
  const LossScalingOptions options{.growth_interval = 2};
  const auto clip = [&](LossScale& scale, std::vector<double> squares, double max_norm) {
    std::vector<UpdateControl> control(1);
    std::vector<LossScale> scales{scale};
    mega::optim::clip_by_norm(stream, view(control), view(scales), view(std::as_const(squares)),
                              max_norm, options);
    scale = scales[0];
    return control[0];
  };
  const auto plain = [&](std::vector<double> squares, double max_norm) {
    std::vector<UpdateControl> control(1);
    mega::optim::clip_by_norm(stream, view(control), view(std::as_const(squares)), max_norm);
    return control[0];
  };
  constexpr double k = 4096;
  for (const double max_norm : {0.0, 1.0, 10.0}) {
    LossScale scale{.scale = k};
    const UpdateControl scaled = clip(scale, {9 * k * k, 16 * k * k}, max_norm);
    const UpdateControl expected = plain({9, 16}, max_norm);
    CHECK(scaled.norm == expected.norm);
    CHECK(scaled.gradient_scale * static_cast<float>(k) == expected.gradient_scale);
    CHECK(scaled.loss_scale == k);
    CHECK(scaled.skip == 0);
    CHECK(scale == LossScale{k, 1, 0});
  }
  for (const double bad : {Double::infinity(), Double::quiet_NaN()}) {
    LossScale scale{.scale = k, .good_steps = 1, .skipped_steps = 5};
    const UpdateControl control = clip(scale, {1, bad, 2}, 1);
    CHECK(control.skip == 1);
    CHECK(control.skipped_steps == 5);  // before this step
    CHECK(control.loss_scale == k);
    CHECK(scale == LossScale{k / 2, 0, 6});
  }
}

TEST_CASE("loss scaling: a skipped step moves neither parameters nor the bias correction") {
  mega::host::Stream stream;
  const mega::optim::AdamWOptions adamw;
  const LossScalingOptions options;
  const std::vector<mega::optim::Segment> segments{{0, 2, true}};
  struct Run {
    std::vector<float> w{0.5F, -2.0F}, m{0, 0}, v{0, 0};
    std::vector<LossScale> scale{{.scale = 1024}};
    std::vector<UpdateControl> control{1};
    std::int64_t steps = 0;
  };
  const auto step = [&](Run& run, float size) {
    const std::vector<float> gradient{size * run.scale[0].scale, -size * run.scale[0].scale};
    std::vector<double> squares{0};
    mega::optim::add_sum_of_squares(stream, view(squares), view(gradient));
    mega::optim::clip_by_norm(stream, view(run.control), view(run.scale),
                              view(std::as_const(squares)), 1.0, options);
    const std::vector<StepInputs> inputs{{.step = run.steps++, .learning_rate = 0.01F}};
    mega::optim::correct_bias(stream, view(run.control), view(inputs), adamw);
    mega::optim::adamw_update(stream, view(run.w), view(run.m), view(run.v), view(gradient),
                              view(segments), view(std::as_const(run.control)), adamw);
  };
  Run smooth, bumpy;
  for (const float size : {0.25F, 0.5F, 0.125F}) {
    step(smooth, size);
    const std::vector<float> before = bumpy.w;
    step(bumpy, std::numeric_limits<float>::infinity());
    CHECK(bumpy.w == before);
    step(bumpy, size);
    // With powers of two, the lower scale changes no bit.
    CHECK(bumpy.w == smooth.w);
    CHECK(bumpy.m == smooth.m);
    CHECK(bumpy.v == smooth.v);
    CHECK(bumpy.control[0].step_size == smooth.control[0].step_size);
    CHECK(bumpy.w != before);
  }
  CHECK(bumpy.scale[0] == LossScale{128, 1, 3});
  CHECK(smooth.scale[0] == LossScale{1024, 3, 0});
}

TEST_CASE("loss scaling: the factor of the gradient is the scale over the valid targets") {
  mega::host::AsyncStream stream(1, 0, 50);
  std::vector<float> out{7};
  std::vector<std::int64_t> count{0};
  std::vector<LossScale> scale{{.scale = 96}};
  mega::optim::reciprocal(stream, view(out), view(std::as_const(count)),
                          view(std::as_const(scale)));
  stream.synchronize();
  CHECK(out[0] == 0.0F);
  mega::optim::assign(stream, view(count), 3);
  mega::optim::assign(stream, view(scale), LossScale{.scale = 48});
  mega::optim::reciprocal(stream, view(out), view(std::as_const(count)),
                          view(std::as_const(scale)));
  stream.synchronize();
  CHECK(out[0] == 16.0F);
}
