/// @file  What NCCL takes of a GPU's memory: for plans, which need neither a GPU nor NCCL.
#pragma once
#include <cstddef>

namespace mega::inline v0::comm {

/// Of a communicator of several ranks from its first collectives on, with NCCL's own choice of
/// channels. Half of the drop of cudaMemGetInfo that two of them made, NCCL 2.28.3, between two
/// H200 that NVLink joins; other links, more GPUs and small collectives differ.
inline constexpr std::size_t nccl_communicator_bytes = std::size_t{895} << 20;

}  // namespace mega::inline v0::comm
