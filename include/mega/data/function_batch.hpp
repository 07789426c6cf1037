/// @file  FunctionBatch: micro-batches of matrices computed from a function of the element's index.
#pragma once
#include <mega/core/view.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mega::inline v0::data {

/// The batch of one data-parallel rank for stages that read and predict fp32 matrices. The global
/// batch has microbatches * data_degree micro-batches of `rows` samples; rank d holds those from
/// d * microbatches on. Every target counts.
class FunctionBatch {
 public:
  /// @param f  f(i) -> pair of input and target of element i of the global batch
  template <class F>
  requires requires(const F& f, Index i) {
    { f(i) } -> std::convertible_to<std::pair<float, float>>;
  }
  FunctionBatch(int microbatches, Index rows, Index cols, const F& f, int data_rank = 0)
      : microbatches_(microbatches),
        rows_(rows),
        cols_(cols),
        first_sample_(data_rank * microbatches * rows) {
    const Index count = microbatches * rows * cols;
    for (Index i = 0; i < count; ++i) {
      const std::pair<float, float> sample = f(first_sample_ * cols + i);
      inputs_.push_back(sample.first);
      targets_.push_back(sample.second);
    }
  }

  [[nodiscard]] int microbatches() const noexcept { return microbatches_; }
  [[nodiscard]] Matrix<const float> input(int microbatch) const { return at(inputs_, microbatch); }
  [[nodiscard]] Matrix<const float> target(int microbatch) const {
    return at(targets_, microbatch);
  }
  [[nodiscard]] Index first_sample(int microbatch) const noexcept {
    return first_sample_ + microbatch * rows_;
  }
  [[nodiscard]] std::int64_t valid_targets() const noexcept {
    return static_cast<std::int64_t>(targets_.size());
  }

 private:
  [[nodiscard]] Matrix<const float> at(const std::vector<float>& all, int microbatch) const {
    return {all.data() + microbatch * rows_ * cols_, rows_, cols_};
  }

  int microbatches_;
  Index rows_, cols_, first_sample_;
  std::vector<float> inputs_, targets_;
};

}  // namespace mega::inline v0::data
