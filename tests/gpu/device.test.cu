// Streams, events, memory and the communicator of one rank.
#include <mega/comm/device_self.hpp>
#include <mega/cuda/device.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/optim/adamw.cuh>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using mega::Index;
using mega::Vector;
using mega::cuda::Event;
using mega::cuda::Memory;
using mega::cuda::Stream;

namespace {

template <class T>
Vector<T> view(const Memory& memory) {
  return {reinterpret_cast<T*>(memory.data()), static_cast<Index>(memory.bytes() / sizeof(T))};
}

std::vector<std::int64_t> read(Stream& stream, const Memory& memory) {
  std::vector<std::int64_t> out(memory.bytes() / sizeof(std::int64_t));
  download(stream, Vector<std::int64_t>(out.data(), static_cast<Index>(out.size())),
           Vector<const std::int64_t>(view<std::int64_t>(memory)));
  stream.synchronize();
  return out;
}

void write(Stream& stream, const Memory& memory, std::int64_t value) {
  mega::cuda::assign(stream, view<std::int64_t>(memory), value);
}

}  // namespace

// A kernel's arguments have linkage, so it stands in a named namespace.
namespace mega_test {
struct Nothing {
  __device__ void operator()(Index) const {}
};
/// *out = 0 + 1 + ... + (words - 1), by way of that much dynamic shared memory.
template <int>
MEGA_KERNEL void sum_through_shared(std::int64_t* out, int words) {
  extern __shared__ int words_of_block[];
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x))
    words_of_block[i] = i;
  __syncthreads();
  if (threadIdx.x > 0) return;
  std::int64_t sum = 0;
  for (int i = 0; i < words; ++i) sum += words_of_block[i];
  *out = sum;
}
}  // namespace mega_test
using mega_test::Nothing;

TEST_CASE("gpu device: copies") {
  mega::Cuda device;
  Stream stream = device.make_stream("test");
  const Memory a = device.allocate(5 * sizeof(std::int64_t)), b = device.allocate(a.bytes());
  const std::vector<std::int64_t> in = {1, -2, 3, INT64_MAX, 5};
  upload(stream, view<std::int64_t>(a), Vector<const std::int64_t>(in.data(), 5));
  copy(stream, view<std::int64_t>(b), Vector<const std::int64_t>(view<std::int64_t>(a)));
  CHECK(read(stream, b) == in);
  fill_zero(stream, view<std::int64_t>(b).slice(1, 3));
  CHECK(read(stream, b) == std::vector<std::int64_t>{1, 0, 0, 0, 5});
  const Memory none = device.allocate(0);
  CHECK(none.data() == nullptr);
  fill_zero(stream, view<std::int64_t>(none));
  CHECK_THROWS_AS(copy(stream, view<std::int64_t>(b).slice(0, 2),
                       Vector<const std::int64_t>(view<std::int64_t>(a))),
                  mega::Error);
}

TEST_CASE("gpu device: what CUDA refuses is an Error that says so") {
  CHECK_THROWS_WITH_AS(mega::Cuda(4711), doctest::Contains("there is no GPU 4711"), mega::Error);
  try {
    Memory too_large(std::size_t{1} << 50);
    FAIL("a petabyte was granted");
  } catch (const mega::Error& error) {
    CHECK(error.code() == mega::ErrorCode::device);
    CHECK(std::string(error.what()).find("cudaErrorMemoryAllocation") != std::string::npos);
    CHECK(std::string(error.what()).find("1125899906842624 bytes") != std::string::npos);
  }
  Stream stream;
  CHECK_THROWS_WITH_AS(mega::cuda::detail::launch(stream, "an_operation",
                                                  mega::cuda::detail::run_each_index<Nothing>,
                                                  dim3(1), dim3(4096), 0, Index{1}, Nothing{}),
                       doctest::Contains("an_operation failed with cudaErrorInvalid"), mega::Error);
  // The error was that of the launch alone.
  CHECK_NOTHROW(stream.synchronize());
}

TEST_CASE("gpu device: a stream waits for what was queued before the event") {
  mega::Cuda device;
  Stream slow = device.make_stream("slow"), waiting = device.make_stream("waiting");
  Event event = device.make_event();
  // An event that was never recorded holds nothing back.
  waiting.wait(event);
  const Memory target = device.allocate(sizeof(std::int64_t)),
               seen = device.allocate(target.bytes());
  const Memory large = device.allocate(std::size_t{1} << 30);
  for (std::int64_t round = 1; round <= 5; ++round) {
    // Milliseconds of work ahead of the write.
    for (int i = 0; i < 20; ++i) fill_zero(slow, view<std::int64_t>(large));
    write(slow, target, round);
    slow.record(event);
    waiting.wait(event);
    copy(waiting, view<std::int64_t>(seen), Vector<const std::int64_t>(view<std::int64_t>(target)));
    CHECK(read(waiting, seen) == std::vector<std::int64_t>{round});
  }
}

TEST_CASE("gpu device: what a stream owns") {
  struct Counted {
    explicit Counted(Stream& stream) : native(stream.native()) {}
    cudaStream_t native;
    int calls = 0;
  };
  Stream a, b;
  CHECK(&a.resource<Counted>() == &a.resource<Counted>());
  CHECK(&a.resource<Counted>() != &b.resource<Counted>());
  CHECK(b.resource<Counted>().native == b.native());
  Counted* const before = &a.resource<Counted>();
  Stream moved = std::move(a);
  CHECK(&moved.resource<Counted>() == before);
  void* const small = moved.scratch(100);
  CHECK(moved.scratch(50) == small);
  void* const grown = moved.scratch(std::size_t{64} << 20);
  CHECK(grown != nullptr);
  CHECK(moved.scratch(100) == grown);
  moved.synchronize();
}

TEST_CASE("gpu self: channels keep order and reuse their slots") {
  mega::Cuda device;
  mega::DeviceSelfComm comm;
  auto sender = comm.open_sender(0, 3);
  auto receiver = comm.open_receiver(0, 3);
  Stream compute = device.make_stream("compute"), out = device.make_stream("send"),
         in = device.make_stream("receive");
  const Memory message = device.allocate(sizeof(std::int64_t));
  std::vector<Memory> slots;
  for (int i = 0; i < 5; ++i) slots.push_back(device.allocate(message.bytes()));
  const auto bytes = [](const Memory& m) { return view<std::byte>(m); };
  std::int64_t next = 0;
  for (const int batch : {1, 2, 5, 3}) {
    for (int i = 0; i < batch; ++i)
      receiver.post(compute, bytes(slots[static_cast<std::size_t>(i)]));
    for (int i = 0; i < batch; ++i) {
      write(out, message, next + i);
      sender.send(out, Vector<const std::byte>(bytes(message)));
    }
    for (int i = 0; i < batch; ++i) {
      receiver.complete(in);
      CHECK(read(in, slots[static_cast<std::size_t>(i)]) == std::vector<std::int64_t>{next + i});
    }
    next += batch;
  }
  // The slot is free, and the message whole, long after the host has queued everything.
  const Memory large = device.allocate(std::size_t{1} << 30);
  const Memory& slot = slots[0];
  for (int i = 0; i < 20; ++i) fill_zero(compute, view<std::int64_t>(large));
  write(compute, slot, -1);
  receiver.post(compute, bytes(slot));
  write(out, message, 42);
  sender.send(out, Vector<const std::byte>(bytes(message)));
  receiver.complete(in);
  CHECK(read(in, slot) == std::vector<std::int64_t>{42});
  compute.synchronize();
  CHECK(read(in, slot) == std::vector<std::int64_t>{42});
  CHECK_THROWS_WITH_AS(sender.send(out, Vector<const std::byte>(bytes(message))),
                       doctest::Contains("channel 3: message 13 has no slot"), mega::Error);
  CHECK_THROWS_WITH_AS(receiver.complete(in), doctest::Contains("message 13 was not sent"),
                       mega::Error);
  CHECK_THROWS_AS((void)comm.open_sender(1, 3), mega::Error);
}

TEST_CASE("gpu device: shared memory beyond 48 KiB is granted once and never taken back") {
  const mega::Cuda device;
  constexpr std::size_t less = std::size_t{60} << 10, more = std::size_t{90} << 10;
  const auto kernel = mega_test::sum_through_shared<0>;
  const auto launch = [&](Stream& stream, const Memory& out, std::size_t bytes) {
    mega::cuda::detail::launch(stream, "sum_through_shared", kernel, 1, 64, bytes,
                               reinterpret_cast<std::int64_t*>(out.data()),
                               static_cast<int>(bytes / sizeof(int)));
  };
  const auto sum_of = [](std::size_t bytes) {
    const auto words = static_cast<std::int64_t>(bytes / sizeof(int));
    return words * (words - 1) / 2;
  };
  const auto granted = [&] {
    cudaFuncAttributes attributes{};
    REQUIRE(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) ==
            cudaSuccess);
    return static_cast<std::size_t>(attributes.maxDynamicSharedSizeBytes);
  };
  Stream stream;
  const Memory out = device.allocate(sizeof(std::int64_t));
  for (const std::size_t bytes : {std::size_t{4096}, less, more, less}) {
    launch(stream, out, bytes);
    CHECK(read(stream, out).front() == sum_of(bytes));
  }
  CHECK(granted() == more);

  // What the device does not have is refused by name, and the next launch is not blamed for it.
  int most = 0;
  REQUIRE(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                 device.ordinal()) == cudaSuccess);
  CHECK_THROWS_WITH_AS(launch(stream, out, static_cast<std::size_t>(most) + 1024),
                       doctest::Contains("sum_through_shared failed with"), mega::Error);
  launch(stream, out, less);
  CHECK(read(stream, out).front() == sum_of(less));

  // Threads that want unlike amounts of another kernel do not take each other's.
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      try {
        const mega::Cuda same_device(device.ordinal());
        Stream own;
        const Memory sum = same_device.allocate(sizeof(std::int64_t));
        const std::size_t bytes = t % 2 == 0 ? less : more;
        for (int i = 0; i < 100; ++i) {
          mega::cuda::detail::launch(own, "sum_through_shared", mega_test::sum_through_shared<1>, 1,
                                     64, bytes, reinterpret_cast<std::int64_t*>(sum.data()),
                                     static_cast<int>(bytes / sizeof(int)));
          if (read(own, sum).front() != sum_of(bytes)) ++wrong[t];
        }
      } catch (const std::exception&) {
        wrong[t] = -1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4, 0));
}
