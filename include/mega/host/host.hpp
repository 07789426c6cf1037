/// @file  Host: the device policy whose streams run inline in the rank's own thread.
#pragma once
#include <mega/core/device.hpp>
#include <mega/host/memory.hpp>
#include <mega/host/stream.hpp>

#include <cstddef>
#include <string_view>

namespace mega::inline v0::host {

/// The reference device: no concurrency inside a rank, so every result has one possible order.
struct Host {
  static constexpr std::string_view name = "host";
  using stream_type = Stream;
  using memory_type = Memory;

  [[nodiscard]] Stream make_stream(const char*) const noexcept { return {}; }
  [[nodiscard]] Event make_event() const noexcept { return {}; }
  [[nodiscard]] Memory allocate(std::size_t bytes) const { return Memory(bytes); }
};

static_assert(device_policy<Host>);

}  // namespace mega::inline v0::host

namespace mega::inline v0 {
using host::Host;
}
