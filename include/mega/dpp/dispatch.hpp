/// @file  Dispatch policies: who decides which action of its list a rank performs next. Here is the
/// policy that never chooses; look_ahead_dispatch.hpp has those that do.
///
/// A policy is a small value that names what it needs, and its dispatcher<Device, Comm>, made as
/// dispatcher(policy, device, world, mesh, list), does the work: run(list, step) performs every
/// action of the rank's lowered list once, through what the executor lends it,
///   step.perform(action)    queues the action
///   step.has_arrived(a)     what the compute action a needs from other stages is here
///   step.can_leave(a)       what it gives other stages would go without waiting for a slot
///   step.compute()          the stream of the compute actions
///   step.waiting_for(a)     a span for as long as what it returns lives: compute waits for a's
///   input
/// Where it has reorder(list), the trainer may change the order between steps.
/// Only whole portions change places: a compute action (or fused pair) with the receives before it
/// and the sends behind it. Collectives keep their order on every rank, and none begins before the
/// portions that stand before it in the list are done: a rank that waits in a collective has
/// nothing left to do that the other ranks need in order to come there.
#pragma once
#include <mega/core/device.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/value.hpp>
#include <mega/dpp/action.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>

namespace mega::inline v0::dpp {

template <class D>
concept has_dispatch_name = requires {
  { D::name } -> std::convertible_to<std::string_view>;
};

/// Forwards that may run out of turn: each chunk gets as many slots more.
template <class D>
concept bounds_look_ahead = requires(const D policy) {
  { policy.ahead } -> std::convertible_to<int>;
};

/// Whether the communicator must answer for its channels (comm::has_channel_queries).
template <class D>
concept says_whether_it_queries_channels = requires {
  { D::queries_channels } -> std::convertible_to<bool>;
};

/// Device memory of a dispatcher on a rank of the mesh.
template <class D>
concept counts_its_bytes = requires(const D policy, const Mesh& mesh) {
  { policy.required_bytes(mesh) } -> std::same_as<std::size_t>;
};

template <class D>
concept dispatch_policy = semiregular<D> && has_dispatch_name<D> && bounds_look_ahead<D> &&
    says_whether_it_queries_channels<D> && counts_its_bytes<D>;

/// Of a dispatcher: another list of the same actions from the next step on.
template <class D>
concept takes_new_orders = requires(D& dispatcher, std::span<const Action> list) {
  dispatcher.reorder(list);
};

/// The list from front to back: nothing to decide, nothing to keep.
struct StaticDispatch {
  static constexpr std::string_view name = "static";
  static constexpr int ahead = 0;
  static constexpr bool queries_channels = false;
  static constexpr std::size_t required_bytes(const Mesh&) noexcept { return 0; }

  template <device_policy Device, class Comm>
  struct dispatcher {
    dispatcher() = default;
    dispatcher(StaticDispatch, Device&, Comm&, const Mesh&, std::span<const Action>) noexcept {}

    void reorder(std::span<const Action>) noexcept {}

    template <class Step>
    void run(std::span<const Action> list, Step& step) {
      for (const Action& a : list) step.perform(a);
    }
  };
};

static_assert(dispatch_policy<StaticDispatch>);

}  // namespace mega::inline v0::dpp
