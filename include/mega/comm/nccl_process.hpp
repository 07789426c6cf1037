/// @file  NcclProcessComm: one GPU and one process a rank, on one host or on many. Collectives and
/// channels go through NCCL; processes find each other and tell their failures over a
/// ControlChannel. Opt-in: needs the CUDA headers and NCCL to link.
///
/// Sums: as on NcclComm, one order with two ranks and NCCL's own with more.
///
/// Failures: when a rank throws, is killed or stopped, when a collective or a message has stood on
/// a stream for the deadline, or when NCCL reports an error, every process aborts its NCCL
/// communicators, so that its streams go on with values that mean nothing, its next call throws,
/// and run_nccl() ends it with a sentence that names the rank and the operation. A process whose
/// thread does not come to a call by itself is ended a little later. Ranks that call different
/// collectives are told so once these stand still; results of a mismatch that NCCL lets pass are
/// not checked. A rank that has come to its end names the message or the collective that another
/// waits for, and one that it sent and nobody took.
///
/// Before CUDA starts, CUDA_DEVICE_MAX_CONNECTIONS becomes 32 unless it is set: with the usual 8
/// queues, a kernel that waits for a message could stand before the work that the other rank waits
/// for. CUDA_MODULE_LOADING=EAGER belongs in the environment for the reason of NcclComm.
#pragma once
#include <mega/comm/bootstrap.hpp>
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/control_channel.hpp>
#include <mega/comm/nccl.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/device.hpp>
#include <mega/cuda/event.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/self.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
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
    if (!control_.world().failed()) return;
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
    int code = 3;
    std::string what = "an exception that is not a std::exception";
    try {
      std::rethrow_exception(why);
    } catch (const Error& error) {
      code = exit_code(error.code());
      what = error.what();
    } catch (const std::exception& exception) {
      what = exception.what();
    } catch (...) {
    }
    if (rank >= 0) what = sentence("rank ", rank, ": ", what);
    std::fprintf(stderr, "%s\n", what.c_str());
    std::fflush(nullptr);
    std::_Exit(code);
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

/// The NCCL communicator of collectives.
class CollectiveLink final : public ProcessLink {
 public:
  CollectiveLink(ProcessWorld& world, std::string key, std::shared_ptr<Roster> roster)
      : ProcessLink(world, std::move(key)), roster_(std::move(roster)) {}

  [[nodiscard]] std::string text(const Call& call) const override {
    return describe(call, *roster_) + " on " + roster_->text();
  }
  [[nodiscard]] std::vector<int> members() const override {
    const auto all = roster_->members();
    return {all.begin(), all.end()};
  }
  [[nodiscard]] std::string late(const Call& call,
                                 const std::vector<Standing>& standings) const override {
    std::vector<int> missing;
    for (std::size_t m = 0; m < standings.size(); ++m)
      if (standings[m].issued < call.sequence)
        missing.push_back(roster_->global(static_cast<int>(m)));
    return sentence(text(call), ": ",
                    !missing.empty()    ? rank_list(missing) + " did not call it"
                    : standings.empty() ? std::string("it was not done")
                                        : std::string("all ranks called it, but it was not done"),
                    " within ", to_string(world_.world().deadline()));
  }
  [[nodiscard]] std::string disagreement(const Call& call,
                                         const std::vector<Standing>& standings) const override {
    std::vector<Call> calls;
    bool differ = false;
    for (const Standing& at : standings) {
      const Call& other = at.pending.sequence == call.sequence ? at.pending : at.last;
      // Members that are elsewhere are left to the deadline.
      const bool same_number = other.sequence == call.sequence;
      differ |= same_number && other != call;
      calls.push_back(same_number ? other : call);
    }
    return differ ? describe_disagreement(calls, *roster_) : std::string();
  }

  void open(const ncclUniqueId& id, int member) {
    begin(roster_->size(), id, member, NCCL_CONFIG_INITIALIZER);
    world_.poll([&] { return settled(); },
                [&](const std::string& when) {
                  return sentence("opening NCCL on ", roster_->text(), ": it was not done ", when);
                });
  }
  /// Collective over this link's members; a member without a child takes part alike.
  /// @pre  this rank's work is done
  void split(CollectiveLink* child, int color, int key, const std::string& what) {
    call(
        [&](ncclComm_t comm) {
          ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
          config.blocking = 0;
          const ncclResult_t status = ncclCommSplit(
              comm, child != nullptr ? color : NCCL_SPLIT_NOCOLOR, key, &child_, &config);
          // NCCL gives success for a split that has only begun. It is done, and the handle there,
          // when this communicator says so.
          return status == ncclSuccess ? ncclInProgress : status;
        },
        [&] { return what; });
    if (child == nullptr) return;
    child->adopt(std::exchange(child_, nullptr));
    world_.poll(
        [&] { return child->settled(); },
        [&](const std::string& when) { return sentence(what, ": it was not done ", when); });
  }

  /// Queues queue(ncclComm_t, cudaStream_t) as call `call` of this rank.
  template <class Queue>
  void issue(cuda::Stream& stream, const Call& call, const Queue& queue) {
    issued_.store(call.sequence);
    world_.note_last(this);
    if (call.count == 0 && call.type != ElementType::none) return track_.note(call);
    track_.run(stream, call, [&] {
      ProcessLink::call([&](ncclComm_t comm) { return queue(comm, stream.native()); },
                        [&] { return text(call); });
    });
  }
  [[nodiscard]] void* flag() const noexcept { return world_.word(0); }

 protected:
  /// This rank makes no more calls, so one of a higher number waits in vain.
  [[nodiscard]] std::string owed(const std::vector<Standing>& standings) const override {
    for (const Standing& at : standings)
      if (at.pending.sequence > issued_) return late(at.pending, standings);
    return {};
  }

 private:
  const std::shared_ptr<Roster> roster_;
  // Of a split under way, until it is done: a thread of NCCL's writes it, also after a failure,
  // when the link still lives but the call that began the split may be gone.
  ncclComm_t child_ = nullptr;
};

/// One end of a channel: an NCCL communicator of the two ranks, the source its rank 0. The
/// watchdog's thread brings it about once both ends are open here and there, so that opening and
/// posting wait for nobody.
class ChannelEnd : public ProcessLink {
 public:
  ChannelEnd(ProcessWorld& world, Edge edge, bool source, std::string key)
      : ProcessLink(world, std::move(key)), edge_(edge), source_(source) {
    ncclUniqueId id{};
    if (source) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    world_.control().contribute(key_, members(), source ? Packer().put(id).take() : std::string());
  }

  [[nodiscard]] std::vector<int> members() const override {
    return {edge_.source, edge_.destination};
  }

  /// What was sent has been received, so nothing needs the other end any more.
  void close() override { abort(); }

  void advance() override {
    std::unique_lock lock(state_mutex_, std::try_to_lock);
    if (!lock || state_ == State::left) return;
    if (state_ == State::alone) {
      const auto records = world_.control().collect(key_);
      if (!records) return;
      ++world_.connecting;
      state_ = State::opening;
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.maxCTAs = world_.options().channel_blocks;
      begin(2, Unpacker((*records)[0]).get<ncclUniqueId>(), source_ ? 0 : 1, config);
    }
    if (state_ == State::opening && settled()) {
      // The first message makes the connection, which needs both ranks at once.
      start([&](ncclComm_t comm) { return move(comm, {}, stream_.native()); });
      state_ = State::connecting;
    }
    if (state_ == State::connecting && settled()) {
      state_ = State::open;
      --world_.connecting;
    }
    if (is_open()) come_open();
    agree_on_sizes();
  }

 protected:
  /// Under state_mutex_.
  [[nodiscard]] bool is_open() const { return state_ == State::open && world_.connecting == 0; }
  virtual void come_open() {}
  /// Key of the count of slots that the destination has posted when it comes to its end.
  [[nodiscard]] std::string end_key() const { return key_ + ", end"; }
  [[nodiscard]] std::string owed(const std::vector<Standing>& standings) const override {
    if (standings.size() != 2) return {};
    const std::string within = "within " + to_string(world_.world().deadline());
    const std::uint64_t sent = source_ ? issued_.load() : standings[0].issued;
    const std::uint64_t posted = source_ ? standings[1].issued : issued_.load();
    // NCCL may have taken a message whose slot never came, so that no stream stands.
    if (sent > posted) return no_slot(edge_, posted + 1, within);
    const std::uint64_t awaited = standings[1].pending.sequence;
    return awaited > sent ? no_message(edge_, awaited, within) : std::string();
  }
  /// The watchdog has no more to do with it.
  void leave_open() { state_ = State::left; }

  /// Queues one message, towards `bytes` at the destination; one of no bytes is a word of padding.
  ncclResult_t move(ncclComm_t comm, Vector<std::byte> bytes, cudaStream_t on) const {
    void* const at = bytes.empty() ? world_.word(source_ ? 0 : 1) : bytes.data();
    const std::size_t n = bytes.empty() ? 1 : static_cast<std::size_t>(bytes.size());
    return source_ ? ncclSend(at, n, ncclInt8, 1, comm, on)
                   : ncclRecv(at, n, ncclInt8, 0, comm, on);
  }

  /// Message or slot `number`, the newest here, has so many bytes. Both ends tell each other every
  /// change, which shows the first difference: at least one side changes there.
  void note_size(std::uint64_t number, Index bytes) {
    if (sizes_.empty() || sizes_.back().bytes != bytes) {
      sizes_.push_back({number, bytes});
      world_.control().tell(source_ ? edge_.destination : edge_.source, key_,
                            Packer().put(sizes_.back()).take());
    }
    newest_ = number;
    agree_on_sizes();
  }

  const Edge edge_;
  const bool source_;
  cuda::Stream stream_;  // of receives
  std::mutex state_mutex_;

 private:
  enum class State { alone, opening, connecting, open, left };
  struct Size {
    std::uint64_t first;  // number of the first message or slot of this size
    Index bytes;
  };

  void agree_on_sizes() {
    while (const auto text = world_.control().told(key_))
      theirs_.push_back(Unpacker(*text).get<Size>());
    for (; !theirs_.empty() && theirs_.front().first <= newest_; theirs_.pop_front()) {
      const Size& other = theirs_.front();
      const auto next = std::find_if(sizes_.begin(), sizes_.end(),
                                     [&](const Size& own) { return own.first > other.first; });
      const Index own = std::prev(next)->bytes;
      if (own != other.bytes)
        world_.control().disagree_and_throw(size_mismatch(
            edge_, other.first, source_ ? own : other.bytes, source_ ? other.bytes : own));
      // What both have passed is settled.
      sizes_.erase(sizes_.begin(), std::prev(next));
    }
  }

  State state_ = State::alone;
  std::uint64_t newest_ = 0;
  std::deque<Size> sizes_, theirs_;
};

class SendEnd final : public ChannelEnd {
 public:
  SendEnd(ProcessWorld& world, Edge edge, std::string key)
      : ChannelEnd(world, edge, true, std::move(key)) {}

  void send(cuda::Stream& stream, Vector<const std::byte> message) {
    const std::uint64_t number = issued_ + 1;
    world_.poll(
        [&] {
          std::lock_guard lock(state_mutex_);
          return is_open();
        },
        [&](const std::string& when) { return no_slot(edge_, number, when); });
    world_.world().throw_if_failed();
    {
      std::lock_guard lock(state_mutex_);
      note_size(number, message.size());
    }
    issued_.store(number);
    world_.note_last(this);
    const Vector<std::byte> bytes(const_cast<std::byte*>(message.data()), message.size());
    track_.run(stream, {.sequence = number}, [&] {
      call([&](ncclComm_t comm) { return move(comm, bytes, stream.native()); },
           [&] { return text({.sequence = number}); });
    });
  }

  void expect_done() override {
    const auto told = world_.control().told(end_key());
    const std::uint64_t posted = told ? Unpacker(*told).get<std::uint64_t>() : 0;
    if (issued_ > posted)
      world_.control().disagree_and_throw(no_slot(edge_, posted + 1, "before its end"));
  }

  [[nodiscard]] std::string text(const Call& call) const override {
    return sentence("send #", call.sequence, " on ", describe(edge_));
  }
  [[nodiscard]] std::string late(const Call& call,
                                 const std::vector<Standing>& standings) const override {
    const std::string within = "within " + to_string(world_.world().deadline());
    if (standings.size() == 2 && standings[1].issued < call.sequence)
      return no_slot(edge_, call.sequence, within);
    return sentence(text(call), ": rank ", edge_.destination, " did not take the message ", within);
  }
};

class ReceiveEnd final : public ChannelEnd {
 public:
  ReceiveEnd(ProcessWorld& world, Edge edge, std::string key, Attention attended)
      : ChannelEnd(world, edge, false, std::move(key)), attended_(std::move(attended)) {}

  void post(cuda::Stream& stream, Vector<std::byte> memory) {
    world_.world().throw_if_failed();
    std::lock_guard lock(state_mutex_);
    Slot slot = take_slot();
    slot.memory = memory;
    stream.record(slot.free);
    slots_.push_back(std::move(slot));
    const std::uint64_t number = issued_ + 1;
    issued_.store(number);
    note_size(number, memory.size());
    if (is_open()) come_open();
  }

  void complete(cuda::Stream& stream) {
    expect_posted(edge_, completed_, issued_);
    const std::uint64_t number = completed_ + 1;
    world_.poll(
        [&] {
          std::lock_guard lock(state_mutex_);
          if (queued_ == 0 && is_open()) queue_next();
          return queued_ > 0;
        },
        [&](const std::string& when) { return no_message(edge_, number, when); });
    cudaEvent_t filled = nullptr;
    {
      std::lock_guard lock(state_mutex_);
      world_.note_last(this);
      track_.run(stream, {.sequence = number}, [&] { stream.wait(slots_.front().filled); });
      filled = slots_.front().filled.native();
      spare_.push_back(std::move(slots_.front()));
      slots_.pop_front();
      --queued_;
      completed_ = number;
    }
    // Not the whole stream of receives, which may hold some that were queued ahead; and without the
    // lock, so that the watchdog can compare sizes meanwhile.
    if (*attended_) world_.await([&] { return is_done(cudaEventQuery(filled)); });
  }

  /// Takes the slots back. True: receives are under way into them, so the channel is to be aborted
  /// and drained before their memory goes.
  [[nodiscard]] bool give_up() {
    std::lock_guard lock(state_mutex_);
    if (queued_ == 0) {
      slots_.clear();
      return false;
    }
    leave_open();
    return true;
  }
  void drain() noexcept {
    (void)cudaStreamSynchronize(stream_.native());
    std::lock_guard lock(state_mutex_);
    slots_.clear();
    queued_ = 0;
  }

  [[nodiscard]] std::string held() override {
    std::lock_guard lock(state_mutex_);
    if (slots_.empty()) return {};
    return sentence("slot #", completed_ + 1, " on ", describe(edge_));
  }
  void tell_end() override {
    world_.control().tell(edge_.source, end_key(), Packer().put(issued_.load()).take());
  }

  [[nodiscard]] std::string text(const Call& call) const override {
    return sentence("receive #", call.sequence, " on ", describe(edge_));
  }
  [[nodiscard]] std::string late(const Call& call,
                                 const std::vector<Standing>& standings) const override {
    const std::string within = "within " + to_string(world_.world().deadline());
    if (standings.size() == 2 && standings[0].issued >= call.sequence)
      return sentence(text(call), ": rank ", edge_.source, " sent it, but it was not there ",
                      within);
    return no_message(edge_, call.sequence, within);
  }

 private:
  struct Slot {
    Vector<std::byte> memory;
    cuda::Event free, filled;
  };

  [[nodiscard]] Slot take_slot() {
    if (spare_.empty()) return {};
    Slot out = std::move(spare_.back());
    spare_.pop_back();
    return out;
  }

  /// Queues the receives of all posted slots; while attended, of none.
  void come_open() override {
    while (!*attended_ && queued_ < slots_.size()) queue_next();
  }
  /// Queues the receive of the oldest slot that has none, for when that slot is free.
  void queue_next() {
    Slot& slot = slots_[queued_];
    stream_.wait(slot.free);
    call([&](ncclComm_t comm) { return move(comm, slot.memory, stream_.native()); },
         [&] { return text({.sequence = completed_ + queued_ + 1}); });
    stream_.record(slot.filled);
    ++queued_;
  }

  const Attention attended_;
  std::deque<Slot> slots_;   // posted, not completed
  std::vector<Slot> spare_;  // their events are used again
  std::size_t queued_ = 0;   // of slots_, whose receives are queued
  std::uint64_t completed_ = 0;
};

}  // namespace detail

/// Sending half of a channel between two processes, or of one to this rank itself. Move-only.
class NcclProcessSender {
 public:
  using Half = std::variant<cuda::LocalSender, std::shared_ptr<detail::SendEnd>>;
  explicit NcclProcessSender(Half end) : half_(std::move(end)) {}
  NcclProcessSender(NcclProcessSender&&) noexcept = default;
  NcclProcessSender& operator=(NcclProcessSender&&) noexcept = default;

  /// @sync  ordered on stream; holds the host back until the receiver has opened its half
  /// @cost  a kernel on each GPU from when both ranks have come to it until the message is there;
  ///        before, the one that came first waits on its GPU. NCCL may take a small message before
  ///        its slot is posted; one whose slot never comes is then an error at the rank's end
  void send(cuda::Stream& stream, Vector<const std::byte> message) {
    if (auto* own = std::get_if<cuda::LocalSender>(&half_)) return own->send(stream, message);
    std::get<1>(half_)->send(stream, message);
  }

 private:
  Half half_;
};

/// Receiving half. Move-only. Ends before the memory of its slots; one that ends with slots not
/// completed gives the channel up.
class NcclProcessReceiver {
 public:
  using End = std::shared_ptr<detail::ReceiveEnd>;
  explicit NcclProcessReceiver(cuda::LocalReceiver own) : half_(std::move(own)) {}
  NcclProcessReceiver(std::shared_ptr<detail::ProcessWorld> world, End end)
      : world_(std::move(world)), half_(std::move(end)) {}
  NcclProcessReceiver(NcclProcessReceiver&&) noexcept = default;
  NcclProcessReceiver& operator=(NcclProcessReceiver&& other) noexcept {
    std::swap(world_, other.world_);
    std::swap(half_, other.half_);
    return *this;
  }
  ~NcclProcessReceiver() {
    auto* end = std::get_if<End>(&half_);
    if (end == nullptr || *end == nullptr || !(*end)->give_up()) return;
    world_->abort_in_background(*end);
    (*end)->drain();
  }

  /// @sync  ordered on stream, waits for no other rank. From then on, where the channel is open on
  ///        both sides, a kernel waits for the message: cudaFree, cudaDeviceSynchronize and the
  ///        first calls of cuBLAS wait, too. While attended, nothing is queued
  void post(cuda::Stream& stream, Vector<std::byte> slot) {
    if (auto* own = std::get_if<cuda::LocalReceiver>(&half_)) return own->post(stream, slot);
    std::get<End>(half_)->post(stream, slot);
  }
  /// @sync  holds the host back until the sender has opened its half, and stream until the message
  ///        is there; while attended, the host as well
  void complete(cuda::Stream& stream) {
    if (auto* own = std::get_if<cuda::LocalReceiver>(&half_)) return own->complete(stream);
    std::get<End>(half_)->complete(stream);
  }

 private:
  std::shared_ptr<detail::ProcessWorld> world_;
  std::variant<cuda::LocalReceiver, End> half_;
};

/// One rank's handle on a communicator of processes with a GPU each. Move-only; used by one thread
/// and from one stream at a time. Ranks make and use all their communicators in one order. A
/// communicator of one rank uses no NCCL. What NCCL holds for communicators and channels stays
/// until the session ends. Has no channel queries: whether a slot in another process is free would
/// need a message of its own.
/// @determinism  run to run; see comm/nccl.hpp for sums over more than two ranks
class NcclProcessComm : public detail::NcclCollectives<NcclProcessComm> {
 public:
  using sender = NcclProcessSender;
  using receiver = NcclProcessReceiver;

  /// Collective over the members. Use NcclProcessSession::world(), run_nccl() or split().
  NcclProcessComm(std::shared_ptr<detail::ProcessWorld> world, std::shared_ptr<Roster> roster,
                  std::string key, int rank, std::shared_ptr<detail::CollectiveLink> link)
      : world_(std::move(world)),
        roster_(std::move(roster)),
        key_(std::move(key)),
        rank_(rank),
        link_(std::move(link)) {}
  NcclProcessComm(NcclProcessComm&&) noexcept = default;
  NcclProcessComm& operator=(NcclProcessComm&&) noexcept = default;

  /// The communicator of all ranks. Collective.
  [[nodiscard]] static NcclProcessComm of_all(std::shared_ptr<detail::ProcessWorld> world) {
    ControlChannel& control = world->control();
    std::vector<int> members(static_cast<std::size_t>(control.size()));
    std::iota(members.begin(), members.end(), 0);
    const auto roster = std::make_shared<Roster>(members, "world");
    std::shared_ptr<detail::CollectiveLink> link;
    if (control.size() > 1) {
      ncclUniqueId id{};
      if (control.rank() == 0) detail::check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
      const auto records =
          control.exchange("opening NCCL on " + roster->text(), members,
                           control.rank() == 0 ? detail::Packer().put(id).take() : std::string());
      link = std::make_shared<detail::CollectiveLink>(*world, "world", roster);
      world->add(link);
      link->open(detail::Unpacker(records[0]).get<ncclUniqueId>(), control.rank());
    }
    const int rank = control.rank();
    return {std::move(world), roster, "world", rank, std::move(link)};
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return roster_->size(); }
  /// This rank's number in the whole run, the one that messages use.
  [[nodiscard]] int global_rank() const { return roster_->global(rank_); }
  /// Global ranks of the members, in their order here.
  [[nodiscard]] std::span<const int> members() const noexcept { return roster_->members(); }
  [[nodiscard]] std::string name() const { return roster_->name(); }
  /// Names the communicator in messages of this rank.
  void set_name(std::string name) { roster_->set_name(std::move(name)); }
  /// Throws Error(peer_failed) when the run has failed, on whichever rank.
  void throw_if_failed() const { world_->world().throw_if_failed(); }

  /// While on, nothing that this communicator and the channels opened from it have queued is left
  /// waiting for another rank when a call returns, but sends: a collective returns once its stream
  /// has done it, post() only notes the slot, and complete() queues the oldest slot's receive and
  /// returns once it is filled. After attend(false), slots that were only noted are received into
  /// without complete(). See has_attended_calls. For a message the receiving rank's attention
  /// counts. A send of more than NCCL takes at once waits on its GPU, and with it a first use of
  /// the sender, until the receiver comes to complete(); so a receiver must come there without what
  /// the sender does later, as it does where it takes messages in the order in which they were
  /// sent.
  /// @pre  no slot is posted when it goes on, since those stay queued
  void attend(bool on) noexcept { *attended_ = on; }

  /// Makes the new NCCL communicators at once; waits for the collectives and messages that this
  /// rank has queued so far, on any communicator.
  /// @throws  Error(logic) where a slot of a channel is posted but not completed, since setting up
  ///          NCCL may wait for its message; nothing has happened then
  [[nodiscard]] NcclProcessComm split(int color, int key) {
    const auto all = roster_->members();
    const std::string what =
        sentence("split #", splits_ + 1, " on communicator ", key_, " of ", rank_list(all));
    if (link_) world_->settle(what);
    ++splits_;
    std::vector<int> colors, keys;
    for (const std::string& record :
         world_->control().exchange(what, all, detail::Packer().put(color).put(key).take())) {
      detail::Unpacker in(record);
      colors.push_back(in.get<int>());
      keys.push_back(in.get<int>());
    }
    std::vector<int> members = split_members(colors, keys, rank_);
    const int rank =
        static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
    for (int& member : members) member = roster_->global(member);
    const std::string child_key = sentence(key_, "/", splits_, ".", color);
    auto roster = std::make_shared<Roster>(std::move(members), sentence(name(), "/", color));
    std::shared_ptr<detail::CollectiveLink> child;
    if (roster->size() > 1) {
      child = std::make_shared<detail::CollectiveLink>(*world_, child_key, roster);
      world_->add(child);
    }
    if (link_) link_->split(child.get(), color, rank, what);
    return {world_, std::move(roster), child_key, rank, std::move(child)};
  }

  /// @pre  no slot of another channel is posted, since setting up NCCL may wait for its message
  /// Opening waits for nobody; the two ends are connected in the background. A channel is opened
  /// once at a time; ends that were opened as n-th belong together.
  [[nodiscard]] sender open_sender(int peer, std::uint32_t id) {
    detail::expect_member("channel peer", peer, size());
    detail::expect_channel_id(id);
    if (peer == rank_) return sender(self_.open_sender(0, id));
    const Edge edge{global_rank(), roster_->global(peer), id};
    auto end = std::make_shared<detail::SendEnd>(*world_, edge, channel_key(edge));
    world_->add(end);
    return sender(std::move(end));
  }
  [[nodiscard]] receiver open_receiver(int peer, std::uint32_t id) {
    detail::expect_member("channel peer", peer, size());
    detail::expect_channel_id(id);
    if (peer == rank_) return receiver(self_.open_receiver(0, id));
    const Edge edge{roster_->global(peer), global_rank(), id};
    auto end = std::make_shared<detail::ReceiveEnd>(*world_, edge, channel_key(edge), attended_);
    world_->add(end);
    return {world_, std::move(end)};
  }

 private:
  friend class detail::NcclCollectives<NcclProcessComm>;

  [[nodiscard]] void* flag() const noexcept { return link_->flag(); }
  /// Numbers the call and queues it; while attended, waits for it.
  template <class Queue>
  void issue(cuda::Stream& stream, Call call, const Queue& queue) {
    world_->world().throw_if_failed();
    if (!link_) return;
    call.sequence = ++calls_;
    link_->issue(stream, call, queue);
    if (*attended_)
      world_->await([&] { return detail::is_done(cudaStreamQuery(stream.native())); });
  }

  /// Equal at both ends.
  [[nodiscard]] std::string channel_key(const Edge& edge) {
    const int opening = ++openings_[{edge.source, edge.destination, edge.id}];
    return sentence(describe(edge), " on communicator ", key_, ", opening #", opening);
  }

  std::shared_ptr<detail::ProcessWorld> world_;
  std::shared_ptr<Roster> roster_;
  std::string key_;  // equal on all members: the splits that led here
  int rank_;
  std::shared_ptr<detail::CollectiveLink> link_;  // none in a communicator of one rank
  cuda::SelfComm self_;                           // channels of this rank to itself
  std::shared_ptr<std::atomic<bool>> attended_ = std::make_shared<std::atomic<bool>>(false);
  std::map<std::tuple<int, int, std::uint32_t>, int> openings_;
  std::uint64_t calls_ = 0;
  std::uint64_t splits_ = 0;
};

static_assert(has_attended_calls<NcclProcessComm>);
static_assert(communicator<NcclProcessComm, cuda::Stream>);

/// This process's part in a run, from finding the others to leaving them; one a process, made
/// before CUDA is used.
class NcclProcessSession {
 public:
  /// Collective over all processes of the run. Makes the process's GPU current in the calling
  /// thread.
  explicit NcclProcessSession(NcclProcessOptions options = {}, ProcessIdentity who = identify())
      : world_(std::make_shared<detail::ProcessWorld>(std::move(who), options)) {}

  /// Ordinal of this process's GPU.
  [[nodiscard]] int device() const noexcept { return world_->device(); }
  /// The communicator of all ranks. Collective; called once.
  [[nodiscard]] NcclProcessComm world() const { return NcclProcessComm::of_all(world_); }
  /// Collective: the orderly end. @pre  streams, communicators and channels have ended
  void finish() { world_->finish(); }

  /// Tells the other ranks, prints the run's first failure, and ends the process with exit_code()
  /// of the error, or 3. No destructor runs: they might wait for a GPU that waits for other ranks.
  [[noreturn]] void abort(const std::exception_ptr& cause) noexcept {
    ControlChannel& control = world_->control();
    control.set_last_resort({}, {});
    // A GPU whose peer is gone may be the first to complain; what the peer's end is says more.
    for (int i = 0; i < 50 && !control.world().failed() && is_of_device(cause); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    control.fail(cause);
    // A connection that closes takes back what the others have not read.
    if (control.announced_within(Seconds(0.5)))
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    world_->end_process(world_->cause());
  }

 private:
  static bool is_of_device(const std::exception_ptr& cause) noexcept {
    try {
      std::rethrow_exception(cause);
    } catch (const Error& error) {
      return error.code() == ErrorCode::device;
    } catch (...) {
      return false;
    }
  }

  std::shared_ptr<detail::ProcessWorld> world_;
};

/// Runs f(NcclProcessComm&) on every process that torchrun, mpirun or srun has started, each with
/// its GPU current, and returns when all are done. When a rank fails, all print why and end: it
/// with exit_code() of its error, the others with 3. `who` replaces what the environment says.
template <std::invocable<NcclProcessComm&> F>
void run_nccl(const F& f, NcclProcessOptions options = {},
              std::optional<ProcessIdentity> who = std::nullopt) {
  std::optional<NcclProcessSession> session;
  try {
    if (!who) who = identify();
    session.emplace(options, *who);
    {
      NcclProcessComm comm = session->world();
      f(comm);
    }
    session->finish();
  } catch (...) {
    if (session) session->abort(std::current_exception());
    detail::ProcessWorld::end_process(who ? who->rank : -1, std::current_exception());
  }
}

}  // namespace mega::inline v0::comm

namespace mega::inline v0 {
using comm::NcclProcessComm;
using comm::run_nccl;
}  // namespace mega::inline v0
