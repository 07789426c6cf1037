/// @file  The pipeline of a layout as one rank sees it: its stages, neighbours, actions and slots.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/activation_buffers.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/verifier.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace mega::inline v0::train {

/// Pure: any rank's view can be made anywhere, so plans need no device and no peers.
/// Placement counts where the traversal does not bring its own.
template <dpp::traversal_policy Traversal, dpp::placement Placement>
class Pipeline {
 public:
  /// Throws Error(usage) on a mesh that does not fit the world and on sizes the traversal refuses.
  template <class Options>
  Pipeline(const Options& options, int rank, int world)
      : mesh_(options.mesh),
        rank_(rank),
        chunks_(options.chunks),
        microbatches_(options.microbatches),
        traversal_(options.traversal),
        placement_(dpp::placement_of(traversal_, Placement{})) {
    validate(mesh_, world);
    expects(chunks_ >= 1 && microbatches_ >= 1, ErrorCode::usage, [&] {
      return sentence(chunks_, " chunks a rank and ", microbatches_,
                      " micro-batches; both must be at least 1");
    });
    position_ = mesh_.coordinates(rank)[Axis::pipeline];
  }

  [[nodiscard]] int stages() const noexcept { return mesh_.pipeline * chunks_; }
  /// Position on the pipeline axis of the ranks that hold `stage`.
  [[nodiscard]] int rank_of(int stage) const {
    return placement_.rank_of(stage, mesh_.pipeline, chunks_);
  }
  [[nodiscard]] bool holds_last() const { return rank_of(stages() - 1) == position_; }

  /// The stage of each local chunk.
  [[nodiscard]] std::vector<int> own_stages() const {
    std::vector<int> out;
    for (int c = 0; c < chunks_; ++c)
      out.push_back(placement_.stage(position_, c, mesh_.pipeline, chunks_));
    return out;
  }

  /// Another order of the same pipeline from now on.
  void reorder(const Traversal& traversal) { traversal_ = traversal; }

  /// This rank's lowered list. The orders of all ranks were verified together.
  [[nodiscard]] std::vector<dpp::Action> actions(bool tied_ends) const {
    const dpp::Schedule schedule = make(traversal_, tied_ends);
    const auto own = schedule.of_rank(position_);
    return {own.data(), own.data() + own.size()};
  }

  /// Where each chunk stands, with as many slots as its order needs, one more for a micro-batch
  /// that arrives early, and `ahead` more for forwards that a dispatch policy runs out of turn;
  /// never more than micro-batches. Enough for every order that the traversal may turn to.
  [[nodiscard]] std::vector<dpp::ChunkPlacement> placements(bool tied_ends, int ahead = 0) const {
    const std::vector<int> slots = required_slots(tied_ends);
    std::vector<dpp::ChunkPlacement> out;
    for (int c = 0; c < chunks_; ++c) {
      const int stage = placement_.stage(position_, c, mesh_.pipeline, chunks_);
      dpp::ChunkPlacement& at = out.emplace_back();
      at.position = {stage, stages()};
      if (!at.position.first())
        at.previous_rank = mesh_.moved(rank_, Axis::pipeline, rank_of(stage - 1));
      if (!at.position.last())
        at.next_rank = mesh_.moved(rank_, Axis::pipeline, rank_of(stage + 1));
      const int needed = slots[static_cast<std::size_t>(position_ * chunks_ + c)];
      const int wanted = needed + ahead + (at.position.first() ? 0 : 1);
      at.slots = wanted < microbatches_ ? wanted : std::max(needed, microbatches_);
    }
    return out;
  }

 private:
  [[nodiscard]] dpp::Schedule make(const Traversal& traversal, bool tied_ends) const {
    return dpp::lower(
        dpp::make_schedule(traversal, mesh_.pipeline, microbatches_, chunks_, placement_),
        {.tied_ends = tied_ends});
  }

  [[nodiscard]] std::vector<int> required_slots(bool tied_ends) const {
    std::vector<int> slots = dpp::required_slots(make(traversal_, tied_ends));
    if constexpr (dpp::names_alternatives<Traversal>) {
      for (const Traversal& other : traversal_.alternatives(mesh_.pipeline, microbatches_)) {
        const std::vector<int> needed = dpp::required_slots(make(other, tied_ends));
        for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = std::max(slots[i], needed[i]);
      }
    }
    return slots;
  }

  Mesh mesh_;
  int rank_;
  int chunks_;
  int microbatches_;
  Traversal traversal_;
  decltype(dpp::placement_of(std::declval<const Traversal&>(), Placement{})) placement_;
  int position_ = 0;
};

}  // namespace mega::inline v0::train
