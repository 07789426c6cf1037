/// @file  What a stage is: one chunk of a model, written by anyone. The library asks no more of it.
#pragma once
#include <mega/core/context.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

namespace mega::inline v0 {

/// Where a chunk stands in the whole model. Handed to the factory that makes stages.
struct StagePosition {
  int stage = 0;
  int stages = 1;
  [[nodiscard]] constexpr bool first() const noexcept { return stage == 0; }
  [[nodiscard]] constexpr bool last() const noexcept { return stage == stages - 1; }
};

/// input: what the first chunk reads of a micro-batch; target: what loss() compares with;
/// edge: what flows between chunks. Views; of an edge's type the element type and the number of
/// extents are the contract that both of its ends share at compile time.
template <class S>
concept names_its_views = requires {
  typename S::input_type;   // View<const T, R>
  typename S::target_type;  // View<const T, R>
  typename S::edge_type;    // View<T, R>
};

/// Extents of one micro-batch, equal on all ranks that hold the stage: input_extents() and
/// target_extents() of the data, edge_extents() of what this chunk sends on.
template <class S>
concept declares_extents = names_its_views<S> && requires(const S& s) {
  { s.input_extents() } -> std::same_as<std::array<Index, S::input_type::rank>>;
  { s.target_extents() } -> std::same_as<std::array<Index, S::target_type::rank>>;
  { s.edge_extents() } -> std::same_as<std::array<Index, S::edge_type::rank>>;
};

/// Optional incoming_extents(): of what this chunk receives, where it differs from what it sends.
template <class S>
[[nodiscard]] std::array<Index, S::edge_type::rank> incoming_extents(const S& stage) {
  if constexpr (requires { stage.incoming_extents(); }) {
    return stage.incoming_extents();
  } else {
    return stage.edge_extents();
  }
}

/// saved_type: views of what backward needs of one micro-batch. make_saved() lays them out in an
/// arena; on a counting arena it is only measured, so size and layout cannot disagree.
template <class S>
concept lays_out_saved = requires {
  typename S::saved_type;
}
&&requires(const S& s, Arena& a) {
  { s.make_saved(a) } -> std::same_as<typename S::saved_type>;
};

/// Upper bound of what one call takes from ctx.arena.
template <class S>
concept declares_workspace = requires(const S& s) {
  { s.workspace_bytes() } -> std::convertible_to<std::size_t>;
};

/// The chunk's parameters, in an order that depends on the position of the chunk alone, so that
/// the concatenation over all chunks is the same list for every number of chunks.
template <class S>
concept lists_parameters = requires(const S& s) {
  { s.parameters() } -> std::same_as<std::vector<Parameter>>;
};

/// Optional value_type: what the stage's parameters are stored as; float where it names none.
template <class S>
struct StageValue {
  using type = float;
};
template <class S>
requires requires {
  typename S::value_type;
}
struct StageValue<S> {
  using type = typename S::value_type;
};
template <class S>
using stage_value_t = typename StageValue<S>::type;

/// Called once before the first step: one view a parameter, valid for the stage's life.
template <class S>
concept binds_parameters = requires(S& s, std::span<const ParameterView<stage_value_t<S>>> views) {
  s.bind(views);
};

/// out is a function of in and the parameters. in is valid until the micro-batch's last backward
/// call, so saved may hold the view itself.
template <class S, class Ctx>
concept runs_forward_from_input = requires(S& s, Ctx& ctx, typename S::input_type in,
                                           typename S::edge_type out,
                                           typename S::saved_type& saved) {
  s.forward(ctx, in, out, saved);
};

template <class S>
using const_edge_t = View<const typename S::edge_type::element_type, S::edge_type::rank>;

template <class S, class Ctx>
concept runs_forward_from_edge = requires(S& s, Ctx& ctx, const_edge_t<S> in,
                                          typename S::edge_type out,
                                          typename S::saved_type& saved) {
  s.forward(ctx, in, out, saved);
};

/// din from dout; din is empty on the first chunk. What backward_weight() needs stays in saved.
template <class S, class Ctx>
concept runs_backward_input = requires(S& s, Ctx& ctx, const_edge_t<S> dout,
                                       typename S::edge_type din, typename S::saved_type& saved) {
  s.backward_input(ctx, dout, din, saved);
};

/// Adds this micro-batch's weight gradients to the accumulators. Micro-batches come in order.
template <class S, class Ctx>
concept runs_backward_weight = requires(S& s, Ctx& ctx, typename S::saved_type& saved) {
  s.backward_weight(ctx, saved);
};

/// Both halves apart, as schedules want them that put other work between the two.
template <class S, class Ctx>
concept runs_split_backward = runs_backward_input<S, Ctx> && runs_backward_weight<S, Ctx>;

/// Optional: both halves at once, for stages that save memory by not splitting them.
/// @law  where both forms exist they give the same bits
template <class S, class Ctx>
concept runs_fused_backward = requires(S& s, Ctx& ctx, const_edge_t<S> dout,
                                       typename S::edge_type din, typename S::saved_type& saved) {
  s.backward(ctx, dout, din, saved);
};

/// Called on the last chunk: adds the sum of losses to *ctx.loss_sum and turns `out` into the
/// gradient of (sum of losses * *ctx.loss_scale), in place. In Mode::evaluate only the sum is made.
template <class S, class Ctx>
concept computes_loss = requires(S& s, Ctx& ctx, typename S::edge_type out_then_dout,
                                 typename S::target_type targets) {
  s.loss(ctx, out_then_dout, targets);
};

template <class S, class Ctx>
concept runs_backward = runs_fused_backward<S, Ctx> || runs_split_backward<S, Ctx>;

/// A chunk of a model on contexts of type Ctx.
template <class S, class Ctx>
concept stage =
    names_its_views<S> && declares_extents<S> && lays_out_saved<S> && declares_workspace<S> &&
    lists_parameters<S> && binds_parameters<S> && runs_forward_from_input<S, Ctx> &&
    runs_forward_from_edge<S, Ctx> && runs_backward<S, Ctx> && computes_loss<S, Ctx>;

/// Base for small stages: input, edges and targets are fp32 matrices of the same extents, and the
/// parameter views are kept in `weights`. A derived stage adds saved_type, make_saved(),
/// parameters(), forward(), a backward and loss(); it may hide any member.
struct UniformStage {
  using input_type = Matrix<const float>;
  using target_type = Matrix<const float>;
  using edge_type = Matrix<float>;

  Index rows = 0;  ///< of one micro-batch
  Index cols = 0;
  std::vector<ParameterView<float>> weights = {};

  [[nodiscard]] std::array<Index, 2> input_extents() const noexcept { return {rows, cols}; }
  [[nodiscard]] std::array<Index, 2> target_extents() const noexcept { return {rows, cols}; }
  [[nodiscard]] std::array<Index, 2> edge_extents() const noexcept { return {rows, cols}; }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept { return 0; }
  void bind(std::span<const ParameterView<float>> views) {
    weights.assign(views.data(), views.data() + views.size());
  }
};

}  // namespace mega::inline v0
