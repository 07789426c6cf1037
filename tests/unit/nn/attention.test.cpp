/// @file  Attention against a naive double-precision one, its gradients by central differences.
#include "support.hpp"
#include <mega/core/error.hpp>
#include <mega/nn/attention.hpp>

#include <doctest/doctest.h>

using namespace mega;
using test::at;
using test::Doubles;
using test::Floats;

namespace {

struct Reference {
  Doubles out, lse;
};

Reference reference(const Doubles& qkv, const nn::AttentionShape& s,
                    const nn::AttentionDropout& dropout) {
  Reference y{Doubles(at(s.rows() * s.query_heads * s.head_dim)),
              Doubles(at(s.batch * s.query_heads * s.time))};
  const auto x = [&](Index b, Index t, Index head, Index c) {
    return qkv[at(((b * s.time + t) * (s.query_heads + 2 * s.kv_heads) + head) * s.head_dim + c)];
  };
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.query_heads; ++h)
      for (Index q = 0; q < s.time; ++q) {
        const Index kv = h * s.kv_heads / s.query_heads;
        Doubles p;
        double sum = 0.0;
        for (Index k = 0; k <= q; ++k) {
          double score = 0.0;
          for (Index c = 0; c < s.head_dim; ++c)
            score += x(b, q, h, c) * x(b, k, s.query_heads + kv, c);
          p.push_back(std::exp(score / std::sqrt(static_cast<double>(s.head_dim))));
          sum += p.back();
        }
        y.lse[at((b * s.query_heads + h) * s.time + q)] = std::log(sum);
        for (Index k = 0; k <= q; ++k) {
          double factor = 1.0;
          if (dropout.probability > 0.0f) {
            const Index sample = dropout.first_sample + b, head = dropout.first_head + h;
            const Index element =
                ((sample * dropout.global_heads + head) * s.time + q) * s.time + k;
            factor = dropout.key.read().uniform(element) < dropout.probability
                         ? 0.0
                         : 1.0 / (1.0 - static_cast<double>(dropout.probability));
          }
          for (Index c = 0; c < s.head_dim; ++c)
            y.out[at(((b * s.time + q) * s.query_heads + h) * s.head_dim + c)] +=
                p[at(k)] / sum * factor * x(b, k, s.query_heads + s.kv_heads + kv, c);
        }
      }
  return y;
}

struct Result {
  Floats out, lse, dqkv;
};

Result run(const Floats& qkv, const Floats& dout, const nn::AttentionShape& s,
           const nn::AttentionDropout& dropout) {
  host::Stream stream;
  const Index out_width = s.query_heads * s.head_dim;
  Result y{Floats(dout.size()), Floats(at(s.batch * s.query_heads * s.time)),
           Floats(qkv.size(), NAN)};
  const View<float, 3> lse(y.lse.data(), s.batch, s.query_heads, s.time);
  const auto x = test::matrix(qkv, s.rows(), s.width());
  nn::attention_forward(stream, test::matrix(y.out, s.rows(), out_width), lse, x, s, dropout);
  nn::attention_backward(stream, test::matrix(y.dqkv, s.rows(), s.width()),
                         test::matrix(dout, s.rows(), out_width), x,
                         test::matrix(y.out, s.rows(), out_width), lse, s, dropout);
  return y;
}

}  // namespace

TEST_CASE("nn attention: output, log-sum-exp and gradients against double precision") {
  const nn::AttentionShape shapes[] = {{1, 1, 1, 1, 8},  {2, 1, 8, 2, 16}, {1, 5, 8, 4, 8},
                                       {2, 3, 8, 2, 16}, {1, 64, 2, 1, 8}, {1, 65, 2, 2, 16},
                                       {1, 131, 4, 2, 3}};
  for (const auto& s : shapes)
    for (const float probability : {0.0f, 0.3f}) {
      const nn::AttentionDropout dropout{
          probability, {.seed = 4, .use = RandomUse::attention_dropout}, 3, 1, s.query_heads + 2};
      const Floats qkv = test::random_floats(s.rows() * s.width(), 1, 2.0f);
      const Floats dout = test::random_floats(s.rows() * s.query_heads * s.head_dim, 2);
      const Result y = run(qkv, dout, s, dropout);
      const Reference want = reference(test::widen(qkv), s, dropout);
      CAPTURE(s.time);
      CAPTURE(s.head_dim);
      CAPTURE(probability);
      // Scores of size up to 16 err by 16 * 2^-23, and so do probabilities, relatively.
      CHECK(test::error(y.out, want.out) < 4e-6);
      CHECK(test::error(y.lse, want.lse) < 2e-6);
      std::vector<Index> elements = test::all_elements(s.rows() * s.width());
      if (s.time > 5) {  // a seeded sample of elements, the reference is slow
        const RandomKey key{.seed = 8, .use = RandomUse::test};
        const auto count = static_cast<std::uint32_t>(elements.size());
        elements.clear();
        for (Index i = 0; i < 48; ++i) elements.push_back(key.bits(i) % count);
      }
      const Doubles gradient = test::differences(
          [&](const Doubles& p) { return test::inner(dout, reference(p, s, dropout).out); },
          test::widen(qkv), elements);
      CHECK(test::error(test::pick(y.dqkv, elements), gradient) < 2e-5);
      CHECK(test::error(y.dqkv, y.dqkv) == 0.0);  // every element was written
    }
}

TEST_CASE("nn attention: scores of 1e4 neither overflow nor give NaN") {
  const nn::AttentionShape s{1, 70, 1, 1, 8};
  Floats qkv = test::random_floats(s.rows() * s.width(), 1);
  for (Index t = 0; t < s.time; ++t)
    for (Index c = 0; c < 16; ++c) qkv[at(t * s.width() + c)] *= 60.0f;
  const Floats dout = test::random_floats(s.rows() * s.head_dim, 2);
  const Result y = run(qkv, dout, s, {});
  for (const float value : y.out) CHECK(std::abs(value) <= 1.0f);  // a mean of values within 1
  for (const float value : y.dqkv) CHECK(std::isfinite(value));
}

TEST_CASE("nn attention: later tokens and other samples change no bit of a row") {
  constexpr Index hq = 4, hkv = 2, dim = 8, time = 150, width = (hq + 2 * hkv) * dim;
  const Floats qkv = test::random_floats(2 * time * width, 1);
  const Floats dout = test::random_floats(2 * time * hq * dim, 2);
  const Result whole = run(qkv, dout, {2, time, hq, hkv, dim}, {});
  for (const Index shorter : {1, 63, 64, 100}) {
    const auto head = [](const Floats& x, Index count) {
      return Floats(x.begin(), x.begin() + count);
    };
    const Result cut = run(head(qkv, shorter * width), head(dout, shorter * hq * dim),
                           {1, shorter, hq, hkv, dim}, {});
    CHECK(cut.out == head(whole.out, shorter * hq * dim));
  }
  const Result second =
      run(Floats(qkv.begin() + time * width, qkv.end()),
          Floats(dout.begin() + time * hq * dim, dout.end()), {1, time, hq, hkv, dim}, {});
  CHECK(second.out == Floats(whole.out.begin() + time * hq * dim, whole.out.end()));
  CHECK(second.dqkv == Floats(whole.dqkv.begin() + time * width, whole.dqkv.end()));
}

TEST_CASE("nn attention: dropout of a shard of heads equals the whole") {
  constexpr Index time = 9, dim = 8;
  const nn::AttentionShape whole{1, time, 4, 4, dim}, half{1, time, 2, 2, dim};
  const nn::AttentionDropout all{0.5f, {.seed = 3, .use = RandomUse::attention_dropout}, 0, 0, 4};
  nn::AttentionDropout upper = all;
  upper.first_head = 2;
  const Floats qkv = test::random_floats(time * whole.width(), 1);
  Floats shard;
  for (Index t = 0; t < time; ++t)
    for (Index part = 0; part < 3; ++part)  // heads 2 and 3 of queries, keys and values
      for (Index c = 0; c < 2 * dim; ++c)
        shard.push_back(qkv[at(t * whole.width() + (part * 4 + 2) * dim + c)]);
  const Result a = run(qkv, Floats(at(time * 4 * dim)), whole, all);
  const Result b = run(shard, Floats(at(time * 2 * dim)), half, upper);
  for (Index t = 0; t < time; ++t)
    for (Index c = 0; c < 2 * dim; ++c)
      CHECK(b.out[at(t * 2 * dim + c)] == a.out[at(t * 4 * dim + 2 * dim + c)]);
}

TEST_CASE("nn attention: impossible shapes are refused") {
  host::Stream s;
  Floats x(64);
  const View<float, 3> lse(x.data(), 1, 3, 1);
  CHECK_THROWS_WITH_AS(nn::attention_forward(s, test::matrix(x, 1, 12), lse, test::matrix(x, 1, 28),
                                             {1, 1, 3, 2, 4}),
                       "attention_forward: 3 query heads are not a multiple of 2 kv heads", Error);
  CHECK_THROWS_AS(nn::attention_forward(s, test::matrix(x, 1, 12), lse, test::matrix(x, 1, 20),
                                        {1, 1, 3, 1, 4}, {.probability = 0.5f, .global_heads = 2}),
                  Error);
}
