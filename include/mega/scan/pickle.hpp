/// @file  Reader of Python pickles that hold plain data (protocols 2 to 5): numbers, texts, lists,
/// dictionaries, tuples. Nothing is ever executed: an opcode that names or calls code is refused.
///
/// Source: the opcode list of Python's pickletools module.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/plain_document.hpp>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::scan {

[[nodiscard]] inline bool looks_like_pickle(std::string_view head) noexcept {
  return head.size() >= 2 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5;
}

namespace detail {

/// The pickle machine: a stack of values, a stack of marks in it, a memo of shared values.
class PickleReader {
 public:
  using Node = PlainDocument::Node;

  PickleReader(std::string_view bytes, PlainDocument& out) : bytes_(bytes), out_(out) {}

  void run() {
    expects(looks_like_pickle(bytes_), ErrorCode::bad_input, [&] {
      return out_.source() + " is no pickle of protocol 2, 3, 4 or 5, which begins with byte 0x80";
    });
    while (!stopped_) {
      place_ = at_;
      step(static_cast<std::uint8_t>(take(1)[0]));
    }
    out_.set_root(pop());
  }

 private:
  [[noreturn]] void refuse(std::string_view why) const {
    throw Error(ErrorCode::bad_input, sentence(out_.source(), ": byte ", place_, " ", why));
  }

  std::string_view take(std::uint64_t count) {
    if (count > bytes_.size() - at_) {
      refuse(sentence("begins a value of which the file, of ", bytes_.size(),
                      " bytes, holds only a part"));
    }
    const std::string_view taken = bytes_.substr(at_, static_cast<std::size_t>(count));
    at_ += static_cast<std::size_t>(count);
    return taken;
  }
  /// Little-endian.
  std::uint64_t take_unsigned(int width) {
    const std::string_view raw = take(static_cast<std::uint64_t>(width));
    std::uint64_t value = 0;
    for (int i = width; i-- > 0;)
      value = value << 8U | static_cast<std::uint8_t>(raw[static_cast<std::size_t>(i)]);
    return value;
  }

  void push(Node node) { stack_.push_back(node); }
  [[nodiscard]] std::size_t floor() const noexcept { return marks_.empty() ? 0 : marks_.back(); }
  Node pop() {
    if (stack_.size() <= floor()) refuse("takes a value from an empty stack");
    const Node node = stack_.back();
    stack_.pop_back();
    return node;
  }
  [[nodiscard]] Node top(PlainDocument::Kind kind) const {
    if (stack_.size() <= floor() || out_.kind(stack_.back()) != kind)
      refuse("adds to something that is no list or dictionary");
    return stack_.back();
  }
  /// Where the values since the last mark begin; the mark goes.
  std::size_t pop_mark() {
    if (marks_.empty()) refuse("asks for a mark, and there is none");
    const std::size_t begin = marks_.back();
    marks_.pop_back();
    return begin;
  }

  /// Moves the values from `begin` on into the container.
  void append_from(std::size_t begin, Node container) {
    const bool pairs = out_.kind(container) == PlainDocument::Kind::dictionary;
    if (pairs && (stack_.size() - begin) % 2 != 0) refuse("sets a key without a value");
    for (std::size_t i = begin; i < stack_.size(); ++i) out_.append(container, stack_[i]);
    stack_.resize(begin);
  }
  void collect(std::size_t begin, Node container) {
    append_from(begin, container);
    push(container);
  }
  void tuple(std::size_t size) {
    if (stack_.size() - floor() < size) refuse("takes a value from an empty stack");
    collect(stack_.size() - size, out_.add_list());
  }

  void remember(std::uint64_t index) {
    if (stack_.size() <= floor()) refuse("takes a value from an empty stack");
    if (index >= PlainDocument::most_nodes) refuse("remembers a value under too large a number");
    if (index >= memo_.size()) memo_.resize(static_cast<std::size_t>(index) + 1, absent);
    memo_[static_cast<std::size_t>(index)] = stack_.back();
    ++remembered_;
  }
  void recall(std::uint64_t index) {
    if (index >= memo_.size() || memo_[static_cast<std::size_t>(index)] == absent)
      refuse("recalls a value that was never remembered");
    if (stack_.size() >= PlainDocument::most_nodes) refuse("puts too many values on the stack");
    push(memo_[static_cast<std::size_t>(index)]);
  }

  /// Two's complement, little-endian, of any width; beyond 64 bits the nearest double.
  void long_integer(std::uint64_t width) {
    const std::string_view raw = take(width);
    if (width <= 8) {
      const bool negative = width > 0 && (static_cast<std::uint8_t>(raw.back()) & 0x80U) != 0;
      std::uint64_t value = negative ? ~std::uint64_t{0} : 0;
      for (std::size_t i = raw.size(); i-- > 0;)
        value = value << 8U | static_cast<std::uint8_t>(raw[i]);
      push(out_.add_integer(static_cast<std::int64_t>(value)));
      return;
    }
    double value = static_cast<std::int8_t>(raw.back());
    for (std::size_t i = raw.size() - 1; i-- > 0;)
      value = value * 256 + static_cast<std::uint8_t>(raw[i]);
    push(out_.add_real(value));
  }
  void binary_float() {  // the one value that is big-endian
    std::uint64_t bits = 0;
    for (const char c : take(8)) bits = bits << 8U | static_cast<std::uint8_t>(c);
    push(out_.add_real(std::bit_cast<double>(bits)));
  }
  void text(std::uint64_t length) { push(out_.add_text(take(length))); }

  void step(std::uint8_t opcode) {
    using Kind = PlainDocument::Kind;
    switch (opcode) {
      case 0x80:  // PROTO
        if (take_unsigned(1) > 5) refuse("asks for a protocol above 5");
        break;
      case 0x95: take_unsigned(8); break;  // FRAME: a hint for buffering
      case '.': stopped_ = true; break;    // STOP
      case '(':                            // MARK
        if (marks_.size() >= PlainDocument::most_nodes) refuse("sets too many marks");
        marks_.push_back(stack_.size());
        break;
      case '0': pop(); break;                           // POP
      case '1': stack_.resize(pop_mark()); break;       // POP_MARK
      case 'N': push(out_.add_null()); break;           // NONE
      case 0x88: push(out_.add_boolean(true)); break;   // NEWTRUE
      case 0x89: push(out_.add_boolean(false)); break;  // NEWFALSE
      case 'J':                                         // BININT
        push(out_.add_integer(static_cast<std::int32_t>(take_unsigned(4))));
        break;
      case 'K': push(out_.add_integer(static_cast<std::int64_t>(take_unsigned(1)))); break;
      case 'M': push(out_.add_integer(static_cast<std::int64_t>(take_unsigned(2)))); break;
      case 0x8a: long_integer(take_unsigned(1)); break;             // LONG1
      case 0x8b: long_integer(take_unsigned(4)); break;             // LONG4
      case 'G': binary_float(); break;                              // BINFLOAT
      case 'U':                                                     // SHORT_BINSTRING
      case 'C':                                                     // SHORT_BINBYTES
      case 0x8c: text(take_unsigned(1)); break;                     // SHORT_BINUNICODE
      case 'T':                                                     // BINSTRING
      case 'B':                                                     // BINBYTES
      case 'X': text(take_unsigned(4)); break;                      // BINUNICODE
      case 0x8d:                                                    // BINUNICODE8
      case 0x8e:                                                    // BINBYTES8
      case 0x96: text(take_unsigned(8)); break;                     // BYTEARRAY8
      case ']':                                                     // EMPTY_LIST
      case ')':                                                     // EMPTY_TUPLE
      case 0x8f: push(out_.add_list()); break;                      // EMPTY_SET
      case '}': push(out_.add_dictionary()); break;                 // EMPTY_DICT
      case 'l':                                                     // LIST
      case 't':                                                     // TUPLE
      case 0x91: collect(pop_mark(), out_.add_list()); break;       // FROZENSET
      case 'd': collect(pop_mark(), out_.add_dictionary()); break;  // DICT
      case 0x85: tuple(1); break;
      case 0x86: tuple(2); break;
      case 0x87: tuple(3); break;
      case 'a': {  // APPEND
        const Node value = pop();
        out_.append(top(Kind::list), value);
        break;
      }
      case 's': {  // SETITEM
        const Node value = pop();
        const Node key = pop();
        const Node dictionary = top(Kind::dictionary);
        out_.append(dictionary, key);
        out_.append(dictionary, value);
        break;
      }
      case 'e':    // APPENDS
      case 0x90:   // ADDITEMS
      case 'u': {  // SETITEMS
        const std::size_t begin = pop_mark();
        const auto kind = opcode == 'u' ? Kind::dictionary : Kind::list;
        if (begin <= floor() || out_.kind(stack_[begin - 1]) != kind)
          refuse("adds to something that is no list or dictionary");
        append_from(begin, stack_[begin - 1]);
        break;
      }
      case '2': {  // DUP
        const Node node = pop();
        if (stack_.size() >= PlainDocument::most_nodes) refuse("puts too many values on the stack");
        push(node);
        push(node);
        break;
      }
      case 'h': recall(take_unsigned(1)); break;    // BINGET
      case 'j': recall(take_unsigned(4)); break;    // LONG_BINGET
      case 'q': remember(take_unsigned(1)); break;  // BINPUT
      case 'r': remember(take_unsigned(4)); break;  // LONG_BINPUT
      case 0x94: remember(remembered_); break;      // MEMOIZE
      case 'c': refuse_code("GLOBAL");
      case 0x93: refuse_code("STACK_GLOBAL");
      case 'R': refuse_code("REDUCE");
      case 'b': refuse_code("BUILD");
      case 'i': refuse_code("INST");
      case 'o': refuse_code("OBJ");
      case 0x81: refuse_code("NEWOBJ");
      case 0x92: refuse_code("NEWOBJ_EX");
      case 0x82:
      case 0x83:
      case 0x84: refuse_code("EXT");
      case 'P':
      case 'Q': refuse_code("PERSID");
      default:
        refuse(sentence("is opcode ", static_cast<int>(opcode),
                        ", which no pickle of plain data in protocols 2 to 5 has"));
    }
  }
  [[noreturn]] void refuse_code(std::string_view opcode) const {
    refuse(sentence("is opcode ", opcode,
                    ", which names code to run; only numbers, texts, lists, tuples and "
                    "dictionaries are read"));
  }

  static constexpr Node absent = PlainDocument::absent;
  std::string_view bytes_;
  PlainDocument& out_;
  std::size_t at_ = 0;
  std::size_t place_ = 0;  // of the opcode at work
  std::vector<Node> stack_, memo_;
  std::vector<std::size_t> marks_;
  std::uint64_t remembered_ = 0;
  bool stopped_ = false;
};

}  // namespace detail

/// Reads a pickle. Texts of the document refer to `bytes`, which must outlive it. Tuples and sets
/// become lists; bytes after STOP are ignored, as Python does.
/// @throws Error(bad_input): truncated, malformed, more than PlainDocument::most_nodes values, or
/// an opcode that names code. Cost: O(bytes); memory at most about 50 bytes a byte of input.
[[nodiscard]] inline PlainDocument read_pickle(std::string_view bytes, std::string source) {
  PlainDocument document(std::move(source));
  detail::PickleReader(bytes, document).run();
  return document;
}

}  // namespace mega::inline v0::scan
