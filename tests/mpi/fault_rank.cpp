/// @file  A small run in which one rank does something wrong at step 20. faults.sh starts it under
/// mpirun and reads what the others say.
/// usage: fault_rank FAULT [deadline_s]
#include <mega/comm/mpi.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using mega::comm::Reduce;

constexpr int culprit = 2;
constexpr int step_of_fault = 20;

void misbehave(const std::string& fault) {
  if (fault == "throw") throw std::runtime_error("disk full");
  if (fault == "usage") throw mega::Error(mega::ErrorCode::usage, "steps must be positive, not 0");
  if (fault == "stall") std::this_thread::sleep_for(std::chrono::seconds(600));
  if (fault == "kill") std::raise(SIGKILL);
  if (fault == "stop") std::raise(SIGSTOP);
}

void step(mega::MpiComm& comm, mega::Vector<float> x, const std::string& fault, bool faulty) {
  mega::host::Stream stream;
  if (faulty) misbehave(fault);
  const bool longer = faulty && fault == "count";
  if (faulty && fault == "swap") comm.barrier(stream);
  comm.all_reduce(stream, longer ? x : x.slice(0, x.size() - 1), Reduce::max);
  if (!(faulty && fault == "swap")) comm.barrier(stream);
}

/// Rank 2 sends to rank 0 two messages, the second too long for its slot or never sent.
void messages(mega::MpiComm& comm, const std::string& fault) {
  mega::host::Stream stream;
  std::vector<std::byte> data(64);
  const mega::Vector<std::byte> whole(data.data(), 64);
  if (comm.rank() == culprit) {
    auto out = comm.open_sender(0, 5);
    out.send(stream, whole.slice(0, 32));
    if (fault == "message_size") out.send(stream, whole);
  }
  if (comm.rank() == 0) {
    auto in = comm.open_receiver(culprit, 5);
    in.post(stream, whole.slice(0, 32));
    in.post(stream, whole.slice(32, 32));
    in.complete(stream);
    in.complete(stream);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: fault_rank FAULT [deadline_s]\n");
    return 2;
  }
  const std::string fault = argv[1];
  const double deadline = argc > 2 ? std::atof(argv[2]) : 1.0;
  mega::run_mpi(
      [&](mega::MpiComm& comm) {
        std::vector<float> x(50001, 1.0f);
        for (int i = 0; i < 40; ++i) {
          const bool faulty = comm.rank() == culprit && i == step_of_fault;
          if (faulty && fault == "leave") return;
          step(comm, {x.data(), static_cast<mega::Index>(x.size())}, fault, faulty);
        }
        if (fault == "message_size" || fault == "message_missing") messages(comm, fault);
      },
      {.deadline = mega::comm::Seconds(deadline)});
  std::puts("done");
  return 0;
}
