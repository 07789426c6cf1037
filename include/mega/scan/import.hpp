/// @file  Reads a file of any known dialect into a Trace.
///
/// A dialect is two functions in a header of its own, which includes input.hpp and trace.hpp:
///
///   bool looks_like_X(std::string_view head);             // the first bytes of the text, of which
///                                                         // there are dialect_head at most
///   void import_X(Trace&, Source&, const ImportOptions&); // the whole text, from its first byte
///
/// and one row in detail::dialects below. A Source (input.hpp) has name(), and bytes: at_hand(),
/// consume(n), read_more(), look(n), everything(limit); next_line(source, line) is for JSON lines.
/// Text is inflated and members of archives are apart already. Defects of the text are counted in
/// Trace::defects; only what cannot be used at all throws Error(bad_input), with source.name().
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/detail/one_job.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/flight_recorder.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/joined_timeline.hpp>
#include <mega/scan/kineto.hpp>
#include <mega/scan/megatronapp.hpp>
#include <mega/scan/nccl_inspector.hpp>
#include <mega/scan/own_format.hpp>
#include <mega/scan/straggler_timeline.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

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
    Dialect{"the Chrome JSON of mega-scan convert", looks_like_joined_timeline,
            import_joined_timeline},
    Dialect{"MegatronApp's trace", looks_like_megatronapp, import_megatronapp},
    Dialect{"StragglerAnalysis's timeline", looks_like_straggler_timeline,
            import_straggler_timeline},
    Dialect{"NCCL Inspector's lines", looks_like_nccl_inspector, import_nccl_inspector},
    Dialect{"Kineto or Chrome trace JSON", looks_like_kineto, import_kineto},
    Dialect{"PyTorch's flight recorder dump", looks_like_flight_recorder, import_flight_recorder},
};

/// A graph of operators without times, as PyTorch's ExecutionTraceObserver writes it in JSON, and
/// Chakra in JSON and protobuf (.et).
[[nodiscard]] inline bool looks_like_execution_trace(std::string_view head,
                                                     std::string_view name) noexcept {
  if (name.ends_with(".gz")) name.remove_suffix(3);
  if (holds(head, "\"traceEvents\"")) return false;
  return (holds(head, "\"schema\"") && holds(head, "\"nodes\"")) || holds(head, "\"COMP_NODE\"") ||
         holds(head, "\"COMM_COLL_NODE\"") || name.ends_with(".et");
}

/// Perfetto's protobuf, of which every packet begins with this byte and holds small numbers.
[[nodiscard]] inline bool looks_like_perfetto(std::string_view head) noexcept {
  return head.starts_with('\n') && head.substr(0, 64).find_first_of(std::string_view(
                                       "\0\1\2\3\4\5\6\7\10", 9)) != std::string_view::npos;
}

/// @return false: no dialect knows the text
inline bool import_text(Trace& trace, Source& source, const ImportOptions& options) {
  // Some editors put this mark before text in UTF-8.
  constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
  if (source.look(byte_order_mark.size()).starts_with(byte_order_mark))
    source.consume(byte_order_mark.size());
  const std::string_view head = source.look(dialect_head).substr(0, dialect_head);
  for (const Dialect& dialect : dialects) {
    if (!dialect.looks_like(head)) continue;
    dialect.import(trace, source, options);
    return true;
  }
  // A dump that its rank never came to write is evidence too.
  if (head.empty() && is_flight_recorder_name(source.name())) {
    import_flight_recorder(trace, source, options);
    return true;
  }
  expects(head.empty() || !looks_like_execution_trace(head, source.name()), ErrorCode::bad_input,
          [&] {
            return sentence(
                source.name(), " is an execution trace (PyTorch's or Chakra's), which has ",
                "operators but no times; give the profiler's traces (Kineto) of the same run");
          });
  expects(!looks_like_perfetto(head), ErrorCode::bad_input, [&] {
    return sentence(source.name(),
                    " is Perfetto's protobuf, which is written for viewers and not "
                    "read; give the files that it was made of, or their Chrome "
                    "JSON, which mega-scan convert --to chrome writes");
  });
  return false;
}

/// Why import_text() returned false.
[[nodiscard]] inline std::string stranger(Source& source) {
  if (const std::string damage = source.damage(); !damage.empty())
    return sentence(source.name(), " cannot be read: ", damage);
  if (source.look(1).empty()) return source.name() + " is empty";
  std::string known;
  for (const Dialect& dialect : dialects)
    known.append(known.empty() ? "" : ", ").append(dialect.name);
  return sentence(source.name(), " is of no known kind; known are ", known);
}

}  // namespace detail

/// The dialect of a text by its first bytes; "" if none knows it.
[[nodiscard]] inline std::string_view dialect_of(std::string_view head) {
  for (const detail::Dialect& dialect : detail::dialects) {
    if (dialect.looks_like(head)) return dialect.name;
  }
  return {};
}

/// Adds what the source holds to the trace. What is missing of it is named in the trace's warnings.
/// A part of a recording goes to the rank that has another part of it: see one_job.hpp.
/// @throws Error(bad_input) if no dialect knows it, its own cannot use it, or it contradicts what
/// was imported before: a copy, another run of the same rank, a job of another size
inline void import_source(Trace& trace, Source& source, const ImportOptions& options = {}) {
  const detail::TableSizes before(trace);
  expects(detail::import_text(trace, source, options), ErrorCode::bad_input,
          [&] { return detail::stranger(source); });
  detail::settle_file(trace, source, before, options);
}

/// Adds all that `path` names: a file, "-" for standard input, the files of a directory, the
/// members of an archive; see for_each_source(). Files of an archive or directory that cannot be
/// used are named in the trace's warnings, unless there is nothing else; so is what was not
/// visited.
/// @throws Error(bad_input): see import_source()
inline void import_file(Trace& trace, const std::filesystem::path& path,
                        const ImportOptions& options = {}) {
  std::string first_fault;
  std::vector<std::string> strangers, faults;
  std::size_t imported = 0;
  const std::vector<std::string> remarks = for_each_source(path, [&](Source& source) {
    const detail::TableSizes before(trace);
    const auto pass_over = [&](const std::string& why) {
      if (first_fault.empty()) first_fault = why;
    };
    try {
      if (!detail::import_text(trace, source, options)) {
        pass_over(detail::stranger(source));
        strangers.emplace_back(detail::own_name(source.name()));
        return;
      }
    } catch (const Error& fault) {
      if (fault.code() != ErrorCode::bad_input) throw;
      pass_over(fault.what());
      faults.push_back(sentence(fault.what(), "; it was passed over"));
      return;
    }
    detail::settle_file(trace, source, before, options);
    ++imported;
  });
  expects(imported > 0, ErrorCode::bad_input, [&] {
    const std::string why = first_fault.empty() ? path.string() + " holds no file" : first_fault;
    return remarks.empty() ? why : sentence(why, "; ", remarks.front());
  });
  if (!strangers.empty()) {
    trace.warnings.push_back(
        sentence(detail::listed(strangers), " in ", path.string(),
                 strangers.size() == 1 ? " is no trace and was" : " are no traces and were",
                 " passed over"));
  }
  trace.warnings.insert(trace.warnings.end(), faults.begin(), faults.end());
  trace.warnings.insert(trace.warnings.end(), remarks.begin(), remarks.end());
}

/// Remarks on all files of a job, after the last import: ranks that are missing are noted, and
/// warned of are ranks whose files, by the time of day, were recorded at different times.
inline void remark_on_job(Trace& trace) {
  std::set<std::int32_t> known;
  std::int32_t world = -1;
  for (const Rank& r : trace.ranks) {
    if (r.rank >= 0) known.insert(r.rank);
    world = std::max(world, r.world);
  }
  if (static_cast<std::int64_t>(known.size()) < world)
    trace.notes.push_back(
        sentence("the job has ", world, " ranks, of which there are files of ", known.size()));
  detail::warn_of_other_times(trace);
}

}  // namespace mega::inline v0::scan
