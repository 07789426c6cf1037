/// @file  Importer of NCCL flight recorder dumps (PyTorch, versions 2.x), pickled or JSON.
///
/// An entry is a call that a host made, not a span on a device: it begins where it was created and
/// ends where its completion was noticed. What had not completed ends where it begins and stands in
/// Trace::outstanding, in the order of the calls; how far the rank came in each group stands in
/// Trace::progress. A dump that is empty or cut off is evidence and makes its rank `missing`.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/communication_name.hpp>
#include <mega/scan/detail/event_records.hpp>
#include <mega/scan/detail/rank_name.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/pickle.hpp>
#include <mega/scan/plain_document.hpp>
#include <mega/scan/plain_json.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

[[nodiscard]] inline bool looks_like_flight_recorder(std::string_view head) noexcept {
  if (looks_like_pickle(head)) return true;
  const auto has = [&](std::string_view key) { return head.find(key) != std::string_view::npos; };
  return has("\"pg_config\"") || has("\"pg_status\"") ||
         (has("\"entries\"") && has("\"collective_seq_id\""));
}

/// Names under which PyTorch writes its dumps, for files that are empty and so look like nothing.
[[nodiscard]] inline bool is_flight_recorder_name(std::string_view path) noexcept {
  const std::string_view name = path.substr(path.find_last_of("/:") + 1);
  return name.find("dump_") != std::string_view::npos || name.starts_with("nccl_trace_rank_") ||
         name.starts_with("comm_lib_trace_rank_");
}

namespace detail {

class FlightRecorderImport {
 public:
  using Node = PlainDocument::Node;

  FlightRecorderImport(Trace& trace, const PlainDocument& document, const ImportOptions& options)
      : t_(trace), d_(document), options_(options) {}

  void run() {
    const Node root = d_.root();
    const Node entries = d_.find(root, "entries");
    expects(d_.kind(root) == PlainDocument::Kind::dictionary &&
                (entries != PlainDocument::absent ||
                 d_.find(root, "pg_config") != PlainDocument::absent),
            ErrorCode::bad_input, [&] {
              return d_.source() +
                     " is no flight recorder dump: it has neither \"entries\" nor \"pg_config\"";
            });
    read_groups(root);
    const TableIndex rank = add_rank(root);
    std::vector<Node> calls;
    for (const Node entry : d_.children(entries)) {
      if (d_.kind(entry) == PlainDocument::Kind::dictionary) {
        calls.push_back(entry);
      } else {
        ++t_.defects.malformed_records;
      }
    }
    std::stable_sort(calls.begin(), calls.end(), [&](Node a, Node b) {
      return d_.integer(d_.find(a, "record_id")) < d_.integer(d_.find(b, "record_id"));
    });
    for (const Node entry : calls) read_entry(entry, rank);
    t_.ranks[rank].missing = calls.empty();
    read_progress(root, rank);
  }

 private:
  /// The integers of a list, or of a text such as "[0, 1, 2]".
  [[nodiscard]] std::vector<std::int32_t> ranks_of(Node node) {
    std::vector<std::int32_t> ranks;
    const auto add = [&](std::int64_t rank) {
      if (rank >= 0 && rank <= std::numeric_limits<std::int32_t>::max() && members_left_ > 0) {
        ranks.push_back(static_cast<std::int32_t>(rank));
        --members_left_;
      }
    };
    for (const Node member : d_.children(node)) add(d_.integer(member));
    const std::string_view text = d_.text(node);
    for (std::size_t i = 0; i < text.size();) {
      std::int64_t rank = 0;
      const auto [end, fault] = std::from_chars(text.data() + i, text.data() + text.size(), rank);
      if (fault == std::errc{}) add(rank);
      i = fault == std::errc{} ? static_cast<std::size_t>(end - text.data()) : i + 1;
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  void read_groups(Node root) {
    const std::vector<Node>& pairs = d_.children(d_.find(root, "pg_config"));
    if (pairs.size() / 2 > most_groups) {
      t_.notes.push_back(sentence(d_.source(), " lists ", pairs.size() / 2, " groups; the first ",
                                  most_groups, " are read"));
    }
    for (std::size_t i = 0; i + 1 < pairs.size() && groups_.size() < most_groups; i += 2) {
      const Node key = pairs[i];
      const Node group = pairs[i + 1];
      const std::string name =
          d_.is_integer(key) ? std::to_string(d_.integer(key)) : std::string(d_.text(key));
      std::vector<std::int32_t> ranks = ranks_of(d_.find(group, "ranks"));
      if (!ranks.empty()) {
        if (first_group_) {
          common_ = ranks;
        } else {
          std::vector<std::int32_t> both;
          std::set_intersection(common_.begin(), common_.end(), ranks.begin(), ranks.end(),
                                std::back_inserter(both));
          common_ = std::move(both);
        }
        first_group_ = false;
      }
      const std::string_view description = d_.text(d_.find(group, "desc"));
      if (description == "default_pg" && !ranks.empty())
        world_ = static_cast<std::int32_t>(ranks.size());
      groups_[name] = t_.intern_group(label(name, description), ranks);
    }
  }

  /// Groups are numbered anew in each process; the description says what they are for.
  [[nodiscard]] static std::string label(std::string_view name, std::string_view description) {
    return description.empty() ? std::string(name) : sentence(description, " (", name, ")");
  }

  /// As the user says, else as the file says, else the one rank that is in all of its groups, else
  /// the number in the file's name.
  TableIndex add_rank(Node root) {
    std::int64_t rank = options_.rank;
    if (rank < 0) rank = d_.integer(d_.find(root, "rank"));
    if (rank < 0 && common_.size() == 1) rank = common_.front();
    if (rank < 0 || rank > std::numeric_limits<std::int32_t>::max()) {
      rank = rank_in_dump_name(d_.source());
      ++t_.defects.rank_guessed;
    }
    Rank made;
    made.rank = static_cast<std::int32_t>(rank);
    made.source = d_.source();
    made.world = world_;
    t_.ranks.push_back(std::move(made));
    return static_cast<TableIndex>(t_.ranks.size() - 1);
  }

  TableIndex group_of(Node entry) {
    const Node pair = d_.find(entry, "process_group");
    const std::string name(d_.text(d_.at(pair, 0)));
    const auto found = groups_.find(name);
    if (found != groups_.end()) return found->second;
    if (name.empty() || groups_.size() >= most_groups) return none;
    const TableIndex made = t_.intern_group(label(name, d_.text(d_.at(pair, 1))), {});
    groups_[name] = made;
    return made;
  }

  TableIndex lane_of(TableIndex rank, TableIndex group) {
    const auto [at, is_new] = lanes_.try_emplace(group, static_cast<TableIndex>(t_.lanes.size()));
    if (is_new) {
      Lane lane;
      lane.rank = rank;
      lane.track = static_cast<std::int64_t>(lanes_.size());
      lane.kind = LaneKind::host;
      lane.label = group == none ? "calls" : "calls in " + t_.groups[group].name;
      t_.lanes.push_back(std::move(lane));
    }
    return at->second;
  }

  /// Product of the extents of the inputs times the size of their elements; -1: not said.
  [[nodiscard]] std::int64_t bytes_of(Node entry) {
    const std::vector<Node>& tensors = d_.children(d_.find(entry, "input_sizes"));
    const Node dtypes = d_.find(entry, "input_dtypes");
    double bytes = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::int64_t element = element_bytes_of(d_.text(d_.at(dtypes, i)));
      if (element == 0) return -1;
      double elements = static_cast<double>(element);
      for (const Node extent : d_.children(tensors[i])) {
        if (extents_left_-- <= 0) return -1;
        elements *= static_cast<double>(d_.integer(extent, 0));
      }
      bytes += elements;
    }
    return !tensors.empty() && bytes >= 0 && bytes < 9e18 ? static_cast<std::int64_t>(bytes) : -1;
  }

  /// Of "nccl:recv 3<-1", ranks of the group: the peer of the recorder is 1. -1: not said.
  [[nodiscard]] std::int32_t peer_of(std::string_view name, TableIndex group) const {
    const std::size_t to = name.find("->");
    const std::size_t from = name.find("<-");
    const std::size_t arrow = std::min(to, from);
    if (arrow == std::string_view::npos) return -1;
    std::int32_t peer = -1;
    std::from_chars(name.data() + arrow + 2, name.data() + name.size(), peer);
    if (group == none || t_.groups[group].ranks.empty()) return -1;
    const std::vector<std::int32_t>& ranks = t_.groups[group].ranks;
    return peer >= 0 && static_cast<std::size_t>(peer) < ranks.size()
               ? ranks[static_cast<std::size_t>(peer)]
               : -1;
  }

  void read_entry(Node entry, TableIndex rank) {
    const Node created = d_.find(entry, "time_created_ns");
    if (!d_.is_integer(created) || !usable_time(d_.integer(created))) {
      ++t_.defects.malformed_records;
      return;
    }
    const std::string_view name = d_.text(d_.find(entry, "profiling_name"));
    const TableIndex group = group_of(entry);
    const std::int64_t number = d_.integer(d_.find(entry, "pg_id"));
    if (group != none && number >= 0) numbers_[number] = group;
    Event event;
    event.begin = d_.integer(created);
    const Nanoseconds noticed = d_.integer(d_.find(entry, "time_discovered_completed_ns"));
    const Nanoseconds end = usable_time(noticed) ? noticed : -1;
    const std::string_view state = d_.text(d_.find(entry, "state"));
    const bool done = state == "completed" || end > 0 || d_.truth(d_.find(entry, "retired"));
    if (end > 0 && end < event.begin) ++t_.defects.negative_durations;
    event.end = std::max(event.begin, end);
    event.name = t_.names.intern(name);
    event.lane = lane_of(rank, group);
    const auto at = static_cast<TableIndex>(t_.events.push_back(event));

    Communication call;
    call.group = group;
    call.op = communication_of(name);
    const bool pair = call.op == CommunicationOp::send || call.op == CommunicationOp::recv;
    call.peer = pair ? peer_of(name, group) : -1;
    // Transfers of a group are counted together, whatever the pair: no number that both ends share.
    const bool transfer = pair || d_.truth(d_.find(entry, "is_p2p"));
    call.sequence = transfer ? -1 : d_.integer(d_.find(entry, "collective_seq_id"));
    call.bytes = bytes_of(entry);
    const std::string_view dtype = d_.text(d_.at(d_.find(entry, "input_dtypes"), 0));
    if (!dtype.empty()) call.dtype = t_.names.intern(dtype);
    const TableIndex communication = t_.attach(at, call);
    if (!done) t_.outstanding.push_back(communication);
  }

  /// pg_status counts by the process's own numbers of its groups. Entries say which number is which
  /// group; for the rest, numbers and names rise together.
  void read_progress(Node root, TableIndex rank) {
    const std::vector<Node>& pairs = d_.children(d_.find(root, "pg_status"));
    std::map<std::int64_t, Node> status;
    for (std::size_t i = 0; i + 1 < pairs.size() && status.size() < most_groups; i += 2)
      status[number_of(pairs[i])] = pairs[i + 1];
    infer_numbers(status);
    for (const auto& [number, node] : status) {
      const auto found = numbers_.find(number);
      if (found == numbers_.end()) continue;
      Progress progress;
      progress.rank = rank;
      progress.group = found->second;
      progress.last_enqueued = d_.integer(d_.find(node, "last_enqueued_collective"));
      progress.last_started = d_.integer(d_.find(node, "last_started_collective"));
      progress.last_completed = d_.integer(d_.find(node, "last_completed_collective"));
      t_.progress.push_back(progress);
    }
  }

  [[nodiscard]] std::int64_t number_of(Node key) const { return number_of(key, d_.text(key)); }
  [[nodiscard]] std::int64_t number_of(Node key, std::string_view text) const {
    if (d_.is_integer(key)) return d_.integer(key);
    std::int64_t number = -1;
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
    return fault == std::errc{} && end == text.data() + text.size() ? number : -1;
  }

  /// k-th number and k-th name belong together, provided that no entry says otherwise.
  void infer_numbers(const std::map<std::int64_t, Node>& status) {
    std::map<std::int64_t, TableIndex> names;
    for (const auto& [name, group] : groups_) names[number_of(PlainDocument::absent, name)] = group;
    if (names.size() != status.size() || names.size() != groups_.size() || names.contains(-1))
      return;
    std::map<std::int64_t, TableIndex> inferred;
    auto name = names.begin();
    for (const auto& [number, node] : status) inferred[number] = (name++)->second;
    for (const auto& [number, group] : numbers_) {
      const auto found = inferred.find(number);
      if (found == inferred.end() || found->second != group) return;
    }
    numbers_ = std::move(inferred);
  }

  static constexpr std::size_t most_groups = 4096;  // of one rank

  Trace& t_;
  const PlainDocument& d_;
  const ImportOptions& options_;
  std::map<std::string, TableIndex, std::less<>> groups_;  // by the name that all ranks share
  std::map<std::int64_t, TableIndex> numbers_;             // by the number in this process
  std::map<TableIndex, TableIndex> lanes_;                 // by group
  std::vector<std::int32_t> common_;                       // ranks that are in all groups so far
  bool first_group_ = true;
  std::int32_t world_ = -1;
  // A hostile file may share one long list among many groups or entries.
  std::int64_t members_left_ = std::int64_t{1} << 24U;
  std::int64_t extents_left_ = std::int64_t{1} << 26U;
};

}  // namespace detail

/// Adds one rank and what its dump says. An empty or cut dump adds the rank as missing and a note.
/// @throws Error(bad_input): no dump, a pickle that names code, more than 1 GiB
inline void import_flight_recorder(Trace& trace, Source& source, const ImportOptions& options) {
  const std::string_view bytes = source.everything(std::size_t{1} << 30U);
  const auto lost = [&](std::string_view why) {
    Rank rank;
    rank.rank = options.rank >= 0 ? options.rank : detail::rank_in_dump_name(source.name());
    rank.source = source.name();
    rank.missing = true;
    if (options.rank < 0) ++trace.defects.rank_guessed;
    trace.notes.push_back(sentence("rank ", rank.rank, " left no usable dump: ", why));
    trace.ranks.push_back(std::move(rank));
  };
  if (bytes.empty()) return lost(source.name() + " is empty");
  if (!looks_like_pickle(bytes)) {
    const PlainDocument document = read_plain_json(bytes, source.name(), trace.defects);
    detail::FlightRecorderImport(trace, document, options).run();
    return;
  }
  // STOP is a pickle's last byte; without it the writer died at work.
  if (bytes.back() != '.') {
    ++trace.defects.truncated_files;
    return lost(source.name() + " breaks off");
  }
  const PlainDocument document = read_pickle(bytes, source.name());
  detail::FlightRecorderImport(trace, document, options).run();
}

}  // namespace mega::inline v0::scan
