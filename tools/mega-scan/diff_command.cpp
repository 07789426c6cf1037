#include "diff_command.hpp"

#include "describe.hpp"
#include "inputs.hpp"
#include "json.hpp"
#include "text.hpp"
#include <mega/core/error.hpp>
#include <mega/scan/study.hpp>
#include <mega/scan/trace.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace scan_tool {

using mega::sentence;
namespace scan = mega::scan;

namespace {

struct DiffArguments {
  std::string before, after;
  bool json = false;
};

/// Of one job, what does not depend on how many ranks and steps its files hold.
struct Summary {
  struct Work {
    double calls = 0, ns = 0;  // a rank and step
  };
  std::vector<std::string> warnings;
  double ranks = 0, steps = 1;
  double step_ns = 0;
  std::map<std::pair<scan::EventKind, std::string>, Work> work;
  std::map<scan::EventKind, double> kinds;   // ns a rank and step
  std::map<std::int32_t, double> computing;  // ns a step, by rank
};

/// Nanoseconds from first to last event, median over ranks and steps: of a file without device
/// work.
double length_of_steps(const scan::Trace& trace) {
  std::map<std::pair<scan::TableIndex, std::int32_t>,
           std::pair<scan::Nanoseconds, scan::Nanoseconds>>
      windows;  // of each rank and step
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const scan::Event& e = trace.events[i];
    if (e.step < 0) continue;
    const auto [at, is_new] =
        windows.try_emplace({trace.rank_index(e), e.step}, std::pair{e.begin, e.end});
    at->second.first = std::min(at->second.first, e.begin);
    at->second.second = std::max(at->second.second, e.end);
  }
  std::vector<double> lengths;
  for (const auto& [key, window] : windows)
    lengths.push_back(static_cast<double>(window.second - window.first));
  return lengths.empty() ? 0 : scan::verdicts::lower_median(lengths);
}

Summary summary_of(const std::string& path) {
  const scan::Trace trace = read_trace(path);
  Summary out;
  out.warnings = trace.warnings;
  out.ranks = static_cast<double>(std::max<std::size_t>(1, trace.ranks.size()));
  std::set<std::int32_t> steps;
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const scan::Event& e = trace.events[i];
    if (e.step >= 0) steps.insert(e.step);
  }
  if (!steps.empty()) out.steps = static_cast<double>(steps.size());
  const scan::Nanoseconds worked = scan::verdicts::lay_out(trace).step_time;
  out.step_ns = worked > 0 ? static_cast<double>(worked) : length_of_steps(trace);
  const scan::verdicts::Nesting nesting = scan::verdicts::find_nesting(trace);
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const scan::Event& e = trace.events[i];
    if (is_compute(e.kind) && nesting.holds[i] == 0)
      out.computing[trace.rank(e)] += static_cast<double>(e.duration()) / out.steps;
  }
  const double share = 1 / (out.ranks * out.steps);
  for (const scan::NameTotal& t : scan::totals_by_name(trace)) {
    const bool device = is_compute(t.kind) || t.kind == scan::EventKind::communication ||
                        t.kind == scan::EventKind::memory;
    if (!device) continue;
    const std::string name = t.name == scan::none ? "" : std::string(trace.names[t.name]);
    out.work[{t.kind, name}] = {static_cast<double>(t.count) * share,
                                static_cast<double>(t.total) * share};
    out.kinds[t.kind] += static_cast<double>(t.total) * share;
  }
  mega::expects(!out.work.empty() || out.step_ns > 0, mega::ErrorCode::bad_input, [&] {
    return sentence(path, " holds neither steps nor device work, so there is nothing to compare");
  });
  return out;
}

/// Of a rank that is in both runs, what its computations of a step take.
struct RankChange {
  std::int32_t rank;
  double before, after;  // ns
  [[nodiscard]] double ns() const { return after - before; }
};

/// The most changed first.
std::vector<RankChange> rank_changes_of(const Summary& before, const Summary& after) {
  std::vector<RankChange> out;
  for (const auto& [rank, ns] : before.computing) {
    const auto same = after.computing.find(rank);
    if (same != after.computing.end()) out.push_back({rank, ns, same->second});
  }
  std::stable_sort(out.begin(), out.end(), [](const RankChange& a, const RankChange& b) {
    return std::abs(a.ns()) > std::abs(b.ns());
  });
  return out;
}

struct Change {
  scan::EventKind kind;
  std::string name;
  Summary::Work before, after;
  [[nodiscard]] double ns() const { return after.ns - before.ns; }
};

std::vector<Change> changes_of(const Summary& before, const Summary& after) {
  std::map<std::pair<scan::EventKind, std::string>, Change> all;
  for (const auto& [key, work] : before.work) all[key] = {key.first, key.second, work, {}};
  for (const auto& [key, work] : after.work) {
    Change& c = all[key];
    c.kind = key.first;
    c.name = key.second;
    c.after = work;
  }
  std::vector<Change> out;
  for (auto& [key, change] : all) out.push_back(std::move(change));
  std::stable_sort(out.begin(), out.end(), [](const Change& a, const Change& b) {
    return std::abs(a.ns()) > std::abs(b.ns());
  });
  return out;
}

/// To the last nanosecond and call.
bool are_equal(const Summary& before, const Summary& after, const std::vector<Change>& changes) {
  return before.step_ns == after.step_ns &&
         std::all_of(changes.begin(), changes.end(), [](auto& c) {
           return c.before.ns == c.after.ns && c.before.calls == c.after.calls;
         });
}

std::string signed_duration(double ns) {
  return (ns > 0 ? "+" : "") + duration(ns);
}

/// Which ranks compute longer or shorter than they did, unless all do alike.
void print_ranks(const Summary& before, const Summary& after) {
  const std::vector<RankChange> ranks = rank_changes_of(before, after);
  if (ranks.size() < 2) return;
  constexpr std::size_t most = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(most, ranks.size()); ++i) {
    text += sentence(i == 0 ? "" : ", ", "rank ", ranks[i].rank, " ", duration(ranks[i].before),
                     " -> ", duration(ranks[i].after));
  }
  if (ranks.size() > most)
    text += sentence(", the others changed by ", duration(std::abs(ranks[most].ns())), " at most");
  std::printf("Computing in a step: %s.\n", text.c_str());
}

void print_text(const Summary& before, const Summary& after, const std::vector<Change>& changes) {
  if (are_equal(before, after, changes)) {
    std::puts("No difference: the steps and all device work take the same time in both.");
    return;
  }
  if (before.step_ns > 0 && after.step_ns > 0) {
    std::printf("A step took %s and takes %s: %s, %s times as long (%s).\n",
                duration(before.step_ns).c_str(), duration(after.step_ns).c_str(),
                signed_duration(after.step_ns - before.step_ns).c_str(),
                fixed(after.step_ns / before.step_ns, 3).c_str(), step_length);
  }
  print_ranks(before, after);
  std::puts("Device time a rank and step:\n\n      before       after      change   calls   name");
  constexpr std::size_t most = 20;
  for (std::size_t i = 0; i < std::min(most, changes.size()); ++i) {
    const Change& c = changes[i];
    const std::string calls =
        c.before.calls == c.after.calls
            ? fixed(c.after.calls, 0)
            : sentence(fixed(c.before.calls, 0), "->", fixed(c.after.calls, 0));
    std::printf("  %10s  %10s  %10s  %6s   %s\n", duration(c.before.ns).c_str(),
                duration(c.after.ns).c_str(), signed_duration(c.ns()).c_str(), calls.c_str(),
                cut(c.name, 60).c_str());
  }
  if (changes.size() > most)
    std::printf("  and %s that changed less; --json has them all\n",
                counted(static_cast<std::int64_t>(changes.size() - most), "name").c_str());
}

void print_json(const Summary& before, const Summary& after, const std::vector<Change>& changes) {
  const auto side = [](const Summary& s) {
    Json kinds = Json::object();
    for (const auto& [kind, ns] : s.kinds) kinds[std::string(to_string(kind))] = ns / 1e6;
    return Json{{"ranks", s.ranks},
                {"steps", s.steps},
                {"step_ms", s.step_ns / 1e6},
                {"kinds_ms", kinds},
                {"warnings", s.warnings}};
  };
  Json rows = Json::array();
  for (const Change& c : changes) {
    rows.push_back({{"name", c.name},
                    {"kind", to_string(c.kind)},
                    {"before_ms", c.before.ns / 1e6},
                    {"after_ms", c.after.ns / 1e6},
                    {"before_calls", c.before.calls},
                    {"after_calls", c.after.calls}});
  }
  Json ranks = Json::array();
  for (const RankChange& c : rank_changes_of(before, after)) {
    ranks.push_back({{"rank", c.rank},
                     {"before_compute_ms", c.before / 1e6},
                     {"after_compute_ms", c.after / 1e6}});
  }
  std::printf("%s\n", text_of({{"before", side(before)},
                               {"after", side(after)},
                               {"equal", are_equal(before, after, changes)},
                               {"ranks", ranks},
                               {"changes", rows}})
                          .c_str());
}

void run(const DiffArguments& arguments) {
  const Summary before = summary_of(arguments.before), after = summary_of(arguments.after);
  const std::vector<Change> changes = changes_of(before, after);
  if (arguments.json) {
    print_json(before, after, changes);
  } else {
    print_text(before, after, changes);
  }
}

}  // namespace

void add_diff(CLI::App& app) {
  CLI::App& command =
      *app.add_subcommand("diff", "Compares two runs, kernel by kernel, a rank and step");
  const auto arguments = std::make_shared<DiffArguments>();
  command.add_option("before", arguments->before, "file, directory or archive of one run")
      ->required();
  command.add_option("after", arguments->after, "of the other run")->required();
  command.add_flag("--json", arguments->json, "print one JSON object");
  command.footer("Example: mega-scan diff monday/ tuesday/");
  command.callback([arguments] { run(*arguments); });
}

}  // namespace scan_tool
