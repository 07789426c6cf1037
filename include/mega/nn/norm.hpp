/// @file  Layer normalisation and root-mean-square normalisation of rows, on the host.
/// Sources: Ba, Kiros and Hinton, arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467.
#pragma once
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/detail/lanes.hpp>
#include <mega/nn/detail/scratch.hpp>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/elementwise.hpp>

#include <cmath>

// Every operation: matrices are [rows, cols] with cols > 0, all fp32; work is ordered on `stream`;
// a wrong shape throws Error(logic) in the caller. A row's result does not depend on the others.
namespace mega::inline v0::nn {

/// out = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(variance + epsilon).
/// Saves mean and rstd, one number a row, for the backward operations. out may be x.
template <host::host_stream S>
void layer_norm_forward(S& stream, Matrix<float> out, Vector<float> mean, Vector<float> rstd,
                        Matrix<const float> x, Vector<const float> weight, Vector<const float> bias,
                        float epsilon) {
  const Index rows = x.rows(), cols = x.cols();
  detail::expects_shape("layer_norm_forward", "out", out, rows, cols);
  detail::expects_size("layer_norm_forward", "mean", mean, rows);
  detail::expects_size("layer_norm_forward", "rstd", rstd, rows);
  detail::expects_size("layer_norm_forward", "weight", weight, cols);
  detail::expects_size("layer_norm_forward", "bias", bias, cols);
  stream.run([=] {
    const float* const w = weight.data();
    const float* const b = bias.data();
    for (Index r = 0; r < rows; ++r) {
      const float* const in = x.row(r);
      float* const to = out.row(r);
      const float m =
          detail::lane_sum(cols, [=](Index c) { return in[c]; }) / static_cast<float>(cols);
      const float variance =
          detail::lane_sum(cols, [=](Index c) { return (in[c] - m) * (in[c] - m); }) /
          static_cast<float>(cols);
      const float s = 1.0f / std::sqrt(variance + epsilon);
      for (Index c = 0; c < cols; ++c) to[c] = (in[c] - m) * s * w[c] + b[c];
      mean(r) = m;
      rstd(r) = s;
    }
  });
}

/// dx = d loss / d x. dx may be dout; it may not be x.
template <host::host_stream S>
void layer_norm_backward_input(S& stream, Matrix<float> dx, Matrix<const float> dout,
                               Matrix<const float> x, Vector<const float> weight,
                               Vector<const float> mean, Vector<const float> rstd) {
  const Index rows = x.rows(), cols = x.cols();
  detail::expects_shape("layer_norm_backward_input", "dx", dx, rows, cols);
  detail::expects_shape("layer_norm_backward_input", "dout", dout, rows, cols);
  detail::expects_size("layer_norm_backward_input", "weight", weight, cols);
  detail::expects_size("layer_norm_backward_input", "mean", mean, rows);
  detail::expects_size("layer_norm_backward_input", "rstd", rstd, rows);
  stream.run([=] {
    const float* const w = weight.data();
    for (Index r = 0; r < rows; ++r) {
      const float* const in = x.row(r);
      const float* const dy = dout.row(r);
      float* const to = dx.row(r);
      const float m = mean(r), s = rstd(r), count = static_cast<float>(cols);
      const float average = detail::lane_sum(cols, [=](Index c) { return dy[c] * w[c]; }) / count;
      const float slope =
          detail::lane_sum(cols, [=](Index c) { return dy[c] * w[c] * ((in[c] - m) * s); }) / count;
      for (Index c = 0; c < cols; ++c)
        to[c] = s * (dy[c] * w[c] - average - (in[c] - m) * s * slope);
    }
  });
}

/// dweight += and dbias +=, rows in ascending order.
template <host::host_stream S>
void layer_norm_backward_weight(S& stream, Vector<float> dweight, Vector<float> dbias,
                                Matrix<const float> dout, Matrix<const float> x,
                                Vector<const float> mean, Vector<const float> rstd) {
  const Index rows = x.rows(), cols = x.cols();
  detail::expects_size("layer_norm_backward_weight", "dweight", dweight, cols);
  detail::expects_size("layer_norm_backward_weight", "dbias", dbias, cols);
  detail::expects_shape("layer_norm_backward_weight", "dout", dout, rows, cols);
  detail::expects_size("layer_norm_backward_weight", "mean", mean, rows);
  detail::expects_size("layer_norm_backward_weight", "rstd", rstd, rows);
  stream.run([=] {
    const float* const in = x.data();
    const float* const dy = dout.data();
    const float* const m = mean.data();
    const float* const s = rstd.data();
    detail::add_column_sums(dweight.data(), rows, cols, [=](Index r, Index c) {
      return dy[r * cols + c] * ((in[r * cols + c] - m[r]) * s[r]);
    });
    detail::add_column_sums(dbias.data(), rows, cols,
                            [=](Index r, Index c) { return dy[r * cols + c]; });
  });
}

/// out = x * rstd * weight, with rstd = 1 / sqrt(mean of x^2 + epsilon), saved one number a row.
/// out may be x.
template <host::host_stream S>
void rms_norm_forward(S& stream, Matrix<float> out, Vector<float> rstd, Matrix<const float> x,
                      Vector<const float> weight, float epsilon) {
  const Index rows = x.rows(), cols = x.cols();
  detail::expects_shape("rms_norm_forward", "out", out, rows, cols);
  detail::expects_size("rms_norm_forward", "rstd", rstd, rows);
  detail::expects_size("rms_norm_forward", "weight", weight, cols);
  stream.run([=] {
    const float* const w = weight.data();
    for (Index r = 0; r < rows; ++r) {
      const float* const in = x.row(r);
      float* const to = out.row(r);
      const float square =
          detail::lane_sum(cols, [=](Index c) { return in[c] * in[c]; }) / static_cast<float>(cols);
      const float s = 1.0f / std::sqrt(square + epsilon);
      for (Index c = 0; c < cols; ++c) to[c] = in[c] * s * w[c];
      rstd(r) = s;
    }
  });
}

/// dx = d loss / d x. dx may be dout; it may not be x.
template <host::host_stream S>
void rms_norm_backward_input(S& stream, Matrix<float> dx, Matrix<const float> dout,
                             Matrix<const float> x, Vector<const float> weight,
                             Vector<const float> rstd) {
  const Index rows = x.rows(), cols = x.cols();
  detail::expects_shape("rms_norm_backward_input", "dx", dx, rows, cols);
  detail::expects_shape("rms_norm_backward_input", "dout", dout, rows, cols);
  detail::expects_size("rms_norm_backward_input", "weight", weight, cols);
  detail::expects_size("rms_norm_backward_input", "rstd", rstd, rows);
  stream.run([=] {
    const float* const w = weight.data();
    for (Index r = 0; r < rows; ++r) {
      const float* const in = x.row(r);
      const float* const dy = dout.row(r);
      float* const to = dx.row(r);
      const float s = rstd(r);
      const float slope =
          detail::lane_sum(cols, [=](Index c) { return dy[c] * w[c] * (in[c] * s); }) /
          static_cast<float>(cols);
      for (Index c = 0; c < cols; ++c) to[c] = s * (dy[c] * w[c] - in[c] * s * slope);
    }
  });
}

/// dweight +=, rows in ascending order.
template <host::host_stream S>
void rms_norm_backward_weight(S& stream, Vector<float> dweight, Matrix<const float> dout,
                              Matrix<const float> x, Vector<const float> rstd) {
  const Index rows = x.rows(), cols = x.cols();
  detail::expects_size("rms_norm_backward_weight", "dweight", dweight, cols);
  detail::expects_shape("rms_norm_backward_weight", "dout", dout, rows, cols);
  detail::expects_size("rms_norm_backward_weight", "rstd", rstd, rows);
  stream.run([=] {
    const float* const in = x.data();
    const float* const dy = dout.data();
    const float* const s = rstd.data();
    detail::add_column_sums(dweight.data(), rows, cols, [=](Index r, Index c) {
      return dy[r * cols + c] * (in[r * cols + c] * s[r]);
    });
  });
}

/// y = x + (branch + branch_bias), then layer_norm_forward() of y. branch_bias may be empty; y may
/// be x, out neither x nor y.
template <host::host_stream S>
void add_layer_norm_forward(S& stream, Matrix<float> y, Matrix<float> out, Vector<float> mean,
                            Vector<float> rstd, Matrix<const float> x, Matrix<const float> branch,
                            Vector<const float> branch_bias, Vector<const float> weight,
                            Vector<const float> bias, float epsilon) {
  add_branch(stream, y, x, branch, branch_bias);
  layer_norm_forward(stream, out, mean, rstd, y, weight, bias, epsilon);
}

/// As add_layer_norm_forward(), with rms_norm_forward().
template <host::host_stream S>
void add_rms_norm_forward(S& stream, Matrix<float> y, Matrix<float> out, Vector<float> rstd,
                          Matrix<const float> x, Matrix<const float> branch,
                          Vector<const float> branch_bias, Vector<const float> weight,
                          float epsilon) {
  add_branch(stream, y, x, branch, branch_bias);
  rms_norm_forward(stream, out, rstd, y, weight, epsilon);
}

namespace detail {

/// dx = dy + dnormed, where gradient(stream, dnormed row, row number) makes dnormed; then
/// dbranch_bias += column sums of dx. Empty dy and dbranch_bias are left out.
template <host::host_stream S, class Gradient>
void add_norm_gradient(S& stream, Matrix<float> dx, Matrix<const float> dy,
                       Vector<float> dbranch_bias, Gradient gradient) {
  stream.run([=] {
    struct NormGradient {};
    host::Stream now;
    const Matrix<float> dnormed(scratch<NormGradient>(dx.cols()), 1, dx.cols());
    for (Index r = 0; r < dx.rows(); ++r) {
      if (dy.empty()) {
        gradient(now, dx.slice(r, 1), r);
      } else {
        gradient(now, dnormed, r);
        add(now, dx.slice(r, 1), dy.slice(r, 1), dnormed);
      }
    }
  });
  if (!dbranch_bias.empty()) bias_gradient(stream, dbranch_bias, dx);
}

}  // namespace detail

/// layer_norm_backward_weight(), then dx = dy + what layer_norm_backward_input() gives, then, where
/// dbranch_bias is not empty, bias_gradient() of dx: dbranch_bias is of the bias of the branch that
/// x ends with. dy may be empty: then dx is the norm's gradient alone. dx may be dy or dout.
template <host::host_stream S>
void layer_norm_backward(S& stream, Matrix<float> dx, Vector<float> dweight, Vector<float> dbias,
                         Matrix<const float> dy, Matrix<const float> dout, Matrix<const float> x,
                         Vector<const float> weight, Vector<const float> mean,
                         Vector<const float> rstd, Vector<float> dbranch_bias = {}) {
  constexpr auto op = "layer_norm_backward";
  detail::expects_shape(op, "dx", dx, x.rows(), x.cols());
  detail::expects_size(op, "weight", weight, x.cols());
  if (!dy.empty()) detail::expects_shape(op, "dy", dy, x.rows(), x.cols());
  if (!dbranch_bias.empty()) detail::expects_size(op, "dbranch_bias", dbranch_bias, x.cols());
  layer_norm_backward_weight(stream, dweight, dbias, dout, x, mean, rstd);
  detail::add_norm_gradient(
      stream, dx, dy, dbranch_bias, [=](host::Stream& now, Matrix<float> dnormed, Index r) {
        layer_norm_backward_input(now, dnormed, dout.slice(r, 1), x.slice(r, 1), weight,
                                  mean.slice(r, 1), rstd.slice(r, 1));
      });
}

/// As layer_norm_backward(), with rms_norm_backward_weight() and rms_norm_backward_input().
template <host::host_stream S>
void rms_norm_backward(S& stream, Matrix<float> dx, Vector<float> dweight, Matrix<const float> dy,
                       Matrix<const float> dout, Matrix<const float> x, Vector<const float> weight,
                       Vector<const float> rstd, Vector<float> dbranch_bias = {}) {
  constexpr auto op = "rms_norm_backward";
  detail::expects_shape(op, "dx", dx, x.rows(), x.cols());
  detail::expects_size(op, "weight", weight, x.cols());
  if (!dy.empty()) detail::expects_shape(op, "dy", dy, x.rows(), x.cols());
  if (!dbranch_bias.empty()) detail::expects_size(op, "dbranch_bias", dbranch_bias, x.cols());
  rms_norm_backward_weight(stream, dweight, dout, x, rstd);
  detail::add_norm_gradient(stream, dx, dy, dbranch_bias,
                            [=](host::Stream& now, Matrix<float> dnormed, Index r) {
                              rms_norm_backward_input(now, dnormed, dout.slice(r, 1), x.slice(r, 1),
                                                      weight, rstd.slice(r, 1));
                            });
}

}  // namespace mega::inline v0::nn
