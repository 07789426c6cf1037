/// @file  Working memory of host operations: one buffer per thread and use, grown once and kept.
#pragma once
#include <mega/core/view.hpp>

#include <cstddef>
#include <vector>

namespace mega::inline v0::nn::detail {

/// `count` floats of indeterminate value, aligned to 64 bytes, owned by the calling thread. Two
/// uses that are alive at the same time name different tags; a tag is never used recursively.
template <class Tag>
[[nodiscard]] float* scratch(Index count) {
  struct alignas(64) Line {
    float value[16];
  };
  thread_local std::vector<Line> lines;
  const auto needed = static_cast<std::size_t>((count + 15) / 16);
  if (lines.size() < needed) lines.resize(needed);
  return reinterpret_cast<float*>(lines.data());
}

}  // namespace mega::inline v0::nn::detail
