// gpu_step's runs of GPT-3: a translation unit of their own, since compiling a trainer takes long.
#include "measure.cuh"
#include <mega/nn/gpt3.hpp>

namespace gpu_step {

Measurement measure_gpt3(const Options& options) {
  return measure<mega::nn::Gpt3>(options);
}

}  // namespace gpu_step
