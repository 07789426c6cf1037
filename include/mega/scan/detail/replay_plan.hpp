/// @file  A graph laid out for many replays at once, and for replays of its steps apart.
#pragma once
#include <mega/scan/replay.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace mega::inline v0::scan::detail {

/// Columns in the order of replay, so that a replay reads memory forwards and what is needed stands
/// shortly before. Steps are apart from each other unless an operation joins them: what is joined
/// is a section, and sections can be replayed at the same time.
class ReplayPlan {
 public:
  /// Replays that are made at once: their times lie side by side.
  static constexpr std::size_t lanes = 8;
  using Lanes = std::array<double, lanes>;

  struct Section {
    std::uint32_t first_wave = 0, last_wave = 0;  ///< into waves
    std::uint32_t first = 0, last = 0;            ///< operations
  };

  /// Only the steps marked in `chosen`, which has one entry for each of graph.steps.
  ReplayPlan(const DependencyGraph& graph, const std::vector<char>& chosen) {
    const std::vector<std::uint32_t> section_of = join_steps(graph, chosen);
    std::uint32_t count = 0;
    for (const std::uint32_t s : section_of) count = s == none ? count : std::max(count, s + 1);
    sections_.resize(count);
    std::vector<std::uint32_t> next(sections_.size(), 0);
    const auto section = [&](std::uint32_t node) { return section_of[graph.nodes[node].step]; };
    for (const std::uint32_t node : graph.order) {
      if (section(node) != none) ++next[section(node)];
    }
    std::uint32_t first = 0;
    for (std::size_t s = 0; s < sections_.size(); ++s) {
      sections_[s].first = first;
      sections_[s].last = first += next[s];
      next[s] = sections_[s].first;
    }
    nodes_.resize(first);
    std::vector<std::uint32_t> place(graph.nodes.size(), none);
    for (const std::uint32_t node : graph.order) {
      if (section(node) == none) continue;
      place[node] = next[section(node)]++;
      nodes_[place[node]] = node;
    }
    need_ends_.reserve(nodes_.size() + 1);
    need_ends_.push_back(0);
    needs_.reserve(graph.dependencies.size());
    steps_.reserve(nodes_.size());
    for (Section& s : sections_) {
      s.first_wave = static_cast<std::uint32_t>(waves_.size());
      for (std::uint32_t at = s.first; at < s.last; ++at) {
        const DependencyGraph::Node& n = graph.nodes[nodes_[at]];
        const bool joined =
            at > s.first && n.meeting != none && graph.nodes[nodes_[at - 1]].meeting == n.meeting;
        if (!joined) waves_.push_back(at);
        for (const std::uint32_t d : graph.needs(n)) needs_.push_back(place[d] - s.first);
        need_ends_.push_back(needs_.size());
        steps_.push_back(n.step);
      }
      s.last_wave = static_cast<std::uint32_t>(waves_.size());
      longest_ = std::max(longest_, s.last - s.first);
    }
    waves_.push_back(first);
  }

  [[nodiscard]] std::span<const std::uint32_t> nodes() const noexcept { return nodes_; }
  [[nodiscard]] std::size_t sections() const noexcept { return sections_.size(); }
  /// Operations of the longest section.
  [[nodiscard]] std::size_t longest() const noexcept { return longest_; }

  /// One section. `work(at, lanes)` fills in the ns of the operation that is `at` in nodes().
  /// @param ends  scratch of longest() entries
  /// @param lengths  of the steps, by index into the graph's; those of the section are raised
  template <class Work>
  void replay(std::size_t section, const Work& work, std::span<Lanes> ends,
              std::span<Lanes> lengths) const noexcept {
    const Section& s = sections_[section];
    for (std::uint32_t wave = s.first_wave; wave < s.last_wave; ++wave) {
      const std::uint32_t first = waves_[wave];
      const std::uint32_t last = wave + 1 == s.last_wave ? s.last : waves_[wave + 1];
      Lanes start{};
      for (std::size_t k = need_ends_[first]; k < need_ends_[last]; ++k)
        raise(start, ends[needs_[k]]);
      for (std::uint32_t at = first; at < last; ++at) {
        Lanes end;
        work(at, end);
        for (std::size_t lane = 0; lane < lanes; ++lane) end[lane] += start[lane];
        ends[at - s.first] = end;
        raise(lengths[steps_[at]], end);
      }
    }
  }

 private:
  static void raise(Lanes& value, const Lanes& to) noexcept {
    for (std::size_t lane = 0; lane < lanes; ++lane)
      value[lane] = value[lane] < to[lane] ? to[lane] : value[lane];
  }

  /// The section of each chosen step; none for the others.
  static std::vector<std::uint32_t> join_steps(const DependencyGraph& graph,
                                               const std::vector<char>& chosen) {
    std::vector<std::uint32_t> parent(graph.steps.size());
    std::iota(parent.begin(), parent.end(), 0U);
    const auto root = [&](std::uint32_t step) {
      while (parent[step] != step) step = parent[step] = parent[parent[step]];
      return step;
    };
    for (std::size_t m = 0; m < graph.meetings(); ++m) {
      std::uint32_t joined = none;
      for (const std::uint32_t node : graph.members(m)) {
        const std::uint32_t step = graph.nodes[node].step;
        if (chosen[step] == 0) continue;
        if (joined == none) joined = step;
        if (step != joined) parent[root(step)] = root(joined);
      }
    }
    std::vector<std::uint32_t> number(parent.size(), none), out(parent.size(), none);
    std::uint32_t count = 0;
    for (std::uint32_t step = 0; step < parent.size(); ++step) {
      if (chosen[step] == 0) continue;
      std::uint32_t& own = number[root(step)];
      if (own == none) own = count++;
      out[step] = own;
    }
    return out;
  }

  std::vector<Section> sections_;
  std::vector<std::uint32_t> nodes_;  // of the graph, in the order of replay, by section
  std::vector<std::uint32_t> waves_;  // operations that start together: the first of each
  std::vector<std::size_t> need_ends_;
  std::vector<std::uint32_t> needs_;  // places inside the section
  std::vector<std::uint32_t> steps_;
  std::uint32_t longest_ = 0;
};

}  // namespace mega::inline v0::scan::detail
