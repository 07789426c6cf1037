/// @file  Writes a Trace as Chrome's trace event JSON, for ui.perfetto.dev and chrome://tracing: a
/// process a rank, a thread a stream (further ones where slices overlap partially), arrows between
/// the members of matched operations and from launches to device work.
///
/// Time is aligned, in microseconds with three decimals, counted from "baseTimeNanoseconds":
/// viewers read doubles, which hold nanoseconds since 1970 no more exactly than to 256 of them.
///
/// Records of metadata that viewers pass over say what joined_timeline.hpp needs to read the ranks
/// back: "mega_rank" of each process, "mega_lane" of each thread and "mega_group" of each group.
///
/// Source: Google's "Trace Event Format".
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/detail/rows.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace mega::inline v0::scan {

/// Takes the next bytes of a file.
template <class S>
concept byte_sink = std::invocable<S&, std::string_view>;

namespace detail {

template <byte_sink Sink>
class ChromeJsonWriter {
 public:
  ChromeJsonWriter(const Trace& trace, const Matches& matches, const Alignment& alignment,
                   Sink& sink)
      : t_(trace),
        alignment_(alignment),
        flows_(trace, matches, alignment),
        sink_(sink),
        base_(earliest(trace, alignment)) {}

  void run() {
    text_ = "{\"mega_timeline\":1,\"aligned\":";
    text_ += alignment_.aligned() ? "true" : "false";
    text_ += ",\"displayTimeUnit\":\"ns\",\"baseTimeNanoseconds\":";
    append_integer(text_, base_);
    text_ += ",\"traceEvents\":[";
    for (std::size_t r = 0; r < t_.ranks.size(); ++r) {
      metadata("process_name", process(r), 0, "name", rank_label(t_.ranks[r]));
      metadata("process_sort_index", process(r), 0, "sort_index", {},
               t_.ranks[r].rank < 0 ? static_cast<std::int64_t>(r) : t_.ranks[r].rank);
      describe_rank(t_.ranks[r], process(r));
    }
    for (const Group& group : t_.groups) describe_group(group);
    for_each_row(t_, alignment_,
                 [&](TableIndex lane, std::size_t overflow, std::span<const Slice> slices) {
                   write_row(lane, overflow, slices);
                 });
    text_ += "\n]}\n";
    flush();
  }

 private:
  /// Not 0, which viewers keep for the idle process.
  [[nodiscard]] static std::int64_t process(std::size_t rank_index) noexcept {
    return static_cast<std::int64_t>(rank_index) + 1;
  }

  void flush() {
    sink_(std::string_view(text_));
    text_.clear();
  }
  void begin_record() {
    if (text_.size() > (std::size_t{1} << 16U)) flush();
    text_ += first_ ? "\n{" : ",\n{";
    first_ = false;
  }
  void key(std::string_view name) {
    text_ += '"';
    text_ += name;
    text_ += "\":";
  }
  void number(std::string_view name, std::int64_t value) {
    key(name);
    append_integer(text_, value);
  }
  void place(std::int64_t pid, std::int64_t tid) {
    number("pid", pid);
    text_ += ',';
    number("tid", tid);
  }

  void metadata(std::string_view what, std::int64_t pid, std::int64_t tid, std::string_view name,
                std::string_view text, std::int64_t value = 0) {
    begin_record();
    text_ += "\"ph\":\"M\",\"name\":\"";
    text_ += what;
    text_ += "\",";
    place(pid, tid);
    text_ += ",\"args\":{";
    if (text.empty()) {
      number(name, value);
    } else {
      key(name);
      append_json_string(text_, text);
    }
    text_ += "}}";
  }

  void describe_rank(const Rank& rank, std::int64_t pid) {
    begin_record();
    text_ += "\"ph\":\"M\",\"name\":\"mega_rank\",";
    place(pid, 0);
    text_ += ",\"args\":{";
    number("rank", rank.rank);
    for (const auto& [name, value] : {std::pair("data", rank.data),
                                      {"pipeline", rank.pipeline},
                                      {"tensor", rank.tensor},
                                      {"world", rank.world}}) {
      text_ += ',';
      number(name, value);
    }
    text_ += rank.is_place_lost ? ",\"place_lost\":1}}" : "}}";
  }

  void describe_group(const Group& group) {
    begin_record();
    text_ += "\"ph\":\"M\",\"name\":\"mega_group\",";
    place(0, 0);
    text_ += ",\"args\":{\"group\":";
    append_json_string(text_, group.name);
    text_ += ",\"ranks\":[";
    for (std::size_t i = 0; i < group.ranks.size(); ++i) {
      if (i > 0) text_ += ',';
      append_integer(text_, group.ranks[i]);
    }
    text_ += "]}}";
  }

  void describe_lane(TableIndex at, const Lane& lane, std::int64_t pid, std::int64_t tid) {
    begin_record();
    text_ += "\"ph\":\"M\",\"name\":\"mega_lane\",";
    place(pid, tid);
    text_ += ",\"args\":{";
    number("lane", at);
    text_ += ',';
    number("track", lane.track);
    text_ += lane.kind == LaneKind::host ? ",\"host\":1" : "";
    if (!lane.label.empty()) {
      text_ += ",\"label\":";
      append_json_string(text_, lane.label);
    }
    text_ += "}}";
  }

  void write_row(TableIndex at, std::size_t overflow, std::span<const Slice> slices) {
    const Lane& lane = t_.lanes[at];
    const std::int64_t pid = process(lane.rank);
    const std::int64_t tid = ++rows_;  // of the whole file, so that no two threads share one
    metadata("thread_name", pid, tid, "name", row_label(lane, overflow));
    metadata("thread_sort_index", pid, tid, "sort_index", {}, tid);
    describe_lane(at, lane, pid, tid);
    for (const Slice& slice : slices) {
      write_slice(slice, pid, tid);
      for (const FlowEnd& flow : flows_.of(slice.event)) write_flow(flow, slice, pid, tid);
    }
  }

  void write_slice(const Slice& slice, std::int64_t pid, std::int64_t tid) {
    const Event& e = t_.events[slice.event];
    begin_record();
    text_ += "\"ph\":\"X\",\"cat\":\"";
    text_ += to_string(e.kind);
    text_ += "\",\"name\":";
    append_json_string(text_, t_.name(e));
    text_ += ',';
    place(pid, tid);
    text_ += ",\"ts\":";
    append_microseconds(text_, slice.begin - base_);
    text_ += ",\"dur\":";
    append_microseconds(text_, slice.end - slice.begin);
    text_ += ",\"args\":{";
    std::size_t count = 0;
    const auto next = [&] {
      if (count++ > 0) text_ += ',';
    };
    const auto integer = [&](std::string_view name, std::int64_t value) {
      if (value < 0) return;
      next();
      number(name, value);
    };
    const auto words = [&](std::string_view name, std::string_view value) {
      next();
      key(name);
      append_json_string(text_, value);
    };
    integer("step", e.step);
    integer("microbatch", e.microbatch);
    integer("chunk", e.chunk);
    if (e.detail != none) {
      const Communication& c = t_.communications[e.detail];
      words("op", to_string(c.op));
      if (c.group != none) words("group", t_.groups[c.group].name);
      integer("sequence", c.sequence);
      integer("peer", c.peer);
      integer("bytes", c.bytes);
      if (c.dtype != none) words("dtype", t_.names[c.dtype]);
    }
    text_ += "}}";
  }

  void write_flow(const FlowEnd& flow, const Slice& slice, std::int64_t pid, std::int64_t tid) {
    constexpr std::string_view phases[] = {"s", "t", "f"};
    begin_record();
    text_ += "\"ph\":\"";
    text_ += phases[static_cast<std::size_t>(flow.role)];
    text_ += "\",\"bp\":\"e\",\"cat\":\"flow\",\"name\":\"";
    text_ += flow.op == CommunicationOp::unknown ? std::string_view("launch") : to_string(flow.op);
    text_ += "\",\"id\":\"0x";
    append_hexadecimal(text_, flow.id);
    text_ += "\",";
    place(pid, tid);
    text_ += ",\"ts\":";
    append_microseconds(text_, slice.begin - base_);
    text_ += '}';
  }

  const Trace& t_;
  const Alignment& alignment_;
  Flows flows_;
  Sink& sink_;
  Nanoseconds base_;
  std::string text_;
  std::int64_t rows_ = 0;
  bool first_ = true;
};

}  // namespace detail

/// The sink gets the file in pieces of about 64 KiB. Memory: 24 bytes an arrow's end, 4 bytes an
/// event and the slices of one lane; cost O(n log n).
template <byte_sink Sink>
void write_chrome_json(const Trace& trace, const Matches& matches, const Alignment& alignment,
                       Sink&& sink) {
  detail::ChromeJsonWriter(trace, matches, alignment, sink).run();
}

}  // namespace mega::inline v0::scan
