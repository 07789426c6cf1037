/// @file  AttentionLimits: the sizes that the attention kernels of GPUs take, for the kernels and
/// for programs that refuse other sizes before they start. Needs neither nvcc nor CUDA's headers.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>

#include <limits>

namespace mega::inline v0::cuda {

/// Of one call. What has no limit here ends with the GPU's memory.
struct AttentionLimits {
  Index head_dim = 0;           ///< largest, since tiles of heads lie in shared memory
  Index head_dim_multiple = 1;  ///< of which head_dim is one: tensor cores are fed 16 bytes at once
  Index samples = 0;            ///< largest, and
  Index heads = 0;              ///< largest of a rank: they are sides of a grid
};

/// By what the numbers are stored as.
template <storage T>
inline constexpr AttentionLimits attention_limits{128, 1, 65535, 65535};
template <half_storage T>  // whose grid has one long side
inline constexpr AttentionLimits attention_limits<T>{128, 8, std::numeric_limits<Index>::max(),
                                                     std::numeric_limits<Index>::max()};

}  // namespace mega::inline v0::cuda
