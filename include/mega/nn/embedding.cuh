/// @file  Token and learned position embeddings on a GPU. The host twins in nn/embedding.hpp say
/// what each operation does.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/pack.cuh>
#include <mega/cuda/stream.hpp>
#include <mega/nn/detail/shape.hpp>
#include <mega/nn/embedding.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mega::inline v0::cuda {

namespace detail {

template <storage T>
struct EmbeddingForward {
  T* out;
  const std::int32_t* tokens;
  const T* table;
  Index first_row, rows, cols;
  template <int W>
  __device__ void at(Index r, Index c) const {
    const Index row = tokens[r] - first_row;
    float v[W] = {};
    if (row >= 0 && row < rows) load_constant(v, table + row * cols + c);
    store_pack(out + r * cols + c, v);
  }
};

/// Positions listed of a row of the table; one that occurs more often is looked for in the text.
inline constexpr unsigned listed_occurrences = 32;

/// Where the rows of the table occur in a text, one entry a row.
struct Occurrences {
  unsigned* count;
  unsigned* from_end;      ///< text length - first position; 0: nowhere
  std::int32_t* position;  ///< listed_occurrences a row, in no order

  [[nodiscard]] __device__ std::int32_t* listed(Index row) const {
    return position + row * listed_occurrences;
  }
};

struct CountOccurrences {
  Occurrences occurrences;
  const std::int32_t* tokens;
  Index count, first_row, rows;
  __device__ void operator()(Index i) const {
    const Index row = tokens[i] - first_row;
    if (row < 0 || row >= rows) return;
    atomicMax(&occurrences.from_end[row], static_cast<unsigned>(count - i));
    const unsigned n = atomicAdd(&occurrences.count[row], 1U);
    if (n < listed_occurrences) occurrences.listed(row)[n] = static_cast<std::int32_t>(i);
  }
};

/// Gathers in order[] the positions of a text that hold one token, ascending.
template <int Threads>
struct OccurrenceScan {
  static constexpr int capacity = 8 * Threads;
  int of_warp[Threads / warp_threads];
  std::int32_t order[capacity];

  /// Looks at the next `capacity` tokens from `begin` on. By the whole block.
  __device__ int find(const std::int32_t* tokens, std::int32_t token, Index begin, Index end) {
    const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
    int found = 0;
    for (int part = 0; part < capacity / Threads; ++part) {
      const Index i = begin + part * Threads + threadIdx.x;
      const bool matches = i < end && tokens[i] == token;
      const unsigned warp_matches = __ballot_sync(0xffffffffU, matches);
      if (lane == 0) of_warp[warp] = __popc(warp_matches);
      __syncthreads();
      int before = found;
      for (int w = 0; w < Threads / warp_threads; ++w) {
        before += w < warp ? of_warp[w] : 0;
        found += of_warp[w];
      }
      if (matches)
        order[before + __popc(warp_matches & ((1U << lane) - 1U))] = static_cast<std::int32_t>(i);
      __syncthreads();
    }
    return found;
  }
};

/// One block a position of the text. That of a token's first occurrence adds the gradients of all
/// its occurrences, in their order; the others have nothing to do.
template <int W, int Threads, storage T>
MEGA_KERNEL void __launch_bounds__(Threads)
    add_embedding_gradients(float* dtable, const T* dout, const std::int32_t* tokens, Index count,
                            Occurrences occurrences, Index first_row, Index rows, Index cols) {
  constexpr int batch = 8;
  __shared__ OccurrenceScan<Threads> scan;
  for (Index position = blockIdx.x; position < count; position += gridDim.x) {
    const std::int32_t token = tokens[position];
    const Index row = token - first_row;
    if (row < 0 || row >= rows) continue;
    if (static_cast<Index>(occurrences.from_end[row]) != count - position) continue;
    const unsigned all = occurrences.count[row];
    // Adds the rows of order[0, found), in this order.
    const auto add = [&](int found) {
      for (Index c = static_cast<Index>(threadIdx.x) * W; found > 0 && c < cols; c += Threads * W) {
        float sum[W];
        load_pack(sum, dtable + row * cols + c);
        for (int first = 0; first < found; first += batch) {
          RawPack<T, W> raw[batch];
#pragma unroll
          for (int k = 0; k < batch; ++k)
            if (first + k < found) raw[k] = load_raw<W>(dout + scan.order[first + k] * cols + c);
#pragma unroll
          for (int k = 0; k < batch; ++k) {
            if (first + k >= found) continue;
            float v[W];
            unpack(v, raw[k]);
#pragma unroll
            for (int w = 0; w < W; ++w) sum[w] += v[w];
          }
        }
        store_pack(dtable + row * cols + c, sum);
      }
      __syncthreads();  // before the order is written again
    };
    if (all <= listed_occurrences) {
      if (threadIdx.x < all) {
        const std::int32_t* const listed = occurrences.listed(row);
        const std::int32_t own = listed[threadIdx.x];
        int before = 0;
        for (unsigned k = 0; k < all; ++k) before += listed[k] < own ? 1 : 0;
        scan.order[before] = own;
      }
      __syncthreads();
      add(static_cast<int>(all));
    } else {
      for (Index begin = position; begin < count; begin += scan.capacity)
        add(scan.find(tokens, token, begin, count));
    }
  }
}

template <storage T>
struct PositionForward {
  T* out;
  const T* x;
  const T* table;
  Index time, first_position, cols;
  template <int W>
  __device__ void at(Index r, Index c) const {
    float v[W], position[W];
    load_pack(v, x + r * cols + c);
    load_constant(position, table + (first_position + r % time) * cols + c);
    for (int w = 0; w < W; ++w) v[w] += position[w];
    store_pack(out + r * cols + c, v);
  }
};

template <storage T>
struct PositionBackward {
  float* dtable;
  const T* dout;
  Index rows, time, first_position, cols;
  template <int W>
  __device__ void at(Index t, Index c) const {
    float* const to = dtable + (first_position + t) * cols + c;
    float sum[W];
    load_pack(sum, to);
#pragma unroll 4
    for (Index r = t; r < rows; r += time) {
      float v[W];
      load_constant(v, dout + r * cols + c);
      for (int w = 0; w < W; ++w) sum[w] += v[w];
    }
    store_pack(to, sum);
  }
};

}  // namespace detail

template <storage T>
void embedding_forward(Stream& stream, Matrix<T> out, Vector<const std::int32_t> tokens,
                       Matrix<const std::type_identity_t<T>> table, Index first_row) {
  constexpr auto op = "embedding_forward";
  nn::detail::expects_shape(op, "out", out, tokens.size(), table.cols());
  const detail::EmbeddingForward<T> body{out.data(), tokens.data(), table.data(),
                                         first_row,  table.rows(),  table.cols()};
  detail::with_width<T>(detail::all_packs_fit(body.cols, body.out, body.table),
                        [&]<int W>(std::integral_constant<int, W>) {
                          detail::for_each_pack<W>(stream, op, tokens.size(), body.cols, body);
                        });
}

/// Gives the bits of the host twin.
/// @tparam E  element of dout: a storage, const or not
/// @pre  less than 2^31 tokens
/// @cost  2 launches and a fill of 8 bytes a row of the table, scratch of 136 bytes a row; reads
///        dout once, reads and writes the rows of the table that occur. A token that occurs more
///        than 32 times costs one look at all later tokens besides.
template <class E>
requires storage<std::remove_const_t<E>>
void embedding_backward(Stream& stream, Matrix<float> dtable, Matrix<E> dout,
                        Vector<const std::int32_t> tokens, Index first_row) {
  using T = std::remove_const_t<E>;
  constexpr auto op = "embedding_backward";
  const Index count = tokens.size(), rows = dtable.rows(), cols = dtable.cols();
  nn::detail::expects_shape(op, "dout", dout, count, cols);
  if (count == 0 || rows == 0 || cols == 0) return;
  const auto numbers = static_cast<std::size_t>(rows) * sizeof(unsigned);
  auto* const counts =
      static_cast<unsigned*>(stream.scratch(numbers * (2 + detail::listed_occurrences)));
  const detail::Occurrences occurrences{counts, counts + rows,
                                        reinterpret_cast<std::int32_t*>(counts + 2 * rows)};
  check(cudaMemsetAsync(counts, 0, 2 * numbers, stream.native()), op);
  detail::for_each_index(
      stream, op, count,
      detail::CountOccurrences{occurrences, tokens.data(), count, first_row, rows});
  const bool packs = detail::packs_fit(dtable.data(), cols) && detail::packs_fit(dout.data(), cols);
  detail::with_width<T>(packs, [&]<int W>(std::integral_constant<int, W>) {
    const auto add = [&]<int Threads>(std::integral_constant<int, Threads>) {
      detail::launch(stream, op, detail::add_embedding_gradients<W, Threads, T>,
                     detail::grid_x(count), Threads, 0, dtable.data(), dout.data(), tokens.data(),
                     count, occurrences, first_row, rows, cols);
    };
    if (cols <= 128 * W) {
      add(std::integral_constant<int, 128>{});
    } else {
      add(std::integral_constant<int, detail::block_threads>{});
    }
  });
}

template <storage T>
void position_embedding_forward(Stream& stream, Matrix<T> out,
                                Matrix<const std::type_identity_t<T>> x,
                                Matrix<const std::type_identity_t<T>> table, Index time,
                                Index first_position) {
  constexpr auto op = "position_embedding_forward";
  nn::detail::expects_shape(op, "out", out, x.rows(), table.cols());
  nn::detail::expects_shape(op, "x", x, x.rows(), table.cols());
  nn::detail::expects_positions(op, x.rows(), table.rows(), time, first_position);
  const detail::PositionForward<T> body{out.data(), x.data(),       table.data(),
                                        time,       first_position, x.cols()};
  detail::with_width<T>(detail::all_packs_fit(body.cols, body.out, body.x, body.table),
                        [&]<int W>(std::integral_constant<int, W>) {
                          detail::for_each_pack<W>(stream, op, x.rows(), body.cols, body);
                        });
}

/// Gives the bits of the host twin.
/// @tparam E  element of dout: a storage, const or not
template <class E>
requires storage<std::remove_const_t<E>>
void position_embedding_backward(Stream& stream, Matrix<float> dtable, Matrix<E> dout, Index time,
                                 Index first_position) {
  using T = std::remove_const_t<E>;
  constexpr auto op = "position_embedding_backward";
  nn::detail::expects_shape(op, "dout", dout, dout.rows(), dtable.cols());
  nn::detail::expects_positions(op, dout.rows(), dtable.rows(), time, first_position);
  const detail::PositionBackward<T> body{dtable.data(), dout.data(),    dout.rows(),
                                         time,          first_position, dout.cols()};
  const bool packs =
      detail::packs_fit(body.dtable, body.cols) && detail::packs_fit(body.dout, body.cols);
  detail::with_width<T>(packs, [&]<int W>(std::integral_constant<int, W>) {
    detail::for_each_pack<W>(stream, op, body.rows == 0 ? 0 : time, body.cols, body);
  });
}

}  // namespace mega::inline v0::cuda
