/// @file  DualPipeV: two chunks a rank on a V, where the forward of one micro-batch runs side by
/// side with the backward of another, so that each hides the other's communication.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/traversal.hpp>

#include <array>
#include <cstddef>
#include <string_view>

namespace mega::inline v0::dpp {

/// How often each of the eight phases of DualPipeV repeats on a rank. F, I, W, B: forward, input
/// gradient, weight gradient, both gradients; 0 and 1: the chunk; x&y: a fused pair.
///   0  F0           fills the way down
///   1  F0, F1       fills the way up
///   2  I1, W1, F1   the first gradients of the way down leave as early as they can
///   3  F0&B1, F1&B0
///   4  B1, F1&B0    the forwards of the way up run out
///   5  B1, B0       the second half of them I, without its W
///   6  W, I0        W: the oldest that waits
///   7  W
/// DualPipe, which holds two copies of the model on 2p ranks and sends m micro-batches down each,
/// has the same counts on its ranks r and 2p-1-r. @pre 0 <= rank < p, m >= 2p
[[nodiscard]] constexpr std::array<int, 8> dual_pipe_phases(int rank, int p, int m) noexcept {
  const int above = p - 1 - rank;
  const int below = rank + 1;
  return {2 * above, below, above, m - p - above, above, below, above, below};
}

/// Every p >= 1 with m >= 2p micro-batches, one for each stage; v must be 2.
/// Idle time of the worst rank: (p-1)(pair + B - 3W), pair = duration of a fused pair, B = of a
/// whole backward. Peak: at most 2p+1 live activations of a chunk.
/// When to use it: hops or expert-parallel exchanges are long, and a stage can hide them behind the
/// compute of another micro-batch. Where pair = F + B nothing is hidden, and ZeroBubbleV takes less
/// time and memory.
/// Source: DeepSeek-AI, DualPipe and DualPipeV; the V, half of DualPipe, is by Sea AI Lab.
struct DualPipeV {
  static constexpr std::string_view name = "dual_pipe_v";
  static constexpr bool splits_backward = true;

  [[nodiscard]] static constexpr VPlacement placement() noexcept { return {}; }

  /// Of rank 0; rank r has r fewer, since fewer of its backwards are split.
  [[nodiscard]] static constexpr int length(int p, int m, int /*v*/) noexcept {
    return 4 * m + 2 * p - 1;
  }

  static constexpr int order(int rank, int p, int m, int v, ActionSpan out);
};

namespace detail {

/// Writes a rank's list; each chunk and kind counts its own micro-batches.
class DualPipeList {
 public:
  constexpr explicit DualPipeList(ActionSpan out) noexcept : out_(out), sink_(out) {}

  constexpr void forward(int chunk) { sink_.put(ActionKind::forward, chunk, forwards_[chunk]++); }
  constexpr void backward(int chunk) {
    sink_.put(ActionKind::backward, chunk, backwards_[chunk]++);
  }
  constexpr void input_gradient(int chunk) {
    sink_.put(ActionKind::backward_input, chunk, backwards_[chunk]++);
  }
  constexpr void oldest_weight_gradient() {
    while (out_[oldest_].kind != ActionKind::backward_input) ++oldest_;
    const Action input = out_[oldest_++];
    sink_.put(ActionKind::backward_weight, input.chunk, input.microbatch);
  }
  constexpr void pair(int forward_chunk, int backward_chunk) {
    forward(forward_chunk);
    out_[static_cast<std::size_t>(sink_.count() - 1)].with_next = true;
    backward(backward_chunk);
  }
  [[nodiscard]] constexpr int count() const noexcept { return sink_.count(); }

 private:
  ActionSpan out_;
  ActionSink sink_;
  int forwards_[2] = {};
  int backwards_[2] = {};
  std::size_t oldest_ = 0;  ///< where to look for the I whose W is due next
};

}  // namespace detail

constexpr int DualPipeV::order(int rank, int p, int m, int v, ActionSpan out) {
  detail::expect_pipeline(rank, p, m, v);
  expects(v == 2, ErrorCode::usage,
          [&] { return sentence("DualPipeV runs 2 chunks a rank, not v ", v, "; use v 2"); });
  expects(m >= 2 * p, ErrorCode::usage, [&] {
    return sentence("DualPipeV needs one micro-batch for each of its ", 2 * p,
                    " stages at least, not m ", m, "; use m ", 2 * p, " or more");
  });
  const auto repeats = dual_pipe_phases(rank, p, m);
  detail::DualPipeList list(out);
  for (int i = 0; i < repeats[0]; ++i) list.forward(0);
  for (int i = 0; i < repeats[1]; ++i) {
    list.forward(0);
    list.forward(1);
  }
  for (int i = 0; i < repeats[2]; ++i) {
    list.input_gradient(1);
    list.oldest_weight_gradient();
    list.forward(1);
  }
  for (int i = 0; i < repeats[3]; ++i) {
    // The last rank waits for the first gradient. The forward alone fits into that wait, while in
    // a pair it would wait too.
    if (i == 0 && rank == p - 1) {
      list.forward(0);
      list.backward(1);
    } else {
      list.pair(0, 1);
    }
    list.pair(1, 0);
  }
  for (int i = 0; i < repeats[4]; ++i) {
    list.backward(1);
    list.pair(1, 0);
  }
  for (int i = 0; i < 2 * repeats[5]; ++i) {
    if (i < repeats[5]) {
      list.backward(1 - i % 2);
    } else {
      list.input_gradient(1 - i % 2);
    }
  }
  for (int i = 0; i < repeats[6]; ++i) {
    list.oldest_weight_gradient();
    list.input_gradient(0);
  }
  for (int i = 0; i < repeats[7]; ++i) list.oldest_weight_gradient();
  return list.count();
}

static_assert(traversal_policy<DualPipeV> && brings_placement<DualPipeV>);

}  // namespace mega::inline v0::dpp
