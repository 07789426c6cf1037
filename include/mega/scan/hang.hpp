/// @file  Who holds up a job that hangs, from the operations that never completed.
///
/// A rank is stuck in its earliest outstanding operation; it waits for the other end of a transfer,
/// and in a collective for every member that never called it, or that has not completed what it
/// itself has completed before in the group. Following these arrows, whoever waits for nobody and
/// is waited for is a suspect, and so are ranks that wait for each other in a circle. A rank whose
/// dump is empty while others wait for it is a suspect: its host stood still.
///
/// Counters of a group are compared only where all its operations are collectives: transfers are
/// counted too, and the members of a group do not run the same ones.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// What one rank did in one group.
struct MemberState {
  std::int32_t rank = -1;
  std::int64_t last_enqueued = -1, last_started = -1, last_completed = -1;  ///< -1: not said
  std::int64_t outstanding = 0;
  Nanoseconds earliest_outstanding = 0;  ///< in the rank's clock; 0 where nothing is outstanding
  bool missing = false;                  ///< no dump, or an empty one
};

struct GroupState {
  TableIndex group = none;
  std::vector<MemberState> members;             ///< by rank
  bool comparable = true;                       ///< all operations seen were collectives
  std::vector<std::int32_t> behind_in_calls;    ///< called less than the member that called most
  std::vector<std::int32_t> behind_in_results;  ///< completed less than the one furthest on
};

struct StuckRank {
  std::int32_t rank = -1;
  bool missing = false;
  std::int64_t outstanding = 0;
  Nanoseconds earliest_outstanding = 0;
  TableIndex stuck_in = none;           ///< into Trace::communications
  std::vector<std::int32_t> waits_for;  ///< sorted
};

struct HangReport {
  bool hung = false;                   ///< something is outstanding, or a dump is missing
  std::vector<StuckRank> ranks;        ///< by rank; those of whom a group speaks included
  std::vector<GroupState> groups;      ///< those in which something is known of a member
  std::vector<std::int32_t> suspects;  ///< sorted
  std::vector<std::string> evidence;   ///< sentences, at least one a suspect
  std::vector<std::string> notes;      ///< what weakens the conclusion
};

namespace detail {

class HangFinder {
 public:
  explicit HangFinder(const Trace& trace) : t_(trace) {}

  HangReport run() {
    add_ranks();
    add_progress();
    add_calls();
    for (GroupState& group : out_.groups) compare(group);
    for (const auto& [rank, at] : index_) {
      StuckRank& state = out_.ranks[at];
      out_.hung = out_.hung || state.outstanding > 0;
      if (state.stuck_in != none) find_awaited(state);
    }
    out_.hung = out_.hung || std::any_of(t_.ranks.begin(), t_.ranks.end(),
                                         [](const Rank& r) { return r.missing; });
    find_suspects();
    return std::move(out_);
  }

 private:
  StuckRank& of(std::int32_t rank) { return out_.ranks[index_.at(rank)]; }

  /// Ranks of the trace, and those that only the groups know: they left no file at all.
  void add_ranks() {
    std::map<std::int32_t, bool> missing;
    for (const Rank& r : t_.ranks) missing[r.rank] = r.missing;
    const std::size_t present = missing.size();
    for (const TableIndex i : t_.outstanding) {
      const TableIndex group = t_.communications[i].group;
      if (group == none) continue;
      for (const std::int32_t r : t_.groups[group].ranks) missing.try_emplace(r, true);
    }
    for (const auto& [rank, is_missing] : missing) {
      index_[rank] = out_.ranks.size();
      StuckRank state;
      state.rank = rank;
      state.missing = is_missing;
      out_.ranks.push_back(std::move(state));
    }
    absent_ = missing.size() - present;
    for (const Rank& r : t_.ranks) has_file_[r.rank] = true;
    if (absent_ > 0) {
      out_.notes.push_back(sentence("dumps of ", present, " of ", missing.size(),
                                    " ranks were given; ", absent_, " ranks left none"));
    }
    // Unless most ranks are there, the absence of the others is the user's choice, and no evidence.
    absence_counts_ = absent_ < present;
  }

  GroupState& group_state(TableIndex group) {
    const auto [at, is_new] = group_index_.try_emplace(group, out_.groups.size());
    if (is_new) {
      GroupState state;
      state.group = group;
      for (const std::int32_t rank : t_.groups[group].ranks) state.members.push_back(member(rank));
      out_.groups.push_back(std::move(state));
    }
    return out_.groups[at->second];
  }
  [[nodiscard]] MemberState member(std::int32_t rank) const {
    MemberState made;
    made.rank = rank;
    const auto known = index_.find(rank);
    made.missing = known == index_.end() || out_.ranks[known->second].missing;
    return made;
  }
  MemberState& member_of(GroupState& group, std::int32_t rank) {
    const auto at =
        std::lower_bound(group.members.begin(), group.members.end(), rank,
                         [](const MemberState& m, std::int32_t r) { return m.rank < r; });
    if (at != group.members.end() && at->rank == rank) return *at;
    return *group.members.insert(at, member(rank));
  }

  void add_progress() {
    for (const Progress& p : t_.progress) {
      MemberState& m = member_of(group_state(p.group), t_.ranks[p.rank].rank);
      m.last_enqueued = std::max(m.last_enqueued, p.last_enqueued);
      m.last_started = std::max(m.last_started, p.last_started);
      m.last_completed = std::max(m.last_completed, p.last_completed);
    }
  }

  void add_calls() {
    std::vector<char> is_outstanding(t_.communications.size(), 0);
    for (const TableIndex i : t_.outstanding) is_outstanding[i] = 1;
    for (std::size_t i = 0; i < t_.communications.size(); ++i) {
      const Communication& c = t_.communications[i];
      if (c.group == none) continue;
      GroupState& group = group_state(c.group);
      if (c.sequence < 0) group.comparable = false;
      MemberState& m = member_of(group, t_.rank(t_.events[c.event]));
      m.last_enqueued = std::max(m.last_enqueued, c.sequence);
      if (is_outstanding[i] == 0) m.last_completed = std::max(m.last_completed, c.sequence);
    }
    for (const TableIndex i : t_.outstanding) {
      const Communication& c = t_.communications[i];
      const Event& e = t_.events[c.event];
      const auto count = [&](auto& state) {
        const bool first = state.outstanding++ == 0;
        state.earliest_outstanding =
            first ? e.begin : std::min(state.earliest_outstanding, e.begin);
      };
      StuckRank& rank = of(t_.rank(e));
      if (rank.stuck_in == none) rank.stuck_in = i;
      count(rank);
      if (c.group != none) count(member_of(group_state(c.group), rank.rank));
    }
  }

  static void compare(GroupState& group) {
    if (!group.comparable) return;
    std::int64_t calls = -1, results = -1;
    for (const MemberState& m : group.members) {
      calls = std::max(calls, m.last_enqueued);
      results = std::max(results, m.last_completed);
    }
    for (const MemberState& m : group.members) {
      if (m.last_enqueued >= 0 && m.last_enqueued < calls) group.behind_in_calls.push_back(m.rank);
      if (m.last_completed >= 0 && m.last_completed < results)
        group.behind_in_results.push_back(m.rank);
    }
  }

  void find_awaited(StuckRank& state) {
    const Communication& c = t_.communications[state.stuck_in];
    if (c.op == CommunicationOp::send || c.op == CommunicationOp::recv) {
      if (c.peer >= 0 && index_.contains(c.peer)) await(state, c.peer, Why::other_end);
      return;
    }
    if (c.group == none) return;
    GroupState& group = group_state(c.group);
    const std::int64_t own = member_of(group, state.rank).last_completed;
    std::vector<std::int32_t> silent;
    for (const MemberState& m : group.members) {
      if (m.rank == state.rank) continue;
      if (m.missing) {
        silent.push_back(m.rank);
      } else if (!group.comparable || c.sequence < 0) {
        continue;
      } else if (m.last_enqueued < c.sequence) {
        await(state, m.rank, Why::never_called);
      } else if (m.last_completed < own) {
        await(state, m.rank, Why::never_completed);
      }
    }
    for (const std::int32_t rank : silent) {
      if (has_file_.contains(rank) || (absence_counts_ && state.waits_for.empty()))
        await(state, rank, Why::no_dump);
    }
  }

  enum class Why : std::uint8_t { other_end, never_called, never_completed, no_dump };

  void await(StuckRank& state, std::int32_t rank, Why why) {
    state.waits_for.push_back(rank);
    auto& reasons = awaited_[rank];
    reasons.by.push_back(state.rank);
    if (reasons.in == none || why > reasons.why) {
      reasons.why = why;
      reasons.in = state.stuck_in;
    }
  }

  /// Tarjan's strongly connected components, without recursion; of the components that no arrow
  /// leaves, those that one enters, or that are a circle.
  void find_suspects() {
    const std::size_t n = out_.ranks.size();
    for (StuckRank& r : out_.ranks) std::sort(r.waits_for.begin(), r.waits_for.end());
    std::vector<std::size_t> order(n, n), low(n, n), component(n, n), next(n, 0), stack, path;
    std::size_t visited = 0, components = 0;
    for (std::size_t start = 0; start < n; ++start) {
      if (order[start] != n) continue;
      path.push_back(start);
      while (!path.empty()) {
        const std::size_t v = path.back();
        if (next[v] == 0) {
          order[v] = low[v] = visited++;
          stack.push_back(v);
        }
        if (next[v] < out_.ranks[v].waits_for.size()) {
          const std::size_t w = index_.at(out_.ranks[v].waits_for[next[v]++]);
          if (order[w] == n) {
            path.push_back(w);
          } else if (component[w] == n) {
            low[v] = std::min(low[v], order[w]);
          }
          continue;
        }
        next[v] = std::max<std::size_t>(next[v], 1);
        path.pop_back();
        if (!path.empty()) low[path.back()] = std::min(low[path.back()], low[v]);
        if (low[v] != order[v]) continue;
        std::size_t member;
        do {
          member = stack.back();
          stack.pop_back();
          component[member] = components;
        } while (member != v);
        ++components;
      }
    }
    std::vector<char> leaves(components, 0), entered(components, 0);
    std::vector<std::size_t> size(components, 0);
    for (std::size_t v = 0; v < n; ++v) {
      ++size[component[v]];
      for (const std::int32_t rank : out_.ranks[v].waits_for) {
        const std::size_t w = index_.at(rank);
        if (component[v] == component[w]) continue;
        leaves[component[v]] = 1;
        entered[component[w]] = 1;
      }
    }
    for (std::size_t v = 0; v < n; ++v) {
      const std::size_t c = component[v];
      if (leaves[c] != 0 || (entered[c] == 0 && size[c] < 2)) continue;
      accuse(out_.ranks[v], size[c]);
    }
    if (out_.hung && out_.suspects.empty()) {
      out_.notes.push_back(
          "nobody is behind the others in what is known of the groups: the operations themselves, "
          "their devices or their network stand still, or dumps of other ranks are needed");
    }
  }

  void accuse(const StuckRank& state, std::size_t circle) {
    out_.suspects.push_back(state.rank);
    const Awaited& awaited = awaited_.at(state.rank);
    const std::string who = sentence("rank ", state.rank);
    const std::string place = operation(awaited.in);
    const std::string waiting =
        sentence(awaited.by.size(), awaited.by.size() == 1 ? " rank waits" : " ranks wait");
    if (circle > 1) {
      out_.evidence.push_back(sentence(who, " is one of ", circle,
                                       " ranks that wait for each other in a circle: ", place));
    } else if (awaited.why == Why::no_dump) {
      const bool file = has_file_.contains(state.rank);
      out_.evidence.push_back(
          sentence(who, file ? " has called nothing that is unfinished" : " left no dump",
                   " while ", waiting, " for it in ", place));
    } else if (awaited.why == Why::never_called) {
      out_.evidence.push_back(
          sentence(who, " never called ", place, ", in which ", waiting, " for it"));
    } else if (awaited.why == Why::never_completed) {
      out_.evidence.push_back(sentence(who, " has not completed what others completed before ",
                                       place, ", in which ", waiting, " for it"));
    } else {
      out_.evidence.push_back(
          sentence(who, " is the other end of ", place, ", in which ", waiting, " for it"));
    }
    if (state.stuck_in != none && circle < 2) {
      out_.evidence.back() +=
          sentence("; it has ", state.outstanding,
                   " unfinished operations itself, the first of them ", operation(state.stuck_in));
    }
  }

  [[nodiscard]] std::string operation(TableIndex communication) const {
    const Communication& c = t_.communications[communication];
    std::string text(t_.name(t_.events[c.event]));
    if (c.sequence >= 0) text += sentence(" ", c.sequence);
    if (c.group != none) text += sentence(" of group ", t_.groups[c.group].name);
    return text;
  }

  struct Awaited {
    Why why = Why::other_end;
    TableIndex in = none;
    std::vector<std::int32_t> by;
  };

  const Trace& t_;
  HangReport out_;
  std::map<std::int32_t, std::size_t> index_;  // of a rank in out_.ranks
  std::map<std::int32_t, bool> has_file_;
  std::map<TableIndex, std::size_t> group_index_;
  std::map<std::int32_t, Awaited> awaited_;
  std::size_t absent_ = 0;
  bool absence_counts_ = true;
};

}  // namespace detail

/// Cost: O(communications * log ranks + sum of group sizes).
[[nodiscard]] inline HangReport find_hang(const Trace& trace) {
  return detail::HangFinder(trace).run();
}

}  // namespace mega::inline v0::scan
