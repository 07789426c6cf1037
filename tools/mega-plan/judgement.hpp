/// @file  What a schedule is worth: whether it runs, how long it takes and what it holds.
#pragma once
#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/timeline.hpp>
#include <mega/dpp/verifier.hpp>

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

namespace plan {

/// On which links a lowered schedule runs to its end, its transfers as they stand.
struct RunsOn {
  bool slots = false;       ///< receives posted ahead into the slots that it requires, as the
                            ///< executor does
  bool rendezvous = false;  ///< nothing posted ahead, two out-buffers a channel
  bool blocking = false;    ///< transfers hold both ends and share a queue a rank pair, as one NCCL
                            ///< stream does
};

struct Judgement {
  mega::dpp::Verdict verdict;
  std::vector<int> slots;  ///< [p*v] required; empty unless the verdict is good
  RunsOn runs_on;
  /// On ideal links; none unless the verdict is good.
  std::optional<mega::dpp::ClusterEstimate> run;
};

/// @param lowered  as its transfers stand
[[nodiscard]] Judgement judge(const mega::dpp::ScheduleView& lowered,
                              const mega::dpp::ActionTimes& times);

/// When its actions and transfers take place on ideal links, for pictures.
/// @pre  the judgement is good
[[nodiscard]] mega::dpp::Timeline timeline_of(const mega::dpp::ScheduleView& lowered,
                                              const mega::dpp::ActionTimes& times);

/// The figures of a good judgement, as JSON members and as lines of text.
void put_figures(nlohmann::ordered_json& out, const mega::dpp::ScheduleView& schedule,
                 const Judgement& judgement);
[[nodiscard]] std::string figures_text(const mega::dpp::ScheduleView& schedule,
                                       const Judgement& judgement);

}  // namespace plan
