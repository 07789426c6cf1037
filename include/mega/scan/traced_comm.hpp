/// @file  TracedComm: a communicator whose operations are recorded, with what it takes to find the
/// other ranks' part of each: group, sequence number, peer, bytes, element type.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/hooks.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// Numbers communicators; see HostRecorder::add_group().
template <class R>
concept numbers_groups = requires(R& recorder) {
  { recorder.add_group(std::string(), std::vector<int>()) } -> std::same_as<std::int32_t>;
};

/// Optional in a communicator: the global ranks of its members, in member order.
template <class C>
concept tells_members = requires(const C& c) {
  { c.members() } -> std::convertible_to<std::span<const int>>;
};

template <class T>
[[nodiscard]] constexpr std::string_view dtype_name() noexcept {
  if constexpr (std::same_as<T, float>) return "float32";
  if constexpr (std::same_as<T, double>) return "float64";
  if constexpr (std::same_as<T, Bfloat16>) return "bfloat16";
  if constexpr (std::same_as<T, Float16>) return "float16";
  if constexpr (std::same_as<T, std::int32_t>) return "int32";
  if constexpr (std::same_as<T, std::int64_t>) return "int64";
  if constexpr (std::same_as<T, std::byte>) return "byte";
  return "";
}

namespace detail {

/// A series of operations: its number at the recorder, known from the first operation on.
template <class Recorder>
class TracedSeries {
 public:
  TracedSeries(const Recorder& recorder, std::string name, std::vector<int> ranks)
      : recorder_(recorder), name_(std::move(name)), ranks_(std::move(ranks)) {}

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// @pre  before the first operation, else it stays as it was
  void set_name(std::string name) { name_ = std::move(name); }
  [[nodiscard]] Recorder& recorder() noexcept { return recorder_; }
  [[nodiscard]] const Recorder& recorder() const noexcept { return recorder_; }
  /// Global rank of a member.
  [[nodiscard]] std::int32_t global(int member) const noexcept {
    const auto m = static_cast<std::size_t>(member);
    return m < ranks_.size() ? ranks_[m] : -1;
  }

  /// The next operation. Numbers count what is not recorded too: they are equal on all ranks.
  [[nodiscard]] SpanInfo next(std::string_view name, std::int64_t bytes, std::string_view dtype,
                              std::int32_t peer) {
    if (group_ < 0) {
      if constexpr (numbers_groups<Recorder>) group_ = recorder_.add_group(name_, ranks_);
    }
    SpanInfo info{name};
    info.bytes = bytes;
    info.peer = peer;
    info.kind = SpanKind::communication;
    info.group = group_;
    info.sequence = ++sequence_;
    info.dtype = dtype;
    return info;
  }

 private:
  Recorder recorder_;
  std::string name_;
  std::vector<int> ranks_;
  std::int32_t group_ = -1;
  std::int64_t sequence_ = 0;
};

/// The channel is a group of its own, since an ordered pair of ranks may have several.
template <class Sender, class Recorder>
class TracedSender {
 public:
  TracedSender(Sender sender, TracedSeries<Recorder> series, std::int32_t peer)
      : sender_(std::move(sender)), series_(std::move(series)), peer_(peer) {}

  template <class S>
  void send(S& stream, Vector<const std::byte> message) requires comm::sends<Sender, S> {
    if (!std::exchange(named_, true)) name_stream(series_.recorder(), stream, "send");
    const ScopedSpan span(series_.recorder(), stream,
                          series_.next("send", message.size(), "byte", peer_));
    sender_.send(stream, message);
  }
  [[nodiscard]] bool can_send() const requires comm::tells_whether_it_can_send<Sender> {
    return sender_.can_send();
  }

 private:
  Sender sender_;
  TracedSeries<Recorder> series_;
  std::int32_t peer_;
  bool named_ = false;
};

template <class Receiver, class Recorder>
class TracedReceiver {
 public:
  TracedReceiver(Receiver receiver, TracedSeries<Recorder> series, std::int32_t peer)
      : receiver_(std::move(receiver)), series_(std::move(series)), peer_(peer) {}

  template <class S>
  void post(S& stream, Vector<std::byte> slot) requires comm::receives<Receiver, S> {
    receiver_.post(stream, slot);
    posted_.push(slot.size());
  }
  template <class S>
  void complete(S& stream) requires comm::receives<Receiver, S> {
    if (!std::exchange(named_, true)) name_stream(series_.recorder(), stream, "receive");
    const ScopedSpan span(series_.recorder(), stream,
                          series_.next("recv", posted_.pop(), "byte", peer_));
    receiver_.complete(stream);
  }
  [[nodiscard]] bool ready() const requires comm::tells_whether_it_is_ready<Receiver> {
    return receiver_.ready();
  }

 private:
  /// Sizes of the slots under way, oldest first; memory of the most that there were.
  class Sizes {
   public:
    void push(Index size) {
      if (count_ == sizes_.size()) {
        std::vector<Index> longer(sizes_.empty() ? 8 : 2 * sizes_.size());
        for (std::size_t i = 0; i < count_; ++i) longer[i] = sizes_[(first_ + i) % sizes_.size()];
        sizes_ = std::move(longer);
        first_ = 0;
      }
      sizes_[(first_ + count_++) % sizes_.size()] = size;
    }
    /// 0 where nothing is posted: the receiver says what is wrong with that.
    Index pop() noexcept {
      if (count_ == 0) return 0;
      const Index size = sizes_[first_];
      first_ = (first_ + 1) % sizes_.size();
      --count_;
      return size;
    }

   private:
    std::vector<Index> sizes_;
    std::size_t first_ = 0, count_ = 0;
  };

  Receiver receiver_;
  TracedSeries<Recorder> series_;
  std::int32_t peer_;
  Sizes posted_;
  bool named_ = false;
};

/// Names of the ends of channels, where the communicator has them.
template <class Comm, class Recorder>
struct TracedChannels {};
template <class Comm, class Recorder>
requires requires {
  typename Comm::sender;
  typename Comm::receiver;
}
struct TracedChannels<Comm, Recorder> {
  using sender = TracedSender<typename Comm::sender, Recorder>;
  using receiver = TracedReceiver<typename Comm::receiver, Recorder>;
};

}  // namespace detail

/// Models what Comm models, on the same streams. Each call is a span of kind communication, named
/// as the operation, around the call of Comm; bytes are this rank's input. A communicator of one
/// rank records nothing: it moves nothing between ranks. split() gives a traced communicator.
/// Move-only as Comm is.
template <class Comm, class Recorder>
class TracedComm : public detail::TracedChannels<Comm, Recorder> {
 public:
  using inner_type = Comm;
  /// Refers to `world`, which outlives it.
  TracedComm(Comm& world, const Recorder& recorder)
      : inner_(&world), series_(recorder, name_of(world, "world"), members_of(world, true)) {}
  /// Owns the communicator.
  TracedComm(Comm&& owned, const Recorder& recorder, std::string name = "group")
      : owned_(std::make_unique<Comm>(std::move(owned))),
        inner_(owned_.get()),
        series_(recorder, std::move(name), members_of(*inner_, false)) {}

  [[nodiscard]] int rank() const noexcept { return inner_->rank(); }
  [[nodiscard]] int size() const noexcept { return inner_->size(); }
  [[nodiscard]] Comm& inner() noexcept { return *inner_; }
  [[nodiscard]] Recorder& recorder() noexcept { return series_.recorder(); }

  [[nodiscard]] int global_rank() const requires requires(const Comm& c) { c.global_rank(); }
  { return inner_->global_rank(); }
  [[nodiscard]] std::span<const int> members() const requires tells_members<Comm> {
    return inner_->members();
  }
  [[nodiscard]] const std::string& name() const noexcept { return series_.name(); }
  /// Also of the communicator inside, where that has a name.
  void set_name(std::string name) {
    if constexpr (requires { inner_->set_name(name); }) inner_->set_name(name);
    series_.set_name(std::move(name));
  }

  [[nodiscard]] TracedComm split(int color, int key) requires comm::has_split<Comm> {
    // The color is not in the name: it tells apart groups whose ranks differ anyway.
    return TracedComm(inner_->split(color, key), series_.recorder(),
                      series_.name() + "." + std::to_string(++splits_));
  }

  template <class S>
  void barrier(S& stream) requires comm::has_barrier<Comm, S> {
    const auto span = trace(stream, "barrier", 0, "", -1);
    inner_->barrier(stream);
  }
  template <class S, class T>
  void all_reduce(S& stream, Vector<T> inout,
                  comm::Reduce reduce) requires comm::has_all_reduce<Comm, S, T> {
    const auto span = trace(stream, "all_reduce", inout);
    inner_->all_reduce(stream, inout, reduce);
  }
  template <class S, class T>
  void reduce_scatter(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in,
                      comm::Reduce reduce) requires comm::has_reduce_scatter<Comm, S, T> {
    const auto span = trace(stream, "reduce_scatter", in);
    inner_->reduce_scatter(stream, out, in, reduce);
  }
  template <class S, class T>
  void all_gather(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) requires
      comm::has_all_gather<Comm, S, T> {
    const auto span = trace(stream, "all_gather", in);
    inner_->all_gather(stream, out, in);
  }
  template <class S, class T>
  void broadcast(S& stream, Vector<T> inout, int root) requires comm::has_broadcast<Comm, S, T> {
    const auto span = trace(stream, "broadcast", inout, series_.global(root));
    inner_->broadcast(stream, inout, root);
  }
  template <class S, class T>
  void all_to_all(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) requires
      comm::has_all_to_all<Comm, S, T> {
    const auto span = trace(stream, "all_to_all", in);
    inner_->all_to_all(stream, out, in);
  }

  [[nodiscard]] auto open_sender(int peer, std::uint32_t id) requires requires {
    typename Comm::sender;
  }
  {
    using Sender = typename TracedComm::sender;
    return Sender(inner_->open_sender(peer, id), channel(rank(), peer, id), series_.global(peer));
  }
  [[nodiscard]] auto open_receiver(int peer, std::uint32_t id) requires requires {
    typename Comm::receiver;
  }
  {
    using Receiver = typename TracedComm::receiver;
    return Receiver(inner_->open_receiver(peer, id), channel(peer, rank(), id),
                    series_.global(peer));
  }

  template <class Done, class Late>
  void poll(const Done& done, const Late& late) requires comm::polls<Comm> {
    inner_->poll(done, late);
  }
  /// A replay has none of the calls that record.
  [[nodiscard]] bool may_replay() const noexcept {
    bool records = !std::same_as<Recorder, NullRecorder>;
    if constexpr (requires(const Recorder& r) {
                    { r.records() } -> std::same_as<bool>;
                  })
      records = series_.recorder().records();
    return !records && comm::is_replayable(*inner_);
  }
  void attend(bool on) requires comm::has_attended_calls<Comm> { inner_->attend(on); }

 private:
  [[nodiscard]] static std::string name_of(const Comm& c, const char* otherwise) {
    if constexpr (requires {
                    { c.name() } -> std::convertible_to<std::string>;
                  }) {
      return c.name();
    } else {
      return otherwise;
    }
  }
  [[nodiscard]] static std::vector<int> members_of(const Comm& c, bool is_world) {
    if constexpr (tells_members<Comm>) {
      const std::span<const int> members = c.members();
      return {members.begin(), members.end()};
    }
    std::vector<int> all(is_world ? static_cast<std::size_t>(c.size()) : 0);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  [[nodiscard]] detail::TracedSeries<Recorder> channel(int from, int to, std::uint32_t id) {
    std::vector<int> ends;
    for (const int end : {from, to})
      if (series_.global(end) >= 0) ends.push_back(series_.global(end));
    return {series_.recorder(), series_.name() + " channel " + std::to_string(id), std::move(ends)};
  }

  /// A span where there is somebody to communicate with.
  template <class S>
  class Span {
   public:
    Span(TracedComm& comm, S& stream, std::string_view name, std::int64_t bytes,
         std::string_view dtype, std::int32_t peer) {
      if (comm.size() > 1)
        span_.emplace(comm.recorder(), stream, comm.series_.next(name, bytes, dtype, peer));
    }

   private:
    std::optional<ScopedSpan<Recorder, S>> span_;
  };
  template <class S>
  [[nodiscard]] Span<S> trace(S& stream, std::string_view name, std::int64_t bytes,
                              std::string_view dtype, std::int32_t peer) {
    return Span<S>(*this, stream, name, bytes, dtype, peer);
  }
  template <class S, class T>
  [[nodiscard]] auto trace(S& stream, std::string_view name, Vector<T> in, std::int32_t peer = -1) {
    return trace(stream, name, in.size() * static_cast<Index>(sizeof(T)),
                 dtype_name<std::remove_const_t<T>>(), peer);
  }

  std::unique_ptr<Comm> owned_;
  Comm* inner_;
  detail::TracedSeries<Recorder> series_;
  int splits_ = 0;
};

}  // namespace mega::inline v0::scan
