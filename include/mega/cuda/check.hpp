/// @file  Turns a status of the CUDA runtime into an Error. Plain C++: needs the CUDA headers, not
/// nvcc.
#pragma once
#include <mega/core/error.hpp>

#include <cuda_runtime.h>

#include <string_view>

namespace mega::inline v0::cuda {

/// Throws Error(device) naming the call, CUDA's own name and text of the status, and the place.
/// @param call  what was asked of CUDA, as a reader would say it: "cudaMalloc of 64 bytes"
inline void check(cudaError_t status, std::string_view call,
                  SourceLocation at = SourceLocation::current()) {
  if (status == cudaSuccess) [[likely]]
    return;
  throw Error(ErrorCode::device,
              sentence(call, " failed with ", cudaGetErrorName(status), ", ",
                       cudaGetErrorString(status), ", at ", at.file_name(), ":", at.line()),
              at);
}

}  // namespace mega::inline v0::cuda
