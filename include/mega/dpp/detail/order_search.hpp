/// @file  The search on one placement: candidates timed within caps and slots, list schedules, and
/// random changes to the best.
#pragma once
#include <mega/core/rng.hpp>
#include <mega/core/view.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/detail/critical_path.hpp>
#include <mega/dpp/detail/list_scheduler.hpp>
#include <mega/dpp/detail/order_words.hpp>
#include <mega/dpp/detail/pipeline.hpp>
#include <mega/dpp/detail/stopwatch.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/search_problem.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/verifier.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp::detail {

/// Numbers of the search, one stream for each seed.
class SearchRandom {
 public:
  explicit SearchRandom(std::uint64_t seed) noexcept : key_{seed} {}
  /// In 0..bound-1. @pre bound >= 1
  int below(int bound) noexcept {
    return static_cast<int>(key_.bits(drawn_++) % static_cast<std::uint32_t>(bound));
  }

 private:
  RandomKey key_;
  Index drawn_ = 0;
};

/// The search itself: named candidates, list schedules, then random changes to the best.
class ScheduleSearch {
 public:
  /// @param empty  a schedule of the pipeline
  /// @param slots  as those of the profile
  ScheduleSearch(const Pipeline& pipeline, const ScheduleView& empty, std::span<const int> slots,
                 ScheduleGoal goal, const SearchBudget& budget)
      : pipe_(pipeline),
        empty_(empty),
        slots_(slots),
        goal_(goal),
        budget_(budget),
        bound_(pipeline.bound(goal)),
        begin_(std::chrono::steady_clock::now()),
        watch_(pipeline),
        random_(budget.seed) {}

  /// Times the words; those that exceed a cap or do not run with the slots are no candidate.
  void consider(std::string_view name, const Words& words) {
    if (!watch_.run(words) || !runs_with_slots(words)) return;
    candidates.push_back({std::string(name), watch_.makespan(), watch_.longest_span(), {}});
    keep_if_better(name, words);
  }

  /// List schedules from cautious to greedy: how many forwards run ahead, when W fills a gap.
  /// At least one of them, however little time there is, unless no order can be shorter than the
  /// best: then only those that hold less. The best joins the candidates, of equal ones the
  /// greediest.
  void try_lists() {
    std::vector<ListRules> all;
    for (const double part : {0.5, 0.6, 0.75, 0.9, 1.0, 1.05, 1.1, 1.25, 1.5, 1e9}) {
      for (const double more : {0.0, 0.5, 1.0}) {
        for (const double patience : {0.0, 0.25, 0.5, 1.0}) {
          for (const bool alternate : {false, true}) {
            for (const bool deep : {true, false}) {
              if (!deep && pipe_.v == 1) continue;  // no two chunks to choose from
              all.push_back({lead(part, more), patience, alternate, deep});
            }
          }
        }
      }
    }
    // From the middle on, where the best mostly are, so that most others can end early.
    const auto count = static_cast<int>(all.size());
    Words best_list;
    int best_index = -1;
    for (int tried = 0; tried < count; ++tried) {
      if ((!best_list.empty() || is_shortest()) && out_of_time()) break;
      const int index = tried < count - count / 2 ? count / 2 + tried : count - 1 - tried;
      const ListRules& rules = all[Pipeline::at(index)];
      if (std::find(all.begin() + index + 1, all.end(), rules) != all.end()) continue;
      Words words = ListScheduler(pipe_, rules).run(cutoff_of_lists());
      if (!is_best_list(rules, words, index > best_index)) continue;
      best_list = std::move(words);
      best_index = index;
    }
    if (!best_list.empty()) consider("list", best_list);
  }

  /// A quarter of the tries, which cost some ten times the others, vary the rules of the best list
  /// schedule; the others move letters of the best of all.
  void improve() {
    const bool has_list = !rules_.lead.empty();
    for (; has_list && tries < budget_.tries / 4 && !out_of_time(); ++tries) {
      const ListRules rules = varied(rules_);
      const Words words = ListScheduler(pipe_, rules).run(cutoff_of_lists());
      if (is_best_list(rules, words, true)) keep_if_better("list, rules varied", words);
    }
    move_letters();
  }

  Words best;
  std::string best_name;
  Rating rating;  ///< of the best
  std::vector<ScheduleCandidate> candidates;
  int tries = 0;

 private:
  /// Whether no order can be shorter than the best, but for rounding.
  [[nodiscard]] bool is_shortest() const { return rating.cost.goal <= bound_ * (1 + 1e-9); }

  /// What a list schedule has to keep to to be of use.
  [[nodiscard]] Cutoff cutoff_of_lists() const {
    if (!is_shortest()) return {goal_, list_cost_.goal};
    return {goal_, std::min(list_cost_.goal, rating.cost.goal), rating.peak - memory_slack};
  }

  /// @pre watch_.run(words) and runs_with_slots(words) gave true
  void keep_if_better(std::string_view name, const Words& words) {
    const auto& peaks = watch_.peak_memory();
    const Rating now{cost_of(watch_, goal_), *std::max_element(peaks.begin(), peaks.end())};
    if (!now.is_better_than(rating)) return;
    rating = now;
    best = words;
    best_name = name;
  }

  [[nodiscard]] bool runs_with_slots(const Words& words) const {
    return slots_.empty() ||
           ListRun(lower(schedule_of(words, empty_)).view(), slots_, Transport::slots()).finish();
  }

  /// Times a list schedule, and makes its rules the ones to vary if no other was better.
  /// @param words  none where it was cut off   @param wins_ties  against one that costs the same
  bool is_best_list(const ListRules& rules, const Words& words, bool wins_ties) {
    if (words.empty() || !watch_.run(words)) return false;
    const Cost cost = cost_of(watch_, goal_);
    if (wins_ties ? list_cost_ < cost : !(cost < list_cost_)) return false;
    if (!runs_with_slots(words)) return false;
    list_cost_ = cost;
    rules_ = rules;
    return true;
  }

  /// One forward more or less ahead, on some ranks in a row, for one chunk or all.
  [[nodiscard]] ListRules varied(ListRules rules) {
    const int first = random_.below(pipe_.p);
    const int end = first + 1 + random_.below(pipe_.p - first);
    const int chunk = random_.below(pipe_.v + 1);  // v: all of them
    const double step = random_.below(2) == 0 ? -1 : 1;
    for (int place = first * pipe_.v; place < end * pipe_.v; ++place) {
      double& lead = rules.lead[Pipeline::at(place)];
      if (chunk == pipe_.v || place % pipe_.v == chunk) lead = std::max(1.0, lead + step);
    }
    if (random_.below(4) == 0) rules.patience = 0.125 * random_.below(10);
    if (random_.below(8) == 0) rules.alternate = !rules.alternate;
    return rules;
  }

  [[nodiscard]] bool out_of_time() const {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin_;
    return spent.count() > budget_.seconds;
  }

  /// For each place, `part` of the number of forwards that fit in the time until the gradient of
  /// the first one can be back, plus `more`. A rank's forwards of a micro-batch count as one.
  [[nodiscard]] std::vector<double> lead(double part, double more) const {
    std::vector<double> back(pipe_.times.size(), 0.0);  // from the start of F to that of its I
    double way = 0;
    for (int stage = pipe_.last_stage(); stage >= 0; --stage) {
      const ActionTimes& t = pipe_.times[Pipeline::at(stage)];
      way += t.forward + pipe_.hop_down[Pipeline::at(stage)];
      back[Pipeline::at(stage)] = way;
      way += t.backward_input + pipe_.hop_up[Pipeline::at(stage)];
    }
    std::vector<double> lead;
    for (int rank = 0; rank < pipe_.p; ++rank) {
      double forward = 0;
      for (int chunk = 0; chunk < pipe_.v; ++chunk) {
        forward += pipe_.duration(ActionKind::forward, pipe_.stage(rank, chunk));
      }
      for (int chunk = 0; chunk < pipe_.v; ++chunk) {
        const double fit = back[Pipeline::at(pipe_.stage(rank, chunk))] / forward;
        const double count = forward > 0 ? std::floor(part * fit + more) : pipe_.m;
        lead.push_back(std::clamp<double>(count, 1, pipe_.m));
      }
    }
    return lead;
  }

  void move_letters() {
    if (best.empty()) return;
    Words words = split_words(best);
    if (!watch_.run(words) || !runs_with_slots(words)) return;
    Cost cost = cost_of(watch_, goal_);
    keep_if_better(best_name + ", split", words);
    bool moved = true;
    std::vector<CriticalPath::Node> path;
    std::vector<std::vector<int>> gaps;
    for (; tries < budget_.tries && !out_of_time(); ++tries) {
      if (moved) {
        watch_.run(words);
        path = CriticalPath(pipe_, words, watch_, goal_).nodes;
        gaps = gaps_of(words);
      }
      const auto [rank, from] = path[Pipeline::at(random_.below(static_cast<int>(path.size())))];
      const auto r = Pipeline::at(rank);
      const int length = static_cast<int>(words[r].size());
      int to = from;
      if (words[r][Pipeline::at(from)].kind == ActionKind::backward_weight && !gaps[r].empty() &&
          random_.below(2) == 0) {
        to = gaps[r][Pipeline::at(random_.below(static_cast<int>(gaps[r].size())))];
      } else {
        const int reach = 1 << random_.below(6);
        to = std::clamp(from - reach + random_.below(2 * reach + 1), 0, length - 1);
      }
      moved = false;
      if (to == from) continue;
      move_letter(words[r], from, to);
      if (watch_.run(words, {goal_, cost.goal})) {
        const Cost now = cost_of(watch_, goal_);
        moved = !(cost < now) && runs_with_slots(words);
      }
      if (moved) {
        cost = cost_of(watch_, goal_);
        keep_if_better(best_name.ends_with("moved") ? best_name : best_name + ", letters moved",
                       words);
      }
      if (!moved) move_letter(words[r], to, from);
    }
  }

  /// Positions before which each rank waits. @pre watch_.run(words) gave true
  [[nodiscard]] std::vector<std::vector<int>> gaps_of(const Words& words) const {
    std::vector<std::vector<int>> gaps(words.size());
    for (int rank = 0; rank < pipe_.p; ++rank) {
      const auto r = Pipeline::at(rank);
      const auto& starts = watch_.starts(rank);
      for (std::size_t i = 1; i < words[r].size(); ++i) {
        const Letter before = words[r][i - 1];
        const double end =
            starts[i - 1] + pipe_.duration(before.kind, pipe_.stage(rank, before.chunk));
        if (end < starts[i]) gaps[r].push_back(static_cast<int>(i));
      }
    }
    return gaps;
  }

  const Pipeline& pipe_;
  ScheduleView empty_;
  std::span<const int> slots_;
  ScheduleGoal goal_;
  SearchBudget budget_;
  double bound_;  // no order is shorter
  std::chrono::steady_clock::time_point begin_;
  Stopwatch watch_;
  SearchRandom random_;
  ListRules rules_;  // of the best list schedule
  Cost list_cost_;
};

}  // namespace mega::inline v0::dpp::detail
