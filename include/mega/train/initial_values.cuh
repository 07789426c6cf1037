/// @file  Initial values of parameters, on a GPU. The host twin in train/initial_values.hpp says
/// what they are; its logarithms and cosines may differ in the last bit.
#pragma once
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/launch.cuh>
#include <mega/cuda/memory.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/train/initial_values.hpp>

#include <cstdint>

namespace mega::inline v0::cuda {

namespace detail {

struct InitialNumbers {
  float* out;
  Index global;  ///< of out[0] in the whole tensor
  RandomKey key;
  Init init;
  __device__ void operator()(Index i) const {
    out[i] = init.kind == Init::Kind::ones
                 ? 1.0F
                 : init.deviation * train::standard_normal(key, global + i);
  }
};

}  // namespace detail

/// @cost  a launch for each run of elements that lie together in the whole tensor
MEGA_LAUNCHES void initialise_values(Stream& stream, Vector<float> out, const Parameter& p,
                                     std::uint64_t seed, int position, int degree) {
  fill_zero(stream, out);
  if (p.init.kind == Init::Kind::zeros) return;
  const RandomKey key = train::initial_key(p, seed);
  for (const ShardRun& run : shard_runs(p, position, degree)) {
    detail::for_each_index(stream, "initialise_values", run.count,
                           detail::InitialNumbers{out.data() + run.local, run.global, key, p.init});
  }
}

}  // namespace mega::inline v0::cuda
