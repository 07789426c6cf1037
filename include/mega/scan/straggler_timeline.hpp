/// @file  Importer of StragglerAnalysis timelines: all ranks of a job in one file of Chrome
/// records, a process a data-parallel rank and five threads a rank (compute, pp-comm, tp-comm,
/// dp-comm, misc), whose names say stage and tensor rank. Names of records say the kind of work.
///
/// Who takes part in a communication follows from its name, as in the tool that wrote the file:
/// gradients and parameters meet along the data axis, embeddings on the first and last stage,
/// layer norms along the tensor axis, clipping everywhere; transfers go to neighbouring stages.
/// Where the file is cut before the names of threads, which stand at its end, ranks have no place
/// and their communications no partners.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/communication_name.hpp>
#include <mega/scan/detail/event_records.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

[[nodiscard]] inline bool looks_like_straggler_timeline(std::string_view head) noexcept {
  const auto has = [&](std::string_view key) { return head.find(key) != std::string_view::npos; };
  return has("\"mb_id\"") && has("\"seq_id\"") && has("\"step\"");
}

namespace detail {

class StragglerTimelineImport {
 public:
  StragglerTimelineImport(Trace& trace, Source& source)
      : t_(trace),
        source_(source),
        first_(trace.communications.size()),
        first_rank_(trace.ranks.size()) {}

  void run() {
    JsonScanner scanner(source_, t_.defects);
    for_each_record(
        scanner, t_.defects,
        [&] {
          step_ = chunk_ = microbatch_ = sequence_ = -1;
          label_.clear();
        },
        [&](std::string_view key, JsonScanner& s) { take_argument(key, s); },
        [&](const EventRecord& record) { take(record); });
    make_ranks();
    make_groups();
  }

 private:
  static constexpr std::int64_t threads_per_rank = 5;
  static constexpr std::int64_t sequences_per_step = 1'000'000;

  void take_argument(std::string_view key, JsonScanner& s) {
    if (key == "step") {
      step_ = argument_number(s);
    } else if (key == "model_chunk") {
      chunk_ = argument_number(s);
    } else if (key == "mb_id") {
      microbatch_ = argument_number(s);
    } else if (key == "seq_id") {
      sequence_ = argument_number(s);
    } else if (key == "name" && s.kind() == JsonScanner::Kind::text) {
      label_ = std::string(unescape(s.text(), scratch_));
    } else {
      s.skip();
    }
  }

  void take(const EventRecord& r) {
    if (r.phase == 'M') {
      if (r.name == "thread_name") labels_[{r.pid, r.tid}] = label_;
      return;
    }
    if (r.phase != 'X' || !r.timed) {
      ++t_.defects.malformed_records;
      return;
    }
    Event e;
    e.begin = r.begin;
    e.end = end_of(r.begin, r.duration, t_.defects);
    // The writer has ends measured and counts begins of transfers back from them.
    if (r.duration < 0 && r.begin > -last_time - r.duration) e.begin = e.end = r.begin + r.duration;
    e.name = t_.names.intern(r.name);
    e.lane = lane_of(r.pid, r.tid);
    e.step = as_index(step_);
    e.microbatch = as_index(microbatch_);
    e.chunk = chunk_ >= 0 && chunk_ < 0x7FFF ? static_cast<std::int16_t>(chunk_) : std::int16_t{-1};
    e.kind = kind_of(r.name);
    const auto at = static_cast<TableIndex>(t_.events.push_back(e));
    if (e.kind != EventKind::communication) return;
    Communication c;
    c.op = r.name == "optimizer-clip-main-grad" ? CommunicationOp::all_reduce
                                                : communication_of(r.name);
    if (step_ >= 0 && step_ < (std::int64_t{1} << 40U) && sequence_ >= 0 &&
        sequence_ < sequences_per_step) {
      c.sequence = step_ * sequences_per_step + sequence_;
    }
    t_.attach(at, c);
  }

  [[nodiscard]] static EventKind kind_of(std::string_view name) noexcept {
    if (name == "forward-compute") return EventKind::forward;
    if (name == "backward-compute") return EventKind::backward;
    if (name == "backward-wgrad-compute") return EventKind::weight;
    if (name == "optimizer" || name == "optimizer-inner-step") return EventKind::optimizer;
    if (name == "gc" || name == "data-load") return EventKind::host_op;
    if (name == "data-sync") return EventKind::synchronize;
    if (name == "optimizer-clip-main-grad" || communication_of(name) != CommunicationOp::unknown) {
      return EventKind::communication;
    }
    return EventKind::other;
  }

  TableIndex lane_of(std::int64_t pid, std::int64_t tid) {
    const auto [at, is_new] = threads_.try_emplace({pid, tid}, none);
    if (is_new) {
      at->second = static_cast<TableIndex>(t_.lanes.size());
      Lane lane;
      lane.process = pid;
      lane.track = tid;
      t_.lanes.push_back(std::move(lane));
    }
    return at->second;
  }

  /// Names of threads stand behind the events: only now it is known whose they are.
  void make_ranks() {
    std::map<std::int64_t, TableIndex> ranks;  // by global rank
    std::map<std::int64_t, std::int64_t> replica;
    for (const auto& [key, lane] : threads_) replica[key.second / threads_per_rank] = key.first;
    for (const auto& [number, pid] : replica) {
      ranks[number] = static_cast<TableIndex>(t_.ranks.size());
      Rank rank;
      rank.rank = as_index(number);
      rank.data = as_index(pid);
      rank.source = source_.name();
      rank.clock = source_.name();  // the writer has put all ranks into one time
      t_.ranks.push_back(std::move(rank));
    }
    for (const auto& [key, lane] : threads_) {
      const TableIndex owner = ranks[key.second / threads_per_rank];
      t_.lanes[lane].rank = owner;
      const auto label = labels_.find(key);
      if (label == labels_.end()) continue;
      Rank& rank = t_.ranks[owner];
      rank.pipeline = number_behind(label->second, "PP rank ");
      rank.tensor = number_behind(label->second, "TP rank ");
      const std::size_t comma = label->second.rfind(", ");
      t_.lanes[lane].label =
          comma == std::string::npos ? label->second : label->second.substr(comma + 2);
    }
    mark_lost_places();
  }
  void mark_lost_places() {
    std::size_t lost = 0;
    for (std::size_t r = first_rank_; r < t_.ranks.size(); ++r) {
      t_.ranks[r].is_place_lost = t_.ranks[r].pipeline < 0;
      lost += t_.ranks[r].is_place_lost ? 1 : 0;
    }
    if (lost == 0) return;
    t_.notes.push_back(sentence(source_.name(), " does not say which stages ", lost, " of its ",
                                t_.ranks.size() - first_rank_,
                                " ranks are of: the names of their threads, which stand at its "
                                "end, are missing"));
  }
  [[nodiscard]] static std::int32_t number_behind(std::string_view text, std::string_view word) {
    const std::size_t at = text.find(word);
    if (at == std::string_view::npos) return -1;
    std::int32_t number = -1;
    std::from_chars(text.data() + at + word.size(), text.data() + text.size(), number);
    return number < (1 << 20) ? std::max(number, -1) : -1;
  }

  /// Which coordinates the members of a communication share.
  enum class Axis : std::uint8_t { data, tensor, ends, all, forward, backward };
  [[nodiscard]] static Axis axis_of(std::string_view name) noexcept {
    if (name.starts_with("forward-")) return Axis::forward;
    if (name.starts_with("backward-")) return Axis::backward;
    if (name.starts_with("embedding-")) return Axis::ends;
    if (name.starts_with("layernorm-") || name.starts_with("tp-")) return Axis::tensor;
    if (name.starts_with("optimizer-")) return Axis::all;
    return Axis::data;
  }

  /// What the members of a group have in common; `any` where they differ.
  using Key = std::tuple<Axis, std::int32_t, std::int32_t, std::int32_t>;
  static constexpr std::int32_t any = -2;

  [[nodiscard]] Key key_of(Axis axis, const Rank& r) const {
    switch (axis) {
      case Axis::data: return {axis, any, r.pipeline, r.tensor};
      case Axis::tensor: return {axis, r.data, r.pipeline, any};
      case Axis::ends: {
        const bool end = r.pipeline == 0 || r.pipeline == stages_ - 1;
        return {axis, r.data, end ? any : r.pipeline, r.tensor};
      }
      case Axis::all: return {axis, any, any, r.tensor};
      case Axis::forward:
      case Axis::backward: break;
    }
    return {axis, r.data, any, r.tensor};
  }

  [[nodiscard]] static std::string name_of(const Key& key) {
    constexpr std::array<std::string_view, 6> axes{"data", "tensor",  "embedding",
                                                   "all",  "forward", "backward"};
    const auto& [axis, data, pipeline, tensor] = key;
    std::string name(axes[static_cast<std::size_t>(axis)]);
    if (pipeline != any) name += sentence(" of stage ", pipeline);
    if (data != any) name += sentence(" of dp ", data);
    if (tensor > 0) name += sentence(" of tp ", tensor);
    return name;
  }

  void make_groups() {
    std::map<Key, std::vector<std::int32_t>> members;
    for (std::size_t r = first_rank_; r < t_.ranks.size(); ++r)
      stages_ = std::max(stages_, t_.ranks[r].pipeline + 1);
    for (std::size_t r = first_rank_; r < t_.ranks.size(); ++r) {
      const Rank& rank = t_.ranks[r];
      if (rank.is_place_lost) continue;
      by_place_[{rank.data, rank.pipeline, rank.tensor}] = rank.rank;
      for (const Axis axis :
           {Axis::data, Axis::tensor, Axis::ends, Axis::all, Axis::forward, Axis::backward}) {
        members[key_of(axis, rank)].push_back(rank.rank);
      }
    }
    std::map<Key, TableIndex> groups;
    for (std::size_t i = first_; i < t_.communications.size(); ++i) {
      Communication& c = t_.communications[i];
      const Event& e = t_.events[c.event];
      const Rank& rank = t_.ranks[t_.rank_index(e)];
      if (rank.is_place_lost) {
        c.group = t_.intern_group(sentence("unknown, of rank ", rank.rank), {});
        continue;
      }
      const Axis axis = axis_of(t_.name(e));
      const Key key = key_of(axis, rank);
      const auto [at, is_new] = groups.try_emplace(key, none);
      if (is_new) {
        std::vector<std::int32_t>& of = members[key];
        std::sort(of.begin(), of.end());
        at->second = t_.intern_group(name_of(key), of);
      }
      c.group = at->second;
      if (c.op == CommunicationOp::send || c.op == CommunicationOp::recv) {
        const bool up = (c.op == CommunicationOp::send) == (axis == Axis::forward);
        c.peer = neighbour(rank, up ? 1 : -1);
      }
    }
  }

  [[nodiscard]] std::int32_t neighbour(const Rank& of, std::int32_t by) const {
    if (of.pipeline < 0 || stages_ < 2) return -1;
    const auto at = by_place_.find({of.data, (of.pipeline + by + stages_) % stages_, of.tensor});
    return at == by_place_.end() ? -1 : at->second;
  }

  Trace& t_;
  Source& source_;
  std::size_t first_;       // communication of this file
  std::size_t first_rank_;  // of this file
  std::int32_t stages_ = 0;
  std::map<std::pair<std::int64_t, std::int64_t>, TableIndex> threads_;  // lanes
  std::map<std::pair<std::int64_t, std::int64_t>, std::string> labels_;
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::int32_t> by_place_;
  std::int64_t step_ = -1, chunk_ = -1, microbatch_ = -1, sequence_ = -1;
  std::string label_, scratch_;
};

}  // namespace detail

/// Adds all ranks of the file, on one clock. Negative durations become none and are counted.
inline void import_straggler_timeline(Trace& trace, Source& source, const ImportOptions&) {
  detail::StragglerTimelineImport(trace, source).run();
}

}  // namespace mega::inline v0::scan
