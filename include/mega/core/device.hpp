/// @file  What a device policy is: streams that keep order, events between them, memory.
/// Models: mega::host::Host, mega::host::HostAsync. A device is a small object, since the
/// asynchronous host has a seed and a GPU has an ordinal.
#pragma once
#include <mega/core/value.hpp>

#include <concepts>
#include <cstddef>

namespace mega::inline v0 {

/// @law  Work queued on one stream runs in the order in which it was queued.
/// @law  stream.wait(event) holds back later work of `stream` until all work queued before the
///       event's most recent record() is done; an event never recorded holds nothing back.
/// @law  synchronize() returns after all queued work is done and rethrows the first Error of it.
template <class S>
concept has_event = requires {
  typename S::event_type;
}
&&movable<typename S::event_type>;

template <class S>
concept records_event = has_event<S> && requires(S& s, typename S::event_type& e) {
  s.record(e);
};

template <class S>
concept waits_for_event = has_event<S> && requires(S& s, const typename S::event_type& e) {
  s.wait(e);
};

template <class S>
concept synchronizes = requires(S& s) {
  s.synchronize();
};

/// Operations find their overload by the stream's type (nn/, optim/), so a stream is also the
/// compile-time name of its device.
template <class S>
concept stream = movable<S> && records_event<S> && waits_for_event<S> && synchronizes<S>;

/// A block of device memory: owned, aligned to at least 64 bytes, contents indeterminate.
template <class M>
concept device_memory = movable<M> && requires(const M& m) {
  { m.data() } -> std::same_as<std::byte*>;
  { m.bytes() } -> std::same_as<std::size_t>;
};

template <class D>
concept has_stream_type = requires {
  typename D::stream_type;
}
&&stream<typename D::stream_type>;

template <class D>
concept has_memory_type = requires {
  typename D::memory_type;
}
&&device_memory<typename D::memory_type>;

template <class D>
concept makes_streams = has_stream_type<D> && requires(D& d, const char* name) {
  { d.make_stream(name) } -> std::same_as<typename D::stream_type>;
};

template <class D>
concept makes_events = has_stream_type<D> && requires(D& d) {
  { d.make_event() } -> std::same_as<typename D::stream_type::event_type>;
};

template <class D>
concept allocates = has_memory_type<D> && requires(D& d, std::size_t bytes) {
  { d.allocate(bytes) } -> std::same_as<typename D::memory_type>;
};

/// A device whose streams the executor and the trainer run on.
/// Besides these members, generic code calls, found through the stream's namespace:
///   copy(stream, View<T> out, View<const T> in)          same device, ordered on stream
///   fill_zero(stream, View<T> out)
///   upload(stream, View<T> out, View<const T> host_in)   host_in stays valid until it is done
///   download(stream, View<T> host_out, View<const T> in)
template <class D>
concept device_policy = makes_streams<D> && makes_events<D> && allocates<D>;

}  // namespace mega::inline v0
