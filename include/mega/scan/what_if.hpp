/// @file  What-if: how long steps would take without stragglers, and whose fault the difference is.
///
/// The ideal has every operation at its kind's usual time over ranks and steps: computation at the
/// mean, so that no work disappears, and transfers at the median, so that no hiccup stays; delays
/// of launches count in neither. S is the step without delays over the ideal one. S_x is the ideal
/// one with the operations of x as they were, over the ideal: what x alone costs. M_W and M_S are
/// the shares of the slowdown that go away when the worst ranks, or the last stage, run ideally.
/// The worst are those that cost most alone; of equal ones the lower ranks. All of these depend on
/// which steps count: a share of two ranks among many equal ones most of all.
/// Definitions of the what-if analysis of Lin et al. (Understanding Stragglers in Large Model
/// Training Using What-if Analysis, OSDI 2025).
#pragma once
#include <mega/scan/detail/replay_plan.hpp>
#include <mega/scan/detail/threads.hpp>
#include <mega/scan/replay.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

struct WhatIf {
  double actual_ns = 0;    ///< mean step, replayed with delays
  double no_delay_ns = 0;  ///< without delays of launches
  double ideal_ns = 0;
  double slowdown = 1;                      ///< S
  double delay_slowdown = 1;                ///< actual over no_delay
  std::map<std::string, double> by_name;    ///< S_x of each kind of operation
  std::map<std::int32_t, double> by_data;   ///< of each data-parallel rank
  std::map<std::int32_t, double> by_stage;  ///< of each pipeline stage
  std::map<std::int32_t, double> by_rank;   ///< the lesser of its replica's and its stage's
  std::vector<std::int32_t> worst;          ///< ranks that M_W is about
  double worst_share = 0;                   ///< M_W; may be beyond [0, 1]
  double last_stage_share = 0;              ///< M_S; says nothing unless has_stages()

  [[nodiscard]] bool has_stages() const noexcept { return by_stage.size() > 1; }
};

struct WhatIfOptions {
  double worst_fraction = 0.03;     ///< of the ranks, rounded up
  std::size_t most_names = 32;      ///< kinds of operations that get an S_x: those with most time
  std::vector<std::int32_t> steps;  ///< that count; empty: all
  std::size_t threads = 0;          ///< 0: as many as the machine runs at once
};

namespace detail {

class Counterfactual {
 public:
  Counterfactual(const Trace& trace, const DependencyGraph& graph, const WhatIfOptions& options)
      : t_(trace), g_(graph), o_(options), chosen_(graph.steps.size(), 1) {
    if (options.steps.empty()) return;
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      chosen_[i] = std::find(options.steps.begin(), options.steps.end(), graph.steps[i]) !=
                   options.steps.end();
    }
  }

  WhatIf run() {
    plan_.emplace(g_, chosen_);
    if (plan_->nodes().empty()) return {};
    find_usual_times();
    choose_names();
    const std::size_t real = add_scenario(), ideal = add_scenario();
    set_all_ranks(real, [](const Rank&) { return true; });
    add_parts();
    const std::size_t last_stage = add_scenario();
    std::int32_t last = -1;
    for (const Rank& r : t_.ranks) last = std::max(last, r.pipeline);
    set_all_ranks(last_stage, [&](const Rank& r) { return r.pipeline != last; });
    replay_all();

    out_.actual_ns = delayed_step();
    out_.no_delay_ns = step_of(real);
    out_.ideal_ns = step_of(ideal);
    if (out_.ideal_ns <= 0 || out_.no_delay_ns <= 0) return std::move(out_);
    out_.slowdown = out_.no_delay_ns / out_.ideal_ns;
    out_.delay_slowdown = out_.actual_ns / out_.no_delay_ns;
    report_parts();
    rank_scores();
    const double lost = out_.no_delay_ns - out_.ideal_ns;
    if (lost == 0) return std::move(out_);
    out_.last_stage_share = (out_.no_delay_ns - step_of(last_stage)) / lost;
    const std::size_t worst = add_scenario();
    set_all_ranks(worst, [&](const Rank& r) {
      return !std::binary_search(out_.worst.begin(), out_.worst.end(), r.rank);
    });
    replay_all();
    out_.worst_share = (out_.no_delay_ns - step_of(worst)) / lost;
    return std::move(out_);
  }

 private:
  using Lanes = ReplayPlan::Lanes;
  /// In which of a batch of scenarios an operation takes its own time, a bit each.
  using Mask = std::uint8_t;
  static_assert(ReplayPlan::lanes == 8);

  /// Scenarios that are replayed at once. An operation takes its own time where its rank or its
  /// kind says so, and the usual one of its kind elsewhere.
  struct Batch {
    std::vector<Mask> of_rank, of_kind;
    std::vector<Lanes> lengths;  // of each step
  };
  /// Transfers of different sizes are different kinds.
  struct Kind {
    TableIndex name = none;
    bool transfer = false;
    std::uint32_t count = 0;
    double sum = 0, usual = 0;
  };

  void find_usual_times() {
    const auto nodes = plan_->nodes();
    kind_.reserve(nodes.size());
    work_.reserve(nodes.size());
    std::map<std::pair<TableIndex, std::int64_t>, std::uint32_t> known;
    // Nearly always a name has the kind that it had last.
    std::vector<std::pair<std::int64_t, std::uint32_t>> last(t_.names.size() + 1, {0, none});
    for (const std::uint32_t i : nodes) {
      const DependencyGraph::Node& n = g_.nodes[i];
      const Event& e = t_.events[n.event];
      const bool transfer = e.kind == EventKind::communication;
      const std::int64_t size =
          transfer && e.detail != none ? t_.communications[e.detail].bytes : -1;
      auto& [last_size, at] = last[e.name == none ? t_.names.size() : e.name];
      if (at == none || last_size != size) {
        const auto [found, is_new] =
            known.try_emplace(std::pair(e.name, size), static_cast<std::uint32_t>(kinds_.size()));
        if (is_new) kinds_.push_back({e.name, transfer, 0, 0, 0});
        at = found->second;
        last_size = size;
      }
      ++kinds_[at].count;
      kinds_[at].sum += n.work;
      kind_.push_back(at);
      work_.push_back(n.work);
    }
    std::vector<std::size_t> ends(kinds_.size() + 1, 0);
    for (std::size_t k = 0; k < kinds_.size(); ++k) ends[k + 1] = ends[k] + kinds_[k].count;
    std::vector<double> sorted(work_.size());
    for (std::size_t at = work_.size(); at-- > 0;) sorted[--ends[kind_[at] + 1]] = work_[at];
    // Now ends[k + 1] is where kind k begins.
    for (std::size_t k = 0; k < kinds_.size(); ++k) {
      Kind& kind = kinds_[k];
      const std::span<double> all(sorted.data() + ends[k + 1], kind.count);
      kind.usual = kind.transfer ? median(all) : kind.sum / static_cast<double>(kind.count);
    }
  }

  /// @pre not empty. Reorders.
  [[nodiscard]] static double median(std::span<double> all) {
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    std::nth_element(all.begin(), middle, all.end());
    return all.size() % 2 != 0 ? *middle : (*middle + *std::max_element(all.begin(), middle)) / 2;
  }

  void choose_names() {
    std::map<TableIndex, double> time;
    for (const Kind& k : kinds_) {
      if (k.name != none) time[k.name] += k.sum;
    }
    std::vector<std::pair<double, TableIndex>> most;
    for (const auto& [name, ns] : time) most.emplace_back(-ns, name);
    std::sort(most.begin(), most.end());
    if (most.size() > o_.most_names) most.resize(o_.most_names);
    for (const auto& [ns, name] : most) names_.push_back(name);
  }

  /// @return its number; ideal until it is told otherwise
  std::size_t add_scenario() {
    if (scenarios_ == batches_.size() * ReplayPlan::lanes) {
      batches_.push_back({std::vector<Mask>(t_.ranks.size(), 0),
                          std::vector<Mask>(kinds_.size(), 0),
                          std::vector<Lanes>(g_.steps.size(), Lanes{})});
    }
    return scenarios_++;
  }
  [[nodiscard]] Batch& batch_of(std::size_t scenario) {
    return batches_[scenario / ReplayPlan::lanes];
  }
  [[nodiscard]] static Mask bit_of(std::size_t scenario) {
    return static_cast<Mask>(1U << scenario % ReplayPlan::lanes);
  }
  template <class Where>
  void set_all_ranks(std::size_t scenario, const Where& takes_own_time) {
    for (std::size_t r = 0; r < t_.ranks.size(); ++r) {
      if (takes_own_time(t_.ranks[r])) batch_of(scenario).of_rank[r] |= bit_of(scenario);
    }
  }

  /// The scenarios of S_x.
  void add_parts() {
    for (const TableIndex name : names_) {
      const std::size_t s = name_[name] = add_scenario();
      for (std::size_t k = 0; k < kinds_.size(); ++k) {
        if (kinds_[k].name == name) batch_of(s).of_kind[k] |= bit_of(s);
      }
    }
    std::vector<char> occurs(t_.ranks.size(), 0);
    for (const std::uint32_t i : plan_->nodes()) occurs[g_.nodes[i].rank] = 1;
    const auto add = [&](std::map<std::int32_t, std::size_t>& out, std::int32_t Rank::*place) {
      for (std::size_t r = 0; r < t_.ranks.size(); ++r) {
        if (occurs[r] == 0 || t_.ranks[r].*place < 0) continue;
        const auto [at, is_new] = out.try_emplace(t_.ranks[r].*place, 0);
        if (is_new) at->second = add_scenario();
        batch_of(at->second).of_rank[r] |= bit_of(at->second);
      }
    };
    add(data_, &Rank::data);
    add(stage_, &Rank::pipeline);
  }

  void report_parts() {
    for (const auto& [name, s] : name_)
      out_.by_name[std::string(t_.names[name])] = step_of(s) / out_.ideal_ns;
    for (const auto& [data, s] : data_) out_.by_data[data] = step_of(s) / out_.ideal_ns;
    for (const auto& [stage, s] : stage_) out_.by_stage[stage] = step_of(s) / out_.ideal_ns;
  }

  /// What was added since the last call. Every section of every batch is replayed on its own.
  void replay_all() {
    // A batch that was not full is replayed again with what joined it.
    const std::size_t first = replayed_ / ReplayPlan::lanes, sections = plan_->sections();
    const std::size_t tasks = (batches_.size() - first) * sections;
    const std::size_t threads = useful_threads(o_.threads, tasks);
    for (std::size_t b = first; b < batches_.size(); ++b)
      std::fill(batches_[b].lengths.begin(), batches_[b].lengths.end(), Lanes{});
    std::vector<std::vector<Lanes>> ends(threads, std::vector<Lanes>(plan_->longest()));
    on_threads(tasks, threads, [&](std::size_t task, std::size_t worker) {
      Batch& batch = batches_[first + task / sections];
      const auto own = [&](std::uint32_t at, Lanes& out) {
        const double times[2] = {kinds_[kind_[at]].usual, work_[at]};
        const unsigned mask = static_cast<unsigned>(batch.of_kind[kind_[at]]) |
                              batch.of_rank[g_.nodes[plan_->nodes()[at]].rank];
        for (std::size_t lane = 0; lane < ReplayPlan::lanes; ++lane)
          out[lane] = times[mask >> lane & 1U];
      };
      plan_->replay(task % sections, own, ends[worker], batch.lengths);
    });
    replayed_ = scenarios_;
  }

  [[nodiscard]] double mean(auto&& length_of_step) const {
    double sum = 0, count = 0;
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      if (chosen_[i] == 0) continue;
      sum += length_of_step(i);
      ++count;
    }
    return sum / count;
  }
  [[nodiscard]] double step_of(std::size_t scenario) {
    const Batch& batch = batch_of(scenario);
    return mean([&](std::size_t i) { return batch.lengths[i][scenario % ReplayPlan::lanes]; });
  }
  [[nodiscard]] double delayed_step() const {
    std::vector<double> work;
    work.reserve(g_.nodes.size());
    for (const DependencyGraph::Node& n : g_.nodes) work.push_back(n.work);
    ReplayTimes times;
    replay(g_, work, true, times);
    return mean([&](std::size_t i) { return times.step[i]; });
  }

  void rank_scores() {
    std::vector<std::pair<double, std::int32_t>> scores;
    for (const Rank& r : t_.ranks) {
      const auto data = out_.by_data.find(r.data);
      const auto stage = out_.by_stage.find(r.pipeline);
      if (data == out_.by_data.end() || stage == out_.by_stage.end()) continue;
      const double score = std::min(data->second, stage->second);
      out_.by_rank[r.rank] = score;
      scores.emplace_back(-score, r.rank);
    }
    std::sort(scores.begin(), scores.end());
    // Rounded up, as whole numbers are: 3 % of 100 are 3.
    const double wanted = o_.worst_fraction * static_cast<double>(scores.size());
    auto count = static_cast<std::size_t>(wanted);
    if (wanted > static_cast<double>(count) + 1e-9) ++count;
    for (std::size_t i = 0; i < std::min(count, scores.size()); ++i)
      out_.worst.push_back(scores[i].second);
    std::sort(out_.worst.begin(), out_.worst.end());
  }

  const Trace& t_;
  const DependencyGraph& g_;
  const WhatIfOptions& o_;
  std::vector<char> chosen_;  // by step
  std::optional<ReplayPlan> plan_;
  std::vector<Kind> kinds_;
  std::vector<std::uint32_t> kind_;                   // of each operation of the plan
  std::vector<double> work_;                          // likewise
  std::vector<TableIndex> names_;                     // that get an S_x
  std::map<TableIndex, std::size_t> name_;            // their scenarios
  std::map<std::int32_t, std::size_t> data_, stage_;  // likewise
  std::vector<Batch> batches_;
  std::size_t scenarios_ = 0, replayed_ = 0;
  WhatIf out_;
};

}  // namespace detail

/// Cost: one replay for each name, data-parallel rank and stage; eight take little longer than one,
/// and steps are replayed on all threads. Deterministic, whatever the number of threads.
[[nodiscard]] inline WhatIf what_if(const Trace& trace, const DependencyGraph& graph,
                                    const WhatIfOptions& options = {}) {
  return detail::Counterfactual(trace, graph, options).run();
}

}  // namespace mega::inline v0::scan
