/// @file  Text: what it holds; and for other programs valid UTF-8, JSON strings, exact decimals.
#pragma once
#include <mega/scan/trace.hpp>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mega::inline v0::scan::detail {

[[nodiscard]] constexpr bool holds(std::string_view text, std::string_view part) noexcept {
  return text.find(part) != std::string_view::npos;
}

/// Length of the valid UTF-8 sequence at the front of `text`, 1 to 4; 0 where there is none
/// (overlong forms, surrogates and values above U+10FFFF are none). @pre !text.empty()
[[nodiscard]] constexpr std::size_t utf8_length(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0U) != 0x80) return 0;
  }
  const std::uint8_t next = byte(1);
  const bool overlong = (lead == 0xE0 && next < 0xA0) || (lead == 0xF0 && next < 0x90);
  const bool beyond = (lead == 0xED && next >= 0xA0) || (lead == 0xF4 && next >= 0x90);
  return overlong || beyond ? 0 : length;
}

inline constexpr std::string_view replacement_character = "\xEF\xBF\xBD";

inline void append_utf8(std::string& out, std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    out += length == 0 ? replacement_character : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
}

/// With its quotes; what is not UTF-8 becomes U+FFFD.
inline void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view hex = "0123456789abcdef";
  out += '"';
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const auto c = static_cast<std::uint8_t>(text[0]);
    if (length == 0) {
      out += replacement_character;
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += text[0];
    } else if (c == '\n') {
      out += "\\n";
    } else if (c < 0x20 || c == 0x7F) {
      out += "\\u00";
      out += hex[c >> 4U];
      out += hex[c & 15U];
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out += '"';
}

inline void append_integer(std::string& out, std::int64_t value) {
  char digits[20];
  const auto [end, fault] = std::to_chars(digits, digits + sizeof digits, value);
  out.append(digits, end);
}

/// Nanoseconds as microseconds with three decimals, exact.
inline void append_microseconds(std::string& out, Nanoseconds ns) {
  std::uint64_t magnitude = static_cast<std::uint64_t>(ns);
  if (ns < 0) {
    out += '-';
    magnitude = 0 - magnitude;
  }
  char digits[20];
  const auto [end, fault] = std::to_chars(digits, digits + sizeof digits, magnitude / 1000);
  out.append(digits, end);
  const auto rest = static_cast<unsigned>(magnitude % 1000);
  out += '.';
  out += static_cast<char>('0' + rest / 100);
  out += static_cast<char>('0' + rest / 10 % 10);
  out += static_cast<char>('0' + rest % 10);
}

inline void append_hexadecimal(std::string& out, std::uint64_t value) {
  char digits[16];
  const auto [end, fault] = std::to_chars(digits, digits + sizeof digits, value, 16);
  out.append(digits, end);
}

}  // namespace mega::inline v0::scan::detail
