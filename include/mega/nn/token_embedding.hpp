/// @file  The entry of a Transformer: token embedding, learned positions where the specification
/// has them, dropout.
#pragma once
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/embedding.hpp>
#include <mega/nn/tensor_parallel.hpp>
#include <mega/nn/transformer_config.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace mega::inline v0::nn {

/// The parameter that a tied head shares.
inline constexpr std::string_view token_embedding_name = "embedding.token.weight";

/// Rows of the table are divided between the tensor ranks; out and dout are [own rows, hidden].
template <class Spec, class T>
class TokenEmbedding {
  using Position = typename Spec::position;

 public:
  static constexpr std::string_view token_name = token_embedding_name;
  static constexpr std::string_view position_name = "embedding.position.weight";

  TokenEmbedding(const TransformerConfig& config, const TransformerRun& run, int tensor_rank,
                 int tensor_degree) noexcept
      : range_(VocabRange::of_rank(config.vocab, tensor_rank, tensor_degree)),
        hidden_(config.hidden),
        positions_(config.max_positions),
        sequence_(run.sequence),
        dropout_(config.dropout.embedding) {}

  template <class Self, class Visit>
  static void for_each_parameter(Self& self, const TransformerConfig& config, bool partial,
                                 const Visit& visit) {
    const Init normal{Init::Kind::normal, config.init_deviation};
    visit(vocab_parallel_table(std::string(token_name), config.vocab, config.hidden, normal),
          self.tokens_);
    if constexpr (Position::has_table) {
      visit(Parameter{.name = std::string(position_name),
                      .shape = {config.max_positions, config.hidden},
                      .init = normal,
                      .partial_over_tensor = partial},
            self.table_);
    }
  }

  /// @param whole  [rows, hidden], overwritten
  template <class Ctx, class Region>
  void forward(Ctx& ctx, const Region& region, Matrix<T> out, Matrix<const std::int32_t> tokens,
               Matrix<T> whole) const {
    const auto span = ctx.span("embedding");
    embedding_forward(ctx.stream, whole, tokens.flat(), token_table(tokens_.value), range_.first);
    const Matrix<T> sum = region.reduce(ctx.stream, whole);
    if constexpr (Position::has_table) {
      for_each_run(region, [&](Index row, Index rows, Index time, Index first_position) {
        const Matrix<T> part = sum.slice(row, rows);
        position_embedding_forward(ctx.stream, part, part, position_table(table_.value), time,
                                   first_position);
      });
    }
    dropout_forward(ctx.stream, out, sum, probability(ctx), random(ctx), place(ctx, region));
  }

  /// Adds to the gradients of the tables. @param dout  overwritten  @param whole  as in forward()
  template <class Ctx, class Region>
  void backward(Ctx& ctx, const Region& region, Matrix<T> dout, Matrix<const std::int32_t> tokens,
                Matrix<T> whole) const {
    const auto span = ctx.span("embedding");
    dropout_backward(ctx.stream, dout, dout, probability(ctx), random(ctx), place(ctx, region));
    if constexpr (Position::has_table) {
      for_each_run(region, [&](Index row, Index rows, Index time, Index first_position) {
        position_embedding_backward(ctx.stream, position_table(table_.gradient),
                                    dout.slice(row, rows), time, first_position);
      });
    }
    embedding_backward(ctx.stream, token_table(tokens_.gradient),
                       region.gather(ctx.stream, whole, dout), tokens.flat(), range_.first);
  }

 private:
  template <class U>
  [[nodiscard]] Matrix<U> token_table(Vector<U> values) const noexcept {
    return {values.data(), range_.padded, hidden_};
  }
  template <class U>
  [[nodiscard]] Matrix<U> position_table(Vector<U> values) const noexcept {
    return {values.data(), positions_, hidden_};
  }

  /// Cuts the own rows where a sample is cut, since the operations take rows of whole periods:
  /// f(first row, rows, period, position of the first row).
  template <class Region, class F>
  void for_each_run(const Region& region, const F& f) const {
    const Index begin = region.first_row(), end = begin + region.own_rows();
    for (Index row = begin; row < end;) {
      const Index position = row % sequence_;
      const Index whole_samples = (end - row) / sequence_ * sequence_;
      const bool aligned = position == 0 && whole_samples > 0;
      const Index rows = aligned ? whole_samples : std::min(end - row, sequence_ - position);
      f(row - begin, rows, aligned ? sequence_ : rows, position);
      row += rows;
    }
  }

  template <class Ctx>
  [[nodiscard]] float probability(const Ctx& ctx) const noexcept {
    return ctx.training() ? dropout_ : 0.0F;
  }
  template <class Ctx>
  [[nodiscard]] static RandomSite random(const Ctx& ctx) noexcept {
    return ctx.random(0, RandomUse::embedding_dropout);
  }
  template <class Ctx, class Region>
  [[nodiscard]] GlobalBlock place(const Ctx& ctx, const Region& region) const noexcept {
    return {ctx.first_sample * sequence_ + region.first_row(), hidden_, 0};
  }

  ParameterView<T> tokens_, table_;
  VocabRange range_;
  Index hidden_;
  Index positions_;
  Index sequence_;
  float dropout_;
};

}  // namespace mega::inline v0::nn
