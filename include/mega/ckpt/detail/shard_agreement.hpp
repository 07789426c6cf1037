/// @file  How the ranks of a collective save or load go on together or stop together.
/// opt-in: needs nlohmann-json.
#pragma once
#include <mega/ckpt/sharded_store.hpp>
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt::detail {

/// What a failed save is called on all ranks: a wrong request stays one.
enum class Purpose : std::uint8_t { save, load };

/// Lets the ranks of a save or load go on together or stop together.
template <class Device, class Comm>
class Agreement {
 public:
  template <class Store>
  Agreement(const ShardedStore<Store, Device, Comm>& sharded, Purpose purpose)
      : world_(sharded.world),
        device_(sharded.device),
        stream_(sharded.stream),
        purpose_(purpose) {}

  /// The strings of all ranks, in rank order.
  [[nodiscard]] std::vector<std::string> gather(const std::string& mine) {
    const auto ranks = static_cast<std::size_t>(world_.size());
    const std::uint64_t size = mine.size();
    std::vector<std::uint64_t> sizes(ranks);
    gather_blocks(std::as_bytes(std::span(&size, 1)), std::as_writable_bytes(std::span(sizes)));
    const auto longest = static_cast<std::size_t>(*std::max_element(sizes.begin(), sizes.end()));
    std::string padded = mine;
    padded.resize(longest);
    std::string all(longest * ranks, '\0');
    if (longest > 0) {
      gather_blocks(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
    }
    std::vector<std::string> out;
    for (std::size_t r = 0; r < ranks; ++r)
      out.push_back(all.substr(r * longest, static_cast<std::size_t>(sizes[r])));
    return out;
  }

  /// Runs work() -> std::string on every rank and returns the results of all; if it threw anywhere,
  /// every rank throws what the first failing one said.
  template <class Work>
  std::vector<std::string> all_or_none(const Work& work) {
    std::string reply;
    try {
      reply = "+" + work();
    } catch (const Error& fault) {
      reply = failure(fault.code(), fault.what());
    } catch (const std::exception& fault) {
      reply = failure(ErrorCode::peer_failed, fault.what());
    } catch (...) {
      reply = failure(ErrorCode::peer_failed, "an exception that is not a std::exception");
    }
    auto replies = gather(reply);
    for (std::size_t r = 0; r < replies.size(); ++r) {
      if (replies[r].front() != '+') {
        const auto code = static_cast<ErrorCode>(replies[r].front());
        replies[r].erase(0, 1);
        throw Error(code, replies.size() == 1 ? replies[r]
                                              : sentence("rank ", r, ": ", std::move(replies[r])));
      }
      replies[r].erase(0, 1);
    }
    return replies;
  }

 private:
  static_assert(static_cast<int>(ErrorCode::logic) < '+');

  [[nodiscard]] std::string failure(ErrorCode code, const char* what) const {
    if (purpose_ == Purpose::save && code != ErrorCode::usage) code = ErrorCode::not_durable;
    return static_cast<char>(code) + std::string(what);
  }

  void gather_blocks(std::span<const std::byte> mine, std::span<std::byte> out) {
    const auto memory = device_.allocate(out.size());
    const auto count = static_cast<Index>(mine.size());
    const Vector<std::byte> all(memory.data(), static_cast<Index>(out.size()));
    const Vector<std::byte> own = all.slice(world_.rank() * count, count);
    upload(stream_, own, Vector<const std::byte>(mine.data(), count));
    world_.all_gather(stream_, all, Vector<const std::byte>(own));
    download(stream_, Vector<std::byte>(out.data(), all.size()), Vector<const std::byte>(all));
    stream_.synchronize();
  }

  Comm& world_;
  Device& device_;
  typename Device::stream_type& stream_;
  Purpose purpose_;
};
template <class Store, class Device, class Comm>
Agreement(const ShardedStore<Store, Device, Comm>&, Purpose) -> Agreement<Device, Comm>;

template <class Sharded>
void check_layout(const Sharded& sharded) {
  validate(sharded.mesh, sharded.world.size());
  const auto place = sharded.store.table().position();
  const Coordinates at = sharded.mesh.coordinates(sharded.world.rank());
  expects(place.tensor == at[Axis::tensor] && place.tensor_degree == sharded.mesh.tensor &&
              place.data == at[Axis::data] && place.data_degree == sharded.mesh.data,
          ErrorCode::usage, [&] {
            return sentence("the parameter table is that of tensor rank ", place.tensor, " of ",
                            place.tensor_degree, " and data rank ", place.data, " of ",
                            place.data_degree, ", not of rank ", sharded.world.rank(), " in ",
                            to_string(sharded.mesh));
          });
}

}  // namespace mega::inline v0::ckpt::detail
