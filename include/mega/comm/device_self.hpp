/// @file  DeviceSelfComm: the communicator of a single rank on a GPU. Collectives are copies or
/// nothing, channels are copies in device memory ordered by events.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/event.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {

namespace detail {

/// Slots in the order in which they were posted. Slot n has the events n % size, made when more are
/// under way than ever before, then used again.
class DeviceSelfChannel {
 public:
  explicit DeviceSelfChannel(std::uint32_t id) : id_(id) {}

  void post(cuda::Stream& stream, Vector<std::byte> slot) {
    if (posted_ - completed_ == ring_.size()) grow();
    Slot& at = ring_[posted_++ % ring_.size()];
    at.memory = slot;
    stream.record(at.free);
  }
  void send(cuda::Stream& stream, Vector<const std::byte> message) {
    expects(sent_ < posted_, ErrorCode::logic, [&] {
      return sentence("channel ", id_, ": message ", sent_ + 1, " has no slot, ", posted_,
                      " were posted, and one rank has nobody to wait for");
    });
    Slot& at = ring_[sent_++ % ring_.size()];
    stream.wait(at.free);
    cuda::copy(stream, at.memory, message);
    stream.record(at.filled);
  }
  [[nodiscard]] bool can_send() const noexcept { return sent_ < posted_; }
  [[nodiscard]] bool ready() const noexcept { return completed_ < sent_; }
  void complete(cuda::Stream& stream) {
    expects(completed_ < sent_, ErrorCode::logic, [&] {
      return sentence("channel ", id_, ": message ", completed_ + 1, " was not sent, ", sent_,
                      " were, and one rank has nobody to wait for");
    });
    stream.wait(ring_[completed_++ % ring_.size()].filled);
  }

 private:
  struct Slot {
    Vector<std::byte> memory;
    cuda::Event free, filled;
  };

  /// Slots under way keep their events and get places that fit the new size.
  void grow() {
    std::vector<Slot> larger(2 * ring_.size() + 2);
    for (std::uint64_t n = completed_; n < posted_; ++n)
      larger[n % larger.size()] = std::move(ring_[n % ring_.size()]);
    ring_ = std::move(larger);
  }

  std::uint32_t id_;
  std::vector<Slot> ring_;
  std::uint64_t posted_ = 0, sent_ = 0, completed_ = 0;
};

}  // namespace detail

class DeviceSelfSender {
 public:
  explicit DeviceSelfSender(std::shared_ptr<detail::DeviceSelfChannel> channel)
      : channel_(std::move(channel)) {}
  /// @cost  one copy in device memory
  void send(cuda::Stream& stream, Vector<const std::byte> message) {
    channel_->send(stream, message);
  }
  [[nodiscard]] bool can_send() const { return channel_->can_send(); }

 private:
  std::shared_ptr<detail::DeviceSelfChannel> channel_;
};

class DeviceSelfReceiver {
 public:
  explicit DeviceSelfReceiver(std::shared_ptr<detail::DeviceSelfChannel> channel)
      : channel_(std::move(channel)) {}
  void post(cuda::Stream& stream, Vector<std::byte> slot) { channel_->post(stream, slot); }
  void complete(cuda::Stream& stream) { channel_->complete(stream); }
  [[nodiscard]] bool ready() const { return channel_->ready(); }

 private:
  std::shared_ptr<detail::DeviceSelfChannel> channel_;
};

/// One rank. A send needs a slot that was posted before, a completion a message that was sent
/// before; else they throw Error(logic), since no other rank could bring it.
class DeviceSelfComm {
 public:
  using sender = DeviceSelfSender;
  using receiver = DeviceSelfReceiver;

  [[nodiscard]] int rank() const noexcept { return 0; }
  [[nodiscard]] int size() const noexcept { return 1; }
  [[nodiscard]] DeviceSelfComm split(int /*color*/, int /*key*/) const { return {}; }

  void barrier(cuda::Stream&) const noexcept {}

  template <element T>
  void all_reduce(cuda::Stream&, Vector<T>, Reduce) const noexcept {}

  template <element T>
  void reduce_scatter(cuda::Stream& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in,
                      Reduce) const {
    if (out.data() != in.data()) cuda::copy(stream, out, in);
  }
  template <element T>
  void all_gather(cuda::Stream& stream, Vector<T> out,
                  Vector<const std::type_identity_t<T>> in) const {
    if (out.data() != in.data()) cuda::copy(stream, out, in);
  }
  template <element T>
  void broadcast(cuda::Stream&, Vector<T>, int root) const {
    expect_self(root);
  }
  template <element T>
  void all_to_all(cuda::Stream& stream, Vector<T> out,
                  Vector<const std::type_identity_t<T>> in) const {
    cuda::copy(stream, out, in);
  }

  [[nodiscard]] sender open_sender(int peer, std::uint32_t id) { return sender(open(peer, id)); }
  [[nodiscard]] receiver open_receiver(int peer, std::uint32_t id) {
    return receiver(open(peer, id));
  }

  /// Throws Error(logic) where done() gives false: nobody else would change that.
  template <class Done, class Late>
  void poll(const Done& done, const Late& late) const {
    expects(done(), ErrorCode::logic, [&] { return late("on a communicator of one rank"); });
  }

 private:
  static void expect_self(int rank) {
    expects(rank == 0, ErrorCode::logic,
            [&] { return sentence("rank ", rank, " is not in a communicator of one rank, 0"); });
  }
  std::shared_ptr<detail::DeviceSelfChannel> open(int peer, std::uint32_t id) {
    expect_self(peer);
    std::weak_ptr<detail::DeviceSelfChannel>& known = channels_[id];
    auto channel = known.lock();
    if (!channel) known = channel = std::make_shared<detail::DeviceSelfChannel>(id);
    return channel;
  }

  std::map<std::uint32_t, std::weak_ptr<detail::DeviceSelfChannel>> channels_;
};

static_assert(communicator<DeviceSelfComm, cuda::Stream>);
static_assert(has_channel_queries<DeviceSelfComm, cuda::Stream>);

}  // namespace mega::inline v0::comm

namespace mega::inline v0 {
using comm::DeviceSelfComm;
}
