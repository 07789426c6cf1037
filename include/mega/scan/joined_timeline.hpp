/// @file  Importer of what write_chrome_json() wrote: all ranks of a job in one file. Samples of
/// devices, hosts and what recorders said of themselves do not stand in it.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/detail/event_records.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/trace.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

[[nodiscard]] inline bool looks_like_joined_timeline(std::string_view head) noexcept {
  return head.starts_with("{\"mega_timeline\":");
}

namespace detail {

class JoinedTimelineImport {
 public:
  JoinedTimelineImport(Trace& trace, Source& source) : t_(trace), source_(source) {}

  void run() {
    // Ranks whose clocks were not aligned have as many clocks still.
    aligned_ = source_.look(64).substr(0, 64).find("\"aligned\":true") != std::string_view::npos;
    JsonScanner scanner(source_, t_.defects);
    for_each_record(
        scanner, t_.defects, [&] { arguments_ = Arguments{}; },
        [&](std::string_view key, JsonScanner& s) { take_argument(key, s); },
        [&](const EventRecord& record) { take(record); });
    for (const auto& [event, launch] : launches_) {
      const auto from = launched_from_.find(launch);
      if (from == launched_from_.end()) {
        ++t_.defects.dangling_flows;
      } else {
        t_.events[event].launch = from->second;
      }
    }
  }

 private:
  struct Arguments {
    std::int64_t step = -1, microbatch = -1, chunk = -1;
    std::int64_t sequence = -1, peer = -1, bytes = -1;
    std::int64_t rank = -1, data = -1, pipeline = -1, tensor = -1, world = -1;
    std::int64_t lane = -1, track = 0, host = 0, place_lost = 0;
    std::string op, group, dtype, label;
    std::vector<std::int32_t> ranks;
  };

  void take_argument(std::string_view key, JsonScanner& s) {
    using Number = std::int64_t Arguments::*;
    using Text = std::string Arguments::*;
    static constexpr std::pair<std::string_view, Number> numbers[] = {
        {"step", &Arguments::step},
        {"microbatch", &Arguments::microbatch},
        {"chunk", &Arguments::chunk},
        {"sequence", &Arguments::sequence},
        {"peer", &Arguments::peer},
        {"bytes", &Arguments::bytes},
        {"rank", &Arguments::rank},
        {"data", &Arguments::data},
        {"pipeline", &Arguments::pipeline},
        {"tensor", &Arguments::tensor},
        {"world", &Arguments::world},
        {"lane", &Arguments::lane},
        {"track", &Arguments::track},
        {"host", &Arguments::host},
        {"place_lost", &Arguments::place_lost}};
    static constexpr std::pair<std::string_view, Text> texts[] = {{"op", &Arguments::op},
                                                                  {"group", &Arguments::group},
                                                                  {"dtype", &Arguments::dtype},
                                                                  {"label", &Arguments::label}};
    for (const auto& [name, field] : numbers) {
      if (key == name) {
        arguments_.*field = argument_number(s);
        return;
      }
    }
    for (const auto& [name, field] : texts) {
      if (key == name && s.kind() == JsonScanner::Kind::text) {
        arguments_.*field = std::string(unescape(s.text(), scratch_));
        return;
      }
    }
    if (key == "ranks" && s.kind() == JsonScanner::Kind::array) {
      s.enter();
      while (s.next_element()) {
        const std::int64_t rank = argument_number(s);
        if (rank >= 0) arguments_.ranks.push_back(as_index(rank));
      }
      return;
    }
    s.skip();
  }

  void take(const EventRecord& r) {
    if (r.phase == 'M') {
      take_metadata(r);
    } else if (r.phase == 'X' && r.timed) {
      take_slice(r);
    } else if (r.phase == 's' || r.phase == 'f') {
      take_arrow(r);
    } else if (r.phase != 't') {
      ++t_.defects.malformed_records;
    }
  }

  void take_metadata(const EventRecord& r) {
    if (r.name == "mega_rank") {
      rank_of(r.pid);
    } else if (r.name == "mega_group") {
      const TableIndex group = t_.intern_group(arguments_.group, arguments_.ranks);
      for (const std::int32_t rank : t_.groups[group].ranks)
        groups_.try_emplace({arguments_.group, rank}, group);
    } else if (r.name == "mega_lane") {
      const TableIndex rank = rank_of(r.pid);
      const auto [at, is_new] =
          lanes_.try_emplace(arguments_.lane, static_cast<TableIndex>(t_.lanes.size()));
      if (is_new) {
        t_.lanes.push_back({rank, r.pid, arguments_.track,
                            arguments_.host > 0 ? LaneKind::host : LaneKind::device,
                            arguments_.label});
      }
      threads_[{r.pid, r.tid}] = at->second;
    }
  }

  TableIndex rank_of(std::int64_t pid) {
    const auto [at, is_new] = ranks_.try_emplace(pid, static_cast<TableIndex>(t_.ranks.size()));
    if (!is_new) return at->second;
    Rank rank;
    rank.rank = as_index(arguments_.rank);
    rank.data = as_index(arguments_.data);
    rank.pipeline = as_index(arguments_.pipeline);
    rank.tensor = as_index(arguments_.tensor);
    rank.world = as_index(arguments_.world);
    rank.is_place_lost = arguments_.place_lost > 0;
    rank.source = source_.name();
    rank.clock = aligned_ ? source_.name() : sentence(source_.name(), ", process ", pid);
    t_.ranks.push_back(std::move(rank));
    return at->second;
  }

  void take_slice(const EventRecord& r) {
    const auto thread = threads_.find({r.pid, r.tid});
    if (thread == threads_.end()) {
      ++t_.defects.malformed_records;
      last_ = none;
      return;
    }
    Event e;
    e.begin = r.begin;
    e.end = end_of(r.begin, r.duration, t_.defects);
    e.name = t_.names.intern(r.name);
    e.lane = thread->second;
    e.step = as_index(arguments_.step);
    e.microbatch = as_index(arguments_.microbatch);
    const std::int64_t chunk = arguments_.chunk;
    e.chunk = chunk >= 0 && chunk < 0x7FFF ? static_cast<std::int16_t>(chunk) : std::int16_t{-1};
    e.kind = event_kind_of(r.category);
    last_ = static_cast<TableIndex>(t_.events.push_back(e));
    if (arguments_.op.empty() && e.kind != EventKind::communication) return;
    Communication c;
    c.op = operation_of(arguments_.op);
    const auto group = groups_.find({arguments_.group, t_.ranks[t_.lanes[e.lane].rank].rank});
    if (group != groups_.end()) {
      c.group = group->second;
    } else if (!arguments_.group.empty()) {
      c.group = t_.intern_group(arguments_.group, {});
    }
    c.sequence = arguments_.sequence;
    c.peer = as_index(arguments_.peer);
    c.bytes = arguments_.bytes;
    if (!arguments_.dtype.empty()) c.dtype = t_.names.intern(arguments_.dtype);
    t_.attach(last_, c);
  }

  /// Arrows stand behind the slice that they begin or end at.
  void take_arrow(const EventRecord& r) {
    if (r.name != "launch" || last_ == none) return;
    if (r.phase == 's') {
      launched_from_.try_emplace(std::string(r.id), last_);
    } else {
      launches_.emplace_back(last_, std::string(r.id));
    }
  }

  [[nodiscard]] static CommunicationOp operation_of(std::string_view name) noexcept {
    for (int op = 0; op <= static_cast<int>(CommunicationOp::send_recv); ++op) {
      if (to_string(static_cast<CommunicationOp>(op)) == name)
        return static_cast<CommunicationOp>(op);
    }
    return CommunicationOp::unknown;
  }

  Trace& t_;
  Source& source_;
  bool aligned_ = false;
  std::map<std::int64_t, TableIndex> ranks_;                             // by process
  std::map<std::int64_t, TableIndex> lanes_;                             // as numbered in the file
  std::map<std::pair<std::int64_t, std::int64_t>, TableIndex> threads_;  // lanes
  std::map<std::pair<std::string, std::int32_t>, TableIndex> groups_;    // by name and member
  std::unordered_map<std::string, TableIndex> launched_from_;            // by arrow
  std::vector<std::pair<TableIndex, std::string>> launches_;             // what an arrow ends at
  TableIndex last_ = none;                                               // slice
  Arguments arguments_;
  std::string scratch_;
};

}  // namespace detail

/// Adds all ranks of the file.
inline void import_joined_timeline(Trace& trace, Source& source, const ImportOptions&) {
  detail::JoinedTimelineImport(trace, source).run();
}

}  // namespace mega::inline v0::scan
