/// @file  Kernels: what a Transformer computes with. The type of its stored numbers, who multiplies
/// matrices, who attends.
#pragma once
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/product.hpp>

#include <concepts>
#include <string_view>
#include <type_traits>

namespace mega::inline v0::nn {

struct AttentionDropout;

/// Attention by the library's own operation for the stream.
struct BuiltInAttention {
  static constexpr std::string_view name = "built-in";

  /// out [rows, query heads * head_dim] and lse from the packed queries, keys and values.
  template <class T, class S>
  static void forward(S& stream, Matrix<T> out, View<float, 3> lse,
                      Matrix<const std::type_identity_t<T>> qkv, const AttentionShape& shape,
                      const AttentionDropout& dropout) {
    attention_forward(stream, out, lse, qkv, shape, dropout);
  }
  /// @pre  dqkv overlaps nothing else
  template <class T, class S>
  static void backward(S& stream, Matrix<T> dqkv, Matrix<const std::type_identity_t<T>> dout,
                       Matrix<const std::type_identity_t<T>> qkv,
                       Matrix<const std::type_identity_t<T>> out, View<const float, 3> lse,
                       const AttentionShape& shape, const AttentionDropout& dropout) {
    attention_backward(stream, dqkv, dout, qkv, out, lse, shape, dropout);
  }
};

/// @tparam Product  a matrix_product; its element is what parameters and activations are stored as
template <class Product = PortableProduct, class Attention = BuiltInAttention>
struct Kernels {
  using product = Product;
  using attention = Attention;
  using element = typename Product::element;
};

template <class K>
concept kernels = requires {
  typename K::product;
  typename K::attention;
  typename K::element;
}
&&storage<typename K::element>;

static_assert(kernels<Kernels<>>);

}  // namespace mega::inline v0::nn
