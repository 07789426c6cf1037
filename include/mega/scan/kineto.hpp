/// @file  Importer of Chrome trace JSON as Kineto (torch.profiler) and its relatives write it.
///
/// One record becomes one Event where it spans time: X, B with its E, and instants. Flows are only
/// checked, since correlation numbers say more; counters and asynchronous spans are passed over
/// with a note. Streams become device lanes and threads host lanes.
///
/// The parts, each of which knows those before it and none behind:
///   kineto/record.hpp            text to the fields of one record
///   kineto/names.hpp             each name once, and what it says of its records
///   kineto/lanes.hpp             streams and threads, and spans that are still open
///   kineto/launches.hpp          calls and what they started
///   kineto/collectives.hpp       communications and their groups
///   kineto/distributed_info.hpp  which rank the file is of
///   kineto/timeline.hpp          steps, and the base of the clock
///   kineto/defects.hpp           what only the whole file shows to be wrong
/// Memory beside the Trace is 8 bytes for an end of a flow; then, one after the other, 8 for a
/// record with a correlation and 4 for an event.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/kineto/collectives.hpp>
#include <mega/scan/kineto/defects.hpp>
#include <mega/scan/kineto/distributed_info.hpp>
#include <mega/scan/kineto/lanes.hpp>
#include <mega/scan/kineto/launches.hpp>
#include <mega/scan/kineto/names.hpp>
#include <mega/scan/kineto/record.hpp>
#include <mega/scan/kineto/timeline.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace mega::inline v0::scan {

namespace kineto {

/// Reads one file: its records become events as they come, and what needs all of them follows.
class Import {
 public:
  Import(Trace& trace, Source& source, const ImportOptions& options)
      : t_(trace),
        source_(source),
        options_(options),
        json_(source, trace.defects),
        first_event_(trace.events.size()),
        first_lane_(trace.lanes.size()),
        rank_index_(static_cast<TableIndex>(trace.ranks.size())),
        reader_(json_),
        names_(trace.names),
        lanes_(trace, names_, rank_index_),
        collectives_(trace, names_) {
    Rank rank;
    rank.source = source.name();
    t_.ranks.push_back(std::move(rank));
  }

  void run() {
    read_document();
    if (!found_events_) {
      t_.ranks.pop_back();
      throw Error(ErrorCode::bad_input,
                  sentence(source_.name(), " has no list of trace events: neither an array nor an ",
                           "object with \"traceEvents\""));
    }
    if (json_.cut() || !source_.damage().empty()) ++t_.defects.truncated_files;
    lanes_.close_all();
    lanes_.settle_labels();
    settle_rank();
    collectives_.settle_groups();
    t_.defects.dangling_flows += flows_.count_dangling();
    launches_.link(t_, first_event_);
    t_.defects.partial_overlaps += count_overlaps(t_, first_event_, first_lane_);
    steps_.assign(t_, first_event_);
    settle_clock(t_, first_event_, base_);
    write_notes();
  }

 private:
  // The document ------------------------------------------------------------------------------

  void read_document() {
    using Kind = JsonScanner::Kind;
    const Kind kind = json_.kind();
    if (kind == Kind::array) {
      read_events();
    } else if (kind == Kind::object) {
      json_.enter();
      JsonText key;
      for (json_.start_record(); json_.next_key(key); json_.start_record()) read_property(key.raw);
    }
  }

  void read_property(std::string_view key) {
    if (key == "traceEvents" && json_.kind() == JsonScanner::Kind::array) {
      read_events();
    } else if (key == "distributedInfo" && json_.kind() == JsonScanner::Kind::object) {
      const DistributedInfo info = read_distributed_info(json_, collectives_);
      if (info.rank >= 0) declared_rank_ = info.rank;
      if (info.world >= 0) t_.ranks[rank_index_].world = info.world;
    } else if (key == "baseTimeNanoseconds") {
      Nanoseconds base = 0;
      base_ = json_.number(base) ? std::optional(base) : std::nullopt;
    } else {
      json_.skip_long();
    }
  }

  void read_events() {
    found_events_ = true;
    json_.enter();
    for (json_.start_record(); json_.next_element(); json_.start_record()) {
      if (json_.kind() == JsonScanner::Kind::object) {
        json_.enter();
        Record record;
        if (reader_.read(record)) add(record);
      } else {
        ++t_.defects.malformed_records;
        json_.skip_long();
      }
    }
  }

  // From record to event ----------------------------------------------------------------------

  void add(const Record& r) {
    switch (r.phase) {
      case 'X':
      case 'B':
      case 'i':
      case 'I': return add_span(r);
      case 'E': return end_span(r);
      case 'M': return lanes_.note_label(r);
      case 's':
      case 't':
      case 'f': return flows_.add(r);
      case 'C': ++counters_; return;
      case '\0': ++t_.defects.malformed_records; return;
      default: ++passed_over_; return;
    }
  }

  void add_span(const Record& r) {
    if (!r.has_begin) {
      ++t_.defects.malformed_records;
      return;
    }
    const bool instant = r.phase == 'i' || r.phase == 'I';
    if (instant && r.name.raw == "[memory]") {
      ++counters_;  // samples of the allocator
      return;
    }
    Event e;
    e.begin = e.end = r.begin;
    if (r.phase == 'X') {
      if (r.duration < 0) {
        ++t_.defects.negative_durations;
      } else {
        e.end = saturating_sum(r.begin, r.duration);
      }
    }
    e.name = names_.intern(r.name);
    e.lane = lanes_.of(r);
    lanes_.note_begin(e.lane, e.begin);
    if (on_device(r.category)) {
      t_.lanes[e.lane].kind = LaneKind::device;
      any_device_ = true;
    }
    const NameFacts facts = names_.facts(e.name);
    e.kind = kind_of(r, facts);
    if (e.kind == EventKind::iteration) steps_.add(e.begin, e.end, facts.step);
    launches_.mark(e, r);
    const auto at = static_cast<TableIndex>(t_.events.push_back(e));
    if (r.phase == 'B') lanes_.open(e.lane, at);
    if (e.kind == EventKind::communication) collectives_.attach(at, facts.op, r.collective);
  }

  [[nodiscard]] static EventKind kind_of(const Record& r, const NameFacts& facts) noexcept {
    switch (r.category) {
      case Category::kernel:
        return facts.communicates || r.collective != nullptr ? EventKind::communication
                                                             : EventKind::compute;
      case Category::copy: return EventKind::memory;
      case Category::device_wait: return EventKind::synchronize;
      case Category::host: return EventKind::host_op;
      case Category::runtime:
        return facts.synchronizes ? EventKind::synchronize
               : facts.launches   ? EventKind::launch
                                  : EventKind::host_op;
      case Category::annotation: return facts.step >= 0 ? EventKind::iteration : EventKind::other;
      default: return EventKind::other;
    }
  }

  void end_span(const Record& r) {
    const TableIndex event = r.has_begin ? lanes_.close(lanes_.of(r)) : none;
    if (event == none) {
      ++t_.defects.malformed_records;
      return;
    }
    Event& e = t_.events[event];
    if (r.begin < e.begin) {
      ++t_.defects.negative_durations;
    } else {
      e.end = r.begin;
    }
  }

  // After the last record ---------------------------------------------------------------------

  void settle_rank() {
    Rank& own = t_.ranks[rank_index_];
    own.rank = options_.rank >= 0 ? options_.rank : declared_rank_;
    if (own.rank < 0) guess_rank(t_, rank_index_);
  }

  void write_notes() {
    const std::string& name = source_.name();
    if (t_.events.size() == first_event_)
      t_.notes.push_back(sentence(name, " has no events"));
    else if (!any_device_)
      t_.notes.push_back(sentence(name, " has no GPU activity"));
    if (counters_ > 0)
      t_.notes.push_back(sentence(name, ": ", counters_, " counter values were passed over"));
    if (passed_over_ > 0)
      t_.notes.push_back(sentence(name, ": ", passed_over_,
                                  " records of kinds that span no lane were passed over"));
  }

  Trace& t_;
  Source& source_;
  const ImportOptions& options_;
  JsonScanner json_;
  std::size_t first_event_, first_lane_;
  TableIndex rank_index_;

  RecordReader reader_;
  Names names_;
  Lanes lanes_;
  Launches launches_;
  Collectives collectives_;
  Steps steps_;
  Flows flows_;

  bool found_events_ = false, any_device_ = false;
  std::int32_t declared_rank_ = -1;
  std::optional<Nanoseconds> base_;
  std::int64_t counters_ = 0, passed_over_ = 0;
};

}  // namespace kineto

/// True for Chrome trace JSON of any writer: an array or object whose head names its parts.
[[nodiscard]] inline bool looks_like_kineto(std::string_view head) noexcept {
  using detail::holds;
  const std::size_t at = head.find_first_not_of(" \n\t\r");
  if (at == std::string_view::npos || (head[at] != '{' && head[at] != '[')) return false;
  return holds(head, "\"traceEvents\"") || holds(head, "\"ph\"") ||
         holds(head, "\"schemaVersion\"") || holds(head, "\"deviceProperties\"");
}

/// Adds one rank with its events. Its number is what the file says, or its name, or the place among
/// the files imported before; `options` override all three.
/// Cost: the text once, and sorting of each lane's events. Memory: see the top of this file.
/// @throws Error(bad_input) if the text has no list of events
inline void import_kineto(Trace& trace, Source& source, const ImportOptions& options = {}) {
  kineto::Import(trace, source, options).run();
}

}  // namespace mega::inline v0::scan
