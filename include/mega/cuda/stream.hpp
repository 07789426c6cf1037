/// @file  An owned CUDA stream, with what belongs to one stream alone: scratch memory and library
/// handles.
#pragma once
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/event.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace mega::inline v0::cuda {

/// Runs beside the legacy default stream and waits for nothing on it. Made on the calling thread's
/// current device, which must be current wherever the stream is used. Move-only; used by one thread
/// at a time.
class Stream {
 public:
  using event_type = Event;

  Stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  Stream(Stream&& other) noexcept { swap(other); }
  Stream& operator=(Stream&& other) noexcept {
    swap(other);
    return *this;
  }
  /// Waits for what is queued, since the memory that it touches goes next.
  ~Stream() {
    if (stream_ == nullptr) return;
    (void)cudaStreamSynchronize(stream_);
    resources_.clear();
    if (scratch_ != nullptr) (void)cudaFreeAsync(scratch_, stream_);
    (void)cudaStreamDestroy(stream_);
  }

  [[nodiscard]] cudaStream_t native() const noexcept {
    ++uses_;
    return stream_;
  }
  /// Grows with whatever may queue work: native(), wait(), scratch(), resource(). Two equal values
  /// have none between them, provided that nobody keeps what these return for a later operation.
  [[nodiscard]] std::uint64_t uses() const noexcept { return uses_; }

  void record(Event& event) { check(cudaEventRecord(event.native(), stream_), "cudaEventRecord"); }
  void wait(const Event& event) {
    ++uses_;
    check(cudaStreamWaitEvent(stream_, event.native(), 0), "cudaStreamWaitEvent");
  }
  /// @throws  Error(device) for whatever queued work did wrong; CUDA reports it from then on
  void synchronize() { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  /// Device memory of one operation: valid for what is queued until the next call of scratch().
  /// Contents indeterminate, aligned to 256 bytes. Grown in stream order at its largest use, then
  /// kept.
  /// @throws  Error(logic) where it would have to grow while the stream is captured: a graph would
  ///          own the memory
  [[nodiscard]] void* scratch(std::size_t bytes) {
    ++uses_;
    if (bytes > scratch_bytes_) {
      expects(!is_capturing(), ErrorCode::logic, [&] {
        return sentence("scratch of ", bytes, " bytes was asked for in a capture, the stream has ",
                        scratch_bytes_, "; run the work once before it is captured");
      });
      if (scratch_ != nullptr)
        check(cudaFreeAsync(std::exchange(scratch_, nullptr), stream_), "cudaFreeAsync");
      scratch_bytes_ = 0;
      check(cudaMallocAsync(&scratch_, bytes, stream_),
            sentence("cudaMallocAsync of ", bytes, " bytes"));
      scratch_bytes_ = bytes;
      ++scratch_revision_;
    }
    return scratch_;
  }
  /// Changes whenever scratch has moved, after which graphs that name it are of no use.
  [[nodiscard]] std::uint64_t scratch_revision() const noexcept { return scratch_revision_; }

  /// What is queued goes into a graph and does not run.
  [[nodiscard]] bool is_capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  /// This stream's own T, made by T(stream) at the first call; it ends before the stream does.
  template <class T>
  [[nodiscard]] T& resource() {
    ++uses_;
    for (const Resource& known : resources_)
      if (known.key == &key_of<T>) return *static_cast<T*>(known.object.get());
    resources_.push_back({&key_of<T>, std::make_shared<T>(*this)});
    return *static_cast<T*>(resources_.back().object.get());
  }

 private:
  struct Resource {
    const char* key;
    std::shared_ptr<void> object;
  };
  template <class T>
  static inline char key_of = 0;  // only its address counts

  void swap(Stream& other) noexcept {
    std::swap(stream_, other.stream_);
    std::swap(scratch_, other.scratch_);
    std::swap(scratch_bytes_, other.scratch_bytes_);
    std::swap(scratch_revision_, other.scratch_revision_);
    std::swap(resources_, other.resources_);
    std::swap(uses_, other.uses_);
  }

  cudaStream_t stream_ = nullptr;
  void* scratch_ = nullptr;
  std::size_t scratch_bytes_ = 0;
  std::uint64_t scratch_revision_ = 0;
  std::vector<Resource> resources_;
  mutable std::uint64_t uses_ = 0;
};

static_assert(stream<Stream>);

}  // namespace mega::inline v0::cuda
