/// @file  Memory of a run on GPUs: the plan of every rank against what a GPU has, before anything
/// is allocated and without a GPU if its memory is named.
#pragma once
#include "config.hpp"
#include "console.hpp"
#include "job.hpp"
#include "stages.hpp"
#include <mega/comm/nccl_memory.hpp>
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/storage.hpp>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_limits.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/cublas_lt.hpp>
#include <mega/nn/kernels.hpp>
#include <mega/nn/transformer_config.hpp>
#ifdef MEGA_WITH_CUDNN
#include <mega/nn/cudnn_attention.hpp>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace trainer {

/// What computes on a GPU, by the type of the stored numbers. cuDNN attends where this program was
/// built with it and where it takes the shape, else the library itself.
template <mega::storage Element>
struct GpuKernelsOf {
  using type = mega::nn::Kernels<mega::nn::CublasLtProduct<Element>>;
};
#ifdef MEGA_WITH_CUDNN
template <mega::half_storage Element>
struct GpuKernelsOf<Element> {
  using type = mega::nn::Kernels<mega::nn::CublasLtProduct<Element>, mega::nn::CudnnAttention<>>;
};
#endif
template <mega::storage Element>
using GpuKernels = typename GpuKernelsOf<Element>::type;

/// f(std::type_identity<Element>) with what `precision` stores numbers as.
template <class F>
decltype(auto) with_element(Precision precision, const F& f) {
  switch (precision) {
    case Precision::bf16: return f(std::type_identity<mega::Bfloat16>());
    case Precision::fp16: return f(std::type_identity<mega::Float16>());
    case Precision::fp32: break;
  }
  return f(std::type_identity<float>());
}

using mega::comm::nccl_communicator_bytes;

/// Bytes of a text like 141GB or 80GiB. A number without a unit and memory that no GPU ever had
/// come from a unit that was forgotten.
/// @throws  Error(usage)
[[nodiscard]] inline std::size_t parse_bytes(std::string_view option, const std::string& text) {
  constexpr double least = 1e6, most = 1e18;
  constexpr std::array<std::pair<std::string_view, double>, 8> units{{{"B", 1.0},
                                                                      {"MB", 1e6},
                                                                      {"GB", 1e9},
                                                                      {"TB", 1e12},
                                                                      {"KiB", 1024.0},
                                                                      {"MiB", 1048576.0},
                                                                      {"GiB", 1073741824.0},
                                                                      {"TiB", 1099511627776.0}}};
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string_view unit(end);
  const auto known =
      std::find_if(units.begin(), units.end(), [&](const auto& u) { return u.first == unit; });
  mega::expects(end != text.c_str() && known != units.end() && std::isfinite(number) &&
                    number * known->second >= least && number * known->second < most,
                mega::ErrorCode::usage, [&] {
                  return mega::sentence(
                      option, " is '", text,
                      "'; it takes a number with one of the units B, MB, GB, TB, "
                      "KiB, MiB, GiB and TiB, of at least 1MB and below 1000000TB, as 80GB");
                });
  return static_cast<std::size_t>(number * known->second);
}

/// Refuses sizes that the plan could add up and the kernels would refuse at their first call.
/// @throws  Error(usage)
template <mega::storage Element>
void expects_kernels_take(const Job& job) {
  using mega::ErrorCode;
  using mega::expects;
  using mega::sentence;
  constexpr mega::cuda::AttentionLimits limits = mega::cuda::attention_limits<Element>;
  constexpr Index largest = std::numeric_limits<int>::max();  // of a size that cuBLASLt takes
  const mega::nn::TransformerConfig& m = job.model;
  const std::string_view precision = name_of(precision_names, job.config.gpu->precision);
  expects(m.head_dim <= limits.head_dim && m.head_dim % limits.head_dim_multiple == 0,
          ErrorCode::usage, [&] {
            const std::string wanted =
                limits.head_dim_multiple > 1
                    ? sentence("multiples of ", limits.head_dim_multiple, " up to ")
                    : std::string("1 to ");
            return sentence("heads are ", m.head_dim,
                            " wide (--kv-channels, or --hidden-size by "
                            "--num-attention-heads); attention on a GPU in --precision ",
                            precision, " takes ", wanted, limits.head_dim);
          });
  const Index heads = m.heads / job.options.mesh.tensor;
  expects(heads <= limits.heads, ErrorCode::usage, [&] {
    return sentence("--num-attention-heads ", m.heads, " over --tp ", job.options.mesh.tensor,
                    " are ", heads, " heads a rank; attention on a GPU in --precision ", precision,
                    " takes at most ", limits.heads);
  });
  expects(job.run.micro_batch <= limits.samples, ErrorCode::usage, [&] {
    return sentence("--micro-batch-size is ", job.run.micro_batch,
                    "; attention on a GPU in --precision ", precision, " takes at most ",
                    limits.samples, " samples");
  });
  expects(job.run.rows() <= largest, ErrorCode::usage, [&] {
    return sentence("--micro-batch-size ", job.run.micro_batch, " x --seq-length ",
                    job.run.sequence, " are ", job.run.rows(),
                    " tokens; a matrix product on a GPU takes at most ", largest);
  });
  const Index packed = (m.heads + 2 * m.kv_heads) / job.options.mesh.tensor * m.head_dim;
  expects(packed <= largest, ErrorCode::usage, [&] {
    return sentence("--num-attention-heads ", m.heads, ", --num-query-groups ", m.kv_heads,
                    " and heads of ", m.head_dim, " make ", packed,
                    " columns a rank; a matrix product on a GPU takes at most ", largest);
  });
}

/// Largest scratch that a stream keeps for attention of `micro_batch` samples.
template <class Kernels>
[[nodiscard]] std::size_t attention_bytes(const Job& job, Index micro_batch) {
  using Attention = typename Kernels::attention;
  const Index tensor = job.options.mesh.tensor;
  const mega::nn::AttentionShape shape{micro_batch, job.run.sequence, job.model.heads / tensor,
                                       job.model.kv_heads / tensor, job.model.head_dim};
  if constexpr (requires { Attention::workspace_bytes(shape); }) {
    if (Attention::supports(shape, {.probability = job.model.dropout.attention}))
      return Attention::workspace_bytes(shape);
  }
  return sizeof(float) * static_cast<std::size_t>(shape.rows() * shape.query_heads);
}

/// Communicators of several ranks that a rank at this place of the pipeline holds to the end: the
/// world, one of its own for decisions, one more where ranks are compared and where the order
/// adapts, one an axis and one more for look-ahead's decisions, one that ties the ends.
[[nodiscard]] inline int communicators(const Job& job, std::size_t place) {
  const mega::Mesh& mesh = job.options.mesh;
  const bool at_an_end = place == 0 || static_cast<int>(place) + 1 == mesh.pipeline;
  const int of_the_world = 2 + (job.config.watch_interval > 0 ? 1 : 0) +
                           (job.config.schedule == Schedule::adaptive ? 1 : 0);
  const int of_tensor_ranks = job.options.dispatch.ahead > 0 ? 2 : 1;
  return (mesh.size() > 1 ? of_the_world : 0) + (mesh.tensor > 1 ? of_tensor_ranks : 0) +
         (mesh.data > 1 ? 1 : 0) + (mesh.pipeline > 1 && at_an_end ? 1 : 0);
}

/// What the ranks take of their GPUs, at each place of the pipeline: the trainer, and what the
/// libraries keep beside it.
template <class Spec, class Kernels>
[[nodiscard]] std::vector<RankPlan> plan_gpus(const Job& job) {
  std::vector<RankPlan> out = plan_ranks<Spec, Kernels>(job);
  std::vector<mega::train::MemoryPlan> sampling;
  if (job.config.sample_tokens > 0) {
    auto options = job.options;
    options.microbatches = 1;
    options.traversal = options.traversal.of_one_microbatch();
    sampling = plan_places<Spec, Kernels>(job, options, sampling_run(job));
  }
  for (std::size_t place = 0; place < out.size(); ++place) {
    auto& memory = out[place].memory;
    memory.push_back({"matrix products", mega::nn::cublas_lt_workspace_bytes});
    memory.push_back({"attention", attention_bytes<Kernels>(job, job.run.micro_batch)});
    if (const int count = communicators(job, place); count > 0)
      memory.push_back(
          {"communicators", static_cast<std::size_t>(count) * nccl_communicator_bytes});
    if (sampling.empty()) continue;
    const std::size_t logits = sizeof(typename Kernels::element) *
                               static_cast<std::size_t>(job.run.sequence * job.model.vocab);
    memory.push_back({"sampling", sampling[place].activations + sampling[place].workspace + logits +
                                      mega::nn::cublas_lt_workspace_bytes +
                                      attention_bytes<Kernels>(job, 1) +
                                      (job.world() > 1 ? 2 * nccl_communicator_bytes : 0)});
  }
  return out;
}

/// Plans for the precision that the job names.
template <class Spec>
[[nodiscard]] std::vector<RankPlan> plan_gpus(const Job& job) {
  return with_element(job.config.gpu->precision, [&]<class Element>(std::type_identity<Element>) {
    return plan_gpus<Spec, GpuKernels<Element>>(job);
  });
}

/// The same for the kernels of that precision.
/// @throws  Error(usage)
inline void expects_kernels_take(const Job& job) {
  with_element(job.config.gpu->precision, [&]<class Element>(std::type_identity<Element>) {
    expects_kernels_take<Element>(job);
  });
}

/// Place of the pipeline whose rank takes most.
[[nodiscard]] inline std::size_t fullest(const std::vector<RankPlan>& plans) {
  const auto less = [](const RankPlan& a, const RankPlan& b) { return a.total() < b.total(); };
  return static_cast<std::size_t>(std::max_element(plans.begin(), plans.end(), less) -
                                  plans.begin());
}

/// What a rank may take of a GPU.
struct GpuLimit {
  std::size_t memory = 0;  ///< of the GPU
  double utilization = 0;

  [[nodiscard]] std::size_t bytes() const noexcept {
    return static_cast<std::size_t>(static_cast<double>(memory) * utilization);
  }
};

/// The divisors of n that are smaller, from the largest to 1.
[[nodiscard]] inline std::vector<int> smaller_divisors(int n) {
  std::vector<int> small, large;
  for (int d = 1; d <= n / d; ++d) {
    if (n % d != 0) continue;
    if (d < n) small.push_back(d);
    if (d > 1 && d < n / d) large.push_back(n / d);
  }
  large.insert(large.end(), small.rbegin(), small.rend());
  return large;
}

/// One way to need less memory a GPU: flags, and what they do to the configuration.
struct Remedy {
  std::string flags;
  Config config;
};

/// From what costs little time to what costs more GPUs.
[[nodiscard]] inline std::vector<Remedy> remedies(const Job& job) {
  using mega::sentence;
  using mega::nn::Recompute;
  const Config& now = job.config;
  std::vector<Remedy> out;
  const auto add = [&](const std::string& flags, Config config) {
    // Degrees and layers were settled for the layout as it is.
    if (config.pipeline != now.pipeline) config.layout.clear();
    out.push_back({flags, std::move(config)});
  };
  const auto join = [](const std::string& a, const std::string& b) {
    return a.empty() || b.empty() ? a + b : a + " " + b;
  };
  const auto with_recompute = [&](const std::string& before, Config config) {
    add(before, config);
    for (const Recompute what : {Recompute::selective, Recompute::full}) {
      if (what <= now.recompute) continue;
      config.recompute = what;
      add(join(before, sentence("--recompute ", name_of(recompute_names, what))), config);
    }
  };
  const auto with_micro_batches = [&](const std::string& before, Config config) {
    with_recompute(before, config);
    for (const int samples : smaller_divisors(now.micro_batch)) {
      config.micro_batch = samples;
      with_recompute(join(before, sentence("--micro-batch-size ", samples)), config);
    }
  };
  with_micro_batches("", now);
  if (now.data > 1 && !now.shard_optimizer) {
    Config config = now;
    config.shard_optimizer = true;
    with_micro_batches("--zero1", config);
  }
  for (int factor = 2; factor <= 16; factor *= 2) {
    Config config = now;
    config.tensor = now.tensor * factor;
    with_micro_batches(sentence("--tp ", config.tensor), config);
    config = now;
    config.pipeline = now.pipeline * factor;
    with_micro_batches(sentence("--pp ", config.pipeline), config);
    config = now;
    config.data = now.data * factor;
    config.shard_optimizer = true;
    with_micro_batches(sentence("--dp ", config.data, " --zero1"), config);
  }
  return out;
}

/// The first remedy whose plan fits, as a piece of a sentence.
template <class Spec>
[[nodiscard]] std::string advice(const Job& job, const GpuLimit& limit) {
  for (const Remedy& remedy : remedies(job)) {
    if (remedy.flags.empty()) continue;
    try {
      const Job other = make_job<Spec>(remedy.config, job.model, 0);
      const std::vector<RankPlan> plans = plan_gpus<Spec>(other);
      const std::size_t bytes = plans[fullest(plans)].total();
      if (bytes > limit.bytes()) continue;
      const int more = other.world() - job.world();
      return mega::sentence(
          remedy.flags, " would fit with ", readable_bytes(bytes),
          more > 0 ? mega::sentence(" a GPU on ", other.world(), " GPUs") : std::string());
    } catch (const mega::Error&) {
      // The model, the batch or the schedule does not divide like this.
    }
  }
  return "no --recompute, --micro-batch-size, --zero1, --tp, --pp or --dp up to 16 times as large "
         "makes it fit; train a smaller model or shorter sequences";
}

/// @throws  Error(usage) with the lines of the fullest rank's plan and a change that would fit
template <class Spec>
void expects_fit(const Job& job, const std::vector<RankPlan>& plans, const GpuLimit& limit) {
  const std::size_t place = fullest(plans);
  mega::expects(plans[place].total() <= limit.bytes(), mega::ErrorCode::usage, [&] {
    int rank = 0;
    while (place_of(job, rank) != place) ++rank;
    return mega::sentence("rank ", rank, " needs ", memory_text(plans[place]),
                          ", but --gpu-memory-utilization ", limit.utilization, " leaves it ",
                          readable_bytes(limit.bytes()), " of the ", readable_bytes(limit.memory),
                          " of its GPU; ", advice<Spec>(job, limit));
  });
}

}  // namespace trainer
