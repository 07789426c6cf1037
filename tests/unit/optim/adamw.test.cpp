#include <mega/core/bfloat16.hpp>
#include <mega/core/float16.hpp>
#include <mega/host/host.hpp>
#include <mega/optim/adamw.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using mega::Index;
using mega::Vector;
using mega::optim::AdamWOptions;
using mega::optim::Segment;
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
}  // namespace

TEST_CASE(
    "optim: AdamW follows the published recurrence, with and without decay, padding untouched") {
  mega::host::Stream stream;
  const AdamWOptions options{.beta1 = 0.9F, .beta2 = 0.95F, .epsilon = 1e-8F, .weight_decay = 0.1F};
  std::vector<float> w{1.5F, -2.0F, 0.25F, 7.0F}, m(4), v(4);
  std::vector<double> dw(w.begin(), w.end()), dm(4), dv(4);
  const std::vector<Segment> segments{{0, 1, true}, {1, 3, false}};  // element 3 is padding
  std::vector<UpdateControl> control{{.norm = 3, .gradient_scale = 0.5F, .skip = 0}};
  for (int step = 1; step <= 5; ++step) {
    const std::vector<float> g{0.3F * static_cast<float>(step), -1e-6F, 0.0F, 9.0F};
    const std::vector<StepInputs> inputs{{.step = step - 1, .learning_rate = 0.01F}};
    mega::optim::correct_bias(stream, view(control), view(inputs), options);
    mega::optim::adamw_update(stream, view(w), view(m), view(v), view(g), view(segments),
                              view(std::as_const(control)), options);
    for (std::size_t i = 0; i < 3; ++i) {
      const double grad = static_cast<double>(g[i]) * 0.5;
      dm[i] = 0.9 * dm[i] + 0.1 * grad;
      dv[i] = 0.95 * dv[i] + 0.05 * grad * grad;
      if (i == 0) dw[i] *= 1 - 0.01 * 0.1;
      dw[i] -= 0.01 * (dm[i] / (1 - std::pow(0.9, step))) /
               (std::sqrt(dv[i] / (1 - std::pow(0.95, step))) + 1e-8);
      // fp32 rounding of a few operations a step; the tiny gradient meets epsilon
      CHECK(w[i] == doctest::Approx(dw[i]).epsilon(1e-5));
    }
    CHECK(w[3] == 7.0F);
    CHECK(m[3] == 0.0F);
  }
  CHECK(w[2] == 0.25F);
}

TEST_CASE("optim: the clip factor comes from the global norm, a norm that is not finite skips") {
  mega::host::Stream stream;
  std::vector<UpdateControl> control(1);
  const auto clip = [&](std::vector<double> squares, double max_norm) {
    mega::optim::clip_by_norm(stream, view(control), view(std::as_const(squares)), max_norm);
    return control[0];
  };
  CHECK(clip({9, 16}, 1).norm == 5.0);
  CHECK(clip({9, 16}, 1).gradient_scale == doctest::Approx(1 / (5 + 1e-6)));
  CHECK(clip({9, 16}, 10).gradient_scale == 1.0F);
  CHECK(clip({9, 16}, 0).gradient_scale == 1.0F);
  CHECK(clip({}, 1).norm == 0.0);
  CHECK(clip({0}, 1).gradient_scale == 1.0F);
  CHECK(clip({std::numeric_limits<double>::quiet_NaN(), 1}, 1).skip == 1);
  CHECK(clip({std::numeric_limits<double>::infinity()}, 1).skip == 1);
  std::vector<float> w{1.0F}, m{0.5F}, v{0.25F};
  const std::vector<float> g{1.0F};
  const std::vector<Segment> segments{{0, 1, true}};
  const std::vector<StepInputs> inputs{{.learning_rate = 0.1F}};
  mega::optim::correct_bias(stream, view(control), view(inputs), {});
  CHECK(control[0].skip == 1);
  mega::optim::adamw_update(stream, view(w), view(m), view(v), view(g), view(segments),
                            view(std::as_const(control)), {});
  CHECK(w[0] == 1.0F);
  CHECK(m[0] == 0.5F);
  CHECK(v[0] == 0.25F);
}

TEST_CASE("optim: sums of squares, odd lengths and extremes") {
  mega::host::Stream stream;
  for (const std::size_t n : {0U, 1U, 15U, 16U, 17U, 1000U}) {
    std::vector<float> x(n);
    double expected = 2;
    for (std::size_t i = 0; i < n; ++i) {
      x[i] = 0.1F * static_cast<float>(i) - 3;
      expected += static_cast<double>(x[i]) * x[i];
    }
    std::vector<double> out{2};
    mega::optim::add_sum_of_squares(stream, view(out), view(std::as_const(x)));
    CHECK(out[0] == doctest::Approx(expected).epsilon(1e-13));
  }
  std::vector<double> out{0};
  const std::vector<float> huge{3e38F, 3e38F};  // the squares overflow fp32, not double
  mega::optim::add_sum_of_squares(stream, view(out), view(huge));
  CHECK(out[0] == doctest::Approx(1.8e77));
}

TEST_CASE("optim: no valid target gives the factor zero") {
  mega::host::Stream stream;
  std::vector<float> out{7};
  std::vector<std::int64_t> count{0};
  mega::optim::reciprocal(stream, view(out), view(std::as_const(count)));
  CHECK(out[0] == 0.0F);
  mega::optim::assign(stream, view(count), 8);
  mega::optim::reciprocal(stream, view(out), view(std::as_const(count)));
  CHECK(out[0] == 0.125F);
}

TEST_CASE("optim: many sums of squares have the bits of one by one, slots may be shared") {
  mega::host::Stream stream;
  std::vector<float> x(1000);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.1F * static_cast<float>(i) - 30;
  const std::vector<mega::optim::SquareRange> ranges{
      {0, 17, 2}, {17, 17, 0}, {20, 999, 1}, {999, 1000, 2}};
  std::vector<double> expected{1, 2, 3}, out = expected;
  for (const auto& range : ranges)
    mega::optim::add_sum_of_squares(
        stream, view(expected).slice(range.slot, 1),
        view(std::as_const(x)).slice(range.begin, range.end - range.begin));
  mega::optim::sums_of_squares(stream, view(out), view(std::as_const(x)), view(ranges));
  CHECK(out == expected);
  CHECK(out[0] == 1.0);
}

TEST_CASE("optim: values are rounded to their storage, ties to even") {
  mega::host::Stream stream;
  const std::vector<float> in{1.0F, 1.00390625F, 1.01171875F, -3e38F, 0.1F};
  std::vector<mega::Bfloat16> out(in.size());
  std::vector<float> same(in.size());
  mega::optim::to_storage(stream, view(out), view(in));
  mega::optim::to_storage(stream, view(same), view(in));
  CHECK(same == in);
  CHECK(static_cast<float>(out[0]) == 1.0F);
  CHECK(static_cast<float>(out[1]) == 1.0F);
  CHECK(static_cast<float>(out[2]) == 1.015625F);
  CHECK(static_cast<float>(out[3]) == doctest::Approx(-3e38).epsilon(0x1p-8));
  CHECK(static_cast<float>(out[4]) == doctest::Approx(0.1).epsilon(0x1p-8));
}

TEST_CASE_TEMPLATE("optim: with masters, values are what the masters are rounded to", T,
                   mega::Bfloat16, mega::Float16) {
  mega::host::Stream stream;
  const std::vector<float> start{1.0F, -0.3F, 0.01F}, g{0.5F, -1.0F, 1e-3F};
  const std::vector<Segment> segments{{0, 3, true}};
  const std::vector<StepInputs> inputs{{.learning_rate = 1e-4F}};
  std::vector<UpdateControl> control(1);
  mega::optim::correct_bias(stream, view(control), view(inputs), {});
  std::vector<float> alone = start, m1(3), v1(3), master = start, m2(3), v2(3);
  std::vector<T> values(3);
  mega::optim::adamw_update(stream, view(alone), view(m1), view(v1), view(g), view(segments),
                            view(std::as_const(control)), {});
  mega::optim::adamw_update(stream, view(values), view(master), view(m2), view(v2), view(g),
                            view(segments), view(std::as_const(control)), {});
  CHECK(master == alone);
  CHECK(m2 == m1);
  CHECK(v2 == v1);
  for (std::size_t i = 0; i < 3; ++i) CHECK(values[i].bits == T(alone[i]).bits);
}
