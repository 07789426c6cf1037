// gpu_step's runs of Llama 3: a translation unit of their own, since compiling a trainer takes
// long.
#include "measure.cuh"
#include <mega/nn/llama3.hpp>

namespace gpu_step {

Measurement measure_llama3(const Options& options) {
  return measure<mega::nn::Llama3>(options);
}

}  // namespace gpu_step
