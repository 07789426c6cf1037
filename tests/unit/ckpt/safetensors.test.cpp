/// @file  Tests of ckpt/safetensors.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/ckpt/safetensors.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

namespace ckpt = mega::ckpt;
using ckpt::DType;
using mega::ErrorCode;
using mega::Index;
using mega::tests::contains;
using mega::tests::sentence_of;
using mega::tests::TemporaryDirectory;
using mega::tests::throws_code;

namespace {

/// A file with this header and `data_bytes` bytes of data 0, 1, 2, ...
std::string file_of(std::string_view json, std::size_t data_bytes) {
  const std::uint64_t length = json.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  out += json;
  for (std::size_t i = 0; i < data_bytes; ++i) out += static_cast<char>(i);
  return out;
}

std::string length_of(std::uint64_t length) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out;
}

ckpt::SafetensorsHeader parse(std::string_view file) {
  return ckpt::parse_safetensors(std::as_bytes(std::span(file)), "f");
}

std::string refusal(std::string_view file) {
  return sentence_of([&] { (void)parse(file); });
}

std::string tensor(std::string_view name, std::string_view dtype, std::string_view shape,
                   std::string_view offsets) {
  return mega::sentence("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":[", shape,
                        "],\"data_offsets\":[", offsets, "]}");
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

TEST_CASE("safetensors: a valid header gives tensors by name") {
  const auto header =
      parse(file_of("{" + tensor("b", "F32", "2,3", "4,28") + "," + tensor("a", "I16", "2", "0,4") +
                        ",\"__metadata__\":{\"format\":\"pt\",\"k\":\"\"}}   ",
                    28));
  REQUIRE(header.tensors.size() == 2);
  CHECK(header.tensors[0].name == "a");
  CHECK(header.tensors[0].dtype == DType::i16);
  CHECK(header.tensors[0].offset == 0);
  CHECK(header.tensors[1].name == "b");
  CHECK(header.tensors[1].shape == std::vector<Index>{2, 3});
  CHECK(header.tensors[1].offset == 4);
  CHECK(header.tensors[1].bytes == 24);
  CHECK(header.metadata.at("format") == "pt");
}

TEST_CASE("safetensors: empty files, empty tensors and scalars are valid") {
  CHECK(parse(file_of("{}", 0)).tensors.empty());
  CHECK(parse(file_of("{\"__metadata__\":{}}", 0)).tensors.empty());
  CHECK(parse(file_of("{" + tensor("s", "F64", "", "0,8") + "}", 8)).tensors[0].shape.empty());
  const auto empties = parse(
      file_of("{" + tensor("x", "F32", "0,5", "4,4") + "," + tensor("y", "U8", "4", "0,4") + "," +
                  tensor("z", "F32", "0", "4,4") + "," + tensor("w", "I64", "3,0", "0,0") + "}",
              4));
  CHECK(empties.tensors.size() == 4);
  CHECK(parse(file_of("{" + tensor("\\u0000\\n", "U8", "1", "0,1") + "}", 1)).tensors[0].name ==
        std::string("\0\n", 2));
}

TEST_CASE("safetensors: every element type is known with its size") {
  for (const auto& row : ckpt::detail::dtype_table) {
    CAPTURE(row.name);
    const auto bytes = static_cast<std::size_t>(3 * ckpt::element_bytes(row.dtype));
    const auto header =
        parse(file_of("{" + tensor("t", row.name, "3", "0," + std::to_string(bytes)) + "}", bytes));
    CHECK(header.tensors[0].dtype == row.dtype);
    CHECK(ckpt::dtype_from(ckpt::to_string(row.dtype)) == row.dtype);
  }
}

TEST_CASE("safetensors: hostile and damaged headers are refused with the reason") {
  const std::string huge = "9223372036854775807";
  struct Case {
    std::string file;
    std::string_view reason;
  };
  const std::string ok = tensor("t", "F32", "1", "0,4");
  const Case cases[] = {
      // the length
      {"", "0 bytes do not hold the 8-byte header length"},
      {"1234567", "7 bytes do not hold"},
      {length_of(100'000'001) + std::string(64, ' '), "exceeds the limit"},
      {length_of(~std::uint64_t{0}), "exceeds the limit"},
      {length_of(std::uint64_t{1} << 63), "exceeds the limit"},
      {length_of(100) + "{}", "header ends at byte 108 but the file ends at byte 10"},
      {length_of(0), "too small"},
      {length_of(1) + "{", "too small"},
      // the JSON
      {file_of(" {}", 0), "does not begin with '{'"},
      {file_of("[]", 0), "does not begin with '{'"},
      {file_of("\xEF\xBB\xBF{}", 0), "does not begin with '{'"},
      {file_of("{\"a", 0), "not valid JSON at byte"},
      {file_of("{} {}", 0), "not valid JSON at byte"},
      {file_of(std::string("{}\0\0", 4), 0), "not valid JSON at byte 11, a zero byte"},
      {file_of(std::string("{}\0{", 4), 0), "not valid JSON at byte 11"},
      {file_of("{\"\xff\":1}", 0), "not valid JSON at byte"},
      {file_of("{\"\xc0\x80\":1}", 0), "not valid JSON at byte"},
      {file_of("{" + ok + ",}", 4), "not valid JSON at byte"},
      {file_of("{\"a\":" + std::string(512'000, '['), 0), "an array stands where"},
      {file_of("{\"t\":{\"shape\":" + std::string(512'000, '['), 0), "an array stands where"},
      // the schema
      {file_of("{\"a\":1}", 0), "a number stands where"},
      {file_of("{\"a\":null}", 0), "null stands where"},
      {file_of("{\"a\":{}}", 0), "dtype, shape or data_offsets is missing"},
      {file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4), "is missing"},
      {file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4),
       "unknown key 'x'"},
      {file_of("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F16\",\"shape\":[1]}}", 4),
       "key 'dtype' appears twice"},
      {file_of("{\"a\":{\"dtype\":{},\"shape\":[1],\"data_offsets\":[0,4]}}", 4),
       "an object stands where"},
      {file_of("{\"a\":{\"dtype\":[],\"shape\":[1],\"data_offsets\":[0,4]}}", 4),
       "an array stands where"},
      {file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":\"1\",\"data_offsets\":[0,4]}}", 4),
       "a string stands where"},
      {file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4),
       "a number stands where"},
      {file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[[1]],\"data_offsets\":[0,4]}}", 4),
       "an array stands where"},
      {file_of("{" + ok + "," + ok + "}", 4), "tensor 't' appears twice"},
      {file_of("{" + tensor("t", "U8", "0", "0,0") + "," + tensor("t", "U8", "0", "0,0") + "}", 0),
       "tensor 't' appears twice"},
      {file_of("{\"__metadata__\":{\"a\":1}}", 0), "a number stands where"},
      {file_of("{\"__metadata__\":{\"a\":{}}}", 0), "an object stands where"},
      {file_of("{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0), "key 'a' appears twice"},
      {file_of("{\"__metadata__\":{},\"__metadata__\":{}}", 0), "__metadata__ appears twice"},
      {file_of("{\"__metadata__\":\"x\"}", 0), "a string stands where"},
      // dtype and shape
      {file_of("{" + tensor("t", "F31", "1", "0,4") + "}", 4), "tensor 't': unknown dtype 'F31'"},
      {file_of("{" + tensor("t", "", "1", "0,4") + "}", 4), "unknown dtype ''"},
      {file_of("{" + tensor("t", "F32", "-1", "0,4") + "}", 4), "a negative number"},
      {file_of("{" + tensor("t", "F32", "1.0", "0,4") + "}", 4), "not a 64-bit integer"},
      {file_of("{" + tensor("t", "F32", "18446744073709551616", "0,4") + "}", 4),
       "not a 64-bit integer"},
      {file_of("{" + tensor("t", "F32", "9223372036854775808", "0,4") + "}", 4), "out of range"},
      {file_of("{" + tensor("t", "F32", "4611686018427387905", "0,4") + "}", 4), "exceeds 63 bits"},
      {file_of("{" + tensor("t", "U8", "4294967296,4294967296", "0,0") + "}", 0),
       "exceeds 63 bits"},
      {file_of("{" + tensor("t", "F64", huge + ",0", "0,0") + "}", 0), "exceeds 63 bits"},
      {file_of("{" + tensor("t", "F32", "2", "0,4") + "}", 4),
       "need 8 bytes but data_offsets hold 4"},
      {file_of("{" + tensor("t", "F16", "1", "0,4") + "}", 4),
       "need 2 bytes but data_offsets hold 4"},
      // data_offsets
      {file_of("{" + tensor("t", "F32", "1", "0") + "}", 4), "does not have two numbers"},
      {file_of("{" + tensor("t", "F32", "1", "") + "}", 4), "does not have two numbers"},
      {file_of("{" + tensor("t", "F32", "1", "0,4,4") + "}", 4), "more than 2 numbers"},
      {file_of("{" + tensor("t", "F32", "1", "4,0") + "}", 4), "before they begin"},
      {file_of("{" + tensor("t", "F32", "1", "4,8") + "}", 8), "after a hole"},
      {file_of("{" + tensor("a", "F32", "1", "0,4") + "," + tensor("b", "F32", "1", "2,6") + "}",
               6),
       "tensor 'b' begins at data byte 2, inside"},
      {file_of("{" + tensor("a", "F32", "1", "0,4") + "," + tensor("b", "F32", "1", "0,4") + "}",
               4),
       "inside the tensor that ends at 4"},
      {file_of("{" + tensor("a", "F32", "1", "0,4") + "," + tensor("b", "F32", "1", "8,12") + "}",
               12),
       "tensor 'b' begins at data byte 8, after a hole behind the tensor that ends at 4"},
      {file_of("{" + tensor("e", "F32", "0", "9,9") + "}", 4), "after a hole"},
      {file_of("{" + ok + "}", 3), "is truncated"},
      {file_of("{" + ok + "}", 0), "is truncated"},
      {file_of("{" + ok + "}", 5), "1 bytes after the last tensor"},
      {file_of("{}", 1), "1 bytes after the last tensor"},
      {file_of("{" + tensor("t", "U8", huge, "0," + huge) + "}", 4), "is truncated"},
  };
  for (const auto& c : cases) {
    CAPTURE(c.file.substr(0, 200));
    const auto said = refusal(c.file);
    CAPTURE(said);
    CHECK(contains(said, c.reason));
    CHECK(said.starts_with("f"));
    CHECK(throws_code(ErrorCode::bad_input, [&] { (void)parse(c.file); }));
  }
}

TEST_CASE("safetensors: a truncated file is refused at every length, with its place") {
  TemporaryDirectory dir;
  const std::string whole = file_of(
      "{" + tensor("a", "F32", "2", "0,8") + "," + tensor("b", "U8", "3", "8,11") + "}", 11);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    const auto path = dir.write("t", whole.substr(0, size));
    CHECK(contains(sentence_of([&] { ckpt::SafetensorsReader r(path); }), path + " is truncated"));
  }
  CHECK_NOTHROW(ckpt::SafetensorsReader(dir.write("t", whole)));
  const auto said = refusal(whole.substr(0, whole.size() - 1));
  CHECK(contains(said, "end at byte " + std::to_string(whole.size())));
  CHECK(contains(said, "the file ends at byte " + std::to_string(whole.size() - 1)));
}

TEST_CASE("safetensors: a file that shrinks or is replaced after opening gives no zeros") {
  TemporaryDirectory dir;
  const auto path = dir.write("t", file_of("{" + tensor("a", "U8", "100", "0,100") + "}", 100));
  const ckpt::SafetensorsReader reader(path);
  std::filesystem::resize_file(path, 100);
  std::vector<std::byte> out(100);
  CHECK(contains(sentence_of([&] { reader.read(reader.at("a"), out); }), "truncated"));
}

TEST_CASE("safetensors: missing files and tensors") {
  TemporaryDirectory dir;
  CHECK(throws_code(ErrorCode::bad_input, [&] { ckpt::SafetensorsReader r(dir / "absent"); }));
  CHECK(throws_code(ErrorCode::bad_input, [&] { ckpt::SafetensorsReader r(dir.path()); }));
  const ckpt::SafetensorsReader reader(
      dir.write("t", file_of("{" + tensor("a", "U8", "1", "0,1") + "}", 1)));
  CHECK(reader.find("a") != nullptr);
  CHECK(reader.find("") == nullptr);
  CHECK(reader.find("b") == nullptr);
  CHECK(contains(sentence_of([&] { (void)reader.at("b"); }), "holds no tensor 'b'"));
}

TEST_CASE("safetensors: what is written is read back bit for bit, whole and in ranges") {
  TemporaryDirectory dir;
  const std::vector<double> d{0.1, -0.0, std::numeric_limits<double>::infinity()};
  std::vector<float> f(5 * 7);
  for (std::size_t i = 0; i < f.size(); ++i) f[i] = std::ldexp(1.0f, static_cast<int>(i) - 20);
  f[3] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::uint8_t> b{255, 0, 7};
  const std::string odd = "name \"with\" \\ and \xC3\xA9";
  const std::map<std::string, std::string> metadata{{"k", "v\n"}, {"", ""}};

  ckpt::SafetensorsWriter writer(dir / "t",
                                 {{"d", DType::f64, {3}},
                                  {odd, DType::f32, {5, 7}},
                                  {"none", DType::f32, {0, 4}},
                                  {"b", DType::u8, {3}}},
                                 metadata);
  writer.write("d", bytes_of(d));
  writer.write(odd, bytes_of(f));
  writer.write("none", {});
  writer.write("b", bytes_of(b));
  writer.finish();

  const ckpt::SafetensorsReader reader(dir / "t");
  CHECK(reader.metadata() == metadata);
  REQUIRE(reader.tensors().size() == 4);
  std::vector<double> d2(3);
  reader.read(reader.at("d"), std::as_writable_bytes(std::span(d2)));
  CHECK(std::memcmp(d.data(), d2.data(), 24) == 0);
  std::vector<float> f2(35);
  reader.read_f32(odd, f2);
  CHECK(std::memcmp(f.data(), f2.data(), 35 * 4) == 0);
  reader.read_f32("none", {});

  // Rows 2 and 3 of the 5 x 7 matrix.
  const auto& matrix = reader.at(odd);
  std::vector<float> rows(14);
  reader.read_range(matrix, 2 * 7 * 4, std::as_writable_bytes(std::span(rows)));
  CHECK(std::memcmp(rows.data(), f.data() + 14, 14 * 4) == 0);
  std::fill(rows.begin(), rows.end(), 0.0f);
  reader.read_f32(matrix, 14, rows);
  CHECK(std::memcmp(rows.data(), f.data() + 14, 14 * 4) == 0);

  std::vector<std::byte> wrong(139);
  CHECK(throws_code(ErrorCode::logic, [&] { reader.read(matrix, wrong); }));
  CHECK(throws_code(ErrorCode::logic, [&] { reader.read_range(matrix, 2, wrong); }));
  CHECK(throws_code(ErrorCode::logic, [&] { reader.read_range(matrix, -1, {}); }));
  CHECK(throws_code(ErrorCode::logic,
                    [&] { reader.read_range(matrix, std::numeric_limits<Index>::max(), wrong); }));
  CHECK(throws_code(ErrorCode::logic,
                    [&] { reader.read_f32(matrix, 34, std::span(rows).first(2)); }));
  CHECK(throws_code(ErrorCode::logic,
                    [&] { reader.read_f32(matrix, std::numeric_limits<Index>::max() / 2, {}); }));
  CHECK(throws_code(ErrorCode::bad_input, [&] { reader.read_f32(odd, rows); }));
  CHECK(contains(sentence_of([&] { reader.read_f32("b", std::span(rows).first(3)); }), "dtype U8"));
}

TEST_CASE("safetensors: all 65536 half and bfloat16 values convert exactly") {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    const float got = ckpt::float_from_f16(half);
    bool same = false;
    if (exponent == 31) {
      same = fraction != 0 ? std::isnan(got) : std::isinf(got);
    } else {
      const double expected = sign * (exponent == 0 ? std::ldexp(fraction, -24)
                                                    : std::ldexp(1024 + fraction, exponent - 25));
      same = static_cast<double>(got) == expected;
    }
    same = same && std::signbit(got) == std::signbit(sign);
    if (!same) CHECK_MESSAGE(same, "half ", bits);
    const float wide = ckpt::float_from_bf16(half);
    std::uint32_t word = 0;
    std::memcpy(&word, &wide, 4);
    if (word != static_cast<std::uint32_t>(bits) << 16) CHECK_MESSAGE(false, "bfloat16 ", bits);
  }
}

TEST_CASE("safetensors: conversion to float of long tensors crosses its pieces") {
  TemporaryDirectory dir;
  const std::size_t n = (std::size_t{1} << 18) * 2 + 3;
  std::vector<std::uint16_t> h(n);
  std::vector<double> d(n);
  for (std::size_t i = 0; i < n; ++i) {
    h[i] = static_cast<std::uint16_t>((i * 40503u) % 0x7c00u);
    d[i] = static_cast<double>(i) * 1.1;
  }
  ckpt::SafetensorsWriter writer(dir / "t", {{"d", DType::f64, {static_cast<Index>(n)}},
                                             {"bf", DType::bf16, {static_cast<Index>(n)}},
                                             {"h", DType::f16, {static_cast<Index>(n)}}});
  writer.write("d", bytes_of(d));
  writer.write("bf", bytes_of(h));
  writer.write("h", bytes_of(h));
  writer.finish();
  const ckpt::SafetensorsReader reader(dir / "t");
  std::vector<float> out(n);
  std::size_t wrong = 0;
  reader.read_f32("h", out);
  for (std::size_t i = 0; i < n; ++i) wrong += out[i] != ckpt::float_from_f16(h[i]);
  reader.read_f32("bf", out);
  for (std::size_t i = 0; i < n; ++i) wrong += out[i] != ckpt::float_from_bf16(h[i]);
  reader.read_f32("d", out);
  for (std::size_t i = 0; i < n; ++i) wrong += out[i] != static_cast<float>(d[i]);
  CHECK(wrong == 0);
  float last = 0;
  reader.read_f32(reader.at("d"), static_cast<Index>(n) - 1, std::span(&last, 1));
  CHECK(last == static_cast<float>(d.back()));
}

TEST_CASE("safetensors: the writer holds to its declaration") {
  TemporaryDirectory dir;
  const std::vector<float> one{1}, two{1, 2};
  {
    ckpt::SafetensorsWriter writer(dir / "t", {{"a", DType::f32, {1}}, {"b", DType::f32, {2}}});
    CHECK(throws_code(ErrorCode::logic, [&] { writer.write("b", bytes_of(two)); }));
    CHECK(throws_code(ErrorCode::logic, [&] { writer.write("a", bytes_of(two)); }));
    writer.write("a", bytes_of(one));
    CHECK(contains(sentence_of([&] { writer.finish(); }), "'b' was declared but not written"));
    writer.write("b", bytes_of(two));
    CHECK(throws_code(ErrorCode::logic, [&] { writer.write("c", bytes_of(one)); }));
    writer.finish();
  }
  CHECK(ckpt::SafetensorsReader(dir / "t").tensors().size() == 2);
  { ckpt::SafetensorsWriter abandoned(dir / "u", {{"a", DType::f32, {1}}}); }
  CHECK_FALSE(std::filesystem::exists(dir / "u"));
  ckpt::SafetensorsWriter empty(dir / "v", {});
  empty.finish();
  CHECK(ckpt::SafetensorsReader(dir / "v").tensors().empty());
}

TEST_CASE("safetensors: the writer refuses what no reader could accept, and leaves no file") {
  TemporaryDirectory dir;
  const auto refused = [&](std::vector<ckpt::TensorSpec> tensors,
                           const std::map<std::string, std::string>& metadata = {}) {
    const bool usage = throws_code(
        ErrorCode::usage, [&] { ckpt::SafetensorsWriter w(dir / "t", tensors, metadata); });
    return usage && !std::filesystem::exists(dir / "t");
  };
  CHECK(refused({{"a", DType::f32, {1}}, {"a", DType::f32, {1}}}));
  CHECK(refused({{"__metadata__", DType::f32, {1}}}));
  CHECK(refused({{"\xff", DType::f32, {1}}}));
  CHECK(refused({}, {{"k", "\xc3"}}));
  CHECK(refused({{"a", DType::f32, {-1}}}));
  CHECK(refused({{"a", DType::f32, {Index{1} << 61}}}));
  CHECK(refused({{"a", DType::u8, {Index{1} << 62}}, {"b", DType::u8, {Index{1} << 62}}}));
  CHECK(refused({{"a", DType::u8, {3}}, {"b", DType::f32, {1}}}));  // b would be misaligned
  std::vector<ckpt::TensorSpec> many;
  for (int i = 0; i < 1000; ++i) {
    many.push_back({std::string(101'000, 'n') + std::to_string(i), DType::f32, {1}});
  }
  CHECK(refused(many));
}

TEST_CASE("safetensors: files of another implementation round-trip bit-equal") {
  const char* const shared = std::getenv("MEGA_SHARED");
  const std::string root = std::string(shared == nullptr ? "" : shared) + "/oracles";
  if (shared == nullptr || !std::filesystem::is_directory(root)) {
    MESSAGE("skipped: MEGA_SHARED names no directory with oracles");
    return;
  }
  TemporaryDirectory dir;
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (entry.path().extension() != ".safetensors") continue;
    CAPTURE(entry.path().string());
    const ckpt::SafetensorsReader reader(entry.path().string());
    CHECK_FALSE(reader.tensors().empty());
    auto ordered = reader.tensors();
    std::sort(ordered.begin(), ordered.end(),
              [](const auto& a, const auto& b) { return a.offset < b.offset; });
    std::vector<ckpt::TensorSpec> specs;
    for (const auto& t : ordered) specs.push_back({t.name, t.dtype, t.shape});
    const auto copy_path = dir / std::to_string(files++);
    ckpt::SafetensorsWriter writer(copy_path, specs, reader.metadata());
    std::vector<std::byte> data, again;
    for (const auto& t : ordered) {
      data.resize(static_cast<std::size_t>(t.bytes));
      reader.read(t, data);
      writer.write(t.name, data);
    }
    writer.finish();
    const ckpt::SafetensorsReader copy(copy_path);
    REQUIRE(copy.tensors().size() == ordered.size());
    for (const auto& t : ordered) {
      data.resize(static_cast<std::size_t>(t.bytes));
      again.resize(static_cast<std::size_t>(t.bytes));
      reader.read(t, data);
      copy.read(copy.at(t.name), again);
      CHECK(copy.at(t.name).shape == t.shape);
      CHECK(copy.at(t.name).dtype == t.dtype);
      CHECK(data == again);
    }
  }
  CHECK(files > 0);
}
