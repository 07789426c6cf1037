/// @file  Streams of the host: host_stream is what host operations are written against; Stream
/// runs each piece of work at once in the calling thread.
#pragma once
#include <mega/core/device.hpp>
#include <mega/core/view.hpp>

#include <concepts>
#include <cstring>
#include <type_traits>
#include <utility>

namespace mega::inline v0::host {

namespace detail {
// nvcc rejects a lambda expression inside a requires-expression.
struct NoWork {
  void operator()() const noexcept {}
};
}  // namespace detail

template <class S>
concept runs_callables = requires(S& s, detail::NoWork work) {
  s.run(work);
};

/// A stream that runs callables on the host, now or later, in order. What is passed to run() must
/// hold its operands by value (views, scalars) and must not read device memory outside of it.
template <class S>
concept host_stream = stream<S> && runs_callables<S>;

/// Nothing to wait for: work was done when it was queued.
struct Event {};

/// Runs each callable inside run(). Exceptions leave through run().
class Stream {
 public:
  using event_type = Event;

  template <std::invocable F>
  void run(F&& work) {
    std::forward<F>(work)();
  }
  void record(Event&) noexcept {}
  void wait(const Event&) noexcept {}
  void synchronize() noexcept {}
};

static_assert(host_stream<Stream>);

/// @pre  equal sizes, no overlap   @sync  ordered on stream
template <host_stream S, class T, int R>
void copy(S& stream, View<T, R> out, View<const std::type_identity_t<T>, R> in) {
  stream.run([=] {
    if (!in.empty())
      std::memcpy(out.data(), in.data(), sizeof(T) * static_cast<std::size_t>(in.size()));
  });
}

template <host_stream S, class T, int R>
void fill_zero(S& stream, View<T, R> out) {
  stream.run([=] {
    if (!out.empty())
      std::memset(static_cast<void*>(out.data()), 0,
                  sizeof(T) * static_cast<std::size_t>(out.size()));
  });
}

/// Host memory is device memory here, so both directions are copies.
template <host_stream S, class T, int R>
void upload(S& stream, View<T, R> out, View<const std::type_identity_t<T>, R> in) {
  host::copy(stream, out, in);
}
template <host_stream S, class T, int R>
void download(S& stream, View<T, R> out, View<const std::type_identity_t<T>, R> in) {
  host::copy(stream, out, in);
}

}  // namespace mega::inline v0::host
