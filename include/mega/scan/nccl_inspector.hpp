/// @file  Importer of NCCL Inspector logs: one JSON object a line and operation.
///
/// Verbose logs carry times of begin and end; others only how long an operation took and when it
/// was written down, so that an operation lies before its line, and nothing can be aligned by it.
/// Ranks are those of communicators; the largest is taken as the job, and a file as one process.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/communication_name.hpp>
#include <mega/scan/detail/event_records.hpp>
#include <mega/scan/detail/rank_name.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/plain_document.hpp>
#include <mega/scan/plain_json.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

[[nodiscard]] inline bool looks_like_nccl_inspector(std::string_view head) noexcept {
  const auto has = [&](std::string_view key) { return head.find(key) != std::string_view::npos; };
  return has("\"inspector_output_format_version\"") || has("\"coll_perf\"") || has("\"p2p_perf\"");
}

namespace detail {

class NcclInspectorImport {
 public:
  using Node = PlainDocument::Node;

  NcclInspectorImport(Trace& trace, Source& source, const ImportOptions& options)
      : t_(trace),
        source_(source),
        options_(options),
        first_(trace.communications.size()),
        rank_(static_cast<TableIndex>(trace.ranks.size())) {
    Rank rank;
    rank.source = source.name();
    t_.ranks.push_back(std::move(rank));
  }

  void run() {
    std::string_view line;
    bool cut = false;
    while (next_line(source_, line)) {
      if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      Defects defects;
      const PlainDocument record = read_plain_json(line, source_.name(), defects);
      t_.defects.not_a_number += defects.not_a_number;
      cut = defects.truncated_files > 0;
      if (cut || !read(record)) ++t_.defects.malformed_records;
    }
    if (cut) ++t_.defects.truncated_files;  // the last one, if any
    finish();
  }

 private:
  struct Communicator {
    std::int64_t size = 0;
    std::int64_t own_rank = -1;
    TableIndex lane = none;
    std::string name;
  };

  bool read(const PlainDocument& d) {
    const Node header = d.find(d.root(), "header");
    const bool transfer = d.find(d.root(), "p2p_perf") != PlainDocument::absent;
    const Node call = d.find(d.root(), transfer ? "p2p_perf" : "coll_perf");
    const std::string prefix = transfer ? "p2p_" : "coll_";
    const std::string_view name = d.text(d.find(call, transfer ? "p2p" : "coll"));
    if (header == PlainDocument::absent || name.empty()) return false;
    const std::size_t communicator = communicator_of(d, header);
    if (communicator == most_communicators) return false;

    Event event;
    const Node times = d.find(call, "event_trace_ts");
    const std::int64_t took = d.integer(d.find(call, prefix + "exec_time_us"), 0);
    const bool timed = span_of(d, times, prefix, event.begin, event.end);
    if (!timed) {
      const Node metadata = d.find(d.root(), "metadata");
      const std::int64_t written = d.integer(d.find(metadata, "dump_timestamp_us"), 0);
      if (written <= 0 || written > most_us || took < 0 || took > written) return false;
      event.end = written * 1000;
      event.begin = (written - took) * 1000;
      ++untimed_;
    }
    event.name = t_.names.intern(name);
    event.lane = communicators_[communicator].lane;
    const auto at = static_cast<TableIndex>(t_.events.push_back(event));
    Communication c;
    c.group = static_cast<TableIndex>(communicator);  // of this file; see finish()
    c.op = communication_of(name);
    c.sequence = d.integer(d.find(call, prefix + "sn"));
    c.bytes = d.integer(d.find(call, prefix + "msg_size_bytes"));
    // Both ends count their transfers with all peers: no number that both share.
    if (transfer) {
      c.peer = as_index(d.integer(d.find(call, "p2p_peer")));
      c.sequence = -1;
    }
    t_.attach(at, c);
    return true;
  }

  std::size_t communicator_of(const PlainDocument& d, Node header) {
    const std::string id(d.text(d.find(header, "id")));
    const auto [at, is_new] = index_.try_emplace(id, communicators_.size());
    if (!is_new) return at->second;
    if (communicators_.size() == most_communicators) {
      index_.erase(at);
      return most_communicators;
    }
    Communicator made;
    const std::string_view name = d.text(d.find(header, "comm_name"));
    made.name =
        name.empty() || name == "null" ? "communicator " + id : sentence(name, " (", id, ")");
    made.size = d.integer(d.find(header, "n_ranks"), 0);
    made.own_rank = d.integer(d.find(header, "rank"));
    made.lane = static_cast<TableIndex>(t_.lanes.size());
    Lane lane;
    lane.rank = rank_;
    lane.track = static_cast<std::int64_t>(communicators_.size());
    lane.label = made.name;
    t_.lanes.push_back(std::move(lane));
    communicators_.push_back(std::move(made));
    return communicators_.size() - 1;
  }

  /// From the first kernel's begin to the last one's end, else those of the call itself.
  bool span_of(const PlainDocument& d, Node times, std::string_view prefix, Nanoseconds& begin,
               Nanoseconds& end) {
    std::int64_t first = 0, last = 0;
    for (const Node kernel : d.children(d.find(times, "kernel_events"))) {
      const std::int64_t from = d.integer(d.find(kernel, "kernel_start_ts"), 0);
      const std::int64_t to = d.integer(d.find(kernel, "kernel_stop_ts"), 0);
      if (from <= 0 || to <= 0 || from > most_us || to > most_us) continue;  // never stamped
      first = first == 0 ? from : std::min(first, from);
      last = std::max(last, to);
    }
    if (first == 0) {
      first = d.integer(d.find(times, std::string(prefix) + "start_ts"), 0);
      last = d.integer(d.find(times, std::string(prefix) + "stop_ts"), 0);
    }
    if (first <= 0 || last <= 0 || first > most_us || last > most_us) return false;
    begin = first * 1000;
    end = end_of(begin, (last - first) * 1000, t_.defects);
    return true;
  }

  /// Now that the largest communicator is known, ranks and peers in it are global ones.
  void finish() {
    const auto largest = std::max_element(
        communicators_.begin(), communicators_.end(),
        [](const Communicator& a, const Communicator& b) { return a.size < b.size; });
    std::int64_t rank = options_.rank;
    if (rank < 0 && largest != communicators_.end()) rank = largest->own_rank;
    if (rank < 0) {
      rank = rank_in_dump_name(source_.name());
      ++t_.defects.rank_guessed;
    }
    t_.ranks[rank_].rank = as_index(rank);
    std::vector<TableIndex> groups;
    std::int64_t listed = 0;  // in all: a line that claims many ranks must not make many bytes
    for (const Communicator& c : communicators_) {
      std::vector<std::int32_t> members;
      if (is_job(c, *largest) && c.size <= most_ranks - listed) {
        listed += c.size;
        members.resize(static_cast<std::size_t>(c.size));
        std::iota(members.begin(), members.end(), 0);
      }
      groups.push_back(t_.intern_group(c.name, std::move(members)));
    }
    for (std::size_t i = first_; i < t_.communications.size(); ++i) {
      Communication& c = t_.communications[i];
      if (!is_job(communicators_[c.group], *largest)) c.peer = -1;
      c.group = groups[c.group];
    }
    if (untimed_ > 0) {
      t_.notes.push_back(sentence(source_.name(), " has no times of begin and end for ", untimed_,
                                  " operations; they are placed before the moments at which they "
                                  "were written down (set NCCL_INSPECTOR_DUMP_VERBOSE=1)"));
    }
  }
  [[nodiscard]] static bool is_job(const Communicator& c, const Communicator& largest) noexcept {
    return c.size == largest.size && c.size > 0 && c.size <= most_ranks;
  }

  static constexpr std::size_t most_communicators = 4096;
  static constexpr std::int64_t most_ranks = std::int64_t{1} << 20U;
  static constexpr std::int64_t most_us = last_time / 1000;

  Trace& t_;
  Source& source_;
  const ImportOptions& options_;
  std::size_t first_;
  TableIndex rank_;
  std::map<std::string, std::size_t> index_;  // by communicator id
  std::vector<Communicator> communicators_;
  std::int64_t untimed_ = 0;
};

}  // namespace detail

/// Adds one rank. Lines that are no record count as malformed.
inline void import_nccl_inspector(Trace& trace, Source& source, const ImportOptions& options) {
  detail::NcclInspectorImport(trace, source, options).run();
}

}  // namespace mega::inline v0::scan
