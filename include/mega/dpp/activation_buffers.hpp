/// @file  The device memory of a rank's pipeline: fixed slots, laid out once, measured without a
/// device.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/stage.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

/// Where one of the rank's chunks stands, who its neighbours are (global ranks), how many
/// micro-batches it may hold at once.
struct ChunkPlacement {
  StagePosition position;
  int previous_rank = -1;
  int next_rank = -1;
  int slots = 1;
};

/// A view of type V with the given extents, taken from the arena.
template <class V>
[[nodiscard]] V take_view(Arena& arena, const std::array<Index, V::rank>& extents) {
  return [&]<std::size_t... D>(std::index_sequence<D...>) {
    return arena.take<std::remove_const_t<typename V::element_type>>(extents[D]...);
  }
  (std::make_index_sequence<V::rank>{});
}

/// Home of one micro-batch on one chunk, from its arrival to its last backward call.
template <class Stage>
struct Slot {
  typename Stage::edge_type in;  ///< activation received; unused on the first chunk
  typename Stage::edge_type
      dout;  ///< gradient received; on the last chunk the output, then its gradient
  typename Stage::saved_type saved;
};

template <class Stage>
struct ChunkBuffers {
  std::vector<Slot<Stage>> slots;
  /// Two of each: one is filled while the other leaves. Empty where there is no neighbour.
  std::array<typename Stage::edge_type, 2> out;
  std::array<typename Stage::edge_type, 2> din;
};

/// All buffers of a rank's chunks for m micro-batches.
/// The constructor is the layout: on a counting arena it measures.
template <class Stage>
struct ActivationBuffers {
  using input_type =
      View<std::remove_const_t<typename Stage::input_type::element_type>, Stage::input_type::rank>;
  using target_type = View<std::remove_const_t<typename Stage::target_type::element_type>,
                           Stage::target_type::rank>;

  std::vector<ChunkBuffers<Stage>> chunks;
  std::vector<input_type> inputs;    ///< one a micro-batch, where the first chunk lives
  std::vector<target_type> targets;  ///< one a micro-batch, where the last chunk lives
  Vector<double> loss_sums;          ///< one a micro-batch
  Vector<float> loss_scale;          ///< one element
  std::byte* workspace = nullptr;
  std::size_t workspace_bytes = 0;

  ActivationBuffers(Arena& arena, std::span<const Stage> stages,
                    std::span<const ChunkPlacement> placements, int microbatches) {
    for (std::size_t c = 0; c < stages.size(); ++c) {
      const Stage& stage = stages[c];
      const ChunkPlacement& at = placements[c];
      ChunkBuffers<Stage>& chunk = chunks.emplace_back();
      for (int k = 0; k < at.slots; ++k) {
        Slot<Stage>& slot = chunk.slots.emplace_back();
        if (!at.position.first())
          slot.in = take_view<typename Stage::edge_type>(arena, incoming_extents(stage));
        slot.dout = take_view<typename Stage::edge_type>(arena, stage.edge_extents());
        slot.saved = stage.make_saved(arena);
      }
      for (int k = 0; k < 2; ++k) {
        if (!at.position.last())
          chunk.out[k] = take_view<typename Stage::edge_type>(arena, stage.edge_extents());
        if (!at.position.first())
          chunk.din[k] = take_view<typename Stage::edge_type>(arena, incoming_extents(stage));
      }
      for (int mb = 0; mb < microbatches; ++mb) {
        if (at.position.first())
          inputs.push_back(take_view<input_type>(arena, stage.input_extents()));
        if (at.position.last())
          targets.push_back(take_view<target_type>(arena, stage.target_extents()));
      }
      workspace_bytes = std::max<std::size_t>(workspace_bytes, stage.workspace_bytes());
    }
    loss_sums = arena.take<double>(microbatches);
    loss_scale = arena.take<float>(1);
    workspace = static_cast<std::byte*>(arena.take_bytes(workspace_bytes));
  }
};

}  // namespace mega::inline v0::dpp
