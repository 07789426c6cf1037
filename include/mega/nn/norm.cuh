/// @file  Layer normalisation and root-mean-square normalisation of rows, on a GPU. The host twins
/// in nn/norm.hpp say what each operation does.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/norm_rows.cuh>
#include <mega/nn/detail/row_groups.cuh>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/elementwise.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string_view>
#include <type_traits>

namespace mega::inline v0::cuda {

namespace detail {

/// Packs that each lane of one warp would have of a row.
template <storage T>
[[nodiscard]] Index packs_of_lane(Index cols) noexcept {
  return ceil_div(cols, Index{warp_threads} * pack_size<T>);
}

template <class Shape, bool Centred, bool Branch, storage T>
void norm_forward_with(Stream& stream, std::string_view op, const NormForward<T>& operands) {
  const Index blocks = std::min(ceil_div(operands.rows, Shape::groups),
                                multiprocessors * norm_forward_blocks<Branch>);
  launch(stream, op, norm_forward_ahead<Shape, Centred, Branch, T>, grid_x(blocks),
         dim3(Shape::row_threads, Shape::groups), 0, operands);
}

/// Whether the row is short enough that norm_forward_ahead() was queued. Its sums have the order of
/// norm_forward_rows().
/// @pre  packs fit
template <bool Centred, storage T>
[[nodiscard]] bool norm_forward_ahead_of_rows(Stream& stream, std::string_view op,
                                              const NormForward<T>& operands) {
  const auto with = [&]<class Shape>(Shape) {
    if (operands.branch != nullptr) {
      norm_forward_with<Shape, Centred, true>(stream, op, operands);
    } else {
      norm_forward_with<Shape, Centred, false>(stream, op, operands);
    }
    return true;
  };
  const Index packs = packs_of_lane<T>(operands.cols);
  if (packs <= 3) return with(RowGroups<1, 3, 4>{});
  if (packs <= 4) return with(RowGroups<1, 4, 4>{});
  if (packs <= 8) return with(RowGroups<2, 4, 2>{});
  return false;
}

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
  if (packs && norm_forward_ahead_of_rows<Centred>(stream, op, operands)) return;
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

/// What norm_backward_ring() needs once on the stream's device: shared memory, of which a
/// multiprocessor keeps less as cache. The bits do not depend on the depth.
template <class Shape, bool Centred, bool Branch, storage T>
struct __attribute__((visibility("hidden"))) NormRingMemory {
  explicit NormRingMemory(Stream&) {
    constexpr auto what = "shared memory of the backward of a norm";
    const auto attribute = [&](cudaDeviceAttr which) {
      int device = 0, value = 0;
      check(cudaGetDevice(&device), what);
      check(cudaDeviceGetAttribute(&value, which, device), what);
      return static_cast<std::size_t>(value);
    };
    const auto* const kernel =
        reinterpret_cast<const void*>(norm_backward_ring<Shape, Centred, Branch, T>);
    cudaFuncAttributes own{};
    check(cudaFuncGetAttributes(&own, kernel), what);
    const std::size_t room =
        std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                 attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / Shape::blocks -
                     attribute(cudaDevAttrReservedSharedMemoryPerBlock)) -
        own.sharedSizeBytes;
    constexpr std::size_t stage = NormRing<Shape, T>::stage_bytes;
    depth = std::clamp(static_cast<int>(room / stage), 2, Shape::depth);
    bytes = static_cast<std::size_t>(depth) * stage;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          what);
  }
  int depth;
  std::size_t bytes;
};

template <class Shape, bool Centred, bool Branch, storage T>
void norm_backward_with(Stream& stream, std::string_view op, const NormBackward<T>& operands,
                        const ColumnTargets<norm_sums<Centred, Branch>>& targets) {
  constexpr int sums = norm_sums<Centred, Branch>;
  const auto& memory = stream.resource<NormRingMemory<Shape, Centred, Branch, T>>();
  const Index blocks =
      std::min(ceil_div(operands.rows, Shape::groups), multiprocessors * Shape::blocks);
  auto* const partial = static_cast<float*>(
      stream.scratch(sizeof(float) * static_cast<std::size_t>(blocks * sums * operands.cols)));
  launch(stream, op, norm_backward_ring<Shape, Centred, Branch, T>, grid_x(blocks),
         dim3(Shape::row_threads, Shape::groups), memory.bytes, operands, partial, memory.depth);
  add_partial_sums(stream, op, targets, partial, blocks, operands.cols);
}

/// Whether the row is short enough that norm_backward_ring() was queued.
/// @pre  packs fit
template <bool Centred, bool Branch, storage T>
[[nodiscard]] bool norm_backward_by_ring(Stream& stream, std::string_view op,
                                         const NormBackward<T>& operands,
                                         const ColumnTargets<norm_sums<Centred, Branch>>& targets) {
  const auto with = [&]<class Shape>(Shape) {
    norm_backward_with<Shape, Centred, Branch>(stream, op, operands, targets);
    return true;
  };
  const Index packs = packs_of_lane<T>(operands.cols);
  if (packs <= 1) return with(NormGroups<1, 1, 6, 3, 2>{});
  if (packs <= 2) return with(NormGroups<1, 2, 6, 3, 2>{});
  if (packs <= 3) return with(NormGroups<1, 3, 6, 3, 2>{});
  if (packs <= 8) return with(NormGroups<8, 1, 3, 5, 1>{});
  if (packs <= 16) return with(NormGroups<8, 2, 2, 4, 1>{});
  if (packs <= 32) return with(NormGroups<16, 2, 1, 4, 1>{});
  return false;
}

/// Threads that a multiprocessor has registers for.
inline constexpr Index norm_resident_threads = 576;

/// @pre  cols <= norm_threads * norm_elements
template <bool Centred, storage T>
void norm_backward_by_elements(Stream& stream, std::string_view op, const NormBackward<T>& operands,
                               const ColumnTargets<norm_sums<Centred, true>>& targets) {
  constexpr int sums = norm_sums<Centred, true>;
  const Index rows = operands.rows, cols = operands.cols;
  const Index across = ceil_div(cols, Index{warp_threads} * norm_elements) * warp_threads;
  const Index down = std::max<Index>(1, block_threads / across);
  const Index blocks =
      std::min(ceil_div(rows, down),
               multiprocessors * std::max<Index>(1, norm_resident_threads / (across * down)));
  auto* const partial = static_cast<float*>(
      stream.scratch(sizeof(float) * static_cast<std::size_t>(blocks * sums * cols)));
  const Index tile = down > 1 ? across * down * norm_elements : 0;
  launch(stream, op, norm_backward_elements<Centred, T>, grid_x(blocks),
         dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)),
         sizeof(float) * static_cast<std::size_t>(tile), operands, partial);
  add_partial_sums(stream, op, targets, partial, blocks, cols);
}

/// @param dbranch_bias  may be null
template <bool Centred, storage T>
void norm_backward(Stream& stream, std::string_view op, const NormBackward<T>& operands,
                   const ColumnTargets<norm_sums<Centred, false>>& dweights, float* dbranch_bias) {
  const Index rows = operands.rows, cols = operands.cols;
  if (rows == 0 || cols == 0) return;
  ColumnTargets<norm_sums<Centred, true>> all{};
  std::copy(std::begin(dweights.out), std::end(dweights.out), all.out);
  all.out[norm_sums<Centred, true> - 1] = dbranch_bias;
  const bool packs = norm_packs_fit(operands);
  if (packs) {
    const bool queued = dbranch_bias != nullptr
                            ? norm_backward_by_ring<Centred, true>(stream, op, operands, all)
                            : norm_backward_by_ring<Centred, false>(stream, op, operands, dweights);
    if (queued) return;
  } else if (cols <= Index{norm_threads} * norm_elements) {
    return norm_backward_by_elements<Centred>(stream, op, operands, all);
  }
  // dx may be dout, so dout is read first.
  norm_backward_weight<Centred, T>(stream, op, dweights, rows,
                                   {operands.dout, operands.x, operands.mean, operands.rstd, cols});
  norm_backward_input<Centred>(stream, op, operands);
  if (dbranch_bias == nullptr) return;
  with_width<T>(packs, [&]<int W>(std::integral_constant<int, W>) {
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
/// @cost  2 launches and one pass over memory for rows of at most 8192 elements of 16 bits, 4096
///        in float or where rows are no multiples of 16 bytes
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
