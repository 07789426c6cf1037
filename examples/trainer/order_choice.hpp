/// @file  What --schedule auto and adaptive decide: the search from stage times, the limits of the
/// dial, and what cannot go together.
#pragma once
#include "config.hpp"
#include "schedule_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/adaptive.hpp>
#include <mega/dpp/auto_schedule.hpp>
#include <mega/dpp/named_orders.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/verifier.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace trainer {

using StageTimes = std::vector<mega::dpp::ActionTimes>;

/// Longest time of an action that a search takes, in any unit.
inline constexpr double longest_time = 1e15;

/// What no stage can take, in words; empty for possible times.
[[nodiscard]] inline std::string impossible_in(const mega::dpp::ActionTimes& stage) {
  for (const double time :
       {stage.forward, stage.backward_input, stage.backward_weight, stage.hop}) {
    if (!(time >= 0 && time <= longest_time))
      return mega::sentence(time, ", which is no time: valid are 0 to ", longest_time);
  }
  const bool works = stage.forward + stage.backward_input + stage.backward_weight > 0;
  return works ? "" : "a stage whose forward and backward take no time";
}

/// "F,I,W" or "F,I,W,HOP", one for all stages or, separated by semicolons, one for each.
/// @throws  Error(usage) with the wrong text
[[nodiscard]] inline StageTimes parse_stage_times(const std::string& text, int stages) {
  const auto wrong = [&](const std::string& why) {
    return mega::Error(mega::ErrorCode::usage,
                       mega::sentence("--stage-times '", text, "' ", why,
                                      "; it takes forward, input gradient, weight gradient and, "
                                      "if wanted, transfer, as 2,2,1,0.1, once or, with ; between "
                                      "them, for each of the ",
                                      stages, " stages"));
  };
  const auto pieces = [](std::string_view whole, char separator) {
    std::vector<std::string_view> out;
    for (std::size_t at = 0; at <= whole.size();) {
      const std::size_t end = std::min(whole.find(separator, at), whole.size());
      out.push_back(whole.substr(at, end - at));
      at = end + 1;
    }
    return out;
  };
  StageTimes out;
  for (const std::string_view stage : pieces(text, ';')) {
    std::vector<double> numbers;
    for (const std::string_view piece : pieces(stage, ',')) {
      double number = 0;
      const auto [end, failed] = std::from_chars(piece.data(), piece.data() + piece.size(), number);
      if (failed != std::errc() || end != piece.data() + piece.size())
        throw wrong(mega::sentence("has '", piece, "' where a number belongs"));
      numbers.push_back(number);
    }
    if (numbers.size() != 3 && numbers.size() != 4)
      throw wrong(mega::sentence("gives ", numbers.size(),
                                 numbers.size() == 1 ? " number" : " numbers", " for a stage"));
    out.push_back({numbers[0], numbers[1], numbers[2], numbers.size() == 4 ? numbers[3] : 0.0});
    if (const std::string fault = impossible_in(out.back()); !fault.empty())
      throw wrong("has " + fault);
  }
  if (out.size() != 1 && out.size() != static_cast<std::size_t>(stages))
    throw wrong(mega::sentence("is for ", out.size(), " stages"));
  return out;
}

/// What the search begins with: no rank holds more activations, and no chunk has more slots, than
/// in this order, but for what --memory-cap adds or takes away.
class SearchLimits {
 public:
  /// @param begun  the order, by the placement and v
  /// @param cap  activations of a chunk that the fullest rank may hold; 0: those of the order
  /// @throws  Error(usage) where not even one micro-batch fits
  SearchLimits(const ChosenTraversal& begun, int p, int m, int v, int cap)
      : first_(made(begun, p, m, v)),
        placement_(begun.placement()),
        slots_(mega::dpp::required_slots(lower(first_))) {
    mega::expects(cap == 0 || cap >= v, mega::ErrorCode::usage, [&] {
      return mega::sentence("--memory-cap ", cap, " is below the ", v,
                            " chunks of a rank, on each of which a micro-batch keeps an "
                            "activation");
    });
    const std::vector<int> peak = verify(lower(first_)).peak_per_rank;
    const int change = cap == 0 ? 0 : cap - *std::max_element(peak.begin(), peak.end());
    for (const int held : peak) caps_.push_back(std::max(held + change, v));
    // With several chunks an order may need a slot that no activation fills.
    added_slots_ = std::max(change, 0) + (v > 1 ? 1 : 0);
    for (int& slots : slots_) slots += added_slots_;
  }

  [[nodiscard]] const mega::dpp::Schedule& first() const noexcept { return first_; }
  [[nodiscard]] ChosenPlacement placement() const noexcept { return placement_; }
  [[nodiscard]] const std::vector<double>& caps() const noexcept { return caps_; }
  /// Slots of a chunk beyond those of the first order.
  [[nodiscard]] int added_slots() const noexcept { return added_slots_; }
  /// [p*v] of each chunk in all.
  [[nodiscard]] const std::vector<int>& slots() const noexcept { return slots_; }

 private:
  [[nodiscard]] static mega::dpp::Schedule made(const ChosenTraversal& begun, int p, int m, int v) {
    mega::expects(!begun.on_v || v == 2, mega::ErrorCode::usage, [&] {
      return mega::sentence("--placement v is for 2 chunks a rank, not ", v,
                            "; leave --vpp out, or give --placement loop");
    });
    return mega::dpp::make_schedule(begun, p, m, v);
  }

  mega::dpp::Schedule first_;
  ChosenPlacement placement_;
  std::vector<int> slots_;
  std::vector<double> caps_;
  int added_slots_ = 0;
};

/// The order that --schedule auto decided for, and why.
struct FoundOrder {
  std::string name;  ///< where it came from
  std::shared_ptr<const ActionLists> lists;
  StageTimes times;
  double makespan = 0;  ///< predicted, in the unit of the times
  double bubble = 0;    ///< idle part of it
  int peak = 0;         ///< of the fullest rank, activations of a chunk
  std::string rival;    ///< 1f1b, dfc or, on the V, zb_v; empty: it did not fit
  double rival_makespan = 0;
};

/// The best order for the times within the limits, the first one at the least.
/// @throws  Error(usage) where the times are impossible
/// @determinism  equal arguments give equal orders on one kind of machine
[[nodiscard]] inline FoundOrder find_order(const SearchLimits& limits, const StageTimes& times) {
  using namespace mega::dpp;
  const ScheduleView first = limits.first().view();
  const AutoSchedule best = auto_schedule({.p = first.p,
                                           .m = first.m,
                                           .v = first.v,
                                           .times = times,
                                           .caps = limits.caps(),
                                           .slots = limits.slots()},
                                          ScheduleGoal::makespan, {}, limits.placement());
  const std::vector<int>& peaks = best.timing.peak_per_rank;
  ActionLists lists = ChosenTraversal::lists_of(best.schedule);
  // The halves of a pair run one after the other here, and either may then begin earlier.
  for (auto& list : lists) {
    for (Action& action : list) action.with_next = false;
  }
  FoundOrder out{.name = best.candidate,
                 .lists = std::make_shared<const ActionLists>(std::move(lists)),
                 .times = times,
                 .makespan = best.timing.makespan,
                 .bubble = best.timing.wall_fraction(),
                 .peak = *std::max_element(peaks.begin(), peaks.end()),
                 .rival = {}};
  const std::string_view rival = limits.placement().is_v ? "zb_v" : first.v == 1 ? "1f1b" : "dfc";
  for (const ScheduleCandidate& c : best.candidates) {
    if (c.name != rival) continue;
    out.rival = c.name;
    out.rival_makespan = c.makespan;
  }
  return out;
}

/// "zb_h1, letters moved: predicted bubble 8.1 %, 0.93 of the time of 1f1b, at most 4 activations a
/// rank".
[[nodiscard]] inline std::string to_string(const FoundOrder& order) {
  char bubble[32], ratio[32] = "";
  std::snprintf(bubble, sizeof bubble, "%.1f %%", 100 * order.bubble);
  if (!order.rival.empty())
    std::snprintf(ratio, sizeof ratio, "%.3f", order.makespan / order.rival_makespan);
  return mega::sentence(
      order.name, ": predicted bubble ", bubble,
      order.rival.empty() ? "" : mega::sentence(", ", ratio, " of the time of ", order.rival),
      ", at most ", order.peak, " activations a rank");
}

/// The largest group of the dial whose orders keep within `cap` activations a rank; 0: any is.
/// @param ahead  activations more, of look-ahead
/// @throws  Error(usage) where the dial has nowhere to go
[[nodiscard]] inline int largest_group(int p, int m, int v, int cap, int ahead) {
  using namespace mega::dpp;
  const std::vector<int> sizes = AdaptiveTraversal{}.group_sizes(p, m);
  mega::expects(p > 1 && v > 1 && sizes.size() > 1, mega::ErrorCode::usage, [&] {
    return mega::sentence(
        "--schedule adaptive moves between group sizes of ", p, " and ", std::max(p, m),
        " micro-batches, and with pp ", p, ", ", v,
        v == 1 ? " chunk a rank and " : " chunks a rank and ", m,
        " micro-batches they are one order; it needs --pp and --vpp of at least 2 and more "
        "micro-batches than pipeline ranks");
  });
  if (cap == 0) return 0;
  std::vector<int> peaks;  // of each size, on the fullest rank
  int largest = 0;
  for (const int size : sizes) {
    const auto held = verify(lower(make_schedule(Interleaved{{size}}, p, m, v))).peak_per_rank;
    peaks.push_back(*std::max_element(held.begin(), held.end()) + ahead);
    if (peaks.back() <= cap) largest = size;
  }
  mega::expects(largest > p, mega::ErrorCode::usage, [&] {
    const int least = *std::min_element(peaks.begin() + 1, peaks.end());
    return mega::sentence("--memory-cap ", cap,
                          " leaves --schedule adaptive nothing to choose: on the fullest rank ",
                          "groups of ", p, " micro-batches, which are dfc, hold ", peaks.front(),
                          " activations and ", "larger ones at least ", least,
                          ahead > 0 ? ", look-ahead included" : "", "; give --memory-cap ", least,
                          " or more", peaks.front() <= cap ? ", or --schedule dfc without it" : "");
  });
  return largest;
}

/// Refuses what cannot go together.
/// @throws  Error(usage)
inline void check_order_choice(const Config& c) {
  using mega::ErrorCode;
  using mega::expects;
  const bool adaptive = c.schedule == Schedule::adaptive;
  const bool automatic = c.schedule == Schedule::automatic;
  const bool capped = c.schedule == Schedule::v_schedule;
  expects(mega::dpp::takes_group_size(c.schedule) == (c.group_size != 0), ErrorCode::usage,
          "--schedule interleaved or split-interleaved and "
          "--microbatch-group-size-per-virtual-pipeline-stage belong together; give both or "
          "neither");
  expects(
      c.weight_gradients.empty() || mega::dpp::takes_weight_delay(c.schedule), ErrorCode::usage,
      "--weight-gradients is for --schedule split-<base>; the others say themselves when weight "
      "gradients run");
  expects(c.weight_gradients.empty() || mega::dpp::weights_pending_of(c.weight_gradients),
          ErrorCode::usage, [&] {
            return mega::sentence("--weight-gradients is '", c.weight_gradients,
                                  "'; it takes at-once, by-rank, at-end, or the number of weight "
                                  "gradients that may wait on a rank, from 0");
          });
  expects(c.placement.empty() || automatic, ErrorCode::usage,
          "--placement is for --schedule auto; the others are for one placement each");
  expects(
      c.placement != "any", ErrorCode::usage,
      "--placement any is for mega-plan: a trainer places its stages before it times them; give "
      "loop or v, the one that mega-plan finds better");
  expects(c.placement.empty() || c.placement == "loop" || c.placement == "v", ErrorCode::usage,
          [&] { return mega::sentence("--placement is '", c.placement, "'; it takes loop or v"); });
  expects(c.look_ahead == 0 || c.pipeline > 1, ErrorCode::usage, [&] {
    return mega::sentence("--look-ahead ", c.look_ahead,
                          " needs --pp of at least 2: with one pipeline rank no input is late");
  });
  expects(c.look_ahead == 0 || !ChosenTraversal{c.schedule}.has_fused_pairs(), ErrorCode::usage,
          "--look-ahead and --schedule dualpipev exclude each other: its forwards and backwards "
          "run in pairs, and no half of a pair overtakes");
  expects(automatic || c.stage_times.empty(), ErrorCode::usage,
          "--stage-times is for --schedule auto, which alone searches an order");
  expects(!capped || c.memory_cap > 0, ErrorCode::usage,
          "--schedule v needs --memory-cap, the live activations of a chunk that a rank may hold");
  expects(automatic || adaptive || capped || c.memory_cap == 0, ErrorCode::usage,
          "--memory-cap is for --schedule v, auto and adaptive; the others hold what their order "
          "needs, which --dry-run prints");
  expects(automatic || adaptive || c.replay_path.empty(), ErrorCode::usage,
          "--replay-decisions is for --schedule auto and adaptive, which alone make decisions");
  expects(c.stage_times.empty() || c.replay_path.empty(), ErrorCode::usage,
          "--stage-times and --replay-decisions both say what --schedule auto searches with; give "
          "one");
}

}  // namespace trainer
