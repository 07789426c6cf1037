/// @file  A scanner of JSON as recorders really write it. It pulls: the caller asks for the next
/// key or element and takes or skips its value, so that only what is wanted is looked at twice.
///
/// It reads on through NaN and infinity, control characters, unescaped quotes, backslashes and line
/// breaks in strings, bad UTF-8, keys without their opening quote, missing and trailing commas, and
/// a text that ends anywhere; what it met is counted in Defects. It never recurses and holds no
/// more of the text than one record, of record_limit bytes at most.
///
/// A string is taken to end at a quote that is followed by what may follow a string. Once a string
/// has shown one that is not, its end must also look right behind the comma.
#pragma once
#include <mega/scan/decimal.hpp>
#include <mega/scan/detail/byte_lanes.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/trace.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace mega::inline v0::scan {

/// The characters between a string's quotes, as they stand in the text.
struct JsonText {
  std::string_view raw;
  bool plain = true;  ///< printable ASCII without escapes: raw is the string itself
};

namespace detail {

[[nodiscard]] constexpr bool is_space(char c) noexcept {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/// Ends of numbers and literals, by character.
inline constexpr auto ends_scalar = [] {
  std::array<bool, 256> table{};
  for (const unsigned char c : {',', '}', ']', ':', '"', '{', '[', ' ', '\n', '\t', '\r'})
    table[c] = true;
  return table;
}();

[[nodiscard]] inline int hex_value(char c) noexcept {
  if (is_digit(c)) return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/// The code unit of "\uXXXX" at `at`; -1: it is none.
[[nodiscard]] inline int escaped_unit(const char* at, const char* end) noexcept {
  if (end - at < 6 || at[0] != '\\' || at[1] != 'u') return -1;
  int unit = 0;
  for (int i = 2; i < 6; ++i) {
    const int digit = hex_value(at[i]);
    if (digit < 0) return -1;
    unit = unit * 16 + digit;
  }
  return unit;
}

inline void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xC0U | code >> 6U);
  } else {
    if (code < 0x10000) {
      put(0xE0U | code >> 12U);
    } else {
      put(0xF0U | code >> 18U);
      put(0x80U | (code >> 12U & 0x3FU));
    }
    put(0x80U | (code >> 6U & 0x3FU));
  }
  put(0x80U | (code & 0x3FU));
}

}  // namespace detail

/// The string that `text` spells: escapes resolved, what is no UTF-8 as U+FFFD. Backslashes that
/// begin no escape stand for themselves. @return raw itself, or a view into `scratch`
inline std::string_view unescape(const JsonText& text, std::string& scratch) {
  if (text.plain) return text.raw;
  constexpr std::uint32_t replacement = 0xFFFD;
  scratch.clear();
  const char* at = text.raw.data();
  const char* const end = at + text.raw.size();
  while (at != end) {
    if (*at != '\\') {
      const std::size_t length = detail::utf8_length({at, end});
      if (length == 0) {
        detail::append_utf8(scratch, replacement);
        ++at;
      } else {
        scratch.append(at, length);
        at += length;
      }
      continue;
    }
    if (const int unit = detail::escaped_unit(at, end); unit >= 0) {
      at += 6;
      auto code = static_cast<std::uint32_t>(unit);
      if (unit >= 0xD800 && unit < 0xE000) {
        const int low = unit < 0xDC00 ? detail::escaped_unit(at, end) : -1;
        const bool paired = low >= 0xDC00 && low < 0xE000;
        code = paired ? 0x10000U + ((code - 0xD800U) << 10U) + static_cast<std::uint32_t>(low) -
                            0xDC00U
                      : replacement;
        at += paired ? 6 : 0;
      }
      detail::append_utf8(scratch, code);
      continue;
    }
    constexpr std::string_view letters = "\"\\/bfnrt";
    constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
    const std::size_t which = at + 1 == end ? letters.npos : letters.find(at[1]);
    scratch += which == letters.npos ? '\\' : meanings[which];
    at += which == letters.npos ? 1 : 2;
  }
  return scratch;
}

/// See the top of this file.
class JsonScanner {
 public:
  enum class Kind : std::uint8_t { object, array, text, scalar, end };

  /// A longer record is passed over and counted as malformed.
  static constexpr std::size_t record_limit = std::size_t{1} << 18U;

  /// @pre both outlive the scanner
  JsonScanner(Source& source, Defects& defects) : source_(source), defects_(defects) {
    start_record();
  }

  /// Ends the life of every view given before, and makes the next record_limit bytes readable.
  void start_record() {
    if (at_ != nullptr) source_.consume(static_cast<std::size_t>(at_ - begin_));
    broken_ = false;
    if (!last_ || at_ == nullptr) last_ = source_.look(record_limit).size() < record_limit;
    const std::string_view text = source_.at_hand();
    const char* const end = text.data() + text.size();
    const bool moved = at_ != text.data() || end_ != end;
    at_ = begin_ = text.data();
    end_ = end;
    if (moved) load_block(at_);
  }

  /// True if the text between start_record() and here cannot be trusted: brackets that do not
  /// match, or characters that belong nowhere.
  [[nodiscard]] bool broken() const noexcept { return broken_; }
  /// True if the text has ended where more was due.
  [[nodiscard]] bool cut() const noexcept { return cut_; }
  /// True if the record did not end within record_limit.
  [[nodiscard]] bool too_long() const noexcept { return cut_ && !last_; }

  /// What comes next, behind white space.
  [[nodiscard]] Kind kind() noexcept {
    pass_space();
    if (at_ == end_) return Kind::end;
    switch (*at_) {
      case '{': return Kind::object;
      case '[': return Kind::array;
      case '"': return Kind::text;
      default: return Kind::scalar;
    }
  }

  /// Enters the object or array that kind() has announced.
  void enter() noexcept { ++at_; }

  /// Next key of the object that was entered, and its colon.
  /// @return false: the object has ended, or the text has
  bool next_key(JsonText& key) {
    pass_space();
    if (at_ != end_ && *at_ == ',') {
      ++at_;
      pass_space();
    }
    if (at_ != end_ && *at_ == '"') [[likely]] {
      const char* const from = at_ + 1;
      const char* const quote = find_special(from);
      if (end_ - quote > 1 && quote[0] == '"' && quote[1] == ':') [[likely]] {
        key = {{from, static_cast<std::size_t>(quote - from)}, true};
        at_ = quote + 2;
        return true;
      }
    }
    return next_odd_key(key);
  }

  /// Moves to the next element of the array that was entered.
  /// @return false: the array has ended, or the text has
  bool next_element() {
    for (;;) {
      pass_space();
      if (at_ == end_) return end_of_text();
      if (*at_ == ']') {
        ++at_;
        return false;
      }
      if (*at_ == '}' || *at_ == ':') broken_ = true;
      if (*at_ != ',' && *at_ != '}' && *at_ != ':') return true;
      ++at_;
    }
  }

  /// Moves to the next value of a text that is one behind the other, as JSON lines are; marks that
  /// belong to none are passed over. @return false: the text has ended
  bool next_value() noexcept {
    for (pass_space(); at_ != end_; pass_space()) {
      if (*at_ != ',' && *at_ != ':' && *at_ != '}' && *at_ != ']') return true;
      ++at_;
    }
    return false;
  }

  /// The string that kind() has announced. @param in_array it is an element, not an object's value
  [[nodiscard]] JsonText text(bool in_array = false) {
    pass_space();
    JsonText out;
    take_string(out, in_array ? Place::element : Place::value);
    return out;
  }

  /// Number, literal or anything else without quotes and brackets, as it stands.
  [[nodiscard]] std::string_view scalar() noexcept {
    pass_space();
    const char* const from = at_;
    while (at_ != end_ && !detail::ends_scalar[static_cast<unsigned char>(*at_)]) ++at_;
    if (at_ == end_ && !last_) cut_ = true;
    if (at_ == from && at_ != end_) {  // no value at all
      broken_ = true;
      if (*at_ == '"' || *at_ == ':') ++at_;
    }
    return {from, static_cast<std::size_t>(at_ - from)};
  }

  /// A string's or a scalar's characters; of an object or array nothing, and it is passed over.
  [[nodiscard]] std::string_view token() {
    switch (kind()) {
      case Kind::text: return text().raw;
      case Kind::scalar: return scalar();
      default: skip(); return {};
    }
  }

  /// A number of few digits without sign and exponent, times 10^scale.
  /// @return false: something else comes next, and is still there
  bool plain_number(std::int64_t& out, int scale = 0) noexcept {
    pass_space();
    const char* const next = detail::plain_decimal(at_, end_, scale, out);
    if (next == nullptr || !detail::ends_scalar[static_cast<unsigned char>(*next)]) return false;
    at_ = next;
    return true;
  }

  /// A number, quoted or not, times 10^scale. @return false: there is none
  bool number(std::int64_t& out, int scale = 0) {
    if (plain_number(out, scale)) [[likely]]
      return true;
    const std::string_view spelled = token();
    const Decimal decimal = parse_decimal(spelled, scale);
    if (decimal.fault == DecimalFault::no_fault) [[likely]] {
      out = decimal.value;
      return true;
    }
    if (decimal.fault == DecimalFault::not_a_number) {
      ++defects_.not_a_number;
      return false;
    }
    if (spelled.empty() || spelled == "null" || spelled == "true" || spelled == "false")
      return false;
    ++defects_.malformed_numbers;
    out = decimal.value;
    return decimal.fault == DecimalFault::overflow || decimal.value != 0;
  }

  /// Passes over the next value, whatever it is. Within the record.
  void skip(bool in_array = false) {
    switch (kind()) {
      case Kind::text: (void)text(in_array); break;
      case Kind::scalar: {
        const std::string_view spelled = scalar();
        if (!spelled.empty() && !detail::is_digit(spelled[0])) count_no_number(spelled);
        break;
      }
      case Kind::end: (void)end_of_text(); break;
      default: skip_nested(); break;
    }
  }

  /// Passes over the next value of any length, in bounded memory; starts a new record behind it.
  void skip_long() {
    start_record();
    const Kind what = kind();
    if (what != Kind::object && what != Kind::array) {
      skip();
      if (!too_long()) return start_record();
    }
    cut_ = false;
    pass_over(0);
  }

  /// Gives up the record that began at start_record(): passes over all of it if it was too long or
  /// goes on where it broke. @pre the record is an object
  void give_up_record() {
    ++defects_.malformed_records;
    if (too_long()) {
      cut_ = false;
      at_ = begin_;
      pass_over(0);
    }
  }

 private:
  enum class Place : std::uint8_t { key, value, element, anywhere };
  static constexpr std::size_t block_size = 64;
  static constexpr std::uint64_t last_bit = std::uint64_t{1} << 63U;

  [[nodiscard]] const char* pass(const char* at) const noexcept {
    while (at != end_ && detail::is_space(*at)) ++at;
    return at;
  }
  void pass_space() noexcept { at_ = pass(at_); }

  /// First quote, backslash, control or other character than ASCII from `from` on. The text is
  /// looked at in blocks, one behind the other, so that the processor need not know where a string
  /// ends before it looks for the end of the next.
  [[nodiscard]] const char* find_special(const char* from) noexcept {
    for (;;) {
      const auto offset = static_cast<std::size_t>(from - block_);
      if (offset < block_size) {
        const std::uint64_t rest = specials_ >> offset;
        if (rest != 0) return from + std::countr_zero(rest);
        from = block_ + block_size;
        load_block(from);
      } else {
        load_block(offset < 2 * block_size ? block_ + block_size : from);
      }
    }
  }
  /// Behind the text all is quotes: find_special() stops at its end.
  void load_block(const char* at) noexcept {
    block_ = at;
    const auto left = static_cast<std::size_t>(end_ - at);
    if (left >= block_size) {
      specials_ = detail::special_characters(at);
    } else {
      char padded[block_size];
      std::memset(padded, '"', block_size);
      std::memcpy(padded, at, left);
      specials_ = detail::special_characters(padded);
    }
  }
  bool end_of_text() noexcept {
    cut_ = true;
    return false;
  }

  void count_no_number(std::string_view spelled) {
    if (parse_decimal(spelled).fault == DecimalFault::not_a_number) ++defects_.not_a_number;
  }

  /// next_key() where a comma, a key or its colon is not as it should be.
  bool next_odd_key(JsonText& key) {
    for (;;) {
      pass_space();
      if (at_ == end_) return end_of_text();
      const char c = *at_;
      if (c == '"') {
        take_string(key, Place::key);
        break;
      }
      if (c == ',') {
        ++at_;
      } else if (c == '}') {
        ++at_;
        return false;
      } else if (c == '{' || c == '[' || c == ']') {
        broken_ = true;  // the caller decides where to go on
        return false;
      } else if (take_bare_key(key)) {
        break;
      } else {
        broken_ = true;
        ++at_;
      }
    }
    pass_space();
    if (at_ == end_) return end_of_text();
    if (*at_ == ':') {
      ++at_;
    } else {
      broken_ = true;
    }
    return true;
  }

  /// @pre *at_ is a quote
  void take_string(JsonText& out, Place place) {
    const char* const from = at_ + 1;
    const char* const quote = find_special(from);
    if (quote != end_ && *quote == '"' && may_end(quote, place)) [[likely]] {
      out = {{from, static_cast<std::size_t>(quote - from)}, true};
      at_ = quote + 1;
      return;
    }
    take_odd_string(out, place);
  }

  /// Whether the quote is followed by what may follow a string.
  [[nodiscard]] bool may_end(const char* quote, Place place) const noexcept {
    const char* const next = pass(quote + 1);
    if (next == end_) return true;
    const bool ends_value = *next == ',' || *next == '}' || *next == ']';
    const bool ends_key = *next == ':';
    return (ends_value && place != Place::key) ||
           (ends_key && (place == Place::key || place == Place::anywhere));
  }

  /// Whether the text around the quote looks like the end of a value even if quotes are unreliable.
  [[nodiscard]] bool surely_ends(const char* quote, Place place) const noexcept {
    if (!may_end(quote, place)) return false;
    if (place == Place::key) return true;
    const char* next = pass(quote + 1);
    if (next == end_) return true;
    const char mark = *next;
    if (mark == ':') return true;
    next = pass(next + 1);
    if (next == end_ || *next == '}' || *next == ']') return true;
    if (mark != ',') return *next == ',' || *next == '{';
    return place != Place::value || looks_like_key(next);
  }
  /// A short word, with or without its opening quote, a quote and a colon.
  [[nodiscard]] bool looks_like_key(const char* at) const noexcept {
    if (at != end_ && *at == '"') ++at;
    const char* const from = at;
    while (at != end_ && at - from < 64 && (detail::is_digit(*at) || is_letter(*at) || *at == ' '))
      ++at;
    if (at == from || at == end_ || *at != '"') return false;
    at = pass(at + 1);
    return at != end_ && *at == ':';
  }
  [[nodiscard]] static bool is_letter(char c) noexcept {
    const char lower = static_cast<char>(c | 0x20);
    return (lower >= 'a' && lower <= 'z') || c == '_';
  }

  /// A string with escapes, bytes beyond ASCII, or quotes that do not end it.
  void take_odd_string(JsonText& out, Place place) {
    const char* const from = at_ + 1;
    const char* escaped_quote = nullptr;  // one that might have been the end
    bool doubtful = false;
    const auto finish = [&](const char* last, const char* next) {
      out = {{from, static_cast<std::size_t>(last - from)}, false};
      at_ = next;
    };
    for (const char* at = from;;) {
      at = find_special(at);
      if (at == end_) {
        cut_ = true;
        return finish(end_, end_);
      }
      const char c = *at;
      if (c == '"') {
        if (doubtful ? surely_ends(at, place) : may_end(at, place)) return finish(at, at + 1);
        ++defects_.bad_escapes;
        doubtful = true;
        ++at;
      } else if (c == '\\') {
        const bool unit = detail::escaped_unit(at, end_) >= 0;
        const bool known =
            at + 1 != end_ && std::string_view("\"\\/bfnrt").find(at[1]) != std::string_view::npos;
        if (known && at[1] == '"' && surely_ends(at + 1, place)) escaped_quote = at + 1;
        if (!unit && !known) ++defects_.bad_escapes;
        at += unit ? 6 : known ? 2 : 1;
      } else if (static_cast<signed char>(c) >= 0) {  // a control character
        const char* const next = pass(at);
        if (c == '\n' && (next == end_ || *next == '}' || looks_like_key(next))) {
          // The next line goes on with the object: the string's end was lost before.
          ++defects_.bad_escapes;
          if (escaped_quote != nullptr) return finish(escaped_quote, escaped_quote + 1);
          return finish(at, at);
        }
        ++defects_.control_characters;
        ++at;
      } else {
        const std::size_t length = detail::utf8_length({at, end_});
        if (length == 0) ++defects_.bad_utf8;
        at += length == 0 ? 1 : length;
      }
    }
  }

  /// `tid": 7` and `tid: 7`.
  bool take_bare_key(JsonText& key) {
    const char* at = at_;
    while (at != end_ && (is_letter(*at) || detail::is_digit(*at))) ++at;
    if (at == at_ || at == end_) return false;
    const char* const last = at;
    if (*at == '"') ++at;
    const char* const colon = pass(at);
    if (colon == end_ || *colon != ':') return false;
    key = {{at_, static_cast<std::size_t>(last - at_)}, true};
    at_ = at;
    ++defects_.bad_escapes;
    return true;
  }

  /// Passes over an object or array, 64 characters at a time: of each block, what stands before the
  /// first string that is odd or longer than the block. That string is read by itself.
  /// @pre *at_ opens an object or array
  void skip_nested() {
    JsonText ignored;
    std::int64_t depth = 0;
    do {
      if (end_ - at_ < static_cast<std::ptrdiff_t>(block_size)) return skip_to_end(depth);
      const auto block = detail::JsonBlock::at(at_);
      const std::uint64_t inside = detail::running_parity(block.quotes);  // strings, less their end
      const std::uint64_t ends = block.quotes & ~inside;
      const std::uint64_t followed = (block.marks | block.closes) >> 1U;
      const std::uint64_t doubts = (inside & block.odd) | (ends & ~followed) | (inside & last_bit);
      std::uint64_t certain = ~std::uint64_t{0};
      if (doubts != 0) {
        // Below the last quote that opens a string at or before the first doubt.
        const std::uint64_t begins = block.quotes & inside & ((doubts & (~doubts + 1)) * 2 - 1);
        certain = std::bit_floor(begins) - 1;
      }
      std::uint64_t closes = block.closes & ~inside & certain;
      const std::uint64_t opens = block.opens & ~inside & certain;
      if (std::popcount(closes) >= depth) {
        for (std::int64_t closed = 1; closes != 0; ++closed, closes &= closes - 1) {
          const std::uint64_t before = (closes & (~closes + 1)) - 1;
          if (depth + std::popcount(opens & before) > closed) continue;
          at_ += std::popcount(before) + 1;
          return;
        }
        closes = block.closes & ~inside & certain;
      }
      depth += std::popcount(opens) - std::popcount(closes);
      at_ += std::popcount(certain);
      if (certain == 0) take_nested_string(ignored);
    } while (!cut_);
  }

  /// The same for the last characters of the text.
  void skip_to_end(std::int64_t depth) {
    JsonText ignored;
    do {
      while (at_ != end_ && *at_ != '"' && !is_bracket(*at_)) ++at_;
      if (at_ == end_) {
        cut_ = true;
      } else if (*at_ == '"') {
        take_nested_string(ignored);
      } else {
        depth += *at_ == '{' || *at_ == '[' ? 1 : -1;
        if (++at_; depth <= 0) return;
      }
    } while (!cut_);
  }
  [[nodiscard]] static bool is_bracket(char c) noexcept {
    return c == '[' || c == ']' || c == '{' || c == '}';
  }

  /// A string whose place is not tracked: a key or a value of any depth.
  void take_nested_string(JsonText& out) {
    const char* const from = at_ + 1;
    const char* const quote = find_special(from);
    if (quote != end_ && *quote == '"') [[likely]] {
      const char* const next = pass(quote + 1);
      if (next == end_ || *next == ',' || *next == ']' || *next == '}' || *next == ':') {
        at_ = quote + 1;
        return;
      }
    }
    take_odd_string(out, Place::anywhere);
  }

  /// Passes over one value whose inside is not looked at, window by window.
  void pass_over(std::int64_t depth) {
    bool in_string = false, escaped = false;
    for (;;) {
      for (; at_ != end_; ++at_) {
        const char c = *at_;
        if (in_string) {
          if (escaped) {
            escaped = false;
          } else if (c == '\\') {
            escaped = true;
          } else if (c == '"') {
            in_string = false;
          }
          if (in_string || depth > 0) continue;
        } else if (c == '"') {
          in_string = true;
          continue;
        } else if (c == '{' || c == '[') {
          ++depth;
          continue;
        } else if (c == '}' || c == ']') {
          --depth;
        } else {
          continue;
        }
        if (depth > 0) continue;
        ++at_;
        return start_record();
      }
      const bool ended = last_;
      start_record();
      if (ended) {
        cut_ = true;
        return;
      }
    }
  }

  Source& source_;
  Defects& defects_;
  const char* begin_ = nullptr;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
  const char* block_ = nullptr;  // where specials_ are from
  std::uint64_t specials_ = 0;
  bool last_ = false;  // the source has no byte beyond end_
  bool broken_ = false;
  bool cut_ = false;
};

}  // namespace mega::inline v0::scan
