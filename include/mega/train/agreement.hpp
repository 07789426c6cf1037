/// @file  Agreement: the ranks of a run settle a small number, such as whether to stop.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/device.hpp>
#include <mega/core/view.hpp>

#include <cstddef>
#include <cstdint>

namespace mega::inline v0::train {

/// Collective host decisions over a communicator of their own, so they never mix with a step's.
/// Every member blocks until all ranks have called it.
template <device_policy Device, class Comm>
class Agreement {
 public:
  /// Collective over `world`.
  Agreement(Device& device, Comm& world)
      : comm_(world.split(0, world.rank())),
        stream_(device.make_stream("agreement")),
        memory_(device.allocate(sizeof(std::int64_t))) {
    // Whoever is not here yet may be allocating.
    if constexpr (comm::has_attended_calls<Comm>) comm_.attend(true);
  }

  /// The largest value that any rank brings.
  [[nodiscard]] std::int64_t largest(std::int64_t value) {
    return combine(value, comm::Reduce::max);
  }
  [[nodiscard]] std::int64_t sum(std::int64_t value) { return combine(value, comm::Reduce::sum); }

 private:
  std::int64_t combine(std::int64_t value, comm::Reduce reduce) {
    const Vector<std::int64_t> shared(reinterpret_cast<std::int64_t*>(memory_.data()), 1);
    upload(stream_, shared, Vector<const std::int64_t>(&value, 1));
    comm_.all_reduce(stream_, shared, reduce);
    download(stream_, Vector<std::int64_t>(&value, 1), Vector<const std::int64_t>(shared));
    stream_.synchronize();
    return value;
  }

  Comm comm_;
  typename Device::stream_type stream_;
  typename Device::memory_type memory_;
};

}  // namespace mega::inline v0::train
