/// @file  The decisions of --schedule adaptive and auto as JSON: in the log and between ranks.
#pragma once
#include "order_choice.hpp"
#include <mega/dpp/action.hpp>
#include <mega/dpp/adaptive.hpp>
#include <mega/dpp/simulator.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace trainer {

/// The pipeline that a decision is for; one of another size cannot repeat it.
struct DecidedPipeline {
  int pp = 1;
  int vpp = 1;
  int micro_batches = 1;
  bool on_v = false;   ///< of --schedule auto: where the stages stand
  int memory_cap = 0;  ///< the same: of the fullest rank's activations; 0: none was given

  [[nodiscard]] const char* placement() const noexcept { return on_v ? "v" : "loop"; }
};

/// @pre  of a log or about to be in one: {"schedule": ..., "pp": 2, "vpp": 2, "micro_batches": 8}
[[nodiscard]] inline nlohmann::json decision_head(const char* schedule, const DecidedPipeline& of) {
  return {
      {"schedule", schedule}, {"pp", of.pp}, {"vpp", of.vpp}, {"micro_batches", of.micro_batches}};
}

/// Where the dial of --schedule adaptive stands: the value of a log's key "dial", in the line of
/// the first step of each run, and a part of its checkpoints.
[[nodiscard]] inline nlohmann::json dial_of(int group_size, const DecidedPipeline& of) {
  nlohmann::json out = decision_head("adaptive", of);
  out["group_size"] = group_size;
  return out;
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
  out["memory_cap"] = of.memory_cap;
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

}  // namespace trainer
