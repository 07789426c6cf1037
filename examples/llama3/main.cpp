// mega-llama3: Llama3 models on thread ranks. The loop is in ../trainer/run.hpp.
#include "../trainer/program.hpp"
#include <mega/nn/llama3.hpp>

int main(int argc, char** argv) {
  return trainer::main_with_threads<mega::nn::Llama3>("mega-llama3", argc, argv);
}
