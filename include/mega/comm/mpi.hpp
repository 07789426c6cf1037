/// @file  MpiComm: ranks are processes under MPI. Opt-in: needs an MPI 3 library.
/// Only point-to-point messages are used: the library's collectives have no deadline and its sums
/// no order. Sums follow ThreadComm's tree, so both give the same bits.
#pragma once
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/reduce.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>

// The C++ bindings, long removed from the standard, only bring warnings and a library to link.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {

/// MPI is called from the rank's own thread, so MpiComm takes only streams that run there.
template <class S>
concept stream_in_the_calling_thread = std::same_as<S, host::Stream>;

namespace detail {

[[nodiscard]] inline Error mpi_error(int status, std::string_view call) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(status, text, &length);
  return {ErrorCode::peer_failed, sentence(call, " failed: ", text)};
}
inline void check_mpi(int status, std::string_view call) {
  if (status != MPI_SUCCESS) [[unlikely]]
    throw mpi_error(status, call);
}

/// A private copy of MPI_COMM_WORLD whose errors come back as codes.
class MpiLane {
 public:
  MpiLane() {
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &handle_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN);
  }
  MpiLane(const MpiLane&) = delete;
  MpiLane& operator=(const MpiLane&) = delete;
  ~MpiLane() { MPI_Comm_free(&handle_); }
  [[nodiscard]] MPI_Comm get() const noexcept { return handle_; }

 private:
  MPI_Comm handle_ = MPI_COMM_NULL;
};

/// Failures travel on a lane of their own, where every rank always has a receive posted.
struct FailureNote {
  std::int32_t rank = -1;
  std::int32_t shared = 0;
  char what[1016] = {};
};

/// What all communicators of this process share: lanes, the deadline and the one loop that waits.
/// After a failure no MPI call is made but MPI_Abort: unfinished requests may name memory that
/// unwinding has freed.
class MpiWorld {
 public:
  explicit MpiWorld(Seconds deadline) : world_(deadline) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    int* bound = nullptr;
    int known = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &known);
    contexts_ = known != 0 ? static_cast<int>((std::int64_t{*bound} + 1) >> tag_bits) : 0;
    expects(contexts_ >= 1, ErrorCode::usage, [&] {
      return sentence("this MPI library's tags end at ", known != 0 ? *bound : 0,
                      "; channels need tags to ", (1 << tag_bits) - 1);
    });
    check_mpi(MPI_Irecv(&heard_, sizeof heard_, MPI_BYTE, MPI_ANY_SOURCE, 0, failures_.get(),
                        &listening_),
              "MPI_Irecv");
  }
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;
  ~MpiWorld() {
    if (world_.failed()) return;
    MPI_Cancel(&listening_);
    MPI_Wait(&listening_, MPI_STATUS_IGNORE);
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] World& world() noexcept { return world_; }
  [[nodiscard]] MPI_Comm messages() const noexcept { return messages_.get(); }
  [[nodiscard]] MPI_Comm credits() const noexcept { return credits_.get(); }

  /// Messages of different communicators differ in the upper bits of their tags.
  [[nodiscard]] static constexpr int tag(int context, std::uint32_t low) noexcept {
    return context << tag_bits | static_cast<int>(low);
  }
  static constexpr std::uint32_t call_tag = max_channel_id + 1;
  static constexpr std::uint32_t data_tag = max_channel_id + 2;

  /// First context that no communicator of this rank uses.
  [[nodiscard]] int next_context() const noexcept { return next_context_; }
  void take_context(int context) {
    expects(context < contexts_, ErrorCode::usage, [&] {
      return sentence("communicator number ", context + 1, " of rank ", rank_,
                      ": this MPI library's tags suffice for ", contexts_);
    });
    next_context_ = context + 1;
  }

  /// Polls until all requests are done, another rank fails, or the deadline passes; then
  /// late(pending) makes the sentence, where pending(i) tells whether request i is not done.
  template <class Late>
  void wait(std::span<MPI_Request> requests, const Late& late) {
    const auto end =
        std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(world_.deadline());
    for (int polls = 0;; ++polls) {
      int done = 0;
      const int status = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                                     MPI_STATUSES_IGNORE);
      if (status != MPI_SUCCESS) fail_and_throw(mpi_error(status, "MPI_Testall"));
      if (done != 0) return;
      listen();
      if (std::chrono::steady_clock::now() >= end) {
        const auto pending = [&](std::size_t i) {
          int finished = 0;
          MPI_Request_get_status(requests[i], &finished, MPI_STATUS_IGNORE);
          return finished == 0;
        };
        fail_and_throw(Error(ErrorCode::timeout, late(pending)));
      }
      rest(polls);
    }
  }

  /// The same for anything that MPI calls of done() bring about.
  template <class Done, class Late>
  void poll(const Done& done, const Late& late) {
    const auto end =
        std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(world_.deadline());
    for (int polls = 0; !done(); ++polls) {
      listen();
      if (std::chrono::steady_clock::now() >= end)
        fail_and_throw(Error(ErrorCode::timeout, late("within " + to_string(world_.deadline()))));
      rest(polls);
    }
  }

  /// Throws the echo of a failure that this rank knows of or has been told.
  void listen() {
    if (!world_.failed()) {
      int told = 0;
      check_mpi(MPI_Test(&listening_, &told, MPI_STATUS_IGNORE), "MPI_Test");
      if (told != 0) {
        heard_.what[sizeof heard_.what - 1] = '\0';
        world_.fail(Failure{heard_.rank, heard_.shared != 0, heard_.what});
      }
    }
    world_.throw_if_failed();
  }

  [[noreturn]] void fail_and_throw(const Error& error) {
    fail(std::make_exception_ptr(error));
    throw error;
  }
  [[noreturn]] void disagree_and_throw(const std::string& text) {
    world_.fail(Failure{rank_, true, text});
    announce();
    world_.throw_echo();
  }
  /// Records this rank's own failure and tells all others, once.
  void fail(std::exception_ptr cause) noexcept {
    if (world_.failed()) return;
    world_.fail(rank_, std::move(cause));
    announce();
  }

 private:
  static constexpr int tag_bits = 21;
  static constexpr std::chrono::milliseconds announce_limit{200};

  void announce() noexcept {
    const Failure failure = world_.failure();
    told_.rank = failure.rank;
    told_.shared = failure.shared ? 1 : 0;
    std::snprintf(told_.what, sizeof told_.what, "%s", failure.what.c_str());
    std::vector<MPI_Request> sends;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      MPI_Isend(&told_, sizeof told_, MPI_BYTE, peer, 0, failures_.get(), &sends.emplace_back());
    }
    const auto end = std::chrono::steady_clock::now() + announce_limit;
    int done = 0;
    while (done == 0 && std::chrono::steady_clock::now() < end) {
      MPI_Testall(static_cast<int>(sends.size()), sends.data(), &done, MPI_STATUSES_IGNORE);
      std::this_thread::yield();
    }
  }

  World world_;
  MpiLane messages_, credits_, failures_;
  int rank_ = 0;
  int size_ = 1;
  int contexts_ = 0;
  int next_context_ = 1;  // 0 is the world's
  MPI_Request listening_ = MPI_REQUEST_NULL;
  FailureNote heard_, told_;
};

inline void expect_message_size(Index bytes) {
  expects(bytes <= std::numeric_limits<int>::max(), ErrorCode::logic, [&] {
    return sentence("an MPI channel's message of ", bytes, " bytes exceeds ",
                    std::numeric_limits<int>::max());
  });
}

}  // namespace detail

/// Sending half of a channel. A message leaves when the receiver's credit for its slot has come.
class MpiSender {
 public:
  MpiSender(std::shared_ptr<detail::MpiWorld> world, Edge edge, int tag)
      : world_(std::move(world)), edge_(edge), tag_(tag) {}

  /// @sync  returns when `message` may be reused; waits until the receiver has posted a slot
  template <stream_in_the_calling_thread S>
  void send(S&, Vector<const std::byte> message) {
    detail::expect_message_size(message.size());
    world_->world().throw_if_failed();
    const std::uint64_t number = ++sent_;
    const std::string within = "within " + to_string(world_->world().deadline());
    MPI_Request request = MPI_REQUEST_NULL;
    detail::check_mpi(MPI_Irecv(&credit_, sizeof credit_, MPI_BYTE, edge_.destination, tag_,
                                world_->credits(), &request),
                      "MPI_Irecv");
    world_->wait({&request, 1}, [&](auto&&) { return detail::no_slot(edge_, number, within); });
    if (credit_ != message.size())
      world_->disagree_and_throw(detail::size_mismatch(edge_, number, message.size(), credit_));
    detail::check_mpi(MPI_Isend(message.data(), static_cast<int>(message.size()), MPI_BYTE,
                                edge_.destination, tag_, world_->messages(), &request),
                      "MPI_Isend");
    world_->wait({&request, 1}, [&](auto&&) {
      return sentence("send #", number, " on ", describe(edge_), ": rank ", edge_.destination,
                      " did not take the message ", within);
    });
  }

  [[nodiscard]] bool can_send() const {
    world_->world().throw_if_failed();
    int credited = 0;
    detail::check_mpi(
        MPI_Iprobe(edge_.destination, tag_, world_->credits(), &credited, MPI_STATUS_IGNORE),
        "MPI_Iprobe");
    return credited != 0;
  }

 private:
  std::shared_ptr<detail::MpiWorld> world_;
  Edge edge_;
  int tag_;
  std::uint64_t sent_ = 0;
  Index credit_ = 0;
};

/// Receiving half of a channel. Its end takes back the slots that wait for a message; the id must
/// not be used again then, since the sender may hold a credit.
class MpiReceiver {
 public:
  MpiReceiver(std::shared_ptr<detail::MpiWorld> world, Edge edge, int tag)
      : world_(std::move(world)), edge_(edge), tag_(tag) {}
  MpiReceiver(MpiReceiver&&) noexcept = default;
  MpiReceiver& operator=(MpiReceiver&& other) noexcept {
    std::swap(world_, other.world_);
    std::swap(edge_, other.edge_);
    std::swap(tag_, other.tag_);
    std::swap(slots_, other.slots_);
    std::swap(completed_, other.completed_);
    return *this;
  }
  ~MpiReceiver() {
    if (!world_ || world_->world().failed()) return;
    for (Slot& slot : slots_) {
      MPI_Cancel(&slot.requests[0]);
      MPI_Waitall(2, slot.requests, MPI_STATUSES_IGNORE);
    }
  }

  /// Never waits.
  template <stream_in_the_calling_thread S>
  void post(S&, Vector<std::byte> slot) {
    detail::expect_message_size(slot.size());
    world_->world().throw_if_failed();
    // The receive stands before the credit that lets the message come.
    Slot& posted = slots_.emplace_back();
    posted.bytes = slot.size();
    detail::check_mpi(MPI_Irecv(slot.data(), static_cast<int>(slot.size()), MPI_BYTE, edge_.source,
                                tag_, world_->messages(), &posted.requests[0]),
                      "MPI_Irecv");
    detail::check_mpi(MPI_Isend(&posted.bytes, sizeof posted.bytes, MPI_BYTE, edge_.source, tag_,
                                world_->credits(), &posted.requests[1]),
                      "MPI_Isend");
  }

  /// @sync  returns when the oldest posted slot is filled
  template <stream_in_the_calling_thread S>
  void complete(S&) {
    detail::expect_posted(edge_, completed_, completed_ + slots_.size());
    world_->world().throw_if_failed();
    world_->wait(slots_.front().requests, [&](auto&&) {
      return detail::no_message(edge_, completed_ + 1,
                                "within " + to_string(world_->world().deadline()));
    });
    slots_.pop_front();
    ++completed_;
  }

  [[nodiscard]] bool ready() const {
    world_->world().throw_if_failed();
    if (slots_.empty()) return false;
    int filled = 0;
    detail::check_mpi(
        MPI_Request_get_status(slots_.front().requests[0], &filled, MPI_STATUS_IGNORE),
        "MPI_Request_get_status");
    return filled != 0;
  }

 private:
  struct Slot {
    Index bytes = 0;  // the credit's payload, so it stays until the credit is sent
    MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};  // message, credit
  };

  std::shared_ptr<detail::MpiWorld> world_;
  Edge edge_;
  int tag_;
  std::deque<Slot> slots_;  // a deque does not move its elements
  std::uint64_t completed_ = 0;
};

/// One rank's handle on a communicator of processes. Move-only; used by the thread that made the
/// session. Every call returns when it is done.
/// Before each collective all members exchange their calls, so a mismatch is named, not waited for.
/// @cost  2 (size - 1) small messages a rank for the check; a reduction moves each element twice
class MpiComm {
 public:
  using sender = MpiSender;
  using receiver = MpiReceiver;

  /// Use MpiSession::world(), run_mpi() or split().
  MpiComm(std::shared_ptr<detail::MpiWorld> world, std::vector<int> members, std::string name,
          int rank, int context)
      : world_(std::move(world)),
        roster_(std::make_unique<Roster>(std::move(members), std::move(name))),
        rank_(rank),
        context_(context),
        said_(static_cast<std::size_t>(roster_->size())) {}

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return roster_->size(); }
  /// This rank's number in MPI_COMM_WORLD, the one that messages use.
  [[nodiscard]] int global_rank() const { return roster_->global(rank_); }
  /// Global ranks of the members, in their order here.
  [[nodiscard]] std::span<const int> members() const noexcept { return roster_->members(); }
  [[nodiscard]] std::string name() const { return roster_->name(); }
  /// Names the communicator in messages of this rank.
  void set_name(std::string name) { roster_->set_name(std::move(name)); }

  [[nodiscard]] MpiComm split(int color, int key) {
    agree({.operation = Operation::split}, color, key);
    std::vector<int> colors, keys;
    int context = 0;
    for (const Said& said : said_) {
      colors.push_back(said.color);
      keys.push_back(said.key);
      context = std::max(context, said.next_context);
    }
    world_->take_context(context);
    std::vector<int> members = split_members(colors, keys, rank_);
    const auto self = std::find(members.begin(), members.end(), rank_);
    const int rank = static_cast<int>(self - members.begin());
    for (int& member : members) member = roster_->global(member);
    return {world_, std::move(members), sentence(name(), "/", color), rank, context};
  }

  template <stream_in_the_calling_thread S>
  void barrier(S&) {
    if (size() > 1) agree({});
  }

  template <stream_in_the_calling_thread S, reducible T>
  void all_reduce(S&, Vector<T> inout, Reduce reduce) {
    if (size() == 1) return;
    agree({Operation::all_reduce, element_type_of<T>(), reduce, 0, inout.size()});
    const auto share = [&](int member) {
      const Piece piece = share_of(inout.size(), member, size());
      return inout.slice(piece.first, piece.count);
    };
    reduce_pieces(share(rank_), share, reduce);
    for_peers([&](int peer) {
      receive(peer, share(peer));
      send<T>(peer, share(rank_));
    });
    finish();
  }

  template <stream_in_the_calling_thread S, reducible T>
  void reduce_scatter(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in,
                      Reduce reduce) {
    detail::expect_pieces(Operation::reduce_scatter, in.size(), out.size(), size());
    if (size() == 1) return copy_unless_same(stream, out, in);
    agree({Operation::reduce_scatter, element_type_of<T>(), reduce, 0, in.size()});
    reduce_pieces(
        out, [&](int member) { return in.slice(member * out.size(), out.size()); }, reduce);
  }

  template <stream_in_the_calling_thread S, element T>
  void all_gather(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) {
    detail::expect_pieces(Operation::all_gather, out.size(), in.size(), size());
    const Vector<T> own = out.slice(rank_ * in.size(), in.size());
    if (size() == 1) return copy_unless_same(stream, out, in);
    agree({Operation::all_gather, element_type_of<T>(), {}, 0, in.size()});
    for_peers([&](int peer) {
      receive(peer, out.slice(peer * in.size(), in.size()));
      send<T>(peer, in);
    });
    copy_unless_same(stream, own, in);
    finish();
  }

  template <stream_in_the_calling_thread S, element T>
  void broadcast(S&, Vector<T> inout, int root) {
    detail::expect_member("broadcast root", root, size());
    if (size() == 1) return;
    agree({Operation::broadcast, element_type_of<T>(), {}, root, inout.size()});
    if (rank_ == root)
      for_peers([&](int peer) { send<T>(peer, inout); });
    else
      receive(root, inout);
    finish();
  }

  template <stream_in_the_calling_thread S, element T>
  void all_to_all(S& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) {
    detail::expect_exchange(out.size(), in.size(), size());
    const Index count = in.size() / size();
    if (size() > 1) agree({Operation::all_to_all, element_type_of<T>(), {}, 0, in.size()});
    for_peers([&](int peer) {
      receive(peer, out.slice(peer * count, count));
      send<T>(peer, in.slice(peer * count, count));
    });
    copy(stream, out.slice(rank_ * count, count), in.slice(rank_ * count, count));
    finish();
  }

  [[nodiscard]] sender open_sender(int peer, std::uint32_t id) {
    return {world_, edge(rank_, peer, id), world_->tag(context_, id)};
  }
  [[nodiscard]] receiver open_receiver(int peer, std::uint32_t id) {
    return {world_, edge(peer, rank_, id), world_->tag(context_, id)};
  }

  template <class Done, class Late>
  void poll(const Done& done, const Late& late) {
    world_->poll(done, late);
  }

 private:
  /// What a member says before a collective.
  struct Said {
    Call call;
    int color = 0;
    int key = 0;
    int next_context = 0;
  };
  static_assert(std::is_trivially_copyable_v<Said>);

  /// Exchanges the calls of all members and checks that they are equal.
  void agree(Call call, int color = 0, int key = 0) {
    call.sequence = ++calls_;
    Said& own = said_[static_cast<std::size_t>(rank_)];
    own = {call, color, key, world_->next_context()};
    for_peers([&](int peer) {
      receive_bytes(peer, &said_[static_cast<std::size_t>(peer)], sizeof(Said),
                    detail::MpiWorld::call_tag);
      send_bytes(peer, &own, sizeof(Said), detail::MpiWorld::call_tag);
    });
    finish();
    std::vector<Call>& calls = compared_;
    calls.clear();
    for (const Said& said : said_) calls.push_back(said.call);
    for (const Call& other : calls)
      if (other != call) world_->disagree_and_throw(describe_disagreement(calls, *roster_));
  }

  /// out becomes the reduction of piece(rank()) over all members; piece(m) goes to member m.
  /// `out` may be this rank's own piece.
  template <class T, class PieceOf>
  void reduce_pieces(Vector<T> out, const PieceOf& piece, Reduce reduce) {
    const Index count = out.size();
    scratch_.resize(static_cast<std::size_t>(count * size()) * sizeof(T));
    T* const received = reinterpret_cast<T*>(scratch_.data());
    for_peers([&](int peer) {
      receive(peer, Vector<T>(received + peer * count, count));
      send<T>(peer, piece(peer));
    });
    finish();
    reduce_along_tree<T>(
        reduce, size(),
        [&](int member) -> const T* {
          return member == rank_ ? piece(rank_).data() : received + member * count;
        },
        {0, count},
        [&](Piece at, const T* values) {
          std::memcpy(out.data() + at.first, values,
                      sizeof(T) * static_cast<std::size_t>(at.count));
        });
  }

  /// Every rank starts with its right neighbour, so that not all begin at rank 0.
  template <class F>
  void for_peers(const F& f) const {
    for (int i = 1; i < size(); ++i) f((rank_ + i) % size());
  }

  template <class T>
  void receive(int peer, Vector<T> into) {
    receive_bytes(peer, into.data(), into.size() * static_cast<Index>(sizeof(T)),
                  detail::MpiWorld::data_tag);
  }
  template <class T>
  void send(int peer, Vector<const T> from) {
    send_bytes(peer, from.data(), from.size() * static_cast<Index>(sizeof(T)),
               detail::MpiWorld::data_tag);
  }

  void receive_bytes(int peer, void* into, Index bytes, std::uint32_t low_tag) {
    for_parts(bytes, [&](Index first, int count) {
      requests_.push_back(MPI_REQUEST_NULL);
      peers_.push_back(peer);
      detail::check_mpi(
          MPI_Irecv(static_cast<std::byte*>(into) + first, count, MPI_BYTE, roster_->global(peer),
                    world_->tag(context_, low_tag), world_->messages(), &requests_.back()),
          "MPI_Irecv");
    });
  }
  void send_bytes(int peer, const void* from, Index bytes, std::uint32_t low_tag) {
    for_parts(bytes, [&](Index first, int count) {
      requests_.push_back(MPI_REQUEST_NULL);
      peers_.push_back(peer);
      detail::check_mpi(MPI_Isend(static_cast<const std::byte*>(from) + first, count, MPI_BYTE,
                                  roster_->global(peer), world_->tag(context_, low_tag),
                                  world_->messages(), &requests_.back()),
                        "MPI_Isend");
    });
  }

  /// MPI counts are ints, so long messages go in parts.
  template <class F>
  static void for_parts(Index bytes, const F& f) {
    constexpr Index most = Index{1} << 30;
    for (Index first = 0; first < bytes; first += most)
      f(first, static_cast<int>(std::min(most, bytes - first)));
  }

  /// Waits for all messages begun since the last finish().
  void finish() {
    world_->world().throw_if_failed();
    world_->wait(requests_, [&](const auto& pending) {
      std::vector<int> missing;
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        const int rank = roster_->global(peers_[i]);
        if (pending(i) && std::find(missing.begin(), missing.end(), rank) == missing.end())
          missing.push_back(rank);
      }
      std::sort(missing.begin(), missing.end());
      const Call& call = said_[static_cast<std::size_t>(rank_)].call;
      return sentence(describe(call, *roster_), " on ", roster_->text(), ": ", rank_list(missing),
                      " did not arrive within ", to_string(world_->world().deadline()));
    });
    requests_.clear();
    peers_.clear();
  }

  [[nodiscard]] Edge edge(int source, int destination, std::uint32_t id) const {
    detail::expect_channel_id(id);
    detail::expect_member("channel peer", source, size());
    detail::expect_member("channel peer", destination, size());
    return {roster_->global(source), roster_->global(destination), id};
  }

  template <class S, class T>
  static void copy_unless_same(S& stream, Vector<T> out, Vector<const T> in) {
    if (out.data() != in.data()) copy(stream, out, in);
  }

  std::shared_ptr<detail::MpiWorld> world_;
  std::unique_ptr<Roster> roster_;
  int rank_;
  int context_;
  std::uint64_t calls_ = 0;
  std::vector<Said> said_;      // by member
  std::vector<Call> compared_;  // of said_
  std::vector<MPI_Request> requests_;
  std::vector<int> peers_;  // whom each request concerns
  std::vector<std::byte> scratch_;
};

static_assert(communicator<MpiComm, host::Stream>);
static_assert(has_channel_queries<MpiComm, host::Stream>);

struct MpiOptions {
  Seconds deadline = default_deadline;  ///< longest wait of a rank for another
};

/// MPI from initialisation to finalisation; one a process. Its end finalises MPI, or when an
/// exception unwinds it, tells the other ranks and aborts the run.
class MpiSession {
 public:
  explicit MpiSession(MpiOptions options = {}) : exceptions_(std::uncaught_exceptions()) {
    int provided = 0;
    detail::check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided),
                      "MPI_Init_thread");
    world_ = std::make_shared<detail::MpiWorld>(options.deadline);
  }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  /// @pre  communicators and channels have ended
  ~MpiSession() {
    if (std::uncaught_exceptions() > exceptions_)
      abort(std::make_exception_ptr(Error(ErrorCode::logic, "an exception ended its MPI session")));
    world_.reset();
    MPI_Finalize();
  }

  /// The communicator of all ranks. @pre  called once
  [[nodiscard]] MpiComm world() const {
    std::vector<int> members(static_cast<std::size_t>(world_->size()));
    std::iota(members.begin(), members.end(), 0);
    return {world_, std::move(members), "world", world_->rank(), 0};
  }

  /// Prints the sentence, tells the other ranks, leaves them time to end by themselves, and ends
  /// all processes with exit_code() of the error, or 3.
  [[noreturn]] void abort(const std::exception_ptr& cause) noexcept {
    const Ending end = ending_of(cause);
    std::fprintf(stderr, "rank %d: %s\n", world_->rank(), end.what.c_str());
    std::fflush(nullptr);
    world_->fail(cause);
    // The rank that failed first decides the exit code; the others go on only if it is gone.
    const bool own = world_->world().failure().rank == world_->rank();
    std::this_thread::sleep_for(own ? grace : 3 * grace);
    MPI_Abort(MPI_COMM_WORLD, end.code);
    std::terminate();
  }

 private:
  static constexpr std::chrono::milliseconds grace{300};

  int exceptions_;
  std::shared_ptr<detail::MpiWorld> world_;
};

/// Runs f(MpiComm&) on every process that mpirun or srun has started and returns when all are done.
/// When a rank throws, all ranks print why and the run ends with exit_code() of the error.
template <std::invocable<MpiComm&> F>
void run_mpi(const F& f, MpiOptions options = {}) {
  MpiSession session(options);
  try {
    MpiComm comm = session.world();
    f(comm);
    // A rank that left early would hold the others in MPI_Finalize without a deadline.
    host::Stream stream;
    comm.barrier(stream);
  } catch (...) {
    session.abort(std::current_exception());
  }
}

}  // namespace mega::inline v0::comm

namespace mega::inline v0 {
using comm::MpiComm;
using comm::run_mpi;
}  // namespace mega::inline v0
