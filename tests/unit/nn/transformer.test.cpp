#include "tests/unit/nn/support.hpp"
#include "tests/unit/nn/transformer_model.hpp"
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/host/host_async.hpp>
#include <mega/nn/gpt3.hpp>
#include <mega/nn/kernels.hpp>
#include <mega/nn/llama3.hpp>
#include <mega/nn/product.hpp>
#include <mega/nn/transformer.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace {

using mega::Index;
using mega::Mode;
using mega::nn::Gpt3;
using mega::nn::Llama3;
using mega::nn::Recompute;
using mega::nn::TransformerConfig;
using mega::nn::TransformerRun;
using test::Model;
using test::Tensors;
using test::Text;

/// Every size another number; the vocabulary divides over no degree, dropout is on.
template <class Spec>
TransformerConfig micro_config() {
  return {.layers = 3,
          .hidden = 16,
          .heads = 4,
          .kv_heads = Spec::position::has_table ? 4 : 2,
          .head_dim = 4,
          .ffn = 20,
          .vocab = 101,
          .max_positions = 9,
          .norm_epsilon = 1e-5F,
          .rope = {.theta = 100.0},
          .dropout = {.embedding = 0.1F, .attention = 0.2F, .residual = 0.3F},
          .tied_head = Spec::position::has_table};
}
constexpr TransformerRun micro_run{.micro_batch = 2, .sequence = 7, .loss_rows = 5};
const Text text(6, 7, 101);

struct Outcome {
  double loss = 0;
  Tensors gradients;
};

/// Loss and whole gradients of two micro-batches.
template <class Spec, class Stream = mega::host::Stream, class MakeStream = Stream (*)()>
Outcome train(
    const TransformerConfig& config, const TransformerRun& run, int tensor_degree,
    const std::vector<int>& layers, const std::string& disturbed = "",
    MakeStream make_stream = [] { return Stream{}; }) {
  Outcome out;
  std::mutex mutex;
  mega::run_threads(tensor_degree, [&](mega::ThreadComm& tensor) {
    Model<Spec, Stream> model(config, run, tensor, layers, make_stream());
    model.hooks.injector.target = disturbed;
    double loss = 0;
    for (; model.microbatch < 2; ++model.microbatch)
      loss += model.run(text, 2 + model.microbatch * run.micro_batch, Mode::train, 0.25F);
    model.reduce_gradients();
    model.gather_gradients(out.gradients, mutex);
    if (tensor.rank() == 0) out.loss = loss;
  });
  return out;
}

void check_same_bits(const Outcome& got, const Outcome& expected) {
  CHECK(got.loss == expected.loss);
  REQUIRE(got.gradients.size() == expected.gradients.size());
  for (const auto& gradient : expected.gradients) {
    CAPTURE(gradient.first);
    CHECK(got.gradients.at(gradient.first) == gradient.second);
  }
}

/// fp32 sums in another order: 1e-5 of each fused tensor's norm.
void check_close(const Outcome& got, const Outcome& expected) {
  CHECK(got.loss == doctest::Approx(expected.loss).epsilon(1e-5));
  REQUIRE(got.gradients.size() == expected.gradients.size());
  for (const auto& gradient : expected.gradients) {
    CAPTURE(gradient.first);
    CHECK(test::relative(got.gradients.at(gradient.first), gradient.second) < 1e-5);
  }
}

std::string refusal(const auto& call) {
  try {
    call();
  } catch (const mega::Error& error) {
    CHECK(error.code() == mega::ErrorCode::usage);
    return error.what();
  }
  return "";
}
bool contains(const std::string& all, const std::string& part) {
  return all.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE_TEMPLATE("transformer: gradients are the slopes of the loss, dropout included", Spec,
                   Gpt3, Llama3) {
  TransformerConfig config = micro_config<Spec>();
  for (const bool tied : {false, true}) {
    config.tied_head = tied;
    CAPTURE(tied);
    mega::run_threads(1, [&](mega::ThreadComm& tensor) {
      Model<Spec> model(config, micro_run, tensor, {3});
      model.run(text, 1, Mode::train);
      model.reduce_gradients();
      Tensors gradients;
      std::mutex mutex;
      model.gather_gradients(gradients, mutex);
      for (const mega::Parameter& p : model.parameters()) {
        if (!p.tied_to.empty()) continue;
        CAPTURE(p.name);
        const std::vector<float>& gradient = gradients.at(p.name);
        double norm = 0;
        for (const float g : gradient) norm += static_cast<double>(g) * g;
        norm = std::sqrt(norm);
        REQUIRE(norm > 0.01);
        // Along the gradient itself the slope is its norm. The step changes the sum of about ten
        // losses by 2e-2: rounding (1e-6) and curvature both stay below a percent of it.
        const double step = std::min(1e-2 / norm, 2e-3);
        std::vector<float>& value = model.value(p.name);
        const std::vector<float> before = value;
        double side[2] = {};
        for (const int sign : {0, 1}) {
          for (std::size_t i = 0; i < value.size(); ++i)
            value[i] =
                static_cast<float>(before[i] + (sign == 0 ? -step : step) * gradient[i] / norm);
          side[sign] = model.run(text, 1, Mode::train);
        }
        value = before;
        CHECK((side[1] - side[0]) / (2 * step) == doctest::Approx(norm).epsilon(0.01));
      }
    });
  }
}

TEST_CASE_TEMPLATE("transformer: recomputation, chunks and split backward change no bit", Spec,
                   Gpt3, Llama3) {
  const TransformerConfig config = micro_config<Spec>();
  for (const std::string disturbed : {"", "layers.1.mlp.activation", "layers.2.attention.output"}) {
    CAPTURE(disturbed);
    const Outcome expected = train<Spec>(config, micro_run, 1, {3}, disturbed);
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      CAPTURE(to_string(recompute));
      TransformerRun run = micro_run;
      run.recompute = recompute;
      check_same_bits(train<Spec>(config, run, 1, {3}, disturbed), expected);
      check_same_bits(train<Spec>(config, run, 1, {0, 1, 2}, disturbed), expected);
      check_same_bits(train<Spec>(config, run, 1, {1, 2, 0}, disturbed), expected);
      if (recompute == Recompute::full) continue;
      run.split_backward = true;
      check_same_bits(train<Spec>(config, run, 1, {2, 1}, disturbed), expected);
      check_same_bits(train<Spec>(config, run, 1, {0, 3}, disturbed), expected);
    }
  }
}

TEST_CASE_TEMPLATE("transformer: tensor and sequence parallelism give the gradients of one rank",
                   Spec, Gpt3, Llama3) {
  TransformerConfig config = micro_config<Spec>();
  const Outcome expected = train<Spec>(config, micro_run, 1, {3});
  check_close(train<Spec>(config, micro_run, 2, {3}), expected);
  TransformerRun run = micro_run;
  run.sequence_parallel = true;  // 7 of 14 rows: a sample each
  for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    run.recompute = recompute;
    check_close(train<Spec>(config, run, 2, {1, 2}), expected);
  }
  run.recompute = Recompute::selective;
  run.split_backward = true;
  check_close(train<Spec>(config, run, 2, {1, 2}), expected);
  if constexpr (Spec::position::has_table) {
    // Four ranks with three rows each: cuts inside and between samples, and the last shard of the
    // vocabulary holds 23 of 26 tokens.
    run = {.micro_batch = 2, .sequence = 6, .sequence_parallel = true, .loss_rows = 5};
    TransformerRun whole = run;
    whole.sequence_parallel = false;
    const Outcome one = train<Spec>(config, whole, 1, {3});
    check_close(train<Spec>(config, run, 4, {3}), one);
    check_close(train<Spec>(config, whole, 4, {3}), one);
    // Two ranks with one sample and a half each.
    run.micro_batch = whole.micro_batch = 3;
    run.sequence = whole.sequence = 4;
    check_close(train<Spec>(config, run, 2, {3}), train<Spec>(config, whole, 1, {3}));
  }
}

TEST_CASE("transformer: a vocabulary smaller than the tensor degree leaves ranks of padding only") {
  TransformerConfig config = micro_config<Gpt3>();
  config.vocab = 5;  // shards of 2, 2, 1 and 0
  const Text small(4, 7, 5);
  double expected = 0;
  for (const int degree : {1, 4}) {
    mega::run_threads(degree, [&](mega::ThreadComm& tensor) {
      Model<Gpt3> model(config, micro_run, tensor, {3});
      const double loss = model.run(small, 0, Mode::train);
      if (tensor.rank() != 0) return;
      if (degree == 1) expected = loss;
      CHECK(loss == doctest::Approx(expected).epsilon(1e-6));
      CHECK(loss > 0);
    });
  }
}

TEST_CASE("transformer: a stream that runs late gives the same bits") {
  const auto make_stream = [] { return mega::host::AsyncStream(3, 1, 20); };
  TransformerRun run = micro_run;
  run.recompute = Recompute::full;
  const TransformerConfig config = micro_config<Llama3>();
  check_same_bits(train<Llama3, mega::host::AsyncStream>(config, run, 2, {1, 2}, "", make_stream),
                  train<Llama3>(config, run, 2, {1, 2}));
}

TEST_CASE("transformer: evaluation draws no dropout and touches no gradient") {
  TransformerConfig config = micro_config<Gpt3>();
  mega::run_threads(2, [&](mega::ThreadComm& tensor) {
    Model<Gpt3> model(config, micro_run, tensor, {2, 1});
    const double trained = model.run(text, 0, Mode::train);
    model.clear_gradients();
    const double loss = model.run(text, 0, Mode::evaluate);
    CHECK(loss != trained);
    CHECK(loss == model.run(text, 0, Mode::evaluate));
    for (const mega::Parameter& p : model.parameters()) {
      for (const float g : model.gradient(p.name)) REQUIRE(g == 0.0F);
    }
    config.dropout = {};
    Model<Gpt3> plain(config, micro_run, tensor, {3});
    CHECK(plain.run(text, 0, Mode::train) == loss);
  });
}

TEST_CASE("transformer: logits are whole, unpadded, and those of the loss") {
  TransformerConfig config = micro_config<Llama3>();
  std::vector<float> expected;
  for (const bool divided : {false, true}) {
    for (const int degree : {1, 2}) {
      TransformerRun run = micro_run;
      run.sequence_parallel = divided;
      mega::run_threads(degree, [&](mega::ThreadComm& tensor) {
        Model<Llama3> model(config, run, tensor, {3});
        std::vector<float> out(14 * 101, NAN);
        const double loss = model.run(
            text, 0, Mode::evaluate, 1.0F, [&](auto& ctx, auto& stage, mega::Matrix<float> hidden) {
              stage.logits(ctx, hidden, mega::Matrix<float>(out.data(), 14, 101));
            });
        if (tensor.rank() != degree - 1) return;
        if (expected.empty()) expected = out;
        CHECK(test::error(out, expected) < 1e-5);
        double sum = 0;
        for (std::size_t r = 0; r < 14; ++r) {
          double total = 0;
          for (std::size_t c = 0; c < 101; ++c)
            total += std::exp(static_cast<double>(out[r * 101 + c]));
          if (text.targets[r] >= 0)
            sum += std::log(total) - out[r * 101 + static_cast<std::size_t>(text.targets[r])];
        }
        CHECK(loss == doctest::Approx(sum).epsilon(1e-6));
      });
    }
  }
}

TEST_CASE("transformer: the list of parameters does not depend on the number of chunks") {
  const auto names = [](const TransformerConfig& config, const std::vector<int>& layers) {
    std::string out;
    mega::run_threads(1, [&](mega::ThreadComm& tensor) {
      Model<Gpt3> model(config, micro_run, tensor, layers);
      for (const mega::Parameter& p : model.parameters()) {
        out += p.name + (p.decay ? " decays" : "") + (p.tied_to.empty() ? "" : " = " + p.tied_to);
        CHECK(p.decay == (p.shape.size() == 2));
        CHECK_FALSE(p.partial_over_tensor);
        out += "\n";
      }
    });
    return out;
  };
  const TransformerConfig config = micro_config<Gpt3>();
  const std::string whole = names(config, {3});
  CHECK(names(config, {1, 1, 1}) == whole);
  CHECK(names(config, {0, 2, 1, 0}) == whole);
  CHECK(contains(whole, "layers.2.attention.qkv.weight decays\nlayers.2.attention.qkv.bias\n"));
  CHECK(contains(whole, "head.weight decays = embedding.token.weight\n"));
}

TEST_CASE("transformer: sequence parallelism marks what each rank sees only its rows of") {
  TransformerRun run = micro_run;
  run.sequence_parallel = true;
  mega::run_threads(2, [&](mega::ThreadComm& tensor) {
    Model<Gpt3> model(micro_config<Gpt3>(), run, tensor, {3});
    for (const mega::Parameter& p : model.parameters()) {
      CAPTURE(p.name);
      CHECK(p.partial_over_tensor == p.shard.replicated());
    }
  });
}

TEST_CASE("transformer: the probe sees each named tensor once, whatever is recomputed") {
  for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    TransformerRun run = micro_run;
    run.recompute = recompute;
    mega::run_threads(1, [&](mega::ThreadComm& tensor) {
      Model<Llama3> model(micro_config<Llama3>(), run, tensor, {1, 2});
      std::map<std::string, int> seen;
      model.hooks.probe.seen = [&](std::string_view name, mega::Matrix<const float> values) {
        ++seen[std::string(name)];
        CHECK(values.rows() == 14);
      };
      model.run(text, 0, Mode::train);
      CHECK(seen.size() == 9);
      for (const auto& [name, count] : seen) CHECK(count == 1);
      CHECK(seen.count("layers.2.output") == 1);
    });
  }
}

TEST_CASE("transformer: recomputation saves memory") {
  mega::run_threads(1, [&](mega::ThreadComm& tensor) {
    std::vector<std::size_t> bytes;
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      TransformerRun run = micro_run;
      run.recompute = recompute;
      const mega::nn::Transformer<Llama3, mega::ThreadComm> stage(
          micro_config<Llama3>(), run, {0, 1}, mega::dpp::LayerRange{0, 3}, tensor);
      mega::Arena counting;
      (void)stage.make_saved(counting);
      bytes.push_back(counting.used());
    }
    // Per layer and row, of 16 + 32 + 16 + 16 + 16 + 40 + 20 + 16 floats: 16 + 16 + 20 less, then
    // the last 16 alone.
    CHECK(bytes[1] * 10 < bytes[0] * 8);
    CHECK(bytes[2] * 10 < bytes[0] * 2);
  });
}

TEST_CASE("transformer: what cannot be divided is refused with the numbers") {
  const TransformerConfig good = micro_config<Llama3>();
  const auto sentence_for = [&](auto change, int tensor_degree = 2, int stages = 1) {
    TransformerConfig config = good;
    TransformerRun run = micro_run;
    change(config, run);
    return refusal([&] { mega::nn::validate<Llama3>(config, run, tensor_degree, stages); });
  };
  CHECK(sentence_for([](auto&, auto&) {}) == "");
  CHECK(contains(sentence_for([](auto& c, auto&) { c.heads = c.kv_heads = 9; }),
                 "heads 9 does not divide over tensor degree 2; nearest that does: 1 or 3"));
  CHECK(contains(sentence_for([](auto&, auto&) {}, 4),
                 "kv_heads 2 does not divide over tensor degree 4; nearest that does: 2"));
  CHECK(contains(sentence_for([](auto& c, auto&) { c.ffn = 21; }), "ffn 21"));
  CHECK(contains(sentence_for([](auto& c, auto&) { c.kv_heads = 3; }),
                 "heads 4 is not a multiple of kv_heads 3; nearest that divides it: 2 or 4"));
  CHECK(contains(sentence_for([](auto& c, auto&) { c.head_dim = 5; }), "head_dim 5 is odd"));
  CHECK(contains(sentence_for([](auto& c, auto&) { c.layers = 0; }), "layers is 0"));
  CHECK(contains(sentence_for([](auto& c, auto&) { c.dropout.residual = 1; }),
                 "residual dropout is 1"));
  CHECK(contains(sentence_for([](auto&, auto& r) { r.micro_batch = 0; }), "micro_batch is 0"));
  CHECK(contains(sentence_for([](auto&, auto&) {}, 1, 6), "3 layers cannot be dealt to 6 stages"));
  CHECK(contains(sentence_for([](auto&, auto& r) {
                   r.micro_batch = 1;
                   r.sequence_parallel = true;
                 }),
                 "rows (micro_batch * sequence) 7 does not divide"));
  CHECK(contains(sentence_for([](auto&, auto& r) {
                   r.recompute = Recompute::full;
                   r.split_backward = true;
                 }),
                 "fused backward"));
  TransformerRun long_run = micro_run;
  long_run.sequence = 10;
  CHECK(sentence_for([](auto&, auto& r) { r.sequence = 10; }) == "");
  CHECK(contains(refusal([&] { mega::nn::validate<Gpt3>(micro_config<Gpt3>(), long_run, 1, 1); }),
                 "sequence 10 is longer than the 9 learned positions"));
  mega::run_threads(1, [&](mega::ThreadComm& tensor) {
    using Stage = mega::nn::Transformer<Llama3, mega::ThreadComm>;
    CHECK(contains(refusal([&] {
                     Stage(good, micro_run, {1, 3}, mega::dpp::LayerRange{1, 1}, tensor);
                   }),
                   "stage 1 of 3 cannot hold layers [1, 1)"));
    Stage fused(good, micro_run, {0, 1}, mega::dpp::LayerRange{0, 3}, tensor);
    Model<Llama3> model(good, micro_run, tensor, {3});
    mega::host::Stream stream;
    mega::Arena arena;
    test::TestHooks hooks;
    Model<Llama3>::Ctx ctx{stream, arena, hooks, 0, 0, 0, 0, 0, Mode::train, nullptr, nullptr};
    auto saved = fused.make_saved(arena);
    CHECK(contains(refusal([&] { fused.backward_input(ctx, {}, {}, saved); }), "split_backward"));
    CHECK(contains(refusal([&] { fused.backward_weight(ctx, saved); }), "split_backward"));
  });
}
