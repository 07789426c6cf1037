/// @file  Backend: where the ranks of a program compute. One struct of aliases and the little that
/// differs between them, so that host threads, MPI processes and GPUs share one training loop.
#pragma once
#include <mega/core/device.hpp>
#include <mega/nn/kernels.hpp>

#include <concepts>
#include <cstddef>

namespace trainer {

/// A model names
///   device, communicator, kernels   what the plan of the trainer is made of
///   recorder                        what records spans on the device's streams
///   make_device(rank)               of a rank of the world
///   used_bytes(rank)                memory that the rank has taken so far, for its report
///   planned_bytes(rank)             memory that it was to take; 0 where no plan limits it
///   memory_share(rank)              part of the device's memory in use, by whomever
/// Models: HostBackend, GpuBackend.
template <class B>
concept backend = mega::device_policy<typename B::device> &&
    mega::nn::kernels<typename B::kernels> && requires(const B& b, int rank) {
  typename B::communicator;
  typename B::recorder;
  { b.make_device(rank) } -> std::same_as<typename B::device>;
  { b.used_bytes(rank) } -> std::same_as<std::size_t>;
  { b.planned_bytes(rank) } -> std::same_as<std::size_t>;
  { b.memory_share(rank) } -> std::same_as<double>;
};

}  // namespace trainer
