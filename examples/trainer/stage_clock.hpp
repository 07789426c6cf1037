/// @file  StageClock: how long the calls of a rank's stages take, from what a recorder recorded.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/scan/record.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace trainer {

/// Keeps the spans of each kind of call of each chunk, the first step's left out.
class StageClock {
 public:
  explicit StageClock(int chunks)
      : spans_(std::make_shared<std::vector<Chunk>>(static_cast<std::size_t>(chunks))) {}

  /// For one recorder; it may outlive the clock.
  [[nodiscard]] std::unique_ptr<mega::scan::RecordSink> sink() const {
    return std::make_unique<Sink>(spans_);
  }

  /// Seconds of a chunk, medians over the steps; the loss counts as a part of the input gradient. 0
  /// where nothing was recorded. @pre  the recorder is closed
  [[nodiscard]] mega::dpp::ActionTimes times(int chunk) const {
    const Chunk& c = (*spans_)[static_cast<std::size_t>(chunk)];
    return {median(c.forward), median(c.loss) + median(c.input), median(c.weight)};
  }

 private:
  using Spans = std::vector<mega::scan::Nanoseconds>;
  struct Chunk {
    Spans forward, loss, input, weight;
  };

  [[nodiscard]] static double median(Spans spans) {
    if (spans.empty()) return 0;
    const auto middle = spans.begin() + static_cast<std::ptrdiff_t>(spans.size() / 2);
    std::nth_element(spans.begin(), middle, spans.end());
    return static_cast<double>(*middle) / 1e9;
  }

  class Sink final : public mega::scan::RecordSink {
   public:
    explicit Sink(std::shared_ptr<std::vector<Chunk>> to) : to_(std::move(to)) {}

    void start(const mega::scan::RecordingInfo&) override {}
    void lane(int, std::string_view) override {}
    void group(int, std::string_view, std::span<const int>) override {}
    void anchor(const mega::scan::ClockAnchor&) override {}
    void finish(const mega::scan::RecordingTotals&) override {}
    void record(const mega::scan::Record& r) override {
      using enum mega::dpp::ActionKind;
      if (r.step < 1 || r.chunk < 0) return;
      Chunk& chunk = (*to_)[static_cast<std::size_t>(r.chunk)];
      const auto take_if = [&](mega::dpp::ActionKind kind, Spans& spans) {
        if (r.name == to_string(kind)) spans.push_back(r.end - r.begin);
      };
      take_if(forward, chunk.forward);
      take_if(loss, chunk.loss);
      take_if(backward_input, chunk.input);
      take_if(backward_weight, chunk.weight);
    }

   private:
    std::shared_ptr<std::vector<Chunk>> to_;
  };

  std::shared_ptr<std::vector<Chunk>> spans_;
};

}  // namespace trainer
