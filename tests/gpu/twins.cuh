/// @file  Runs an operation on the GPU, twice, and its host twin, from the same initial contents of
/// all their operands.
#pragma once
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/host/stream.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mega_test {

using mega::Index;
using mega::Matrix;
using mega::Vector;

/// Which side's memory a view is of.
struct OnHost {};
struct OnDevice {};

class AnyTwin {
 public:
  virtual ~AnyTwin() = default;
  virtual void reset(mega::cuda::Stream& stream) = 0;
  virtual void keep(mega::cuda::Stream& stream) = 0;
  [[nodiscard]] virtual bool repeats() const = 0;
};

/// An operand that exists on both sides.
template <class T>
class Twin : public AnyTwin {
 public:
  explicit Twin(std::vector<T> initial)
      : initial_(std::move(initial)), host_(initial_), memory_(initial_.size() * sizeof(T)) {}

  [[nodiscard]] Index size() const { return static_cast<Index>(initial_.size()); }
  [[nodiscard]] Vector<T> operator()(OnHost) { return {host_.data(), size()}; }
  [[nodiscard]] Vector<T> operator()(OnDevice) {
    return {reinterpret_cast<T*>(memory_.data()), size()};
  }
  template <class Place>
  [[nodiscard]] Matrix<T> matrix(Place place, Index rows) {
    return {(*this)(place).data(), rows, rows == 0 ? 0 : size() / rows};
  }
  template <class Place, class... Extents>
  [[nodiscard]] auto view(Place place, Extents... extents) {
    return mega::View<T, static_cast<int>(sizeof...(Extents))>((*this)(place).data(), extents...);
  }

  /// Largest difference of the two sides, over the largest number of the host; NaN is infinite.
  [[nodiscard]] double worst() const {
    double difference = 0, largest = 0;
    for (std::size_t i = 0; i < host_.size(); ++i) {
      const auto a = static_cast<double>(host_[i]), b = static_cast<double>(device_[i]);
      if (a == b) continue;
      difference = std::isfinite(a - b) ? std::max(difference, std::abs(a - b))
                                        : std::numeric_limits<double>::infinity();
      if (!std::isfinite(difference)) return difference;
    }
    for (const T value : host_)
      if (std::isfinite(static_cast<double>(value)))
        largest = std::max(largest, std::abs(static_cast<double>(value)));
    return largest > 0 ? difference / largest : difference;
  }
  [[nodiscard]] bool equal() const {
    return host_.empty() ||
           std::memcmp(host_.data(), device_.data(), host_.size() * sizeof(T)) == 0;
  }
  /// What the GPU made.
  [[nodiscard]] const std::vector<T>& result() const { return device_; }

  void reset(mega::cuda::Stream& stream) override {
    host_ = initial_;
    upload(stream, (*this)(OnDevice{}), Vector<const T>(initial_.data(), size()));
  }
  void keep(mega::cuda::Stream& stream) override {
    before_ = std::move(device_);
    device_.assign(initial_.size(), T{});
    download(stream, Vector<T>(device_.data(), size()), Vector<const T>((*this)(OnDevice{})));
    stream.synchronize();
  }
  [[nodiscard]] bool repeats() const override {
    return before_.size() == device_.size() &&
           (device_.empty() ||
            std::memcmp(before_.data(), device_.data(), device_.size() * sizeof(T)) == 0);
  }

 private:
  std::vector<T> initial_, host_, device_, before_;
  mega::cuda::Memory memory_;
};

/// The operands of one comparison, which they do not outlive.
class Twins {
 public:
  explicit Twins(std::uint64_t seed) : key_{seed, 0, 0, mega::RandomUse::test} {}

  template <class T>
  Twin<T>& given(std::vector<T> initial) {
    auto twin = std::make_unique<Twin<T>>(std::move(initial));
    Twin<T>& out = *twin;
    all_.push_back(std::move(twin));
    return out;
  }
  /// Even in [low, high).
  Twin<float>& random(Index count, float low = -1, float high = 1) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& v : values) v = low + (high - low) * static_cast<float>(next() >> 8) * 0x1p-24F;
    return given(std::move(values));
  }
  Twin<std::int32_t>& integers(Index count, int low, int end) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    for (auto& v : values)
      v = low + static_cast<std::int32_t>(next() % static_cast<std::uint32_t>(end - low));
    return given(std::move(values));
  }
  /// An output: a number that is not written stays NaN, and so differs from everything.
  template <class T = float>
  Twin<T>& poisoned(Index count) {
    return given(
        std::vector<T>(static_cast<std::size_t>(count), std::numeric_limits<T>::quiet_NaN()));
  }

  /// op(stream, place): on the GPU, again, and on the host. The GPU gives the same bits twice.
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
  std::uint32_t next() { return key_.bits(drawn_++); }

  mega::RandomKey key_;
  Index drawn_ = 0;
  mega::cuda::Stream stream_;
  std::vector<std::unique_ptr<AnyTwin>> all_;
};

/// Remembers the worst difference of each result; prints the table when the program ends.
class WorstDifferences {
 public:
  static WorstDifferences& table() {
    static WorstDifferences table;
    return table;
  }
  void add(const std::string& result, double difference) {
    auto& worst = worst_[result];
    worst = std::max(worst, difference);
  }
  ~WorstDifferences() {
    for (const auto& [result, difference] : worst_)
      std::printf("worst %-36s %.2e\n", result.c_str(), difference);
  }

 private:
  std::map<std::string, double> worst_;
};

template <class T>
void check_close(const std::string& result, const Twin<T>& twin, double bound) {
  CAPTURE(result);
  const double worst = twin.worst();
  WorstDifferences::table().add(result, worst);
  CHECK(worst <= bound);
}
template <class T>
void check_equal(const std::string& result, const Twin<T>& twin) {
  CAPTURE(result);
  WorstDifferences::table().add(result, twin.equal() ? 0.0 : std::max(twin.worst(), 1e-300));
  CHECK(twin.equal());
}

}  // namespace mega_test
