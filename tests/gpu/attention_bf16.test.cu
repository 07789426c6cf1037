// Attention in bf16 and fp16 on tensor cores: against the float host twin, and its speed.
#include <mega/core/rng.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/host/stream.hpp>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_mma.cuh>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

// As generic code of the library calls them: the GPU's overloads come by the type of the stream.
using namespace mega::nn;
using mega::Bfloat16;
using mega::Float16;
using mega::Index;
using mega::Matrix;
using mega::RandomKey;
using mega::RandomUse;
using mega::Vector;
using mega::View;

namespace {

/// Device memory with the contents of a vector.
template <class T>
class Device {
 public:
  Device(mega::cuda::Stream& stream, std::vector<T> contents)
      : contents_(std::move(contents)), memory_(contents_.size() * sizeof(T)) {
    reset(stream);
  }
  void reset(mega::cuda::Stream& stream) {
    upload(stream, Vector<T>(data(), size()), Vector<const T>(contents_.data(), size()));
  }
  [[nodiscard]] std::vector<T> read(mega::cuda::Stream& stream) {
    std::vector<T> out(contents_.size());
    download(stream, Vector<T>(out.data(), size()), Vector<const T>(data(), size()));
    stream.synchronize();
    return out;
  }
  [[nodiscard]] T* data() { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] Index size() const { return static_cast<Index>(contents_.size()); }
  [[nodiscard]] Matrix<T> matrix(Index rows) { return {data(), rows, size() / rows}; }

 private:
  std::vector<T> contents_;
  mega::cuda::Memory memory_;
};

/// Even in [-range, range), rounded to T.
template <class T>
std::vector<T> random_numbers(Index count, std::uint64_t seed, float range) {
  const RandomKey key{seed, 0, 0, RandomUse::test};
  std::vector<T> out(static_cast<std::size_t>(count));
  for (Index i = 0; i < count; ++i)
    out[static_cast<std::size_t>(i)] = T((2 * key.uniform(i) - 1) * range);
  return out;
}
template <class T>
std::vector<T> poison(Index count) {
  return std::vector<T>(static_cast<std::size_t>(count),
                        T(std::numeric_limits<float>::quiet_NaN()));
}
template <class T>
std::vector<float> as_floats(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// Root of the mean square of f(r, c) over `count` columns from `first` on.
template <class F>
double root_mean_square(Index rows, Index first, Index count, const F& f) {
  double sum = 0;
  for (Index r = 0; r < rows; ++r)
    for (Index c = first; c < first + count; ++c) sum += f(r, c) * f(r, c);
  return std::sqrt(sum / static_cast<double>(rows * count));
}

/// Checks columns [first, first + count): difference and host in the L2 norm. The gradient of a
/// query that sees one key is zero, a difference of equal numbers, of which rounding leaves
/// something: no part is measured in less than a tenth of what all columns have. One key has no
/// others to outweigh that, so there it is a half.
template <class T>
void check_near(const char* name, const std::vector<T>& got, const std::vector<float>& host,
                Index rows, Index first, Index count) {
  CAPTURE(name);
  const Index width = static_cast<Index>(host.size()) / rows;
  const auto expected = [&](Index r, Index c) {
    return static_cast<double>(host[static_cast<std::size_t>(r * width + c)]);
  };
  const auto difference = [&](Index r, Index c) {
    return static_cast<double>(got[static_cast<std::size_t>(r * width + c)]) - expected(r, c);
  };
  const double size =
      std::max(root_mean_square(rows, first, count, expected),
               (rows == 1 ? 0.5 : 0.1) * root_mean_square(rows, 0, width, expected));
  // bf16 rounds by up to 2^-9, here probabilities, scores' gradients, out and results: together
  // some 3e-3. fp16 rounds by an eighth of that. A key too many or too few in a row, or a mask
  // shifted by one, is wrong by 5e-2 and more at these lengths. NaN fails.
  const double bound = std::is_same_v<T, Bfloat16> ? 1e-2 : 1.25e-3;
  CHECK(root_mean_square(rows, first, count, difference) < bound * size);
}

template <class T>
void check_attention(AttentionShape shape, AttentionDropout dropout) {
  CAPTURE(shape.batch);
  CAPTURE(shape.query_heads);
  CAPTURE(shape.kv_heads);
  CAPTURE(shape.time);
  CAPTURE(shape.head_dim);
  CAPTURE(dropout.probability);
  const Index rows = shape.rows(), width = shape.width();
  const Index out_width = shape.query_heads * shape.head_dim;
  const Index statistics = shape.batch * shape.query_heads * shape.time;
  const auto qkv = random_numbers<T>(rows * width, 1, 2),
             dout = random_numbers<T>(rows * out_width, 2, 1);

  mega::cuda::Stream stream;
  Device<T> device_qkv(stream, qkv), device_dout(stream, dout),
      device_out(stream, poison<T>(rows * out_width)), device_dqkv(stream, poison<T>(rows * width));
  Device<float> device_lse(stream, std::vector<float>(static_cast<std::size_t>(statistics),
                                                      std::numeric_limits<float>::quiet_NaN()));
  std::vector<T> out, dqkv;
  std::vector<float> lse;
  for (int time = 0; time < 2; ++time) {
    device_out.reset(stream);
    device_dqkv.reset(stream);
    device_lse.reset(stream);
    const View<float, 3> l(device_lse.data(), shape.batch, shape.query_heads, shape.time);
    attention_forward(stream, device_out.matrix(rows), l, device_qkv.matrix(rows), shape, dropout);
    attention_backward(stream, device_dqkv.matrix(rows), device_dout.matrix(rows),
                       device_qkv.matrix(rows), device_out.matrix(rows), l, shape, dropout);
    const auto out_now = device_out.read(stream), dqkv_now = device_dqkv.read(stream);
    const auto lse_now = device_lse.read(stream);
    if (time == 1) {
      CHECK(same_bits(out, out_now));
      CHECK(same_bits(dqkv, dqkv_now));
      CHECK(same_bits(lse, lse_now));
    }
    out = out_now;
    dqkv = dqkv_now;
    lse = lse_now;
  }
  CHECK(same_bits(device_qkv.read(stream), qkv));

  std::vector<float> host_qkv = as_floats(qkv), host_dout = as_floats(dout);
  std::vector<float> host_out(host_dout.size()), host_lse(lse.size()), host_dqkv(host_qkv.size());
  mega::host::Stream host;
  const View<float, 3> l(host_lse.data(), shape.batch, shape.query_heads, shape.time);
  const Matrix<const float> in(host_qkv.data(), rows, width);
  const Matrix<float> o(host_out.data(), rows, out_width);
  attention_forward(host, o, l, in, shape, dropout);
  attention_backward(host, Matrix<float>(host_dqkv.data(), rows, width),
                     Matrix<const float>(host_dout.data(), rows, out_width), in,
                     Matrix<const float>(o), View<const float, 3>(l), shape, dropout);

  check_near("out", out, host_out, rows, 0, out_width);
  const Index keys = shape.kv_heads * shape.head_dim;
  check_near("dq", dqkv, host_dqkv, rows, 0, out_width);
  check_near("dk", dqkv, host_dqkv, rows, out_width, keys);
  check_near("dv", dqkv, host_dqkv, rows, out_width + keys, keys);
  // Scores are fp32 sums of exact products; lse is below 30 here.
  double worst = 0;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double difference = std::abs(static_cast<double>(lse[i]) - host_lse[i]);
    worst = difference <= worst ? worst : difference;  // NaN stays
  }
  CHECK(worst < 2e-5);
}

}  // namespace

TEST_CASE_TEMPLATE("gpu: attention on tensor cores", T, Bfloat16, Float16) {
  for (const AttentionShape shape :
       {AttentionShape{1, 1, 1, 1, 16}, AttentionShape{2, 65, 3, 3, 64},
        AttentionShape{1, 128, 4, 2, 64}, AttentionShape{2, 200, 2, 1, 128},
        AttentionShape{1, 333, 6, 2, 32}, AttentionShape{1, 129, 2, 2, 96},
        AttentionShape{1, 517, 2, 2, 128}, AttentionShape{3, 70, 2, 1, 8},
        AttentionShape{1, 130, 3, 1, 80}, AttentionShape{5, 256, 12, 4, 128}}) {
    check_attention<T>(shape, {});
    check_attention<T>(shape, {0.1F, RandomKey{7, 1, 3, RandomUse::attention_dropout}, 2, 1,
                               shape.query_heads + 3});
  }
}

TEST_CASE_TEMPLATE("gpu: attention of no samples is nothing", T, Bfloat16, Float16) {
  mega::cuda::Stream stream;
  const AttentionShape shape{0, 8, 1, 1, 16};
  const Matrix<T> out(nullptr, 0, 16), packed(nullptr, 0, 48);
  const View<float, 3> lse(nullptr, 0, 1, 8);
  attention_forward(stream, out, lse, packed, shape);
  attention_backward(stream, packed, out, packed, out, lse, shape);
  CHECK_NOTHROW(stream.synchronize());
}

TEST_CASE("gpu: attention on tensor cores refuses what it cannot do") {
  mega::cuda::Stream stream;
  const auto forward = [&](Index head_dim, Bfloat16* at) {
    attention_forward(stream, Matrix<Bfloat16>(nullptr, 1, head_dim),
                      View<float, 3>(nullptr, 1, 1, 1), Matrix<Bfloat16>(at, 1, 3 * head_dim),
                      AttentionShape{1, 1, 1, 1, head_dim});
  };
  CHECK_THROWS_WITH_AS(forward(136, nullptr),
                       "attention_forward: head dim 136 does not fit the tensor-core kernels; "
                       "use a multiple of 8 up to 128",
                       mega::Error);
  CHECK_THROWS_WITH_AS(forward(12, nullptr),
                       "attention_forward: head dim 12 does not fit the tensor-core kernels; "
                       "use a multiple of 8 up to 128",
                       mega::Error);
  alignas(16) Bfloat16 memory[9];
  CHECK_THROWS_WITH_AS(forward(8, memory + 1),
                       "attention_forward: qkv begins 2 bytes behind a multiple of 16, it must "
                       "begin at one",
                       mega::Error);
}

TEST_CASE("gpu: speed of attention in bf16") {
  mega::cuda::Stream stream;
  cudaEvent_t begin, end;
  mega::cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
  mega::cuda::check(cudaEventCreate(&end), "cudaEventCreate");
  const auto best_ms = [&](const auto& operation) {
    float best = std::numeric_limits<float>::infinity();
    for (int time = 0; time < 8; ++time) {
      mega::cuda::check(cudaEventRecord(begin, stream.native()), "cudaEventRecord");
      operation();
      mega::cuda::check(cudaEventRecord(end, stream.native()), "cudaEventRecord");
      stream.synchronize();
      float ms = 0;
      mega::cuda::check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      best = std::min(best, ms);
    }
    return static_cast<double>(best);
  };
  for (const AttentionShape shape :
       {AttentionShape{16, 2048, 12, 12, 64}, AttentionShape{8, 2048, 16, 16, 128},
        AttentionShape{4, 4096, 32, 8, 64}, AttentionShape{1, 8192, 32, 8, 128}}) {
    const Index rows = shape.rows(), out_width = shape.query_heads * shape.head_dim;
    Device<Bfloat16> qkv(stream, random_numbers<Bfloat16>(rows * shape.width(), 1, 2)),
        dqkv(stream, poison<Bfloat16>(rows * shape.width())),
        dout(stream, random_numbers<Bfloat16>(rows * out_width, 2, 1)),
        out(stream, poison<Bfloat16>(rows * out_width));
    Device<float> statistics(
        stream, std::vector<float>(static_cast<std::size_t>(rows * shape.query_heads)));
    const View<float, 3> lse(statistics.data(), shape.batch, shape.query_heads, shape.time);
    // Two products forward, five backward, over half of the pairs of query and key.
    const double product = static_cast<double>(shape.batch * shape.query_heads) *
                           static_cast<double>(shape.time) * static_cast<double>(shape.time) *
                           static_cast<double>(shape.head_dim);
    for (const float probability : {0.0F, 0.1F}) {
      const AttentionDropout dropout{probability, RandomKey{1, 1, 1, RandomUse::attention_dropout},
                                     0, 0, shape.query_heads};
      const double forward = best_ms([&] {
        attention_forward(stream, out.matrix(rows), lse, qkv.matrix(rows), shape, dropout);
      });
      const double backward = best_ms([&] {
        attention_backward(stream, dqkv.matrix(rows), dout.matrix(rows), qkv.matrix(rows),
                           out.matrix(rows), lse, shape, dropout);
      });
      std::printf(
          "attention bf16 b %d hq %d hkv %d T %d d %d dropout %.1f: forward %.3f ms %.0f TFLOP/s, "
          "backward %.3f ms %.0f TFLOP/s\n",
          static_cast<int>(shape.batch), static_cast<int>(shape.query_heads),
          static_cast<int>(shape.kv_heads), static_cast<int>(shape.time),
          static_cast<int>(shape.head_dim), static_cast<double>(probability), forward,
          2 * product / forward * 1e-9, backward, 5 * product / backward * 1e-9);
      CHECK(std::isfinite(forward + backward));
    }
  }
  mega::cuda::check(cudaEventDestroy(begin), "cudaEventDestroy");
  mega::cuda::check(cudaEventDestroy(end), "cudaEventDestroy");
}
