#include "text.hpp"

#include <mega/core/error.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace scan_tool {

using mega::sentence;

std::string fixed(double value, int digits) {
  std::array<char, 512> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  std::string out = text.data();
  if (out.starts_with('-') && out.find_first_not_of("-0.") == std::string::npos) out.erase(0, 1);
  return out;
}

std::string duration(double ns) {
  const double size = std::abs(ns);
  constexpr std::array<std::pair<double, std::string_view>, 4> units{
      {{1e9, " s"}, {1e6, " ms"}, {1e3, " us"}, {1, " ns"}}};
  for (const auto& [scale, unit] : units) {
    if (size < scale && scale > 1) continue;
    const double value = size / scale;
    const int digits = scale == 1 ? 0 : value < 10 ? 2 : value < 100 ? 1 : 0;
    return sentence(fixed(ns / scale, digits), unit);
  }
  return "0 ns";
}

std::string percent(double share) {
  return fixed(100 * share, std::abs(share) < 0.0995 ? 1 : 0) + " %";
}

std::string listed(std::string_view noun, std::span<const std::int32_t> numbers, std::size_t most) {
  if (numbers.size() == 1) return sentence(noun, " ", numbers[0]);
  std::string out = sentence(noun, "s ");
  const std::size_t shown = numbers.size() > most ? most : numbers.size();
  for (std::size_t i = 0; i < shown; ++i) {
    const bool last = i + 1 == numbers.size();
    out += sentence(i == 0 ? "" : last ? " and " : ", ", numbers[i]);
  }
  if (shown < numbers.size()) out += sentence(" and ", numbers.size() - shown, " more");
  return out;
}

std::string grouped(std::int64_t count) {
  std::string digits = std::to_string(count);
  const std::size_t from = count < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > from + 3; at -= 3) digits.insert(at - 3, 1, ',');
  return digits;
}

std::string counted(std::int64_t count, std::string_view noun) {
  return sentence(grouped(count), " ", noun, count == 1 ? "" : noun.ends_with("ch") ? "es" : "s");
}

std::string cut(std::string_view text, std::size_t width) {
  if (text.size() <= width) return std::string(text);
  std::size_t end = width - 3;
  // Not inside a character of several bytes.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return std::string(text.substr(0, end)) + "...";
}

}  // namespace scan_tool
