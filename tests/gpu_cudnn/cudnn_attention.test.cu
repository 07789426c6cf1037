// Attention through cuDNN: against the host twin in float, against itself, and its speed.
#include <mega/core/rng.hpp>
#include <mega/core/storage.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/attention.cuh>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_mma.cuh>
#include <mega/nn/cudnn_attention.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

using namespace mega::nn;
using mega::Bfloat16;
using mega::Float16;
using mega::Index;
using mega::Matrix;
using mega::View;
using mega::cuda::Stream;

namespace {

constexpr float poison = std::numeric_limits<float>::quiet_NaN();

/// Even in [-reach, reach), rounded to T, so that both sides compute from the same numbers.
template <class T = Bfloat16>
std::vector<T> random_numbers(Index count, float reach, std::uint64_t seed) {
  const mega::RandomKey key{seed, 0, 0, mega::RandomUse::test};
  std::vector<T> out(static_cast<std::size_t>(count));
  for (Index i = 0; i < count; ++i)
    out[static_cast<std::size_t>(i)] = T(reach * (2 * key.uniform(i) - 1));
  return out;
}

template <class T>
std::vector<float> as_floats(const std::vector<T>& values) {
  return std::vector<float>(values.begin(), values.end());
}

/// Norm of the difference over that of `right`; NaN where either holds one.
double relative_difference(const std::vector<float>& got, const std::vector<float>& right) {
  REQUIRE(got.size() == right.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < right.size(); ++i) {
    const double a = got[i], b = right[i];
    difference += (a - b) * (a - b);
    norm += b * b;
  }
  return std::sqrt(difference / norm);
}

double largest_difference(const std::vector<float>& got, const std::vector<float>& right) {
  REQUIRE(got.size() == right.size());
  double largest = 0;
  for (std::size_t i = 0; i < right.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - right[i]);
    if (!(difference <= largest)) largest = difference;  // a NaN stays
    if (std::isnan(largest)) break;
  }
  return largest;
}

template <class T>
class Array {
 public:
  explicit Array(Index size) : size_(size), memory_(static_cast<std::size_t>(size) * sizeof(T)) {}

  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] Matrix<T> matrix(Index rows) const { return {data(), rows, size_ / rows}; }
  void set(Stream& stream, const std::vector<T>& values) {
    mega::cuda::upload(stream, mega::Vector<T>(data(), size_),
                       mega::Vector<const T>(values.data(), static_cast<Index>(values.size())));
    stream.synchronize();
  }
  void fill(Stream& stream, T value) {
    set(stream, std::vector<T>(static_cast<std::size_t>(size_), value));
  }
  /// The same block of numbers again and again.
  void repeat(Stream& stream, const std::vector<T>& block) {
    const auto length = static_cast<Index>(block.size());
    for (Index at = 0; at < size_; at += length)
      mega::cuda::upload(stream, mega::Vector<T>(data() + at, std::min(length, size_ - at)),
                         mega::Vector<const T>(block.data(), std::min(length, size_ - at)));
    stream.synchronize();
  }
  [[nodiscard]] std::vector<T> get(Stream& stream) const {
    std::vector<T> out(static_cast<std::size_t>(size_));
    mega::cuda::download(stream, mega::Vector<T>(out.data(), size_),
                         mega::Vector<const T>(data(), size_));
    stream.synchronize();
    return out;
  }

 private:
  Index size_;
  mega::cuda::Memory memory_;
};

/// Operands of one attention on the GPU.
template <class T = Bfloat16>
struct Operands {
  AttentionShape shape;
  Array<T> qkv, dout, out, dqkv;
  Array<float> lse;

  explicit Operands(const AttentionShape& s)
      : shape(s),
        qkv(s.rows() * s.width()),
        dout(s.rows() * s.query_heads * s.head_dim),
        out(s.rows() * s.query_heads * s.head_dim),
        dqkv(s.rows() * s.width()),
        lse(s.rows() * s.query_heads) {}

  void spoil(Stream& stream) {
    out.fill(stream, T(poison));
    dqkv.fill(stream, T(poison));
    lse.fill(stream, poison);
  }
  [[nodiscard]] View<float, 3> lse_view() const {
    return {lse.data(), shape.batch, shape.query_heads, shape.time};
  }
  template <class Attention>
  void forward(Stream& stream) const {
    Attention::forward(stream, out.matrix(shape.rows()), lse_view(), qkv.matrix(shape.rows()),
                       shape, AttentionDropout{});
  }
  template <class Attention>
  void backward(Stream& stream) const {
    const Index rows = shape.rows();
    Attention::backward(stream, dqkv.matrix(rows), dout.matrix(rows), qkv.matrix(rows),
                        out.matrix(rows), lse_view(), shape, AttentionDropout{});
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

std::string describe(const AttentionShape& s) {
  return mega::sentence("batch ", s.batch, ", time ", s.time, ", heads ", s.query_heads, "/",
                        s.kv_heads, ", head dim ", s.head_dim);
}

/// Against the host twin in float. bf16 keeps 8 bits, and cuDNN rounds probabilities and gradients
/// of scores besides its outputs: a few roundings of 2^-9, far from an element or a sign amiss.
/// fp16 rounds by an eighth of that.
template <class T, bool Deterministic>
void check_against_host(const AttentionShape& shape) {
  using Attention = CudnnAttention<Deterministic>;
  const std::string text = describe(shape);
  CAPTURE(text);
  CAPTURE(Deterministic);
  if (!Attention::supports(shape, {})) {
    MESSAGE("not supported by cuDNN ", detail::cudnn_version_name(), ", skipped: ", text);
    return;
  }
  const auto qkv = random_numbers<T>(shape.rows() * shape.width(), 2, 1);
  const auto dout = random_numbers<T>(shape.rows() * shape.query_heads * shape.head_dim, 1, 2);

  std::vector<float> host_qkv = as_floats(qkv), host_dout = as_floats(dout), host_out(dout.size()),
                     host_dqkv(qkv.size()),
                     host_lse(static_cast<std::size_t>(shape.rows() * shape.query_heads));
  const auto host_matrix = [&](std::vector<float>& m) {
    return Matrix<float>(m.data(), shape.rows(), static_cast<Index>(m.size()) / shape.rows());
  };
  const View<float, 3> lse(host_lse.data(), shape.batch, shape.query_heads, shape.time);
  mega::host::Stream host;
  attention_forward(host, host_matrix(host_out), lse, host_matrix(host_qkv), shape);
  attention_backward(host, host_matrix(host_dqkv), host_matrix(host_dout), host_matrix(host_qkv),
                     host_matrix(host_out), lse, shape);

  Stream stream;
  Operands<T> gpu(shape);
  gpu.qkv.set(stream, qkv);
  gpu.dout.set(stream, dout);
  gpu.spoil(stream);
  gpu.template forward<Attention>(stream);
  gpu.template backward<Attention>(stream);
  const double out_error = relative_difference(as_floats(gpu.out.get(stream)), host_out);
  const double lse_error = largest_difference(gpu.lse.get(stream), host_lse);
  const double dqkv_error = relative_difference(as_floats(gpu.dqkv.get(stream)), host_dqkv);
  std::printf("%s in %s%s: out %.1e, lse %.1e, dqkv %.1e\n", text.c_str(),
              std::is_same_v<T, Bfloat16> ? "bf16" : "fp16", Deterministic ? ", deterministic" : "",
              out_error, lse_error, dqkv_error);
  const double bound = std::is_same_v<T, Bfloat16> ? 1e-2 : 1.25e-3;
  CHECK(out_error < bound);
  CHECK(lse_error < 1e-2);
  CHECK(dqkv_error < bound);
  CHECK(same_bits(gpu.qkv.get(stream), qkv));
  CHECK(same_bits(gpu.dout.get(stream), dout));
}

/// Milliseconds of one call: median of ten.
template <class Call>
double milliseconds(Stream& stream, const Call& call) {
  for (int i = 0; i < 3; ++i) call();
  cudaEvent_t begin = nullptr, end = nullptr;
  mega::cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
  mega::cuda::check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times(10);
  for (float& time : times) {
    mega::cuda::check(cudaEventRecord(begin, stream.native()), "cudaEventRecord");
    call();
    mega::cuda::check(cudaEventRecord(end, stream.native()), "cudaEventRecord");
    mega::cuda::check(cudaEventSynchronize(end), "cudaEventSynchronize");
    mega::cuda::check(cudaEventElapsedTime(&time, begin, end), "cudaEventElapsedTime");
  }
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return (times[4] + times[5]) / 2;
}

const AttentionShape training_shapes[] = {
    {16, 2048, 12, 12, 64}, {8, 2048, 16, 16, 128}, {4, 4096, 32, 8, 64}, {1, 8192, 32, 8, 128}};

template <bool Deterministic>
void check_scratch(Stream& stream, const AttentionShape& shape) {
  const AttentionShape part = detail::backward_part(shape, Deterministic);
  const auto& plan = stream.resource<detail::CudnnAttentionPlans>().plan(
      {part, shape.width(), shape.query_heads * shape.head_dim,
       Deterministic ? detail::CudnnAttentionPass::deterministic_backward
                     : detail::CudnnAttentionPass::backward});
  const detail::CudnnBackwardScratch needed(part, Deterministic, plan.workspace_bytes());
  CHECK(needed.bytes <= CudnnAttention<Deterministic>::workspace_bytes(shape));
}

}  // namespace

TEST_CASE("cudnn: what is supported") {
  const auto supports = CudnnAttention<>::supports;
  CHECK(supports({1, 128, 2, 1, 64}, {}));
  CHECK(supports({3, 1024, 4, 4, 128}, {}));
  CHECK_FALSE(supports({1, 128, 2, 1, 68}, {}));
  CHECK_FALSE(supports({1, 128, 2, 1, 136}, {}));
  CHECK_FALSE(supports({1, 1, 2, 1, 64}, {}));
  CHECK_FALSE(supports({0, 128, 2, 1, 64}, {}));
  AttentionDropout dropout;
  dropout.probability = 0.1F;
  dropout.global_heads = 2;
  CHECK_FALSE(supports({1, 128, 2, 1, 64}, dropout));
  CHECK(supports({1, 200, 2, 2, 64}, {}) == (cudnnGetVersion() >= 91501));
}

TEST_CASE("cudnn: attention against the host twin") {
  for (const AttentionShape shape :
       {AttentionShape{2, 128, 4, 4, 64}, AttentionShape{1, 256, 4, 2, 64},
        AttentionShape{2, 384, 2, 1, 128}, AttentionShape{3, 128, 6, 2, 80},
        AttentionShape{1, 200, 2, 2, 64}}) {
    check_against_host<Bfloat16, false>(shape);
    check_against_host<Bfloat16, true>(shape);
    check_against_host<Float16, false>(shape);
    check_against_host<Float16, true>(shape);
  }
}

TEST_CASE("cudnn: the deterministic variant gives equal bits, also from a CUDA graph") {
  using Attention = CudnnAttention<true>;
  const AttentionShape shape{4, 1024, 8, 2, 64};
  Stream stream;
  Operands<> gpu(shape);
  gpu.qkv.set(stream, random_numbers(shape.rows() * shape.width(), 2, 3));
  gpu.dout.set(stream, random_numbers(shape.rows() * shape.query_heads * shape.head_dim, 1, 4));
  const auto both = [&] {
    gpu.forward<Attention>(stream);
    gpu.backward<Attention>(stream);
  };
  gpu.spoil(stream);
  both();
  const auto out = gpu.out.get(stream), dqkv = gpu.dqkv.get(stream);
  const auto lse = gpu.lse.get(stream);
  const auto check_repeats = [&] {
    CHECK(same_bits(gpu.out.get(stream), out));
    CHECK(same_bits(gpu.dqkv.get(stream), dqkv));
    CHECK(same_bits(gpu.lse.get(stream), lse));
  };
  for (int again = 0; again < 3; ++again) {
    gpu.spoil(stream);
    both();
    check_repeats();
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  mega::cuda::check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal),
                    "cudaStreamBeginCapture");
  both();
  mega::cuda::check(cudaStreamEndCapture(stream.native(), &graph), "cudaStreamEndCapture");
  mega::cuda::check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (int launch = 0; launch < 2; ++launch) {
    gpu.spoil(stream);
    mega::cuda::check(cudaGraphLaunch(executable, stream.native()), "cudaGraphLaunch");
    check_repeats();
  }
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
}

TEST_CASE("cudnn: backward in parts equals backward in one piece") {
  // The first is split by samples, the second by key heads of its only sample.
  const AttentionShape shapes[] = {{2, 4096, 32, 8, 64}, {1, 8192, 32, 4, 64}};
  CHECK(detail::backward_part(shapes[0], true).batch == 1);
  CHECK(detail::backward_part(shapes[0], true).kv_heads == 8);
  CHECK(detail::backward_part(shapes[1], true).kv_heads == 1);
  for (const AttentionShape& shape : shapes) {
    const std::string text = describe(shape);
    CAPTURE(text);
    Stream stream;
    Operands<> gpu(shape);
    gpu.qkv.repeat(stream, random_numbers(999983, 2, 5));
    gpu.dout.repeat(stream, random_numbers(999979, 1, 6));
    gpu.spoil(stream);
    gpu.forward<CudnnAttention<>>(stream);
    gpu.backward<CudnnAttention<>>(stream);
    const auto right = as_floats(gpu.dqkv.get(stream));
    gpu.dqkv.fill(stream, Bfloat16(poison));
    gpu.backward<CudnnAttention<true>>(stream);
    // Equal inputs and probabilities; sums and one more rounding of scores' gradients differ.
    CHECK(relative_difference(as_floats(gpu.dqkv.get(stream)), right) < 1e-2);
  }
}

TEST_CASE("cudnn: float goes to the library's own operation") {
  const AttentionShape shape{2, 128, 4, 2, 64};
  const auto qkv = as_floats(random_numbers(shape.rows() * shape.width(), 2, 7));
  const auto dout =
      as_floats(random_numbers(shape.rows() * shape.query_heads * shape.head_dim, 1, 8));
  Stream stream;
  Operands<float> gpu(shape), own(shape);
  gpu.qkv.set(stream, qkv);
  gpu.dout.set(stream, dout);
  gpu.spoil(stream);
  gpu.forward<CudnnAttention<>>(stream);
  gpu.backward<CudnnAttention<>>(stream);
  const Index rows = shape.rows();
  own.spoil(stream);
  attention_forward(stream, own.out.matrix(rows), own.lse_view(), gpu.qkv.matrix(rows), shape);
  attention_backward(stream, own.dqkv.matrix(rows), gpu.dout.matrix(rows), gpu.qkv.matrix(rows),
                     own.out.matrix(rows), own.lse_view(), shape);
  CHECK(same_bits(gpu.out.get(stream), own.out.get(stream)));
  CHECK(same_bits(gpu.dqkv.get(stream), own.dqkv.get(stream)));
  CHECK(same_bits(gpu.lse.get(stream), own.lse.get(stream)));
}

TEST_CASE("cudnn: an operand that is not aligned is refused") {
  const AttentionShape shape{1, 128, 1, 1, 64};
  Stream stream;
  Operands<> gpu(shape);
  const Matrix<Bfloat16> shifted(gpu.out.data() + 1, shape.rows(), 64);
  CHECK_THROWS_WITH_AS(
      CudnnAttention<>::forward(stream, shifted, gpu.lse_view(), gpu.qkv.matrix(shape.rows()),
                                shape),
      "attention_forward: out must be aligned to 16 bytes for cuDNN, it lies 2 beyond",
      mega::Error);
}

TEST_CASE("cudnn: speed, and scratch within its estimate") {
  std::printf("cuDNN %s, causal attention in bf16, TFLOP/s\n",
              detail::cudnn_version_name().c_str());
  for (const AttentionShape& s : training_shapes) {
    Stream stream;
    Operands<> gpu(s);
    gpu.qkv.repeat(stream, random_numbers(999983, 1, 9));
    gpu.dout.repeat(stream, random_numbers(999979, 1, 10));
    const double forward = milliseconds(stream, [&] { gpu.forward<CudnnAttention<>>(stream); });
    const double backward = milliseconds(stream, [&] { gpu.backward<CudnnAttention<>>(stream); });
    const double repeatable =
        milliseconds(stream, [&] { gpu.backward<CudnnAttention<true>>(stream); });
    check_scratch<false>(stream, s);
    check_scratch<true>(stream, s);
    // Half of the pairs of a query and a key are computed, in two products forward, five backward.
    const double flops = 2.0 * static_cast<double>(s.batch * s.query_heads * s.time) *
                         static_cast<double>(s.time * s.head_dim);
    std::printf(
        "%-52s forward %6.1f (%.3f ms)  backward %6.1f (%.3f ms)  deterministic %6.1f "
        "(%.3f ms)\n",
        describe(s).c_str(), flops / forward * 1e-9, forward, 2.5 * flops / backward * 1e-9,
        backward, 2.5 * flops / repeatable * 1e-9, repeatable);
  }
}
