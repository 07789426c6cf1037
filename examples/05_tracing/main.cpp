// A trainer that records itself, and the analysis of what it recorded: rank 2 of four computes
// twice as long as it should, on purpose. With a folder as its argument it writes files for
// mega-scan instead: 05_tracing traces && mega-scan report traces
#include "../common/gate.hpp"
#include <mega/mega.hpp>
#include <mega/scan/injected_faults.hpp>
#include <mega/scan/own_format_writer.hpp>
#include <mega/scan/recorder.hpp>
#include <mega/scan/study.hpp>
#include <mega/scan/traced_comm.hpp>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

using Recorder = mega::scan::FaultyRecorder<mega::scan::HostRecorder>;

/// The gate and 1 ms of rest a call, so that the ranks do not compete for processors.
struct RestingGate : example::Gate {
  using Gate::Gate;
  void forward(auto& ctx, mega::Matrix<const float> x, mega::Matrix<float> y, saved_type& saved) {
    const auto span = ctx.span("rest");  // a span of one's own, inside the executor's "forward"
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Gate::forward(ctx, x, y, saved);
  }
};

struct Plan : mega::DefaultPlan {
  using stage = RestingGate;
  using communicator = mega::scan::TracedComm<mega::ThreadComm, Recorder>;
  using hooks = mega::Hooks<Recorder>;
};

int main(int argc, char** argv) {
  const mega::Mesh mesh{.data = 4};
  mega::scan::TraceCollector collector;
  const auto sink_of = [&](int rank) -> std::unique_ptr<mega::scan::RecordSink> {
    if (argc < 2) return collector.sink();
    return std::make_unique<mega::scan::OwnFormatWriter>(std::string(argv[1]) + "/rank-" +
                                                         std::to_string(rank) + ".mega.jsonl");
  };

  mega::run_threads(mesh.size(), [&](mega::ThreadComm& threads) {
    const int rank = threads.rank();
    mega::scan::HostRecorder host(mega::scan::recording_of(mesh, rank), sink_of(rank));
    Recorder recorder(host, rank, mega::scan::parse_faults("slow-rank=2,factor=2", mesh.size()));
    Plan::communicator world(threads, recorder);
    const mega::data::FunctionBatch batch(8, example::samples, example::width, example::halve,
                                          rank);
    mega::Trainer<Plan> trainer(world, {.mesh = mesh, .microbatches = 8},
                                [](mega::StagePosition at) { return RestingGate(at); }, {},
                                {recorder, {}, {}});
    for (int step = 0; step < 12; ++step) trainer.step(batch, 0.05);
    host.close();
  });

  if (argc >= 2) return 0;
  const mega::scan::Study study(collector.take());
  for (const mega::scan::Verdict& v : study.diagnosis.verdicts) {
    std::printf("%s: rank %d, %.2f times its peers, costs %.1f ms a step\n",
                std::string(mega::scan::to_string(v.what)).c_str(),
                v.ranks.empty() ? -1 : v.ranks.front(), v.factor,
                static_cast<double>(v.cost_per_step) / 1e6);
    for (const std::string& line : v.evidence) std::printf("  %s\n", line.c_str());
  }
  return study.diagnosis.healthy() ? 1 : 0;
}
