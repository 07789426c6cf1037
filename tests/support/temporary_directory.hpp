/// @file  A directory of its own for a test, removed with everything in it at the end of the scope.
#pragma once
#include <mega/core/error.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace mega::tests {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "mega-test-XXXXXX").string();
    expects(::mkdtemp(name.data()) != nullptr, ErrorCode::not_durable,
            "no temporary directory could be made");
    path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string operator/(std::string_view name) const {
    return path_ + "/" + std::string(name);
  }

  /// Writes a file in the directory, or in an existing one below it. @return its path
  std::string write(std::string_view name, std::string_view content) const {
    const std::string path = *this / name;
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

 private:
  std::string path_;
};

inline std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Runs `f` and returns the Error's sentence, or "" if it threw none.
template <class F>
std::string sentence_of(F f) {
  try {
    f();
  } catch (const Error& fault) {
    return fault.what();
  }
  return {};
}

/// Runs `f`; true if it threw an Error with this code.
template <class F>
bool throws_code(ErrorCode code, F f) {
  try {
    f();
  } catch (const Error& fault) {
    return fault.code() == code;
  }
  return false;
}

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace mega::tests
