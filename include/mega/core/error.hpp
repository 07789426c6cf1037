/// @file  The one exception type: a code, the place that found the fault, one sentence for the
/// reader.
#pragma once
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

#if __has_include(<source_location>) && (!defined(__clang__) || __clang_major__ >= 16)
#include <source_location>
#endif

namespace mega::inline v0 {

#if defined(__cpp_lib_source_location)
using SourceLocation = std::source_location;
#else
/// Stand-in where the standard library has no std::source_location (clang 14 with libstdc++ 12).
struct SourceLocation {
  const char* file = "";
  unsigned number = 0;
  static constexpr SourceLocation current(const char* f = __builtin_FILE(),
                                          unsigned n = __builtin_LINE()) noexcept {
    return {f, n};
  }
  [[nodiscard]] constexpr const char* file_name() const noexcept { return file; }
  [[nodiscard]] constexpr unsigned line() const noexcept { return number; }
};
#endif

/// What kind of fault it is. A program's exit code follows from it: see exit_code().
enum class ErrorCode : std::uint8_t {
  usage,        ///< contradictory or impossible request: flags, layouts, sizes
  bad_input,    ///< a file, a header or a record that cannot be accepted
  peer_failed,  ///< another rank threw, died or disagreed
  timeout,      ///< a deadline passed while waiting for other ranks
  not_durable,  ///< a checkpoint could not be made durable
  device,       ///< the device or its driver reported an error
  logic,        ///< a precondition of the library was broken by its caller
};

[[nodiscard]] constexpr std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::usage: return "usage";
    case ErrorCode::bad_input: return "bad input";
    case ErrorCode::peer_failed: return "peer failed";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::not_durable: return "not durable";
    case ErrorCode::device: return "device";
    case ErrorCode::logic: return "logic";
  }
  return "unknown";
}

/// Exit code of a program that ends with this fault: 2 usage or input, 3 a rank or peer, 4
/// durability.
[[nodiscard]] constexpr int exit_code(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::usage:
    case ErrorCode::bad_input: return 2;
    case ErrorCode::not_durable: return 4;
    default: return 3;
  }
}

/// Thrown by host calls; destructors, recorders and stream workers never let it out.
/// what() is one sentence that names the wrong value and the valid ones.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& sentence, SourceLocation at = SourceLocation::current())
      : std::runtime_error(sentence), code_(code), at_(at) {}

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }
  [[nodiscard]] SourceLocation where() const noexcept { return at_; }

 private:
  ErrorCode code_;
  SourceLocation at_;
};

namespace detail {

[[noreturn]] inline void fail(ErrorCode code, const std::string& sentence, SourceLocation at) {
  throw Error(code, sentence, at);
}

/// A string or a number on its way into a sentence. Not a template, so that the hundreds of
/// sentences of the library cost little to compile.
class Part {
 public:
  Part(std::string_view text) noexcept : text_(text) {}
  Part(char letter) : own_(1, letter) {}
  Part(int number) : own_(std::to_string(number)) {}
  Part(long number) : own_(std::to_string(number)) {}
  Part(long long number) : own_(std::to_string(number)) {}
  Part(unsigned number) : own_(std::to_string(number)) {}
  Part(unsigned long number) : own_(std::to_string(number)) {}
  Part(unsigned long long number) : own_(std::to_string(number)) {}
  Part(double number) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", number);
    own_ = digits;
  }

  void append_to(std::string& out) const {
    out += text_;
    out += own_;
  }

 private:
  std::string_view text_;
  std::string own_;
};

inline std::string join(std::initializer_list<Part> parts) {
  std::string out;
  for (const Part& part : parts) part.append_to(out);
  return out;
}

}  // namespace detail

/// Throws Error(code, sentence) unless `holds`. A sentence that is built of parts is passed as a
/// callable returning std::string, which is called on failure only.
template <class Sentence>
constexpr void expects(bool holds, ErrorCode code, const Sentence& sentence,
                       SourceLocation at = SourceLocation::current()) {
  if (holds) [[likely]]
    return;
  if constexpr (requires { sentence(); }) {
    detail::fail(code, sentence(), at);
  } else {
    detail::fail(code, sentence, at);
  }
}

/// Concatenates strings and numbers: sentence("tp ", 3, " does not divide heads ", 8).
/// Parts come by value, so that literals of all lengths share an instantiation.
template <class... Parts>
[[nodiscard]] std::string sentence(Parts... parts) {
  return detail::join({detail::Part(parts)...});
}

}  // namespace mega::inline v0
