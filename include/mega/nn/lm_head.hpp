/// @file  The exit of a Transformer: logits over a vocabulary divided between the tensor ranks, and
/// their soft-max cross-entropy, a block of rows at a time.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/arena.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/copy_columns.hpp>
#include <mega/nn/cross_entropy.hpp>
#include <mega/nn/fused_cross_entropy.hpp>
#include <mega/nn/kernels.hpp>
#include <mega/nn/loss_sum.hpp>
#include <mega/nn/tensor_parallel.hpp>
#include <mega/nn/token_embedding.hpp>
#include <mega/nn/transformer_config.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace mega::inline v0::nn {

/// Memory of the loss grows with loss_rows * vocabulary / tensor degree, not with the micro-batch.
template <class Spec, class Kernels>
class LmHead {
  using T = typename Kernels::element;
  using Product = Linear<typename Kernels::product>;

 public:
  static constexpr std::string_view weight_name = "head.weight";

  LmHead(const TransformerConfig& config, const TransformerRun& run, int tensor_rank,
         int tensor_degree) noexcept
      : range_(VocabRange::of_rank(config.vocab, tensor_rank, tensor_degree)),
        hidden_(config.hidden),
        vocab_(config.vocab),
        block_rows_(std::min(run.loss_rows, run.rows())) {}

  template <class Self, class Visit>
  static void for_each_parameter(Self& self, const TransformerConfig& config, bool,
                                 const Visit& visit) {
    Parameter p = vocab_parallel_table(std::string(weight_name), config.vocab, config.hidden,
                                       {Init::Kind::normal, config.init_deviation});
    if (config.tied_head) p.tied_to = token_embedding_name;
    p.overwritten_first = true;
    visit(p, self.weight_);
  }

  /// Memory of one call of loss() or logits().
  struct Scratch {
    Matrix<T> whole;          ///< [rows, hidden], where rows are divided
    Matrix<T> logits;         ///< [block rows, padded vocabulary of the rank]
    Vector<float> row_max;    ///< [block rows]
    Vector<float> sums;       ///< [2 * block rows]: of exponentials, then the targets' logits
    Vector<float> row_loss;   ///< [block rows]
    Vector<double> partials;  ///< loss of each block
    Vector<T> gathered;       ///< the ranks' logits of a block, for logits() only
  };
  template <class Region>
  [[nodiscard]] Scratch make_scratch(Arena& arena, const Region& region, bool for_loss) const {
    Scratch s;
    if (region.divides_rows()) s.whole = arena.take<T>(region.rows(), hidden_);
    s.logits = arena.take<T>(block_rows_, range_.padded);
    if (for_loss) {
      s.row_max = arena.take<float>(block_rows_);
      s.sums = arena.take<float>(2 * block_rows_);
      s.row_loss = arena.take<float>(block_rows_);
      s.partials = arena.take<double>((region.rows() + block_rows_ - 1) / block_rows_);
    } else {
      s.gathered = arena.take<T>(block_rows_ * range_.padded * region.degree());
    }
    return s;
  }

  /// Adds the sum of losses to *ctx.loss_sum. In training, `hidden` [own rows, hidden] becomes the
  /// gradient of the scaled sum, and the weight's gradient is added to its accumulator.
  /// @cost  3 products of rows x hidden x vocabulary / degree, 1 of them in evaluation
  template <class Ctx, class Region>
  void loss(Ctx& ctx, const Region& region, Matrix<T> hidden,
            Matrix<const std::int32_t> targets) const {
    const auto span = ctx.span("head");
    const Scratch s = make_scratch(ctx.arena, region, true);
    Matrix<T> rows = hidden;
    if (region.divides_rows()) {
      region.gather(ctx.stream, s.whole, hidden);
      rows = s.whole;
    }
    const Vector<const std::int32_t> ids = targets.flat();
    for (Index first = 0, block = 0; first < rows.rows(); first += block_rows_, ++block) {
      const Index count = std::min(block_rows_, rows.rows() - first);
      const Matrix<T> x = rows.slice(first, count);
      const Matrix<T> logits = s.logits.slice(0, count);
      {
        const auto product = ctx.span("head_product");
        Product::forward(ctx.stream, logits, x, weight_.value);
      }
      const Vector<const std::int32_t> wanted = ids.slice(first, count);
      const Vector<double> loss_of_block = s.partials.slice(block, 1);
      const Vector<const float> scale(ctx.loss_scale, 1);
      if (ctx.training() && region.degree() == 1) {
        const auto entropy = ctx.span("cross_entropy");
        fused_cross_entropy(ctx.stream, logits, loss_of_block, s.row_loss.slice(0, count), wanted,
                            range_.valid, scale);
      } else {
        block_loss(ctx, region, s, logits, wanted, loss_of_block);
        if (!ctx.training()) continue;
        const auto entropy = ctx.span("cross_entropy");
        cross_entropy_backward(ctx.stream, logits, Matrix<const T>(logits), wanted,
                               s.row_max.slice(0, count), s.sums.slice(0, count), shard(), scale);
      }
      const auto products = ctx.span("head_product");
      Product::backward_weight(ctx.stream, weight_.gradient, logits, x,
                               ctx.microbatch == 0 && block == 0);
      Product::backward_input(ctx.stream, x, logits, weight_.value);
    }
    add_loss_parts(ctx.stream, Vector<double>(ctx.loss_sum, 1), s.partials);
    if (!ctx.training()) return;
    const Matrix<T> dhidden = region.reduce(ctx.stream, rows);
    if (region.divides_rows()) copy(ctx.stream, hidden, Matrix<const T>(dhidden));
  }

  /// out [rows, vocab] of `hidden`, on every tensor rank, without padding. hidden holds this rank's
  /// rows where the region divides them, else any number of rows.
  /// @pre  out does not overlap hidden
  template <class Ctx, class Region>
  void logits(Ctx& ctx, const Region& region, Matrix<const T> hidden, Matrix<T> out) const {
    const auto span = ctx.span("logits");
    const Scratch s = make_scratch(ctx.arena, region, false);
    const Matrix<const T> rows = region.gather(ctx.stream, s.whole, hidden);
    for (Index first = 0; first < rows.rows(); first += block_rows_) {
      const Index count = std::min(block_rows_, rows.rows() - first);
      const Matrix<T> local = s.logits.slice(0, count);
      const Matrix<T> to = out.slice(first, count);
      Product::forward(ctx.stream, local, rows.slice(first, count), weight_.value);
      const Index piece = local.size();
      region.comm().all_gather(ctx.stream, s.gathered.slice(0, piece * region.degree()),
                               Vector<const T>(local.flat()));
      for (int rank = 0; rank < region.degree(); ++rank) {
        const VocabRange range = VocabRange::of_rank(vocab_, rank, region.degree());
        if (range.valid == 0) continue;
        copy_columns(ctx.stream, to, range.first,
                     Matrix<const T>(s.gathered.data() + rank * piece, count, range_.padded),
                     range.valid);
      }
    }
  }

 private:
  [[nodiscard]] VocabShard shard() const noexcept { return {range_.first, range_.valid}; }

  /// Loss of a block of rows; row_max and the sums of exponentials stay for the gradient.
  template <class Ctx, class Region>
  void block_loss(Ctx& ctx, const Region& region, const Scratch& s, Matrix<const T> logits,
                  Vector<const std::int32_t> targets, Vector<double> loss) const {
    const Index count = logits.rows();
    const Vector<float> row_max = s.row_max.slice(0, count);
    const Vector<float> sums = s.sums.slice(0, 2 * count);
    const auto entropy = ctx.span("cross_entropy");
    cross_entropy_row_max(ctx.stream, row_max, logits, shard());
    region.comm().all_reduce(ctx.stream, row_max, comm::Reduce::max);
    cross_entropy_sum_exp(ctx.stream, sums.slice(0, count), sums.slice(count, count), logits,
                          targets, row_max, shard());
    region.comm().all_reduce(ctx.stream, sums, comm::Reduce::sum);
    cross_entropy_loss(ctx.stream, loss, s.row_loss.slice(0, count), targets, row_max,
                       sums.slice(0, count), sums.slice(count, count));
  }

  ParameterView<T> weight_;
  VocabRange range_;
  Index hidden_;
  Index vocab_;
  Index block_rows_;
};

}  // namespace mega::inline v0::nn
