/// @file  Names of the files and tensors of a sharded checkpoint, and the runs of elements in them.
#pragma once
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::ckpt::detail {

inline constexpr std::string_view runs_prefix = "runs/";
inline constexpr std::array<std::string_view, 3> data_prefixes{"value/", "first_moment/",
                                                               "second_moment/"};

inline std::string tensor_name(std::string_view prefix, std::string_view parameter) {
  return std::string(prefix) + std::string(parameter);
}
inline std::string shard_file_name(int rank) {
  std::array<char, 40> name{};
  std::snprintf(name.data(), name.size(), "rank-%05d.safetensors", rank);
  return name.data();
}
/// The runs of a rank's tensor inside its local elements [begin, end).
inline std::vector<ShardRun> runs_within(const Parameter& p, int position, int degree, Index begin,
                                         Index end) {
  std::vector<ShardRun> out;
  for (const ShardRun& run : shard_runs(p, position, degree)) {
    const Index first = std::max(begin, run.local);
    const Index last = std::min(end, run.local + run.count);
    if (first < last) out.push_back({run.global + first - run.local, first, last - first});
  }
  return out;
}

}  // namespace mega::inline v0::ckpt::detail
