/// @file  main() of a trainer whose ranks are threads of the process.
#pragma once
#include "command_line.hpp"
#include "config.hpp"
#include "job.hpp"
#include "run.hpp"
#include <mega/comm/thread.hpp>
#include <mega/core/error.hpp>
#include <mega/nn/blas.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <thread>

namespace trainer {

/// Where every Debian keeps English text.
inline constexpr const char* default_corpus = "/usr/share/common-licenses";

/// The parsed and completed configuration of a model family, or the exit code to end with.
template <class Spec>
[[nodiscard]] std::optional<int> read_config(Config& config, const char* program, int argc,
                                             char** argv) {
  CommandLine line(
      config, program,
      mega::sentence("Trains ", Spec::name, " models with tensor, pipeline and data parallelism."));
  if (const std::optional<int> code = line.parse(argc, argv)) return code;
  if (config.data_path.empty()) config.data_path = default_corpus;
  return std::nullopt;
}

/// What a process opens before its ranks start, so that bad input ends it with nothing written.
template <class Spec>
struct Inputs {
  std::optional<HuggingFaceModel> start_from;
  Job job;

  Inputs(const Config& config, int world) {
    constexpr Index vocab = mega::data::ByteTokenSource::vocab_size();
    mega::nn::TransformerConfig model;
    if (config.import_dir.empty()) {
      model = model_from_flags<Spec>(config, vocab);
    } else {
      start_from.emplace(config.import_dir);
      mega::expects(start_from->family() == family_of<Spec>, mega::ErrorCode::bad_input, [&] {
        return mega::sentence("--import-hf: ", config.import_dir, " holds a model of the family ",
                              to_string(start_from->family()), ", which is not ", Spec::name);
      });
      model = start_from->config();
      mega::expects(model.vocab >= vocab, mega::ErrorCode::bad_input, [&] {
        return mega::sentence("--import-hf: the model has ", model.vocab,
                              " tokens, but byte tokens need ", vocab);
      });
    }
    job = make_job<Spec>(config, model, world);
  }
};

/// Prints the sentence of an error and gives the exit code that goes with it.
inline int report(const char* program, const std::exception& e) {
  std::fprintf(stderr, "%s: %s\n", program, e.what());
  const auto* known = dynamic_cast<const mega::Error*>(&e);
  return known != nullptr ? mega::exit_code(known->code()) : 3;
}

template <class Spec>
int main_with_threads(const char* program, int argc, char** argv) {
  try {
    Config config;
    if (const std::optional<int> code = read_config<Spec>(config, program, argc, argv))
      return *code;
    const Inputs<Spec> inputs(config, 0);
    const Job& job = inputs.job;
    if (config.dry_run) {
      std::printf("%s%s", Listing::of(job.config).c_str(), describe_plan<Spec>(job).c_str());
      return 0;
    }
    const Corpus corpus(job.config);
    const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
    mega::nn::set_blas_threads(config.blas_threads > 0 ? config.blas_threads
                               : job.world() > 1       ? 1
                                                       : static_cast<int>(cores));
    stop_on_signals();
    mega::comm::run_threads(job.world(),
                            [&](mega::comm::ThreadComm& world) {
                              TrainingRun<Spec, mega::comm::ThreadComm>(
                                  job, corpus, inputs.start_from ? &*inputs.start_from : nullptr,
                                  world)
                                  .run();
                            },
                            {.deadline = mega::comm::Seconds(config.deadline_s)});
    return 0;
  } catch (const std::exception& e) {
    return report(program, e);
  }
}

}  // namespace trainer
