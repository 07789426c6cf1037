/// @file  Mesh arithmetic: tensor x context x data x pipeline coordinates of a global rank.
#pragma once
#include <mega/core/config.hpp>
#include <mega/core/error.hpp>

#include <array>
#include <string>

namespace mega::inline v0 {

/// The four axes of a mesh, fastest varying first.
enum class Axis : int { tensor = 0, context = 1, data = 2, pipeline = 3 };
inline constexpr int axis_count = 4;

struct Coordinates {
  std::array<int, axis_count> at{};

  [[nodiscard]] constexpr int operator[](Axis axis) const noexcept {
    return at[static_cast<std::size_t>(axis)];
  }
  friend constexpr bool operator==(const Coordinates&, const Coordinates&) = default;
};

/// Degrees of parallelism. rank = t + T * (c + C * (d + D * p)): tensor neighbours are next to each
/// other, pipeline stages farthest apart. Every function is pure and constexpr.
struct Mesh {
  int tensor = 1;
  int context = 1;
  int data = 1;
  int pipeline = 1;

  [[nodiscard]] constexpr int degree(Axis axis) const noexcept {
    const std::array<int, axis_count> all{tensor, context, data, pipeline};
    return all[static_cast<std::size_t>(axis)];
  }
  [[nodiscard]] constexpr int size() const noexcept { return tensor * context * data * pipeline; }

  [[nodiscard]] constexpr Coordinates coordinates(int rank) const noexcept {
    Coordinates out;
    for (int a = 0; a < axis_count; ++a) {
      out.at[static_cast<std::size_t>(a)] = rank % degree(Axis{a});
      rank /= degree(Axis{a});
    }
    return out;
  }

  [[nodiscard]] constexpr int rank(const Coordinates& c) const noexcept {
    int out = 0;
    for (int a = axis_count - 1; a >= 0; --a) out = out * degree(Axis{a}) + c[Axis{a}];
    return out;
  }

  /// The rank that differs from `rank` only in its position along `axis`.
  [[nodiscard]] constexpr int moved(int rank, Axis axis, int position) const noexcept {
    Coordinates c = coordinates(rank);
    c.at[static_cast<std::size_t>(axis)] = position;
    return this->rank(c);
  }

  /// Smallest rank of the group of `rank` along `axis`: equal for all its members, so it serves as
  /// the color of a split.
  [[nodiscard]] constexpr int group(int rank, Axis axis) const noexcept {
    return moved(rank, axis, 0);
  }

  friend constexpr bool operator==(const Mesh&, const Mesh&) = default;
};

[[nodiscard]] inline std::string to_string(const Mesh& mesh) {
  std::string out = sentence("tp", mesh.tensor, " x dp", mesh.data, " x pp", mesh.pipeline);
  if (mesh.context != 1) out += sentence(" x cp", mesh.context);
  return out;
}

/// Refuses degrees below one and a mesh that does not have `world` ranks.
inline void validate(const Mesh& mesh, int world, SourceLocation at = SourceLocation::current()) {
  for (int a = 0; a < axis_count; ++a) {
    expects(
        mesh.degree(Axis{a}) >= 1, ErrorCode::usage,
        [&] {
          return sentence("a degree of parallelism is ", mesh.degree(Axis{a}), " in ",
                          to_string(mesh), "; every degree must be at least 1");
        },
        at);
  }
  expects(
      mesh.size() == world, ErrorCode::usage,
      [&] {
        return sentence(to_string(mesh), " needs ", mesh.size(), " ranks but the world has ",
                        world);
      },
      at);
}

static_assert(Mesh{2, 1, 3, 4}.rank(Mesh{2, 1, 3, 4}.coordinates(17)) == 17);

}  // namespace mega::inline v0
