/// @file  main() of a trainer whose ranks are processes: mpirun -np N build/bin/mega-gpt3-mpi ...
#pragma once
#include "config.hpp"
#include "corpus.hpp"
#include "host_backend.hpp"
#include "inputs.hpp"
#include "listing.hpp"
#include "run.hpp"
#include "stages.hpp"
#include "stop.hpp"
#include <mega/comm/mpi.hpp>
#include <mega/nn/blas.hpp>

#include <cstdio>
#include <exception>
#include <optional>

namespace trainer {

/// Input is checked by every process before ranks depend on each other; rank 0 alone says what is
/// wrong with it.
template <class Spec>
int main_with_mpi(const char* program, int argc, char** argv) {
  using Backend = HostBackend<mega::MpiComm>;
  try {
    Config config;
    if (const std::optional<int> code = read_config<Spec>(config, program, argc, argv))
      return *code;
    mega::comm::run_mpi(
        [&](mega::MpiComm& world) {
          const Inputs<Spec> inputs(config, world.size());
          if (config.dry_run) {
            if (world.rank() == 0)
              std::printf("%s%s", Listing::of(inputs.job.config).c_str(),
                          describe_plan<Spec>(
                              inputs.job, plan_ranks<Spec, typename Backend::kernels>(inputs.job))
                              .c_str());
            return;
          }
          check_outputs(inputs.job.config);
          const Corpus corpus(inputs.job.config);
          mega::nn::set_blas_threads(config.blas_threads > 0 ? config.blas_threads : 1);
          stop_on_signals();
          TrainingRun<Spec, Backend>(Backend{}, inputs.job, corpus,
                                     inputs.start_from ? &*inputs.start_from : nullptr, world)
              .run();
        },
        {.deadline = mega::comm::Seconds(config.deadline_s)});
    finish_output();
    return 0;
  } catch (const std::exception& e) {
    return report(program, e);
  }
}

}  // namespace trainer
