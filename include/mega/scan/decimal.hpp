/// @file  Decimal text to whole numbers without floating point: "1712195495505582.988" microseconds
/// are 1712195495505582988 ns exactly, where a double is off by up to a quarter of a microsecond.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
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

/// 10^0 to 10^19, all that fit.
inline constexpr auto powers_of_ten = [] {
  std::array<std::uint64_t, 20> powers{1};
  for (std::size_t i = 1; i < powers.size(); ++i) powers[i] = powers[i - 1] * 10;
  return powers;
}();

[[nodiscard]] constexpr bool is_digit(char c) noexcept {
  return c >= '0' && c <= '9';
}

/// The digits at the front of eight characters, and their number.
struct LeadingDigits {
  std::uint64_t value = 0;
  unsigned count = 0;
};

/// @pre eight characters are there, and the machine is little-endian: the first is the lowest byte
[[nodiscard]] inline LeadingDigits leading_digits(const char* at) noexcept {
  constexpr std::uint64_t each = 0x0101010101010101U;
  std::uint64_t word = 0;
  std::memcpy(&word, at, sizeof word);
  word ^= each * '0';  // digits are 0 to 9 now, all else is more
  const std::uint64_t others = (((word & each * 0x7FU) + each * 0x76U) | word) & each * 0x80U;
  const unsigned bits = static_cast<unsigned>(std::countr_zero(others)) & ~7U;
  if (bits == 0) return {};
  word <<= 64U - bits;              // zeros in front of the digits
  word = word * 10 + (word >> 8U);  // pairs, in every second byte
  const std::uint64_t low = (word & 0x000000FF000000FFU) * 0x000F424000000064U;
  const std::uint64_t high = (word >> 16U & 0x000000FF000000FFU) * 0x0000271000000001U;
  return {(low + high) >> 32U & 0xFFFFFFFFU, bits / 8};
}

/// Reads digits with or without a fraction, 18 at most together with `scale`; more than that, signs
/// and exponents it leaves to parse_decimal(). `out` is the number times 10^scale.
/// @return the character behind them, inside the text; nullptr: nothing was read
[[nodiscard]] inline const char* plain_decimal(const char* at, const char* end, int scale,
                                               std::int64_t& out) noexcept {
  constexpr std::ptrdiff_t most_read = 24 + 1 + 24 + 1;  // digits, point, digits, what follows
  if (end - at < most_read || std::endian::native != std::endian::little) return nullptr;
  std::uint64_t value = 0;
  const auto run = [&](const char* from) {
    LeadingDigits digits;
    const char* next = from;
    do {
      digits = leading_digits(next);
      value = value * powers_of_ten[digits.count] + digits.value;
      next += digits.count;
    } while (digits.count == 8 && next - from < 24);
    return next;
  };
  const char* next = run(at);
  std::ptrdiff_t digits = next - at;
  if (digits == 0) return nullptr;
  if (*next == '.') {
    const char* const fraction = next + 1;
    next = run(fraction);
    digits += next - fraction;
    scale -= static_cast<int>(next - fraction);
  }
  if (scale < 0 || digits + scale > 18) return nullptr;
  out = static_cast<std::int64_t>(value * powers_of_ten[static_cast<unsigned>(scale)]);
  return next;
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
      while (end - at >= 8 && !full && mantissa < 10000000000U) {
        const LeadingDigits digits = leading_digits(at);
        mantissa = mantissa * powers_of_ten[digits.count] + digits.value;
        exponent -= fraction ? static_cast<int>(digits.count) : 0;
        any = any || digits.count > 0;
        at += digits.count;
        if (digits.count < 8) return at;
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
      const std::uint64_t divisor = powers_of_ten[static_cast<unsigned>(-exponent)];
      const std::uint64_t rest = magnitude % divisor;
      magnitude = magnitude / divisor + (rest >= divisor - rest ? 1 : 0);
    }
  } else if (magnitude != 0) {
    if (exponent == 0) magnitude += digits.round_up ? 1 : 0;
    overflow = exponent > 18 || magnitude > most / powers_of_ten[static_cast<unsigned>(exponent)];
    if (!overflow) magnitude *= powers_of_ten[static_cast<unsigned>(exponent)];
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
