/// @file  Several characters at once: what json_scanner.hpp needs of a processor's vectors, and the
/// same in words of 64 bits for every other processor.
///
/// Each struct here loads `width` characters and compares all with one; its Marks are combined with
/// `|`, and mask() makes them bits, bit i for character i. ByteLanes is the widest that the program
/// is compiled for; nothing is chosen at run time.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace mega::inline v0::scan::detail {

/// Eight characters in a word; the top bit of a byte marks it. No step carries from byte to byte.
struct WordLanes {
  using Vector = std::uint64_t;
  using Marks = std::uint64_t;
  static constexpr std::size_t width = 8;
  static constexpr std::uint64_t each = 0x0101010101010101U;
  static constexpr std::uint64_t tops = each << 7U;

  static Vector load(const char* at) noexcept {
    Vector word = 0;
    std::memcpy(&word, at, sizeof word);
    return std::endian::native == std::endian::little ? word : __builtin_bswap64(word);
  }
  /// Every character with its bit 5 set: '[' as '{', ']' as '}'.
  static Vector fold(Vector v) noexcept { return v | each << 5U; }
  static Marks equal(Vector v, char c) noexcept {
    const std::uint64_t apart = v ^ each * static_cast<unsigned char>(c);
    return ~(((apart & ~tops) + ~tops) | apart) & tops;
  }
  /// Below the space, or not ASCII.
  static Marks odd(Vector v) noexcept { return (~((v | tops) - each * ' ') | v) & tops; }
  static std::uint64_t mask(Marks marks) noexcept {
    return (marks >> 7U) * 0x0102040810204080U >> 56U;
  }
};

#if defined(__SSE2__)
struct Sse2Lanes {
  using Vector = __m128i;
  using Marks = __m128i;
  static constexpr std::size_t width = 16;

  static Vector load(const char* at) noexcept {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  }
  static Vector fold(Vector v) noexcept { return v | _mm_set1_epi8(0x20); }
  static Marks equal(Vector v, char c) noexcept { return _mm_cmpeq_epi8(v, _mm_set1_epi8(c)); }
  static Marks odd(Vector v) noexcept { return _mm_cmplt_epi8(v, _mm_set1_epi8(' ')); }
  static std::uint64_t mask(Marks marks) noexcept {
    return static_cast<std::uint32_t>(_mm_movemask_epi8(marks));
  }
};
#endif

#if defined(__AVX2__)
struct Avx2Lanes {
  using Vector = __m256i;
  using Marks = __m256i;
  static constexpr std::size_t width = 32;

  static Vector load(const char* at) noexcept {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }
  static Vector fold(Vector v) noexcept { return v | _mm256_set1_epi8(0x20); }
  static Marks equal(Vector v, char c) noexcept {
    return _mm256_cmpeq_epi8(v, _mm256_set1_epi8(c));
  }
  static Marks odd(Vector v) noexcept { return _mm256_cmpgt_epi8(_mm256_set1_epi8(' '), v); }
  static std::uint64_t mask(Marks marks) noexcept {
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(marks));
  }
};
#endif

#if defined(__AVX512BW__)
struct Avx512Lanes {
  using Vector = __m512i;
  using Marks = __mmask64;
  static constexpr std::size_t width = 64;

  static Vector load(const char* at) noexcept { return _mm512_loadu_si512(at); }
  static Vector fold(Vector v) noexcept { return v | _mm512_set1_epi8(0x20); }
  static Marks equal(Vector v, char c) noexcept {
    return _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8(c));
  }
  static Marks odd(Vector v) noexcept { return _mm512_cmplt_epi8_mask(v, _mm512_set1_epi8(' ')); }
  static std::uint64_t mask(Marks marks) noexcept { return marks; }
};
#endif

#if defined(__AVX512BW__)
using ByteLanes = Avx512Lanes;
#elif defined(__AVX2__)
using ByteLanes = Avx2Lanes;
#elif defined(__SSE2__)
using ByteLanes = Sse2Lanes;
#else
using ByteLanes = WordLanes;
#endif

/// Which of 64 characters are quotes, backslashes, control characters or not ASCII: bit i for
/// character i.
template <class Lanes = ByteLanes>
[[nodiscard]] inline std::uint64_t special_characters(const char* at) noexcept {
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < 64; i += Lanes::width) {
    const auto text = Lanes::load(at + i);
    found |= Lanes::mask(Lanes::equal(text, '"') | Lanes::equal(text, '\\') | Lanes::odd(text))
             << i;
  }
  return found;
}

/// What stands in 64 characters of JSON: bit i of each mask is for character i.
struct JsonBlock {
  static constexpr std::size_t size = 64;

  std::uint64_t quotes = 0;
  std::uint64_t odd = 0;     ///< backslashes, control characters, not ASCII
  std::uint64_t opens = 0;   ///< [ {
  std::uint64_t closes = 0;  ///< ] }
  std::uint64_t marks = 0;   ///< , :

  [[nodiscard]] bool operator==(const JsonBlock&) const = default;

  template <class Lanes = ByteLanes>
  [[nodiscard]] static JsonBlock at(const char* at) noexcept {
    JsonBlock block;
    for (std::size_t i = 0; i < size; i += Lanes::width) {
      const auto text = Lanes::load(at + i);
      const auto folded = Lanes::fold(text);
      block.quotes |= Lanes::mask(Lanes::equal(text, '"')) << i;
      block.odd |= Lanes::mask(Lanes::equal(text, '\\') | Lanes::odd(text)) << i;
      block.opens |= Lanes::mask(Lanes::equal(folded, '{')) << i;
      block.closes |= Lanes::mask(Lanes::equal(folded, '}')) << i;
      block.marks |= Lanes::mask(Lanes::equal(text, ',') | Lanes::equal(text, ':')) << i;
    }
    return block;
  }
};

/// Bit i: whether an odd number of the bits 0 to i is set.
[[nodiscard]] constexpr std::uint64_t running_parity(std::uint64_t bits) noexcept {
  for (unsigned shift = 1; shift < 64; shift *= 2) bits ^= bits << shift;
  return bits;
}

}  // namespace mega::inline v0::scan::detail
