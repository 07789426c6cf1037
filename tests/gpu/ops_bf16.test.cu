// Operations of the Transformer and the optimizer on stored numbers, float, Bfloat16 and Float16:
// GPU against the host twin in float, on operands that all storages hold exactly; then how fast
// they move memory.
#include "twins.cuh"
#include <mega/core/storage.hpp>
#include <mega/device.cuh>
#include <mega/nn/copy_columns.hpp>
#include <mega/nn/cross_entropy.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/embedding.hpp>
#include <mega/nn/fused_cross_entropy.cuh>
#include <mega/nn/fused_cross_entropy.hpp>
#include <mega/nn/norm.hpp>
#include <mega/nn/rope.hpp>
#include <mega/nn/rope_frequencies.hpp>
#include <mega/optim/adamw.hpp>
#include <mega/optim/loss_scaling.hpp>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using namespace mega::nn;
using namespace mega::optim;
using mega::Bfloat16;
using mega::Float16;
using mega::LossScale;
using mega::RandomKey;
using mega::RandomUse;
using namespace mega_test;

namespace {

using InVector = Vector<const float>;

/// An operand that is float on the host and T on the GPU.
template <class T>
class Stored : public AnyTwin {
 public:
  explicit Stored(std::vector<float> initial)
      : initial_(std::move(initial)), memory_(initial_.size() * sizeof(T)) {
    for (float& value : initial_) value = as_stored_.emplace_back(T(value));
    host_ = initial_;
  }

  [[nodiscard]] Index size() const { return static_cast<Index>(initial_.size()); }
  [[nodiscard]] Vector<float> operator()(OnHost) { return {host_.data(), size()}; }
  [[nodiscard]] Vector<T> operator()(OnDevice) {
    return {reinterpret_cast<T*>(memory_.data()), size()};
  }
  template <class Place>
  [[nodiscard]] auto matrix(Place place, Index rows) {
    const auto flat = (*this)(place);
    return Matrix<typename decltype(flat)::element_type>(flat.data(), rows,
                                                         rows == 0 ? 0 : size() / rows);
  }
  [[nodiscard]] const std::vector<float>& initial() const { return initial_; }
  [[nodiscard]] const std::vector<float>& host() const { return host_; }
  /// What the GPU made.
  [[nodiscard]] const std::vector<T>& result() const { return device_; }

  void reset(mega::cuda::Stream& stream) override {
    host_ = initial_;
    upload(stream, (*this)(OnDevice{}), Vector<const T>(as_stored_.data(), size()));
  }
  void keep(mega::cuda::Stream& stream) override {
    before_ = std::move(device_);
    device_.assign(initial_.size(), T{});
    download(stream, Vector<T>(device_.data(), size()), Vector<const T>((*this)(OnDevice{})));
    stream.synchronize();
  }
  [[nodiscard]] bool repeats() const override { return same_bits(before_, device_); }

  template <class U>
  [[nodiscard]] static bool same_bits(const std::vector<U>& a, const std::vector<U>& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(U)) == 0);
  }

 private:
  std::vector<float> initial_, host_;
  std::vector<T> as_stored_, device_, before_;
  mega::cuda::Memory memory_;
};

/// The operands of one comparison, with activations stored as T.
template <class T>
class Operands {
 public:
  explicit Operands(Index seed) : key_{static_cast<std::uint64_t>(seed), 0, 0, RandomUse::test} {}

  /// Multiples of 1/16 in [low, high): sums of a few are exact in all storages up to 8.
  Stored<T>& grid(Index count, int low = -2, int high = 2) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& v : values)
      v = static_cast<float>(low) +
          static_cast<float>(next() % static_cast<std::uint32_t>(16 * (high - low))) / 16.0F;
    return keep<Stored<T>>(std::move(values));
  }
  Stored<T>& poisoned(Index count) {
    return keep<Stored<T>>(std::vector<float>(static_cast<std::size_t>(count), NAN));
  }
  template <class U>
  Twin<U>& given(std::vector<U> values) {
    return keep<Twin<U>>(std::move(values));
  }
  /// Statistics, sums and gradients of parameters.
  Twin<float>& floats(Index count, float low = -1, float high = 1) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& v : values) v = low + (high - low) * static_cast<float>(next() >> 8) * 0x1p-24F;
    return given(std::move(values));
  }
  template <class U = float>
  Twin<U>& unset(Index count) {
    return given(
        std::vector<U>(static_cast<std::size_t>(count), std::numeric_limits<U>::quiet_NaN()));
  }
  Twin<std::int32_t>& integers(Index count, int low, int end) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    for (auto& v : values)
      v = low + static_cast<std::int32_t>(next() % static_cast<std::uint32_t>(end - low));
    return given(std::move(values));
  }

  /// op(stream, place): twice on the GPU, with the same bits, and on the host.
  template <class Op>
  void run(const Op& op) {
    for (int time = 0; time < 2; ++time) {
      for (const auto& twin : all_) twin->reset(stream_);
      op(stream_, OnDevice{});
      for (const auto& twin : all_) twin->keep(stream_);
    }
    mega::host::Stream host;
    op(host, OnHost{});
    for (const auto& twin : all_) CHECK(twin->repeats());
  }

 private:
  template <class Kind, class Values>
  Kind& keep(Values values) {
    auto twin = std::make_unique<Kind>(std::move(values));
    Kind& out = *twin;
    all_.push_back(std::move(twin));
    return out;
  }
  std::uint32_t next() { return key_.bits(drawn_++); }

  RandomKey key_;
  Index drawn_ = 0;
  mega::cuda::Stream stream_;
  std::vector<std::unique_ptr<AnyTwin>> all_;
};

/// Largest difference over the largest number of the host; what is not finite is infinite.
template <class T>
double difference(const Stored<T>& twin) {
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < twin.host().size(); ++i) {
    const double a = twin.host()[i], b = static_cast<float>(twin.result()[i]);
    worst = std::isfinite(a - b) ? std::max(worst, std::abs(a - b))
                                 : std::numeric_limits<double>::infinity();
    if (!std::isfinite(worst)) return worst;
    largest = std::max(largest, std::abs(a));
  }
  return largest > 0 ? worst / largest : worst;
}

/// One rounding to 8 or 11 bits, of a result that is right to some units of float's last place.
template <class T>
constexpr double rounded = std::is_same_v<T, float>      ? 4e-6
                           : std::is_same_v<T, Bfloat16> ? 0x1p-8
                                                         : 0x1p-11;
template <class T>
constexpr const char* type_name = std::is_same_v<T, float>      ? " (float)"
                                  : std::is_same_v<T, Bfloat16> ? " (Bfloat16)"
                                                                : " (Float16)";
/// Sums in float of up to some thousand products of exact operands, in another order.
constexpr double sums = 1e-5;

template <class T>
void check_close(const std::string& result, const Stored<T>& twin, double bound = rounded<T>) {
  CAPTURE(result);
  const double worst = difference(twin);
  WorstDifferences::table().add(result + type_name<T>, worst);
  CHECK(worst <= bound);
}
template <class T>
void check_equal(const std::string& result, const Stored<T>& twin) {
  CAPTURE(result);
  std::vector<T> expected;
  for (const float value : twin.host()) expected.push_back(T(value));
  CHECK(Stored<T>::same_bits(expected, twin.result()));
}

/// sums - initial = column sums of m as it is stored.
template <class T>
void check_column_sums(const std::string& result, const Twin<float>& sum,
                       const std::vector<float>& initial, const Stored<T>& m) {
  CAPTURE(result);
  const std::size_t cols = initial.size(), rows = m.result().size() / cols;
  double worst = 0, largest = 1e-30;
  for (std::size_t c = 0; c < cols; ++c) {
    double expected = initial[c], size = std::abs(expected);
    for (std::size_t r = 0; r < rows; ++r) {
      expected += static_cast<float>(m.result()[r * cols + c]);
      size += std::abs(static_cast<float>(m.result()[r * cols + c]));
    }
    worst = std::max(worst, std::abs(expected - sum.result()[c]));
    largest = std::max(largest, size);
  }
  CHECK(worst / largest <= 1e-6);
}

struct Shape {
  Index rows, cols;
};
// Odd widths go without packs. The last is too long for a single pass of backward, and for
// registers.
const std::vector<Shape> shapes = {{1, 8},     {1, 7},      {3, 33},   {37, 64},
                                   {129, 257}, {300, 1032}, {2, 4104}, {5, 768},
                                   {64, 2048}, {700, 96},   {3, 8192}, {2, 20008}};
/// On both sides of the widths where backward takes other groups of threads; rows that end inside
/// of a block, one to a group, many to a group, fewer than groups.
const std::vector<Shape> group_shapes = {{7, 776},   {133, 768}, {1237, 2048}, {67, 2056},
                                         {35, 4096}, {19, 8192}, {300, 8200},  {1601, 256},
                                         {11, 264},  {29, 520},  {5, 1024}};

}  // namespace

TEST_CASE_TEMPLATE("gpu: norms of stored rows", T, float, Bfloat16, Float16) {
  for (const auto [rows, cols] : shapes) {
    CAPTURE(rows);
    CAPTURE(cols);
    Operands<T> t(rows * 10000 + cols);
    auto& x = t.grid(rows * cols);
    auto& dout = t.grid(rows * cols);
    auto& weight = t.grid(cols, 1, 2);
    auto& bias = t.grid(cols);
    auto& mean = t.unset(rows);
    auto& rstd = t.unset(rows);
    auto& rms = t.unset(rows);
    auto& out = t.poisoned(rows * cols);
    auto& rms_out = t.poisoned(rows * cols);
    auto& dx = t.poisoned(rows * cols);
    auto& rms_dx = t.grid(rows * cols);
    auto& dweight = t.floats(cols);
    auto& dbias = t.floats(cols);
    auto& rms_dweight = t.floats(cols);
    const float epsilon = 1e-3F;
    t.run([&](auto& s, auto at) {
      layer_norm_forward(s, out.matrix(at, rows), mean(at), rstd(at), x.matrix(at, rows),
                         weight(at), bias(at), epsilon);
      layer_norm_backward_input(s, dx.matrix(at, rows), dout.matrix(at, rows), x.matrix(at, rows),
                                weight(at), mean(at), rstd(at));
      layer_norm_backward_weight(s, dweight(at), dbias(at), dout.matrix(at, rows),
                                 x.matrix(at, rows), mean(at), rstd(at));
      rms_norm_forward(s, rms_out.matrix(at, rows), rms(at), x.matrix(at, rows), weight(at),
                       epsilon);
      rms_norm_backward_input(s, rms_dx.matrix(at, rows), rms_dx.matrix(at, rows),
                              x.matrix(at, rows), weight(at), rms(at));
      rms_norm_backward_weight(s, rms_dweight(at), dout.matrix(at, rows), x.matrix(at, rows),
                               rms(at));
    });
    check_close("layer_norm mean", mean, sums);
    check_close("layer_norm rstd", rstd, sums);
    check_close("rms_norm rstd", rms, sums);
    check_close("layer_norm_forward", out);
    check_close("rms_norm_forward", rms_out);
    check_close("layer_norm_backward_input", dx);
    check_close("rms_norm_backward_input", rms_dx);
    check_close("layer_norm_backward_weight", dweight, sums);
    check_close("layer_norm_backward_weight bias", dbias, sums);
    check_close("rms_norm_backward_weight", rms_dweight, sums);
  }
}

TEST_CASE_TEMPLATE("gpu: a sum and its norm; the norm again has the same bits", T, float, Bfloat16,
                   Float16) {
  for (const auto [rows, cols] : shapes) {
    for (const bool with_bias : {false, true}) {
      CAPTURE(rows);
      CAPTURE(cols);
      CAPTURE(with_bias);
      Operands<T> t(rows * 10000 + cols + 1);
      auto& x = t.grid(rows * cols);
      auto& branch = t.grid(rows * cols);
      auto& branch_bias = t.grid(with_bias ? cols : 0);
      auto& weight = t.grid(cols, 1, 2);
      auto& bias = t.grid(cols);
      auto& y = t.poisoned(rows * cols);
      auto& out = t.poisoned(rows * cols);
      auto& again = t.poisoned(rows * cols);
      auto& mean = t.unset(rows);
      auto& rstd = t.unset(rows);
      auto& mean_again = t.unset(rows);
      auto& rstd_again = t.unset(rows);
      auto& rms_y = t.grid(rows * cols);
      auto& rms = t.unset(rows);
      auto& rms_again = t.unset(rows);
      auto& rms_out = t.poisoned(rows * cols);
      auto& rms_out_again = t.poisoned(rows * cols);
      auto& sum = t.poisoned(rows * cols);
      const float epsilon = 1e-3F;
      t.run([&](auto& s, auto at) {
        add_layer_norm_forward(s, y.matrix(at, rows), out.matrix(at, rows), mean(at), rstd(at),
                               x.matrix(at, rows), branch.matrix(at, rows), branch_bias(at),
                               weight(at), bias(at), epsilon);
        layer_norm_forward(s, again.matrix(at, rows), mean_again(at), rstd_again(at),
                           y.matrix(at, rows), weight(at), bias(at), epsilon);
        // In place on the residual stream.
        add_rms_norm_forward(s, rms_y.matrix(at, rows), rms_out.matrix(at, rows), rms(at),
                             rms_y.matrix(at, rows), branch.matrix(at, rows), branch_bias(at),
                             weight(at), epsilon);
        rms_norm_forward(s, rms_out_again.matrix(at, rows), rms_again(at), rms_y.matrix(at, rows),
                         weight(at), epsilon);
        add_branch(s, sum.matrix(at, rows), x.matrix(at, rows), branch.matrix(at, rows),
                   branch_bias(at));
      });
      check_equal("add_layer_norm_forward y", y);
      check_equal("add_rms_norm_forward y", rms_y);
      check_equal("add_branch", sum);
      check_close("add_layer_norm_forward", out);
      check_close("add_rms_norm_forward", rms_out);
      check_close("add_layer_norm_forward mean", mean, sums);
      check_close("add_layer_norm_forward rstd", rstd, sums);
      CHECK(Stored<T>::same_bits(out.result(), again.result()));
      CHECK(Stored<T>::same_bits(mean.result(), mean_again.result()));
      CHECK(Stored<T>::same_bits(rstd.result(), rstd_again.result()));
      CHECK(Stored<T>::same_bits(rms_out.result(), rms_out_again.result()));
      CHECK(Stored<T>::same_bits(rms.result(), rms_again.result()));
    }
  }
}

TEST_CASE_TEMPLATE("gpu: y is rounded before its norm; operands out of step change no bits", T,
                   float, Bfloat16, Float16) {
  const Index rows = 9, cols = 768;
  Operands<T> t(41);
  auto& x = t.grid(rows * cols, -1000, 1000);  // sums have more than 11 bits
  auto& branch = t.grid(rows * cols + 1, -1, 1);
  auto& weight = t.grid(cols, 1, 2);
  auto& bias = t.grid(cols);
  auto& y = t.poisoned(rows * cols);
  auto& out = t.poisoned(rows * cols);
  auto& again = t.poisoned(rows * cols);
  auto& mean = t.unset(rows);
  auto& rstd = t.unset(rows);
  t.run([&](auto& s, auto at) {
    // One element beyond the beginning of the memory.
    const auto late = branch(at).slice(1, rows * cols);
    using Element = typename decltype(late)::element_type;
    add_layer_norm_forward(s, y.matrix(at, rows), out.matrix(at, rows), mean(at), rstd(at),
                           x.matrix(at, rows), Matrix<Element>(late.data(), rows, cols),
                           Vector<const Element>(), weight(at), bias(at), 1e-3F);
    layer_norm_forward(s, again.matrix(at, rows), mean(at), rstd(at), y.matrix(at, rows),
                       weight(at), bias(at), 1e-3F);
  });
  check_equal("add_layer_norm_forward y", y);
  CHECK(Stored<T>::same_bits(out.result(), again.result()));
}

TEST_CASE_TEMPLATE("gpu: backward of a norm in one pass", T, float, Bfloat16, Float16) {
  for (const auto [rows, cols] : shapes) {
    for (const bool residual : {false, true}) {
      CAPTURE(rows);
      CAPTURE(cols);
      CAPTURE(residual);
      Operands<T> t(rows * 10000 + cols + 2);
      auto& x = t.grid(rows * cols);
      auto& dout = t.grid(rows * cols);
      auto& dy = t.grid(residual ? rows * cols : 0);
      auto& weight = t.grid(cols, 1, 2);
      auto& mean = t.floats(rows, -0.2F, 0.2F);
      auto& rstd = t.floats(rows, 0.7F, 1.0F);
      auto& dx = t.poisoned(rows * cols);
      auto& dweight = t.floats(cols);
      auto& dbias = t.floats(cols);
      auto& dbranch = t.floats(cols);
      auto& rms_dx = t.grid(rows * cols);
      auto& rms_dweight = t.floats(cols);
      auto& rms_dbranch = t.floats(cols);
      auto& unwanted_dx = t.grid(rows * cols);
      auto& unwanted_dweight = t.floats(cols);
      const auto initial = [&](Twin<float>& twin) {
        return std::vector<float>(twin(OnHost{}).data(), twin(OnHost{}).data() + cols);
      };
      const std::vector<float> before = initial(dbranch), rms_before = initial(rms_dbranch);
      t.run([&](auto& s, auto at) {
        auto rest = dy.matrix(at, residual ? rows : 0);
        layer_norm_backward(s, dx.matrix(at, rows), dweight(at), dbias(at), rest,
                            dout.matrix(at, rows), x.matrix(at, rows), weight(at), mean(at),
                            rstd(at), dbranch(at));
        // In place of the gradient of the norm's output.
        rms_norm_backward(s, rms_dx.matrix(at, rows), rms_dweight(at), rest,
                          rms_dx.matrix(at, rows), x.matrix(at, rows), weight(at), rstd(at),
                          rms_dbranch(at));
        // In place of the gradient of the residual stream, and nobody asks for its sums.
        rms_norm_backward(s, unwanted_dx.matrix(at, rows), unwanted_dweight(at),
                          unwanted_dx.matrix(at, rows), dout.matrix(at, rows), x.matrix(at, rows),
                          weight(at), rstd(at));
      });
      check_close("layer_norm_backward dx", dx);
      check_close("layer_norm_backward dweight", dweight, sums);
      check_close("layer_norm_backward dbias", dbias, sums);
      check_column_sums("layer_norm_backward dbranch_bias", dbranch, before, dx);
      check_close("rms_norm_backward dx in place of dout", rms_dx);
      check_close("rms_norm_backward dweight", rms_dweight, sums);
      check_column_sums("rms_norm_backward dbranch_bias", rms_dbranch, rms_before, rms_dx);
      check_close("rms_norm_backward dx in place of dy", unwanted_dx);
      check_close("rms_norm_backward dweight", unwanted_dweight, sums);
    }
  }
}

TEST_CASE_TEMPLATE("gpu: backward of a norm, with each operand that may be left out or shared", T,
                   float, Bfloat16, Float16) {
  enum class Place { apart, of_dy, of_dout };
  for (const auto [rows, cols] : group_shapes)
    for (const bool with_branch : {false, true})
      for (const bool residual : {false, true})
        for (const Place place : {Place::apart, Place::of_dy, Place::of_dout}) {
          if (place == Place::of_dy && !residual) continue;
          CAPTURE(rows);
          CAPTURE(cols);
          CAPTURE(with_branch);
          CAPTURE(residual);
          CAPTURE(static_cast<int>(place));
          Operands<T> t(rows * 10000 + cols + 4);
          auto& x = t.grid(rows * cols);
          auto& dout = t.grid(place == Place::of_dout ? 0 : rows * cols);
          auto& dy = t.grid(residual && place != Place::of_dy ? rows * cols : 0);
          auto& weight = t.grid(cols, 1, 2);
          auto& mean = t.floats(rows, -0.2F, 0.2F);
          auto& rstd = t.floats(rows, 0.7F, 1.0F);
          auto& dx = place == Place::apart ? t.poisoned(rows * cols) : t.grid(rows * cols);
          auto& rms_dx = place == Place::apart ? t.poisoned(rows * cols) : t.grid(rows * cols);
          auto& dweight = t.floats(cols);
          auto& dbias = t.floats(cols);
          auto& rms_dweight = t.floats(cols);
          auto& dbranch = t.floats(with_branch ? cols : 0);
          auto& rms_dbranch = t.floats(with_branch ? cols : 0);
          const auto initial = [](Twin<float>& twin) {
            const Vector<float> values = twin(OnHost{});
            return std::vector<float>(values.data(), values.data() + values.size());
          };
          const std::vector<float> before = initial(dbranch), rms_before = initial(rms_dbranch);
          t.run([&](auto& s, auto at) {
            const auto all = [&](Stored<T>& m, Stored<T>& to, bool shared) {
              return shared ? to.matrix(at, rows) : m.matrix(at, m.size() == 0 ? 0 : rows);
            };
            layer_norm_backward(s, dx.matrix(at, rows), dweight(at), dbias(at),
                                all(dy, dx, place == Place::of_dy),
                                all(dout, dx, place == Place::of_dout), x.matrix(at, rows),
                                weight(at), mean(at), rstd(at), dbranch(at));
            rms_norm_backward(s, rms_dx.matrix(at, rows), rms_dweight(at),
                              all(dy, rms_dx, place == Place::of_dy),
                              all(dout, rms_dx, place == Place::of_dout), x.matrix(at, rows),
                              weight(at), rstd(at), rms_dbranch(at));
          });
          check_close("layer_norm_backward dx", dx);
          check_close("layer_norm_backward dweight", dweight, sums);
          check_close("layer_norm_backward dbias", dbias, sums);
          check_close("rms_norm_backward dx", rms_dx);
          check_close("rms_norm_backward dweight", rms_dweight, sums);
          if (!with_branch) continue;
          check_column_sums("layer_norm_backward dbranch_bias", dbranch, before, dx);
          check_column_sums("rms_norm_backward dbranch_bias", rms_dbranch, rms_before, rms_dx);
        }
}

TEST_CASE_TEMPLATE("gpu: elements and columns of stored matrices", T, float, Bfloat16, Float16) {
  for (const auto [rows, cols] : shapes) {
    CAPTURE(rows);
    CAPTURE(cols);
    Operands<T> t(rows * 10000 + cols + 3);
    auto& a = t.grid(rows * cols, -4, 4);
    auto& b = t.grid(rows * cols);
    auto& wide = t.grid(2 * rows * cols, -4, 4);
    auto& bias = t.grid(cols);
    auto& filled = t.poisoned(rows * cols);
    auto& added = t.poisoned(rows * cols);
    auto& scaled = t.poisoned(rows * cols);
    auto& biased = t.poisoned(rows * cols);
    auto& dbias = t.floats(cols);
    auto& gelu = t.poisoned(rows * cols);
    auto& dgelu = t.poisoned(rows * cols);
    auto& dgelu_in_place = t.grid(rows * cols);
    auto& dgelu_bias = t.floats(cols);
    auto& swiglu = t.poisoned(rows * cols);
    auto& dswiglu = t.poisoned(2 * rows * cols);
    auto& dropped = t.poisoned(rows * cols);
    auto& columns = t.grid(rows * (cols + 5));
    const std::vector<float> before(dgelu_bias(OnHost{}).data(),
                                    dgelu_bias(OnHost{}).data() + cols);
    const std::vector<float> dbias_before(dbias(OnHost{}).data(), dbias(OnHost{}).data() + cols);
    const RandomKey key{5, 3, 2, RandomUse::mlp_dropout};
    t.run([&](auto& s, auto at) {
      const auto x = a.matrix(at, rows), y = b.matrix(at, rows), xx = wide.matrix(at, rows);
      fill(s, filled.matrix(at, rows), 0.25F);
      add(s, added.matrix(at, rows), x, y);
      scale(s, scaled.matrix(at, rows), x, 1.7F);
      bias_add(s, biased.matrix(at, rows), x, bias(at));
      bias_gradient(s, dbias(at), y);
      gelu_tanh_forward(s, gelu.matrix(at, rows), x);
      gelu_tanh_backward(s, dgelu.matrix(at, rows), y, x);
      gelu_tanh_backward_bias(s, dgelu_in_place.matrix(at, rows), dgelu_bias(at),
                              dgelu_in_place.matrix(at, rows), x);
      swiglu_forward(s, swiglu.matrix(at, rows), xx);
      swiglu_backward(s, dswiglu.matrix(at, rows), y, xx);
      dropout_forward(s, dropped.matrix(at, rows), x, 0.3F, key,
                      GlobalBlock{5, cols + cols % 4, 0});
      copy_columns(s, columns.matrix(at, rows), 3, x, cols - 1);
    });
    check_equal("fill", filled);
    check_equal("add", added);
    check_equal("bias_add", biased);
    check_equal("copy_columns", columns);
    check_close("scale", scaled);
    check_column_sums("bias_gradient", dbias, dbias_before, b);
    check_close("gelu_tanh_forward", gelu);
    check_close("gelu_tanh_backward", dgelu);
    check_close("gelu_tanh_backward_bias", dgelu_in_place);
    check_column_sums("gelu_tanh_backward_bias dbias", dgelu_bias, before, dgelu_in_place);
    check_close("swiglu_forward", swiglu);
    check_close("swiglu_backward", dswiglu);
    check_close("dropout_forward", dropped);
  }
}

TEST_CASE_TEMPLATE("gpu: rotary embedding of stored heads", T, float, Bfloat16, Float16) {
  // Halves of a head that are packs and ones that are not; the values stay as they are.
  for (const AttentionShape shape :
       {AttentionShape{1, 1, 1, 1, 2}, AttentionShape{2, 9, 4, 2, 8},
        AttentionShape{2, 5, 3, 1, 80}, AttentionShape{1, 70, 32, 8, 128},
        AttentionShape{1, 3, 1, 1, 600}}) {
    Operands<T> t(29);
    auto& frequencies = t.unset(shape.head_dim / 2);
    auto& qkv = t.grid(shape.rows() * shape.width());
    auto& dqkv = t.grid(shape.rows() * shape.width());
    t.run([&](auto& s, auto at) {
      rope_frequencies(s, frequencies(at), 500000.0, RopeScaling{});
      rope_forward(s, qkv.matrix(at, shape.rows()), frequencies(at), shape, 1000);
      rope_backward(s, dqkv.matrix(at, shape.rows()), frequencies(at), shape, 0);
    });
    check_close("rope_forward", qkv);
    check_close("rope_backward", dqkv);
  }
}

TEST_CASE_TEMPLATE("gpu: embeddings of stored tables", T, float, Bfloat16, Float16) {
  struct Case {
    Index tokens, vocab, cols, first_row;
  };
  // Tokens outside of the shard on both sides; tokens that come once, 32 times and thousands.
  for (const auto [count, vocab, cols, first_row] :
       {Case{1, 1, 1, 0}, Case{37, 11, 33, 4}, Case{64, 2, 8, 0}, Case{5000, 3, 300, 0},
        Case{777, 5000, 64, 100}, Case{3000, 90, 1032, 5}, Case{2500, 1, 2056, 0}}) {
    CAPTURE(count);
    CAPTURE(vocab);
    Operands<T> t(count);
    auto& tokens = t.integers(count, 0, static_cast<int>(vocab + 2 * first_row));
    auto& table = t.grid(vocab * cols);
    auto& out = t.poisoned(count * cols);
    auto& dout = t.grid(count * cols);
    auto& dtable = t.floats(vocab * cols);
    t.run([&](auto& s, auto at) {
      embedding_forward(s, out.matrix(at, count), tokens(at), table.matrix(at, vocab), first_row);
      embedding_backward(s, dtable.matrix(at, vocab), dout.matrix(at, count), tokens(at),
                         first_row);
    });
    check_equal("embedding_forward", out);
    check_equal("embedding_backward", dtable);
  }
  struct Positions {
    Index samples, time, first, cols;
  };
  for (const auto [samples, time, first, cols] :
       {Positions{1, 1, 0, 35}, Positions{3, 17, 5, 35}, Positions{7, 20, 10, 768}}) {
    const Index rows = samples * time, positions = 30, begin = first, period = time;
    Operands<T> t(23);
    auto& x = t.grid(rows * cols);
    auto& table = t.grid(positions * cols);
    auto& out = t.poisoned(rows * cols);
    auto& dtable = t.floats(positions * cols);
    t.run([&](auto& s, auto at) {
      position_embedding_forward(s, out.matrix(at, rows), x.matrix(at, rows),
                                 table.matrix(at, positions), period, begin);
      position_embedding_backward(s, dtable.matrix(at, positions), x.matrix(at, rows), period,
                                  begin);
    });
    check_equal("position_embedding_forward", out);
    check_equal("position_embedding_backward", dtable);
  }
}

TEST_CASE_TEMPLATE("gpu: cross-entropy of stored logits", T, float, Bfloat16, Float16) {
  struct Case {
    Index rows, cols, valid, first;
  };
  // The last is longer than what a multiprocessor keeps of a row.
  for (const auto [rows, cols, valid, first] :
       {Case{1, 8, 8, 0}, Case{5, 13, 10, 20}, Case{48, 1032, 1027, 0}, Case{300, 72, 65, 3},
        Case{3, 60000, 59995, 0}}) {
    CAPTURE(rows);
    CAPTURE(cols);
    Operands<T> t(rows + cols);
    auto& logits = t.grid(rows * cols, -8, 8);
    auto& fused = t.grid(rows * cols, -8, 8);
    // Some left out, some of other shards.
    auto& targets = t.integers(rows, -2, static_cast<int>(first + valid + 3));
    auto& row_max = t.unset(rows);
    auto& sum_exp = t.unset(rows);
    auto& target_logit = t.unset(rows);
    auto& row_loss = t.unset(rows);
    auto& loss = t.template unset<double>(1);
    auto& fused_loss = t.template unset<double>(1);
    auto& fused_row_loss = t.unset(rows);
    auto& gradient = t.poisoned(rows * cols);
    auto& factor = t.floats(1, 0.1F, 1.0F);
    const VocabShard shard{first, valid};
    const Index columns = valid;
    t.run([&](auto& s, auto at) {
      const auto x = logits.matrix(at, rows);
      cross_entropy_row_max(s, row_max(at), x, shard);
      cross_entropy_sum_exp(s, sum_exp(at), target_logit(at), x, targets(at), row_max(at), shard);
      cross_entropy_loss(s, loss(at), row_loss(at), targets(at), row_max(at), sum_exp(at),
                         target_logit(at));
      cross_entropy_backward(s, gradient.matrix(at, rows), x, targets(at), row_max(at), sum_exp(at),
                             shard, 0.7F);
      cross_entropy_backward(s, x, x, targets(at), row_max(at), sum_exp(at), shard,
                             InVector(factor(at)));
      fused_cross_entropy(s, fused.matrix(at, rows), fused_loss(at), fused_row_loss(at),
                          targets(at), columns, factor(at));
    });
    check_equal("cross_entropy_row_max", row_max);
    check_equal("cross_entropy target logit", target_logit);
    check_close("cross_entropy_sum_exp", sum_exp, sums);
    check_close("cross_entropy_loss of rows", row_loss, sums);
    check_close("cross_entropy_loss", loss, sums);
    check_close("cross_entropy_backward", gradient);
    check_close("cross_entropy_backward in place", logits);
    check_close("fused_cross_entropy", fused);
    check_close("fused_cross_entropy of rows", fused_row_loss, sums);
    check_close("fused_cross_entropy loss", fused_loss, sums);
  }
}

TEST_CASE_TEMPLATE("gpu: extreme logits neither overflow nor hide", T, float, Bfloat16, Float16) {
  const Index rows = 3, cols = 2048;
  constexpr float huge = std::is_same_v<T, Float16> ? 0x1p15F : 0x1p127F;
  std::vector<float> extreme(static_cast<std::size_t>(rows * cols), -huge);
  extreme[7] = huge / 128;  // all the probability in one column
  for (Index c = 0; c < cols; ++c) {
    extreme[static_cast<std::size_t>(cols + c)] = -INFINITY;  // but two columns
    extreme[static_cast<std::size_t>(2 * cols + c)] = c % 2 == 0 ? 0.0F : -INFINITY;
  }
  extreme[static_cast<std::size_t>(cols + 3)] = extreme[static_cast<std::size_t>(cols + 2000)] = 5;
  Stored<T> logits(extreme);
  Twin<std::int32_t> targets({7, 3, 0});
  Twin<float> row_loss({NAN, NAN, NAN}), scale({1.0F});
  Twin<double> loss({NAN});
  mega::cuda::Stream stream;
  for (AnyTwin* twin : {static_cast<AnyTwin*>(&logits), static_cast<AnyTwin*>(&targets),
                        static_cast<AnyTwin*>(&row_loss), static_cast<AnyTwin*>(&scale),
                        static_cast<AnyTwin*>(&loss)})
    twin->reset(stream);
  const OnDevice at;
  fused_cross_entropy(stream, logits.matrix(at, rows), loss(at), row_loss(at), targets(at), cols,
                      scale(at));
  logits.keep(stream);
  row_loss.keep(stream);
  CHECK(row_loss.result()[0] == 0.0F);
  CHECK(row_loss.result()[1] == doctest::Approx(std::log(2.0)));
  CHECK(row_loss.result()[2] == doctest::Approx(std::log(1024.0)));
  CHECK(static_cast<float>(logits.result()[7]) == 0.0F);
  CHECK(static_cast<float>(logits.result()[static_cast<std::size_t>(cols + 2000)]) == 0.5F);
  CHECK(static_cast<float>(logits.result()[static_cast<std::size_t>(cols + 3)]) == -0.5F);
  CHECK(static_cast<float>(logits.result()[static_cast<std::size_t>(cols + 4)]) == 0.0F);
}

TEST_CASE_TEMPLATE("gpu: optimizer with masters", T, float, Bfloat16, Float16) {
  for (const Index size : {Index{1}, Index{1000}, Index{100'003}}) {
    CAPTURE(size);
    Operands<T> t(size);
    auto& values = t.grid(size);
    auto& master = t.floats(size);
    auto& first = t.floats(size, -0.1F, 0.1F);
    auto& second = t.floats(size, 0.0F, 0.01F);
    auto& gradient = t.floats(size);
    auto& rounded_gradient = t.poisoned(size);
    auto& control = t.given(std::vector<UpdateControl>{{1.0, 0.5F, 0}});
    // Not in order, with gaps, many that are short, and one that is empty.
    std::vector<Segment> runs{{size / 2, size - size / 7, false},
                              {size / 4, size / 2 - size / 9, true}};
    for (Index begin = 0; begin + 3 < size / 4 && begin < 3000; begin += 5)
      runs.push_back({begin, begin + 3, begin % 2 == 0});
    runs.push_back({size / 3, size / 3, true});
    auto& segments = t.given(runs);
    auto& inputs = t.given(std::vector<StepInputs>{{0, 0, 1e-2F}, {0, 1, 1e-2F}});
    t.run([&](auto& s, auto at) {
      to_storage(s, rounded_gradient(at), InVector(gradient(at)));
      for (const Index step : {0, 1}) {
        correct_bias(s, control(at), Vector<const StepInputs>(inputs(at).slice(step, 1)),
                     AdamWOptions{});
        if constexpr (std::is_same_v<decltype(at), OnDevice> && mega::half_storage<T>) {
          adamw_update(s, values(at), master(at), first(at), second(at), gradient(at), segments(at),
                       control(at), AdamWOptions{});
        } else {
          adamw_update(s, master(at), first(at), second(at), gradient(at), segments(at),
                       control(at), AdamWOptions{});
        }
      }
    });
    check_equal("to_storage", rounded_gradient);
    check_close("adamw_update master", master, 1e-6);
    check_close("adamw_update first moment", first, 1e-6);
    check_close("adamw_update second moment", second, 1e-6);
    if constexpr (mega::half_storage<T>) {
      std::vector<bool> updated(static_cast<std::size_t>(size));
      for (const Segment& run : runs)
        for (Index i = run.begin; i < run.end; ++i) updated[static_cast<std::size_t>(i)] = true;
      Index wrong = 0;
      for (std::size_t i = 0; i < updated.size(); ++i) {
        const T expected(updated[i] ? master.result()[i] : values.initial()[i]);
        wrong += values.result()[i].bits != expected.bits ? 1 : 0;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("gpu: a skipped step changes no value") {
  Operands<Bfloat16> t(43);
  auto& values = t.grid(500);
  auto& master = t.floats(500);
  auto& moment = t.floats(500);
  auto& gradient = t.floats(500);
  auto& control = t.given(std::vector<UpdateControl>{{NAN, 1.0F, 1}});
  auto& segments = t.given(std::vector<Segment>{{0, 500, true}});
  t.run([&](auto& s, auto at) {
    if constexpr (std::is_same_v<decltype(at), OnDevice>)
      adamw_update(s, values(at), master(at), moment(at), moment(at), gradient(at), segments(at),
                   control(at), AdamWOptions{});
  });
  check_equal("adamw_update values", values);
  check_equal("adamw_update master", master);
}

TEST_CASE("gpu: loss scaling has the bits of the host twin, whatever the norm") {
  const LossScalingOptions options{.growth_interval = 3};
  for (const double square : {2.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    CAPTURE(square);
    Operands<float> t(53);
    auto& squares = t.given(std::vector<double>{0x1p40, 3 * 0x1p38, square * 0x1p30});
    auto& scale = t.given(std::vector<LossScale>{{4096, 1, 7}});
    auto& control = t.given(std::vector<UpdateControl>(1));
    auto& count = t.given(std::vector<std::int64_t>{6});
    auto& factor = t.unset(1);
    t.run([&](auto& s, auto at) {
      reciprocal(s, factor(at), Vector<const std::int64_t>(count(at)),
                 Vector<const LossScale>(scale(at)));
      for (int step = 0; step < 4; ++step)
        clip_by_norm(s, control(at), scale(at), Vector<const double>(squares(at)), 1.0, options);
    });
    check_equal("reciprocal of a scale", factor);
    CHECK(scale.equal());
    CHECK(factor.result()[0] == 4096.0F / 6);
    if (std::isfinite(square)) {
      CHECK(scale.result()[0] == LossScale{8192, 2, 7});  // it grows after the second good step
      CHECK(control.result()[0].norm ==
            doctest::Approx(std::sqrt(1.75 * 0x1p40 + 2 * 0x1p30) / 8192));
      CHECK(control.result()[0].gradient_scale * 8192 * control.result()[0].norm ==
            doctest::Approx(1.0).epsilon(1e-6));
    } else {
      CHECK(scale.result()[0] == LossScale{256, 0, 11});
      CHECK(control.result()[0].skip == 1);
      CHECK(control.result()[0].skipped_steps == 10);
    }
  }
}

TEST_CASE("gpu: every number of Float16 is widened and rounded as on the host") {
  // All numbers with a half step more, and less: to the even neighbour. NaNs stay such.
  std::vector<float> wide;
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    Float16 half;
    half.bits = static_cast<std::uint16_t>(bits);
    const float value = half;
    for (const float x : {value, value * (1 + 0x1p-11F), value * (1 - 0x1p-12F), value * 3})
      wide.push_back(x);
  }
  // Of an odd length, so that numbers go by packs and one by one.
  wide.push_back(0.1F);
  Operands<Float16> t(59);
  auto& in = t.given(wide);
  auto& rounded = t.poisoned(in.size());
  auto& doubled = t.poisoned(in.size());
  t.run([&](auto& s, auto at) {
    to_storage(s, rounded(at), InVector(in(at)));
    add(s, doubled.matrix(at, 1), rounded.matrix(at, 1), rounded.matrix(at, 1));
  });
  Index wrong = 0;
  for (std::size_t i = 0; i < wide.size(); ++i) {
    const Float16 expected(wide[i]);
    const auto differs = [](Float16 got, Float16 want) {
      return std::isnan(static_cast<float>(want)) ? !std::isnan(static_cast<float>(got))
                                                  : got.bits != want.bits;
    };
    wrong += differs(rounded.result()[i], expected) ? 1 : 0;
    wrong += differs(doubled.result()[i], Float16(2 * static_cast<float>(expected))) ? 1 : 0;
  }
  CHECK(wrong == 0);
}

TEST_CASE("gpu: sums of squares of many ranges") {
  const Index size = 200'000;
  Operands<float> t(47);
  auto& values = t.floats(size, -3, 3);
  // Empty, short, of one piece exactly, of many, at odd places, two of one slot.
  std::vector<SquareRange> list{{16, 16, 4},         {100'000, 100'001, 1}, {0, 16, 0},
                                {32, 32 + 16384, 2}, {16421, 99'999, 3},    {100'002, 170'000, 1}};
  for (Index begin = 170'000; begin + 40 < size; begin += 50)
    list.push_back({begin, begin + 40, 5 + (begin - 170'000) / 50});
  auto& ranges = t.given(list);
  auto& out = t.given(std::vector<double>(700, 0.25));
  t.run([&](auto& s, auto at) { sums_of_squares(s, out(at), InVector(values(at)), ranges(at)); });
  // fp64 sums of 1e5 numbers in another order.
  check_close("sums_of_squares", out, 1e-12);
  for (std::size_t slot = 0; slot < 700; ++slot)
    CHECK(out.result()[slot] == doctest::Approx(out(OnHost{}).data()[slot]).epsilon(1e-12));
}

namespace {

/// Times operations on buffers that take turns, so that none is in the cache from its last use.
class Bench {
 public:
  static constexpr int turns = 3;

  /// Filled with 1/2.
  template <class T>
  std::vector<Vector<T>> buffers(Index count) {
    std::vector<Vector<T>> out;
    for (int turn = 0; turn < turns; ++turn) {
      memory_.emplace_back(sizeof(T) * static_cast<std::size_t>(count));
      out.emplace_back(reinterpret_cast<T*>(memory_.back().data()), count);
      if constexpr (mega::storage<T>) {
        fill(stream_, Matrix<T>(out.back().data(), 1, count), 0.5F);
      } else {
        fill_zero(stream_, out.back());
      }
    }
    return out;
  }
  template <class T>
  Vector<const T> uploaded(const std::vector<T>& values) {
    memory_.emplace_back(sizeof(T) * values.size());
    const Vector<T> out(reinterpret_cast<T*>(memory_.back().data()),
                        static_cast<Index>(values.size()));
    upload(stream_, out, Vector<const T>(values.data(), out.size()));
    stream_.synchronize();
    return out;
  }

  /// Prints the median of 20 runs of op(stream, turn), and the rate that `bytes` make of it.
  template <class Op>
  void time(const char* name, double bytes, const Op& op) {
    constexpr int warm = 3, runs = 20;
    cudaEvent_t begin[runs], end[runs];
    for (int i = 0; i < warm; ++i) op(stream_, i % turns);
    for (int i = 0; i < runs; ++i) {
      mega::cuda::check(cudaEventCreate(&begin[i]), "cudaEventCreate");
      mega::cuda::check(cudaEventCreate(&end[i]), "cudaEventCreate");
      mega::cuda::check(cudaEventRecord(begin[i], stream_.native()), "cudaEventRecord");
      op(stream_, i % turns);
      mega::cuda::check(cudaEventRecord(end[i], stream_.native()), "cudaEventRecord");
    }
    stream_.synchronize();
    std::vector<float> ms(runs);
    for (int i = 0; i < runs; ++i) {
      mega::cuda::check(cudaEventElapsedTime(&ms[static_cast<std::size_t>(i)], begin[i], end[i]),
                        "cudaEventElapsedTime");
      cudaEventDestroy(begin[i]);
      cudaEventDestroy(end[i]);
    }
    std::nth_element(ms.begin(), ms.begin() + runs / 2, ms.end());
    const double median = ms[runs / 2];
    std::printf("%-52s %9.1f us %8.0f GB/s\n", name, 1e3 * median, bytes / median * 1e-6);
    CHECK(median > 0);
  }

 private:
  mega::cuda::Stream stream_;
  std::vector<mega::cuda::Memory> memory_;
};

template <class T>
Matrix<T> shaped(const std::vector<Vector<T>>& buffers, int turn, Index rows) {
  const Vector<T> flat = buffers[static_cast<std::size_t>(turn)];
  return {flat.data(), rows, flat.size() / rows};
}
template <class T>
Vector<T> of(const std::vector<Vector<T>>& buffers, int turn) {
  return buffers[static_cast<std::size_t>(turn)];
}

void time_norms(Index rows, Index cols) {
  Bench bench;
  const Index n = rows * cols;
  const auto x = bench.buffers<Bfloat16>(n), y = bench.buffers<Bfloat16>(n),
             a = bench.buffers<Bfloat16>(n), b = bench.buffers<Bfloat16>(n);
  const auto w = bench.buffers<Bfloat16>(cols), bias = bench.buffers<Bfloat16>(cols);
  const auto mean = bench.buffers<float>(rows), rstd = bench.buffers<float>(rows);
  const auto dw = bench.buffers<float>(cols), db = bench.buffers<float>(cols),
             dc = bench.buffers<float>(cols);
  const double bytes = 2.0 * static_cast<double>(n);
  const auto named = [&](const char* op) {
    return std::string(op) + " " + std::to_string(rows) + " x " + std::to_string(cols);
  };
  bench.time(named("copy").c_str(), 2 * bytes,
             [&](auto& s, int t) { copy(s, of(y, t), Vector<const Bfloat16>(of(x, t))); });
  bench.time(named("add").c_str(), 3 * bytes, [&](auto& s, int t) {
    add(s, shaped(y, t, rows), shaped(x, t, rows), shaped(a, t, rows));
  });
  bench.time(named("add_branch").c_str(), 3 * bytes, [&](auto& s, int t) {
    add_branch(s, shaped(y, t, rows), shaped(x, t, rows), shaped(a, t, rows), of(bias, t));
  });
  bench.time(named("bias_gradient").c_str(), bytes,
             [&](auto& s, int t) { bias_gradient(s, of(db, t), shaped(x, t, rows)); });
  bench.time(named("layer_norm_forward").c_str(), 2 * bytes, [&](auto& s, int t) {
    layer_norm_forward(s, shaped(y, t, rows), of(mean, t), of(rstd, t), shaped(x, t, rows),
                       of(w, t), of(bias, t), 1e-5F);
  });
  bench.time(named("add_layer_norm_forward").c_str(), 4 * bytes, [&](auto& s, int t) {
    add_layer_norm_forward(s, shaped(y, t, rows), shaped(b, t, rows), of(mean, t), of(rstd, t),
                           shaped(x, t, rows), shaped(a, t, rows), of(bias, t), of(w, t),
                           of(bias, t), 1e-5F);
  });
  bench.time(named("add_rms_norm_forward").c_str(), 4 * bytes, [&](auto& s, int t) {
    add_rms_norm_forward(s, shaped(y, t, rows), shaped(b, t, rows), of(rstd, t), shaped(x, t, rows),
                         shaped(a, t, rows), Vector<const Bfloat16>(), of(w, t), 1e-5F);
  });
  bench.time(named("layer_norm_backward").c_str(), 4 * bytes, [&](auto& s, int t) {
    layer_norm_backward(s, shaped(y, t, rows), of(dw, t), of(db, t), shaped(a, t, rows),
                        shaped(b, t, rows), shaped(x, t, rows), of(w, t), of(mean, t), of(rstd, t),
                        of(dc, t));
  });
  bench.time(named("rms_norm_backward").c_str(), 4 * bytes, [&](auto& s, int t) {
    rms_norm_backward(s, shaped(y, t, rows), of(dw, t), shaped(a, t, rows), shaped(b, t, rows),
                      shaped(x, t, rows), of(w, t), of(rstd, t));
  });
}

void time_activations(Index rows, Index cols) {
  Bench bench;
  const Index n = rows * cols;
  const auto x = bench.buffers<Bfloat16>(n), y = bench.buffers<Bfloat16>(n),
             a = bench.buffers<Bfloat16>(n);
  const auto wide = bench.buffers<Bfloat16>(2 * n), dwide = bench.buffers<Bfloat16>(2 * n);
  const auto db = bench.buffers<float>(cols);
  const double bytes = 2.0 * static_cast<double>(n);
  const auto named = [&](const char* op) {
    return std::string(op) + " " + std::to_string(rows) + " x " + std::to_string(cols);
  };
  bench.time(named("gelu_tanh_forward").c_str(), 2 * bytes,
             [&](auto& s, int t) { gelu_tanh_forward(s, shaped(y, t, rows), shaped(x, t, rows)); });
  bench.time(named("gelu_tanh_backward").c_str(), 3 * bytes, [&](auto& s, int t) {
    gelu_tanh_backward(s, shaped(y, t, rows), shaped(a, t, rows), shaped(x, t, rows));
  });
  bench.time(named("gelu_tanh_backward_bias").c_str(), 3 * bytes, [&](auto& s, int t) {
    gelu_tanh_backward_bias(s, shaped(y, t, rows), of(db, t), shaped(a, t, rows),
                            shaped(x, t, rows));
  });
  bench.time(named("swiglu_forward").c_str(), 3 * bytes,
             [&](auto& s, int t) { swiglu_forward(s, shaped(y, t, rows), shaped(wide, t, rows)); });
  bench.time(named("swiglu_backward").c_str(), 5 * bytes, [&](auto& s, int t) {
    swiglu_backward(s, shaped(dwide, t, rows), shaped(a, t, rows), shaped(wide, t, rows));
  });
}

}  // namespace

TEST_CASE("gpu: rates of the operations on Bfloat16") {
  time_norms(32768, 768);
  time_norms(16384, 2048);
  time_norms(8192, 4096);
  time_norms(4096, 8192);
  time_activations(16384, 8192);
  time_activations(32768, 3072);
  {
    Bench bench;
    const AttentionShape shape{2, 8192, 32, 8, 128};
    const auto qkv = bench.buffers<Bfloat16>(shape.rows() * shape.width());
    const auto frequencies = bench.buffers<float>(shape.head_dim / 2);
    bench.time("rope_forward 16384 x 40 heads x 128",
               4.0 * static_cast<double>(shape.rows() * 40 * 128), [&](auto& s, int t) {
                 rope_forward(s, shaped(qkv, t, shape.rows()), of(frequencies, t), shape, 0);
               });
  }
  for (const Index vocab : {Index{50304}, Index{128256}}) {
    Bench bench;
    const Index rows = 4096;
    const auto logits = bench.buffers<Bfloat16>(rows * vocab);
    const auto row_loss = bench.buffers<float>(rows), scale = bench.buffers<float>(1);
    const auto loss = bench.buffers<double>(1);
    const auto targets = bench.buffers<std::int32_t>(rows);
    bench.time(("fused_cross_entropy 4096 x " + std::to_string(vocab)).c_str(),
               4.0 * static_cast<double>(rows * vocab), [&](auto& s, int t) {
                 fused_cross_entropy(s, shaped(logits, t, rows), of(loss, t), of(row_loss, t),
                                     of(targets, t), vocab - 47, of(scale, t));
               });
  }
  for (const auto [rows, cols, vocab] :
       {std::array<Index, 3>{32768, 768, 50304}, std::array<Index, 3>{16384, 4096, 128256}}) {
    Bench bench;
    // As frequent as words are: one in k of the k-th.
    const RandomKey key{1, 0, 0, RandomUse::test};
    std::vector<std::int32_t> text;
    std::vector<bool> seen(static_cast<std::size_t>(vocab));
    Index distinct = 0;
    for (Index i = 0; i < rows; ++i) {
      const double rank = std::pow(static_cast<double>(vocab), key.uniform(i));
      text.push_back(
          std::min(static_cast<std::int32_t>(rank), static_cast<std::int32_t>(vocab - 1)));
      if (!seen[static_cast<std::size_t>(text.back())]) ++distinct;
      seen[static_cast<std::size_t>(text.back())] = true;
    }
    const auto tokens = bench.uploaded(text);
    const auto dout = bench.buffers<Bfloat16>(rows * cols),
               out = bench.buffers<Bfloat16>(rows * cols);
    const auto table = bench.buffers<Bfloat16>(vocab * cols);
    const auto dtable = bench.buffers<float>(vocab * cols);
    const double each = static_cast<double>(cols);
    const std::string shape = " " + std::to_string(rows) + " x " + std::to_string(cols);
    bench.time(("embedding_forward" + shape).c_str(),
               2.0 * each * static_cast<double>(rows + distinct), [&](auto& s, int t) {
                 embedding_forward(s, shaped(out, t, rows), tokens, shaped(table, t, vocab), 0);
               });
    bench.time(("embedding_backward" + shape).c_str(),
               each * (2.0 * static_cast<double>(rows) + 8.0 * static_cast<double>(distinct)),
               [&](auto& s, int t) {
                 embedding_backward(s, shaped(dtable, t, vocab), shaped(dout, t, rows), tokens, 0);
               });
    const Index time = 2048;
    bench.time(("position_embedding_backward" + shape).c_str(),
               each * (2.0 * static_cast<double>(rows) + 8.0 * static_cast<double>(time)),
               [&](auto& s, int t) {
                 position_embedding_backward(s, shaped(dtable, t, vocab), shaped(dout, t, rows),
                                             time, 0);
               });
  }
  {
    Bench bench;
    const Index size = 162'500'000;
    const auto values = bench.buffers<Bfloat16>(size);
    const auto master = bench.buffers<float>(size), first = bench.buffers<float>(size),
               second = bench.buffers<float>(size), gradient = bench.buffers<float>(size);
    // Three hundred tensors, half of them short.
    std::vector<Segment> list;
    std::vector<SquareRange> pieces;
    const Index step = size / 150 / 16 * 16;
    for (Index k = 0; k < 150; ++k) {
      const Index begin = k * step, end = k == 149 ? size : begin + step;
      list.push_back({begin, begin + 768, false});
      list.push_back({begin + 768, end, true});
      pieces.push_back({begin, begin + 768, 2 * k});
      pieces.push_back({begin + 768, end, 2 * k + 1});
    }
    const auto segments = bench.uploaded(list);
    const auto ranges = bench.uploaded(pieces);
    const auto control = bench.uploaded(std::vector<UpdateControl>(1));
    const auto squares = bench.buffers<double>(300);
    const auto n = static_cast<double>(size);
    bench.time("adamw_update, masters, 162.5e6", 30 * n, [&](auto& s, int t) {
      adamw_update(s, of(values, t), of(master, t), of(first, t), of(second, t), of(gradient, t),
                   segments, control, AdamWOptions{});
    });
    bench.time("adamw_update, float, 162.5e6", 28 * n, [&](auto& s, int t) {
      adamw_update(s, of(master, t), of(first, t), of(second, t), of(gradient, t), segments,
                   control, AdamWOptions{});
    });
    bench.time("sums_of_squares 162.5e6", 4 * n, [&](auto& s, int t) {
      sums_of_squares(s, of(squares, t), InVector(of(gradient, t)), ranges);
    });
    bench.time("to_storage 162.5e6", 6 * n,
               [&](auto& s, int t) { to_storage(s, of(values, t), InVector(of(master, t))); });
    bench.time("accumulate 162.5e6", 12 * n,
               [&](auto& s, int t) { accumulate(s, of(master, t), InVector(of(gradient, t))); });
  }
}
