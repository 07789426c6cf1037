// mega-gpt3-mpi: Gpt3 models on MPI ranks. The loop is in ../trainer/run.hpp.
#include "../trainer/program_mpi.hpp"
#include <mega/nn/gpt3.hpp>

int main(int argc, char** argv) {
  return trainer::main_with_mpi<mega::nn::Gpt3>("mega-gpt3-mpi", argc, argv);
}
