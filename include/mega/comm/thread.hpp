/// @file  ThreadComm: ranks are threads of one process and read each other's memory.
/// World (world.hpp) keeps the deadline and the first failure, Rendezvous brings the members of a
/// communicator together, Group holds what they share, ThreadComm is one rank's handle on it.
#pragma once
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/reduce.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>

#include <atomic>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {
namespace detail {

/// What a member brings to a collective. The memory stays valid until all members have left.
struct Arrival {
  const void* in = nullptr;
  void* out = nullptr;
};

/// Where the members of a communicator meet for a collective.
///
/// A member may only give up while somebody is missing. From the moment the last one is there,
/// nobody leaves before all work is done: the others read its memory, and that work neither waits
/// nor throws. Leaving early and arriving are both done under the lock, and a member that leaves
/// early has seen the world fail, so a later one never takes it for present.
class Rendezvous {
 public:
  Rendezvous(std::shared_ptr<World> world, const Roster& roster)
      : world_(std::move(world)),
        roster_(roster),
        calls_(static_cast<std::size_t>(roster.size())),
        places_(calls_.size()) {}

  /// Returns once all members have entered with equal calls. The last one runs `complete` before
  /// anybody returns. Throws when the calls differ, somebody fails, or the deadline passes.
  template <class Complete>
  void enter(int member, const Call& call, const Arrival& arrival, const Complete& complete) {
    static_assert(noexcept(complete()), "mega: nobody could leave if this threw");
    const auto m = static_cast<std::size_t>(member);
    std::unique_lock lock(mutex_);
    world_->throw_if_failed();
    expects(!places_[m].taken, ErrorCode::logic, [&] {
      return sentence("rank ", roster_.global(member), " called ", describe(call, roster_), " on ",
                      roster_.text(), " while its ", describe(calls_[m], roster_),
                      " still waits; use a communicator from one stream at a time");
    });
    calls_[m] = call;
    places_[m] = {arrival, true};
    if (count_ + 1 < roster_.size()) {
      ++count_;
      await_others(lock, member);
      return;
    }
    expect_agreement(member);
    ++count_;
    lock.unlock();
    complete();
    lock.lock();
    release(lock);
  }

  /// Returns once all members that entered have called leave().
  void leave() {
    std::unique_lock lock(mutex_);
    if (++count_ == roster_.size())
      release(lock);
    else
      await_release(lock, generation_.load(std::memory_order_relaxed));
  }

  /// @pre  between enter() and leave(), or inside enter's `complete`
  [[nodiscard]] const Arrival& arrival(int member) const {
    return places_[static_cast<std::size_t>(member)].arrival;
  }

 private:
  struct Place {
    Arrival arrival;
    bool taken = false;  // in the present phase
  };

  void expect_agreement(int member) {
    for (const Call& other : calls_) {
      if (other == calls_.front()) continue;
      changed_.notify_all();
      world_->disagree_and_throw(roster_.global(member),
                                 describe_disagreement({calls_.data(), calls_.size()}, roster_));
    }
  }

  void await_others(std::unique_lock<std::mutex>& lock, int member) {
    const std::uint64_t generation = generation_.load(std::memory_order_relaxed);
    const auto all_here = [&] {
      return generation_.load(std::memory_order_relaxed) != generation || count_ == roster_.size();
    };
    lock.unlock();
    if (spin([&] { return generation_.load(std::memory_order_acquire) != generation; })) return;
    lock.lock();
    switch (world_->wait(lock, changed_, all_here)) {
      case World::Ended::ready: await_release(lock, generation); return;
      case World::Ended::failed: world_->throw_echo();
      case World::Ended::late: world_->fail_and_throw(roster_.global(member), late(member));
    }
  }

  void await_release(std::unique_lock<std::mutex>& lock, std::uint64_t generation) {
    changed_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != generation; });
  }

  void release(std::unique_lock<std::mutex>& lock) {
    count_ = 0;
    for (Place& place : places_) place.taken = false;
    generation_.fetch_add(1, std::memory_order_release);
    lock.unlock();
    changed_.notify_all();
  }

  [[nodiscard]] Error late(int member) const {
    std::vector<int> missing;
    for (int i = 0; i < roster_.size(); ++i)
      if (!places_[static_cast<std::size_t>(i)].taken) missing.push_back(roster_.global(i));
    return {ErrorCode::timeout,
            sentence(describe(calls_[static_cast<std::size_t>(member)], roster_), " on ",
                     roster_.text(), ": ", rank_list({missing.data(), missing.size()}),
                     " did not arrive within ", to_string(world_->deadline()))};
  }

  const std::shared_ptr<World> world_;
  const Roster& roster_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;                   // by member
  std::vector<Place> places_;                 // by member
  int count_ = 0;                             // members in the present phase
  std::atomic<std::uint64_t> generation_{0};  // phases that all members have passed
};

/// What the members of one communicator share.
class Group {
 public:
  Group(std::shared_ptr<World> world, std::vector<int> members, std::string name)
      : world_(std::move(world)),
        roster_(std::move(members), std::move(name)),
        rendezvous_(world_, roster_) {}

  [[nodiscard]] const std::shared_ptr<World>& world() const noexcept { return world_; }
  [[nodiscard]] Roster& roster() noexcept { return roster_; }
  [[nodiscard]] int size() const noexcept { return roster_.size(); }

  template <class T>
  [[nodiscard]] const T* in(int member) const {
    return static_cast<const T*>(rendezvous_.arrival(member).in);
  }
  template <class T>
  [[nodiscard]] T* out(int member) const {
    return static_cast<T*>(rendezvous_.arrival(member).out);
  }

  /// work(group, m) is the part of member m; parts touch disjoint outputs. Small collectives are
  /// done whole by the last member to arrive: one rendezvous instead of two.
  template <class Work>
  void collective(int member, const Call& call, const Arrival& arrival, const Work& work) {
    const bool in_one_piece = call.count * bytes_of(call.type) <= small_bytes;
    rendezvous_.enter(member, call, arrival, [&]() noexcept {
      for (int m = 0; in_one_piece && m < size(); ++m) work(*this, m);
    });
    if (in_one_piece) return;
    work(*this, member);
    rendezvous_.leave();
  }

  /// A new group of a member and its rank there.
  struct Membership {
    std::shared_ptr<Group> group;
    int rank;
  };
  [[nodiscard]] Membership split(int member, std::uint64_t sequence, int color, int key) {
    Seat seat{color, key, nullptr, 0};
    rendezvous_.enter(member, {.operation = Operation::split, .sequence = sequence},
                      {nullptr, &seat}, [&]() noexcept { seat_all(); });
    return {std::move(seat.group), seat.rank};
  }

  [[nodiscard]] std::shared_ptr<Channel> open(int source, int destination, std::uint32_t id) {
    return channels_.open(world_, {roster_.global(source), roster_.global(destination), id}, false);
  }

 private:
  static constexpr Index small_bytes = 16384;

  struct Seat {
    int color, key;
    std::shared_ptr<Group> group;
    int rank;
  };

  void seat_all() {
    std::vector<int> colors, keys;
    for (int m = 0; m < size(); ++m) {
      colors.push_back(out<Seat>(m)->color);
      keys.push_back(out<Seat>(m)->key);
    }
    for (int m = 0; m < size(); ++m) {
      if (out<Seat>(m)->group) continue;
      const std::vector<int> chosen =
          split_members({colors.data(), colors.size()}, {keys.data(), keys.size()}, m);
      std::vector<int> members;
      for (const int c : chosen) members.push_back(roster_.global(c));
      const auto group = std::make_shared<Group>(
          world_, std::move(members),
          sentence(roster_.name(), "/", colors[static_cast<std::size_t>(m)]));
      int rank = 0;
      for (const int c : chosen) {
        out<Seat>(c)->group = group;
        out<Seat>(c)->rank = rank++;
      }
    }
  }

  const std::shared_ptr<World> world_;
  Roster roster_;
  Rendezvous rendezvous_;
  Channels channels_;
};

template <class T>
void copy_elements(T* out, const T* in, Index count) noexcept {
  if (count > 0 && out != in) std::memcpy(out, in, sizeof(T) * static_cast<std::size_t>(count));
}

}  // namespace detail

/// One rank's handle on a communicator whose ranks are threads. Move-only; used by one thread and
/// from one stream at a time. With an asynchronous host stream a collective waits in the stream's
/// worker, and its fault comes out of synchronize().
/// @cost  two hand-overs between threads and (reductions) each element read once by one rank and
///        written to all; up to 16 KiB one hand-over and no parallel work
class ThreadComm {
 public:
  using sender = ChannelSender;
  using receiver = ChannelReceiver;

  /// Use run_threads() or split().
  ThreadComm(std::shared_ptr<detail::Group> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  ThreadComm(ThreadComm&&) noexcept = default;
  ThreadComm& operator=(ThreadComm&&) noexcept = default;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return group_->size(); }
  /// This rank's number in the whole run, the one that messages use.
  [[nodiscard]] int global_rank() const { return group_->roster().global(rank_); }
  /// Global ranks of the members, in their order here.
  [[nodiscard]] std::span<const int> members() const noexcept { return group_->roster().members(); }
  [[nodiscard]] std::string name() const { return group_->roster().name(); }
  /// Names the communicator in messages, for all its ranks.
  void set_name(std::string name) { group_->roster().set_name(std::move(name)); }

  /// @pre  collectives queued on this communicator are done
  [[nodiscard]] ThreadComm split(int color, int key) {
    auto [group, rank] = group_->split(rank_, ++calls_, color, key);
    return {std::move(group), rank};
  }

  template <host::host_stream S>
  void barrier(S& stream) {
    issue(stream, {}, {}, [](detail::Group&, int) noexcept {});
  }

  template <host::host_stream S, reducible T>
  void all_reduce(S& stream, Vector<T> inout, Reduce reduce) {
    const Index count = inout.size();
    issue(stream, {Operation::all_reduce, element_type_of<T>(), reduce, 0, count},
          {inout.data(), inout.data()}, [=](detail::Group& group, int part) noexcept {
            const auto operand = [&](int m) { return group.in<T>(m); };
            const auto store = [&](Piece at, const T* values) {
              for (int m = 0; m < group.size(); ++m)
                detail::copy_elements(group.out<T>(m) + at.first, values, at.count);
            };
            reduce_along_tree<T>(reduce, group.size(), operand, share_of(count, part, group.size()),
                                 store);
          });
  }

  template <host::host_stream S, reducible T>
  void reduce_scatter(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in,
                      Reduce reduce) {
    detail::expect_pieces(Operation::reduce_scatter, in.size(), out.size(), size());
    const Index count = out.size();
    if (size() == 1) return copy_unless_same(stream, out, in);
    issue(stream, {Operation::reduce_scatter, element_type_of<T>(), reduce, 0, in.size()},
          {in.data(), out.data()}, [=](detail::Group& group, int part) noexcept {
            const auto operand = [&](int m) { return group.in<T>(m); };
            const auto store = [&](Piece at, const T* values) {
              detail::copy_elements(group.out<T>(part) + (at.first - part * count), values,
                                    at.count);
            };
            reduce_along_tree<T>(reduce, group.size(), operand, {part * count, count}, store);
          });
  }

  template <host::host_stream S, element T>
  void all_gather(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) {
    detail::expect_pieces(Operation::all_gather, out.size(), in.size(), size());
    const Index count = in.size();
    if (size() == 1) return copy_unless_same(stream, out, in);
    issue(stream, {Operation::all_gather, element_type_of<T>(), {}, 0, count},
          {in.data(), out.data()}, [=](detail::Group& group, int part) noexcept {
            for (int m = 0; m < group.size(); ++m)
              detail::copy_elements(group.out<T>(part) + m * count, group.in<T>(m), count);
          });
  }

  template <host::host_stream S, element T>
  void broadcast(S& stream, Vector<T> inout, int root) {
    detail::expect_member("broadcast root", root, size());
    const Index count = inout.size();
    issue(stream, {Operation::broadcast, element_type_of<T>(), {}, root, count},
          {inout.data(), inout.data()}, [=](detail::Group& group, int part) noexcept {
            detail::copy_elements(group.out<T>(part), group.in<T>(root), count);
          });
  }

  template <host::host_stream S, element T>
  void all_to_all(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) {
    detail::expect_exchange(out.size(), in.size(), size());
    const Index count = in.size() / size();
    if (size() == 1) return copy_unless_same(stream, out, in);
    issue(stream, {Operation::all_to_all, element_type_of<T>(), {}, 0, in.size()},
          {in.data(), out.data()}, [=](detail::Group& group, int part) noexcept {
            for (int m = 0; m < group.size(); ++m)
              detail::copy_elements(group.out<T>(part) + m * count, group.in<T>(m) + part * count,
                                    count);
          });
  }

  /// A channel to this rank itself needs two streams that run apart, or the slot posted first.
  [[nodiscard]] sender open_sender(int peer, std::uint32_t id) {
    detail::expect_member("channel peer", peer, size());
    return sender(group_->open(rank_, peer, id));
  }
  [[nodiscard]] receiver open_receiver(int peer, std::uint32_t id) {
    detail::expect_member("channel peer", peer, size());
    return receiver(group_->open(peer, rank_, id));
  }

  template <class Done, class Late>
  void poll(const Done& done, const Late& late) {
    detail::poll(*group_->world(), global_rank(), done, late);
  }

 private:
  /// Numbers the call now, in program order, and queues it.
  template <class S, class Work>
  void issue(S& stream, Call call, detail::Arrival arrival, Work work) {
    if (size() == 1) return;
    call.sequence = ++calls_;
    stream.run([group = group_, member = rank_, call, arrival, work] {
      group->collective(member, call, arrival, work);
    });
  }

  template <class S, class T>
  static void copy_unless_same(S& stream, Vector<T> out, Vector<const T> in) {
    if (out.data() != in.data()) copy(stream, out, in);
  }

  std::shared_ptr<detail::Group> group_;
  int rank_;
  std::uint64_t calls_ = 0;
};

static_assert(communicator<ThreadComm, host::Stream>);
static_assert(has_channel_queries<ThreadComm, host::Stream>);

namespace detail {

/// What all ranks of a run share, where they are threads.
[[nodiscard]] inline std::shared_ptr<Group> group_of_all(std::shared_ptr<World> world, int ranks) {
  std::vector<int> members(static_cast<std::size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<Group>(std::move(world), std::move(members), "world");
}

/// Runs body(rank) on `ranks` threads, one a rank, and returns when all have ended. What one of
/// them throws, and a thread that cannot be started, fails the world.
template <std::invocable<int> Body>
void run_ranks(World& world, int ranks, const Body& body) {
  const auto run_rank = [&](int rank) {
    try {
      body(rank);
    } catch (...) {
      world.fail(rank, std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    try {
      threads.emplace_back(run_rank, rank);
    } catch (...) {
      world.fail(rank, std::current_exception());
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace detail

struct ThreadOptions {
  Seconds deadline = default_deadline;  ///< longest wait of a rank for another
};

/// Runs f(ThreadComm&) on `ranks` threads, one a rank, and returns when all have ended. When a rank
/// throws, all others end at their next wait, and the first exception leaves from here.
/// A rank that computes without end is waited for: only waits have deadlines.
template <std::invocable<ThreadComm&> F>
void run_threads(int ranks, const F& f, ThreadOptions options = {}) {
  expects(ranks >= 1, ErrorCode::usage,
          [&] { return sentence("a run needs at least 1 rank, not ", ranks); });
  const auto world = std::make_shared<World>(options.deadline);
  const auto group = detail::group_of_all(world, ranks);
  detail::run_ranks(*world, ranks, [&](int rank) {
    ThreadComm comm(group, rank);
    f(comm);
  });
  world->rethrow_cause();
}

}  // namespace mega::inline v0::comm

namespace mega::inline v0 {
using comm::run_threads;
using comm::ThreadComm;
}  // namespace mega::inline v0
