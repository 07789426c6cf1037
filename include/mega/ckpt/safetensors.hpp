/// @file  Tensors in one file, in the safetensors format: a checked reader and a streaming writer.
/// opt-in: needs nlohmann-json.
/// Format: 8 bytes of little-endian header length, a JSON object, then the tensors' bytes.
/// Source: https://huggingface.co/docs/safetensors
#pragma once
#include <mega/ckpt/durable_file.hpp>
#include <mega/ckpt/strict_json.hpp>
#include <mega/core/bfloat16.hpp>
#include <mega/core/error.hpp>
#include <mega/core/float16.hpp>
#include <mega/core/view.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt {

static_assert(std::endian::native == std::endian::little,
              "mega: safetensors files are little-endian; byte swapping is not supported");

/// Largest header that is read or written, as in the reference implementation.
inline constexpr Index safetensors_header_limit = 100'000'000;

/// Element types of the format whose elements are whole bytes.
enum class DType : std::uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  i64,
  u64,
  f64,
};

namespace detail {
struct DTypeRow {
  DType dtype;
  std::string_view name;
  int bytes;
};
inline constexpr DTypeRow dtype_table[] = {
    {DType::boolean, "BOOL", 1},    {DType::u8, "U8", 1},           {DType::i8, "I8", 1},
    {DType::f8_e4m3, "F8_E4M3", 1}, {DType::f8_e5m2, "F8_E5M2", 1}, {DType::i16, "I16", 2},
    {DType::u16, "U16", 2},         {DType::f16, "F16", 2},         {DType::bf16, "BF16", 2},
    {DType::i32, "I32", 4},         {DType::u32, "U32", 4},         {DType::f32, "F32", 4},
    {DType::i64, "I64", 8},         {DType::u64, "U64", 8},         {DType::f64, "F64", 8},
};
}  // namespace detail

/// The format's name of an element type.
[[nodiscard]] constexpr std::string_view to_string(DType dtype) noexcept {
  for (const auto& row : detail::dtype_table) {
    if (row.dtype == dtype) return row.name;
  }
  return "unknown";
}
/// Bytes of one element.
[[nodiscard]] constexpr int element_bytes(DType dtype) noexcept {
  for (const auto& row : detail::dtype_table) {
    if (row.dtype == dtype) return row.bytes;
  }
  return 0;
}
[[nodiscard]] constexpr std::optional<DType> dtype_from(std::string_view name) noexcept {
  for (const auto& row : detail::dtype_table) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

/// A tensor as the header declares it.
struct TensorEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Index> shape;  ///< no extent: one element
  Index offset = 0;          ///< bytes from the first tensor's start
  Index bytes = 0;
};

/// A checked header: every invariant of the format holds.
struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;             ///< in byte order of their names
  std::map<std::string, std::string> metadata;  ///< the "__metadata__" object
  Index data_begin = 0;                         ///< byte of the file at which the tensors start
};

namespace detail {

/// elements * bytes of one; nothing if the product does not fit Index.
inline std::optional<Index> tensor_bytes(DType dtype, const std::vector<Index>& shape) noexcept {
  Index bytes = element_bytes(dtype);
  for (const Index extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

/// Reads the header's fixed schema from parser events. Whatever is nested deeper or differs from
/// the schema is refused when it is seen, so memory stays proportional to the header.
class HeaderEvents final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderEvents(std::string_view where) : where_(where) {}

  std::vector<TensorEntry> tensors;
  std::map<std::string, std::string> metadata;

  bool null() override { return refuse_value("null"); }
  bool boolean(bool) override { return refuse_value("a boolean"); }
  bool number_integer(number_integer_t) override { return refuse_value("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return refuse_value("a number that is not a 64-bit integer");
  }
  bool binary(binary_t&) override { return refuse_value("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::shape && place_ != Place::offsets) return refuse_value("a number");
    if (value > static_cast<std::uint64_t>(std::numeric_limits<Index>::max())) {
      fail(sentence("the number ", value, " is out of range"));
    }
    auto& list = place_ == Place::shape ? tensors.back().shape : offsets_;
    const std::size_t most = place_ == Place::shape ? 64 : 2;
    if (list.size() == most) {
      fail(sentence(place_ == Place::shape ? "shape" : "data_offsets", " has more than ", most,
                    " numbers"));
    }
    list.push_back(static_cast<Index>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      if (!metadata.emplace(key_, value).second) {
        fail(sentence("key ", printable(key_), " appears twice in __metadata__"));
      }
      return true;
    }
    if (place_ != Place::tensor || field_ != Field::dtype) return refuse_value("a string");
    const auto dtype = dtype_from(value);
    if (!dtype) fail(sentence("unknown dtype ", printable(value)));
    tensors.back().dtype = *dtype;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::header;
    } else if (place_ != Place::header) {
      return refuse_value("an object");
    } else if (key_ == "__metadata__") {
      if (std::exchange(has_metadata_, true)) fail("__metadata__ appears twice");
      place_ = Place::metadata;
    } else {
      tensors.push_back({.name = key_, .dtype = {}, .shape = {}});
      seen_ = 0;
      offsets_.clear();
      place_ = Place::tensor;
    }
    return true;
  }

  bool key(string_t& value) override {
    if (place_ != Place::tensor) {
      key_ = value;
      return true;
    }
    field_ = value == "dtype"          ? Field::dtype
             : value == "shape"        ? Field::shape
             : value == "data_offsets" ? Field::offsets
                                       : Field::none;
    if (field_ == Field::none) fail(sentence("unknown key ", printable(value)));
    const unsigned bit = 1u << static_cast<unsigned>(field_);
    if ((seen_ & bit) != 0) fail(sentence("key ", printable(value), " appears twice"));
    seen_ |= bit;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      if (seen_ != 7u) fail("dtype, shape or data_offsets is missing");
      if (offsets_.size() != 2) fail("data_offsets does not have two numbers");
      close_tensor();
    }
    place_ = place_ == Place::header ? Place::outside : Place::header;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || field_ == Field::dtype) return refuse_value("an array");
    place_ = field_ == Field::shape ? Place::shape : Place::offsets;
    return true;
  }
  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t byte, const std::string&,
                   const nlohmann::json::exception&) override {
    throw Error(ErrorCode::bad_input,
                sentence(where_, ": header is not valid JSON at byte ", 8 + byte));
  }

 private:
  enum class Place : std::uint8_t { outside, header, metadata, tensor, shape, offsets };
  enum class Field : std::uint8_t { dtype, shape, offsets, none };

  [[noreturn]] void fail(const std::string& reason) const {
    const bool in_tensor =
        place_ == Place::tensor || place_ == Place::shape || place_ == Place::offsets;
    throw Error(ErrorCode::bad_input,
                in_tensor
                    ? sentence(where_, ": tensor ", printable(tensors.back().name), ": ", reason)
                    : sentence(where_, ": header: ", reason));
  }
  bool refuse_value(std::string_view what) const {
    fail(
        place_ == Place::outside || place_ == Place::header || place_ == Place::metadata
            ? sentence(what, " stands where the format does not allow it, at key ", printable(key_))
            : sentence(what, " stands where the format does not allow it"));
  }

  void close_tensor() {
    auto& tensor = tensors.back();
    const auto bytes = tensor_bytes(tensor.dtype, tensor.shape);
    if (!bytes) fail("the product of shape and element size exceeds 63 bits");
    if (offsets_[1] < offsets_[0]) {
      fail(sentence("data_offsets end at ", offsets_[1], ", before they begin at ", offsets_[0]));
    }
    if (offsets_[1] - offsets_[0] != *bytes) {
      fail(sentence("shape and dtype need ", *bytes, " bytes but data_offsets hold ",
                    offsets_[1] - offsets_[0]));
    }
    tensor.offset = offsets_[0];
    tensor.bytes = *bytes;
  }

  std::string where_;
  Place place_ = Place::outside;
  Field field_ = Field::none;
  unsigned seen_ = 0;
  std::string key_;
  std::vector<Index> offsets_;
  bool has_metadata_ = false;
};

/// Every byte of the data belongs to exactly one tensor.
inline void check_tiling(const std::vector<TensorEntry>& tensors, Index data_bytes,
                         Index data_begin, std::string_view where) {
  std::vector<const TensorEntry*> by_offset;
  by_offset.reserve(tensors.size());
  for (const auto& tensor : tensors) by_offset.push_back(&tensor);
  std::sort(by_offset.begin(), by_offset.end(), [](const auto* a, const auto* b) {
    return a->offset != b->offset ? a->offset < b->offset : a->bytes < b->bytes;
  });
  Index end = 0;
  for (const auto* tensor : by_offset) {
    expects(tensor->offset == end, ErrorCode::bad_input, [&] {
      return sentence(where, ": tensor ", printable(tensor->name), " begins at data byte ",
                      tensor->offset, tensor->offset < end ? ", inside" : ", after a hole behind",
                      " the tensor that ends at ", end);
    });
    end += tensor->bytes;  // no overflow: offset + bytes was read as one 63-bit number
  }
  expects(end <= data_bytes, ErrorCode::bad_input, [&] {
    const auto last = static_cast<std::uint64_t>(data_begin) + static_cast<std::uint64_t>(end);
    return sentence(where, " is truncated: its tensors end at byte ", last,
                    " but the file ends at byte ", data_begin + data_bytes);
  });
  expects(end == data_bytes, ErrorCode::bad_input, [&] {
    return sentence(where, ": ", data_bytes - end, " bytes after the last tensor, from byte ",
                    data_begin + end, ", belong to none");
  });
}

}  // namespace detail

/// Length of the JSON header, from the file's first 8 bytes.
/// @throws Error bad_input
[[nodiscard]] inline Index safetensors_header_bytes(std::span<const std::byte> first8,
                                                    Index file_bytes, std::string_view where) {
  expects(first8.size() >= 8 && file_bytes >= 8, ErrorCode::bad_input, [&] {
    return sentence(where, " is truncated: ", file_bytes,
                    " bytes do not hold the 8-byte header length");
  });
  std::uint64_t length = 0;
  std::memcpy(&length, first8.data(), sizeof length);
  expects(length <= static_cast<std::uint64_t>(safetensors_header_limit), ErrorCode::bad_input,
          [&] {
            return sentence(where, ": header length ", length, " at byte 0 exceeds the limit of ",
                            safetensors_header_limit);
          });
  const auto bytes = static_cast<Index>(length);
  expects(bytes <= file_bytes - 8, ErrorCode::bad_input, [&] {
    return sentence(where, " is truncated: the header ends at byte ", 8 + bytes,
                    " but the file ends at byte ", file_bytes);
  });
  expects(bytes >= 2, ErrorCode::bad_input, [&] {
    return sentence(where, ": header length ", bytes, " at byte 0 is too small for a JSON object");
  });
  return bytes;
}

/// Parses and checks a header.
/// @param json        the header without its length
/// @param data_bytes  bytes of the file behind the header
/// @throws Error bad_input with the tensor or the byte, and the reason
/// @cost   O(header bytes), O(tensors log tensors)
[[nodiscard]] inline SafetensorsHeader parse_safetensors_header(std::string_view json,
                                                                Index data_bytes,
                                                                std::string_view where) {
  expects(!json.empty() && json.front() == '{', ErrorCode::bad_input,
          [&] { return sentence(where, ": header does not begin with '{' at byte 8"); });
  // The parser takes a zero byte for the end, and would not look at what is behind it.
  const auto zero = json.find('\0');
  expects(zero == json.npos, ErrorCode::bad_input, [&] {
    return sentence(where, ": header is not valid JSON at byte ", 9 + zero, ", a zero byte");
  });
  detail::HeaderEvents events(where);
  nlohmann::json::sax_parse(json, &events);
  SafetensorsHeader header{std::move(events.tensors), std::move(events.metadata),
                           8 + static_cast<Index>(json.size())};
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::sort(header.tensors.begin(), header.tensors.end(), by_name);
  const auto twice =
      std::adjacent_find(header.tensors.begin(), header.tensors.end(),
                         [](const auto& a, const auto& b) { return a.name == b.name; });
  expects(twice == header.tensors.end(), ErrorCode::bad_input,
          [&] { return sentence(where, ": tensor ", printable(twice->name), " appears twice"); });
  detail::check_tiling(header.tensors, data_bytes, header.data_begin, where);
  return header;
}

/// Parses and checks the header of a file held in memory.
[[nodiscard]] inline SafetensorsHeader parse_safetensors(std::span<const std::byte> file,
                                                         std::string_view where) {
  const auto size = static_cast<Index>(file.size());
  const Index length = safetensors_header_bytes(file, size, where);
  const auto json = file.subspan(8, static_cast<std::size_t>(length));
  return parse_safetensors_header({reinterpret_cast<const char*>(json.data()), json.size()},
                                  size - 8 - length, where);
}

/// An IEEE binary16 number as float; exact, NaN stays NaN.
[[nodiscard]] constexpr float float_from_f16(std::uint16_t bits) noexcept {
  return std::bit_cast<Float16>(bits);
}
/// A bfloat16 number as float; exact.
[[nodiscard]] constexpr float float_from_bf16(std::uint16_t bits) noexcept {
  return std::bit_cast<Bfloat16>(bits);
}

/// A safetensors file open for reading; only its header is held in memory.
/// Reads are positional and const: several threads may share one reader.
class SafetensorsReader {
 public:
  /// @throws Error bad_input if any check of the format fails
  explicit SafetensorsReader(const std::string& path) : file_(path) {
    std::byte first8[8] = {};
    if (file_.size() >= 8) file_.read(0, first8);
    const Index length = safetensors_header_bytes(first8, file_.size(), path);
    std::string json(static_cast<std::size_t>(length), '\0');
    file_.read(8, std::as_writable_bytes(std::span(json)));
    header_ = parse_safetensors_header(json, file_.size() - 8 - length, path);
  }

  /// All tensors, in byte order of their names.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept { return header_.tensors; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept {
    return header_.metadata;
  }
  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }

  /// The tensor of that name, or null.
  [[nodiscard]] const TensorEntry* find(std::string_view name) const noexcept {
    const auto& all = header_.tensors;
    const auto at = std::lower_bound(all.begin(), all.end(), name,
                                     [](const auto& t, std::string_view n) { return t.name < n; });
    return at != all.end() && at->name == name ? &*at : nullptr;
  }
  /// @throws Error bad_input if there is none
  [[nodiscard]] const TensorEntry& at(std::string_view name) const {
    const auto* const tensor = find(name);
    expects(tensor != nullptr, ErrorCode::bad_input, [&] {
      return sentence(path(), " holds no tensor ", printable(name), " among its ",
                      tensors().size());
    });
    return *tensor;
  }

  /// The whole tensor, as stored. @pre out.size() == tensor.bytes
  void read(const TensorEntry& tensor, std::span<std::byte> out) const {
    expects(static_cast<Index>(out.size()) == tensor.bytes, ErrorCode::logic, [&] {
      return sentence(path(), ": tensor ", printable(tensor.name), " has ", tensor.bytes,
                      " bytes but the destination has ", out.size());
    });
    read_range(tensor, 0, out);
  }

  /// Bytes [first_byte, first_byte + out.size()) of a tensor: leading rows are a contiguous range.
  void read_range(const TensorEntry& tensor, Index first_byte, std::span<std::byte> out) const {
    const auto count = static_cast<Index>(out.size());
    expects(first_byte >= 0 && first_byte <= tensor.bytes && count <= tensor.bytes - first_byte,
            ErrorCode::logic, [&] {
              return sentence(path(), ": tensor ", printable(tensor.name), " has ", tensor.bytes,
                              " bytes, not ", count, " from byte ", first_byte);
            });
    file_.read(header_.data_begin + tensor.offset + first_byte, out);
  }

  /// All elements as float, from F32, F16, BF16 (exact) or F64 (rounded to nearest).
  /// @throws Error bad_input if the stored type is another or the element count differs
  void read_f32(std::string_view name, std::span<float> out) const {
    const auto& tensor = at(name);
    const Index elements = tensor.bytes / element_bytes(tensor.dtype);
    expects(static_cast<Index>(out.size()) == elements, ErrorCode::bad_input, [&] {
      return sentence(path(), ": tensor ", printable(name), " has ", elements, " elements where ",
                      out.size(), " are needed");
    });
    read_f32(tensor, 0, out);
  }

  /// Elements [first, first + out.size()) as float.
  void read_f32(const TensorEntry& tensor, Index first, std::span<float> out) const {
    if (tensor.dtype == DType::f32) {
      check_first(tensor, first);
      return read_range(tensor, first * 4, std::as_writable_bytes(out));
    }
    const auto convert = [&]<class Stored>(Stored, auto to_float) {
      check_first(tensor, first);
      std::vector<Stored> piece(std::min(out.size(), std::size_t{1} << 18));
      while (!out.empty()) {
        const auto now = std::span(piece).first(std::min(piece.size(), out.size()));
        read_range(tensor, first * Index{sizeof(Stored)}, std::as_writable_bytes(now));
        std::transform(now.begin(), now.end(), out.begin(), to_float);
        out = out.subspan(now.size());
        first += static_cast<Index>(now.size());
      }
    };
    switch (tensor.dtype) {
      case DType::f16: return convert(std::uint16_t{}, float_from_f16);
      case DType::bf16: return convert(std::uint16_t{}, float_from_bf16);
      case DType::f64: return convert(double{}, [](double x) { return static_cast<float>(x); });
      default:
        throw Error(ErrorCode::bad_input,
                    sentence(path(), ": tensor ", printable(tensor.name), " has dtype ",
                             to_string(tensor.dtype), " where F32, F16, BF16 or F64 is needed"));
    }
  }

 private:
  void check_first(const TensorEntry& tensor, Index first) const {
    expects(first >= 0 && first <= tensor.bytes / element_bytes(tensor.dtype), ErrorCode::logic,
            [&] {
              return sentence(path(), ": element ", first, " lies outside tensor ",
                              printable(tensor.name));
            });
  }

  InputFile file_;
  SafetensorsHeader header_;
};

/// Where a writer puts bytes: DurableFile, or a file that also counts or checksums them.
template <class S>
concept byte_sink = requires(S& sink, std::span<const std::byte> bytes) {
  sink.write(bytes);
  sink.finish();
};

/// What is going to be written.
struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Index> shape;
};

/// Writes a safetensors file front to back: the header follows from the declared tensors, so no
/// tensor is held in memory.
template <byte_sink Sink = DurableFile>
class SafetensorsWriter {
 public:
  /// Writes the header. Tensors keep the declared order; declare wide elements before narrow ones,
  /// since readers map the file and each tensor must start at a multiple of its element size.
  /// @throws Error usage for a name twice, not UTF-8 or reserved, a misaligned tensor, a header
  /// over
  ///         the limit; not_durable
  SafetensorsWriter(Sink sink, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {})
      : sink_(std::move(sink)), tensors_(std::move(tensors)) {
    const std::string json = header(metadata);
    const std::uint64_t length = json.size();
    sink_.write(std::as_bytes(std::span(&length, 1)));
    sink_.write(std::as_bytes(std::span(json)));
  }
  SafetensorsWriter(std::string path, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {}) requires
      std::same_as<Sink, DurableFile>
      : SafetensorsWriter(DurableFile(std::move(path)), std::move(tensors), metadata) {}

  /// The next tensor's bytes, row-major, little-endian.
  /// @throws Error logic if `name` is not the next declared one or the size differs; not_durable
  void write(std::string_view name, std::span<const std::byte> bytes) {
    expects(next_ < tensors_.size(), ErrorCode::logic, [&] {
      return sentence("tensor ", printable(name), " was written after all ", tensors_.size(),
                      " declared ones");
    });
    const auto& tensor = tensors_[next_];
    expects(tensor.name == name, ErrorCode::logic, [&] {
      return sentence("tensor ", printable(name), " was written where ", printable(tensor.name),
                      " was declared, at place ", next_);
    });
    const Index declared = *detail::tensor_bytes(tensor.dtype, tensor.shape);
    expects(declared == static_cast<Index>(bytes.size()), ErrorCode::logic, [&] {
      return sentence("tensor ", printable(name), " was declared with ", declared,
                      " bytes and written with ", bytes.size());
    });
    sink_.write(bytes);
    ++next_;
  }

  /// Flushes and closes the file. @return what the sink's finish() returns
  /// @throws Error logic if a declared tensor is missing; not_durable
  auto finish() {
    expects(next_ == tensors_.size(), ErrorCode::logic, [&] {
      return sentence("tensor ", printable(tensors_[next_].name), " was declared but not written");
    });
    return sink_.finish();
  }

 private:
  [[nodiscard]] std::string header(const std::map<std::string, std::string>& metadata) const {
    std::vector<std::string_view> names;
    Index begin = 0;
    std::string json = "{";
    try {
      if (!metadata.empty()) json += "\"__metadata__\":" + nlohmann::json(metadata).dump() + ",";
      for (const auto& tensor : tensors_) {
        expects(tensor.name != "__metadata__", ErrorCode::usage,
                "a tensor cannot have the reserved name __metadata__");
        const auto bytes = detail::tensor_bytes(tensor.dtype, tensor.shape);
        Index end = 0;
        expects(bytes && !__builtin_add_overflow(begin, *bytes, &end), ErrorCode::usage, [&] {
          return sentence("tensor ", printable(tensor.name),
                          " has a negative extent or more than 2^63 bytes");
        });
        expects(begin % element_bytes(tensor.dtype) == 0, ErrorCode::usage, [&] {
          return sentence("tensor ", printable(tensor.name), " would begin at data byte ", begin,
                          ", not a multiple of its element size ", element_bytes(tensor.dtype),
                          "; declare wider element types first");
        });
        json += nlohmann::json(tensor.name).dump();
        json += sentence(":{\"dtype\":\"", to_string(tensor.dtype),
                         "\",\"shape\":", nlohmann::json(tensor.shape).dump(),
                         ",\"data_offsets\":[", begin, ",", end, "]},");
        names.push_back(tensor.name);
        begin = end;
      }
    } catch (const nlohmann::json::exception&) {
      throw Error(ErrorCode::usage, "a tensor name or metadata entry is not valid UTF-8");
    }
    if (json.back() == ',') json.pop_back();
    json += '}';
    json.append((8 - json.size() % 8) % 8, ' ');  // the data starts at a multiple of 8
    expects(static_cast<Index>(json.size()) <= safetensors_header_limit, ErrorCode::usage, [&] {
      return sentence("the header of ", tensors_.size(), " tensors has ", json.size(),
                      " bytes, more than ", safetensors_header_limit,
                      "; split the tensors over several files");
    });
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    expects(twice == names.end(), ErrorCode::usage,
            [&] { return sentence("tensor ", printable(*twice), " is declared twice"); });
    return json;
  }

  Sink sink_;
  std::vector<TensorSpec> tensors_;
  std::size_t next_ = 0;
};

}  // namespace mega::inline v0::ckpt
