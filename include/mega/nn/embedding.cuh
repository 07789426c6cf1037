/// @file  Token and learned position embeddings on a GPU. The host twins in nn/embedding.hpp say
/// what each operation does.
#pragma once
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/embedding.hpp>

#include <cstdint>

namespace mega::inline v0::cuda {

namespace detail {

struct EmbeddingForward {
  float* out;
  const std::int32_t* tokens;
  const float* table;
  Index first_row, rows, cols;
  __device__ void operator()(Index r, Index c) const {
    const Index at = tokens[r] - first_row;
    out[r * cols + c] = at >= 0 && at < rows ? table[at * cols + c] : 0.0F;
  }
};

/// One block a position of the text. That of a token's first occurrence adds the gradients of all
/// its occurrences, in their order; the others have nothing to do.
template <int Threads>
MEGA_KERNEL void add_embedding_gradients(float* dtable, const float* dout,
                                         const std::int32_t* tokens, Index count, Index first_row,
                                         Index rows, Index cols) {
  __shared__ int occurrence[Threads];
  __shared__ int found_before[Threads / warp_threads + 1];
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  for (Index position = blockIdx.x; position < count; position += gridDim.x) {
    const std::int32_t token = tokens[position];
    const Index at = token - first_row;
    if (at < 0 || at >= rows) continue;
    bool first = true;
    for (Index begin = 0; first && begin < position; begin += Threads) {
      const Index i = begin + threadIdx.x;
      first = __syncthreads_or(i < position && tokens[i] == token) == 0;
    }
    if (!first) continue;
    for (Index begin = position; begin < count; begin += Threads) {
      const Index i = begin + threadIdx.x;
      const bool matches = i < count && tokens[i] == token;
      const unsigned warp_matches = __ballot_sync(0xffffffffU, matches);
      if (lane == 0) found_before[warp + 1] = __popc(warp_matches);
      if (threadIdx.x == 0) found_before[0] = 0;
      __syncthreads();
      if (threadIdx.x == 0)
        for (int w = 0; w < Threads / warp_threads; ++w) found_before[w + 1] += found_before[w];
      __syncthreads();
      if (matches)
        occurrence[found_before[warp] + __popc(warp_matches & ((1U << lane) - 1U))] = threadIdx.x;
      __syncthreads();
      const int found = found_before[Threads / warp_threads];
      for (Index c = threadIdx.x; found > 0 && c < cols; c += Threads) {
        float sum = dtable[at * cols + c];
        for (int k = 0; k < found; ++k) sum += dout[(begin + occurrence[k]) * cols + c];
        dtable[at * cols + c] = sum;
      }
      __syncthreads();
    }
  }
}

struct PositionForward {
  float* out;
  const float* x;
  const float* table;
  Index time, first_position, cols;
  __device__ void operator()(Index r, Index c) const {
    out[r * cols + c] = x[r * cols + c] + table[(first_position + r % time) * cols + c];
  }
};

struct PositionBackward {
  float* dtable;
  const float* dout;
  Index rows, time, first_position, cols;
  __device__ void operator()(Index t, Index c) const {
    float& to = dtable[(first_position + t) * cols + c];
    float sum = to;
    for (Index r = t; r < rows; r += time) sum += dout[r * cols + c];
    to = sum;
  }
};

}  // namespace detail

MEGA_LAUNCHES void embedding_forward(Stream& stream, Matrix<float> out,
                                     Vector<const std::int32_t> tokens, Matrix<const float> table,
                                     Index first_row) {
  nn::detail::expects_shape("embedding_forward", "out", out, tokens.size(), table.cols());
  detail::for_each_element(stream, "embedding_forward", tokens.size(), table.cols(),
                           detail::EmbeddingForward{out.data(), tokens.data(), table.data(),
                                                    first_row, table.rows(), table.cols()});
}

/// Gives the bits of the host twin.
/// @cost  besides the gradients, tokens.size()^2 / 2 token ids are read from cache in the worst
///        case, when no token comes twice
MEGA_LAUNCHES void embedding_backward(Stream& stream, Matrix<float> dtable,
                                      Matrix<const float> dout, Vector<const std::int32_t> tokens,
                                      Index first_row) {
  nn::detail::expects_shape("embedding_backward", "dout", dout, tokens.size(), dtable.cols());
  detail::launch(
      stream, "embedding_backward", detail::add_embedding_gradients<detail::block_threads>,
      detail::grid_x(tokens.size()), detail::block_threads, 0, dtable.data(), dout.data(),
      tokens.data(), tokens.size(), first_row, dtable.rows(), dtable.cols());
}

MEGA_LAUNCHES void position_embedding_forward(Stream& stream, Matrix<float> out,
                                              Matrix<const float> x, Matrix<const float> table,
                                              Index time, Index first_position) {
  constexpr auto op = "position_embedding_forward";
  nn::detail::expects_shape(op, "out", out, x.rows(), table.cols());
  nn::detail::expects_shape(op, "x", x, x.rows(), table.cols());
  nn::detail::expects_positions(op, x.rows(), table.rows(), time, first_position);
  detail::for_each_element(
      stream, op, x.rows(), x.cols(),
      detail::PositionForward{out.data(), x.data(), table.data(), time, first_position, x.cols()});
}

/// Gives the bits of the host twin.
MEGA_LAUNCHES void position_embedding_backward(Stream& stream, Matrix<float> dtable,
                                               Matrix<const float> dout, Index time,
                                               Index first_position) {
  constexpr auto op = "position_embedding_backward";
  nn::detail::expects_shape(op, "dout", dout, dout.rows(), dtable.cols());
  nn::detail::expects_positions(op, dout.rows(), dtable.rows(), time, first_position);
  detail::for_each_element(stream, op, dout.rows() == 0 ? 0 : time, dout.cols(),
                           detail::PositionBackward{dtable.data(), dout.data(), dout.rows(), time,
                                                    first_position, dout.cols()});
}

}  // namespace mega::inline v0::cuda
