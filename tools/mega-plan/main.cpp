// mega-plan: what a pipeline schedule costs before it runs, and what a run's traces say it cost.
#include "check_command.hpp"
#include "compare_command.hpp"
#include "metrics_command.hpp"
#include "schedule_command.hpp"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  CLI::App app{
      "Plans pipeline schedules: makes and draws them, proves them, compares them for a model and "
      "a\n"
      "cluster, and measures traces.",
      "mega-plan"};
  app.footer(
      "Example: mega-plan compare --pp 8 --micro-batches 32 --times 2,2,2 --comm 0.1\n"
      "Exit codes: 0 done, 1 the schedule that was to be checked is invalid, 2 wrong usage or "
      "input.");
  app.require_subcommand(0, 1);
  int exit_code = 0;
  plan::add_schedule(app, exit_code);
  plan::add_check(app, exit_code);
  plan::add_compare(app, exit_code);
  plan::add_metrics(app, exit_code);
  try {
    app.parse(argc, argv);
    if (!app.get_subcommands().empty()) {
      if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
      std::fputs("mega-plan: standard output takes no more; what was printed is not whole\n",
                 stderr);
      return 2;
    }
    std::fputs("mega-plan: a command is missing; valid are schedule, check, compare and metrics\n",
               stderr);
  } catch (const CLI::Success& asked_for) {
    return app.exit(asked_for);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "mega-plan: %s; --help lists the options\n", error.what());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mega-plan: %s\n", error.what());
  }
  return 2;
}
