/// @file  Reads traces of pipelines: MegatronApp's profiles, and timelines that mega-plan wrote.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/metrics.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/timeline.hpp>

#include <nlohmann/json.hpp>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace plan {

/// What a trace says, and which system wrote it.
struct TraceFile {
  std::string_view format;
  mega::dpp::PipelineRecord record;
};

/// The whole of a file of at most `limit` bytes, unpacked where gzip has packed it.
/// Throws Error(bad_input).
inline std::string read_unpacked(const std::string& path, std::size_t limit) {
  using mega::ErrorCode, mega::expects, mega::sentence;
  gzFile file = gzopen(path.c_str(), "rb");
  expects(file != nullptr, ErrorCode::bad_input,
          [&] { return sentence(path, " cannot be opened"); });
  const auto close = [](gzFile_s* open) { gzclose_r(open); };
  const std::unique_ptr<gzFile_s, decltype(close)> owner(file, close);
  std::string text;
  std::vector<char> block(1 << 16);
  for (;;) {
    const int got = gzread(file, block.data(), static_cast<unsigned>(block.size()));
    if (got > 0) text.append(block.data(), static_cast<std::size_t>(got));
    int status = Z_OK;
    (void)gzerror(file, &status);
    // A packed file that ends early is no error to gzread, only to what asks afterwards.
    expects(got >= 0 && status == Z_OK, ErrorCode::bad_input, [&] {
      return sentence(
          path, " cannot be read beyond byte ", text.size(),
          status == Z_ERRNO ? "" : " of its content: the packed data is damaged or cut");
    });
    expects(text.size() <= limit, ErrorCode::bad_input, [&] {
      return sentence(path, " holds more than ", limit, " bytes, the most that is read");
    });
    if (got == 0) return text;
  }
}

namespace detail {

using mega::ErrorCode;
using mega::expects;
using mega::sentence;
namespace dpp = mega::dpp;

/// The events of a trace in Chrome's JSON format; refuses what is missing or of another type with
/// the number of the event.
class EventReader {
 public:
  using Json = nlohmann::json;

  EventReader(const std::string& text, const std::string& file) : file_(file) {
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) refuse("is empty");
    try {
      document_ = Json::parse(text);
    } catch (const Json::parse_error& error) {
      refuse(sentence("is not JSON: byte ", error.byte, " does not continue it"));
    }
    events_ = &document_;
    if (document_.is_object() && document_.contains("traceEvents"))
      events_ = &document_["traceEvents"];
    if (!events_->is_array()) refuse("is no trace: it has no list of events");
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw mega::Error(ErrorCode::bad_input, sentence(file_, " ", why));
  }
  [[noreturn]] void refuse_event(std::size_t i, const std::string& why) const {
    refuse(sentence("has in event ", i, " ", why));
  }

  [[nodiscard]] std::size_t size() const { return events_->size(); }

  /// Empty where the event has no such text.
  [[nodiscard]] std::string_view text(std::size_t i, const char* member) const {
    const Json& event = (*events_)[i];
    if (!event.is_object()) return {};
    const auto found = event.find(member);
    if (found == event.end() || !found->is_string()) return {};
    return found->get_ref<const std::string&>();
  }
  [[nodiscard]] std::string_view argument_text(std::size_t i, const char* name) const {
    const auto arguments = (*events_)[i].find("args");
    if (arguments == (*events_)[i].end() || !arguments->is_object()) return {};
    const auto found = arguments->find(name);
    if (found == arguments->end() || !found->is_string()) return {};
    return found->get_ref<const std::string&>();
  }

  [[nodiscard]] int whole(std::size_t i, const char* member) const {
    return whole_in((*events_)[i], i, member);
  }
  [[nodiscard]] int argument(std::size_t i, const char* name) const {
    const Json& event = (*events_)[i];
    const auto arguments = event.find("args");
    if (arguments == event.end() || !arguments->is_object())
      refuse_event(i, sentence("no args with a ", name));
    return whole_in(*arguments, i, name);
  }

  /// Microseconds of the file as nanoseconds.
  [[nodiscard]] std::int64_t nanoseconds(std::size_t i, const char* member) const {
    const Json& event = (*events_)[i];
    const auto found = event.find(member);
    if (found == event.end() || !found->is_number())
      refuse_event(i, sentence("no number ", member));
    const double time = found->get<double>();
    constexpr double latest = 4e15;
    if (!(std::abs(time) <= latest))
      refuse_event(i, sentence(member, " ", time, "; valid are microseconds within ", latest));
    if (found->is_number_integer()) return found->get<std::int64_t>() * 1000;
    return std::llround(time * 1000);
  }

 private:
  [[nodiscard]] int whole_in(const Json& object, std::size_t i, const char* name) const {
    const auto found = object.find(name);
    constexpr int largest = 1 << 24;
    const bool valid = found != object.end() && found->is_number_integer() &&
                       found->get<double>() >= 0 && found->get<double>() <= largest;
    if (!valid) {
      refuse_event(i, sentence("no valid ", name, ": it must be a whole number of 0 to ", largest));
    }
    return found->get<int>();
  }

  const std::string& file_;
  Json document_;
  const Json* events_ = nullptr;
};

inline dpp::Action action_of(const EventReader& events, std::size_t i, dpp::ActionKind kind,
                             const char* chunk_name) {
  const int chunk = events.argument(i, chunk_name);
  constexpr int largest = std::numeric_limits<std::int16_t>::max();
  if (chunk > largest)
    events.refuse_event(i, sentence(chunk_name, " ", chunk, "; valid are 0 to ", largest));
  return dpp::make_action(kind, chunk, events.argument(i, "microbatch"));
}

/// MegatronApp's profile: a process for each rank, whose marks begin and end iterations, say when
/// reduction may begin, and enclose forwards and backwards. The end of an action tells which it
/// was.
class MegatronAppReader {
 public:
  explicit MegatronAppReader(const EventReader& events) : events_(events) {}

  static bool wrote(const EventReader& events) {
    for (std::size_t i = 0; i < events.size(); ++i) {
      if (events.text(i, "name") == "iteration begin") return true;
    }
    return false;
  }

  dpp::PipelineRecord read() {
    for (std::size_t i = 0; i < events_.size(); ++i) add(i);
    for (const auto& [rank, state] : ranks_) {
      if (state.iteration || state.action) {
        events_.refuse(sentence("ends while rank ", rank, " is within ",
                                state.action ? "an action" : "an iteration",
                                "; leave out what is not finished"));
      }
      record_.p = std::max(record_.p, rank + 1);
    }
    place();
    return std::move(record_);
  }

 private:
  struct OpenAction {
    dpp::ActionKind kind;
    std::int64_t start;
  };
  struct RankState {
    std::optional<std::int64_t> last;
    std::optional<dpp::IterationRecord> iteration;
    std::optional<OpenAction> action;
  };

  void add(std::size_t i) {
    const std::string_view name = events_.text(i, "name");
    const bool computes = name == "forward" || name == "backward";
    if (!computes && name != "iteration begin" && name != "iteration end" && name != "reduce")
      return;
    const int rank = events_.whole(i, "pid");
    const int number = events_.argument(i, "iteration");
    const std::int64_t now = events_.nanoseconds(i, "ts");
    RankState& state = ranks_[rank];
    if (state.last && now < *state.last) {
      events_.refuse_event(i, sentence("rank ", rank, " going back in time, from ", *state.last,
                                       " to ", now, " ns, in iteration ", number,
                                       ": it holds more than one run; give a file of one"));
    }
    state.last = now;
    const auto refuse = [&](std::string_view why) {
      events_.refuse_event(
          i, sentence("'", name, "' of rank ", rank, ", iteration ", number, ", ", why));
    };
    if (name == "iteration begin") {
      if (state.iteration) refuse("before the iteration before has ended");
      state.iteration = dpp::IterationRecord{rank, number, now, now, {}};
      return;
    }
    if (!state.iteration || state.iteration->iteration != number)
      refuse("which the rank has not begun");
    if (computes) {
      compute(i, rank, number, now, state, refuse);
    } else if (state.action) {
      refuse("within an action");
    } else if (name == "reduce") {
      state.iteration->reduce_ns = now;
    } else {
      state.iteration->end_ns = now;
      record_.iterations.push_back(*state.iteration);
      state.iteration.reset();
    }
  }

  template <class Refuse>
  void compute(std::size_t i, int rank, int number, std::int64_t now, RankState& state,
               const Refuse& refuse) {
    const std::string_view phase = events_.text(i, "ph");
    const auto kind =
        events_.text(i, "name") == "forward" ? dpp::ActionKind::forward : dpp::ActionKind::backward;
    if (phase == "B") {
      if (state.action) refuse("before the action before has ended");
      state.action = OpenAction{kind, now};
    } else if (phase == "E") {
      if (!state.action || state.action->kind != kind) refuse("which the rank has not begun");
      if (events_.argument(i, "pp_rank") != rank) {
        refuse(
            "with another pp_rank: several processes share a pipeline rank; give one pipeline's");
      }
      record_.compute.push_back(
          {rank, number, action_of(events_, i, kind, "model_chunk"), state.action->start, now});
      state.action.reset();
    } else {
      refuse("that neither begins nor ends (ph B, E)");
    }
  }

  /// The stages go round the ranks, as all of Megatron's do.
  void place() {
    int v = 0;
    for (const dpp::ComputeRecord& c : record_.compute) v = std::max(v, c.action.chunk + 1);
    const auto stages = static_cast<std::size_t>(record_.p) * static_cast<std::size_t>(v);
    if (stages > record_.compute.size()) {
      events_.refuse(sentence("has ", record_.compute.size(), " actions, too few for ", record_.p,
                              " ranks with ", v, " chunks each"));
    }
    record_.hand_overs = dpp::hand_overs(dpp::LoopPlacement{}, record_.p, v);
  }

  const EventReader& events_;
  std::map<int, RankState> ranks_;
  dpp::PipelineRecord record_;
};

/// What dpp::to_trace_json writes: slices of compute on process 0, slices of transfers on process
/// 1, and arrows that say which action used which message.
class TimelineReader {
 public:
  explicit TimelineReader(const EventReader& events) : events_(events) {}

  static bool wrote(const EventReader& events) {
    for (std::size_t i = 0; i < events.size(); ++i) {
      if (events.text(i, "ph") == "X" && events.text(i, "cat") == "compute") return true;
    }
    return false;
  }

  dpp::PipelineRecord read() {
    for (std::size_t i = 0; i < events_.size(); ++i) name(i);
    for (std::size_t i = 0; i < events_.size(); ++i) {
      const std::string_view phase = events_.text(i, "ph"), category = events_.text(i, "cat");
      if (phase == "X" && category == "compute") compute(i);
      if (phase == "X" && category == "transfer") transfer(i);
      if (phase == "t" && category == "transfer") arrow_through(i);
      if (phase == "f" && category == "transfer") arrow_end(i);
    }
    for (auto& actions : timeline_.ranks) {
      std::stable_sort(
          actions.begin(), actions.end(),
          [](const dpp::TimedAction& a, const dpp::TimedAction& b) { return a.start < b.start; });
    }
    for (const auto& [message, use] : uses_) join(message, use);
    return dpp::record_of(timeline_, 1.0);
  }

 private:
  struct Use {
    std::size_t event;
    int rank;
    double start;
  };

  [[nodiscard]] double time(std::size_t i, const char* member) const {
    return static_cast<double>(events_.nanoseconds(i, member));
  }

  void name(std::size_t i) {
    if (events_.text(i, "ph") != "M" || events_.text(i, "name") != "thread_name") return;
    const std::string said(events_.argument_text(i, "name"));
    int from = 0, to = 0;
    if (events_.whole(i, "pid") == 0) {
      add_rank(i);
    } else if (std::sscanf(said.c_str(), "rank %d to %d", &from, &to) == 2) {
      links_[events_.whole(i, "tid")] = {from, to};
    }
  }
  std::vector<dpp::TimedAction>& add_rank(std::size_t i) {
    const auto rank = static_cast<std::size_t>(events_.whole(i, "tid"));
    if (rank >= events_.size())
      events_.refuse_event(i, sentence("rank ", rank, ", of fewer events than that"));
    if (timeline_.ranks.size() <= rank) timeline_.ranks.resize(rank + 1);
    return timeline_.ranks[rank];
  }

  void compute(std::size_t i) {
    const std::string_view said = events_.text(i, "name");
    const std::string_view word = said.substr(0, said.find(' '));
    using enum dpp::ActionKind;
    for (const dpp::ActionKind kind : {forward, backward, backward_input, backward_weight}) {
      if (word != to_string(kind)) continue;
      const double start = time(i, "ts");
      add_rank(i).push_back({action_of(events_, i, kind, "chunk"), start, start + time(i, "dur")});
      return;
    }
    events_.refuse_event(i, sentence("'", said,
                                     "'; compute is forward, backward, backward_input or "
                                     "backward_weight"));
  }

  void transfer(std::size_t i) {
    const auto link = links_.find(events_.whole(i, "tid"));
    if (link == links_.end()) events_.refuse_event(i, "a transfer on a track that names no link");
    const bool gradient = events_.text(i, "name").starts_with("gradient");
    const dpp::Action sent = action_of(
        events_, i, gradient ? dpp::ActionKind::send_backward : dpp::ActionKind::send_forward,
        "chunk");
    const double start = time(i, "ts");
    transfer_track_ = link->first;
    // Until an arrow tells the consumer, the message has none.
    const auto ranks = static_cast<int>(timeline_.ranks.size());
    if (!(0 <= link->second.first && link->second.first < ranks && 0 <= link->second.second &&
          link->second.second < ranks)) {
      events_.refuse_event(i, sentence("a transfer from rank ", link->second.first, " to ",
                                       link->second.second, "; valid are 0 to ", ranks - 1));
    }
    timeline_.transfers.push_back(
        {link->second.first, link->second.second, sent, sent, start, start + time(i, "dur")});
  }

  /// The arrow stands behind the slice that it passes.
  void arrow_through(std::size_t i) {
    const int id = events_.whole(i, "id");
    if (timeline_.transfers.empty() || events_.whole(i, "tid") != transfer_track_ ||
        time(i, "ts") != timeline_.transfers.back().start) {
      events_.refuse_event(i, sentence("arrow ", id, ", which passes through no transfer"));
    }
    messages_[id] = timeline_.transfers.size() - 1;
  }
  void arrow_end(std::size_t i) {
    const auto message = messages_.find(events_.whole(i, "id"));
    if (message == messages_.end()) events_.refuse_event(i, "an arrow that has not begun");
    uses_.push_back({message->second, Use{i, events_.whole(i, "tid"), time(i, "ts")}});
  }

  void join(std::size_t message, const Use& use) {
    dpp::Transfer& t = timeline_.transfers[message];
    const bool gradient = t.sent.kind == dpp::ActionKind::send_backward;
    if (use.rank == t.to) {
      const auto& actions = timeline_.ranks[static_cast<std::size_t>(t.to)];
      auto a = std::lower_bound(actions.begin(), actions.end(), use.start,
                                [](const dpp::TimedAction& x, double at) { return x.start < at; });
      for (; a != actions.end() && a->start == use.start; ++a) {
        const bool takes = gradient ? gives_input_gradient(a->action.kind)
                                    : a->action.kind == dpp::ActionKind::forward;
        if (!takes || a->action.microbatch != t.sent.microbatch) continue;
        t.received = dpp::make_action(
            gradient ? dpp::ActionKind::recv_backward : dpp::ActionKind::recv_forward,
            a->action.chunk, a->action.microbatch);
        return;
      }
    }
    events_.refuse_event(use.event, "an arrow to where no action uses its message");
  }

  const EventReader& events_;
  dpp::Timeline timeline_;
  std::map<int, std::pair<int, int>> links_;  // by track
  int transfer_track_ = -1;                   // of the last transfer
  std::map<int, std::size_t> messages_;       // by arrow
  std::vector<std::pair<std::size_t, Use>> uses_;
};

}  // namespace detail

/// @param file  its name, for refusals
/// Throws Error(bad_input), with the number of the event from 0.
inline TraceFile parse_trace(const std::string& text, const std::string& file) {
  const detail::EventReader events(text, file);
  if (detail::MegatronAppReader::wrote(events))
    return {"MegatronApp", detail::MegatronAppReader(events).read()};
  if (detail::TimelineReader::wrote(events))
    return {"mega-plan", detail::TimelineReader(events).read()};
  events.refuse(
      "is no trace of a pipeline; valid are MegatronApp's profiles, with 'iteration begin', what "
      "mega-plan schedule --perfetto writes, and the folder or files of a trainer's --trace");
}

/// Reads a file, packed by gzip or not.
inline TraceFile read_trace(const std::string& path) {
  constexpr std::size_t largest = 256U << 20;
  return parse_trace(read_unpacked(path, largest), path);
}

}  // namespace plan
