/// @file  One step of a rank's pipeline schedule: what to do, on which model chunk, for which
/// micro-batch.
#pragma once
#include <mega/core/error.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace mega::inline v0::dpp {

enum class ActionKind : std::uint8_t {
  forward,
  backward,         ///< input and weight gradient in one go
  backward_input,   ///< gradient of the chunk's input only
  backward_weight,  ///< gradient of the chunk's weights only, after backward_input
  send_forward,     ///< hands the chunk's output to the next stage
  recv_forward,     ///< waits for the chunk's input from the previous stage
  send_backward,    ///< hands the gradient of the chunk's input to the previous stage
  recv_backward,    ///< waits for the gradient of the chunk's output from the next stage
  loss,             ///< last stage: turns its output into the gradient of its output
  reduce,           ///< sums the chunk's weight gradients over the data-parallel ranks
  tied_reduce,      ///< sums the gradients of parameters that the first and the last stage share
};

[[nodiscard]] constexpr std::string_view to_string(ActionKind kind) noexcept {
  switch (kind) {
    case ActionKind::forward: return "forward";
    case ActionKind::backward: return "backward";
    case ActionKind::backward_input: return "backward_input";
    case ActionKind::backward_weight: return "backward_weight";
    case ActionKind::send_forward: return "send_forward";
    case ActionKind::recv_forward: return "recv_forward";
    case ActionKind::send_backward: return "send_backward";
    case ActionKind::recv_backward: return "recv_backward";
    case ActionKind::loss: return "loss";
    case ActionKind::reduce: return "reduce";
    case ActionKind::tied_reduce: return "tied_reduce";
  }
  return "unknown";
}

/// Value of Action::microbatch where the action concerns all of them (reduce, tied_reduce).
inline constexpr std::int32_t all_microbatches = -1;

struct Action {
  ActionKind kind = ActionKind::forward;
  /// This compute action and the next compute action of the rank's list form a pair whose halves
  /// run side by side: one forward and one backward, of different micro-batches or chunks. The pair
  /// begins when both have their inputs; what it produces leaves when both are done.
  bool with_next = false;
  std::int16_t chunk = 0;  ///< local model chunk of the rank, 0..v-1
  std::int32_t microbatch = 0;

  friend constexpr bool operator==(const Action&, const Action&) = default;
};

/// Action from plain ints. @pre chunk fits 16 bits
[[nodiscard]] constexpr Action make_action(ActionKind kind, int chunk, int microbatch) noexcept {
  return {kind, false, static_cast<std::int16_t>(chunk), microbatch};
}

/// "forward of chunk 1, micro-batch 3"; "reduce of chunk 1" where all micro-batches are meant.
[[nodiscard]] inline std::string to_string(const Action& action) {
  std::string text = sentence(to_string(action.kind), " of chunk ", action.chunk);
  if (action.microbatch != all_microbatches) text += sentence(", micro-batch ", action.microbatch);
  return text;
}

/// True for the actions that occupy the rank's compute stream.
[[nodiscard]] constexpr bool is_compute(ActionKind kind) noexcept {
  return kind == ActionKind::forward || kind == ActionKind::backward ||
         kind == ActionKind::backward_input || kind == ActionKind::backward_weight;
}

/// True for the action that produces the gradient of the chunk's input.
[[nodiscard]] constexpr bool gives_input_gradient(ActionKind kind) noexcept {
  return kind == ActionKind::backward || kind == ActionKind::backward_input;
}

/// True for the action that adds to the weight gradient; after it the saved activations are free.
[[nodiscard]] constexpr bool gives_weight_gradient(ActionKind kind) noexcept {
  return kind == ActionKind::backward || kind == ActionKind::backward_weight;
}

}  // namespace mega::inline v0::dpp
