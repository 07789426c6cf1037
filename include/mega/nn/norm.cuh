/// @file  Layer normalisation and root-mean-square normalisation of rows, on a GPU. The host twins
/// in nn/norm.hpp say what each operation does.
#pragma once
#include <mega/core/bfloat16.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/norm_rows.cuh>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/elementwise.cuh>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <type_traits>

namespace mega::inline v0::cuda {

namespace detail {

template <bool Centred, storage T>
void norm_forward(Stream& stream, std::string_view op, NormForward<T> operands) {
  const Index rows = operands.rows, cols = operands.cols;
  const bool packs = all_packs_fit(cols, operands.out, operands.weight, operands.bias) &&
                     packs_fit(operands.branch == nullptr ? operands.x : operands.y, cols);
  // How the branch lies in memory must not change the width, and so the sums, of the norm.
  if (packs && !all_packs_fit(cols, operands.x, operands.branch, operands.branch_bias)) {
    for_each_pack<1>(
        stream, op, rows, cols,
        AddBranch<T>{operands.y, operands.x, operands.branch, operands.branch_bias, cols});
    operands.x = operands.y;
    operands.branch = nullptr;
  }
  with_width<T>(packs, [&]<int W>(std::integral_constant<int, W>) {
    launch_rows<W>(stream, op, rows, cols, norm_forward_rows<W, norm_kept, Centred, T>,
                   norm_forward_rows<W, 0, Centred, T>, operands);
  });
}

template <storage T>
[[nodiscard]] bool norm_packs_fit(const NormBackward<T>& operands) noexcept {
  return all_packs_fit(operands.cols, operands.dx, operands.dy, operands.dout, operands.x,
                       operands.weight);
}

template <bool Centred, storage T>
void norm_backward_input(Stream& stream, std::string_view op, const NormBackward<T>& operands) {
  with_width<T>(norm_packs_fit(operands), [&]<int W>(std::integral_constant<int, W>) {
    launch_rows<W>(stream, op, operands.rows, operands.cols,
                   norm_backward_rows<W, norm_kept, Centred, T>,
                   norm_backward_rows<W, 0, Centred, T>, operands);
  });
}

template <bool Centred, storage T>
void norm_backward_weight(Stream& stream, std::string_view op,
                          const ColumnTargets<NormWeightTerms<Centred, T>::count>& targets,
                          Index rows, const NormWeightTerms<Centred, T>& terms) {
  with_width<T>(all_packs_fit(terms.cols, terms.dout, terms.x),
                [&]<int W>(std::integral_constant<int, W>) {
                  add_column_sums<W>(stream, op, targets, rows, terms.cols, terms);
                });
}

/// Elements of a row that a thread of the single pass holds: as many as registers allow with the
/// column sums of all of them. Without a bias, and packed in Bfloat16, twice as many fit.
inline constexpr int norm_columns_of_thread = 8;

/// Blocks of the single pass: the threads that a multiprocessor has registers for, on all of an
/// H200. A constant, so that the order of the sums does not depend on the GPU.
inline constexpr Index norm_resident_threads = 576;
inline constexpr Index norm_multiprocessors = 132;

template <int W, int Packs, bool Centred, storage T>
void norm_backward_in_one_pass(Stream& stream, std::string_view op, const NormBackward<T>& operands,
                               const ColumnTargets<norm_sums<Centred>>& targets) {
  const Index rows = operands.rows, cols = operands.cols;
  const Index across = ceil_div(cols, Index{warp_threads} * W * Packs) * warp_threads;
  const Index down = std::max<Index>(1, block_threads / across);
  const Index blocks =
      std::min(ceil_div(rows, down),
               norm_multiprocessors * std::max<Index>(1, norm_resident_threads / (across * down)));
  auto* const partial = static_cast<float*>(
      stream.scratch(sizeof(float) * static_cast<std::size_t>(blocks * norm_sums<Centred> * cols)));
  const Index tile = down > 1 ? across * down * W * Packs : 0;
  launch(stream, op, norm_backward_columns<W, Packs, Centred, T>, grid_x(blocks),
         dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)),
         sizeof(float) * static_cast<std::size_t>(tile), operands, partial);
  add_partial_sums(stream, op, targets, partial, blocks, cols);
}

/// @param dbranch_bias  may be null
template <bool Centred, storage T>
void norm_backward(Stream& stream, std::string_view op, const NormBackward<T>& operands,
                   const ColumnTargets<NormWeightTerms<Centred, T>::count>& dweights,
                   float* dbranch_bias) {
  const Index rows = operands.rows, cols = operands.cols;
  if (rows == 0 || cols == 0) return;
  ColumnTargets<norm_sums<Centred>> targets{};
  std::copy(std::begin(dweights.out), std::end(dweights.out), targets.out);
  targets.out[norm_sums<Centred> - 1] = dbranch_bias;
  with_width<T>(norm_packs_fit(operands), [&]<int W>(std::integral_constant<int, W>) {
    constexpr int packs = norm_columns_of_thread / W;
    constexpr Index most = Index{norm_threads} * norm_columns_of_thread;
    if (cols <= most)
      return norm_backward_in_one_pass<W, packs, Centred>(stream, op, operands, targets);
    if constexpr (!Centred && W == pack_size<Bfloat16>) {
      if (cols <= 2 * most)
        return norm_backward_in_one_pass<W, 2 * packs, Centred>(stream, op, operands, targets);
    }
    // dx may be dout, so dout is read first.
    norm_backward_weight<Centred, T>(
        stream, op, dweights, rows,
        {operands.dout, operands.x, operands.mean, operands.rstd, cols});
    norm_backward_input<Centred>(stream, op, operands);
    if (dbranch_bias != nullptr)
      add_column_sums<W>(stream, op, ColumnTargets<1>{{dbranch_bias}}, rows, cols,
                         RowTerms<T>{operands.dx, cols});
  });
}

}  // namespace detail

template <storage T>
void layer_norm_forward(Stream& stream, Matrix<T> out, Vector<float> mean, Vector<float> rstd,
                        Matrix<const std::type_identity_t<T>> x,
                        Vector<const std::type_identity_t<T>> weight,
                        Vector<const std::type_identity_t<T>> bias, float epsilon) {
  constexpr auto op = "layer_norm_forward";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "out", out, rows, cols);
  nn::detail::expects_size(op, "mean", mean, rows);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "bias", bias, cols);
  detail::norm_forward<true, T>(stream, op,
                                {out.data(), nullptr, mean.data(), rstd.data(), x.data(), nullptr,
                                 nullptr, weight.data(), bias.data(), rows, cols, epsilon});
}

/// y = x + (branch + branch_bias), and out = layer norm of y as stored: the bits that
/// layer_norm_forward() makes of y. branch_bias may be empty, y may be x.
/// @cost  1 launch; reads x and branch, writes y and out
template <storage T>
void add_layer_norm_forward(Stream& stream, Matrix<T> y, Matrix<std::type_identity_t<T>> out,
                            Vector<float> mean, Vector<float> rstd,
                            Matrix<const std::type_identity_t<T>> x,
                            Matrix<const std::type_identity_t<T>> branch,
                            Vector<const std::type_identity_t<T>> branch_bias,
                            Vector<const std::type_identity_t<T>> weight,
                            Vector<const std::type_identity_t<T>> bias, float epsilon) {
  constexpr auto op = "add_layer_norm_forward";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "y", y, rows, cols);
  nn::detail::expects_shape(op, "out", out, rows, cols);
  nn::detail::expects_size(op, "mean", mean, rows);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  nn::detail::expects_shape(op, "branch", branch, rows, cols);
  if (!branch_bias.empty()) nn::detail::expects_size(op, "branch_bias", branch_bias, cols);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "bias", bias, cols);
  detail::norm_forward<true, T>(stream, op,
                                {out.data(), y.data(), mean.data(), rstd.data(), x.data(),
                                 branch.data(), branch_bias.empty() ? nullptr : branch_bias.data(),
                                 weight.data(), bias.data(), rows, cols, epsilon});
}

template <storage T>
void layer_norm_backward_input(Stream& stream, Matrix<T> dx,
                               Matrix<const std::type_identity_t<T>> dout,
                               Matrix<const std::type_identity_t<T>> x,
                               Vector<const std::type_identity_t<T>> weight,
                               Vector<const float> mean, Vector<const float> rstd) {
  constexpr auto op = "layer_norm_backward_input";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "dx", dx, rows, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "mean", mean, rows);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  detail::norm_backward_input<true, T>(stream, op,
                                       {dx.data(), nullptr, dout.data(), x.data(), weight.data(),
                                        mean.data(), rstd.data(), rows, cols});
}

/// @tparam E  element of dout: a storage, const or not
template <class E>
requires storage<std::remove_const_t<E>>
void layer_norm_backward_weight(Stream& stream, Vector<float> dweight, Vector<float> dbias,
                                Matrix<E> dout, Matrix<const std::remove_const_t<E>> x,
                                Vector<const float> mean, Vector<const float> rstd) {
  constexpr auto op = "layer_norm_backward_weight";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_size(op, "dweight", dweight, cols);
  nn::detail::expects_size(op, "dbias", dbias, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "mean", mean, rows);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  detail::norm_backward_weight<true, std::remove_const_t<E>>(
      stream, op, {{dweight.data(), dbias.data()}}, rows,
      {dout.data(), x.data(), mean.data(), rstd.data(), cols});
}

/// dx = dy + gradient of the norm's input; dweight, dbias and, unless it is empty, dbranch_bias +=,
/// the last one column sums of dx as stored: the gradient of the bias of the branch that x ends
/// with. dy may be empty: then dx is the gradient alone. dx may be dy or dout.
/// @cost  2 launches and one pass over memory for rows of at most 4096 elements
/// @determinism  run to run; the order of the sums depends on the shape alone
template <storage T>
void layer_norm_backward(Stream& stream, Matrix<T> dx, Vector<float> dweight, Vector<float> dbias,
                         Matrix<const std::type_identity_t<T>> dy,
                         Matrix<const std::type_identity_t<T>> dout,
                         Matrix<const std::type_identity_t<T>> x,
                         Vector<const std::type_identity_t<T>> weight, Vector<const float> mean,
                         Vector<const float> rstd, Vector<float> dbranch_bias = {}) {
  constexpr auto op = "layer_norm_backward";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "dx", dx, rows, cols);
  nn::detail::expects_size(op, "dweight", dweight, cols);
  nn::detail::expects_size(op, "dbias", dbias, cols);
  if (!dy.empty()) nn::detail::expects_shape(op, "dy", dy, rows, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "mean", mean, rows);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  if (!dbranch_bias.empty()) nn::detail::expects_size(op, "dbranch_bias", dbranch_bias, cols);
  detail::norm_backward<true, T>(stream, op,
                                 {dx.data(), dy.empty() ? nullptr : dy.data(), dout.data(),
                                  x.data(), weight.data(), mean.data(), rstd.data(), rows, cols},
                                 {{dweight.data(), dbias.data()}},
                                 dbranch_bias.empty() ? nullptr : dbranch_bias.data());
}

template <storage T>
void rms_norm_forward(Stream& stream, Matrix<T> out, Vector<float> rstd,
                      Matrix<const std::type_identity_t<T>> x,
                      Vector<const std::type_identity_t<T>> weight, float epsilon) {
  constexpr auto op = "rms_norm_forward";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "out", out, rows, cols);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  nn::detail::expects_size(op, "weight", weight, cols);
  detail::norm_forward<false, T>(stream, op,
                                 {out.data(), nullptr, nullptr, rstd.data(), x.data(), nullptr,
                                  nullptr, weight.data(), nullptr, rows, cols, epsilon});
}

/// As add_layer_norm_forward(), with the norm of rms_norm_forward().
template <storage T>
void add_rms_norm_forward(Stream& stream, Matrix<T> y, Matrix<std::type_identity_t<T>> out,
                          Vector<float> rstd, Matrix<const std::type_identity_t<T>> x,
                          Matrix<const std::type_identity_t<T>> branch,
                          Vector<const std::type_identity_t<T>> branch_bias,
                          Vector<const std::type_identity_t<T>> weight, float epsilon) {
  constexpr auto op = "add_rms_norm_forward";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "y", y, rows, cols);
  nn::detail::expects_shape(op, "out", out, rows, cols);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  nn::detail::expects_shape(op, "branch", branch, rows, cols);
  if (!branch_bias.empty()) nn::detail::expects_size(op, "branch_bias", branch_bias, cols);
  nn::detail::expects_size(op, "weight", weight, cols);
  detail::norm_forward<false, T>(stream, op,
                                 {out.data(), y.data(), nullptr, rstd.data(), x.data(),
                                  branch.data(), branch_bias.empty() ? nullptr : branch_bias.data(),
                                  weight.data(), nullptr, rows, cols, epsilon});
}

template <storage T>
void rms_norm_backward_input(Stream& stream, Matrix<T> dx,
                             Matrix<const std::type_identity_t<T>> dout,
                             Matrix<const std::type_identity_t<T>> x,
                             Vector<const std::type_identity_t<T>> weight,
                             Vector<const float> rstd) {
  constexpr auto op = "rms_norm_backward_input";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "dx", dx, rows, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  detail::norm_backward_input<false, T>(
      stream, op,
      {dx.data(), nullptr, dout.data(), x.data(), weight.data(), nullptr, rstd.data(), rows, cols});
}

/// @tparam E  element of dout: a storage, const or not
template <class E>
requires storage<std::remove_const_t<E>>
void rms_norm_backward_weight(Stream& stream, Vector<float> dweight, Matrix<E> dout,
                              Matrix<const std::remove_const_t<E>> x, Vector<const float> rstd) {
  constexpr auto op = "rms_norm_backward_weight";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_size(op, "dweight", dweight, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  detail::norm_backward_weight<false, std::remove_const_t<E>>(
      stream, op, {{dweight.data()}}, rows, {dout.data(), x.data(), nullptr, rstd.data(), cols});
}

/// As layer_norm_backward(), for the norm of rms_norm_forward().
/// @cost  2 launches and one pass over memory for rows of at most 8192 elements in Bfloat16, 4096
///        in float
template <storage T>
void rms_norm_backward(Stream& stream, Matrix<T> dx, Vector<float> dweight,
                       Matrix<const std::type_identity_t<T>> dy,
                       Matrix<const std::type_identity_t<T>> dout,
                       Matrix<const std::type_identity_t<T>> x,
                       Vector<const std::type_identity_t<T>> weight, Vector<const float> rstd,
                       Vector<float> dbranch_bias = {}) {
  constexpr auto op = "rms_norm_backward";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "dx", dx, rows, cols);
  nn::detail::expects_size(op, "dweight", dweight, cols);
  if (!dy.empty()) nn::detail::expects_shape(op, "dy", dy, rows, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  if (!dbranch_bias.empty()) nn::detail::expects_size(op, "dbranch_bias", dbranch_bias, cols);
  detail::norm_backward<false, T>(stream, op,
                                  {dx.data(), dy.empty() ? nullptr : dy.data(), dout.data(),
                                   x.data(), weight.data(), nullptr, rstd.data(), rows, cols},
                                  {{dweight.data()}},
                                  dbranch_bias.empty() ? nullptr : dbranch_bias.data());
}

}  // namespace mega::inline v0::cuda
