/// @file  What NcclProcessComm's communicators of one process share: the control channel, the links
/// to NCCL, and the thread that watches them.
#pragma once
#include <mega/comm/bootstrap.hpp>
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/control_channel.hpp>
#include <mega/comm/detail/control_messages.hpp>
#include <mega/comm/detail/nccl_calls.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/device.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {

struct NcclProcessOptions {
  Seconds deadline = default_deadline;  ///< longest wait of a rank for another
  /// Thread blocks of a message under way; a receive that was posted ahead holds them until its
  /// message comes.
  int channel_blocks = 4;
};

namespace detail {

/// Equal on all ranks for equal texts (FNV-1a).
[[nodiscard]] constexpr std::uint64_t hash_of(std::string_view text) noexcept {
  std::uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

/// How far a rank has come on one communicator or channel, as its live signs tell the others.
struct Standing {
  std::uint64_t link = 0;    ///< hash of the link's key
  std::uint64_t issued = 0;  ///< calls made, or slots posted
  Call pending;              ///< the oldest that is not done; sequence 0: none
  Call last;                 ///< the newest; sequence 0: none
};

/// The calls of one link that its streams have been given, and how far these have come. Calls
/// nothing of CUDA but in run().
class Track {
 public:
  using Clock = std::chrono::steady_clock;
  struct Oldest {
    Call call;
    bool begun = false;
    Clock::time_point since{};  ///< when it was first seen to have begun
  };

  /// Queues what queue() queues as call `call`.
  template <class Queue>
  void run(cuda::Stream& stream, const Call& call, const Queue& queue) {
    {
      std::lock_guard lock(mutex_);
      pending_.push_back(call);
      last_ = call;
    }
    progress_.begin(stream, number(call));
    queue();
    progress_.end(stream, number(call));
  }

  /// A call that queues nothing.
  void note(const Call& call) {
    std::lock_guard lock(mutex_);
    last_ = call;
  }

  [[nodiscard]] std::optional<Oldest> oldest() {
    std::lock_guard lock(mutex_);
    for (; !pending_.empty() && progress_.ended(number(pending_.front())); begun_ = false)
      pending_.pop_front();
    if (pending_.empty()) return std::nullopt;
    if (!begun_ && progress_.begun(number(pending_.front()))) {
      begun_ = true;
      since_ = Clock::now();
    }
    return Oldest{pending_.front(), begun_, since_};
  }
  /// The newest call; sequence 0: none.
  [[nodiscard]] Call last() const {
    std::lock_guard lock(mutex_);
    return last_;
  }

 private:
  static std::uint32_t number(const Call& call) noexcept {
    return static_cast<std::uint32_t>(call.sequence);
  }

  Progress progress_;
  mutable std::mutex mutex_;
  std::deque<Call> pending_;
  Call last_;
  bool begun_ = false;
  Clock::time_point since_{};
};

/// Whether what a query of CUDA asked about is done. @throws  Error(device) for what it did wrong
[[nodiscard]] inline bool is_done(cudaError_t queried) {
  if (queried == cudaErrorNotReady) {
    (void)cudaGetLastError();  // not ready is none
    return false;
  }
  cuda::check(queried, "work on a stream");
  return true;
}

/// Of a communicator and the channels that were opened from it: attend() was called last with this.
using Attention = std::shared_ptr<const std::atomic<bool>>;

class ProcessWorld;

/// One NCCL communicator of this process: used by its rank's thread, watched by the watchdog. It
/// does not block, so that no thread is inside NCCL for long and the watchdog can abort between two
/// questions. It lives as long as the session: freeing memory would wait for kernels that wait for
/// other ranks.
class ProcessLink {
 public:
  ProcessLink(ProcessWorld& world, std::string key) : world_(world), key_(std::move(key)) {}
  ProcessLink(const ProcessLink&) = delete;
  ProcessLink& operator=(const ProcessLink&) = delete;
  virtual ~ProcessLink() = default;

  /// "all_reduce(sum) #17 with 100 float on communicator world of ranks 0,1".
  [[nodiscard]] virtual std::string text(const Call& call) const = 0;
  /// Global ranks of the members.
  [[nodiscard]] virtual std::vector<int> members() const = 0;
  /// For a call that was not done within the deadline, from the members' standings; a member that
  /// gave none has called nothing.
  [[nodiscard]] virtual std::string late(const Call& call,
                                         const std::vector<Standing>& standings) const = 0;
  /// A sentence where a member has made another call of the same number; else empty.
  [[nodiscard]] virtual std::string disagreement(const Call&, const std::vector<Standing>&) const {
    return {};
  }
  /// Work of the watchdog's thread.
  virtual void advance() {}
  /// "slot #1 on channel 5 from rank 1 to rank 0", which waits for its message; else empty.
  [[nodiscard]] virtual std::string held() { return {}; }
  /// Tells the other members what they need for expect_done(); at this rank's end.
  virtual void tell_end() {}
  /// Once all members have come to their end. @throws  where their calls do not match
  virtual void expect_done() {}

  [[nodiscard]] Standing standing() {
    const auto oldest = track_.oldest();
    return {hash_of(key_), issued_.load(), oldest ? oldest->call : Call{}, track_.last()};
  }
  /// What the members last told of this link, in their order; none where rank 0 does not answer.
  [[nodiscard]] std::vector<Standing> standings();
  [[nodiscard]] Track& track() noexcept { return track_; }

  /// At this rank's end: a sentence on what the link still waits for; else empty.
  [[nodiscard]] std::string unmet() {
    const auto all = standings();
    const auto oldest = track_.oldest();
    return oldest ? late(oldest->call, all) : owed(all);
  }

  /// For the watchdog: throws when NCCL reports an error, when the oldest call has stood for the
  /// deadline, and when one that stands is not the others' call.
  void watch();

  /// Stops what runs. May wait for kernels of other communicators, until these are aborted, too.
  void abort() noexcept {
    ncclComm_t comm = nullptr;
    {
      std::lock_guard lock(mutex_);
      aborted_ = true;
      comm = std::exchange(comm_, nullptr);
    }
    if (comm != nullptr) (void)ncclCommAbort(comm);
  }
  /// The orderly end of a communicator whose work is done on all members. Collective.
  virtual void close();

 protected:
  /// Begins to open the communicator; settled() tells when it is. Collective.
  void begin(int size, const ncclUniqueId& id, int member, ncclConfig_t config);
  [[nodiscard]] bool settled();
  /// Begins with a communicator that NCCL has made, in place of begin().
  void adopt(ncclComm_t comm);
  /// A sentence on what another member waits for, which this rank, at its end, does not bring, and
  /// on messages without a slot; else empty.
  [[nodiscard]] virtual std::string owed(const std::vector<Standing>& standings) const = 0;
  /// Calls queue(ncclComm_t) and waits until NCCL is done with it.
  template <class Queue, class Text>
  void call(const Queue& queue, const Text& what);
  /// The same without waiting.
  template <class Queue>
  void start(const Queue& queue);

  ProcessWorld& world_;
  const std::string key_;  // equal on all members
  std::atomic<std::uint64_t> issued_{0};
  Track track_;
  std::mutex mutex_;  // whoever calls NCCL with comm_
  ncclComm_t comm_ = nullptr;
  bool aborted_ = false;

 private:
  void expect_usable();
  template <class Text>
  void await(std::unique_lock<std::mutex>& lock, ncclResult_t status, const Text& what);
  [[noreturn]] void throw_nccl(ncclResult_t status, std::string_view what);

  std::uint64_t compared_ = 0;  // the watchdog's: last call that was compared with the others'
};

/// What all communicators of this process share: the control channel, the links, and the thread
/// that watches them.
class ProcessWorld {
 public:
  ProcessWorld(ProcessIdentity who, NcclProcessOptions options)
      : options_(options), control_(std::move(who), options.deadline) {
    try {
      // CUDA starts only now.
      (void)::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
      leave_multicast_off();
      device_ = choose_device();
      word_ = std::make_unique<cuda::Memory>(2 * sizeof(std::int64_t));
      cuda::check(cudaMemset(word_->data(), 0, word_->bytes()), "cudaMemset");
    } catch (...) {
      control_.fail(std::current_exception());
      throw;
    }
    control_.set_status([this] { return status(); });
    control_.set_position([this] { return position(); });
    control_.set_last_resort(std::max(Seconds(2), options.deadline / 4),
                             [this] { end_process(cause()); });
    thread_ = std::thread([this] { run(); });
  }
  ProcessWorld(const ProcessWorld&) = delete;
  ProcessWorld& operator=(const ProcessWorld&) = delete;
  /// @pre  no communicator is used any more
  ~ProcessWorld() {
    control_.set_status({});
    control_.set_position({});
    control_.set_last_resort({}, {});
    stop_ = true;
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    // After finish() there is nothing under way; a session that ends otherwise may have given up
    // channels.
    if (!control_.world().failed() && aborting_.empty()) return;
    abort_all();
    for (std::thread& thread : aborting_) thread.join();
  }

  [[nodiscard]] ControlChannel& control() noexcept { return control_; }
  [[nodiscard]] World& world() noexcept { return control_.world(); }
  [[nodiscard]] const NcclProcessOptions& options() const noexcept { return options_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  /// Two words of device memory, for barriers and for messages of no bytes.
  [[nodiscard]] std::byte* word(int k) const noexcept {
    return word_->data() + static_cast<std::size_t>(k) * sizeof(std::int64_t);
  }
  /// Channels whose two ends are being connected. Meanwhile no message is queued, since setting up
  /// NCCL may wait for kernels that wait for other ranks.
  std::atomic<int> connecting{0};

  void add(std::shared_ptr<ProcessLink> link) {
    std::lock_guard lock(mutex_);
    links_.push_back(std::move(link));
  }
  void abort_in_background(std::shared_ptr<ProcessLink> link) {
    std::lock_guard lock(mutex_);
    aborting_.emplace_back([this, link = std::move(link)] {
      (void)cudaSetDevice(device_);
      link->abort();
    });
  }
  void note_last(const ProcessLink* link) noexcept { last_.store(link); }

  /// Asks done() until it gives true. @throws  echoes, and Error(timeout) past the deadline
  template <class Done, class Late>
  void poll(const Done& done, const Late& late) {
    const auto end = Track::Clock::now() + clock_duration(world().deadline());
    for (int polls = 0; !done(); ++polls) {
      world().throw_if_failed();
      if (Track::Clock::now() >= end)
        control_.fail_and_throw(
            Error(ErrorCode::timeout, late("within " + to_string(world().deadline()))));
      rest(polls);
    }
  }

  /// Holds the host until done(), for a call that a link's stream has been given: where others keep
  /// it waiting, the watchdog fails the run at the deadline. @throws  echoes
  template <class Done>
  void await(const Done& done) {
    for (int polls = 0; !done(); ++polls) {
      world().throw_if_failed();
      rest(polls);
    }
    // What was aborted is done, too.
    world().throw_if_failed();
  }

  /// Waits until all that this rank has queued is done. @throws  Error(logic) where a slot is
  /// posted
  void settle(const std::string& what) {
    for (const auto& link : links()) {
      const std::string held = link->held();
      expects(held.empty(), ErrorCode::logic, [&] {
        return sentence(what, ": ", held, " is posted; complete it, or end its receiver, before");
      });
    }
    std::string text;
    poll(
        [&] {
          for (const auto& link : links()) {
            const auto oldest = link->track().oldest();
            if (!oldest) continue;
            text = link->text(oldest->call);
            return false;
          }
          return true;
        },
        [&](const std::string& when) {
          return sentence(what, ": ", text, " was not done ", when);
        });
  }

  /// The run's first failure as this process knows it. @pre  there is one
  [[nodiscard]] std::exception_ptr cause() {
    try {
      world().rethrow_cause();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  /// Prints the sentence and ends the process with exit_code() of the error, or 3. No destructor
  /// runs: they might wait for a GPU that waits for other ranks.
  [[noreturn]] void end_process(const std::exception_ptr& why) noexcept {
    end_process(control_.rank(), why);
  }
  [[noreturn]] static void end_process(int rank, const std::exception_ptr& why) noexcept {
    const Ending end = ending_of(why);
    const std::string who = rank >= 0 ? sentence("rank ", rank, ": ") : std::string();
    std::fprintf(stderr, "%s%s\n", who.c_str(), end.what.c_str());
    std::fflush(nullptr);
    std::_Exit(end.code);
  }

  /// Collective: ends all links and leaves the run. @pre  their work is done or will be
  void finish() {
    await_ends();
    // Channels that nobody has used may still come about; both ends know that by now.
    const std::uint64_t round = rounds_;
    poll([&] { return rounds_ >= round + 2 && connecting == 0; },
         [](const std::string& when) { return "channels were not connected " + when; });
    std::vector<std::thread> threads;
    for (const auto& link : links())
      threads.emplace_back([this, link] {
        try {
          cuda::check(cudaSetDevice(device_), "cudaSetDevice");
          link->close();
        } catch (...) {
          control_.fail(std::current_exception());
        }
      });
    for (std::thread& thread : threads) thread.join();
    threads.clear();
    {
      std::lock_guard lock(mutex_);
      threads.swap(aborting_);
    }
    for (std::thread& thread : threads) thread.join();
    world().throw_if_failed();
    control_.leave();
  }

 private:
  static constexpr std::chrono::milliseconds interval{5};
  static constexpr const char* closing = "the closing of NCCL";

  [[nodiscard]] std::vector<std::shared_ptr<ProcessLink>> links() const {
    std::lock_guard lock(mutex_);
    return links_;
  }

  /// Waits until all ranks have come to their end, with nothing left over between them. Not
  /// ControlChannel::exchange(), which knows nothing of a message that a missing rank waits for.
  void await_ends() {
    const auto open = links();
    std::vector<int> all(static_cast<std::size_t>(control_.size()));
    std::iota(all.begin(), all.end(), 0);
    // Rank 0 passes everything on in order, so these are there once all have come.
    for (const auto& link : open) link->tell_end();
    closing_ = true;
    control_.contribute(closing, all, "");
    poll([&] { return control_.collect(closing).has_value(); },
         [&](const std::string& when) {
           for (const auto& link : open)
             if (std::string text = link->unmet(); !text.empty()) return text;
           return sentence(closing, ": ", absent(all), " ", when);
         });
    for (const auto& link : open) link->expect_done();
  }
  /// "rank 1 did not come", as the ranks' last live signs have it.
  [[nodiscard]] std::string absent(const std::vector<int>& all) {
    std::vector<int> out;
    const auto statuses = control_.statuses(all);
    for (std::size_t r = 0; r < statuses.size(); ++r) {
      bool come = false;
      if (!statuses[r].empty())
        for (const Standing& at : Unpacker(statuses[r]).numbers<Standing>())
          come |= at.link == hash_of(closing);
      if (!come) out.push_back(static_cast<int>(r));
    }
    if (statuses.empty()) return "rank 0 did not answer";
    return out.empty() ? std::string("not all ranks came") : rank_list(out) + " did not come";
  }

  /// The GPU of this process: number local_rank, or the only one that it sees. No two may share.
  int choose_device() {
    int count = 0;
    cuda::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    const int local = control_.identity().local_rank;
    expects(count == 1 || local < count, ErrorCode::usage, [&] {
      return sentence("local rank ", local, " of rank ", control_.rank(), " sees ", count,
                      " GPUs; start as many processes a host as it has GPUs");
    });
    const cuda::Device device(count == 1 ? 0 : local);
    char bus[32] = {}, host[256] = {};
    cuda::check(cudaDeviceGetPCIBusId(bus, sizeof bus, device.ordinal()), "cudaDeviceGetPCIBusId");
    (void)::gethostname(host, sizeof host - 1);
    std::vector<int> all(static_cast<std::size_t>(control_.size()));
    std::iota(all.begin(), all.end(), 0);
    const std::string own = sentence("GPU ", bus, " of host ", host);
    const auto places = control_.exchange("the choice of GPUs", all, own);
    for (int r = 0; r < control_.rank(); ++r)
      expects(places[static_cast<std::size_t>(r)] != own, ErrorCode::usage, [&] {
        return sentence("ranks ", r, " and ", control_.rank(), " both have ", own,
                        "; each process needs a GPU of its own");
      });
    return device.ordinal();
  }

  void run() {
    (void)cudaSetDevice(device_);
    std::unique_lock lock(waiting_);
    while (!stop_) {
      if (world().failed()) {
        // Links that open later find the world failed.
        abort_all();
      } else {
        try {
          for (const auto& link : links()) {
            link->advance();
            link->watch();
          }
          ++rounds_;
        } catch (...) {
          control_.fail(std::current_exception());
        }
      }
      changed_.wait_for(lock, interval);
    }
  }
  /// Each in a thread of its own, since an abort may wait for a GPU that another communicator's
  /// kernels hold until that one is aborted, too.
  void abort_all() {
    if (std::exchange(aborted_, true)) return;
    for (const auto& link : links()) abort_in_background(link);
  }

  // The control channel's thread calls these: they touch no lock that is held inside CUDA or NCCL.

  [[nodiscard]] std::string status() const {
    Packer out;
    std::vector<Standing> standings;
    for (const auto& link : links()) standings.push_back(link->standing());
    if (closing_) standings.push_back({hash_of(closing), 0, {}, {}});
    out.put(std::span<const Standing>(standings));
    return out.take();
  }
  /// "rank 0 was waiting in all_reduce(sum) #17 ...", the call that has stood longest.
  [[nodiscard]] std::string position() const {
    std::string queued, waiting;
    auto first = Track::Clock::time_point::max();
    for (const auto& link : links()) {
      const auto oldest = link->track().oldest();
      if (!oldest) continue;
      if (!oldest->begun) {
        queued = sentence("rank ", control_.rank(), " had queued ", link->text(oldest->call));
      } else if (oldest->since < first) {
        first = oldest->since;
        waiting = sentence("rank ", control_.rank(), " was waiting in ", link->text(oldest->call));
      }
    }
    if (!waiting.empty()) return waiting;
    if (!queued.empty()) return queued;
    for (const auto& link : links()) {
      if (link.get() != last_.load()) continue;
      if (const Call call = link->track().last(); call.sequence > 0)
        return sentence("rank ", control_.rank(), " had done ", link->text(call));
    }
    return {};
  }

  const NcclProcessOptions options_;
  ControlChannel control_;
  int device_ = 0;
  std::unique_ptr<cuda::Memory> word_;
  mutable std::mutex mutex_;  // of the two lists
  std::vector<std::shared_ptr<ProcessLink>> links_;
  std::vector<std::thread> aborting_;
  std::atomic<const ProcessLink*> last_{nullptr};
  bool aborted_ = false;
  std::atomic<bool> closing_{false};      // this rank has come to its end
  std::atomic<std::uint64_t> rounds_{0};  // of the watchdog over all links
  std::atomic<bool> stop_{false};
  std::mutex waiting_;
  std::condition_variable changed_;
  std::thread thread_;
};

inline void ProcessLink::expect_usable() {
  world_.world().throw_if_failed();
  expects(!aborted_, ErrorCode::logic, [&] { return sentence(key_, " was aborted"); });
}

/// A peer that is gone is NCCL's error before it is the control channel's failure, which says more.
inline void ProcessLink::throw_nccl(ncclResult_t status, std::string_view what) {
  for (int i = 0; i < 50; ++i) {
    world_.world().throw_if_failed();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  check_nccl(status, what);
  std::terminate();
}

/// Asks NCCL until it is done with the last call; gives the lock away between two questions.
template <class Text>
void ProcessLink::await(std::unique_lock<std::mutex>& lock, ncclResult_t status, const Text& what) {
  const auto begin = Track::Clock::now();
  while (status == ncclInProgress) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
    expect_usable();
    if (const ncclResult_t asked = ncclCommGetAsyncError(comm_, &status); asked != ncclSuccess)
      status = asked;
    if (status == ncclInProgress &&
        Track::Clock::now() - begin > clock_duration(world_.world().deadline()))
      world_.control().fail_and_throw(Error(
          ErrorCode::timeout,
          sentence(what(), ": NCCL was not ready within ", to_string(world_.world().deadline()))));
  }
  if (status == ncclSuccess) return;
  lock.unlock();
  throw_nccl(status, what());
}

template <class Queue, class Text>
void ProcessLink::call(const Queue& queue, const Text& what) {
  std::unique_lock lock(mutex_);
  expect_usable();
  await(lock, queue(comm_), what);
}
template <class Queue>
void ProcessLink::start(const Queue& queue) {
  std::lock_guard lock(mutex_);
  expect_usable();
  check_nccl(queue(comm_), key_);
}
inline void ProcessLink::begin(int size, const ncclUniqueId& id, int member, ncclConfig_t config) {
  std::lock_guard lock(mutex_);
  expect_usable();
  config.blocking = 0;
  check_nccl(ncclCommInitRankConfig(&comm_, size, id, member, &config), "opening " + key_);
}
inline void ProcessLink::adopt(ncclComm_t comm) {
  expects(comm != nullptr, ErrorCode::device,
          [&] { return sentence("opening ", key_, ": NCCL made no communicator"); });
  {
    std::lock_guard lock(mutex_);
    if (!aborted_) comm_ = std::exchange(comm, nullptr);
  }
  if (comm != nullptr) (void)ncclCommAbort(comm);
}
inline bool ProcessLink::settled() {
  ncclResult_t status = ncclSuccess;
  {
    std::lock_guard lock(mutex_);
    expect_usable();
    if (const ncclResult_t asked = ncclCommGetAsyncError(comm_, &status); asked != ncclSuccess)
      status = asked;
  }
  if (status == ncclInProgress) return false;
  if (status != ncclSuccess) throw_nccl(status, "opening " + key_);
  return true;
}

inline void ProcessLink::close() {
  try {
    std::unique_lock lock(mutex_);
    if (comm_ == nullptr) return;
    await(lock, ncclCommFinalize(comm_), [&] { return "closing " + key_; });
    check_nccl(ncclCommDestroy(std::exchange(comm_, nullptr)), "ncclCommDestroy");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::device) throw;
    // All results are there; a member that closed before may look like an error now.
    abort();
  }
}

inline std::vector<Standing> ProcessLink::standings() {
  const std::vector<int> ranks = members();
  const std::uint64_t own = hash_of(key_);
  std::vector<Standing> out;
  for (const std::string& status : world_.control().statuses(ranks)) {
    Standing& at = out.emplace_back();
    if (status.empty()) continue;
    for (const Standing& one : Unpacker(status).numbers<Standing>())
      if (one.link == own) at = one;
  }
  return out;
}

inline void ProcessLink::watch() {
  // Where nothing is under way, a member that has closed before is in order.
  const auto oldest = track_.oldest();
  if (!oldest) return;
  if (std::unique_lock lock(mutex_, std::try_to_lock); lock && comm_ != nullptr) {
    ncclResult_t status = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &status);
    if (asked != ncclSuccess) status = asked;
    if (status != ncclSuccess && status != ncclInProgress) {
      lock.unlock();
      throw_nccl(status, text(oldest->call));
    }
  }
  if (!oldest->begun) return;
  const auto stood = Track::Clock::now() - oldest->since;
  // By then the others have told where they stand, too.
  if (stood > 3 * clock_duration(world_.control().interval()) &&
      compared_ != oldest->call.sequence) {
    compared_ = oldest->call.sequence;
    if (std::string text = disagreement(oldest->call, standings()); !text.empty())
      world_.control().disagree_and_throw(std::move(text));
  }
  if (stood >= clock_duration(world_.world().deadline()))
    throw Error(ErrorCode::timeout, late(oldest->call, standings()));
}

}  // namespace detail

}  // namespace mega::inline v0::comm
