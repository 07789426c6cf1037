/// @file  Matrix products of a GPU through cuBLASLt: bf16, fp16 or fp32, with a bias, its
/// gradient and the derivative of GELU inside the product. Opt-in: needs the CUDA headers and
/// cuBLASLt to link.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/storage.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/nn/product.hpp>

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::nn {

/// Device memory that each stream with a product of cuBLASLt keeps, from its first product on.
inline constexpr std::size_t cublas_lt_workspace_bytes = std::size_t{64} << 20;

/// How a problem that has no algorithm yet gets one.
enum class AlgorithmChoice : std::uint8_t {
  heuristic,  ///< cuBLASLt's first answer, which is the same in every run
  timed,      ///< the fastest of its first 16 answers, measured at the first product
};

/// The algorithms of this process, one a problem: sizes, transposes, types, leading dimensions,
/// epilogue, whether C is read, alignments, and the kind of GPU. All streams and threads use the
/// same, so that equal products give equal bits. As text they can be sent to other ranks and kept
/// for the next run, which a timed choice needs to repeat. Safe to use from several threads.
class MatmulAlgorithms {
 public:
  [[nodiscard]] static MatmulAlgorithms& of_process() {
    static MatmulAlgorithms algorithms;
    return algorithms;
  }

  /// From now on, for problems that have no algorithm yet.
  void choose_by(AlgorithmChoice choice) noexcept { choice_ = choice; }
  [[nodiscard]] AlgorithmChoice choice() const noexcept { return choice_; }

  /// One line a problem, sorted: the version of cuBLASLt, the kind of GPU, the problem, and the
  /// algorithm in hexadecimal digits.
  [[nodiscard]] std::string text() const {
    const std::lock_guard lock(mutex_);
    std::string out;
    for (const auto& [problem, algorithm] : known_) {
      out += problem;
      out += ' ';
      for (const std::uint64_t word : algorithm.data) {
        char digits[digits_per_word + 1];
        std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(word));
        out += digits;
      }
      out += '\n';
    }
    return out;
  }

  /// Takes over what text() wrote, instead of what is known of the same problems; each stream
  /// follows at its next product. Ranks that must agree read the same text at the same step.
  /// @throws  Error(bad_input) for a line that is torn or of another version of cuBLASLt; then
  ///          nothing of the text was taken over
  void read(std::string_view text) {
    std::map<std::string, cublasLtMatmulAlgo_t> in;
    const std::string version = std::to_string(cublasLtGetVersion());
    for (int number = 1; !text.empty(); ++number) {
      const std::string_view line = text.substr(0, text.find('\n'));
      text.remove_prefix(std::min(text.size(), line.size() + 1));
      const std::string_view from = line.substr(0, line.find(' '));
      const auto fields = 1 + std::count(line.begin(), line.end(), ' ');
      expects(fields == fields_per_line, ErrorCode::bad_input, [&] {
        return sentence("matmul algorithms: line ", number, " has ", fields, " fields, not ",
                        fields_per_line);
      });
      expects(from == version, ErrorCode::bad_input, [&] {
        return sentence("matmul algorithms: line ", number, " is of cuBLASLt ", from, ", this is ",
                        version, ", and algorithms do not carry over");
      });
      const std::size_t end = line.rfind(' ');
      const auto algorithm = from_hexadecimal(line.substr(end + 1));
      expects(algorithm.has_value(), ErrorCode::bad_input, [&] {
        return sentence("matmul algorithms: line ", number, " ends in ", line.substr(end + 1),
                        ", not in ", digits_per_word * words, " hexadecimal digits");
      });
      in[std::string(line.substr(0, end))] = *algorithm;
    }
    const std::lock_guard lock(mutex_);
    for (const auto& [problem, algorithm] : in) known_[problem] = algorithm;
    ++revision_;
  }

  [[nodiscard]] std::optional<cublasLtMatmulAlgo_t> find(const std::string& problem) const {
    const std::lock_guard lock(mutex_);
    const auto at = known_.find(problem);
    return at == known_.end() ? std::nullopt : std::optional(at->second);
  }
  /// The algorithm to use: `algorithm`, unless another thread has kept one for this problem since.
  cublasLtMatmulAlgo_t keep(const std::string& problem, const cublasLtMatmulAlgo_t& algorithm) {
    const std::lock_guard lock(mutex_);
    return known_.emplace(problem, algorithm).first->second;
  }
  /// Changes whenever an algorithm may have been replaced.
  [[nodiscard]] std::uint64_t revision() const noexcept { return revision_; }

 private:
  static constexpr int fields_per_line = 15;
  static constexpr std::size_t words = std::extent_v<decltype(cublasLtMatmulAlgo_t::data)>;
  static constexpr std::size_t digits_per_word = 16;

  [[nodiscard]] static std::optional<cublasLtMatmulAlgo_t> from_hexadecimal(std::string_view text) {
    if (text.size() != words * digits_per_word) return std::nullopt;
    cublasLtMatmulAlgo_t out = {};
    for (std::size_t i = 0; i < text.size(); ++i) {
      const std::size_t digit = std::string_view("0123456789abcdef").find(text[i]);
      if (digit == std::string_view::npos) return std::nullopt;
      std::uint64_t& word = out.data[i / digits_per_word];
      word = word << 4 | digit;
    }
    return out;
  }

  mutable std::mutex mutex_;
  std::map<std::string, cublasLtMatmulAlgo_t> known_;
  std::atomic<std::uint64_t> revision_ = 0;
  std::atomic<AlgorithmChoice> choice_ = AlgorithmChoice::heuristic;
};

namespace detail {

inline void check_cublas_lt(cublasStatus_t status, std::string_view call,
                            SourceLocation at = SourceLocation::current()) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  throw Error(ErrorCode::device,
              sentence(call, " failed with ", cublasLtGetStatusName(status), ", ",
                       cublasLtGetStatusString(status), ", at ", at.file_name(), ":", at.line()),
              at);
}

/// 16, or the largest power of two below it that divides the address. No kernel moves more than 16
/// bytes at once, and telling larger ones apart would choose anew for every place in an arena.
[[nodiscard]] inline std::uint8_t matmul_alignment(const void* p) noexcept {
  const auto low = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(p) % 16);
  return static_cast<std::uint8_t>(low == 0 ? 16U : low & (~low + 1U));
}

template <storage T>
inline constexpr cudaDataType_t cuda_data_type = std::is_same_v<T, float>     ? CUDA_R_32F
                                                 : std::is_same_v<T, Float16> ? CUDA_R_16F
                                                                              : CUDA_R_16BF;

/// What the choice of an algorithm depends on, row-major as callers see it.
struct MatmulProblem {
  cublasLtEpilogue_t epilogue;
  cudaDataType_t in, out;
  Transpose trans_a, trans_b;
  bool reads_c;
  std::uint8_t align_a, align_b, align_c, align_vector, align_aux;
  int m, n, k, lda, ldb, ldc;

  friend bool operator==(const MatmulProblem&, const MatmulProblem&) = default;

  /// Numbers of a bias.
  [[nodiscard]] int vector_size() const noexcept {
    return epilogue == CUBLASLT_EPILOGUE_BIAS ? n : 0;
  }
  [[nodiscard]] bool has_aux() const noexcept { return epilogue == CUBLASLT_EPILOGUE_DGELU; }

  /// The problem as fields of a line of MatmulAlgorithms.
  [[nodiscard]] std::string text() const {
    const auto type = [](cudaDataType_t t) {
      return t == CUDA_R_32F ? "fp32" : t == CUDA_R_16F ? "fp16" : "bf16";
    };
    const auto flag = [](Transpose t) { return t == Transpose::no ? 'n' : 't'; };
    const char* const after = epilogue == CUBLASLT_EPILOGUE_BIAS    ? "bias"
                              : epilogue == CUBLASLT_EPILOGUE_DGELU ? "dgelu"
                                                                    : "none";
    return sentence(type(in), ' ', type(out), ' ', after, ' ', flag(trans_a), flag(trans_b), ' ', m,
                    ' ', n, ' ', k, ' ', lda, ' ', ldb, ' ', ldc, reads_c ? " += " : " = ", align_a,
                    ',', align_b, ',', align_c, ',', align_vector, ',', align_aux);
  }

  struct Hash {
    [[nodiscard]] std::size_t operator()(const MatmulProblem& p) const noexcept {
      std::uint64_t sum = 0;
      const auto mix = [&sum](auto high, auto low) {
        const auto word = static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
                          static_cast<std::uint32_t>(low);
        sum = (sum ^ word) * 0x9E3779B97F4A7C15U;
        sum ^= sum >> 32;
      };
      mix(p.m, p.n);
      mix(p.k, p.lda);
      mix(p.ldb, p.ldc);
      mix(p.epilogue, p.in * 256 + p.out);
      mix(static_cast<int>(p.trans_a) * 4 + static_cast<int>(p.trans_b) * 2 + p.reads_c,
          p.align_a << 20 | p.align_b << 15 | p.align_c << 10 | p.align_vector << 5 | p.align_aux);
      return static_cast<std::size_t>(sum);
    }
  };
};

struct MatmulOperands {
  const void* a;
  const void* b;
  const void* vector;  ///< a bias, or where sums go
  void* aux;
  void* c;
  float alpha, beta;
};

/// A problem as cuBLASLt describes it, and its algorithm. cuBLASLt counts columns first, so it sees
/// every matrix transposed and computes C^T = op(B)^T op(A)^T: B is its left operand, C^T has n
/// rows and m columns. A bias runs along those rows, as it runs along the columns of C; sums over k
/// of the right operand are those of the rows of op(A); the operand of GELU lies as C does.
struct MatmulPlan {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t left, right, out;
  cublasLtMatmulAlgo_t algorithm;

  explicit MatmulPlan(const MatmulProblem& p) {
    // A matrix whose rows are `row` long is, transposed, one whose columns are.
    const auto layout = [](cublasLtMatrixLayoutOpaque_t& to, cudaDataType_t type, int rows, int row,
                           int ld) {
      check_cublas_lt(cublasLtMatrixLayoutInit(&to, type, static_cast<std::uint64_t>(row),
                                               static_cast<std::uint64_t>(rows), ld),
                      "cublasLtMatrixLayoutInit");
    };
    const bool plain_a = p.trans_a == Transpose::no, plain_b = p.trans_b == Transpose::no;
    layout(left, p.in, plain_b ? p.k : p.n, plain_b ? p.n : p.k, p.ldb);
    layout(right, p.in, plain_a ? p.m : p.k, plain_a ? p.k : p.m, p.lda);
    layout(out, p.out, p.m, p.n, p.ldc);
    check_cublas_lt(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                    "cublasLtMatmulDescInit");
    const auto flag = [](bool plain) -> std::int32_t { return plain ? CUBLAS_OP_N : CUBLAS_OP_T; };
    set(CUBLASLT_MATMUL_DESC_TRANSA, flag(plain_b));
    set(CUBLASLT_MATMUL_DESC_TRANSB, flag(plain_a));
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(p.epilogue));
    if (p.has_aux()) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{p.ldc});
  }

  void point_to(const MatmulProblem& p, const MatmulOperands& at) {
    if (p.vector_size() > 0) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.vector);
    if (p.has_aux()) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at.aux);
  }

  /// @pre  point_to() was called with the same operands
  [[nodiscard]] cublasStatus_t run(cublasLtHandle_t handle, const MatmulOperands& at,
                                   const cublasLtMatmulAlgo_t& by, void* workspace,
                                   cudaStream_t stream) {
    return cublasLtMatmul(handle, &operation, &at.alpha, at.b, &left, at.a, &right, &at.beta, at.c,
                          &out, at.c, &out, &by, workspace, cublas_lt_workspace_bytes, stream);
  }

  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    check_cublas_lt(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof value),
                    "cublasLtMatmulDescSetAttribute");
  }
};

inline constexpr int matmul_candidates_most = 16;

/// What may do a problem. A type with a name, since nvcc 13.0 fails on containers that destroy the
/// nameless structs of cuBLASLt.
struct MatmulCandidate {
  cublasLtMatmulAlgo_t algorithm;
  bool runs = true;
  std::vector<float> milliseconds = {};
};

/// Up to `most` algorithms that can do it, the one cuBLASLt expects to be fastest first.
[[nodiscard]] inline std::vector<MatmulCandidate> matmul_candidates(cublasLtHandle_t handle,
                                                                    MatmulPlan& plan,
                                                                    const MatmulProblem& p,
                                                                    int most) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check_cublas_lt(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check_cublas_lt(
        cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{cublas_lt_workspace_bytes});
  // Partial sums over parts of k stay in fp32, whatever C is stored as.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{p.align_b});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, std::uint32_t{p.align_a});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::uint32_t{p.align_c});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, std::uint32_t{p.align_c});
  // Without tensor cores there is neither TF32 nor an emulation of fp32, whatever the environment
  // asks for; and unlike CUBLAS_COMPUTE_32F_PEDANTIC this does not narrow the epilogues.
  if (p.in == CUDA_R_32F)
    prefer(CUBLASLT_MATMUL_PREF_IMPL_MASK,
           ~std::uint64_t{CUBLASLT_NUMERICAL_IMPL_FLAGS_TENSOR_OP_MASK});

  cublasLtMatmulHeuristicResult_t answers[matmul_candidates_most];
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, &plan.operation, &plan.left, &plan.right, &plan.out,
                                     &plan.out, &preference, most, answers, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
  check_cublas_lt(status, "cublasLtMatmulAlgoGetHeuristic");
  std::vector<MatmulCandidate> out;
  for (int i = 0; i < count; ++i)
    if (answers[i].state == CUBLAS_STATUS_SUCCESS) out.push_back({answers[i].algo});
  return out;
}

/// Time on the GPU between two places in a stream.
class Stopwatch {
 public:
  Stopwatch() {
    cuda::check(cudaEventCreate(&start_), "cudaEventCreate");
    cuda::check(cudaEventCreate(&stop_), "cudaEventCreate");
  }
  Stopwatch(Stopwatch&& other) noexcept
      : start_(std::exchange(other.start_, nullptr)), stop_(std::exchange(other.stop_, nullptr)) {}
  Stopwatch& operator=(Stopwatch&&) = delete;
  ~Stopwatch() {
    if (start_ != nullptr) (void)cudaEventDestroy(start_);
    if (stop_ != nullptr) (void)cudaEventDestroy(stop_);
  }
  void start(cudaStream_t stream) {
    cuda::check(cudaEventRecord(start_, stream), "cudaEventRecord");
  }
  void stop(cudaStream_t stream) { cuda::check(cudaEventRecord(stop_, stream), "cudaEventRecord"); }
  /// @pre  the stream has passed both places
  [[nodiscard]] float milliseconds() const {
    float out = 0;
    cuda::check(cudaEventElapsedTime(&out, start_, stop_), "cudaEventElapsedTime");
    return out;
  }

 private:
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

/// The candidate with the least median time, on operands of its own that no cache holds. Rounds go
/// over all candidates, so that what else the GPU does for a while disturbs them alike. Memory
/// comes and goes in the order of a stream, since a cudaFree would wait for the whole GPU, and so
/// perhaps for a peer. Where the operands do not fit beside what is there: the first candidate.
[[nodiscard]] inline cublasLtMatmulAlgo_t fastest_matmul(cublasLtHandle_t handle, MatmulPlan& plan,
                                                         const MatmulProblem& p, MatmulOperands at,
                                                         std::vector<MatmulCandidate> candidates) {
  constexpr int rounds = 7;
  constexpr std::size_t pattern_bytes = std::size_t{2} << 20;
  int device = 0, cache_bytes = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  cuda::check(cudaDeviceGetAttribute(&cache_bytes, cudaDevAttrL2CacheSize, device),
              "cudaDeviceGetAttribute");

  std::size_t total = 0;
  const auto reserve = [&total](std::size_t bytes) {
    return std::exchange(total, total + (bytes + 255) / 256 * 256);
  };
  const auto reserve_matrix = [&](cudaDataType_t type, int rows, int ld) {
    return reserve(static_cast<std::size_t>(rows) * static_cast<std::size_t>(ld) *
                   std::size_t{type == CUDA_R_32F ? 4U : 2U});
  };
  const std::size_t a = reserve_matrix(p.in, p.trans_a == Transpose::no ? p.m : p.k, p.lda);
  const std::size_t b = reserve_matrix(p.in, p.trans_b == Transpose::no ? p.k : p.n, p.ldb);
  const std::size_t c = reserve_matrix(p.out, p.m, p.ldc);
  const std::size_t vector = reserve_matrix(p.out, 1, p.vector_size());
  const std::size_t aux = reserve_matrix(p.out, p.has_aux() ? p.m : 0, p.ldc);
  const std::size_t numbers_bytes = total;
  const std::size_t workspace = reserve(cublas_lt_workspace_bytes);
  const std::size_t cached_bytes = 2 * static_cast<std::size_t>(cache_bytes);
  const std::size_t cached = reserve(cached_bytes);
  std::size_t free_bytes = 0, all_bytes = 0;
  cuda::check(cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo");
  if (total > free_bytes) return candidates.front().algorithm;

  // Zeros and constants cost less power, and so run at higher clocks, than numbers do. Words of two
  // bf16 numbers in (-2, -1] and [1, 2) are such fp32 numbers too, and two fp16 numbers near 2 or
  // -2.
  std::vector<std::uint32_t> pattern(pattern_bytes / sizeof(std::uint32_t));
  const RandomKey key{.use = RandomUse::test};
  for (std::size_t i = 0; i < pattern.size(); ++i)
    pattern[i] = (key.bits(static_cast<Index>(i)) & 0x807f807fU) | 0x3f803f80U;

  std::vector<Stopwatch> watches(candidates.size());
  cuda::Stream stream;  // waits for its work and frees its scratch before the pattern goes
  auto* const base = static_cast<std::byte*>(stream.scratch(total));
  std::size_t filled = std::min(pattern_bytes, numbers_bytes);
  cuda::check(
      cudaMemcpyAsync(base, pattern.data(), filled, cudaMemcpyHostToDevice, stream.native()),
      "cudaMemcpyAsync");
  while (filled < numbers_bytes) {
    const std::size_t more = std::min(filled, numbers_bytes - filled);
    cuda::check(
        cudaMemcpyAsync(base + filled, base, more, cudaMemcpyDeviceToDevice, stream.native()),
        "cudaMemcpyAsync");
    filled += more;
  }
  at.a = base + a;
  at.b = base + b;
  at.c = base + c;
  at.vector = base + vector;
  at.aux = base + aux;
  plan.point_to(p, at);

  for (int round = -1; round < rounds; ++round) {  // the first one loads code
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      MatmulCandidate& candidate = candidates[i];
      if (!candidate.runs) continue;
      cuda::check(cudaMemsetAsync(base + cached, 0, cached_bytes, stream.native()),
                  "cudaMemsetAsync");
      watches[i].start(stream.native());
      candidate.runs = plan.run(handle, at, candidate.algorithm, base + workspace,
                                stream.native()) == CUBLAS_STATUS_SUCCESS;
      watches[i].stop(stream.native());
    }
    stream.synchronize();
    for (std::size_t i = 0; i < candidates.size(); ++i)
      if (candidates[i].runs && round >= 0)
        candidates[i].milliseconds.push_back(watches[i].milliseconds());
  }
  (void)cudaGetLastError();  // a refused candidate is no fault of what comes next
  const MatmulCandidate* best = &candidates.front();
  float least = std::numeric_limits<float>::infinity();
  for (MatmulCandidate& candidate : candidates) {
    if (!candidate.runs) continue;
    const auto median = candidate.milliseconds.begin() + rounds / 2;
    std::nth_element(candidate.milliseconds.begin(), median, candidate.milliseconds.end());
    if (*median < least) {
      least = *median;
      best = &candidate;
    }
  }
  return best->algorithm;
}

/// Name of the current GPU and its number of multiprocessors, as one word.
[[nodiscard]] inline std::string gpu_kind() {
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp properties;
  cuda::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::string out = sentence(&properties.name[0], ':', properties.multiProcessorCount);
  std::replace(out.begin(), out.end(), ' ', '_');
  return out;
}

/// Handle, workspace and plans of one stream: two streams that shared a workspace would spoil each
/// other's sums, and a plan holds the pointers of the product that is being queued.
class CublasLtMatmul {
 public:
  explicit CublasLtMatmul(cuda::Stream&)
      : workspace_(cublas_lt_workspace_bytes),
        prefix_(sentence(cublasLtGetVersion(), ' ', gpu_kind(), ' ')) {
    check_cublas_lt(cublasLtCreate(&handle_), "cublasLtCreate");
  }
  CublasLtMatmul(const CublasLtMatmul&) = delete;
  CublasLtMatmul& operator=(const CublasLtMatmul&) = delete;
  ~CublasLtMatmul() { (void)cublasLtDestroy(handle_); }

  /// False where cuBLASLt has no algorithm; then nothing was queued.
  [[nodiscard]] bool run(cuda::Stream& stream, std::string_view call, const MatmulProblem& p,
                         const MatmulOperands& at) {
    const std::uint64_t revision = MatmulAlgorithms::of_process().revision();
    if (revision != revision_) plans_.clear();
    revision_ = revision;
    auto known = plans_.find(p);
    if (known == plans_.end()) known = plans_.emplace(p, make_plan(stream, p, at)).first;
    if (!known->second) return false;
    MatmulPlan& plan = *known->second;
    plan.point_to(p, at);
    check_cublas_lt(plan.run(handle_, at, plan.algorithm, workspace_.data(), stream.native()),
                    call);
    return true;
  }
  [[noreturn]] void refuse(std::string_view call, const MatmulProblem& p) const {
    throw Error(ErrorCode::device,
                sentence(call, ": cuBLASLt has no algorithm for ", prefix_, p.text()));
  }

 private:
  /// None where cuBLASLt has no algorithm.
  [[nodiscard]] std::optional<MatmulPlan> make_plan(cuda::Stream& stream, const MatmulProblem& p,
                                                    const MatmulOperands& at) const {
    MatmulAlgorithms& algorithms = MatmulAlgorithms::of_process();
    MatmulPlan out(p);
    out.point_to(p, at);
    const std::string problem = prefix_ + p.text();
    if (const auto known = algorithms.find(problem)) {
      out.algorithm = *known;
    } else {
      const auto chosen = choose(stream, out, p, at);
      if (!chosen) return std::nullopt;
      out.algorithm = algorithms.keep(problem, *chosen);
      out.point_to(p, at);
    }
    cublasLtMatmulHeuristicResult_t result = {};
    check_cublas_lt(cublasLtMatmulAlgoCheck(handle_, &out.operation, &out.left, &out.right,
                                            &out.out, &out.out, &out.algorithm, &result),
                    sentence("the algorithm of ", problem));
    expects(result.workspaceSize <= cublas_lt_workspace_bytes, ErrorCode::device, [&] {
      return sentence("the algorithm of ", problem, " needs a workspace of ", result.workspaceSize,
                      " bytes, streams have ", cublas_lt_workspace_bytes);
    });
    return out;
  }

  [[nodiscard]] std::optional<cublasLtMatmulAlgo_t> choose(cuda::Stream& stream, MatmulPlan& plan,
                                                           const MatmulProblem& p,
                                                           const MatmulOperands& at) const {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(stream.native(), &capture), "cudaStreamIsCapturing");
    // A stream under capture cannot be waited for.
    const bool timed = MatmulAlgorithms::of_process().choice() == AlgorithmChoice::timed &&
                       capture == cudaStreamCaptureStatusNone;
    const auto candidates = matmul_candidates(handle_, plan, p, timed ? matmul_candidates_most : 1);
    if (candidates.empty()) return std::nullopt;
    if (candidates.size() == 1) return candidates.front().algorithm;
    stream.synchronize();  // its work would share the GPU with what is measured
    return fastest_matmul(handle_, plan, p, at, candidates);
  }

  cuda::Memory workspace_;
  std::string prefix_;
  cublasLtHandle_t handle_ = nullptr;
  std::uint64_t revision_ = 0;
  std::unordered_map<MatmulProblem, std::optional<MatmulPlan>, MatmulProblem::Hash> plans_;
};

/// A size or a leading dimension.
[[nodiscard]] inline int matmul_size(std::string_view call, std::string_view what, Index n) {
  expects(n >= 0 && n <= std::numeric_limits<int>::max(), ErrorCode::logic, [&] {
    return sentence(call, ": ", what, " is ", n, ", cuBLASLt takes 0 to ",
                    std::numeric_limits<int>::max());
  });
  return static_cast<int>(n);
}

}  // namespace detail

/// Matrix products of T with fp32 sums. T float is fp32 throughout: no tensor cores, so no TF32.
/// All matrices are row-major; op(A) is m x k, op(B) is k x n, C is m x n. Pointers need only the
/// alignment of their elements, leading dimensions only cover a row; multiples of 16 bytes are
/// faster. m or n == 0 does nothing, k == 0 gives empty sums.
/// @pre          C (and pre) overlap no operand; sizes and leading dimensions fit an int
/// @sync         ordered on stream. The first product of a problem asks cuBLASLt, and under
///               AlgorithmChoice::timed waits for the stream and measures for a while, except in a
///               capture; later ones are a look-up and a launch. The very first product of a stream
///               allocates, so it comes before any capture.
/// @cost         cublas_lt_workspace_bytes a stream; a measurement has copies of all operands
/// @determinism  run to run on one kind of GPU with AlgorithmChoice::heuristic or with the same
///               text read into MatmulAlgorithms
/// @throws       Error(device) where cuBLASLt has no algorithm, which happens with an epilogue on
///               operands that are not aligned to 16 bytes: the bias and GELU are then operations
///               of their own after gemm()
template <storage T>
struct CublasLtProduct {
  using element = T;
  static constexpr std::string_view name = "cublas_lt";

  /// Whether all algorithms of cuBLASLt with something behind the sum take matrices with rows of
  /// this many elements: whole 16 bytes.
  [[nodiscard]] static constexpr bool fuses_rows_of(Index row) noexcept {
    return row * static_cast<Index>(sizeof(T)) % 16 == 0;
  }

  /// C = alpha op(A) op(B) + beta C. C is T, or float: the accumulator of a weight gradient.
  template <class C>
  requires(std::is_same_v<C, T> || std::is_same_v<C, float>) static void gemm(
      cuda::Stream& stream, Transpose trans_a, Transpose trans_b, Index m, Index n, Index k,
      float alpha, const T* a, Index lda, const T* b, Index ldb, float beta, C* c, Index ldc) {
    multiply<C>(stream, "gemm", CUBLASLT_EPILOGUE_DEFAULT, trans_a, trans_b, m, n, k, lda, ldb, ldc,
                {a, b, nullptr, nullptr, c, alpha, beta});
  }

  /// C = op(A) op(B) + bias in each row.
  /// @param bias  [n]
  static void gemm_bias(cuda::Stream& stream, Transpose trans_a, Transpose trans_b, Index m,
                        Index n, Index k, const T* a, Index lda, const T* b, Index ldb,
                        const T* bias, T* c, Index ldc) {
    multiply<T>(stream, "gemm_bias", CUBLASLT_EPILOGUE_BIAS, trans_a, trans_b, m, n, k, lda, ldb,
                ldc, {a, b, bias, nullptr, c, 1.0F, 0.0F});
  }

  /// C = (op(A) op(B)) * gelu_tanh'(pre), element by element.
  /// @param pre  m x n, with the leading dimension of C
  /// @throws     Error(logic) unless ldc is a multiple of 8, which cuBLASLt asks of pre
  static void gemm_dgelu(cuda::Stream& stream, Transpose trans_a, Transpose trans_b, Index m,
                         Index n, Index k, const T* a, Index lda, const T* b, Index ldb,
                         const T* pre, T* c, Index ldc) {
    // cuBLASLt asks for a pointer to what it only reads.
    multiply<T>(stream, "gemm_dgelu", CUBLASLT_EPILOGUE_DGELU, trans_a, trans_b, m, n, k, lda, ldb,
                ldc, {a, b, nullptr, const_cast<T*>(pre), c, 1.0F, 0.0F});
  }

 private:
  template <class C>
  static void multiply(cuda::Stream& stream, std::string_view call, cublasLtEpilogue_t epilogue,
                       Transpose trans_a, Transpose trans_b, Index m, Index n, Index k, Index lda,
                       Index ldb, Index ldc, const detail::MatmulOperands& at) {
    if (m <= 0 || n <= 0) return;
    if (k <= 0) {
      // An empty sum is a sum of one zero.
      const std::size_t bytes = static_cast<std::size_t>(std::max(m, n)) * sizeof(T);
      void* const zeros = stream.scratch(bytes);
      cuda::check(cudaMemsetAsync(zeros, 0, bytes, stream.native()), "cudaMemsetAsync");
      return multiply<C>(stream, call, epilogue, Transpose::yes, Transpose::no, m, n, 1, m, n, ldc,
                         {zeros, zeros, at.vector, at.aux, at.c, at.alpha, at.beta});
    }
    const auto problem =
        problem_of<C>(call, epilogue, trans_a, trans_b, m, n, k, lda, ldb, ldc, at);
    auto& products = stream.resource<detail::CublasLtMatmul>();
    if (!products.run(stream, call, problem, at)) products.refuse(call, problem);
  }

  template <class C>
  [[nodiscard]] static detail::MatmulProblem problem_of(std::string_view call,
                                                        cublasLtEpilogue_t epilogue,
                                                        Transpose trans_a, Transpose trans_b,
                                                        Index m, Index n, Index k, Index lda,
                                                        Index ldb, Index ldc,
                                                        const detail::MatmulOperands& at) {
    const auto size = [&](std::string_view what, Index value) {
      return detail::matmul_size(call, what, value);
    };
    const detail::MatmulProblem problem{.epilogue = epilogue,
                                        .in = detail::cuda_data_type<T>,
                                        .out = detail::cuda_data_type<C>,
                                        .trans_a = trans_a,
                                        .trans_b = trans_b,
                                        .reads_c = at.beta != 0.0F,
                                        .align_a = detail::matmul_alignment(at.a),
                                        .align_b = detail::matmul_alignment(at.b),
                                        .align_c = detail::matmul_alignment(at.c),
                                        .align_vector = detail::matmul_alignment(at.vector),
                                        .align_aux = detail::matmul_alignment(at.aux),
                                        .m = size("m", m),
                                        .n = size("n", n),
                                        .k = size("k", k),
                                        .lda = size("lda", lda),
                                        .ldb = size("ldb", ldb),
                                        .ldc = size("ldc", ldc)};
    expects(!problem.has_aux() || ldc % 8 == 0, ErrorCode::logic, [&] {
      return sentence(call, ": ldc is ", ldc, ", cuBLASLt takes multiples of 8 with GELU");
    });
    return problem;
  }
};

static_assert(matrix_product<CublasLtProduct<float>, cuda::Stream>);
static_assert(fuses_bias<CublasLtProduct<Bfloat16>, cuda::Stream>);
static_assert(fuses_gelu_backward<CublasLtProduct<Bfloat16>, cuda::Stream>);
static_assert(fuses_bias<CublasLtProduct<Float16>, cuda::Stream>);
static_assert(fuses_gelu_backward<CublasLtProduct<Float16>, cuda::Stream>);

}  // namespace mega::inline v0::nn
