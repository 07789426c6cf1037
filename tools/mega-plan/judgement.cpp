#include "judgement.hpp"

#include "arguments.hpp"
#include <mega/core/error.hpp>

#include <algorithm>
#include <cstddef>

namespace plan {

namespace dpp = mega::dpp;
using mega::sentence;

namespace {

dpp::Cluster ideal(const dpp::ActionTimes& times) {
  dpp::Cluster cluster;
  cluster.times = {times};
  return cluster;
}

}  // namespace

Judgement judge(const dpp::ScheduleView& lowered, const dpp::ActionTimes& times) {
  Judgement result;
  result.verdict = dpp::verify(lowered);
  if (!result.verdict.ok()) return result;
  result.slots = dpp::required_slots(lowered, result.verdict);
  // Where nothing is posted ahead, memory is allocated when a message is received.
  result.runs_on = {dpp::runs_on(lowered, result.slots, dpp::Transport::slots()),
                    dpp::runs_on(lowered, {}, dpp::Transport::rendezvous()),
                    dpp::runs_on(lowered, {}, dpp::Transport::blocking())};
  result.run = dpp::estimate(lowered, ideal(times));
  return result;
}

dpp::Timeline timeline_of(const dpp::ScheduleView& lowered, const dpp::ActionTimes& times) {
  return dpp::simulate(lowered, ideal(times)).timeline;
}

void put_figures(nlohmann::ordered_json& out, const dpp::ScheduleView& schedule,
                 const Judgement& judgement) {
  const dpp::Timing& timing = judgement.run->timing;
  out["makespan"] = timing.makespan;
  out["busy"] = timing.busy;
  out["bubble_wall"] = timing.wall_fraction();
  out["bubble_span"] = timing.span_fraction();
  out["peak_activations"] = timing.peak_per_rank;
  auto& slots = out["slots"] = nlohmann::ordered_json::array();
  for (int rank = 0; rank < schedule.p; ++rank) {
    const auto of_rank = judgement.slots.begin() + rank * schedule.v;
    slots.push_back(std::vector<int>(of_rank, of_rank + schedule.v));
  }
  out["deadlock_free"] = judgement.runs_on.slots;
  out["runs_on"] = {{"slots", judgement.runs_on.slots},
                    {"rendezvous", judgement.runs_on.rendezvous},
                    {"blocking", judgement.runs_on.blocking}};
  out["transfer_coverage"] = judgement.run->transfers.coverage();
  out["exposed_transfer"] = judgement.run->transfers.exposed();
}

std::string figures_text(const dpp::ScheduleView& schedule, const Judgement& judgement) {
  const dpp::Timing& timing = judgement.run->timing;
  const dpp::TransferTime& transfers = judgement.run->transfers;
  const auto percent = [](double fraction) { return fixed(100 * fraction, 2) + " %"; };
  const auto yes = [](bool holds) { return holds ? "yes" : "no"; };
  std::string text;
  text += sentence("makespan          ", timing.makespan, ", of which the busiest rank computes ",
                   timing.busy, "\n");
  text += "bubble, wall      " + percent(timing.wall_fraction()) + " of the makespan\n";
  text += "bubble, span      " + percent(timing.span_fraction()) +
          " of the longest time from a rank's first start to its last end\n";
  text += "peak activations  " + joined(timing.peak_per_rank) + ", of a chunk, by rank\n";
  text += "slots             " + joined(judgement.slots) + ", by rank" +
          (schedule.v > 1 ? " and chunk\n" : "\n");
  text += sentence("deadlock-free     ", yes(judgement.runs_on.slots),
                   " (without posted receives: ", yes(judgement.runs_on.rendezvous),
                   "; on blocking links: ", yes(judgement.runs_on.blocking), ")\n");
  if (transfers.total > 0) {
    text += "transfers         " + percent(transfers.coverage()) +
            sentence(" covered by compute, ", transfers.exposed(), " exposed on all ranks\n");
  }
  return text;
}

}  // namespace plan
