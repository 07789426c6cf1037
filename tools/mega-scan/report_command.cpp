#include "report_command.hpp"

#include "describe.hpp"
#include "html_page.hpp"
#include "inputs.hpp"
#include "json.hpp"
#include "text.hpp"
#include <mega/ckpt/replaced_file.hpp>
#include <mega/scan/study.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace scan_tool {

using mega::sentence;
namespace scan = mega::scan;

namespace {

struct ReportArguments {
  Inputs inputs;
  bool json = false;
  std::string html;
};

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
}

/// Ranks that the waiting goes back to, the most first.
void print_waits(const scan::Study& study) {
  const scan::WaitReport& w = study.waits;
  scan::Nanoseconds all = std::accumulate(w.caused.begin(), w.caused.end(), scan::Nanoseconds{0});
  if (all == 0) return;
  const auto blame = [&](std::size_t r) {
    return study.delays.direct[r] + study.delays.indirect[r];
  };
  std::vector<std::size_t> order(w.caused.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t r) {
    return w.caused[r] == 0 && w.suffered[r] == 0 && !(blame(r) > 0);
  });
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return blame(a) > blame(b); });
  constexpr std::size_t most = 8;
  const auto& unjudged = study.diagnosis.unjudged;
  say(sentence("\nWaiting in matched operations, by rank",
               unjudged.empty()
                   ? std::string()
                   : sentence(", as far as it is known without ", listed("rank", unjudged)),
               ":"));
  say("  rank      caused    suffered   goes back to it");
  for (std::size_t i = 0; i < std::min(most, order.size()); ++i) {
    const std::size_t r = order[i];
    std::printf("  %4d  %10s  %10s  %16s\n", study.trace.ranks[r].rank,
                duration(static_cast<double>(w.caused[r])).c_str(),
                duration(static_cast<double>(w.suffered[r])).c_str(), duration(blame(r)).c_str());
  }
  if (order.size() > most)
    say(sentence("  and ", counted(static_cast<std::int64_t>(order.size() - most), "more rank"),
                 "; --json has them all"));
}

/// On whom the end of the trace depends.
void print_path(const scan::Study& study) {
  scan::Nanoseconds all = 0;
  std::vector<std::pair<scan::Nanoseconds, std::int32_t>> ranks;
  for (const auto& [rank, ns] : study.critical_path.by_rank) {
    all += ns;
    ranks.emplace_back(-ns, rank);
  }
  if (all == 0 || ranks.size() < 2) return;
  std::sort(ranks.begin(), ranks.end());
  std::string text = sentence("\nThe critical path of ", duration(static_cast<double>(all)), ":");
  constexpr std::size_t most = 5;
  for (std::size_t i = 0; i < std::min(most, ranks.size()); ++i) {
    text += sentence(i == 0 ? " " : ", ",
                     percent(static_cast<double>(-ranks[i].first) / static_cast<double>(all)),
                     " on rank ", ranks[i].second);
  }
  if (ranks.size() > most) {
    text += sentence(" and the rest on ",
                     counted(static_cast<std::int64_t>(ranks.size() - most), "other"));
  }
  say(text + ".");
}

void print_totals(const scan::Study& study) {
  const std::vector<scan::NameTotal> totals = scan::totals_by_name(study.trace);
  constexpr std::size_t most = 10;
  std::size_t shown = 0;
  for (const scan::NameTotal& t : totals) {
    const bool device = is_compute(t.kind) || t.kind == scan::EventKind::communication ||
                        t.kind == scan::EventKind::memory;
    if (!device) continue;
    if (shown++ == most) break;
    if (shown == 1) say("\nDevice time, all ranks:");
    const std::string_view name = t.name == scan::none ? "" : study.trace.names[t.name];
    std::printf("  %10s  %8s x  %-13s  %s\n", duration(static_cast<double>(t.total)).c_str(),
                grouped(t.count).c_str(), std::string(to_string(t.kind)).c_str(),
                cut(name, 60).c_str());
  }
}

void print_text(const scan::Study& study) {
  const std::vector<Statement> verdicts = describe_verdicts(study);
  for (const Statement& v : verdicts) {
    say(v.headline);
    for (const std::string& line : v.details) say("  " + line);
  }
  if (verdicts.empty()) say(describe_health(study));
  say("");
  say(describe_extent(study) + ".");
  say(describe_alignment(study.trace, study.alignment));
  for (const std::string& line : describe_hosts(study.trace)) say(line);
  if (study.what_if) say(describe_what_if(*study.what_if, !study.diagnosis.healthy()));
  print_waits(study);
  print_path(study);
  print_totals(study);
  std::vector<std::string> remarks = study.trace.warnings;
  const std::vector<std::string> defects = describe_defects(study.trace);
  for (const auto* more : {&defects, &study.trace.notes, &study.matches.notes,
                           &study.alignment.notes, &study.diagnosis.notes, &study.hang.notes})
    remarks.insert(remarks.end(), more->begin(), more->end());
  if (remarks.empty()) return;
  say("\nOf the input:");
  constexpr std::size_t most = 20;
  for (std::size_t i = 0; i < std::min(most, remarks.size()); ++i) say("  " + remarks[i]);
  if (remarks.size() > most)
    say(sentence("  and ", counted(static_cast<std::int64_t>(remarks.size() - most), "more remark"),
                 "; --json has them all"));
}

void run(const ReportArguments& arguments) {
  if (!arguments.html.empty()) arguments.inputs.expect_output("--html", arguments.html);
  const scan::Study study(arguments.inputs.read());
  if (!arguments.html.empty()) {
    mega::ckpt::ReplacedFile page(arguments.html);
    page.write(html_page(study));
    page.finish();
    if (mega::ckpt::ReplacedFile::is_standard_output(arguments.html)) return;
  }
  if (arguments.json) {
    say(text_of(json_of(study)));
  } else {
    print_text(study);
  }
}

}  // namespace

void add_report(CLI::App& app) {
  CLI::App& command = *app.add_subcommand(
      "report", "Says what is wrong, in sentences, as JSON, or as a page to look into");
  const auto arguments = std::make_shared<ReportArguments>();
  arguments->inputs.add_to(command);
  command.add_flag("--json", arguments->json, "print one JSON object");
  add_output(command, "--html", arguments->html,
             "write one self-contained page: timeline, waits by rank and group, what-if");
  command.footer(
      "verdicts   slow_gpu, slow_link, stage_imbalance, data_imbalance, host_delay, hang, "
      "ambiguous\n"
      "caused     time that other ranks waited for this one; suffered: that it waited for others;\n"
      "           goes back to it: waits that it began, also those that others passed on\n"
      "S, M_W, M_S  slowdown against the same step without stragglers; what of it the worst "
      "ranks,\n"
      "           and the last stage, account for\n"
      "Example: mega-scan report traces/ --html report.html");
  command.callback([arguments] { run(*arguments); });
}

}  // namespace scan_tool
