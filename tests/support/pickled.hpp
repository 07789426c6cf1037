/// @file  Pickles of plain data, built from their opcodes (protocol 2).
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega_test::pickled {

inline std::string little_endian(std::uint64_t value, int width) {
  std::string bytes;
  for (int i = 0; i < width; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFFU);
  return bytes;
}

inline std::string text(std::string_view value) {
  return "X" + little_endian(value.size(), 4) + std::string(value);
}
/// LONG1 of eight bytes.
inline std::string integer(std::int64_t value) {
  return "\x8a\x08" + little_endian(static_cast<std::uint64_t>(value), 8);
}
inline std::string null() {
  return "N";
}
inline std::string truth(bool value) {
  return value ? "\x88" : "\x89";
}
inline std::string list(const std::vector<std::string>& values) {
  std::string bytes = "](";
  for (const std::string& value : values) bytes += value;
  return bytes + "e";
}
inline std::string pair(const std::string& a, const std::string& b) {
  return a + b + "\x86";
}
inline std::string dictionary(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string bytes = "}(";
  for (const auto& [key, value] : items) bytes += text(key) + value;
  return bytes + "u";
}
inline std::string file(const std::string& value) {
  return "\x80\x02" + value + ".";
}

}  // namespace mega_test::pickled
