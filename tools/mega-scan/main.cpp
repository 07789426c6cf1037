// mega-scan: why a training job is slow, or why it hangs, from the traces of its ranks.
#include "align_command.hpp"
#include "convert_command.hpp"
#include "diff_command.hpp"
#include "report_command.hpp"
#include "what_if_command.hpp"
#include <mega/core/error.hpp>
#include <mega/version.hpp>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  CLI::App app{
      "Says which rank, link, stage or host makes a training job slow, from the traces of its "
      "ranks.\n"
      "Reads mega's own traces, PyTorch profiles (Kineto), flight recorder dumps, NCCL "
      "Inspector's\n"
      "lines, StragglerAnalysis's timelines and MegatronApp's traces, packed by gzip and tar or "
      "not.",
      "mega-scan"};
  app.footer(
      "Example: mega-scan report rank*.json.gz --html report.html\n"
      "Exit codes: 0 done, 2 wrong usage or input.");
  app.set_version_flag("--version", mega::sentence("mega-scan ", MEGA_VERSION_MAJOR, ".",
                                                   MEGA_VERSION_MINOR, ".", MEGA_VERSION_PATCH));
  app.require_subcommand(0, 1);
  scan_tool::add_report(app);
  scan_tool::add_align(app);
  scan_tool::add_what_if(app);
  scan_tool::add_convert(app);
  scan_tool::add_diff(app);
  try {
    app.parse(argc, argv);
    if (!app.get_subcommands().empty()) {
      if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
      std::fputs("mega-scan: standard output takes no more; what was printed is not whole\n",
                 stderr);
      return 2;
    }
    std::fputs(
        "mega-scan: a command is missing; valid are report, align, what-if, convert and diff\n",
        stderr);
  } catch (const CLI::Success& asked_for) {
    return app.exit(asked_for);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "mega-scan: %s; --help lists the options\n", error.what());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mega-scan: %s\n", error.what());
  }
  return 2;
}
