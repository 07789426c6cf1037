// The training loop of Llama3 models in fp16.
#include "../trainer/gpu_run.cuh"
#include <mega/nn/llama3.hpp>

template void trainer::train_on_gpus<mega::nn::Llama3, mega::Float16>(
    const trainer::Job&, const trainer::Corpus&, const trainer::HuggingFaceModel*,
    const std::vector<std::size_t>&);
