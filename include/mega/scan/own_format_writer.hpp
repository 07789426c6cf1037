/// @file  Writes mega's own trace files: one a rank, JSON lines, whole numbers of nanoseconds.
///
/// The first line says who recorded, by which clock and at which cost; lanes, groups and clock
/// anchors have lines before the first event that refers to them; then a line an event; the last
/// line counts what was recorded and dropped. A file without its last line was cut off. "host" and
/// "processors" are left out where they are unknown.
///
///   {"mega_trace":1,"rank":3,"world":8,"data":1,"pipeline":0,"tensor":1,"clock":"host",
///    "host":"node7","processors":"0-3,8","interval":1,"cost_ns":21.5}
///   {"lane":0,"label":"compute"}        may have "kind":"host", "process", "track"
///   {"group":0,"name":"dp","ranks":[1,3]}
///   {"anchor":812345678901,"realtime":1712195495505582988,"width":120}
///   {"b":812345678950,"d":1200,"n":"layer 0","k":"forward","l":0,"s":7,"m":2,"c":1}
///   {"b":812345680150,"d":900,"n":"all_reduce","k":"communication","l":1,"s":7,"g":0,"q":41,
///    "p":5,"y":1048576,"t":"bf16"}
///   {"recorded":2,"dropped":0}
///
/// A line {"device":812345679000,"mhz":1980,"celsius":61,"busy":99,"milliwatts":645000,"limits":4}
/// is a DeviceState at that time; what the device does not say is left out.
///
/// Of an event: begin, duration, name, kind, lane; where it has them step, micro-batch, chunk,
/// group, sequence number, peer or root, bytes, dtype, the operation ("o") where the name does not
/// say it, and the line number among the events, from 0, of what launched it ("a").
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/record.hpp>
#include <mega/scan/trace.hpp>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace mega::inline v0::scan {

inline constexpr int own_format_version = 1;

namespace detail {

/// Appends the lines of the format to a text.
class OwnFormatLines {
 public:
  [[nodiscard]] std::string& text() noexcept { return text_; }

  void header(const RecordingInfo& info) {
    text_ += "{\"mega_trace\":";
    append_integer(text_, own_format_version);
    number("rank", info.rank);
    number("world", info.world);
    some("data", info.data);
    some("pipeline", info.pipeline);
    some("tensor", info.tensor);
    words("clock", info.clock);
    if (!info.host.empty()) words("host", info.host);
    if (!info.processors.empty()) words("processors", info.processors);
    number("interval", info.interval);
    text_ += ",\"cost_ns\":";
    std::array<char, 32> digits{};
    const auto [end, fault] =
        std::to_chars(digits.data(), digits.data() + digits.size(), info.cost_ns_per_event);
    text_.append(digits.data(), end);
    end_line();
  }
  void lane(std::int64_t number_of, const Lane& lane) {
    text_ += "{\"lane\":";
    append_integer(text_, number_of);
    words("label", lane.label);
    if (lane.kind == LaneKind::host) words("kind", "host");
    if (lane.process != 0) number("process", lane.process);
    if (lane.track != number_of) number("track", lane.track);
    end_line();
  }
  template <class Ranks>
  void group(std::int64_t number_of, std::string_view name, const Ranks& ranks) {
    text_ += "{\"group\":";
    append_integer(text_, number_of);
    words("name", name);
    text_ += ",\"ranks\":[";
    bool first = true;
    for (const auto rank : ranks) {
      if (!first) text_ += ',';
      append_integer(text_, rank);
      first = false;
    }
    text_ += ']';
    end_line();
  }
  void anchor(const ClockAnchor& anchor) {
    text_ += "{\"anchor\":";
    append_integer(text_, anchor.clock_ns);
    number("realtime", anchor.realtime_ns);
    number("width", anchor.width_ns);
    end_line();
  }
  void device(const DeviceState& state) {
    text_ += "{\"device\":";
    append_integer(text_, state.at);
    some("mhz", state.sm_mhz);
    some("celsius", state.temperature_c);
    some("busy", state.busy_percent);
    some("milliwatts", state.power_mw);
    if (state.clock_limits != 0) number("limits", state.clock_limits);
    end_line();
  }
  void begin_event(Nanoseconds begin, Nanoseconds end, std::string_view name, std::string_view kind,
                   std::int64_t lane) {
    text_ += "{\"b\":";
    append_integer(text_, begin);
    number("d", end - begin);
    words("n", name);
    words("k", kind);
    number("l", lane);
  }
  void end_event() { end_line(); }
  void totals(const RecordingTotals& totals) {
    text_ += "{\"recorded\":";
    append_integer(text_, totals.recorded);
    number("dropped", totals.dropped);
    end_line();
  }

  void number(std::string_view key, std::int64_t value) {
    text_ += ",\"";
    text_ += key;
    text_ += "\":";
    append_integer(text_, value);
  }
  /// A number that is left out where it is negative.
  void some(std::string_view key, std::int64_t value) {
    if (value >= 0) number(key, value);
  }
  void words(std::string_view key, std::string_view value) {
    text_ += ",\"";
    text_ += key;
    text_ += "\":";
    append_json_string(text_, value);
  }

 private:
  void end_line() { text_ += "}\n"; }

  std::string text_;
};

}  // namespace detail

/// Writes a rank's recording to a file as it comes. No allocation an event: lines are built in a
/// buffer that goes to the file when it holds 64 KiB, and at flush().
class OwnFormatWriter final : public RecordSink {
 public:
  /// @throws Error(not_durable): the file cannot be made; so do all others that write to it
  explicit OwnFormatWriter(std::string path)
      : path_(std::move(path)), file_(std::fopen(path_.c_str(), "wb"), &std::fclose) {
    expects(file_ != nullptr, ErrorCode::not_durable,
            [&] { return "the trace file " + path_ + " cannot be made"; });
    lines_.text().reserve(buffer_size + 4096);
  }

  void start(const RecordingInfo& info) override {
    lines_.header(info);
    flush();
  }
  void lane(int lane, std::string_view label) override {
    Lane made;
    made.track = lane;
    made.label = label;
    lines_.lane(lane, made);
  }
  void group(int group, std::string_view name, std::span<const int> ranks) override {
    lines_.group(group, name, ranks);
  }
  void anchor(const ClockAnchor& anchor) override { lines_.anchor(anchor); }
  void record(const Record& r) override {
    lines_.begin_event(r.begin, r.end, r.name, to_string(event_kind(r.kind)), r.lane);
    lines_.some("s", r.step);
    lines_.some("m", r.microbatch);
    lines_.some("c", r.chunk);
    if (r.kind == SpanKind::communication) {
      lines_.some("g", r.group);
      lines_.some("q", r.sequence);
      lines_.some("p", r.peer);
      lines_.some("y", r.bytes);
      if (!r.dtype.empty()) lines_.words("t", r.dtype);
    }
    lines_.end_event();
    if (lines_.text().size() >= buffer_size) write();
  }
  void device(const DeviceState& state) override { lines_.device(state); }
  void flush() override {
    write();
    expects(std::fflush(file_.get()) == 0, ErrorCode::not_durable, [&] { return full(); });
  }
  void finish(const RecordingTotals& totals) override {
    lines_.totals(totals);
    flush();
  }

 private:
  static constexpr std::size_t buffer_size = std::size_t{1} << 16U;

  void write() {
    std::string& text = lines_.text();
    const std::size_t size = text.size();
    const std::size_t written = std::fwrite(text.data(), 1, size, file_.get());
    text.clear();
    expects(written == size, ErrorCode::not_durable, [&] { return full(); });
  }
  [[nodiscard]] std::string full() const {
    return "the trace file " + path_ + " takes no more bytes: is its disk full?";
  }

  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  detail::OwnFormatLines lines_;
};

}  // namespace mega::inline v0::scan
