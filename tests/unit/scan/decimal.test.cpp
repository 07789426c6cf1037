#include <mega/scan/decimal.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace mega::scan;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();

static_assert(parse_time("1712195495505582.988", TimeUnit::microseconds).value ==
              1712195495505582988);
static_assert(parse_time("0.5", TimeUnit::nanoseconds).value == 1);
static_assert(parse_time("-0.4999999999999999999999", TimeUnit::nanoseconds).value == 0);

TEST_CASE("scan: decimals are exact where doubles are not") {
  struct Row {
    const char* text;
    TimeUnit unit;
    std::int64_t value;
  };
  using enum TimeUnit;
  const Row rows[] = {
      {"1712195495505582.988", microseconds, 1712195495505582988},
      {"1712195495505582.9885", microseconds, 1712195495505582989},
      {"1712195495505582.9884999999999999999999", microseconds, 1712195495505582988},
      {"9007199254740993", nanoseconds, 9007199254740993},
      {"-5.660", microseconds, -5660},
      {"-0.0005", microseconds, -1},
      {"1.5e3", nanoseconds, 1500},
      {"15e-1", nanoseconds, 2},
      {"1E+2", seconds, 100000000000},
      {"0.000000001", seconds, 1},
      {"00000000000000000000000000042", nanoseconds, 42},
      {"0.00000000000000000000000000042e29", nanoseconds, 42},
      {"9223372036854775807", nanoseconds, most},
      {"9223372036854775806.5", nanoseconds, most},
      {"-9223372036854775807", nanoseconds, -most},
      {"1e-400", seconds, 0},
      {".25", milliseconds, 250000},
      {"7.", microseconds, 7000},
      {"+3", microseconds, 3000},
  };
  for (const Row& row : rows) {
    CAPTURE(row.text);
    const Decimal d = parse_time(row.text, row.unit);
    CHECK(d.value == row.value);
    CHECK(d.fault == DecimalFault::no_fault);
  }
}

TEST_CASE("scan: decimals that are none, or do not fit, say so") {
  for (const char* text : {"NaN", "nan", "-nan", "Infinity", "-inf", "inf"})
    CHECK(parse_decimal(text).fault == DecimalFault::not_a_number);
  for (const char* text : {"", "-", ".", "e5", "abc", "--1"}) {
    CHECK(parse_decimal(text).fault == DecimalFault::malformed);
    CHECK(parse_decimal(text).value == 0);
  }
  CHECK(parse_decimal("12abc").fault == DecimalFault::malformed);
  CHECK(parse_decimal("12abc").value == 12);
  CHECK(parse_decimal("0.-660", 3).value == -660);
  CHECK(parse_decimal("-5.-660", 3).value == -5660);
  CHECK(parse_decimal("-5.-660", 3).fault == DecimalFault::malformed);
  for (const char* text : {"9223372036854775808", "1e19", "18446744073709551615", "1e999999999999",
                           "99999999999999999999999999999"}) {
    CAPTURE(text);
    CHECK(parse_decimal(text).value == most);
    CHECK(parse_decimal(text).fault == DecimalFault::overflow);
    CHECK(parse_decimal(std::string("-") + text).value == least);
  }
  CHECK(parse_time("9223372036854776", TimeUnit::microseconds).fault == DecimalFault::overflow);
}

TEST_CASE("scan: eight digits at a time give what one at a time gives") {
  // Every length, and a character that is no digit at every place.
  std::string digits;
  std::int64_t expected = 0;
  for (int length = 1; length <= 18; ++length) {
    const int digit = (length * 7) % 10;
    digits += static_cast<char>('0' + digit);
    expected = expected * 10 + digit;
    CHECK(parse_decimal(digits).value == expected);
  }
  for (const char wrong : {'/', ':', ' ', '\xB5', '\0', 'x'}) {
    for (std::size_t at = 1; at < digits.size(); ++at) {
      std::string text = digits;
      text[at] = wrong;
      CHECK(parse_decimal(text).value == parse_decimal(digits.substr(0, at)).value);
    }
  }
}

TEST_CASE("scan: plain decimals are what the careful reader reads, or are left to it") {
  std::mt19937_64 random(3);
  const auto digits = [&](std::size_t count) {
    std::string out;
    for (; count > 0; --count) out += static_cast<char>('0' + random() % 10);
    return out;
  };
  int taken = 0;
  for (int round = 0; round < 100000; ++round) {
    std::string text = digits(random() % 21);
    if (random() % 2 == 0) text += "." + digits(random() % 8);
    if (random() % 8 == 0)
      text.insert(random() % (text.size() + 1), 1, static_cast<char>(random()));
    const std::string padded = text + std::string(64, ',');
    const int scale = static_cast<int>(random() % 10);
    std::int64_t value = -1;
    const char* const next =
        detail::plain_decimal(padded.data(), padded.data() + padded.size(), scale, value);
    if (next == nullptr) continue;
    ++taken;
    const std::string spelled(padded.data(), next);
    CAPTURE(text);
    CAPTURE(scale);
    const Decimal careful = parse_decimal(spelled, scale);
    REQUIRE(careful.fault == DecimalFault::no_fault);
    REQUIRE(careful.value == value);
    REQUIRE(!detail::is_digit(*next));
  }
  CHECK(taken > 20000);
  // Of 19 digits and more, and of those that must be rounded, it keeps off.
  const std::string most_digits = "999999999999999999" + std::string(64, ',');
  const char* const end = most_digits.data() + most_digits.size();
  std::int64_t value = 0;
  CHECK(detail::plain_decimal(most_digits.data(), end, 0, value) == most_digits.data() + 18);
  CHECK(value == 999999999999999999);
  CHECK(detail::plain_decimal(most_digits.data(), end, 1, value) == nullptr);
  const std::string rounded = "1.0005" + std::string(64, ',');
  CHECK(detail::plain_decimal(rounded.data(), rounded.data() + rounded.size(), 3, value) ==
        nullptr);
  // Nothing beyond the end is read: a heap copy of exactly this size shows it to a sanitizer.
  for (std::size_t size = 0; size < 64; ++size) {
    for (std::size_t point = 0; point < size; ++point) {
      std::vector<char> copy(size, '7');
      copy[point] = '.';
      const char* const from = copy.data();
      CHECK(detail::plain_decimal(from, from + size, 9, value) == nullptr);
    }
  }
  CHECK(detail::plain_decimal(rounded.data(), rounded.data() + 6, 4, value) == nullptr);
}

}  // namespace
