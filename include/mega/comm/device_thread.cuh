/// @file  DeviceThreadComm: ranks are threads of one process that share one GPU, each with its own
/// streams and memory. Any layout can run on a single GPU, at the speed of one.
///
/// How a collective is ordered: each rank's thread records an event on its stream and enters a
/// rendezvous that compares the calls. The last thread to come queues the rest for all: the stream
/// of rank 0 waits for the events of the others, runs one kernel over the memory of all ranks and
/// records its own event; the other streams wait for that one. A thread waits for threads alone,
/// and a stream for work that was queued before the wait was. So nothing can stand still on the
/// GPU, however few hardware queues the streams share.
///
/// Failures: a rank that throws, a disagreement or a passed deadline ends every later wait as with
/// ThreadComm; no stream is left waiting.
#pragma once
#include <mega/comm/call.hpp>
#include <mega/comm/channel.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/device_channel.hpp>
#include <mega/comm/reduce.hpp>
#include <mega/comm/thread.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/device.hpp>
#include <mega/cuda/event.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace mega::inline v0::cuda {

/// How many ranks may share one GPU.
inline constexpr int max_members = 64;

/// The buffers that the members of a communicator bring to one collective.
template <class T>
struct MemberBuffers {
  int members = 0;
  const T* in[max_members] = {};
  T* out[max_members] = {};
};

namespace detail {

inline constexpr int tree_levels = std::bit_width(static_cast<unsigned>(max_members));

/// Neighbouring elements that move in one access.
template <class T, int Width>
struct alignas(sizeof(T) * Width) Neighbours {
  T at[Width];
};

template <comm::Reduce Op, class T, int Width>
__device__ inline Neighbours<T, Width> combine(const Neighbours<T, Width>& left,
                                               const Neighbours<T, Width>& right) {
  Neighbours<T, Width> out;
#pragma unroll
  for (int i = 0; i < Width; ++i) out.at[i] = comm::combine(Op, left.at[i], right.at[i]);
  return out;
}

/// The canonical tree over the members' values, left to right. Since every left branch of it is a
/// power of two wide, it is a binary counter: after m values, level k holds a finished subtree of
/// 2^k where bit k of m is set, and the levels are in registers.
template <comm::Reduce Op, int Width, class T>
__device__ inline Neighbours<T, Width> reduce_members(const MemberBuffers<T>& buffers, Index at) {
  Neighbours<T, Width> level[tree_levels];
  for (int m = 0; m < buffers.members; ++m) {
    auto subtree = *reinterpret_cast<const Neighbours<T, Width>*>(buffers.in[m] + at);
    // As a counter carries: finished subtrees grow until a free level takes them.
    const int free = __ffs(~m) - 1;
#pragma unroll
    for (int k = 0; k < tree_levels; ++k) {
      if (k < free) subtree = detail::combine<Op>(level[k], subtree);
      if (k == free) level[k] = subtree;
    }
  }
  // What is left over is narrower, and further to the right, the lower its level.
  Neighbours<T, Width> whole{};
  bool begun = false;
#pragma unroll
  for (int k = 0; k < tree_levels; ++k) {
    if ((buffers.members >> k & 1) == 0) continue;
    whole = begun ? detail::combine<Op>(level[k], whole) : level[k];
    begun = true;
  }
  return whole;
}

/// Writes where it has read, and nobody else reads there: outputs may be the inputs.
template <comm::Reduce Op, int Width, class T>
MEGA_KERNEL void reduce_to_all_members(const __grid_constant__ MemberBuffers<T> buffers,
                                       Index groups) {
  const Index step = static_cast<Index>(gridDim.x) * blockDim.x;
  for (Index g = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; g < groups; g += step) {
    const auto whole = reduce_members<Op, Width>(buffers, g * Width);
    for (int m = 0; m < buffers.members; ++m)
      *reinterpret_cast<Neighbours<T, Width>*>(buffers.out[m] + g * Width) = whole;
  }
}

/// Piece blockIdx.y of the reduction goes to member blockIdx.y.
template <comm::Reduce Op, int Width, class T>
MEGA_KERNEL void reduce_to_each_member(const __grid_constant__ MemberBuffers<T> buffers,
                                       Index groups) {
  const Index first = blockIdx.y * groups * Width;
  const Index step = static_cast<Index>(gridDim.x) * blockDim.x;
  for (Index g = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; g < groups; g += step) {
    *reinterpret_cast<Neighbours<T, Width>*>(buffers.out[blockIdx.y] + g * Width) =
        reduce_members<Op, Width>(buffers, first + g * Width);
  }
}

/// Which part of which input goes where in which output: member `first_source + blockIdx.y` gives
/// member m the `count` elements at m * in_step, which go to source * out_step.
template <class T>
MEGA_KERNEL void exchange_between_members(const __grid_constant__ MemberBuffers<T> buffers,
                                          int first_source, Index in_step, Index out_step,
                                          Index count) {
  const int source = first_source + static_cast<int>(blockIdx.y);
  const Index step = static_cast<Index>(gridDim.x) * blockDim.x;
  for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    T value = buffers.in[source][i];
    for (int m = 0; m < buffers.members; ++m) {
      if (m > 0 && in_step > 0) value = buffers.in[source][m * in_step + i];
      buffers.out[m][source * out_step + i] = value;
    }
  }
}

/// Whether all buffers, and all steps of `step` elements in them, are on borders of 16 bytes.
template <class T>
[[nodiscard]] inline bool members_are_aligned(const MemberBuffers<T>& buffers, Index step) {
  bool aligned = step * static_cast<Index>(sizeof(T)) % 16 == 0;
  for (int m = 0; m < buffers.members; ++m) {
    aligned = aligned && reinterpret_cast<std::uintptr_t>(buffers.in[m]) % 16 == 0 &&
              reinterpret_cast<std::uintptr_t>(buffers.out[m]) % 16 == 0;
  }
  return aligned;
}

/// The buffers from element `first` on.
template <class T>
[[nodiscard]] inline MemberBuffers<T> from_element(MemberBuffers<T> buffers, Index first) {
  for (int m = 0; m < buffers.members; ++m) {
    buffers.in[m] += first;
    buffers.out[m] += first;
  }
  return buffers;
}

template <comm::Reduce Op, class T>
void reduce_to_all(Stream& stream, const MemberBuffers<T>& buffers, Index count) {
  constexpr int width = 16 / static_cast<int>(sizeof(T));
  const Index groups = members_are_aligned(buffers, 0) ? count / width : 0;
  launch(stream, "all_reduce", reduce_to_all_members<Op, width, T>,
         grid_x(ceil_div(groups, block_threads)), block_threads, 0, buffers, groups);
  const Index rest = count - groups * width;
  launch(stream, "all_reduce", reduce_to_all_members<Op, 1, T>,
         grid_x(ceil_div(rest, block_threads)), block_threads, 0,
         from_element(buffers, groups * width), rest);
}

template <comm::Reduce Op, class T>
void reduce_to_each(Stream& stream, const MemberBuffers<T>& buffers, Index count) {
  constexpr int width = 16 / static_cast<int>(sizeof(T));
  const auto members = static_cast<unsigned>(buffers.members);
  if (members_are_aligned(buffers, count)) {
    const Index groups = count / width;
    launch(stream, "reduce_scatter", reduce_to_each_member<Op, width, T>,
           dim3(grid_x(ceil_div(groups, block_threads)), members), block_threads, 0, buffers,
           groups);
  } else {
    launch(stream, "reduce_scatter", reduce_to_each_member<Op, 1, T>,
           dim3(grid_x(ceil_div(count, block_threads)), members), block_threads, 0, buffers, count);
  }
}

}  // namespace detail

/// out[m][i] becomes the reduction of in[0][i], in[1][i], ... for every member m, i < count.
/// @pre  out[m] may be in[m]; no other overlap   @determinism  the bits of comm::tree_reduce()
template <comm::reducible T>
void reduce_to_all(Stream& stream, const MemberBuffers<T>& buffers, Index count,
                   comm::Reduce reduce) {
  if (reduce == comm::Reduce::sum)
    detail::reduce_to_all<comm::Reduce::sum>(stream, buffers, count);
  else
    detail::reduce_to_all<comm::Reduce::max>(stream, buffers, count);
}

/// out[m][i] becomes the reduction of in[0][m * count + i], in[1][m * count + i], ..., i < count.
/// @pre  out[m] may be in[m] + m * count; no other overlap
/// @determinism  the bits of comm::tree_reduce()
template <comm::reducible T>
void reduce_to_each(Stream& stream, const MemberBuffers<T>& buffers, Index count,
                    comm::Reduce reduce) {
  if (reduce == comm::Reduce::sum)
    detail::reduce_to_each<comm::Reduce::sum>(stream, buffers, count);
  else
    detail::reduce_to_each<comm::Reduce::max>(stream, buffers, count);
}

/// out[m][s * out_step + i] becomes in[s][m * in_step + i] for every member m, i < count, and for
/// the members s of [first_source, first_source + sources).
/// @pre  an output may be the input that it is a copy of; no other overlap
template <comm::element T>
void exchange(Stream& stream, const MemberBuffers<T>& buffers, int first_source, int sources,
              Index in_step, Index out_step, Index count) {
  const auto queue = [&]<class Unit>(const MemberBuffers<Unit>& units, Index elements) {
    const dim3 grid(detail::grid_x(detail::ceil_div(count / elements, detail::block_threads)),
                    static_cast<unsigned>(sources));
    detail::launch(stream, "exchange", detail::exchange_between_members<Unit>, grid,
                   detail::block_threads, 0, units, first_source, in_step / elements,
                   out_step / elements, count / elements);
  };
  // All steps are 0 or count.
  if (!detail::members_are_aligned(buffers, count)) return queue(buffers, Index{1});
  MemberBuffers<uint4> units{.members = buffers.members};
  for (int m = 0; m < buffers.members; ++m) {
    units.in[m] = reinterpret_cast<const uint4*>(buffers.in[m]);
    units.out[m] = reinterpret_cast<uint4*>(buffers.out[m]);
  }
  queue(units, static_cast<Index>(sizeof(uint4) / sizeof(T)));
}

}  // namespace mega::inline v0::cuda

namespace mega::inline v0::comm {
namespace detail {

/// What a member brings to a collective. It lies where the member waits, which is what makes its
/// stream usable by the thread that queues for all.
struct DeviceArrival {
  cuda::Stream* stream;
  cuda::Event* event;
  const void* in;
  void* out;
};

/// What the ranks of one DeviceThreadComm share.
class DeviceThreadGroup {
 public:
  explicit DeviceThreadGroup(std::shared_ptr<Group> members)
      : members_(std::move(members)), rendezvous_(members_->world(), members_->roster()) {}

  [[nodiscard]] Group& members() noexcept { return *members_; }
  [[nodiscard]] const std::shared_ptr<World>& world() const noexcept { return members_->world(); }
  [[nodiscard]] Roster& roster() noexcept { return members_->roster(); }

  /// Queues work(stream, buffers) after all that the members have queued on their streams, and
  /// what they queue from now on after it.
  template <class T, class Work>
  void collective(int member, const Call& call, DeviceArrival arrival, const Work& work) {
    if (member > 0) arrival.stream->record(*arrival.event);
    std::exception_ptr thrown;
    rendezvous_.enter(member, call, {nullptr, &arrival}, [&]() noexcept {
      try {
        queue<T>(work);
      } catch (...) {
        thrown = std::current_exception();
        world()->fail(roster().global(member), thrown);
      }
    });
    if (thrown) std::rethrow_exception(thrown);
    world()->throw_if_failed();
  }

  [[nodiscard]] std::shared_ptr<DeviceChannel> open(int source, int destination, std::uint32_t id) {
    return channels_.open(world(), {roster().global(source), roster().global(destination), id});
  }

 private:
  [[nodiscard]] const DeviceArrival& arrival(int member) const {
    return *static_cast<const DeviceArrival*>(rendezvous_.arrival(member).out);
  }

  template <class T, class Work>
  void queue(const Work& work) {
    const int size = members_->size();
    cuda::MemberBuffers<T> buffers{.members = size};
    for (int m = 0; m < size; ++m) {
      buffers.in[m] = static_cast<const T*>(arrival(m).in);
      buffers.out[m] = static_cast<T*>(arrival(m).out);
    }
    cuda::Stream& first = *arrival(0).stream;
    for (int m = 1; m < size; ++m) first.wait(*arrival(m).event);
    work(first, buffers);
    first.record(*arrival(0).event);
    for (int m = 1; m < size; ++m) arrival(m).stream->wait(*arrival(0).event);
  }

  const std::shared_ptr<Group> members_;
  Rendezvous rendezvous_;  // of collectives; the members' own one is for split()
  DeviceChannels channels_;
};

}  // namespace detail

/// One rank's handle on a communicator whose ranks are threads and share a GPU. Move-only; used by
/// one thread and from one stream at a time, on which the buffers are free to be used again once
/// the call has returned. Ranks issue collectives of all their communicators in one order.
/// @cost  a collective: one meeting of the threads and one kernel; reductions read each element of
///        each rank once. The host never waits for the GPU.
/// @determinism  the bits of ThreadComm
class DeviceThreadComm {
 public:
  using sender = DeviceSender;
  using receiver = DeviceReceiver;

  /// Collective over `members`, which share the calling thread's current device. Use
  /// run_device_threads() or split().
  DeviceThreadComm(std::shared_ptr<detail::Group> members, int rank) : rank_(rank) {
    if (rank == 0) group_ = std::make_shared<detail::DeviceThreadGroup>(members);
    if (members->size() == 1) return;
    // Small enough for the last member to do it whole, before anybody's group_ is used.
    members->collective(rank, {.operation = Operation::broadcast, .sequence = 1},
                        {&group_, &group_}, [](detail::Group& all, int m) noexcept {
                          using Shared = std::shared_ptr<detail::DeviceThreadGroup>;
                          if (m > 0) *all.out<Shared>(m) = *all.in<Shared>(0);
                        });
  }
  DeviceThreadComm(DeviceThreadComm&&) noexcept = default;
  DeviceThreadComm& operator=(DeviceThreadComm&&) noexcept = default;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return group_->members().size(); }
  /// This rank's number in the whole run, the one that messages use.
  [[nodiscard]] int global_rank() const { return group_->roster().global(rank_); }
  /// Global ranks of the members, in their order here.
  [[nodiscard]] std::span<const int> members() const noexcept { return group_->roster().members(); }
  [[nodiscard]] std::string name() const { return group_->roster().name(); }
  /// Names the communicator in messages, for all its ranks.
  void set_name(std::string name) { group_->roster().set_name(std::move(name)); }

  [[nodiscard]] DeviceThreadComm split(int color, int key) {
    auto [members, rank] = group_->members().split(rank_, ++splits_, color, key);
    return {std::move(members), rank};
  }

  void barrier(cuda::Stream& stream) {
    issue<std::byte>(stream, {}, {}, {}, [](cuda::Stream&, const auto&) {});
  }

  template <reducible T>
  void all_reduce(cuda::Stream& stream, Vector<T> inout, Reduce reduce) {
    const Index count = inout.size();
    issue<T>(stream, {Operation::all_reduce, element_type_of<T>(), reduce, 0, count}, inout.data(),
             inout.data(), [=](cuda::Stream& on, const auto& buffers) {
               cuda::reduce_to_all(on, buffers, count, reduce);
             });
  }

  template <reducible T>
  void reduce_scatter(cuda::Stream& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in,
                      Reduce reduce) {
    detail::expect_pieces(Operation::reduce_scatter, in.size(), out.size(), size());
    const Index count = out.size();
    if (size() == 1) return copy_unless_same(stream, out, in);
    issue<T>(stream, {Operation::reduce_scatter, element_type_of<T>(), reduce, 0, in.size()},
             in.data(), out.data(), [=](cuda::Stream& on, const auto& buffers) {
               cuda::reduce_to_each(on, buffers, count, reduce);
             });
  }

  template <element T>
  void all_gather(cuda::Stream& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) {
    detail::expect_pieces(Operation::all_gather, out.size(), in.size(), size());
    const Index count = in.size();
    if (size() == 1) return copy_unless_same(stream, out, in);
    issue<T>(stream, {Operation::all_gather, element_type_of<T>(), {}, 0, count}, in.data(),
             out.data(), [=](cuda::Stream& on, const auto& buffers) {
               cuda::exchange(on, buffers, 0, buffers.members, 0, count, count);
             });
  }

  template <element T>
  void broadcast(cuda::Stream& stream, Vector<T> inout, int root) {
    detail::expect_member("broadcast root", root, size());
    const Index count = inout.size();
    issue<T>(stream, {Operation::broadcast, element_type_of<T>(), {}, root, count}, inout.data(),
             inout.data(), [=](cuda::Stream& on, const auto& buffers) {
               cuda::exchange(on, buffers, root, 1, 0, 0, count);
             });
  }

  template <element T>
  void all_to_all(cuda::Stream& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) {
    detail::expect_exchange(out.size(), in.size(), size());
    const Index count = in.size() / size();
    if (size() == 1) return copy_unless_same(stream, out, in);
    issue<T>(stream, {Operation::all_to_all, element_type_of<T>(), {}, 0, in.size()}, in.data(),
             out.data(), [=](cuda::Stream& on, const auto& buffers) {
               cuda::exchange(on, buffers, 0, buffers.members, count, count, count);
             });
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
  /// Numbers the call, and meets the other ranks for it.
  template <class T, class Work>
  void issue(cuda::Stream& stream, Call call, const T* in, T* out, const Work& work) {
    if (size() == 1) return;
    call.sequence = ++calls_;
    group_->template collective<T>(rank_, call, {&stream, &event_, in, out}, work);
  }

  template <class T>
  static void copy_unless_same(cuda::Stream& stream, Vector<T> out, Vector<const T> in) {
    if (out.data() != in.data()) cuda::copy(stream, out, in);
  }

  std::shared_ptr<detail::DeviceThreadGroup> group_;
  int rank_;
  /// This rank has come; on rank 0: all is done. A wait keeps the record that it was made for.
  cuda::Event event_;
  std::uint64_t calls_ = 0;
  std::uint64_t splits_ = 0;
};

static_assert(communicator<DeviceThreadComm, cuda::Stream>);
static_assert(has_channel_queries<DeviceThreadComm, cuda::Stream>);

struct DeviceThreadOptions {
  Seconds deadline = default_deadline;  ///< longest wait of a rank for another
  int device = 0;                       ///< ordinal of the GPU that the ranks share
};

/// Runs f(DeviceThreadComm&) on `ranks` threads, one a rank, all with the same current device, and
/// returns when all have ended. When a rank throws, all others end at their next wait, and the
/// first exception leaves from here.
template <std::invocable<DeviceThreadComm&> F>
void run_device_threads(int ranks, const F& f, DeviceThreadOptions options = {}) {
  expects(ranks >= 1 && ranks <= cuda::max_members, ErrorCode::usage, [&] {
    return sentence("a run of ranks that share a GPU needs 1 to ", cuda::max_members,
                    " ranks, not ", ranks);
  });
  const auto world = std::make_shared<World>(options.deadline);
  const auto group = detail::group_of_all(world, ranks);
  detail::run_ranks(*world, ranks, [&](int rank) {
    const cuda::Device device(options.device);
    DeviceThreadComm comm(group, rank);
    f(comm);
  });
  world->rethrow_cause();
}

}  // namespace mega::inline v0::comm

namespace mega::inline v0 {
using comm::DeviceThreadComm;
using comm::run_device_threads;
}  // namespace mega::inline v0
