/// @file  Reads a file of any known dialect into a Trace.
///
/// A dialect is two functions in a header of its own, which includes input.hpp and trace.hpp:
///
///   bool looks_like_X(std::string_view head);             // head: first bytes of the text, at
///   most
///                                                         // dialect_head of them
///   void import_X(Trace&, Source&, const ImportOptions&); // the whole text, from its first byte
///
/// and one row in detail::dialects below. A Source (input.hpp) has name(), and bytes: at_hand(),
/// consume(n), read_more(), look(n), everything(limit); next_line(source, line) is for JSON lines.
/// Text is inflated and members of archives are apart already. Defects of the text are counted in
/// Trace::defects; only what cannot be used at all throws Error(bad_input), with source.name().
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/flight_recorder.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/kineto.hpp>
#include <mega/scan/megatronapp.hpp>
#include <mega/scan/nccl_inspector.hpp>
#include <mega/scan/own_format.hpp>
#include <mega/scan/straggler_timeline.hpp>
#include <mega/scan/trace.hpp>

#include <array>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace mega::inline v0::scan {

/// How much of a text a dialect may look at to recognise itself.
inline constexpr std::size_t dialect_head = std::size_t{1} << 16U;

namespace detail {

struct Dialect {
  std::string_view name;
  bool (*looks_like)(std::string_view head);
  void (*import)(Trace&, Source&, const ImportOptions&);
};

/// In this order: the narrower dialect before the wider one that it is a case of.
inline constexpr std::array dialects{
    Dialect{"mega's own trace", looks_like_own_format, import_own_format},
    Dialect{"MegatronApp's trace", looks_like_megatronapp, import_megatronapp},
    Dialect{"StragglerAnalysis's timeline", looks_like_straggler_timeline,
            import_straggler_timeline},
    Dialect{"NCCL Inspector's lines", looks_like_nccl_inspector, import_nccl_inspector},
    Dialect{"Kineto or Chrome trace JSON", looks_like_kineto, import_kineto},
    Dialect{"PyTorch's flight recorder dump", looks_like_flight_recorder, import_flight_recorder},
};

/// A graph of operators without times, as PyTorch's ExecutionTraceObserver and Chakra write it.
[[nodiscard]] inline bool looks_like_execution_trace(std::string_view head) noexcept {
  return holds(head, "\"schema\"") && holds(head, "\"nodes\"") && !holds(head, "\"traceEvents\"");
}

}  // namespace detail

/// The dialect of a text by its first bytes; "" if none knows it.
[[nodiscard]] inline std::string_view dialect_of(std::string_view head) {
  for (const detail::Dialect& dialect : detail::dialects) {
    if (dialect.looks_like(head)) return dialect.name;
  }
  return {};
}

/// Adds what the source holds to the trace.
/// @throws Error(bad_input) if no dialect knows it, or its own cannot use it
inline void import_source(Trace& trace, Source& source, const ImportOptions& options = {}) {
  const std::string_view head = source.look(dialect_head).substr(0, dialect_head);
  for (const detail::Dialect& dialect : detail::dialects) {
    if (dialect.looks_like(head)) return dialect.import(trace, source, options);
  }
  // A dump that its rank never came to write is evidence too.
  if (head.empty() && is_flight_recorder_name(source.name()))
    return import_flight_recorder(trace, source, options);
  expects(!detail::looks_like_execution_trace(head), ErrorCode::bad_input, [&] {
    return sentence(source.name(), " is an execution trace, which has operators but no times");
  });
  std::string known;
  for (const detail::Dialect& dialect : detail::dialects)
    known.append(known.empty() ? "" : ", ").append(dialect.name);
  throw Error(ErrorCode::bad_input,
              sentence(source.name(), head.empty() ? " is empty" : " is of no known kind",
                       "; known are ", known));
}

/// Adds all that `path` names: a file, "-" for standard input, the files of a directory, the
/// members of an archive; see for_each_source(). Files of an archive or directory that no dialect
/// knows are named in the trace's notes, unless there is nothing else.
/// @throws Error(bad_input): see import_source()
inline void import_file(Trace& trace, const std::filesystem::path& path,
                        const ImportOptions& options = {}) {
  std::string first_fault;
  std::size_t imported = 0;
  for_each_source(path, [&](Source& source) {
    try {
      import_source(trace, source, options);
      ++imported;
    } catch (const Error& fault) {
      if (fault.code() != ErrorCode::bad_input) throw;
      if (first_fault.empty()) {
        first_fault = fault.what();
      }
      trace.notes.emplace_back(fault.what());
    }
  });
  expects(imported > 0, ErrorCode::bad_input, [&] {
    return first_fault.empty() ? sentence(path.string(), " holds no file") : first_fault;
  });
}

}  // namespace mega::inline v0::scan
