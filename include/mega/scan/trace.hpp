/// @file  Trace: what one or many ranks did, in one form for every file format and recorder. (scan
/// means MegaScan tracing here, not the prefix sum.)
///
/// Data goes one way: an importer or a recorder fills a Trace; matching pairs its communications;
/// alignment finds the clocks; analysis explains; writers render. Nothing changes the events after
/// import: aligned time is computed from the alignment, never written back.
///
/// Time is int64 nanoseconds everywhere, in the clock of the rank that recorded it. Differences are
/// safe; the absolute value has a meaning inside one clock only, until alignment.
#pragma once
#include <mega/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

using Nanoseconds = std::int64_t;

/// Index into one of the tables of a Trace; `none` where the event has no such property.
using TableIndex = std::uint32_t;
inline constexpr TableIndex none = ~TableIndex{0};

/// What kind of work an event is. One event has one kind; names stay free text.
enum class EventKind : std::uint8_t {
  other,
  iteration,  ///< one training step of a rank
  forward,
  backward,  ///< whole backward, or its input half
  weight,    ///< weight-gradient half of a backward
  loss,
  optimizer,
  compute,        ///< kernel or layer operation that is none of the above
  communication,  ///< has a row in Trace::communications
  memory,         ///< copy or fill by the device
  host_op,        ///< operator on a CPU thread
  launch,         ///< runtime or driver call that starts device work
  synchronize,    ///< the host or a stream waits; not work
};

[[nodiscard]] constexpr std::string_view to_string(EventKind kind) noexcept {
  switch (kind) {
    case EventKind::other: return "other";
    case EventKind::iteration: return "iteration";
    case EventKind::forward: return "forward";
    case EventKind::backward: return "backward";
    case EventKind::weight: return "weight";
    case EventKind::loss: return "loss";
    case EventKind::optimizer: return "optimizer";
    case EventKind::compute: return "compute";
    case EventKind::communication: return "communication";
    case EventKind::memory: return "memory";
    case EventKind::host_op: return "host_op";
    case EventKind::launch: return "launch";
    case EventKind::synchronize: return "synchronize";
  }
  return "unknown";
}

/// The kind of that name; `other` where there is none.
[[nodiscard]] constexpr EventKind event_kind_of(std::string_view name) noexcept {
  for (int kind = 0; kind <= static_cast<int>(EventKind::synchronize); ++kind) {
    if (to_string(static_cast<EventKind>(kind)) == name) return static_cast<EventKind>(kind);
  }
  return EventKind::other;
}

/// True for work that keeps the device's compute units busy.
[[nodiscard]] constexpr bool is_compute(EventKind kind) noexcept {
  return kind == EventKind::forward || kind == EventKind::backward || kind == EventKind::weight ||
         kind == EventKind::loss || kind == EventKind::optimizer || kind == EventKind::compute;
}

/// One span on one lane. 48 bytes; everything rare is in a table.
struct Event {
  Nanoseconds begin = 0;
  Nanoseconds end = 0;       ///< >= begin; negative durations of a file are counted as a defect
  TableIndex name = none;    ///< into Trace::names
  TableIndex lane = none;    ///< into Trace::lanes; the lane knows the rank
  TableIndex detail = none;  ///< communication: into Trace::communications
  TableIndex launch = none;  ///< device work: the event that launched it
  std::int32_t step = -1;    ///< training iteration
  std::int32_t microbatch = -1;
  std::int16_t chunk = -1;  ///< local model chunk
  EventKind kind = EventKind::other;

  [[nodiscard]] constexpr Nanoseconds duration() const noexcept { return end - begin; }
};
static_assert(sizeof(Event) == 48);

enum class CommunicationOp : std::uint8_t {
  unknown,
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  broadcast,
  reduce,
  gather,
  scatter,
  barrier,
  send,
  recv,
  send_recv,  ///< several sends and receives as one device operation
};

[[nodiscard]] constexpr std::string_view to_string(CommunicationOp op) noexcept {
  switch (op) {
    case CommunicationOp::unknown: return "unknown";
    case CommunicationOp::all_reduce: return "all_reduce";
    case CommunicationOp::reduce_scatter: return "reduce_scatter";
    case CommunicationOp::all_gather: return "all_gather";
    case CommunicationOp::all_to_all: return "all_to_all";
    case CommunicationOp::broadcast: return "broadcast";
    case CommunicationOp::reduce: return "reduce";
    case CommunicationOp::gather: return "gather";
    case CommunicationOp::scatter: return "scatter";
    case CommunicationOp::barrier: return "barrier";
    case CommunicationOp::send: return "send";
    case CommunicationOp::recv: return "recv";
    case CommunicationOp::send_recv: return "send_recv";
  }
  return "unknown";
}

/// True where no member can end before the last one has begun.
[[nodiscard]] constexpr bool synchronises_all(CommunicationOp op) noexcept {
  return op == CommunicationOp::all_reduce || op == CommunicationOp::reduce_scatter ||
         op == CommunicationOp::all_gather || op == CommunicationOp::all_to_all ||
         op == CommunicationOp::barrier;
}

/// What is known of a communication event; -1 or none where the file does not say.
struct Communication {
  TableIndex group = none;     ///< into Trace::groups
  std::int32_t peer = -1;      ///< global rank of the other end of a send or recv; root of a
                               ///< rooted operation
  std::int64_t sequence = -1;  ///< position in the group's, or the pair's, series of operations
  std::int64_t bytes = -1;     ///< payload of this rank
  TableIndex dtype = none;     ///< into Trace::names
  TableIndex event = none;     ///< the event this belongs to
  CommunicationOp op = CommunicationOp::unknown;
};

/// A communicator: the same ranks under the same name are the same group in every file.
struct Group {
  std::string name;
  std::vector<std::int32_t> ranks;  ///< sorted global ranks; empty where the file does not say
};

enum class LaneKind : std::uint8_t { device, host };

/// A place where events do not overlap by design: a device stream or a host thread of a rank.
struct Lane {
  TableIndex rank = none;    ///< into Trace::ranks
  std::int64_t process = 0;  ///< pid, or device number, as the file has it
  std::int64_t track = 0;    ///< tid or stream as the file has it
  LaneKind kind = LaneKind::device;
  std::string label;
};

/// One rank of the job and the file that it came from.
struct Rank {
  std::int32_t rank = -1;  ///< global rank
  std::int32_t data = -1, pipeline = -1, tensor = -1;
  bool is_place_lost = false;  ///< the job has places, but what says this one's is missing
  std::string clock;       ///< ranks with the same non-empty name read one clock, says the recorder
  std::string host;        ///< name of its machine; empty: unknown
  std::string processors;  ///< of the host, on which its spans may have run, as Linux lists them:
                           ///< "0-3,8"; empty: unknown, or a device's spans
  std::string source;      ///< file, as given by the user
  bool is_numbered_by_place = false;  ///< neither its file nor the file's name says which rank
  bool missing = false;     ///< the job had it, but its dump is absent or empty: evidence in itself
  std::int32_t world = -1;  ///< how many ranks the job has, says the file
};

/// What one file added to a trace, by which files of one job are told from those of several.
struct ImportedFile {
  std::string name;
  std::vector<std::int32_t> ranks;  ///< sorted global ranks, where they are known
  std::string clock;                ///< of its first rank
  std::size_t events = 0;
  std::uint64_t digest = 0;        ///< of times and names of the events
  Nanoseconds begin = 0, end = 0;  ///< of all events
  std::int32_t first_step = -1, last_step = -1;
  bool says_ranks = false;  ///< they stand in the file; neither its name nor the user was asked
  bool is_dump = false;     ///< the state of one moment: a rank has one
};

/// How far a rank came in a group, as the rank's own runtime says; -1 where it does not.
struct Progress {
  TableIndex rank = none;   ///< into Trace::ranks
  TableIndex group = none;  ///< into Trace::groups
  std::int64_t last_enqueued = -1, last_started = -1, last_completed = -1;
};

/// What the device of a rank said of itself at one moment; -1 where it does not say.
struct DeviceState {
  Nanoseconds at = 0;               ///< in the clock of the rank
  TableIndex rank = none;           ///< into Trace::ranks
  std::int32_t sm_mhz = -1;         ///< clock of the multiprocessors
  std::int32_t temperature_c = -1;  ///< degrees Celsius
  std::int32_t busy_percent = -1;   ///< of the last moments, kernels ran
  std::int32_t power_mw = -1;
  std::uint32_t clock_limits = 0;  ///< what keeps the clock down: bits of ClockLimit
};

/// The bits of NVML's reasons of clock events.
enum class ClockLimit : std::uint32_t {
  idle = 0x1,
  setting = 0x2,
  power_cap = 0x4,
  hardware_slowdown = 0x8,
  sync_boost = 0x10,
  heat = 0x20,
  hardware_heat = 0x40,
  power_brake = 0x80,
  display_setting = 0x100,
};

/// What was wrong with the input, counted. None of it stops an import.
struct Defects {
  std::int64_t negative_durations = 0;
  std::int64_t partial_overlaps = 0;  ///< events of a lane that overlap without nesting
  std::int64_t duplicate_correlations = 0;
  std::int64_t kernels_without_launch = 0;
  std::int64_t dangling_flows = 0;
  std::int64_t not_a_number = 0;       ///< NaN or infinity where a number belongs
  std::int64_t malformed_numbers = 0;  ///< "-5.-660", digits with a tail, beyond 64 bits
  std::int64_t bad_utf8 = 0;
  std::int64_t control_characters = 0;
  std::int64_t bad_escapes = 0;        ///< backslashes and quotes that JSON does not allow
  std::int64_t malformed_records = 0;  ///< skipped
  std::int64_t truncated_files = 0;
  std::int64_t rank_guessed = 0;         ///< from the file's name or its place on the command line
  std::int64_t clock_base_adjusted = 0;  ///< ranks whose base times differ by a quarter of a year
  std::int64_t overlapping_runs = 0;     ///< several runs in one file on the same tracks
};

/// What a recorder says of its own cost and of what it lost.
struct Completeness {
  std::int64_t events_dropped = 0;  ///< the recorder ran out of room
  bool window_truncated = false;    ///< events at the ends of the window are cut off
  double cost_ns_per_event = 0;     ///< measured by the recorder; 0: unknown
};

/// Append-only sequence in blocks: never moves what it holds, and wastes less than one block.
template <class T>
class BlockVector {
 public:
  static constexpr std::size_t block_size = std::size_t{1} << 12U;

  std::size_t push_back(const T& value) {
    if (size_ == blocks_.size() * block_size) blocks_.push_back(std::make_unique<T[]>(block_size));
    (*this)[size_] = value;
    return size_++;
  }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  /// @pre i < size()
  [[nodiscard]] T& operator[](std::size_t i) noexcept {
    return blocks_[i / block_size][i % block_size];
  }
  [[nodiscard]] const T& operator[](std::size_t i) const noexcept {
    return blocks_[i / block_size][i % block_size];
  }

 private:
  std::vector<std::unique_ptr<T[]>> blocks_;
  std::size_t size_ = 0;
};

/// Each distinct text once; indices are stable and dense.
class NameTable {
 public:
  TableIndex intern(std::string_view text) {
    if (const auto found = index_.find(text); found != index_.end()) return found->second;
    texts_.push_back(std::make_unique<std::string>(text));
    const auto made = static_cast<TableIndex>(texts_.size() - 1);
    index_.emplace(*texts_.back(), made);
    return made;
  }
  /// @pre index < size()
  [[nodiscard]] std::string_view operator[](TableIndex index) const noexcept {
    return *texts_[index];
  }
  [[nodiscard]] std::size_t size() const noexcept { return texts_.size(); }

 private:
  std::vector<std::unique_ptr<std::string>> texts_;  // the keys of index_ point into them
  std::unordered_map<std::string_view, TableIndex> index_;
};

/// See the top of this file. Tables are public: importers fill them, everything else reads.
struct Trace {
  NameTable names;
  BlockVector<Event> events;
  BlockVector<Communication> communications;
  std::vector<Rank> ranks;
  std::vector<Lane> lanes;
  std::vector<Group> groups;
  std::vector<Progress> progress;          ///< of dumps that were written when a job hung
  std::vector<TableIndex> outstanding;     ///< communications that never completed, as enqueued;
                                           ///< their events end where they begin
  std::vector<DeviceState> device_states;  ///< in the order of each rank's time
  std::vector<ImportedFile> files;         ///< in the order in which they were imported
  Defects defects;
  Completeness completeness;
  std::vector<std::string> warnings;  ///< sentences for the user: what is missing of the input, so
                                      ///< that all that is found may be wrong
  std::vector<std::string> notes;     ///< of less weight: what was guessed or passed over

  Trace() = default;
  Trace(Trace&&) = default;
  Trace& operator=(Trace&&) = default;

  [[nodiscard]] std::string_view name(const Event& e) const noexcept {
    return e.name == none ? std::string_view{} : names[e.name];
  }
  /// Index into ranks of the rank that recorded the event.
  [[nodiscard]] TableIndex rank_index(const Event& e) const noexcept { return lanes[e.lane].rank; }
  [[nodiscard]] std::int32_t rank(const Event& e) const noexcept {
    return ranks[rank_index(e)].rank;
  }

  /// How many ranks are at a place that the files no longer say.
  [[nodiscard]] std::size_t lost_places() const noexcept {
    std::size_t count = 0;
    for (const Rank& r : ranks) count += r.is_place_lost ? 1 : 0;
    return count;
  }

  /// The group of this name and these ranks, which are sorted here; made if new.
  TableIndex intern_group(std::string_view name, std::vector<std::int32_t> members);
  /// Adds a communication and ties the event to it. @pre event was added, without a detail
  TableIndex attach(TableIndex event, Communication communication);
};

inline TableIndex Trace::intern_group(std::string_view name, std::vector<std::int32_t> members) {
  for (std::size_t i = 1; i < members.size(); ++i) {
    for (std::size_t k = i; k > 0 && members[k] < members[k - 1]; --k)
      std::swap(members[k], members[k - 1]);
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].name == name && groups[g].ranks == members) return static_cast<TableIndex>(g);
  }
  groups.push_back({std::string(name), std::move(members)});
  return static_cast<TableIndex>(groups.size() - 1);
}

inline TableIndex Trace::attach(TableIndex event, Communication communication) {
  communication.event = event;
  const auto made = static_cast<TableIndex>(communications.push_back(communication));
  events[event].detail = made;
  events[event].kind = EventKind::communication;
  return made;
}

}  // namespace mega::inline v0::scan
