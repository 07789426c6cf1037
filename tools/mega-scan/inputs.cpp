#include "inputs.hpp"

#include "../common/trace_warnings.hpp"
#include "text.hpp"
#include <mega/ckpt/replaced_file.hpp>
#include <mega/core/error.hpp>
#include <mega/scan/import.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace scan_tool {

using mega::ErrorCode;
using mega::expects;
using mega::sentence;
namespace scan = mega::scan;

namespace {

void finish(scan::Trace& trace) {
  tools::finish_import(trace, "mega-scan");
}

}  // namespace

void Inputs::add_to(CLI::App& command) {
  command
      .add_option("files", paths,
                  "traces, one or more a rank: files, directories, archives, or - for standard "
                  "input")
      ->required();
  command.add_option("--ranks", ranks, "the global rank of each file, where the files do not say")
      ->delimiter(',');
}

scan::Trace Inputs::read() const {
  expects(ranks.empty() || ranks.size() == paths.size(), ErrorCode::usage, [&] {
    return sentence("--ranks has ", counted(static_cast<std::int64_t>(ranks.size()), "number"),
                    " for ", counted(static_cast<std::int64_t>(paths.size()), "file"),
                    "; give one for each");
  });
  std::vector<int> numbers;
  for (const std::string& text : ranks) {
    int rank = -1;
    const char* const end = text.data() + text.size();
    const auto [stop, fault] = std::from_chars(text.data(), end, rank);
    expects(fault == std::errc{} && stop == end && rank >= 0, ErrorCode::usage, [&] {
      return sentence("--ranks has ", text.empty() ? "nothing between two commas" : text,
                      "; valid are whole numbers from 0 on, one for each file, as in --ranks 0,1");
    });
    numbers.push_back(rank);
  }
  for (std::size_t i = 0; i < paths.size(); ++i) {
    expects(std::count(paths.begin(), paths.end(), paths[i]) == 1, ErrorCode::usage,
            [&] { return sentence(paths[i], " is given twice"); });
  }
  scan::Trace trace;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    scan::ImportOptions options;
    if (!numbers.empty()) options.rank = numbers[i];
    scan::import_file(trace, paths[i], options);
  }
  finish(trace);
  return trace;
}

void Inputs::expect_output(std::string_view option, const std::string& output) const {
  namespace fs = std::filesystem;
  const auto expect_other = [&](const fs::path& input) {
    std::error_code unknown;  // as of a file that is not there yet
    const bool same = fs::equivalent(input, output, unknown) && !unknown;
    expects(!same, ErrorCode::usage, [&] {
      return sentence(option, " ", output, " is the input ", input.string(),
                      ", which it would replace; name another file");
    });
  };
  for (const std::string& path : paths) {
    expect_other(path);
    std::error_code unreadable;  // which reading it will tell
    for (auto at = fs::recursive_directory_iterator(path, unreadable);
         !unreadable && at != fs::recursive_directory_iterator(); at.increment(unreadable)) {
      expect_other(at->path());
    }
  }
  // What is no file in the end is opened once, when its bytes are there.
  if (!mega::ckpt::ReplacedFile::is_stream(output)) mega::ckpt::ReplacedFile{output};
}

CLI::Option& add_output(CLI::App& command, const std::string& names, std::string& output,
                        const std::string& description) {
  const std::string option = names.substr(names.rfind(',') + 1);
  return *command.add_option(names, output, description + ", - for standard output")
              ->transform([](const std::string& name) {
                return name == "-" ? std::string("/dev/stdout") : name;
              })
              ->check([option](const std::string& name) {
                return name.empty() ? option + " needs the name of a file" : std::string();
              });
}

scan::Trace read_trace(const std::string& path) {
  scan::Trace trace;
  scan::import_file(trace, path);
  finish(trace);
  return trace;
}

}  // namespace scan_tool
