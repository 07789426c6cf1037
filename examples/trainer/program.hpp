/// @file  main() of a trainer whose ranks are threads of the process.
#pragma once
#include "config.hpp"
#include "corpus.hpp"
#include "host_backend.hpp"
#include "inputs.hpp"
#include "job.hpp"
#include "listing.hpp"
#include "run.hpp"
#include "stages.hpp"
#include "stop.hpp"
#include <mega/comm/thread.hpp>
#include <mega/nn/blas.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>
#include <thread>

namespace trainer {

template <class Spec>
int main_with_threads(const char* program, int argc, char** argv) {
  using Backend = HostBackend<mega::comm::ThreadComm>;
  try {
    Config config;
    if (const std::optional<int> code = read_config<Spec>(config, program, argc, argv))
      return *code;
    const Inputs<Spec> inputs(config, 0);
    const Job& job = inputs.job;
    if (config.dry_run) {
      std::printf(
          "%s%s", Listing::of(job.config).c_str(),
          describe_plan<Spec>(job, plan_ranks<Spec, typename Backend::kernels>(job)).c_str());
      finish_output();
      return 0;
    }
    check_outputs(job.config);
    const Corpus corpus(job.config);
    const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
    mega::nn::set_blas_threads(config.blas_threads > 0 ? config.blas_threads
                               : job.world() > 1       ? 1
                                                       : static_cast<int>(cores));
    stop_on_signals();
    mega::comm::run_threads(job.world(),
                            [&](mega::comm::ThreadComm& world) {
                              TrainingRun<Spec, Backend>(
                                  Backend{}, job, corpus,
                                  inputs.start_from ? &*inputs.start_from : nullptr, world)
                                  .run();
                            },
                            {.deadline = mega::comm::Seconds(config.deadline_s)});
    return 0;
  } catch (const std::exception& e) {
    return report(program, e);
  }
}

}  // namespace trainer
