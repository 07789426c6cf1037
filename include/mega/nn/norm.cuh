/// @file  Layer normalisation and root-mean-square normalisation of rows, on a GPU. The host twins
/// in nn/norm.hpp say what each operation does.
#pragma once
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/reduce.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/shape.hpp>

namespace mega::inline v0::cuda {

namespace detail {

struct LayerNormForward {
  float* out;
  float* mean;
  float* rstd;
  const float* x;
  const float* weight;
  const float* bias;
  Index cols;
  float epsilon;

  __device__ void operator()(Index r) const {
    const float* const in = x + r * cols;
    float* const to = out + r * cols;
    const float count = static_cast<float>(cols);
    const float m = block_sum<float>(cols, [=](Index c) { return in[c]; }) / count;
    const float variance =
        block_sum<float>(cols, [=](Index c) { return (in[c] - m) * (in[c] - m); }) / count;
    const float s = 1.0F / sqrtf(variance + epsilon);
    for (Index c = threadIdx.x; c < cols; c += blockDim.x)
      to[c] = (in[c] - m) * s * weight[c] + bias[c];
    if (threadIdx.x == 0) {
      mean[r] = m;
      rstd[r] = s;
    }
  }
};

struct LayerNormBackwardInput {
  float* dx;
  const float* dout;
  const float* x;
  const float* weight;
  const float* mean;
  const float* rstd;
  Index cols;

  __device__ void operator()(Index r) const {
    const float* const in = x + r * cols;
    const float* const dy = dout + r * cols;
    const float* const w = weight;
    const float m = mean[r], s = rstd[r], count = static_cast<float>(cols);
    float average = 0.0F, slope = 0.0F;
    for (Index c = threadIdx.x; c < cols; c += blockDim.x) {
      const float g = dy[c] * w[c];
      average += g;
      slope += g * ((in[c] - m) * s);
    }
    average = block_reduce<Sum>(average) / count;
    slope = block_reduce<Sum>(slope) / count;
    float* const to = dx + r * cols;
    for (Index c = threadIdx.x; c < cols; c += blockDim.x)
      to[c] = s * (dy[c] * w[c] - average - (in[c] - m) * s * slope);
  }
};

struct LayerNormWeightTerms {
  const float* dout;
  const float* x;
  const float* mean;
  const float* rstd;
  Index cols;

  __device__ void operator()(Index r, Index c, float (&term)[2]) const {
    const float dy = dout[r * cols + c];
    term[0] = dy * ((x[r * cols + c] - mean[r]) * rstd[r]);
    term[1] = dy;
  }
};

struct RmsNormForward {
  float* out;
  float* rstd;
  const float* x;
  const float* weight;
  Index cols;
  float epsilon;

  __device__ void operator()(Index r) const {
    const float* const in = x + r * cols;
    float* const to = out + r * cols;
    const float square =
        block_sum<float>(cols, [=](Index c) { return in[c] * in[c]; }) / static_cast<float>(cols);
    const float s = 1.0F / sqrtf(square + epsilon);
    for (Index c = threadIdx.x; c < cols; c += blockDim.x) to[c] = in[c] * s * weight[c];
    if (threadIdx.x == 0) rstd[r] = s;
  }
};

struct RmsNormBackwardInput {
  float* dx;
  const float* dout;
  const float* x;
  const float* weight;
  const float* rstd;
  Index cols;

  __device__ void operator()(Index r) const {
    const float* const in = x + r * cols;
    const float* const dy = dout + r * cols;
    const float* const w = weight;
    const float s = rstd[r];
    const float slope =
        block_sum<float>(cols, [=](Index c) { return dy[c] * w[c] * (in[c] * s); }) /
        static_cast<float>(cols);
    float* const to = dx + r * cols;
    for (Index c = threadIdx.x; c < cols; c += blockDim.x)
      to[c] = s * (dy[c] * w[c] - in[c] * s * slope);
  }
};

struct RmsNormWeightTerms {
  const float* dout;
  const float* x;
  const float* rstd;
  Index cols;

  __device__ void operator()(Index r, Index c, float (&term)[1]) const {
    term[0] = dout[r * cols + c] * (x[r * cols + c] * rstd[r]);
  }
};

}  // namespace detail

MEGA_LAUNCHES void layer_norm_forward(Stream& stream, Matrix<float> out, Vector<float> mean,
                                      Vector<float> rstd, Matrix<const float> x,
                                      Vector<const float> weight, Vector<const float> bias,
                                      float epsilon) {
  constexpr auto op = "layer_norm_forward";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "out", out, rows, cols);
  nn::detail::expects_size(op, "mean", mean, rows);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "bias", bias, cols);
  detail::for_each_row(stream, op, rows, cols,
                       detail::LayerNormForward{out.data(), mean.data(), rstd.data(), x.data(),
                                                weight.data(), bias.data(), cols, epsilon});
}

MEGA_LAUNCHES void layer_norm_backward_input(Stream& stream, Matrix<float> dx,
                                             Matrix<const float> dout, Matrix<const float> x,
                                             Vector<const float> weight, Vector<const float> mean,
                                             Vector<const float> rstd) {
  constexpr auto op = "layer_norm_backward_input";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "dx", dx, rows, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "mean", mean, rows);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  detail::for_each_row(
      stream, op, rows, cols,
      detail::LayerNormBackwardInput{dx.data(), dout.data(), x.data(), weight.data(), mean.data(),
                                     rstd.data(), cols});
}

MEGA_LAUNCHES void layer_norm_backward_weight(Stream& stream, Vector<float> dweight,
                                              Vector<float> dbias, Matrix<const float> dout,
                                              Matrix<const float> x, Vector<const float> mean,
                                              Vector<const float> rstd) {
  constexpr auto op = "layer_norm_backward_weight";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_size(op, "dweight", dweight, cols);
  nn::detail::expects_size(op, "dbias", dbias, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "mean", mean, rows);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  detail::add_column_sums(
      stream, op, detail::ColumnTargets<2>{{dweight.data(), dbias.data()}}, rows, cols,
      detail::LayerNormWeightTerms{dout.data(), x.data(), mean.data(), rstd.data(), cols});
}

MEGA_LAUNCHES void rms_norm_forward(Stream& stream, Matrix<float> out, Vector<float> rstd,
                                    Matrix<const float> x, Vector<const float> weight,
                                    float epsilon) {
  constexpr auto op = "rms_norm_forward";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "out", out, rows, cols);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  nn::detail::expects_size(op, "weight", weight, cols);
  detail::for_each_row(
      stream, op, rows, cols,
      detail::RmsNormForward{out.data(), rstd.data(), x.data(), weight.data(), cols, epsilon});
}

MEGA_LAUNCHES void rms_norm_backward_input(Stream& stream, Matrix<float> dx,
                                           Matrix<const float> dout, Matrix<const float> x,
                                           Vector<const float> weight, Vector<const float> rstd) {
  constexpr auto op = "rms_norm_backward_input";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_shape(op, "dx", dx, rows, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "weight", weight, cols);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  detail::for_each_row(stream, op, rows, cols,
                       detail::RmsNormBackwardInput{dx.data(), dout.data(), x.data(), weight.data(),
                                                    rstd.data(), cols});
}

MEGA_LAUNCHES void rms_norm_backward_weight(Stream& stream, Vector<float> dweight,
                                            Matrix<const float> dout, Matrix<const float> x,
                                            Vector<const float> rstd) {
  constexpr auto op = "rms_norm_backward_weight";
  const Index rows = x.rows(), cols = x.cols();
  nn::detail::expects_size(op, "dweight", dweight, cols);
  nn::detail::expects_shape(op, "dout", dout, rows, cols);
  nn::detail::expects_size(op, "rstd", rstd, rows);
  detail::add_column_sums(stream, op, detail::ColumnTargets<1>{{dweight.data()}}, rows, cols,
                          detail::RmsNormWeightTerms{dout.data(), x.data(), rstd.data(), cols});
}

}  // namespace mega::inline v0::cuda
