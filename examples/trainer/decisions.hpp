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
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace trainer {

/// The value of a log's key "decision", in the line of the step behind which the dial moved.
[[nodiscard]] inline nlohmann::json decision_of(const mega::dpp::DialMove& move) {
  return {{"schedule", "adaptive"},
          {"from", move.from},
          {"to", move.to},
          {"reason", to_string(move.reason)},
          {"step_seconds", move.measured.step_seconds},
          {"exposed_seconds", move.measured.exposed_seconds},
          {"memory_share", move.measured.memory_share}};
}

/// The same, in the line of the first step of the order.
[[nodiscard]] inline nlohmann::json decision_of(const FoundOrder& order) {
  auto times = nlohmann::json::array();
  for (const mega::dpp::ActionTimes& t : order.times)
    times.push_back({t.forward, t.backward_input, t.backward_weight, t.hop});
  return {{"schedule", "auto"},
          {"order", order.name},
          {"predicted_bubble", order.bubble},
          {"predicted_makespan", order.makespan},
          {"peak_activations", order.peak},
          {"stage_times", times}};
}

[[nodiscard]] inline StageTimes stage_times_of(const nlohmann::json& decision) {
  StageTimes out;
  for (const auto& t : decision.at("stage_times"))
    out.push_back({t.at(0).get<double>(), t.at(1).get<double>(), t.at(2).get<double>(),
                   t.at(3).get<double>()});
  return out;
}

/// All of it, for the other ranks.
[[nodiscard]] inline std::string message_of(const FoundOrder& order) {
  nlohmann::json out = decision_of(order);
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

/// What a log says that was decided.
struct RecordedDecisions {
  std::vector<mega::dpp::DialMove> moves;
  StageTimes stage_times;  ///< empty: no order was searched
};

/// Reads the file of --log-json. @param schedule  adaptive or automatic: the other's are passed
/// over
/// @throws  Error(bad_input) with the line
[[nodiscard]] inline RecordedDecisions read_decisions(const std::string& path, Schedule schedule) {
  std::ifstream in(path);
  mega::expects(in.good(), mega::ErrorCode::bad_input, [&] {
    return mega::sentence("--replay-decisions: cannot read '", path, "': ", std::strerror(errno));
  });
  const auto reason_of = [](const std::string& text) {
    using enum mega::dpp::DialReason;
    for (const auto reason : {links, memory, no_gain}) {
      if (to_string(reason) == text) return reason;
    }
    throw std::invalid_argument("the reason '" + text + "' is not links, memory or no gain");
  };
  RecordedDecisions out;
  std::string line;
  std::int64_t steps = 0;
  for (std::int64_t number = 1; std::getline(in, line); ++number) {
    try {
      const auto step = nlohmann::json::parse(line);
      const std::int64_t after = step.at("step").get<std::int64_t>() - 1;
      ++steps;
      if (!step.contains("decision")) continue;
      const auto& decision = step.at("decision");
      const bool of_dial = decision.at("schedule") == "adaptive";
      if (of_dial != (schedule == Schedule::adaptive)) continue;
      if (of_dial) {
        out.moves.push_back({after,
                             decision.at("from").get<int>(),
                             decision.at("to").get<int>(),
                             reason_of(decision.at("reason").get<std::string>()),
                             {decision.at("step_seconds").get<double>(),
                              decision.at("exposed_seconds").get<double>(),
                              decision.at("memory_share").get<double>()}});
      } else {
        out.stage_times = stage_times_of(decision);
      }
    } catch (const std::exception& e) {
      throw mega::Error(mega::ErrorCode::bad_input,
                        mega::sentence("--replay-decisions: line ", number, " of ", path,
                                       " is no step of a log: ", e.what()));
    }
  }
  mega::expects(steps > 0 && (schedule == Schedule::adaptive || !out.stage_times.empty()),
                mega::ErrorCode::bad_input, [&] {
                  return mega::sentence("--replay-decisions: ", path, " holds no ",
                                        steps > 0 ? "decision of --schedule auto" : "step", " in ",
                                        steps, " lines");
                });
  return out;
}

/// Refuses moves to sizes that the dial of this run does not have.
/// @throws  Error(bad_input)
inline void check_moves(const std::vector<mega::dpp::DialMove>& moves,
                        const std::vector<int>& sizes) {
  for (const mega::dpp::DialMove& move : moves) {
    mega::expects(
        std::count(sizes.begin(), sizes.end(), move.to) == 1, mega::ErrorCode::bad_input, [&] {
          std::string listed;
          for (const int size : sizes)
            listed += (listed.empty() ? "" : ", ") + std::to_string(size);
          return mega::sentence("--replay-decisions: step ", move.step + 1, " turns to groups of ",
                                move.to, " micro-batches, but the sizes of this run are ", listed);
        });
  }
}

}  // namespace trainer
