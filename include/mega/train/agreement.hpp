/// @file  Agreement: the ranks of a run settle a small number, such as whether to stop, or take
/// over one rank's text.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/device.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

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
        memory_(device.allocate(piece_bytes)) {
    // Whoever is not here yet may be allocating.
    if constexpr (comm::has_attended_calls<Comm>) comm_.attend(true);
  }

  [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
  [[nodiscard]] int size() const noexcept { return comm_.size(); }

  /// The largest value that any rank brings.
  [[nodiscard]] std::int64_t largest(std::int64_t value) {
    return combine(value, comm::Reduce::max);
  }
  [[nodiscard]] std::int64_t sum(std::int64_t value) { return combine(value, comm::Reduce::sum); }

  /// The text that rank `root` brings, of any bytes; what other ranks bring is not looked at.
  /// @cost  a broadcast for its size, and one for each 64 KiB
  [[nodiscard]] std::string text_of(int root, std::string_view own) requires
      comm::has_broadcast<Comm, typename Device::stream_type, std::byte> {
    std::uint64_t size = own.size();
    broadcast(root, reinterpret_cast<char*>(&size), sizeof size);
    std::string out = rank() == root ? std::string(own) : std::string();
    out.resize(static_cast<std::size_t>(size));
    for (std::size_t at = 0; at < out.size(); at += piece_bytes)
      broadcast(root, out.data() + at, std::min(piece_bytes, out.size() - at));
    return out;
  }

 private:
  static constexpr std::size_t piece_bytes = std::size_t{64} << 10;

  void broadcast(int root, char* bytes, std::size_t count) {
    const auto n = static_cast<Index>(count);
    const Vector<std::byte> own(reinterpret_cast<std::byte*>(bytes), n), shared(memory_.data(), n);
    if (rank() == root) upload(stream_, shared, Vector<const std::byte>(own));
    comm_.broadcast(stream_, shared, root);
    download(stream_, own, Vector<const std::byte>(shared));
    stream_.synchronize();
  }

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
