/// @file  Traces that other people's systems recorded. They are not part of this repository: tests
/// read them where MEGA_SHARED names a directory with traces/, and say that they skip elsewhere.
#pragma once
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

namespace mega_test {

/// Path of a file or folder below traces/; empty, with a message, where it is not there.
[[nodiscard]] inline std::string shared_trace(std::string_view name) {
  const char* const shared = std::getenv("MEGA_SHARED");
  std::string path = std::string(shared == nullptr ? "" : shared) + "/traces/" + std::string(name);
  if (shared != nullptr && std::filesystem::exists(path)) return path;
  MESSAGE("skipped: MEGA_SHARED names no directory with traces/", std::string(name));
  return {};
}

}  // namespace mega_test
