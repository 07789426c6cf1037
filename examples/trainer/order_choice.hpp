/// @file  What --schedule auto and adaptive decide: the search from stage times, the limits of the
/// dial, and what cannot go together.
#pragma once
#include "config.hpp"
#include "schedule_choice.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/adaptive.hpp>
#include <mega/dpp/auto_schedule.hpp>
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
      throw wrong(mega::sentence("gives ", numbers.size(), " numbers for a stage"));
    out.push_back({numbers[0], numbers[1], numbers[2], numbers.size() == 4 ? numbers[3] : 0.0});
  }
  if (out.size() != 1 && out.size() != static_cast<std::size_t>(stages))
    throw wrong(mega::sentence("is for ", out.size(), " stages"));
  return out;
}

/// What the search begins with: no rank holds more activations, and no chunk has more slots, than
/// in this order, but for what --memory-cap adds or takes away.
class SearchLimits {
 public:
  /// @param cap  activations of a chunk that the fullest rank may hold; 0: those of the order
  /// @throws  Error(usage) where not even one micro-batch fits
  SearchLimits(int p, int m, int v, int cap)
      : first_(mega::dpp::make_schedule(ChosenTraversal{Schedule::automatic}, p, m, v)),
        slots_(mega::dpp::required_slots(lower(first_))) {
    mega::expects(cap == 0 || cap >= v, mega::ErrorCode::usage, [&] {
      return mega::sentence("--memory-cap ", cap, " is below the ", v,
                            " chunks of a rank, on each of which a micro-batch keeps an "
                            "activation");
    });
    const mega::dpp::Verdict verdict = verify(lower(first_));
    const std::vector<int>& peak = verdict.peak_per_rank;
    const int change = cap == 0 ? 0 : cap - *std::max_element(peak.begin(), peak.end());
    for (const int held : peak) caps_.push_back(std::max(held + change, v));
    peak_per_chunk_ = verdict.peak_per_chunk;
    added_activations_ = std::max(change, 0);
    // With several chunks an order may need a slot that no activation fills.
    added_slots_ = added_activations_ + (v > 1 ? 1 : 0);
  }

  [[nodiscard]] const mega::dpp::Schedule& first() const noexcept { return first_; }
  [[nodiscard]] const std::vector<double>& caps() const noexcept { return caps_; }
  /// Activations of a chunk beyond those of the first order.
  [[nodiscard]] int added_activations() const noexcept { return added_activations_; }
  [[nodiscard]] std::vector<int> chunk_caps(int added) const {
    std::vector<int> caps = peak_per_chunk_;
    for (int& held : caps) held += added;
    return caps;
  }
  /// Slots of a chunk beyond those of the first order.
  [[nodiscard]] int added_slots() const noexcept { return added_slots_; }

  /// Whether the chunks have slots enough.
  [[nodiscard]] bool fits(const mega::dpp::Schedule& schedule) const {
    const std::vector<int> needed = mega::dpp::required_slots(lower(schedule));
    bool fits = true;
    for (std::size_t place = 0; place < needed.size(); ++place)
      fits &= needed[place] <= slots_[place] + added_slots_;
    return fits;
  }

 private:
  mega::dpp::Schedule first_;
  std::vector<int> slots_;
  std::vector<double> caps_;
  std::vector<int> peak_per_chunk_;
  int added_activations_ = 0, added_slots_ = 0;
};

/// The order that --schedule auto decided for, and why.
struct FoundOrder {
  std::string name;  ///< where it came from
  std::shared_ptr<const ActionLists> lists;
  StageTimes times;
  double makespan = 0;  ///< predicted, in the unit of the times
  double bubble = 0;    ///< idle part of it
  int peak = 0;         ///< of the fullest rank, activations of a chunk
  std::string rival;    ///< 1f1b, or dfc where a rank has several chunks; empty: it did not fit
  double rival_makespan = 0;
};

/// The best order for the times within the limits; the first one where no better one fits.
/// @throws  Error(usage) where cap or times are impossible
/// @determinism  equal arguments give equal orders on one kind of machine
[[nodiscard]] inline FoundOrder find_order(int p, int m, int v, const StageTimes& times, int cap) {
  using namespace mega::dpp;
  const SearchLimits limits(p, m, v, cap);
  FoundOrder out;
  out.times = times;
  const auto take = [&](std::string name, const mega::dpp::Schedule& schedule) {
    const Timing timing = simulate(schedule, std::span<const ActionTimes>(times));
    out.name = std::move(name);
    out.lists = std::make_shared<const ActionLists>(ChosenTraversal::lists_of(schedule));
    out.makespan = timing.makespan;
    out.bubble = timing.wall_fraction();
    out.peak = *std::max_element(timing.peak_per_rank.begin(), timing.peak_per_rank.end());
  };
  take(v == 1 ? "zb_h1" : "dfc, W at once", limits.first());
  for (int added = limits.added_activations(); added >= 0; --added) {
    const AutoSchedule best = auto_schedule({.p = p,
                                             .m = m,
                                             .v = v,
                                             .times = times,
                                             .caps = limits.caps(),
                                             .chunk_caps = limits.chunk_caps(added)});
    for (const ScheduleCandidate& c : best.candidates) {
      if (c.name != (v == 1 ? "1f1b" : "dfc")) continue;
      out.rival = c.name;
      out.rival_makespan = c.makespan;
    }
    if (!limits.fits(best.schedule)) continue;
    take(best.candidate, best.schedule);
    break;
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
        " micro-batches, and with pp ", p, ", ", v, " chunks a rank and ", m,
        " micro-batches they are one order; it needs --pp and --vpp of at least 2 and more "
        "micro-batches than pipeline ranks");
  });
  if (cap == 0) return 0;
  int largest = 0, least = 0;
  for (const int size : sizes) {
    const auto peaks = verify(lower(make_schedule(Interleaved{{size}}, p, m, v))).peak_per_rank;
    const int peak = *std::max_element(peaks.begin(), peaks.end()) + ahead;
    if (size != p && (least == 0 || peak < least)) least = peak;
    if (peak <= cap) largest = size;
  }
  mega::expects(largest > p, mega::ErrorCode::usage, [&] {
    return mega::sentence("--memory-cap ", cap, " leaves --schedule adaptive at most the group of ",
                          p, " micro-batches, which is dfc; the next size holds ", least,
                          " activations on the fullest rank");
  });
  return largest;
}

/// Refuses what cannot go together. @pre  c.chunks is settled
/// @throws  Error(usage)
inline void check_order_choice(const Config& c) {
  using mega::ErrorCode;
  using mega::expects;
  const bool adaptive = c.schedule == Schedule::adaptive;
  const bool automatic = c.schedule == Schedule::automatic;
  expects(c.look_ahead == 0 || c.pipeline > 1, ErrorCode::usage, [&] {
    return mega::sentence("--look-ahead ", c.look_ahead,
                          " needs --pp of at least 2: with one pipeline rank no input is late");
  });
  expects(c.look_ahead == 0 || !ChosenTraversal{c.schedule}.has_fused_pairs(), ErrorCode::usage,
          "--look-ahead and --schedule dualpipev exclude each other: its forwards and backwards "
          "run in pairs, and no half of a pair overtakes");
  expects(automatic || c.stage_times.empty(), ErrorCode::usage,
          "--stage-times is for --schedule auto, which alone searches an order");
  expects(automatic || adaptive || c.memory_cap == 0, ErrorCode::usage,
          "--memory-cap is for --schedule auto and adaptive; the others hold what their order "
          "needs, which --dry-run prints");
  expects(automatic || adaptive || c.replay_path.empty(), ErrorCode::usage,
          "--replay-decisions is for --schedule auto and adaptive, which alone make decisions");
  expects(c.stage_times.empty() || c.replay_path.empty(), ErrorCode::usage,
          "--stage-times and --replay-decisions both say what --schedule auto searches with; give "
          "one");
}

}  // namespace trainer
