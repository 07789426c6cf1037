// mega-gpt3-cuda: Gpt3 models on NVIDIA GPUs, a rank a GPU. The loop is in ../trainer/run.hpp;
// bf16.cu, fp16.cu and fp32.cu instantiate it.
#include "../trainer/program_cuda.hpp"
#include <mega/nn/gpt3.hpp>

int main(int argc, char** argv) {
  return trainer::main_on_gpus<mega::nn::Gpt3>("mega-gpt3-cuda", argc, argv);
}
