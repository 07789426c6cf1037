#include "convert_command.hpp"

#include "inputs.hpp"
#include "text.hpp"
#include <mega/ckpt/replaced_file.hpp>
#include <mega/core/error.hpp>
#include <mega/scan/align.hpp>
#include <mega/scan/chrome_json.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/perfetto.hpp>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

namespace scan_tool {

using mega::sentence;
namespace scan = mega::scan;

namespace {

struct ConvertArguments {
  Inputs inputs;
  std::string to;
  std::string output;
};

void run(const ConvertArguments& arguments) {
  arguments.inputs.expect_output("--output", arguments.output);
  const bool silent = mega::ckpt::ReplacedFile::is_standard_output(arguments.output);
  const scan::Trace trace = arguments.inputs.read();
  mega::expects(!trace.events.empty(), mega::ErrorCode::bad_input,
                "the files hold no events, so there is nothing to show");
  const scan::Matches matches = scan::match(trace);
  const scan::Alignment alignment = scan::align(trace, matches);
  mega::ckpt::ReplacedFile file(arguments.output);
  const auto sink = [&](std::string_view piece) { file.write(piece); };
  if (arguments.to == "perfetto") {
    scan::write_perfetto(trace, matches, alignment, sink);
  } else {
    scan::write_chrome_json(trace, matches, alignment, sink);
  }
  file.finish();
  if (silent) return;  // what the trace is in
  std::printf("%s of %s in %s, which opens in ui.perfetto.dev%s\n",
              counted(static_cast<std::int64_t>(trace.events.size()), "event").c_str(),
              counted(static_cast<std::int64_t>(trace.ranks.size()), "rank").c_str(),
              file.path().c_str(), arguments.to == "chrome" ? " and chrome://tracing" : "");
  if (!alignment.aligned())
    std::printf("The clocks stay as they were: %s\n", alignment.refusal.c_str());
}

}  // namespace

void add_convert(CLI::App& app) {
  CLI::App& command = *app.add_subcommand(
      "convert",
      "Joins the ranks into one file for a viewer, on one clock, with arrows between "
      "the members of each operation");
  const auto arguments = std::make_shared<ConvertArguments>();
  arguments->inputs.add_to(command);
  command.add_option("--to", arguments->to, "perfetto (small, protobuf) or chrome (JSON)")
      ->check(CLI::IsMember({"perfetto", "chrome"}))
      ->default_val("perfetto");
  add_output(command, "-o,--output", arguments->output, "file to write").required();
  command.footer("Example: mega-scan convert rank*.json.gz -o job.pftrace");
  command.callback([arguments] { run(*arguments); });
}

}  // namespace scan_tool
