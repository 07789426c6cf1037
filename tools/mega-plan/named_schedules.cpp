#include "named_schedules.hpp"

#include "arguments.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/auto_schedule.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

namespace plan {

namespace dpp = mega::dpp;
using mega::ErrorCode;
using mega::expects;
using mega::sentence;

namespace {

constexpr std::string_view split_prefix = "split-";

constexpr std::array<NamedSchedule, 16> names{{
    {"gpipe", 1, "all forwards, then all backwards"},
    {"looped-bfs", 2, "gpipe over several chunks a rank"},
    {"1f1b", 1, "one forward and one backward in turn; least memory of one chunk a rank"},
    {"eager-1f1b", 1, "1f1b with twice its warm-up, which gives each hop some slack"},
    {"dfc", 2, "interleaved 1f1b, depth first: groups of --pp micro-batches, least memory"},
    {"bfc", 2, "interleaved 1f1b, breadth first: one group, most slack for transfers"},
    {"interleaved", 2, "interleaved 1f1b with --group-size between those of dfc and bfc"},
    {"zb-h1", 1, "split backward, a third of 1f1b's bubble in the memory of 1f1b's first rank"},
    {"zb-h2", 1, "split backward, no bubble but start skew in twice the memory"},
    {"zb-v", 2, "split backward on a V of two chunks, no bubble but start skew in 1f1b's memory"},
    {"v-half", 2, "the V in about half of that memory"},
    {"v-min", 2, "the V in about a third of it"},
    {"v", 2, "the V under --memory-cap"},
    {"dualpipev", 2, "the V with a forward and a backward side by side, which take --pair"},
    {"auto", 1, "the best order that a search finds for the times, under --memory-cap if given"},
    {"split-<base>", 0, "the base with weight gradients apart, as late as --weights allows"},
}};

/// The schedules that split- applies to.
constexpr std::array<std::string_view, 7> bases{"gpipe", "looped-bfs", "1f1b",       "eager-1f1b",
                                                "dfc",   "bfc",        "interleaved"};

bool is_split(std::string_view name) {
  return name.starts_with(split_prefix);
}
std::string_view base_of(std::string_view name) {
  return is_split(name) ? name.substr(split_prefix.size()) : name;
}

void expect_known(std::string_view name) {
  const std::string_view base = base_of(name);
  const bool known =
      is_split(name) ? std::find(bases.begin(), bases.end(), base) != bases.end()
                     : std::any_of(names.begin(), names.end() - 1,
                                   [&](const NamedSchedule& each) { return each.name == base; });
  expects(known, ErrorCode::usage, [&] {
    std::string all;
    for (const NamedSchedule& each : names) all += sentence(all.empty() ? "" : ", ", each.name);
    std::string all_bases;
    for (const std::string_view each : bases)
      all_bases += sentence(all_bases.empty() ? "" : ", ", each);
    return sentence("there is no schedule '", name, "'; valid are ", all, ", with <base> one of ",
                    all_bases);
  });
}

/// Calls use(policy) with the schedule of a base.
template <class Use>
auto with_base(const Request& request, std::string_view base, const Use& use) {
  if (base == "1f1b") return use(dpp::OneForwardOneBackward{});
  if (base == "eager-1f1b") return use(dpp::EagerOneForwardOneBackward{});
  if (base == "dfc") return use(dpp::ScheduleTraversal<dpp::DFC>{});
  if (base == "bfc") return use(dpp::ScheduleTraversal<dpp::BFC>{});
  if (base == "interleaved") {
    expects(request.group_size.has_value(), ErrorCode::usage, [&] {
      return sentence("interleaved needs --group-size, a number of ", request.p, " to ",
                      std::max(request.p, request.m));
    });
    return use(dpp::Interleaved{{*request.group_size}});
  }
  return use(dpp::GPipe{});
}

/// Calls use(delay) with the weight delay of the request.
template <class Use>
auto with_delay(const Request& request, const Use& use) {
  const std::string text = request.weights.value_or("by-rank");
  if (text == "at-once") return use(dpp::WeightAtOnce{});
  if (text == "by-rank") return use(dpp::WeightByRank<1>{});
  if (text == "at-end") return use(dpp::WeightAtEnd{});
  int pending = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), pending);
  expects(error == std::errc() && end == text.data() + text.size() && pending >= 0,
          ErrorCode::usage, [&] {
            return sentence("--weights ", text,
                            " is unknown; valid are at-once, by-rank, at-end, or the number of "
                            "weight gradients that may wait on a rank, from 0");
          });
  return use(dpp::WeightsPending{pending});
}

MadeSchedule search(const Request& request, int v) {
  dpp::PipelineProfile profile;
  profile.p = request.p;
  profile.m = request.m;
  profile.v = v;
  profile.times = request.times;
  if (request.memory_cap)
    profile.caps.assign(static_cast<std::size_t>(request.p), *request.memory_cap);
  const std::string goal = request.goal.value_or("makespan");
  expects(goal == "makespan" || goal == "span", ErrorCode::usage,
          [&] { return sentence("--goal ", goal, " is unknown; valid are makespan and span"); });
  const std::string place = request.placement.value_or("any");
  expects(place == "loop" || place == "v" || place == "any", ErrorCode::usage, [&] {
    return sentence("--placement ", place, " is unknown; valid are loop, v and any");
  });
  const auto aim = goal == "span" ? dpp::ScheduleGoal::longest_span : dpp::ScheduleGoal::makespan;
  dpp::SearchBudget budget;
  if (request.tries) budget.tries = *request.tries;
  constexpr dpp::LoopPlacement loop;
  constexpr dpp::VPlacement on_v;
  auto found = place == "loop" ? dpp::auto_schedule(profile, aim, budget, loop)
               : place == "v"  ? dpp::auto_schedule(profile, aim, budget, on_v)
                               : dpp::auto_schedule(profile, aim, budget, loop, on_v);
  const bool is_choice = place == "any" && v > 1 && request.p > 1;
  if (is_choice) found.candidate += sentence(", on the ", found.placement == "v" ? "V" : "loop");
  return {std::move(found.schedule), std::move(found.candidate)};
}

/// Options that a name has no use for are refused, so that no plan is less than it seems.
void expect_used(const Request& request) {
  const std::string_view base = base_of(request.name);
  const auto refuse = [&](bool given, std::string_view option, bool used, std::string_view by) {
    expects(!given || used, ErrorCode::usage, [&] {
      return sentence(option, " is of no use to ", request.name, "; it belongs to ", by);
    });
  };
  const bool searches = base == "auto";
  refuse(request.group_size.has_value(), "--group-size", base == "interleaved",
         "interleaved and split-interleaved");
  refuse(request.memory_cap.has_value(), "--memory-cap", searches || base == "v", "v and auto");
  refuse(request.weights.has_value(), "--weights", is_split(request.name), "split-<base>");
  refuse(request.placement.has_value(), "--placement", searches, "auto");
  refuse(request.goal.has_value(), "--goal", searches, "auto");
  refuse(request.tries.has_value(), "--tries", searches, "auto");
}

}  // namespace

std::span<const NamedSchedule> named_schedules() {
  return names;
}

int chunks_of(const Request& request) {
  expect_known(request.name);
  if (request.v) return *request.v;
  const auto at = std::find_if(names.begin(), names.end(), [&](const NamedSchedule& each) {
    return each.name == base_of(request.name);
  });
  return at->chunks;
}

MadeSchedule make_named(const Request& request) {
  const int v = chunks_of(request);
  expect_size(request.p, request.m, v);
  expect_used(request);
  const auto make = [&](const auto& policy) -> MadeSchedule {
    return {dpp::make_schedule(policy, request.p, request.m, v), {}};
  };
  const std::string_view base = base_of(request.name);
  if (is_split(request.name)) {
    return with_base(request, base, [&](const auto& traversal) {
      return with_delay(request, [&](const auto& delay) {
        return make(
            dpp::SplitBackward<std::decay_t<decltype(traversal)>, std::decay_t<decltype(delay)>>{
                traversal, delay});
      });
    });
  }
  if (request.memory_cap) expect_amount("--memory-cap", *request.memory_cap);
  if (base == "auto") return search(request, v);
  if (base == "zb-h1") return make(dpp::ZeroBubbleH1{});
  if (base == "zb-h2") return make(dpp::ZeroBubbleH2{});
  if (base == "zb-v") return make(dpp::ZeroBubbleV{});
  if (base == "v-half") return make(dpp::VHalf{});
  if (base == "v-min") return make(dpp::VMin{});
  if (base == "dualpipev") return make(dpp::DualPipeV{});
  if (base == "v") {
    expects(request.memory_cap.has_value(), ErrorCode::usage, [&] {
      return sentence("v needs --memory-cap, the live activations of a chunk that a rank may hold");
    });
    return make(dpp::VSchedule{{static_cast<int>(std::min(*request.memory_cap, 1e9))}});
  }
  return with_base(request, base, make);
}

}  // namespace plan
