/// @file  Record: what is kept of one object of "traceEvents", and RecordReader, which reads it.
/// From text to fields and no further: nothing here knows of a Trace.
#pragma once
#include <mega/scan/decimal.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/kineto/hash.hpp>
#include <mega/scan/trace.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace mega::inline v0::scan::kineto {

/// What "cat" says.
enum class Category : std::uint8_t {
  other,
  host,        ///< operators, Python functions, overhead
  annotation,  ///< user ranges on the host
  runtime,     ///< calls of the runtime or the driver
  kernel,
  copy,  ///< memcpy, memset
  device_annotation,
  device_wait,
};

[[nodiscard]] inline Category parse_category(std::string_view text) noexcept {
  using enum Category;
  if (text == "cpu_op" || text == "python_function" || text == "Operator" || text == "overhead")
    return host;
  if (text == "cuda_runtime" || text == "cuda_driver" || text == "Runtime" ||
      text == "hip_runtime" || text == "xpu_runtime" || text == "mtia_runtime")
    return runtime;
  if (text == "kernel" || text == "Kernel" || text == "mtia_ccp_events") return kernel;
  if (text == "user_annotation") return annotation;
  if (text == "gpu_user_annotation") return device_annotation;
  if (text == "gpu_memcpy" || text == "gpu_memset" || text == "Memcpy" || text == "Memset")
    return copy;
  if (text == "cuda_sync") return device_wait;
  return other;
}

[[nodiscard]] constexpr bool on_device(Category c) noexcept {
  using enum Category;
  return c == kernel || c == copy || c == device_annotation || c == device_wait;
}

/// A process or thread: a number, or a text to be made one.
struct Place {
  std::int64_t number = 0;
  JsonText text;
  bool plain = false;  ///< number holds it
  bool quoted = false;
};

/// What the arguments of a communication kernel say; empty or -1 where they do not.
struct CollectiveArguments {
  std::string_view collective, group, ranks, dtype;
  std::int64_t elements = -1, sequence = -1, source = -1, destination = -1;
  std::int64_t rank_start = -1, rank_stride = -1, size = -1;
};

/// Texts are views into the file's, until the next record.
struct Record {
  char phase = 0;  ///< 0: none, or none of one character
  bool has_begin = false, has_id = false;
  Category category = Category::other;
  std::uint32_t category_hash = 0;
  JsonText name;
  JsonText label;  ///< the argument "name"
  Place process, track;
  Nanoseconds begin = 0, duration = 0;
  std::uint64_t id = 0;                             ///< of a flow, hashed
  std::uint32_t correlation = none;                 ///< of a call and of what it starts
  const CollectiveArguments* collective = nullptr;  ///< where there are any
};

class RecordReader {
 public:
  explicit RecordReader(JsonScanner& json) : json_(json) {}

  /// @pre the scanner has entered the record's object, and `r` is new
  /// @return false: it is broken, or the text ends in it
  [[nodiscard]] bool read(Record& r) {
    JsonText key;
    has_collective_ = false;
    while (json_.next_key(key)) read_field(r, key.raw);
    if (has_collective_) r.collective = &collective_;
    if (!json_.broken() && !json_.cut()) [[likely]]
      return true;
    if (!json_.cut() || json_.too_long()) json_.give_up_record();
    return false;
  }

 private:
  void read_field(Record& r, std::string_view key) {
    using Kind = JsonScanner::Kind;
    const auto is = [&](std::string_view word) {
      return std::memcmp(key.data(), word.data(), word.size()) == 0;
    };
    switch (key.size()) {
      case 2:
        if (is("ph")) {
          const std::string_view phase = json_.token();
          r.phase = phase.size() == 1 ? phase[0] : '\0';
          return;
        }
        if (is("ts")) {
          r.has_begin = json_.number(r.begin, microseconds);
          return;
        }
        if (is("id")) return read_id(r);
        break;
      case 3:
        if (is("cat")) {
          const std::string_view text = json_.token();
          r.category = parse_category(text);
          r.category_hash = static_cast<std::uint32_t>(quick_hash(text));
          return;
        }
        if (is("pid")) return read_place(r.process);
        if (is("tid")) return read_place(r.track);
        if (is("dur")) {
          (void)json_.number(r.duration, microseconds);
          return;
        }
        break;
      case 4:
        if (is("name")) {
          if (json_.kind() == Kind::text) {
            r.name = json_.text();
          } else {
            json_.skip();
          }
          return;
        }
        // Operators' arguments say nothing that is kept, and are most of the text.
        if (is("args") && json_.kind() == Kind::object && r.category != Category::host) {
          json_.enter();
          collective_ = {};
          has_collective_ = false;
          JsonText argument;
          while (json_.next_key(argument)) read_argument(r, argument.raw);
          return;
        }
        break;
      default: break;
    }
    json_.skip();
  }

  void read_argument(Record& r, std::string_view key) {
    const auto is = [&](std::string_view word) {
      return std::memcmp(key.data(), word.data(), word.size()) == 0;
    };
    const auto number = [&](std::int64_t& out) { (void)json_.number(out); };
    const auto text = [&](std::string_view& out) { out = json_.token(); };
    switch (key.size()) {
      case 3:
        if (is("Seq")) return number(collective_.sequence);
        break;
      case 4:
        if (is("name") && json_.kind() == JsonScanner::Kind::text) {
          r.label = json_.text();
          return;
        }
        break;
      case 5:
        if (is("dtype")) return text(collective_.dtype);
        break;
      case 8:
        if (is("Src Rank")) return number(collective_.source);
        if (is("Dst Rank")) return number(collective_.destination);
        break;
      case 10:
        if (is("Group size")) return number(collective_.size);
        break;
      case 11:
        if (is("correlation")) return read_correlation(r);
        break;
      case 13:
        if (is("In msg nelems")) {
          has_collective_ = true;
          return number(collective_.elements);
        }
        break;
      case 15:
        if (is("Collective name")) {
          has_collective_ = true;
          return text(collective_.collective);
        }
        break;
      case 17:
        if (is("Global rank start")) return number(collective_.rank_start);
        break;
      case 18:
        if (is("Process Group Name")) {
          has_collective_ = true;
          return text(collective_.group);
        }
        if (is("Global rank stride")) return number(collective_.rank_stride);
        break;
      case 19:
        if (is("Process Group Ranks")) return text(collective_.ranks);
        break;
      default: break;
    }
    json_.skip();
  }

  void read_id(Record& r) {
    const std::string_view text = json_.token();
    r.has_id = !text.empty();
    r.id = quick_hash(text);
  }

  void read_place(Place& out) {
    out.plain = json_.plain_number(out.number);
    if (out.plain) return;
    out.quoted = json_.kind() == JsonScanner::Kind::text;
    out.text = out.quoted ? json_.text() : JsonText{json_.token(), true};
  }

  /// CUPTI's correlations have 32 bits. Longer ones, and the largest of those, which marks none,
  /// are told apart by their hash.
  void read_correlation(Record& r) {
    const std::string_view text = json_.token();
    if (text.empty()) return;
    std::uint64_t value = 0;
    bool fits = text.size() <= 10;
    for (const char c : text) {
      fits = fits && detail::is_digit(c);
      value = value * 10 + static_cast<std::uint64_t>(c - '0');
    }
    r.correlation =
        static_cast<std::uint32_t>(fits && value < none ? value : quick_hash(text) % none);
  }

  static constexpr int microseconds = static_cast<int>(TimeUnit::microseconds);

  JsonScanner& json_;
  CollectiveArguments collective_;  // of the last arguments that were read
  bool has_collective_ = false;
};

}  // namespace mega::inline v0::scan::kineto
