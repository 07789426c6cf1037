/// @file  A plan names the kinds a trainer is made of; what a plan does not name has a default
/// here.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/comm/self.hpp>
#include <mega/core/context.hpp>
#include <mega/core/stage.hpp>
#include <mega/dpp/dispatch.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/host/host.hpp>
#include <mega/train/gradient_reducer.hpp>

#include <concepts>
#include <type_traits>
#include <utility>

namespace mega::inline v0 {

namespace train {
/// The traversal's own placement; the loop where any will do.
struct PlacementOfTraversal : dpp::LoopPlacement {};
}  // namespace train

/// Derive from it and name at least `stage`:
///   struct Plan : mega::DefaultPlan { using stage = MyStage; using communicator = ThreadComm; };
struct DefaultPlan {
  using device = Host;
  using communicator = comm::SelfComm;
  using traversal = dpp::ScheduleTraversal<dpp::DFC>;
  using placement = train::PlacementOfTraversal;
  using dispatch = dpp::StaticDispatch;
  using hooks = Hooks<>;
  template <class Device, class Comm, class Store>
  using reducer = train::GradientReducer<Device, Comm, Store>;
};

template <class Plan>
using plan_context_t = Context<typename Plan::device::stream_type, typename Plan::hooks>;

template <class P>
concept names_a_stage = requires {
  typename P::stage;
};
template <class P>
concept names_a_device = device_policy<typename P::device>;
template <class P>
concept names_a_communicator =
    comm::communicator<typename P::communicator, typename P::device::stream_type>;
template <class P>
concept names_a_traversal = dpp::traversal_policy<typename P::traversal>;
template <class P>
concept names_a_placement = dpp::placement<typename P::placement>;
/// Where the traversal is right on one placement only, the plan's is that one or none.
template <class P>
concept agrees_on_placement =
    !dpp::brings_placement<typename P::traversal> ||
    std::same_as<typename P::placement, train::PlacementOfTraversal> ||
    std::same_as<typename P::placement,
                 std::remove_cvref_t<decltype(dpp::placement_of(
                     std::declval<const typename P::traversal&>(), typename P::placement{}))>>;
template <class P>
concept names_a_dispatch = dpp::dispatch_policy<typename P::dispatch>;
/// Look-ahead chooses by the state of the channels.
template <class P>
concept answers_its_dispatch =
    !P::dispatch::queries_channels ||
    comm::has_channel_queries<typename P::communicator, typename P::device::stream_type>;
template <class P>
concept names_hooks =
    event_recorder<typename P::hooks::recorder_type, typename P::device::stream_type>;
template <class P>
concept names_a_working_stage = stage<typename P::stage, plan_context_t<P>>;
/// Where the traversal says that it splits the backward, the stage can.
template <class P>
concept agrees_on_backward = !dpp::splits_backward<typename P::traversal> ||
                             runs_split_backward<typename P::stage, plan_context_t<P>>;

template <class P>
concept plan = names_a_stage<P> && names_a_device<P> && names_a_communicator<P> &&
    names_a_traversal<P> && names_a_placement<P> && agrees_on_placement<P> && names_a_dispatch<P> &&
    answers_its_dispatch<P> && names_hooks<P> && names_a_working_stage<P> && agrees_on_backward<P>;

/// Compiles for a plan that works; otherwise the first failed line says in one sentence what is
/// missing. Costs nothing at run time.
template <class P>
consteval void explain() {
  static_assert(names_a_stage<P>, "mega: the plan names no stage; write using stage = MyStage");
  static_assert(
      names_a_device<P>,
      "mega: the plan's device is no device policy; use mega::Host or a model of device_policy");
  static_assert(names_a_communicator<P>,
                "mega: the plan's communicator lacks an operation on the device's streams (see "
                "comm/concepts.hpp); Host takes SelfComm, ThreadComm or MpiComm, Cuda takes "
                "DeviceSelfComm, DeviceThreadComm, NcclComm or NcclProcessComm");
  static_assert(
      names_a_traversal<P>,
      "mega: the plan's traversal has no name, int length(p, m, v) const or int order(rank, p, m, "
      "v, mega::dpp::ActionSpan out) const; see dpp/traversal.hpp");
  static_assert(names_a_placement<P>,
                "mega: the plan's placement does not map stages to ranks; see dpp/placement.hpp");
  static_assert(agrees_on_placement<P>,
                "mega: the plan's placement is not the one that its traversal was made for; leave "
                "the placement out of the plan");
  static_assert(names_a_dispatch<P>,
                "mega: the plan's dispatch is no dispatch policy; use mega::dpp::StaticDispatch, "
                "mega::dpp::LookAhead<L> or mega::dpp::BoundedLookAhead");
  static_assert(answers_its_dispatch<P>,
                "mega: the plan's dispatch asks channels whether a message is here, and the "
                "communicator lacks can_send(), ready() or poll(); use mega::dpp::StaticDispatch");
  static_assert(names_hooks<P>,
                "mega: the plan's recorder has no noexcept begin() and end(); see core/hooks.hpp");
  using S = typename P::stage;
  using Ctx = plan_context_t<P>;
  static_assert(names_its_views<S>,
                "mega: the stage names no input_type, target_type or edge_type");
  static_assert(declares_extents<S>,
                "mega: the stage lacks input_extents(), target_extents() or edge_extents() "
                "returning std::array<Index, rank>");
  static_assert(lays_out_saved<S>, "mega: the stage lacks saved_type or make_saved(Arena&) const");
  static_assert(declares_workspace<S>, "mega: the stage lacks workspace_bytes() const");
  static_assert(lists_parameters<S>,
                "mega: the stage lacks parameters() const returning std::vector<Parameter>");
  static_assert(binds_parameters<S>,
                "mega: the stage lacks bind(std::span<const ParameterView<float>>)");
  static_assert(runs_forward_from_input<S, Ctx>,
                "mega: the stage lacks forward(ctx, input, out, saved) for the first chunk");
  static_assert(runs_forward_from_edge<S, Ctx>,
                "mega: the stage lacks forward(ctx, edge, out, saved) for later chunks");
  static_assert(runs_backward<S, Ctx>,
                "mega: the stage lacks backward(ctx, dout, din, saved), or backward_input and "
                "backward_weight");
  static_assert(
      agrees_on_backward<P>,
      "mega: the plan's traversal splits the backward, and the stage lacks "
      "backward_input(ctx, dout, din, saved) or backward_weight(ctx, saved); give it both, "
      "or use mega::dpp::FullBackward<traversal>");
  static_assert(computes_loss<S, Ctx>, "mega: the stage lacks loss(ctx, out, targets)");
}

}  // namespace mega::inline v0
