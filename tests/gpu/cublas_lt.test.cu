// Matrix products through cuBLASLt against sums in double precision on the same stored numbers.
#include "twins.cuh"
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/storage.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/nn/cublas_lt.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

using mega::Bfloat16;
using mega::Error;
using mega::ErrorCode;
using mega::Float16;
using mega::Index;
using mega::cuda::Memory;
using mega::cuda::Stream;
using mega::nn::AlgorithmChoice;
using mega::nn::CublasLtProduct;
using mega::nn::MatmulAlgorithms;
using mega::nn::Transpose;

namespace {

constexpr Transpose both[] = {Transpose::no, Transpose::yes};

// Relative to the largest result. A stored bf16 number is off by 2^-9 of itself at most, one in
// fp16 by an eighth of that, and the sum by far less; after GELU there may be a second rounding
// between product and function, whose slope is up to 1.13, or between product and sum.
template <class T>
constexpr double one_rounding = std::is_same_v<T, Bfloat16> ? 0x1p-8 : 0x1p-11;
template <class T>
constexpr double two_roundings = 2 * one_rounding<T>;
// fp32 sums of up to 2304 random products; TF32 would be off by 3e-4.
constexpr double fp32_sums = 1e-5;
// Tensor cores cut off where they add: once for 16 products, so 144 times 2^-24 on average.
constexpr double tensor_core_sums = 2e-5;

struct Shape {
  Index m, n, k;
  Index pad;     // elements between the rows of every matrix
  Index offset;  // elements by which every matrix misses the alignment of 256 bytes
};

struct Random {
  mega::RandomKey key;
  Index drawn = 0;
  explicit Random(std::uint64_t seed) : key{seed, 0, 0, mega::RandomUse::test} {}

  template <class T>
  std::vector<T> numbers(Index count, float low, float high) {
    std::vector<T> out(static_cast<std::size_t>(count));
    for (T& x : out) x = T(low + (high - low) * key.uniform(drawn++));
    return out;
  }
};

template <class T>
T not_a_number() {
  return T(std::numeric_limits<float>::quiet_NaN());
}

/// A matrix [rows, cols] as it lies in memory: perhaps transposed, NaN between the rows.
template <class T>
std::vector<T> stored(const std::vector<T>& x, Index rows, Index cols, Transpose trans, Index pad) {
  const bool plain = trans == Transpose::no;
  const Index ld = (plain ? cols : rows) + pad;
  std::vector<T> out(static_cast<std::size_t>((plain ? rows : cols) * ld), not_a_number<T>());
  for (Index r = 0; r < rows; ++r)
    for (Index c = 0; c < cols; ++c)
      out[static_cast<std::size_t>(plain ? r * ld + c : c * ld + r)] =
          x[static_cast<std::size_t>(r * cols + c)];
  return out;
}

/// An array in device memory, with its first contents.
template <class T>
class Array {
 public:
  Array(Stream& stream, std::vector<T> values, Index offset = 0)
      : values_(std::move(values)),
        offset_(offset),
        memory_((values_.size() + static_cast<std::size_t>(offset)) * sizeof(T)) {
    reset(stream);
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()) + offset_; }
  void reset(Stream& stream) {
    upload(stream, mega::Vector<T>(data(), size()), mega::Vector<const T>(values_.data(), size()));
  }
  [[nodiscard]] std::vector<T> read(Stream& stream) const {
    std::vector<T> out(values_.size());
    download(stream, mega::Vector<T>(out.data(), size()),
             mega::Vector<const T>(static_cast<const T*>(data()), size()));
    stream.synchronize();
    return out;
  }

 private:
  [[nodiscard]] Index size() const { return static_cast<Index>(values_.size()); }

  std::vector<T> values_;
  Index offset_;
  Memory memory_;
};

template <class T>
bool same_bits(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

/// Largest difference of the columns in front of the padding, over the largest number expected; NaN
/// is infinite, and so is a written padding.
template <class T>
double worst(const std::vector<T>& got, const std::vector<double>& expected, Index cols,
             Index pad) {
  double difference = 0, largest = 0;
  const std::size_t ld = static_cast<std::size_t>(cols + pad);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto x = static_cast<double>(static_cast<float>(got[i]));
    if (i % ld >= static_cast<std::size_t>(cols)) {
      if (!std::isnan(x)) return std::numeric_limits<double>::infinity();
      continue;
    }
    const double y = expected[i / ld * static_cast<std::size_t>(cols) + i % ld];
    if (!std::isfinite(x)) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, std::abs(x - y));
    largest = std::max(largest, std::abs(y));
  }
  return largest > 0 ? difference / largest : difference;
}

template <class T>
void check_close(const std::string& what, const std::vector<T>& got,
                 const std::vector<double>& expected, Index cols, Index pad, double bound) {
  CAPTURE(what);
  const double difference = worst(got, expected, cols, pad);
  mega_test::WorstDifferences::table().add(what, difference);
  CHECK(difference <= bound);
}

template <class T>
std::vector<double> product(const std::vector<T>& a, const std::vector<T>& b, Index m, Index n,
                            Index k) {
  std::vector<double> c(static_cast<std::size_t>(m * n)), right(b.size());
  std::transform(b.begin(), b.end(), right.begin(),
                 [](T x) { return static_cast<double>(static_cast<float>(x)); });
  for (Index i = 0; i < m; ++i) {
    double* const out = c.data() + i * n;
    for (Index p = 0; p < k; ++p) {
      const double factor = static_cast<float>(a[static_cast<std::size_t>(i * k + p)]);
      const double* const in = right.data() + p * n;
      for (Index j = 0; j < n; ++j) out[j] += factor * in[j];
    }
  }
  return c;
}

constexpr double gelu_slope = 0.79788456080286535588, gelu_cubic = 0.044715;
double gelu_derivative(double x) {
  const double t = std::tanh(gelu_slope * (x + gelu_cubic * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * gelu_slope * (1 + 3 * gelu_cubic * x * x);
}

/// op(A) and op(B), and what they give.
template <class T>
struct Factors {
  Shape s;
  std::vector<T> a, b;
  std::vector<double> ab;

  Factors(const Shape& shape, Random& random)
      : s(shape),
        a(random.numbers<T>(s.m * s.k, -1, 1)),
        b(random.numbers<T>(s.k * s.n, -1, 1)),
        ab(product(a, b, s.m, s.n, s.k)) {}

  [[nodiscard]] Index lda(Transpose t) const { return (t == Transpose::no ? s.k : s.m) + s.pad; }
  [[nodiscard]] Index ldb(Transpose t) const { return (t == Transpose::no ? s.n : s.k) + s.pad; }
  [[nodiscard]] Index ldc() const { return s.n + s.pad; }
  [[nodiscard]] Array<T> left(Stream& stream, Transpose t) const {
    return {stream, stored(a, s.m, s.k, t, s.pad), s.offset};
  }
  [[nodiscard]] Array<T> right(Stream& stream, Transpose t) const {
    return {stream, stored(b, s.k, s.n, t, s.pad), s.offset};
  }
  /// m x n numbers of NaN.
  template <class C = T>
  [[nodiscard]] Array<C> poisoned(Stream& stream) const {
    return {stream, std::vector<C>(static_cast<std::size_t>(s.m * ldc()), not_a_number<C>()),
            s.offset};
  }
};

template <class T, class C>
double bound_of_sums() {
  if (mega::half_storage<C>) return one_rounding<C>;
  return std::is_same_v<T, float> ? fp32_sums : tensor_core_sums;
}

template <class T, class C>
void check_gemm(const std::string& what, const Factors<T>& f, Random& random) {
  using Product = CublasLtProduct<T>;
  const Shape& s = f.s;
  Stream stream;
  const std::vector<C> before = random.numbers<C>(s.m * s.n, -1, 1);
  struct Scales {
    float alpha, beta;
  };
  for (const Transpose ta : both) {
    for (const Transpose tb : both) {
      const Array<T> a = f.left(stream, ta), b = f.right(stream, tb);
      for (const auto [alpha, beta] : {Scales{1, 0}, Scales{1, 1}, Scales{0.5F, -2}}) {
        CAPTURE(s.m);
        CAPTURE(s.n);
        CAPTURE(s.k);
        CAPTURE(ta);
        CAPTURE(tb);
        CAPTURE(beta);
        std::vector<double> expected(f.ab.size());
        for (std::size_t i = 0; i < expected.size(); ++i)
          expected[i] = alpha * f.ab[i] + beta * static_cast<double>(static_cast<float>(before[i]));
        Array<C> c =
            beta == 0 ? f.template poisoned<C>(stream)
                      : Array<C>(stream, stored(before, s.m, s.n, Transpose::no, s.pad), s.offset);
        const auto run = [&] {
          Product::gemm(stream, ta, tb, s.m, s.n, s.k, alpha, a.data(), f.lda(ta), b.data(),
                        f.ldb(tb), beta, c.data(), f.ldc());
          return c.read(stream);
        };
        const std::vector<C> first = run();
        // Some algorithms round the product before they add what C held.
        const double roundings = mega::half_storage<C> && beta != 0 ? 2.0 : 1.0;
        check_close(what, first, expected, s.n, s.pad, roundings * bound_of_sums<T, C>());
        c.reset(stream);
        CHECK(same_bits(run(), first));
      }
    }
  }
}

/// Whether cuBLASLt did it; where it need not, it says that it does not.
template <class Run>
bool done_or_refused(const std::string& what, bool must, const Run& run) {
  try {
    run();
    return true;
  } catch (const Error& error) {
    CAPTURE(what);
    CHECK_FALSE(must);
    CHECK(error.code() == ErrorCode::device);
    CHECK(std::string(error.what()).find("cuBLASLt has no algorithm for") != std::string::npos);
    MESSAGE(std::string(error.what()));
    return false;
  }
}

template <class T>
void check_epilogues(const std::string& type, const Shape& s, bool must, double single,
                     double twofold) {
  using Product = CublasLtProduct<T>;
  Random random(static_cast<std::uint64_t>(s.m * 1000 + s.n));
  const Factors<T> f(s, random);
  const std::vector<T> bias = random.numbers<T>(s.n, -3, 3);
  const std::vector<T> before_gelu = random.numbers<T>(s.m * s.n, -4, 4);
  std::vector<double> biased(f.ab.size()), through_gelu(f.ab.size());
  for (std::size_t i = 0; i < biased.size(); ++i) {
    biased[i] = f.ab[i] + static_cast<float>(bias[i % static_cast<std::size_t>(s.n)]);
    through_gelu[i] = f.ab[i] * gelu_derivative(static_cast<float>(before_gelu[i]));
  }
  Stream stream;
  const Array<T> bias_on_gpu(stream, bias, s.offset);
  const Array<T> saved(stream, stored(before_gelu, s.m, s.n, Transpose::no, s.pad), s.offset);
  for (const Transpose ta : both) {
    for (const Transpose tb : both) {
      CAPTURE(s.m);
      CAPTURE(s.n);
      CAPTURE(s.k);
      CAPTURE(ta);
      CAPTURE(tb);
      const Array<T> a = f.left(stream, ta), b = f.right(stream, tb);
      // Twice, since the second product goes by the kept plan with other pointers.
      const Array<T> c[2] = {f.poisoned(stream), f.poisoned(stream)};
      const Array<T> gradient[2] = {f.poisoned(stream), f.poisoned(stream)};
      const bool has_bias = done_or_refused(type + " gemm_bias", must, [&] {
        for (const Array<T>& out : c)
          Product::gemm_bias(stream, ta, tb, s.m, s.n, s.k, a.data(), f.lda(ta), b.data(),
                             f.ldb(tb), bias_on_gpu.data(), out.data(), f.ldc());
      });
      if (has_bias) {
        check_close(type + " gemm_bias", c[0].read(stream), biased, s.n, s.pad, single);
        CHECK(same_bits(c[0].read(stream), c[1].read(stream)));
      }
      if (f.ldc() % 8 != 0) continue;
      const bool has_derivative = done_or_refused(type + " gemm_dgelu", must, [&] {
        for (const Array<T>& out : gradient)
          Product::gemm_dgelu(stream, ta, tb, s.m, s.n, s.k, a.data(), f.lda(ta), b.data(),
                              f.ldb(tb), saved.data(), out.data(), f.ldc());
      });
      if (has_derivative) {
        check_close(type + " gemm_dgelu", gradient[0].read(stream), through_gelu, s.n, s.pad,
                    twofold);
        CHECK(same_bits(gradient[0].read(stream), gradient[1].read(stream)));
      }
    }
  }
}

/// A line as text() writes it, for a GPU that does not exist.
std::string line_of(std::size_t version, char digit) {
  return std::to_string(version) + " No_GPU:1 bf16 bf16 none nt 8 8 8 8 8 8 = 16,16,16,16,16 " +
         std::string(128, digit) + "\n";
}

/// What the process chooses by, for a scope.
struct Choosing {
  explicit Choosing(AlgorithmChoice choice) { MatmulAlgorithms::of_process().choose_by(choice); }
  ~Choosing() { MatmulAlgorithms::of_process().choose_by(AlgorithmChoice::heuristic); }
};

}  // namespace

TEST_CASE("gpu cublas_lt: products") {
  const Shape shapes[] = {{1, 1, 1, 0, 0},       {7, 33, 65, 0, 0},    {7, 33, 65, 3, 0},
                          {130, 257, 64, 0, 0},  {130, 257, 64, 1, 1}, {130, 257, 64, 7, 3},
                          {512, 768, 2304, 8, 0}};
  Random random(1);
  for (const Shape& s : shapes) {
    const Factors<Bfloat16> narrow(s, random);
    check_gemm<Bfloat16, Bfloat16>("gemm bf16", narrow, random);
    check_gemm<Bfloat16, float>("gemm bf16 to fp32", narrow, random);
    const Factors<Float16> half(s, random);
    check_gemm<Float16, Float16>("gemm fp16", half, random);
    check_gemm<Float16, float>("gemm fp16 to fp32", half, random);
    check_gemm<float, float>("gemm fp32", Factors<float>(s, random), random);
  }
}

TEST_CASE("gpu cublas_lt: empty products") {
  using Product = CublasLtProduct<Bfloat16>;
  Stream stream;
  const std::vector<float> before = {1, 2, 3, 4, 5, 6};
  const Bfloat16* const none = nullptr;
  for (const Transpose ta : both) {
    for (const Transpose tb : both) {
      Array<float> c(stream, before);
      const auto gemm = [&](Index m, Index n, float beta) {
        Product::gemm(stream, ta, tb, m, n, 0, 1.0F, none, 0, none, 0, beta, c.data(), 3);
        return c.read(stream);
      };
      CHECK(gemm(0, 3, 0) == before);
      CHECK(gemm(2, 0, 0) == before);
      CHECK(gemm(2, 3, 1) == before);
      CHECK(gemm(2, 3, -2) == std::vector<float>{-2, -4, -6, -8, -10, -12});
      Array<float> poisoned(stream, std::vector<float>(6, not_a_number<float>()));
      Product::gemm(stream, ta, tb, 2, 3, 0, 1.0F, none, 0, none, 0, 0.0F, poisoned.data(), 3);
      CHECK(poisoned.read(stream) == std::vector<float>(6, 0.0F));
    }
  }
  Product::gemm(stream, Transpose::no, Transpose::no, 0, 0, 0, 1.0F, none, 0, none, 0, 0.0F,
                static_cast<Bfloat16*>(nullptr), 0);
  const std::vector<float> bias = {1, -2, 3, -4, 5, -6, 7, -8};
  const Array<float> bias_on_gpu(stream, bias);
  const Array<float> rows(stream, std::vector<float>(16, not_a_number<float>()));
  CublasLtProduct<float>::gemm_bias(stream, Transpose::no, Transpose::yes, 2, 8, 0, nullptr, 0,
                                    nullptr, 0, bias_on_gpu.data(), rows.data(), 8);
  std::vector<float> twice = bias;
  twice.insert(twice.end(), bias.begin(), bias.end());
  CHECK(rows.read(stream) == twice);
}

TEST_CASE("gpu cublas_lt: bias and the derivative of GELU in the product") {
  for (const Shape& s :
       {Shape{64, 128, 96, 0, 0}, Shape{136, 264, 72, 8, 0}, Shape{512, 384, 768, 0, 0}}) {
    check_epilogues<Bfloat16>("bf16", s, true, one_rounding<Bfloat16>, two_roundings<Bfloat16>);
    // The approximate tanh of the GPU, off by 2^-11, is no longer small beside the rounding.
    check_epilogues<Float16>("fp16", s, true, one_rounding<Float16>, 0x1p-9);
  }
  for (const Shape& s : {Shape{64, 128, 96, 0, 0}, Shape{136, 264, 72, 8, 0}}) {
    // cuBLASLt does not say how exactly it computes GELU; the approximate tanh of the GPU is off by
    // 2^-11.
    check_epilogues<float>("fp32", s, false, fp32_sums, 0x1p-10);
  }
  for (const Shape& s : {Shape{7, 33, 65, 0, 0}, Shape{31, 40, 17, 0, 1}, Shape{1, 8, 8, 0, 0}})
    check_epilogues<Bfloat16>("odd bf16", s, false, one_rounding<Bfloat16>,
                              two_roundings<Bfloat16>);
}

TEST_CASE("gpu cublas_lt: what cannot be is refused with a sentence") {
  Stream stream;
  const Array<Bfloat16> x(stream, std::vector<Bfloat16>(1024, Bfloat16(1.0F)));
  Bfloat16* const at = x.data();
  using Product = CublasLtProduct<Bfloat16>;
  CHECK_THROWS_WITH_AS(Product::gemm_dgelu(stream, Transpose::no, Transpose::no, 4, 12, 8, at, 8,
                                           at, 12, at, at, 12),
                       doctest::Contains("ldc is 12, cuBLASLt takes multiples of 8"), Error);
  CHECK_THROWS_WITH_AS(Product::gemm(stream, Transpose::no, Transpose::no, Index{1} << 31, 1, 1,
                                     1.0F, at, 1, at, 1, 0.0F, at, 1),
                       doctest::Contains("m is 2147483648, cuBLASLt takes 0 to 2147483647"), Error);
}

TEST_CASE("cublas_lt: algorithms as text") {
  const std::size_t version = cublasLtGetVersion();
  MatmulAlgorithms algorithms;
  algorithms.read("");
  CHECK(algorithms.text().empty());
  const std::string good = line_of(version, 'a');
  algorithms.read(good);
  CHECK(algorithms.text() == good);
  const std::string problem = good.substr(0, good.rfind(' '));
  REQUIRE(algorithms.find(problem));
  CHECK(algorithms.find(problem)->data[7] == 0xaaaaaaaaaaaaaaaaU);
  CHECK_FALSE(algorithms.find(problem + " "));

  // A second one does not replace what is kept, but what is read does.
  const cublasLtMatmulAlgo_t other = {{1, 2, 3, 4, 5, 6, 7, 0xfedcba9876543210U}};
  CHECK(algorithms.keep(problem, other).data[0] == 0xaaaaaaaaaaaaaaaaU);
  const std::uint64_t revision = algorithms.revision();
  algorithms.read(line_of(version, '0'));
  CHECK(algorithms.text() == line_of(version, '0'));
  CHECK(algorithms.revision() != revision);
  CHECK(algorithms.keep("another problem", other).data[1] == 2);
  const std::string two = algorithms.text();
  CHECK(two.find("another problem 0000000000000001") != std::string::npos);
  CHECK(two.find("fedcba9876543210\n") != std::string::npos);

  const auto refused = [&](const std::string& text, const std::string& why) {
    CAPTURE(text);
    const std::string before = algorithms.text();
    try {
      algorithms.read(text);
      FAIL_CHECK("it was accepted");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::bad_input);
      CAPTURE(error.what());
      CHECK(std::string(error.what()).find(why) != std::string::npos);
    }
    CHECK(algorithms.text() == before);
  };
  const std::string bare = good.substr(0, good.size() - 1);
  refused(good + line_of(version + 1, 'b'), "line 2 is of cuBLASLt " + std::to_string(version + 1) +
                                                ", this is " + std::to_string(version));
  refused(good + bare.substr(0, bare.size() - 1), "not in 128 hexadecimal digits");
  refused(bare + "a", "not in 128 hexadecimal digits");
  refused(bare.substr(0, bare.size() - 1) + "A", "not in 128 hexadecimal digits");
  refused(bare.substr(0, bare.size() - 1) + "\r\n", "not in 128 hexadecimal digits");
  refused(good.substr(0, 40), "line 1 has ");
  refused(good + "\n" + good, "line 2 has 1 fields, not 15");
  refused("nonsense", "line 1 has 1 fields, not 15");
  refused(std::string(14, ' '), "line 1 is of cuBLASLt , this is");
  algorithms.read(bare);  // the newline of the last line is not needed
  CHECK(algorithms.find(problem)->data[0] == 0xaaaaaaaaaaaaaaaaU);
}

TEST_CASE("gpu cublas_lt: a timed choice is right, is kept, and can be read again") {
  MatmulAlgorithms& algorithms = MatmulAlgorithms::of_process();
  const Choosing timed(AlgorithmChoice::timed);
  Random random(5);
  const Shape s = {192, 320, 1024, 0, 0};  // in no other test
  const Factors<Bfloat16> f(s, random);
  const auto lines = [&] {
    const std::string text = algorithms.text();
    return std::count(text.begin(), text.end(), '\n');
  };
  const auto before = lines();
  check_gemm<Bfloat16, Bfloat16>("timed gemm bf16", f, random);
  CHECK(lines() == before + 8);  // four pairs of transposes, C read or not
  check_gemm<Bfloat16, float>("timed gemm bf16 to fp32", f, random);
  CHECK(lines() == before + 16);
  check_gemm<float, float>("timed gemm fp32", Factors<float>(s, random), random);
  CHECK(lines() == before + 24);
  check_epilogues<Bfloat16>("timed bf16", {192, 320, 256, 8, 0}, true, one_rounding<Bfloat16>,
                            two_roundings<Bfloat16>);

  MatmulAlgorithms copy;
  copy.read(algorithms.text());
  CHECK(copy.text() == algorithms.text());

  // Another thread and its stream, and this one after the text was read, give the same bits.
  const auto run = [&](Stream& stream) {
    const Array<Bfloat16> a = f.left(stream, Transpose::no), b = f.right(stream, Transpose::yes);
    const Array<Bfloat16> c = f.poisoned(stream);
    CublasLtProduct<Bfloat16>::gemm(stream, Transpose::no, Transpose::yes, s.m, s.n, s.k, 1.0F,
                                    a.data(), s.k, b.data(), s.k, 0.0F, c.data(), s.n);
    return c.read(stream);
  };
  Stream stream;
  const std::vector<Bfloat16> first = run(stream);
  std::vector<Bfloat16> second;
  std::thread([&] {
    Stream other;
    second = run(other);
  }).join();
  CHECK(same_bits(first, second));
  const std::string text = algorithms.text();
  algorithms.read(text);
  CHECK(same_bits(run(stream), first));
  CHECK(algorithms.text() == text);
}
