/// @file  A HostAsync whose streams ignore one kind of event wait: proof that the wait is needed.
#pragma once
#include <mega/core/device.hpp>
#include <mega/host/host_async.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace mega_test {

/// Waits of streams called `waiting` for events last recorded on streams called `recorded` are
/// lost, and the latter are slowed down, so that the loss shows.
struct ForgottenWait {
  std::string waiting, recorded;
};

struct TracedEvent {
  mega::host::AsyncEvent event;
  std::shared_ptr<std::string> recorded = std::make_shared<std::string>();
};

/// Based on AsyncStream, so that host operations are found for it.
class ForgetfulStream : public mega::host::AsyncStream {
 public:
  using event_type = TracedEvent;

  ForgetfulStream(mega::host::AsyncStream stream, std::string name, ForgottenWait forgotten)
      : AsyncStream(std::move(stream)), name_(std::move(name)), forgotten_(std::move(forgotten)) {}

  void record(TracedEvent& event) {
    *event.recorded = name_;
    AsyncStream::record(event.event);
  }
  void wait(const TracedEvent& event) {
    if (name_ == forgotten_.waiting && *event.recorded == forgotten_.recorded) return;
    AsyncStream::wait(event.event);
  }

 private:
  std::string name_;
  ForgottenWait forgotten_;
};

class ForgetfulDevice {
 public:
  using stream_type = ForgetfulStream;
  using memory_type = mega::host::Memory;

  explicit ForgetfulDevice(std::uint64_t seed = 0, ForgottenWait forgotten = {})
      : seed_(seed), forgotten_(std::move(forgotten)) {}

  [[nodiscard]] ForgetfulStream make_stream(const char* name) {
    const int max_delay_us = name == forgotten_.recorded ? 3000 : 20;
    return {mega::host::AsyncStream(seed_, streams_++, max_delay_us), name, forgotten_};
  }
  [[nodiscard]] TracedEvent make_event() const { return {}; }
  [[nodiscard]] mega::host::Memory allocate(std::size_t bytes) const {
    return mega::host::Memory(bytes);
  }

 private:
  std::uint64_t seed_;
  std::uint32_t streams_ = 0;
  ForgottenWait forgotten_;
};

static_assert(mega::device_policy<ForgetfulDevice>);

}  // namespace mega_test
