// mega-gpt3: Gpt3 models on thread ranks. The loop is in ../trainer/run.hpp.
#include "../trainer/program.hpp"
#include <mega/nn/gpt3.hpp>

int main(int argc, char** argv) {
  return trainer::main_with_threads<mega::nn::Gpt3>("mega-gpt3", argc, argv);
}
