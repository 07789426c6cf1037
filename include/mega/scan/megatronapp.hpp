/// @file  Importer of MegatronApp's traces: begin, end and instant records of all ranks of a job,
/// a process a rank. The coordinates stand in the arguments of the ends.
///
/// Two runs in one file on the same processes (MegatronApp's merged traces) are no one timeline:
/// each has lanes of its own and the file is counted in Defects::overlapping_runs.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/communication_name.hpp>
#include <mega/scan/detail/event_records.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

[[nodiscard]] inline bool looks_like_megatronapp(std::string_view head) noexcept {
  const auto has = [&](std::string_view key) { return head.find(key) != std::string_view::npos; };
  return has("\"iteration begin\"") || (has("\"pp_rank\"") && has("\"microbatch\""));
}

namespace detail {

class MegatronAppImport {
 public:
  MegatronAppImport(Trace& trace, Source& source) : t_(trace), source_(source) {}

  void run() {
    JsonScanner scanner(source_, t_.defects);
    for_each_record(
        scanner, t_.defects, [&] { arguments_ = Arguments{}; },
        [&](std::string_view key, JsonScanner& s) { take_argument(key, s); },
        [&](const EventRecord& record) { take(record); });
    std::int64_t runs = 1;
    for (const auto& [key, count] : begun_) runs = std::max(runs, count);
    if (runs > 1) {
      t_.defects.overlapping_runs += runs - 1;
      t_.notes.push_back(sentence(source_.name(), " holds ", runs,
                                  " runs on the same processes; they are kept apart and are no "
                                  "one timeline"));
    }
    for (const auto& [key, lane] : lanes_) {
      if (!lane.open.empty()) t_.completeness.window_truncated = true;
      t_.defects.malformed_records += static_cast<std::int64_t>(lane.open.size());
    }
  }

 private:
  struct Arguments {
    std::int64_t iteration = -1, microbatch = -1, chunk = -1;
    std::int64_t rank = -1, data = -1, pipeline = -1, tensor = -1;
  };
  struct Open {
    TableIndex name;
    Nanoseconds begin;
    std::int32_t step;
  };
  struct Track {
    TableIndex lane = none;
    std::vector<Open> open;
  };

  static constexpr std::size_t most_open = 1024;  // nested in one lane

  void take_argument(std::string_view key, JsonScanner& s) {
    const auto is = [&](std::string_view a, std::string_view b) { return key == a || key == b; };
    if (key == "iteration") {
      arguments_.iteration = argument_number(s);
    } else if (key == "microbatch") {
      arguments_.microbatch = argument_number(s);
    } else if (key == "model_chunk") {
      arguments_.chunk = argument_number(s);
    } else if (is("pp_rank", "pp_rk")) {
      arguments_.pipeline = argument_number(s);
    } else if (is("dp_rank", "dp_rk")) {
      arguments_.data = argument_number(s);
    } else if (is("tp_rank", "tp_rk")) {
      arguments_.tensor = argument_number(s);
    } else if (is("global_rank", "g_rk")) {
      arguments_.rank = argument_number(s);
    } else {
      s.skip();
    }
  }

  TableIndex rank_of(std::int64_t pid) {
    const auto [at, is_new] = ranks_.try_emplace(pid, static_cast<TableIndex>(t_.ranks.size()));
    if (is_new) {
      Rank rank;
      rank.rank = as_index(pid);
      rank.source = source_.name();
      rank.clock = source_.name();  // the aggregator has put all ranks into one time
      t_.ranks.push_back(std::move(rank));
    }
    Rank& rank = t_.ranks[at->second];
    const auto note = [](std::int32_t& known, std::int64_t said) {
      if (said >= 0) known = as_index(said);
    };
    note(rank.rank, arguments_.rank);
    note(rank.data, arguments_.data);
    note(rank.pipeline, arguments_.pipeline);
    note(rank.tensor, arguments_.tensor);
    return at->second;
  }

  Track& track_of(std::int64_t pid, std::int64_t tid) {
    const TableIndex rank = rank_of(pid);
    const std::int64_t run = runs_[{pid, tid}];
    Track& track = lanes_[{pid, tid, run}];
    if (track.lane == none) {
      track.lane = static_cast<TableIndex>(t_.lanes.size());
      Lane lane;
      lane.rank = rank;
      lane.process = pid;
      lane.track = tid;
      t_.lanes.push_back(std::move(lane));
    }
    return track;
  }

  void take(const EventRecord& r) {
    if (r.phase == 'M') return;
    if (!r.timed) {
      ++t_.defects.malformed_records;
      return;
    }
    // "iteration begin" and "iteration end" are instants, and one span here.
    const bool opens_iteration = r.phase == 'i' && r.name == "iteration begin";
    const bool closes_iteration = r.phase == 'i' && r.name == "iteration end";
    if (opens_iteration) {
      const std::int64_t run = begun_[{r.pid, arguments_.iteration}]++;
      std::int64_t& current = runs_[{r.pid, r.tid}];
      current = std::max(current, run);
    }
    Track& track = track_of(r.pid, r.tid);
    if (opens_iteration) {
      open(track, "iteration", r);
    } else if (closes_iteration) {
      close(track, "iteration", r);
    } else if (r.phase == 'B') {
      open(track, r.name, r);
    } else if (r.phase == 'E') {
      close(track, r.name, r);
    } else if (r.phase == 'X') {
      add(track, t_.names.intern(r.name), r.begin, end_of(r.begin, r.duration, t_.defects),
          as_index(arguments_.iteration));
    } else if (r.phase == 'i' || r.phase == 'I') {
      add(track, t_.names.intern(r.name), r.begin, r.begin, as_index(arguments_.iteration));
    } else {
      ++t_.defects.malformed_records;
    }
  }

  void open(Track& track, std::string_view name, const EventRecord& r) {
    if (track.open.size() < most_open) {
      track.open.push_back({t_.names.intern(name), r.begin, as_index(arguments_.iteration)});
    } else {
      ++t_.defects.malformed_records;
    }
  }

  /// Ends the innermost open span of the name; what was opened inside it has lost its end.
  void close(Track& track, std::string_view name, const EventRecord& r) {
    const TableIndex wanted = t_.names.intern(name);
    auto at = track.open.end();
    while (at != track.open.begin() && (at - 1)->name != wanted) --at;
    if (at == track.open.begin()) {
      ++t_.defects.malformed_records;
      return;
    }
    const Open span = *(at - 1);
    t_.defects.malformed_records += track.open.end() - at;
    track.open.erase(at - 1, track.open.end());
    if (r.begin < span.begin) ++t_.defects.negative_durations;
    const std::int32_t step =
        arguments_.iteration >= 0 ? as_index(arguments_.iteration) : span.step;
    add(track, wanted, span.begin, std::max(span.begin, r.begin), step);
  }

  void add(const Track& track, TableIndex name, Nanoseconds begin, Nanoseconds end,
           std::int32_t step) {
    Event e;
    e.begin = begin;
    e.end = end;
    e.name = name;
    e.lane = track.lane;
    e.step = step;
    e.microbatch = as_index(arguments_.microbatch);
    const std::int64_t chunk = arguments_.chunk;
    e.chunk = chunk >= 0 && chunk < 0x7FFF ? static_cast<std::int16_t>(chunk) : std::int16_t{-1};
    e.kind = kind_of(t_.names[name], begin == end);
    const auto at = static_cast<TableIndex>(t_.events.push_back(e));
    if (e.kind != EventKind::communication) return;
    Communication c;
    c.op = communication_of(t_.names[name]);
    t_.attach(at, c);
  }

  [[nodiscard]] static EventKind kind_of(std::string_view name, bool instant) noexcept {
    if (name == "iteration") return EventKind::iteration;
    if (name == "forward") return EventKind::forward;
    if (name == "backward") return EventKind::backward;
    if (name == "loss") return EventKind::loss;
    if (name == "optimizer") return EventKind::optimizer;
    if (!instant && communication_of(name) != CommunicationOp::unknown)
      return EventKind::communication;
    return EventKind::other;
  }

  Trace& t_;
  Source& source_;
  std::map<std::int64_t, TableIndex> ranks_;                             // by pid
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> begun_;  // by pid and iteration
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> runs_;   // by pid and tid
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, Track> lanes_;
  Arguments arguments_;
};

}  // namespace detail

/// Adds all ranks of the file, on one clock.
inline void import_megatronapp(Trace& trace, Source& source, const ImportOptions&) {
  detail::MegatronAppImport(trace, source).run();
}

}  // namespace mega::inline v0::scan
