/// @file  NcclProcessComm's links: NCCL's communicator of collectives, and the two ends of a
/// channel.
#pragma once
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/detail/control_messages.hpp>
#include <mega/comm/detail/nccl_calls.hpp>
#include <mega/comm/detail/process_world.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/event.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::comm::detail {

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

}  // namespace mega::inline v0::comm::detail
