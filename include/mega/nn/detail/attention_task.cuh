/// @file  What the tensor-core kernels of attention share: their operands, the order of their
/// tiles, dropout, and the checks of what they can do.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/mma.cuh>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_limits.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/dropout_mask.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace mega::inline v0::cuda::detail {

inline constexpr float log2_e = 1.44269504088896340736F;

/// Which tile of which head a block takes. Causal tiles differ in work: the blocks that start first
/// take the heaviest tiles of several heads, as many as the second-level cache holds, then their
/// next heaviest, and so on.
struct TileOrder {
  int heads;  ///< of all samples
  int tiles;  ///< of a head
  int together;

  /// @param  head_bytes  what the tiles of one head read again and again
  [[nodiscard]] static TileOrder of(std::string_view op, Index heads, Index tiles,
                                    Index head_bytes) {
    constexpr Index cache_bytes = Index{16} << 20;
    expects(heads == 0 || tiles <= 0x7fffffff / heads, ErrorCode::usage, [&] {
      return sentence(op, ": ", tiles, " tiles of ", heads,
                      " heads are more than a grid holds, 2147483647 in all");
    });
    const Index together = std::clamp<Index>(cache_bytes / std::max<Index>(head_bytes, 1), 1,
                                             std::max<Index>(heads, 1));
    return {static_cast<int>(heads), static_cast<int>(tiles), static_cast<int>(together)};
  }

  [[nodiscard]] dim3 grid() const { return dim3(static_cast<unsigned>(heads * tiles)); }

  struct Place {
    int head;
    int turn;  ///< 0 for the heaviest tile of the head
  };
  [[nodiscard]] __device__ Place place(unsigned block) const {
    const int first = static_cast<int>(block) / tiles / together * together;
    const int count = min(together, heads - first);
    const int within = static_cast<int>(block) - first * tiles;
    return {first + within % count, within / count};
  }
};

/// The operands and sizes of one call. Heads lie as AttentionShape says.
template <half_storage T>
struct AttentionTask {
  nn::AttentionShape shape;
  nn::AttentionDropout dropout;
  const T* qkv;
  float scale;
  float kept;  ///< factor of what dropout keeps
  TileOrder order;

  [[nodiscard]] __device__ int time() const { return static_cast<int>(shape.time); }
  [[nodiscard]] __device__ int dim() const { return static_cast<int>(shape.head_dim); }
  [[nodiscard]] __device__ Index out_width() const { return shape.query_heads * shape.head_dim; }
  [[nodiscard]] __device__ bool drops() const { return dropout.probability > 0.0F; }
  /// Row 0 of a sample in the packed matrix.
  [[nodiscard]] __device__ Index first_element(int sample) const {
    return sample * shape.time * shape.width();
  }
  /// Row 0 of a sample's head in a matrix [batch * time, query_heads * head_dim].
  [[nodiscard]] __device__ Index first_out(int sample, int head) const {
    return sample * shape.time * out_width() + head * shape.head_dim;
  }
  [[nodiscard]] __device__ Index first_statistic(int sample, int head) const {
    return (sample * shape.query_heads + head) * shape.time;
  }
};

/// Whether row r of a warp's score tiles is a query and column c a key, or the other way round.
enum class ScoreRows { queries, keys };

/// Makes scores of keys after their query minus infinity.
template <ScoreRows Rows, int M, int Tiles>
__device__ inline void mask_future(float (&score)[M][Tiles][4], int first_query, int first_key) {
  const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int j = 0; j < Tiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * m + i / 2 * 8 + g, column = 8 * j + 2 * t + i % 2;
        const int query = first_query + (Rows == ScoreRows::queries ? row : column);
        const int key = first_key + (Rows == ScoreRows::queries ? column : row);
        if (key > query) score[m][j][i] = -INFINITY;
      }
}

/// Which of a lane's scores dropout keeps: bit 4 * (Tiles * m + j) + i for element i of tile (m,
/// j). One Philox block holds four neighbouring keys of a query. Where blocks begin at multiples of
/// four keys, the lanes that need words of the same four blocks make one each and trade.
/// @pre  first_key is a multiple of 4; all lanes of the warp call it
template <ScoreRows Rows, int M, int Tiles, half_storage T>
__device__ inline std::uint64_t kept_scores(const AttentionTask<T>& task, int sample, int head,
                                            int first_query, int first_key) {
  static_assert(4 * M * Tiles <= 64);
  const nn::AttentionDropout& dropout = task.dropout;
  const RandomKey random = dropout.key.read();
  const Index time = task.shape.time;
  const int g = lane_index() / 4, t = lane_index() % 4;
  std::uint64_t bits = 0;
#pragma unroll 1
  for (int tile = 0; tile < M * Tiles; ++tile) {
    const int row = tile / Tiles * 16 + g, column = tile % Tiles * 8 + 2 * t;
    const int query = first_query + (Rows == ScoreRows::queries ? row : column);
    const int key = first_key + (Rows == ScoreRows::queries ? column : row);
    unsigned kept = 0;
    if (time % 4 == 0) {
      std::uint32_t word[4];
      const auto draw = [&](int q, int k) {
        const PhiloxBlock block = random.block((dropout.element(sample, head, q, time) + k) >> 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = block.word[i];
      };
      if constexpr (Rows == ScoreRows::queries) {
        // Lanes t and t ^ 1 have the first and the last two keys of two blocks, one 8 queries on.
        const bool odd = t % 2 != 0;
        draw(odd ? query + 8 : query, key - (odd ? 2 : 0));
        const std::uint32_t first = __shfl_xor_sync(0xffffffffU, odd ? word[0] : word[2], 1);
        const std::uint32_t second = __shfl_xor_sync(0xffffffffU, odd ? word[1] : word[3], 1);
        word[0] = odd ? first : word[0];
        word[1] = odd ? second : word[1];
        word[2] = odd ? word[2] : first;
        word[3] = odd ? word[3] : second;
      } else {
        // Lanes g, g ^ 1, g ^ 2 and g ^ 3 have a key each of four blocks: query, the next query,
        // and the same 8 keys on.
        const int n = g % 4;
        draw(query + n % 2, key - n + n / 2 * 8);
        transpose_words<4>(word);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (static_cast<float>(word[i] >> 8) * 0x1p-24F >= dropout.probability) kept |= 1U << i;
    } else {
      nn::detail::DropoutMask mask(random, dropout.probability);
      // In the order of the elements of a query, which share blocks.
#pragma unroll 1
      for (int n = 0; n < 4; ++n) {
        const int i = Rows == ScoreRows::queries ? n : n / 2 + n % 2 * 2;
        const int q = query + (Rows == ScoreRows::queries ? i / 2 * 8 : i % 2);
        const int k = key + (Rows == ScoreRows::queries ? i % 2 : i / 2 * 8);
        if (mask.factor(dropout.element(sample, head, q, time) + k) != 0.0F) kept |= 1U << i;
      }
    }
    bits |= static_cast<std::uint64_t>(kept) << (4 * tile);
  }
  return bits;
}

/// Multiplies what kept_scores() keeps by `factor`, and makes zeros of the rest.
template <int M, int Tiles>
__device__ inline void drop(float (&score)[M][Tiles][4], std::uint64_t kept, float factor) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int j = 0; j < Tiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool keep = (kept >> (4 * (Tiles * m + j) + i) & 1) != 0;
        score[m][j][i] = keep ? factor * score[m][j][i] : 0.0F;
      }
}

/// Calls f.template operator()<Dim>() with the smallest tile that holds head_dim.
template <class F>
void with_tile_dim(std::string_view op, Index head_dim, const F& f) {
  // Both formats of 16 bits have the same.
  constexpr AttentionLimits limits = attention_limits<Bfloat16>;
  static_assert(limits.head_dim == 128);
  expects(head_dim <= limits.head_dim && head_dim % limits.head_dim_multiple == 0, ErrorCode::usage,
          [&] {
            return sentence(op, ": head dim ", head_dim,
                            " does not fit the tensor-core kernels; use a multiple of ",
                            limits.head_dim_multiple, " up to ", limits.head_dim);
          });
  if (head_dim <= 32) return f.template operator()<32>();
  if (head_dim <= 64) return f.template operator()<64>();
  if (head_dim <= 96) return f.template operator()<96>();
  return f.template operator()<128>();
}

inline void expects_aligned(std::string_view op, std::string_view name, const void* data) {
  expects(reinterpret_cast<std::uintptr_t>(data) % 16 == 0, ErrorCode::usage, [&] {
    return sentence(op, ": ", name, " begins ", reinterpret_cast<std::uintptr_t>(data) % 16,
                    " bytes behind a multiple of 16, it must begin at one");
  });
}

/// `order` is left to the pass.
template <half_storage T>
[[nodiscard]] AttentionTask<T> attention_task(std::string_view op, const nn::AttentionShape& shape,
                                              const nn::AttentionDropout& dropout,
                                              Matrix<const T> qkv) {
  constexpr Index limit = Index{1} << 30;  // positions of a tile's end are ints
  expects(shape.time < limit, ErrorCode::usage,
          [&] { return sentence(op, ": time is ", shape.time, ", it must be below ", limit); });
  expects_aligned(op, "qkv", qkv.data());
  return {shape,
          dropout,
          qkv.data(),
          1.0F / std::sqrt(static_cast<float>(shape.head_dim)),
          1.0F / (1.0F - dropout.probability),
          {}};
}

/// Order of a kernel with a block a tile of queries.
[[nodiscard]] inline TileOrder query_order(std::string_view op, const nn::AttentionShape& shape,
                                           int rows) {
  return TileOrder::of(op, shape.batch * shape.query_heads, ceil_div(shape.time, rows),
                       4 * shape.time * shape.head_dim / shape.group());
}

}  // namespace mega::inline v0::cuda::detail
