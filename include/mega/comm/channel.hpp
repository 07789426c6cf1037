/// @file  Ordered channels through shared memory: the receiver posts slots, the sender fills the
/// oldest. SelfComm and ThreadComm open them.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {

/// Channel ids reach from 0 to this one, on every communicator.
inline constexpr std::uint32_t max_channel_id = 1u << 20;

/// What names a channel within a run: global ranks and the id.
struct Edge {
  int source = 0;
  int destination = 0;
  std::uint32_t id = 0;
  friend bool operator==(const Edge&, const Edge&) = default;
};

/// "channel 7 from rank 0 to rank 1".
[[nodiscard]] inline std::string describe(const Edge& edge) {
  return sentence("channel ", edge.id, " from rank ", edge.source, " to rank ", edge.destination);
}

namespace detail {

inline void expect_channel_id(std::uint32_t id) {
  expects(id <= max_channel_id, ErrorCode::logic,
          [&] { return sentence("channel id ", id, " is not in 0 to ", max_channel_id); });
}

[[nodiscard]] inline std::string size_mismatch(const Edge& edge, std::uint64_t number,
                                               Index message, Index slot) {
  return sentence(describe(edge), ": message #", number, " has ", message, " bytes, its slot has ",
                  slot);
}
[[nodiscard]] inline std::string no_slot(const Edge& edge, std::uint64_t number,
                                         const std::string& when) {
  return sentence("send #", number, " on ", describe(edge), ": rank ", edge.destination,
                  " posted no slot ", when);
}
[[nodiscard]] inline std::string no_message(const Edge& edge, std::uint64_t number,
                                            const std::string& when) {
  return sentence("receive #", number, " on ", describe(edge), ": rank ", edge.source,
                  " sent no message ", when);
}
inline void expect_posted(const Edge& edge, std::uint64_t completed, std::uint64_t posted) {
  expects(completed < posted, ErrorCode::logic, [&] {
    return sentence("complete #", completed + 1, " on ", describe(edge), ": only ", posted,
                    " slots were posted");
  });
}

/// Gives way to other ranks, which may share this core, after `polls` questions in vain.
inline void rest(int polls) {
  if (polls < 20) return;
  if (polls < 2000)
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
}

/// poll() of communicators whose ranks share a World. @param rank  the one that waits, global
template <class Done, class Late>
void poll(World& world, int rank, const Done& done, const Late& late) {
  const auto end =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(world.deadline());
  for (int polls = 0; !done(); ++polls) {
    world.throw_if_failed();
    if (std::chrono::steady_clock::now() >= end)
      world.fail_and_throw(
          rank, Error(ErrorCode::timeout, late("within " + to_string(world.deadline()))));
    rest(polls);
  }
}

/// The state that both halves share. Messages are numbered from 1.
class Channel {
 public:
  /// @param alone  one thread serves both halves, so that a wait in it can never end
  Channel(std::shared_ptr<World> world, Edge edge, bool alone)
      : world_(std::move(world)), edge_(edge), alone_(alone) {}

  [[nodiscard]] const Edge& edge() const noexcept { return edge_; }

  void post(Vector<std::byte> slot) {
    {
      std::lock_guard lock(mutex_);
      slots_.push_back(slot);
    }
    changed_.notify_all();
  }

  /// Copies `message` into the oldest slot. `issuer` is the thread that queued the call.
  void send(Vector<const std::byte> message, std::thread::id issuer) {
    std::unique_lock lock(mutex_);
    const std::uint64_t number = filled_ + 1;
    await(
        lock, issuer, edge_.source, [&] { return !slots_.empty(); },
        [&](const std::string& when) { return no_slot(edge_, number, when); });
    // After a failure the receiver's buffers may be gone.
    world_->throw_if_failed();
    const Vector<std::byte> slot = slots_.front();
    if (slot.size() != message.size())
      world_->disagree_and_throw(edge_.source,
                                 size_mismatch(edge_, number, message.size(), slot.size()));
    slots_.erase(slots_.begin());
    filling_ = true;
    lock.unlock();
    if (!message.empty())
      std::memcpy(slot.data(), message.data(), static_cast<std::size_t>(message.size()));
    lock.lock();
    filling_ = false;
    ++filled_;
    lock.unlock();
    changed_.notify_all();
  }

  /// Waits for message `number`.
  void complete(std::uint64_t number, std::thread::id issuer) {
    std::unique_lock lock(mutex_);
    await(
        lock, issuer, edge_.destination, [&] { return filled_ >= number; },
        [&](const std::string& when) { return no_message(edge_, number, when); });
  }

  /// Message `number` is in its slot.
  [[nodiscard]] bool is_filled(std::uint64_t number) const {
    std::lock_guard lock(mutex_);
    return filled_ >= number;
  }
  /// A slot for message `number` is posted.
  [[nodiscard]] bool is_posted(std::uint64_t number) const {
    std::lock_guard lock(mutex_);
    return filled_ + slots_.size() + (filling_ ? 1 : 0) >= number;
  }

  /// Forgets the slots, after which their memory may go.
  void close() noexcept {
    std::unique_lock lock(mutex_);
    slots_.clear();
    changed_.wait(lock, [&] { return !filling_; });
  }

 private:
  template <class Ready, class Text>
  void await(std::unique_lock<std::mutex>& lock, std::thread::id issuer, int waiter,
             const Ready& ready, const Text& text) {
    expects(ready() || !alone_ || issuer != std::this_thread::get_id(), ErrorCode::logic,
            [&] { return text("before, and this thread is the only one that could"); });
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
  const bool alone_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Vector<std::byte>> slots_;  // posted, not yet filled: a few at most
  std::uint64_t filled_ = 0;
  bool filling_ = false;  // the sender writes into a slot that it has taken
};

/// The open channels of a communicator. A channel lives as long as one of its halves.
class Channels {
 public:
  [[nodiscard]] std::shared_ptr<Channel> open(const std::shared_ptr<World>& world, Edge edge,
                                              bool alone) {
    expect_channel_id(edge.id);
    std::lock_guard lock(mutex_);
    for (std::size_t i = open_.size(); i-- > 0;) {
      if (auto channel = open_[i].lock(); !channel) {
        open_[i].swap(open_.back());
        open_.pop_back();
      } else if (channel->edge() == edge) {
        return channel;
      }
    }
    auto channel = std::make_shared<Channel>(world, edge, alone);
    open_.push_back(channel);
    return channel;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Channel>> open_;
};

}  // namespace detail

/// Sending half of a channel through shared memory. Move-only.
class ChannelSender {
 public:
  explicit ChannelSender(std::shared_ptr<detail::Channel> channel) : channel_(std::move(channel)) {}
  ChannelSender(ChannelSender&&) noexcept = default;
  ChannelSender& operator=(ChannelSender&&) noexcept = default;

  /// @sync  ordered on stream; holds it back until the receiver has posted a slot
  /// @cost  one copy of the message
  template <host::host_stream S>
  void send(S& stream, Vector<const std::byte> message) {
    ++sent_;
    stream.run([channel = channel_, message, issuer = std::this_thread::get_id()] {
      channel->send(message, issuer);
    });
  }

  [[nodiscard]] bool can_send() const { return channel_->is_posted(sent_ + 1); }

 private:
  std::shared_ptr<detail::Channel> channel_;
  std::uint64_t sent_ = 0;
};

/// Receiving half of a channel through shared memory. Move-only. Its end takes back the slots that
/// wait for a message, so it ends before their memory does and after its queued work is done.
class ChannelReceiver {
 public:
  explicit ChannelReceiver(std::shared_ptr<detail::Channel> channel)
      : channel_(std::move(channel)) {}
  ChannelReceiver(ChannelReceiver&&) noexcept = default;
  ChannelReceiver& operator=(ChannelReceiver&& other) noexcept {
    std::swap(channel_, other.channel_);
    std::swap(posted_, other.posted_);
    std::swap(completed_, other.completed_);
    return *this;
  }
  ~ChannelReceiver() {
    if (channel_) channel_->close();
  }

  /// @sync  ordered on stream, never blocks
  template <host::host_stream S>
  void post(S& stream, Vector<std::byte> slot) {
    ++posted_;
    stream.run([channel = channel_, slot] { channel->post(slot); });
  }

  /// @sync  holds stream back until the oldest posted slot not yet completed is filled
  template <host::host_stream S>
  void complete(S& stream) {
    detail::expect_posted(channel_->edge(), completed_, posted_);
    stream.run([channel = channel_, number = ++completed_, issuer = std::this_thread::get_id()] {
      channel->complete(number, issuer);
    });
  }

  [[nodiscard]] bool ready() const { return channel_->is_filled(completed_ + 1); }

 private:
  std::shared_ptr<detail::Channel> channel_;
  std::uint64_t posted_ = 0;
  std::uint64_t completed_ = 0;
};

static_assert(sends<ChannelSender, host::Stream> && receives<ChannelReceiver, host::Stream>);

}  // namespace mega::inline v0::comm
