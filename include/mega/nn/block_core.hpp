/// @file  What stands between the two products of a residual block: attention, or the activation
/// function of an MLP.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/elementwise.hpp>
#include <mega/nn/transformer_config.hpp>

#include <cstdint>
#include <string_view>
#include <type_traits>
#include <vector>

namespace mega::inline v0::nn {

// A core has: the names of its block and of the products around it; recomputable, whether forward
// is cheap enough for selective recomputation; residual_use, the random numbers of its block's
// dropout; the global sizes of the products; the widths on one rank; Saved; forward and backward,
// which adds the column sums of dinner to dbias where that is not empty.
// `inner` is the output of the first product, `out` the input of the second. forward() runs again
// on the same inner only if recomputable. joins_product<P, S>: whether backward_from() can have
// product P make dinner at once from the gradient behind the second product.

/// Rotation of queries and keys, then attention, over this rank's heads.
template <class Position, class Attention>
class AttentionCore {
 public:
  static constexpr std::string_view name = "attention";
  static constexpr std::string_view in_name = "qkv";
  static constexpr std::string_view out_name = "out";
  static constexpr std::string_view exposed_name = "attention.output";
  static constexpr bool recomputable = false;
  static constexpr RandomUse residual_use = RandomUse::residual_dropout;

  template <class, class>
  static constexpr bool joins_product = false;

  struct Saved {
    View<float, 3> lse;
  };

  AttentionCore(const TransformerConfig& config, const TransformerRun& run, int tensor_rank,
                int tensor_degree, std::uint32_t layer) noexcept
      : shape_{run.micro_batch, run.sequence, config.heads / tensor_degree,
               config.kv_heads / tensor_degree, config.head_dim},
        dropout_(config.dropout.attention),
        first_head_(tensor_rank * shape_.query_heads),
        heads_(config.heads),
        layer_(layer) {}

  [[nodiscard]] static std::vector<Index> in_parts(const TransformerConfig& c) {
    return {c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim};
  }
  [[nodiscard]] static Index out_inputs(const TransformerConfig& c) { return c.heads * c.head_dim; }

  [[nodiscard]] Index inner_width() const noexcept { return shape_.width(); }
  [[nodiscard]] Index out_width() const noexcept { return shape_.query_heads * shape_.head_dim; }

  [[nodiscard]] Saved make_saved(Arena& arena) const {
    return {arena.take<float>(shape_.batch, shape_.query_heads, shape_.time)};
  }

  /// Leaves queries and keys rotated in inner.
  template <class Ctx, class T>
  void forward(Ctx& ctx, Matrix<T> out, Matrix<T> inner, const Saved& saved,
               Vector<const float> frequencies) const {
    if constexpr (Position::rotates) {
      const auto span = ctx.span("rope");
      Position::rotate(ctx.stream, inner, frequencies, shape_);
    }
    const auto span = ctx.span("attention_core");
    Attention::forward(ctx.stream, out, saved.lse, inner, shape_, dropout(ctx));
  }

  /// @pre  dinner does not overlap inner
  template <class Ctx, class T>
  void backward(Ctx& ctx, Matrix<T> dinner, Vector<float> dbias,
                Matrix<const std::type_identity_t<T>> dout,
                Matrix<const std::type_identity_t<T>> inner,
                Matrix<const std::type_identity_t<T>> out, const Saved& saved,
                Vector<const float> frequencies) const {
    {
      const auto span = ctx.span("attention_core");
      Attention::backward(ctx.stream, dinner, dout, inner, out, saved.lse, shape_, dropout(ctx));
    }
    if constexpr (Position::rotates) {
      const auto span = ctx.span("rope");
      Position::rotate_back(ctx.stream, dinner, frequencies, shape_);
    }
    if (!dbias.empty()) bias_gradient(ctx.stream, dbias, Matrix<const T>(dinner));
  }

 private:
  template <class Ctx>
  [[nodiscard]] AttentionDropout dropout(const Ctx& ctx) const noexcept {
    return {ctx.training() ? dropout_ : 0.0F, ctx.random(layer_, RandomUse::attention_dropout),
            ctx.first_sample, first_head_, heads_};
  }

  AttentionShape shape_;
  float dropout_;
  Index first_head_;
  Index heads_;
  std::uint32_t layer_;
};

/// The activation function over this rank's columns.
template <class Activation>
class MlpCore {
 public:
  static constexpr std::string_view name = "mlp";
  static constexpr std::string_view in_name = "up";
  static constexpr std::string_view out_name = "down";
  static constexpr std::string_view exposed_name = "mlp.activation";
  static constexpr bool recomputable = true;
  static constexpr RandomUse residual_use = RandomUse::mlp_dropout;

  template <class Product, class S>
  static constexpr bool joins_product = Activation::template joins_product<Product, S>;

  struct Saved {};

  MlpCore(const TransformerConfig& config, const TransformerRun&, int, int tensor_degree,
          std::uint32_t) noexcept
      : width_(config.ffn / tensor_degree) {}

  [[nodiscard]] static std::vector<Index> in_parts(const TransformerConfig& c) {
    return std::vector<Index>(Activation::inputs, c.ffn);
  }
  [[nodiscard]] static Index out_inputs(const TransformerConfig& c) { return c.ffn; }

  [[nodiscard]] Index inner_width() const noexcept { return Activation::inputs * width_; }
  [[nodiscard]] Index out_width() const noexcept { return width_; }

  [[nodiscard]] Saved make_saved(Arena&) const noexcept { return {}; }

  template <class Ctx, class T>
  void forward(Ctx& ctx, Matrix<T> out, Matrix<T> inner, const Saved&, Vector<const float>) const {
    const auto span = ctx.span("activation");
    Activation::forward(ctx.stream, out, Matrix<const T>(inner));
  }
  template <class Ctx, class T>
  void backward(Ctx& ctx, Matrix<T> dinner, Vector<float> dbias,
                Matrix<const std::type_identity_t<T>> dout,
                Matrix<const std::type_identity_t<T>> inner, Matrix<const std::type_identity_t<T>>,
                const Saved&, Vector<const float>) const {
    const auto span = ctx.span("activation");
    Activation::backward(ctx.stream, dinner, dbias, dout, inner);
  }
  /// @param dout  behind the second product   @return  false where the sizes do not admit it
  template <class Ctx, class T, class Product>
  bool backward_from(Ctx& ctx, Matrix<T> dinner, Vector<float> dbias,
                     Matrix<const std::type_identity_t<T>> dout,
                     Vector<const std::type_identity_t<T>> weight,
                     Matrix<const std::type_identity_t<T>> inner, Product) const {
    const auto span = ctx.span("down_activation");
    return Activation::template backward_from<Product>(ctx.stream, dinner, dbias, dout, weight,
                                                       inner);
  }

 private:
  Index width_;
};

}  // namespace mega::inline v0::nn
