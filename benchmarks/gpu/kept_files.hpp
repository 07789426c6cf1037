/// @file  Files that benchmarks keep: results, and the algorithms of matrix products between runs.
#pragma once
#include <mega/core/error.hpp>
#include <mega/nn/cublas_lt.hpp>

#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace gpu_step {

/// Of the whole process, before its first product. @param path  empty or a missing file: none
inline void read_algorithms(bool tune, const std::string& path) {
  auto& algorithms = mega::nn::MatmulAlgorithms::of_process();
  if (tune) algorithms.choose_by(mega::nn::AlgorithmChoice::timed);
  if (path.empty()) return;
  std::ifstream in(path, std::ios::binary);
  algorithms.read(std::string{std::istreambuf_iterator<char>(in), {}});
}

/// @throws Error(not_durable)
inline void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  mega::expects(!out.fail(), mega::ErrorCode::not_durable,
                [&] { return mega::sentence("cannot write ", std::string_view(path)); });
}

inline void write_algorithms(const std::string& path) {
  if (!path.empty()) write_file(path, mega::nn::MatmulAlgorithms::of_process().text());
}

}  // namespace gpu_step
