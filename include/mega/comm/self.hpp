/// @file  SelfComm: the communicator of a single rank. Collectives are copies or nothing.
#pragma once
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/reduce.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/device.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>

#include <cstdint>
#include <memory>
#include <type_traits>

namespace mega::inline v0::comm {

/// One rank, on streams of any device that has copy(stream, out, in). Channels are host memory.
class SelfComm {
 public:
  using sender = ChannelSender;
  using receiver = ChannelReceiver;

  explicit SelfComm(Seconds deadline = default_deadline)
      : shared_(std::make_shared<Shared>(deadline)) {}

  [[nodiscard]] int rank() const noexcept { return 0; }
  [[nodiscard]] int size() const noexcept { return 1; }
  [[nodiscard]] SelfComm split(int /*color*/, int /*key*/) const {
    return SelfComm(shared_->world.deadline());
  }

  template <stream S>
  void barrier(S&) const noexcept {}

  template <stream S, reducible T>
  void all_reduce(S&, Vector<T>, Reduce) const noexcept {}

  template <stream S, reducible T>
  void reduce_scatter(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in,
                      Reduce) const {
    detail::expect_pieces(Operation::reduce_scatter, in.size(), out.size(), 1);
    if (out.data() != in.data()) copy(stream, out, in);
  }

  template <stream S, element T>
  void all_gather(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) const {
    detail::expect_pieces(Operation::all_gather, out.size(), in.size(), 1);
    if (out.data() != in.data()) copy(stream, out, in);
  }

  template <stream S, element T>
  void broadcast(S&, Vector<T>, int root) const {
    detail::expect_member("broadcast root", root, 1);
  }

  template <stream S, element T>
  void all_to_all(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) const {
    detail::expect_exchange(out.size(), in.size(), 1);
    copy(stream, out, in);
  }

  /// On a stream that runs in the calling thread, a send without a posted slot and a receive
  /// without a message throw Error(logic) at once, since nobody else could end the wait.
  [[nodiscard]] sender open_sender(int peer, std::uint32_t id) { return sender(open(peer, id)); }
  [[nodiscard]] receiver open_receiver(int peer, std::uint32_t id) {
    return receiver(open(peer, id));
  }

  template <class Done, class Late>
  void poll(const Done& done, const Late& late) const {
    detail::poll(shared_->world, 0, done, late);
  }

 private:
  struct Shared {
    explicit Shared(Seconds deadline) : world(deadline) {}
    World world;
    detail::Channels channels;
  };

  std::shared_ptr<detail::Channel> open(int peer, std::uint32_t id) {
    detail::expect_member("channel peer", peer, 1);
    // A channel that outlives its communicator keeps what they share.
    return shared_->channels.open(std::shared_ptr<World>(shared_, &shared_->world), {0, 0, id},
                                  true);
  }

  std::shared_ptr<Shared> shared_;
};

static_assert(communicator<SelfComm, host::Stream>);
static_assert(has_channel_queries<SelfComm, host::Stream>);

}  // namespace mega::inline v0::comm

namespace mega::inline v0 {
using comm::SelfComm;
}
