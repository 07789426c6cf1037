/// @file  Reads one JSON value into a PlainDocument, as tolerantly as JsonScanner does.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/decimal.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/plain_document.hpp>
#include <mega/scan/trace.hpp>

#include <charconv>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::scan {

namespace detail {

class PlainJsonReader {
 public:
  using Node = PlainDocument::Node;

  PlainJsonReader(JsonScanner& scanner, Defects& defects, PlainDocument& out)
      : scanner_(scanner), defects_(defects), out_(out) {}

  /// One value with all that is in it; depth costs no stack.
  void run() {
    const JsonScanner::Kind kind = scanner_.kind();
    if (kind == JsonScanner::Kind::end) return;
    out_.set_root(value(false));
    while (!open_.empty()) {
      scanner_.start_record();  // texts are copied: nothing is held across values
      const Node container = open_.back();
      const bool list = out_.kind(container) == PlainDocument::Kind::list;
      JsonText key;
      if (list ? !scanner_.next_element() : !scanner_.next_key(key)) {
        open_.pop_back();
        continue;
      }
      if (!list) out_.append(container, text(key));
      out_.append(container, value(list));
    }
    if (scanner_.cut()) ++defects_.truncated_files;
  }

 private:
  Node text(const JsonText& raw) { return out_.add_own_text(std::string(unescape(raw, scratch_))); }

  Node value(bool in_list) {
    switch (scanner_.kind()) {
      case JsonScanner::Kind::object: return enter(out_.add_dictionary());
      case JsonScanner::Kind::array: return enter(out_.add_list());
      case JsonScanner::Kind::text: return text(scanner_.text(in_list));
      case JsonScanner::Kind::scalar: return scalar(scanner_.scalar());
      case JsonScanner::Kind::end: break;
    }
    return out_.add_null();
  }
  Node enter(Node container) {
    scanner_.enter();
    open_.push_back(container);
    return container;
  }
  Node scalar(std::string_view spelled) {
    if (spelled == "true" || spelled == "false") return out_.add_boolean(spelled == "true");
    if (spelled.find_first_of(".eE") == std::string_view::npos) {
      const Decimal whole = parse_decimal(spelled);
      if (whole.fault == DecimalFault::no_fault) return out_.add_integer(whole.value);
      if (whole.fault == DecimalFault::not_a_number) {
        ++defects_.not_a_number;
        return out_.add_null();
      }
    }
    double real = 0;
    const auto [end, fault] =
        std::from_chars(spelled.data(), spelled.data() + spelled.size(), real);
    return fault == std::errc{} ? out_.add_real(real) : out_.add_null();
  }

  JsonScanner& scanner_;
  Defects& defects_;
  PlainDocument& out_;
  std::vector<Node> open_;
  std::string scratch_;
};

}  // namespace detail

/// The next value of the scanner's text. @throws Error(bad_input): more than
/// PlainDocument::most_nodes values
inline void read_plain_json(JsonScanner& scanner, Defects& defects, PlainDocument& out) {
  detail::PlainJsonReader(scanner, defects, out).run();
}

[[nodiscard]] inline PlainDocument read_plain_json(std::string_view text, const std::string& source,
                                                   Defects& defects) {
  Source bytes(source, text);
  JsonScanner scanner(bytes, defects);
  PlainDocument document(source);
  read_plain_json(scanner, defects, document);
  return document;
}

}  // namespace mega::inline v0::scan
