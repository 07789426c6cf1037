// mega-llama3-cuda: Llama3 models on NVIDIA GPUs, a rank a GPU. The loop is in ../trainer/run.hpp;
// bf16.cu, fp16.cu and fp32.cu instantiate it.
#include "../trainer/program_cuda.hpp"
#include <mega/nn/llama3.hpp>

int main(int argc, char** argv) {
  return trainer::main_on_gpus<mega::nn::Llama3>("mega-llama3-cuda", argc, argv);
}
