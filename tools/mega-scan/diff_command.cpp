#include "diff_command.hpp"

#include "inputs.hpp"
#include "json.hpp"
#include "text.hpp"
#include <mega/core/error.hpp>
#include <mega/scan/study.hpp>

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
  std::map<scan::EventKind, double> kinds;  // ns a rank and step
};

Summary summary_of(const std::string& path) {
  const scan::Trace trace = read_trace(path);
  Summary out;
  out.warnings = trace.warnings;
  out.ranks = static_cast<double>(std::max<std::size_t>(1, trace.ranks.size()));
  std::set<std::int32_t> steps;
  std::map<std::pair<scan::TableIndex, std::int32_t>,
           std::pair<scan::Nanoseconds, scan::Nanoseconds>>
      windows;  // of each rank and step
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const scan::Event& e = trace.events[i];
    if (e.step < 0) continue;
    steps.insert(e.step);
    const auto [at, is_new] =
        windows.try_emplace({trace.rank_index(e), e.step}, std::pair{e.begin, e.end});
    at->second.first = std::min(at->second.first, e.begin);
    at->second.second = std::max(at->second.second, e.end);
  }
  if (!steps.empty()) out.steps = static_cast<double>(steps.size());
  for (const auto& [key, window] : windows)
    out.step_ns += static_cast<double>(window.second - window.first);
  if (!windows.empty()) out.step_ns /= static_cast<double>(windows.size());
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

void print_text(const Summary& before, const Summary& after, const std::vector<Change>& changes) {
  if (are_equal(before, after, changes)) {
    std::puts("No difference: the steps and all device work take the same time in both.");
    return;
  }
  if (before.step_ns > 0 && after.step_ns > 0) {
    std::printf("A step took %s and takes %s: %s, %s times as long.\n",
                duration(before.step_ns).c_str(), duration(after.step_ns).c_str(),
                signed_duration(after.step_ns - before.step_ns).c_str(),
                fixed(after.step_ns / before.step_ns, 3).c_str());
  }
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
  std::printf("%s\n", text_of({{"before", side(before)},
                               {"after", side(after)},
                               {"equal", are_equal(before, after, changes)},
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
