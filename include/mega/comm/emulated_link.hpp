/// @file  EmulatedLink: a communicator whose channels take as long as those of another machine, for
/// host ranks. Orders and their hiding of transfers can so be timed by the real executor where the
/// links are not.
///
/// The link of two ranks takes one message after the other in each direction, each for its bytes
/// over the bandwidth; a message counts as arrived one latency after it has been taken. That is a
/// deadline: data moves at once, and a receiver waits for the deadline. So links cost no processor,
/// and ranks that wait leave it to others. Collectives are those of the communicator: they take the
/// time that they take.
#pragma once
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/core/error.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {

/// One direction between two ranks.
struct EmulatedHop {
  double latency_s = 0;
  double bytes_per_s = std::numeric_limits<double>::infinity();
  double jitter_s = 0;  ///< mean of an exponential delay added to each message's latency
};

/// A rank's time in seconds: now() never goes back, wait_until(t) returns when it is t or later.
template <class C>
concept emulation_clock = requires(C& clock, double t) {
  { clock.now() } -> std::same_as<double>;
  clock.wait_until(t);
  { C::runs_by_itself } -> std::convertible_to<bool>;
};

/// The machine's time; waiting sleeps. Late by what the system takes to wake a thread, some 0.1 ms
/// where cores are free.
struct WallClock {
  static constexpr bool runs_by_itself = true;

  [[nodiscard]] static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static void wait_until(double t) {
    const std::chrono::duration<double> left(t - now());
    if (left.count() > 0) std::this_thread::sleep_for(left);
  }
};

/// Time that passes only where someone waits for it: a run takes no longer than its real work, and
/// equal runs give equal times to the last bit, on however busy a machine. Of one thread, so for
/// streams that run their work at once. Ranks agree on the time through their messages alone;
/// collectives do not move it. Whoever chooses by what has arrived needs WallClock.
class LogicalClock {
 public:
  static constexpr bool runs_by_itself = false;

  [[nodiscard]] double now() const noexcept { return now_; }
  void wait_until(double t) noexcept { now_ = std::max(now_, t); }

 private:
  double now_ = 0;
};

/// A message as it crossed: begins when the link takes it, ends when it has arrived.
struct EmulatedPassage {
  int from = 0;  ///< global ranks
  int to = 0;
  std::uint32_t channel = 0;
  Index bytes = 0;
  double start_s = 0;
  double end_s = 0;
};

namespace detail {

/// A channel between emulated ranks: its communicator's place among the splits, and its ends.
using EmulatedChannel = std::tuple<std::vector<int>, int, int, std::uint32_t>;

/// When the slots of one channel were posted, and when its messages arrive. Numbers count from 1.
class EmulatedTimes {
 public:
  void post(double at) {
    const std::lock_guard lock(mutex_);
    posted_.push_back(at);
  }
  /// @pre  slot `number` was posted
  [[nodiscard]] double posted(std::uint64_t number) const {
    const std::lock_guard lock(mutex_);
    return posted_[static_cast<std::size_t>(number - 1)];
  }
  void set_out(double arrival) {
    {
      const std::lock_guard lock(mutex_);
      arrivals_.push_back(arrival);
    }
    changed_.notify_all();
  }
  /// Holds the caller until message `number` has been sent, which its data show it was.
  [[nodiscard]] double arrival(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrivals_.size() >= number; });
    return arrivals_[static_cast<std::size_t>(number - 1)];
  }
  [[nodiscard]] bool arrived(std::uint64_t number, double now) const {
    const std::lock_guard lock(mutex_);
    return arrivals_.size() >= number && arrivals_[static_cast<std::size_t>(number - 1)] <= now;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<double> posted_, arrivals_;
};

}  // namespace detail

/// The links of a run, shared by its ranks, which are threads of one process. Keeps what crossed;
/// 64 bytes a message.
class EmulatedNetwork {
 public:
  /// @param hop  every direction between two ranks
  /// Throws Error(usage) for a hop that no message could cross in time.
  explicit EmulatedNetwork(const EmulatedHop& hop, std::uint64_t seed = 1)
      : seed_(seed), hop_(hop) {
    const auto is_time = [](double t) { return t >= 0 && std::isfinite(t); };
    expects(is_time(hop.latency_s) && is_time(hop.jitter_s) && hop.bytes_per_s > 0,
            ErrorCode::usage, [&] {
              return sentence("an emulated hop of latency ", hop.latency_s, " s, jitter ",
                              hop.jitter_s, " s and ", hop.bytes_per_s,
                              " bytes/s; times must be finite and not negative, bandwidths above "
                              "0");
            });
  }

  /// All messages so far, by rank that sent them and then in the order in which they left it.
  [[nodiscard]] std::vector<EmulatedPassage> passages() const {
    const std::lock_guard lock(mutex_);
    std::vector<EmulatedPassage> all;
    for (const auto& [ends, link] : links_)
      all.insert(all.end(), link.passages.begin(), link.passages.end());
    return all;
  }

  /// The times of a channel; the same object for both of its ends.
  [[nodiscard]] std::shared_ptr<detail::EmulatedTimes> times(
      const detail::EmulatedChannel& channel) {
    const std::lock_guard lock(mutex_);
    auto& times = times_[channel];
    if (!times) times = std::make_shared<detail::EmulatedTimes>();
    return times;
  }

  /// A message that the sender has ready at `now`. Returns when it arrives.
  [[nodiscard]] double carry(const Edge& edge, Index bytes, double now) {
    const std::lock_guard lock(mutex_);
    if (edge.source == edge.destination) return now;
    Link& link = links_[{edge.source, edge.destination}];
    const double start = std::max(now, link.free);
    link.free = start + static_cast<double>(bytes) / hop_.bytes_per_s;
    const double arrival = link.free + hop_.latency_s + delay(edge, link.passages.size());
    link.passages.push_back({edge.source, edge.destination, edge.id, bytes, start, arrival});
    return arrival;
  }

 private:
  struct Link {
    double free = 0;  ///< when it takes the next message
    std::vector<EmulatedPassage> passages;
  };

  [[nodiscard]] double delay(const Edge& edge, std::size_t number) const {
    if (hop_.jitter_s == 0) return 0;
    const RandomKey key{.seed = seed_,
                        .step = static_cast<std::uint64_t>(edge.source),
                        .layer = static_cast<std::uint32_t>(edge.destination),
                        .use = RandomUse::test};
    return -hop_.jitter_s * std::log1p(-double{key.uniform(static_cast<Index>(number))});
  }

  std::uint64_t seed_;
  EmulatedHop hop_;
  mutable std::mutex mutex_;
  std::map<std::pair<int, int>, Link> links_;
  std::map<detail::EmulatedChannel, std::shared_ptr<detail::EmulatedTimes>> times_;
};

namespace detail {

template <class S, class Clock>
concept keeps_time_on = Clock::runs_by_itself || std::same_as<S, host::Stream>;

/// What the two halves of a channel share.
template <class Clock>
struct EmulatedEnd {
  std::shared_ptr<EmulatedNetwork> network;
  std::shared_ptr<Clock> clock;
  std::shared_ptr<EmulatedTimes> times;
  Edge edge;
};

}  // namespace detail

/// Sending half. send() holds its stream as the communicator's does, until a slot is posted; while
/// the message is under way the stream goes on, as beside a copy engine.
template <class Sender, class Clock>
class EmulatedSender {
 public:
  EmulatedSender(Sender sender, detail::EmulatedEnd<Clock> end)
      : sender_(std::move(sender)), end_(std::move(end)) {}

  template <detail::keeps_time_on<Clock> S>
  void send(S& stream, Vector<const std::byte> message) {
    sender_.send(stream, message);
    stream.run([end = end_, bytes = message.size(), number = ++sent_] {
      end.clock->wait_until(end.times->posted(number));
      end.times->set_out(end.network->carry(end.edge, bytes, end.clock->now()));
    });
  }

  [[nodiscard]] bool can_send() const requires Clock::runs_by_itself { return sender_.can_send(); }

 private:
  Sender sender_;
  detail::EmulatedEnd<Clock> end_;
  std::uint64_t sent_ = 0;
};

/// Receiving half: a message is there once its data are and its time has come.
template <class Receiver, class Clock>
class EmulatedReceiver {
 public:
  EmulatedReceiver(Receiver receiver, detail::EmulatedEnd<Clock> end)
      : receiver_(std::move(receiver)), end_(std::move(end)) {}

  template <detail::keeps_time_on<Clock> S>
  void post(S& stream, Vector<std::byte> slot) {
    stream.run([end = end_] { end.times->post(end.clock->now()); });
    receiver_.post(stream, slot);
  }

  template <detail::keeps_time_on<Clock> S>
  void complete(S& stream) {
    receiver_.complete(stream);
    stream.run(
        [end = end_, number = ++completed_] { end.clock->wait_until(end.times->arrival(number)); });
  }

  [[nodiscard]] bool ready() const requires Clock::runs_by_itself {
    return receiver_.ready() && end_.times->arrived(completed_ + 1, end_.clock->now());
  }

 private:
  Receiver receiver_;
  detail::EmulatedEnd<Clock> end_;
  std::uint64_t completed_ = 0;
};

/// Comm with emulated links between its ranks; all else is Comm's own. Ranks of one process.
template <class Comm, emulation_clock Clock = WallClock>
class EmulatedLink : public Comm {
 public:
  using sender = EmulatedSender<typename Comm::sender, Clock>;
  using receiver = EmulatedReceiver<typename Comm::receiver, Clock>;

  /// Collective over `world`. @param network  of the run, the same object on all ranks
  EmulatedLink(Comm world, std::shared_ptr<EmulatedNetwork> network)
      : EmulatedLink(std::move(world), std::move(network), std::make_shared<Clock>(), {}) {}

  /// This rank's time.
  [[nodiscard]] Clock& clock() noexcept { return *clock_; }

  [[nodiscard]] EmulatedLink split(int color, int key) {
    std::vector<int> path = path_;
    path.push_back(++splits_);
    path.push_back(color);
    return {Comm::split(color, key), network_, clock_, std::move(path)};
  }

  [[nodiscard]] sender open_sender(int peer, std::uint32_t id) {
    typename Comm::sender half = Comm::open_sender(peer, id);
    return {std::move(half), end({global(this->rank()), global(peer), id})};
  }
  [[nodiscard]] receiver open_receiver(int peer, std::uint32_t id) {
    typename Comm::receiver half = Comm::open_receiver(peer, id);
    return {std::move(half), end({global(peer), global(this->rank()), id})};
  }

 private:
  EmulatedLink(Comm comm, std::shared_ptr<EmulatedNetwork> network, std::shared_ptr<Clock> clock,
               std::vector<int> path)
      : Comm(std::move(comm)),
        network_(std::move(network)),
        clock_(std::move(clock)),
        path_(std::move(path)),
        members_(static_cast<std::size_t>(this->size())) {
    host::Stream stream;
    const std::int32_t own = this->global_rank();
    Comm::all_gather(stream, Vector<std::int32_t>(members_.data(), this->size()),
                     Vector<const std::int32_t>(&own, 1));
  }

  [[nodiscard]] int global(int member) const { return members_[static_cast<std::size_t>(member)]; }
  [[nodiscard]] detail::EmulatedEnd<Clock> end(const Edge& edge) {
    return {network_, clock_, network_->times({path_, edge.source, edge.destination, edge.id}),
            edge};
  }

  std::shared_ptr<EmulatedNetwork> network_;
  std::shared_ptr<Clock> clock_;
  std::vector<int> path_;  // number and color of each split since the world
  std::vector<std::int32_t> members_;
  int splits_ = 0;
};

static_assert(emulation_clock<WallClock> && emulation_clock<LogicalClock>);

}  // namespace mega::inline v0::comm
