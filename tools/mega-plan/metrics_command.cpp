#include "metrics_command.hpp"

#include "../common/trace_warnings.hpp"
#include "arguments.hpp"
#include "recorded_pipeline.hpp"
#include "trace_file.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/metrics.hpp>
#include <mega/scan/import.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace plan {

namespace dpp = mega::dpp;
using mega::sentence;

namespace {

constexpr double ns_per_ms = 1e6;

struct MetricsArguments {
  std::vector<std::string> files;
  std::optional<int> skip;
  bool json = false;
};

/// What importing the traces had to say.
struct Remarks {
  std::vector<std::string> warnings, notes;
};

/// What the records say of the pipeline's size.
struct Extents {
  int micro_batches = 0;
  int chunks = 0;
};

Extents extents_of(const dpp::PipelineRecord& record) {
  Extents extents;
  for (const dpp::ComputeRecord& c : record.compute) {
    extents.micro_batches = std::max(extents.micro_batches, c.action.microbatch + 1);
    extents.chunks = std::max(extents.chunks, c.action.chunk + 1);
  }
  return extents;
}

/// The first of several iterations is set-up, and the published figures leave it out.
int skipped_by_default(const dpp::PipelineRecord& record) {
  const bool several = std::any_of(
      record.iterations.begin(), record.iterations.end(),
      [&](const auto& each) { return each.iteration != record.iterations.front().iteration; });
  return several ? 1 : 0;
}

std::string_view carries(const dpp::SendWindow& send) {
  return send.kind == dpp::ActionKind::send_forward ? "activation" : "gradient";
}

nlohmann::ordered_json json_of(const dpp::TransferTime& time) {
  return {{"total_ms", time.total / ns_per_ms},
          {"covered_ms", time.covered / ns_per_ms},
          {"exposed_ms", time.exposed() / ns_per_ms},
          {"coverage", time.coverage()}};
}

void print_json(const TraceFile& trace, const Extents& extents, const dpp::PipelineMetrics& metrics,
                const Remarks& remarks) {
  nlohmann::ordered_json out = {{"format", trace.format},
                                {"ranks", trace.record.p},
                                {"micro_batches", extents.micro_batches},
                                {"chunks", extents.chunks},
                                {"iterations", metrics.iterations},
                                {"iteration_ms", metrics.iteration_ns / ns_per_ms}};
  auto& ranks = out["per_rank"] = nlohmann::ordered_json::array();
  for (const dpp::RankMetrics& r : metrics.ranks) {
    auto& rank = ranks.emplace_back(
        nlohmann::ordered_json{{"iteration_ms", r.iteration_ns / ns_per_ms},
                               {"compute_window_ms", r.compute_window_ns / ns_per_ms},
                               {"compute_ratio", r.compute_ratio},
                               {"reduce_window_ms", r.reduce_window_ns / ns_per_ms},
                               {"reduce_ratio", r.reduce_ratio},
                               {"gradient_window_ms", r.gradient_window_ns / ns_per_ms},
                               {"gradient_ratio", r.gradient_ratio},
                               {"peak_activations", r.peak_live}});
    if (metrics.transfer_ns) rank["incoming"] = json_of(r.incoming_ns);
  }
  auto& sends = out["send_windows"] = nlohmann::ordered_json::array();
  for (const dpp::SendWindow& s : metrics.sends) {
    sends.push_back({{"carries", carries(s)},
                     {"from", s.from},
                     {"to", s.to},
                     {"messages", s.messages},
                     {"window_ms", s.window_ns / ns_per_ms},
                     {"ratio", s.ratio}});
  }
  out["transfers"] = nullptr;
  if (metrics.transfer_ns) out["transfers"] = json_of(*metrics.transfer_ns);
  out["warnings"] = remarks.warnings;
  out["notes"] = remarks.notes;
  std::printf("%s\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

/// A dash for what is not known.
std::string shown(double value, int digits) {
  return std::isnan(value) ? "-" : fixed(value, digits);
}

void print_text(const std::string& file, const TraceFile& trace, const Extents& extents,
                const dpp::PipelineMetrics& metrics) {
  std::printf("%s: %s trace, %s, %s, %s a rank\n", file.c_str(), std::string(trace.format).c_str(),
              counted(trace.record.p, "rank").c_str(),
              counted(extents.micro_batches, "micro-batch").c_str(),
              counted(extents.chunks, "chunk").c_str());
  const auto measured = static_cast<int>(metrics.iterations.size());
  std::printf("%s, %d to %d, of %s ms on average\n\n", counted(measured, "iteration").c_str(),
              metrics.iterations.front(), metrics.iterations.back(),
              fixed(metrics.iteration_ns / ns_per_ms, 2).c_str());

  std::printf(
      "rank  compute ms   ratio   reduce ms   ratio  gradient ms   ratio   peak activations");
  std::puts(metrics.transfer_ns ? "   incoming ms  exposed ms  coverage" : "");
  for (std::size_t rank = 0; rank < metrics.ranks.size(); ++rank) {
    const dpp::RankMetrics& r = metrics.ranks[rank];
    std::printf("%4zu  %10s  %6s  %10s  %6s  %11s  %6s  %17d", rank,
                shown(r.compute_window_ns / ns_per_ms, 3).c_str(),
                shown(r.compute_ratio, 4).c_str(), shown(r.reduce_window_ns / ns_per_ms, 3).c_str(),
                shown(r.reduce_ratio, 4).c_str(),
                shown(r.gradient_window_ns / ns_per_ms, 3).c_str(),
                shown(r.gradient_ratio, 4).c_str(), r.peak_live);
    if (metrics.transfer_ns) {
      std::printf("  %12s  %10s  %8s", fixed(r.incoming_ns.total / ns_per_ms, 3).c_str(),
                  fixed(r.incoming_ns.exposed() / ns_per_ms, 3).c_str(),
                  fixed(r.incoming_ns.coverage(), 4).c_str());
    }
    std::puts("");
  }
  if (!metrics.sends.empty()) std::puts("\nsend window    ranks          ms   ratio  messages");
  for (const dpp::SendWindow& s : metrics.sends) {
    std::printf("%-11s  %7s  %10s  %6s  %8lld\n", std::string(carries(s)).c_str(),
                sentence(s.from, "->", s.to).c_str(), shown(s.window_ns / ns_per_ms, 3).c_str(),
                shown(s.ratio, 4).c_str(), static_cast<long long>(s.messages));
  }
  if (!metrics.transfer_ns) {
    std::puts(
        "\nThe trace does not say when transfers begin and end: their coverage is not known.");
    return;
  }
  const dpp::TransferTime& transfers = *metrics.transfer_ns;
  std::printf("\nMessages were under way for %s ms over all ranks, exposed for %s; coverage %s\n",
              fixed(transfers.total / ns_per_ms, 3).c_str(),
              fixed(transfers.exposed() / ns_per_ms, 3).c_str(),
              fixed(transfers.coverage(), 4).c_str());
}

/// Whether the file begins as a mega trainer's recording does.
bool is_recording(const std::string& path) {
  std::string head(64, '\0');
  std::ifstream(path).read(head.data(), static_cast<std::streamsize>(head.size()));
  return std::string_view(head).starts_with("{\"mega_trace\"");
}

/// A file of another system holds all ranks; our recordings are a folder, or a file a rank.
/// @param remarks  gets what is missing of the recordings or was guessed; standard error too
TraceFile read(const std::vector<std::string>& files, Remarks& remarks) {
  const bool recorded = files.size() > 1 || std::filesystem::is_directory(files.front()) ||
                        is_recording(files.front());
  if (!recorded) return read_trace(files.front());
  mega::scan::Trace trace;
  for (const std::string& file : files) mega::scan::import_file(trace, file);
  tools::finish_import(trace, "mega-plan");
  remarks = {trace.warnings, trace.notes};
  return {"mega", recorded_pipeline(trace)};
}

/// The first `count` iterations, set-up, need not be whole. What there is must remain for measure()
/// to refuse where that is nothing.
int leave_out(dpp::PipelineRecord& record, int count) {
  std::set<int> numbers;
  for (const dpp::IterationRecord& i : record.iterations) numbers.insert(i.iteration);
  if (count <= 0 || numbers.size() <= static_cast<std::size_t>(count)) return count;
  const int first = *std::next(numbers.begin(), count);
  const auto is_early = [&](const auto& each) { return each.iteration < first; };
  std::erase_if(record.iterations, is_early);
  std::erase_if(record.compute, is_early);
  std::erase_if(record.transfers, is_early);
  return 0;
}

void run(const MetricsArguments& arguments) {
  const std::string& file = arguments.files.front();
  Remarks remarks;
  TraceFile trace = read(arguments.files, remarks);
  const int skip =
      leave_out(trace.record, arguments.skip.value_or(skipped_by_default(trace.record)));
  const auto metrics = [&] {
    try {
      return dpp::measure(trace.record, skip);
    } catch (const mega::Error& error) {
      throw mega::Error(error.code(), sentence(file, ": ", error.what()), error.where());
    }
  }();
  const Extents extents = extents_of(trace.record);
  if (arguments.json) {
    print_json(trace, extents, metrics, remarks);
  } else {
    print_text(file, trace, extents, metrics);
    for (const std::string& note : remarks.notes) std::printf("Note: %s\n", note.c_str());
  }
}

}  // namespace

void add_metrics(CLI::App& app, int& /*exit_code*/) {
  CLI::App& command = *app.add_subcommand(
      "metrics", "Measures a trace: windows and ratios as MegatronApp defines them, and coverage");
  const auto arguments = std::make_shared<MetricsArguments>();
  command
      .add_option("traces", arguments->files,
                  "a profile of MegatronApp, packed by gzip or not, what --perfetto wrote, or the "
                  "folder or files of a trainer's --trace")
      ->required();
  command.add_option("--skip", arguments->skip,
                     "how many of the first iterations to leave out; by default 1 of several");
  command.add_flag("--json", arguments->json, "print one JSON object");
  command.footer(
      "send window     start of the consumer - end of the producer, mean: room for a transfer\n"
      "compute window  duration of a compute action, mean\n"
      "reduce window   end of the iteration - end of the rank's last compute action, mean\n"
      "ratio           time in the windows / iteration, geometric mean over iterations; send "
      "windows\n"
      "                overlap, so theirs may exceed 1 and is no coverage\n"
      "coverage        of the time in which messages are under way to a rank, the part in which "
      "it\n"
      "                computes; the rest is exposed\n"
      "Example: mega-plan metrics data-1-pipeline-4-tensor-1-dpp-aggregated.json --json");
  command.callback([arguments, &command] {
    expect_values(command);
    run(*arguments);
  });
}

}  // namespace plan
