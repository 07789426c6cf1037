/// @file  What communicators over NCCL have in common: checked calls, NCCL's names of types and
/// operations, the collectives, and how far a stream has come with them.
#pragma once
#include <mega/comm/call.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/comm/reduce.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <type_traits>

namespace mega::inline v0::comm::detail {

/// NVLink multicast stays off unless NCCL_NVLS_ENABLE says otherwise: nothing here was tested or
/// measured with it. NCCL reads the variable once, when it makes its first communicator.
/// @pre  no other thread reads or changes the environment meanwhile
inline void leave_multicast_off() {
  (void)::setenv("NCCL_NVLS_ENABLE", "0", 0);
}

inline void check_nccl(ncclResult_t status, std::string_view call,
                       SourceLocation at = SourceLocation::current()) {
  if (status == ncclSuccess || status == ncclInProgress) [[likely]]
    return;
  throw Error(ErrorCode::device,
              sentence(call, " failed with ", ncclGetErrorString(status), ": ",
                       ncclGetLastError(nullptr), ", at ", at.file_name(), ":", at.line()),
              at);
}

template <element T>
[[nodiscard]] constexpr ncclDataType_t nccl_type() noexcept {
  switch (element_type_of<T>()) {
    case ElementType::float32: return ncclFloat32;
    case ElementType::float64: return ncclFloat64;
    case ElementType::bfloat16: return ncclBfloat16;
    case ElementType::float16: return ncclFloat16;
    case ElementType::int32: return ncclInt32;
    case ElementType::int64: return ncclInt64;
    default: return ncclInt8;
  }
}

[[nodiscard]] constexpr ncclRedOp_t nccl_operation(Reduce reduce) noexcept {
  return reduce == Reduce::sum ? ncclSum : ncclMax;
}

/// How far a stream has come with the collectives of one communicator: two words of host memory
/// that the stream itself writes, so that they can be read while every call to CUDA would wait.
class Progress {
 public:
  Progress() {
    void* function = nullptr;
    cuda::check(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function, 12000,
                                                 cudaEnableDefault),
                "cudaGetDriverEntryPointByVersion of cuStreamWriteValue32");
    write_ = reinterpret_cast<PFN_cuStreamWriteValue32_v11070>(function);
    cuda::check(cudaMallocHost(&words_, 2 * sizeof(std::uint32_t)), "cudaMallocHost");
    words_[0] = words_[1] = 0;
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { (void)cudaFreeHost(words_); }

  void begin(cuda::Stream& stream, std::uint32_t number) { write(stream, 0, number); }
  void end(cuda::Stream& stream, std::uint32_t number) { write(stream, 1, number); }
  [[nodiscard]] bool begun(std::uint32_t number) const noexcept { return reached(0, number); }
  [[nodiscard]] bool ended(std::uint32_t number) const noexcept { return reached(1, number); }

 private:
  void write(cuda::Stream& stream, int word, std::uint32_t number) {
    const CUresult status =
        write_(stream.native(), reinterpret_cast<CUdeviceptr>(words_ + word), number, 0);
    expects(status == CUDA_SUCCESS, ErrorCode::device, [&] {
      return sentence("cuStreamWriteValue32 failed with status ", static_cast<int>(status));
    });
  }
  /// Numbers may wrap around.
  [[nodiscard]] bool reached(int word, std::uint32_t number) const noexcept {
    const volatile std::uint32_t& at = words_[word];
    return static_cast<std::int32_t>(at - number) >= 0;
  }

  PFN_cuStreamWriteValue32_v11070 write_ = nullptr;
  std::uint32_t* words_ = nullptr;
};

/// Collectives as NCCL calls. Comm has size(), flag() (a word of device memory) and issue(stream,
/// Call, queue), which numbers the call and has queue(ncclComm_t, cudaStream_t) queue it, or does
/// nothing in a communicator of one rank.
template <class Comm>
class NcclCollectives {
 public:
  void barrier(cuda::Stream& stream) {
    self().issue(stream, {Operation::barrier}, [&](ncclComm_t comm, cudaStream_t on) {
      return ncclAllReduce(self().flag(), self().flag(), 1, ncclInt32, ncclSum, comm, on);
    });
  }

  template <reducible T>
  void all_reduce(cuda::Stream& stream, Vector<T> inout, Reduce reduce) {
    self().issue(stream, {Operation::all_reduce, element_type_of<T>(), reduce, 0, inout.size()},
                 [&](ncclComm_t comm, cudaStream_t on) {
                   return ncclAllReduce(inout.data(), inout.data(), count(inout), nccl_type<T>(),
                                        nccl_operation(reduce), comm, on);
                 });
  }

  template <reducible T>
  void reduce_scatter(cuda::Stream& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in,
                      Reduce reduce) {
    expect_pieces(Operation::reduce_scatter, in.size(), out.size(), self().size());
    if (self().size() == 1) return copy_unless_same(stream, out, in);
    self().issue(stream, {Operation::reduce_scatter, element_type_of<T>(), reduce, 0, in.size()},
                 [&](ncclComm_t comm, cudaStream_t on) {
                   return ncclReduceScatter(in.data(), out.data(), count(out), nccl_type<T>(),
                                            nccl_operation(reduce), comm, on);
                 });
  }

  template <element T>
  void all_gather(cuda::Stream& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) {
    expect_pieces(Operation::all_gather, out.size(), in.size(), self().size());
    if (self().size() == 1) return copy_unless_same(stream, out, in);
    self().issue(stream, {Operation::all_gather, element_type_of<T>(), {}, 0, in.size()},
                 [&](ncclComm_t comm, cudaStream_t on) {
                   return ncclAllGather(in.data(), out.data(), count(in), nccl_type<T>(), comm, on);
                 });
  }

  template <element T>
  void broadcast(cuda::Stream& stream, Vector<T> inout, int root) {
    expect_member("broadcast root", root, self().size());
    self().issue(stream, {Operation::broadcast, element_type_of<T>(), {}, root, inout.size()},
                 [&](ncclComm_t comm, cudaStream_t on) {
                   return ncclBroadcast(inout.data(), inout.data(), count(inout), nccl_type<T>(),
                                        root, comm, on);
                 });
  }

  template <element T>
  void all_to_all(cuda::Stream& stream, Vector<T> out, Vector<const std::type_identity_t<T>> in) {
    expect_exchange(out.size(), in.size(), self().size());
    if (self().size() == 1) return copy_unless_same(stream, out, in);
    const Index piece = in.size() / self().size();
    self().issue(stream, {Operation::all_to_all, element_type_of<T>(), {}, 0, in.size()},
                 [&](ncclComm_t comm, cudaStream_t on) {
                   ncclResult_t first = ncclGroupStart();
                   const auto keep = [&](ncclResult_t status) {
                     if (first == ncclSuccess && status != ncclInProgress) first = status;
                   };
                   const auto n = static_cast<std::size_t>(piece);
                   for (int peer = 0; peer < self().size(); ++peer) {
                     keep(ncclSend(in.data() + peer * piece, n, nccl_type<T>(), peer, comm, on));
                     keep(ncclRecv(out.data() + peer * piece, n, nccl_type<T>(), peer, comm, on));
                   }
                   const ncclResult_t last = ncclGroupEnd();
                   return first == ncclSuccess ? last : first;
                 });
  }

 private:
  [[nodiscard]] Comm& self() noexcept { return static_cast<Comm&>(*this); }

  template <class T>
  [[nodiscard]] static std::size_t count(Vector<T> v) noexcept {
    return static_cast<std::size_t>(v.size());
  }
  template <class T>
  static void copy_unless_same(cuda::Stream& stream, Vector<T> out, Vector<const T> in) {
    if (out.data() != in.data()) cuda::copy(stream, out, in);
  }
};

}  // namespace mega::inline v0::comm::detail
