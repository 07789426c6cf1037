// mega-plan: what a pipeline schedule costs before it runs, and what a run's traces say it cost.
#include "check_command.hpp"
#include "compare_command.hpp"
#include "metrics_command.hpp"
#include "schedule_command.hpp"

#include <CLI/CLI.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>

#ifdef __GLIBC__
#include <malloc.h>
#include <sys/mman.h>
#endif

namespace {

/// A plan of a thousand ranks takes hundreds of megabytes, whose pages would cost more than all
/// that is computed in them. So they are large where the system has large ones, and what one
/// schedule has freed serves the next. Only pages that are used are taken.
void prepare_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  constexpr std::size_t room = std::size_t{1} << 30;
  constexpr std::size_t page = std::size_t{1} << 12;
  char* const heap = static_cast<char*>(std::malloc(room));
  if (heap == nullptr) return;
  const std::size_t ahead = page - reinterpret_cast<std::uintptr_t>(heap) % page;
  madvise(heap + ahead, room - page, MADV_HUGEPAGE);
  std::free(heap);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  prepare_memory();
  CLI::App app{
      "Plans pipeline schedules: makes and draws them, proves them, compares them for a model and "
      "a\n"
      "cluster, and measures traces.",
      "mega-plan"};
  app.footer(
      "Example: mega-plan compare --pp 8 --micro-batches 32 --times 2,2,2 --comm 0.1\n"
      "Exit codes: 0 done, 1 the schedule that was to be checked is invalid, 2 wrong usage or "
      "input,\n"
      "or an output that could not be written.");
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
