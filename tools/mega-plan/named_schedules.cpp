#include "named_schedules.hpp"

#include "arguments.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/auto_schedule.hpp>
#include <mega/dpp/named_orders.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace plan {

namespace dpp = mega::dpp;
using mega::ErrorCode;
using mega::expects;
using mega::sentence;

namespace {

constexpr std::string_view split_prefix = "split-";

bool is_base_split(const dpp::OrderName& each) {
  return dpp::takes_weight_delay(each.order);
}

/// The order of a name, refused where it is none or no matter of a plan.
dpp::NamedOrder order_of(std::string_view name) {
  const dpp::OrderName* const found = dpp::find_order_name(name);
  expects(found != nullptr, ErrorCode::usage, [&] {
    std::string all, bases;
    for (const dpp::OrderName& each : dpp::order_names) {
      if (is_base_split(each)) {
        bases += sentence(bases.empty() ? "" : ", ", each.name.substr(split_prefix.size()));
      } else if (each.order != dpp::NamedOrder::adaptive) {
        all += sentence(all.empty() ? "" : ", ", each.name);
      }
    }
    return sentence("there is no schedule '", name, "'; valid are ", all,
                    ", split-<base>, with <base> one of ", bases);
  });
  expects(
      found->order != dpp::NamedOrder::adaptive, ErrorCode::usage,
      "adaptive moves between group sizes as a run measures, so only a trainer has it; the ends "
      "of its dial are dfc and bfc");
  return found->order;
}

dpp::WeightsPending weights_of(const Request& request) {
  const std::string text = request.weights.value_or("by-rank");
  const auto found = dpp::weights_pending_of(text);
  expects(found.has_value(), ErrorCode::usage, [&] {
    return sentence("--weights ", text,
                    " is unknown; valid are at-once, by-rank, at-end, or the number of weight "
                    "gradients that may wait on a rank, from 0");
  });
  return *found;
}

MadeSchedule search(const Request& request, int v) {
  dpp::PipelineProfile profile;
  profile.p = request.p;
  profile.m = request.m;
  profile.v = v;
  profile.times = request.times;
  profile.activation_sizes = request.activation_sizes;
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
void expect_used(const Request& request, dpp::NamedOrder order) {
  const auto refuse = [&](bool given, std::string_view option, bool used, std::string_view by) {
    expects(!given || used, ErrorCode::usage, [&] {
      return sentence(option, " is of no use to ", request.name, "; it belongs to ", by);
    });
  };
  const bool searches = order == dpp::NamedOrder::automatic;
  refuse(request.group_size.has_value(), "--group-size", dpp::takes_group_size(order),
         "interleaved and split-interleaved");
  refuse(request.memory_cap.has_value(), "--memory-cap",
         searches || order == dpp::NamedOrder::v_schedule, "v and auto");
  refuse(request.weights.has_value(), "--weights", dpp::takes_weight_delay(order), "split-<base>");
  refuse(request.placement.has_value(), "--placement", searches, "auto");
  refuse(request.goal.has_value(), "--goal", searches, "auto");
  refuse(request.tries.has_value(), "--tries", searches, "auto");
}

}  // namespace

std::string list_of_names() {
  std::string text;
  const auto add = [&](std::string_view name, std::string_view summary) {
    text += name;
    text.append(name.size() < 14 ? 14 - name.size() : 1, ' ');
    text += sentence(summary, '\n');
  };
  for (const dpp::OrderName& each : dpp::order_names) {
    if (each.order == dpp::NamedOrder::adaptive || is_base_split(each)) continue;
    add(each.name, each.summary);
  }
  add("split-<base>", "the base with weight gradients apart, as late as --weights allows");
  return text;
}

bool is_on_v(const Request& request) {
  return request.placement == "v" || dpp::stands_on_v(order_of(request.name));
}

int chunks_of(const Request& request) {
  const dpp::NamedOrder order = order_of(request.name);
  return request.v ? *request.v : dpp::named(order).chunks;
}

MadeSchedule make_named(const Request& request) {
  const dpp::NamedOrder order = order_of(request.name);
  const int v = chunks_of(request);
  expect_size(request.p, request.m, v);
  expect_used(request, order);
  if (request.memory_cap) expect_amount("--memory-cap", *request.memory_cap);
  if (order == dpp::NamedOrder::automatic) return search(request, v);
  expects(request.group_size || !dpp::takes_group_size(order), ErrorCode::usage, [&] {
    return sentence(request.name, " needs --group-size, a number of ", request.p, " to ",
                    std::max(request.p, request.m));
  });
  expects(request.memory_cap || order != dpp::NamedOrder::v_schedule, ErrorCode::usage, [&] {
    return sentence("v needs --memory-cap, the live activations of a chunk that a rank may hold");
  });
  const dpp::OrderNumbers numbers{
      .group_size = request.group_size.value_or(0),
      .cap = static_cast<int>(std::min(request.memory_cap.value_or(0), 1e9)),
      .weights = weights_of(request)};
  return dpp::with_named(order, numbers, [&](const auto& policy) -> MadeSchedule {
    return {dpp::make_schedule(policy, request.p, request.m, v), {}};
  });
}

}  // namespace plan
