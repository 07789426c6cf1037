/// @file  Replays: work that was queued once and is queued again by one call. What a device policy
/// may have besides streams, events and memory; Cuda has it, as graphs.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace mega::inline v0 {

/// How much of a training step one call queues.
enum class ReplayScope : std::uint8_t {
  none,     ///< every operation is queued by its own call
  actions,  ///< one forward, loss or backward of a micro-batch on a chunk
  step,     ///< the whole step behind its inputs, where one rank has it all; else as actions
};

/// Replays of a device that has none: work is queued by its calls each time.
struct NoReplays {
  template <class Body, class... Streams>
  static void run(std::size_t, std::uint64_t, const Body& body, Streams&...) {
    body();
  }
  static constexpr void clear() noexcept {}
  [[nodiscard]] static constexpr std::size_t size() noexcept { return 0; }
};

/// run(place, revision, body, stream, others...) queues what body() queues. `place` is a small
/// number that names the piece of work; body() begins and ends on `stream`, and what it queues on
/// `others` comes after work of `stream` and before later work of it. Whether body() is called, or
/// what it queued earlier is queued again, is the device's choice, so body() has no effect besides,
/// and between two runs of a place that share a revision it
///   - queues the same operations with the same arguments, on memory that has not moved;
///   - finds in device memory whatever differs;
///   - waits for no event that was recorded outside of it.
/// clear() forgets all that was queued earlier; size() is the number of pieces that are kept.
template <class R, class Stream>
concept replays_of = requires(R& r, const R& c, Stream& stream, void (*body)()) {
  r.run(std::size_t{}, std::uint64_t{}, body, stream);
  r.run(std::size_t{}, std::uint64_t{}, body, stream, stream);
  r.clear();
  { c.size() } -> std::same_as<std::size_t>;
};

/// A device that can replay: device.replay_scope() says how much it does.
template <class D>
concept replays_work = replays_of<typename D::replays_type, typename D::stream_type> &&
    requires(const D& device) {
  { device.replay_scope() } -> std::same_as<ReplayScope>;
  { device.make_replays() } -> std::same_as<typename D::replays_type>;
};

[[nodiscard]] constexpr ReplayScope replay_scope_of(const auto& device) noexcept {
  if constexpr (replays_work<std::remove_cvref_t<decltype(device)>>) {
    return device.replay_scope();
  } else {
    return ReplayScope::none;
  }
}

/// The device's replays or, for one that has none, NoReplays.
[[nodiscard]] auto make_replays(const auto& device) {
  if constexpr (replays_work<std::remove_cvref_t<decltype(device)>>) {
    return device.make_replays();
  } else {
    return NoReplays{};
  }
}

template <class Device>
using replays_t = decltype(make_replays(std::declval<const Device&>()));

}  // namespace mega::inline v0
