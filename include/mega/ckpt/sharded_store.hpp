/// @file  What is saved of a run and loaded into one: its state, and a rank's parameters with their
/// place among the other ranks.
/// opt-in: needs nlohmann-json.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/device.hpp>
#include <mega/core/loss_scale.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/view.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace mega::inline v0::ckpt {

/// How far a run has come, and of what. Random numbers need no more: they are keyed by seed and
/// step.
struct TrainingState {
  Index steps_done = 0;
  Index consumed_samples = 0;  ///< of all data-parallel ranks together, so any layout can go on
  std::uint64_t seed = 0;
  nlohmann::json model = nlohmann::json::object();  ///< the caller's description; rank 0's is kept
  std::optional<LossScale> loss_scale = std::nullopt;  ///< of training in fp16
};

template <class S>
concept has_parameter_table = requires(const S& store) {
  store.table().entries();
  store.table().regions();
  store.table().position();
  store.table().model_parameters();
};

template <class S>
concept has_flat_buffers = requires(const S& store) {
  store.owned();
  store.masters(std::size_t{0}, store.owned()[0].values);
  store.first_moments();
  store.second_moments();
};

/// Model: train::ParameterStore.
template <class S>
concept parameter_store = has_parameter_table<S> && has_flat_buffers<S>;

template <class C, class Device>
concept gathers_bytes =
    comm::has_rank_and_size<C> && comm::has_all_gather<C, typename Device::stream_type, std::byte>;

/// A rank's parameters, its place in the mesh and its way to the other ranks: what a collective
/// save or load needs of it. Refers to all, owns nothing.
template <parameter_store Store, device_policy Device, gathers_bytes<Device> Comm>
struct ShardedStore {
  Store& store;
  Mesh mesh;  ///< of `world`
  Comm& world;
  Device& device;  ///< allocates the memory of the exchanges
  typename Device::stream_type& stream;
};
template <class Store, class Device, class Comm>
ShardedStore(Store&, Mesh, Comm&, Device&, typename Device::stream_type&)
    -> ShardedStore<Store, Device, Comm>;

}  // namespace mega::inline v0::ckpt
