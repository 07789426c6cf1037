/// @file  What a process reads before its ranks start, and what it refuses then.
#pragma once
#include "command_line.hpp"
#include "config.hpp"
#include "hugging_face.hpp"
#include "job.hpp"
#include "log_file.hpp"
#include <mega/ckpt/checkpoint_directory.hpp>
#include <mega/ckpt/directory_lock.hpp>
#include <mega/core/error.hpp>
#include <mega/data/token_source.hpp>
#include <mega/nn/transformer_config.hpp>

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

namespace trainer {

/// Where every Debian keeps English text.
inline constexpr const char* default_corpus = "/usr/share/common-licenses";

/// Ends what was printed on standard output.
/// @throws  Error(bad_input) where it takes no more
inline void finish_output() {
  mega::expects(std::fflush(stdout) == 0 && std::ferror(stdout) == 0, mega::ErrorCode::bad_input,
                "standard output takes no more; what was printed is not whole");
}

/// The parsed and completed configuration of a model family, or the exit code to end with.
template <class Spec>
[[nodiscard]] std::optional<int> read_config(Config& config, const char* program, int argc,
                                             char** argv) {
  CommandLine line(
      config, program,
      mega::sentence("Trains ", Spec::name, " models with tensor, pipeline and data parallelism."));
  if (const std::optional<int> code = line.parse(argc, argv)) {
    finish_output();
    return code;
  }
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

/// The nearest folder of `path` that exists must be one that can be written.
inline void expects_writable(const char* option, const std::string& path) {
  std::filesystem::path at = std::filesystem::absolute(path);
  std::error_code ignored;
  while (!std::filesystem::exists(at, ignored) && at.has_relative_path()) at = at.parent_path();
  mega::expects(std::filesystem::is_directory(at, ignored) && access(at.c_str(), W_OK) == 0,
                mega::ErrorCode::usage, [&] {
                  return mega::sentence("--", option, ": '", path, "' cannot be written, because ",
                                        at.string(), " is no folder that this user may write");
                });
}

/// Refuses a folder of checkpoints that are not this run's.
/// @throws  Error(usage)
inline void expects_own_checkpoints(const Config& c) {
  std::error_code ignored;
  if (!std::filesystem::exists(c.save_dir, ignored)) return;
  if (!c.load_dir.empty() && std::filesystem::equivalent(c.save_dir, c.load_dir, ignored)) return;
  const auto latest = mega::ckpt::latest_complete(c.save_dir, mega::ckpt::Verify::sizes);
  mega::expects(!latest.found.has_value(), mega::ErrorCode::usage, [&] {
    return mega::sentence("--save: ", c.save_dir,
                          " holds checkpoints of another run, the last of step ",
                          latest.found->manifest.step, "; go on from them with --load ", c.save_dir,
                          ", or save elsewhere");
  });
}

/// The folder of --save, for as long as the run lasts; nothing where it saves nothing. For one
/// rank: two runs at a time would take each other's newest checkpoints away.
/// @throws  Error(usage) with the run that has it and how far that is
[[nodiscard]] inline std::optional<mega::ckpt::DirectoryLock> own_save_folder(const Config& c) {
  if (c.save_dir.empty()) return std::nullopt;
  std::optional<mega::ckpt::DirectoryLock> lock(std::in_place, c.save_dir);
  mega::expects(lock->is_owned(), mega::ErrorCode::usage, [&] {
    const auto latest = mega::ckpt::latest_complete(c.save_dir, mega::ckpt::Verify::sizes);
    return mega::sentence("--save: ", c.save_dir, " is in use by another run, ", lock->owner(),
                          latest.found ? mega::sentence(", whose last checkpoint there is of step ",
                                                        latest.found->manifest.step)
                                       : std::string(", which has saved none yet"),
                          "; save elsewhere, or wait until it has ended");
  });
  expects_own_checkpoints(c);  // one that has just ended may have left some
  return lock;
}

/// The log, for as long as the run lasts; null where it keeps none. For one rank.
/// @throws  Error(usage, bad_input)
[[nodiscard]] inline std::unique_ptr<LogFile> own_log(const Config& c) {
  return c.log_json.empty() ? nullptr : std::make_unique<LogFile>(c.log_json);
}

/// Refuses, before any work is done for it, output that could not be kept or would replace another
/// run's.
inline void check_outputs(const Config& c) {
  if (!c.save_dir.empty()) {
    expects_writable("save", c.save_dir);
    expects_own_checkpoints(c);
  }
  if (!c.trace_dir.empty()) {
    expects_writable("trace", c.trace_dir);
    std::error_code ignored;
    for (const auto& file : std::filesystem::directory_iterator(c.trace_dir, ignored)) {
      mega::expects(!file.path().string().ends_with(".mega.jsonl"), mega::ErrorCode::usage, [&] {
        return mega::sentence("--trace: ", c.trace_dir, " holds a trace of another run, ",
                              file.path().filename().string(), "; trace elsewhere");
      });
    }
  }
  if (!c.export_dir.empty()) {
    expects_writable("export-hf", c.export_dir);
    for (const char* file : {"/config.json", "/model.safetensors"}) {
      std::error_code ignored;
      mega::expects(!std::filesystem::exists(c.export_dir + file, ignored), mega::ErrorCode::usage,
                    [&] {
                      return mega::sentence("--export-hf: ", c.export_dir, file,
                                            " exists already; export elsewhere");
                    });
    }
  }
}

/// Prints the sentence of an error and gives the exit code that goes with it.
inline int report(const char* program, const std::exception& e) {
  std::fflush(stdout);  // so that what was printed before comes before, where both are one pipe
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr) {
    std::fprintf(stderr, "%s: out of memory; --dry-run prints what each rank of a layout needs\n",
                 program);
    return 3;
  }
  std::fprintf(stderr, "%s: %s\n", program, e.what());
  const auto* known = dynamic_cast<const mega::Error*>(&e);
  return known != nullptr ? mega::exit_code(known->code()) : 3;
}

}  // namespace trainer
