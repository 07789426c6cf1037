/// @file  The communicators of a rank, one an axis of the mesh.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/mesh.hpp>

#include <utility>

namespace mega::inline v0::train {

/// Subgroups are made eagerly and in one order on all ranks. `tied` joins the ranks that hold the
/// first and the last stage of one pipeline, in this order; elsewhere it is the rank alone.
template <class Comm>
struct Groups {
  Comm tensor;
  Comm data;
  Comm tied;

  /// Collective over `world`.
  [[nodiscard]] static Groups make(Comm& world, const Mesh& mesh, int first_stage_rank,
                                   int last_stage_rank) {
    const int rank = world.rank();
    const int position = mesh.coordinates(rank)[Axis::pipeline];
    const bool at_an_end = position == first_stage_rank || position == last_stage_rank;
    Groups out{world.split(mesh.group(rank, Axis::tensor), rank),
               world.split(mesh.group(rank, Axis::data), rank),
               world.split(at_an_end ? mesh.group(rank, Axis::pipeline) : -1,
                           position == first_stage_rank ? 0 : 1)};
    // For messages and traces.
    if constexpr (requires { out.tensor.set_name("tensor"); }) {
      out.tensor.set_name("tensor");
      out.data.set_name("data");
      out.tied.set_name("tied");
    }
    return out;
  }

  /// See comm::has_attended_calls; nothing where the communicator has no such need.
  void attend(bool on) {
    if constexpr (comm::has_attended_calls<Comm>) {
      for (Comm* comm : {&tensor, &data, &tied}) comm->attend(on);
    }
  }
};

}  // namespace mega::inline v0::train
