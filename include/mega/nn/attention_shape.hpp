/// @file  AttentionShape: the sizes that attention and rotary embedding share.
#pragma once
#include <mega/core/config.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>

#include <string_view>

namespace mega::inline v0::nn {

/// Sizes of one rank's attention. The packed matrix is [batch * time, width()], a row holding the
/// query heads, then the key heads, then the value heads, each head_dim wide; query heads
/// [g * group(), (g + 1) * group()) share key and value head g.
struct AttentionShape {
  Index batch = 0;
  Index time = 0;
  Index query_heads = 0;
  Index kv_heads = 0;
  Index head_dim = 0;

  [[nodiscard]] MEGA_HD constexpr Index rows() const noexcept { return batch * time; }
  [[nodiscard]] MEGA_HD constexpr Index group() const noexcept { return query_heads / kv_heads; }
  [[nodiscard]] MEGA_HD constexpr Index width() const noexcept {
    return (query_heads + 2 * kv_heads) * head_dim;
  }
  /// First column of query head h, of key head g, of value head g.
  [[nodiscard]] MEGA_HD constexpr Index query_column(Index h) const noexcept {
    return h * head_dim;
  }
  [[nodiscard]] MEGA_HD constexpr Index key_column(Index g) const noexcept {
    return (query_heads + g) * head_dim;
  }
  [[nodiscard]] MEGA_HD constexpr Index value_column(Index g) const noexcept {
    return (query_heads + kv_heads + g) * head_dim;
  }
};

namespace detail {
inline void expects_valid(std::string_view op, const AttentionShape& s) {
  expects(s.batch >= 0 && s.time >= 0 && s.kv_heads > 0 && s.head_dim > 0 && s.query_heads > 0,
          ErrorCode::logic, [&] {
            return sentence(op, ": batch ", s.batch, ", time ", s.time, ", query heads ",
                            s.query_heads, ", kv heads ", s.kv_heads, ", head dim ", s.head_dim,
                            " hold a negative size or no head");
          });
  expects(s.query_heads % s.kv_heads == 0, ErrorCode::logic, [&] {
    return sentence(op, ": ", s.query_heads, " query heads are not a multiple of ", s.kv_heads,
                    " kv heads");
  });
}
}  // namespace detail

}  // namespace mega::inline v0::nn
