/// @file  Lanes: streams and threads of one file, their labels, and spans that are still open.
#pragma once
#include <mega/scan/decimal.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/kineto/hash.hpp>
#include <mega/scan/kineto/names.hpp>
#include <mega/scan/kineto/record.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::kineto {

class Lanes {
 public:
  /// @param rank  index into Trace::ranks, of all lanes
  Lanes(Trace& trace, Names& names, TableIndex rank)
      : t_(trace), names_(names), rank_(rank), first_(trace.lanes.size()) {}

  /// The lane of the record's process and track; made if new, as a host's.
  [[nodiscard]] TableIndex of(const Record& r) {
    const std::pair key{number_of(r.process), number_of(r.track)};
    Recent& recent = recent_[PairHash{}(key) >> 32U & (recent_.size() - 1)];
    if (recent.lane != none && recent.key == key) return recent.lane;
    const auto [at, is_new] = index_.try_emplace(key, static_cast<TableIndex>(t_.lanes.size()));
    if (is_new) {
      Lane lane;
      lane.rank = rank_;
      lane.process = key.first;
      lane.track = key.second;
      lane.kind = LaneKind::host;
      if (key.second < -1) lane.label = unescape(r.track.text, scratch_);
      t_.lanes.push_back(std::move(lane));
      states_.emplace_back();
    }
    recent = {key, at->second};
    return at->second;
  }

  /// A span began on the lane, whether it is complete or not.
  void note_begin(TableIndex lane, Nanoseconds begin) {
    State& state = states_[lane - first_];
    state.last_begin = std::max(state.last_begin, begin);
  }
  /// A span whose end is a record of its own. @param event  of the span
  void open(TableIndex lane, TableIndex event) { states_[lane - first_].open.push_back(event); }
  /// @return the event that was opened last; none: none is open
  [[nodiscard]] TableIndex close(TableIndex lane) {
    std::vector<TableIndex>& open = states_[lane - first_].open;
    if (open.empty()) return none;
    const TableIndex event = open.back();
    open.pop_back();
    return event;
  }
  /// What never ended did so when the last span of its lane began.
  void close_all() {
    for (State& lane : states_) {
      for (const TableIndex event : lane.open) {
        t_.events[event].end = std::max(t_.events[event].begin, lane.last_begin);
        t_.completeness.window_truncated = true;
      }
      lane.open = {};
    }
  }

  /// The record is metadata; labels come before or behind the spans of their lane.
  void note_label(const Record& r) {
    if (r.name.raw != "thread_name" || r.label.raw.empty()) return;
    if (labels_.size() >= label_limit) return;
    const std::string_view text = unescape(r.label, scratch_);
    labels_.push_back({number_of(r.process), number_of(r.track),
                       static_cast<std::uint32_t>(label_text_.size()),
                       static_cast<std::uint32_t>(text.size())});
    label_text_ += text;
  }
  void settle_labels() {
    for (const Label& label : labels_) {
      const auto lane = index_.find({label.process, label.track});
      if (lane != index_.end())
        t_.lanes[lane->second].label = label_text_.substr(label.offset, label.length);
    }
    labels_ = {};
    label_text_ = {};
  }

 private:
  struct State {
    Nanoseconds last_begin = std::numeric_limits<Nanoseconds>::min();
    std::vector<TableIndex> open;
  };
  struct Label {
    std::int64_t process, track;
    std::uint32_t offset, length;  // into label_text_
  };
  struct Recent {
    std::pair<std::int64_t, std::int64_t> key;  // process and track
    TableIndex lane = none;
  };

  [[nodiscard]] std::int64_t number_of(const Place& place) {
    if (place.plain) return place.number;
    const std::string_view text = place.text.raw;
    const Decimal number = parse_decimal(text);
    if (number.fault == DecimalFault::no_fault) return number.value;
    if (!place.quoted || text.empty()) {
      // Thread identities of up to 64 bits without sign keep their bits.
      std::uint64_t value = 0;
      for (const char c : text)
        value = value * 10 + static_cast<std::uint64_t>(detail::is_digit(c) ? c - '0' : 0);
      return static_cast<std::int64_t>(value);
    }
    return -2 - static_cast<std::int64_t>(names_.intern(place.text));
  }

  static constexpr std::size_t label_limit = std::size_t{1} << 20U;

  Trace& t_;
  Names& names_;
  TableIndex rank_;
  std::size_t first_;  // lane of this file
  std::unordered_map<std::pair<std::int64_t, std::int64_t>, TableIndex, PairHash> index_;
  std::vector<State> states_;  // by lane of this file
  std::array<Recent, 64> recent_{};
  std::vector<Label> labels_;
  std::string label_text_, scratch_;
};

}  // namespace mega::inline v0::scan::kineto
