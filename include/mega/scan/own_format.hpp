/// @file  mega's own trace files: reading them, and writing a rank of a Trace. The format is
/// described where recorders write it, in own_format_writer.hpp.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/detail/event_records.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/own_format_writer.hpp>
#include <mega/scan/record.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

[[nodiscard]] inline bool looks_like_own_format(std::string_view head) noexcept {
  return head.starts_with("{\"mega_trace\":");
}

/// Writes one rank of a Trace. The sink gets the file in pieces of about 64 KiB.
template <class Sink>
void write_own_format(const Trace& trace, TableIndex rank, Sink&& sink) {
  detail::OwnFormatLines lines;
  const auto flush = [&](std::size_t above) {
    if (lines.text().size() <= above) return;
    sink(std::string_view(lines.text()));
    lines.text().clear();
  };
  const Rank& of = trace.ranks[rank];
  RecordingInfo info;
  info.rank = of.rank;
  info.world = static_cast<std::int32_t>(trace.ranks.size());
  info.data = of.data;
  info.pipeline = of.pipeline;
  info.tensor = of.tensor;
  info.clock = of.clock;
  info.host = of.host;
  info.processors = of.processors;
  info.cost_ns_per_event = trace.completeness.cost_ns_per_event;
  lines.header(info);
  std::vector<std::int64_t> lane_of(trace.lanes.size(), -1);
  std::int64_t lanes = 0;
  for (std::size_t l = 0; l < trace.lanes.size(); ++l) {
    if (trace.lanes[l].rank != rank) continue;
    lane_of[l] = lanes;
    lines.lane(lanes++, trace.lanes[l]);
  }
  for (const DeviceState& state : trace.device_states)
    if (state.rank == rank) lines.device(state);
  std::vector<char> told(trace.groups.size(), 0);
  std::vector<std::int64_t> ordinal;  // among the events of this rank
  ordinal.reserve(trace.events.size());
  std::int64_t count = 0;
  for (std::size_t i = 0; i < trace.events.size(); ++i)
    ordinal.push_back(lane_of[trace.events[i].lane] >= 0 ? count++ : -1);
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    if (ordinal[i] < 0) continue;
    const Event& e = trace.events[i];
    const Communication* const c = e.detail == none ? nullptr : &trace.communications[e.detail];
    if (c != nullptr && c->group != none && told[c->group] == 0) {
      lines.group(c->group, trace.groups[c->group].name, trace.groups[c->group].ranks);
      told[c->group] = 1;
    }
    lines.begin_event(e.begin, e.end, trace.name(e), to_string(e.kind), lane_of[e.lane]);
    lines.some("s", e.step);
    lines.some("m", e.microbatch);
    lines.some("c", e.chunk);
    if (c != nullptr) {
      if (c->group != none) lines.number("g", c->group);
      lines.some("q", c->sequence);
      lines.some("p", c->peer);
      lines.some("y", c->bytes);
      if (c->dtype != none) lines.words("t", trace.names[c->dtype]);
      if (c->op != communication_op(trace.name(e))) lines.words("o", to_string(c->op));
    }
    if (e.launch < ordinal.size()) lines.some("a", ordinal[e.launch]);
    lines.end_event();
    flush(std::size_t{1} << 16U);
  }
  lines.totals({count, trace.completeness.events_dropped});
  flush(0);
}

namespace detail {

class OwnFormatImport {
 public:
  OwnFormatImport(Trace& trace, Source& source, const ImportOptions& options)
      : t_(trace), source_(source), options_(options) {}

  void run() {
    JsonScanner scanner(source_, t_.defects);
    for (scanner.start_record(); scanner.next_value(); scanner.start_record()) {
      if (scanner.kind() != JsonScanner::Kind::object) {
        scanner.skip();
        if (scanner.kind() == JsonScanner::Kind::array) scanner.skip_long();
        ++t_.defects.malformed_records;
        continue;
      }
      line_ = Line{};
      line_.ranks.clear();
      scanner.enter();
      JsonText key;
      while (scanner.next_key(key)) take(key.raw, scanner);
      if (scanner.broken() || scanner.too_long()) {
        scanner.give_up_record();
      } else if (scanner.cut()) {
        break;
      } else if (!finish_line()) {
        ++t_.defects.malformed_records;
      }
    }
    finish();
  }

 private:
  enum class What : std::uint8_t { nothing, header, lane, group, anchor, device, event, totals };

  struct Line {
    What what = What::nothing;
    std::int64_t number = 0;  // of the lane, group or version; begin; records
    std::int64_t rank = -1, world = -1, data = -1, pipeline = -1, tensor = -1;
    double cost_ns = 0;
    std::int64_t process = 0, track = std::numeric_limits<std::int64_t>::min(), dropped = 0;
    std::int64_t duration = 0, lane = -1, step = -1, microbatch = -1, chunk = -1;
    std::int64_t group = -1, sequence = -1, peer = -1, bytes = -1, launch = -1;
    std::int64_t mhz = -1, celsius = -1, busy = -1, milliwatts = -1, limits = 0;
    TableIndex name = none, dtype = none;
    EventKind kind = EventKind::other;
    CommunicationOp op = CommunicationOp::unknown;
    bool op_said = false;
    bool on_host = false;
    std::string clock, host, processors, label;
    std::vector<std::int32_t> ranks;
  };

  void take(std::string_view key, JsonScanner& s) {
    const auto number = [&](std::int64_t& into) { (void)s.number(into); };
    const auto first = [&](What what) {
      // A number that cannot be read leaves the line without a meaning.
      if (s.number(line_.number)) line_.what = what;
    };
    if (key.size() == 1) {
      switch (key[0]) {
        case 'b': return first(What::event);
        case 'd': return number(line_.duration);
        case 'n': line_.name = t_.names.intern(text(s)); return;
        case 'k': line_.kind = event_kind_of(text(s)); return;
        case 'l': return number(line_.lane);
        case 's': return number(line_.step);
        case 'm': return number(line_.microbatch);
        case 'c': return number(line_.chunk);
        case 'g': return number(line_.group);
        case 'q': return number(line_.sequence);
        case 'p': return number(line_.peer);
        case 'y': return number(line_.bytes);
        case 't': line_.dtype = t_.names.intern(text(s)); return;
        case 'o':
          line_.op = communication_op(text(s));
          line_.op_said = true;
          return;
        case 'a': return number(line_.launch);
        default: return s.skip();
      }
    }
    if (key == "mega_trace") return first(What::header);
    if (key == "lane") return first(What::lane);
    if (key == "group") return first(What::group);
    if (key == "anchor") return first(What::anchor);
    if (key == "device") return first(What::device);
    if (key == "recorded") return first(What::totals);
    if (key == "rank") return number(line_.rank);
    if (key == "world") return number(line_.world);
    if (key == "data") return number(line_.data);
    if (key == "pipeline") return number(line_.pipeline);
    if (key == "tensor") return number(line_.tensor);
    if (key == "process") return number(line_.process);
    if (key == "track") return number(line_.track);
    if (key == "dropped") return number(line_.dropped);
    if (key == "mhz") return number(line_.mhz);
    if (key == "celsius") return number(line_.celsius);
    if (key == "busy") return number(line_.busy);
    if (key == "milliwatts") return number(line_.milliwatts);
    if (key == "limits") return number(line_.limits);
    if (key == "clock") {
      line_.clock = text(s);
    } else if (key == "host") {
      line_.host = text(s);
    } else if (key == "processors") {
      line_.processors = text(s);
    } else if (key == "label" || key == "name") {
      line_.label = text(s);
    } else if (key == "kind") {
      line_.on_host = text(s) == "host";
    } else if (key == "cost_ns") {
      const std::string_view spelled = s.token();
      double cost = 0;
      const auto [end, fault] =
          std::from_chars(spelled.data(), spelled.data() + spelled.size(), cost);
      if (fault == std::errc{} && cost >= 0 && cost < 1e12) line_.cost_ns = cost;
    } else if (key == "ranks" && s.kind() == JsonScanner::Kind::array) {
      s.enter();
      while (s.next_element()) {
        std::int64_t rank = -1;
        if (s.kind() == JsonScanner::Kind::scalar && s.number(rank)) {
          line_.ranks.push_back(as_index(rank));
        } else {
          s.skip(true);
        }
      }
    } else {
      s.skip();
    }
  }

  std::string_view text(JsonScanner& s) {
    if (s.kind() == JsonScanner::Kind::text) return unescape(s.text(), scratch_);
    s.skip();
    return {};
  }

  bool finish_line() {
    switch (line_.what) {
      case What::header: return add_rank();
      case What::lane: return add_lane();
      case What::group: return add_group();
      case What::device: return add_device_state();
      case What::event: return add_event();
      case What::totals:
        ended_ = true;
        t_.completeness.events_dropped += line_.dropped;
        return true;
      case What::anchor: return true;
      case What::nothing: break;
    }
    return false;
  }

  bool add_rank() {
    expects(line_.number == own_format_version, ErrorCode::bad_input, [&] {
      return sentence(source_.name(), " is a trace of format version ", line_.number,
                      "; this library reads version ", own_format_version);
    });
    if (rank_ != none) return false;
    rank_ = static_cast<TableIndex>(t_.ranks.size());
    Rank rank;
    rank.rank = options_.rank >= 0 ? options_.rank : as_index(line_.rank);
    rank.world = as_index(line_.world);
    rank.data = as_index(line_.data);
    rank.pipeline = as_index(line_.pipeline);
    rank.tensor = as_index(line_.tensor);
    rank.clock = line_.clock;
    rank.host = line_.host;
    rank.processors = line_.processors;
    rank.source = source_.name();
    t_.ranks.push_back(std::move(rank));
    if (line_.cost_ns > t_.completeness.cost_ns_per_event)
      t_.completeness.cost_ns_per_event = line_.cost_ns;
    return true;
  }
  bool add_lane() {
    if (rank_ == none || lanes_.size() >= most_tables || line_.number < 0) return false;
    Lane lane;
    lane.rank = rank_;
    lane.process = line_.process;
    lane.track = line_.track == Line{}.track ? line_.number : line_.track;
    lane.kind = line_.on_host ? LaneKind::host : LaneKind::device;
    lane.label = line_.label;
    if (!lanes_.try_emplace(line_.number, static_cast<TableIndex>(t_.lanes.size())).second)
      return false;
    t_.lanes.push_back(std::move(lane));
    return true;
  }
  bool add_group() {
    if (groups_.size() >= most_tables || line_.number < 0) return false;
    std::sort(line_.ranks.begin(), line_.ranks.end());
    groups_[line_.number] = t_.intern_group(line_.label, line_.ranks);
    return true;
  }
  bool add_device_state() {
    if (rank_ == none || !usable_time(line_.number)) return false;
    DeviceState state;
    state.at = line_.number;
    state.rank = rank_;
    state.sm_mhz = as_index(line_.mhz);
    state.temperature_c = as_index(line_.celsius);
    state.busy_percent = as_index(line_.busy);
    state.power_mw = as_index(line_.milliwatts);
    state.clock_limits = static_cast<std::uint32_t>(line_.limits & 0xFFFF'FFFF);
    t_.device_states.push_back(state);
    return true;
  }
  bool add_event() {
    const auto lane = lanes_.find(line_.lane);
    if (lane == lanes_.end() || !usable_time(line_.number)) return false;
    Event e;
    e.begin = line_.number;
    e.end = end_of(e.begin, line_.duration, t_.defects);
    e.name = line_.name;
    e.lane = lane->second;
    e.step = as_index(line_.step);
    e.microbatch = as_index(line_.microbatch);
    e.chunk = line_.chunk >= 0 && line_.chunk < 0x7FFF ? static_cast<std::int16_t>(line_.chunk)
                                                       : std::int16_t{-1};
    e.kind = line_.kind;
    const auto at = static_cast<TableIndex>(t_.events.push_back(e));
    if (first_event_ == none) first_event_ = at;
    if (line_.launch >= 0) launches_.push_back({at, line_.launch});
    if (e.kind != EventKind::communication) return true;
    Communication c;
    const auto group = groups_.find(line_.group);
    c.group = group == groups_.end() ? none : group->second;
    c.peer = as_index(line_.peer);
    c.sequence = line_.sequence;
    c.bytes = line_.bytes;
    c.dtype = line_.dtype;
    c.op = line_.op_said || e.name == none ? line_.op : communication_op(t_.names[e.name]);
    t_.attach(at, c);
    return true;
  }

  void finish() {
    expects(rank_ != none, ErrorCode::bad_input, [&] {
      return source_.name() + " has no line with \"mega_trace\", the first of mega's trace files";
    });
    for (const auto& [event, ordinal] : launches_) {
      const auto launcher = static_cast<std::int64_t>(first_event_) + ordinal;
      if (ordinal < static_cast<std::int64_t>(t_.events.size()) &&
          launcher < static_cast<std::int64_t>(t_.events.size())) {
        t_.events[event].launch = static_cast<TableIndex>(launcher);
      }
    }
    if (ended_) return;
    ++t_.defects.truncated_files;
    t_.completeness.window_truncated = true;
  }

  static constexpr std::size_t most_tables = std::size_t{1} << 16U;

  Trace& t_;
  Source& source_;
  const ImportOptions& options_;
  TableIndex rank_ = none;
  TableIndex first_event_ = none;
  std::unordered_map<std::int64_t, TableIndex> lanes_, groups_;  // by the file's numbers
  std::vector<std::pair<TableIndex, std::int64_t>> launches_;
  Line line_;
  std::string scratch_;
  bool ended_ = false;
};

}  // namespace detail

/// Adds one rank. A file that was cut off is read as far as it goes, and counted.
/// @throws Error(bad_input): no header, or a format version that is not read here
inline void import_own_format(Trace& trace, Source& source, const ImportOptions& options) {
  detail::OwnFormatImport(trace, source, options).run();
}

}  // namespace mega::inline v0::scan
