/// @file  The decisions of --schedule adaptive and auto as JSON: in the log, between ranks, and
/// back from a log to repeat them.
#pragma once
#include "config.hpp"
#include "order_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/adaptive.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace trainer {

/// The pipeline that a decision is for; one of another size cannot repeat it.
struct DecidedPipeline {
  int pp = 1;
  int vpp = 1;
  int micro_batches = 1;
  bool on_v = false;  ///< of --schedule auto: where the stages stand

  [[nodiscard]] const char* placement() const noexcept { return on_v ? "v" : "loop"; }
};

/// @pre  of a log or about to be in one: {"schedule": ..., "pp": 2, "vpp": 2, "micro_batches": 8}
[[nodiscard]] inline nlohmann::json decision_head(const char* schedule, const DecidedPipeline& of) {
  return {
      {"schedule", schedule}, {"pp", of.pp}, {"vpp", of.vpp}, {"micro_batches", of.micro_batches}};
}

/// The value of a log's key "decision", in the line of the step behind which the dial moved.
[[nodiscard]] inline nlohmann::json decision_of(const mega::dpp::DialMove& move,
                                                const DecidedPipeline& of) {
  nlohmann::json out = decision_head("adaptive", of);
  out.update({{"from", move.from},
              {"to", move.to},
              {"reason", to_string(move.reason)},
              {"step_seconds", move.measured.step_seconds},
              {"exposed_seconds", move.measured.exposed_seconds},
              {"memory_share", move.measured.memory_share}});
  return out;
}

/// What is known of an order besides its lists.
[[nodiscard]] inline nlohmann::json figures_of(const FoundOrder& order) {
  auto times = nlohmann::json::array();
  for (const mega::dpp::ActionTimes& t : order.times)
    times.push_back({t.forward, t.backward_input, t.backward_weight, t.hop});
  return {{"order", order.name},
          {"predicted_bubble", order.bubble},
          {"predicted_makespan", order.makespan},
          {"peak_activations", order.peak},
          {"stage_times", times}};
}

/// The same, in the line of the first step of the order.
[[nodiscard]] inline nlohmann::json decision_of(const FoundOrder& order,
                                                const DecidedPipeline& of) {
  nlohmann::json out = decision_head("auto", of);
  out["placement"] = of.placement();
  out.update(figures_of(order));
  return out;
}

[[nodiscard]] inline StageTimes stage_times_of(const nlohmann::json& figures) {
  StageTimes out;
  for (const auto& t : figures.at("stage_times"))
    out.push_back({t.at(0).get<double>(), t.at(1).get<double>(), t.at(2).get<double>(),
                   t.at(3).get<double>()});
  return out;
}

/// All of it, for the other ranks.
[[nodiscard]] inline std::string message_of(const FoundOrder& order) {
  nlohmann::json out = figures_of(order);
  auto& lists = out["lists"] = nlohmann::json::array();
  for (const auto& list : *order.lists) {
    auto& numbers = lists.emplace_back(nlohmann::json::array());
    for (const mega::dpp::Action& a : list) {
      for (const int number :
           {static_cast<int>(a.kind), a.with_next ? 1 : 0, static_cast<int>(a.chunk), a.microbatch})
        numbers.push_back(number);
    }
  }
  out["rival"] = order.rival;
  out["rival_makespan"] = order.rival_makespan;
  return out.dump();
}
[[nodiscard]] inline FoundOrder order_of(const std::string& message) {
  const auto in = nlohmann::json::parse(message);
  FoundOrder out;
  out.name = in.at("order").get<std::string>();
  out.bubble = in.at("predicted_bubble").get<double>();
  out.makespan = in.at("predicted_makespan").get<double>();
  out.peak = in.at("peak_activations").get<int>();
  out.times = stage_times_of(in);
  out.rival = in.at("rival").get<std::string>();
  out.rival_makespan = in.at("rival_makespan").get<double>();
  ActionLists lists;
  for (const auto& numbers : in.at("lists")) {
    auto& list = lists.emplace_back();
    for (std::size_t i = 0; i + 3 < numbers.size(); i += 4) {
      list.push_back(
          mega::dpp::make_action(static_cast<mega::dpp::ActionKind>(numbers[i].get<int>()),
                                 numbers[i + 2].get<int>(), numbers[i + 3].get<std::int32_t>()));
      list.back().with_next = numbers[i + 1].get<int>() != 0;
    }
  }
  out.lists = std::make_shared<const ActionLists>(std::move(lists));
  return out;
}

namespace detail {

/// A log of --log-json that is to be repeated, line by line. All that is refused is refused in one
/// sentence with the file, the line, what stands there and what this run has.
class DecisionLog {
 public:
  using Json = nlohmann::json;

  /// @param schedule  adaptive or automatic
  DecisionLog(const std::string& path, Schedule schedule, const DecidedPipeline& run)
      : path_(path), adaptive_(schedule == Schedule::adaptive), run_(run) {}

  /// Calls use(step, decision) for each decision, with the number of its step counted from 1.
  template <class Use>
  void for_each_decision(const Use& use) {
    std::error_code unknown;
    std::ifstream in(path_);
    mega::expects(in.good() && !std::filesystem::is_directory(path_, unknown),
                  mega::ErrorCode::bad_input, [&] {
                    return mega::sentence("--replay-decisions: cannot read '", path_,
                                          "': ", std::strerror(in.good() ? EISDIR : errno));
                  });
    std::string text;
    for (line_ = 1; std::getline(in, text); ++line_) {
      const Json record = parsed(text, in.eof());
      const auto step = whole(record, "step", 1, std::numeric_limits<std::int64_t>::max());
      ++steps_;
      const auto decision = record.find("decision");
      if (decision == record.end()) continue;
      check_head(*decision);
      use(step, *decision);
    }
    if (steps_ == 0) throw wrong("it holds no step");
  }

  [[nodiscard]] std::int64_t steps() const noexcept { return steps_; }

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
  [[nodiscard]] Json parsed(const std::string& line, bool last) const {
    Json record = Json::parse(line, nullptr, false);
    if (!record.is_discarded() && record.is_object()) return record;
    if (last && line.starts_with('{'))
      throw fault(mega::sentence("is cut off after ", line.size(),
                                 line.size() == 1 ? " byte" : " bytes",
                                 ", as a run that was killed leaves it; take the line away"));
    throw fault("is no step of a log that --log-json wrote");
  }

  void check_head(const Json& decision) const {
    if (!decision.is_object()) throw fault("has a \"decision\" that is no object");
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
      if (!decision.contains(key)) return;  // of a log that says less
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
  std::int64_t line_ = 0;
  std::int64_t steps_ = 0;
};

}  // namespace detail

/// The dial's moves that a log of --schedule adaptive holds.
/// @param sizes  of groups that this run's dial has
/// @throws  Error(bad_input) with the line
[[nodiscard]] inline std::vector<mega::dpp::DialMove> read_moves(const std::string& path,
                                                                 const DecidedPipeline& run,
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
  std::vector<mega::dpp::DialMove> moves;
  log.for_each_decision([&](std::int64_t step, const nlohmann::json& decision) {
    moves.push_back({step - 1,
                     size(decision, "from"),
                     size(decision, "to"),
                     reason(decision),
                     {log.number(decision, "step_seconds"), log.number(decision, "exposed_seconds"),
                      log.number(decision, "memory_share")}});
  });
  return moves;
}

/// The times with which --schedule auto searched, by a log that holds its decision: one for all
/// stages, or one for each.
/// @throws  Error(bad_input) with the line
[[nodiscard]] inline StageTimes read_stage_times(const std::string& path,
                                                 const DecidedPipeline& run) {
  detail::DecisionLog log(path, Schedule::automatic, run);
  const auto stages = static_cast<std::size_t>(run.pp) * static_cast<std::size_t>(run.vpp);
  StageTimes times;
  log.for_each_decision([&](std::int64_t, const nlohmann::json& decision) {
    const auto is_stage = [](const nlohmann::json& t) {
      const auto is_number = [](const nlohmann::json& n) { return n.is_number(); };
      return t.is_array() && t.size() == 4 && std::all_of(t.begin(), t.end(), is_number);
    };
    if (decision.contains("placement") && log.text(decision, "placement") != run.placement())
      throw log.fault(mega::sentence("was decided with ",
                                     detail::DecisionLog::shown(decision, "placement"),
                                     ", but this run has --placement ", run.placement()));
    const auto found = decision.find("stage_times");
    if (found == decision.end() || !found->is_array() || found->empty() ||
        !std::all_of(found->begin(), found->end(), is_stage)) {
      throw log.fault(mega::sentence("has ", detail::DecisionLog::shown(decision, "stage_times"),
                                     ", not a list of four numbers for each stage"));
    }
    if (found->size() != 1 && found->size() != stages)
      throw log.fault(mega::sentence("has the times of ", found->size(), " stages, but --pp ",
                                     run.pp, " times --vpp ", run.vpp, " of this run is ", stages));
    times = stage_times_of(decision);
    for (const mega::dpp::ActionTimes& stage : times) {
      if (const std::string why = impossible_in(stage); !why.empty())
        throw log.fault("has \"stage_times\" with " + why);
    }
  });
  if (times.empty())
    throw log.wrong(mega::sentence("its ", log.steps(),
                                   log.steps() == 1 ? " step has" : " steps have",
                                   " no decision of --schedule auto"));
  return times;
}

}  // namespace trainer
