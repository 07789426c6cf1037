/// @file  Records of Chrome's trace event form, for dialects that are written in it: a top-level
/// array of them, or the array of an object's "traceEvents".
#pragma once
#include <mega/scan/decimal.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/trace.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace mega::inline v0::scan::detail {

/// Times beyond are taken for damage, so that differences of those within fit 64 bits.
inline constexpr Nanoseconds last_time = (Nanoseconds{1} << 62U) - 1;
[[nodiscard]] constexpr bool usable_time(Nanoseconds t) noexcept {
  return t <= last_time && t > -last_time;
}

/// begin + duration, at most last_time; a negative duration is counted and becomes none.
/// @pre usable_time(begin)
[[nodiscard]] inline Nanoseconds end_of(Nanoseconds begin, Nanoseconds duration,
                                        Defects& defects) noexcept {
  if (duration < 0) ++defects.negative_durations;
  if (duration <= 0) return begin;
  return duration > last_time - begin ? last_time : begin + duration;
}

/// The fields that all records share. Texts live until the next record.
struct EventRecord {
  std::string_view name;
  std::string_view category, id;  ///< as spelled, escapes and all
  char phase = '\0';              ///< of several characters the first
  std::int64_t pid = 0, tid = 0;
  Nanoseconds begin = 0, duration = 0;
  bool timed = false;  ///< has a usable "ts"
};

/// Enters the array of records. @return false: the text holds none
inline bool enter_records(JsonScanner& scanner) {
  if (scanner.kind() == JsonScanner::Kind::array) {
    scanner.enter();
    return true;
  }
  if (scanner.kind() != JsonScanner::Kind::object) return false;
  scanner.enter();
  JsonText key;
  while (scanner.next_key(key)) {
    if (key.raw == "traceEvents" && scanner.kind() == JsonScanner::Kind::array) {
      scanner.enter();
      return true;
    }
    scanner.skip_long();
  }
  return false;
}

/// Calls start() before and finish(record) behind each record, and argument(key, scanner) for each
/// member of its "args", which takes or skips the value. A broken record is counted and passed
/// over. `scratch` holds names that had to be unescaped.
template <class Start, class Argument, class Finish>
void for_each_record(JsonScanner& scanner, Defects& defects, const Start& start,
                     const Argument& argument, const Finish& finish) {
  if (!enter_records(scanner)) {
    ++defects.malformed_records;
    return;
  }
  std::string scratch;
  for (scanner.start_record(); scanner.next_element(); scanner.start_record()) {
    if (scanner.kind() != JsonScanner::Kind::object) {
      scanner.skip(true);
      ++defects.malformed_records;
      continue;
    }
    EventRecord record;
    start();
    scanner.enter();
    JsonText key;
    while (scanner.next_key(key)) {
      const JsonScanner::Kind kind = scanner.kind();
      if (key.raw == "name" && kind == JsonScanner::Kind::text) {
        record.name = unescape(scanner.text(), scratch);
      } else if (key.raw == "cat" && kind == JsonScanner::Kind::text) {
        record.category = scanner.text().raw;
      } else if (key.raw == "id" && kind == JsonScanner::Kind::text) {
        record.id = scanner.text().raw;
      } else if (key.raw == "ph") {
        const std::string_view phase = scanner.token();
        record.phase = phase.empty() ? '\0' : phase[0];
      } else if (key.raw == "ts") {
        record.timed = scanner.number(record.begin, static_cast<int>(TimeUnit::microseconds)) &&
                       usable_time(record.begin);
      } else if (key.raw == "dur") {
        (void)scanner.number(record.duration, static_cast<int>(TimeUnit::microseconds));
      } else if (key.raw == "pid") {
        (void)scanner.number(record.pid);
      } else if (key.raw == "tid") {
        (void)scanner.number(record.tid);
      } else if (key.raw == "args" && kind == JsonScanner::Kind::object) {
        scanner.enter();
        JsonText name;
        while (scanner.next_key(name)) argument(name.raw, scanner);
      } else {
        scanner.skip();
      }
    }
    if (scanner.broken() || scanner.too_long()) {
      scanner.give_up_record();
    } else if (scanner.cut()) {
      break;
    } else {
      finish(record);
    }
  }
  if (scanner.cut()) ++defects.truncated_files;
}

/// A number of a record's argument where it is one that an event can hold, else -1.
inline std::int64_t argument_number(JsonScanner& scanner) {
  std::int64_t value = -1;
  return scanner.number(value) ? value : -1;
}

[[nodiscard]] constexpr std::int32_t as_index(std::int64_t value) noexcept {
  return value >= 0 && value <= 0x7FFFFFFF ? static_cast<std::int32_t>(value) : -1;
}

}  // namespace mega::inline v0::scan::detail
