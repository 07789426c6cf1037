/// @file  Writes a Trace as Perfetto protobuf, for ui.perfetto.dev and its trace processor: a
/// process a rank, a track a stream (further ones where slices overlap partially), 64-bit flows
/// between the members of matched operations and from launches to device work. Names are interned:
/// 60 to 75 bytes an event with all its properties, a third of Chrome JSON.
///
/// Needs protozero. Source: Perfetto's schema, protos/perfetto/trace/.
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/chrome_json.hpp>
#include <mega/scan/detail/rows.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <protozero/pbf_writer.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mega::inline v0::scan {

namespace detail {

/// Field numbers of Perfetto's messages.
namespace field {
enum Trace : protozero::pbf_tag_type { packet = 1 };
enum TracePacket : protozero::pbf_tag_type {
  timestamp = 8,
  sequence_id = 10,
  track_event = 11,
  interned_data = 12,
  sequence_flags = 13,
  track_descriptor = 60,
};
enum TrackDescriptor : protozero::pbf_tag_type {
  uuid = 1,
  track_name = 2,
  process = 3,
  parent_uuid = 5,
  child_ordering = 11,
  sibling_order_rank = 12,
  process_ordering = 19,
};
enum ProcessDescriptor : protozero::pbf_tag_type { pid = 1, process_name = 6 };
enum TrackEvent : protozero::pbf_tag_type {
  category_iids = 3,
  debug_annotations = 4,
  type = 9,
  name_iid = 10,
  track_uuid = 11,
  flow_ids = 47,
  terminating_flow_ids = 48,
};
enum DebugAnnotation : protozero::pbf_tag_type {
  annotation_name_iid = 1,
  int_value = 4,
  string_value_iid = 17,
};
enum InternedData : protozero::pbf_tag_type {
  event_categories = 1,
  event_names = 2,
  annotation_names = 3,
  annotation_strings = 29,
};
enum InternedString : protozero::pbf_tag_type { iid = 1, string = 2 };
}  // namespace field

template <byte_sink Sink>
class PerfettoWriter {
 public:
  PerfettoWriter(const Trace& trace, const Matches& matches, const Alignment& alignment, Sink& sink)
      : t_(trace),
        alignment_(alignment),
        flows_(trace, matches, alignment),
        sink_(sink),
        shift_(std::max<Nanoseconds>(0, -earliest(trace, alignment))) {
    event_names_.assign(t_.names.size(), 0);
    group_names_.assign(t_.groups.size(), 0);
    dtypes_.assign(t_.names.size(), 0);
  }

  void run() {
    if (!t_.ranks.empty()) describe_root();
    for (std::size_t r = 0; r < t_.ranks.size(); ++r) describe_rank(r);
    for_each_row(t_, alignment_,
                 [&](TableIndex lane, std::size_t overflow, std::span<const Slice> slices) {
                   write_row(t_.lanes[lane], overflow, slices);
                 });
    flush();
  }

 private:
  using Writer = protozero::pbf_writer;

  static constexpr std::uint32_t sequence = 1;  // all packets are of one writer
  enum SequenceFlag : std::uint32_t { state_cleared = 1, needs_state = 2 };
  enum EventType : std::int32_t { slice_begin = 1, slice_end = 2 };
  static constexpr std::int32_t explicit_child_order = 3;
  static constexpr std::int32_t explicit_process_order = 1;

  /// Tables of interned strings, in the order of their fields.
  enum Table : std::uint8_t { categories, names, annotations, strings, table_count };

  void flush() {
    sink_(std::string_view(out_));
    out_.clear();
  }
  /// Appends packet_ to the file.
  void finish_packet() {
    Writer(out_).add_message(field::packet, packet_);
    packet_.clear();
    if (out_.size() > (std::size_t{1} << 16U)) flush();
  }

  /// Tracks need ids; 0 is taken by the root.
  [[nodiscard]] static std::uint64_t track_of_rank(std::size_t rank_index) noexcept {
    return static_cast<std::uint64_t>(rank_index) + 1;
  }

  /// Begins the state of strings, and has processes ordered by rank.
  void describe_root() {
    {
      Writer packet(packet_);
      packet.add_uint32(field::sequence_id, sequence);
      packet.add_uint32(field::sequence_flags, state_cleared);
      Writer track(packet, field::track_descriptor);
      track.add_uint64(field::uuid, 0);
      track.add_enum(field::process_ordering, explicit_process_order);
    }
    finish_packet();
  }

  void describe_rank(std::size_t r) {
    std::string label;
    append_utf8(label, rank_label(t_.ranks[r]));
    {
      Writer packet(packet_);
      packet.add_uint32(field::sequence_id, sequence);
      Writer track(packet, field::track_descriptor);
      track.add_uint64(field::uuid, track_of_rank(r));
      {
        Writer process(track, field::process);
        process.add_int32(field::pid, static_cast<std::int32_t>(r) + 1);
        process.add_string(field::process_name, label);
      }
      track.add_enum(field::child_ordering, explicit_child_order);
      track.add_int32(field::sibling_order_rank, std::max(0, t_.ranks[r].rank));
    }
    finish_packet();
  }

  void write_row(const Lane& lane, std::size_t overflow, std::span<const Slice> slices) {
    const std::uint64_t track = track_of_rank(t_.ranks.size()) + rows_;
    std::string label;
    append_utf8(label, row_label(lane, overflow));
    {
      Writer packet(packet_);
      packet.add_uint32(field::sequence_id, sequence);
      Writer descriptor(packet, field::track_descriptor);
      descriptor.add_uint64(field::uuid, track);
      descriptor.add_string(field::track_name, label);
      descriptor.add_uint64(field::parent_uuid, track_of_rank(lane.rank));
      descriptor.add_int32(field::sibling_order_rank, static_cast<std::int32_t>(rows_));
    }
    finish_packet();
    ++rows_;
    std::vector<Nanoseconds> open;
    for (const Slice& slice : slices) {
      close_until(slice.begin, open, track);
      write_begin(slice, track);
      open.push_back(slice.end);
    }
    close_until(std::numeric_limits<Nanoseconds>::max(), open, track);
  }

  /// Ends come before begins at the same time, so that neighbours do not nest.
  void close_until(Nanoseconds time, std::vector<Nanoseconds>& open, std::uint64_t track) {
    while (!open.empty() && open.back() <= time) {
      Writer packet(packet_);
      packet.add_uint64(field::timestamp, stamp(open.back()));
      packet.add_uint32(field::sequence_id, sequence);
      packet.add_uint32(field::sequence_flags, needs_state);
      {
        Writer event(packet, field::track_event);
        event.add_enum(field::type, slice_end);
        event.add_uint64(field::track_uuid, track);
      }
      finish_packet();
      open.pop_back();
    }
  }

  [[nodiscard]] std::uint64_t stamp(Nanoseconds t) const noexcept {
    return static_cast<std::uint64_t>(t + shift_);
  }

  /// The number of a string; if new, it goes into this packet's interned data.
  std::uint64_t intern(Table table, std::uint64_t& known, std::string_view text) {
    if (known != 0) return known;
    known = ++interned_[table];
    std::string valid;
    append_utf8(valid, text);
    std::string entry;
    Writer writer(entry);
    writer.add_uint64(field::iid, known);
    writer.add_bytes(field::string, valid);
    constexpr std::array<field::InternedData, table_count> fields{
        field::event_categories, field::event_names, field::annotation_names,
        field::annotation_strings};
    Writer(new_strings_).add_message(fields[table], entry);
    return known;
  }

  void annotate(Writer& event, std::string_view name, std::int64_t value) {
    if (value < 0) return;
    const std::uint64_t id = intern(annotations, annotation_names_[name], name);
    Writer annotation(event, field::debug_annotations);
    annotation.add_uint64(field::annotation_name_iid, id);
    annotation.add_int64(field::int_value, value);
  }
  void annotate(Writer& event, std::string_view name, std::uint64_t& known,
                std::string_view value) {
    const std::uint64_t id = intern(annotations, annotation_names_[name], name);
    const std::uint64_t text = intern(strings, known, value);
    Writer annotation(event, field::debug_annotations);
    annotation.add_uint64(field::annotation_name_iid, id);
    annotation.add_uint64(field::string_value_iid, text);
  }

  void write_begin(const Slice& slice, std::uint64_t track) {
    const Event& e = t_.events[slice.event];
    event_.clear();
    {
      Writer event(event_);
      event.add_enum(field::type, slice_begin);
      event.add_uint64(field::track_uuid, track);
      event.add_uint64(
          field::category_iids,
          intern(categories, kind_names_[static_cast<std::size_t>(e.kind)], to_string(e.kind)));
      if (e.name != none)
        event.add_uint64(field::name_iid, intern(names, event_names_[e.name], t_.names[e.name]));
      for (const FlowEnd& flow : flows_.of(slice.event)) {
        event.add_fixed64(
            flow.role == FlowRole::end ? field::terminating_flow_ids : field::flow_ids, flow.id);
      }
      annotate(event, "step", e.step);
      annotate(event, "microbatch", e.microbatch);
      annotate(event, "chunk", e.chunk);
      if (e.detail != none) {
        const Communication& c = t_.communications[e.detail];
        annotate(event, "op", op_names_[static_cast<std::size_t>(c.op)], to_string(c.op));
        if (c.group != none)
          annotate(event, "group", group_names_[c.group], t_.groups[c.group].name);
        annotate(event, "sequence", c.sequence);
        annotate(event, "peer", c.peer);
        annotate(event, "bytes", c.bytes);
        if (c.dtype != none) annotate(event, "dtype", dtypes_[c.dtype], t_.names[c.dtype]);
      }
    }
    Writer packet(packet_);
    packet.add_uint64(field::timestamp, stamp(slice.begin));
    packet.add_uint32(field::sequence_id, sequence);
    packet.add_uint32(field::sequence_flags, needs_state);
    if (!new_strings_.empty()) packet.add_message(field::interned_data, new_strings_);
    new_strings_.clear();
    packet.add_message(field::track_event, event_);
    finish_packet();
  }

  const Trace& t_;
  const Alignment& alignment_;
  Flows flows_;
  Sink& sink_;
  Nanoseconds shift_;  // stamps are unsigned: an earliest time below 0 becomes 0
  std::string out_, packet_, event_, new_strings_;
  std::uint64_t rows_ = 0;
  // Numbers of interned strings; 0: not yet written.
  std::array<std::uint64_t, table_count> interned_{};
  std::vector<std::uint64_t> event_names_, group_names_, dtypes_;
  std::array<std::uint64_t, 16> kind_names_{}, op_names_{};
  std::unordered_map<std::string_view, std::uint64_t> annotation_names_;  // of literals
};

}  // namespace detail

/// The sink gets the file in pieces of about 64 KiB. Time is aligned, in nanoseconds; if the
/// earliest lies before 0, all are shifted to begin there. Memory and cost as write_chrome_json.
template <byte_sink Sink>
void write_perfetto(const Trace& trace, const Matches& matches, const Alignment& alignment,
                    Sink&& sink) {
  detail::PerfettoWriter(trace, matches, alignment, sink).run();
}

}  // namespace mega::inline v0::scan
