/// @file  JSON from an untrusted file: nesting capped, duplicate keys refused, faults located.
/// opt-in: needs nlohmann-json.
#pragma once
#include <mega/core/error.hpp>

#include <nlohmann/json.hpp>

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::ckpt {

/// Deepest nesting of arrays and objects that is read.
inline constexpr int json_depth_limit = 64;

/// A name from a file, safe to print: control characters masked, at most 80 bytes.
[[nodiscard]] inline std::string printable(std::string_view name) {
  std::string out = "'";
  for (const char c : name.substr(0, 80)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  out += name.size() > 80 ? "...'" : "'";
  return out;
}

/// Parses one JSON value. The parser keeps its own stack, so nesting cannot overflow the program's.
/// @param where  what is parsed, for the error's sentence
/// @throws Error bad_input
[[nodiscard]] inline nlohmann::json parse_json_strictly(std::string_view text,
                                                        std::string_view where) {
  using nlohmann::json;
  std::vector<std::set<std::string>> keys;  // of the open objects, innermost last
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    switch (event) {
      case json::parse_event_t::object_start: keys.emplace_back(); [[fallthrough]];
      case json::parse_event_t::array_start:
        expects(depth < json_depth_limit, ErrorCode::bad_input, [&] {
          return sentence(where, ": JSON is nested deeper than ", json_depth_limit, " levels");
        });
        break;
      case json::parse_event_t::object_end: keys.pop_back(); break;
      case json::parse_event_t::key: {
        const auto& key = value.get_ref<const std::string&>();
        expects(keys.back().insert(key).second, ErrorCode::bad_input, [&] {
          return sentence(where, ": key ", printable(key), " appears twice in one object");
        });
        break;
      }
      default: break;
    }
    return true;
  };
  // The parser takes a zero byte for the end, and would not look at what is behind it.
  const auto zero = text.find('\0');
  expects(zero == text.npos, ErrorCode::bad_input,
          [&] { return sentence(where, ": not valid JSON at byte ", zero + 1, ", a zero byte"); });
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& fault) {
    throw Error(ErrorCode::bad_input, sentence(where, ": not valid JSON at byte ", fault.byte));
  } catch (const json::exception&) {
    throw Error(ErrorCode::bad_input, sentence(where, ": JSON holds a number out of range"));
  }
}

}  // namespace mega::inline v0::ckpt
