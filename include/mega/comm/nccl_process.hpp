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
/// for. NCCL_NVLS_ENABLE becomes 0 likewise, as in run_gpus(). CUDA_MODULE_LOADING=EAGER belongs in
/// the environment for the reason of NcclComm.
#pragma once
#include <mega/comm/bootstrap.hpp>
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/control_channel.hpp>
#include <mega/comm/detail/control_messages.hpp>
#include <mega/comm/detail/nccl_calls.hpp>
#include <mega/comm/detail/process_ends.hpp>
#include <mega/comm/detail/process_world.hpp>
#include <mega/comm/device_self.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace mega::inline v0::comm {

/// Sending half of a channel between two processes, or of one to this rank itself. Move-only.
class NcclProcessSender {
 public:
  using Half = std::variant<DeviceSelfSender, std::shared_ptr<detail::SendEnd>>;
  explicit NcclProcessSender(Half end) : half_(std::move(end)) {}
  NcclProcessSender(NcclProcessSender&&) noexcept = default;
  NcclProcessSender& operator=(NcclProcessSender&&) noexcept = default;

  /// @sync  ordered on stream; holds the host back until the receiver has opened its half
  /// @cost  a kernel on each GPU from when both ranks have come to it until the message is there;
  ///        before, the one that came first waits on its GPU. NCCL may take a small message before
  ///        its slot is posted; one whose slot never comes is then an error at the rank's end
  void send(cuda::Stream& stream, Vector<const std::byte> message) {
    if (auto* own = std::get_if<DeviceSelfSender>(&half_)) return own->send(stream, message);
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
  explicit NcclProcessReceiver(DeviceSelfReceiver own) : half_(std::move(own)) {}
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
    if (auto* own = std::get_if<DeviceSelfReceiver>(&half_)) return own->post(stream, slot);
    std::get<End>(half_)->post(stream, slot);
  }
  /// @sync  holds the host back until the sender has opened its half, and stream until the message
  ///        is there; while attended, the host as well
  void complete(cuda::Stream& stream) {
    if (auto* own = std::get_if<DeviceSelfReceiver>(&half_)) return own->complete(stream);
    std::get<End>(half_)->complete(stream);
  }

 private:
  std::shared_ptr<detail::ProcessWorld> world_;
  std::variant<DeviceSelfReceiver, End> half_;
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
  DeviceSelfComm self_;                           // channels of this rank to itself
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
