/// @file  What-if: how long steps would take without stragglers, and whose fault the difference is.
///
/// The ideal has every operation at its kind's usual time over ranks and steps: computation at the
/// mean, so that no work disappears, and transfers at the median, so that no hiccup stays; delays
/// of launches count in neither. S is the step without delays over the ideal one. S_x is the ideal
/// one with the operations of x as they were, over the ideal: what x alone costs. M_W and M_S are
/// the shares of the slowdown that go away when the worst ranks, or the last stage, run ideally.
/// Definitions of the what-if analysis of Lin et al. (Understanding Stragglers in Large Model
/// Training Using What-if Analysis, OSDI 2025).
#pragma once
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/replay.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
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
  double last_stage_share = 0;              ///< M_S
};

struct WhatIfOptions {
  double worst_fraction = 0.03;  ///< of the ranks, rounded up
  std::size_t most_names = 32;   ///< kinds of operations that get an S_x: those with most time
};

namespace detail {

class Counterfactual {
 public:
  Counterfactual(const Trace& trace, const DependencyGraph& graph, const WhatIfOptions& options)
      : t_(trace), g_(graph), o_(options) {}

  WhatIf run() {
    if (g_.nodes.empty()) return out_;
    set_times();
    out_.actual_ns = step_of(real_, true);
    out_.no_delay_ns = step_of(real_, false);
    out_.ideal_ns = step_of(ideal_, false);
    if (out_.ideal_ns <= 0 || out_.no_delay_ns <= 0) return out_;
    out_.slowdown = out_.no_delay_ns / out_.ideal_ns;
    out_.delay_slowdown = out_.actual_ns / out_.no_delay_ns;
    decompose();
    rank_scores();
    const double lost = out_.no_delay_ns - out_.ideal_ns;
    if (lost == 0) return out_;
    const auto share = [&](const auto& fixed) {
      for (std::size_t i = 0; i < g_.nodes.size(); ++i)
        mixed_[i] = fixed(g_.nodes[i]) ? ideal_[i] : real_[i];
      return (out_.no_delay_ns - step_of(mixed_, false)) / lost;
    };
    out_.worst_share = share([&](const DependencyGraph::Node& n) {
      return std::binary_search(out_.worst.begin(), out_.worst.end(), t_.ranks[n.rank].rank);
    });
    std::int32_t last = -1;
    for (const Rank& r : t_.ranks) last = std::max(last, r.pipeline);
    out_.last_stage_share =
        share([&](const DependencyGraph::Node& n) { return t_.ranks[n.rank].pipeline == last; });
    return std::move(out_);
  }

 private:
  [[nodiscard]] double step_of(const std::vector<double>& work, bool delayed) {
    replay(g_, work, delayed, times_);
    return times_.mean_step();
  }

  void set_times() {
    struct Usual {
      bool transfer = false;
      double sum = 0;
      std::vector<double> all;
      double value = 0;
    };
    // Transfers of different sizes are different kinds.
    std::map<std::pair<TableIndex, std::int64_t>, Usual> kinds;
    const auto kind = [&](const DependencyGraph::Node& n) -> Usual& {
      const Event& e = t_.events[n.event];
      const bool transfer = e.kind == EventKind::communication;
      Usual& u = kinds[{e.name, transfer ? t_.communications[e.detail].bytes : -1}];
      u.transfer = transfer;
      return u;
    };
    for (const auto& n : g_.nodes) {
      Usual& u = kind(n);
      u.sum += n.work;
      u.all.push_back(n.work);
    }
    for (auto& [key, u] : kinds) {
      const std::size_t count = u.all.size();
      if (!u.transfer) {
        u.value = u.sum / static_cast<double>(count);
        continue;
      }
      const auto middle = u.all.begin() + static_cast<std::ptrdiff_t>(count / 2);
      std::nth_element(u.all.begin(), middle, u.all.end());
      u.value = *middle;
      if (count % 2 == 0) u.value = (u.value + *std::max_element(u.all.begin(), middle)) / 2;
    }
    for (const auto& n : g_.nodes) {
      real_.push_back(n.work);
      ideal_.push_back(kind(n).value);
    }
    mixed_ = ideal_;
  }

  /// S_x for every value that `key` takes.
  template <class Key, class Out>
  void decompose_by(const Key& key, const Out& out) {
    std::map<std::int64_t, std::vector<std::uint32_t>> members;
    for (std::size_t i = 0; i < g_.nodes.size(); ++i) {
      const std::int64_t k = key(g_.nodes[i]);
      if (k >= 0) members[k].push_back(static_cast<std::uint32_t>(i));
    }
    mixed_ = ideal_;
    for (const auto& [k, own] : members) {
      for (const std::uint32_t i : own) mixed_[i] = real_[i];
      out(k, step_of(mixed_, false) / out_.ideal_ns);
      for (const std::uint32_t i : own) mixed_[i] = ideal_[i];
    }
  }

  void decompose() {
    std::map<TableIndex, double> time;
    for (const auto& n : g_.nodes) time[t_.events[n.event].name] += n.work;
    std::vector<std::pair<double, TableIndex>> most;
    for (const auto& [name, ns] : time) most.emplace_back(-ns, name);
    std::sort(most.begin(), most.end());
    if (most.size() > o_.most_names) most.resize(o_.most_names);
    decompose_by(
        [&](const auto& n) -> std::int64_t {
          const TableIndex name = t_.events[n.event].name;
          const bool asked = name != none && std::any_of(most.begin(), most.end(),
                                                         [&](auto& m) { return m.second == name; });
          return asked ? static_cast<std::int64_t>(name) : -1;
        },
        [&](std::int64_t k, double s) {
          out_.by_name[std::string(t_.names[static_cast<TableIndex>(k)])] = s;
        });
    decompose_by([&](const auto& n) { return std::int64_t{t_.ranks[n.rank].data}; },
                 [&](std::int64_t k, double s) { out_.by_data[static_cast<std::int32_t>(k)] = s; });
    decompose_by(
        [&](const auto& n) { return std::int64_t{t_.ranks[n.rank].pipeline}; },
        [&](std::int64_t k, double s) { out_.by_stage[static_cast<std::int32_t>(k)] = s; });
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
  std::vector<double> real_, ideal_, mixed_;
  ReplayTimes times_;
  WhatIf out_;
};

}  // namespace detail

/// Cost: one replay for each name, data-parallel rank and stage.
[[nodiscard]] inline WhatIf what_if(const Trace& trace, const DependencyGraph& graph,
                                    const WhatIfOptions& options = {}) {
  return detail::Counterfactual(trace, graph, options).run();
}

}  // namespace mega::inline v0::scan
