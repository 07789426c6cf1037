/// @file  Tensor parallelism: how weights are divided between the ranks of the tensor axis, and the
/// two places where activations cross between them.
/// Sources: Shoeybi et al., arXiv 1909.08053; with divided rows Korthikanti et al., arXiv
/// 2205.05198.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/product.hpp>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::nn {

/// Weight [outputs, inputs] whose outputs are divided. `parts` are sizes of packed outputs, each
/// divided by itself, so that a rank owns whole heads, or matching columns of gate and up. Weights
/// of products have gradients that overwrite first.
[[nodiscard]] inline Parameter column_parallel_weight(std::string name, std::vector<Index> parts,
                                                      Index inputs, Init init) {
  Index outputs = 0;
  for (const Index part : parts) outputs += part;
  return {.name = std::move(name),
          .shape = {outputs, inputs},
          .shard = {0, std::move(parts)},
          .init = init,
          .overwritten_first = true};
}

/// Its bias, divided alike; no decay.
[[nodiscard]] inline Parameter column_parallel_bias(std::string name, std::vector<Index> parts) {
  Parameter p = column_parallel_weight(std::move(name), std::move(parts), 1, {});
  p.shape.pop_back();
  p.decay = false;
  p.overwritten_first = false;
  return p;
}

/// Weight [outputs, inputs] whose inputs are divided: the ranks' products are summed.
[[nodiscard]] inline Parameter row_parallel_weight(std::string name, Index outputs, Index inputs,
                                                   Init init) {
  return {.name = std::move(name),
          .shape = {outputs, inputs},
          .shard = {1, {inputs}},
          .init = init,
          .overwritten_first = true};
}

/// A vector that all ranks hold; no decay.
/// @param partial  each rank sees the gradient of its own rows only
[[nodiscard]] inline Parameter replicated_vector(std::string name, Index size, Init init,
                                                 bool partial) {
  return {.name = std::move(name),
          .shape = {size},
          .init = init,
          .decay = false,
          .partial_over_tensor = partial};
}

/// Table [vocab, width] whose rows are divided; a vocabulary that does not divide is padded.
[[nodiscard]] inline Parameter vocab_parallel_table(std::string name, Index vocab, Index width,
                                                    Init init) {
  return {.name = std::move(name), .shape = {vocab, width}, .shard = {0, {vocab}}, .init = init};
}

/// A rank's rows [first, first + valid) of a divided vocabulary, in a table of `padded` rows.
struct VocabRange {
  Index first = 0;
  Index valid = 0;
  Index padded = 0;

  [[nodiscard]] static constexpr VocabRange of_rank(Index vocab, int rank, int degree) noexcept {
    const Index padded = (vocab + degree - 1) / degree;
    const Index first = std::min(vocab, padded * rank);
    return {padded * rank, std::min(padded, vocab - first), padded};
  }
};

/// One rank's view of where the residual stream meets the divided products. The stream is either
/// whole on every rank or, under sequence parallelism, divided by rows: rank t holds the rows
/// [t, t + 1) * rows / degree. Inside, every rank has all rows. gather() leads in, reduce() out;
/// backward runs them the other way round.
/// @law  both divisions give the same bits, since the canonical sum does not depend on it
template <class Comm>
class TensorRegion {
 public:
  /// @param rows  of the whole residual stream   @pre  comm outlives the region
  TensorRegion(Comm& comm, Index rows, bool sequence_parallel) noexcept
      : comm_(&comm), rows_(rows), divides_rows_(sequence_parallel && comm.size() > 1) {}

  [[nodiscard]] int rank() const noexcept { return comm_->rank(); }
  [[nodiscard]] int degree() const noexcept { return comm_->size(); }
  [[nodiscard]] Comm& comm() const noexcept { return *comm_; }
  [[nodiscard]] bool divides_rows() const noexcept { return divides_rows_; }
  [[nodiscard]] Index rows() const noexcept { return rows_; }
  [[nodiscard]] Index own_rows() const noexcept { return divides_rows_ ? rows_ / degree() : rows_; }
  /// First of the rows of the residual stream that this rank holds.
  [[nodiscard]] Index first_row() const noexcept { return divides_rows_ ? rank() * own_rows() : 0; }

  /// This rank's rows of a matrix that has them all.
  template <class T>
  [[nodiscard]] Matrix<T> own(Matrix<T> whole) const noexcept {
    return whole.slice(first_row(), own_rows());
  }

  /// All rows: `part` itself where it has them, else gathered into `whole`. part may be own(whole).
  template <class S, class T>
  Matrix<const T> gather(S& stream, Matrix<T> whole,
                         Matrix<const std::type_identity_t<T>> part) const {
    if (!divides_rows_) return part;
    comm_->all_gather(stream, whole.flat(), part.flat());
    return whole;
  }

  /// Own rows of the sum over the ranks of `partial`, in its memory.
  template <class S, class T>
  Matrix<T> reduce(S& stream, Matrix<T> partial) const {
    const Matrix<T> mine = own(partial);
    if (divides_rows_) {
      comm_->reduce_scatter(stream, mine.flat(), Vector<const T>(partial.flat()),
                            comm::Reduce::sum);
    } else {
      comm_->all_reduce(stream, partial.flat(), comm::Reduce::sum);
    }
    return mine;
  }

 private:
  Comm* comm_;
  Index rows_;
  bool divides_rows_;
};

/// The three products of a linear map y = x W^T with W [outputs, inputs]; extents come from the
/// activations. All are ordered on `stream`.
template <class Product>
struct Linear {
  using T = typename Product::element;

  /// y = x W^T
  template <class S>
  static void forward(S& stream, Matrix<T> y, Matrix<const T> x, Vector<const T> w) {
    Product::gemm(stream, Transpose::no, Transpose::yes, y.rows(), y.cols(), x.cols(), 1.0F,
                  x.data(), x.cols(), w.data(), x.cols(), 0.0F, y.data(), y.cols());
  }
  /// y = x W^T + bias; an empty bias is none.
  template <class S>
  static void forward(S& stream, Matrix<T> y, Matrix<const T> x, Vector<const T> w,
                      Vector<const T> bias) {
    if (bias.empty()) return forward(stream, y, x, w);
    if constexpr (fuses_bias<Product, S>) {
      if (Product::fuses_rows_of(x.cols()) && Product::fuses_rows_of(y.cols()))
        return Product::gemm_bias(stream, Transpose::no, Transpose::yes, y.rows(), y.cols(),
                                  x.cols(), x.data(), x.cols(), w.data(), x.cols(), bias.data(),
                                  y.data(), y.cols());
    }
    forward(stream, y, x, w);
    bias_add(stream, y, Matrix<const T>(y), bias);
  }
  /// dx = dy W
  template <class S>
  static void backward_input(S& stream, Matrix<T> dx, Matrix<const T> dy, Vector<const T> w) {
    Product::gemm(stream, Transpose::no, Transpose::no, dx.rows(), dx.cols(), dy.cols(), 1.0F,
                  dy.data(), dy.cols(), w.data(), dx.cols(), 0.0F, dx.data(), dx.cols());
  }
  /// dw += dy^T x, or dw = dy^T x if `overwrites`.
  template <class S>
  static void backward_weight(S& stream, Vector<float> dw, Matrix<const T> dy, Matrix<const T> x,
                              bool overwrites) {
    Product::gemm(stream, Transpose::yes, Transpose::no, dy.cols(), x.cols(), x.rows(), 1.0F,
                  dy.data(), dy.cols(), x.data(), x.cols(), overwrites ? 0.0F : 1.0F, dw.data(),
                  x.cols());
  }
};

}  // namespace mega::inline v0::nn
