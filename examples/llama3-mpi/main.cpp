// mega-llama3-mpi: Llama3 models on MPI ranks. The loop is in ../trainer/run.hpp.
#include "../trainer/program_mpi.hpp"
#include <mega/nn/llama3.hpp>

int main(int argc, char** argv) {
  return trainer::main_with_mpi<mega::nn::Llama3>("mega-llama3-mpi", argc, argv);
}
