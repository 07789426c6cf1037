#include "schedule_command.hpp"

#include "arguments.hpp"
#include "judgement.hpp"
#include "named_schedules.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/csv.hpp>
#include <mega/dpp/passes.hpp>
#include <mega/dpp/svg.hpp>
#include <mega/dpp/timeline_json.hpp>
#include <mega/dpp/transfer_order.hpp>

#include <nlohmann/json.hpp>

#include <cstdio>
#include <memory>
#include <string>

namespace plan {

namespace dpp = mega::dpp;
using mega::ErrorCode;
using mega::expects;
using mega::sentence;

namespace {

struct ScheduleArguments {
  Request request;
  TimeArguments times;
  bool list = false;
  bool json = false;
  bool transfers = false;
  std::string svg, csv, perfetto;
};

void run(ScheduleArguments& arguments, const CLI::App& command) {
  if (arguments.list) {
    std::fputs(list_of_names().c_str(), stdout);
    return;
  }
  for (const char* const needed : {"--name", "--pp", "--micro-batches"}) {
    expects(command.get_option(needed)->count() > 0, ErrorCode::usage, [&] {
      return sentence("schedule needs ", needed, "; schedule --help has an example");
    });
  }
  Request& request = arguments.request;
  const dpp::ActionTimes times = arguments.times.parsed();
  expects(times.pair < 0 || request.name == "dualpipev", ErrorCode::usage, [&] {
    return sentence("--pair is of no use to ", request.name,
                    "; it belongs to dualpipev, which runs actions side by side");
  });
  expects(!arguments.transfers || !arguments.csv.empty(), ErrorCode::usage,
          "--transfers says what --csv writes, and there is no --csv");
  request.times = {times};
  const MadeSchedule made = make_named(request);
  const dpp::ScheduleView compute = made.schedule.view();
  const dpp::Schedule lowered = dpp::lower(compute);
  const Judgement judgement = judge(lowered, times);
  expects(judgement.verdict.ok(), ErrorCode::logic,
          [&] { return sentence(request.name, ": ", dpp::describe(judgement.verdict)); });

  const std::string title =
      sentence(request.name, ": ", counted(compute.p, "rank"), ", ",
               counted(compute.m, "micro-batch"), ", ", counted(compute.v, "chunk"), " a rank",
               made.origin.empty() ? std::string() : sentence("; found as ", made.origin));
  OutputFiles files;
  dpp::Timeline timeline;
  if (!arguments.svg.empty() || !arguments.perfetto.empty()) timeline = timeline_of(lowered, times);
  if (!arguments.svg.empty()) files.add(arguments.svg, dpp::to_svg(timeline, {.title = title}));
  if (!arguments.csv.empty()) {
    files.add(arguments.csv, dpp::write_csv(arguments.transfers
                                                ? dpp::strip_implicit(dpp::order_transfers(lowered))
                                                : made.schedule));
  }
  if (!arguments.perfetto.empty()) files.add(arguments.perfetto, dpp::to_trace_json(timeline));
  const bool silent = files.take_standard_output(arguments.json);
  files.write();
  if (silent) return;

  if (arguments.json) {
    nlohmann::ordered_json out = {{"name", request.name},
                                  {"ranks", compute.p},
                                  {"micro_batches", compute.m},
                                  {"chunks", compute.v}};
    if (!made.origin.empty()) out["found_as"] = made.origin;
    put_figures(out, compute, judgement);
    std::printf("%s\n", out.dump(2).c_str());
  } else {
    std::printf("%s\n%s", title.c_str(), figures_text(compute, judgement).c_str());
  }
}

}  // namespace

void add_schedule(CLI::App& app, int& /*exit_code*/) {
  CLI::App& command = *app.add_subcommand(
      "schedule", "Makes one schedule by name and prints its step time, bubble and memory");
  const auto arguments = std::make_shared<ScheduleArguments>();
  Request& request = arguments->request;
  command.add_option("--name", request.name, "which schedule; --list prints all");
  const auto into = [](auto& value) { return [&value](auto given) { value = given; }; };
  add_whole(command, "--pp", into(request.p), "pipeline ranks");
  add_whole(command, "--micro-batches", into(request.m), "micro-batches of a step");
  add_whole(command, "--vpp", into(request.v), "chunks a rank; by default what the schedule needs");
  add_whole(command, "--group-size", into(request.group_size),
            "interleaved: micro-batches of a group");
  add_number(command, "--memory-cap", into(request.memory_cap),
             "v, auto: live activations of a chunk that a rank may hold");
  command.add_option("--weights,--weight-gradients", request.weights,
                     "split-<base>: at-once, by-rank (default), at-end, or how many may wait");
  command.add_option("--placement", request.placement,
                     "auto: loop, v, or any (default), the better of both");
  command.add_option("--goal", request.goal,
                     "auto: makespan (default), or span, which leaves start skew out");
  add_whole(command, "--tries", into(request.tries),
            "auto: orders that the local search times on each placement", 0, most_tries);
  arguments->times.add_to(command, "one action on one chunk");
  command.add_flag("--list", arguments->list, "print the names, a line each, and end");
  command.add_flag("--json", arguments->json, "print one JSON object");
  command.add_option("--svg", arguments->svg, "draw the timeline into this file");
  command.add_option("--csv", arguments->csv, "write the compute order as PyTorch reads it");
  command.add_flag("--transfers", arguments->transfers,
                   "with --csv: sends and receives too, in an order for blocking links");
  command.add_option("--perfetto", arguments->perfetto,
                     "write the timeline as a trace for Perfetto, a unit of time as 1 ms");
  command.footer(
      "Bubbles are fractions: wall = 1 - busy/makespan; span = 1 - busy/(longest time from a "
      "rank's\n"
      "first start to its last end). An activation is alive from its forward to its weight "
      "gradient.\n"
      "Example: mega-plan schedule --name zb-h1 --pp 8 --micro-batches 24 --times 2,2,1 --comm "
      "0.1\n"
      "                            --svg zb-h1.svg");
  command.callback([arguments, &command] {
    expect_values(command);
    run(*arguments, command);
  });
}

}  // namespace plan
