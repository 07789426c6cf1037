/// @file  NcclComm: one GPU a rank, ranks are threads of one process. Collectives go through NCCL;
/// channels are copies between the GPUs' memories. Opt-in: needs the CUDA headers and NCCL to link.
///
/// Sums: with two ranks there is one order, the canonical one. With more, NCCL picks the order from
/// its algorithm and the links between the GPUs, so the canonical tree does not hold; fixing
/// NCCL_ALGO and NCCL_PROTO keeps the bits from run to run on one kind of machine.
///
/// Failures: when a rank throws, when ranks call different collectives, or when a collective has
/// stood on a stream for the deadline, a watchdog aborts every NCCL communicator of the run; then
/// streams that waited for other ranks go on with values that mean nothing, the next call on any
/// communicator throws, and run_gpus() throws the first failure. So results are to be trusted once
/// run_gpus() has returned, or after throw_if_failed().
#pragma once
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/detail/nccl_calls.hpp>
#include <mega/comm/device_channel.hpp>
#include <mega/comm/thread.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/device.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {
namespace detail {

/// What the ranks of one NcclComm share on the host: who they are, what each has called, and the
/// open channels.
class NcclGroup {
 public:
  explicit NcclGroup(std::shared_ptr<Group> members)
      : members_(std::move(members)), issued_(static_cast<std::size_t>(members_->size())) {}

  [[nodiscard]] Group& members() noexcept { return *members_; }
  [[nodiscard]] const std::shared_ptr<World>& world() const noexcept { return members_->world(); }
  [[nodiscard]] Roster& roster() noexcept { return members_->roster(); }

  /// Compares a call with the one of equal number that another member made before, without waiting.
  void expect_agreement(int member, const Call& call) {
    std::lock_guard lock(mutex_);
    std::uint64_t& mine = issued_[static_cast<std::size_t>(member)];
    if (mine == forgotten_ + calls_.size()) {
      calls_.push_back({call, member});
    } else if (const auto& [other, who] = calls_[static_cast<std::size_t>(mine - forgotten_)];
               other != call) {
      world()->disagree_and_throw(
          roster().global(member),
          sentence(roster().text(), " disagrees: rank ", roster().global(who), " called ",
                   describe(other, roster()), ", rank ", roster().global(member), " called ",
                   describe(call, roster())));
    }
    ++mine;
    for (const auto slowest = *std::min_element(issued_.begin(), issued_.end());
         forgotten_ < slowest; ++forgotten_)
      calls_.pop_front();
  }

  /// The sentence for a collective that stood on member's stream for the whole deadline.
  [[nodiscard]] std::string late(const Call& call) {
    std::lock_guard lock(mutex_);
    std::vector<int> missing;
    for (std::size_t m = 0; m < issued_.size(); ++m)
      if (issued_[m] < call.sequence) missing.push_back(roster().global(static_cast<int>(m)));
    return sentence(describe(call, roster()), " on ", roster().text(), ": ",
                    missing.empty() ? "all ranks called it, but it was not done"
                                    : rank_list(missing) + " did not call it",
                    " within ", to_string(world()->deadline()));
  }

  [[nodiscard]] std::shared_ptr<DeviceChannel> open(int source, int destination, std::uint32_t id) {
    return channels_.open(world(), {roster().global(source), roster().global(destination), id});
  }

 private:
  struct Logged {
    Call call;
    int member;  // who made it first
  };

  const std::shared_ptr<Group> members_;
  std::mutex mutex_;
  std::vector<std::uint64_t> issued_;  // calls of each member
  std::deque<Logged> calls_;           // those that not all members have made
  std::uint64_t forgotten_ = 0;        // calls that all have made
  DeviceChannels channels_;
};

/// One rank's NCCL communicator, used by its rank and watched by the watchdog. It does not block:
/// NCCL returns at once and is asked until it is ready, so that no thread is inside NCCL for long
/// and the watchdog can abort between two questions.
class NcclLink {
 public:
  NcclLink(std::shared_ptr<NcclGroup> group, int member)
      : group_(std::move(group)),
        member_(member),
        uncaught_(std::uncaught_exceptions()),
        flag_(sizeof(std::int32_t)) {
    cuda::check(cudaMemset(flag_.data(), 0, flag_.bytes()), "cudaMemset");
  }
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  /// Collective over the group.
  void open(const ncclUniqueId& id) {
    std::unique_lock lock(mutex_);
    expect_usable();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const auto status =
        ncclCommInitRankConfig(&comm_, group_->roster().size(), id, member_, &config);
    await(lock, status, [&] { return sentence("opening NCCL on ", group_->roster().text()); });
  }

  /// Queues queue(ncclComm_t, cudaStream_t) as call `call` of this rank.
  template <class Queue>
  void issue(cuda::Stream& stream, const Call& call, const Queue& queue) {
    group_->expect_agreement(member_, call);
    if (call.count == 0 && call.type != ElementType::none) return;
    {
      std::lock_guard lock(pending_mutex_);
      pending_.push_back(call);
    }
    // Outside the locks, because a full queue of a stream holds the host.
    progress_.begin(stream, number(call));
    {
      std::unique_lock lock(mutex_);
      expect_usable();
      await(lock, queue(comm_, stream.native()),
            [&] { return describe(call, group_->roster()) + " on " + group_->roster().text(); });
    }
    progress_.end(stream, number(call));
  }

  [[nodiscard]] bool is_open() {
    std::lock_guard lock(mutex_);
    return comm_ != nullptr;
  }
  /// A word of device memory for barriers.
  [[nodiscard]] void* flag() const noexcept { return flag_.data(); }

  /// For the watchdog: fails the world when the oldest collective has begun on its stream, and has
  /// not ended there for the deadline. Calls nothing of CUDA.
  void watch(std::chrono::steady_clock::time_point now) {
    std::lock_guard lock(pending_mutex_);
    for (; !pending_.empty() && progress_.ended(number(pending_.front())); waiting_ = false)
      pending_.pop_front();
    if (pending_.empty() || !progress_.begun(number(pending_.front()))) return;
    if (!std::exchange(waiting_, true)) since_ = now;
    if (now - since_ < group_->world()->deadline()) return;
    try {
      group_->world()->fail_and_throw(group_->roster().global(member_),
                                      Error(ErrorCode::timeout, group_->late(pending_.front())));
    } catch (const Error&) {
      // The world remembers it.
    }
  }

  void abort() noexcept {
    std::lock_guard lock(mutex_);
    aborted_ = true;
    if (ncclComm_t comm = std::exchange(comm_, nullptr)) (void)ncclCommAbort(comm);
  }

  /// The orderly end. A rank that leaves by an exception, or a run that has failed, leaves the
  /// communicator to abort().
  void close() noexcept {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr || group_->world()->failed() || std::uncaught_exceptions() > uncaught_)
      return;
    (void)ncclCommDestroy(std::exchange(comm_, nullptr));
  }

 private:
  static std::uint32_t number(const Call& call) noexcept {
    return static_cast<std::uint32_t>(call.sequence);
  }

  void expect_usable() const {
    group_->world()->throw_if_failed();
    expects(!aborted_, ErrorCode::logic, [] { return "this communicator was aborted"; });
  }

  /// Asks NCCL until it is done with the last call; gives the lock away between two questions.
  template <class Text>
  void await(std::unique_lock<std::mutex>& lock, ncclResult_t status, const Text& text) {
    const auto begin = std::chrono::steady_clock::now();
    while (status == ncclInProgress) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
      expect_usable();
      check_nccl(ncclCommGetAsyncError(comm_, &status), "ncclCommGetAsyncError");
      if (status == ncclInProgress &&
          std::chrono::steady_clock::now() - begin > group_->world()->deadline())
        group_->world()->fail_and_throw(
            group_->roster().global(member_),
            Error(ErrorCode::timeout, sentence(text(), ": NCCL was not ready within ",
                                               to_string(group_->world()->deadline()))));
    }
    if (status != ncclSuccess) check_nccl(status, text());
  }

  const std::shared_ptr<NcclGroup> group_;
  const int member_;
  const int uncaught_;
  cuda::Memory flag_;
  Progress progress_;
  std::mutex mutex_;  // whoever calls NCCL with comm_
  ncclComm_t comm_ = nullptr;
  bool aborted_ = false;
  std::mutex pending_mutex_;
  std::deque<Call> pending_;  // queued, not yet seen to have ended
  bool waiting_ = false;      // the oldest has begun, since `since_` as far as was seen
  std::chrono::steady_clock::time_point since_{};
};

/// All NCCL communicators of a run, and the thread that watches them.
class NcclWatchdog {
 public:
  explicit NcclWatchdog(std::shared_ptr<World> world)
      : world_(std::move(world)), thread_([this] { run(); }) {}
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;
  /// Aborts what no rank has closed. @pre  no rank uses its communicators any more
  ~NcclWatchdog() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
    abort_all();
  }

  void add(std::shared_ptr<NcclLink> link) {
    std::lock_guard lock(mutex_);
    links_.push_back(std::move(link));
  }
  void remove(const std::shared_ptr<NcclLink>& link) {
    std::lock_guard lock(mutex_);
    std::erase(links_, link);
  }

 private:
  static constexpr std::chrono::milliseconds interval{5};

  /// Each in a thread of its own, since an abort may wait for a GPU that another communicator's
  /// kernels hold until that one is aborted, too.
  void abort_all() {
    std::vector<std::thread> threads;
    for (const auto& link : links_)
      if (link->is_open()) threads.emplace_back([&link] { link->abort(); });
    for (std::thread& thread : threads) thread.join();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (world_->failed()) {
        // Links that open later find the world failed.
        abort_all();
      } else {
        for (const auto& link : links_) link->watch(std::chrono::steady_clock::now());
        if (world_->failed()) continue;
      }
      changed_.wait_for(lock, interval);
    }
  }

  const std::shared_ptr<World> world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::vector<std::shared_ptr<NcclLink>> links_;
  std::thread thread_;
};

}  // namespace detail

using NcclSender = DeviceSender;
using NcclReceiver = DeviceReceiver;

/// One rank's handle on a communicator of GPUs. Move-only; used by one thread, the one that runs
/// the rank, and from one stream at a time. Ranks queue collectives of all their communicators in
/// one order. A communicator of one rank uses no NCCL.
/// @cost  a collective holds the host for 70 us on two H200, since NCCL that does not block
///        launches from a thread of its own
/// @determinism  run to run; see the head of this file for sums over more than two ranks
class NcclComm : public detail::NcclCollectives<NcclComm> {
 public:
  using sender = NcclSender;
  using receiver = NcclReceiver;

  /// Collective over `members`. Use run_gpus() or split().
  NcclComm(std::shared_ptr<detail::NcclWatchdog> watchdog, std::shared_ptr<detail::Group> members,
           int rank)
      : watchdog_(std::move(watchdog)), rank_(rank) {
    struct Opening {
      ncclUniqueId id{};
      std::shared_ptr<detail::NcclGroup> group;
    } opening;
    if (rank == 0) {
      opening.group = std::make_shared<detail::NcclGroup>(members);
      if (members->size() > 1) detail::check_nccl(ncclGetUniqueId(&opening.id), "ncclGetUniqueId");
    }
    if (members->size() > 1) {
      members->collective(rank, {.operation = Operation::broadcast, .sequence = 1},
                          {&opening, &opening}, [](detail::Group& all, int m) noexcept {
                            if (m > 0) *all.out<Opening>(m) = *all.in<Opening>(0);
                          });
    }
    group_ = opening.group;
    if (members->size() == 1) return;
    link_ = std::make_shared<detail::NcclLink>(group_, rank);
    watchdog_->add(link_);
    link_->open(opening.id);
  }
  NcclComm(NcclComm&&) noexcept = default;
  NcclComm& operator=(NcclComm&& other) noexcept {
    std::swap(watchdog_, other.watchdog_);
    std::swap(group_, other.group_);
    std::swap(link_, other.link_);
    std::swap(rank_, other.rank_);
    std::swap(calls_, other.calls_);
    std::swap(splits_, other.splits_);
    std::swap(attended_, other.attended_);
    return *this;
  }
  /// Ranks of a communicator end it at about the same time. @pre  its collectives are done
  ~NcclComm() {
    if (!link_) return;
    link_->close();
    if (!link_->is_open()) watchdog_->remove(link_);
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return group_->members().size(); }
  /// This rank's number in the whole run, the one that messages use: also the ordinal of its GPU.
  [[nodiscard]] int global_rank() const { return group_->roster().global(rank_); }
  /// Global ranks of the members, in their order here.
  [[nodiscard]] std::span<const int> members() const noexcept { return group_->roster().members(); }
  [[nodiscard]] std::string name() const { return group_->roster().name(); }
  /// Names the communicator in messages, for all its ranks.
  void set_name(std::string name) { group_->roster().set_name(std::move(name)); }
  /// Throws Error(peer_failed) when the run has failed, on whichever rank.
  void throw_if_failed() const { group_->world()->throw_if_failed(); }

  /// While on, the threads of all members meet in a collective before any of them queues it, and
  /// it returns once it is done on the stream. See has_attended_calls.
  void attend(bool on) noexcept { attended_ = on; }

  /// Makes the new NCCL communicators at once: all ranks split in one order.
  [[nodiscard]] NcclComm split(int color, int key) {
    auto [members, rank] = group_->members().split(rank_, ++splits_, color, key);
    return {watchdog_, std::move(members), rank};
  }

  /// A channel to this rank itself needs the slot posted before the send, and that before the
  /// completion.
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
  friend class detail::NcclCollectives<NcclComm>;

  [[nodiscard]] void* flag() const noexcept { return link_->flag(); }
  /// Numbers the call and queues it.
  template <class Queue>
  void issue(cuda::Stream& stream, Call call, const Queue& queue) {
    if (!link_) return;
    call.sequence = ++calls_;
    if (attended_) {
      group_->members().collective(rank_,
                                   {.operation = Operation::barrier, .sequence = call.sequence}, {},
                                   [](detail::Group&, int) noexcept {});
    }
    link_->issue(stream, call, queue);
    if (attended_) stream.synchronize();
  }

  std::shared_ptr<detail::NcclWatchdog> watchdog_;
  std::shared_ptr<detail::NcclGroup> group_;
  std::shared_ptr<detail::NcclLink> link_;  // none in a communicator of one rank
  int rank_;
  std::uint64_t calls_ = 0;
  std::uint64_t splits_ = 0;
  bool attended_ = false;
};

static_assert(has_attended_calls<NcclComm>);
static_assert(communicator<NcclComm, cuda::Stream>);
static_assert(has_channel_queries<NcclComm, cuda::Stream>);

struct GpuOptions {
  Seconds deadline = default_deadline;  ///< longest wait of a rank for another
};

namespace detail {
/// Lets the current GPU reach the memory of the others, where the links allow it; elsewhere copies
/// go through host memory.
inline void enable_peers(int own, int gpus) {
  for (int peer = 0; peer < gpus; ++peer) {
    int reachable = 0;
    if (peer != own)
      cuda::check(cudaDeviceCanAccessPeer(&reachable, own, peer), "cudaDeviceCanAccessPeer");
    if (reachable == 0) continue;
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      cuda::check(status, "cudaDeviceEnablePeerAccess");
    }
  }
}

/// The first exception that is a rank's own. A rank that is held while it unwinds tells the world
/// later than those that waited for it in vain, so this one says more than the world's failure.
class FirstFault {
 public:
  void keep(const std::exception_ptr& thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& e) {
      if (e.code() == ErrorCode::peer_failed || e.code() == ErrorCode::timeout) return;
    } catch (...) {
      // Not the library's: the rank's own.
    }
    std::lock_guard lock(mutex_);
    if (!first_) first_ = thrown;
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};
}  // namespace detail

/// Runs f(NcclComm&) on `ranks` threads, rank r with GPU r as its current device, and returns when
/// all have ended. When a rank throws, all others end at their next call, within the deadline and
/// the work that their GPUs have queued, and the first exception leaves from here. A rank whose
/// exception unwinds past streams that wait for other ranks, or frees memory while other GPUs wait
/// for it, may be held there until the deadline. NCCL_NVLS_ENABLE becomes 0 unless it is set.
template <std::invocable<NcclComm&> F>
void run_gpus(int ranks, const F& f, GpuOptions options = {}) {
  int gpus = 0;
  cuda::check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  expects(ranks >= 1 && ranks <= gpus, ErrorCode::usage, [&] {
    return sentence("a run of one rank a GPU needs 1 to ", gpus, " ranks here, not ", ranks);
  });
  detail::leave_multicast_off();
  const auto world = std::make_shared<World>(options.deadline);
  const auto group = detail::group_of_all(world, ranks);
  detail::FirstFault fault;
  {
    const auto watchdog = std::make_shared<detail::NcclWatchdog>(world);
    detail::run_ranks(*world, ranks, [&](int rank) {
      try {
        const cuda::Device device(rank);
        detail::enable_peers(rank, ranks);
        NcclComm comm(watchdog, group, rank);
        f(comm);
      } catch (...) {
        fault.keep(std::current_exception());
        throw;
      }
    });
  }
  fault.rethrow();
  world->rethrow_cause();
}

}  // namespace mega::inline v0::comm

namespace mega::inline v0 {
using comm::NcclComm;
using comm::run_gpus;
}  // namespace mega::inline v0
