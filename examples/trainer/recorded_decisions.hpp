/// @file  Decisions of --schedule adaptive and auto back from a log, to repeat them.
#pragma once
#include "config.hpp"
#include "decisions.hpp"
#include "order_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/adaptive.hpp>
#include <mega/dpp/simulator.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <istream>
#include <limits>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace trainer {

namespace detail {

/// A log of --log-json that is to be repeated, line by line. All that is refused is refused in one
/// sentence with the file, the line, what stands there and what this run has.
class DecisionLog {
  static constexpr std::int64_t most_steps = 1'000'000'000'000'000;

 public:
  using Json = nlohmann::json;

  /// @param schedule  adaptive or automatic
  DecisionLog(const std::string& path, Schedule schedule, const DecidedPipeline& run)
      : path_(path), adaptive_(schedule == Schedule::adaptive), run_(run) {}

  /// Calls begin(step, value) in the line of the first step of each run that the log is of, and
  /// decide(step, decision) for each decision; steps are counted from 1. Runs follow each other,
  /// and one that was resumed may do steps again: what was decided behind them counts no more.
  template <class Begin, class Decide>
  void read(const Begin& begin, const Decide& decide) {
    std::error_code unknown;
    std::ifstream in(path_);
    mega::expects(in.good() && !std::filesystem::is_directory(path_, unknown),
                  mega::ErrorCode::bad_input, [&] {
                    return mega::sentence("--replay-decisions: cannot read '", path_,
                                          "': ", std::strerror(in.good() ? EISDIR : errno));
                  });
    const char* const head = adaptive_ ? "dial" : "decision";
    for (line_ = 1; next_line(in); ++line_) {
      const Json record = parsed(text_, in.eof());
      const auto step = whole(record, "step", 1, most_steps);
      const auto first = record.find(head), decision = record.find("decision");
      if (decision != record.end()) check_head("decision", *decision);
      if (first != record.end()) {
        check_head(head, *first);
        if (steps_ > 0 && step > last_step_ + 1) throw lost(step);
        begin(step, *first);
      } else if (steps_ == 0) {
        throw fault(mega::sentence("has no \"", head, "\", with which a log of --schedule ",
                                   adaptive_ ? "adaptive" : "auto", " begins"));
      } else if (step != last_step_ + 1) {
        throw lost(step);
      }
      if (decision != record.end()) decide(step, *decision);
      last_step_ = step;
      ++steps_;
    }
    if (steps_ == 0) throw wrong("it holds no step");
  }

  [[nodiscard]] mega::Error fault(const std::string& why) const {
    return wrong(mega::sentence("line ", line_, " ", why));
  }
  [[nodiscard]] mega::Error wrong(const std::string& why) const {
    return mega::Error(mega::ErrorCode::bad_input,
                       mega::sentence("--replay-decisions ", path_, ": ", why));
  }

  [[nodiscard]] std::int64_t whole(const Json& object, const char* key, std::int64_t least,
                                   std::int64_t most) const {
    const auto found = object.find(key);
    const bool valid = found != object.end() && found->is_number_integer() &&
                       found->get<double>() >= static_cast<double>(least) &&
                       found->get<double>() <= static_cast<double>(most);
    if (!valid)
      throw fault(mega::sentence("has ", shown(object, key), ", not a whole number from ", least));
    return found->get<std::int64_t>();
  }
  [[nodiscard]] double number(const Json& object, const char* key) const {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_number())
      throw fault(mega::sentence("has ", shown(object, key), ", not a number"));
    return found->get<double>();
  }
  [[nodiscard]] std::string text(const Json& object, const char* key) const {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_string())
      throw fault(mega::sentence("has ", shown(object, key), ", not a text"));
    return found->get<std::string>();
  }

  /// `"key": value`, or that there is none; long values are cut.
  [[nodiscard]] static std::string shown(const Json& object, const char* key) {
    const auto found = object.find(key);
    if (found == object.end()) return mega::sentence("no \"", key, "\"");
    constexpr std::size_t most = 40;
    std::string value = found->dump(-1, ' ', true, Json::error_handler_t::replace);
    if (value.size() > most) value = value.substr(0, most) + "...";
    return mega::sentence("\"", key, "\": ", value);
  }

 private:
  /// Whether there is one.
  bool next_line(std::istream& in) {
    constexpr std::size_t most = std::size_t{1} << 20;  // no record is as long
    text_.clear();
    for (int c = in.get(); c != std::istream::traits_type::eof(); c = in.get()) {
      if (c == '\n') return true;
      if (text_.size() == most)
        throw fault(mega::sentence("is longer than ", most, " bytes, so it is no step of a log"));
      text_ += static_cast<char>(c);
    }
    return !text_.empty();
  }

  [[nodiscard]] mega::Error lost(std::int64_t step) const {
    return fault(mega::sentence("is step ", step, " behind step ", last_step_,
                                "; lines are missing, or not in their order"));
  }

  [[nodiscard]] Json parsed(const std::string& line, bool last) const {
    Json record = Json::parse(line, nullptr, false);
    if (!record.is_discarded() && record.is_object()) return record;
    if (last && line.starts_with('{'))
      throw fault(mega::sentence("is cut off after ", line.size(),
                                 line.size() == 1 ? " byte" : " bytes",
                                 ", as a run that was killed leaves it; take the line away"));
    throw fault("is no step of a log that --log-json wrote");
  }

  void check_head(const char* key_of_head, const Json& decision) const {
    if (!decision.is_object())
      throw fault(mega::sentence("has a \"", key_of_head, "\" that is no object"));
    const std::string schedule = text(decision, "schedule");
    if (schedule != "adaptive" && schedule != "auto")
      throw fault(mega::sentence("is a decision of --schedule ", shown(decision, "schedule"),
                                 "; valid are adaptive and auto"));
    if ((schedule == "adaptive") != adaptive_)
      throw fault(mega::sentence("is a decision of --schedule ", schedule,
                                 ", but this run has --schedule ",
                                 adaptive_ ? "adaptive" : "auto"));
    constexpr auto most = std::numeric_limits<int>::max();
    const auto same = [&](const char* key, int own, const std::string& ours) {
      if (whole(decision, key, 1, most) != own)
        throw fault(
            mega::sentence("was decided with ", shown(decision, key), ", but this run has ", ours));
    };
    same("pp", run_.pp, mega::sentence("--pp ", run_.pp));
    same("vpp", run_.vpp, mega::sentence("--vpp ", run_.vpp));
    same("micro_batches", run_.micro_batches,
         mega::sentence(run_.micro_batches, " micro-batches a step"));
  }

  std::string path_;
  bool adaptive_;
  DecidedPipeline run_;
  std::string text_;
  std::int64_t line_ = 0;
  std::int64_t steps_ = 0, last_step_ = 0;
};

}  // namespace detail

/// What a log of --schedule adaptive says of its dial.
struct RecordedDial {
  std::int64_t first_step = 1;             ///< that it tells of, counted from 1
  std::vector<mega::dpp::DialMove> moves;  ///< each from where the one before has left the dial
};

/// @param sizes  of groups that this run's dial has; it begins with the first
/// @throws  Error(bad_input) with the line
[[nodiscard]] inline RecordedDial read_dial(const std::string& path, const DecidedPipeline& run,
                                            const std::vector<int>& sizes) {
  detail::DecisionLog log(path, Schedule::adaptive, run);
  const auto size = [&](const nlohmann::json& decision, const char* key) {
    const auto given = log.whole(decision, key, 1, std::numeric_limits<int>::max());
    if (std::count(sizes.begin(), sizes.end(), given) == 1) return static_cast<int>(given);
    std::string listed;
    for (const int each : sizes) listed += (listed.empty() ? "" : ", ") + std::to_string(each);
    throw log.fault(mega::sentence("turns \"", key, "\" groups of ", given,
                                   " micro-batches, but the sizes of this run are ", listed));
  };
  const auto reason = [&](const nlohmann::json& decision) {
    const std::string said = log.text(decision, "reason");
    using enum mega::dpp::DialReason;
    for (const auto known : {links, memory, no_gain}) {
      if (to_string(known) == said) return known;
    }
    throw log.fault(mega::sentence("has ", detail::DecisionLog::shown(decision, "reason"),
                                   "; valid are links, memory and no gain"));
  };
  RecordedDial out;
  std::vector<mega::dpp::DialMove>& moves = out.moves;
  const auto stands_at = [&] { return moves.empty() ? sizes.front() : moves.back().to; };
  bool begun = false;
  const auto begin = [&](std::int64_t step, const nlohmann::json& dial) {
    const int given = size(dial, "group_size");
    while (!moves.empty() && moves.back().step >= step - 1) moves.pop_back();
    if (!std::exchange(begun, true)) {
      out.first_step = step;
      // What came before has left it there.
      if (step > 1 && given != sizes.front()) moves.push_back({step - 2, sizes.front(), given});
    }
    if (given != stands_at())
      throw log.fault(mega::sentence("goes on with groups of ", given,
                                     " micro-batches, but the dial stood at ", stands_at()));
  };
  const auto decide = [&](std::int64_t step, const nlohmann::json& decision) {
    const int from = size(decision, "from");
    if (from != stands_at())
      throw log.fault(mega::sentence("turns the dial from groups of ", from,
                                     " micro-batches, but it stood at ", stands_at()));
    moves.push_back({step - 1,
                     from,
                     size(decision, "to"),
                     reason(decision),
                     {log.number(decision, "step_seconds"), log.number(decision, "exposed_seconds"),
                      log.number(decision, "memory_share")}});
  };
  log.read(begin, decide);
  return out;
}

/// What a log of --schedule auto says of its order.
struct RecordedOrder {
  StageTimes times;  ///< with which it was searched: one for all stages, or one for each
  std::string name;
  int peak = 0;
  double makespan = 0;
};

/// @throws  Error(bad_input) with the line
[[nodiscard]] inline RecordedOrder read_order(const std::string& path, const DecidedPipeline& run) {
  detail::DecisionLog log(path, Schedule::automatic, run);
  const auto stages = static_cast<std::size_t>(run.pp) * static_cast<std::size_t>(run.vpp);
  const auto decided = [&](const nlohmann::json& decision) {
    const auto is_stage = [](const nlohmann::json& t) {
      const auto is_number = [](const nlohmann::json& n) { return n.is_number(); };
      return t.is_array() && t.size() == 4 && std::all_of(t.begin(), t.end(), is_number);
    };
    const auto shown = [&](const char* key) { return detail::DecisionLog::shown(decision, key); };
    if (log.text(decision, "placement") != run.placement())
      throw log.fault(mega::sentence("was decided with ", shown("placement"),
                                     ", but this run has --placement ", run.placement()));
    constexpr auto most = std::numeric_limits<int>::max();
    if (log.whole(decision, "memory_cap", 0, most) != run.memory_cap)
      throw log.fault(mega::sentence(
          "was decided with ", shown("memory_cap"), ", but this run has ",
          run.memory_cap > 0 ? mega::sentence("--memory-cap ", run.memory_cap)
                             : std::string("no --memory-cap, which is \"memory_cap\": 0")));
    const auto found = decision.find("stage_times");
    if (found == decision.end() || !found->is_array() || found->empty() ||
        !std::all_of(found->begin(), found->end(), is_stage)) {
      throw log.fault(mega::sentence("has ", shown("stage_times"),
                                     ", not a list of four numbers for each stage"));
    }
    if (found->size() != 1 && found->size() != stages)
      throw log.fault(mega::sentence("has the times of ", found->size(), " stages, but --pp ",
                                     run.pp, " times --vpp ", run.vpp, " of this run is ", stages));
    RecordedOrder out{stage_times_of(decision), log.text(decision, "order"),
                      static_cast<int>(log.whole(decision, "peak_activations", 1, most)),
                      log.number(decision, "predicted_makespan")};
    for (const mega::dpp::ActionTimes& stage : out.times) {
      if (const std::string why = impossible_in(stage); !why.empty())
        throw log.fault("has \"stage_times\" with " + why);
    }
    return out;
  };
  nlohmann::json first;
  RecordedOrder out;
  const auto begin = [&](std::int64_t, const nlohmann::json& decision) {
    if (first.is_null()) {
      first = decision;
      out = decided(decision);
    } else if (decision != first) {
      throw log.fault(
          "decides for another order than the first line, as a run that was resumed "
          "does; keep the lines of one run");
    }
  };
  log.read(begin, [](std::int64_t, const nlohmann::json&) {});
  return out;
}

/// The order that a log tells of, found again.
/// @throws  Error(bad_input) where the search finds another
[[nodiscard]] inline FoundOrder find_recorded(const std::string& path, const SearchLimits& limits,
                                              const RecordedOrder& recorded) {
  FoundOrder found = find_order(limits, recorded.times);
  const bool same = found.name == recorded.name && found.peak == recorded.peak &&
                    std::abs(found.makespan - recorded.makespan) <= 1e-9 * found.makespan;
  mega::expects(same, mega::ErrorCode::bad_input, [&] {
    const auto told = [](const std::string& name, double makespan, int peak) {
      return mega::sentence(name, " with a step of ", makespan, " and at most ", peak,
                            " activations a rank");
    };
    return mega::sentence("--replay-decisions ", path, ": its order is ",
                          told(recorded.name, recorded.makespan, recorded.peak),
                          ", but with its stage_times the search finds ",
                          told(found.name, found.makespan, found.peak),
                          "; the log was changed, or written by another version");
  });
  return found;
}

}  // namespace trainer
