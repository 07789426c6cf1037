// The training loop of Llama3 models in fp32.
#include "../trainer/gpu_run.cuh"
#include <mega/nn/llama3.hpp>

template void trainer::train_on_gpus<mega::nn::Llama3, float>(const trainer::Job&,
                                                              const trainer::Corpus&,
                                                              const trainer::HuggingFaceModel*,
                                                              const std::vector<std::size_t>&);
