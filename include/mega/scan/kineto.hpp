/// @file  Importer of Chrome trace JSON as Kineto (torch.profiler) and its relatives write it.
///
/// One record becomes one Event where it spans time: X, B with its E, and instants. Flows are only
/// checked, since correlation numbers say more; counters and asynchronous spans are passed over
/// with a note. Streams become device lanes and threads host lanes. Memory beside the Trace is 8
/// bytes for an end of a flow; then, one after the other, 8 for a record with a correlation and 4
/// for an event. Until calls and kernels are joined, an event's `launch` holds its correlation.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/communication_name.hpp>
#include <mega/scan/decimal.hpp>
#include <mega/scan/detail/rank_name.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

namespace detail {

/// What a name alone says of a record.
struct NameFacts {
  bool known = false;
  bool communicates = false;
  bool synchronizes = false;
  bool launches = false;
  CommunicationOp op = CommunicationOp::unknown;
  std::int32_t step = -1;  // of "ProfilerStep#N"
};

[[nodiscard]] inline bool holds(std::string_view text, std::string_view part) noexcept {
  return text.find(part) != std::string_view::npos;
}

/// Kernels of communication libraries: NCCL and RCCL, expert-parallel dispatch and combine, and the
/// one-shot all-reduces of inference engines.
[[nodiscard]] inline bool is_communication_kernel(std::string_view name) noexcept {
  const std::string_view function = name.substr(0, name.find('('));
  for (const std::string_view part : {"ncclKernel", "ncclDevKernel", "ncclSymk", "rcclKernel"}) {
    if (holds(function, part)) return true;
  }
  if (function.starts_with("nccl") || function.starts_with("rccl")) return true;
  const bool experts = holds(function, "::ep::") || holds(function, "deep_ep");
  if (experts) return !holds(function, "layout");
  for (const std::string_view part :
       {"cross_device_reduce", "allreduce_fusion", "one_shot_all_reduce", "two_shot_all_reduce",
        "multimem_all_reduce", "multimem_one_shot", "mscclpp", "nvshmem"}) {
    if (holds(function, part)) return true;
  }
  return false;
}

[[nodiscard]] inline NameFacts facts_of(std::string_view name) {
  NameFacts facts;
  facts.known = true;
  facts.communicates = is_communication_kernel(name);
  if (facts.communicates) {
    facts.op = communication_of(name.substr(0, name.find('(')));
    if (holds(name, "dispatch") || holds(name, "combine")) facts.op = CommunicationOp::all_to_all;
    if (holds(name, "notify")) facts.op = CommunicationOp::barrier;
    if (holds(name, "cross_device_reduce")) facts.op = CommunicationOp::all_reduce;
  }
  facts.synchronizes = holds(name, "Synchronize") || holds(name, "WaitEvent") ||
                       holds(name, "WaitExternal") || holds(name, " Sync");
  facts.launches = !facts.synchronizes &&
                   (holds(name, "Launch") || holds(name, "Memcpy") || holds(name, "Memset"));
  constexpr std::string_view step = "ProfilerStep#";
  if (name.starts_with(step)) {
    const Decimal number = parse_decimal(name.substr(step.size()));
    if (number.fault == DecimalFault::no_fault && number.value >= 0 &&
        number.value <= std::numeric_limits<std::int32_t>::max())
      facts.step = static_cast<std::int32_t>(number.value);
  }
  return facts;
}

enum class KinetoCategory : std::uint8_t {
  other,
  host,        ///< operators, Python functions, overhead
  annotation,  ///< user ranges on the host
  runtime,     ///< calls of the runtime or the driver
  kernel,
  copy,  ///< memcpy, memset
  device_annotation,
  device_wait,
};

[[nodiscard]] inline KinetoCategory parse_category(std::string_view text) noexcept {
  using enum KinetoCategory;
  if (text == "cpu_op" || text == "python_function" || text == "Operator" || text == "overhead")
    return host;
  if (text == "cuda_runtime" || text == "cuda_driver" || text == "Runtime" ||
      text == "hip_runtime" || text == "xpu_runtime" || text == "mtia_runtime")
    return runtime;
  if (text == "kernel" || text == "Kernel" || text == "mtia_ccp_events") return kernel;
  if (text == "user_annotation") return annotation;
  if (text == "gpu_user_annotation") return device_annotation;
  if (text == "gpu_memcpy" || text == "gpu_memset" || text == "Memcpy" || text == "Memset")
    return copy;
  if (text == "cuda_sync") return device_wait;
  return other;
}

[[nodiscard]] constexpr bool on_device(KinetoCategory c) noexcept {
  using enum KinetoCategory;
  return c == kernel || c == copy || c == device_annotation || c == device_wait;
}

/// A list of words that grows in place, where the system can move pages: a vector would hold both
/// its old and its new room while it grows, and twice what it needs in between.
class FlowEnds {
 public:
  void push_back(std::uint64_t word) {
    if (size_ == capacity_) {
      capacity_ += std::max<std::size_t>(1024, capacity_ / 2);
      void* const moved = std::realloc(words_.get(), capacity_ * sizeof word);
      if (moved == nullptr) throw std::bad_alloc();
      (void)words_.release();
      words_.reset(static_cast<std::uint64_t*>(moved));
    }
    words_.get()[size_++] = word;
  }
  [[nodiscard]] std::uint64_t* begin() noexcept { return words_.get(); }
  [[nodiscard]] std::uint64_t* end() noexcept { return words_.get() + size_; }
  void clear() noexcept {
    words_.reset();
    size_ = capacity_ = 0;
  }

 private:
  struct Free {
    void operator()(std::uint64_t* words) const noexcept { std::free(words); }
  };
  std::unique_ptr<std::uint64_t, Free> words_;
  std::size_t size_ = 0, capacity_ = 0;
};

class KinetoImporter {
 public:
  KinetoImporter(Trace& trace, Source& source, const ImportOptions& options)
      : t_(trace),
        source_(source),
        options_(options),
        json_(source, trace.defects),
        first_event_(trace.events.size()),
        first_lane_(trace.lanes.size()),
        rank_index_(static_cast<TableIndex>(trace.ranks.size())) {
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
    if (json_.cut() || !source_.damage().empty()) {
      ++t_.defects.truncated_files;
    }
    close_open_spans();
    name_lanes();
    settle_rank();
    settle_groups();
    count_dangling_flows();
    link_launches();
    count_overlaps();
    assign_steps();
    settle_clock();
    write_notes();
  }

 private:
  /// A process or thread: a number, or a text to be made one.
  struct Place {
    std::int64_t number = 0;
    JsonText text;
    bool plain = false;  // number holds it
    bool quoted = false;
  };
  /// What was read of one record. Texts are views into it.
  struct Record {
    char phase = 0;
    bool has_begin = false, has_id = false;
    KinetoCategory category = KinetoCategory::other;
    std::uint32_t category_hash = 0;
    JsonText name, label;
    Place process, track;
    Nanoseconds begin = 0, duration = 0;
    std::uint64_t id = 0;
    std::uint32_t correlation = none;
  };
  /// What the arguments of a communication kernel say. Filled only where there are any.
  struct Metadata {
    bool any = false;
    std::string_view collective, group, ranks, dtype;
    std::int64_t elements = -1, sequence = -1, source = -1, destination = -1;
    std::int64_t rank_start = -1, rank_stride = -1, size = -1;
  };
  struct LaneState {
    Nanoseconds last_begin = std::numeric_limits<Nanoseconds>::min();
    std::vector<TableIndex> open;  // B without E yet
  };
  /// A correlation and the event that carries it.
  struct Correlated {
    std::uint32_t correlation;
    TableIndex event;
    [[nodiscard]] bool operator<(const Correlated& other) const noexcept {
      return correlation != other.correlation ? correlation < other.correlation
                                              : event < other.event;
    }
  };
  struct PendingLabel {
    std::int64_t process, track;
    std::uint32_t offset, length;
  };
  struct CachedName {
    std::uint64_t hash = 0;
    TableIndex name = none;
  };
  struct CachedLane {
    std::pair<std::int64_t, std::int64_t> key;  // process and track
    TableIndex lane = none;
  };
  struct Step {
    Nanoseconds begin, end;
    std::int32_t number;
  };

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
      read_distributed_info();
    } else if (key == "baseTimeNanoseconds") {
      has_base_ = json_.number(base_);
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
        read_record();
      } else {
        ++t_.defects.malformed_records;
        json_.skip_long();
      }
    }
  }

  void read_distributed_info() {
    json_.enter();
    JsonText key;
    for (json_.start_record(); json_.next_key(key); json_.start_record()) {
      if (key.raw == "rank") {
        std::int64_t rank = -1;
        if (json_.number(rank) && is_rank(rank)) declared_rank_ = static_cast<std::int32_t>(rank);
      } else if (key.raw == "world_size") {
        std::int64_t world = -1;
        if (json_.number(world) && is_rank(world))
          t_.ranks[rank_index_].world = static_cast<std::int32_t>(world);
      } else if (key.raw == "pg_config" && json_.kind() == JsonScanner::Kind::array) {
        json_.enter();
        for (json_.start_record(); json_.next_element(); json_.start_record()) {
          if (json_.kind() == JsonScanner::Kind::object) {
            read_group();
          } else {
            json_.skip_long();
          }
        }
      } else {
        json_.skip_long();
      }
    }
  }

  void read_group() {
    json_.enter();
    JsonText key;
    std::string name;
    std::vector<std::int32_t> ranks;
    for (json_.start_record(); json_.next_key(key); json_.start_record()) {
      const auto kind = json_.kind();
      if (key.raw == "pg_name") {
        name = json_.token();
      } else if (key.raw == "ranks" && kind == JsonScanner::Kind::array) {
        json_.enter();
        for (json_.start_record(); json_.next_element(); json_.start_record()) {
          std::int64_t rank = 0;
          if (json_.number(rank) && is_rank(rank) && ranks.size() < rank_limit)
            ranks.push_back(static_cast<std::int32_t>(rank));
        }
      } else {
        json_.skip_long();
      }
    }
    std::sort(ranks.begin(), ranks.end());
    configured_.push_back(t_.intern_group(name, std::move(ranks)));
  }

  // One record --------------------------------------------------------------------------------

  void read_record() {
    Record record;
    JsonText key;
    metadata_.any = false;
    while (json_.next_key(key)) read_field(record, key.raw);
    if (json_.broken() || json_.cut()) [[unlikely]] {
      if (json_.cut() && !json_.too_long()) return;  // the file ends here
      return json_.give_up_record();
    }
    add(record);
  }

  void read_field(Record& r, std::string_view key) {
    using Kind = JsonScanner::Kind;
    const auto is = [&](std::string_view word) {
      return std::memcmp(key.data(), word.data(), word.size()) == 0;
    };
    switch (key.size()) {
      case 2:
        if (is("ph")) {
          const std::string_view phase = json_.token();
          r.phase = phase.size() == 1 ? phase[0] : '\0';
          return;
        }
        if (is("ts")) {
          r.has_begin = json_.number(r.begin, microseconds);
          return;
        }
        if (is("id")) return read_id(r);
        break;
      case 3:
        if (is("cat")) {
          const std::string_view text = json_.token();
          r.category = parse_category(text);
          r.category_hash = static_cast<std::uint32_t>(quick_hash(text));
          return;
        }
        if (is("pid")) return read_place(r.process);
        if (is("tid")) return read_place(r.track);
        if (is("dur")) {
          (void)json_.number(r.duration, microseconds);
          return;
        }
        break;
      case 4:
        if (is("name")) {
          if (json_.kind() == Kind::text) {
            r.name = json_.text();
          } else {
            json_.skip();
          }
          return;
        }
        if (is("args") && json_.kind() == Kind::object && r.category != KinetoCategory::host) {
          json_.enter();
          metadata_ = {};
          JsonText argument;
          while (json_.next_key(argument)) read_argument(r, argument.raw);
          return;
        }
        break;
      default: break;
    }
    json_.skip();
  }

  void read_id(Record& r) {
    const std::string_view text = json_.token();
    r.has_id = !text.empty();
    r.id = quick_hash(text);
  }

  void read_place(Place& out) {
    out.plain = json_.plain_number(out.number);
    if (out.plain) return;
    out.quoted = json_.kind() == JsonScanner::Kind::text;
    out.text = out.quoted ? json_.text() : JsonText{json_.token(), true};
  }

  void read_argument(Record& r, std::string_view key) {
    const auto is = [&](std::string_view word) {
      return std::memcmp(key.data(), word.data(), word.size()) == 0;
    };
    const auto number = [&](std::int64_t& out) { (void)json_.number(out); };
    const auto text = [&](std::string_view& out) { out = json_.token(); };
    if (r.category == KinetoCategory::host) return json_.skip();
    switch (key.size()) {
      case 3:
        if (is("Seq")) return number(metadata_.sequence);
        break;
      case 4:
        if (is("name") && json_.kind() == JsonScanner::Kind::text) {
          r.label = json_.text();
          return;
        }
        break;
      case 5:
        if (is("dtype")) return text(metadata_.dtype);
        break;
      case 8:
        if (is("Src Rank")) return number(metadata_.source);
        if (is("Dst Rank")) return number(metadata_.destination);
        break;
      case 10:
        if (is("Group size")) return number(metadata_.size);
        break;
      case 11:
        if (is("correlation")) return read_correlation(r);
        break;
      case 13:
        if (is("In msg nelems")) {
          metadata_.any = true;
          return number(metadata_.elements);
        }
        break;
      case 15:
        if (is("Collective name")) {
          metadata_.any = true;
          return text(metadata_.collective);
        }
        break;
      case 17:
        if (is("Global rank start")) return number(metadata_.rank_start);
        break;
      case 18:
        if (is("Process Group Name")) {
          metadata_.any = true;
          return text(metadata_.group);
        }
        if (is("Global rank stride")) return number(metadata_.rank_stride);
        break;
      case 19:
        if (is("Process Group Ranks")) return text(metadata_.ranks);
        break;
      default: break;
    }
    json_.skip();
  }

  /// CUPTI's correlations have 32 bits. Longer ones, and the largest of those, which marks none,
  /// are told apart by their hash.
  void read_correlation(Record& r) {
    const std::string_view text = json_.token();
    if (text.empty()) return;
    std::uint64_t value = 0;
    bool fits = text.size() <= 10;
    for (const char c : text) {
      fits = fits && is_digit(c);
      value = value * 10 + static_cast<std::uint64_t>(c - '0');
    }
    r.correlation =
        static_cast<std::uint32_t>(fits && value < none ? value : quick_hash(text) % none);
  }

  void add(const Record& r) {
    switch (r.phase) {
      case 'X':
      case 'B':
      case 'i':
      case 'I': return add_span(r);
      case 'E': return end_span(r);
      case 'M': return add_label(r);
      case 's':
      case 't':
      case 'f': return add_flow(r);
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
        e.end = sum(r.begin, r.duration);
      }
    }
    e.name = intern(r.name);
    e.lane = lane_of(r);
    const auto at = static_cast<TableIndex>(t_.events.size());
    LaneState& lane = states_[e.lane - first_lane_];
    lane.last_begin = std::max(lane.last_begin, e.begin);
    const NameFacts facts = e.name == none ? NameFacts{} : facts_[e.name];
    if (on_device(r.category)) {
      t_.lanes[e.lane].kind = LaneKind::device;
      any_device_ = true;
    }
    classify(e, r, facts);
    if (r.category == KinetoCategory::runtime) {
      calls_ += r.correlation != none ? 1 : 0;
      e.launch = r.correlation;
    } else if (on_device(r.category)) {
      started_ += r.correlation != none ? 1 : 0;
      e.launch = r.correlation;
    }
    t_.events.push_back(e);
    if (r.phase == 'B') lane.open.push_back(at);
    if (e.kind == EventKind::communication) attach(at, facts);
  }

  void classify(Event& e, const Record& r, const NameFacts& facts) {
    switch (r.category) {
      case KinetoCategory::kernel:
        e.kind =
            facts.communicates || metadata_.any ? EventKind::communication : EventKind::compute;
        break;
      case KinetoCategory::copy: e.kind = EventKind::memory; break;
      case KinetoCategory::device_wait: e.kind = EventKind::synchronize; break;
      case KinetoCategory::host: e.kind = EventKind::host_op; break;
      case KinetoCategory::runtime:
        e.kind = facts.synchronizes ? EventKind::synchronize
                 : facts.launches   ? EventKind::launch
                                    : EventKind::host_op;
        break;
      case KinetoCategory::annotation:
        if (facts.step >= 0) {
          e.kind = EventKind::iteration;
          steps_.push_back({e.begin, e.end, facts.step});
        }
        break;
      default: break;
    }
  }

  void end_span(const Record& r) {
    if (!r.has_begin) {
      ++t_.defects.malformed_records;
      return;
    }
    std::vector<TableIndex>& open = states_[lane_of(r) - first_lane_].open;
    if (open.empty()) {
      ++t_.defects.malformed_records;
      return;
    }
    Event& e = t_.events[open.back()];
    open.pop_back();
    if (r.begin < e.begin) {
      ++t_.defects.negative_durations;
    } else {
      e.end = r.begin;
    }
  }

  void add_label(const Record& r) {
    if (r.name.raw != "thread_name" || r.label.raw.empty()) return;
    if (labels_.size() >= label_limit) return;
    const std::string_view text = unescape(r.label, scratch_);
    labels_.push_back({number_of(r.process), number_of(r.track),
                       static_cast<std::uint32_t>(label_text_.size()),
                       static_cast<std::uint32_t>(text.size())});
    label_text_ += text;
  }

  void add_flow(const Record& r) {
    if (r.phase == 't' || !r.has_id) return;
    const std::uint64_t key = (r.id ^ r.category_hash * 0x9E3779B97F4A7C15ULL) << 1U;
    flows_.push_back(key | (r.phase == 'f' ? 1U : 0U));
  }

  // Communication -----------------------------------------------------------------------------

  void attach(TableIndex event, const NameFacts& facts) {
    Communication c;
    c.op = facts.op;
    if (metadata_.any) {
      const Metadata& m = metadata_;
      const CommunicationOp named = communication_of(m.collective);
      if (named != CommunicationOp::unknown) c.op = named;
      c.sequence = m.sequence;
      if (!m.dtype.empty()) c.dtype = intern({m.dtype, false});
      if (const std::int64_t element = m.dtype == "Char" ? 1 : element_bytes_of(m.dtype);
          element > 0 && m.elements >= 0 && m.elements < (std::int64_t{1} << 59U))
        c.bytes = m.elements * element;
      const std::int64_t peer = c.op == CommunicationOp::recv ? m.source : m.destination;
      if ((c.op == CommunicationOp::send || c.op == CommunicationOp::recv) && is_rank(peer))
        c.peer = static_cast<std::int32_t>(peer);
      if (!m.group.empty() || !m.ranks.empty()) c.group = group_of(m);
    }
    t_.attach(event, c);
  }

  [[nodiscard]] static bool is_rank(std::int64_t value) noexcept {
    return value >= 0 && value <= std::numeric_limits<std::int32_t>::max();
  }

  [[nodiscard]] TableIndex group_of(const Metadata& m) {
    scratch_.assign(m.group).append(1, '\n').append(m.ranks);
    if (const auto known = groups_.find(scratch_); known != groups_.end()) return known->second;
    const std::string key = scratch_;
    std::vector<std::int32_t> ranks;
    if (!holds(m.ranks, "...")) {
      for (std::size_t at = 0; at < m.ranks.size() && ranks.size() < rank_limit;) {
        std::int64_t value = 0;
        const std::size_t from = at;
        for (; at < m.ranks.size() && is_digit(m.ranks[at]) && value < 100000000; ++at)
          value = value * 10 + (m.ranks[at] - '0');
        if (at > from) ranks.push_back(static_cast<std::int32_t>(value));
        at += at == from ? 1 : 0;
      }
    } else if (m.size > 0 && is_rank(m.rank_start) && is_rank(m.rank_stride)) {
      // The list was shortened by the recorder; start and stride are not. All such lists together
      // have a limit: a record that claims many ranks must not make many bytes.
      std::int64_t rank = m.rank_start;
      for (std::int64_t i = 0; i < m.size && is_rank(rank) && claimed_ranks_ < rank_limit; ++i) {
        ranks.push_back(static_cast<std::int32_t>(rank));
        rank += m.rank_stride;
        ++claimed_ranks_;
      }
    }
    std::sort(ranks.begin(), ranks.end());  // intern_group() expects them nearly in order
    const TableIndex group = t_.intern_group(m.group, std::move(ranks));
    groups_.emplace(key, group);
    return group;
  }

  /// Groups whose ranks no kernel named take those of the file's own list.
  void settle_groups() {
    std::unordered_map<TableIndex, TableIndex> better;
    for (const auto& [key, group] : groups_) {
      if (!t_.groups[group].ranks.empty()) continue;
      for (const TableIndex other : configured_) {
        if (t_.groups[other].name == t_.groups[group].name) better.emplace(group, other);
      }
    }
    if (better.empty()) return;
    for (std::size_t i = 0; i < t_.communications.size(); ++i) {
      Communication& c = t_.communications[i];
      if (c.event < first_event_) continue;
      if (const auto found = better.find(c.group); found != better.end()) c.group = found->second;
    }
  }

  // Names and lanes ---------------------------------------------------------------------------

  [[nodiscard]] static std::uint64_t quick_hash(std::string_view text) noexcept {
    constexpr std::uint64_t odd = 0x9E3779B97F4A7C15ULL;
    std::uint64_t hash = text.size() * odd;
    const auto mix = [&](std::uint64_t word) { hash = (hash ^ word) * odd ^ hash >> 29U; };
    const auto word_at = [](const char* at) {
      std::uint64_t word = 0;
      std::memcpy(&word, at, sizeof word);
      return word;
    };
    if (text.size() >= 8) {
      const char* const last = text.data() + text.size() - 8;
      for (const char* at = text.data(); at < last; at += 8) mix(word_at(at));
      mix(word_at(last));  // over the one before, where the length is no multiple
    } else {
      std::uint64_t word = 0;
      for (const char c : text) word = word << 8U | static_cast<unsigned char>(c);
      mix(word);
    }
    return hash ^ hash >> 32U;
  }

  [[nodiscard]] TableIndex intern(const JsonText& text) {
    if (text.raw.empty() && text.plain) return none;
    const std::uint64_t hash = quick_hash(text.raw);
    CachedName& cached = names_[hash % names_.size()];
    if (cached.hash == hash && cached.name != none && text.plain &&
        t_.names[cached.name] == text.raw)
      return cached.name;
    const std::string_view clean = unescape(text, scratch_);
    const TableIndex name = t_.names.intern(clean);
    if (facts_.size() < t_.names.size()) facts_.resize(t_.names.size());
    if (!facts_[name].known) facts_[name] = facts_of(clean);
    cached = {hash, name};
    return name;
  }

  [[nodiscard]] std::int64_t number_of(const Place& place) {
    if (place.plain) return place.number;
    const std::string_view text = place.text.raw;
    const Decimal number = parse_decimal(text);
    if (number.fault == DecimalFault::no_fault) return number.value;
    if (!place.quoted || text.empty()) {
      // Thread identities of up to 64 bits without sign keep their bits.
      std::uint64_t value = 0;
      for (const char c : text)
        value = value * 10 + static_cast<std::uint64_t>(is_digit(c) ? c - '0' : 0);
      return static_cast<std::int64_t>(value);
    }
    return -2 - static_cast<std::int64_t>(intern(place.text));
  }

  [[nodiscard]] TableIndex lane_of(const Record& r) {
    const std::pair key{number_of(r.process), number_of(r.track)};
    CachedLane& cached = recent_lanes_[PairHash{}(key) >> 32U & (recent_lanes_.size() - 1)];
    if (cached.lane != none && cached.key == key) return cached.lane;
    const auto [at, is_new] = lanes_.try_emplace(key, static_cast<TableIndex>(t_.lanes.size()));
    if (is_new) {
      Lane lane;
      lane.rank = rank_index_;
      lane.process = key.first;
      lane.track = key.second;
      lane.kind = LaneKind::host;
      if (key.second < -1) lane.label = unescape(r.track.text, scratch_);
      t_.lanes.push_back(std::move(lane));
      states_.emplace_back();
    }
    cached = {key, at->second};
    return at->second;
  }

  void name_lanes() {
    for (const PendingLabel& label : labels_) {
      const auto lane = lanes_.find({label.process, label.track});
      if (lane != lanes_.end())
        t_.lanes[lane->second].label = label_text_.substr(label.offset, label.length);
    }
    labels_ = {};
    label_text_ = {};
  }

  // After the last record ---------------------------------------------------------------------

  void close_open_spans() {
    for (LaneState& lane : states_) {
      for (const TableIndex event : lane.open) {
        t_.events[event].end = std::max(t_.events[event].begin, lane.last_begin);
        t_.completeness.window_truncated = true;
      }
      lane.open = {};
    }
  }

  void settle_rank() {
    Rank& own = t_.ranks[rank_index_];
    own.rank = options_.rank >= 0 ? options_.rank : declared_rank_;
    if (own.rank >= 0) return;
    // Another file may be a part of the same rank's recording, but not if it has the number by its
    // place.
    const auto taken = [&](std::int32_t rank, bool by_name) {
      for (std::size_t r = 0; r < t_.ranks.size(); ++r) {
        const Rank& other = t_.ranks[r];
        const bool is_part = by_name && rank_in_name(other.source) == rank;
        if (r != rank_index_ && other.rank == rank && !is_part) return true;
      }
      return false;
    };
    ++t_.defects.rank_guessed;
    own.rank = rank_in_name(own.source);
    const bool by_name = own.rank >= 0 && !taken(own.rank, true);
    if (!by_name) {
      own.rank = static_cast<std::int32_t>(rank_index_);
      while (taken(own.rank, false)) ++own.rank;
    }
    t_.notes.push_back(
        sentence(own.source, " does not say its rank; ", own.rank,
                 by_name ? " was taken from its name" : " was taken from its place"));
  }

  [[nodiscard]] static bool is_kernel(const Event& e) noexcept {
    return e.kind == EventKind::compute || e.kind == EventKind::communication;
  }

  /// Calls and what they started, both in the order of their correlations, side by side.
  void link_launches() {
    std::vector<Correlated> calls, started;
    calls.reserve(calls_);
    started.reserve(started_);
    for (std::size_t i = first_event_; i < t_.events.size(); ++i) {
      Event& e = t_.events[i];
      if (e.launch == none) continue;
      const bool waits = e.kind == EventKind::synchronize;
      const bool on_host = waits ? t_.lanes[e.lane].kind == LaneKind::host
                                 : e.kind == EventKind::launch || e.kind == EventKind::host_op;
      (on_host ? calls : started).push_back({e.launch, static_cast<TableIndex>(i)});
      e.launch = none;
    }
    for (std::vector<Correlated>* list : {&calls, &started}) {
      if (!std::is_sorted(list->begin(), list->end())) std::sort(list->begin(), list->end());
    }
    auto call = calls.begin();
    std::uint32_t previous = none;
    for (const Correlated& work : started) {
      while (call != calls.end() && call->correlation < work.correlation) ++call;
      Event& e = t_.events[work.event];
      if (call != calls.end() && call->correlation == work.correlation) e.launch = call->event;
      if (!is_kernel(e)) continue;
      if (previous == work.correlation) ++t_.defects.duplicate_correlations;
      previous = work.correlation;
    }
    for (std::size_t i = first_event_; i < t_.events.size(); ++i) {
      const Event& e = t_.events[i];
      if (is_kernel(e) && e.launch == none) ++t_.defects.kernels_without_launch;
    }
  }

  void count_dangling_flows() {
    std::sort(flows_.begin(), flows_.end());
    for (auto at = flows_.begin(); at != flows_.end();) {
      const auto next =
          std::find_if(at, flows_.end(), [&](std::uint64_t key) { return key >> 1U != *at >> 1U; });
      const bool both = (*at & 1U) == 0 && (*(next - 1) & 1U) == 1;
      if (!both) t_.defects.dangling_flows += next - at;
      at = next;
    }
    flows_.clear();
  }

  /// Spans of a lane must nest or be apart.
  void count_overlaps() {
    std::vector<std::uint32_t> counts(states_.size() + 1, 0);
    for (std::size_t i = first_event_; i < t_.events.size(); ++i)
      ++counts[t_.events[i].lane - first_lane_ + 1];
    for (std::size_t l = 1; l < counts.size(); ++l) counts[l] += counts[l - 1];
    std::vector<TableIndex> order(t_.events.size() - first_event_);
    std::vector<std::uint32_t> next(counts.begin(), counts.end() - 1);
    for (std::size_t i = first_event_; i < t_.events.size(); ++i)
      order[next[t_.events[i].lane - first_lane_]++] = static_cast<TableIndex>(i);
    std::vector<Nanoseconds> enclosing;
    for (std::size_t l = 0; l < states_.size(); ++l) {
      const auto from = order.begin() + counts[l];
      const auto to = order.begin() + counts[l + 1];
      sort_by_begin(from, to);
      enclosing.clear();
      for (auto at = from; at != to; ++at) {
        const Event& e = t_.events[*at];
        while (!enclosing.empty() && enclosing.back() <= e.begin) enclosing.pop_back();
        if (!enclosing.empty() && e.end > enclosing.back()) ++t_.defects.partial_overlaps;
        enclosing.push_back(e.end);
      }
    }
  }

  /// Outer spans before inner ones. Recorders write a lane nearly in order, so that moving the few
  /// strays is cheaper than sorting; strays that would have to move too far are sorted.
  void sort_by_begin(std::vector<TableIndex>::iterator from,
                     std::vector<TableIndex>::iterator to) const {
    const auto before = [&](TableIndex a, TableIndex b) {
      const Event& x = t_.events[a];
      const Event& y = t_.events[b];
      return x.begin != y.begin ? x.begin < y.begin : x.end > y.end;
    };
    if (from == to) return;
    std::ptrdiff_t budget = 64 * (to - from);
    for (auto at = from + 1; at != to; ++at) {
      if (!before(*at, *(at - 1))) continue;
      const auto place = std::upper_bound(from, at, *at, before);
      budget -= at - place;
      if (budget < 0) return std::sort(from, to, before);
      std::rotate(place, at, at + 1);
    }
  }

  /// Host work belongs to the step in which it began, device work to that of its launch.
  void assign_steps() {
    if (steps_.empty()) return;
    std::sort(steps_.begin(), steps_.end(),
              [](const Step& a, const Step& b) { return a.begin < b.begin; });
    const Step* current = &steps_.front();
    const auto step_at = [&](Nanoseconds t) -> std::int32_t {
      if (t < current->begin || t >= current->end) {
        const auto after = std::upper_bound(
            steps_.begin(), steps_.end(), t,
            [](Nanoseconds value, const Step& step) { return value < step.begin; });
        if (after == steps_.begin()) return -1;
        current = &*(after - 1);
      }
      return t < current->end ? current->number : -1;
    };
    for (std::size_t i = first_event_; i < t_.events.size(); ++i) {
      Event& e = t_.events[i];
      e.step = step_at(e.launch == none ? e.begin : t_.events[e.launch].begin);
    }
  }

  /// Stays at the ends of the range: times of a hostile file need not make sense.
  [[nodiscard]] static Nanoseconds sum(Nanoseconds a, Nanoseconds b) noexcept {
    Nanoseconds out = 0;
    if (!__builtin_add_overflow(a, b, &out)) return out;
    return a < 0 ? std::numeric_limits<Nanoseconds>::min()
                 : std::numeric_limits<Nanoseconds>::max();
  }

  /// Stamps are relative to a base that each process rounds down to a multiple of three months, or
  /// absolute. All become absolute; a file that left its base out takes the quarter of the others.
  void settle_clock() {
    if (t_.events.size() == first_event_) return;
    constexpr Nanoseconds quarter = Nanoseconds{7889238} * 1000000000;
    constexpr Nanoseconds hour = Nanoseconds{3600} * 1000000000;
    Nanoseconds shift = has_base_ ? base_ : 0;
    if (first_event_ > 0) {
      const Nanoseconds apart =
          sum(sum(t_.events[first_event_].begin, shift),
              -std::max(t_.events[0].begin, -std::numeric_limits<Nanoseconds>::max()));
      const Nanoseconds quarters = sum(apart, apart < 0 ? -quarter / 2 : quarter / 2) / quarter;
      const Nanoseconds rest = apart - quarters * quarter;
      if (!has_base_ && quarters != 0 && rest < hour && rest > -hour) {
        shift -= quarters * quarter;
        ++t_.defects.clock_base_adjusted;
      } else if (has_base_ && base_ % quarter == 0 && rest < hour && rest > -hour &&
                 t_.events[0].begin / quarter != base_ / quarter) {
        ++t_.defects.clock_base_adjusted;
      }
    }
    if (shift == 0) return;
    for (std::size_t i = first_event_; i < t_.events.size(); ++i) {
      t_.events[i].begin = sum(t_.events[i].begin, shift);
      t_.events[i].end = sum(t_.events[i].end, shift);
    }
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

  struct PairHash {
    std::size_t operator()(const std::pair<std::int64_t, std::int64_t>& p) const noexcept {
      return (static_cast<std::size_t>(p.first) * 0x9E3779B97F4A7C15ULL ^
              static_cast<std::size_t>(p.second)) *
             0x9E3779B97F4A7C15ULL;
    }
  };

  static constexpr int microseconds = static_cast<int>(TimeUnit::microseconds);
  static constexpr std::size_t rank_limit = std::size_t{1} << 20U;
  static constexpr std::size_t label_limit = std::size_t{1} << 20U;

  Trace& t_;
  Source& source_;
  const ImportOptions& options_;
  JsonScanner json_;
  std::size_t first_event_, first_lane_;
  TableIndex rank_index_;

  bool found_events_ = false, has_base_ = false, any_device_ = false;
  std::int32_t declared_rank_ = -1;
  std::int64_t base_ = 0, counters_ = 0, passed_over_ = 0;

  Metadata metadata_;
  std::array<CachedName, 4096> names_{};
  std::vector<NameFacts> facts_;  // by name
  std::string scratch_;
  std::unordered_map<std::pair<std::int64_t, std::int64_t>, TableIndex, PairHash> lanes_;
  std::vector<LaneState> states_;  // by lane
  std::array<CachedLane, 64> recent_lanes_{};

  std::unordered_map<std::string, TableIndex> groups_;  // by name and ranks as written
  std::vector<TableIndex> configured_;
  std::size_t claimed_ranks_ = 0;  // listed from a start and a stride
  std::vector<Step> steps_;
  std::vector<PendingLabel> labels_;
  std::string label_text_;
  std::size_t calls_ = 0, started_ = 0;  // with a correlation
  FlowEnds flows_;
};

}  // namespace detail

/// True for Chrome trace JSON of any writer: an array or object whose head names its parts.
[[nodiscard]] inline bool looks_like_kineto(std::string_view head) noexcept {
  const std::size_t at = head.find_first_not_of(" \n\t\r");
  if (at == std::string_view::npos || (head[at] != '{' && head[at] != '[')) return false;
  return detail::holds(head, "\"traceEvents\"") || detail::holds(head, "\"ph\"") ||
         detail::holds(head, "\"schemaVersion\"") || detail::holds(head, "\"deviceProperties\"");
}

/// Adds one rank with its events. Its number is what the file says, or its name, or the place among
/// the files imported before; `options` override all three.
/// Cost: the text once, and sorting of each lane's events. Memory: see the top of this file.
/// @throws Error(bad_input) if the text has no list of events
inline void import_kineto(Trace& trace, Source& source, const ImportOptions& options = {}) {
  detail::KinetoImporter(trace, source, options).run();
}

}  // namespace mega::inline v0::scan
