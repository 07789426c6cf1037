#include "json.hpp"

#include "describe.hpp"
#include <mega/scan/shared_processors.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

namespace scan_tool {

namespace scan = mega::scan;

namespace {

constexpr double ns_per_us = 1e3;

/// JSON has no infinities.
Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json microseconds(scan::Nanoseconds ns) {
  return static_cast<double>(ns) / ns_per_us;
}

/// Indices into the ranks, by their numbers.
std::vector<std::size_t> by_number(const scan::Trace& trace) {
  std::vector<std::size_t> out(trace.ranks.size());
  std::iota(out.begin(), out.end(), std::size_t{0});
  std::stable_sort(out.begin(), out.end(), [&](std::size_t a, std::size_t b) {
    return trace.ranks[a].rank < trace.ranks[b].rank;
  });
  return out;
}

Json by_rank(const scan::Trace& trace, const std::vector<scan::Nanoseconds>& values) {
  Json out = Json::object();
  for (const std::size_t i : by_number(trace))
    out[std::to_string(trace.ranks[i].rank)] = microseconds(values[i]);
  return out;
}

Json delay_costs(const scan::Study& study) {
  Json out = Json::object();
  for (const std::size_t i : by_number(study.trace)) {
    out[std::to_string(study.trace.ranks[i].rank)] = {
        {"direct", number(study.delays.direct[i] / ns_per_us)},
        {"indirect", number(study.delays.indirect[i] / ns_per_us)}};
  }
  return out;
}

Json critical_path(const scan::Study& study) {
  Json ranks = Json::object(), names = Json::object();
  for (const auto& [rank, ns] : study.critical_path.by_rank)
    ranks[std::to_string(rank)] = microseconds(ns);
  for (const auto& [name, ns] : study.critical_path.by_name)
    names[std::string(name == scan::none ? "" : study.trace.names[name])] = microseconds(ns);
  return {{"by_rank_us", std::move(ranks)}, {"by_operation_us", std::move(names)}};
}

Json hosts_that_share(const scan::Trace& trace) {
  Json out = Json::array();
  for (const scan::SharedHost& host : scan::shared_hosts(trace))
    out.push_back({{"host", host.name}, {"ranks", host.ranks}, {"processors", host.processors}});
  return out;
}

Json optional_text(std::string_view text) {
  return text.empty() ? Json(nullptr) : Json(text);
}

Json collectives(const scan::Study& study) {
  Json out = Json::array();
  const scan::Trace& t = study.trace;
  for (const scan::OperationTiming& timing : study.waits.operations) {
    const scan::Instance& instance = study.matches.instances[timing.instance];
    const auto members = study.matches.of(instance);
    std::int64_t bytes = -1;
    for (const scan::TableIndex m : members) bytes = std::max(bytes, t.communications[m].bytes);
    Json& row = out.emplace_back(
        Json{{"op", to_string(instance.op)},
             {"group",
              instance.group == scan::none ? Json(nullptr) : Json(t.groups[instance.group].name)},
             {"sequence", instance.sequence},
             {"members", members.size()},
             {"last_arriver", t.ranks[timing.last_arriver].rank},
             {"end_spread_us", microseconds(timing.end_spread)},
             {"waited_us", microseconds(timing.waited)},
             {"transfer_us", microseconds(timing.transfer)}});
    if (bytes >= 0) row["bytes"] = bytes;
    if (bytes > 0 && timing.transfer > 0)
      row["bytes_per_ns"] = static_cast<double>(bytes) / static_cast<double>(timing.transfer);
  }
  return out;
}

Json verdicts(const scan::Study& study) {
  Json out = Json::array();
  const auto statements = describe_verdicts(study);
  for (std::size_t i = 0; i < statements.size(); ++i) {
    const scan::Verdict& v = study.diagnosis.verdicts[i];
    out.push_back({{"class", to_string(v.what)},
                   {"ranks", v.ranks},
                   {"stages", v.stages},
                   {"confidence", number(v.confidence)},
                   {"factor", number(v.factor)},
                   {"has_peers", !v.alone},
                   {"since_step", v.since_step >= 0 ? Json(v.since_step) : Json(nullptr)},
                   {"cost_per_step_us", microseconds(v.cost_per_step)},
                   {"path", v.path},
                   {"headline", statements[i].headline},
                   {"evidence", v.evidence}});
  }
  return out;
}

Json ranks_of(const scan::Trace& trace) {
  Json out = Json::array();
  for (const scan::Rank& r : trace.ranks) {
    Json& row = out.emplace_back(Json{{"rank", r.rank}, {"source", r.source}});
    if (r.data >= 0) row["data"] = r.data;
    if (r.pipeline >= 0) row["pipeline"] = r.pipeline;
    if (r.tensor >= 0) row["tensor"] = r.tensor;
    if (r.missing) row["missing"] = true;
  }
  return out;
}

template <class Key>
Json scores(const std::map<Key, double>& values) {
  Json out = Json::object();
  for (const auto& [key, value] : values) {
    if constexpr (std::is_integral_v<Key>) {
      out[std::to_string(key)] = number(value);
    } else {
      out[key] = number(value);
    }
  }
  return out;
}

}  // namespace

Json json_of(const scan::WhatIf& w) {
  return {{"S", number(w.slowdown)},
          {"M_W", w.worst.empty() ? Json(nullptr) : number(w.worst_share)},
          {"M_S", w.has_stages() ? number(w.last_stage_share) : Json(nullptr)},
          {"actual_ms", number(w.actual_ns / 1e6)},
          {"no_delay_ms", number(w.no_delay_ns / 1e6)},
          {"ideal_ms", number(w.ideal_ns / 1e6)},
          {"worst_ranks", w.worst},
          {"by_operation", scores(w.by_name)},
          {"by_data_rank", scores(w.by_data)},
          {"by_stage", scores(w.by_stage)},
          {"by_rank", scores(w.by_rank)}};
}

Json json_of(const scan::Trace& trace, const scan::Alignment& a) {
  Json out = {{"residual_mad_us", number(a.residual_mad_us)},
              {"residual_p99_us", number(a.residual_p99_us)},
              {"bound_us", number(a.bound_us)},
              {"violations", a.violations},
              {"checked", a.checked},
              {"contradiction", a.contradiction},
              {"notes", a.notes}};
  Json& clocks = out["clocks"] = Json::object();
  for (std::size_t i = 0; i < a.clocks.size(); ++i) {
    clocks[std::to_string(trace.ranks[i].rank)] = {{"offset_ns", a.clocks[i].offset},
                                                   {"drift_ppm", number(a.clocks[i].drift * 1e6)}};
  }
  return out;
}

Json json_of(const scan::Study& study) {
  const scan::Trace& t = study.trace;
  Json defects = Json::object();
  for (const NamedDefect& d : named_defects(t.defects)) defects[d.name] = d.count;
  std::vector<std::string> notes = t.notes;
  for (const auto* more :
       {&study.matches.notes, &study.alignment.notes, &study.diagnosis.notes, &study.hang.notes})
    notes.insert(notes.end(), more->begin(), more->end());
  const bool timed = study.alignment.aligned() || !study.waits.operations.empty();
  return {{"events", t.events.size()},
          {"ranks", t.ranks.size()},
          {"aligned", t.ranks.size() > 1 && study.alignment.aligned()},
          {"refusal", optional_text(study.alignment.refusal)},
          {"step_ms", static_cast<double>(study.diagnosis.step_time) / 1e6},
          {"healthy", study.diagnosis.healthy()},
          {"unjudged_ranks", study.diagnosis.unjudged},
          {"verdicts", verdicts(study)},
          {"what_if", study.what_if ? json_of(*study.what_if) : Json(nullptr)},
          {"alignment", json_of(t, study.alignment)},
          {"wait_caused_us", timed ? by_rank(t, study.waits.caused) : Json(nullptr)},
          {"wait_suffered_us", timed ? by_rank(t, study.waits.suffered) : Json(nullptr)},
          {"delay_cost_us", timed ? delay_costs(study) : Json(nullptr)},
          {"critical_path", critical_path(study)},
          {"matched",
           {{"by_sequence", study.matches.by_sequence},
            {"by_signature", study.matches.by_signature},
            {"leftovers", study.matches.leftovers.size()}}},
          {"collectives", collectives(study)},
          {"defects", std::move(defects)},
          {"completeness",
           {{"events_dropped", t.completeness.events_dropped},
            {"window_truncated", t.completeness.window_truncated},
            {"cost_ns_per_event", number(t.completeness.cost_ns_per_event)}}},
          {"rank_files", ranks_of(t)},
          {"shared_hosts", hosts_that_share(t)},
          {"warnings", t.warnings},
          {"notes", notes}};
}

std::string text_of(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace scan_tool
