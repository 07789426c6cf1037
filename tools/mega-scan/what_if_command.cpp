#include "what_if_command.hpp"

#include "describe.hpp"
#include "inputs.hpp"
#include "json.hpp"
#include "text.hpp"
#include <mega/core/error.hpp>
#include <mega/scan/study.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace scan_tool {

namespace scan = mega::scan;

namespace {

struct WhatIfArguments {
  Inputs inputs;
  bool json = false;
};

template <class Key>
void print_scores(const char* title, const std::map<Key, double>& scores) {
  if (scores.empty()) return;
  std::vector<std::pair<double, Key>> order;
  for (const auto& [key, value] : scores) order.emplace_back(-value, key);
  std::stable_sort(order.begin(), order.end());
  std::printf("\n%s\n", title);
  constexpr std::size_t most = 8;
  for (std::size_t i = 0; i < std::min(most, order.size()); ++i) {
    const std::string name = [&] {
      if constexpr (std::is_integral_v<Key>)
        return std::to_string(order[i].second);
      else
        return cut(order[i].second, 60);
    }();
    std::printf("  %8s  %s\n", fixed(-order[i].first, 4).c_str(), name.c_str());
  }
}

void run(const WhatIfArguments& arguments) {
  const scan::Trace trace = arguments.inputs.read();
  const scan::Matches matches = scan::match(trace);
  mega::expects(!scan::are_strangers(trace, matches), mega::ErrorCode::bad_input, [&] {
    return mega::sentence("nothing says that the ", trace.ranks.size(),
                          " files are of one job: they name no ranks and share no operation; "
                          "--ranks, or names such as rank3.json, say which is which");
  });
  mega::expects(trace.lost_places() == 0, mega::ErrorCode::bad_input, [&] {
    return mega::sentence("the files do not say which stages ", trace.lost_places(), " of ",
                          counted(static_cast<std::int64_t>(trace.ranks.size()), "rank"),
                          " are of, so who waited for whom is not known; give whole files");
  });
  const scan::Alignment alignment = scan::align(trace, matches);
  mega::expects(scan::are_timed(trace, matches, alignment), mega::ErrorCode::bad_input, [&] {
    return mega::sentence("who waited for whom is not known, because ", alignment.refusal);
  });
  const auto found = scan::what_if_of(trace, scan::build_dependencies(trace, matches, alignment));
  mega::expects(found.has_value(), mega::ErrorCode::bad_input,
                "the files hold no training steps with device work, so there is nothing to replay");
  const scan::WhatIf& w = *found;
  if (arguments.json) {
    Json out = json_of(w);
    out["warnings"] = trace.warnings;
    std::printf("%s\n", text_of(out).c_str());
    return;
  }
  std::printf("%s\n", describe_what_if(w).c_str());
  print_scores("Slowdown by each data-parallel rank alone:", w.by_data);
  print_scores("By each pipeline stage alone:", w.by_stage);
  print_scores("By each kind of operation alone:", w.by_name);
}

}  // namespace

void add_what_if(CLI::App& app) {
  CLI::App& command = *app.add_subcommand(
      "what-if",
      "Replays the steps without stragglers: how long they would take, and whose fault "
      "the difference is");
  const auto arguments = std::make_shared<WhatIfArguments>();
  arguments->inputs.add_to(command);
  command.add_flag("--json", arguments->json, "print one JSON object");
  command.footer(
      "The ideal has every computation at the mean of its kind and every transfer at the median.\n"
      "A rank, stage or operation alone: the ideal, but with its own times.\n"
      "Example: mega-scan what-if timeline.json.gz");
  command.callback([arguments] { run(*arguments); });
}

}  // namespace scan_tool
