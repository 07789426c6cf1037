// Every operation of the Transformer and the trainer but attention and products: GPU against host
// twin, on odd shapes.
#include "twins.cuh"
#include <mega/device.cuh>
#include <mega/nn/copy_columns.hpp>
#include <mega/nn/cross_entropy.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/embedding.hpp>
#include <mega/nn/loss_sum.hpp>
#include <mega/nn/norm.hpp>
#include <mega/nn/rope.hpp>
#include <mega/nn/rope_frequencies.hpp>
#include <mega/optim/adamw.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

// As generic code of the library calls them: the GPU's overloads come by the type of the stream.
using namespace mega::nn;
using namespace mega::optim;
using mega::RandomKey;
using mega::RandomUse;
using namespace mega_test;

namespace {

using In = Matrix<const float>;
using InVector = Vector<const float>;

// Elementary functions of CUDA are within 2 units of the last place, and the compiler contracts
// products and sums; a handful of roundings of 6e-8.
constexpr double elementwise = 1e-6;
// Sums of up to 4000 numbers in another order.
constexpr double sums = 4e-6;

struct Shape {
  Index rows, cols;
};
const std::vector<Shape> shapes = {{1, 1},     {1, 7},      {3, 33},  {37, 64},
                                   {129, 257}, {300, 1030}, {2, 4097}};

}  // namespace

TEST_CASE("gpu: norms") {
  for (const auto [rows, cols] : shapes) {
    CAPTURE(rows);
    CAPTURE(cols);
    // The gradient of a single column is what epsilon leaves of it.
    const float epsilon = cols == 1 ? 1.0F : 1e-5F;
    Twins t(static_cast<std::uint64_t>(rows * 10000 + cols));
    auto& x = t.random(rows * cols, -2, 3);
    auto& dout = t.random(rows * cols);
    auto& weight = t.random(cols, 0.5, 1.5);
    auto& bias = t.random(cols);
    auto& mean = t.poisoned(rows);
    auto& rstd = t.poisoned(rows);
    auto& rms = t.poisoned(rows);
    auto& out = t.poisoned(rows * cols);
    auto& rms_out = t.poisoned(rows * cols);
    auto& dx = t.poisoned(rows * cols);
    auto& rms_dx = t.random(rows * cols);
    auto& dweight = t.random(cols);
    auto& dbias = t.random(cols);
    auto& rms_dweight = t.random(cols);
    t.run([&](auto& s, auto at) {
      const In in = x.matrix(at, rows), dy = dout.matrix(at, rows);
      layer_norm_forward(s, out.matrix(at, rows), mean(at), rstd(at), in, InVector(weight(at)),
                         InVector(bias(at)), epsilon);
      layer_norm_backward_input(s, dx.matrix(at, rows), dy, in, InVector(weight(at)),
                                InVector(mean(at)), InVector(rstd(at)));
      layer_norm_backward_weight(s, dweight(at), dbias(at), dy, in, InVector(mean(at)),
                                 InVector(rstd(at)));
      rms_norm_forward(s, rms_out.matrix(at, rows), rms(at), in, InVector(weight(at)), epsilon);
      // In place of its gradient, as the residual block calls it.
      rms_norm_backward_input(s, rms_dx.matrix(at, rows), In(rms_dx.matrix(at, rows)), in,
                              InVector(weight(at)), InVector(rms(at)));
      rms_norm_backward_weight(s, rms_dweight(at), dy, in, InVector(rms(at)));
    });
    check_close("layer_norm mean", mean, sums);
    check_close("layer_norm rstd", rstd, sums);
    check_close("layer_norm_forward", out, sums);
    check_close("layer_norm_backward_input", dx, sums);
    check_close("layer_norm_backward_weight", dweight, sums);
    check_close("layer_norm_backward_weight bias", dbias, sums);
    check_close("rms_norm rstd", rms, sums);
    check_close("rms_norm_forward", rms_out, sums);
    check_close("rms_norm_backward_input", rms_dx, sums);
    check_close("rms_norm_backward_weight", rms_dweight, sums);
  }
}

TEST_CASE("gpu: single elements and the bias") {
  for (const auto [rows, cols] : shapes) {
    CAPTURE(rows);
    CAPTURE(cols);
    Twins t(static_cast<std::uint64_t>(rows * 10000 + cols + 1));
    auto& a = t.random(rows * cols, -8, 8);
    auto& b = t.random(rows * cols);
    auto& wide = t.random(2 * rows * cols, -8, 8);
    auto& bias = t.random(cols);
    auto& filled = t.poisoned(rows * cols);
    auto& added = t.poisoned(rows * cols);
    auto& scaled = t.poisoned(rows * cols);
    auto& biased = t.poisoned(rows * cols);
    auto& dbias = t.random(cols);
    auto& gelu = t.poisoned(rows * cols);
    auto& dgelu = t.poisoned(rows * cols);
    auto& swiglu = t.poisoned(rows * cols);
    auto& dswiglu = t.poisoned(2 * rows * cols);
    t.run([&](auto& s, auto at) {
      const In x = a.matrix(at, rows), y = b.matrix(at, rows), xx = wide.matrix(at, rows);
      fill(s, filled.matrix(at, rows), 0.25F);
      add(s, added.matrix(at, rows), x, y);
      scale(s, scaled.matrix(at, rows), x, 1.7F);
      bias_add(s, biased.matrix(at, rows), x, InVector(bias(at)));
      bias_gradient(s, dbias(at), y);
      gelu_tanh_forward(s, gelu.matrix(at, rows), x);
      gelu_tanh_backward(s, dgelu.matrix(at, rows), y, x);
      swiglu_forward(s, swiglu.matrix(at, rows), xx);
      swiglu_backward(s, dswiglu.matrix(at, rows), y, xx);
    });
    check_equal("fill", filled);
    check_equal("add", added);
    check_equal("scale", scaled);
    check_equal("bias_add", biased);
    check_close("bias_gradient", dbias, sums);
    check_close("gelu_tanh_forward", gelu, elementwise);
    check_close("gelu_tanh_backward", dgelu, elementwise);
    check_close("swiglu_forward", swiglu, elementwise);
    check_close("swiglu_backward", dswiglu, elementwise);
  }
}

TEST_CASE("gpu: column sums are right where one block does not see all rows") {
  const Index rows = 4000, cols = 45;
  Twins t(11);
  auto& dout = t.random(rows * cols, 0, 1);
  auto& dbias = t.random(cols);
  t.run([&](auto& s, auto at) { bias_gradient(s, dbias(at), In(dout.matrix(at, rows))); });
  check_close("bias_gradient", dbias, sums);
}

TEST_CASE("gpu: dropout keeps the elements that the host keeps") {
  const RandomKey key{5, 3, 2, RandomUse::mlp_dropout};
  for (const auto [rows, cols] : shapes) {
    // Rows that begin inside of a Philox block, and a shard of columns.
    for (const GlobalBlock block : {GlobalBlock{0, cols, 0}, GlobalBlock{5, cols + 6, 3}}) {
      for (const float probability : {0.0F, 0.3F, 0.95F}) {
        CAPTURE(rows);
        CAPTURE(cols);
        Twins t(17);
        auto& x = t.random(rows * cols);
        auto& out = t.poisoned(rows * cols);
        auto& inplace = t.random(rows * cols);
        t.run([&](auto& s, auto at) {
          dropout_forward(s, out.matrix(at, rows), In(x.matrix(at, rows)), probability, key, block);
          dropout_backward(s, inplace.matrix(at, rows), In(inplace.matrix(at, rows)), probability,
                           key, block);
        });
        check_equal("dropout_forward", out);
        check_equal("dropout_backward", inplace);
      }
    }
  }
}

TEST_CASE("gpu: embeddings") {
  struct Case {
    Index tokens, vocab, cols, first_row;
  };
  // Tokens outside of the shard on both sides, a text longer than a block, one token only.
  for (const auto [count, vocab, cols, first_row] :
       {Case{1, 1, 1, 0}, Case{37, 11, 33, 4}, Case{1000, 5, 300, 0}, Case{777, 5000, 65, 100}}) {
    CAPTURE(count);
    Twins t(static_cast<std::uint64_t>(count));
    auto& tokens = t.integers(count, 0, static_cast<int>(vocab + 2 * first_row));
    auto& table = t.random(vocab * cols);
    auto& out = t.poisoned(count * cols);
    auto& dout = t.random(count * cols);
    auto& dtable = t.random(vocab * cols);
    t.run([&](auto& s, auto at) {
      const Vector<const std::int32_t> ids = tokens(at);
      embedding_forward(s, out.matrix(at, count), ids, In(table.matrix(at, vocab)), first_row);
      embedding_backward(s, dtable.matrix(at, vocab), In(dout.matrix(at, count)), ids, first_row);
    });
    check_equal("embedding_forward", out);
    check_equal("embedding_backward", dtable);
  }
  struct Positions {
    Index samples, time, first;
  };
  for (const auto [samples, time, first] : {Positions{1, 1, 0}, Positions{3, 17, 5}}) {
    const Index rows = samples * time, cols = 35, positions = 30, first_position = first;
    Twins t(23);
    auto& x = t.random(rows * cols);
    auto& table = t.random(positions * cols);
    auto& out = t.poisoned(rows * cols);
    auto& dtable = t.random(positions * cols);
    t.run([&](auto& s, auto at) {
      position_embedding_forward(s, out.matrix(at, rows), In(x.matrix(at, rows)),
                                 In(table.matrix(at, positions)), time, first_position);
      position_embedding_backward(s, dtable.matrix(at, positions), In(x.matrix(at, rows)), time,
                                  first_position);
    });
    check_equal("position_embedding_forward", out);
    check_equal("position_embedding_backward", dtable);
  }
}

TEST_CASE("gpu: rotary embedding") {
  for (const AttentionShape shape :
       {AttentionShape{1, 1, 1, 1, 2}, AttentionShape{2, 9, 4, 2, 8},
        AttentionShape{1, 70, 3, 1, 128}, AttentionShape{1, 3, 1, 1, 600}}) {
    Twins t(29);
    auto& frequencies = t.poisoned(shape.head_dim / 2);
    auto& qkv = t.random(shape.rows() * shape.width());
    auto& dqkv = t.random(shape.rows() * shape.width());
    const RopeScaling scaling{RopeScalingKind::llama3, 8.0, 1.0, 4.0, 64};
    t.run([&](auto& s, auto at) {
      rope_frequencies(s, frequencies(at), 500000.0, scaling);
      rope_forward(s, qkv.matrix(at, shape.rows()), InVector(frequencies(at)), shape, 1000);
      rope_backward(s, dqkv.matrix(at, shape.rows()), InVector(frequencies(at)), shape, 0);
    });
    check_equal("rope_frequencies", frequencies);
    check_close("rope_forward", qkv, elementwise);
    check_close("rope_backward", dqkv, elementwise);
  }
}

TEST_CASE("gpu: cross-entropy") {
  struct Case {
    Index rows, cols, valid, first;
  };
  for (const auto [rows, cols, valid, first] :
       {Case{1, 1, 1, 0}, Case{5, 13, 10, 20}, Case{48, 1031, 1031, 0}, Case{300, 70, 65, 3}}) {
    CAPTURE(rows);
    Twins t(static_cast<std::uint64_t>(rows + cols));
    auto& logits = t.random(rows * cols, -20, 20);
    // Some left out, some of other shards.
    auto& targets = t.integers(rows, -2, static_cast<int>(first + valid + 3));
    auto& row_max = t.poisoned(rows);
    auto& sum_exp = t.poisoned(rows);
    auto& target_logit = t.poisoned(rows);
    auto& row_loss = t.poisoned(rows);
    auto& loss = t.poisoned<double>(1);
    auto& gradient = t.poisoned(rows * cols);
    auto& factor = t.random(1, 0.1F, 1.0F);
    const VocabShard shard{first, valid};
    t.run([&](auto& s, auto at) {
      const In x = logits.matrix(at, rows);
      const Vector<const std::int32_t> ids = targets(at);
      cross_entropy_row_max(s, row_max(at), x, shard);
      cross_entropy_sum_exp(s, sum_exp(at), target_logit(at), x, ids, InVector(row_max(at)), shard);
      cross_entropy_loss(s, loss(at), row_loss(at), ids, InVector(row_max(at)),
                         InVector(sum_exp(at)), InVector(target_logit(at)));
      cross_entropy_backward(s, gradient.matrix(at, rows), x, ids, InVector(row_max(at)),
                             InVector(sum_exp(at)), shard, 0.7F);
      // In place, with the scale in memory.
      cross_entropy_backward(s, logits.matrix(at, rows), x, ids, InVector(row_max(at)),
                             InVector(sum_exp(at)), shard, InVector(factor(at)));
    });
    check_equal("cross_entropy_row_max", row_max);
    check_close("cross_entropy_sum_exp", sum_exp, sums);
    check_equal("cross_entropy target logit", target_logit);
    check_close("cross_entropy_loss of rows", row_loss, elementwise);
    check_close("cross_entropy_loss", loss, 1e-6);
    check_close("cross_entropy_backward", gradient, sums);
    check_close("cross_entropy_backward in place", logits, sums);
  }
}

TEST_CASE("gpu: a shard of padding only has no maximum and no gradient") {
  Twins t(3);
  auto& logits = t.random(4 * 9);
  auto& targets = t.integers(4, 0, 3);
  auto& row_max = t.poisoned(4);
  auto& ones = t.random(4, 1.0F, 1.5F);
  auto& gradient = t.poisoned(4 * 9);
  t.run([&](auto& s, auto at) {
    cross_entropy_row_max(s, row_max(at), In(logits.matrix(at, 4)), VocabShard{100, 0});
    cross_entropy_backward(s, gradient.matrix(at, 4), In(logits.matrix(at, 4)),
                           Vector<const std::int32_t>(targets(at)), InVector(ones(at)),
                           InVector(ones(at)), VocabShard{100, 0}, 1.0F);
  });
  for (const float value : row_max.result()) CHECK(value == -INFINITY);
  for (const float value : gradient.result()) CHECK(value == 0.0F);
}

TEST_CASE("gpu: loss parts and columns") {
  Twins t(31);
  auto& parts = t.given(std::vector<double>{1e16, 1.0, -1e16, 3.5});  // order matters
  auto& total = t.given(std::vector<double>{2.0});
  auto& in = t.random(7 * 5);
  auto& out = t.random(7 * 12);
  t.run([&](auto& s, auto at) {
    add_loss_parts(s, total(at), Vector<const double>(parts(at)));
    copy_columns(s, out.matrix(at, 7), 6, In(in.matrix(at, 7)), 4);
    copy_columns(s, out.matrix(at, 7), 0, In(in.matrix(at, 7)), 0);
  });
  check_equal("add_loss_parts", total);
  check_equal("copy_columns", out);
}

TEST_CASE("gpu: optimizer") {
  for (const Index size : {Index{1}, Index{1000}, Index{100'003}}) {
    Twins t(static_cast<std::uint64_t>(size));
    auto& values = t.random(size);
    auto& first = t.random(size, -0.1F, 0.1F);
    auto& second = t.random(size, 0.0F, 0.01F);
    auto& gradient = t.random(size);
    auto& inout = t.random(size);
    auto& squares = t.given(std::vector<double>{0.5, 0.25});
    auto& control = t.given(std::vector<UpdateControl>(1));
    // Not in order, and a gap that no segment owns.
    auto& segments = t.given(
        std::vector<Segment>{{size / 2, size - size / 7, false}, {0, size / 2 - size / 9, true}});
    auto& inputs = t.given(std::vector<StepInputs>{{0, 0, 1e-2F}, {0, 1, 1e-2F}});
    auto& count = t.given(std::vector<std::int64_t>{-1});
    auto& one_over = t.poisoned(1);
    t.run([&](auto& s, auto at) {
      accumulate(s, inout(at), InVector(gradient(at)));
      assign(s, count(at), 7);
      reciprocal(s, one_over(at), Vector<const std::int64_t>(count(at)));
      add_sum_of_squares(s, squares(at).slice(1, 1), InVector(gradient(at)));
      clip_by_norm(s, control(at), Vector<const double>(squares(at)), 1.0);
      for (const Index step : {0, 1}) {
        correct_bias(s, control(at), Vector<const StepInputs>(inputs(at).slice(step, 1)),
                     AdamWOptions{});
        adamw_update(s, values(at), first(at), second(at), InVector(gradient(at)),
                     Vector<const Segment>(segments(at)), Vector<const UpdateControl>(control(at)),
                     AdamWOptions{});
      }
    });
    check_equal("accumulate", inout);
    check_equal("assign", count);
    check_equal("reciprocal", one_over);
    // fp64 sums of 1e5 numbers in another order.
    check_close("add_sum_of_squares", squares, 1e-12);
    check_close("adamw_update", values, elementwise);
    check_close("adamw_update first moment", first, elementwise);
    check_close("adamw_update second moment", second, elementwise);
    const double norm = std::sqrt(squares.result()[0] + squares.result()[1]);
    CHECK(control.result()[0].norm == doctest::Approx(norm).epsilon(1e-12));
    CHECK(control.result()[0].gradient_scale ==
          doctest::Approx(std::fmin(1.0, 1.0 / (norm + 1e-6))).epsilon(1e-6));
    CHECK(control.result()[0].skip == 0);
  }
}

TEST_CASE("gpu: a norm that is not finite changes no parameter") {
  Twins t(37);
  auto& values = t.random(100);
  auto& first = t.random(100);
  auto& second = t.random(100);
  auto& gradient = t.random(100);
  auto& squares = t.given(std::vector<double>{NAN, 1.0});
  auto& control = t.given(std::vector<UpdateControl>(1));
  auto& segments = t.given(std::vector<Segment>{{0, 100, true}});
  auto& count = t.given(std::vector<std::int64_t>{0});
  auto& one_over = t.poisoned(1);
  const std::vector<float> before(values(OnHost{}).data(), values(OnHost{}).data() + 100);
  t.run([&](auto& s, auto at) {
    reciprocal(s, one_over(at), Vector<const std::int64_t>(count(at)));
    clip_by_norm(s, control(at), Vector<const double>(squares(at)), 1.0);
    adamw_update(s, values(at), first(at), second(at), InVector(gradient(at)),
                 Vector<const Segment>(segments(at)), Vector<const UpdateControl>(control(at)),
                 AdamWOptions{});
  });
  CHECK(one_over.result()[0] == 0.0F);
  CHECK(control.result()[0].skip == 1);
  CHECK(values.result() == before);
}

TEST_CASE("gpu: nothing to do is done") {
  Twins t(1);
  auto& nothing = t.random(0);
  auto& bias = t.random(5);
  t.run([&](auto& s, auto at) {
    const Matrix<float> none(nothing(at).data(), 0, 5);
    add(s, none, In(none), In(none));
    bias_add(s, none, In(none), InVector(bias(at)));
    bias_gradient(s, bias(at), In(none));
    gelu_tanh_forward(s, none, In(none));
    dropout_forward(s, none, In(none), 0.5F, RandomKey{}, GlobalBlock{0, 5, 0});
  });
  check_equal("bias_gradient of no rows", bias);
}

TEST_CASE("gpu: a wrong shape is refused before anything is queued") {
  mega::cuda::Stream stream;
  float value = 0;
  const Matrix<float> two(&value, 1, 2), three(&value, 1, 3);
  CHECK_THROWS_WITH_AS(add(stream, two, In(three), In(three)),
                       "add: out is 1 x 2, it must be 1 x 3", mega::Error);
  CHECK_THROWS_AS(dropout_forward(stream, two, In(two), 1.0F, RandomKey{}, GlobalBlock{0, 2, 0}),
                  mega::Error);
}
