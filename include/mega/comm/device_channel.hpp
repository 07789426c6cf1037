/// @file  Ordered channels in device memory between ranks that are threads of one process, whether
/// they share a GPU or have one each: the receiver posts slots, the sender fills the oldest.
/// Opt-in: needs the CUDA headers.
#pragma once
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/event.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {
namespace detail {

/// An ordered channel from one rank's device memory to another's. Host threads meet as on a
/// Channel: a send waits until the receiver's thread has posted a slot, a completion until the
/// sender's thread has queued the copy. What they queue is ordered by two events a slot: `free` of
/// the receiver's GPU, `filled` of the sender's. Copies between GPUs use copy engines and no
/// multiprocessor.
class DeviceChannel {
 public:
  DeviceChannel(std::shared_ptr<World> world, Edge edge) : world_(std::move(world)), edge_(edge) {}

  [[nodiscard]] const Edge& edge() const noexcept { return edge_; }

  void post(cuda::Stream& stream, Vector<std::byte> memory) {
    Slot& at = next_to_post();
    at.memory = memory;
    if (!at.free) at.free.emplace();
    stream.record(*at.free);
    advance(posted_);
  }

  void send(cuda::Stream& stream, Vector<const std::byte> message) {
    Slot& at = begin_to_fill(message.size());
    try {
      if (!at.filled) at.filled.emplace();
      stream.wait(*at.free);
      if (!message.empty())
        cuda::check(cudaMemcpyAsync(at.memory.data(), message.data(),
                                    static_cast<std::size_t>(message.size()), cudaMemcpyDefault,
                                    stream.native()),
                    "cudaMemcpyAsync of a message");
      stream.record(*at.filled);
    } catch (...) {
      end_filling(0);
      throw;
    }
    end_filling(1);
  }

  void complete(cuda::Stream& stream) {
    expect_posted(edge_, completed_, posted_);
    std::unique_lock lock(mutex_);
    await(
        lock, edge_.destination, [&] { return sent_ > completed_; },
        [&](const std::string& when) { return no_message(edge_, completed_ + 1, when); });
    Slot& at = *ring_[completed_ % ring_.size()];
    lock.unlock();
    stream.wait(*at.filled);
    advance(completed_);
  }

  /// The slot of the next message is posted, and its GPU has come to where it is free.
  [[nodiscard]] bool can_send() const {
    std::unique_lock lock(mutex_);
    if (posted_ <= sent_) return false;
    const Slot& next = *ring_[sent_ % ring_.size()];
    lock.unlock();
    return is_done(*next.free);
  }
  /// The copy into the oldest slot not yet completed is done.
  [[nodiscard]] bool ready() const {
    std::unique_lock lock(mutex_);
    if (sent_ <= completed_) return false;
    const Slot& oldest = *ring_[completed_ % ring_.size()];
    lock.unlock();
    return is_done(*oldest.filled);
  }

  /// Takes the slots back and waits for the copies into them, after which their memory may go.
  /// @param failing  the receiver leaves by an exception, which its world is about to be told
  void close(bool failing) noexcept {
    std::unique_lock lock(mutex_);
    closed_ = true;
    failing_ = failing;
    changed_.wait(lock, [&] { return !filling_; });
    for (std::uint64_t n = completed_; n < sent_; ++n)
      (void)cudaEventSynchronize(ring_[n % ring_.size()]->filled->native());
  }

 private:
  struct Slot {
    Vector<std::byte> memory;
    std::optional<cuda::Event> free, filled;
  };

  static bool is_done(const cuda::Event& event) {
    const cudaError_t status = cudaEventQuery(event.native());
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    cuda::check(status, "cudaEventQuery");
    return true;
  }

  Slot& next_to_post() {
    std::lock_guard lock(mutex_);
    if (posted_ - completed_ == ring_.size()) {
      std::vector<std::unique_ptr<Slot>> larger(2 * ring_.size() + 2);
      for (std::uint64_t n = completed_; n < posted_; ++n)
        larger[n % larger.size()] = std::move(ring_[n % ring_.size()]);
      for (auto& slot : larger)
        if (!slot) slot = std::make_unique<Slot>();
      ring_ = std::move(larger);
    }
    return *ring_[posted_ % ring_.size()];
  }

  Slot& begin_to_fill(Index bytes) {
    std::unique_lock lock(mutex_);
    await(
        lock, edge_.source, [&] { return posted_ > sent_ && !failing_; },
        [&](const std::string& when) { return no_slot(edge_, sent_ + 1, when); });
    if (closed_) world_->throw_if_failed();
    expects(!closed_, ErrorCode::logic,
            [&] { return no_slot(edge_, sent_ + 1, "that is still open"); });
    Slot& at = *ring_[sent_ % ring_.size()];
    if (at.memory.size() != bytes)
      world_->disagree_and_throw(edge_.source,
                                 size_mismatch(edge_, sent_ + 1, bytes, at.memory.size()));
    filling_ = true;
    return at;
  }
  void end_filling(std::uint64_t messages) {
    {
      std::lock_guard lock(mutex_);
      filling_ = false;
      sent_ += messages;
    }
    changed_.notify_all();
  }

  void advance(std::uint64_t& number) {
    {
      std::lock_guard lock(mutex_);
      ++number;
    }
    changed_.notify_all();
  }

  template <class Ready, class Text>
  void await(std::unique_lock<std::mutex>& lock, int waiter, const Ready& ready, const Text& text) {
    expects(ready() || edge_.source != edge_.destination, ErrorCode::logic,
            [&] { return text("before, and this rank is the only one that could"); });
    switch (world_->wait(lock, changed_, ready)) {
      case World::Ended::ready: return;
      case World::Ended::failed: world_->throw_echo();
      case World::Ended::late:
        world_->fail_and_throw(
            waiter, Error(ErrorCode::timeout, text("within " + to_string(world_->deadline()))));
    }
  }

  const std::shared_ptr<World> world_;
  const Edge edge_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Slot n is ring_[n % size]; its address stays when the ring grows.
  std::vector<std::unique_ptr<Slot>> ring_;
  std::uint64_t posted_ = 0, sent_ = 0, completed_ = 0;
  bool filling_ = false;  // the sender queues work on a slot that it has taken
  bool closed_ = false;
  bool failing_ = false;  // a sender waits for the receiver's own sentence
};

/// The open channels of a communicator. A channel lives as long as one of its halves.
class DeviceChannels {
 public:
  [[nodiscard]] std::shared_ptr<DeviceChannel> open(const std::shared_ptr<World>& world,
                                                    Edge edge) {
    expect_channel_id(edge.id);
    std::lock_guard lock(mutex_);
    std::erase_if(open_, [](const auto& known) { return known.expired(); });
    for (const auto& known : open_)
      if (auto channel = known.lock(); channel && channel->edge() == edge) return channel;
    auto channel = std::make_shared<DeviceChannel>(world, edge);
    open_.push_back(channel);
    return channel;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<DeviceChannel>> open_;
};

}  // namespace detail

/// Sending half of a channel in device memory. Move-only.
class DeviceSender {
 public:
  explicit DeviceSender(std::shared_ptr<detail::DeviceChannel> channel)
      : channel_(std::move(channel)) {}
  DeviceSender(DeviceSender&&) noexcept = default;
  DeviceSender& operator=(DeviceSender&&) noexcept = default;

  /// @sync  ordered on stream; holds the host back until the receiver's thread has posted a slot
  /// @cost  one copy in device memory, or over the link between two GPUs
  void send(cuda::Stream& stream, Vector<const std::byte> message) {
    channel_->send(stream, message);
  }
  [[nodiscard]] bool can_send() const { return channel_->can_send(); }

 private:
  std::shared_ptr<detail::DeviceChannel> channel_;
};

/// Receiving half of a channel in device memory. Move-only. Ends before the memory of its slots.
class DeviceReceiver {
 public:
  explicit DeviceReceiver(std::shared_ptr<detail::DeviceChannel> channel)
      : channel_(std::move(channel)) {}
  DeviceReceiver(DeviceReceiver&&) noexcept = default;
  DeviceReceiver& operator=(DeviceReceiver&& other) noexcept {
    std::swap(channel_, other.channel_);
    std::swap(uncaught_, other.uncaught_);
    return *this;
  }
  ~DeviceReceiver() {
    if (channel_) channel_->close(std::uncaught_exceptions() > uncaught_);
  }

  /// @sync  ordered on stream, never blocks
  void post(cuda::Stream& stream, Vector<std::byte> slot) { channel_->post(stream, slot); }
  /// @sync  holds the host back until the sender's thread has queued the message, and stream until
  ///        it is there
  void complete(cuda::Stream& stream) { channel_->complete(stream); }
  [[nodiscard]] bool ready() const { return channel_->ready(); }

 private:
  std::shared_ptr<detail::DeviceChannel> channel_;
  int uncaught_ = std::uncaught_exceptions();
};

static_assert(sends<DeviceSender, cuda::Stream> && receives<DeviceReceiver, cuda::Stream>);

}  // namespace mega::inline v0::comm
