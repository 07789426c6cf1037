// The trainer and the Transformer on one GPU against values of Hugging Face transformers.
#include "../../tools/mega-oracle-check/oracle_check.hpp"
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/cublas.hpp>
#include <mega/nn/cublas_lt.hpp>

#include <doctest/doctest.h>

#include <cstdio>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using mega::nn::Recompute;

template <class Spec, class Product>
struct GpuPlan : mega::DefaultPlan {
  using device = mega::Cuda;
  using communicator = mega::DeviceSelfComm;
  using stage = mega::nn::Transformer<Spec, communicator, mega::nn::Kernels<Product>>;
};

template <class Product = mega::nn::CublasProduct>
std::unique_ptr<oracle::Comparison> run(const std::string& name, const oracle::Layout& layout) {
  auto comparison = std::make_unique<oracle::Comparison>("tests/oracle/" + name, layout);
  mega::DeviceSelfComm world;
  if (comparison->model().family() == mega::ckpt::HuggingFaceFamily::gpt2) {
    comparison->template run_rank<GpuPlan<mega::nn::Gpt3, Product>>(world);
  } else {
    comparison->template run_rank<GpuPlan<mega::nn::Llama3, Product>>(world);
  }
  return comparison;
}

const std::vector<oracle::Layout> layouts = {{},
                                             {.recompute = Recompute::selective},
                                             {.recompute = Recompute::full},
                                             {.chunks = 2},
                                             {.zero1 = true}};

}  // namespace

TEST_CASE("gpu oracle: logits, loss, gradients and AdamW equal Hugging Face's") {
  for (const std::string name : {"gpt3-tiny", "llama3-tiny"}) {
    for (const oracle::Layout& layout : layouts) {
      CAPTURE(name);
      CAPTURE(layout.chunks);
      CAPTURE(to_string(layout.recompute));
      const oracle::Report report = run(name, layout)->report();
      std::printf(
          "%s, recompute %s, %d chunks: logits %.1e, loss %.1e, gradients %.1e (%s), "
          "key bias %.1e, AdamW %.1e\n",
          name.c_str(), std::string(to_string(layout.recompute)).c_str(), layout.chunks,
          report.logits_max_abs, report.loss_rel, report.grad_worst_rel,
          report.grad_worst_name.c_str(), report.key_bias_max_abs, report.adamw_worst_rel);
      // fp32 against fp32, as on the host.
      CHECK(report.logits_max_abs < 3e-5);
      CHECK(report.loss_rel < 1e-6);
      CAPTURE(report.grad_worst_name);
      CHECK(report.grad_worst_rel < 1e-4);
      CHECK(report.key_bias_max_abs < 1e-7);
      CHECK(report.adamw_worst_rel < 3e-5);
    }
  }
}

TEST_CASE("gpu oracle: a second run, and every way of recomputing, gives the same bits") {
  for (const std::string name : {"gpt3-tiny", "llama3-tiny"}) {
    const auto first = run(name, {});
    for (const Recompute mode : {Recompute::none, Recompute::selective, Recompute::full}) {
      CAPTURE(name);
      CAPTURE(to_string(mode));
      const auto again = run(name, {.recompute = mode});
      CHECK(again->logits() == first->logits());
      CHECK(again->losses() == first->losses());
      CHECK(again->gradients() == first->gradients());
    }
  }
}

TEST_CASE_TEMPLATE(
    "gpu oracle: 16 bits train as fp32 does, and repeat their bits in every way of recomputing", T,
    mega::Bfloat16, mega::Float16) {
  using Product = mega::nn::CublasLtProduct<T>;
  constexpr bool bf16 = std::is_same_v<T, mega::Bfloat16>;
  for (const std::string name : {"gpt3-tiny", "llama3-tiny"}) {
    CAPTURE(name);
    const auto first = run<Product>(name, {});
    const oracle::Report report = first->report();
    std::printf("%s in %s: logits %.1e, loss %.1e, gradients %.1e (%s), AdamW %.1e\n", name.c_str(),
                bf16 ? "bf16" : "fp16", report.logits_max_abs, report.loss_rel,
                report.grad_worst_rel, report.grad_worst_name.c_str(), report.adamw_worst_rel);
    CHECK(report.loss_rel < 1e-2);
    CHECK(report.adamw_worst_rel < 1e-2);
    // Rounding to 8 or 11 bits in every operation of two layers and back.
    CHECK(report.grad_worst_rel < (bf16 ? 5e-2 : 1e-2));
    for (const Recompute mode : {Recompute::none, Recompute::selective, Recompute::full}) {
      CAPTURE(to_string(mode));
      const auto again = run<Product>(name, {.recompute = mode});
      CHECK(again->logits() == first->logits());
      CHECK(again->losses() == first->losses());
      CHECK(again->gradients() == first->gradients());
    }
  }
}
