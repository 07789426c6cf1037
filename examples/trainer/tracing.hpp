/// @file  What a run records of itself, and what goes wrong in it on purpose.
#pragma once
#include "config.hpp"
#include "job.hpp"
#include "stop.hpp"
#include <mega/core/context.hpp>
#include <mega/core/error.hpp>
#include <mega/scan/injected_faults.hpp>
#include <mega/scan/own_format_writer.hpp>
#include <mega/scan/record.hpp>
#include <mega/scan/traced_comm.hpp>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

namespace trainer {

/// The hooks and the communicator of every program: switched on by the command line. Off, each span
/// costs a branch, which no step can tell from its noise; a second set of types for it would double
/// what a program takes to compile.
template <class Backend>
using RunRecorder = mega::scan::FaultyRecorder<typename Backend::recorder>;
template <class Backend>
using RunHooks = mega::Hooks<RunRecorder<Backend>>;
template <class Backend>
using RunComm = mega::scan::TracedComm<typename Backend::communicator, RunRecorder<Backend>>;

/// File of a rank's trace.
[[nodiscard]] inline std::string trace_path(const std::string& folder, int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "rank-%05d.mega.jsonl", rank);
  return (std::filesystem::path(folder) / name).string();
}

/// The recorder with the faults of --inject, which a run that is asked to stop does not wait for.
/// @param rank  of the recorder
template <class Recorder>
[[nodiscard]] mega::scan::FaultyRecorder<Recorder> with_faults(Recorder recorder, const Job& job,
                                                               int rank) {
  return {std::move(recorder), rank, mega::scan::parse_faults(job.config.inject, job.world()),
          &stop_requested};
}

/// An empty recorder where the run needs none: it neither traces, nor compares ranks, nor decides
/// by how long they wait.
/// @throws  Error(not_durable) where the trace cannot be written
template <class Recorder>
[[nodiscard]] mega::scan::FaultyRecorder<Recorder> make_recorder(const Job& job, int rank) {
  const Config& c = job.config;
  const bool traces = !c.trace_dir.empty();
  Recorder recorder;
  if (traces || (c.watch_interval > 0 && job.world() > 1) || c.schedule == Schedule::adaptive) {
    std::unique_ptr<mega::scan::RecordSink> sink = std::make_unique<mega::scan::NoSink>();
    if (traces) {
      std::error_code failed;
      std::filesystem::create_directories(c.trace_dir, failed);
      sink = std::make_unique<mega::scan::OwnFormatWriter>(trace_path(c.trace_dir, rank));
    }
    recorder = Recorder(mega::scan::recording_of(job.options.mesh, rank), std::move(sink),
                        {.interval = traces ? c.trace_interval : 0});
  }
  return with_faults(std::move(recorder), job, rank);
}

}  // namespace trainer
