#include "align_command.hpp"

#include "describe.hpp"
#include "inputs.hpp"
#include "json.hpp"
#include "text.hpp"
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>

#include <cstddef>
#include <cstdio>
#include <memory>

namespace scan_tool {

namespace scan = mega::scan;

namespace {

struct AlignArguments {
  Inputs inputs;
  bool json = false;
};

void run(const AlignArguments& arguments) {
  const scan::Trace t = arguments.inputs.read();
  const scan::Alignment alignment = scan::align(t, scan::match(t));
  if (arguments.json) {
    Json out = json_of(t, alignment);
    out["aligned"] = t.ranks.size() > 1 && alignment.aligned();
    out["warnings"] = t.warnings;
    out["refusal"] = alignment.aligned() ? Json(nullptr) : Json(alignment.refusal);
    std::printf("%s\n", text_of(out).c_str());
    return;
  }
  std::printf("%s\n", describe_alignment(t, alignment).c_str());
  if (t.ranks.size() > 1 && alignment.aligned()) {
    std::puts("\nrank            offset   drift ppm   file");
    for (std::size_t i = 0; i < t.ranks.size(); ++i) {
      const scan::ClockModel& c = alignment.clocks[i];
      std::printf("%4d  %16s  %10s   %s\n", t.ranks[i].rank,
                  duration(static_cast<double>(c.offset)).c_str(), fixed(c.drift * 1e6, 3).c_str(),
                  t.ranks[i].source.c_str());
    }
  }
  for (const std::string& note : alignment.notes) std::printf("%s\n", note.c_str());
}

}  // namespace

void add_align(CLI::App& app) {
  CLI::App& command = *app.add_subcommand(
      "align", "Finds each rank's clock from operations that ranks ran together, or says why not");
  const auto arguments = std::make_shared<AlignArguments>();
  arguments->inputs.add_to(command);
  command.add_flag("--json", arguments->json, "print one JSON object");
  command.footer("Example: mega-scan align rank*.json.gz");
  command.callback([arguments] { run(*arguments); });
}

}  // namespace scan_tool
