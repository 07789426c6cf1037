/// @file  Documents from JSON lines: one object a line, its "text" is the document.
/// opt-in: needs nlohmann-json.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/data/token_source.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace mega::inline v0::data {

namespace detail {

/// Takes the outer object's "text" from parser events and keeps nothing else of the line.
class TextEvents final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::optional<std::string> text;
  std::string problem;  ///< why parsing stopped

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a boolean"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }
  bool binary(binary_t&) override { return value("binary data"); }
  bool string(string_t& string) override {
    if (!is_text()) return value("a string");
    text = std::move(string);
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ > 0 && !value("an object")) return false;
    return descend();
  }
  bool start_array(std::size_t) override { return value("an array") && descend(); }
  bool key(string_t& name) override {
    at_text_ = depth_ == 1 && name == "text";
    return !(at_text_ && text) || stop("the key \"text\" appears twice");
  }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool parse_error(std::size_t byte, const std::string&,
                   const nlohmann::json::exception& fault) override {
    const std::string_view said = fault.what();
    const auto says = [&](std::string_view word) {
      return said.find(word) != std::string_view::npos;
    };
    return stop(sentence(says("ill-formed UTF-8")                   ? "invalid UTF-8"
                         : says("surrogate")                        ? "half of a surrogate pair"
                         : says("out of range") || says("overflow") ? "a number out of range"
                                                                    : "invalid JSON",
                         " at byte ", byte));
  }

 private:
  static constexpr int depth_limit = 64;

  [[nodiscard]] bool is_text() const noexcept { return depth_ == 1 && at_text_; }
  bool stop(std::string reason) {
    problem = std::move(reason);
    return false;
  }
  bool value(std::string_view what) {
    if (depth_ == 0) return stop(sentence("the line is ", what, ", not an object"));
    return !is_text() || stop(sentence("\"text\" is ", what, ", not a string"));
  }
  bool descend() {
    return ++depth_ <= depth_limit ||
           stop(sentence("nesting deeper than ", depth_limit, " levels"));
  }

  int depth_ = 0;
  bool at_text_ = false;
};

}  // namespace detail

/// Adds one document for each line. Blank lines are skipped; a byte order mark at the start and
/// carriage returns at line ends are tolerated; empty documents are counted by the source.
/// @throws Error bad_input with file, line and reason: not a JSON object, no "text" or one that is
///         not a string, invalid UTF-8, nesting deeper than 64
inline void append_jsonl(ByteTokenSource& source, const std::string& path) {
  Index line_number = 0;
  const auto take = [&](std::string_view line) {
    ++line_number;
    if (line_number == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    detail::TextEvents events;
    if (const auto zero = line.find('\0'); zero != line.npos) {
      // The parser would take it for the end of the line.
      events.problem = sentence("invalid JSON at byte ", zero + 1, ", a zero byte");
    } else if (nlohmann::json::sax_parse(line, &events) && !events.text) {
      events.problem = "the key \"text\" is missing";
    }
    expects(events.problem.empty(), ErrorCode::bad_input,
            [&] { return sentence(path, ", line ", line_number, ": ", events.problem); });
    source.append(*events.text);
  };
  std::string line;  // of which the end has not been read yet
  detail::for_each_piece(path, [&](std::string_view piece) {
    for (auto end = piece.find('\n'); end != std::string_view::npos; end = piece.find('\n')) {
      line += piece.substr(0, end);
      take(line);
      line.clear();
      piece.remove_prefix(end + 1);
    }
    line += piece;
  });
  if (!line.empty()) take(line);
}

/// Opens a file or a directory of files; names that end in ".jsonl" are JSON lines, all others
/// text.
/// @throws Error bad_input
[[nodiscard]] inline ByteTokenSource open_token_source(const std::string& path) {
  return open_documents(path, [](ByteTokenSource& source, const std::string& file) {
    std::string_view(file).ends_with(".jsonl") ? append_jsonl(source, file)
                                               : append_text_file(source, file);
  });
}

}  // namespace mega::inline v0::data
