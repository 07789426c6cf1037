/// @file  Decimal text to whole numbers without floating point: "1712195495505582.988" microseconds
/// are 1712195495505582988 ns exactly, where a double is off by up to a quarter of a microsecond.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>

namespace mega::inline v0::scan {

/// A unit of time as the power of ten of its nanoseconds.
enum class TimeUnit : int { nanoseconds = 0, microseconds = 3, milliseconds = 6, seconds = 9 };

enum class DecimalFault : std::uint8_t {
  no_fault,
  not_a_number,  ///< NaN or infinity in any spelling; the value is 0
  malformed,     ///< the value is what the valid part says, 0 where there is none
  overflow,      ///< the value is the nearest that fits
};

struct Decimal {
  std::int64_t value = 0;
  DecimalFault fault = DecimalFault::no_fault;
};

namespace detail {

constexpr std::uint64_t power_of_ten(int exponent) noexcept {
  std::uint64_t power = 1;
  for (; exponent > 0; --exponent) power *= 10;
  return power;
}

[[nodiscard]] constexpr bool is_digit(char c) noexcept {
  return c >= '0' && c <= '9';
}

/// Eight characters at once, if all are digits. Bytes of a little-endian word: the first character
/// is the lowest.
inline bool eight_digits(const char* at, std::uint32_t& out) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, at, sizeof word);
  const std::uint64_t no_high = word & 0xF0F0F0F0F0F0F0F0U;
  const std::uint64_t carried = (word + 0x0606060606060606U) & 0xF0F0F0F0F0F0F0F0U;
  if (no_high != 0x3030303030303030U || carried != 0x3030303030303030U) return false;
  word -= 0x3030303030303030U;
  word = word * 10 + (word >> 8U);  // pairs, in every second byte
  const std::uint64_t low = (word & 0x000000FF000000FFU) * 0x000F424000000064U;
  const std::uint64_t high = (word >> 16U & 0x000000FF000000FFU) * 0x0000271000000001U;
  out = static_cast<std::uint32_t>((low + high) >> 32U);
  return true;
}

/// Digits as mantissa * 10^exponent; those that do not fit a word only round.
struct DigitSink {
  std::uint64_t mantissa = 0;
  int exponent = 0;
  bool any = false;
  bool full = false;      // a digit was dropped
  bool round_up = false;  // the first that was dropped is 5 or more

  constexpr void add(char c, bool fraction) noexcept {
    any = true;
    if (!full && mantissa < 1000000000000000000U) {
      mantissa = mantissa * 10 + static_cast<std::uint64_t>(c - '0');
      exponent -= fraction ? 1 : 0;
      return;
    }
    if (!full) round_up = c >= '5';
    full = true;
    exponent += fraction ? 0 : 1;
  }

  constexpr const char* run(const char* at, const char* end, bool fraction) noexcept {
    if (!std::is_constant_evaluated() && std::endian::native == std::endian::little) {
      std::uint32_t eight = 0;
      while (end - at >= 8 && !full && mantissa < 10000000000U && eight_digits(at, eight)) {
        mantissa = mantissa * 100000000U + eight;
        exponent -= fraction ? 8 : 0;
        any = true;
        at += 8;
      }
    }
    for (; at != end && is_digit(*at); ++at) add(*at, fraction);
    return at;
  }
};

constexpr Decimal finish_decimal(const DigitSink& digits, bool negative, int exponent,
                                 DecimalFault fault) noexcept {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t magnitude = digits.mantissa;
  bool overflow = false;
  if (exponent < 0) {
    if (exponent < -19) {
      magnitude = 0;
    } else {
      const std::uint64_t divisor = power_of_ten(-exponent);
      const std::uint64_t rest = magnitude % divisor;
      magnitude = magnitude / divisor + (rest >= divisor - rest ? 1 : 0);
    }
  } else if (magnitude != 0) {
    if (exponent == 0) magnitude += digits.round_up ? 1 : 0;
    overflow = exponent > 18 || magnitude > most / power_of_ten(exponent);
    if (!overflow) magnitude *= power_of_ten(exponent);
  }
  if (overflow || magnitude > most) {
    return {negative ? std::numeric_limits<std::int64_t>::min()
                     : std::numeric_limits<std::int64_t>::max(),
            DecimalFault::overflow};
  }
  const auto value = static_cast<std::int64_t>(magnitude);
  return {negative ? -value : value, fault};
}

[[nodiscard]] constexpr bool spells_no_number(const char* at, const char* end) noexcept {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  if (end - at < 3) return false;
  const char a = lower(at[0]), b = lower(at[1]), c = lower(at[2]);
  return (a == 'n' && b == 'a' && c == 'n') || (a == 'i' && b == 'n' && c == 'f');
}

}  // namespace detail

/// The number that `text` spells, times 10^scale, to the nearest whole number (ties away from
/// zero). Sign, fraction and exponent are those of JSON; also read are a leading '+' and point, and
/// "-5.-660", which some recorders print for -5.660. Cost: about a nanosecond per eight digits.
[[nodiscard]] constexpr Decimal parse_decimal(std::string_view text, int scale = 0) noexcept {
  const char* at = text.data();
  const char* const end = at + text.size();
  bool negative = false;
  DecimalFault fault = DecimalFault::no_fault;
  if (at != end && (*at == '-' || *at == '+')) negative = *at++ == '-';
  if (detail::spells_no_number(at, end)) return {0, DecimalFault::not_a_number};
  detail::DigitSink digits;
  at = digits.run(at, end, false);
  if (at != end && *at == '.') {
    ++at;
    if (at != end && *at == '-') {
      negative = true;
      fault = DecimalFault::malformed;
      ++at;
    }
    at = digits.run(at, end, true);
  }
  if (!digits.any) return {0, DecimalFault::malformed};
  int exponent = 0;
  if (at != end && (*at == 'e' || *at == 'E')) {
    const char* power = at + 1;
    bool down = false;
    if (power != end && (*power == '-' || *power == '+')) down = *power++ == '-';
    if (power != end && detail::is_digit(*power)) {
      for (; power != end && detail::is_digit(*power); ++power)
        exponent = exponent > 100000 ? exponent : exponent * 10 + (*power - '0');
      exponent = down ? -exponent : exponent;
      at = power;
    }
  }
  if (at != end) fault = DecimalFault::malformed;
  return detail::finish_decimal(digits, negative, digits.exponent + exponent + scale, fault);
}

/// Nanoseconds of `text` in `unit`.
[[nodiscard]] constexpr Decimal parse_time(std::string_view text, TimeUnit unit) noexcept {
  return parse_decimal(text, static_cast<int>(unit));
}

}  // namespace mega::inline v0::scan
