/// @file  Ports: the two ends of a pipeline edge as the executor sees them, on streams of their
/// own.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/device.hpp>
#include <mega/core/view.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace mega::inline v0::dpp {

template <class T, int R>
[[nodiscard]] Vector<std::byte> bytes_of(View<T, R> v) noexcept {
  return {reinterpret_cast<std::byte*>(v.data()), v.size() * static_cast<Index>(sizeof(T))};
}

/// Sends from two buffers in turn: one may be filled while the other is still leaving.
template <class Device, class Comm>
class Outlet {
  using stream_type = typename Device::stream_type;
  using event_type = typename stream_type::event_type;

 public:
  Outlet(Device& device, Comm& comm, int peer, std::uint32_t id)
      : sender_(comm.open_sender(peer, id)),
        stream_(device.make_stream("send")),
        ready_{device.make_event(), device.make_event()},
        sent_{device.make_event(), device.make_event()} {}

  /// Later work of `compute` may overwrite buffer `k`.
  void acquire(stream_type& compute, int k) { compute.wait(sent_[index(k)]); }

  /// Sends buffer `k` as soon as the work queued on `compute` so far has filled it.
  void dispatch(stream_type& compute, int k, Vector<const std::byte> message) {
    compute.record(ready_[index(k)]);
    stream_.wait(ready_[index(k)]);
    sender_.send(stream_, message);
    stream_.record(sent_[index(k)]);
  }

  /// One more message would find its slot at once. A buffer is then free as soon as the copies
  /// under way are done, since messages take slots in their order.
  [[nodiscard]] bool can_send() const { return sender_.can_send(); }

  void synchronize() { stream_.synchronize(); }

 private:
  static constexpr std::size_t index(int k) noexcept { return static_cast<std::size_t>(k); }

  typename Comm::sender sender_;
  stream_type stream_;
  std::array<event_type, 2> ready_, sent_;
};

/// Receives into slots that were posted ahead, in the order in which they were posted.
template <class Device, class Comm>
class Inlet {
  using stream_type = typename Device::stream_type;

 public:
  Inlet(Device& device, Comm& comm, int peer, std::uint32_t id)
      : receiver_(comm.open_receiver(peer, id)),
        stream_(device.make_stream("receive")),
        arrived_(device.make_event()) {}

  /// `slot` is free once the work queued on `compute` so far is done.
  void post(stream_type& compute, Vector<std::byte> slot) { receiver_.post(compute, slot); }

  /// Later work of `compute` sees the oldest posted slot filled.
  void await(stream_type& compute) {
    receiver_.complete(stream_);
    stream_.record(arrived_);
    compute.wait(arrived_);
  }

  /// The oldest posted slot is filled: await() would hold nothing back.
  [[nodiscard]] bool ready() const { return receiver_.ready(); }

  void synchronize() { stream_.synchronize(); }

 private:
  typename Comm::receiver receiver_;
  stream_type stream_;
  typename stream_type::event_type arrived_;
};

}  // namespace mega::inline v0::dpp
